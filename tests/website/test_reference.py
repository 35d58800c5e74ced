"""Compare pages of docs/reference that are written by hand with the code."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


def strings() -> set[str]:
    """Return all texts in the packages' code, except docstrings."""
    texts: set[str] = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs
        }
    return texts


def test_the_page_has_all_environment_variables() -> None:
    read = {text for text in strings() if re.fullmatch(r"LIGHTSPAN_[A-Z_]*[A-Z]", text)}
    page = (REFERENCE / "environment-variables.md").read_text("utf-8")
    page = page.partition("## Development of lightspan")[0]
    assert read == set(re.findall(r"`(LIGHTSPAN_[A-Z_]+)`", page))


# --- metrics and files of runs ----------------------------------------------------------------
def rows(page: str, *, until: str) -> list[re.Pattern[str]]:
    """Return patterns for the names in the first columns of a page's tables.

    Args:
        page: name of the page.
        until: heading at which to stop.
    """
    text, found, _ = (REFERENCE / page).read_text("utf-8").partition(f"\n## {until}\n")
    assert found
    cells = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [re.compile(_pattern(name)) for name in names]


def _pattern(name: str) -> str:
    """Return the regular expression of a name in which words in capitals stand for any text.

    A name that ends with a slash is that of a folder, and matches the files in it.
    """
    parts = re.split(r"([A-Z]{2,})", name)
    expression = "".join(".+" if part.isupper() else re.escape(part) for part in parts)
    return expression + ".*" * name.endswith("/")


def missing(names: Iterable[str], known: list[re.Pattern[str]]) -> list[str]:
    return sorted(n for n in set(names) if not any(each.fullmatch(n) for each in known))


@pytest.fixture(scope="module")
def runs(apps: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Train with many options; return the folders of the runs."""
    import gepa_toy as toy  # type: ignore[import-not-found]
    import judged_app as judged  # type: ignore[import-not-found]
    import scripted_judge  # type: ignore[import-not-found]
    from tool_app import parsed  # type: ignore[import-not-found]

    from lightspan import LLM, Forks, Judge, LightningRL, Overlong, Replay, Trainer
    from lightspan.progress import SilentReporter
    from lightspan_testing.scripted import ScriptedServer

    root = tmp_path_factory.mktemp("runs")
    common: dict[str, Any] = {"runners": 2, "reporter": SilentReporter()}

    def trainer(name: str, settings: dict[str, Any], **options: Any) -> Trainer:
        small = {"group_size": 4, "tasks_per_step": 2, "learning_rate": 1e-3, "optimize": "writer"}
        algorithm = LightningRL(str(tiny), **{**small, **options})
        return Trainer(algorithm, folder=root / name, **{"steps": 1, **common, **settings})

    def tasks(start: int, **fields: Any) -> list[dict[str, Any]]:
        return [{"q": f"question {number}", **fields} for number in range(start, start + 4)]

    best = {"keep": "best", "validate_every": 1}
    overlong = Overlong(max_tokens=4, buffer=2)
    choice = {"tasks": "adaptive", "replay": Replay(), "minibatches": 2}
    shaped = trainer("shaped", best, air=True, overlong=overlong, resample=1, **choice)
    shaped.fit(parsed, tasks(0), tasks(4), selection=tasks(8))
    ppo = {"estimator": "ppo", "group_size": 1, "tasks_per_step": 4}
    trainer("critic", {"reward": by_length, "steps": 2}, overlap=1, **ppo).fit(parsed, tasks(0))
    forking = {"estimator": "rloo", "credit": "family", "forks": Forks(at=1)}
    trainer("forked", {}, **forking).fit(apps.spell, tasks(0))
    policies = {"writer": "a", "reviewer": "b"}
    both = [*tasks(0, who="writer"), *tasks(4, who="reviewer")]
    ppo |= {"tasks_per_step": 8}
    trainer("policies", {}, optimize=policies, **ppo).fit(apps.either, both)
    failing = [*tasks(0), *tasks(4, **{"raise": "x"})]
    trainer("failing", {}, tasks_per_step=8).fit(apps.breaks, failing, failing)
    numbers = scripted_judge.gives(lambda text, place: int(text.rpartition("number ")[2]))
    with ScriptedServer(judged.counted) as model, ScriptedServer(numbers) as wise:
        judge = Judge("More is better.", LLM(base_url=wise.url, model="wise"))
        judging = Trainer(judged.Sees(), reward=judge, steps=1, folder=root / "judge", **common)
        judging.fit(judged.counts, judged.tasks(model.url, 1, 3), judged.tasks(model.url, 5))
    with ScriptedServer(toy.speaks) as model, ScriptedServer(toy.reflects) as thinker:
        toy.train(root / "search", model.url, thinker.url)
    return sorted(root.iterdir())


def by_length(answer: str) -> float:
    return len(answer) / 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_has_every_metric(runs: list[Path]) -> None:
    files = [(run / "metrics.jsonl").read_text("utf-8") for run in runs]
    lines = [json.loads(line) for text in files for line in text.splitlines()]
    keys = {key for line in lines for key in line}
    assert {"learner/lambda", "air/tool_success", "resample/groups", "overlap/behind"} < keys
    assert {"tasks/zero_gradient_predicted", "replay/row_share", "forks/departed"} < keys
    assert {"learner/a/loss", "judge/calls", "by_length/unscored"} < keys
    assert {line["kind"] for line in lines} == {"train", "eval", "selection", "search"}
    assert missing(keys, rows("metrics.md", until="The result")) == []


@pytest.mark.slow
def test_the_page_has_every_key_of_the_result(runs: list[Path]) -> None:
    page = (REFERENCE / "metrics.md").read_text("utf-8").partition("\n## The result\n")[2]
    for run in runs:
        result = json.loads((run / "result.json").read_text("utf-8"))
        assert set(result) == set(re.findall(r"^\| `(\w+)` \|", page.partition("\n## ")[0], re.M))


@pytest.mark.slow
def test_the_page_has_every_file_of_a_run(runs: list[Path]) -> None:
    paths = [str(p.relative_to(run)) for run in runs for p in run.rglob("*") if p.is_file()]
    assert missing(paths, rows("run-folder.md", until="Permissions")) == []
    assert {run.stat().st_mode & 0o777 for run in runs} == {0o700}
