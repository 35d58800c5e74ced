"""Follow docs/guides/coding-agents.md with a script in the place of pi."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pages import TRAIN, Follower  # type: ignore[import-not-found]

pytest.importorskip("torch")

from lightspan_testing.stored_episodes import stored_episodes

pytestmark = [pytest.mark.pages, pytest.mark.timeout(900)]

PI = """\
import json, os, pathlib, sys, urllib.request
provider = json.loads(pathlib.Path.home().joinpath(".pi/agent/models.json").read_text())
provider = provider["providers"]["lightspan"]
body = {
    "model": sys.argv[sys.argv.index("--model") + 1],
    "messages": [{"role": "user", "content": sys.argv[-1]}],
    "max_tokens": 8,
}
request = urllib.request.Request(
    provider["baseUrl"] + "/chat/completions",
    json.dumps(body).encode(),
    {
        "Content-Type": "application/json",
        "Authorization": "Bearer " + os.environ[provider["apiKey"]],
    },
)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
if len(text) % 2:
    path = pathlib.Path("calc.py")
    path.write_text(path.read_text().replace("a - b", "a + b"))
pathlib.Path("test_calc.py").write_text("")  # it is restored
"""


def test_the_page(tmp_path: Path) -> None:
    page = Follower(tmp_path)
    page.write(".bin/pi", f"#!{sys.executable}\n{PI}")
    (tmp_path / ".bin/pi").chmod(0o700)
    page.follow("guides/coding-agents.md")
    train = TRAIN.replace("[train]", "[train,programs]").replace(
        "torch", "torch ./packages/programs"
    )
    assert page.installed == [f"pip install {train}"]
    [dry] = [printed for command, printed in page.printed.items() if command.startswith("lightsp")][
        :1
    ]
    assert "AGENTS" in dry
    episodes = stored_episodes(tmp_path / "runs/repair/store.db")
    assert len(episodes) == 8
    solved = [episode for episode in episodes if episode.reward == 1.0]
    for episode in episodes:
        [call] = episode.calls
        assert call.record is not None
        names = [span.name for span in episode.spans if span.name.startswith("command ")]
        assert names == ["command pi", "command verify"]
    assert 0 < len(solved) < 8
