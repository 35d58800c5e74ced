"""Bytes of an answer's tokens are together the bytes of its text, in every kind of vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from lightspan_gateway.generated_call import token_octets
from lightspan_testing.tiny import SPECIAL, TEXTS, tiny_tokenizer
from lightspan_torch.engine.tokenizer import TransformersTokenizer


def _byte_fallback() -> Any:
    """Return a tokenizer like Llama 2's: spaces begin tokens, and rare characters are bytes."""
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({letter for text in TEXTS for letter in text if letter.isalnum()} | {"▁"})
    pairs = [("▁", letter) for letter in letters if letter != "▁"]
    names = ["<unk>", *octets, *letters, *("".join(pair) for pair in pairs)]
    vocabulary = {name: number for number, name in enumerate(names)}
    raw = Tokenizer(models.BPE(vocabulary, pairs, byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw, unk_token="<unk>", extra_special_tokens=list(SPECIAL)
    )


KINDS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: tiny_tokenizer(TEXTS, 400, ""),
    "byte fallback": _byte_fallback,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> TransformersTokenizer:
    return TransformersTokenizer(KINDS[request.param]())


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(max_size=12) | st.sampled_from(["Größe 🙂!", "a 🤗🤗 b", " the  end ", "日本 x"])
)
def test_bytes_of_tokens_are_those_of_the_text(tokenizer: TransformersTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    octets, _ = token_octets(tokenizer, ids)
    decoded = tokenizer.decode(ids)
    whole = decoded.rstrip("\ufffd") if "\ufffd" not in text else decoded
    assert b"".join(octets) == whole.encode()


def test_a_special_token_between_has_bytes_of_its_own(tokenizer: TransformersTokenizer) -> None:
    [end] = tokenizer.encode("<|im_end|>")[-1:]
    ids = [*tokenizer.encode("🙂"), end, *tokenizer.encode("ok")]
    octets, _ = token_octets(tokenizer, ids)
    assert b"".join(octets).replace(b" ", b"") == "🙂<|im_end|>ok".encode()


def test_an_answer_cut_within_a_character(tokenizer: TransformersTokenizer) -> None:
    ids = tokenizer.encode("a🙂")[:-1]
    octets, offsets = token_octets(tokenizer, ids)
    assert "a🙂".encode().startswith(b"".join(octets).lstrip())
    assert len(octets) == len(offsets) == len(ids)
