"""TRL's GRPO and lightspan on the same tasks of others, at equal settings (docs/evidence/peers.md).

    python benchmarks/peers_learning.py                        all runs that are left
    python benchmarks/peers_learning.py --tasks leg_counting --sides trl-1.16.0 --seeds 0
    python benchmarks/peers_learning.py --report               write the table, and what is missing

Both train on the same questions of reasoning-gym, in the same order, from the same weights, with as
many rollouts, groups, updates, the same loss, rate and optimiser. What has to be set for that is in
`peer_learning.py` and `lightspan_learning.py`. Both are whole programs: CPU seconds are those of
the process that trains, from its start, and of all its children. Both are evaluated by one sampler,
from the weights they saved.

Sides: `trl-1.16.0`; `lightspan`, whose app calls the OpenAI SDK; `lightspan-http`, whose app sends
the same requests by the standard library. Each run is a line of
benchmarks/results/peers_learning.jsonl, which is committed, so the same command continues.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from _curves import seed_interval
from _defaults_plan import TASKS
from _peers import peer_environment, peer_python
from _reasoning_tasks import GENERATORS, Task, score
from _report import Figure, circumstances, report
from defaults import CACHE, Subject, load_subject
from learning import ROOT, SAY

from lightspan import LightningRL, LoRA
from lightspan.algorithms.task_sampler import Epochs

RESULTS: Final = ROOT / "benchmarks" / "results" / "peers_learning.jsonl"
PEER: Final = "trl-1.16.0-learning"
TRL, OURS, HTTP = "trl-1.16.0", "lightspan", "lightspan-http"
SIDES: Final = (TRL, OURS, HTTP)
SEEDS: Final = (0, 1, 2)
COMPARED: Final = ("family_relationships", "leg_counting", "number_filtering-smollm2")
GROUP: Final = 8
TASKS_PER_STEP: Final = 16
PART: Final = {"tiny": 16, "smollm2": 4}
"""Sequences of TRL's forward and backward pass. With 16 it needs 12.6 GiB for SmolLM2."""
SAMPLES: Final = {"tiny": 2, "smollm2": 1}
"""Answers for each held-out task."""
BATCH: Final = 32
"""Prompts of a batch of the sampler."""
CHEAPER: Final = {"tiny": 1.0, "smollm2": 4.0}
"""Promised ratio of TRL's to our CPU seconds."""


class Key(NamedTuple):
    """Which run a row is the result of."""

    task: str
    side: str
    seed: int
    rollouts: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Key:
        return cls(row["task"], row["side"], row["seed"], row["rollouts"])


Comparison = tuple[str, int]
"""A task, and the number of rollouts."""


# --- runs -----------------------------------------------------------------------------------
def plan_of(
    key: Key, subject: Subject, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Return everything that both sides are told."""
    task, generator = TASKS[key.task], GENERATORS[key.task]
    model = subject.model(key.seed)
    lora = LoRA() if task.model == "smollm2" else None
    rate = LightningRL(str(model), lora=lora).optimizer.learning_rate
    tasks = options.tasks_per_step
    steps = key.rollouts // (GROUP * tasks)
    return {
        "task": key.task,
        "is_http": key.side == HTTP,
        "model": str(model),
        "folder": str(folder),
        "generator": generator.name,
        "settings": dict(generator.settings),
        "max_tokens": generator.max_tokens,
        "seed": key.seed,
        "steps": steps,
        "group_size": GROUP,
        "tasks_per_step": tasks,
        "minibatches": options.minibatches,
        "part": PART[task.model],
        "lora": lora is not None,
        "learning_rate": rate,
        "train": list(subject.train),
        "rows": Epochs(subject.train, key.seed).take(0, steps * tasks),
    }


def run(key: Key, subject: Subject, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train one side with one seed in a process of its own, evaluate it, and return the row."""
    SAY.line(f"{key.task}, {key.side}, seed {key.seed}: begins")
    plan = plan_of(key, subject, options, folder)
    (folder / "plan.json").write_text(json.dumps(plan))
    here = Path(__file__).parent
    command = [sys.executable, str(here / "lightspan_learning.py"), str(folder / "plan.json")]
    environment = dict(os.environ)
    if key.side == TRL:
        python = options.peer_python or peer_python(PEER)
        command = [str(python), "-I", str(here / "peer_learning.py"), str(folder / "plan.json")]
        environment = peer_environment()
    before, started = children_cpu(), time.monotonic()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    wall, spent = time.monotonic() - started, children_cpu() - before
    if done.returncode:
        raise SystemExit(f"{key}: status {done.returncode}\n{(done.stderr or done.stdout)[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    count = options.held_out or len(subject.held_out)
    tasks, model = list(subject.held_out)[:count], TASKS[key.task].model
    end = evaluate(folder / "model", tasks, SAMPLES[model])
    return {
        **key._asdict(),
        "steps": plan["steps"],
        "minibatches": plan["minibatches"],
        "learning_rate": plan["learning_rate"],
        "rewards": [round(reward, 4) for reward in found["rewards"]],
        "start": start_of(key, Path(plan["model"]), tasks, SAMPLES[model]),
        "end": round(end, 4),
        "n": len(tasks) * SAMPLES[model],
        "cpu_s": round(spent, 1),
        "wall_s": round(wall, 1),
        "peak_mib": found["peak_mib"],
        "parts": found.get("parts", {}),
    }


_starts: dict[tuple[str, int], float] = {}


def start_of(key: Key, model: Path, tasks: Sequence[Task], samples: int) -> float:
    """Return the score of the weights with which both sides of a task and a seed begin."""
    if (key.task, key.seed) not in _starts:
        _starts[key.task, key.seed] = round(evaluate(model, tasks, samples), 4)
    return _starts[key.task, key.seed]


def children_cpu() -> float:
    """Return the CPU seconds of ended child processes, their own children included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- the sampler ----------------------------------------------------------------------------
def evaluate(model: Path, tasks: Sequence[Task], samples: int) -> float:
    """Return the mean score at temperature 1, by transformers' `generate`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    torch.manual_seed(0)
    scores: list[float] = []
    wanted = [task for task in tasks for _ in range(samples)]
    for first in range(0, len(wanted), BATCH):
        part = wanted[first : first + BATCH]
        texts = [
            tokenizer.apply_chat_template(t["messages"], add_generation_prompt=True, tokenize=False)
            for t in part
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            outputs = network.generate(
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                max_new_tokens=part[0]["max_tokens"],
                pad_token_id=tokenizer.pad_token_id,
            )
        answers = outputs[:, inputs["input_ids"].shape[1] :]
        said = tokenizer.batch_decode(answers, skip_special_tokens=True)
        scores += [score(task, text.strip()) for task, text in zip(part, said, strict=True)]
    return math.fsum(scores) / len(scores)


# --- the table ------------------------------------------------------------------------------
HEADS: Final = (
    "task",
    "side",
    "seeds",
    "rollouts",
    "start → end",
    "first and last third of the training reward",
    "CPU-s",
    "wall s",
    "peak MiB",
)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as Markdown, then the differences, where CPU goes, and what is missing."""
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    for task in compared(rows):
        for side in SIDES:
            found = of(rows, task, side)
            if found:
                lines.append(f"| {' | '.join(_cells(task[0], side, found))} |")
    lines += ["", *_differences(rows), "", *_parts(rows)]
    done = {Key.of(row) for row in rows}
    left = Counter((key.task, key.side) for key in keys() if key not in done)
    missing = [
        f"- `{task}`, {side}: {count} of {len(SEEDS)} seeds" for (task, side), count in left.items()
    ]
    return "\n".join([*lines, "", *(["Missing:", "", *missing] if missing else [])])


def _cells(task: str, side: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
    thirds = []
    for row in found:
        each = max(1, len(row["rewards"]) // 3)
        thirds.append((_mean(row["rewards"][:each]), _mean(row["rewards"][-each:])))
    return [
        task,
        side,
        ", ".join(str(row["seed"]) for row in found),
        f"{found[0]['rollouts']:,}",
        f"{_mean([r['start'] for r in found]):.3f} → {_mean([r['end'] for r in found]):.3f}",
        f"{_mean([first for first, _ in thirds]):.3f}, {_mean([last for _, last in thirds]):.3f}",
        *(
            f"{_mean([row[name] for row in found]):,.0f}"
            for name in ("cpu_s", "wall_s", "peak_mib")
        ),
    ]


def _differences(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield, for each task, our end less TRL's, over the seeds that both have."""
    for task in compared(rows):
        theirs = {row["seed"]: row for row in of(rows, task, TRL)}
        for side in (OURS, HTTP):
            pairs = [(r, theirs[r["seed"]]) for r in of(rows, task, side) if r["seed"] in theirs]
            if not pairs:
                continue
            found = seed_interval([ours["end"] - trl["end"] for ours, trl in pairs])
            ratio = sum(t["cpu_s"] for _, t in pairs) / sum(o["cpu_s"] for o, _ in pairs)
            interval = "" if math.isinf(found.low) else f" ({found.low:+.3f}..{found.high:+.3f})"
            yield (
                f"- `{task[0]}`: {side} ends {found.mean:+.3f}{interval} from TRL, over {found.n} "
                f"seed{'s' if found.n > 1 else ''}; TRL takes {ratio:.2f} times its CPU seconds"
            )


def _parts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield, for each task and side of ours, how its CPU seconds divide."""
    for task in compared(rows):
        for side in (OURS, HTTP):
            found = of(rows, task, side)
            if found:
                names = ("engine", "learner", "runners", "process")
                engine, learner, runners, process = (
                    _mean([row["parts"][name] for row in found]) for name in names
                )
                rest = process - engine - learner
                yield (
                    f"- `{task[0]}`, {side}: engine {engine:.0f}, learner {learner:.0f}, the "
                    f"runners with the app {runners:.0f}, gateway, store and start {rest:.0f} CPU-s"
                )


def compared(rows: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Return the tasks with their numbers of rollouts, in the order of `COMPARED`."""
    found = {(row["task"], row["rollouts"]) for row in rows}
    return sorted(found, key=lambda each: (COMPARED.index(each[0]), each[1]))


def of(rows: Sequence[Mapping[str, Any]], task: Comparison, side: str) -> list[Mapping[str, Any]]:
    """Return the rows of a task with its number of rollouts and a side, by seed."""
    found = [row for row in rows if (row["task"], row["rollouts"], row["side"]) == (*task, side)]
    return sorted(found, key=lambda row: row["seed"])


def figures(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return the CPU seconds as figures with a target."""
    found = []
    for task in compared(rows):
        ours, theirs = of(rows, task, OURS), of(rows, task, TRL)
        if ours and theirs:
            ends = [_mean([row["end"] for row in each]) for each in (ours, theirs)]
            found.append(
                Figure(
                    what=f"{task[0]}, {ours[0]['rollouts']:,} rollouts",
                    unit="CPU-s",
                    ours=_mean([row["cpu_s"] for row in ours]),
                    peer=TRL,
                    theirs=_mean([row["cpu_s"] for row in theirs]),
                    at_least=CHEAPER[TASKS[task[0]].model],
                    note=f"held-out reward {ends[0]:.3f}, TRL {ends[1]:.3f}",
                )
            )
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- the command ----------------------------------------------------------------------------
def keys(steps: int | None = None, tasks: int = TASKS_PER_STEP) -> list[Key]:
    """Return all runs, a seed of all sides after the other.

    Args:
        steps: number of steps; None for that of the task.
        tasks: tasks of a step.
    """
    return [
        Key(task, side, seed, (steps or TASKS[task].steps) * GROUP * tasks)
        for task in COMPARED
        for seed in SEEDS
        for side in SIDES
    ]


def main() -> int:
    """Make the runs that are left, or write the table; return the exit status."""
    options = _parser().parse_args()
    path: Path = options.json
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if options.report:
        whole = {**report(figures(rows)), "table": table(rows)}
        path.with_suffix(".json").write_text(json.dumps(whole, indent=2) + "\n")
        print(whole["table"])
        return 0
    torch.set_num_threads(1)
    done = {Key.of(row) for row in rows}
    subjects: dict[str, Subject] = {}
    for key in keys(options.steps, options.tasks_per_step):
        wanted = key.task in options.tasks and key.side in options.sides
        if key in done or not wanted or key.seed not in options.seeds:
            continue
        if key.task not in subjects:
            subjects[key.task] = load_subject(key.task, "test", options.cache)
        with tempfile.TemporaryDirectory() as folder:
            row = {**run(key, subjects[key.task], options, Path(folder)), **circumstances()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        SAY.line(f"{key.task}, {key.side}: {row['start']} -> {row['end']}, {row['cpu_s']} CPU-s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=COMPARED, default=COMPARED, help="(all)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="(all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="(0 1 2)")
    parser.add_argument("--steps", type=int, help="(12 with the tiny model, 8 with SmolLM2)")
    parser.add_argument("--tasks-per-step", type=int, default=TASKS_PER_STEP, help="(16)")
    parser.add_argument("--minibatches", type=int, default=1, help="updates of a step (1)")
    parser.add_argument("--held-out", type=int, help="evaluate on so many tasks (320)")
    parser.add_argument("--report", action="store_true", help="write the table")
    parser.add_argument("--json", type=Path, default=RESULTS, help="(results/peers_learning.jsonl)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="warm starts (.cache/defaults)")
    parser.add_argument(
        "--peer-python",
        type=Path,
        help="an interpreter with the peer's packages (makes an environment of its own)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
