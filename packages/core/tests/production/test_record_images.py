"""Test that images of calls are stored in production, and that this can be switched off."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import openai
import pytest

import lightspan
from lightspan.errors import ConfigError
from lightspan.production.record import record
from lightspan.schema.images import Image
from lightspan.schema.spans import Span
from lightspan.stores import open_store
from lightspan_testing.attempts import read_recorded

PICTURE = Image.of(b"\x89PNG a picture", "image/png")
SECOND = Image.of(b"GIF8 another one", "image/gif")


def part_of(image: Image) -> dict[str, Any]:
    data = base64.b64encode(image.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{image.media_type};base64,{data}"}}


def show(client: openai.OpenAI, *images: Image) -> None:
    parts = [{"type": "text", "text": "look"}, *map(part_of, images)]
    messages: Any = [{"role": "user", "content": parts}]
    client.chat.completions.create(model="m", messages=messages)


def stored(url: str) -> dict[str, Image]:
    async def read() -> dict[str, Image]:
        async with open_store(url) as store:
            return await store.images([PICTURE.digest, SECOND.digest])

    return asyncio.run(read())


def same(span: Span) -> Span:
    return span


def test_images_are_stored_beside_the_spans(client: openai.OpenAI, url: str) -> None:
    with record(url):
        with lightspan.operation("handle"):
            show(client, PICTURE, SECOND)
            show(client, PICTURE)
        show(client, PICTURE)
    assert stored(url) == {PICTURE.digest: PICTURE, SECOND.digest: SECOND}
    found = read_recorded(url)
    assert [len(attempt.spans) for attempt in found] == [4, 1]
    assert PICTURE.digest in repr(found[1].spans)
    assert [attempt.attempt.capture_errors for attempt in found] == [[], []]


@pytest.mark.parametrize(
    ("variable", "options", "is_stored"),
    [
        (None, {}, True),
        ("0", {}, False),
        ("1", {}, True),
        (None, {"images": False}, False),
        ("0", {"images": True}, True),
        ("1", {"images": False}, False),
        (None, {"redact": same}, False),  # a hook cannot hide a part of an image
        ("1", {"redact": same}, True),
        (None, {"redact": same, "images": True}, True),
        (None, {"redact": lightspan.without_content, "images": True}, False),
    ],
)
def test_the_switch(
    client: openai.OpenAI,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    options: dict[str, Any],
    is_stored: bool,
) -> None:
    if variable is not None:
        monkeypatch.setenv("LIGHTSPAN_IMAGES", variable)
    with record(url, **options):
        show(client, PICTURE)
    assert stored(url) == ({PICTURE.digest: PICTURE} if is_stored else {})
    assert len(read_recorded(url)) == 1


def test_a_wrong_switch(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTSPAN_IMAGES", "yes")
    with pytest.raises(ConfigError, match="LIGHTSPAN_IMAGES='yes': give 1 to store images, or 0"):
        record(url)


def test_an_attempt_that_is_not_sampled(client: openai.OpenAI, url: str) -> None:
    with record(url, sample=0.0):
        show(client, PICTURE)
    assert read_recorded(url) == []
    assert stored(url) == {}
