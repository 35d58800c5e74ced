"""Test images of recorded messages: references in the API, and their bytes."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

import lightspan_ui.views as v
from lightspan.schema.images import Image
from lightspan.schema.records import AttemptRef
from lightspan.stores import open_store
from lightspan_testing.store_suite.base import IMAGE
from lightspan_ui.server import PREFIX
from packages.ui.tests.recorded import call_span, record
from packages.ui.tests.ui_client import serving

SVG = Image.of(
    b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", "image/svg+xml"
)
LIE = Image.of(b"<!doctype html><script>alert(2)</script>", "image/png")


def part(image: Image) -> dict[str, object]:
    data = base64.b64encode(image.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{image.media_type};base64,{data}"}}


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """Return the URL of a store with an attempt with images."""
    url = f"sqlite:///{tmp_path / 'app.db'}"
    async with open_store(url) as store:
        attempt_id = await record(store, "ro-1")
        attempt = await store.attempt(attempt_id)
        await store.add_images(AttemptRef(attempt_id, attempt.epoch), [IMAGE, SVG, LIE])
        content = [{"type": "text", "text": "Which bar of "}, part(IMAGE), part(SVG)]
        content.append({"type": "text", "text": " is highest?"})
        span = call_span(attempt, 6, "router/reader", content, "The red one.")
        await store.add_spans(AttemptRef(attempt_id, attempt.epoch), [span])
    return url


async def test_a_message_names_its_images_where_its_text_has_them(url: str) -> None:
    async with serving(url) as client:
        detail = await client.get("/stores/app/rollouts/at-ro-1/calls/call-at-ro-1-6", v.CallDetail)
    _, message = detail.input
    assert message.text == "Which bar of [image][image] is highest?"
    assert message.images == [
        v.MessageImage(digest=each.digest, media_type=each.media_type, size=len(each.data))
        for each in (IMAGE, SVG)
    ]


async def test_an_image_is_answered_as_bytes_that_cannot_run(url: str) -> None:
    async with serving(url) as client:
        for image in (IMAGE, LIE):
            answer = await client.send(f"{PREFIX}/stores/app/images/{image.digest}")
            assert (answer.status, answer.body) == (200, image.data)
            assert answer.headers["Content-Type"] == "image/png"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            policy = answer.headers["Content-Security-Policy"]
            assert policy == "default-src 'none'; sandbox; frame-ancestors 'none'"
            assert answer.headers["Content-Disposition"] == "inline"


async def test_an_image_with_scripts_is_a_file_to_save(url: str) -> None:
    async with serving(url) as client:
        answer = await client.send(f"{PREFIX}/stores/app/images/{SVG.digest}")
    assert answer.body == SVG.data
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Content-Disposition"] == "attachment"


async def test_an_image_needs_the_token_and_must_be_stored(url: str) -> None:
    async with serving(url) as client:
        path = f"{PREFIX}/stores/app/images/"
        refused = await client.send(path + IMAGE.digest, Authorization=None)
        assert refused.status == 401
        foreign = await client.send(path + IMAGE.digest, Sec_Fetch_Site="cross-site")
        assert foreign.status == 403
        missing = await client.send(path + "0" * 64)
        assert missing.status == 404
        assert missing.error == f"the store does not have the bytes of the image {'0' * 64}"
