"""Tests of the program and the command by which the web page trains on what it shows."""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import lightspan_ui.export
import lightspan_ui.views as v
from lightspan.cli import main
from lightspan.production.feedback import feedback
from lightspan.schema.records import AttemptRef
from lightspan.stores import open_store
from lightspan_testing.store_suite.base import IMAGE
from lightspan_torch.sft.chat_dataset import load_chats
from packages.ui.tests.recorded import make_production_store, make_run, record
from packages.ui.tests.ui_client import serving


async def export_of(place: str | Path, path: str, **query: Any) -> v.Export:
    async with serving(place) as client:
        return await client.get(f"{path}/export", v.Export, **query)


@pytest.mark.slow
def test_what_was_rated_is_fine_tuned(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = asyncio.run(make_production_store(tmp_path / "app.db", 4))
    for name, reward in (("at-ro-0", 0.9), ("at-ro-1", 0.2), ("at-ro-3", 0.8)):
        feedback(name, reward, store=url)
    query: dict[str, Any] = {"reward_min": 0.5, "agent": "router/*", "service": "support"}
    query["since"] = "2001-01-01"
    export = asyncio.run(export_of(url, "/stores/app", **query))
    assert (export.attempts, export.calls) == (0, 0)  # the recordings are of 1970
    query["since"] = "1970-01-01T00:00:00+00:00"
    export = asyncio.run(export_of(url, "/stores/app", **query))
    assert (export.attempts, export.calls) == (2, 2)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(export.command)[1:]) == 0
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert len(chats) == export.calls
    exec(export.program.replace("MODEL", str(tiny)), {})
    assert (tmp_path / "runs" / "sft" / "tokenizer.json").exists()
    assert "2 calls of" in capsys.readouterr().out
    exec(export.preferences.replace("MODEL", str(tiny)), {})
    assert (tmp_path / "runs" / "preferences" / "tokenizer.json").exists()
    # the attempt that was rated 0.2 too
    assert "2 desirable and 1 undesirable answers for KTO" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_run_sampled_is_fine_tuned(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(make_run(tmp_path / "a run", steps=3))
    place, query = tmp_path / "a run", {"reward_min": 0.5, "agent": "writer"}
    export = asyncio.run(export_of(place, "/runs/a%20run", **query, status="lost"))
    assert (export.attempts, export.calls) == (3, 3)  # the program has no such filter
    assert export.note.endswith("has such a filter: status")
    export = asyncio.run(export_of(place, "/runs/a%20run", **query))
    assert (export.attempts, export.calls) == (3, 3)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(export.command)[1:]) == 0
    assert len((tmp_path / "chats.jsonl").read_text().splitlines()) == export.calls
    exec(export.program.replace("MODEL", str(tiny)), {})
    assert (tmp_path / "runs" / "sft").is_dir()


async def make_image_store(path: Path, *, is_stored: bool) -> str:
    """Make a store with an attempt of text, and one with an image; return its URL.

    Args:
        path: file of the store.
        is_stored: whether the store has the bytes of the image.
    """
    url = f"sqlite:///{path}"
    data = base64.b64encode(IMAGE.data).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:{IMAGE.media_type};base64,{data}"}}
    async with open_store(url) as store:
        await record(store, "ro-1")
        attempt_id = await record(store, "ro-2", service="desk", question=[part])
        if is_stored:
            attempt = await store.attempt(attempt_id)
            await store.add_images(AttemptRef(attempt_id, attempt.epoch), [IMAGE])
    return url


@pytest.mark.parametrize("is_stored", [True, False])
def test_fine_tuning_takes_calls_whose_images_are_stored(
    is_stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = asyncio.run(make_image_store(tmp_path / "app.db", is_stored=is_stored))
    texts = asyncio.run(export_of(url, "/stores/app", service="support"))
    export = asyncio.run(export_of(url, "/stores/app", service="desk"))
    chats = load_chats(url, service="desk").chats
    assert (texts.attempts, texts.calls) == (1, 2)
    assert (export.attempts, export.calls) == ((1, 2) if is_stored else (0, 0))
    assert export.calls == len(chats)
    assert "--images" not in texts.command
    assert ("--images" in export.command) is is_stored
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(export.command)[1:]) == 0
    rows = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert [row["rejection"] is None for row in rows] == [is_stored] * 2
    assert [row["messages"] for row in rows if is_stored] == [chat["messages"] for chat in chats]


def test_a_count_that_ends_early_writes_the_images_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightspan_ui.export, "COUNTING_S", -1.0)
    url = asyncio.run(make_production_store(tmp_path / "app.db", 2))
    export = asyncio.run(export_of(url, "/stores/app"))
    assert (export.attempts, export.note) == (1, "counted in the newest 1 of 2 attempts only")
    assert "--images" in export.command
