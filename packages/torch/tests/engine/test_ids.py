"""Our tokenizer returns the same ids as transformers."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import (
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from lightspan.errors import ContextOverflowError
from lightspan_testing.tiny import CHAT_TEMPLATE, SPECIAL, TEXTS, tiny_tokenizer
from lightspan_torch.engine import tokenizer as module
from lightspan_torch.engine.tokenizer import TransformersTokenizer

OPTIONS = signature(PreTrainedTokenizerFast.apply_chat_template).parameters


def _unigram() -> Any:
    """A tokenizer like SentencePiece's: the first word of a text gets other ids than later ones."""
    raw = Tokenizer(models.Unigram())
    raw.normalizer = normalizers.NFKC()
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return _fast(raw, trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", **_TRAINING))


_TRAINING: dict[str, Any] = {"special_tokens": ["<unk>", *SPECIAL], "show_progress": False}


def _fast(raw: Any, trainer: Any) -> Any:
    raw.train_from_iterator(TEXTS, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw, unk_token="<unk>", extra_special_tokens=list(SPECIAL)
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


KINDS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: tiny_tokenizer(TEXTS, 400, ""),
    "llama": lambda: tiny_tokenizer(TEXTS, 400, "", "llama"),
    "unigram": _unigram,
}
texts = st.lists(
    st.text(max_size=12) | st.sampled_from([*TEXTS, *SPECIAL, "<|eot_id|>", " \n ", "singer"]),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> TransformersTokenizer:
    return TransformersTokenizer(KINDS[request.param]())


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_ids_are_those_of_transformers(tokenizer: TransformersTokenizer, text: str) -> None:
    theirs = tokenizer.tokenizer
    assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    assert tokenizer.render(messages, [{"name": text}]) == theirs.apply_chat_template(
        messages,
        tools=[{"name": text}],
        add_generation_prompt=True,
        chat_template=_with_date(tokenizer),
        return_dict=False,
    )


def _with_date(tokenizer: TransformersTokenizer) -> str:
    template = tokenizer._template(with_tools=True)
    return tokenizer._date_macro + template if "strftime_now" in template else template


# --- what a tokenizer does in its own way ---------------------------------------------------
class _Backwards(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer that overrides how ids are made."""

    def _encode_plus(self, text: str, **options: Any) -> Any:
        return super()._encode_plus(text[::-1], **options)


def test_a_class_with_a_way_of_its_own_is_asked() -> None:
    plain = tiny_tokenizer(TEXTS, 400, "")
    options = {"tokenizer_object": plain.backend_tokenizer, "eos_token": "<|im_end|>"}
    tokenizer = TransformersTokenizer(
        _Backwards(**options, chat_template="{{ messages[0].content }}")
    )
    ids = TransformersTokenizer(plain).encode("regnis")
    assert tokenizer.encode("singer") == ids
    assert tokenizer.render([{"role": "user", "content": "singer"}]) == ids


def test_settings_of_the_backend_count_for_nothing() -> None:
    """Truncation and padding in a tokenizer's file do not change the ids."""
    theirs = tiny_tokenizer(TEXTS, 400, "")
    tokenizer = TransformersTokenizer(theirs)
    text = "How many singers are there?"
    ids = tokenizer.encode(text)
    theirs.backend_tokenizer.enable_truncation(3)
    assert tokenizer.encode(text) == ids
    theirs.backend_tokenizer.enable_padding(length=60)
    assert tokenizer.encode(text) == ids


def test_special_tokens_are_taken_apart_where_that_is_asked() -> None:
    theirs = tiny_tokenizer(TEXTS, 400, "")
    tokenizer = TransformersTokenizer(theirs)
    assert len(tokenizer.encode("<|im_end|>")) == 1
    theirs.split_special_tokens = True
    assert len(tokenizer.encode("<|im_end|>")) > 1
    theirs.split_special_tokens = False
    assert len(tokenizer.encode("<|im_end|>")) == 1


@pytest.mark.skipif(
    "sanitize_control_tokens"
    not in signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
    reason="transformers before 5.19 has no such option",
)
def test_options_of_transformers_are_given_to_it() -> None:
    """With `sanitize_control_tokens`, special tokens in a message are encoded as plain text."""
    tokenizer = TransformersTokenizer(tiny_tokenizer(TEXTS, 400, ""))
    messages = [{"role": "user", "content": "<|im_end|>"}]
    options = {"sanitize_control_tokens": True}
    end = min(tokenizer.eos_ids)
    assert tokenizer.render(messages).count(end) == 2
    assert tokenizer.render(messages, template_options=options).count(end) == 1


# --- what is far too long -------------------------------------------------------------------
def test_a_text_that_is_far_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is refused after a few pieces; the rest is not encoded."""
    tokenizer = TransformersTokenizer(tiny_tokenizer(TEXTS, 400, ""))
    sizes = []

    class Noted:
        def __init__(self, backend: Any) -> None:
            self.backend = backend

        def encode_batch_fast(self, given: list[str], **options: Any) -> Any:
            sizes.append(len(given[0]))
            return self.backend.encode_batch_fast(given, **options)

    plain = module._plain_backend
    monkeypatch.setattr(module, "_plain_backend", lambda tokenizer: Noted(plain(tokenizer)))
    says = "far more tokens than the model's context holds, which is 100,000"
    with pytest.raises(ContextOverflowError, match=says):
        tokenizer.encode("a" * 3_000_000, most=100_000)
    assert sizes == [65_536] * 4
    with pytest.raises(ContextOverflowError, match=says):
        tokenizer.render([{"role": "user", "content": "a" * 3_000_000}], most=100_000)
    assert sizes == [65_536] * 8


def test_whatever_may_fit_is_told_whole() -> None:
    """This includes a text with more characters than the length from which pieces are checked."""
    tokenizer = TransformersTokenizer(tiny_tokenizer(TEXTS, 400, ""))
    end = min(tokenizer.eos_ids)
    text = "<|im_end|>" * 20_000
    assert tokenizer.encode(text, most=20_000) == [end] * 20_000
    assert tokenizer.encode(text, most=10_100) == [end] * 20_000  # a cut adds a few
    with pytest.raises(ContextOverflowError):
        tokenizer.encode(text, most=9_999)
    assert tokenizer.encode("a" * 1_000, most=250) == tokenizer.encode("a" * 1_000)
    assert tokenizer.encode(text) == [end] * 20_000
