"""Train with an engine that differs from the learner, with and without the correction.

    python benchmarks/engine_mismatch.py                      three seeds of each arm
    python benchmarks/engine_mismatch.py --json results/engine_mismatch.json
    python benchmarks/engine_mismatch.py --bits 4 --seeds 0   one seed, another engine

The engine samples from the learner's weights rounded to `--bits` bits a weight, as a coarsely
quantised server does, and records the probabilities of what it samples. The model is random and
tiny. The reward of an answer is the share of its tokens that the task asks for. `LightningRL`, its
batches and the torch learner are those of any training; only the rollouts are made here. The arms:

- `same`: the engine has the learner's weights
- `corrected`: the rounded engine, with the default settings (`PolicyLoss(correction="auto")`)
- `uncorrected`: the rounded engine, with `PolicyLoss(correction="off")`

After training, both the learner's own weights and the rounded ones answer 2,048 tasks.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from _report import Figure, finish, options_of, report
from torch import Tensor

from lightspan import LightningRL
from lightspan.lightning.episode import Episode, build_episode
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import Optimizer, PolicyLoss
from lightspan.schema.records import Mode
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.torch import TorchLearner

ARMS: Final = {"same": "auto", "corrected": "auto", "uncorrected": "off"}
"""Arm → `PolicyLoss.correction`."""
WHAT: Final = {"same": "as the learner", "corrected": "coarsely rounded, corrected"}
KINDS: Final = 4
"""Number of tasks: task n asks for tokens whose id is n modulo this number."""
ANSWER: Final = 8
"""Tokens of an answer."""
NUMERICS: Final = "rounded weights"


def rounded(weights: Mapping[str, Tensor], bits: int | None) -> dict[str, Tensor]:
    """Return the weights rounded to `bits` bits, with one scale a row; None to change nothing."""
    if bits is None:
        return dict(weights)
    levels = 2 ** (bits - 1) - 1
    result = {}
    for name, tensor in weights.items():
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-12) / levels
        result[name] = (tensor / scale).round() * scale if tensor.ndim == 2 else tensor
    return result


class Engine:
    """Samples from rounded weights, at temperature 1.

    Args:
        folder: folder of the model.
        bits: bits of a weight; None for the learner's own weights.
        numerics: see `EngineCapabilities.numerics`.
    """

    def __init__(self, folder: Path, bits: int | None, numerics: str, seed: int) -> None:
        self.capabilities = EngineCapabilities(exact_tokens=True, numerics=numerics)
        self._model: Any = load_model(folder)
        self._bits = bits
        self._random = torch.Generator().manual_seed(seed)

    async def update(self, policy: str, weights: Any, version: int) -> None:
        """Load new weights."""
        del policy, version
        self._model.load_state_dict(rounded(weights, self._bits), strict=False)

    @torch.no_grad()
    def answers(self, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Return the ids and the log-probabilities of an answer to each prompt."""
        ids, logs = torch.tensor(prompts), []
        for _ in range(ANSWER):
            distribution = self._model(ids).logits[:, -1].log_softmax(-1)
            chosen = torch.multinomial(distribution.exp(), 1, generator=self._random)
            logs.append(distribution.gather(1, chosen))
            ids = torch.cat([ids, chosen], 1)
        return ids[:, len(prompts[0]) :].tolist(), torch.cat(logs, 1).tolist()


def prompt_of(task: int) -> list[int]:
    return [5, 10 + task, 6]


def reward_of(task: int, answer: Sequence[int]) -> float:
    return sum(token % KINDS == task % KINDS for token in answer) / len(answer)


class World:
    """A trainer context for `LightningRL` that asks the engine directly."""

    def __init__(self, engine: Engine, learner: TorchLearner, seed: int) -> None:
        self.engine, self.learner = engine, learner
        self.versions = {"policy": 0}
        self.step = 1
        self.rng = random.Random(seed)

    def next_tasks(self, count: int) -> list[int]:
        return [self.rng.randrange(KINDS) for _ in range(count)]

    async def rollouts(
        self, tasks: Sequence[int], group_size: int, mode: Mode = Mode.TRAIN
    ) -> list[Episode]:
        each = [(number, task) for number, task in enumerate(tasks) for _ in range(group_size)]
        ids, logprobs = self.engine.answers([prompt_of(task) for _, task in each])
        episodes = []
        for place, (number, task) in enumerate(each):
            name = f"{self.step}-{place}"
            record = make_record(
                "call",
                prompt_of(task),
                ids[place],
                attempt=name,
                logprobs=logprobs[place],
                versions=[(self.versions["policy"], ANSWER)],
            )
            attempt = make_attempt(name, reward_of(task, ids[place]))
            rollout = make_rollout(name, f"{self.step}-{number}", task_id=str(task))
            episodes.append(build_episode(attempt, rollout, [], [record]))
        return episodes

    async def learn(self, function: Callable[[], Any]) -> Any:
        return function()

    async def publish(self) -> None:
        self.versions = {"policy": self.versions["policy"] + 1}
        await self.learner.publish(self.engine, self.versions)  # type: ignore[arg-type]

    def explain(self, *_: Any) -> None: ...
    def record_mismatches(self, *_: Any) -> None: ...
    def note(self, *_: Any) -> None: ...


async def train(arm: str, seed: int, steps: int, bits: int, rate: float) -> dict[str, Any]:
    """Train an arm, and return its rewards, those of the final weights and the metrics' means."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_model(Path(scratch) / "model", seed=seed, hidden=64, context=64)
        learner = TorchLearner(
            {"policy": folder}, optimizer=Optimizer(learning_rate=rate), seed=seed
        )
        own = learner.capabilities.numerics
        engine = Engine(
            folder, None if arm == "same" else bits, own if arm == "same" else NUMERICS, seed
        )
        algorithm = LightningRL(
            str(folder),
            learning_rate=rate,
            seed=seed,
            loss=PolicyLoss(correction=ARMS[arm]),  # type: ignore[arg-type]
        )
        world: Any = World(engine, learner, seed)
        await world.publish()
        lines = []
        for step in range(1, steps + 1):
            world.step = step
            lines.append(await algorithm.run_step(world))
        final = Engine(folder, None, own, seed + 1)
        await learner.publish(final, {"policy": 99})  # type: ignore[arg-type]
        tasks = [task % KINDS for task in range(2048)]
        figures = {}
        for name, each in (("learner", final), ("engine", engine)):
            answers, _ = each.answers([prompt_of(task) for task in tasks])
            figures[name] = statistics.fmean(map(reward_of, tasks, answers))
    keys = sorted({key for line in lines for key in line if key.startswith("learner/engine_ratio")})
    means = {
        key.removeprefix("learner/"): statistics.fmean(line[key] for line in lines if key in line)
        for key in [*keys, "learner/clip_fraction", "learner/approx_kl"]
    }
    return {
        "arm": arm,
        "seed": seed,
        **figures,
        "curve": [round(line["reward"], 3) for line in lines[:: max(1, steps // 10)]],
        **{key: round(value, 5) for key, value in means.items()},
    }


def main() -> int:
    """Train the arms of the command line."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=[*ARMS])
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=4e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for seed in options.seeds:
        for arm in options.arms:
            start = time.process_time()
            run = train(arm, seed, options.steps, options.bits, options.rate)
            runs.append({**asyncio.run(run), "cpu_s": round(time.process_time() - start, 1)})
            print(runs[-1], flush=True)
    table = figures(runs)
    status = finish(table, None)
    if options.json is not None:
        settings = {"bits": options.bits, "steps": options.steps, "learning_rate": options.rate}
        whole = {**report(table), "settings": settings, "runs": runs}
        options.json.write_text(json.dumps(whole, indent=2) + "\n")
    return status


def figures(runs: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return the mean reward of the final weights of each arm, with the uncorrected arm's."""
    means = {
        arm: statistics.fmean(run["learner"] for run in runs if run["arm"] == arm)
        for arm in dict.fromkeys(run["arm"] for run in runs)
    }
    seeds = len({run["seed"] for run in runs})
    return [
        Figure(
            what=f"reward after training, engine {WHAT[arm]}, mean of {seeds} seeds",
            unit="reward",
            ours=round(means[arm], 3),
            peer="not corrected" if "uncorrected" in means else "",
            theirs=round(means["uncorrected"], 3) if "uncorrected" in means else None,
            more_is_better=True,
        )
        for arm in means
        if arm != "uncorrected"
    ]


if __name__ == "__main__":
    sys.exit(main())
