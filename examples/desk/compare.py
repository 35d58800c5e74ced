"""Compare GEPA with simpler ways to choose among the same prompts, with as many rollouts.

python examples/desk/compare.py            add missing results to measured.jsonl; print tables
python examples/desk/compare.py --table    print the tables only
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from desk_example import comparison, options
from desk_example.app import PROMPT, route
from desk_example.candidates import CANDIDATES, GOOD
from desk_example.comparison import Answers, Search
from desk_example.replay import replayed
from desk_example.serving import app_asks, served
from desk_example.training import NAME, Task, held_out_tasks, train_tasks
from lightspan.progress import default_reporter
from lightspan.schema.records import task_id
from lightspan_prompts.search.candidates import read_found
from router_example.pretrained import pretrained
from train import train

MEASURED = Path(__file__).parent / "measured.jsonl"
AT_ONCE = 8


def right(text: str, tasks: list[Task]) -> str:
    """Return one character per message: 1 if the app with the prompt `text` routes it right, else
    0.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        said = pool.map(lambda task: route(task["message"], text), tasks)
        pairs = zip(said, tasks, strict=True)
        return "".join(str(int(found == task["department"])) for found, task in pairs)


def measure(path: Path, model: Path, folders: Path) -> None:
    """Measure every prompt and run every search whose result is missing in the file `path`."""
    known = comparison.read(path)
    line = default_reporter().line
    with served(model) as (url, name), app_asks(url, name):
        for text in (PROMPT, *CANDIDATES):  # GOOD is one of them
            if text not in known.answers:
                found = Answers(
                    text=text,
                    train=right(text, train_tasks()),
                    held_out=right(text, held_out_tasks()),
                )
                comparison.add(path, found)
                line(f"{found.train.count('1')} of {len(found.train)}: {text[:60]!r}")
        done = {(each.begins, each.order) for each in known.searches if not each.replayed}
        for begins, flags in ((PROMPT, []), (GOOD, ["--good-seed"])):
            for order in comparison.ORDERS:
                if (begins, order) not in done:
                    given = [*flags, "--order", str(order), "--base-url", url]
                    given += ["--endpoint-model", name]
                    comparison.add(path, searched(begins, order, given, folders))


def replay(path: Path) -> None:
    """Run GEPA's searches in further orders, with the recorded answers in place of the model."""
    known = comparison.read(path)
    done = {each.order for each in known.searches if each.replayed}
    for order in comparison.MORE_ORDERS:
        if order not in done:
            comparison.add(path, replayed(order, PROMPT, known.answers))


def searched(begins: str, order: int, flags: list[str], folders: Path) -> Search:
    """Run one search of `train.py`, and return its result.

    Args:
        begins: prompt that the search starts from.
        order: seed of the search.
        flags: command-line arguments of `train.py`.
        folders: folder in which the search's folder is made.
    """
    folder = folders / f"{'good' if '--good-seed' in flags else 'poor'}-{order}"
    given = [*flags, "--folder", str(folder)]
    given += ["--resume"] if folder.exists() else []
    with options.opened(options.parser("").parse_args(given)) as run:
        result = train(run)
    found = read_found(folder)
    assert found is not None
    rewards = result.evaluations[-1].rewards
    held_out = [int(rewards[task_id(task)]) for task in held_out_tasks()]
    return Search(
        order=order,
        begins=begins,
        chosen=result.prompts[NAME].after.text,
        rollouts=found.rollouts,
        reflections=found.reflections,
        candidates=len(found.candidates),
        held_out="".join(map(str, held_out)),
    )


def main() -> int:
    """Measure what is missing, and print the tables; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--measured", type=Path, default=MEASURED, help="what was measured")
    parser.add_argument("--folders", type=Path, default=Path("runs/desk-compared"))
    parser.add_argument("--model", type=Path, help="the folder of another chat model")
    parser.add_argument("--cache", type=Path, default=options.CACHE)
    given = parser.parse_args()
    if not given.table:
        model = given.model or pretrained(given.cache, default_reporter())
        measure(given.measured, model, given.folders)
        replay(given.measured)
    measured = comparison.read(given.measured)
    tables = [
        comparison.table(measured),
        comparison.table(measured, replayed=True),
        comparison.table(measured, GOOD),
        comparison.texts_table(measured),
    ]
    print(*tables, sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
