"""Grammars over token ids: what may come next, while sampling and when it is computed again.

A grammar is a text in llguidance's Lark syntax; `lightspan_gateway.grammars` writes those of a
request. Engine and learner compile the same text for the same tokenizer with the same version of
the library, so that both mask the same tokens, and log-probabilities of the masked, renormalised
distribution agree.
"""

from __future__ import annotations

import hashlib
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
from lightspan.schema.genai_messages import CALL_CLOSE, CALL_OPEN

LIBRARY: Final = f"llguidance {llguidance.__version__}"
"""What compiles grammars; kept with every call that was sampled under one."""
RULES: Final = ("tool_call_open", "tool_call_close", "text_and_tool_call_open")
"""Rules that a grammar may refer to, by whose names tokenizers differ: some have a token for these
marks, which a grammar has to name, others spell them."""
KEPT: Final = 64
"""Compiled grammars that are remembered: most hold 0.1 MiB, the largest that a request may ask for
5 MiB."""
_TRIES: Final = 8
"""Vocabularies that are remembered."""
_LIMITS: Final = llguidance.LLParserLimits(max_items_in_row=20_000, step_max_items=200_000)
"""What a step may cost: by default an object of 700 optional properties fails when it begins. The
length of a grammar is bounded by `lightspan_gateway.grammars`."""


class GrammarMismatchError(EngineError):
    """Tokens that the grammar, as it is compiled here, does not allow."""


class Grammars:
    """The grammars of one model: compiled once each, walked by every call. Safe to use from several
    threads.

    Making one may hold up every thread for a second or two: the library indexes the vocabulary with
    Python locked. Compiling a grammar locks nothing, but may take as long.

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
        self._tokens = _trie(tokenizer, vocabulary, tuple(sorted(eos_ids)))
        self._special = self._special_tokens()
        self._rules = self._marks(tokenizer)
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Compile it, ahead of the calls that follow it.

        Raises:
            UnsupportedError: it cannot be compiled, or not be followed; with the library's reason.
        """
        self._start(grammar)

    def walk(self, grammar: str) -> GrammarState:
        """A way through the grammar, from its beginning.

        Raises:
            UnsupportedError: it cannot be compiled.
        """
        return GrammarState(self._start(grammar), self._tokens, self._special)

    def known(self, grammar: str) -> GrammarState | None:
        """The same at once; None if it has to be compiled."""
        start = self._known(grammar)
        return None if start is None else GrammarState(start, self._tokens, self._special)

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

    def _special_tokens(self) -> NDArray[np.int32]:
        """[words] a bit per special token."""
        special = np.zeros(32 * self.words, np.bool_)
        for token in range(self.vocabulary):
            special[token] = self._tokens.is_special_token(token)
        return np.packbits(special, bitorder="little").view(np.int32)

    def _known(self, grammar: str) -> llguidance.LLMatcher | None:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                return None
            self._compiled.move_to_end(grammar)
            # a copy shares what was compiled, and costs microseconds
            return compiled.deep_copy()

    def _start(self, grammar: str) -> llguidance.LLMatcher:
        known = self._known(grammar)
        if known is not None:
            return known
        compiled = self._compile(grammar)  # without the lock: others need those that are there
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        compiled = llguidance.LLMatcher(
            self._tokens, f"{grammar}\n{self._rules}", log_level=0, limits=_LIMITS
        )
        if compiled.is_error():
            raise UnsupportedError(_reason(compiled))
        # what nothing satisfies compiles, and fails where an answer begins
        first = compiled.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise UnsupportedError(f"no answer can begin as it asks ({_reason(first)})")
        return compiled


class GrammarState:
    """A call's way through its grammar. One thread at a time."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        tokens: llguidance.LLTokenizer,
        special: NDArray[np.int32],
    ) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._special = special

    def copy(self) -> GrammarState:
        """Another walk from here."""
        return GrammarState(self._matcher.deep_copy(), self._tokens, self._special)

    def mask(self, into: NDArray[np.int32]) -> None:
        """Write what may come next into [words].

        Raises:
            GrammarMismatchError: the library gave up; its mask would silently end the answer.
        """
        assert into.nbytes == self._special.nbytes
        assert into.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(into.ctypes.data, into.nbytes)
        self._check()
        if (into & self._special).any():
            self._spell(into)

    def _spell(self, mask: NDArray[np.int32]) -> None:
        """Where the one text that may follow begins like a special token, the library allows that
        token alone: `"<|im_end|>"` as a value would end the answer. Its first letters instead."""
        text = self._matcher.compute_ff_bytes()
        if not text or text[0] == _NAMED:
            return
        (token, *_) = self._tokens.greedy_tokenize(text.decode(errors="ignore"))
        mask[:] = 0
        mask.view(np.uint32)[token // 32] = 1 << token % 32

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


_NAMED: Final = 0xFF
"""What the library writes before a special token that a grammar names; no text has this byte."""
_tries: OrderedDict[tuple[bytes, int, tuple[int, ...]], llguidance.LLTokenizer] = OrderedDict()
_tries_lock: Final = threading.Lock()


def _trie(tokenizer: Any, vocabulary: int, eos_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
    """The library's index of a vocabulary: policies, engine and learner share it.

    Raises:
        UnsupportedError: it cannot index this one.
    """
    with _tries_lock:
        text = tokenizer.backend_tokenizer.to_str().encode()
        key = hashlib.blake2b(text).digest(), vocabulary, eos_ids
        if key not in _tries:
            try:
                _tries[key] = llguidance.hf.from_tokenizer(
                    tokenizer, n_vocab=vocabulary, eos_token=list(eos_ids)
                )
            except ValueError as error:  # it knows byte-level BPE, and as many tokens as logits
                raise UnsupportedError(
                    f"grammars cannot be compiled for this tokenizer: {error}"
                ) from error
            if len(_tries) > _TRIES:
                _tries.popitem(last=False)
        _tries.move_to_end(key)
        return _tries[key]


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The library's error in one line, without where in our text it is."""
    lines = str(matcher.get_error()).splitlines() or ["the grammar cannot be followed"]
    details = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join([re.sub(r"^at \d+\(\d+\): ", "", lines[0]).strip(), *details])
