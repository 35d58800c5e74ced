"""CPU-seconds and peak memory of one learner update, compared with a plain padded torch loop.

The additional cost of a critic is measured too.

Two workloads, on the SQL example's model (a Qwen2 of 0.7 M parameters, 3 layers):

- sql: the batch of one iteration of a real run of the SQL example, the one with the most rows: 16
  tasks, 8 rollouts each, a writer and a rewriter. Rows share their task's prompt, and much of their
  answers. Without `--run` a run of two iterations is made first (one or two minutes; two more if
  no warm start is cached in examples/sql/.cache).
- long: 8 multi-turn episodes of 6,144 tokens, the rollouts of one task. Token ids are random; they
  go the real way, from token records through `build_episode` and `LightningRL.build` to rows.
  System prompt, tools and task take 1,034 tokens, which all share; then 12 calls with 40 tokens of
  action each and 410 of observation after it. Two calls in three think first, 120 tokens that the
  chat template drops from later prompts, as Qwen3's and DeepSeek-R1's do. A call that did not think
  is extended exactly by the next one, and their row goes on; after one that did a new row begins,
  which shares the history without the thought. That makes 8 rows an episode, of 1,194 to 6,144
  tokens.

The peer is the loop that one writes by hand: rows sorted by length, cut into batches of as many
padded tokens as a pass of the learner may have (a longer row alone), padded, with an attention mask
where there is padding, the model's logits of all positions, the same loss, clipping and AdamW.

A critic adds a forward pass before the update, which computes the values of all calls, and the fit
of its head. An update with both is compared with an update alone, in turns in one process.

Each other measurement has a process of its own. CPU-seconds are the thread's, of the best update;
memory is the growth of the process since just before its first update, optimiser state included.
Exit status 1 if the learner is less than twice as fast or takes more memory, or a critic adds over
40 %.

Run: python benchmarks/learner.py [--run runs/sql-seed0] [--workload sql long] [--json PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from _report import Figure, finish, options_of

from lightspan import LightningRL
from lightspan.lightning.episode import Episode, build_episode, score_failure
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Critic, Optimizer, PolicyLoss
from lightspan.schema.records import Attempt, AttemptStatus, Mode, Outcome, Rollout
from lightspan.schema.reward import Reward
from lightspan.schema.token_records import Sampling, TokenRecord
from lightspan.stores import open_store
from lightspan.training.collector import read_episodes
from lightspan.training.folder import RunFolder
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.microbatch import TOKEN_BUDGETS
from lightspan_torch.learner.torch import TorchLearner

ROOT: Final = Path(__file__).resolve().parent.parent
TRAIN: Final = ROOT / "examples" / "sql" / "train.py"
LOSS: Final = PolicyLoss()
OPTIMIZER: Final = Optimizer(learning_rate=4e-4)
BUDGET: Final = TOKEN_BUDGETS["cpu"]
UPDATES: Final = {"sql": 8, "long": 1}
"""Workload → number of updates in each process, of which the best counts."""
FASTER: Final = 2.0
CRITIC_ADDS: Final = 40.0
"""Maximum that a critic may add to an update, in percent."""

EPISODES, TURNS = 8, 12
SHARED, THOUGHT, ACTION, OBSERVATION = 1034, 120, 40, 410
VOCABULARY: Final = 640


# --- the workloads ----------------------------------------------------------------------------
def sql_rows(run: Path) -> tuple[str, list[Row]]:
    """Return the initial weights of a run, and the rows of its largest iteration."""
    sys.path.insert(0, str(TRAIN.parent))
    from sql_example import training

    if not (run / "config.json").exists():
        raise SystemExit(f"{run} is no run: python examples/sql/train.py --folder {run}")
    config = RunFolder(run).read_config()
    algorithm = training.make_algorithm(config["model"], seed=0)
    batches = [algorithm.build(episodes) for episodes in asyncio.run(_by_step(run, config))]
    return str(run / "model"), max((batch.rows for batch in batches), key=len)


async def _by_step(run: Path, config: dict[str, Any]) -> list[list[Episode]]:
    """Return the training episodes of each iteration of a run."""
    async with open_store(RunFolder(run).store_url) as store:
        states = await store.rollouts(run_id=config["run_id"], mode=Mode.TRAIN)
        read = await read_episodes(store, states)
    episodes = [score_failure(episode, config["failure_reward"]) for episode in read]
    steps: dict[int, list[Episode]] = defaultdict(list)
    for state, episode in zip(states, episodes, strict=True):
        steps[state.rollout.step].append(episode)
    return list(steps.values())


def long_rows() -> list[Row]:
    """Return the rows of the workload `long`."""
    rng = random.Random(0)
    shared = _ids(rng, SHARED)
    episodes = [_episode(number, shared, rng) for number in range(EPISODES)]
    rows = LightningRL("unused").build(episodes).rows
    assert max(len(row.ids) for row in rows) == 6144
    return rows


def _episode(number: int, shared: list[int], rng: random.Random) -> Episode:
    rollout_id, attempt_id = f"ro-{number}", f"at-{number}"
    return build_episode(
        Attempt(
            attempt_id=attempt_id,
            rollout_id=rollout_id,
            number=1,
            epoch=1,
            status=AttemptStatus.SUCCEEDED,
            outcome=Outcome.OK,
            reward=Reward(float(number % 2)),
        ),
        Rollout(rollout_id=rollout_id, task=None, task_id="task", group_id="g", mode=Mode.TRAIN),
        [],
        list(_records(attempt_id, shared, rng)),
    )


def _records(attempt_id: str, shared: list[int], rng: random.Random) -> Iterator[TokenRecord]:
    history = list(shared)
    for turn in range(TURNS):
        thought = _ids(rng, THOUGHT) if turn % 3 != 1 else []
        action = _ids(rng, ACTION)
        size = len(thought) + len(action)
        yield TokenRecord.create(
            prompt_ids=history,
            response_ids=thought + action,
            logprobs=[-rng.uniform(5.5, 7.5) for _ in range(size)],
            versions=[(1, size)],
            attempt_id=attempt_id,
            call_id=f"call-{turn}",
            choice=0,
            policy="policy",
            agent_path="app",
            sequence_start=2 * turn + 1,
            sequence_end=2 * turn + 2,
            sampling=Sampling(temperature=1.0),
        )
        history = history + action + _ids(rng, OBSERVATION)


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def make_model(folder: Path) -> str:
    """Write a model with the SQL example's architecture, random weights and a longer context."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


# --- learner and peer -------------------------------------------------------------------------
def learner_update(model: str, rows: Sequence[Row]) -> Callable[[], object]:
    """Return a function that makes one update with our learner."""
    learner = TorchLearner({rows[0].policy: model}, optimizer=OPTIMIZER, token_budget=BUDGET)
    return lambda: learner.update(rows, LOSS)


def critic_update(model: str, rows: Sequence[Row]) -> Callable[[], object]:
    """Return a function that makes one update with a critic, which is fitted to random returns."""
    rng = random.Random(0)
    learner = TorchLearner(
        {rows[0].policy: model}, optimizer=OPTIMIZER, token_budget=BUDGET, critic=Critic()
    )
    aimed = [
        replace(row, value_targets=tuple(float(rng.random() < 0.5) for _ in row.responses))
        for row in rows
    ]

    def update() -> None:
        learner.values(rows)
        learner.update(aimed, LOSS)

    return update


def peer_update(model_folder: str, rows: Sequence[Row]) -> Callable[[], object]:
    """Return a function that makes one update with the plain loop."""
    model = load_model(model_folder)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, weight_decay=0.0
    )
    return lambda: plain_loop(model, optimizer, rows)


def plain_loop(model: Any, optimizer: torch.optim.Optimizer, rows: Sequence[Row]) -> None:
    """Make one update as a hand-written training loop does."""
    optimizer.zero_grad()
    for batch in batches(sorted(rows, key=lambda row: len(row.ids))):
        plain_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield batches of rows whose padded size does not exceed the token budget."""
    batch: list[Row] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row.ids) > BUDGET:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def plain_loss(model: Any, batch: Sequence[Row]) -> torch.Tensor:
    """Return Σ weight · clipped loss over the tokens of a padded batch."""
    length = max(len(row.ids) for row in batch)

    def padded(name: str) -> torch.Tensor:
        return torch.tensor(
            [[*getattr(row, name), *[0] * (length - len(row.ids))] for row in batch]
        )

    ids, mask = padded("ids"), padded("mask").bool()
    attention = None
    if any(len(row.ids) < length for row in batch):
        attention = torch.tensor([[1] * len(r.ids) + [0] * (length - len(r.ids)) for r in batch])
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
    scaled = logits / padded("temperatures").clamp(min=0.1)[:, 1:, None]
    found = scaled.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    ratio = (found - padded("logprobs")[:, 1:]).clamp(-20, 20).exp()
    gain = padded("advantages")[:, 1:]
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.28))
    loss = torch.where(gain < 0, torch.minimum(loss, -3 * gain), loss)
    return (loss * padded("weights")[:, 1:] * mask[:, 1:]).sum()


# --- measuring --------------------------------------------------------------------------------
def measure(who: str, data: Path, updates: int) -> dict[str, float]:
    """Return the CPU seconds of the best update, and by how many MiB this process grew."""
    torch.set_num_threads(1)
    model, rows = pickle.loads(data.read_bytes())  # written by this very script
    update = (learner_update if who == "learner" else peer_update)(model, rows)
    before, spent = _resident_mib(), []
    for _ in range(updates):
        start = time.thread_time()
        update()
        spent.append(time.thread_time() - start)
    return {"cpu_s": min(spent), "mib": _peak_mib() - before}


def measure_critic(data: Path, updates: int) -> dict[str, float]:
    """Return the CPU seconds of the best update without and with a critic, in this process."""
    torch.set_num_threads(1)
    model, rows = pickle.loads(data.read_bytes())  # written by this very script
    kinds = {"alone": learner_update(model, rows), "critic": critic_update(model, rows)}
    spent: dict[str, list[float]] = defaultdict(list)
    for _ in range(updates):
        for name, update in kinds.items():
            start = time.thread_time()
            update()
            spent[name].append(time.thread_time() - start)
    return {name: min(seconds) for name, seconds in spent.items()}


def _resident_mib() -> float:
    """Return the memory of this process; without /proc, the maximum so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return _peak_mib()
    return pages * resource.getpagesize() / 2**20


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def compare(workload: str, model: str, rows: list[Row], rounds: int) -> dict[str, Any]:
    """Measure learner, peer and critic, each in its own process; return the best of each."""
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows"
        data.write_bytes(pickle.dumps((model, rows)))
        for _ in range(rounds):
            for who in ("learner", "peer", "critic"):
                command = [sys.executable, __file__, "--measure", who, str(data), workload]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=_one_thread())
                if done.returncode:
                    raise SystemExit(f"measuring the {who} on {workload} failed")
                results[who].append(json.loads(done.stdout))
    best = {
        who: {name: min(found[name] for found in runs) for name in runs[0]}
        for who, runs in results.items()
    }
    return {
        "rows": len(rows),
        "tokens": sum(len(row.ids) for row in rows),
        "trained": sum(map(sum, (row.mask for row in rows))),
        **best,
        "faster": best["peer"]["cpu_s"] / best["learner"]["cpu_s"],
    }


def _one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _make_run(folder: Path) -> Path:
    print("a short run of the SQL example (give one with --run)", file=sys.stderr)
    command = [sys.executable, str(TRAIN), "--folder", str(folder)]
    done = subprocess.run(
        [*command, "--steps", "2", "--held-out", "16"], stdout=sys.stderr, env=_one_thread()
    )
    if done.returncode:
        raise SystemExit(f"the run failed; make one with: {' '.join(command)}")
    return folder


def _workload(name: str, run: Path | None, folder: Path) -> tuple[str, list[Row]]:
    if name == "long":
        return make_model(folder / "model"), long_rows()
    return sql_rows(run or _make_run(folder / "run"))


def _figures(name: str, found: dict[str, Any]) -> list[Figure]:
    """Return the rows for the time and the memory of one update."""
    what = f"{name}: {found['rows']} rows, {found['tokens']:,} tokens"
    ours, theirs, critic = found["learner"], found["peer"], found["critic"]
    peer = "plain padded loop"
    return [
        Figure(
            what=f"one update, {what}",
            unit="CPU-s",
            ours=ours["cpu_s"],
            theirs=theirs["cpu_s"],
            peer=peer,
            at_least=FASTER,
        ),
        Figure(
            what="  memory that it takes",
            unit="MiB",
            ours=ours["mib"],
            theirs=theirs["mib"],
            peer=peer,
            at_least=1,
        ),
        Figure(
            what="  what a critic adds to it",
            unit="%",
            ours=100 * (critic["critic"] / critic["alone"] - 1),
            at_most=CRITIC_ADDS,
            note=f"{critic['alone']:.2f} to {critic['critic']:.2f} CPU-s",
        ),
    ]


def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--run", type=Path, help="folder of a run of the SQL example")
    parser.add_argument("--workload", nargs="+", choices=UPDATES, default=list(UPDATES))
    parser.add_argument("--rounds", type=int, default=2, help="processes each, for sql (2)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        who, data, workload = options.measure
        updates = UPDATES[workload]
        if who == "critic":
            found = measure_critic(Path(data), updates)
        else:
            found = measure(who, Path(data), updates)
        print(json.dumps(found))
        return 0
    figures = []
    for name in options.workload:
        with tempfile.TemporaryDirectory() as folder:
            model, rows = _workload(name, options.run, Path(folder))
            found = compare(name, model, rows, options.rounds if name == "sql" else 1)
        figures += _figures(name, found)
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
