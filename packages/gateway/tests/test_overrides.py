"""Tests of the request fields that each dialect ignores, and of values that equal the default."""

from __future__ import annotations

from typing import Any

import pytest

from lightspan.schema.records import Mode
from lightspan.schema.token_records import Sampling
from lightspan_gateway.dialects import DIALECTS
from packages.gateway.tests.test_ranges import SAID

FORCED = Sampling(temperature=0.5)


@pytest.mark.parametrize(
    ("dialect", "fields", "overrides"),
    [
        ("chat/completions", {"verbosity": "low"}, {"verbosity": ("low", None)}),
        (
            "responses",
            {"text": {"verbosity": "low"}, "reasoning": {"effort": "high", "mode": None}},
            {"text.verbosity": ("low", None), "reasoning.effort": ("high", None)},
        ),
        (
            "messages",
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
            {
                "output_config.effort": ("high", None),
                "thinking": ({"type": "adaptive"}, None),
            },
        ),
    ],
)
def test_what_steers_a_providers_own_models_is_set_aside_in_val_mode(
    dialect: str, fields: dict[str, Any], overrides: dict[str, Any]
) -> None:
    body = {**SAID[dialect], "temperature": 0.3, **fields}
    parsed = DIALECTS[dialect].parse(body, mode=Mode.VAL, forced=None)
    assert (parsed.overrides, parsed.sampling.temperature) == (overrides, 0.3)


@pytest.mark.parametrize(
    ("dialect", "fields", "overrides"),
    [
        (
            "completions",
            {"logprobs": 3, "seed": 5, "max_tokens": 99},
            {"logprobs": (3, None), "seed": (5, None)},
        ),
        ("responses", {"max_output_tokens": 99}, {}),
        (
            "messages",
            {"top_k": 5, "inference_geo": "eu", "max_tokens": 99},
            {"inference_geo": ("eu", None), "top_k": (5, 0)},
        ),
    ],
)
def test_in_training_the_sampling_is_the_algorithms(
    dialect: str, fields: dict[str, Any], overrides: dict[str, Any]
) -> None:
    body = {**SAID[dialect], "temperature": 0.1, **fields}
    parsed = DIALECTS[dialect].parse(body, mode=Mode.TRAIN, forced=FORCED)
    assert parsed.sampling == Sampling(temperature=0.5, max_tokens=99)
    assert parsed.overrides == {**overrides, "temperature": (0.1, 0.5)}


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        (
            "chat/completions",
            {
                "presence_penalty": 0.0,
                "response_format": {"type": "text"},
                "logit_bias": {},
                "parallel_tool_calls": True,
                "metadata": {"a": "b"},
                "stop": None,
            },
        ),
        ("completions", {"echo": False, "suffix": None, "best_of": 2, "n": 2, "seed": None}),
        (
            "responses",
            {
                "background": False,
                "text": {"format": {"type": "text"}, "verbosity": "medium"},
                "reasoning": {"effort": "none", "summary": None},
                "include": ["reasoning.encrypted_content"],
                "service_tier": "auto",
                "stream_options": {"include_obfuscation": False},
            },
        ),
    ],
)
def test_neutral_values_ask_for_nothing(dialect: str, fields: dict[str, Any]) -> None:
    body = {**SAID[dialect], **fields}
    assert DIALECTS[dialect].parse(body, mode=Mode.VAL, forced=None).overrides == {}
