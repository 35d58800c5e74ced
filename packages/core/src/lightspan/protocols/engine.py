"""What an engine is. Protocols only: implementations are modules of this package.

`TokenEngine`: token ids in, token ids and log-probabilities out; the gateway renders the chat
template and parses tool calls. `ChatEngine`: an OpenAI-compatible server that does both itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from lightspan.errors import EngineError, UnsupportedError
from lightspan.schema.token_records import FinishReason, Sampling

ToolParserName = Literal["hermes", "llama", "json"]
"""The parsers of `lightspan_gateway.tools`: how a family of models writes tool calls."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and how to sample after it. `request_id` is unique among those in flight."""

    request_id: str
    policy: str
    prompt_ids: list[int]
    sampling: Sampling
    """`max_tokens` is set; temperature 0 means greedy."""
    grammar: str = ""
    """What the answer has to follow (`lightspan_torch.engine.grammars`); empty for anything."""
    answered: int = 0
    """How many of the prompt's ids, at its end, are the answer so far: its grammar begins there."""
    rollout: str = ""
    """Whose calls begin alike, and are best served by one server: the attempt's; empty: unknown."""


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Newly generated tokens. The last chunk has a finish reason (and may have no tokens).

    The ids end with the token that completes a stop string, or with the end-of-turn token.
    """

    ids: list[int]
    logprobs: list[float]
    """Of the distribution sampled from. Greedy decoding samples from a point mass: 0.0."""
    version: int
    """The policy version that sampled these tokens."""
    finish_reason: FinishReason | None = None


class LoRAWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A policy as low-rank matrices beside a model's own weights, which do not move: the output of
    each of these layers gains `scale · B(A x)`."""

    rank: int
    scale: float
    layers: Mapping[str, tuple[Any, Any]]
    """Name of a linear layer in the model → A [rank, inputs] and B [outputs, rank]: tensors on the
    CPU that nobody changes any more."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine sampled at temperature 1, to be compared with what the learner says of it."""

    where: str
    """What answered, for a person."""
    version: int
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    tolerance: float
    """How far these may be from the learner's on average: a matter of the float type."""


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can honour; the rest is refused by name (design law 6)."""

    exact_tokens: bool
    """Token ids and log-probabilities as sampled: its calls can be trained."""
    stop_strings: bool = True
    top_p: bool = True
    top_k: bool = True
    seed: bool = False
    temperatures: tuple[float, float] = (0.0, math.inf)
    """The least and the highest that it samples at; 0, which is greedy, besides."""
    in_place_update: bool = True
    trainable_truncation: bool = False
    """Under top-p or top-k, log-probabilities are exact: of the truncated, renormalised
    distribution. Such calls are trained where the learner declares it too (design law 11)."""
    trainable_grammar: bool = False
    """The same under a grammar or a forced tool choice."""
    grammars: str = ""
    """Name and version of what holds answers to a grammar; empty: nothing does."""
    lora: tuple[str, ...] = ()
    """Policies that are served as LoRA beside a model's own weights: `update` takes `LoRAWeights`
    of these, and whole weights of the others."""

    def samples_at(self, temperature: float) -> bool:
        """Whether it does."""
        least, highest = self.temperatures
        return temperature == 0 or least <= temperature <= highest


class ChatTokenizer(Protocol):
    """A tokenizer with its chat template
    (`lightspan_torch.engine.tokenizer.TransformersTokenizer`)."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a turn."""
        ...

    @property
    def context_length(self) -> int: ...

    @property
    def tool_parser(self) -> ToolParserName:
        """Which parser reads this model's tool calls."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Ids of the rendered chat.

        Args:
            most: how many of them anybody can use, if there is such a number (see `encode`).

        Raises:
            ModelError: no chat template, or it refuses these messages.
            ContextOverflowError: as `encode`.
        """
        ...

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        """Ids of the text: of all of it, whatever `most` says.

        Raises:
            ContextOverflowError: instead of the ids of a text that has far more than `most`. It is
                for who gives up early to say what is far: without `most` nobody does.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """One token as text, for `logprobs.content[].token`."""
        ...


@runtime_checkable
class TokenEngine(Protocol):
    """An engine that takes and gives token ids; one event loop owns it.

    Implementations: `lightspan_torch.engine.transformers`, `lightspan_vllm`.
    """

    @property
    def capabilities(self) -> EngineCapabilities: ...

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Cancel everything in flight and free the models. Idempotent."""
        ...

    def policies(self) -> dict[str, int]:
        """Policy name → version being served."""
        ...

    def tokenizer(self, policy: str) -> ChatTokenizer:
        """Raises `NotFoundError` for an unknown policy."""
        ...

    def check_grammar(self, policy: str, grammar: str) -> None:
        """Compile a grammar ahead of the calls that follow it.

        It may take a second: the gateway asks from threads of its own, several at once.

        Raises:
            UnsupportedError: it cannot be followed; says why.
            NotFoundError: an unknown policy.
        """
        raise UnsupportedError("this engine holds no answer to a grammar")

    def generate(self, request: GenerationRequest, *, stream: bool) -> AsyncIterator[TokenChunk]:
        """Generate. Closing the iterator cancels the generation.

        Without `stream` there may be a single chunk. A weight update in between is invisible but
        for the versions: the engine cancels, updates, and resubmits prompt + partial ids.

        Raises (while iterating):
            ContextOverflowError, EngineClosedError, NotFoundError, UnsupportedError
        """
        ...

    async def update(
        self, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        """Replace the weights as this version: all of them (name → tensor, LoRA merged in), or of a
        policy of `capabilities.lora` its `LoRAWeights`, which touches no other policy.

        Requests in flight are interrupted and go on with the new weights; no key or value computed
        with the old ones is used again.
        """
        ...

    def usage(self) -> dict[str, float]:
        """Counters: `tokens`, `requests`, `cpu_s` (CPU-seconds of the engine's own threads).

        Raises:
            EngineError: the engine has died, and every request would fail: a run ends here.
        """
        ...


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer has an engine serve."""

    models: Mapping[str, Any]
    """Policy → model: a name, a folder, or one that is loaded."""
    lora: Mapping[str, int]
    """Policy → rank of its LoRA; 0 for starting weights that are served beside a LoRA."""
    device: str = "cpu"
    seed: int = 0
    folder: Path = Path()
    """The run's, for logs."""

    def shares_model(self, policy: str) -> bool:
        """Return whether another policy with LoRA starts from the same model."""
        model = self.models[policy]
        name = _model_name(model)
        others = [self.models[other] for other in self.lora if other != policy]
        return any(
            other is model or (name is not None and _model_name(other) == name) for other in others
        )

    def copies(self) -> list[tuple[str, ...]]:
        """Return the policies of each copy of weights: those with LoRA that start from one model
        are beside one copy."""
        groups: dict[tuple[bool, str], list[str]] = {}
        for policy, model in self.models.items():
            is_shared = policy in self.lora
            name = (_model_name(model) or str(id(model))) if is_shared else policy
            groups.setdefault((is_shared, name), []).append(policy)
        return [tuple(policies) for policies in groups.values()]


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory of a model depends on."""

    parameters: int
    weight_bytes: int
    """Bytes of a parameter as it is saved."""
    cache_values: int
    """Numbers that the key-value cache keeps of a token."""
    lora_values: int
    """Parameters of a LoRA of rank 1 on all linear layers but the head."""
    context: int


@runtime_checkable
class EngineSpec(Protocol):
    """An engine in words, which a trainer builds (entry points of `lightspan.engines`)."""

    def build(self, request: EngineRequest) -> TokenEngine:
        """Build the engine, not started.

        Raises:
            ConfigError: something that it cannot honour.
            ModelError: a model cannot be loaded.
        """
        ...

    def describe(self, folder: Path) -> str:
        """Return a line for a person who waits for it to start; empty for none.

        Args:
            folder: the run's.
        """
        ...

    def copies(self, request: EngineRequest) -> list[tuple[str, ...]]:
        """Return the policies of each copy of weights that the engine would hold."""
        ...

    def memory(self, size: ModelSize, device: str) -> dict[str, int]:
        """Return part → bytes of one copy of a model: "engine weights" and, where it is known, the
        "key-value cache"; empty where none of it is on this machine."""
        ...


def _model_name(model: Any) -> str | None:
    """Return the name of a model that is loaded by name; None for a loaded one."""
    return os.fspath(model) if isinstance(model, str | os.PathLike) else None


@runtime_checkable
class ProbedEngine(Protocol):
    """A `TokenEngine` whose weights are in other processes: the trainer compares what it samples
    with what the learner says, after each update. One in the trainer's process, which copies the
    weights themselves, is no such engine."""

    async def probes(self, policy: str) -> list[Probe]:
        """Prompts of late calls, answered with the weights of now by everything that serves the
        policy.

        Raises:
            EngineError, NotFoundError
        """
        ...


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What an OpenAI-compatible server answered."""

    status: int
    headers: dict[str, str]
    body: bytes


class PromptRefused(EngineError):
    """The prompt holds what is no token of the model."""


class EndpointRefused(EngineError):
    """The endpoint refused the call."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@runtime_checkable
class ChatEngine(Protocol):
    """An engine that takes and gives chat messages: an OpenAI-compatible server.

    Implementations: `lightspan_gateway.openai_engine`.
    """

    async def start(self) -> None: ...

    async def close(self) -> None:
        """End what is in flight. Idempotent."""
        ...

    async def chat(self, body: Mapping[str, Any]) -> ChatAnswer:
        """An unstreamed call. A refusal is an answer too.

        Raises:
            EngineError: it cannot be reached, or broke off.
            EngineClosedError: not started, or closed.
        """
        ...

    def stream(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """A streamed call: server-sent event payloads (without `data: `, without `[DONE]`).

        Raises (while iterating):
            EndpointRefused: it answered with an error.
            EngineError: it cannot be reached, or broke off.
            EngineClosedError: not started, or closed.
        """
        ...
