"""A token engine that generates scripted text, with real token ids.

It replaces a model where a test determines what is sampled and when. A gate stops a generation
between two tokens until the test opens it. So cancellations and weight updates happen at a known
token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightspan.errors import (
    ContextOverflowError,
    EngineClosedError,
    EngineError,
    NotFoundError,
    UnsupportedError,
)
from lightspan.protocols.engine import (
    ChatTokenizer,
    EngineCapabilities,
    GenerationRequest,
    LoRAWeights,
    TokenChunk,
)
from lightspan.schema.token_records import FinishReason
from lightspan_testing.tiny import CHAT_TEMPLATE, TEXTS, tiny_tokenizer

if TYPE_CHECKING:
    from lightspan_torch.engine.tokenizer import TransformersTokenizer


class Gate:
    """A point at which a generation waits until the test opens it.

    `reached` is set when a generation arrives. After `open()`, all generations pass.
    """

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Let all generations pass from now on."""
        self._opened.set()

    async def wait(self) -> None:
        """Mark the gate as reached, and wait until it is open."""
        self.reached.set()
        await self._opened.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """The text of a generation, with the tokens at which it waits (gates) or fails (errors)."""

    text: str
    gates: Mapping[int, Gate] = field(default_factory=dict)
    """Token position → gate before that token is sampled."""
    errors: Mapping[int, Exception] = field(default_factory=dict)
    """Token position → error to raise instead of sampling that token."""


TokenScript = Callable[[GenerationRequest], "str | Say"] | Iterable["str | Say"] | str


class ScriptedEngine:
    """A token engine that generates scripted text.

    Args:
        tokenizer: tokenizer of the script, such as `tiny_chat_tokenizer()`.
        script: what to generate: a function of the request, one text for every call, or a sequence
            with one text per call. Calls after the end of the sequence fail.
        policies: policy name → version.
        chunk: tokens per chunk of a streamed generation.
        capabilities: capabilities that the engine declares.
        pace_s: seconds per token.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        script: TokenScript = "ok",
        *,
        policies: Mapping[str, int] | None = None,
        chunk: int = 1,
        capabilities: EngineCapabilities | None = None,
        pace_s: float = 0.0,
    ) -> None:
        self.capabilities = capabilities or EngineCapabilities(exact_tokens=True)
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        """Request ids of cancelled generations."""
        self.finished: list[str] = []
        self._tokenizer = tokenizer
        self._script = _as_function(script)
        self._policies = dict(policies or {"policy": 1})
        self._chunk = chunk
        self._pace_s = pace_s
        self._scripts: dict[str, tuple[Say, list[int], int]] = {}
        """(request, choice) → script, its token ids, and the length of its prompt."""
        self._closed = False
        self._fatal_error: EngineError | None = None
        self._tokens = 0

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Refuse generations from now on."""
        self._closed = True

    def die(self, error: EngineError) -> None:
        """Let every call fail with `error` from now on, as if the engine's thread had died."""
        self._fatal_error = error

    def policies(self) -> dict[str, int]:
        """Return policy name → version."""
        return dict(self._policies)

    def tokenizer(self, policy: str) -> ChatTokenizer:
        """Return the tokenizer of a policy."""
        if policy not in self._policies:
            served = ", ".join(sorted(self._policies))
            raise NotFoundError(f"no policy {policy!r} is served here (there is {served})")
        return self._tokenizer

    def check_grammar(self, policy: str, grammar: str) -> None:
        """Accept any grammar if the engine's `capabilities` include grammars.

        Raises:
            UnsupportedError: they do not.
        """
        if not self.capabilities.grammars:
            raise UnsupportedError("this script is not held to a grammar")

    async def update(
        self, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        """Set the version of the policy for tokens that are sampled from now on.

        `weights` is ignored.
        """
        self._policies[policy] = version

    def usage(self) -> dict[str, float]:
        """Return the engine's counters by name."""
        self._check_alive()
        return {"tokens": float(self._tokens), "requests": float(len(self.requests)), "cpu_s": 0.0}

    def ids(self, text: str) -> list[int]:
        """Return the token ids of `text`, followed by the end-of-turn token."""
        return [*self._tokenizer.encode(text), min(self._tokenizer.eos_ids)]

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of `ids` (exact in float32)."""
        return [logprob_of(token) for token in ids]

    async def generate(
        self, request: GenerationRequest, *, stream: bool
    ) -> AsyncIterator[TokenChunk]:
        """Generate the scripted text of a request, in chunks.

        A request may be a repeated one whose prompt already ends with a part of the answer. Then
        only the rest of the answer is generated.
        """
        self._check(request)
        self.requests.append(request)
        say, ids, start = self._script_of(request)
        limit = request.sampling.max_tokens
        pending: list[TokenChunk] = []
        done = False
        try:
            async for chunk in self._chunks(request, say, ids, start, limit):
                if stream:
                    yield chunk
                else:
                    pending.append(chunk)
            for chunk in _joined(pending):
                yield chunk
            done = True
        finally:
            (self.finished if done else self.cancelled).append(request.request_id)

    def _check(self, request: GenerationRequest) -> None:
        if self._closed:
            raise EngineClosedError
        self._check_alive()
        limit = self.tokenizer(request.policy).context_length
        if len(request.prompt_ids) >= limit:
            raise ContextOverflowError(
                f"the prompt has {len(request.prompt_ids)} tokens, the context {limit}"
            )

    def _check_alive(self) -> None:
        if self._fatal_error is not None:
            raise type(self._fatal_error)(str(self._fatal_error))

    def _script_of(self, request: GenerationRequest) -> tuple[Say, list[int], int]:
        """Return the script of a request, its token ids, and the number of tokens to skip.

        Tokens are skipped if the prompt already ends with them, as it does when a call is
        continued.
        """
        stem = request.request_id.rpartition("-")[0]
        if stem in self._scripts:
            say, ids, length = self._scripts[stem]
            partial = request.prompt_ids[length:]
            if partial and partial == ids[: len(partial)]:
                return say, ids, len(partial)
        answer = self._script(request)
        say = Say(text=answer) if isinstance(answer, str) else answer
        ids = self.ids(say.text)
        self._scripts[stem] = (say, ids, len(request.prompt_ids))
        return say, ids, 0

    async def _chunks(
        self,
        request: GenerationRequest,
        say: Say,
        ids: Sequence[int],
        start: int,
        limit: int | None,
    ) -> AsyncIterator[TokenChunk]:
        new: list[int] = []
        for position in range(start, len(ids)):
            await self._wait_or_fail(say, position)
            new.append(ids[position])
            finish = self._finish(request, ids[start : position + 1], ids, position, limit)
            version = self._policies[request.policy]
            if len(new) == self._chunk or finish is not None:
                self._tokens += len(new)
                yield TokenChunk(
                    ids=new, logprobs=self.logprobs(new), version=version, finish_reason=finish
                )
                new = []
            if finish is not None:
                return

    async def _wait_or_fail(self, say: Say, position: int) -> None:
        if position in say.gates:
            await say.gates[position].wait()
        else:
            await asyncio.sleep(self._pace_s)
        if position in say.errors:
            raise say.errors[position]

    def _finish(
        self,
        request: GenerationRequest,
        new: Sequence[int],
        ids: Sequence[int],
        position: int,
        limit: int | None,
    ) -> FinishReason | None:
        text = self._tokenizer.decode(new) if request.sampling.stop else ""
        if any(stop in text for stop in request.sampling.stop) or position == len(ids) - 1:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(new) == limit else None


def _joined(chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
    """Join neighbouring chunks whose tokens have the same policy version."""
    joined: list[TokenChunk] = []
    for chunk in chunks:
        last = joined[-1] if joined else None
        if last is not None and last.version == chunk.version:
            joined[-1] = TokenChunk(
                ids=[*last.ids, *chunk.ids],
                logprobs=[*last.logprobs, *chunk.logprobs],
                version=chunk.version,
                finish_reason=chunk.finish_reason,
            )
        else:
            joined.append(chunk)
    return joined


def logprob_of(token: int) -> float:
    """Return the log-probability that the scripted engine reports for a token id.

    It depends only on the id, and is exact in float32.
    """
    return -((token % 8) + 1) / 16


def tiny_chat_tokenizer(
    *, context_length: int = 512, template: str | None = CHAT_TEMPLATE
) -> TransformersTokenizer:
    """Return the tokenizer that `tiny_model` would save, without building a model."""
    from lightspan_torch.engine.tokenizer import TransformersTokenizer

    tokenizer = tiny_tokenizer(tuple(TEXTS), 400, template)
    return TransformersTokenizer(tokenizer, name="tiny", context_length=context_length)


def _as_function(script: TokenScript) -> Callable[[GenerationRequest], str | Say]:
    if isinstance(script, str):
        return lambda request: script
    if callable(script):
        return script
    answers = iter(script)

    def following(request: GenerationRequest) -> str | Say:
        try:
            return next(answers)
        except StopIteration:
            raise AssertionError(f"the script has no answer for {request.request_id}") from None

    return following
