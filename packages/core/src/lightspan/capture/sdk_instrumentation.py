"""The client shim: one wrapper around `openai.OpenAI.request` and its async twin, and the same one
around the `request` of Anthropic's clients.

Inside a scope, a call of an agent that the algorithm routes to us is handed, as a copy of its
request, to a clean client of ours: whatever client the app built, whenever it built it, nothing of
it (key, headers, query, cookies, auth) travels along, and whatever the gateway answers comes back
through the SDK's own machinery (raw responses, streams, `.parse()`). Other agents' calls go where
the app pointed them, untouched, and are recorded. Of an agent whose instructions are learned, or
are used as they were learned, a copy of the request says other ones (`candidates`), wherever it
goes. Outside a scope nothing changes unless the user said so.

`request` is stable from openai 2.0 to 3.x and in anthropic; hooks on httpx miss the newest of both.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from lightspan.capture import misattributed_calls, uncaptured_http
from lightspan.capture._globals import state
from lightspan.capture.context import (
    AgentContext,
    AttemptHandle,
    CallEnd,
    current_context,
    make_span,
    notify_call_start,
    start_attempt,
)
from lightspan.capture.gateway_clients import aclose, async_client, close, is_clean, sync_client
from lightspan.capture.import_hooks import Awaited
from lightspan.capture.patch import Patch
from lightspan.capture.prompt_overrides import note, reading_attributes, reading_of, with_text
from lightspan.capture.response_observer import as_mapping, observe
from lightspan.capture.sdks import ANTHROPIC, SDKS, Sdk
from lightspan.schema import semconv as c
from lightspan.schema.genai_attributes import (
    StreamedAnswer,
    answer_attributes,
    has_content,
    request_attributes,
    requested_choices,
)
from lightspan.schema.genai_messages import MAPPING
from lightspan.schema.records import Mode
from lightspan.schema.redaction import add_client_key
from lightspan.schema.routing import Route, Target, split_path
from lightspan.schema.semconv import exception_attributes
from lightspan.schema.spans import Attributes, Span, SpanKind, SpanStatus, now_ns, text_of
from lightspan.schema.system_prompts import Reading
from lightspan.schema.token_records import CallOutcome

_KEPT_HEADERS: Final = (
    "x-stainless-raw-response",
    "x-stainless-helper-method",
    "x-stainless-stream-helper",
    "idempotency-key",
)


# --- installing -----------------------------------------------------------------------------
def install() -> None:
    """Wrap the SDKs that are imported, and the others once somebody imports them; idempotent.

    None is imported for it: openai takes longer than all else that a runner needs, anthropic too.

    Raises:
        Exception: an SDK that is imported cannot be wrapped. The others are.
    """
    with state.lock:
        failed: Exception | None = None
        for sdk in SDKS:
            try:
                _wrap_now_or_later(sdk)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed


def _wrap_now_or_later(sdk: Sdk) -> None:
    waiting = state.awaited.get(sdk.name)  # before the shims: it goes when they are there
    if sdk.name in state.shims:
        return
    module = sys.modules.get(sdk.name)
    # an import under way is left to its own thread, which may want our lock before it ends
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        if waiting is not None:
            waiting.stop()
        _wrap(sdk)
    elif waiting is None:
        state.awaited[sdk.name] = Awaited(sdk.name, partial(_wrap_imported, sdk))


def _wrap_imported(sdk: Sdk) -> None:
    # The lock is not taken: whoever has it may be waiting for this import.
    try:
        _wrap(sdk)
    except Exception as error:  # the app gets its import; the next attempt's scope tries it again
        current = current_context()
        if current is not None:
            current.scope.recorder.add_capture_error(
                f"a client SDK could not be wrapped: {error!r}"
            )


def _wrap(sdk: Sdk) -> None:
    classes = sdk.wrapped_classes()  # first: one that is missing must not leave the other wrapped
    state.shims[sdk.name] = [
        Patch(owner, "request", partial(shim, sdk, owner.request))
        for owner, shim in zip(classes, (_sync_shim, _async_shim), strict=True)
    ]
    state.awaited.pop(sdk.name, None)


def uninstall() -> None:
    """Leave the SDKs' classes as they were. A wrapper put on top of ours keeps working."""
    with state.lock:
        while state.awaited:
            state.awaited.popitem()[1].stop()
        while state.shims:
            for shim in state.shims.popitem()[1]:
                shim.undo()
        uncaptured_http.uninstall()


def installed() -> bool:
    """Whether SDKs are wrapped, or will be."""
    return bool(state.shims or state.awaited)


# --- the shims ------------------------------------------------------------------------------
def _sync_shim(sdk: Sdk, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        call = _begin(sdk, self, options) if patch.on else None
        if call is None:
            return original(self, cast_to, options, **kwargs)
        client, sent = self, call.instructed(options)
        if call.redirected:
            try:
                client, sent = sync_client(sdk, call.origin), call.redirect(self, sent)
            except Exception as error:
                call.not_redirected(error)
                return original(self, cast_to, options, **kwargs)
        try:
            result = original(client, cast_to, sent, **kwargs)
        except BaseException as error:
            call.guarded(call.failed, error)
            raise
        return observe(call, result, streamed=bool(kwargs.get("stream")))

    return request


def _async_shim(
    sdk: Sdk, original: Callable[..., Awaitable[Any]], patch: Patch
) -> Callable[..., Any]:
    async def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        call = _begin(sdk, self, options) if patch.on else None
        if call is None:
            return await original(self, cast_to, options, **kwargs)
        client, sent = self, call.instructed(options)
        if call.redirected:
            try:
                client, sent = await async_client(sdk, call.origin), call.redirect(self, sent)
            except Exception as error:
                call.not_redirected(error)
                return await original(self, cast_to, options, **kwargs)
        try:
            result = await original(client, cast_to, sent, **kwargs)
        except BaseException as error:
            call.guarded(call.failed, error)
            raise
        return observe(call, result, streamed=bool(kwargs.get("stream")))

    return request


def _begin(sdk: Sdk, client: Any, options: Any) -> _SentCall | None:
    """The call to handle, or None if it is not ours. Never raises into the app."""
    current, root = current_context(), None
    if is_clean(client) or (current is None and not state.starters):
        return None
    try:
        if not _asks_a_model(sdk, options):
            return None
        if current is None:
            misattributed_calls.look(None)
            return None
        current, root = start_attempt(current, None)
        misattributed_calls.look(current)
        told = notify_call_start(current)
        add_client_key(getattr(client, "api_key", None))
        address = getattr(client, "base_url", None)
        path, body = current.path, _body(options)
        target = _target(current, path, address)
        reading = reading_of(current, body)
        if reading is None and target.route is Route.APP and not current.scope.recorder.keeps:
            return None
        call_id = current.scope.new_call_id()
        return _SentCall(
            sdk, current, path, target, call_id, body, now_ns(), address, told, reading, root
        )
    except Exception as error:
        if current is not None:
            current.scope.recorder.add_capture_error(
                f"a model call could not be captured: {error!r}"
            )
        if root is not None:
            root.close()
        return None


def _target(current: AgentContext, path: str, address: Any) -> Target:
    """Where the call goes that a client with this base URL makes."""
    routing, gateway = current.scope.routing, current.scope.gateway_url
    if current.scope.follows_urls and gateway and not f"{address}/".startswith(f"{gateway}/"):
        return Target(route=Route.APP)
    return routing.target(path)


def _asks_a_model(sdk: Sdk, options: Any) -> bool:
    return str(options.method).lower() == "post" and _model_path(sdk, options) is not None


def _model_path(sdk: Sdk, options: Any) -> str | None:
    path, _, _ = str(options.url).partition("?")
    return sdk.path(path.partition("#")[0])


def _body(options: Any) -> dict[str, Any]:
    body = dict(options.json_data) if isinstance(options.json_data, MAPPING) else {}
    if options.extra_json:
        body.update(options.extra_json)
    return body


def _server(address: Any) -> Attributes:
    """Return host and port of the SDK's base URL; the rest of it may hold a key."""
    host, port = getattr(address, "host", ""), getattr(address, "port", None)
    if not host:
        return {}
    return (
        {c.SERVER_ADDRESS: host} if port is None else {c.SERVER_ADDRESS: host, c.SERVER_PORT: port}
    )


@dataclass(slots=True, eq=False)
class _SentCall:
    """One model call on its way."""

    sdk: Sdk
    acting: AgentContext
    path: str
    """Of the agent that acts."""
    target: Target
    call_id: str
    body: dict[str, Any]
    start_ns: int
    address: Any
    """The base URL of the app's client."""
    told: CallEnd
    """See `scope.notify_call_start`."""
    reading: Reading | None = None
    """What its instructions are, and are to be; None: they are left alone."""
    root: AttemptHandle | None = None
    """The attempt that consists of this call alone."""
    redirected: bool = field(init=False)

    def __post_init__(self) -> None:
        is_ours = self.target.route is not Route.APP
        self.redirected = is_ours and self.acting.scope.gateway_url is not None

    @property
    def recorded_there(self) -> bool:
        """Whether the gateway records it; one that serves production does not."""
        return self.redirected and self.acting.scope.mode is not Mode.PRODUCTION

    @property
    def origin(self) -> str:
        return str(self.acting.scope.gateway_url)

    def instructed(self, options: Any) -> Any:
        """A copy of the request with the instructions that are to be sent; itself, if they are
        its own. What fails damages the attempt: the app's request is sent then."""
        if self.reading is None:
            return options
        try:
            sent = with_text(options, self.reading) if self.reading.is_changed else options
            if self.recorded_there:  # by what knows of the text that was sent alone
                note(self.acting, {c.PROMPT_CALL: self.call_id, **reading_attributes(self.reading)})
            return sent
        except Exception as error:
            self.acting.scope.recorder.add_capture_error(
                f"the instructions of a model call could not be replaced: {error!r}"
            )
            return options

    def redirect(self, client: Any, options: Any) -> Any:
        """A copy of the request that our clean client can send."""
        sent = options.model_copy()
        sent.url = _model_path(self.sdk, options)
        sent.params = {}
        sent.headers = {**_kept_headers(options), **self.headers()}
        sent.max_retries = options.get_max_retries(client.max_retries)
        if not _given(options.timeout):
            sent.timeout = client.timeout
        return sent

    def headers(self) -> dict[str, str]:
        """What the gateway needs to know of the call."""
        scope = self.acting.scope
        names = (quote(name, safe="") for name in split_path(self.path))
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
        self.acting.scope.recorder.add_capture_error(
            f"a model call could not be redirected: {error!r}"
        )

    def failed(self, error: BaseException, answer: Mapping[str, Any] | None = None) -> None:
        """Record a call that brought no answer, one that the app could not read, or left.

        Args:
            error: what ended it.
            answer: what came of it before.
        """
        is_left = isinstance(error, GeneratorExit)
        self.told(is_left and has_content(answer or {}))
        if is_left or isinstance(error, asyncio.CancelledError):
            # At the gateway too, which may notice it when the attempt has been reported already.
            outcome = CallOutcome.CANCELLED
        elif not self.recorded_there:
            outcome = CallOutcome.ERROR
        elif _undelivered(error):
            outcome = CallOutcome.UNDELIVERED
        else:
            return  # the gateway recorded what it answered
        if answer is None:
            answer = as_mapping(getattr(error, "completion", None))  # of a length that is over
        known = {c.CALL_OUTCOME: outcome, **answer_attributes(answer)}
        if is_left:  # which is no error
            self.record(known, SpanStatus.UNSET)
            return
        known |= exception_attributes(error)
        self.record(known, SpanStatus.ERROR, text_of(error) or "error")

    def answered(self, answer: Mapping[str, Any]) -> None:
        """Record the answer of an endpoint that is not ours (ours records itself)."""
        self.told(True)
        if not self.recorded_there:
            self.record({c.CALL_OUTCOME: CallOutcome.OK.value, **answer_attributes(answer)})

    def chunks(self) -> StreamedAnswer:
        """See `answers.Asked`."""
        return StreamedAnswer(choices=requested_choices(self.body))

    def expect(self, give_up: Callable[[], None], response: Any) -> None:
        """See `answers.Asked`."""
        self.acting.scope.recorder.expect(self.call_id, give_up)
        if self.acting.scope.mode is Mode.PRODUCTION:  # nobody will ask how it ended
            weakref.finalize(response, give_up).atexit = False

    def ended(self, answer: Mapping[str, Any], error: BaseException | None) -> None:
        """See `answers.Asked`."""
        if not self.acting.scope.recorder.settle(self.call_id):
            return
        if error is None:
            self.answered(answer)
        else:
            self.failed(error, answer)

    def record(
        self, attributes: Attributes, status: SpanStatus = SpanStatus.OK, message: str = ""
    ) -> None:
        known: Attributes = {
            c.AGENT_PATH: self.path,
            c.CALL_ID: self.call_id,
            c.ROUTE: str(self.target.route),
        }
        if not self.redirected:
            known |= self._elsewhere()
        known |= request_attributes(self._sent_body())
        if self.reading is not None:
            known |= reading_attributes(self.reading)
        name = f"{known[c.OPERATION_NAME]} {self.body.get('model', '')}".rstrip()
        known |= attributes
        span: Span = make_span(
            self.acting,
            name,
            SpanKind.LLM,
            known,
            start_ns=self.start_ns,
            status=status,
            status_message=message,
        )
        self.acting.scope.recorder.add(span)
        if self.root is not None:
            self.root.close()

    def _sent_body(self) -> Mapping[str, Any]:
        """The request's body as it was sent."""
        reading = self.reading
        if reading is None or reading.slot is None or reading.sent is None:
            return self.body
        return {**self.body, reading.slot.key: reading.slot.put(self.body, reading.sent)}

    def _elsewhere(self) -> Attributes:
        """Who answers, where that is not ours."""
        server = _server(self.address)
        return {**server, c.PROVIDER_NAME: self.sdk.name} if self.sdk is ANTHROPIC else server

    def guarded(self, note: Callable[..., None], *values: Any) -> None:
        """Note something of the call: what fails damages the attempt and never reaches the app."""
        try:
            note(*values)
        except Exception as error:
            self.acting.scope.recorder.add_capture_error(
                f"a model call could not be recorded: {error!r}"
            )
            if self.root is not None:
                self.root.close()


_TRANSPORTS: Final = ("httpx", "httpx2", "httpcore", "httpcore2")


def _undelivered(error: BaseException) -> bool:
    """Whether the gateway's answer may not have arrived: the transport failed, or we were cut."""
    if isinstance(error, OSError | asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return "APIConnectionError" in names or type(error).__module__.split(".")[0] in _TRANSPORTS


def _given(value: Any) -> bool:
    return type(value).__name__ not in ("NotGiven", "Omit")


def _kept_headers(options: Any) -> dict[str, Any]:
    headers = options.headers if _given(options.headers) else {}
    return {key: value for key, value in headers.items() if key.lower() in _KEPT_HEADERS}


__all__ = ["aclose", "close", "install", "installed", "uninstall"]
