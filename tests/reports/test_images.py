"""Test that recorded images are named, written to files and put into exported messages."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import openai
import pytest

import lightspan
from lightspan.cli import main
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan_testing.attempts import read_recorded
from lightspan_testing.scripted import ScriptedServer

ENCODED = "R0lGODlhAgADAIAAAAAAAP///yH5BAAAAAAALAAAAAACAAMAAAIDhB8FADs="
"""An image of 2 × 3 pixels."""
DIGEST = "7eefbfed431937bfc592704d7062f5109e9ba46cc0eb1d91eefb792400d01875"
PART = {"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{ENCODED}"}}
_REFERENCES = "with images, sounds or files, of which references are kept"
REFERENCE = {
    "type": "blob",
    "modality": "image",
    "mime_type": "image/gif",
    "size": 44,
    "sha256": DIGEST,
}


def recorded(tmp_path: Path, **options: Any) -> tuple[str, str, str]:
    """Record a call whose prompt has the image twice; return store, attempt and call."""
    url = f"sqlite:{tmp_path / 'app.db'}"
    content = [{"type": "text", "text": "What is it?"}, PART, PART]
    messages: Any = [{"role": "user", "content": content}]
    with (
        ScriptedServer("a picture") as server,
        openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client,
        record(url, **options),
        lightspan.agent("reader"),
    ):
        client.chat.completions.create(model="m", messages=messages)
    [found] = read_recorded(url)
    [call] = found.calls
    return url, found.attempt.attempt_id, str(call.attributes[c.CALL_ID])


def test_inspect_names_the_images_of_a_call_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "pictures"
    assert main(["inspect", *recorded(tmp_path), "--images", str(folder)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("image")]
    assert lines == ["image 7eefbfed4319  image/gif, 44 bytes, 2 × 3 pixels"]
    written = [(path.name, path.read_bytes()) for path in folder.iterdir()]
    assert written == [("7eefbfed4319.gif", base64.b64decode(ENCODED))]


def test_inspect_tells_that_an_image_is_not_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *recorded(tmp_path, images=False)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("image")]
    assert lines == ["image 7eefbfed4319  image/gif, 44 bytes, not stored"]


def test_images_are_written_of_a_call_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, attempt, _ = recorded(tmp_path)
    assert main(["inspect", url, attempt, "--images", str(tmp_path / "pictures")]) == 1
    assert "--images writes the images of one call" in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()


@pytest.mark.parametrize(
    ("is_stored", "arguments", "part", "rejection"),
    [
        (True, ["--images"], PART, None),
        (True, [], REFERENCE, _REFERENCES),
        (
            False,
            ["--images"],
            REFERENCE,
            _REFERENCES,
        ),
    ],
)
def test_exported_messages(
    tmp_path: Path, is_stored: bool, arguments: list[str], part: Any, rejection: str | None
) -> None:
    url, *_ = recorded(tmp_path, images=is_stored)
    out = tmp_path / "messages.jsonl"
    assert main(["export", url, "messages", "-o", str(out), *arguments]) == 0
    [row] = map(json.loads, out.read_text().splitlines())
    assert row["rejection"] == rejection
    assert row["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part, part]},
        {"role": "assistant", "content": "a picture"},
    ]


def test_images_are_an_option_of_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, *_ = recorded(tmp_path)
    assert main(["export", url, "spans", "--images"]) == 1
    assert "--images applies only to messages, not to spans" in capsys.readouterr().err
