"""Compute which tokens a grammar allows next, for sampling and for training.

A grammar is a text in llguidance's Lark syntax, written by `lightspan_gateway.grammars`. The engine
samples only tokens that it allows. The learner computes log-probabilities over the same tokens.
Both compile the same text for the same tokenizer with the same version of llguidance, so that their
log-probabilities agree.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, Final

import llguidance
import llguidance.hf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightspan.errors import EngineError, UnsupportedError
from lightspan.schema.genai_messages import CALL_CLOSE, CALL_OPEN

LIBRARY: Final = f"llguidance {importlib.metadata.version('llguidance')}"
"""Name and version of the grammar compiler; recorded with every call sampled under a grammar."""
MAX_GRAMMARS: Final = 64
"""Maximum number of cached grammars. Most take 0.1 MiB; the largest that a request may send takes
5 MiB."""
MAX_VOCABULARIES: Final = 8
"""Maximum number of cached vocabulary indexes."""
_LIMITS: Final = llguidance.LLParserLimits(max_items_in_row=20_000, step_max_items=200_000)
"""Cost limits of one step. With the defaults, an object of 700 optional properties fails at its
start. `lightspan_gateway.grammars` bounds the length of a grammar."""


class GrammarMismatchError(EngineError):
    """The grammar does not allow a token, or llguidance failed to compute the next mask."""


class Grammars:
    """The compiled grammars of one model, cached. Thread-safe.

    The constructor may hold the GIL for a second or two, while llguidance indexes the vocabulary.
    Compiling a grammar may take as long but releases the GIL.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocabulary: vocabulary size of the model, which may exceed the tokenizer's.
        eos_ids: ids that end a turn. After a complete answer, the grammar allows only these ids.

    Raises:
        UnsupportedError: grammars cannot be compiled for the tokenizer.
    """

    def __init__(self, tokenizer: Any, *, vocabulary: int, eos_ids: Collection[int]) -> None:
        if not getattr(tokenizer, "is_fast", False) or not eos_ids:
            raise UnsupportedError(
                "grammars need a fast tokenizer of transformers with an end-of-turn token; this "
                f"tokenizer is a {type(tokenizer).__name__}"
            )
        self.vocabulary = vocabulary
        self.words = (vocabulary + 31) // 32
        """Number of 32-bit words in a mask; a mask has a bit for each token."""
        self._tokens = _trie(tokenizer, vocabulary, tuple(sorted(eos_ids)))
        self._special = self._special_tokens()
        self._rules = self._tool_call_rules(tokenizer)
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Compile `grammar` and cache it, so that later calls need not wait for the compiler.

        Raises:
            UnsupportedError: the grammar cannot be compiled, or it allows no first token.
        """
        self.start(grammar)

    def start(self, grammar: str) -> GrammarState:
        """Return the state of a grammar at its start. The grammar is compiled if it is not cached.

        Raises:
            UnsupportedError: the grammar cannot be compiled, or it allows no first token.
        """
        state = self.cached_start(grammar)
        if state is not None:
            return state
        compiled = self._compile(grammar)  # outside the lock, which other threads' lookups need
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
            return GrammarState(compiled.deep_copy(), self._tokens, self._special)

    def cached_start(self, grammar: str) -> GrammarState | None:
        """Return the state of a grammar at its start; None if the grammar is not cached."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                return None
            self._compiled.move_to_end(grammar)
            # a copy shares the compiled grammar and costs microseconds
            return GrammarState(compiled.deep_copy(), self._tokens, self._special)

    def masks(self, grammar: str, ids: Sequence[int]) -> NDArray[np.int32]:
        """Return the mask of allowed tokens at each token of a call.

        Args:
            grammar: grammar of the call.
            ids: the T sampled tokens of the call.

        Returns:
            [T, words] masks. Each has a bit for each token of the vocabulary, which is set if the
            token is allowed; the lowest bit of the first word is token 0.

        Raises:
            GrammarMismatchError: a token is not allowed.
            UnsupportedError: the grammar cannot be compiled, or it allows no first token.
        """
        state = self.start(grammar)
        masks = np.empty((len(ids), self.words), np.int32)
        for place, token in enumerate(ids):
            state.mask(masks[place])
            state.take(token)
        return masks

    def _tool_call_rules(self, tokenizer: Any) -> str:
        """Return grammar rules for the texts that open and close a tool call.

        The texts are `CALL_OPEN` and `CALL_CLOSE`. The rules are appended to every grammar. If the
        tokenizer has a special token for such a text, the rule names the token; otherwise it spells
        the text.
        """
        opening, closing = (self._mark(tokenizer, text) for text in (CALL_OPEN, CALL_CLOSE))
        rules = f"tool_call_open: {opening}\ntool_call_close: {closing}\n"
        if opening.startswith("<["):
            text = f"UNMARKED: /(?s:.*)/ & ~/(?s:.*){CALL_OPEN}(?s:.*)/\n"
            return f"{rules}{text}text_and_tool_call_open: UNMARKED? {opening}\n"
        # lazy: a separate text rule would match the mark's first characters and never end
        return f"{rules}text_and_tool_call_open[lazy]: /(?s:.*){CALL_OPEN}/\n"

    def _mark(self, tokenizer: Any, text: str) -> str:
        token = tokenizer.get_vocab().get(text)
        is_one_token = token is not None and self._tokens.is_special_token(token)
        return f"<[{token}]>" if is_one_token else json.dumps(text)

    def _special_tokens(self) -> NDArray[np.int32]:
        """Return [words], a mask in which the bits of special tokens are set."""
        special = np.zeros(32 * self.words, np.bool_)
        for token in range(self.vocabulary):
            special[token] = self._tokens.is_special_token(token)
        return np.packbits(special, bitorder="little").view(np.int32)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        compiled = llguidance.LLMatcher(
            self._tokens, f"{grammar}\n{self._rules}", log_level=0, limits=_LIMITS
        )
        if compiled.is_error():
            raise UnsupportedError(_reason(compiled))
        # an unsatisfiable grammar compiles, and fails at the first token
        first = compiled.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise UnsupportedError(f"the grammar allows no first token ({_reason(first)})")
        return compiled


class GrammarState:
    """Position of one answer in its grammar. Not thread-safe."""

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
        """Return an independent state at the same position."""
        return GrammarState(self._matcher.deep_copy(), self._tokens, self._special)

    def mask(self, into: NDArray[np.int32]) -> None:
        """Write the mask of the tokens that are allowed next into `into`, an array of [words].

        Raises:
            GrammarMismatchError: llguidance failed. Its mask is not used, because it would end the
                answer.
        """
        assert into.nbytes == self._special.nbytes
        assert into.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(into.ctypes.data, into.nbytes)
        self._check()
        if (into & self._special).any():
            self._replace_special(into)

    def _replace_special(self, mask: NDArray[np.int32]) -> None:
        """Change a mask that allows only a special token to allow an ordinary token instead.

        llguidance makes such a mask if the only possible continuation begins with the text of a
        special token, such as `"<|im_end|>"` in a JSON value. That special token would end the
        answer. The mask is changed to allow the first token by which the tokenizer spells the text.
        """
        text = self._matcher.compute_ff_bytes()
        if not text or text[0] == _SPECIAL_TOKEN_BYTE:
            return
        (token, *_) = self._tokens.greedy_tokenize(text.decode(errors="ignore"))
        mask[:] = 0
        mask.view(np.uint32)[token // 32] = 1 << token % 32

    def take(self, token: int) -> None:
        """Advance the state by one sampled token.

        Raises:
            GrammarMismatchError: the token is not allowed at this position.
        """
        if not self._matcher.consume_token(token):
            self._check()
            raise GrammarMismatchError(f"token {token} is not allowed by its grammar")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarMismatchError(_reason(self._matcher))


def allowed(masks: NDArray[np.int32], vocabulary: int) -> NDArray[np.bool_]:
    """Unpack [n, words] masks into [n, vocabulary], True where a token is allowed."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocabulary, bitorder="little")
    return bits.view(np.bool_)


def forbidden(packed: Tensor, vocabulary: int) -> Tensor:
    """Unpack [n, bytes] masks into [n, vocabulary], True where a token is not allowed."""
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=packed.device)
    return (packed[:, :, None].bitwise_and(bits) == 0).flatten(1)[:, :vocabulary]


_SPECIAL_TOKEN_BYTE: Final = 0xFF
"""First byte of a special token in llguidance's byte strings; UTF-8 text never contains it."""
_tries: OrderedDict[tuple[bytes, int, tuple[int, ...]], llguidance.LLTokenizer] = OrderedDict()
_tries_lock: Final = threading.Lock()


def _trie(tokenizer: Any, vocabulary: int, eos_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
    """Return llguidance's index of a vocabulary.

    It is cached, so that policies with equal tokenizers, the engine and the learner share it.

    Raises:
        UnsupportedError: llguidance cannot index the vocabulary.
    """
    with _tries_lock:
        text = tokenizer.backend_tokenizer.to_str().encode()
        key = hashlib.blake2b(text).digest(), vocabulary, eos_ids
        if key not in _tries:
            try:
                _tries[key] = llguidance.hf.from_tokenizer(
                    tokenizer, n_vocab=vocabulary, eos_token=list(eos_ids)
                )
            except ValueError as error:  # not byte-level BPE, or more tokens than logits
                raise UnsupportedError(
                    f"grammars cannot be compiled for this tokenizer: {error}"
                ) from error
            if len(_tries) > MAX_VOCABULARIES:
                _tries.popitem(last=False)
        _tries.move_to_end(key)
        return _tries[key]


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Return llguidance's error in one line, without the line and column numbers."""
    lines = str(matcher.get_error()).splitlines() or ["the grammar cannot be followed"]
    details = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join([re.sub(r"^at \d+\(\d+\): ", "", lines[0]).strip(), *details])
