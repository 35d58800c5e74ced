"""Test the pages on credit: their programs run, and they name every rule."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from pages import DOCS, blocks  # type: ignore[import-not-found]

from lightspan import LightningRL
from lightspan.lightning.baselines import BASELINES
from lightspan.lightning.credit import CREDITS
from lightspan.lightning.states import State


def test_its_program_makes_the_rules() -> None:
    text, mixed, forked = [
        t for language, _, t in blocks("explain/credit.md") if language == "python"
    ]
    made = re.sub(r"^(LightningRL\(.*?)( +#.*)?$", r"made.append(\1)", text, flags=re.MULTILINE)
    names: dict[str, list] = {"made": []}  # type: ignore[type-arg]
    exec(made, names)
    assert [algorithm.credit.name.split("(")[0] for algorithm in names["made"]] == [
        "terminal",
        "discounted",
        "anchor",
        "critic",
    ]
    asked = [{"role": "user", "content": "You are in the cellar.\nA door leads north."}]
    state = State(task_id="t", agent_path="a", turn=0, messages=asked)
    assert names["made"][2].credit.key(state) == "You are in the cellar."
    assert names["made"][3].critic.lam == 0.95
    exec(mixed, names)
    algorithm = names["algorithm"]
    assert (algorithm.critic.lam, algorithm.credit.name) == (1.0, "terminal")
    assert algorithm.batch_config.mixture is not None
    exec(forked, names)
    assert (names["algorithm"].credit.name, names["algorithm"].forks.each) == ("family", 1)


def test_it_names_every_rule() -> None:
    table = (
        (DOCS / "explain/credit.md").read_text().partition("| `credit=` |")[2].partition("\n\n")[0]
    )
    assert re.findall(r'`"(\w+)"`', table) == list(CREDITS)
    reference = (DOCS / "reference/credit.md").read_text()
    table = reference.partition("## Baselines")[2].partition("\n\n- ")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(CREDITS)


def test_a_rule_of_your_own() -> None:
    [text] = [t for language, _, t in blocks("reference/credit.md") if language == "python"]
    names: dict[str, Any] = {}
    exec(text, names)
    rule = names["OnlyTheLast"]()
    assert LightningRL("m", credit=rule).credit is rule
    assert rule.baseline in BASELINES
    calls = {("first", 0): 0, ("last", 0): 1}
    coverage = SimpleNamespace(turns=SimpleNamespace(by_key=calls))
    assert rule(SimpleNamespace(reward=0.5), coverage) == {("first", 0): 0.0, ("last", 0): 0.5}
    assert (
        rule(SimpleNamespace(reward=0.5), SimpleNamespace(turns=SimpleNamespace(by_key={}))) == {}
    )
