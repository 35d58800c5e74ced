"""Protocols of engines.

A `TokenEngine` takes token ids, and returns token ids and log-probabilities. The gateway renders
the chat template and parses tool calls for it. OpenAI-compatible servers do both themselves
(`lightspan_gateway.chat_engine`).
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from lightspan.errors import EngineError, UnsupportedError
from lightspan.lightning.rows import Row
from lightspan.schema.images import PromptImage
from lightspan.schema.token_records import FinishReason, Sampling

Score = Callable[[Sequence[Row]], Awaitable[list[list[float]]]]
"""Function that returns the log-probability of each token of rows."""
ToolParserName = Literal["hermes", "llama", "json", "mistral", "deepseek", "pythonic"]
"""Name of a parser in `lightspan_gateway.tools` that reads the tool calls of a model family."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for one answer: a prompt with sampling settings.

    `request_id` is unique among running requests.
    """

    request_id: str
    policy: str
    prompt_ids: list[int]
    sampling: Sampling
    """Sampling settings; `max_tokens` is always set, and temperature 0 means greedy decoding."""
    grammar: str = ""
    """Grammar that the answer must follow (`lightspan_torch.engine.grammars`); empty for none."""
    answered: int = 0
    """Number of ids at the end of the prompt that already belong to the answer; the grammar applies
    to them too.
    """
    rollout: str = ""
    """Id of the attempt; empty if unknown. Its calls share prefixes, so one server should serve all
    of them.
    """
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt, with their bytes, if `EngineCapabilities.images`."""


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of an answer.

    The last chunk has a finish reason, and may have no tokens. The ids end with the token that
    completes a stop string, or with the end-of-turn token.
    """

    ids: list[int]
    logprobs: list[float]
    """Log-probability of each id under the distribution from which it was sampled; 0.0 for greedy
    decoding."""
    version: int
    """The policy version that sampled these tokens."""
    finish_reason: FinishReason | None = None


class LoRAWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a LoRA policy: low-rank matrices that add `scale · B(A x)` to a layer's output."""

    rank: int
    scale: float
    layers: Mapping[str, tuple[Any, Any]]
    """Name of a linear layer → A [rank, inputs] and B [outputs, rank]: immutable tensors on the
    CPU."""


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Features that an engine supports; use of an unsupported feature raises an error."""

    exact_tokens: bool
    """Whether token ids and log-probabilities are returned as sampled, so that calls can be
    trained."""
    stop_strings: bool = True
    top_p: bool = True
    top_k: bool = True
    seed: bool = False
    temperatures: tuple[float, float] = (0.0, math.inf)
    """Minimum and maximum sampling temperature; 0 (greedy) is always allowed."""
    in_place_update: bool = True
    trainable_truncation: bool = False
    """Whether log-probabilities under top-p or top-k are those of the truncated, renormalised
    distribution. Such calls are trained if the learner has the capability of this name too.
    """
    trainable_grammar: bool = False
    """Whether log-probabilities are normalised over the tokens that a grammar or a forced tool
    choice allows. Such calls are trained if the learner has the capability of this name too.
    """
    grammars: str = ""
    """Name and version of the library that enforces grammars; empty without such a library."""
    numerics: str = ""
    """Name of the code, device and data type that compute log-probabilities; empty if unknown. If
    it is the learner's too, both agree but for rounding (`PolicyLoss.correction`)."""
    images: tuple[str, ...] = ()
    """Policies whose models see. Their tokenizers are `ImageTokenizer`."""
    lora: tuple[str, ...] = ()
    """Policies served as LoRA on shared weights, for which `update` takes `LoRAWeights`; for all
    other policies it takes whole weights."""


class ChatTokenizer(Protocol):
    """Tokenizer with a chat template (`lightspan_torch.engine.tokenizer.TransformersTokenizer`)."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a turn."""

    @property
    def context_length(self) -> int: ...

    @property
    def tool_parser(self) -> ToolParserName:
        """Name of the parser that reads this model's tool calls."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Return the ids of the chat rendered by the chat template.

        Args:
            messages: chat messages in OpenAI's format.
            tools: tools in OpenAI's format; None for none.
            add_generation_prompt: whether to append the start of the assistant's answer.
            template_options: further variables of the template; None for none.
            most: maximum number of ids that the caller can use, as for `encode`; None for no limit.

        Raises:
            ModelError: there is no chat template, or the template rejects the messages.
            ContextOverflowError: the chat has far more ids than `most`.
        """

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        """Return the ids of the whole text.

        Args:
            most: maximum number of ids that the caller can use; None for no limit.

        Raises:
            ContextOverflowError: the text has far more ids than `most`. If it has only a few more,
                an implementation may return them all.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token, which may end or begin within a character."""


@runtime_checkable
class ImageTokenizer(ChatTokenizer, Protocol):
    """Tokenizer of a vision model."""

    def render_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids of a chat as `render` does, and its images with their bytes.

        Args:
            messages: chat messages in OpenAI's format. Their images are parts of the type
                `image_url` with a `data:` URL of base64.
            tools: as for `render`.
            add_generation_prompt: as for `render`.
            template_options: as for `render`.
            most: as for `render`.

        Raises:
            DataError: the bytes of an image cannot be decoded.
            ContextOverflowError: as for `render`.
            ModelError: as for `render`.
        """


@runtime_checkable
class TokenEngine(Protocol):
    """Engine with token ids as input and output. Its methods are called in one event loop.

    Implementations: `lightspan_torch.engine.transformers`, `lightspan_vllm`.
    """

    @property
    def capabilities(self) -> EngineCapabilities: ...

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Cancel all requests and free the models. Idempotent."""

    def policies(self) -> dict[str, int]:
        """Return policy → version of the weights that the engine uses for it."""

    def tokenizer(self, policy: str) -> ChatTokenizer:
        """Return a policy's tokenizer.

        Raises:
            NotFoundError: the policy is unknown.
        """

    def check_grammar(self, policy: str, grammar: str) -> None:
        """Compile a grammar before the calls that use it, so that an unsupported one raises early.

        Compilation may take a second, so the gateway calls this from several threads.

        Raises:
            UnsupportedError: the grammar is not supported; the message has the reason.
            NotFoundError: the policy is unknown.
        """
        raise UnsupportedError("this engine does not support grammars")

    def generate(self, request: GenerationRequest, *, stream: bool) -> AsyncIterator[TokenChunk]:
        """Generate tokens. Closing the iterator cancels the generation.

        Without `stream` there may be a single chunk. After a weight update the generation continues
        with the new weights, and the chunks have the new version.

        Raises (while iterating):
            ContextOverflowError: the prompt does not fit the model's context.
            EngineClosedError: the engine is closed.
            NotFoundError: the policy is unknown.
            UnsupportedError: a sampling setting or the grammar is not supported.
        """

    async def update(
        self, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        """Replace a policy's weights by a new version.

        Running requests are interrupted and continue with the new weights; the KV cache of the old
        weights is discarded.

        Args:
            policy: name of the policy.
            weights: `LoRAWeights` for a policy in `capabilities.lora`; they change no other
                policy. For another policy, name → tensor of all weights, with LoRA merged.
            version: number of the new version.
        """

    def usage(self) -> dict[str, float]:
        """Return counters: `tokens`, `requests` and `cpu_s` (CPU-seconds of the engine's threads).

        Raises:
            EngineError: the engine has ended, so that every request would fail.
        """


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has to serve: the models of the policies, their LoRA ranks, and a device."""

    models: Mapping[str, Any]
    """Policy → model: a name, a folder, or a loaded model."""
    lora: Mapping[str, int]
    """Policy with LoRA → its rank. The starting weights are listed too, with rank 0, if a LoRA
    policy shares them.
    """
    device: str = "cpu"
    seed: int = 0
    folder: Path = Path()
    """The run's folder, for logs."""

    def shares_model(self, policy: str) -> bool:
        """Return whether another policy with LoRA starts from the same model."""
        identity = model_identity(self.models[policy])
        return any(model_identity(self.models[o]) == identity for o in self.lora if o != policy)


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model from which its memory is computed."""

    parameters: int
    weight_bytes: int
    """Bytes per parameter in the saved model."""
    cache_values: int
    """Number of values per token in the KV cache."""
    lora_values: int
    """Number of parameters of a LoRA of rank 1 on all linear layers except the head."""
    context: int


@runtime_checkable
class EngineSpec(Protocol):
    """Configuration of an engine, from which a trainer builds it.

    Plugins provide such classes by the entry points `lightspan.engines`.
    """

    def build(self, request: EngineRequest) -> TokenEngine:
        """Build the engine without starting it.

        Raises:
            ConfigError: a setting is not supported.
            ModelError: a model cannot be loaded.
        """

    def describe(self, folder: Path) -> str:
        """Return a line to print while the engine starts; empty for none.

        Args:
            folder: the run's folder.
        """

    def copies(self, request: EngineRequest) -> list[tuple[str, ...]]:
        """Return the policies that use each copy of a model in the engine, one tuple per copy."""

    def memory(self, size: ModelSize, device: str, policies: int = 1) -> dict[str, int]:
        """Return the memory that the engine needs for one copy of a model: part → bytes.

        The parts are "engine weights" and, if known, "key-value cache". Empty for an engine on
        other machines.

        Args:
            size: size of the model.
            device: the trainer's device.
            policies: number of policies that use the copy.
        """


def model_identity(model: Any) -> str:
    """Return the name or path of a model; for a loaded model, the `id` of the object as text."""
    return os.fspath(model) if isinstance(model, str | os.PathLike) else str(id(model))


@runtime_checkable
class ProbedEngine(Protocol):
    """A `TokenEngine` whose servers have their own copies of the weights, in other processes.

    After each update, the trainer lets it compare the copies with the learner's weights. An engine
    in the trainer's own process needs no such check.
    """

    async def check_weights(self, policy: str, version: int, score: Score) -> None:
        """Compare the log-probabilities of answers that each server samples with the learner's.

        Args:
            policy: name of the policy.
            version: version that was published.
            score: returns the learner's log-probability of each token of rows, as `Learner.score`.

        Raises:
            EngineError: a server failed, or has other weights or another version.
            NotFoundError: the policy is unknown.
        """


class PromptRefused(EngineError):
    """The prompt contains ids that are not tokens of the model."""
