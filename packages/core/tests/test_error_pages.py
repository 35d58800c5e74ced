"""Test the note by which an error names its place on the page of troubleshooting."""

from pathlib import Path

import pytest

from lightspan import errors
from lightspan.errors import ConfigError, page_of

MESSAGE = "the app 'app:run' is defined in a notebook or an interactive session, which is bad"
PLACE = f"{errors.PAGE}#the-app-is-defined-in-a-notebook-or-an-interactive-session"


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_headings", errors._headings.__wrapped__)


def test_an_error_names_its_place() -> None:
    assert ConfigError(MESSAGE).__notes__ == [f"see {PLACE}"]
    assert page_of(MESSAGE.replace(" ", "\n ")) == PLACE
    assert not hasattr(ConfigError("a message of no heading"), "__notes__")
    assert not hasattr(ConfigError(), "__notes__")


@pytest.mark.parametrize("content", [None, b"no tab\n", b"\xff\t\xff\n"])
def test_an_error_is_raised_without_its_note_if_the_table_cannot_be_read(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "troubleshooting.tsv"
    if content is not None:
        table.write_bytes(content)
    monkeypatch.setattr(errors, "_TABLE", table)
    assert not hasattr(ConfigError(MESSAGE), "__notes__")
    assert str(ConfigError(MESSAGE)) == MESSAGE


def test_the_table_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert page_of(MESSAGE) == PLACE
    monkeypatch.setattr(errors, "_TABLE", tmp_path / "gone")
    assert page_of(MESSAGE) == PLACE
