"""The OpenAI client shim: one wrapper around `openai.OpenAI.request` and its async twin.

Inside a scope, a call of an agent that the algorithm routes to us is handed, as a copy of its
request, to a clean client of ours: whatever client the app built, whenever it built it, nothing of
it (key, headers, query, cookies, auth) travels along, and whatever the gateway answers comes back
through the SDK's own machinery (raw responses, streams, `.parse()`). Other agents' calls go where
the app pointed them, untouched, and are recorded. Outside a scope nothing changes.

`request` is stable from openai 2.0 to 3.x; hooks on httpx miss openai 3. It is inherited by the
client classes, so uninstalling is deleting the attribute.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from lightspan import conventions as c
from lightspan import messages, responses
from lightspan.emit import exception_attributes, make_span, text_of
from lightspan.records import CallOutcome, Mode
from lightspan.routing import Route, Target, split_path
from lightspan.scope import Acting, Root, acting, open_root, pushed
from lightspan.spans import Attributes, Span, SpanKind, SpanStatus, now_ns

MODEL_PATHS: Final = ("/chat/completions", "/completions", "/responses")
"""Requests that ask a model; every other request of the client is not ours to touch."""

_KEPT_HEADERS: Final = (
    "x-stainless-raw-response",
    "x-stainless-helper-method",
    "x-stainless-stream-helper",
    "idempotency-key",
)
_CLEAN: Final = "_lightspan_clean"
"""Attribute of our own clients: their requests are on their way already."""

_installed: dict[str, Any] = {}
_lock = threading.Lock()


# --- installing -----------------------------------------------------------------------------
def install() -> bool:
    """Wrap the OpenAI SDK if it is installed; idempotent. Returns whether it is wrapped."""
    with _lock:
        if _installed:
            return True
        if importlib.util.find_spec("openai") is None:
            return False
        import openai

        _installed["sync"] = _wrap(openai.OpenAI, _sync_shim)
        _installed["async"] = _wrap(openai.AsyncOpenAI, _async_shim)
        return True


def uninstall() -> None:
    """Leave the SDK's classes as they were. A wrapper put on top of ours keeps working."""
    with _lock:
        for undo in (_installed.pop("sync", None), _installed.pop("async", None)):
            if undo is not None:
                undo()


def installed() -> bool:
    """Whether the SDK is wrapped."""
    return bool(_installed)


class _Switch:
    """Whether a shim does anything: one that somebody wrapped cannot be taken out."""

    on = True


def _wrap(
    owner: Any, make: Callable[[Callable[..., Any], _Switch], Callable[..., Any]]
) -> Callable[[], None]:
    own, switch = vars(owner).get("request"), _Switch()
    shim = make(owner.request, switch)
    owner.request = shim

    def undo() -> None:
        switch.on = False
        if vars(owner).get("request") is not shim:
            return
        if own is None:
            del owner.request
        else:
            owner.request = own

    return undo


# --- the shims ------------------------------------------------------------------------------
def _sync_shim(original: Callable[..., Any], switch: _Switch) -> Callable[..., Any]:
    def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        call = _begin(self, options) if switch.on else None
        if call is None:
            return original(self, cast_to, options, **kwargs)
        client, sent = self, options
        if call.redirected:
            try:
                client, sent = _sync_client(call.origin), call.redirect(self, options)
            except Exception as error:
                call.not_redirected(error)
                return original(self, cast_to, options, **kwargs)
        try:
            result = original(client, cast_to, sent, **kwargs)
        except BaseException as error:
            call.guarded(call.failed, error)
            raise
        return _observe(call, result, streamed=bool(kwargs.get("stream")))

    return request


def _async_shim(original: Callable[..., Awaitable[Any]], switch: _Switch) -> Callable[..., Any]:
    async def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        call = _begin(self, options) if switch.on else None
        if call is None:
            return await original(self, cast_to, options, **kwargs)
        client, sent = self, options
        if call.redirected:
            try:
                client, sent = await _async_client(call.origin), call.redirect(self, options)
            except Exception as error:
                call.not_redirected(error)
                return await original(self, cast_to, options, **kwargs)
        try:
            result = await original(client, cast_to, sent, **kwargs)
        except BaseException as error:
            call.guarded(call.failed, error)
            raise
        return _observe(call, result, streamed=bool(kwargs.get("stream")))

    return request


def _begin(client: Any, options: Any) -> _Call | None:
    """The call to handle, or None if it is not ours. Never raises into the app."""
    if pushed() is None or getattr(client, _CLEAN, False):
        return None
    current = root = None
    try:
        if not _asks_a_model(options):
            return None
        current = acting()
        if current is None:
            return None
        root = open_root(current, None)
        current = current if root is None else root.acting
        address = getattr(client, "base_url", None)
        target = _target(current, address)
        if target.route is Route.APP and not current.scope.recorder.keeps:
            return None
        call_id = current.scope.new_call_id()
        return _Call(current, target, call_id, _body(options), now_ns(), address, root)
    except Exception as error:
        if current is not None:
            current.scope.recorder.damage(f"a model call could not be captured: {error!r}")
        if root is not None:
            root.close()
        return None


def _target(current: Acting, address: Any) -> Target:
    """Where the call goes that a client with this base URL makes."""
    routing, gateway = current.scope.routing, current.scope.gateway_url
    if routing.by_url and gateway and not f"{address}/".startswith(f"{gateway}/"):
        return Target(route=Route.APP)
    return routing.target(current.path)


def _asks_a_model(options: Any) -> bool:
    path = urlsplit(str(options.url)).path
    return str(options.method).lower() == "post" and path.endswith(MODEL_PATHS)


def _body(options: Any) -> dict[str, Any]:
    body = dict(options.json_data) if isinstance(options.json_data, Mapping) else {}
    return {**body, **(options.extra_json or {})}


def _server(address: Any) -> Attributes:
    """Host and port of a base URL; nothing else of it, which may hold a key."""
    try:
        url = urlsplit(str(address or ""))
        address, port = url.hostname, url.port
    except ValueError:  # a port that is no number
        return {}
    if not address:
        return {}
    return {c.SERVER_ADDRESS: address, **({} if port is None else {c.SERVER_PORT: port})}


@dataclass(frozen=True, slots=True)
class _Call:
    """One model call on its way."""

    acting: Acting
    target: Target
    call_id: str
    body: dict[str, Any]
    start_ns: int
    address: Any
    """The base URL of the app's client."""
    root: Root | None = None
    """The attempt that consists of this call alone."""

    @property
    def redirected(self) -> bool:
        return self.target.route is not Route.APP and self.acting.scope.gateway_url is not None

    @property
    def recorded_there(self) -> bool:
        """Whether the gateway records it; one that serves production does not."""
        return self.redirected and self.acting.scope.mode is not Mode.PRODUCTION

    @property
    def origin(self) -> str:
        return str(self.acting.scope.gateway_url)

    def redirect(self, client: Any, options: Any) -> Any:
        """A copy of the request that our clean client can send."""
        sent = options.model_copy()
        sent.url = _model_path(str(options.url))
        sent.params = {}
        sent.headers = {**_kept_headers(options), **self.headers()}
        sent.max_retries = options.get_max_retries(client.max_retries)
        if not _given(options.timeout):
            sent.timeout = client.timeout
        return sent

    def headers(self) -> dict[str, str]:
        """What the gateway needs to know of the call."""
        scope = self.acting.scope
        names = (quote(name, safe="") for name in split_path(self.acting.path))
        parent = self.acting.parent_span_id or c.NO_PARENT
        return {
            "Authorization": f"Bearer {scope.call_token or 'none'}",
            c.HEADER_CALL_ID: self.call_id,
            c.HEADER_ATTEMPT: scope.attempt_id,
            c.HEADER_AGENT: "/".join(names),
            c.HEADER_PARENT: f"00-{scope.trace_id}-{parent}-01",
            c.HEADER_PROTOCOL: str(c.PROTOCOL_VERSION),
        }

    def not_redirected(self, error: Exception) -> None:
        """Our error, not the app's: its call goes where it pointed, and nothing is trained."""
        self.acting.scope.recorder.damage(f"a model call could not be redirected: {error!r}")

    def failed(self, error: BaseException) -> None:
        """Record a call that brought no answer, or one that the app could not read."""
        if self.recorded_there and not _undelivered(error):
            return  # the gateway recorded what it answered, or notices itself that the app left
        if self.recorded_there:
            outcome = CallOutcome.UNDELIVERED
        elif isinstance(error, GeneratorExit | asyncio.CancelledError):
            outcome = CallOutcome.CANCELLED
        else:
            outcome = CallOutcome.ERROR
        answer = _as_mapping(getattr(error, "completion", None))  # such as a length that is over
        known = {c.CALL_OUTCOME: outcome, **answer_attributes(answer)}
        self.record({**known, **exception_attributes(error)}, text_of(error) or "error")

    def answered(self, answer: Mapping[str, Any]) -> None:
        """Record the answer of an endpoint that is not ours (ours records itself)."""
        if not self.recorded_there:
            self.record({c.CALL_OUTCOME: CallOutcome.OK, **answer_attributes(answer)}, None)

    def ended(self, result: StreamedAnswer | BaseException) -> None:
        """Record how a stream ended, once."""
        if not self.acting.scope.recorder.settle(self.call_id):
            return
        if isinstance(result, StreamedAnswer):
            self.answered(result.answer())
        else:
            self.failed(result)

    def record(self, attributes: Attributes, error: str | None) -> None:
        known: Attributes = {
            c.CALL_ID: self.call_id,
            c.ROUTE: self.target.route.value,
            **({} if self.redirected else _server(self.address)),
            **request_attributes(self.body),
        }
        name = f"{known[c.OPERATION_NAME]} {self.body.get('model', '')}".rstrip()
        status = SpanStatus.OK if error is None else SpanStatus.ERROR
        span: Span = make_span(
            self.acting,
            name,
            SpanKind.LLM,
            {**known, **attributes},
            start_ns=self.start_ns,
            status=status,
            status_message=error or "",
        )
        self.acting.scope.recorder.add(span)
        if self.root is not None:
            self.root.close()

    def guarded(self, note: Callable[..., None], *values: Any) -> None:
        """Note something of the call: what fails damages the attempt and never reaches the app."""
        try:
            note(*values)
        except Exception as error:
            self.acting.scope.recorder.damage(f"a model call could not be recorded: {error!r}")
            if self.root is not None:
                self.root.close()


_TRANSPORTS: Final = ("httpx", "httpx2", "httpcore", "httpcore2")


def _undelivered(error: BaseException) -> bool:
    """Whether the gateway's answer may not have arrived: the transport failed, or we were cut."""
    if isinstance(error, OSError | asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return "APIConnectionError" in names or type(error).__module__.split(".")[0] in _TRANSPORTS


def _model_path(url: str) -> str:
    """The path below `/v1` of a model request, whatever base path or deployment it had."""
    path = urlsplit(url).path
    return next(known for known in MODEL_PATHS if path.endswith(known))


def _given(value: Any) -> bool:
    return type(value).__name__ not in ("NotGiven", "Omit")


def _kept_headers(options: Any) -> dict[str, Any]:
    headers = options.headers if _given(options.headers) else {}
    return {key: value for key, value in headers.items() if key.lower() in _KEPT_HEADERS}


# --- what the app gets back -----------------------------------------------------------------
def _observe(call: _Call, result: Any, *, streamed: bool) -> Any:
    """The result, watched: never changed, never consumed."""
    if streamed:
        call.guarded(_observe_stream, call, result)
    elif not call.recorded_there:
        call.guarded(lambda: call.answered(_as_mapping(result)))
    return result


def _observe_stream(call: _Call, result: Any) -> None:
    stream = result.parse() if _is_raw(result) else result  # `.parse()` is cached by the SDK
    iterator = getattr(stream, "_iterator", None)
    if iterator is None:  # with_streaming_response: the body is not ours to read
        call.answered({})
        return
    give_up = partial(call.guarded, call.ended, GeneratorExit())
    call.acting.scope.recorder.expect(call.call_id, give_up)
    if call.acting.scope.mode is Mode.PRODUCTION:  # nobody will ask how it ended
        weakref.finalize(stream, give_up).atexit = False
    close = stream.close
    if hasattr(iterator, "__anext__"):
        stream._iterator = tee = _async_tee(call, iterator)

        async def aclose() -> None:
            call.guarded(call.ended, GeneratorExit())
            await tee.aclose()
            await close()

        stream.close = aclose
    else:
        stream._iterator = tee = _sync_tee(call, iterator)

        def sync_close() -> None:
            call.guarded(call.ended, GeneratorExit())
            close()

        stream.close = sync_close


def _is_raw(result: Any) -> bool:
    return type(result).__name__ == "LegacyAPIResponse"


def _as_mapping(result: Any) -> Mapping[str, Any]:
    """The answer as JSON; empty where the body is not ours to read."""
    if _is_raw(result):  # not `.parse()`: that runs the app's own parsers
        decoded = msgspec.json.decode(result.http_response.content)
        return decoded if isinstance(decoded, dict) else {}
    dump = getattr(result, "model_dump", None)
    if dump is None:
        return {}
    return dump(mode="json", exclude_unset=True, warnings=False)  # type: ignore[no-any-return]


def _sync_tee(call: _Call, iterator: Any) -> Any:
    gathered = StreamedAnswer()
    try:
        for chunk in iterator:
            if not call.recorded_there:
                call.guarded(gathered.add, chunk)
            yield chunk
    except BaseException as error:
        call.guarded(call.ended, error)
        raise
    finally:
        iterator.close()
    call.guarded(call.ended, gathered)


async def _async_tee(call: _Call, iterator: Any) -> Any:
    gathered = StreamedAnswer()
    try:
        async for chunk in iterator:
            if not call.recorded_there:
                call.guarded(gathered.add, chunk)
            yield chunk
    except BaseException as error:
        call.guarded(call.ended, error)
        raise
    finally:
        await iterator.aclose()
    call.guarded(call.ended, gathered)


class StreamedAnswer:
    """Puts the chunks of a streamed completion, or the events of a response, together again."""

    def __init__(self) -> None:
        self._response: responses.StreamedResponse | None = None
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: Any) -> None:
        """Add one chunk: a pydantic model of the SDK or a mapping."""
        data = chunk if isinstance(chunk, Mapping) else chunk.model_dump(exclude_unset=True)
        if not isinstance(data, Mapping):
            return
        if str(data.get("type", "")).startswith("response."):
            self._response = self._response or responses.StreamedResponse()
            self._response.add(data)
            return
        for key in ("id", "model", "usage"):
            if data.get(key) is not None:
                self._top[key] = data[key]
        for choice in data.get("choices") or ():
            self._add_choice(choice)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index", 0)
        known = self._choices.setdefault(index, {"message": {"role": "assistant"}, "calls": {}})
        delta = choice.get("delta") or {}
        text = delta.get("content") or choice.get("text")  # of a chat, of a text completion
        if text:
            known["message"]["content"] = known["message"].get("content", "") + text
        for call in delta.get("tool_calls") or ():
            _add_tool_call(known["calls"], call)
        if choice.get("finish_reason"):
            known["finish_reason"] = choice["finish_reason"]

    def answer(self) -> dict[str, Any]:
        """The completion as if it had not been streamed."""
        if self._response is not None:
            return self._response.answer()
        choices = []
        for index, known in sorted(self._choices.items()):
            calls = [known["calls"][key] for key in sorted(known["calls"])]
            message = {**known["message"], **({"tool_calls": calls} if calls else {})}
            choice = {"index": index, "message": message}
            choices.append({**choice, "finish_reason": known.get("finish_reason")})
        return {**self._top, "choices": choices}


def _add_tool_call(known: dict[int, dict[str, Any]], delta: Mapping[str, Any]) -> None:
    empty = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
    call = known.setdefault(int(delta.get("index", 0)), empty)
    call["id"] = delta.get("id") or call["id"]
    function = delta.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


# --- attributes of an LLM span --------------------------------------------------------------
def request_attributes(body: Mapping[str, Any]) -> Attributes:
    """GenAI attributes of a request for a chat or text completion, or a response."""
    is_response = responses.is_response(body)
    completes_text = "prompt" in body and "messages" not in body and not is_response
    plain = {
        c.OPERATION_NAME: "text_completion" if completes_text else "chat",
        c.REQUEST_MODEL: body.get("model"),
        c.REQUEST_STREAM: body.get("stream"),
        c.REQUEST_TEMPERATURE: body.get("temperature"),
        c.REQUEST_TOP_P: body.get("top_p"),
        c.REQUEST_MAX_TOKENS: body.get("max_completion_tokens")
        or body.get("max_tokens")
        or body.get("max_output_tokens"),
        c.REQUEST_SEED: body.get("seed"),
        c.REQUEST_CHOICES: body.get("n"),
        c.OPENINFERENCE_KIND: "LLM",
    }
    attributes: Attributes = {key: value for key, value in plain.items() if value is not None}
    asked = _prompts_of(body["prompt"]) if completes_text else body.get("messages")
    if is_response:
        asked = responses.messages_of(body, responses.as_it_is)
    if isinstance(asked, list | tuple):
        attributes[c.INPUT_MESSAGES] = messages.dump(asked)
    elif asked is not None:
        attributes[c.INPUT_MESSAGES] = messages.dump([asked])
    tools = body.get("tools")
    if tools:
        chat_tools = responses.tools_to_chat(tools) if is_response and _are(tools) else tools
        attributes[c.TOOL_DEFINITIONS] = messages.dump_json(chat_tools)
    return attributes


def _are(several: Any) -> bool:
    return isinstance(several, list | tuple)


def _prompts_of(prompt: Any) -> list[dict[str, Any]]:
    """The prompts of a text completion as messages; token ids as JSON."""
    is_one = not isinstance(prompt, list | tuple) or all(isinstance(i, int) for i in prompt)
    return [
        {"role": "user", "content": one if isinstance(one, str) else messages.dump_json(one)}
        for one in ([prompt] if is_one else prompt)
    ]


def answer_attributes(answer: Mapping[str, Any]) -> Attributes:
    """GenAI attributes of a chat or text completion, or a response."""
    if "output" in answer and "choices" not in answer:
        answer = responses.completion_of(answer)
    choices = answer.get("choices") or ()
    reasons = [str(choice.get("finish_reason")) for choice in choices]
    usage = answer.get("usage") or {}
    plain = {
        c.RESPONSE_ID: answer.get("id"),
        c.RESPONSE_MODEL: answer.get("model"),
        c.INPUT_TOKENS: usage.get("prompt_tokens"),
        c.OUTPUT_TOKENS: usage.get("completion_tokens"),
    }
    attributes: Attributes = {key: value for key, value in plain.items() if value is not None}
    if choices:
        attributes[c.FINISH_REASONS] = [*reasons]
        attributes[c.OUTPUT_MESSAGES] = messages.dump(
            {**_message_of(choice), "finish_reason": choice.get("finish_reason")}
            for choice in choices
        )
    return attributes


def _message_of(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    if "text" in choice:
        return {"role": "assistant", "content": choice["text"]}
    return choice.get("message") or {}


# --- clean clients --------------------------------------------------------------------------
_sync_clients: dict[str, Any] = {}
_async_clients: weakref.WeakKeyDictionary[Any, dict[str, _AsyncClient]] = (
    weakref.WeakKeyDictionary()
)


def _sync_client(origin: str) -> Any:
    with _lock:
        if origin not in _sync_clients:
            import openai

            if not _sync_clients:
                atexit.register(close)
            http = openai.DefaultHttpxClient(trust_env=False)
            _sync_clients[origin] = _bare(openai.OpenAI, origin, http)
        return _sync_clients[origin]


class _AsyncClient:
    """A clean client of one event loop, closed when the loop shuts its generators down.

    `asyncio.run` does that before it closes the loop; nobody else would tell us.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._keeper = self._keep()

    async def open(self) -> None:
        await anext(self._keeper)

    async def close(self) -> None:
        await self._keeper.aclose()

    async def _keep(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self.client.close()


async def _async_client(origin: str) -> Any:
    clients = _async_clients.setdefault(asyncio.get_running_loop(), {})
    if origin not in clients:
        import openai

        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        clients[origin] = made = _AsyncClient(_bare(openai.AsyncOpenAI, origin, http))
        await made.open()
    return clients[origin].client


def _bare(kind: Any, origin: str, http: Any) -> Any:
    """A client that carries nothing of the environment: no organisation, project or headers."""
    client = kind(api_key="per-call", base_url=f"{origin.rstrip('/')}/v1", http_client=http)
    client.organization = client.project = None
    client._custom_headers = {}
    setattr(client, _CLEAN, True)
    return client


async def aclose() -> None:
    """Close the clean clients of the running loop (a runner calls this before its loop ends)."""
    clients = _async_clients.pop(asyncio.get_running_loop(), {})
    for client in clients.values():
        await client.close()


def close() -> None:
    """Close the clean synchronous clients."""
    with _lock:
        clients = list(_sync_clients.values())
        _sync_clients.clear()
    for client in clients:
        client.close()
