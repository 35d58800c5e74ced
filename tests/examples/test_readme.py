"""Run the README's program as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import TRAIN, Follower, blocks, gain_low  # type: ignore[import-not-found]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
README = "../README.md"


def test_the_first_program_learns(tmp_path: Path) -> None:
    [(name, text)] = [(name, text) for _, name, text in blocks(README) if name]
    installs = [
        text for kind, _, text in blocks(README) if kind == "sh" and "pip install '" in text
    ]
    assert installs == [f"pip install {TRAIN} ./packages/langgraph openai\n"]
    follower = Follower(tmp_path)
    follower.write(name, text)
    follower.run(f"python {name}")
    assert gain_low(follower.printed[f"python {name}"]) > 0.3
