"""Test docs/explain/credit.md: its program runs, and it names every rule."""

from __future__ import annotations

import re

from pages import DOCS, blocks  # type: ignore[import-not-found]

from lightspan.lightning.credit import CREDITS
from lightspan.lightning.states import State


def test_its_program_makes_the_rules() -> None:
    [(language, _, text)] = blocks("explain/credit.md")
    assert language == "python"
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


def test_it_names_every_rule() -> None:
    table = (
        (DOCS / "explain/credit.md").read_text().partition("| `credit=` |")[2].partition("\n\n")[0]
    )
    assert re.findall(r'`"(\w+)"`', table) == list(CREDITS)
