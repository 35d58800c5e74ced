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
from lightspan.errors import ConfigError, NotFoundError
from lightspan.production.auto_attempts import sampled
from lightspan.production.record import hold, record, release
from lightspan.schema.spans import Span, SpanKind
from lightspan_testing.attempts import read_recorded
from lightspan_testing.scripted import ScriptedServer
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
        ("LIGHTSPAN_REDACT", "no_module:redact"),
        ("LIGHTSPAN_REDACT", "asyncio:sleep"),
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
        ({"redact": "os:no_such"}, r"cannot be imported \(AttributeError: .*no_such"),
        ({"redact": "no_such:redact"}, r"\(ModuleNotFoundError: No module named 'no_such'\)"),
        ({"redact": "asyncio:sleep"}, "is asynchronous"),
        ({"redact": "os:sep"}, "is not a function"),
    ],
)
def test_wrong_arguments_raise(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(**{"store": url, **options})


def test_a_wrong_hook_of_the_environment_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTSPAN_REDACT", "no_such:redact")
    with pytest.raises(ConfigError, match="No module named 'no_such'"):
        record(url)
    assert context.current_context() is None


APP = """
import lightspan, openai, os, sys
client = openai.OpenAI(base_url=sys.argv[1], api_key="k")
if "hold" not in os.environ:
    lightspan.record()
def redact(span):
    return lightspan.map_text(span, str.upper)
"""


@pytest.mark.parametrize("start", ["app", "site"])
def test_a_hook_in_a_module_that_cannot_be_imported_yet(
    server: ScriptedServer, url: str, tmp_path: Path, start: str
) -> None:
    """Check a hook in the app's own module, and one whose folder is not known at Python's start.

    `opentelemetry-instrument` enables the adapters while Python starts.
    """
    environment = {**os.environ, "LIGHTSPAN_STORE": url, "LIGHTSPAN_REDACT": "app:redact"}
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv" / "app.py").write_text(APP)
    call = (
        "app.client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'a'}])"
    )
    (tmp_path / "srv" / "main.py").write_text(f"import app\n{call}\n")
    if start == "site":
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            "from lightspan.production.record import hold\nhold('adapter')\n"
        )
        path = os.pathsep.join([str(folder), *filter(None, sys.path)])
        environment |= {"PYTHONPATH": path, "hold": "1"}
    run = subprocess.run(
        [sys.executable, str(tmp_path / "srv" / "main.py"), server.url],
        env={key: value for key, value in environment.items() if key != "PYTHONSAFEPATH"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stderr == ""
    [found] = read_recorded(url)
    assert found.answered == [("A", "ECHO A")]


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


def test_feedback_goes_to_the_store_that_this_process_records_to(
    client: openai.OpenAI, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with record(url):
        with lightspan.operation("handle"):
            attempt_id = lightspan.current_attempt_id()
            say(client)
        assert attempt_id is not None
        assert lightspan.feedback(attempt_id, 1.0).attempt_id == attempt_id
        monkeypatch.setenv("LIGHTSPAN_STORE", f"sqlite:{tmp_path / 'other.db'}")
        assert lightspan.feedback(attempt_id, 0.5).attempt_id == attempt_id
    with pytest.raises(NotFoundError, match=r"there is no store .*other\.db"):
        lightspan.feedback(attempt_id, 1.0)
    [found] = read_recorded(url)
    assert [span.kind for span in found.spans].count(SpanKind.REWARD) == 2


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
