"""HTTP client of one vLLM server."""

from __future__ import annotations

import asyncio
import errno
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from lightspan.errors import ConfigError, EngineError
from lightspan.schema.genai_attributes import END
from lightspan.schema.token_records import Sampling
from lightspan_gateway.keepalive import keepalive_socket
from lightspan_gateway.openai_engine import server_events
from lightspan_vllm.config import Link
from lightspan_vllm.requirements import ServerInfo, without_routes
from lightspan_vllm.timings import ServerTimings
from lightspan_vllm.weights import LABEL, LoRAFiles, Weights

COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/inference/v1/generate"
"""Route for prompts with images."""
CONTROL_S: Final = 600.0
"""Timeout of control requests, such as loading weights, in seconds."""
_NOT_LISTENING: Final = (errno.ECONNREFUSED, errno.ENOENT)
"""Error numbers of connecting to a closed port or a missing socket file."""
_CLAMPED: Final = -9999.0
"""What vLLM returns in place of a log-probability that is not a number."""
_MAX_DETAIL: Final = 500
"""Maximum number of characters of a server's response in an error message."""
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding an invalid response can raise."""


class Unreachable(EngineError):
    """The server cannot be reached, or the connection broke. The server may come back.

    Args:
        message: the error message.
        not_listening: whether no process listens at the address. If so, the server is not just
            overloaded.
    """

    def __init__(self, message: str, *, not_listening: bool = False) -> None:
        super().__init__(message)
        self.not_listening = not_listening


class Refused(EngineError):
    """The server refused a request, or its response is invalid.

    Args:
        message: the error message.
        status: HTTP status of the response. It is 200 if the server accepted the request but the
            response is invalid.
    """

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


class Chunk(NamedTuple):
    """Tokens that a call has generated since its last chunk."""

    ids: list[int]
    logprobs: list[float]
    finish: str | None
    """Why the call ended: `stop`, `length`, or `abort` after an update; None if more tokens may
    follow."""
    version: int = 0
    """Version of the weights that sampled the tokens. `Client` leaves it 0; `Server` sets it."""


class _Sampled(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    """Log-probabilities of `/v1/completions`."""
    content: list[_Sampled] = []
    """Log-probabilities of `GENERATE`."""

    @property
    def values(self) -> list[float | None]:
        return self.token_logprobs or [_unclamped(token.logprob) for token in self.content]


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    """Ids of the prompt, in the first response of `GENERATE`."""
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _Results(msgspec.Struct):
    results: Annotated[list[ServerInfo], msgspec.Meta(min_length=1)]


A = TypeVar("A")


class Client:
    """An HTTP client of one server. It must be opened and closed on the same event loop.

    Args:
        address: URL of the server, or path of its Unix socket.
        timings: timeouts; None for the defaults of `ServerTimings`.
    """

    def __init__(self, address: str, timings: ServerTimings | None = None) -> None:
        self.address = address
        self._timings = timings or ServerTimings()
        self._socket = self._base = ""
        self._session: aiohttp.ClientSession | None = None
        self._responses: set[aiohttp.ClientResponse] = set()
        self._model = ""
        self._workers = 1
        self._vocabulary = 0

    async def open(self, address: str) -> None:
        """Close all connections, and connect to `address` from now on."""
        await self.close()
        self.address = address
        parts = urlsplit(address)
        self._socket = "" if parts.scheme in ("http", "https") else address
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._base = "http://vllm" if self._socket else f"{parts.scheme}://{parts.netloc}{path}"
        idle_s = self._timings.keepalive_s
        connector: aiohttp.BaseConnector
        if self._socket:
            connector = aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=idle_s)
        else:
            connector = aiohttp.TCPConnector(
                limit=0, socket_factory=keepalive_socket, keepalive_timeout=idle_s
            )
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
        )
        self._model = ""

    @property
    def is_open(self) -> bool:
        return self._session is not None

    async def close(self) -> None:
        """Fail the running requests and close all connections. Idempotent."""
        session, self._session = self._session, None
        for response in self._responses:  # aiohttp would not wake its reader
            response.content.set_exception(aiohttp.ClientConnectionError("closed here"))
        if session is not None:
            await session.close()

    # --- status ---------------------------------------------------------------------------
    async def health_error(self) -> EngineError | None:
        """Check whether the server and its engine are healthy.

        Return None if they are, and otherwise the error of the check.
        """
        try:
            await self._call("GET", "/health", timeout_s=self._timings.health_timeout_s)
        except EngineError as error:
            return error
        return None

    async def info(self) -> ServerInfo:
        """Query the server's description. `complete` and `load` use what it contains.

        Raises:
            ConfigError: the server lacks the route, or its response is invalid.
            Unreachable: the server cannot be reached.
        """
        try:
            models = await self._get("/v1/models", _Models)
        except Refused as error:
            raise ConfigError(
                f"there is no vLLM server at {self.address}, or it is too old: {error}"
            ) from error
        self._model = models.data[0].id
        try:
            body = await self._call(
                "POST", "/collective_rpc", {"method": "lightspan_facts", "timeout": 60}
            )
        except Refused as error:
            raise ConfigError(without_routes(self.address, str(error))) from error
        try:
            info = self._decode("/collective_rpc", body, _Results).results[0]
        except Refused as error:
            raise ConfigError(
                f"the description of the server at {self.address} is invalid ({error}): restart "
                "the server with the lightspan_vllm_plugin.py of this version"
            ) from error
        self._workers, self._vocabulary = info.workers, info.vocabulary
        if info.is_vision_model:
            info = msgspec.structs.replace(info, takes_images=await self._takes_images())
        return info

    async def _takes_images(self) -> bool:
        """Return whether the route for prompts with images is enabled."""
        try:
            await self._call("POST", GENERATE, {})
        except Refused as error:  # enabled, it refuses the empty request as invalid
            return error.status not in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
        return True

    async def label(self) -> str:
        """Return the label that `name_weights` gave the server's weights; at first it is `default`.

        Raises:
            Unreachable: the server cannot be reached, or does not answer as vLLM does.
        """
        try:
            return (await self._get("/weight_info", _WeightInfo)).weight_version
        except Refused as error:  # the engine has died, or another server is at the address
            raise Unreachable(str(error)) from error

    # --- weights --------------------------------------------------------------------------
    async def pause(self) -> None:
        """Abort all running calls, and delete their keys and values.

        Later calls are held until `resume`.
        """
        await self._call("POST", "/pause?mode=abort&clear_cache=true")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort calls, including calls that `pause` holds.

        Args:
            request_ids: ids of the calls; None to abort all calls.
        """
        if request_ids is None:
            body = {}
        else:  # vLLM's ids of a call's only choice, in either route
            names = ("cmpl-{}-0", "generate-tokens-{}")
            body = {"request_ids": [name.format(each) for each in request_ids for name in names]}
        await self._call("POST", "/abort_requests", body)

    async def resume(self) -> None:
        """Start the calls that `pause` holds."""
        await self._call("POST", "/resume")

    async def load(self, weights: Weights, link: Link | None = None) -> None:
        """Load new weights into the server. Call `info` and `pause` before.

        Args:
            weights: the weights' files.
            link: how to send the weights over the network; None if the server reads the files.

        Raises:
            Refused: the server refused the weights, or sending them failed.
            Unreachable: the server cannot be reached.
        """
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})
        await self._call("POST", "/start_weight_update")
        if link is None:
            await self._update(weights, files=list(weights.files))
        else:
            await self._send(weights, link)
        await self._call("POST", "/finish_weight_update", {"weight_version": weights.label})

    async def _update(self, weights: Weights, **source: Any) -> None:
        update = {**source, "again": dict(weights.aliases)}
        await self._call("POST", "/update_weights", {"update_info": update})

    async def _send(self, weights: Weights, link: Link) -> None:
        from lightspan_vllm.broadcast import Broadcast, BroadcastError

        transfer = Broadcast(weights.files, link, self._workers)
        sending = asyncio.create_task(asyncio.to_thread(transfer.send))
        try:
            await self._update(weights, sent=await asyncio.to_thread(transfer.info))
            await sending
        except Refused as error:
            if not (sending.done() and sending.exception()):
                raise
            # the server's error alone would look like its own fault
            raise Refused(f"{error}; sending them failed: {sending.exception()}") from error
        except BroadcastError as error:
            raise Refused(f"{self.address} loaded weights that were not sent: {error}") from error
        finally:
            transfer.stop()
            await asyncio.gather(sending, return_exceptions=True)

    async def name_weights(self, label: str) -> None:
        """Give the server's weights a label.

        A restarted server has its first label again. So the label shows whether the server was
        restarted.
        """
        await self._call("POST", "/update_weight_version", {"new_version": label})

    # --- LoRA -----------------------------------------------------------------------------
    async def loras(self) -> list[str]:
        """Return the names of the LoRA adapters in the server that lightspan has loaded."""
        names = [model.id for model in (await self._get("/v1/models", _Models)).data]
        return [name for name in names if name.startswith(LABEL) and name != self._model]

    async def load_lora(self, files: LoRAFiles) -> None:
        """Load a LoRA adapter, in addition to those that the server has."""
        body = {"lora_name": files.name, "lora_path": str(files.folder)}
        await self._call("POST", "/v1/load_lora_adapter", body)

    async def unload_lora(self, name: str) -> None:
        """Unload the LoRA adapter `name`. No running call may use it."""
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    # --- calls ----------------------------------------------------------------------------
    async def complete(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        lora: str = "",
        max_tokens: int,
        eos_ids: Sequence[int],
        stream: bool,
        images: Callable[[], dict[str, Any]] | None = None,
    ) -> AsyncIterator[Chunk]:
        """Yield the tokens by which the server continues a prompt. Call `info` before.

        Args:
            prompt: ids of the prompt, followed by the answer so far.
            sampling: temperature, top-p and top-k.
            request_id: id for the call, which `abort` needs.
            lora: name of the LoRA adapter; "" for the model's own weights.
            max_tokens: maximum number of tokens.
            eos_ids: ids that end the answer.
            stream: whether to yield chunks as they are generated; otherwise there is one chunk.
            images: returns the images of the prompt, as `image_features` does; None for a prompt
                without images.

        Raises (while iterating):
            DataError: as `images` raises.
            Refused: the server refused the call, or its response is invalid, or it has used other
                ids than those of the prompt.
            Unreachable: the server cannot be reached, or the connection broke.
        """
        settings = {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            # override the model's configuration: log-probabilities do not include these
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(eos_ids),
            "logprobs": 0,
        }
        shared = {"model": lora or self._model, "return_token_ids": True, "stream": stream}
        route = COMPLETIONS if images is None else GENERATE
        unchecked = images is not None
        try:
            async with self._open().post(
                f"{self._base}{route}",
                # images may have megabytes: no variable holds them during the call, and aiohttp
                # sends a file in pieces
                data=_encode_completion(shared, settings, prompt)
                if images is None
                else await asyncio.to_thread(_encode_seen, shared, settings, prompt, images),
                headers={**_JSON, "X-Request-Id": request_id},
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise _refusal(self.address + route, response.status, await response.read())
                self._responses.add(response)
                try:
                    if not stream:
                        yield self._chunk(await response.read(), prompt if unchecked else None)
                        return
                    async for payload in server_events(response.content):
                        if payload != END.encode():
                            yield self._chunk(payload, prompt if unchecked else None)
                            unchecked = False
                finally:
                    self._responses.discard(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    def _chunk(self, payload: bytes, prompt: Sequence[int] | None) -> Chunk:
        """Return the tokens of a response.

        Args:
            payload: the response.
            prompt: ids that the response must report as those of the prompt; None for no check.
        """
        try:
            completion = msgspec.json.decode(payload, type=_Completion)
        except _UNREADABLE as error:
            raise Refused(f"{self.address} returned an invalid completion: {error}") from error
        if completion.error is not None:
            raise Unreachable(f"{self.address} broke off: {str(completion.error)[:_MAX_DETAIL]}")
        if prompt is not None and completion.prompt_token_ids != list(prompt):
            raise Refused(
                f"{self.address} has used another prompt with images than lightspan's: "
                f"{_difference(prompt, completion.prompt_token_ids or [])}"
            )
        if not completion.choices:
            return Chunk([], [], None)
        choice = completion.choices[0]
        ids = choice.token_ids
        if ids is None:
            raise Refused(
                f"{self.address} returns no token ids (return_token_ids): it is not vLLM, or too "
                "old"
            )
        invalid = [token for token in ids if not 0 <= token < self._vocabulary]
        if invalid:
            raise Refused(
                f"{self.address} returned token id {invalid[0]}, but its model's ids are from 0 to "
                f"{self._vocabulary - 1}: it is not vLLM, or a proxy changes its responses"
            )
        values = [] if choice.logprobs is None else choice.logprobs.values
        logprobs = [value for value in values if value is not None]
        if len(values) != len(ids) or len(logprobs) != len(ids):
            null = len(values) - len(logprobs)
            shown = f"{len(values)} log-probabilities" + (f", {null} of them null," if null else "")
            raise Refused(
                f"{self.address} returned {shown} for {len(ids)} tokens: start it with "
                "--logprobs-mode processed_logprobs, and no --max-logprobs 0"
            )
        return Chunk(ids, logprobs, choice.finish_reason)

    async def _get(self, path: str, kind: type[A]) -> A:
        return self._decode(path, await self._call("GET", path), kind)

    def _decode(self, path: str, body: bytes, kind: type[A]) -> A:
        """Return the decoded response of the route `path`; raise `Refused` if it is invalid."""
        try:
            return msgspec.json.decode(body, type=kind)
        except _UNREADABLE as error:
            raise Refused(
                f"{self.address}{path} returned an invalid response: {error} ({_text(body)!r})"
            ) from error

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = CONTROL_S,
    ) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open().request(
                    method,
                    f"{self._base}{path}",
                    data=data,
                    headers=_JSON,
                    allow_redirects=False,  # a redirect may lead to a machine outside `allow`
                ) as response,
            ):
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        if response.status != 200:
            detail = _text(answer) or str(response.reason)
            raise Refused(f"{self.address}{path}: {response.status} {detail}", response.status)
        return answer

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            raise Unreachable(f"the connection to {self.address} is closed")
        return self._session

    def _unreachable(self, error: BaseException) -> Unreachable:
        if isinstance(error, aiohttp.ClientResponseError):
            detail = " ".join(error.message.split())  # the message has several lines
            return Unreachable(f"the server at {self.address} does not speak HTTP: {detail}")
        reason = str(error) or type(error).__name__  # a timeout's message is empty
        return Unreachable(
            f"the vLLM server at {self.address} cannot be reached: {reason}",
            not_listening=isinstance(error, OSError) and error.errno in _NOT_LISTENING,
        )


_JSON: Final = {"Content-Type": "application/json"}


def is_gone(health_error: EngineError | None) -> bool:
    """Return whether a server will never answer its running calls.

    This is so if vLLM's engine in the server is dead (`/health` returns 503), or if no process
    listens at the server's address. A server that answers slowly is not gone.

    Args:
        health_error: result of `Client.health_error`; None if the server is healthy.
    """
    if isinstance(health_error, Refused):
        return health_error.status == HTTPStatus.SERVICE_UNAVAILABLE
    return isinstance(health_error, Unreachable) and health_error.not_listening


def _encode_completion(
    shared: Mapping[str, Any], settings: Mapping[str, Any], prompt: Sequence[int]
) -> bytes:
    body = {
        **shared,
        **settings,
        "prompt": list(prompt),
        "add_special_tokens": False,
        "return_tokens_as_token_ids": True,
    }
    return msgspec.json.encode(body)


def _encode_seen(
    shared: Mapping[str, Any],
    settings: Mapping[str, Any],
    prompt: Sequence[int],
    images: Callable[[], dict[str, Any]],
) -> io.BytesIO:
    body = {
        **shared,
        "sampling_params": {**settings, "detokenize": False},
        "token_ids": list(prompt),
        "features": images(),
    }
    return io.BytesIO(msgspec.json.encode(body))


def _unclamped(logprob: float | None) -> float | None:
    """Return a log-probability of `GENERATE`; None if vLLM has replaced one that is no number."""
    return None if logprob == _CLAMPED else logprob


def _difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Return where two lists of ids differ first."""
    place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if place is None:
        return f"{len(theirs)} ids instead of {len(ours)}"
    return f"id {theirs[place]} instead of {ours[place]} at index {place}"


def _refusal(where: str, status: int, answer: bytes) -> EngineError:
    message = f"{where}: {status} {_text(answer)}"
    # a server whose engine has died returns 500 until it ends
    return Unreachable(message) if status >= 500 else Refused(message, status)


def _text(answer: bytes) -> str:
    return answer.decode(errors="replace")[:_MAX_DETAIL]
