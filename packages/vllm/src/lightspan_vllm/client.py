"""Speaks with one vLLM server."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from lightspan.errors import ConfigError, EngineError
from lightspan.schema.token_records import Sampling
from lightspan.stores.keepalive import keepalive_socket
from lightspan_gateway.openai_engine import server_events
from lightspan_vllm.config import Link
from lightspan_vllm.requirements import ServerInfo, without_routes
from lightspan_vllm.weights import LABEL, LoRAFiles, Weights

CONTROL_S: Final = 600.0
"""How long a server may take to load weights."""
KEPT_S: Final = 2.0
"""How long an idle connection is kept. vLLM ends one after 5 s: a call that is sent at that moment
finds it closed, as if the server were gone, and where the machine is busy the moment is long."""
_HEALTH_S: Final = 10.0
_NOBODY: Final = (errno.ECONNREFUSED, errno.ENOENT)
"""What connecting fails with where nobody listens; the second, where the socket's file is gone."""
_DETAIL: Final = 500
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading foreign JSON may raise."""


class Unreachable(EngineError):
    """The server cannot be reached, or broke off: it may be gone, and come back.

    Args:
        nobody: whether nobody listens there, which no load explains.
    """

    def __init__(self, message: str, *, nobody: bool = False) -> None:
        super().__init__(message)
        self.nobody = nobody


class Refused(EngineError):
    """The server says no, or what cannot be read.

    Args:
        status: of its answer.
    """

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


class Chunk(NamedTuple):
    """Tokens as they come."""

    ids: list[int]
    logprobs: list[float]
    finish: str | None
    """`stop`, `length`, or `abort` where an update cut it; None while there may be more."""
    version: int = 0
    """Of the weights that sampled them, as `Server` knows it."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
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
    """One server's routes. Opened and closed on one event loop.

    Args:
        address: of a server, or the path of its socket.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = self._base = ""
        self._session: aiohttp.ClientSession | None = None
        self._answers: set[aiohttp.ClientResponse] = set()
        self._model = ""
        self._workers = 1
        self._vocabulary = 0

    async def open(self, address: str) -> None:
        """Begin with an empty pool of connections. Again after a restart."""
        await self.close()
        self.address = address
        parts = urlsplit(address)
        self._socket = "" if parts.scheme in ("http", "https") else address
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._base = "http://vllm" if self._socket else f"{parts.scheme}://{parts.netloc}{path}"
        connector: aiohttp.BaseConnector
        if self._socket:
            connector = aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=KEPT_S)
        else:
            connector = aiohttp.TCPConnector(
                limit=0, socket_factory=keepalive_socket, keepalive_timeout=KEPT_S
            )
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
        )
        self._model = ""

    @property
    def is_open(self) -> bool:
        return self._session is not None

    async def close(self) -> None:
        """Break off what is under way; idempotent."""
        session, self._session = self._session, None
        for answer in self._answers:  # whoever reads it would not be told
            answer.content.set_exception(aiohttp.ClientConnectionError("closed here"))
        if session is not None:
            await session.close()

    # --- what it is -----------------------------------------------------------------------
    async def health_error(self) -> EngineError | None:
        """Why it does not answer, or its engine does not live; None where both is well."""
        try:
            await self._call("GET", "/health", timeout_s=_HEALTH_S)
        except EngineError as error:
            return error
        return None

    async def facts(self) -> ServerInfo:
        """What it serves, and how.

        Raises:
            ConfigError: it has no routes for that, or what it says cannot be read.
            Unreachable: as always.
        """
        try:
            models = await self._ask("/v1/models", _Models)
        except Refused as error:
            raise ConfigError(
                f"there is no vLLM server at {self.address}, or it is too old: {error}"
            ) from error
        self._model = models.data[0].id
        try:
            answer = await self._call(
                "POST", "/collective_rpc", {"method": "lightspan_facts", "timeout": 60}
            )
        except Refused as error:
            raise ConfigError(without_routes(self.address, str(error))) from error
        try:
            facts = self._read("/collective_rpc", answer, _Results).results[0]
        except Refused as error:
            raise ConfigError(
                f"the server at {self.address} says what this lightspan cannot read ({error}): "
                "start it again with the lightspan_vllm_plugin.py of this version"
            ) from error
        self._workers, self._vocabulary = facts.workers, facts.vocabulary
        return facts

    async def label(self) -> str:
        """Of the weights that it has; `default` for those that it started with."""
        try:
            return (await self._ask("/weight_info", _WeightInfo)).weight_version
        except Refused as error:  # its engine is asked, which may have died, or is another's now
            raise Unreachable(str(error)) from error

    # --- weights --------------------------------------------------------------------------
    async def pause(self) -> None:
        """Cut every call, which ends as `abort` with what it has; later ones wait. No key or value
        that was computed is kept."""
        await self._call("POST", "/pause?mode=abort&clear_cache=true")

    async def cut(self, request_ids: Sequence[str] | None = None) -> None:
        """End these calls, or all, as `pause` does; those that wait, too."""
        if request_ids is None:
            body = {}
        else:  # as vLLM names the one answer of a call
            body = {"request_ids": [f"cmpl-{request_id}-0" for request_id in request_ids]}
        await self._call("POST", "/abort_requests", body)

    async def resume(self) -> None:
        """Let calls go on."""
        await self._call("POST", "/resume")

    async def load(self, weights: Weights, link: Link | None = None) -> None:
        """Take on new weights; paused. `facts` was called before.

        Args:
            link: how they are sent; None for a server that reads the files itself.
        """
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})
        await self._call("POST", "/start_weight_update")
        if link is None:
            await self._update(weights, files=list(weights.files))
        else:
            await self._send(weights, link)
        await self._call("POST", "/finish_weight_update", {"weight_version": weights.label})

    async def _update(self, weights: Weights, **how: Any) -> None:
        update = {**how, "again": dict(weights.again)}
        await self._call("POST", "/update_weights", {"update_info": update})

    async def _send(self, weights: Weights, link: Link) -> None:
        from lightspan_vllm.broadcast import Broadcast, Broken

        way = Broadcast(weights.files, link, self._workers)
        sending = asyncio.create_task(asyncio.to_thread(way.send))
        try:
            await self._update(weights, sent=await asyncio.to_thread(way.info))
            await sending
        except Refused as error:
            if not (sending.done() and sending.exception()):
                raise
            # whoever reads its words has to know that it was not to blame
            raise Refused(f"{error}; sending them failed: {sending.exception()}") from error
        except Broken as error:
            raise Refused(f"{self.address} took on weights that were not sent: {error}") from error
        finally:
            way.stop()
            await asyncio.gather(sending, return_exceptions=True)

    async def name_weights(self, label: str) -> None:
        """Have it say this of the weights that it has, until it is started again."""
        await self._call("POST", "/update_weight_version", {"new_version": label})

    # --- LoRA -----------------------------------------------------------------------------
    async def loras(self) -> list[str]:
        """Names of those that it has and that a trainer of ours brought."""
        names = [model.id for model in (await self._ask("/v1/models", _Models)).data]
        return [name for name in names if name.startswith(LABEL) and name != self._model]

    async def load_lora(self, files: LoRAFiles) -> None:
        """Take on another LoRA, beside those that it has."""
        body = {"lora_name": files.name, "lora_path": str(files.folder)}
        await self._call("POST", "/v1/load_lora_adapter", body)

    async def unload_lora(self, name: str) -> None:
        """Forget one; no call is on it."""
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
    ) -> AsyncIterator[Chunk]:
        """Sample after these ids. Without `stream` there is one part. `facts` was called before.

        Args:
            request_id: by which it may be cut.
            lora: the name of the one to sample with.

        Raises (while iterating):
            Refused, Unreachable
        """
        body = {
            "model": lora or self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            # what a model's own configuration may say otherwise, and no log-probability shows
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(eos_ids),
            "add_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": stream,
        }
        try:
            async with self._open().post(
                f"{self._base}/v1/completions",
                data=msgspec.json.encode(body),
                headers={**_JSON, "X-Request-Id": request_id},
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise _refusal(self.address, response.status, await response.read())
                self._answers.add(response)
                try:
                    if not stream:
                        yield self._part(await response.read())
                        return
                    async for payload in server_events(response.content):
                        yield self._part(payload)
                finally:
                    self._answers.discard(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    def _part(self, payload: bytes) -> Chunk:
        try:
            completion = msgspec.json.decode(payload, type=_Completion)
        except _UNREADABLE as error:
            raise Refused(f"{self.address} answered what is no completion: {error}") from error
        if completion.error is not None:
            raise Unreachable(f"{self.address} broke off: {str(completion.error)[:_DETAIL]}")
        if not completion.choices:
            return Chunk([], [], None)
        choice = completion.choices[0]
        ids = choice.token_ids
        if ids is None:
            raise Refused(
                f"{self.address} gives no token ids (return_token_ids): it is no vLLM, or too old"
            )
        self._check_ids(ids)
        given = [] if choice.logprobs is None else choice.logprobs.token_logprobs
        logprobs = [value for value in given if value is not None]
        if len(given) != len(ids) or len(logprobs) != len(ids):
            null = len(given) - len(logprobs)
            shown = f"{len(given)} log-probabilities" + (f", {null} of them null," if null else "")
            raise Refused(
                f"{self.address} gave {shown} for {len(ids)} tokens: start it with "
                "--logprobs-mode processed_logprobs, and no --max-logprobs 0"
            )
        return Chunk(ids, logprobs, choice.finish_reason)

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise `Refused` for what the model has no token for: nothing after this would say whose
        fault it is."""
        foreign = [token for token in ids if not 0 <= token < self._vocabulary]
        if foreign:
            raise Refused(
                f"{self.address} gave token id {foreign[0]}, and those of its model are from 0 to "
                f"{self._vocabulary - 1}: it is no vLLM, or something changes what it answers"
            )

    async def _ask(self, path: str, kind: type[A]) -> A:
        return self._read(path, await self._call("GET", path), kind)

    def _read(self, path: str, answer: bytes, kind: type[A]) -> A:
        """What an answer says. Raises `Refused` where that cannot be read."""
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.ValidationError as error:  # names what is missing
            said = f"what vLLM would not: {error}"
        except _UNREADABLE as error:
            said = f"no JSON: {error}"
        raise Refused(f"{self.address}{path} answered {said} ({_text(answer)!r})")

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
                    allow_redirects=False,  # one could lead to a machine that nobody allowed
                ) as response,
            ):
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        if response.status != 200:
            said = _text(answer) or str(response.reason)
            raise Refused(f"{self.address}{path}: {response.status} {said}", response.status)
        return answer

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            raise Unreachable(f"the connection to {self.address} is closed")
        return self._session

    def _unreachable(self, error: BaseException) -> Unreachable:
        if isinstance(error, aiohttp.ClientResponseError):
            said = " ".join(error.message.split())  # it comes in several lines
            return Unreachable(f"what answers at {self.address} does not speak HTTP: {said}")
        why = str(error) or type(error).__name__  # a timeout's message is empty
        nobody = isinstance(error, OSError) and error.errno in _NOBODY
        return Unreachable(
            f"the vLLM server at {self.address} cannot be reached: {why}", nobody=nobody
        )


_JSON: Final = {"Content-Type": "application/json"}


def is_gone(health_error: EngineError | None) -> bool:
    """Whether it says that the server's engine is dead (vLLM's `/health` answers 503), or that it
    listens no more, and not only that it is slow: it is ending, and will answer none of its calls.
    """
    if isinstance(health_error, Refused):
        return health_error.status == HTTPStatus.SERVICE_UNAVAILABLE
    return isinstance(health_error, Unreachable) and health_error.nobody


def _refusal(address: str, status: int, answer: bytes) -> EngineError:
    """A server whose engine died answers 500 until it ends."""
    said = f"{address}/v1/completions: {status} {_text(answer)}"
    return Unreachable(said) if status >= 500 else Refused(said, status)


def _text(answer: bytes) -> str:
    return answer.decode(errors="replace")[:_DETAIL]
