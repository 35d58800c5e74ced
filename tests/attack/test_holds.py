"""No step of reading, rendering and tokenising a large request keeps all others waiting for long.

`nox -s attack -- --delays` measures how long they wait indeed; here it is the CPU time of steps.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
from tests.attack.delays import LIMIT_S, expensive
from tests.attack.holds import longest_hold

from lightspan.engines.tokenizer import TransformersTokenizer
from lightspan.gateway import bodies, preparation
from lightspan.gateway.dialects.chat import parse_chat
from lightspan.gateway.dialects.completions import parse_completion
from lightspan.gateway.refusal import ApiError
from lightspan.schema import conventions as c
from lightspan.schema.records import Mode
from lightspan.testing.scripted_engine import tiny_chat_tokenizer

CONTEXT = 131_072
"""So long that megabytes are tokenised."""
TOO_LONG = ("a message of 4 MB", "4 MB of emoji", "4 MB of line ends", "numbers in a call")
LOOKS = 3
"""At most: one without a long step is enough, as whatever else the machine does only adds."""


@pytest.fixture(scope="module")
def tokenizer() -> TransformersTokenizer:
    return tiny_chat_tokenizer(context_length=CONTEXT)


def read_and_prepared(data: bytes, tokenizer: TransformersTokenizer) -> list[list[int]]:
    """As the gateway's threads do it."""
    body = bodies._decoded([data], "", "chat/completions", 2**24)
    asked = parse_chat(body.fields, mode=Mode.TRAIN, forced=None)
    return preparation._prompts(asked, tokenizer)


@pytest.mark.parametrize("kind", [*TOO_LONG, "a prompt that fits"])
def test_no_step_keeps_others_waiting(tokenizer: TransformersTokenizer, kind: str) -> None:
    data = expensive(kind)[kind]

    def work() -> None:
        if kind not in TOO_LONG:
            [ids] = read_and_prepared(data, tokenizer)
            assert CONTEXT / 2 < len(ids) < CONTEXT
            return
        with pytest.raises(ApiError) as refused:
            read_and_prepared(data, tokenizer)
        assert refused.value.code == c.CONTEXT_OVERFLOW
        assert "far more tokens than the model's context holds" in refused.value.message

    found: list[tuple[float, str]] = []
    while len(found) < LOOKS and (not found or found[-1][0] >= LIMIT_S):
        found.append(longest_hold(work))
    assert min(found)[0] < LIMIT_S, found


def test_what_is_too_long_by_its_letters_is_not_worded(tokenizer: TransformersTokenizer) -> None:
    """As JSON: neither for its digest, nor to see how long it is."""
    data = expensive("15 MB of line ends")["15 MB of line ends"]

    def work() -> None:
        with pytest.raises(ApiError, match=r"has at least 7,500,0\d\d bytes as JSON"):
            read_and_prepared(data, tokenizer)

    _, where = longest_hold(work)
    assert "json_decode" in where, "to word it would take longer than to read it"


def test_a_completion_that_is_far_too_long_is_refused(tokenizer: TransformersTokenizer) -> None:
    asked = parse_completion({"prompt": "a" * 600_000}, mode=Mode.TRAIN, forced=None)
    with pytest.raises(ApiError) as refused:
        preparation._prompts(asked, tokenizer)
    assert (refused.value.param, refused.value.code) == ("prompt", c.CONTEXT_OVERFLOW)
    assert refused.value.message.endswith("which is 131,072; shorten the prompt")


def test_a_step_that_keeps_others_waiting_is_seen() -> None:
    """By as much as it costs: what is freed in one step is a step, too."""

    def work() -> None:
        made: list[Any] = [[number] for number in range(300_000)]
        len(made)
        made.clear()
        len(made)

    gc.disable()  # a collection would be the longer step
    try:
        took, where = longest_hold(work)
    finally:
        gc.enable()
    assert took > 0.001
    # from Python 3.12 on a comprehension has no frame of its own: it is what comes before `len`
    assert any(step in where for step in ("clear", "listcomp", "call work -> c_call len"))


def test_tokenising_lets_others_go_on(tokenizer: TransformersTokenizer) -> None:
    """What `longest_hold` takes for granted of the library in Rust."""
    text, backend = "a, b " * 50_000, tokenizer.tokenizer.backend_tokenizer
    before = sys.getswitchinterval()
    sys.setswitchinterval(3_600)  # nobody is made to let go, so who does lets go by itself
    try:
        for _ in range(20):  # this thread may be slow to come
            begun, over = threading.Event(), threading.Event()

            def encode(begun: threading.Event = begun, over: threading.Event = over) -> None:
                begun.set()
                backend.encode_batch_fast([text])
                over.set()

            thread = threading.Thread(target=encode)
            thread.start()
            begun.wait()
            went_on = not over.is_set()
            thread.join()
            if went_on:
                return
    finally:
        sys.setswitchinterval(before)
    pytest.fail("it keeps all of Python while it tokenises")
