"""Test `lightspan import`: from a file of traces to the commands that read the store."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import lightspan
from lightspan.algorithms.recorded_attempts import Query, read_attempts
from lightspan.cli import main
from lightspan.progress import SilentReporter
from lightspan.schema import semconv as c
from lightspan.stores import open_store
from lightspan.stores.aio import run_sync
from packages.otel.tests.trace_files import ASKED, LANGFUSE, OTLP, PHOENIX, otlp_line


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("LIGHTSPAN_STORE", raising=False)
    return f"sqlite:{tmp_path / 'production.db'}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(otlp_line(span) for span in OTLP))
    return path


def attempt_and_call(url: str) -> tuple[str, str]:
    async def read() -> tuple[str, str]:
        async with open_store(url) as store:
            [found] = [each async for each in read_attempts(store, Query())]
            spans = (await store.spans([found.attempt.attempt_id]))[found.attempt.attempt_id]
            [call_id] = [
                span.attributes[c.CALL_ID] for span in spans if c.CALL_ID in span.attributes
            ]
            return found.attempt.attempt_id, str(call_id)

    return run_sync(read())


def test_a_file_from_import_to_training(
    url: str, file: Path, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(file), "--store", url]) == 0
    assert capsys.readouterr().out == f"{file}: 4 spans of 1 attempt in {url}\n"
    attempt_id, call_id = attempt_and_call(url)

    assert main(["inspect", url, attempt_id]) == 0
    shown = capsys.readouterr().out
    assert f"{call_id}/0 writer: ok" in shown
    assert "its spans were sent by OpenTelemetry: the tokens of its calls are unknown" in shown
    assert main(["feedback", attempt_id, "0.9", "--store", url]) == 0

    chats = tmp_path / "chats.jsonl"
    assert main(["export", url, "messages", "-o", str(chats), "--min-reward", "0.5"]) == 0
    [line] = chats.read_text().splitlines()
    assert json.loads(line)["messages"] == [*ASKED, {"role": "assistant", "content": "Here."}]

    sft = lightspan.SFT(tiny, from_store=url, min_reward=0.5, service="desk", agents="writer")
    result = sft.fit(folder=tmp_path / "model", reporter=SilentReporter())
    assert (result.demonstrations, result.left_out) == (1, {})

    assert lightspan.tasks_from_store(url, min_reward=0.5) == [{"question": "Where?"}]


def test_twice_adds_nothing_twice(
    url: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTSPAN_STORE", url)
    assert main(["import", str(file), str(file)]) == 0
    assert main(["import", str(file)]) == 0
    line = f"{file}: 4 spans of 1 attempt in {url}"
    assert capsys.readouterr().out.splitlines() == [
        line,
        *[f"{line}; 1 of 1 attempt had been there before"] * 2,
    ]
    attempt_and_call(url)  # there is one of each


def test_what_cannot_be_kept_is_told(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    langfuse, phoenix = tmp_path / "langfuse.json", tmp_path / "phoenix.jsonl"
    langfuse.write_text(json.dumps(LANGFUSE))
    lines = ["{" * 22, *map(json.dumps, PHOENIX[1:]), *["[1]"] * 21]
    phoenix.write_text("\n".join(lines))
    options = ["--store", url, "--service", "desk"]
    assert main(["import", str(langfuse), str(phoenix), *options]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"{langfuse}: 4 spans of 1 attempt in {url}; 1 score left out: add them by "
        "lightspan feedback",
        f"{phoenix}: 3 spans of 1 attempt in {url}; 1 of 1 attempt had been there before",
    ]
    errors = said.err.splitlines()
    assert errors[0].startswith(f"{phoenix}: line 1: no JSON: ")
    assert errors[19].startswith(f"{phoenix}: line 23: it has no spans")
    assert errors[20:] == [
        f"{phoenix}: and 2 more errors",
        "lightspan: 22 items of the files could not be imported (see above); 7 spans are stored",
    ]


def test_the_standard_input_is_a_file_too(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(otlp_line(*OTLP).encode())))
    assert main(["import", "-", "--store", url]) == 0
    said = capsys.readouterr()
    assert said.out == f"standard input: 4 spans of 1 attempt in {url}\n"
    assert said.err == "reading standard input to its end\n"


@pytest.mark.usefixtures("url")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "missing.json", "--store", "sqlite:a.db"], "there is no file missing.json"),
        (["import", "{}", "--store", "sqlite:a.db"], "is a folder: name the files in it"),
        (["import", __file__], "import needs a store: give --store, or set LIGHTSPAN_STORE"),
        (["import", __file__, "--store", "sqlite:{}/a.db"], "test_import.py is neither JSON"),
    ],
)
def test_what_cannot_be_done(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([each.format(tmp_path) for each in arguments]) == 1
    assert message in capsys.readouterr().err
