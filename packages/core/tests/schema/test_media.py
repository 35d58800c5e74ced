"""Test that images, sounds and files in messages are recorded as references without their bytes."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any
from urllib.parse import quote

import pytest

from lightspan.schema import media, semconv as c
from lightspan.schema.genai_attributes import StreamedAnswer, answer_attributes, request_attributes
from lightspan.schema.images import Image

PICTURE = bytes(range(256)) * 8_192
"""A picture of two megabytes."""
BASE64 = base64.b64encode(PICTURE).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"
KNOWN = {"size": len(PICTURE), "sha256": hashlib.sha256(PICTURE).hexdigest()}
PNG = {"mime_type": "image/png", **KNOWN}
SIGNED = f"https://me:pass@cdn.test/a/cat.png?X-Amz-Signature={'0' * 64}#part"
SIGNED_DIGEST = hashlib.sha256(SIGNED.encode()).hexdigest()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (  # chat
            {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}},
            {"type": "blob", "modality": "image", **PNG},
        ),
        (
            {"type": "image_url", "image_url": {"url": SIGNED}},
            {
                "type": "uri",
                "modality": "image",
                "uri": "https://cdn.test/a/cat.png",
                "sha256": SIGNED_DIGEST,
            },
        ),
        (
            {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}},
            {"type": "blob", "modality": "audio", "mime_type": "wav", **KNOWN},
        ),
        (
            {"type": "file", "file": {"filename": "a.pdf", "file_data": DATA_URL}},
            {"type": "blob", "modality": "file", "filename": "a.pdf", **PNG},
        ),
        (  # Responses
            {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
            {"type": "blob", "modality": "image", **PNG},
        ),
        (
            {"type": "input_file", "file_url": "https://cdn.test/a.pdf"},
            {"type": "uri", "modality": "file", "uri": "https://cdn.test/a.pdf"},
        ),
        (
            {
                "type": "computer_call_output",
                "call_id": "c1",
                "output": {"type": "computer_screenshot", "image_url": DATA_URL},
            },
            {
                "type": "computer_call_output",
                "call_id": "c1",
                "output": {"type": "computer_screenshot", "image_url": {"type": "blob", **PNG}},
            },
        ),
        (  # Anthropic
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": BASE64},
            },
            {"type": "blob", "modality": "image", **PNG},
        ),
        # unknown types
        ({"type": "x", "bytes": BASE64}, {"type": "x", "bytes": {"type": "blob", **KNOWN}}),
        (
            {"type": "x", "many": [DATA_URL, "a"]},
            {"type": "x", "many": [{"type": "blob", **PNG}, "a"]},
        ),
        (
            {"type": "image_url", "image_url": "data:,caf\u00e9"},
            {
                "type": "blob",
                "modality": "image",
                "size": 5,
                "sha256": hashlib.sha256("caf\u00e9".encode()).hexdigest(),
            },
        ),
    ],
)
def test_references(part: dict[str, Any], expected: dict[str, Any]) -> None:
    assert media.reference(part) == expected


@pytest.mark.parametrize(
    "part",
    [
        {"type": "refusal", "refusal": "no. " * 2000},
        {"type": "x", "said": "Donaudampf" * 500},
        {"type": "x", "hex": "0123456789abcdef" * 300},
        {"type": "x", "said": "Data: 3 apples, 4"},
        {"type": "x", "said": 'data: {"a": 1, "b": 2}'},
        {"type": "image_url", "image_url": 5},
    ],
)
def test_what_is_no_media_is_kept(part: dict[str, Any]) -> None:
    assert media.reference(part) == part


def test_every_place_of_a_chat() -> None:
    """Check messages of a user, a tool and a model."""
    image = {"type": "image_url", "image_url": {"url": DATA_URL}}
    expected = {"type": "blob", "modality": "image", **PNG}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "what?"}, image]},
        {"role": "tool", "tool_call_id": "t1", "content": [image, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "audio": {"id": "audio_1"}},
    ]
    recorded = request_attributes({"model": "m", "messages": messages})[c.INPUT_MESSAGES]
    parts = [message["parts"] for message in json.loads(str(recorded))]
    texts = {"type": "text", "content": "what?"}, {"type": "text", "text": "b"}
    assert parts == [
        [texts[0], expected],
        [{"type": "tool_call_response", "response": [expected, texts[1]], "id": "t1"}],
        [{"type": "file", "modality": "audio", "file_id": "audio_1"}],
    ]


def test_every_place_of_a_response() -> None:
    image = {"type": "input_image", "image_url": DATA_URL}
    expected = {"type": "blob", "modality": "image", **PNG}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "what?"}, image]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [image]},
        {"type": "image_generation_call", "id": "ig_1", "result": BASE64},
    ]
    recorded = request_attributes({"model": "m", "input": items})[c.INPUT_MESSAGES]
    parts = [message["parts"] for message in json.loads(str(recorded))]
    assert parts == [
        [{"type": "text", "content": "what?"}, expected],
        [{"type": "tool_call", "id": "c1", "name": "look", "arguments": "{}"}],
        [{"type": "tool_call_response", "response": [expected], "id": "c1"}],
        [{"type": "blob", "modality": "image", **KNOWN}],
    ]
    answer = answer_attributes({"id": "r1", "status": "completed", "output": [items[3]]})
    [message] = json.loads(str(answer[c.OUTPUT_MESSAGES]))
    assert message["parts"] == [{"type": "blob", "modality": "image", **KNOWN}]


def test_a_spoken_answer() -> None:
    audio = {"id": "audio_1", "data": BASE64, "transcript": "hi", "expires_at": 1}
    choice = {"message": {"role": "assistant", "content": None, "audio": audio}}
    attributes = answer_attributes({"choices": [{**choice, "finish_reason": "stop"}]})
    [message] = json.loads(str(attributes[c.OUTPUT_MESSAGES]))
    assert message["parts"] == [
        {"type": "text", "content": "hi"},
        {"type": "blob", "modality": "audio", **KNOWN},
    ]


def test_a_refusal_is_what_was_said() -> None:
    """Check the field `refusal`, which OpenAI's models use if the request has a response format."""
    whole = {"message": {"role": "assistant", "content": None, "refusal": "I will not."}}
    answers: list[Any] = [{"choices": [whole]}]
    for events in (
        [{"choices": [{"index": 0, "delta": {"refusal": part}}]} for part in ("I will", " not.")],
        [
            {"type": "response.refusal.delta", "output_index": 0, "delta": part}
            for part in ("I will", " not.")
        ],
    ):
        streamed = StreamedAnswer()
        for event in events:
            streamed.add(event)
        answers.append(streamed.answer())
    for answer in answers:
        [message] = json.loads(str(answer_attributes(answer)[c.OUTPUT_MESSAGES]))
        assert message["parts"] == [{"type": "text", "content": "I will not."}]


# --- the bytes of images --------------------------------------------------------------------
SMALL = b"\x89PNG\r\n small"
SMALL_BASE64 = base64.b64encode(SMALL).decode()
SMALL_URL = f"data:image/png;base64,{SMALL_BASE64}"
CHAT = {"type": "image_url", "image_url": {"url": SMALL_URL}}
RESPONSE = {"type": "input_image", "image_url": SMALL_URL}
SOURCE = {"type": "base64", "media_type": "image/png", "data": SMALL_BASE64}
MESSAGE = {"type": "image", "source": SOURCE}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [MESSAGE]}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": [RESPONSE]}


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": user(CHAT, CHAT)},
        {"messages": [{"role": "tool", "tool_call_id": "c1", "content": [CHAT]}]},
        {"input": user(RESPONSE)},
        {"input": [OUTPUT]},
        {"max_tokens": 9, "system": "Look.", "messages": user(MESSAGE)},
        {"max_tokens": 9, "system": "Look.", "messages": user(TOOL_RESULT)},
        {"messages": user({"type": "image", "base64": SMALL_BASE64})},
        {"messages": user({"type": "shot", "at": SMALL_URL})},
    ],
    ids=["chat", "tool", "response", "output", "message", "tool result", "no type", "unknown part"],
)
def test_the_bytes_of_images_are_kept(body: dict[str, Any]) -> None:
    found: dict[str, Image] = {}
    with media.images_into(found):
        attributes = request_attributes({"model": "m", **body})
    image = Image.of(SMALL, "image/png")
    assert found == {image.digest: image}
    assert media.digests_in(attributes) == {image.digest}
    assert request_attributes({"model": "m", **body}) == attributes  # whether kept or not


DENSE = b"\x89PNG\xff\xff\xfb\xef\xbe\xff"
"""An image whose base64 has `+`, `/` and `=`."""


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(DENSE).decode(),
        base64.urlsafe_b64encode(DENSE).decode(),
        quote(base64.b64encode(DENSE), safe=""),
        base64.encodebytes(DENSE).decode(),
    ],
    ids=["standard", "URL-safe", "percent", "lines"],
)
def test_the_alphabets_of_base64(text: str) -> None:
    found: dict[str, Image] = {}
    with media.images_into(found):
        media.reference({"type": "input_image", "image_url": f"data:image/png;base64,{text}"})
    image = Image.of(DENSE, "image/png")
    assert found == {image.digest: image}


@pytest.mark.parametrize(
    ("url", "named"),
    [
        (f"data:image/png;base64,{SMALL_BASE64[:8]}!!!!{SMALL_BASE64[8:]}", None),
        (f"data:image/png;base64,{SMALL_BASE64}====AAAA", None),
        ("data:image/svg+xml,%3Csvg%2F%3E", b"<svg/>"),
        ("data:image/png,abcd", b"abcd"),
    ],
)
def test_what_is_not_base64_is_named_by_its_text(url: str, named: bytes | None) -> None:
    found: dict[str, Image] = {}
    with media.images_into(found):
        part = media.reference({"type": "input_image", "image_url": url})
    named = url.partition(",")[2].encode() if named is None else named
    assert part["sha256"] == hashlib.sha256(named).hexdigest()
    assert (part["size"], found) == (len(named), {})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": SMALL_BASE64, "format": "wav"}},
        {"type": "file", "file": {"filename": "a.png", "file_data": SMALL_URL}},
        {"type": "image_url", "image_url": {"url": "https://cdn.test/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg></svg>"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}},
        {"type": "image", "base64": base64.b64encode(b"text").decode()},
        {"type": "image", "base64": base64.b64encode(b"RIFF\4\0\0\0WAVE").decode()},
        {"type": "video", "data": SMALL_BASE64, "media_type": "image/png"},
    ],
)
def test_other_bytes_are_not_kept(part: dict[str, Any]) -> None:
    found: dict[str, Image] = {}
    with media.images_into(found):
        request_attributes({"messages": user(part)})
    assert found == {}


@pytest.mark.parametrize(
    ("start", "declared", "media_type"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/jpeg", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/png", "image/jpeg"),
        (b"GIF89a", "", "image/gif"),
        (b"RIFF\n\0\0\0WEBP", "application/octet-stream", "image/webp"),
        (b"BM", "image/bmp", "image/bmp"),
    ],
)
def test_an_image_has_the_type_of_its_bytes(start: bytes, declared: str, media_type: str) -> None:
    data, found = start + b"...", dict[str, Image]()
    url = f"data:{declared};base64,{base64.b64encode(data).decode()}"
    with media.images_into(found):
        part = media.reference({"type": "input_image", "image_url": url})
    image = Image.of(data, media_type)
    assert found == {image.digest: image}
    assert part["mime_type"] == media_type


def test_a_large_image_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(media, "MAX_IMAGE_BYTES", len(SMALL) - 1)
    found: dict[str, Image] = {}
    for _ in range(2):
        with media.images_into(found):
            media.reference(CHAT)
    assert found == {}
    digest = hashlib.sha256(SMALL).hexdigest()
    assert caplog.messages == [f"lightspan: image {digest} has 12 bytes: it is not recorded"]


def test_a_reference_becomes_an_image_again() -> None:
    image = Image.of(SMALL, "image/png")
    kept = media.reference(CHAT)
    assert media.with_image(kept, {image.digest: image}) == CHAT
    assert media.with_image(kept, {}) == kept
    text = {"type": "text", "text": "a"}
    assert media.with_image(text, {image.digest: image}) == text
