"""Follow docs/guides/freeze.md: write every file and run every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages import Follower, blocks  # type: ignore[import-not-found]

pytest.importorskip("torch")

from lightspan.schema.routing import make_routing
from lightspan_testing.scripted import ScriptedServer

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]

PAGE = "guides/freeze.md"
ENDPOINT = "https://api.openai.com/v1"
KEY = "planner-secret"


class Answered(Follower):  # type: ignore[misc]
    """Follow a page whose commands, too, name the scripted endpoint."""

    def run(self, command: str) -> None:
        super().run(command.replace(ENDPOINT, self._replace[ENDPOINT]))


def test_the_page(tmp_path: Path) -> None:
    with ScriptedServer("a plan") as server:
        replace = {ENDPOINT: server.url}
        environment = {"OPENAI_API_KEY": "the apps", "PLANNER_KEY": KEY}
        follower = Answered(tmp_path, replace, **environment)
        try:
            follower.follow(PAGE)
            refused = follower.shell("lightspan serve runs/brief")
            inspected = follower.shell("lightspan inspect runs/brief")
        finally:
            follower.stop()
        sent = {(each.body["model"], each.headers["authorization"]) for each in server.requests}
        assert sent == {("gpt-5-mini", f"Bearer {KEY}")}
        asked = len(server.requests)
    assert asked == 16 + 32  # of the dry run and of the training
    printed = follower.printed["python train.py"] + inspected.stdout + refused.stderr
    shown = [text for kind, _, text in blocks(PAGE) if kind == "text"]
    assert len(shown) == 4
    for line in "".join(shown).splitlines():
        if "needs the key" in line or "api.openai.com (planner)" in line or "/rollout  in" in line:
            continue  # without the key; columns as wide as the address
        line = line.replace(ENDPOINT, server.url)
        line = line.replace("api.openai.com", server.url.split("/")[2])
        assert line in printed
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()


def test_the_mapping() -> None:
    [text] = [text for kind, name, text in blocks(PAGE) if kind == "python" and not name]
    names: dict[str, Any] = {}
    exec(text, names)
    routing = make_routing({"writer": "policy"}, names["frozen"], "policy")
    paths = ("planner", "team/checker", "checker", "search_web", "other", "writer")
    routes = [routing.target(path).route for path in paths]
    assert routes == ["endpoint", "base", "app", "app", "app", "policy"]
