"""Test the progress that is printed while something runs."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from lightspan import progress
from lightspan.progress import PlainReporter, default_reporter, describe, escape_control
from lightspan_tools.notebook import NotebookReporter
from lightspan_tools.terminal import TerminalReporter


def test_values_are_short() -> None:
    values: dict[str, float | str] = {"reward": 0.61234, "tokens_per_s": 1810.4, "failed": 2.0}
    values["phase"] = "train"
    assert describe(values) == "reward 0.612  tokens/s 1810  failed 2  phase train"
    assert describe({"loss": float("nan")}) == "loss nan"


ESCAPES = "\x1b[2J\x1b]0;title\x07"
WRITTEN_OUT = r"\x1b[2J\x1b]0;title\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a{ESCAPES}b", f"a{WRITTEN_OUT}b"),
        ("tab\t, line\n, line\r\n, back\r", "tab\t, line\n, line\n, back\\r"),
        ("\x00\x08\x7f", r"\x00\x08\x7f"),
        ("\x9b2J\x9d0;t\x9c", r"\x9b2J\x9d0;t\x9c"),
        ("user\u202etxt.exe\u2066", r"user\u202etxt.exe\u2066"),
        ("naïve, 日本語, 👩\u200d🔬, a\u00a0b", "naïve, 日本語, 👩\u200d🔬, a\u00a0b"),
    ],
)
def test_what_would_command_a_terminal_is_written_out(text: str, shown: str) -> None:
    assert escape_control(text) == shown
    assert escape_control(shown) == shown


def test_no_reporter_sends_commands_to_the_terminal() -> None:
    plain, screen = io.StringIO(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200, color_system=None)
    for reporter in (PlainReporter(plain, interval_s=0.0), TerminalReporter(console)):
        reporter.start(f"title{ESCAPES}", 2)
        reporter.advance(1, name=f"value{ESCAPES}")
        reporter.line(f"line{ESCAPES}")
        reporter.finish(f"end{ESCAPES}")
    for stream in (plain, screen):
        said = stream.getvalue()
        assert "\x1b]0;" not in said  # bars move the cursor by other sequences
        assert "\x07" not in said
        for word in ("title", "value", "line", "end"):
            assert f"{word}{WRITTEN_OUT}" in said


def test_plain_lines_show_progress_values_and_time_left() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream, interval_s=0.0)
    reporter.start("step 3/9", 4)
    reporter.advance(2, reward=0.5, tokens_per_s=100.0)
    reporter.line("a note")
    reporter.finish("step 3/9  reward 0.500")
    reporter.advance(1)
    first, *rest = stream.getvalue().splitlines()
    assert first == "step 3/9 2/4  reward 0.5  tokens/s 100  0 s left"
    assert rest == ["a note", "step 3/9  reward 0.500"]


def test_a_terminal_shows_plain_lines_where_no_plugin_shows_bars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(progress, "installed_plugins", lambda kind: {})
    assert isinstance(default_reporter(), PlainReporter)


def test_terminal_shows_a_bar_with_values_and_keeps_lines() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    reporter = TerminalReporter(console)
    reporter.start("step 1/2", 8)
    reporter.advance(4, reward=0.25)
    reporter.start("step 2/2", 8)
    reporter.advance(8, reward=0.5)
    reporter.finish("done [n=8]")
    reporter.finish()
    shown = stream.getvalue()
    assert "step 1/2" in shown
    assert "8/8" in shown
    assert "reward 0.5" in shown
    assert shown.rstrip().endswith("done [n=8]")


def test_a_notebook_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # a kernel has imported it
    assert isinstance(default_reporter(), NotebookReporter)
