"""Requests that ask a model and that no SDK of `sdks` makes: noted, never touched.

LiteLLM's `groq/` or `hosted_vllm/`, Ollama's client, an httpx call of the app's own: what they
send goes past the wire shim. Of each POST to the path of a model's API, in a rollout, is noted who
asked, which library sent it and where to (`sightings`), so that a dry run can say what to change.
Seen are httpx (and httpx2), requests and aiohttp; not urllib, and not botocore, which Bedrock's
clients use.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, Final
from urllib.parse import urlsplit

from lightspan.capture.imports import Awaited
from lightspan.capture.patch import Patch
from lightspan.capture.scope import acting, pushed
from lightspan.capture.sdks import SDKS
from lightspan.capture.stack import Acting
from lightspan.capture.state import state
from lightspan.schema.origins import Request
from lightspan.schema.records import Mode

_WITH_MODEL: Final = (
    *(path for sdk in SDKS for path in sdk.paths),
    *("/api/chat", "/api/generate"),  # Ollama
    *("/v1/chat", "/v2/chat"),  # Cohere
)
"""Ends of the paths of requests that name their model; others than a model's have them, too."""
_MODEL_IN_PATH: Final = re.compile(
    r"/models?/([^/]+?)(?::(?:generateContent|streamGenerateContent)|/(?:converse|invoke)"
    r"(?:-stream|-with-response-stream)?)$"
)
"""Gemini's and Bedrock's."""
_HTTP: Final = ("httpx", "httpx2", "requests", "aiohttp")
_BENEATH: Final = (*_HTTP, "urllib3", "contextlib", "asyncio")
"""Packages between who asks and what is sent."""
_OF_SDKS: Final = tuple(f"{sdk.name}._base_client" for sdk in SDKS)
_UNDER: Final = ("httpx._client", "httpx2._client")
"""Where another HTTP client may do the work for them (LiteLLM has aiohttp do so)."""
_LITELLM: Final = "litellm"
_LIBRARIES: Final = (
    *(_LITELLM, "cohere", "google.genai", "groq", "huggingface_hub", "mistralai", "ollama"),
    "together",
)
"""Clients of models that bring HTTP clients; of others is told which module called."""


# --- installing -----------------------------------------------------------------------------
def install() -> None:
    """Watch the HTTP clients that are imported, and others once they are. Twice is once."""
    if state.watches or state.watched:
        return
    for name in _HTTP:
        if name in sys.modules:
            _watch(name)
        elif importlib.util.find_spec(name) is not None:
            state.watched.append(Awaited(name, partial(_watch, name)))


def uninstall() -> None:
    """Leave their classes as they were."""
    while state.watched:
        state.watched.pop().stop()
    while state.watches:
        state.watches.pop().undo()


def _watch(name: str) -> None:
    with contextlib.suppress(Exception):  # another version; nothing is then seen of it
        module = importlib.import_module(name)
        for kind, method, make in _WATCHED[name]:
            owner = getattr(module, kind)
            made = partial(make, f"{name}.{kind}", getattr(owner, method))
            state.watches.append(Patch(owner, method, made))


def _sending(client: str, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if patch.on:
            _look(client, request.method, lambda: request.url, lambda: _body(request))
        return original(self, request, *args, **kwargs)

    return send


def _awaited_sending(client: str, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    async def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if patch.on:
            _look(client, request.method, lambda: request.url, lambda: _body(request))
        return await original(self, request, *args, **kwargs)

    return send


def _requesting(client: str, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    """Of aiohttp."""

    async def request(self: Any, method: str, url: Any, **kwargs: Any) -> Any:
        if patch.on:
            body = kwargs.get("json")
            whole = getattr(self, "_build_url", str)  # it may be below the session's base URL
            _look(
                client,
                method,
                lambda: whole(url),
                lambda: kwargs.get("data") if body is None else body,
            )
        return await original(self, method, url, **kwargs)

    return request


_WATCHED: Final[Mapping[str, tuple[tuple[str, str, Callable[..., Any]], ...]]] = {
    "httpx": (("Client", "send", _sending), ("AsyncClient", "send", _awaited_sending)),
    "httpx2": (("Client", "send", _sending), ("AsyncClient", "send", _awaited_sending)),
    "requests": (("Session", "send", _sending),),
    "aiohttp": (("ClientSession", "_request", _requesting),),
}


def _body(request: Any) -> Any:
    """Of a request of httpx or of requests; a stream is not read."""
    return getattr(request, "body", None) or getattr(request, "content", None)


# --- looking --------------------------------------------------------------------------------
def _look(client: str, method: Any, where: Callable[[], Any], body: Callable[[], Any]) -> None:
    """Note it if it asks a model past the SDKs. Never raises."""
    with contextlib.suppress(Exception):  # the app's request goes out, whatever it is
        current = pushed()
        if current is None or not _is_watched(current) or str(method).upper() != "POST":
            return
        url = str(where())
        model = _model_of(url, body)
        if model is None or _is_at(url, current.scope.gateway_url):
            return
        frames = list(_frames())
        modules = [_module(frame) for frame in frames]
        if any(module in _OF_SDKS for module in modules):
            return  # the wire shim sees it
        if not client.startswith("httpx") and any(module in _UNDER for module in modules):
            return  # httpx's, which was looked at
        asking = acting() or current
        library, caller, provider, named = _sender(client, frames)
        found = Request(asking.path, library, caller, provider, named or model, _plain(url))
        current.scope.recorder.sightings.request(found)


def _is_watched(current: Acting) -> bool:
    scope = current.scope
    return not scope.is_outside and scope.recorder.keeps and scope.mode is not Mode.PRODUCTION


def _is_at(url: str, gateway_url: str | None) -> bool:
    return bool(gateway_url) and f"{url}/".startswith(f"{gateway_url}/")


def _model_of(url: str, body: Callable[[], Any]) -> str | None:
    """The model that a request asks, empty where it is not known; None if it asks none."""
    path = urlsplit(url).path.rstrip("/")
    inside = _MODEL_IN_PATH.search(path)
    if inside is not None:
        return inside[1]
    if not path.endswith(_WITH_MODEL):
        return None
    said = body()
    if isinstance(said, str | bytes):
        said = json.loads(said)
    model = said.get("model") if isinstance(said, Mapping) else None
    return model if isinstance(model, str) else None


def _frames() -> Iterator[FrameType]:
    """The calls around, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _sender(client: str, frames: list[FrameType]) -> tuple[str, str, str, str]:
    """(library, calling module, LiteLLM's provider, LiteLLM's model)."""
    outer = [frame for frame in frames if not _is_of(_module(frame), (*_BENEATH, __name__))]
    for frame in outer:
        module = _module(frame)
        library = next((one for one in _LIBRARIES if _is_of(module, (one,))), None)
        if library == _LITELLM:
            return (library, "", *_litellm(outer))
        if library is not None:
            return library, "", "", ""
    return client, _module(outer[0]) if outer else "", "", ""


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _litellm(frames: list[FrameType]) -> tuple[str, str]:
    """What LiteLLM itself works with."""
    for frame in frames:
        if _is_of(_module(frame), (_LITELLM,)):
            known = frame.f_locals
            provider, model = known.get("custom_llm_provider"), known.get("model")
            if isinstance(provider, str) and provider and isinstance(model, str):
                return provider, model.removeprefix(f"{provider}/")
    return "", ""


def _plain(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


__all__ = ["install", "uninstall"]
