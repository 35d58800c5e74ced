"""Random rows (token sequences for training) for the tests of learners."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from lightspan.lightning.rows import Response, Row
from lightspan.protocols.engine import ImageTokenizer
from lightspan.schema.images import PromptImage
from lightspan_testing.learner_suite.reference import row_logits
from lightspan_testing.tiny_vision import image_chat, picture

VOCABULARY = 405


def make_rows(
    model: Any, count: int = 12, *, seed: int = 0, policy: str = "writer", off_policy: float = 0.7
) -> list[Row]:
    """Build random rows (token sequences for training).

    The recorded log-probabilities differ from the model's, so that importance ratios are about 0.5
    to 2.

    Args:
        model: model whose log-probabilities are changed.
        count: number of rows.
        seed: seed of the random values.
        policy: policy of the rows.
        off_policy: maximum difference of a token's log-probability from that of the model.
    """
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        ids = [rng.randrange(5, VOCABULARY) for _ in range(rng.randint(6, 40))]
        rows.append(random_row(ids, rng, f"ro-{number // 2}", policy))
    return [_recorded(model, row, rng, off_policy) for row in rows]


def make_branching_rows(
    model: Any, *, seed: int = 0, policy: str = "writer", off_policy: float = 0.7, long: int = 0
) -> list[Row]:
    """Build random rows with common prefixes, like the rows of a group.

    Several rows begin with the same prompt. Some share a longer prefix. Some are equal except for
    their advantages. One row is the prefix of another. Prefixes contain trained tokens too.
    Log-probabilities and temperatures are as in `make_rows`.

    Args:
        model: model whose log-probabilities are changed.
        seed: seed of the random values.
        policy: policy of the rows.
        off_policy: maximum difference of a token's log-probability from that of the model.
        long: number of tokens of a further row, whose prefixes other rows share; 0 for no such row.
    """
    rng = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(5, VOCABULARY) for _ in range(rng.randint(low, high))]

    prompt, other = some(8, 12), some(5, 8)
    history = prompt + some(10, 20)
    sequences = [prompt + some(1, 9) for _ in range(4)]
    sequences += [history[:size] + some(2, 15) for size in (len(history), 14, 17, 17)]
    sequences += [history, history, history[:11], other, other + some(6, 6)]
    if long:
        far = prompt + some(long, long)
        sequences += [far, *(far[: size * long // 5] + some(20, 60) for size in range(1, 5))]
        sequences.append(far[:30] + some(120, 120))
    rows = [random_row(ids, rng, f"ro-{number}", policy) for number, ids in enumerate(sequences)]
    return [_recorded(model, row, rng, off_policy) for row in rows]


def make_call_rows(
    model: Any, *, seed: int = 0, policy: str = "writer", off_policy: float = 0.7
) -> list[Row]:
    """Build rows that contain several calls each, as merging makes them.

    Some rows have a common prefix. Two rows share an answer. There is a call directly after
    another, a long call, and equal rows with different advantages. Each call has its own advantage,
    weight and temperature.

    The log-probabilities of each call are shifted by a constant, and those of each token by a
    random difference in addition.

    Args:
        model: model whose log-probabilities are changed.
        seed: seed of the random values.
        policy: policy of the rows.
        off_policy: maximum difference of a token's log-probability. The shift of a call is at most
            half as large.
    """
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        return [rng.randrange(5, VOCABULARY) for _ in range(count)]

    prompt, answer, other = some(9), some(6), some(5)
    follow, long = [(some(4), some(7)), ([], some(1)), (some(3), some(5))], some(60)
    chains = [
        [(prompt, answer), *follow],
        [(prompt, answer), *follow],
        [(prompt, answer), follow[0], (some(2), some(4))],
        [(prompt, answer)],
        [(prompt, some(3)), ([], some(8))],
        [(prompt, long)],
        [(prompt, long[:20]), ([], long[20:]), (some(1), some(2))],
        [(other, some(1))],
    ]
    rows = [_call_row(chain, rng, f"ro-{n}", policy) for n, chain in enumerate(chains)]
    recorded = [_recorded(model, row, rng, off_policy) for row in rows]
    return [_shift_calls(row, rng, off_policy) for row in recorded]


def make_image_rows(
    model: Any,
    tokenizer: ImageTokenizer,
    *,
    seed: int = 0,
    policy: str = "writer",
    off_policy: float = 0.7,
) -> list[Row]:
    """Build random rows with none to two images, like the rows of a group.

    Some have equal ids and other images. Some have equal beginnings and equal images. In some, an
    image comes after an answer.

    Args:
        model: model whose log-probabilities are changed.
        tokenizer: the model's tokenizer.
        seed: seed of the random values.
        policy: policy of the rows.
        off_policy: maximum difference of a token's log-probability from that of the model.
    """
    rng = random.Random(seed)
    red, blue, tall = picture("red"), picture("blue"), picture("red", (56, 84))
    answers = [[rng.randrange(5, 300) for _ in range(rng.randint(4, 9))] for _ in range(4)]
    chats: list[list[tuple[list[bytes], int]]] = [
        [([red], 0)],
        [([red], 1)],
        [([blue], 0)],
        [([blue], 1)],
        [([red, blue], 0)],
        [([blue, red], 0)],
        [([tall], 2)],
        [([], 0)],
        [([red], 0), ([blue], 3)],
        [([red], 0), ([red], 3)],
        [([red], 0), ([], 2)],
    ]
    rows = []
    for number, turns in enumerate(chats):
        ids: list[int] = []
        images: list[PromptImage] = []
        for pictures, answer in turns:
            prompt, found = tokenizer.render_images(image_chat("See ", *pictures, " now?"))
            images += [structs.replace(each, start=each.start + len(ids)) for each in found]
            ids = [*ids, *prompt, *answers[answer]]
        row = random_row(ids, rng, f"ro-{number}", policy)
        for image in images:
            for place in range(image.start, image.start + image.length):
                row.mask[place], row.temperatures[place] = False, 1.0
                row.advantages[place] = row.weights[place] = 0.0
        row = replace(row, images=tuple(images))
        rows.append(_recorded(model, row, rng, off_policy))
    return rows


def _call_row(
    chain: Sequence[tuple[list[int], list[int]]], rng: random.Random, rollout_id: str, policy: str
) -> Row:
    """Build a row of several calls.

    `chain` has two token lists per call: the new tokens of its prompt, and its answer.
    """
    ids: list[int] = []
    values: dict[str, list[Any]] = {
        name: [] for name in ("mask", "advantages", "weights", "temperatures")
    }
    responses = []
    for new, answer in chain:
        responses.append(Response(len(ids) + len(new), len(answer)))
        ids = [*ids, *new, *answer]
        sampled = True, rng.uniform(-2, 2), rng.uniform(0.01, 0.1), rng.choice([0.5, 0.7, 1.0, 1.5])
        for (name, column), none, own in zip(
            values.items(), (False, 0.0, 0.0, 1.0), sampled, strict=True
        ):
            values[name] = [*column, *[none] * len(new), *[own] * len(answer)]
    return Row(
        rollout_id=rollout_id,
        policy=policy,
        ids=ids,
        **dict[str, Any](values),
        logprobs=[0.0] * len(ids),
        versions=[0] * len(ids),
        responses=tuple(responses),
    )


def _shift_calls(row: Row, rng: random.Random, off_policy: float) -> Row:
    """Return the row with one random constant per call added to the call's log-probabilities."""
    logprobs = list(row.logprobs)
    for start, length in row.responses:
        shift = rng.uniform(-off_policy, off_policy) / 2
        for place in range(start, start + length):
            logprobs[place] += shift
    return replace(row, logprobs=logprobs)


def split_rows(rows: Sequence[Row]) -> list[Row]:
    """Split rows into rows with one call each; leave out rows without trained tokens."""
    return [
        _single_call(row, number)
        for row in rows
        for number in range(len(row.responses))
        if any(row.mask)
    ]


def _single_call(row: Row, number: int) -> Row:
    start, length = row.responses[number]
    end = start + length
    mask = [place >= start for place in range(end)]
    return replace(
        row,
        ids=row.ids[:end],
        mask=mask,
        advantages=[a if m else 0.0 for a, m in zip(row.advantages, mask, strict=False)],
        weights=[w if m else 0.0 for w, m in zip(row.weights, mask, strict=False)],
        logprobs=[x if m else 0.0 for x, m in zip(row.logprobs, mask, strict=False)],
        versions=row.versions[:end],
        temperatures=[t if m else 1.0 for t, m in zip(row.temperatures, mask, strict=False)],
        responses=(Response(start, length),),
    )


def random_row(ids: list[int], rng: random.Random, rollout_id: str, policy: str) -> Row:
    """Build a row with the tokens `ids`, about half of which are trained.

    It has no log-probabilities.
    """
    mask = [place > 0 and rng.random() < 0.5 for place in range(len(ids))]
    mask[-1] = True
    return Row(
        rollout_id=rollout_id,
        policy=policy,
        ids=ids,
        mask=mask,
        advantages=[rng.uniform(-2, 2) if m else 0.0 for m in mask],
        weights=[rng.uniform(0.01, 0.1) if m else 0.0 for m in mask],
        logprobs=[0.0] * len(ids),
        versions=[0] * len(ids),
        temperatures=[rng.choice([0.5, 0.7, 1.0, 1.5]) if m else 1.0 for m in mask],
    )


def _recorded(model: Any, row: Row, rng: random.Random, off_policy: float) -> Row:
    """Return the row with log-probabilities for its trained tokens.

    They differ from those of the model by up to `off_policy`.
    """
    with torch.no_grad():
        own = token_logprobs(model, row).tolist()
    return replace(
        row,
        logprobs=[
            min(value + rng.uniform(-off_policy, off_policy), -1e-3) if m else 0.0
            for value, m in zip(own, row.mask, strict=True)
        ],
    )


def token_logprobs(model: Any, row: Row) -> Tensor:
    """Return the log-probability of each token of a row, given the tokens before it.

    The first token has 0.
    """
    logits = row_logits(model, row)[:-1]
    scaled = logits / torch.tensor(row.temperatures)[1:, None]
    logprobs = scaled.log_softmax(-1).gather(1, torch.tensor(row.ids)[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logprobs])
