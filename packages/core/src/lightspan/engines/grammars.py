"""Grammars over token ids: what may come next, while sampling and when it is computed again.

A grammar is a text in llguidance's Lark syntax; `lightspan.gateway.grammars` writes those of a
request. Engine and learner compile the same text for the same tokenizer with the same version of
the library, so that both mask the same tokens, and log-probabilities of the masked, renormalised
distribution agree.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, Final

import llguidance
import llguidance.hf
import numpy as np
from numpy.typing import NDArray

from lightspan.errors import EngineError, UnsupportedError
from lightspan.schema.messages import CALL_CLOSE, CALL_OPEN

LIBRARY: Final = f"llguidance {llguidance.__version__}"
"""What compiles grammars; kept with every call that was sampled under one."""
RULES: Final = ("tool_call_open", "tool_call_close", "text_and_tool_call_open")
"""Rules that a grammar may refer to, by whose names tokenizers differ: some have a token for these
marks, which a grammar has to name, others spell them."""
KEPT: Final = 256
"""Compiled grammars that are remembered."""


class GrammarMismatchError(EngineError):
    """Tokens that the grammar, as it is compiled here, does not allow."""


class Grammars:
    """The grammars of one model: compiled once each, walked by every call. Safe to use from several
    threads.

    Args:
        tokenizer: of transformers, a fast one.
        vocabulary: the model's, which may be larger than the tokenizer's.
        eos_ids: every id that ends a turn; a finished grammar allows nothing else.

    Raises:
        UnsupportedError: the tokenizer is not one that grammars can be compiled for.
    """

    def __init__(self, tokenizer: Any, *, vocabulary: int, eos_ids: Collection[int]) -> None:
        if not getattr(tokenizer, "is_fast", False) or not eos_ids:
            raise UnsupportedError(
                "grammars need a fast tokenizer of transformers with a token that ends a turn; "
                f"this is {type(tokenizer).__name__}"
            )
        self.vocabulary = vocabulary
        self.words = (vocabulary + 31) // 32
        """32-bit words of a mask."""
        self._tokens = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocabulary, eos_token=sorted(eos_ids)
        )
        self._rules = self._marks(tokenizer)
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Raise `UnsupportedError`, with the library's reason, if it cannot be compiled."""
        self._start(grammar)

    def walk(self, grammar: str) -> Walk:
        """A way through the grammar, from its beginning.

        Raises:
            UnsupportedError: it cannot be compiled.
        """
        return Walk(self._start(grammar), self.words)

    def masks(self, grammar: str, ids: Sequence[int]) -> NDArray[np.int32]:
        """What each of these tokens was chosen from.

        Returns:
            [T, words] a bit per token of the vocabulary, the lowest first; set where allowed.

        Raises:
            GrammarMismatchError: one of them was not allowed.
            UnsupportedError: the grammar cannot be compiled.
        """
        walk = self.walk(grammar)
        masks = np.empty((len(ids), self.words), np.int32)
        for place, token in enumerate(ids):
            walk.mask(masks[place])
            walk.take(token)
        return masks

    def _marks(self, tokenizer: Any) -> str:
        """The rules of `RULES`, for this tokenizer."""
        opening, closing = (self._mark(tokenizer, text) for text in (CALL_OPEN, CALL_CLOSE))
        rules = f"tool_call_open: {opening}\ntool_call_close: {closing}\n"
        if opening.startswith("<["):
            text = f"UNMARKED: /(?s:.*)/ & ~/(?s:.*){CALL_OPEN}(?s:.*)/\n"
            return f"{rules}{text}text_and_tool_call_open: UNMARKED? {opening}\n"
        # lazy: a text of its own would take in the mark's first characters, and never let them go
        return f"{rules}text_and_tool_call_open[lazy]: /(?s:.*){CALL_OPEN}/\n"

    def _mark(self, tokenizer: Any, text: str) -> str:
        token = tokenizer.get_vocab().get(text)
        is_one_token = token is not None and self._tokens.is_special_token(token)
        return f"<[{token}]>" if is_one_token else json.dumps(text)

    def _start(self, grammar: str) -> llguidance.LLMatcher:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = llguidance.LLMatcher(
                    self._tokens, f"{grammar}\n{self._rules}", log_level=0
                )
                if compiled.is_error():
                    raise UnsupportedError(_reason(compiled))
                self._compiled[grammar] = compiled
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
            # a copy shares what was compiled, and costs microseconds
            return compiled.deep_copy()


class Walk:
    """A call's way through its grammar. One thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._bytes = 4 * words

    def mask(self, into: NDArray[np.int32]) -> None:
        """Write what may come next into [words].

        Raises:
            GrammarMismatchError: the library gave up; its mask would silently end the answer.
        """
        assert into.nbytes == self._bytes
        assert into.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(into.ctypes.data, self._bytes)
        self._check()

    def take(self, token: int) -> None:
        """Go on by a token.

        Raises:
            GrammarMismatchError: it is not allowed here.
        """
        if not self._matcher.consume_token(token):
            self._check()
            raise GrammarMismatchError(f"token {token} is not allowed by its grammar")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarMismatchError(_reason(self._matcher))


def allowed(masks: NDArray[np.int32], vocabulary: int) -> NDArray[np.bool_]:
    """[n, vocabulary] of [n, words]: True where a token is allowed."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocabulary, bitorder="little")
    return bits.view(np.bool_)


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The library's error in one line, without where in our text it is."""
    lines = str(matcher.get_error()).splitlines() or ["the grammar cannot be followed"]
    details = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join([re.sub(r"^at \d+\(\d+\): ", "", lines[0]).strip(), *details])
