"""Noise of the gradient by baseline: the group's mean, anchor, a critic, and their mixture.

Two parts. Each compares baselines on the same rollouts, so that tokens are equal. The gain of a
baseline is the noise of the gradient with the mean of the group's other rollouts (RLOO, the
`terminal` rule), divided by its own noise: as many times fewer rollouts give as clear a gradient.

- process: chains of 8 calls, 1, 3 or all of which decide, in 8 tasks of differing difficulty. A
  call that decides and fails makes the rest of the rollout worthless. The critic's value is the
  true one plus noise with standard deviation .3. The exact gradient is known, so its length with
  lambda .95 is too, and is compared with what `learner/gradient_left` reports.
- an example, with `--example`: a run from its warm start, at a rate that moves no weight, with
  `LightningRL(critic=True, estimator="rloo")`. So values and coefficients are those of the real
  parts, of earlier steps only. The score of each call is computed with transformers and projected
  to 4,096 numbers by a count sketch; the noise is the variance of the groups' gradients. Intervals
  are a bootstrap over groups.

Run: python benchmarks/baselines.py [--example sql quest] [--steps 8] [--tasks 16] [--json PATH]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from _report import Figure, finish

from lightspan.lightning.advantages import Explanation, Observation, mixture_statistics
from lightspan.lightning.baselines import CallCredit
from lightspan.lightning.credit import terminal
from lightspan.lightning.mixture import Mixture, gradient_left

CALLS: Final = 8
GROUPS: Final = 16
SIZE: Final = 8
STEPS: Final = 200
"""Steps of a process after the first ones, to which coefficients are fitted."""
LAMBDA: Final = 0.95
DECIDING: Final = {"one": (4,), "three": (1, 4, 6), "all": tuple(range(CALLS))}
SKETCH: Final = 4096
FITTED: Final = 4
"""Steps of an example that are not measured: coefficients are fitted to three of them."""
RULES: Final = ("anchor", "critic", "mixture")
Whys = Sequence[Explanation]


def main() -> int:
    """Measure, print and store the figures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--example", nargs="*", default=[], choices=("sql", "quest"))
    parser.add_argument("--cache", type=Path, help="folder of its data; its own by default")
    parser.add_argument("--steps", type=int, default=8, help="steps of an example")
    parser.add_argument("--tasks", type=int, default=16, help="tasks of such a step")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    figures = [figure for name in DECIDING for figure in process(name)]
    for name in options.example:
        cache = options.cache or Path("examples", name, ".cache")
        figures += example(name, cache, options.steps, options.tasks)
    return finish(figures, options.json)


def advantage(why: Explanation, rule: str) -> float:
    """Return the advantage of a call by a baseline, before scaling."""
    _, group, critic, state = (term.credit for term in why.mixture)
    baselines = {
        "group": group,
        "anchor": group + state,
        "critic": critic,
        "mixture": why.predicted or 0.0,
    }
    return why.credit - baselines[rule]


def generalised(whys: Whys) -> list[float]:
    """Return the advantages of a chain of calls at `LAMBDA`, with the mixture as the value."""
    later, after, found = 0.0, None, []
    for why in reversed(whys):
        value = why.predicted or 0.0
        surprise = (why.credit if after is None else after) - value
        later = surprise + LAMBDA * later
        after = value
        found.append(later)
    return found[::-1]


# --- processes that can be computed ---------------------------------------------------------------
class Chain:
    """A task: the chance of each call to choose rightly, and which calls decide."""

    def __init__(self, deciding: Sequence[int], rng: random.Random) -> None:
        self.deciding = frozenset(deciding)
        level = rng.uniform(0.2, 0.9) ** (1 / len(deciding))
        self.chances = [level if turn in self.deciding else 0.5 for turn in range(CALLS)]

    def value(self, turn: int, alive: bool) -> float:
        ahead = (self.chances[t] for t in self.deciding if t >= turn)
        return math.prod(ahead) if alive else 0.0

    def gradient(self) -> list[float]:
        """Return the derivative of the success chance by each call's logit."""
        whole = self.value(0, True)
        return [
            whole * (1 - chance) if turn in self.deciding else 0.0
            for turn, chance in enumerate(self.chances)
        ]

    def play(self, rng: random.Random) -> tuple[float, list[float], list[float], list[bool]]:
        """Return the reward, and per call the score, the critic's value and what it could see."""
        alive, scores, values, seen = True, [], [], []
        for turn, chance in enumerate(self.chances):
            seen.append(alive)
            values.append(self.value(turn, alive) + rng.gauss(0, 0.3))
            right = rng.random() < chance
            scores.append(right - chance)
            alive = alive and (right or turn not in self.deciding)
        return float(alive), scores, values, seen


def play(tasks: Sequence[Chain], rng: random.Random, mixture: Mixture) -> tuple[list[Any], Whys]:
    """Return the scores of the rollouts of a step, and an explanation of each call."""
    rollouts = [
        (f"{group}-{place}", f"g{group}", *tasks[group % len(tasks)].play(rng))
        for group in range(GROUPS)
        for place in range(SIZE)
    ]
    observations = [Observation(name, group, reward) for name, group, reward, *_ in rollouts]
    calls = [
        CallCredit(
            rollout_id=name,
            population=group,
            agent_path="agent",
            turn=turn,
            credit=reward,
            value=reward,
            statistics=of_rollout,
            key=(turn, seen[turn]),
            expected=values[turn],
        )
        for (name, group, reward, _, values, seen), of_rollout in zip(
            rollouts, mixture_statistics("rloo", observations), strict=True
        )
        for turn in range(CALLS)
    ]
    whys = [
        Explanation(
            rollout_id=call.rollout_id,
            group_id=str(call.population),
            agent_path=call.agent_path,
            estimator="rloo",
            unit="rollout",
            credit_rule="terminal",
            weighting="rollout",
            credit=call.credit,
            expected=call.expected,
            mixture=found.mixture,
            value=call.value,
            baseline=found.baseline,
            scale=1.0,
            size=SIZE,
            zero_reason=None,
            turn=call.turn,
            tokens=1,
            token_weight=1 / len(rollouts),
            share=1 / CALLS,
        )
        for call, found in zip(calls, mixture.compare(calls, terminal, "rloo"), strict=True)
    ]
    return [scores for _, _, _, scores, _, _ in rollouts], whys


def process(name: str) -> list[Figure]:
    """Measure a process."""
    rng = random.Random(name)
    tasks = [Chain(DECIDING[name], rng) for _ in range(8)]
    exact = [statistics.fmean(parts) for parts in zip(*(t.gradient() for t in tasks), strict=True)]
    mixture = Mixture.first(terminal)
    errors: dict[str, list[float]] = defaultdict(list)
    lengths, told = [], []
    for step in range(STEPS + 4):
        scores, whys = play(tasks, rng, mixture)
        used, mixture = mixture, mixture.after(whys)
        if step < 4:
            continue
        chains = [whys[place : place + CALLS] for place in range(0, len(whys), CALLS)]
        paid = {
            rule: [[advantage(why, rule) for why in chain] for chain in chains]
            for rule in ("group", *RULES)
        }
        paid["lambda"] = [generalised(chain) for chain in chains]
        for rule, advantages in paid.items():
            found = [
                statistics.fmean(a[turn] * s[turn] for a, s in zip(advantages, scores, strict=True))
                for turn in range(CALLS)
            ]
            errors[rule].append(math.fsum((f - e) ** 2 for f, e in zip(found, exact, strict=True)))
            if rule == "lambda":
                dot = math.fsum(f * e for f, e in zip(found, exact, strict=True))
                lengths.append(dot / math.fsum(e * e for e in exact))
        lowered = [
            _with_baseline(why, why.credit - a)
            for why, a in zip(whys, (a for each in paid["lambda"] for a in each), strict=True)
        ]
        told.append(gradient_left(lowered, LAMBDA)["gradient_left"])
    noise = {rule: statistics.fmean(values) for rule, values in errors.items()}
    weights = ", ".join(f"{weight:.2f}" for weight in used.coefficients)
    figures = [
        Figure(
            what=f"process, {name} of {CALLS} calls decide: {rule}",
            unit="noise relative to the group's mean",
            ours=noise[rule] / noise["group"],
            peer="RLOO",
            theirs=1.0,
            note=f"last coefficients {weights}" if rule == "mixture" else "",
        )
        for rule in RULES
    ]
    left, error = statistics.fmean(lengths), statistics.stdev(lengths) / math.sqrt(len(lengths))
    return [
        *figures,
        Figure(
            what=f"process, {name} of {CALLS} calls decide: length left at lambda {LAMBDA}",
            unit="of the expected gradient",
            ours=left,
            more_is_better=True,
            note=f"standard error {error:.2f}; reported as {statistics.fmean(told):.2f}",
        ),
    ]


def _with_baseline(why: Explanation, baseline: float) -> Explanation:
    from msgspec.structs import replace

    return replace(why, baseline=baseline)


# --- an example -----------------------------------------------------------------------------------
def example(name: str, cache: Path, steps: int, tasks: int) -> list[Figure]:
    """Measure an example at its warm start.

    Args:
        name: name of the example.
        cache: folder of its data and its warm start.
        steps: number of steps, of which the first `FITTED` are not measured.
        tasks: number of tasks of each step.
    """
    from lightspan import LightningRL, Optimizer, Trainer
    from lightspan.progress import PlainReporter

    training = import_module(f"{name}_example.training")
    reporter = PlainReporter()
    model, _ = training.warm_start(cache, 0, reporter)
    batches: list[Any] = []

    class Recording(LightningRL):
        async def run_step(self, trainer: Any) -> Any:
            metrics = await super().run_step(trainer)
            batches.append(self.last_batch)
            return metrics

    settings = training.rl_options(0) | {
        "minibatches": 1,
        "optimizer": Optimizer(learning_rate=1e-12),
        "tasks_per_step": tasks,
    }
    settings.pop("learning_rate", None)
    algorithm = Recording(model, estimator="rloo", critic=True, **settings)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(algorithm, steps=steps, folder=Path(folder) / "run", runners=1)
        trainer.fit(training.answer, training.load_tasks(cache, "train"), agents=training.AGENTS)
    sketches = Sketches(model)
    vectors: dict[str, dict[str, Any]] = {rule: {} for rule in ("group", *RULES, "lambda")}
    told, explained = [], defaultdict(list)
    for batch in batches[FITTED:]:
        chains: dict[str, list[Explanation]] = defaultdict(list)
        for why in batch.explanations.values():
            chains[why.rollout_id].append(why)
        paid = {rule: {} for rule in vectors}
        for chain in chains.values():
            chain.sort(key=lambda why: why.turn)
            for why, lowered in zip(chain, generalised(chain), strict=True):
                for rule in ("group", *RULES):
                    paid[rule][id(why)] = advantage(why, rule)
                    explained[rule].append((why.credit, advantage(why, rule)))
                paid["lambda"][id(why)] = lowered
        lowered = [
            _with_baseline(why, why.credit - paid["lambda"][id(why)])
            for why in batch.explanations.values()
        ]
        told.append(gradient_left(lowered, LAMBDA)["gradient_left"])
        whys = {(why.rollout_id, *key[1:]): why for key, why in batch.explanations.items()}
        for row in batch.rows:
            for call, sketch in zip(row.call_ids, sketches.of(row), strict=True):
                why = whys[row.rollout_id, *call]
                for rule, of_group in vectors.items():
                    part = paid[rule][id(why)] * sketch
                    of_group[why.group_id] = of_group.get(why.group_id, 0) + part
    return example_figures(name, vectors, told, explained, algorithm)


class Sketches:
    """Weighted scores of calls, projected to `SKETCH` numbers (count sketch)."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        count = sum(p.numel() for p in self._parameters)
        generator = torch.Generator().manual_seed(0)
        self._places = torch.randint(SKETCH, (count,), generator=generator)
        self._signs = torch.randint(2, (count,), generator=generator) * 2.0 - 1.0

    def of(self, row: Any) -> list[Any]:
        """Return the sketch of each call of a row: Σ weight · gradient of its log-probabilities."""
        import torch

        ids = torch.tensor([row.ids])
        temperatures = torch.tensor(row.temperatures[1:])
        logits = self._model(ids).logits[0, :-1] / temperatures[:, None]
        chosen = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        weighted, found = chosen * torch.tensor(row.weights[1:]), []
        for place in row.responses:
            loss = weighted[place.start - 1 : place.start - 1 + place.length].sum()
            gradients = torch.autograd.grad(loss, self._parameters, retain_graph=True)
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            found.append(torch.zeros(SKETCH).index_add_(0, self._places, flat * self._signs))
        return found


def example_figures(
    example: str,
    vectors: Mapping[str, Mapping[str, Any]],
    told: Sequence[float],
    explained: Mapping[str, Sequence[tuple[float, float]]],
    algorithm: Any,
) -> list[Figure]:
    """Return the figures of an example.

    Args:
        example: name of the example.
        vectors: rule → group → sketch of its gradient.
        told: `gradient_left` of each step.
        explained: rule → (credit, advantage) of each call.
        algorithm: the algorithm after the run.
    """
    import torch

    groups = list(vectors["group"])
    stacked = {rule: torch.stack([of[group] for group in groups]) for rule, of in vectors.items()}
    grams = {rule: (matrix @ matrix.T).double() for rule, matrix in stacked.items()}

    def noise(rule: str, places: Any) -> float:
        gram, count = grams[rule][places][:, places], len(places)
        return float((gram.diagonal().sum() - gram.sum() / count) / (count - 1))

    rng = random.Random(0)
    whole = torch.arange(len(groups))
    draws = [torch.tensor([rng.randrange(len(groups)) for _ in groups]) for _ in range(2000)]
    figures = []
    for rule in (*RULES, "lambda"):
        gains = sorted(noise("group", draw) / noise(rule, draw) for draw in draws)
        low, high = gains[len(gains) // 40], gains[-len(gains) // 40 - 1]
        note = f"95 % of the gain {low:.2f} to {high:.2f}"
        if rule in explained:
            credits = [credit for credit, _ in explained[rule]]
            errors = [error for _, error in explained[rule]]
            share = 1 - statistics.pvariance(errors) / statistics.pvariance(credits)
            note += f"; explained variance {share:.2f}"
        if rule == "mixture":
            weights = ", ".join(f"{x:.2f}" for x in algorithm.batch_config.mixture.coefficients)
            note += f"; last coefficients {weights}"
        name = f"mixture, lambda {LAMBDA} (biased)" if rule == "lambda" else rule
        figures.append(
            Figure(
                what=f"{example}, warm start, {len(groups)} groups of {SIZE}: {name}",
                unit="noise relative to the group's mean",
                ours=noise(rule, whole) / noise("group", whole),
                peer="RLOO",
                theirs=1.0,
                note=note,
            )
        )

    def length(places: Any) -> float:
        """Return the projection on the gradient at lambda 1, over pairs of different groups."""
        cross = (stacked["lambda"][places] @ stacked["mixture"][places].T).double()
        gram = grams["mixture"][places][:, places]
        return float((cross.sum() - cross.diagonal().sum()) / (gram.sum() - gram.diagonal().sum()))

    lengths = sorted(
        length(torch.tensor(rng.sample(range(len(groups)), len(groups) // 2))) for _ in range(200)
    )
    return [
        *figures,
        Figure(
            what=f"{example}, warm start: length left at lambda {LAMBDA}",
            unit="of the expected gradient",
            ours=length(whole),
            more_is_better=True,
            note=(
                f"halves of the groups {lengths[10]:.2f} to {lengths[-11]:.2f}; "
                f"reported as {statistics.fmean(told):.2f}"
            ),
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
