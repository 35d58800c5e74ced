"""Memory and CPU time of the embedded learner, by the tokens of a pass, on SmolLM2-135M with LoRA.

    python benchmarks/learner_memory.py --json results/learner_memory.json
    python benchmarks/learner_memory.py --budgets 0 2048    the default and 2,048 tokens a pass

Each budget is measured in a process of its own: load the model, score some rows and update once
with a batch like that of `examples/router` (groups of rollouts whose calls share their prompt) and
with one of longer rollouts. Memory is the process's maximum resident size. Needs `lightspan[train]`
and the router example's model.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from _report import Figure, finish, options_of, report

ROOT: Final = Path(__file__).parents[1]
BUDGETS: Final = (0, 256, 512, 1024, 2048)
"""Tokens of a pass; 0 for the default."""
BATCHES: Final = {"router": (8, 8, 2, 125, 8), "long": (1, 8, 3, 250, 40)}
"""Batch → groups, rollouts of a group, calls of a rollout, tokens of a prompt and of an answer."""


def make_rows(kind: str) -> list[Any]:
    """Return the rows of a batch with random tokens; half of each prompt is the same everywhere."""
    from lightspan.lightning.rows import Response, Row

    groups, size, calls, prompt, answer = BATCHES[kind]
    rng = random.Random(kind)
    common = [rng.randrange(100, 40_000) for _ in range(prompt // 2)]
    rows = []
    for group in range(groups):
        own = [rng.randrange(100, 40_000) for _ in range(prompt - len(common))]
        for member in range(size):
            history: list[int] = []
            for call in range(calls):
                length = max(1, round(answer * rng.uniform(0.5, 1.5)))
                response = [rng.randrange(100, 40_000) for _ in range(length)]
                ids = [*common, *own, *history, *response]
                start = len(ids) - length
                rows.append(
                    Row(
                        rollout_id=f"{group}-{member}",
                        policy="policy",
                        ids=ids,
                        mask=[place >= start for place in range(len(ids))],
                        advantages=[rng.choice((-1.0, 1.0))] * len(ids),
                        weights=[1 / (groups * size * calls * length)] * len(ids),
                        logprobs=[-8.0] * len(ids),
                        versions=[0] * len(ids),
                        temperatures=[1.0] * len(ids),
                        call_ids=((f"{group}-{member}-{call}", 0),),
                        responses=(Response(start, length),),
                    )
                )
                history += [*response, *own[:20]]
    return rows


def measure(model: Path, kind: str, budget: int) -> dict[str, float]:
    """Return memory (GiB), CPU seconds and results of two steps in this process."""
    from lightspan.protocols.learner import LoRA, Optimizer, PolicyLoss
    from lightspan_torch.learner.torch import TorchLearner

    optimizer = Optimizer(learning_rate=2e-4)
    learner = TorchLearner(
        {"policy": str(model)}, lora=LoRA(), optimizer=optimizer, token_budget=budget or None
    )
    loaded, rows, start = peak(), make_rows(kind), time.process_time()
    learner.score(rows[::8])
    metrics = learner.update(rows, PolicyLoss())
    return {
        "budget": learner.state()["token_budget"],
        "tokens": sum(len(row.ids) for row in rows),
        "loaded_gib": loaded,
        "peak_gib": peak(),
        "cpu_s": time.process_time() - start,
        "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
    }


def peak() -> float:
    """Return the maximum resident size of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def default_model() -> Path:
    """Return the router example's model."""
    found = sorted((ROOT / "examples" / "router" / ".cache").glob("smollm2-*"))
    if not found:
        raise SystemExit("run `python examples/router/train.py --dev` first: it makes the model")
    return found[0]


def main() -> None:
    """Measure the budgets of the command line."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--budgets", type=int, nargs="*", help="0 for the default")
    parser.add_argument("--batch", choices=[*BATCHES])
    parser.add_argument("--only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = options.model or default_model()
    if options.only:
        print(json.dumps(measure(model, options.batch, options.budgets[0])))
        return
    runs = []
    for kind in [options.batch] if options.batch else BATCHES:
        for budget in options.budgets or BUDGETS:
            arguments = ["--only", "--batch", kind, "--budgets", str(budget)]
            command = [sys.executable, __file__, "--model", str(model), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append({"batch": kind, "is_default": not budget, **json.loads(done.stdout)})
            print(runs[-1], flush=True)
    table = figures(runs)
    finish(table, None)
    if options.json is not None:
        options.json.write_text(json.dumps({**report(table), "runs": runs}, indent=2) + "\n")


def figures(runs: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return memory and CPU time by default, with those of the largest budget."""
    rows = []
    for kind in dict.fromkeys(run["batch"] for run in runs):
        own = [run for run in runs if run["batch"] == kind]
        most = max(own, key=lambda run: run["budget"])
        for run in (run for run in own if run["is_default"]):
            for name, unit in (("peak_gib", "GiB"), ("cpu_s", "CPU-s")):
                rows.append(
                    Figure(
                        what=f"SmolLM2-135M, LoRA, an update, {kind} rows, {run['budget']} tokens",
                        unit=unit,
                        ours=round(run[name], 2),
                        peer=f"{most['budget']} tokens a pass",
                        theirs=round(most[name], 2),
                    )
                )
    return rows


if __name__ == "__main__":
    main()
