"""Follow the pages on prompts in one folder: write every file and run every command.

The guides import the files of the tutorial.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from pages import Follower, blocks  # type: ignore[import-not-found]

from lightspan_testing.scripted import Request, ScriptedServer
from lightspan_testing.tiny import tiny_model

pytestmark = [pytest.mark.pages, pytest.mark.timeout(400)]

PAGES = ("tutorials/prompts.md", "guides/prompts.md", "guides/learned-prompts.md")
RULES = "bill: accounts. password: support. parcel: shipping. Answer with the desk alone."


def says(request: Request) -> str:
    """Return the answer of the app's model, which follows its prompt, or of the reflection
    model.
    """
    text = "\n".join(message["content"] for message in request.messages)
    if 'called "router"' in text and "You route mails" in text:
        old = text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
        return f"<prompt>\n{RULES} {old}\n</prompt>"
    if request.body["model"] == "gpt-5-mini":
        return f"<prompt>\n{RULES}\n{{mail}}\n</prompt>"
    known = dict(rule.split(": ") for rule in RULES.split(". ")[:3]) if RULES in text else {}
    return next(
        (desk for what, desk in known.items() if f" {what}" in text[len(RULES) :]), "which?"
    )


def untitled(page: str) -> list[str]:
    """Return the Python blocks of a page that no file has."""
    return [text for kind, name, text in blocks(page) if kind == "python" and not name]


SMALLER = {
    "Qwen/Qwen2.5-0.5B-Instruct": "tiny",
    "max_rollouts=400": "max_rollouts=40",
    "group_size=8": "group_size=2",
    "max_rollouts=2_000": "max_rollouts=56",
}
"""Replacements that make the page's training of weights shorter."""


def test_the_block_on_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    [text] = untitled("guides/prompts.md")
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["algorithm"].max_cost == 2.0


def test_the_pages(tmp_path: Path) -> None:
    tiny_model(tmp_path / "tiny", seed=0)
    with ScriptedServer(says) as server:
        replace = {"https://api.openai.com/v1": server.url, **SMALLER}
        environment = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "key"}
        followed = Follower(tmp_path, replace, **environment)
        for page in PAGES:
            followed.follow(page)
        [count] = untitled("guides/learned-prompts.md")
        followed.write("count.py", count)
        assert followed.shell("python count.py").stdout == "{'router': 0} {'router': {}}\n"
    learned, inspected, by_agent, beam, both, answered = followed.printed.values()
    assert "runs/both/model\n" in both
    assert "held-out reward: 0.00 -> " in both  # a random model knows no desk
    assert "held-out reward: 0.00 -> 1.00 (" in beam
    assert answered == "accounts\n"
    told = "You route mails. Today is {date_1}. Say which desk it is for."
    assert by_agent.endswith(f"-{told}\n+{RULES} {told}\n")
    assert "-Which desk is this for? {mail}\n+bill: accounts." in learned
    assert "held-out reward: 0.00 -> 1.00 (" in learned
    assert inspected.startswith("runs/desk: GEPA\napp ")
    assert (
        "candidate 1, of 0: selection 1.000 (1 1 1 1 1 1; again 1 1 1 1 1 1), chosen" in inspected
    )
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer key"}
