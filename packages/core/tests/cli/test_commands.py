"""Test the command `lightspan` without the packages of some subcommands."""

from __future__ import annotations

import pytest

from lightspan.cli import commands, main
from lightspan.errors import how_to_install


@pytest.mark.parametrize(
    ("command", "extra"),
    [("dev", "train"), ("inspect", "tools"), ("serve", "http"), ("import", "otel")],
)
def test_a_command_that_is_not_installed(
    command: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "installed_plugins", lambda kind: {})
    assert main([command, "run"]) == 1
    assert capsys.readouterr().err == (
        f"lightspan: the command {command!r} is not installed: {how_to_install(extra)}\n"
    )


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trian"])
    assert "invalid choice: 'trian'" in capsys.readouterr().err
