"""What every learner must do: subclass `LearnerSuite` and say how a learner is made.

    class TestMyLearner(LearnerSuite):
        def make_learner(self, models, **options):
            return MyLearner(models, **options)

Gradients are judged by what an update does: the suite compares the published weights with a plain
reference loop that takes the same step. Needs pytest, pytest-asyncio (`asyncio_mode = "auto"`),
torch and transformers. No test looks at a clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from lightspan.engines.protocol import (
    ChatTokenizer,
    EngineCapabilities,
    GenerationRequest,
    TokenChunk,
    TokenEngine,
)
from lightspan.engines.tokenizer import load_tokenizer
from lightspan.engines.weights import load_model
from lightspan.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NotFoundError,
    UnsupportedError,
)
from lightspan.learners.protocol import Learner, LoRA, Loss, Optimizer, PolicyLoss, SFTLoss
from lightspan.lightning.rows import Constraint, Response, Row
from lightspan.testing.tiny import tiny_model
from lightspan.testing.value_suite import ValueSuite

VOCABULARY = 405
SGD_LIKE = Optimizer(learning_rate=1e-3, max_grad_norm=None)

BOTH_CLIPS = PolicyLoss(clip_low=0.2, clip_high=0.28, dual_clip=1.4, importance_cap=None)
FORMS = [
    BOTH_CLIPS,
    PolicyLoss(form="gspo"),
    PolicyLoss(form="gspo", clip_low=0.1, clip_high=0.15),
    PolicyLoss(form="gspo", clip_low=0.9, clip_high=9.0, kl=0.3, entropy=0.05),
    PolicyLoss(form="cispo"),
    PolicyLoss(form="cispo", clip_low=0.2, clip_high=0.2),
    PolicyLoss(form="cispo", kl=0.3, entropy=0.05),
]
FORM_NAMES = ["clip", "gspo", "gspo wide", "gspo kl", "cispo", "cispo narrow", "cispo kl"]


def make_rows(
    model: Any, count: int = 12, *, seed: int = 0, policy: str = "writer", off_policy: float = 0.7
) -> list[Row]:
    """Random rows of several turns whose recorded log-probs give ratios of about 0.5 to 2."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        size = rng.randint(6, 40)
        first = rng.randint(1, size - 2)
        mask = [place >= first and rng.random() < 0.7 for place in range(size)]
        mask[-1] = True
        temperature = rng.choice([0.5, 0.7, 1.0, 1.5])
        rows.append(
            Row(
                rollout_id=f"ro-{number // 2}",
                policy=policy,
                ids=[rng.randrange(5, VOCABULARY) for _ in range(size)],
                mask=mask,
                advantages=[rng.uniform(-2, 2) if m else 0.0 for m in mask],
                weights=[rng.uniform(0.01, 0.1) if m else 0.0 for m in mask],
                logprobs=[0.0] * size,
                versions=[0] * size,
                temperatures=[temperature if m else 1.0 for m in mask],
            )
        )
    return [_recorded(model, row, rng, off_policy) for row in rows]


def make_branching_rows(
    model: Any, *, seed: int = 0, policy: str = "writer", off_policy: float = 0.7, long: int = 0
) -> list[Row]:
    """Random rows that begin alike, as those of a group do: answers to one prompt, histories that
    branch at several depths, a row inside another, and equal rows with other advantages. Trained
    tokens lie in the common parts too. Ratios and temperatures are those of `make_rows`.

    Args:
        long: tokens of a further history, which four rows leave at several depths; 0 for none.
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
    rows = [_random_row(ids, rng, f"ro-{number}", policy) for number, ids in enumerate(sequences)]
    return [_recorded(model, row, rng, off_policy) for row in rows]


def make_call_rows(
    model: Any, *, seed: int = 0, policy: str = "writer", off_policy: float = 0.7
) -> list[Row]:
    """Random rows of several calls each, as exact prefix merging makes them, some of which begin
    alike: an answer that two rows share, a call that follows another without a token between, a
    long one, equal rows with other advantages. Each call has its advantage, weight, temperature,
    and its own distance from the model, of which its tokens' stray by `off_policy`."""
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
    return [_apart(row, rng, off_policy) for row in recorded]


def _call_row(
    chain: Sequence[tuple[list[int], list[int]]], rng: random.Random, rollout_id: str, policy: str
) -> Row:
    """A row of calls, each (what is new in its prompt, its answer)."""
    ids: list[int] = []
    values: dict[str, list[Any]] = {
        name: [] for name in ("mask", "advantages", "weights", "temperatures")
    }
    responses = []
    for new, answer in chain:
        responses.append(Response(len(ids) + len(new), len(answer)))
        ids = [*ids, *new, *answer]
        sampled = True, rng.uniform(-2, 2), rng.uniform(0.01, 0.1), rng.choice([0.5, 0.7, 1.0, 1.5])
        for (name, found), none, own in zip(
            values.items(), (False, 0.0, 0.0, 1.0), sampled, strict=True
        ):
            values[name] = [*found, *[none] * len(new), *[own] * len(answer)]
    return Row(
        rollout_id=rollout_id,
        policy=policy,
        ids=ids,
        **dict[str, Any](values),
        logprobs=[0.0] * len(ids),
        versions=[0] * len(ids),
        responses=tuple(responses),
    )


def _apart(row: Row, rng: random.Random, off_policy: float) -> Row:
    """The row with each call's log-probs moved together."""
    logprobs = list(row.logprobs)
    for start, length in row.responses:
        by = rng.uniform(-off_policy, off_policy) / 2
        for place in range(start, start + length):
            logprobs[place] += by
    return replace(row, logprobs=logprobs)


def split_rows(rows: Sequence[Row]) -> list[Row]:
    """The same calls, a row for each."""
    return [
        _only(row, number) for row in rows for number in range(len(row.responses)) if any(row.mask)
    ]


def _only(row: Row, number: int) -> Row:
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


def _random_row(ids: list[int], rng: random.Random, rollout_id: str, policy: str) -> Row:
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
    """The row with log-probs of a behaviour policy at some distance from the model."""
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
    """[len(ids)] log-probability of each token given those before it; 0 for the first."""
    logits = model(torch.tensor([row.ids])).logits[0, :-1]
    scaled = logits / torch.tensor(row.temperatures)[1:, None]
    found = scaled.log_softmax(-1).gather(1, torch.tensor(row.ids)[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found])


def reference_loss(
    model: Any,
    rows: Sequence[Row],
    loss: Loss,
    *,
    base: Any = None,
    old: Sequence[Sequence[float]] | None = None,
) -> Tensor:
    """Σ weight · loss, token by token, as the formulas read (`lightspan.learners.losses`)."""
    total = torch.zeros(())
    for number, row in enumerate(rows):
        logits = model(torch.tensor([row.ids])).logits[0]
        others = base(torch.tensor([row.ids])).logits[0].detach() if base is not None else None
        distributions = {
            place: (logits[place - 1] / row.temperatures[place]).log_softmax(-1)
            for place, trained in enumerate(row.mask)
            if trained
        }
        logprobs = {place: found[row.ids[place]] for place, found in distributions.items()}
        before = row.logprobs if old is None else old[number]
        for place, distribution in distributions.items():
            logprob = logprobs[place]
            if isinstance(loss, SFTLoss):
                total = total - row.weights[place] * logprob
                continue
            value = _of_form(row, place, logprobs, before, loss)
            if old is not None and loss.importance_cap is not None:
                places = [place] if loss.importance_level == "token" else _call(row, place)
                weight = math.exp(sum(before[at] - row.logprobs[at] for at in places))
                value = value * min(weight, loss.importance_cap)
            if others is not None:
                temperature = row.temperatures[place]
                reference = (others[place - 1] / temperature).log_softmax(-1)[row.ids[place]]
                value = value + loss.kl * _kl(logprob - reference, loss.kl_estimator)
            entropy = -(distribution.exp() * distribution).sum()
            total = total + row.weights[place] * (value - loss.entropy * entropy)
    return total


def _call(row: Row, place: int) -> list[int]:
    """The places of the call that a token is of."""
    for start, length in row.responses:
        if start <= place < start + length:
            return list(range(start, start + length))
    raise AssertionError(place)


def _of_form(
    row: Row,
    place: int,
    logprobs: Mapping[int, Tensor],
    before: Sequence[float],
    loss: PolicyLoss,
) -> Tensor:
    advantage = row.advantages[place]
    if loss.form == "gspo":
        places = _call(row, place)
        mean = sum((logprobs[at] - before[at] for at in places), torch.zeros(())) / len(places)
        if loss.importance_cap is not None and loss.importance_level == "token":
            # tokens of a call weigh differently: the paper's GSPO-token is the definition
            mean = mean.detach() + logprobs[place] - logprobs[place].detach()
        return _clipped(mean.exp(), advantage, loss)
    ratio = (logprobs[place] - before[place]).exp()
    if loss.form == "cispo":
        weight = min(max(float(ratio.detach()), 1 - loss.clip_low), 1 + loss.clip_high)
        return -weight * advantage * logprobs[place]
    return _clipped(ratio, advantage, loss)


def _clipped(ratio: Tensor, advantage: float, loss: PolicyLoss) -> Tensor:
    value = -advantage * ratio
    if advantage > 0 and ratio > 1 + loss.clip_high:
        value = torch.tensor(-advantage * (1 + loss.clip_high))
    if advantage < 0 and ratio < 1 - loss.clip_low:
        value = torch.tensor(-advantage * (1 - loss.clip_low))
    if advantage < 0 and loss.dual_clip is not None:
        ceiling = torch.tensor(-loss.dual_clip * advantage)
        value = ceiling if value > ceiling else value
    return value


def _kl(x: Tensor, estimator: str) -> Tensor:
    return {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[estimator]


class WeightSink(TokenEngine):
    """Stands for an engine: keeps what is published."""

    def __init__(self) -> None:
        self.weights: dict[str, dict[str, Tensor]] = {}
        self.versions: dict[str, int] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(exact_tokens=True)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def policies(self) -> dict[str, int]:
        return self.versions

    def tokenizer(self, policy: str) -> ChatTokenizer:
        raise NotFoundError(policy)

    async def generate(
        self, request: GenerationRequest, *, stream: bool
    ) -> AsyncIterator[TokenChunk]:
        for _ in range(0):
            yield TokenChunk(ids=[], logprobs=[], version=0)
        raise NotFoundError(request.policy)

    async def update(self, policy: str, weights: Mapping[str, Any], version: int) -> None:
        self.weights[policy] = dict(weights)
        self.versions[policy] = version

    def usage(self) -> dict[str, float]:
        return {}


async def published(learner: Learner, policy: str = "writer") -> dict[str, Tensor]:
    """The policy's weights as an engine gets them."""
    sink = WeightSink()
    await learner.publish(sink, {policy: 1})
    return sink.weights[policy]


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Euclidean distance between two sets of weights."""
    assert set(first) == set(second)
    return math.sqrt(sum(float((first[n] - second[n]).square().sum()) for n in first))


class LearnerSuite(ValueSuite):
    """See the module's docstring."""

    def make_learner(self, models: Mapping[str, Any], **options: Any) -> Learner:
        """A learner of these folders.

        Args:
            options: any of `optimizer`, `lora`, `token_budget`, `seed`; `critic` where its
                capabilities say `values`.
        """
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        torch.set_num_threads(1)
        return tiny_model(
            tmp_path_factory.mktemp("learner") / "model", seed=3, hidden=32, context=128
        )

    @pytest.fixture
    def model(self, folder: Path) -> Any:
        return load_model(folder)

    def test_protocol(self, folder: Path) -> None:
        learner = self.make_learner({"writer": folder, "checker": folder})
        assert isinstance(learner, Learner)
        assert learner.policies() == ["writer", "checker"]
        assert learner.usage() == {"cpu_s": 0.0, "tokens": 0.0, "updates": 0.0}
        assert isinstance(learner.state(), dict)

    def test_score(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_rows(model)
        for which in ("policy", "base"):
            scores = learner.score(rows, which)
            for row, score in zip(rows, scores, strict=True):
                assert score[0] == 0.0
                with torch.no_grad():
                    assert score == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-5)

    def test_score_of_the_shortest_rows(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        one = replace(make_rows(model, 1)[0], ids=[7], mask=[False])
        one = replace(
            one, advantages=[0.0], weights=[0.0], logprobs=[0.0], versions=[0], temperatures=[1.0]
        )
        assert learner.score([one]) == [[0.0]]
        assert learner.score([]) == []

    def test_score_under_a_grammar(self, folder: Path, model: Any) -> None:
        """Over the tokens that may come alone: an a, and a digit."""
        learner = self.make_learner({"writer": folder})
        if not learner.capabilities.trainable_grammar:
            pytest.skip("this learner does not train calls under a grammar")
        encode = load_tokenizer(folder).encode
        ids = encode("Say:a7")
        row = _random_row(ids, random.Random(0), "ro-0", "writer")
        row = replace(row, constraints=(Constraint(len(ids) - 2, 2, 'start: "a" /[0-9]/'),))
        with torch.no_grad():
            scaled = model(torch.tensor([ids])).logits[0, -2] / row.temperatures[-1]
            expected = token_logprobs(model, row).tolist()[:-2]
        digits = scaled[[encode(digit)[0] for digit in "0123456789"]].log_softmax(-1)
        assert learner.score([row])[0] == pytest.approx(
            [*expected, 0.0, float(digits[7])], abs=1e-5
        )
        with pytest.raises(DataError, match="rollout ro-0"):
            learner.score([replace(row, ids=[*ids[:-1], ids[-2]])])

    @pytest.mark.parametrize(
        "loss",
        [
            SFTLoss(),
            BOTH_CLIPS,
            PolicyLoss(dual_clip=None),
            PolicyLoss(entropy=0.05),
            PolicyLoss(kl=0.3, kl_estimator="k1"),
            PolicyLoss(kl=0.3, kl_estimator="k2"),
            PolicyLoss(kl=0.3, kl_estimator="k3"),
        ],
    )
    async def test_a_step_is_the_reference_s(self, folder: Path, model: Any, loss: Loss) -> None:
        """Two steps, so that the weights differ from the starting ones that the KL refers to."""
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
        base, start = load_model(folder), await published(learner)
        optimizer = _reference_optimizer(model, SGD_LIKE)
        for seed in (0, 1):
            rows = make_rows(model, seed=seed)
            uses_base = isinstance(loss, PolicyLoss) and loss.kl
            total = reference_loss(model, rows, loss, base=base if uses_base else None)
            norm = _step(optimizer, model, total)
            metrics = learner.update(rows, loss)
            assert norm > 0
            assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-5)
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert metrics["skipped"] == 0
        expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        moved = distance(expected, start)
        assert distance(await published(learner), expected) < 1e-3 * moved

    @pytest.mark.parametrize(
        "loss",
        [SFTLoss(), BOTH_CLIPS, PolicyLoss(kl=0.3, entropy=0.05)],
        ids=["sft", "clips", "kl"],
    )
    @pytest.mark.parametrize("budget", [100_000, 64])
    async def test_rows_that_begin_alike_stay_exact(
        self, folder: Path, model: Any, loss: Loss, budget: int
    ) -> None:
        """Each with its own advantages, ratios and temperatures, however they are computed."""
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE, token_budget=budget)
        rows = make_branching_rows(model)
        for row, score in zip(rows, learner.score(rows), strict=True):
            with torch.no_grad():
                assert score == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-5)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        total = reference_loss(model, rows, loss, base=load_model(folder))
        norm = _step(_reference_optimizer(model, SGD_LIKE), model, total)
        metrics = learner.update(rows, loss)
        assert norm > 0
        assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["tokens"] == sum(sum(row.mask) for row in rows)
        assert metrics["rows"] == len(rows)
        expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        assert distance(await published(learner), expected) < 1e-3 * distance(expected, start)

    def refuses(self, learner: Learner, rows: Sequence[Row], loss: PolicyLoss) -> bool:
        """Whether the learner does not declare the loss; then it has to refuse it by name."""
        if not learner.capabilities.refusals(loss):
            return False
        match = "importance" if loss.form in learner.capabilities.loss_forms else loss.form
        old = learner.score(rows)
        with pytest.raises(UnsupportedError, match=match):
            learner.update(rows, loss, old_logprobs=old if loss.importance_cap else None)
        return True

    @pytest.mark.parametrize("loss", FORMS, ids=FORM_NAMES)
    @pytest.mark.parametrize("budget", [100_000, 16])
    async def test_every_form_is_the_reference_s(
        self, folder: Path, model: Any, loss: PolicyLoss, budget: int
    ) -> None:
        """Off-policy, of rows that hold several calls and begin alike, however they are computed.
        The second step is from weights that are not the starting ones."""
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE, token_budget=budget)
        if self.refuses(learner, make_call_rows(model), loss):
            return
        base, start = load_model(folder), await published(learner)
        optimizer = _reference_optimizer(model, SGD_LIKE)
        for seed in (0, 1):
            rows = make_call_rows(model, seed=seed)
            total = reference_loss(model, rows, loss, base=base if loss.kl else None)
            norm = _step(optimizer, model, total)
            metrics = learner.update(rows, loss)
            assert norm > 0
            assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-5)
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert 0 < metrics["clip_fraction"] < 1 or max(loss.clip_low, loss.clip_high) > 0.9
        expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        assert distance(await published(learner), expected) < 1e-3 * distance(expected, start)

    async def test_on_policy_every_form_has_the_gradient_of_clipping(
        self, folder: Path, model: Any
    ) -> None:
        rows = make_call_rows(model, off_policy=0.0)
        start = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        results = []
        for form in ("clip", "gspo", "cispo"):
            learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
            if form in learner.capabilities.loss_forms:
                metrics = learner.update(rows, PolicyLoss(form=form))
                results.append((metrics["grad_norm"], await published(learner)))
        first_norm, first = results[0]
        for norm, weights in results:
            assert norm == pytest.approx(first_norm, rel=1e-4)
            assert distance(weights, first) < 1e-3 * distance(first, start)

    @pytest.mark.parametrize("loss", FORMS[:5], ids=FORM_NAMES[:5])
    async def test_a_call_is_a_sequence_whatever_else_is_in_its_row(
        self, folder: Path, model: Any, loss: PolicyLoss
    ) -> None:
        """A row for each call, in place of merged rows, changes nothing."""
        merged = make_call_rows(model)
        split = split_rows(merged)
        assert len(split) > 2 * len(merged)
        loss = msgspec.structs.replace(loss, importance_cap=1.5, importance_level="sequence")
        results = []
        for rows in (merged, split):
            learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
            if self.refuses(learner, rows, loss):
                return
            old = _moved(learner.score(rows), rows, rng=random.Random(5))
            metrics = learner.update(rows, loss, old_logprobs=old)
            results.append((metrics, await published(learner)))
        (first, first_weights), (second, second_weights) = results
        for name in ("loss", "grad_norm", "clip_fraction", "ratio_mean", "ratio_max", "tokens"):
            assert second[name] == pytest.approx(first[name], rel=1e-5, abs=1e-6), name
        start = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        moved = distance(first_weights, start)
        assert distance(first_weights, second_weights) < 1e-3 * moved

    @pytest.mark.parametrize("level", ["token", "sequence"])
    @pytest.mark.parametrize("form", ["clip", "gspo", "cispo"])
    @pytest.mark.parametrize("budget", [100_000, 16])
    def test_importance_weights_of_tokens_and_of_calls(
        self, folder: Path, model: Any, level: Any, form: Any, budget: int
    ) -> None:
        learner = self.make_learner({"writer": folder}, token_budget=budget)
        rows = make_call_rows(model)
        loss = PolicyLoss(form=form, clip_low=0.3, importance_cap=1.3, importance_level=level)
        if self.refuses(learner, rows, loss):
            return
        old = _moved(learner.score(rows), rows, rng=random.Random(5))
        total = reference_loss(model, rows, loss, old=old)
        norm = _step(_reference_optimizer(model, SGD_LIKE), model, total)
        metrics = learner.update(rows, loss, old_logprobs=old)
        assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)

    @pytest.mark.parametrize(
        "loss",
        [
            PolicyLoss(form="gspo"),
            PolicyLoss(importance_cap=2.0, importance_level="sequence"),
        ],
        ids=["gspo", "sequence"],
    )
    def test_rows_that_do_not_say_where_their_calls_are_are_refused(
        self, folder: Path, model: Any, loss: PolicyLoss
    ) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_call_rows(model)
        if self.refuses(learner, rows, loss):
            return
        before = learner.weight_hash("writer")
        first = rows[0].responses[0]
        for wrong in ((), (first,), (first, first), (Response(len(rows[0].ids) - 1, 2),)):
            bad = [replace(rows[0], responses=wrong), *rows[1:]]
            old = learner.score(bad) if loss.importance_cap else None
            with pytest.raises(DataError, match=r"rollout ro-0.*Row\.responses"):
                learner.update(bad, loss, old_logprobs=old)
        assert learner.weight_hash("writer") == before

    async def test_the_gradient_s_norm_is_bounded(self, folder: Path, model: Any) -> None:
        """The first gradient is much larger than the second: unbounded, it would outweigh it."""
        bounded = msgspec.structs.replace(SGD_LIKE, max_grad_norm=0.01)
        learner = self.make_learner({"writer": folder}, optimizer=bounded)
        other, start = load_model(folder), await published(learner)
        kinds = [(model, bounded), (other, SGD_LIKE)]
        optimizers = [_reference_optimizer(weights, settings) for weights, settings in kinds]
        for seed, factor in ((0, 100.0), (1, 1.0)):
            rows = [
                replace(row, weights=[factor * weight for weight in row.weights])
                for row in make_rows(model, seed=seed)
            ]
            for (weights, settings), optimizer in zip(kinds, optimizers, strict=True):
                limit = settings.max_grad_norm
                norm = _step(optimizer, weights, reference_loss(weights, rows, SFTLoss()), limit)
                if limit is not None:
                    assert norm > 2 * limit
                    metrics = learner.update(rows, SFTLoss())
                    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
        expected, unbounded = (dict(weights.state_dict()) for weights, _ in kinds)
        moved = distance(expected, start)
        assert distance(await published(learner), expected) < 1e-2 * moved
        assert distance(unbounded, expected) > 0.1 * moved

    def test_both_clips_are_active_in_the_reference_rows(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_rows(model)
        with torch.no_grad():
            logratios = [
                (float(value) - row.logprobs[place], row.advantages[place])
                for row in rows
                for place, value in enumerate(token_logprobs(model, row))
                if row.mask[place]
            ]
        high = [1 for x, a in logratios if a > 0 and math.exp(x) > 1.28]
        low = [1 for x, a in logratios if a < 0 and math.exp(x) < 0.8]
        dual = [1 for x, a in logratios if a < 0 and math.exp(x) > 1.4]
        assert min(len(high), len(low), len(dual)) > 2
        metrics = learner.update(rows, BOTH_CLIPS)
        clipped = len(high) + len(low) + len(dual)
        assert metrics["clip_fraction"] == pytest.approx(clipped / len(logratios))
        ratios = [math.exp(x) for x, _ in logratios]
        assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
        assert metrics["ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
        assert metrics["tokens"] == len(logratios)
        assert metrics["rows"] == len(rows)

    @pytest.mark.parametrize("cap", [None, 1.3])
    def test_decoupled_importance_weights(
        self, folder: Path, model: Any, cap: float | None
    ) -> None:
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
        rows = make_rows(model)
        loss = PolicyLoss(importance_cap=cap)
        rng = random.Random(5)
        old = [[value + rng.uniform(-0.5, 0.5) for value in row] for row in learner.score(rows)]
        total = reference_loss(model, rows, loss, old=old)
        norm = _step(_reference_optimizer(model, SGD_LIKE), model, total)
        metrics = learner.update(rows, loss, old_logprobs=old)
        assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)

    def test_an_importance_cap_without_old_logprobs_is_refused(
        self, folder: Path, model: Any
    ) -> None:
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
        with pytest.raises(ConfigError, match=r"importance_cap=2.*give old_logprobs"):
            learner.update(make_rows(model), PolicyLoss(importance_cap=2.0))

    async def test_the_result_does_not_depend_on_order_or_microbatches(
        self, folder: Path, model: Any
    ) -> None:
        rows = make_rows(model, 20)
        start = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        results = []
        for budget, order in ((100_000, 1), (64, 1), (200, -1), (1, -1)):
            learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE, token_budget=budget)
            metrics = learner.update(rows[::order], BOTH_CLIPS)
            results.append((metrics, await published(learner)))
        first_metrics, first_weights = results[0]
        moved = distance(first_weights, start)
        for metrics, weights in results[1:]:
            assert metrics == pytest.approx(first_metrics, rel=1e-4, abs=1e-6)
            assert distance(weights, first_weights) < 1e-3 * moved

    def test_weights_scale_the_gradient(self, folder: Path, model: Any) -> None:
        rows = make_rows(model)
        doubled = [replace(row, weights=[2 * weight for weight in row.weights]) for row in rows]
        once = self.make_learner({"writer": folder}).update(rows, BOTH_CLIPS)
        twice = self.make_learner({"writer": folder}).update(doubled, BOTH_CLIPS)
        assert twice["loss"] == pytest.approx(2 * once["loss"], rel=1e-5)
        assert twice["grad_norm"] == pytest.approx(2 * once["grad_norm"], rel=1e-5)

    def test_untrained_tokens_do_not_matter(self, folder: Path, model: Any) -> None:
        """Their advantages, weights and log-probs are not read."""
        rows = make_rows(model)
        noisy = [
            replace(
                row,
                advantages=[a if m else 9.0 for a, m in zip(row.advantages, row.mask, strict=True)],
                weights=[w if m else 9.0 for w, m in zip(row.weights, row.mask, strict=True)],
                logprobs=[x if m else -9.0 for x, m in zip(row.logprobs, row.mask, strict=True)],
            )
            for row in rows
        ]
        clean = self.make_learner({"writer": folder}).update(rows, BOTH_CLIPS)
        assert self.make_learner({"writer": folder}).update(noisy, BOTH_CLIPS) == clean

    def test_a_bad_gradient_changes_nothing(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_rows(model)
        before = learner.weight_hash("writer")
        for value in (math.nan, math.inf):
            bad = replace(rows[0], advantages=[value] * len(rows[0].ids))
            metrics = learner.update([bad, *rows[1:]], BOTH_CLIPS)
            assert metrics["skipped"] == 1
            assert learner.weight_hash("writer") == before
        assert learner.usage()["updates"] == 0
        assert learner.update(rows, BOTH_CLIPS)["skipped"] == 0
        assert learner.weight_hash("writer") != before

    @pytest.mark.parametrize("which", ["no rows", "nothing trained"])
    def test_nothing_to_train_is_no_step(self, folder: Path, model: Any, which: str) -> None:
        learner = self.make_learner({"writer": folder})
        rows = [replace(row, mask=[False] * len(row.ids)) for row in make_rows(model, 3)]
        before = learner.weight_hash("writer")
        metrics = learner.update(rows if which == "nothing trained" else [], BOTH_CLIPS)
        assert metrics["skipped"] == 1
        assert learner.weight_hash("writer") == before

    def test_the_gap_to_the_engine_is_measured_before_the_step(
        self, folder: Path, model: Any
    ) -> None:
        learner = self.make_learner({"writer": folder})
        exact = make_rows(model, off_policy=0.0)
        metrics = learner.update(exact, PolicyLoss())
        assert metrics["logprob_gap_max"] < 1e-5
        learner = self.make_learner({"writer": folder})
        shifted = [
            replace(row, logprobs=[x - 0.25 if m else 0.0 for x, m in _pairs(row)]) for row in exact
        ]
        metrics = learner.update(shifted, PolicyLoss())
        assert metrics["logprob_gap_mean"] == pytest.approx(0.25, abs=1e-4)
        assert metrics["logprob_gap_max"] == pytest.approx(0.25, abs=1e-4)

    def test_policies_are_updated_apart(self, folder: Path, model: Any) -> None:
        both = self.make_learner({"writer": folder, "checker": folder})
        alone = self.make_learner({"writer": folder})
        frozen = both.weight_hash("checker")
        rows = make_rows(model)
        both.update(rows, BOTH_CLIPS)
        alone.update(rows, BOTH_CLIPS)
        assert both.weight_hash("writer") == alone.weight_hash("writer")
        assert both.weight_hash("checker") == frozen
        mixed = [*rows, *(replace(row, policy="checker") for row in rows)]
        both.update(mixed, BOTH_CLIPS)
        assert both.weight_hash("checker") == self._after(folder, rows)

    def _after(self, folder: Path, rows: Sequence[Row]) -> str:
        learner = self.make_learner({"writer": folder})
        learner.update(rows, BOTH_CLIPS)
        return learner.weight_hash("writer")

    def test_an_unknown_policy_is_named(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_rows(model, 2, policy="critic")
        with pytest.raises(NotFoundError, match="critic"):
            learner.update(rows, BOTH_CLIPS)
        with pytest.raises(NotFoundError, match="critic"):
            learner.score(rows)
        with pytest.raises(NotFoundError, match="critic"):
            learner.weight_hash("critic")

    @pytest.mark.parametrize("field", ["weights", "temperatures", "mask"])
    def test_a_malformed_row_is_named(self, folder: Path, model: Any, field: str) -> None:
        learner = self.make_learner({"writer": folder})
        row = make_rows(model, 1)[0]
        wrong: Any = [0.0] * len(row.ids) if field == "temperatures" else getattr(row, field)[:-1]
        with pytest.raises(DataError, match=row.rollout_id):
            learner.update([replace(row, **dict[str, Any]({field: wrong}))], BOTH_CLIPS)

    @pytest.mark.parametrize("name", ["adamw", "muon"])
    @pytest.mark.parametrize("lora", [None, LoRA(rank=4, dropout=0.2)], ids=["full", "lora"])
    def test_resume_is_exact(
        self, folder: Path, model: Any, tmp_path: Path, name: Any, lora: LoRA | None
    ) -> None:
        """Three updates equal two, save, load, and one; dropout included."""
        options = {
            "optimizer": Optimizer(name=name, learning_rate=1e-3, warmup_steps=4),
            "lora": lora,
        }
        batches = [make_rows(model, seed=seed) for seed in range(3)]
        whole = self.make_learner({"writer": folder}, **options)
        for batch in batches:
            expected = whole.update(batch, BOTH_CLIPS)
        first = self.make_learner({"writer": folder}, **options)
        for batch in batches[:2]:
            first.update(batch, BOTH_CLIPS)
        first.save(tmp_path / "checkpoint")
        torch.rand(7)  # the global generator is nobody's
        second = self.make_learner({"writer": folder}, **{**options, "seed": 99 if not lora else 0})
        second.load(tmp_path / "checkpoint")
        assert second.weight_hash("writer") == first.weight_hash("writer")
        assert second.update(batches[2], BOTH_CLIPS) == expected
        assert second.weight_hash("writer") == whole.weight_hash("writer")

    def test_a_checkpoint_holds_no_pickle(self, folder: Path, model: Any, tmp_path: Path) -> None:
        learner = self.make_learner({"writer": folder})
        learner.update(make_rows(model), BOTH_CLIPS)
        learner.save(tmp_path)
        suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
        assert suffixes <= {".safetensors", ".json"}

    def test_a_foreign_checkpoint_is_refused(self, folder: Path, tmp_path: Path) -> None:
        learner = self.make_learner({"writer": folder})
        with pytest.raises(CheckpointError, match="nowhere"):
            learner.load(tmp_path / "nowhere")
        other = self.make_learner({"critic": folder})
        other.save(tmp_path / "other")
        with pytest.raises(CheckpointError, match="critic"):
            learner.load(tmp_path / "other")
        adapters = self.make_learner({"writer": folder}, lora=LoRA(rank=2))
        adapters.save(tmp_path / "lora")
        with pytest.raises(CheckpointError, match="lora"):
            learner.load(tmp_path / "lora")

    async def test_lora_equals_its_merged_weights(
        self, folder: Path, model: Any, tmp_path: Path
    ) -> None:
        learner = self.make_learner(
            {"writer": folder},
            lora=LoRA(rank=4),
            optimizer=Optimizer(learning_rate=1e-2, max_grad_norm=None),
        )
        rows = make_rows(model)
        base = learner.score(rows, "base")
        assert learner.score(rows) == [pytest.approx(row, abs=1e-6) for row in base]
        for _ in range(3):
            learner.update(rows, BOTH_CLIPS)
        scores = learner.score(rows)
        assert scores != [pytest.approx(row, abs=1e-2) for row in base]
        assert learner.score(rows, "base") == [pytest.approx(row, abs=1e-6) for row in base]
        model.load_state_dict(await published(learner))
        learner.export("writer", tmp_path / "exported", merge=True)
        for merged in (model, load_model(tmp_path / "exported")):
            for row, score in zip(rows, scores, strict=True):
                with torch.no_grad():
                    assert score == pytest.approx(token_logprobs(merged, row).tolist(), abs=1e-4)

    async def test_publish_hands_over_copies(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_rows(model)
        weights = await published(learner)
        kept = {name: tensor.clone() for name, tensor in weights.items()}
        assert set(weights) == set(model.state_dict())
        learner.update(rows, BOTH_CLIPS)
        assert distance(weights, kept) == 0
        assert distance(await published(learner), kept) > 0
        with pytest.raises(NotFoundError, match="critic"):
            await learner.publish(WeightSink(), {"critic": 1})

    def test_an_exported_model_loads(self, folder: Path, model: Any, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        learner = self.make_learner({"writer": folder})
        rows = make_rows(model)
        learner.update(rows, BOTH_CLIPS)
        learner.export("writer", tmp_path / "exported")
        again = self.make_learner({"writer": tmp_path / "exported"})
        assert again.weight_hash("writer") == learner.weight_hash("writer")
        assert again.score(rows) == [pytest.approx(row, abs=1e-6) for row in learner.score(rows)]
        assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template

    def test_warm_up_and_counters(self, folder: Path, model: Any) -> None:
        learner = self.make_learner(
            {"writer": folder}, optimizer=Optimizer(learning_rate=1.0e-3, warmup_steps=4)
        )
        rows = make_rows(model)
        rates = [learner.update(rows, SFTLoss())["learning_rate"] for _ in range(6)]
        assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
        usage = learner.usage()
        assert usage["updates"] == 6
        assert usage["tokens"] == 6 * sum(sum(row.mask) for row in rows)
        assert usage["cpu_s"] > 0

    @pytest.mark.parametrize("name", ["adamw", "muon"])
    def test_supervised_updates_lower_the_loss(self, folder: Path, model: Any, name: Any) -> None:
        learner = self.make_learner(
            {"writer": folder}, optimizer=Optimizer(name=name, learning_rate=1e-3)
        )
        rows = make_rows(model)
        losses = [learner.update(rows, SFTLoss())["loss"] for _ in range(8)]
        assert losses[-1] < 0.9 * losses[0]


def _moved(
    scores: Sequence[Sequence[float]], rows: Sequence[Row], rng: random.Random
) -> list[list[float]]:
    """Earlier scores than these: each call's tokens moved, by as much wherever the call is."""
    by: dict[tuple[int, ...], list[float]] = {}
    moved = [list(row) for row in scores]
    for row, values in zip(rows, moved, strict=True):
        for start, length in row.responses:
            key = *row.ids[: start + length], round(1e9 * row.advantages[start])
            if key not in by:
                together = rng.uniform(-0.2, 0.2)
                by[key] = [together + rng.uniform(-0.2, 0.2) for _ in range(length)]
            for place, change in enumerate(by[key], start):
                values[place] += change
    return moved


def _pairs(row: Row) -> Any:
    return zip(row.logprobs, row.mask, strict=True)


def _reference_optimizer(model: Any, settings: Optimizer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0
    )


def _step(
    optimizer: torch.optim.Optimizer, model: Any, total: Tensor, limit: float | None = None
) -> float:
    """Take the step, with a gradient of norm `limit` at most; what the norm was."""
    optimizer.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    if limit is not None and norm > limit:
        for parameter in model.parameters():
            parameter.grad.mul_(limit / norm)
    optimizer.step()
    return norm


__all__ = [
    "LearnerSuite",
    "WeightSink",
    "distance",
    "make_branching_rows",
    "make_call_rows",
    "make_rows",
    "published",
    "reference_loss",
    "split_rows",
    "token_logprobs",
]
