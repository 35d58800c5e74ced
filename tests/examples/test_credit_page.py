"""docs/credit.md: its program runs, and it names every rule."""

from __future__ import annotations

import re

from pages import DOCS, blocks  # type: ignore[import-not-found]

from lightspan.lightning.advantages import Explanation, spread
from lightspan.lightning.credit import CREDITS
from lightspan.lightning.states import State


def test_its_program_makes_the_rules() -> None:
    [(language, _, text)] = blocks("credit.md")
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
    table = (DOCS / "credit.md").read_text().partition("| `credit=` |")[2].partition("\n\n")[0]
    assert re.findall(r'`"(\w+)"`', table) == list(CREDITS)


def test_it_shows_what_inspect_says() -> None:
    """Of returns 1, 1, 0, 0, and a call that is compared with its turn."""
    why = Explanation(
        rollout_id="ro",
        group_id="g1",
        agent_path="writer",
        estimator="grpo",
        unit="rollout",
        credit_rule="discounted(1)",
        weighting="rollout",
        credit=0.75,
        shaping=-0.25,
        value=1.0,
        baseline=0.5,
        scale=spread([1.0, 1.0, 0.0, 0.0]) * 4 / 3,
        size=4,
        zero_reason=None,
        turn=1,
        others=3,
        against="in its turn",
        tokens=4,
        token_weight=1 / 32,
        share=0.5,
    )
    assert str(why) in " ".join((DOCS / "credit.md").read_text().split())
