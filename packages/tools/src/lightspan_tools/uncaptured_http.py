"""Record model requests that bypass the SDKs of OpenAI and Anthropic, in a dry run.

The core calls `install` in the app's process before each attempt of a dry run (entry point
`lightspan.dry_run`). httpx, httpx2, requests and aiohttp are then patched: at once if the app has
imported them, or else after their import. For each POST to the path of a model's API, the acting
agent, the calling package, the model and the URL are recorded, so that the report can recommend a
change. urllib and botocore are not patched.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from lightspan.capture._globals import state
from lightspan.capture.context import current_agent, make_span
from lightspan.capture.import_hooks import ImportHook, is_imported
from lightspan.capture.patch import Patch
from lightspan.capture.sdks import SDKS
from lightspan.schema.records import Mode
from lightspan.schema.spans import SpanKind, SpanStatus
from lightspan_tools.uncaptured_requests import Request

_MODEL_PATHS: Final = (
    *(path for sdk in SDKS for path in sdk.paths),
    *("/api/chat", "/api/generate"),  # Ollama
    *("/v1/chat", "/v2/chat"),  # Cohere
)
_GEMINI_PATHS: Final = (":generateContent", ":streamGenerateContent")
"""Paths of requests whose body names no model."""
_PLUMBING: Final = ("httpx", "httpx2", "requests", "aiohttp", "urllib3", "contextlib", "asyncio")
"""Packages that may be on the stack between the calling package and the patched method. They are
not the caller."""
_SDK_MODULES: Final = tuple(f"{sdk.name}._base_client" for sdk in SDKS)


def install() -> None:
    """Patch the installed HTTP clients to record requests to models. Idempotent.

    It imports no client. Other attempts of the process may be running, and code that looks for an
    optional client in `sys.modules`, such as openai's for httpx2, would find it half imported.
    """
    with state.lock:
        for package in _PATCHES:
            if is_imported(package):
                _patch(package)
            elif package not in state.import_hooks:
                state.import_hooks[package] = ImportHook(package, partial(_patch, package))


def _patch(package: str) -> None:
    """Patch the classes of an imported package, unless they are patched already."""
    if (hook := state.import_hooks.pop(package, None)) is not None:
        hook.stop()
    if package in state.http_patches:
        return
    patches = state.http_patches[package] = []
    classes, method, make = _PATCHES[package]
    for name in classes:
        with contextlib.suppress(Exception):  # of a version without the method
            owner = getattr(sys.modules[package], name)
            patches.append(Patch(owner, method, partial(make, getattr(owner, method))))


def _send(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if patch.on:
            _record(lambda: (request.method, request.url, _body(request)))
        return original(self, request, *args, **kwargs)

    return send


def _aiohttp_request(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    def request(self: Any, method: str, url: Any, **kwargs: Any) -> Any:
        if patch.on:
            body = kwargs.get("json") or kwargs.get("data")
            _record(lambda: (method, self._build_url(url), body), is_aiohttp=True)
        return original(self, method, url, **kwargs)

    return request


_CLIENTS: Final = ("Client", "AsyncClient")
_PATCHES: Final[Mapping[str, tuple[tuple[str, ...], str, Callable[..., Any]]]] = {
    "httpx": (_CLIENTS, "send", _send),
    "httpx2": (_CLIENTS, "send", _send),
    "requests": (("Session",), "send", _send),
    "aiohttp": (("ClientSession",), "_request", _aiohttp_request),
}
"""Package → classes, method, and function that makes the replacement of the method."""


def _body(request: Any) -> Any:
    """Return the body of a request of httpx or requests, without reading a stream."""
    return getattr(request, "body", None) or getattr(request, "content", None)


def _record(read: Callable[[], tuple[Any, Any, Any]], *, is_aiohttp: bool = False) -> None:
    """Record a request if it goes to a model and no SDK made it. Never raises.

    Args:
        read: returns method, URL and body of the request.
        is_aiohttp: whether aiohttp sends the request.
    """
    with contextlib.suppress(Exception):  # the app's request must be sent in any case
        current = current_agent()
        if current is None or current.scope.mode is not Mode.DEV:
            return
        method, target, body = read()
        url, gateway = str(target), current.scope.gateway_url
        model = _model_of(url, body) if str(method).upper() == "POST" else None
        if model is None or (gateway and f"{url}/".startswith(f"{gateway}/")):
            return
        modules = list(_calling_modules())
        if any(module in _SDK_MODULES for module in modules):
            return
        if is_aiohttp and any(module.startswith("httpx") for module in modules):
            return  # LiteLLM's transport below httpx, whose request was noted
        packages = (module.partition(".")[0] for module in modules)
        caller = next(package for package in packages if package not in _PLUMBING)
        parts = urlsplit(url)
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        attributes = Request(current.path, caller, model, address).attributes()
        status = SpanStatus.OK
        span = make_span(current, "lightspan.request", SpanKind.OTHER, attributes, status=status)
        current.scope.recorder.add(span)


def _model_of(url: str, body: Any) -> str | None:
    """Return the name of the model in a request.

    Empty for Gemini, whose request body does not name it. None if the request does not go to a
    model.
    """
    path = urlsplit(url).path.rstrip("/")
    if path.endswith(_GEMINI_PATHS):
        return ""
    if not path.endswith(_MODEL_PATHS):
        return None
    content = json.loads(body) if isinstance(body, str | bytes) else body
    model = content.get("model") if isinstance(content, Mapping) else None
    return model if isinstance(model, str) else None


def _calling_modules() -> Iterator[str]:
    """Yield the names of the modules on the stack, the innermost first, without this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        module = str(frame.f_globals.get("__name__", ""))
        if module != __name__:
            yield module
