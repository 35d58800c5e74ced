"""Tests of the types and ranges of sampling fields, in every dialect and mode."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightspan.schema.records import Mode
from lightspan.schema.token_records import Sampling
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.dialects import DIALECTS

SAID: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "completions": {"prompt": "a"},
    "responses": {"input": "a"},
    "messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
}
NO_NUMBER: list[Any] = [True, "0.5", [1], {"a": 1}, math.nan, math.inf, -math.inf, 1e308]
NO_WHOLE = [*NO_NUMBER, 0.5, 10**30, -(10**30)]
SIGNED = [-1e3, 1e3, 10**300]
WRONG: dict[str, list[Any]] = {
    "temperature": [*NO_NUMBER, -0.1, 101, 10**400],
    "top_p": [*NO_NUMBER, 0, -1, 1.01, 10**400],
    "min_p": [*NO_NUMBER, -0.1, 1.1],
    "frequency_penalty": [*NO_NUMBER, *SIGNED],
    "presence_penalty": [*NO_NUMBER, *SIGNED],
    "repetition_penalty": [*NO_NUMBER, *SIGNED],
    "top_k": [*NO_WHOLE, -2, 2**31],
    "n": [*NO_WHOLE, 0, -1, 129],
    "seed": [*NO_WHOLE, 2**64, -(2**63) - 1],
    "top_logprobs": [*NO_WHOLE, -1, 21],
    "max_tokens": [*NO_WHOLE, 0, -1, 2**63],
    "max_completion_tokens": [*NO_WHOLE, 0, 2**63],
    "logit_bias": [1, "a", [1]],
    "stream": [1, "true", []],
    "stream_options": [1, "a", []],
    "stop": [1, True, {"a": 1}, [""], [1], "", ["a"] * 65],
}
OF_ONE: dict[str, dict[str, list[Any]]] = {
    "chat/completions": {"logprobs": [1, "true", []]},
    "completions": {"logprobs": [*NO_WHOLE, -1, 21], "best_of": [*NO_WHOLE, 0, 129]},
    "responses": {"max_output_tokens": [*NO_WHOLE, 0, 2**63]},
    "messages": {"stop_sequences": [1, "a", {}, [""], [1], ["a"] * 65]},
}
NOT_OF: dict[str, set[str]] = {
    # the limit of chats, which others ignore
    "completions": {"max_completion_tokens"},
    "responses": {"max_completion_tokens", "max_tokens"},
    "messages": {"max_completion_tokens", "stop"},
}
CASES = [
    (dialect, field, wrong)
    for dialect in SAID
    for field, values in {**WRONG, **OF_ONE[dialect]}.items()
    if field not in NOT_OF.get(dialect, ())
    for wrong in values
    # an empty text means null
    if not (field == "stop" and wrong == "")
]
MODES = [(Mode.TRAIN, Sampling()), (Mode.VAL, Sampling()), (Mode.VAL, None)]
"""(mode, forced sampling) in training, in validation and in `lightspan serve`."""


@pytest.mark.parametrize("dialect", SAID)
def test_what_is_no_value_of_a_field_is_refused_by_name(dialect: str) -> None:
    for of, field, wrong in CASES:
        if of != dialect:
            continue
        for mode, forced in MODES:
            with pytest.raises(ApiError) as refused:
                DIALECTS[dialect].parse({**SAID[dialect], field: wrong}, mode=mode, forced=forced)
            refusal = (refused.value.status, refused.value.param)
            assert refusal == (400, field), f"{field} = {wrong!r} in {mode}: {refused.value}"
            assert "cannot be honoured" not in refused.value.message, refused.value.message


@pytest.mark.parametrize("dialect", SAID)
def test_the_ends_of_a_range_are_values(dialect: str) -> None:
    fine: dict[str, list[Any]] = {
        "temperature": [0, 100, None],
        "top_p": [1e-9, 1, None],
        "top_k": [-1, 0, 2**31 - 1],
        "frequency_penalty": [-2, 2],
        "repetition_penalty": [0.5],
        "min_p": [0.5],
        "seed": [-(2**63), 2**64 - 1],
        "logit_bias": [{"5": -100}, {}],
        "stream": [True, False, None],
    }
    for field, values in fine.items():
        for value in values:
            body = {**SAID[dialect], field: value}
            DIALECTS[dialect].parse(body, mode=Mode.TRAIN, forced=Sampling())
