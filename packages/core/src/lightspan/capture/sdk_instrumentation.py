"""Instrument the OpenAI and Anthropic SDKs by one wrapper around their clients' `request`.

What the wrapper does with an agent's call inside an attempt:

- If the algorithm routes the call to the gateway, a copy of the request is sent there by a clean
  client (`gateway_clients`). Key, headers, query, cookies and auth of the app's client are not
  sent. This also works for clients that were created before the attempt. The SDK processes the
  gateway's answer as usual (raw responses, streams, `.parse()`).
- Otherwise the call goes where the app sends it, and is recorded.
- If the agent's instructions are being learned, or learned instructions are applied
  (`prompt_overrides`), a copy of the request with the replaced instructions is sent.

Outside every attempt the wrapper does nothing, unless `lightspan.record`, `lightspan.connect` or
`lightspan.apply_prompts` is active.

The method `request` is stable from openai 2.0 to 3.x and in anthropic. Hooks on httpx would miss
the newest versions of both SDKs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from lightspan.capture import context, gateway_clients, prompt_overrides
from lightspan.capture._globals import state
from lightspan.capture.call_errors import is_unreachable
from lightspan.capture.context import current_context, make_span, notify_call_start, start_attempt
from lightspan.capture.context_types import AgentContext, AttemptHandle, CallEnd
from lightspan.capture.gateway_clients import aclose as aclose, close as close, sync_client
from lightspan.capture.import_hooks import ImportHook, is_imported
from lightspan.capture.misattributed_calls import check_call
from lightspan.capture.patch import Patch
from lightspan.capture.prompt_overrides import reading_of, record_prompt, with_text
from lightspan.capture.response_observer import as_mapping, observe
from lightspan.capture.sdks import ANTHROPIC, SDKS, Sdk
from lightspan.errors import EngineError
from lightspan.schema import genai_attributes, semconv as c
from lightspan.schema.genai_attributes import ANSWER_FIELDS
from lightspan.schema.genai_messages import MAPPING
from lightspan.schema.media import images_into
from lightspan.schema.records import Mode
from lightspan.schema.redaction import add_client_key
from lightspan.schema.routing import Route, Target, split_path
from lightspan.schema.semconv import exception_attributes
from lightspan.schema.spans import Attributes, SpanKind, SpanStatus, now_ns, text_of
from lightspan.schema.system_prompts import Reading
from lightspan.schema.token_records import CallOutcome

log = logging.getLogger(__name__)

_FORWARDED_HEADERS: Final = (
    "x-stainless-raw-response",
    "x-stainless-helper-method",
    "x-stainless-stream-helper",
    "idempotency-key",
)


# --- installing -----------------------------------------------------------------------------
def install() -> None:
    """Wrap the SDKs of `sdks`, each when it is imported or now if it already is. Idempotent.

    It imports no SDK, because importing openai or anthropic takes longer than everything else that
    a runner needs.

    Raises:
        Exception: an imported SDK cannot be wrapped; the other SDK is wrapped all the same.
    """
    with state.lock, ExitStack() as stack:  # which calls all, and raises the last error
        for sdk in reversed(SDKS):
            stack.callback(_wrap_now_or_later, sdk)


def _wrap_now_or_later(sdk: Sdk) -> None:
    hook = state.import_hooks.get(sdk.name)  # read first: it is removed after the patches are set
    patches = state.sdk_patches.get(sdk.name, [])
    if patches and not any(patch.is_removed for patch in patches):
        return
    for patch in patches:
        patch.undo()
    if is_imported(sdk.name):  # the thread of an import under way may need `state.lock`
        if hook is not None:
            hook.stop()
        _wrap(sdk)
    elif hook is None:
        state.import_hooks[sdk.name] = ImportHook(sdk.name, partial(_wrap_imported, sdk))


def _wrap_imported(sdk: Sdk) -> None:
    # Without the lock: its holder may be waiting for this import.
    try:
        _wrap(sdk)
    except Exception as error:  # the app's import succeeds; the next attempt wraps the SDK again
        current = current_context()
        if current is not None:
            current.add_capture_error("a client SDK could not be wrapped", error)


def _wrap(sdk: Sdk) -> None:
    classes = sdk.wrapped_classes()  # first: if one is missing, the other must not be wrapped
    state.sdk_patches[sdk.name] = [
        Patch(owner, "request", partial(wrapper, sdk, owner.request))
        for owner, wrapper in zip(classes, (_sync_wrapper, _async_wrapper), strict=True)
    ]
    state.sdk_patches[sdk.name] += [
        Patch(owner, _REPEAT, partial(_repeat_wrapper, getattr(owner, _REPEAT)))
        for owner in classes
        if hasattr(owner, _REPEAT)
    ]
    state.import_hooks.pop(sdk.name, None)
    if (version := str(getattr(sdk.module(), "__version__", ""))).startswith(("0.", "1.")):
        log.warning("lightspan: %s %s is untested: use version 2.0 or later", sdk.name, version)


def uninstall() -> None:
    """Undo `install`.

    A wrapper of another library that replaced `request` after `install` continues to work.
    """
    with state.lock:
        while state.import_hooks:
            state.import_hooks.popitem()[1].stop()
        for patches in (state.sdk_patches, state.http_patches):
            while patches:
                for patch in patches.popitem()[1]:
                    patch.undo()


def installed() -> bool:
    """Return whether SDKs are wrapped, or will be once imported."""
    return bool(state.sdk_patches or state.import_hooks)


# --- the wrappers ---------------------------------------------------------------------------
def _sync_wrapper(sdk: Sdk, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        call = _begin(sdk, self, options) if patch.on else None
        if call is None:
            return original(self, cast_to, options, **kwargs)
        client, sent = self, call.observed(call.with_instructions(options))
        if call.is_redirected:
            try:
                client, sent = sync_client(sdk, call.origin), call.redirect(self, sent)
            except Exception as error:
                call.add_capture_error("redirected", error)
                return original(self, cast_to, options, **kwargs)
        with call:
            result = original(client, cast_to, sent, **kwargs)
        return observe(call, result, streamed=bool(kwargs.get("stream")))

    return request


def _async_wrapper(sdk: Sdk, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    async def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        call = _begin(sdk, self, options) if patch.on else None
        if call is None:
            return await original(self, cast_to, options, **kwargs)
        client, sent = self, call.observed(call.with_instructions(options))
        if call.is_redirected:
            try:
                client = await gateway_clients.async_client(sdk, call.origin)
                sent = call.redirect(self, sent)
            except Exception as error:
                call.add_capture_error("redirected", error)
                return await original(self, cast_to, options, **kwargs)
        with call:
            result = await original(client, cast_to, sent, **kwargs)
        return observe(call, result, streamed=bool(kwargs.get("stream")))

    return request


_REPEAT: Final = "_calculate_retry_timeout"
"""Name of the method that the clients of both SDKs call before each repetition of a request."""
_sending: ContextVar[SdkCall | None] = ContextVar("lightspan-sending", default=None)
"""The call that the SDK is sending; None outside a request."""


def _repeat_wrapper(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    def calculate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if patch.on and (call := _sending.get()) is not None:
            call.repeats += 1
        return original(self, *args, **kwargs)

    return calculate


def _begin(sdk: Sdk, client: Any, options: Any) -> SdkCall | None:
    """Begin the capture of a request; return None if the request is not captured.

    Raises:
        PromptNotAppliedError: a learned prompt cannot be applied (`reading_of`). No other error is
            raised.
    """
    current, attempt = current_context(), None
    if gateway_clients.is_clean(client) or (current is None and "runner" not in state.carriers):
        return None
    try:
        url = _model_path(sdk, options)
        if str(options.method).lower() != "post" or url is None:
            return None
        if url in sdk.counts:
            return _count(sdk, client)
        if current is None:
            check_call(None)
            return None
        current, attempt = start_attempt(current, None)
        check_call(current)
        notify_end = notify_call_start(current)
        add_client_key(getattr(client, "api_key", None))
        target, body = _target(current, client.base_url), _body(sdk, options)
        reading = reading_of(current, body)
        if reading is None and target.route is Route.APP and not current.scope.recorder.keeps:
            return None
        return SdkCall(
            sdk=sdk,
            context=current,
            target=target,
            call_id=current.scope.recorder.new_call_id(),
            body=body,
            address=client.base_url,
            notify_end=notify_end,
            reading=reading,
            attempt=attempt,
        )
    except Exception as error:
        is_strict = isinstance(error, prompt_overrides.PromptNotAppliedError)
        if current is not None and not is_strict:
            current.add_capture_error("a model call could not be captured", error)
        if attempt is not None:
            attempt.close()
        if is_strict:
            raise
        return None


def _count(sdk: Sdk, client: Any) -> SdkCall | None:
    """Return the redirection of a request that counts a prompt's tokens; it is not recorded.

    None if it goes where the app sends it. Providers and endpoints have tokenizers of their own.
    """
    current = context.current_agent()
    target = _target(current, client.base_url) if current else Target(route=Route.APP)
    if current is None or target.route in (Route.APP, Route.ENDPOINT):
        return None
    return SdkCall(sdk=sdk, context=current, target=target, call_id="count", has_ended=True)


def _target(current: AgentContext, address: Any) -> Target:
    """Return where a model call goes: to a policy, to another endpoint, or where the app sends it.

    If the attempt has `follows_urls`, only calls to the gateway's URL are routed. Other calls go
    where the app sends them.

    Args:
        current: context of the calling agent.
        address: base URL of the app's client.
    """
    routing, gateway = current.scope.routing, current.scope.gateway_url
    if current.scope.follows_urls and gateway and not f"{address}/".startswith(f"{gateway}/"):
        return Target(route=Route.APP)
    return routing.target(current.path)


def _model_path(sdk: Sdk, options: Any) -> str | None:
    path, _, _ = str(options.url).partition("?")
    return sdk.path(path.partition("#")[0])


def _body(sdk: Sdk, options: Any) -> dict[str, Any]:
    # The newest SDKs read files and iterators when they send. They can be read once, and the body
    # that is recorded must be the one that is sent.
    prepare = getattr(sys.modules.get(f"{sdk.name}._base_client"), "prepare_request_data", None)
    if prepare is not None:
        options.json_data = prepare(options.json_data, location="body")
    data = options.json_data
    if data is None and isinstance(content := getattr(options, "content", None), bytes):
        data = json.loads(content)
    return {**(data if isinstance(data, MAPPING) else {}), **(options.extra_json or {})}


@dataclass(slots=True, eq=False, kw_only=True)
class SdkCall:
    """One model call of an SDK's client.

    As a context manager it encloses the request, and records the exception that the request raises.
    """

    sdk: Sdk
    context: AgentContext
    target: Target
    call_id: str
    body: dict[str, Any] = field(default_factory=dict)
    start_ns: int = field(default_factory=now_ns)
    address: Any = None
    """Base URL of the app's client."""
    notify_end: CallEnd = bool
    """Function to call at the end of the call (`context.notify_call_start`)."""
    reading: Reading | None = None
    """The request's instructions, and the instructions to send instead. None if the agent's
    instructions are neither recorded nor replaced."""
    attempt: AttemptHandle | None = None
    """The attempt that was opened for this call alone; None if the call belongs to a larger
    attempt."""
    has_ended: bool = False
    """Whether the call is recorded. True from the start for a request that counts tokens."""
    repeats: int = 0
    """How often the SDK has sent the request again."""
    unparsed: Any = None
    """The answer that the SDK gave to the parser of the app's schema; None if it gave none."""

    @property
    def is_redirected(self) -> bool:
        """Whether the call goes to the gateway."""
        return self.target.route is not Route.APP and self.context.scope.gateway_url is not None

    @property
    def is_recorded_elsewhere(self) -> bool:
        """Whether the gateway records the call, so that this process does not record it.

        The gateway does not record calls of an app in production.
        """
        return self.is_redirected and self.context.scope.mode is not Mode.PRODUCTION

    @property
    def origin(self) -> str:
        return str(self.context.scope.gateway_url)

    def __enter__(self) -> None:
        # the attempt, or the process, may end first
        give_up = partial(self.guarded, self.ended, {}, GeneratorExit())
        if not self.has_ended:
            self.context.scope.recorder.register_pending(self.call_id, give_up)
        _sending.set(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _sending.set(None)
        if error is not None:
            self.guarded(self.ended, None, error)

    def add_capture_error(self, action: str, error: Exception) -> None:
        """Record an error as a capture error of the attempt.

        Args:
            action: what could not be done with the call: `"redirected"` or `"recorded"`.
            error: the error.
        """
        self.context.add_capture_error(f"a model call could not be {action}", error)

    def with_instructions(self, options: Any) -> Any:
        """Return a copy of the request `options` with the instructions to send.

        Returns `options` itself if the instructions stay as they are. If they cannot be replaced,
        it returns `options` too, and records a capture error.
        """
        if self.reading is None:
            return options
        try:
            is_changed = self.reading.sent not in (None, self.reading.original)
            sent = with_text(options, self.reading) if is_changed else options
            if self.is_recorded_elsewhere:  # the gateway's record has only the text that was sent
                attributes = prompt_overrides.reading_attributes(self.reading)
                record_prompt(self.context, {c.PROMPT_CALL: self.call_id, **attributes})
            return sent
        except Exception as error:
            self.context.add_capture_error("instructions of a call could not be replaced", error)
            return options

    def observed(self, options: Any) -> Any:
        """Return a copy of the request whose parser also sets `unparsed`.

        Returns `options` itself if the SDK parses nothing, or if the gateway records the call.
        """
        parser = getattr(options, "post_parser", None)
        if self.is_recorded_elsewhere or not callable(parser):
            return options

        def parse(answer: Any) -> Any:
            self.unparsed = answer
            return parser(answer)

        return options.model_copy(update={"post_parser": parse})

    def redirect(self, client: Any, options: Any) -> Any:
        """Return a copy of the request for a clean client, which sends it to the gateway.

        Args:
            client: the app's client. The copy has its timeout and number of retries.
            options: the request of the app.
        """
        sent = options.model_copy()
        sent.url = _model_path(self.sdk, options)
        sent.params = {}
        sent.headers = {**_forwarded_headers(options), **self.headers()}
        sent.max_retries = options.get_max_retries(client.max_retries)
        if type(options.timeout).__name__ in ("NotGiven", "Omit"):
            sent.timeout = client.timeout
        return sent

    def headers(self) -> dict[str, str]:
        """Return the headers that identify attempt, agent and call for the gateway."""
        scope = self.context.scope
        names = (quote(name, safe="") for name in split_path(self.context.path))
        parent = self.context.parent_span_id or c.NO_PARENT
        return {
            "Authorization": f"Bearer {scope.call_token or 'none'}",
            c.HEADER_CALL_ID: self.call_id,
            c.HEADER_ATTEMPT: scope.attempt_id,
            c.HEADER_AGENT: "/".join(names),
            c.HEADER_PARENT: f"00-{scope.trace_id}-{parent}-01",
            c.HEADER_PROTOCOL: str(c.PROTOCOL_VERSION),
        }

    def failed(self, error: BaseException, answer: Mapping[str, Any] | None = None) -> None:
        """Record that the call ended by `error`, unless the gateway has recorded it.

        Args:
            error: the exception that ended the call; GeneratorExit if the app abandoned the answer.
            answer: the answer received so far; None to take `unparsed`.
        """
        is_abandoned = isinstance(error, GeneratorExit)
        has_content = any((answer or {}).get(key) for key in ("choices", "output", "content"))
        self.notify_end(is_abandoned and has_content)
        if is_abandoned or isinstance(error, asyncio.CancelledError):
            # Also at the gateway, which may notice it only after the attempt was reported.
            outcome = CallOutcome.CANCELLED
        elif not self.is_recorded_elsewhere:
            outcome = CallOutcome.ERROR
        else:
            # the transport failed or was interrupted, so that the answer may be lost
            is_cut = any(kind.__name__ in _CUTS for kind in type(error).__mro__)
            is_undelivered = is_cut or type(error).__module__.split(".")[0] in _TRANSPORTS
            if is_undelivered or is_unreachable(error, self.origin):
                where = f"of {self.context.path} to the gateway {self.origin}"
                self._settle(f"{where}: {type(error).__name__}: {text_of(error)}")
            if not is_undelivered:
                return  # the gateway recorded its answer
            outcome = CallOutcome.UNDELIVERED
        if answer is None:  # the answer may have arrived, and not fit the app's schema
            answer = as_mapping(self.unparsed, ANSWER_FIELDS)
        attributes = {c.CALL_OUTCOME: outcome, **genai_attributes.answer_attributes(answer)}
        if is_abandoned:  # which is not an error
            self.record(attributes, SpanStatus.UNSET)
            return
        attributes |= exception_attributes(error)
        self.record(attributes, SpanStatus.ERROR, text_of(error) or "error")

    def _settle(self, error: str | None = None) -> None:
        """Note that the gateway answered the call or, if there is an `error`, that it did not."""
        recorder = self.context.scope.recorder
        if error is not None or recorder.lost_calls:  # the text of a long body takes time
            recorder.settle_call(f"{self.context.path} {self.body!r}", self.start_ns, error)

    def new_answer(self) -> genai_attributes.StreamedAnswer:
        """Return a collector for the chunks of the answer."""
        choices = genai_attributes.requested_choices(self.body)
        return genai_attributes.StreamedAnswer(choices=choices)

    def register_pending(self, give_up: Callable[[], None], response: Any) -> None:
        """Note that the app has not yet read all of the answer.

        Args:
            give_up: records that the app abandoned the answer; called when the attempt ends or, in
                production, when `response` is deleted.
            response: the HTTP response.
        """
        if not self.has_ended:
            self.context.scope.recorder.register_pending(self.call_id, give_up)
        if self.context.scope.mode is Mode.PRODUCTION:  # where no runner cancels pending calls
            weakref.finalize(response, give_up).atexit = False

    def ended(
        self,
        answer: Mapping[str, Any] | None,
        error: BaseException | None = None,
        irregular_field: str = "",
    ) -> None:
        """Record the end of the call, unless the gateway records it. Only the first end counts.

        Args:
            answer: the answer received so far; None to take `unparsed`.
            error: the error that ended the answer; None if the answer is complete.
            irregular_field: name of a field whose streamed parts may have been put together wrong;
                empty if there is none. If there is one, the attempt is not trained.
        """
        if self.has_ended:
            return
        self.has_ended = True
        is_ours = error is None and not self.is_recorded_elsewhere
        problem = genai_attributes.problem_of(answer or {}) if is_ours else ""
        if problem and answer and (answer.get("error") or answer.get("status") == "failed"):
            error = EngineError(problem)
        elif problem:
            self.add_capture_error("recorded", EngineError(problem))
        if irregular_field:
            self.context.scope.recorder.add_capture_error(
                f"a model's answer may be recorded wrong: its streamed {irregular_field!r} is "
                "irregular. The gateway repairs streams: freeze the agent to its endpoint there, "
                "with frozen=LLM(…)"
            )
        if error is not None:
            self.failed(error, answer)
        else:
            self.notify_end(True)
            self._settle()
            if not self.is_recorded_elsewhere:
                end = {c.CALL_OUTCOME: CallOutcome.OK.value}
                self.record({**end, **genai_attributes.answer_attributes(answer or {})})
        self._close()

    def _close(self) -> None:
        # after the call's span was added: the attempt may be complete now
        self.context.scope.recorder.resolve_pending(self.call_id)
        if self.attempt is not None:
            self.attempt.close()

    def record(
        self, attributes: Attributes, status: SpanStatus = SpanStatus.OK, message: str = ""
    ) -> None:
        """Record the call's span."""
        common: dict[str, Any] = {
            c.AGENT_PATH: self.context.path,
            c.CALL_ID: self.call_id,
            c.ROUTE: str(self.target.route),
            c.CALL_REPEATS: self.repeats or None,
        }
        if not self.is_redirected:
            # Only the host and the port of the app's base URL: its other parts may contain a key.
            host, port = (getattr(self.address, name, None) for name in ("host", "port"))
            common |= {c.SERVER_ADDRESS: host or None, c.SERVER_PORT: port}
            common[c.PROVIDER_NAME] = self.sdk.name if self.sdk is ANTHROPIC else None
        body, reading = self.body, self.reading
        if reading is not None and reading.slot is not None and reading.sent is not None:
            body = {**body, reading.slot.key: reading.slot.put(body, reading.sent)}
        common |= genai_attributes.request_attributes(body)
        if reading is not None:
            common |= prompt_overrides.reading_attributes(reading)
        span = make_span(
            self.context,
            f"{common[c.OPERATION_NAME]} {self.body.get('model', '')}".rstrip(),
            SpanKind.LLM,
            {**common, **attributes},
            start_ns=self.start_ns,
            status=status,
            status_message=message,
        )
        self.context.scope.recorder.add(span)

    def guarded(self, function: Callable[..., None], *values: Any) -> None:
        """Call `function`; if it raises, record a capture error and return."""
        try:
            with images_into(self.context.scope.recorder.images):
                function(*values)
        except Exception as error:
            self.add_capture_error("recorded", error)
            self._close()


_CUTS: Final = ("APIConnectionError", "EngineError", "OSError", "KeyboardInterrupt", "SystemExit")
"""Names of exceptions that cut an answer off; `response_observer` makes the `EngineError`s."""
_TRANSPORTS: Final = ("httpx", "httpx2", "httpcore", "httpcore2")


def _forwarded_headers(options: Any) -> dict[str, Any]:
    headers = options.headers if isinstance(options.headers, MAPPING) else {}
    return {key: value for key, value in headers.items() if key.lower() in _FORWARDED_HEADERS}
