"""Settings of the embedded engine, `engine=Transformers(…)`. Imports no torch."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from lightspan.errors import ConfigError
from lightspan.protocols.engine import EngineRequest, ModelSize, ToolParserName
from lightspan.schema.validation import check_choice, check_date, check_whole

if TYPE_CHECKING:
    from lightspan_torch.engine.transformers import TransformersEngine

DTYPES: Final = ("float32", "bfloat16", "float16")


class Transformers(msgspec.Struct, frozen=True, kw_only=True):
    """The transformers engine in the trainer's process: the default of `Trainer(engine=)`.

    Raises:
        ConfigError: a value is out of range.
    """

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the weights; None for the model's."""
    context_length: int | None = None
    """Context length in tokens, at most the model's; it bounds the key-value cache."""
    num_blocks: int | None = None
    """Size of a policy's key-value cache in blocks of 64 tokens; None for a default by device."""
    batch_requests: int | None = None
    """Maximum number of requests in one forward pass; None for a default by device."""
    batch_tokens: int | None = None
    """Maximum number of tokens in one forward pass; None for a default by device."""
    prefix_sharing: bool = True
    """Whether prompts with a common prefix share its keys and values."""
    merge_lora: bool = False
    """Whether each LoRA policy has a model of its own, with merged weights. If not, LoRA policies
    of one model share its weights."""
    tool_parser: ToolParserName | None = None
    """Parser of the models' tool calls; None to choose by each chat template."""
    template_date: datetime.date | None = None
    """Today's date for chat templates; None for 26 July 2024."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("Transformers: dtype", self.dtype, DTYPES)
        for name in ("num_blocks", "batch_requests", "batch_tokens"):
            if (value := getattr(self, name)) is not None:
                check_whole(f"Transformers: {name}", value, 1)
        if self.context_length is not None:
            check_whole("Transformers: context_length", self.context_length, 2)
        for name in ("prefix_sharing", "merge_lora"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"Transformers: {name}={value!r} must be True or False")
        if self.template_date is not None:
            check_date("Transformers: template_date", self.template_date)

    def build(self, request: EngineRequest) -> TransformersEngine:
        """See `EngineSpec.build`."""
        from lightspan_torch.engine.transformers import TransformersEngine

        options = self.options()
        # a policy that shares its model with no other policy is merged: this needs less computation
        # per token, and no more memory
        lora = {
            policy: rank
            for policy, rank in request.lora.items()
            if not self.merge_lora and request.shares_model(policy)
        }
        return TransformersEngine(
            request.models, lora=lora, device=request.device, seed=request.seed, **options
        )

    def options(self) -> dict[str, Any]:
        """Return the arguments of `TransformersEngine` for these settings."""
        import torch

        names = ("context_length", "num_blocks", "batch_requests", "batch_tokens")
        options = {name: getattr(self, name) for name in (*names, "prefix_sharing", "tool_parser")}
        if self.dtype is not None:
            options["dtype"] = getattr(torch, self.dtype)
        if self.template_date is not None:
            options["template_date"] = self.template_date
        return options

    def copies(self, request: EngineRequest) -> list[tuple[str, ...]]:
        """See `EngineSpec.copies`."""
        return [(name,) for name in request.models] if self.merge_lora else request.copies()

    def memory(self, size: ModelSize, device: str) -> dict[str, int]:
        """See `EngineSpec.memory`."""
        from lightspan_torch.engine.transformers import cache_tokens

        context = min(size.context, self.context_length or size.context)
        tokens = cache_tokens(device, context, self.num_blocks)
        width = size.weight_bytes if self.dtype is None else 4 if self.dtype == "float32" else 2
        return {
            "engine weights": size.parameters * width,
            "key-value cache": tokens * size.cache_values * width,
        }

    def describe(self, folder: Path) -> str:
        """See `EngineSpec.describe`."""
        del folder
        return ""
