"""Test that recorded images are named, written to files and put into exported messages."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import openai
import pytest

import lightspan
from lightspan import LLM, LightningRL, Trainer
from lightspan.cli import main
from lightspan.production.feedback import feedback
from lightspan.production.record import record
from lightspan.progress import SilentReporter
from lightspan.schema import semconv as c
from lightspan_testing.attempts import read_recorded
from lightspan_testing.byte_tokenizer import data_url
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.tiny_vision import picture, tiny_vision_model
from lightspan_tools.dry_run.report_model import Spread
from lightspan_torch.sft.chat_dataset import load_chats

ENCODED = "R0lGODlhAgADAIAAAAAAAP///yH5BAAAAAAALAAAAAACAAMAAAIDhB8FADs="
"""An image of 2 × 3 pixels."""
DIGEST = "7eefbfed431937bfc592704d7062f5109e9ba46cc0eb1d91eefb792400d01875"
PART: Any = {"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{ENCODED}"}}
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--images"], "1 messages of 1 rollouts to good.jsonl"),
        (
            [],
            f"0 messages of 1 rollouts to good.jsonl; left out: 1 calls {_REFERENCES}; 1 call "
            "with images: --images puts in those that the store has, as SFT(from_store=) does",
        ),
    ],
)
def test_an_export_by_reward_says_what_images_would_add(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    url, attempt, _ = recorded(tmp_path)
    feedback(attempt, 1.0, store=url)
    assert len(load_chats(url, min_reward=0.5).chats) == 1
    monkeypatch.chdir(tmp_path)
    export = ["export", url, "messages", "--min-reward", "0.5", "-o", "good.jsonl", *arguments]
    assert main(export) == 0
    assert capsys.readouterr().err.splitlines() == [said]


@pytest.mark.parametrize("is_stored", [True, False])
def test_tasks_have_the_images_of_the_first_messages(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    is_stored: bool,
) -> None:
    url, out = f"sqlite:{tmp_path / 'app.db'}", tmp_path / "tasks.jsonl"
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What?"}, PART]}]
    with (
        ScriptedServer("a picture") as server,
        openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client,
        record(url, images=is_stored),
    ):
        client.chat.completions.create(model="m", messages=messages)
    [found] = read_recorded(url)
    part = PART if is_stored else REFERENCE
    task = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]}
    assert lightspan.tasks_from_store(url) == [task]
    warning = (
        "lightspan: 1 tasks have references in place of images, sounds or files, which the store "
        f"does not have; attempts: {found.attempt.attempt_id}"
    )
    assert caplog.messages == ([] if is_stored else [warning])
    capsys.readouterr()
    assert main(["export", url, "tasks", "-o", str(out)]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == [task]
    left = "; left out: 1 images, sounds or files of tasks, of which references are kept"
    said = f"1 tasks of 1 rollouts to {out}{'' if is_stored else left}\n"
    assert capsys.readouterr().err == said


def test_images_are_an_option_of_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, *_ = recorded(tmp_path)
    assert main(["export", url, "spans", "--images"]) == 1
    assert "--images applies only to messages, not to spans" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_counts_images_and_their_tokens(dry_apps: Any, tmp_path: Path) -> None:
    """Check an image of 84 by 56 pixels as 6 tokens, and 56 by 56 as 4.

    The app shows another picture in its second call, so that the conversation breaks.
    """
    folder = tiny_vision_model(tmp_path / "model", seed=1)
    pictures = [picture("red"), picture("blue"), picture("green", (56, 56))]
    algorithm = LightningRL(folder, optimize="writer", group_size=2)
    trainer = Trainer(algorithm, steps=1, reporter=SilentReporter())
    red, blue, small = map(data_url, pictures)
    tasks = [{"pictures": [red, blue]}, {"pictures": [red, small]}]
    report = trainer.dev(dry_apps.watches, [*tasks, *tasks], count=2, replay=False)
    [writer] = report.agents
    assert (writer.calls, writer.trained, writer.image_calls, writer.images) == (8, 8, 8, 3)
    assert writer.image_tokens == Spread(mean=5.5, max=6)
    assert (
        "  writer: 8 of 8 calls have images: 3 different images, 6 / 6 prompt tokens each "
        "(mean / largest)"
    ) in report.text().splitlines()
    assert report.rows is not None
    assert (report.rows.new, report.rows.causes) == (4, {"another image": 4})
    hidden, dtype = 64, 4
    features = (6 + 6 + 4) * hidden * dtype
    assert report.memory is not None
    # four tasks have twice the images of two
    expected = 2 * (features + sum(map(len, pictures)))
    assert report.memory.parts["features of images"] == expected
    assert not [text for text in report.warnings if "fit would stop" in text]


def test_a_dry_run_counts_images_for_endpoints(tiny: Path, dry_apps: Any) -> None:
    """Check calls that are not trained, whose tokens are not known."""
    with ScriptedServer("a picture") as server:
        frozen = {"writer": LLM(base_url=server.url, model="m")}
        algorithm = LightningRL(tiny, optimize="reader", frozen=frozen, group_size=2)
        trainer = Trainer(algorithm, steps=1, reporter=SilentReporter())
        task = {"pictures": [PART["image_url"]["url"]] * 2}
        report = trainer.dev(dry_apps.watches, [task], replay=False)
    [writer] = [agent for agent in report.agents if agent.path == "writer"]
    assert (writer.image_calls, writer.images, writer.image_tokens) == (4, 1, None)
    assert "  writer: 4 of 4 calls have images: 1 different image" in report.text().splitlines()
    assert report.memory is not None
    assert "features of images" not in report.memory.parts
