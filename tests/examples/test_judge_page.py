"""Follow docs/guides/judge.md: write every file and run every command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pages import Follower  # type: ignore[import-not-found]

from lightspan_testing.scripted import Request, ScriptedServer

pytestmark = pytest.mark.pages


def says(request: Request) -> str:
    """Return the answer of the app's model, of the reflection model, or of the judge."""
    text = request.last_text
    if request.body["model"] == "gpt-5-nano":
        return "accounts" if "kindly" in text else "No."
    if "You judge" not in text:
        return "<prompt>\nAnswer kindly. {mail}\n</prompt>"
    shown = re.findall(r"\[\[rollout (\w)[^\]]*\]\]\n(.*?)\n\[\[end", text, re.DOTALL)
    return json.dumps({letter: 9 if "answer: accounts" in said else 2 for letter, said in shown})


def test_the_page(tmp_path: Path) -> None:
    with ScriptedServer(says) as server:
        environment = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "key"}
        replace = {"https://api.openai.com/v1": server.url}
        followed = Follower(tmp_path, replace, **environment).follow("guides/judge.md")
    _, exact, kind, short = followed.printed.values()
    learned = json.loads((tmp_path / "runs/kind/prompts.json").read_bytes())
    assert learned["router"]["after"]["template"] == "Answer kindly. {mail}"
    assert exact.startswith("runs/kind: the reward exact in place of judge\n")
    assert " would have another reward, the most changed:\n" in exact
    assert json.loads(kind)["changes"] == []  # the same judge says the same
    assert json.loads(kind)["spent"] == {"calls": 0, "tokens": 0}
    assert short.endswith("stored in the run as the reward shortest\n")
    assert (tmp_path / "runs/kind/rewards/shortest.jsonl").exists()
