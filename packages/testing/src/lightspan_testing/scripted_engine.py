"""A TokenEngine whose text is scripted: real token ids, exact log-probs, and stops on demand.

It stands in for a model where a test must know what is sampled and when: gates hold a generation
between two tokens, so that cancellations, joins and weight updates happen at a known place.
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
    """A place where a generation waits: `reached` is set there, `open()` lets it go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Let everything through, now and later."""
        self._opened.set()

    async def wait(self) -> None:
        """Be held here."""
        self.reached.set()
        await self._opened.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """What one generation says."""

    text: str
    gates: Mapping[int, Gate] = field(default_factory=dict)
    """Token position → a gate before that token is sampled."""
    errors: Mapping[int, Exception] = field(default_factory=dict)
    """Token position → an error in place of that token."""


TokenScript = Callable[[GenerationRequest], "str | Say"] | Iterable["str | Say"] | str


class ScriptedEngine:
    """See the module.

    Args:
        tokenizer: tokenises the script; `tiny_chat_tokenizer()` makes a real one.
        script: a function of the request, texts in turn (running out is an error), or one text.
        policies: what it serves, at which version.
        chunk: tokens per chunk of a streamed generation.
        capabilities: what it declares.
        pace_s: seconds that each token takes.
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
        """Request ids whose generation was given up."""
        self.finished: list[str] = []
        self._tokenizer = tokenizer
        self._script = _as_function(script)
        self._policies = dict(policies or {"policy": 1})
        self._chunk = chunk
        self._pace_s = pace_s
        self._said: dict[str, tuple[Say, list[int], int]] = {}
        """Call and choice → what it says, the ids of it, and the length of its prompt."""
        self._closed = False
        self._died_of: EngineError | None = None
        self._tokens = 0

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Refuse further generations."""
        self._closed = True

    def die(self, error: EngineError) -> None:
        """Fail, from now on, as an engine whose thread has died."""
        self._died_of = error

    def policies(self) -> dict[str, int]:
        """Policy name → version being served."""
        return dict(self._policies)

    def tokenizer(self, policy: str) -> ChatTokenizer:
        """The one tokenizer, for a policy that is served."""
        if policy not in self._policies:
            served = ", ".join(sorted(self._policies))
            raise NotFoundError(f"no policy {policy!r} is served here (there is {served})")
        return self._tokenizer

    def check_grammar(self, policy: str, grammar: str) -> None:
        """A script says what it says, so it honours what its author says that it honours."""
        if not self.capabilities.grammars:
            raise UnsupportedError("this script is not held to a grammar")

    async def update(
        self, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        """The tokens that follow are of this version."""
        self._policies[policy] = version

    def usage(self) -> dict[str, float]:
        """Counters."""
        self._check_alive()
        return {"tokens": float(self._tokens), "requests": float(len(self.requests)), "cpu_s": 0.0}

    def ids(self, text: str) -> list[int]:
        """What the script's text is sampled as, the end of the turn included."""
        return [*self._tokenizer.encode(text), min(self._tokenizer.eos_ids)]

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """The log-probabilities that these ids are given (exact in float32)."""
        return [logprob_of(token) for token in ids]

    async def generate(
        self, request: GenerationRequest, *, stream: bool
    ) -> AsyncIterator[TokenChunk]:
        """Say what the script says; a prompt that ends in part of it goes on from there."""
        self._check(request)
        self.requests.append(request)
        say, ids, start = self._what(request)
        limit = request.sampling.max_tokens
        held: list[TokenChunk] = []
        done = False
        try:
            async for chunk in self._chunks(request, say, ids, start, limit):
                if stream:
                    yield chunk
                else:
                    held.append(chunk)
            for chunk in _joined(held):
                yield chunk
            done = True
        finally:
            (self.finished if done else self.cancelled).append(request.request_id)

    def _check(self, request: GenerationRequest) -> None:
        if self._closed:
            raise EngineClosedError
        self._check_alive()
        longest = self.tokenizer(request.policy).context_length
        if len(request.prompt_ids) >= longest:
            raise ContextOverflowError(
                f"the prompt has {len(request.prompt_ids)} tokens, the context {longest}"
            )

    def _check_alive(self) -> None:
        if self._died_of is not None:
            raise type(self._died_of)(str(self._died_of))

    def _what(self, request: GenerationRequest) -> tuple[Say, list[int], int]:
        """What is said, the ids of it, and how many of them the prompt ends in already."""
        stem = request.request_id.rpartition("-")[0]
        if stem in self._said:
            say, ids, length = self._said[stem]
            partial = request.prompt_ids[length:]
            if partial and partial == ids[: len(partial)]:
                return say, ids, len(partial)
        said = self._script(request)
        say = Say(text=said) if isinstance(said, str) else said
        ids = self.ids(say.text)
        self._said[stem] = (say, ids, len(request.prompt_ids))
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
            await self._obstacles(say, position)
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

    async def _obstacles(self, say: Say, position: int) -> None:
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
    """One chunk per version (a chunk has only one)."""
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
    """The log-probability that a scripted token is given (exact in float32)."""
    return -((token % 8) + 1) / 16


def tiny_chat_tokenizer(
    *, context_length: int = 512, template: str | None = CHAT_TEMPLATE
) -> TransformersTokenizer:
    """The tokenizer of `tiny_model`, without the model."""
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


__all__ = ["Gate", "Say", "ScriptedEngine", "logprob_of", "tiny_chat_tokenizer"]
