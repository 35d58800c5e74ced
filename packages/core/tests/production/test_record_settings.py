"""Test whether an app is recorded: without settings, sampled, and with invalid settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

import lightspan
from lightspan.capture import context
from lightspan.errors import ConfigError
from lightspan.production.auto_attempts import sampled
from lightspan.production.record import hold, record, release
from lightspan.schema.spans import Span
from lightspan_testing.attempts import read_recorded
from packages.core.tests.production.chat import say


def test_unset_nothing_happens(client: openai.OpenAI, url: str) -> None:
    made = record()
    assert not made.on
    assert (made.settings, made.lost, made.flush()) == (None, 0, True)
    hold("adapter")
    assert context.current_context() is None
    release("adapter")
    with made:
        say(client)
    probe = "import sys, lightspan; lightspan.record(); print('openai' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True, env=os.environ
    )
    assert run.stdout.split() == ["False"]


def test_the_environment_says_it_all(
    client: openai.OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTSPAN_STORE", url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "billing")
    monkeypatch.setenv("LIGHTSPAN_REDACT", f"{__name__}:shout")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    for adapter in ("one", "other"):
        hold(adapter)
    say(client)
    release("one")
    say(client)
    release("other")
    say(client)
    found = read_recorded(url)
    assert [one.rollout.run_id for one in found] == ["billing", "billing"]
    assert found[0].answered == [("HELLO", "ECHO HELLO")]


def shout(span: Span) -> Span:
    return lightspan.map_text(span, str.upper)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIGHTSPAN_STORE", "nonsense:"),
        ("LIGHTSPAN_REDACT", "no_function"),
    ],
)
def test_a_wrong_variable_is_logged_and_the_app_starts(
    name: str,
    value: str,
    client: openai.OpenAI,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("LIGHTSPAN_STORE", url)
    monkeypatch.setenv(name, value)
    hold("adapter")
    assert say(client).choices[0].message.content == "echo hello"
    release("adapter")
    assert value in caplog.text
    assert not Path(url.removeprefix("sqlite:")).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "nonsense:"}, "is not known"),
        ({"store": "memory:"}, "exists in this process only"),
        ({"sample": 2}, "sample=2"),
        ({"redact": "os:no_such"}, "cannot be imported"),
        ({"redact": "os:sep"}, "is not a function"),
    ],
)
def test_wrong_arguments_raise(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(**{"store": url, **options})


def test_one_recording_at_a_time(url: str) -> None:
    with record(url), pytest.raises(ConfigError, match=r"records to .* already"):
        record(url)


def test_an_explicit_recording_goes_before_the_environments(
    client: openai.OpenAI, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"sqlite:{tmp_path / 'other.db'}"
    monkeypatch.setenv("LIGHTSPAN_STORE", url)
    hold("adapter")
    with record(other):
        say(client, "explicit")
    say(client, "environment")
    release("adapter")
    assert [one.answered[0].asked for one in read_recorded(other)] == ["explicit"]
    assert [one.answered[0].asked for one in read_recorded(url)] == ["environment"]


@pytest.mark.parametrize("variable", [None, "0.5"])
def test_sampling_keeps_whole_attempts_by_their_trace(
    client: openai.OpenAI, url: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("LIGHTSPAN_SAMPLE", variable)
    with record(url, sample=None if variable else 0.5):
        ids = []
        for _ in range(40):
            with lightspan.operation("handle"):
                say(client)
                say(client)
                ids.append(lightspan.current_attempt_id())
    found = read_recorded(url)
    assert 5 <= len(found) <= 35  # 1e-6 of all runs would not be
    assert {one.attempt.attempt_id for one in found} == {one for one in ids if one is not None}
    assert all(len(one.calls) == 2 for one in found)
    assert all(sampled(one.spans[0].trace_id, 0.5) for one in found)


def test_sampled_is_opentelemetrys_decision() -> None:
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    for ratio in (0.0, 0.1, 0.5, 1.0):
        sampler = TraceIdRatioBased(ratio)
        for number in (0, 1, 2**63, 2**64 - 1, 2**64, 123 * 2**57, 2**128 - 1, 2**61 - 7):
            theirs = sampler.should_sample(None, number, "x").decision.is_sampled()  # type: ignore[no-untyped-call]
            assert sampled(f"{number:032x}", ratio) is theirs, (ratio, number)
