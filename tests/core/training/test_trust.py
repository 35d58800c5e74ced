"""The mark of a user's own training: a key in the user's state directory makes it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lightspan.errors import ConfigError
from lightspan.training.trust import is_signed, sign, state_folder

DOCUMENT = {"routing": {"default": {"endpoint": "https://one.test"}}, "policies": {}}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of a user who has not trained yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "lightspan"


def test_what_was_signed_is_known_and_nothing_else(state: Path) -> None:
    mark = sign(DOCUMENT)
    assert is_signed(DOCUMENT, mark)
    assert is_signed(dict(reversed(DOCUMENT.items())), sign(DOCUMENT))
    assert not is_signed({**DOCUMENT, "policies": {"p": {}}}, mark)
    for forged in (None, "", 3, mark[:-1], mark.upper(), "é", ["x"]):
        assert not is_signed(DOCUMENT, forged)
    (state / "run-key").unlink()
    assert not is_signed(DOCUMENT, mark)


def test_the_key_is_its_users_alone(state: Path) -> None:
    sign(DOCUMENT)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert [path.name for path in state.iterdir()] == ["run-key"]
    assert stat.S_IMODE((state / "run-key").stat().st_mode) == 0o600


def test_looking_makes_no_key(state: Path) -> None:
    assert not is_signed(DOCUMENT, "00")
    assert not state.exists()


def test_a_key_that_others_may_know_proves_nothing(state: Path) -> None:
    mark = sign(DOCUMENT)
    (state / "run-key").chmod(0o644)
    assert not is_signed(DOCUMENT, mark)
    with pytest.raises(ConfigError, match=r"run-key is not yours alone .*mode 0644\): delete it"):
        sign(DOCUMENT)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to somebody else")
def test_a_key_of_somebody_else_proves_nothing(state: Path) -> None:
    mark = sign(DOCUMENT)
    os.chown(state / "run-key", 12345, -1)
    assert not is_signed(DOCUMENT, mark)
    with pytest.raises(ConfigError, match=r"not yours alone \(owner 12345"):
        sign(DOCUMENT)


def test_a_key_that_was_cut_off_proves_nothing(state: Path) -> None:
    sign(DOCUMENT)
    (state / "run-key").write_bytes(b"")
    with pytest.raises(ConfigError, match="run-key is damaged: delete it"):
        sign(DOCUMENT)
    assert not is_signed(DOCUMENT, "00")


def test_where_no_key_can_be_kept_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"no key can be kept in your state directory: .*file"):
        sign(DOCUMENT)
    assert not is_signed(DOCUMENT, "00")


def test_a_relative_state_directory_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", "/home-of-nobody")
    assert Path("/home-of-nobody") in state_folder().parents


SIGNING = """
import sys
from lightspan.training.trust import sign
print("ready", flush=True)
sys.stdin.read()
print(sign({"a": 1}))
"""


def test_trainings_that_end_at_once_share_a_key() -> None:
    """Each finds no key, and makes one."""
    command = [sys.executable, "-c", SIGNING]
    pipe = subprocess.PIPE
    signers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for signer in signers:
        assert signer.stdout is not None
        assert signer.stdout.readline() == "ready\n"
    for signer in signers:
        assert signer.stdin is not None
        signer.stdin.close()
    marks = set()
    for signer in signers:
        assert signer.stdout is not None
        marks.add(signer.stdout.read().strip())
        signer.stdout.close()
        assert signer.wait() == 0
    assert len(marks) == 1
    assert is_signed({"a": 1}, marks.pop())
