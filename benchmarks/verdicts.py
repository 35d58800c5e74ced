"""What do sparse, noisy verdicts teach? KTO and DPO against SFT and RL (docs/evidence/verdicts.md)

    python benchmarks/verdicts.py                              all runs that are left
    python benchmarks/verdicts.py --tasks desk --arms kto --seeds 0
    python benchmarks/verdicts.py --minutes 60                 begin no run after an hour

What is compared and how it is judged was written before any run: docs/evidence/verdicts.md, with
the numbers below. Each run is a line of benchmarks/results/verdicts.jsonl, so the same command
continues where it stopped. `benchmarks/tables.py` makes the table.

It needs the router example's pretrained model (examples/router/README.md), openai and LangGraph
beside lightspan[train].
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import openai
from _report import circumstances
from _verdicts_table import RESULTS, rows_of
from credit import evenly
from learning import ROOT, SAY

import lightspan
from lightspan import SFT, LightningRL, LoRA, Optimizer, Trainer
from lightspan_torch import Preferences, count_parameters
from lightspan_torch.learner.policy_model import merge_adapter
from lightspan_torch.learning_rate import default_rate

CACHE: Final = ROOT / ".cache" / "verdicts"
ARMS: Final = ("untrained", "sft", "kto", "kto1", "dpo", "rl")
TASKS: Final = ("desk", "router")
SEEDS: Final = (0, 1, 2)
MESSAGES: Final = 128
"""Training messages that the users send."""
ANSWERS: Final = 8
"""Answers to each message, as many as RL's group."""
COVERAGE: Final = 0.1
"""Share of the answers that get a verdict."""
NOISE: Final = 0.2
"""Share of the verdicts that are the opposite of the true one."""
EPOCHS: Final = 4
HELD_OUT: Final = 80
"""Held-out messages, which share neither a phrasing nor a product with training messages."""
THREADS: Final = 8


class Key(NamedTuple):
    """Which run a row is the result of."""

    task: str
    arm: str
    seed: int


def design() -> str:
    """Return a hash of the numbers above."""
    numbers = [MESSAGES, ANSWERS, COVERAGE, NOISE, EPOCHS, HELD_OUT, "desk: good prompt"]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:12]


# --- tasks ----------------------------------------------------------------------------------
def messages_of(task: str, split: str) -> list[Any]:
    """Return the messages of a task: `MESSAGES` of train, `HELD_OUT` of test."""
    from router_example.recipes import load_tasks

    count = MESSAGES if split == "train" else HELD_OUT
    chosen = evenly(load_tasks(CACHE, "train" if split == "train" else "test"), count, "phrasing")
    return list(chosen)


def ask(task: str, url: str, temperature: float) -> Callable[[Any], bool]:
    """Return the function that runs the app on a message, and says whether it was right."""
    client = openai.OpenAI(base_url=url, api_key="unused", timeout=3600)
    [policy] = client.models.list().data
    if task == "desk":
        from desk_example.app import parse_department, turns
        from desk_example.candidates import GOOD

        def desk(message: Any) -> bool:
            with lightspan.agent("desk"):
                reply = client.chat.completions.create(
                    model=policy.id,
                    messages=turns(GOOD, message["message"]),
                    temperature=temperature,
                    max_tokens=4,
                )
            answer = parse_department(reply.choices[0].message.content or "")
            return bool(answer == message["department"])

        return desk
    import lightspan_langgraph
    from router_example.app import build_graph, chat_model

    lightspan_langgraph.instrument()
    model = chat_model(
        policy.id, base_url=url, api_key="unused", temperature=temperature, max_tokens=6
    )
    graph = build_graph(model)

    def router(message: Any) -> bool:
        final = graph.invoke({"message": message["message"]})
        return all(final.get(name) == message[name] for name in ("department", "product"))

    return router


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """Serve a model, and yield the URL of its endpoint."""
    command = [sys.executable, "-m", "lightspan.cli", "serve", str(model), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if url := re.search(r"http://127\.0\.0\.1:\d+(/v1)?", line):
                    yield url[0] if url[1] else f"{url[0]}/v1"
                    break
            else:
                raise RuntimeError("lightspan serve ended")
        finally:
            process.terminate()


def evaluate(task: str, model: Path) -> str:
    """Return for each held-out message "1" if the app is right at temperature 0, else "0"."""
    with served(model) as url, ThreadPoolExecutor(THREADS) as pool:
        right = pool.map(ask(task, url, 0.0), messages_of(task, "test"))
        return "".join(str(int(one)) for one in right)


# --- verdicts -------------------------------------------------------------------------------
def record(task: str, seed: int, model: Path) -> tuple[str, dict[str, int]]:
    """Let users ask the untrained app, and rate some answers; return the store and its counts.

    The store is made once for a task and a seed; all arms without a metric learn from it.
    """
    folder = CACHE / design() / f"{task}-{seed}"
    counts = folder / "counts.json"
    url = f"sqlite:{folder / 'production.db'}"
    if counts.exists():
        return url, json.loads(counts.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with served(model) as endpoint:
        app = ask(task, endpoint, 1.0)

        def attempt(message: Any) -> tuple[str, bool]:
            with lightspan.operation("ask", input=message["message"]):
                right = app(message)
                return str(lightspan.current_attempt_id()), right

        messages = [message for message in messages_of(task, "train") for _ in range(ANSWERS)]
        with lightspan.record(url, service=task), ThreadPoolExecutor(THREADS) as pool:
            answers = list(pool.map(attempt, messages))
    rng = random.Random(f"{task} {seed}")
    totals = {"answers": len(answers), "right": sum(right for _, right in answers)}
    totals |= {"up": 0, "down": 0, "false": 0}
    for attempt_id, right in answers:
        if rng.random() >= COVERAGE:
            continue
        is_false = rng.random() < NOISE
        verdict = right is not is_false
        lightspan.feedback(attempt_id, verdict, store=url)
        totals["up" if verdict else "down"] += 1
        totals["false"] += is_false
    counts.write_text(json.dumps(totals))
    return url, totals


# --- arms -----------------------------------------------------------------------------------
def train(key: Key, start: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Train an arm; return the folder of the model, and figures of the training."""
    if key.arm == "untrained":
        return start, {}
    if key.arm == "rl":
        return _reinforce(key, start, folder), {"rollouts": MESSAGES * ANSWERS}
    url, counts = record(key.task, key.seed, start)
    if key.arm == "sft":
        rate = default_rate(count_parameters(start), lora=True)
        sft = SFT(
            start,
            from_store=url,
            min_reward=0.5,
            lora=LoRA(),
            optimizer=Optimizer(learning_rate=rate),
            epochs=EPOCHS,
            seed=key.seed,
        )
        result = sft.fit(folder=folder / "model", reporter=SAY, resume=True)
        return result.model, {**counts, "examples": result.demonstrations}
    preferences = Preferences(
        start,
        from_store=url,
        loss="dpo" if key.arm == "dpo" else "kto",
        epochs=1 if key.arm == "kto1" else EPOCHS,
        seed=key.seed,
    )
    learned = preferences.fit(folder=folder / "model", reporter=SAY, resume=True)
    last = learned.curve[-1] if learned.curve else None
    sizes = {"examples": learned.examples, "held_out": learned.held_out}
    accuracy = {} if last is None else {"held_out_accuracy": last.accuracy}
    return learned.model, {**counts, **sizes, **accuracy, "notes": learned.check.notes}


def _reinforce(key: Key, start: Path, folder: Path) -> Path:
    """Train with the true metric, on as many rollouts as there were answers."""
    app = "_verdicts_app:desk"
    if key.task == "router":
        app = "router_example.training:answer"
    algorithm = LightningRL(
        str(start), lora=LoRA(), group_size=ANSWERS, tasks_per_step=8, seed=key.seed
    )
    trainer = Trainer(
        algorithm,
        runners=THREADS,
        steps=MESSAGES // 8,
        folder=folder / "run",
        reporter=SAY,
    )
    resume = (folder / "run").exists()
    result = trainer.fit(app, messages_of(key.task, "train"), resume=resume)
    return Path(merge_adapter(Path(str(result.model)), folder / "model", base=start))


def run(key: Key, start: Path) -> None:
    """Make a run and append its row."""
    folder = CACHE / design() / "-".join(map(str, key))
    folder.mkdir(parents=True, exist_ok=True)
    began, row = time.monotonic(), {}
    try:
        model, figures = train(key, start, folder)
        right = evaluate(key.task, model)
        row = {**figures, "right": right, "mean": round(right.count("1") / len(right), 4)}
    except Exception as error:
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {error}".replace(str(ROOT), ".")[:500]}
    shutil.rmtree(folder, ignore_errors=True)
    wall = round(time.monotonic() - began, 1)
    row = {**key._asdict(), **row, "wall_s": wall, "design": design(), **circumstances()}
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    SAY.line(f"{key}: {row.get('mean', row.get('error'))} in {wall:.0f} s")


def main() -> int:
    """Make the runs that are left."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--cache", type=Path, default=ROOT / "examples" / "router" / ".cache")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from router_example.pretrained import pretrained

    start = pretrained(options.cache, SAY)
    done = {
        Key(row["task"], row["arm"], row["seed"])
        for row in rows_of(RESULTS)
        if row["design"] == design() and "error" not in row
    }
    end = time.monotonic() + 60 * options.minutes
    keys: Sequence[Key] = [
        Key(task, arm, 0 if arm == "untrained" else seed)
        for seed in options.seeds
        for task in options.tasks
        for arm in options.arms
    ]
    for key in dict.fromkeys(keys):
        if key not in done and time.monotonic() < end:
            run(key, start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
