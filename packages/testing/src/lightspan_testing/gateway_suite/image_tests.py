"""Conformance tests of the gateway with images in requests of its three APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import pytest

from lightspan.schema import semconv as c
from lightspan.schema.images import Image, PromptImage
from lightspan.stores.protocol import Store
from lightspan_testing.byte_tokenizer import (
    END,
    IMAGES,
    PLACEHOLDER,
    START,
    ByteTokenizer,
    data_url,
    image_file,
)
from lightspan_testing.gateway_suite.harness import Rig, make_rig

RED: Final = Image.of(image_file("red"), "image/png")
BLUE: Final = Image.of(image_file("blue"), "image/png")
"""As large as `RED`, so that both have the same placeholders."""
PATCHES: Final = 6
"""Placeholders of an image of 20 by 12 pixels."""


@dataclass(frozen=True, slots=True)
class Api:
    """An API, and how a request of it holds images."""

    path: str

    def image(self, image: Image) -> dict[str, Any]:
        """Return the part of a message that holds an image."""
        url = data_url(image.data, image.media_type)
        if self.path == "messages":
            _, _, data = url.partition(",")
            source = {"type": "base64", "media_type": image.media_type, "data": data}
            return {"type": "image", "source": source}
        if self.path == "responses":
            return {"type": "input_image", "image_url": url, "detail": "auto"}
        return {"type": "image_url", "image_url": {"url": url}}

    def text(self, text: str) -> dict[str, Any]:
        """Return the part of a message that holds a text."""
        return {"type": "input_text" if self.path == "responses" else "text", "text": text}

    def body(self, *messages: Any, stream: bool = False, **fields: Any) -> dict[str, Any]:
        """Return the body of a request."""
        name = "input" if self.path == "responses" else "messages"
        limit = "max_output_tokens" if self.path == "responses" else "max_tokens"
        return {"model": "policy", name: [*messages], limit: 100, "stream": stream, **fields}

    def called(self, *content: Any) -> list[Any]:
        """Return a tool call of the model, and its result."""
        if self.path == "messages":
            call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "t1", "content": [*content]}
            return [
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ]
        if self.path == "responses":
            call = {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"}
            return [call, {"type": "function_call_output", "call_id": "t1", "output": [*content]}]
        function = {"name": "look", "arguments": "{}"}
        call = {"id": "t1", "type": "function", "function": function}
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": [*content]},
        ]


APIS: Final = [Api("chat/completions"), Api("responses"), Api("messages")]
each_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.path.partition("/")[0])


async def post(rig: Rig, api: Api, body: Mapping[str, Any], call_id: str = "call-a") -> Any:
    """Send a request; return its status, and the text of the answer."""
    headers = {"Authorization": f"Bearer {rig.attempt.call_token}", **rig.headers(call_id)}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{rig.gateway.url}/v1/{api.path}", json=body, headers=headers) as response,
    ):
        return response.status, await response.text()


def turn(role: str, *content: str | int) -> list[int]:
    """Return the ids of a message; a number is that many placeholders."""
    ids = [START, *role.encode(), 10]
    for part in content:
        ids += part.encode() if isinstance(part, str) else [PLACEHOLDER] * part
    return [*ids, END]


def placed(image: Image, start: int) -> PromptImage:
    """Return an image of a prompt as a store has it."""
    return PromptImage(digest=image.digest, grid=(2, 3), start=start, length=PATCHES)


BEGIN: Final = [START, *b"assistant\n"]


class ImageTests:
    """Tests of images. Needs a fixture `store`, which yields an open, empty store."""

    @each_api
    @pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
    async def test_images_are_a_part_of_the_prompt(
        self, store: Store, api: Api, stream: bool
    ) -> None:
        content = [api.text("One"), api.image(RED), api.image(BLUE), api.text("Which?")]
        async with make_rig(store, "Two.", tokenizer=ByteTokenizer(), capabilities=IMAGES) as rig:
            body = api.body({"role": "user", "content": content}, stream=stream)
            status, answer = await post(rig, api, body)
            assert (status, "Two." in answer or '"."' in answer) == (200, True), answer
            [record] = await rig.records()
            [span] = await rig.spans()
            [request] = rig.engine.requests
            stored = await store.images([RED.digest, BLUE.digest])
        prompt = [*turn("user", "One", 2 * PATCHES, "Which?"), *BEGIN]
        assert (record.prompt_ids, record.response_ids) == (prompt, rig.engine.ids("Two."))
        start = len([START, *b"user\nOne"])
        assert record.images == (placed(RED, start), placed(BLUE, start + PATCHES))
        assert request.prompt_ids == prompt
        assert [image.key for image in request.images] == [image.key for image in record.images]
        assert [image.data for image in request.images] == [RED.data, BLUE.data]
        assert stored == {RED.digest: RED, BLUE.digest: BLUE}
        assert span.attributes[c.INPUT_TOKENS] == len(prompt)
        [message] = json.loads(str(span.attributes[c.INPUT_MESSAGES]))
        kept = [part["sha256"] for part in message["parts"] if part["type"] == "blob"]
        assert kept == [RED.digest, BLUE.digest]

    @each_api
    async def test_results_of_tools_hold_images(self, store: Store, api: Api) -> None:
        user = {"role": "user", "content": "Look."}
        async with make_rig(store, "Red.", tokenizer=ByteTokenizer(), capabilities=IMAGES) as rig:
            body = api.body(user, *api.called(api.text("Seen:"), api.image(RED)))
            status, answer = await post(rig, api, body)
            assert status == 200, answer
            [record] = await rig.records()
            assert await store.images([RED.digest]) == {RED.digest: RED}
        function = {"name": "look", "arguments": {}}
        call = f"<tool_call>\n{json.dumps(function)}\n</tool_call>"
        before = [*turn("user", "Look."), *turn("assistant", call), START, *b"tool\nSeen:"]
        assert record.prompt_ids == [*before, *[PLACEHOLDER] * PATCHES, END, *BEGIN]
        assert record.images == (placed(RED, len(before)),)

    async def test_choices_share_the_images(self, store: Store) -> None:
        api = APIS[0]
        async with make_rig(store, "Red.", tokenizer=ByteTokenizer(), capabilities=IMAGES) as rig:
            body = api.body({"role": "user", "content": [api.image(RED)]}, n=3)
            status, answer = await post(rig, api, body)
            assert status == 200
            assert json.loads(answer)["usage"]["prompt_tokens"] == 6 + PATCHES + 1 + len(BEGIN)
            records = await rig.records()
        assert [record.choice for record in records] == [0, 1, 2]
        assert {record.images for record in records} == {(placed(RED, 6),)}
        assert all(request.images[0].data == RED.data for request in rig.engine.requests)

    async def test_images_of_equal_size_are_different_prompts(self, store: Store) -> None:
        api = APIS[0]
        async with make_rig(store, "A.", tokenizer=ByteTokenizer(), capabilities=IMAGES) as rig:
            for number, image in enumerate((RED, BLUE, RED)):
                body = api.body({"role": "user", "content": [api.image(image)]})
                assert (await post(rig, api, body, f"call-{number}"))[0] == 200
            first, second, third = await rig.records()
        assert first.prompt == second.prompt == third.prompt
        assert first.prompt_key != second.prompt_key
        assert first.prompt_key == third.prompt_key

    @pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
    async def test_a_retry_after_a_restart_has_the_same_images(
        self, store: Store, stream: bool
    ) -> None:
        api = APIS[0]
        body = api.body({"role": "user", "content": [api.image(RED)]}, stream=stream)
        async with make_rig(store, "Red.", tokenizer=ByteTokenizer(), capabilities=IMAGES) as rig:
            assert (await post(rig, api, body))[0] == 200
            await rig.restart()
            assert (await post(rig, api, body))[0] == 200
            other = api.body({"role": "user", "content": [api.image(BLUE)]}, stream=stream)
            status, answer = await post(rig, api, other)
            assert (status, "used for another request" in answer) == (400, True)
            assert len(rig.engine.requests) == 1
            [record] = await rig.records()
        assert record.images == (placed(RED, 6),)

    @each_api
    async def test_a_policy_that_does_not_see_refuses_images(self, store: Store, api: Api) -> None:
        part = api.image(RED)
        async with make_rig(store, "Red.", tokenizer=ByteTokenizer()) as rig:
            body = api.body({"role": "user", "content": [api.text("What?"), part]})
            status, answer = await post(rig, api, body)
            [span] = await rig.spans()
            assert rig.engine.requests == []
            assert await store.images([RED.digest]) == {}
        assert status == 400
        advice = (
            f"images ({part['type']!r}) need a policy with a vision model, such as Qwen2.5-VL, and "
            "the embedded engine"
        )
        assert advice in answer
        where = ("input" if api.path == "responses" else "messages") + "[0].content[1]"
        assert span.attributes[c.CALL_REFUSED] == where
        assert span.attributes[c.ERROR_TYPE] == c.UNSUPPORTED_CONTENT
