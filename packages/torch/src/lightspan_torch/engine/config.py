"""Settings of the embedded engine, `engine=Transformers(…)`. Imports no torch."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from lightspan.errors import ConfigError
from lightspan.protocols.engine import EngineRequest, ModelSize, ToolParserName, model_identity
from lightspan.schema.validation import check_choice, check_whole

if TYPE_CHECKING:
    from lightspan_torch.engine.transformers import TransformersEngine

DTYPES: Final = ("float32", "bfloat16", "float16")


def check_date(name: str, value: object) -> None:
    """Raise `ConfigError` unless the value is a date."""
    if not isinstance(value, datetime.date):
        raise ConfigError(f"{name}={value!r} must be a date, such as datetime.date(2026, 11, 20)")


def model_copies(request: EngineRequest) -> list[tuple[str, ...]]:
    """Return the policies that use each copy of a model in the engine, one tuple per copy.

    Policies with LoRA on the same model share one copy of the model. Each other policy has its own.
    """
    groups: dict[tuple[bool, str], list[str]] = {}
    for policy, model in request.models.items():
        is_shared = policy in request.lora
        name = model_identity(model) if is_shared else policy
        groups.setdefault((is_shared, name), []).append(policy)
    return [tuple(policies) for policies in groups.values()]


class Transformers(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine in the trainer's process, the default of `Trainer(engine=)`.

    It samples with continuous batching, through transformers' public interfaces.

    Raises:
        ConfigError: a value is out of range.
    """

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the weights; None for the data type in the model's configuration."""
    context_length: int | None = None
    """Maximum number of tokens of prompt and answer; None, or a value above the model's, for the
    model's. It bounds the key-value cache."""
    num_blocks: int | None = None
    """Size of a policy's key-value cache in blocks of 64 tokens; None for a default that depends on
    the device."""
    batch_requests: int | None = None
    """Maximum number of requests in one forward pass; None for a default that depends on the
    device."""
    batch_tokens: int | None = None
    """Maximum number of tokens in one forward pass; None for a default that depends on the
    device."""
    prefix_sharing: bool = True
    """Whether requests whose prompts start with the same tokens share the keys and values of those
    tokens."""
    merge_lora: bool = False
    """Whether each LoRA policy is served by its own copy of the model, into which its LoRA is
    merged. If False, LoRA policies of one model share the model's weights."""
    tool_parser: ToolParserName | None = None
    """Parser of the models' tool calls; None to choose it by the model's chat template."""
    template_date: datetime.date | None = None
    """Date that chat templates see as today's; None for 26 July 2024."""

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
        """Return the engine, not started (`EngineSpec.build`)."""
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
        """Return the groups of policies that share one copy of their model (`EngineSpec.copies`).

        Each tuple has the names of the policies that share a copy.
        """
        return [(name,) for name in request.models] if self.merge_lora else model_copies(request)

    def memory(self, size: ModelSize, device: str, policies: int = 1) -> dict[str, int]:
        """Estimate the memory of one copy of a model: name of a part → bytes.

        Each policy that uses the copy has a key-value cache of its own. See `EngineSpec.memory`.
        """
        from lightspan_torch.engine.transformers import cache_tokens

        context = min(size.context, self.context_length or size.context)
        tokens = cache_tokens(device, context, self.num_blocks)
        width = size.weight_bytes if self.dtype is None else 4 if self.dtype == "float32" else 2
        return {
            "engine weights": size.parameters * width,
            "key-value cache": policies * tokens * size.cache_values * width,
        }

    def describe(self, folder: Path) -> str:
        """Return "", because nothing is printed while the engine starts (`EngineSpec.describe`)."""
        del folder
        return ""
