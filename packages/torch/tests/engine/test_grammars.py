"""Answers under a grammar are valid and have the log-probabilities of the masked distribution."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightspan.errors import UnsupportedError
from lightspan.protocols.engine import GenerationRequest
from lightspan.schema.token_records import FinishReason, Sampling
from lightspan_testing.engine_suite import TOLERANCE, Answer, perturbed
from lightspan_testing.tiny import tiny_model
from lightspan_testing.wait import until
from lightspan_torch.engine import _batcher
from lightspan_torch.engine.grammars import GrammarMismatchError, Grammars, allowed
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model
from packages.torch.tests.engine.engines import running

PROMPT = [7, 8, 9, 10, 11, 12]
COMPACT = '"x-guidance": {"whitespace_flexible": false}'


def ones_and_twos(count: int) -> str:
    """Return the grammar of an array of `count` numbers, each 1 or 2."""
    return (
        f'start: %json {{"type": "array", "items": {{"enum": [1, 2]}}, "minItems": {count}, '
        f'"maxItems": {count}, {COMPACT}}}'
    )


PAIR = ones_and_twos(2)
FRUIT = 'start: "apple" | "banana" | "cherry"'
SHORT = (
    'start: %json {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, '
    '"minimum": 0}, "b": {"type": "boolean"}}, "required": ["a", "b"], '
    f'"additionalProperties": false, {COMPACT}}}'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("grammars") / "model", seed=2, context=1024)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TransformersTokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_model(folder)


@pytest.fixture(scope="module")
def grammars(model: Any, tokenizer: TransformersTokenizer) -> Grammars:
    vocabulary = model.config.vocab_size
    return Grammars(tokenizer.tokenizer, vocabulary=vocabulary, eos_ids=tokenizer.eos_ids)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    async with running(folder) as engine:
        yield engine


async def generate(
    engine: TransformersEngine,
    grammar: str,
    *,
    prompt: Sequence[int] = PROMPT,
    answered: int = 0,
    name: str = "r",
    stream: bool = False,
    **sampling: Any,
) -> Answer:
    request = GenerationRequest(
        request_id=name,
        policy="writer",
        prompt_ids=list(prompt),
        sampling=Sampling(**{"max_tokens": 100, **sampling}),
        grammar=grammar,
        answered=answered,
    )
    answer = Answer()
    async for chunk in engine.generate(request, stream=stream):
        answer.ids += chunk.ids
        answer.logprobs += chunk.logprobs
        answer.versions += [chunk.version] * len(chunk.ids)
        answer.finish = chunk.finish_reason
    return answer


@torch.no_grad()
def masked(
    model: Any,
    grammars: Grammars,
    grammar: str,
    prompt: Sequence[int],
    ids: Sequence[int],
    temperature: float = 1.0,
) -> list[float]:
    """Return the log-probability of each id under the masked distribution, by one forward pass."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    free = torch.from_numpy(allowed(grammars.masks(grammar, ids), grammars.vocabulary))
    distribution = (logits.masked_fill(~free, -torch.inf) / temperature).log_softmax(-1)
    return distribution.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


# --- masks ----------------------------------------------------------------------------------
def test_masks_are_what_may_come_next(grammars: Grammars, tokenizer: TransformersTokenizer) -> None:
    ids = [*tokenizer.encode("banana"), min(tokenizer.eos_ids)]
    masks = allowed(grammars.masks(FRUIT, ids), grammars.vocabulary)
    assert masks.shape == (len(ids), grammars.vocabulary)
    first = {tokenizer.token_bytes(int(token)).decode() for token in masks[0].nonzero()[0]}
    fruits = ("apple", "banana", "cherry")
    assert {"a", "b", "c"} <= first
    assert all(any(fruit.startswith(text) for fruit in fruits) for text in first)
    assert set(masks[-1].nonzero()[0].tolist()) == set(tokenizer.eos_ids)
    assert all(masks[place, token] for place, token in enumerate(ids))


def test_tokens_that_do_not_fit(grammars: Grammars, tokenizer: TransformersTokenizer) -> None:
    with pytest.raises(GrammarMismatchError):
        grammars.masks(FRUIT, tokenizer.encode("date"))
    with pytest.raises(UnsupportedError, match="Expected token"):
        grammars.check("start: (")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"const": "日本<|im_start|>x<|endoftext|>"}, "日本<|im_start|>x<|endoftext|>"),
        (
            {
                "type": "object",
                "properties": {"<|im_end|>": {"const": 1}},
                "required": ["<|im_end|>"],
                "additionalProperties": False,
            },
            {"<|im_end|>": 1},
        ),
    ],
)
def test_a_special_token_as_a_text_is_spelled(
    grammars: Grammars, tokenizer: TransformersTokenizer, schema: dict[str, Any], value: Any
) -> None:
    """llguidance alone would choose the special token, which would end the answer or be hidden."""
    grammar = f"start: %json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"
    ids = _forced(grammars, grammar, tokenizer.eos_ids)
    assert json.loads(tokenizer.decode(ids)) == value
    assert not set(ids[:-1]) & set(tokenizer.tokenizer.added_tokens_decoder)
    # and as engine and learner mask the same, so does a walk over what was sampled
    masks = allowed(grammars.masks(grammar, ids), grammars.vocabulary)
    assert all(masks[place, token] for place, token in enumerate(ids))


def _forced(grammars: Grammars, grammar: str, eos_ids: Collection[int]) -> list[int]:
    """Return the ids of an answer for which the lowest allowed token is always taken."""
    state, ids = grammars.start(grammar), list[int]()
    mask = np.empty((1, grammars.words), np.int32)
    while not ids or ids[-1] not in eos_ids:
        state.mask(mask[0])
        ids.append(int(allowed(mask, grammars.vocabulary)[0].nonzero()[0][0]))
        state.take(ids[-1])
    return ids


def test_many_optional_properties(grammars: Grammars, tokenizer: TransformersTokenizer) -> None:
    """Regression: a grammar of this size was compiled but failed at the first brace."""
    properties = {f"p{number}": {"enum": [0]} for number in range(1_500)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    text = '{"p3":0,"p1200":0}'
    grammar = f"start: %json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"
    grammars.masks(grammar, [*tokenizer.encode(text), min(tokenizer.eos_ids)])


def test_what_nothing_satisfies_is_not_taken(grammars: Grammars) -> None:
    with pytest.raises(UnsupportedError, match="the grammar allows no first token"):
        grammars.check('start: %json {"$ref": "#"}')


async def test_compiling_holds_up_none(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars.check(FRUIT)
    begun, go_on = threading.Event(), threading.Event()
    compile = grammars._compile

    def slowly(grammar: str) -> Any:
        begun.set()
        assert go_on.wait(60)
        return compile(grammar)

    monkeypatch.setattr(grammars, "_compile", slowly)
    new = FRUIT + ' | "date"'
    compiling = asyncio.create_task(asyncio.to_thread(grammars.check, new))
    assert await asyncio.to_thread(begun.wait, 60)
    walking = asyncio.create_task(asyncio.to_thread(grammars.start, FRUIT))
    await asyncio.wait([walking, compiling], return_when=asyncio.FIRST_COMPLETED)
    assert walking.done()
    assert grammars.cached_start(new) is None
    go_on.set()
    await compiling
    assert grammars.cached_start(new) is not None


def test_one_index_per_vocabulary(
    model: Any, tokenizer: TransformersTokenizer, grammars: Grammars
) -> None:
    other = Grammars(
        load_tokenizer(tokenizer.name).tokenizer,
        vocabulary=model.config.vocab_size,
        eos_ids=tokenizer.eos_ids,
    )
    assert other._tokens is grammars._tokens


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    """Advancing one state does not change another state of the same grammar."""
    one, other = grammars.start(FRUIT), grammars.start(FRUIT)
    before, after = (np.empty(grammars.words, np.int32) for _ in range(2))
    other.mask(before)
    one.take(int(allowed(before, grammars.vocabulary).nonzero()[0][0]))
    other.mask(after)
    assert (before == after).all()
    one.mask(after)
    assert (before != after).any()


# --- sampling -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_answers_are_valid_and_exact(
    engine: TransformersEngine,
    model: Any,
    grammars: Grammars,
    tokenizer: TransformersTokenizer,
    temperature: float,
) -> None:
    """Sixteen requests run at the same time, under three grammars and none."""
    asked = [(SHORT, PAIR, FRUIT, "")[number % 4] for number in range(16)]
    prompts = [[*PROMPT[: 2 + number % 5], number + 20] for number in range(16)]
    answers = await asyncio.gather(
        *(
            generate(engine, grammar, prompt=prompt, name=str(n), temperature=temperature)
            for n, (grammar, prompt) in enumerate(zip(asked, prompts, strict=True))
        )
    )
    for grammar, prompt, answer in zip(asked, prompts, answers, strict=True):
        if not grammar:
            continue
        assert answer.finish is FinishReason.STOP
        _check(grammar, tokenizer.decode(answer.ids))
        expected = masked(model, grammars, grammar, prompt, answer.ids, temperature)
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)
    structured = [a for a, grammar in zip(answers, asked, strict=True) if grammar]
    assert any(logprob == 0.0 for answer in structured for logprob in answer.logprobs)


def _check(grammar: str, text: str) -> None:
    if grammar == FRUIT:
        assert text in ("apple", "banana", "cherry")
    elif grammar == PAIR:
        first, second = json.loads(text)
        assert {first, second} <= {1, 2}
    else:
        value = json.loads(text)
        assert list(value) == ["a", "b"]
        assert 0 <= value["a"] <= 99
        assert isinstance(value["b"], bool)


async def test_the_likeliest(engine: TransformersEngine, tokenizer: TransformersTokenizer) -> None:
    """The grammar's mask is applied before greedy decoding, top-p and top-k."""
    one, same = [await generate(engine, SHORT, temperature=0.0, name=n) for n in "ab"]
    assert one.ids == same.ids
    assert set(one.logprobs) == {0.0}
    _check(SHORT, tokenizer.decode(one.ids))
    for number in range(4):
        answer = await generate(engine, PAIR, top_p=0.5, top_k=3, name=str(number))
        _check(PAIR, tokenizer.decode(answer.ids))
        assert all(math.isfinite(value) for value in answer.logprobs)


async def test_cut_streamed_and_continued(
    engine: TransformersEngine, model: Any, grammars: Grammars, tokenizer: TransformersTokenizer
) -> None:
    """An answer that continues from sampled tokens also continues their grammar."""
    cut = await generate(engine, SHORT, max_tokens=3, stream=True)
    assert (cut.finish, len(cut.ids)) == (FinishReason.LENGTH, 3)
    whole = [*PROMPT, *cut.ids]
    rest = await generate(engine, SHORT, prompt=whole, answered=3, name="again")
    assert rest.finish is FinishReason.STOP
    _check(SHORT, tokenizer.decode([*cut.ids, *rest.ids]))
    expected = masked(model, grammars, SHORT, PROMPT, [*cut.ids, *rest.ids])
    assert [*cut.logprobs, *rest.logprobs] == pytest.approx(expected, abs=TOLERANCE)


async def test_weights_that_change_in_the_middle(
    engine: TransformersEngine, model: Any, tokenizer: TransformersTokenizer
) -> None:
    options: dict[str, Any] = {"max_tokens": 500, "stream": True}
    tasks = [
        asyncio.create_task(generate(engine, ones_and_twos(40), name=str(n), **options))
        for n in range(4)
    ]
    await until(lambda: engine.usage()["tokens"])  # sampled by the weights of before
    for version in (1, 2, 3):
        await engine.update("writer", perturbed(model, version), version)
    answers = await asyncio.gather(*tasks)
    assert {version for answer in answers for version in answer.versions} > {3}
    for answer in answers:
        items = json.loads(tokenizer.decode(answer.ids))
        assert len(items) == 40
        assert set(items) <= {1, 2}


async def test_a_matcher_that_gives_up_fails_its_own_call(
    engine: TransformersEngine, tokenizer: TransformersTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = _batcher._GrammarPosition.mask

    def mask(self: Any, ids: Sequence[int], into: Any) -> None:
        original(self, ids, into)
        if list(ids[:2]) == [30, 31] and len(ids) == 4:
            raise GrammarMismatchError("too complex")

    monkeypatch.setattr(_batcher._GrammarPosition, "mask", mask)
    bad = generate(engine, SHORT, prompt=[30, 31], name="bad")
    good = generate(engine, SHORT, prompt=[32, 33], name="good")
    error, answer = await asyncio.gather(bad, good, return_exceptions=True)
    assert isinstance(error, GrammarMismatchError)
    assert str(error) == "the answer cannot follow its grammar: too complex"
    assert isinstance(answer, Answer)
    _check(SHORT, tokenizer.decode(answer.ids))
    after = await generate(engine, FRUIT, name="after")
    _check(FRUIT, tokenizer.decode(after.ids))
    batcher = engine._workers["writer"]._batcher
    assert batcher is not None
    assert batcher._running == []


async def test_a_grammar_that_cannot_be_followed_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(UnsupportedError, match="uniqueItems"):
        engine.check_grammar("writer", 'start: %json {"uniqueItems": true}')
    with pytest.raises(UnsupportedError, match="uniqueItems"):
        await generate(engine, 'start: %json {"uniqueItems": true}')
