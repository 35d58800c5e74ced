"""Tests of images in requests: what is read, limits, addresses on the web, replays and records."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.resolver import ThreadedResolver
from PIL import Image as pillow

from lightspan.errors import ConfigError, StoreError
from lightspan.protocols.engine import EngineCapabilities
from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan.schema.llm import LLM
from lightspan.schema.records import Fork, Rollout
from lightspan.schema.routing import Route, Routing, Target
from lightspan.stores.protocol import Store
from lightspan_gateway.limits import GatewayLimits, ImageLimits
from lightspan_gateway.serving.public_access import ServingGateway
from lightspan_testing.byte_tokenizer import (
    IMAGES,
    PLACEHOLDER,
    ByteTokenizer,
    data_url,
    image_file,
)
from lightspan_testing.gateway_suite import POLICY, Rig, make_rig
from lightspan_testing.gateway_suite.image_tests import (
    APIS,
    BEGIN,
    BLUE,
    PATCHES,
    RED,
    Api,
    each_api,
    placed,
    post,
    turn,
)
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.scripted_engine import Gate, Say, ScriptedEngine
from lightspan_testing.tiny_vision import tiny_vision_model
from lightspan_testing.wait import until
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.transformers import CAPABILITIES as EMBEDDED
from lightspan_vllm.engine import CAPABILITIES as VLLM

CHAT, RESPONSES, MESSAGES = APIS
SMALL = ImageLimits(max_images=2, max_bytes=2_000, max_side=100, max_pixels=5_000)


def vision(store: Store, script: Any = "Red.", **options: Any) -> Any:
    """Start a gateway whose policy takes images."""
    tokenizer = options.pop("tokenizer", ByteTokenizer())
    return make_rig(store, script, tokenizer=tokenizer, capabilities=IMAGES, **options)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def web_image(api: Api, url: str) -> dict[str, Any]:
    """Return a part with the address of an image."""
    if api is MESSAGES:
        return {"type": "image", "source": {"type": "url", "url": url}}
    if api is RESPONSES:
        return {"type": "input_image", "image_url": url}
    return {"type": "image_url", "image_url": {"url": url}}


def url_field(api: Api) -> str:
    field = "input" if api is RESPONSES else "messages"
    name = "source.url" if api is MESSAGES else "image_url"
    return f"{field}[0].content[0].{name}"


async def refused(rig: Rig, part: Any, api: Api = CHAT) -> tuple[int, str, str]:
    """Ask with one part that is refused; return status, message and code."""
    number = len(await rig.spans())
    status, answer = await post(rig, api, api.body(user(part)), f"call-{number}")
    error = json.loads(answer)["error"]
    code = error.get("details", {}).get("error_code") if api is MESSAGES else error["code"]
    spans = await rig.spans()
    assert spans[number].status_message == error["message"]
    assert rig.engine.requests == []
    return status, error["message"], code


def chat_image(data: bytes) -> dict[str, Any]:
    return CHAT.image(Image.of(data, "image/png"))


# --- what is read ---------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_formats_by_their_bytes(store: Store, kind: str) -> None:
    data = image_file("red", kind=kind)
    image = Image.of(data, f"image/{kind.lower()}")
    declared = {"type": "image_url", "image_url": data_url(data, "image/x")}
    async with vision(store) as rig:
        status, answer = await post(rig, CHAT, CHAT.body(user(declared)))
        assert status == 200, answer
        [record] = await rig.records()
        [span] = await rig.spans()
        assert await store.images([image.digest]) == {image.digest: image}
    assert record.images == (placed(image, 6),)
    [message] = json.loads(str(span.attributes[c.INPUT_MESSAGES]))
    [part] = message["parts"]
    assert (part["mime_type"], part["sha256"]) == (image.media_type, image.digest)


async def test_the_first_frame_of_an_animation(store: Store) -> None:
    frames = [pillow.new("RGB", (20, 12), color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    async with vision(store) as rig:
        status, _ = await post(rig, CHAT, CHAT.body(user(chat_image(file.getvalue()))))
        [record] = await rig.records()
    assert status == 200
    assert record.images[0].digest == Image.of(file.getvalue(), "image/gif").digest


async def test_detail_and_broken_lines_are_kept(store: Store) -> None:
    seen: list[Any] = []

    class Watching(ByteTokenizer):
        def render_images(self, messages: Any, *args: Any, **options: Any) -> Any:
            seen.extend(messages)
            return super().render_images(messages, *args, **options)

    head, _, text = data_url(RED.data).partition(",")
    url = f"{head},{text[:40]}\n{text[40:]}\n"
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    async with vision(store, tokenizer=Watching()) as rig:
        status, answer = await post(rig, CHAT, CHAT.body(user({"type": "text", "text": "A"}, part)))
    assert status == 200, answer
    inner = {"url": data_url(RED.data), "detail": "low"}
    assert seen == [user({"type": "text", "text": "A"}, {"type": "image_url", "image_url": inner})]


async def test_tokens_of_images_are_counted(store: Store) -> None:
    headers = {"x-api-key": ""}
    async with vision(store) as rig:
        headers["x-api-key"] = rig.attempt.call_token
        body = MESSAGES.body(user(MESSAGES.text("A"), MESSAGES.image(RED)))
        api = Api("messages/count_tokens")
        status, answer = await post(rig, api, {**body, "stream": None})
    expected = len([*turn("user", "A", PATCHES), *BEGIN])
    assert (status, json.loads(answer)) == (200, {"input_tokens": expected})


async def test_placeholders_fill_the_context(store: Store) -> None:
    large = Image.of(image_file(size=(800, 80)), "image/png")
    async with vision(store, tokenizer=ByteTokenizer(context_length=512)) as rig:
        status, message, code = await refused(rig, CHAT.image(large))
        assert await store.images([large.digest]) == {large.digest: large}
    length = len([*turn("user", 1_000), *BEGIN])
    assert (status, code) == (400, "context_length_exceeded")
    assert f"the prompt has {length} tokens, the context 512" in message


async def test_what_the_tokenizer_refuses_is_a_400(store: Store) -> None:
    class Failing(ByteTokenizer):
        def render_images(self, *args: Any, **options: Any) -> Any:
            from lightspan.errors import DataError

            raise DataError("the image is 1 pixel wide")

    async with vision(store, tokenizer=Failing()) as rig:
        status, message, _ = await refused(rig, CHAT.image(RED))
    assert status == 400
    assert message == (
        "'messages[0].content[0].image_url' cannot be read: the image is 1 pixel wide"
    )


def test_pillow_is_loaded_with_the_first_image() -> None:
    code = "import sys, lightspan_gateway.training_access; print('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("orientation", [6, 0])
async def test_photos_are_turned_upright(store: Store, orientation: int) -> None:
    exif = pillow.Exif()
    exif[0x0112] = orientation
    data = image_file(size=(40, 8), kind="JPEG", exif=exif)
    async with vision(store) as rig:
        assert (await post(rig, CHAT, CHAT.body(user(chat_image(data)))))[0] == 200
        [record] = await rig.records()
    assert record.images[0].grid == ((5, 1) if orientation == 6 else (1, 5))


# --- limits and broken files ----------------------------------------------------------------
def bomb() -> bytes:
    """Return the start of a PNG file that declares 50,000 by 50,000 pixels."""
    import struct
    import zlib

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1_000))


def plain(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


BROKEN: list[tuple[str, Callable[[], Any], str]] = [
    ("bytes", lambda: chat_image(bytes(2_001)), "is too large: at most 2,000 bytes are read"),
    (
        "side",
        lambda: chat_image(image_file(size=(101, 1))),
        "has 101 by 1 pixels: at most 100 pixels on a side are read",
    ),
    (
        "pixels",
        lambda: chat_image(image_file(size=(71, 71))),
        "has 71 by 71 pixels: at most 5,000 pixels are read",
    ),
    (
        "bomb",
        lambda: chat_image(bomb()),
        "has 50,000 by 50,000 pixels: at most 100 pixels on a side are read",
    ),
    ("base64", lambda: plain("data:image/png;base64,???"), "is not valid base64: "),
    ("padding", lambda: plain("data:image/png;base64,abc"), "is not valid base64: "),
    ("no bytes", lambda: plain("data:image/png;base64,"), "has no bytes"),
    ("percent", lambda: plain("data:image/png,%89PNG"), "must begin with data:image/"),
    ("format", lambda: chat_image(b"BM" + bytes(60)), "is of no supported format: send PNG"),
    (
        "svg",
        lambda: chat_image(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        "is of no supported format: send PNG, JPEG, WEBP or GIF",
    ),
    ("header", lambda: chat_image(b"\x89PNG\r\n\x1a\nabc"), "is a broken or truncated PNG: "),
    (
        "truncated",
        lambda: chat_image(image_file("red", kind="JPEG", size=(60, 60))[:-200]),
        "is a broken or truncated JPEG: ",
    ),
    (
        "truncated PNG",
        lambda: chat_image(image_file("red", size=(60, 60))[:60]),
        "is a broken or truncated PNG: ",
    ),
    (
        "truncated GIF",
        lambda: chat_image(image_file("red", kind="GIF", size=(60, 60))[:-80]),
        "is a broken or truncated GIF: ",
    ),
    (
        "truncated WEBP",
        lambda: chat_image(image_file("red", kind="WEBP", size=(60, 60))[:-10]),
        "is a broken or truncated WEBP: ",
    ),
]


@pytest.mark.parametrize(
    ("part", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
async def test_broken_and_large_images_are_refused(
    store: Store, part: Callable[[], Any], message: str
) -> None:
    async with vision(store, limits=GatewayLimits(images=SMALL)) as rig:
        status, said, code = await refused(rig, part())
        [span] = await rig.spans()
    assert (status, code) == (400, "invalid_image")
    assert said.startswith(f"'messages[0].content[0].image_url' {message}"), said
    assert span.attributes[c.CALL_REFUSED] == "messages[0].content[0].image_url"


@each_api
async def test_every_api_names_its_field(store: Store, api: Api) -> None:
    field = url_field(api).replace("source.url", "source.data")
    async with vision(store) as rig:
        status, message, code = await refused(rig, api.image(Image.of(b"no", "image/png")), api)
    assert (status, code) == (400, "invalid_image")
    assert message == f"'{field}' is of no supported format: send PNG, JPEG, WEBP or GIF"


@each_api
async def test_a_shape_that_the_model_cannot_take(store: Store, api: Api, tmp_path: Path) -> None:
    """Check the limit of a model's own image processor."""
    tokenizer = load_tokenizer(tiny_vision_model(tmp_path / "model", seed=1))
    images = [Image.of(image_file("red", size), "image/png") for size in ((40, 30), (2_000, 4))]
    field = url_field(api).replace("source.url", "source.data").replace("tent[0]", "tent[1]")
    body = api.body(user(*map(api.image, images)))
    async with vision(store, tokenizer=tokenizer) as rig:
        status, answer = await post(rig, api, body)
        error = json.loads(answer)["error"]
        [span] = await rig.spans()
        assert rig.engine.requests == []
    assert status == 400
    assert error["message"] == (
        f"'{field}' cannot be read: image {images[1].digest[:12]} of 2000 by 4 pixels cannot be "
        "prepared by Qwen2VLImageProcessorPil: absolute aspect ratio must be smaller than 200, got "
        "500.0: crop it, pad it or split it"
    )
    details = error["details"] if api is MESSAGES else error
    assert details["error_code" if api is MESSAGES else "code"] == "invalid_image"
    assert span.attributes[c.CALL_REFUSED] == field
    assert span.attributes[c.ERROR_TYPE] == "invalid_image"


async def test_the_number_of_images(store: Store) -> None:
    part = CHAT.image(RED)
    async with vision(store, limits=GatewayLimits(images=SMALL)) as rig:
        status, _ = await post(rig, CHAT, CHAT.body(user(part, part)))
        assert status == 200
        status, answer = await post(rig, CHAT, CHAT.body(user(part, part, part)), "call-b")
        error = json.loads(answer)["error"]
    assert (status, error["code"]) == (400, "invalid_image")
    assert error["message"] == "messages[0].content[2] is image 3: at most 2 are read"


@pytest.mark.parametrize(
    ("api", "part", "field", "message"),
    [
        (CHAT, {"type": "image_url"}, "image_url", "must hold a data: URL"),
        (CHAT, {"type": "image_url", "image_url": {"url": 5}}, "image_url", "must hold a data:"),
        (
            CHAT,
            {"type": "image_url", "image_url": {"url": "data:,", "detail": "huge"}},
            "image_url",
            "must be auto, low, high, original, not 'huge'",
        ),
        (RESPONSES, {"type": "input_image", "file_id": "f"}, "file_id", "names a file at the"),
        (
            MESSAGES,
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            "source.file_id",
            "names a file at the provider",
        ),
        (MESSAGES, {"type": "image", "source": {"type": "x"}}, "source", "'base64' or 'url'"),
        (MESSAGES, {"type": "image", "source": {"type": "base64"}}, "source.data", "a text"),
        (
            MESSAGES,
            {"type": "image", "source": {"type": "url", "url": "data:,"}, "brand_new": 1},
            "brand_new",
            "cannot be honoured",
        ),
    ],
)
async def test_malformed_parts_are_refused(
    store: Store, api: Api, part: Any, field: str, message: str
) -> None:
    async with vision(store) as rig:
        status, said, _ = await refused(rig, part, api)
        [span] = await rig.spans()
    where = ("input" if api is RESPONSES else "messages") + "[0].content[0]"
    assert (status, message in said) == (400, True), said
    assert span.attributes[c.CALL_REFUSED] == f"{where}.{field}"


@pytest.mark.parametrize("kind", ["input_audio", "file", "input_image"])
async def test_other_media_is_refused_by_a_policy_that_sees(store: Store, kind: str) -> None:
    async with vision(store) as rig:
        status, message, code = await refused(rig, {"type": kind})
    assert (status, code) == (400, "unsupported_content")
    assert f"is of type {kind!r}: only text is understood" in message


# --- addresses on the web -------------------------------------------------------------------
@asynccontextmanager
async def site(**answers: Any) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve answers by name; yield host:port, and the paths that were requested."""
    requested: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        requested.append(name)
        answer = answers[name]
        answer = answer() if callable(answer) else answer
        return web.Response(body=answer) if isinstance(answer, bytes) else answer

    app = web.Application()
    app.router.add_get("/{name}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0)
    await server.start()
    try:
        port = runner.addresses[0][1]
        yield f"127.0.0.1:{port}", requested
    finally:
        await runner.cleanup()


def allowing(*hosts: str, **limits: Any) -> GatewayLimits:
    return GatewayLimits(images=ImageLimits(hosts=hosts, **limits))


@each_api
async def test_an_allowed_host_is_fetched_and_recorded_as_data(store: Store, api: Api) -> None:
    async with site(red=RED.data) as (host, requested), vision(store, limits=allowing(host)) as rig:
        body = api.body(user(web_image(api, f"http://{host}/red")))
        status, answer = await post(rig, api, body)
        assert status == 200, answer
        [record] = await rig.records()
        [span] = await rig.spans()
        assert await store.images([RED.digest]) == {RED.digest: RED}
    assert requested == ["red"]
    assert record.images == (placed(RED, 6),)
    [message] = json.loads(str(span.attributes[c.INPUT_MESSAGES]))
    assert message["parts"][0]["sha256"] == RED.digest


@each_api
async def test_other_hosts_are_never_asked(store: Store, api: Api) -> None:
    async with site(red=RED.data) as (host, requested), vision(store) as rig:
        part = web_image(api, f"http://{host}/red?key=secret")
        status, message, code = await refused(rig, part, api)
    assert requested == []
    assert (status, code) == (400, "unsupported_content")
    assert message == (
        f"'{url_field(api)}' is at {host}, from which no images are fetched: send the image "
        f"itself, as base64, or allow the host (Trainer: image_hosts=['{host}'], `lightspan "
        f"serve`: --image-host {host})"
    )


@pytest.mark.parametrize(
    ("hosts", "url", "message"),
    [
        (("{host}",), "ftp://{host}/red", "an address that begins with https://"),
        (("{host}",), "file:///etc/passwd", "an address that begins with https://"),
        (("{host}",), "/etc/passwd", "an address that begins with https://"),
        (("{host}",), "http://{host}@127.0.0.2/red", "must not hold a user or a password"),
        (("{host}",), "http://a:b@{host}/red", "must not hold a user or a password"),
        (("127.0.0.1",), "http://{host}/red", "is at {host}, from which no images are fetched"),
        (("127.0.0.1",), "http://127.0.0.1.evil.example/red", "no images are fetched"),
        (("*.0.0.1",), "http://{host}/red", "from which no images are fetched"),
        (("{host}",), "http://[::1/red", "is no valid address"),
        (("{host}",), "http://{host}/elsewhere", "redirects to another host"),
        (("{host}",), "http://{host}/inside", "from which no images are fetched"),
        (("{host}",), "http://{host}/round", "redirects more than 5 times"),
        (("{host}",), "http://{host}/missing", "was answered 404 by 127.0.0.1"),
        (("{host}",), "http://{host}/large", "is too large: at most 5,000 bytes are read"),
        (("{host}",), "http://{host}/endless", "is too large: at most 5,000 bytes are read"),
        (("{host}",), "http://{host}/page", "is of no supported format"),
    ],
)
async def test_what_is_not_fetched(
    store: Store, hosts: tuple[str, ...], url: str, message: str
) -> None:
    def found(location: str) -> Callable[[], web.Response]:
        return lambda: web.Response(status=302, headers={"Location": location})

    answers = {
        "red": RED.data,
        "missing": lambda: web.Response(status=404),
        "large": bytes(5_001),
        "page": b"<html></html>",
        "elsewhere": found("http://localhost:1/red"),
        "inside": found("http://127.0.0.1:1/red"),
        "round": found("/round"),
        "endless": lambda: web.Response(body=_pieces(), headers={"Content-Type": "image/png"}),
    }
    async with site(**answers) as (host, _):
        limits = allowing(*(each.format(host=host) for each in hosts), max_bytes=5_000)
        async with vision(store, limits=limits) as rig:
            status, said, _ = await refused(rig, web_image(CHAT, url.format(host=host)))
    assert status == 400, said
    assert message.format(host=host) in said


async def _pieces() -> AsyncIterator[bytes]:
    for _ in range(100):
        yield bytes(1_000)


async def test_a_pattern_does_not_lead_to_private_addresses(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of an allowed domain may lead to this network, by mistake or by an attack."""
    resolve = ThreadedResolver.resolve

    async def local(self: Any, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
        return await resolve(self, "localhost", port, socket.AF_INET)

    monkeypatch.setattr(ThreadedResolver, "resolve", local)
    async with site(red=RED.data) as (host, requested):
        port = host.partition(":")[2]
        limits = allowing(f"*.example.com:{port}", f"named.example.com:{port}")
        async with vision(store, limits=limits) as rig:
            part = web_image(CHAT, f"http://a.example.com:{port}/red")
            status, message, code = await refused(rig, part)
            assert requested == []
            part = web_image(CHAT, f"http://named.example.com:{port}/red")
            assert (await post(rig, CHAT, CHAT.body(user(part)), "call-b"))[0] == 200
    assert (status, code) == (400, "unsupported_content")
    assert message.endswith("a.example.com has a private address; allow it by its name")


async def test_redirects_within_a_host_are_followed(store: Store) -> None:
    def found() -> web.Response:
        return web.Response(status=302, headers={"Location": "/red"})

    answers = {"old": found, "red": RED.data}
    async with site(**answers) as (host, requested), vision(store, limits=allowing(host)) as rig:
        body = CHAT.body(user(web_image(CHAT, f"http://{host}/old")))
        assert (await post(rig, CHAT, body))[0] == 200
    assert requested == ["old", "red"]


async def test_hosts_that_fail_are_a_502(store: Store) -> None:
    async with (
        site(down=lambda: web.Response(status=503)) as (host, _),
        vision(store, limits=allowing(host, "127.0.0.1:1")) as rig,
    ):
        down = await refused(rig, web_image(CHAT, f"http://{host}/down"))
        gone = await refused(rig, web_image(CHAT, "http://127.0.0.1:1/red"))
    assert down == (
        502,
        "the image at 'messages[0].content[0].image_url' could not be fetched: it answered 503",
        "image_unreachable",
    )
    assert (gone[0], gone[2]) == (502, "image_unreachable")


async def test_all_images_of_a_request_share_the_bytes(store: Store) -> None:
    size = len(RED.data)
    async with site(red=RED.data) as (host, requested):
        limits = allowing(host, max_fetched_bytes=2 * size)
        async with vision(store, limits=limits) as rig:
            part = web_image(CHAT, f"http://{host}/red")
            assert (await post(rig, CHAT, CHAT.body(user(part, part))))[0] == 200
            status, answer = await post(rig, CHAT, CHAT.body(user(*[part] * 3)), "call-b")
    assert (status, "is too large: at most 0 bytes" in answer) == (400, True)
    assert requested == ["red"] * 5


async def test_a_slow_host_is_left(store: Store) -> None:
    gate = Gate()

    async def slow(request: web.Request) -> web.Response:
        await gate.wait()
        return web.Response(body=RED.data)

    app = web.Application()
    app.router.add_get("/red", slow)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host = f"127.0.0.1:{runner.addresses[0][1]}"
        async with vision(store, limits=allowing(host, fetch_timeout_s=0.2)) as rig:
            part = web_image(CHAT, f"http://{host}/red")
            status, message, _ = await refused(rig, part)
    finally:
        gate.open()
        await runner.cleanup()
    assert (status, message.endswith("it took more than 0.2 s")) == (502, True)


@pytest.mark.parametrize(
    "hosts", ["a.example", ["https://a.example"], ["a.example/b"], [""], ["*"]]
)
def test_hosts_are_names(hosts: Any) -> None:
    with pytest.raises(ConfigError, match="is not in a list of hosts"):
        GatewayLimits().with_hosts(hosts)


# --- retries and replays --------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
async def test_a_retry_of_a_fetched_image_sees_the_same_bytes(store: Store, stream: bool) -> None:
    """The address has other bytes when the gateway is started again and the call is retried."""
    gate = Gate()
    files = [RED.data, BLUE.data]

    def script(request: Any) -> Say:
        return Say(text="A red one.", gates={3: gate})

    async with (
        site(now=lambda: web.Response(body=files.pop(0))) as (host, requested),
        vision(store, script, limits=allowing(host)) as rig,
    ):
        body = CHAT.body(user(web_image(CHAT, f"http://{host}/now")), stream=stream)
        task = asyncio.create_task(post(rig, CHAT, body))
        await gate.reached.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: len(rig.engine.cancelled) == 1)
        await rig.restart()
        gate.open()
        status, answer = await post(rig, CHAT, body)
        assert status == 200, answer
        [record] = await rig.records()
        first, second = rig.engine.requests
    digest = RED.digest if stream else BLUE.digest
    assert requested == ["now"] * (1 if stream else 2)
    assert [image.digest for image in record.images] == [digest]
    assert [image.digest for image in second.images] == [digest]
    assert [image.data for image in first.images] == [RED.data]
    assert second.images[0].data == (RED.data if stream else BLUE.data)


async def test_a_fork_has_the_images_of_its_parent(store: Store) -> None:
    """The forked attempt repeats the first call, and samples the second for the same images."""
    files = [RED.data, BLUE.data]
    async with site(now=lambda: web.Response(body=files.pop(0))) as (host, requested):
        first = CHAT.body(user(CHAT.image(BLUE)))
        second = CHAT.body(user(web_image(CHAT, f"http://{host}/now")))
        async with vision(store, limits=allowing(host)) as rig:
            for number, body in enumerate((first, second)):
                assert (await post(rig, CHAT, body, f"call-{number}"))[0] == 200
            parent = rig.attempt.attempt_id
            resources = await store.put_resources({"routing": Routing(default=POLICY)})
            fork = Fork(attempt_id=parent, call_id="call-1")
            rollout = Rollout(
                rollout_id="fork", task={}, task_id="t", resources_id=resources, fork=fork
            )
            await store.enqueue([rollout])
            [claim] = await store.claim("runner", 1, 600)
            rig.attempt = claim.attempt
            for number, body in enumerate((first, second)):
                status, answer = await post(rig, CHAT, body, f"again-{number}")
                assert status == 200, answer
            [record] = await rig.records()
            assert len(rig.engine.requests) == 3
    assert requested == ["now"]
    assert [image.digest for image in record.images] == [RED.digest]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_response_continues_one_with_an_image(store: Store, restarted: bool) -> None:
    async with vision(store, ["Red.", "Yes."]) as rig:
        body = RESPONSES.body(user(RESPONSES.text("A"), RESPONSES.image(RED)))
        status, answer = await post(rig, RESPONSES, body)
        assert status == 200, answer
        if restarted:
            await rig.restart()
        more = RESPONSES.body(user(RESPONSES.image(BLUE)))
        more["previous_response_id"] = json.loads(answer)["id"]
        status, answer = await post(rig, RESPONSES, more, "call-b")
        assert status == 200, answer
        _, record = await rig.records()
        request = rig.engine.requests[-1]
    before = [*turn("user", "A", PATCHES), *turn("assistant", "Red.")]
    assert record.prompt_ids == [*before, *turn("user", PATCHES), *BEGIN]
    assert record.images == (placed(RED, 7), placed(BLUE, len(before) + 6))
    assert [image.data for image in request.images] == [RED.data, BLUE.data]


async def test_a_store_without_the_image_of_an_earlier_response(store: Store) -> None:
    async with vision(store, ["Red.", "Yes."]) as rig:
        body = RESPONSES.body(user(RESPONSES.image(RED)))
        _, answer = await post(rig, RESPONSES, body)
        await rig.restart()

        async def images(digests: Any) -> dict[str, Image]:
            return {}

        rig.gateway.access.images = images  # type: ignore[method-assign]
        more = RESPONSES.body("unused")
        more |= {"input": "Sure?", "previous_response_id": json.loads(answer)["id"]}
        status, answer = await post(rig, RESPONSES, more, "call-b")
    assert status == 400
    assert "an image of the conversation" in answer


# --- the record -----------------------------------------------------------------------------
async def test_images_are_stored_before_the_call_and_once(store: Store) -> None:
    order: list[Any] = []
    add_images, add_calls = store.add_images, store.add_calls

    async def images(attempt: Any, images: Any) -> None:
        order.append([image.digest for image in images])
        await add_images(attempt, images)

    async def calls(calls: Any) -> Any:
        order.append("call")
        return await add_calls(calls)

    store.add_images, store.add_calls = images, calls  # type: ignore[method-assign]
    async with vision(store) as rig:
        for number, parts in enumerate(([RED], [RED, BLUE], [BLUE, BLUE])):
            body = CHAT.body(user(*map(CHAT.image, parts)))
            assert (await post(rig, CHAT, body, f"call-{number}"))[0] == 200
    assert order == [[RED.digest], "call", [BLUE.digest], "call", "call"]


async def test_a_store_that_refuses_an_image_damages_the_attempt(store: Store) -> None:
    async def failing(attempt: Any, images: Any) -> None:
        raise StoreError("the disk is full")

    store.add_images = failing  # type: ignore[method-assign]
    async with vision(store) as rig:
        assert (await post(rig, CHAT, CHAT.body(user(CHAT.image(RED)))))[0] == 200
        await rig.gateway.access.log.drain()
        attempt = await store.attempt(rig.attempt.attempt_id)
    assert attempt.capture_errors == ["the store refused a call: the disk is full"]


async def test_answered_calls_hold_no_images(store: Store) -> None:
    async with vision(store) as rig:
        assert (await post(rig, CHAT, CHAT.body(user(CHAT.image(RED)))))[0] == 200
        [call] = rig.session().calls.values()
        assert (call.info.images, call.info.body) == ({}, {})
        assert [image.data for run in call.choices for image in run.images] == [b""]  # type: ignore[attr-defined]


@pytest.mark.parametrize("url", [data_url(b"no image"), "https://elsewhere.example/a.png"])
async def test_an_endpoint_gets_images_untouched(store: Store, url: str) -> None:
    body = CHAT.body(user(CHAT.text("A"), plain(url), CHAT.image(RED)))
    with ScriptedServer("Red.") as server:
        endpoint = Target(route=Route.ENDPOINT, endpoint=LLM(base_url=server.url, model="m"))
        async with vision(store, routing=Routing(default=endpoint)) as rig:
            assert (await post(rig, CHAT, body))[0] == 200
            [request] = server.requests
            stored = await store.images([RED.digest])
    assert request.body["messages"] == body["messages"]
    assert stored == {RED.digest: RED}


async def test_serve_answers_images_and_stores_nothing() -> None:
    engine = ScriptedEngine(ByteTokenizer(), "Red.", capabilities=IMAGES)
    routing = Routing(default=Target(route=Route.POLICY, policy="policy"))
    async with (
        site(red=RED.data) as (host, _),
        ServingGateway(engine, routing, image_hosts=[host]) as gateway,
        aiohttp.ClientSession() as session,
    ):
        for part in (CHAT.image(RED), web_image(CHAT, f"http://{host}/red")):
            url = f"{gateway.url}/v1/chat/completions"
            async with session.post(url, json=CHAT.body(user(part))) as response:
                answer = await response.json()
            assert response.status == 200, answer
            assert answer["choices"][0]["message"]["content"] == "Red."
        url = f"{gateway.url}/v1/chat/completions"
        async with session.post(url, json=CHAT.body(user(chat_image(bomb())))) as response:
            assert response.status == 400
    assert [r.prompt_ids.count(PLACEHOLDER) for r in engine.requests] == [PATCHES, PATCHES]
    assert [r.images[0].data for r in engine.requests] == [RED.data, RED.data]


@pytest.mark.parametrize("capabilities", [VLLM, EMBEDDED], ids=["vllm", "embedded"])
async def test_an_engine_that_takes_no_images_gets_none(
    store: Store, capabilities: EngineCapabilities
) -> None:
    """Check a model whose tokenizer could render images, in an engine that takes none."""
    tokenizer = ByteTokenizer()
    async with make_rig(store, "A.", tokenizer=tokenizer, capabilities=capabilities) as rig:
        _, message, code = await refused(rig, chat_image(RED.data))
        assert message.endswith("such as Qwen2.5-VL, and the embedded engine")
        assert code == c.UNSUPPORTED_CONTENT
        status, _ = await post(rig, CHAT, CHAT.body(user(CHAT.text("A"))), "call-a")
    assert status == 200
