"""What loading and saving weights shows."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

BARE = "and without us:"
SCRIPT = f"""
import sys

import torch
from transformers import AutoModelForCausalLM
from lightspan_torch.learner.policy_model import TrainedModel
from lightspan_testing.tiny import tiny_model
folder = tiny_model(sys.argv[1], seed=0)
model = TrainedModel(str(folder), lora=None, device="cpu", dtype=torch.float32, seed=0)
model.export(folder.parent / "exported")
print({BARE!r}, file=sys.stderr)
AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder.parent / "again")
"""


def on_a_terminal(*command: str | Path) -> str:
    """What a program shows where its errors go to a terminal."""
    ours, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    process = subprocess.Popen(command, stderr=terminal, stdin=terminal)
    os.close(terminal)
    shown = b""
    try:
        while read := os.read(ours, 65536):
            shown += read
    except OSError:  # how Linux says that nobody holds the other end any more
        pass
    os.close(ours)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode()


@pytest.mark.slow
def test_no_bar_of_a_librarys_is_shown_on_a_terminal(tmp_path: Path) -> None:
    ours, _, bare = on_a_terminal(sys.executable, "-c", SCRIPT, tmp_path / "model").partition(BARE)
    assert ours == ""
    assert "Loading weights: 100%" in bare  # the bars are those that would be seen
    assert "Writing model shards: 100%" in bare
