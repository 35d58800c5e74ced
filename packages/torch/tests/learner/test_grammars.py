"""Training on tokens that were sampled under a grammar uses the masked distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from lightspan.errors import ConfigError, DataError
from lightspan.lightning.rows import Constraint, Row, build_rows
from lightspan.lightning.transitions import Transition
from lightspan.protocols.learner import LoRA, Loss, PolicyLoss, SFTLoss
from lightspan.schema.token_records import Sampling, TokenRecord, pack_ids
from lightspan_testing.learner_suite import reference_loss, token_logprobs
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.grammars import LIBRARY, Grammars, allowed
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner import losses
from lightspan_torch.learner.masks import Replays
from lightspan_torch.learner.token_losses import FrozenStates
from lightspan_torch.learner.torch import TorchLearner
from packages.torch.tests.learner.gradients import assert_close, gradients, gradients_of

NUMBER = 'start: "a" /[0-9]{1,3}/'
WORD = "start: /[a-z0-9]{1,4}/"
YES = 'start: "yes" | "no"'
FORCED = 'start: "a12"'
LOSSES = {
    "sft": SFTLoss(),
    "clipped": PolicyLoss(clip_low=0.2, clip_high=0.28, dual_clip=1.4),
    "kl": PolicyLoss(kl=0.3, entropy=0.05),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("grammars") / "model", seed=4, hidden=32)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TransformersTokenizer:
    return load_tokenizer(folder)


@pytest.fixture
def model(folder: Path) -> Any:
    return load_model(folder)


class Calls:
    """Makes transitions from texts; each response ends with the end-of-turn token."""

    def __init__(self, tokenizer: TransformersTokenizer) -> None:
        self.tokenizer = tokenizer
        [self.eos] = tokenizer.eos_ids
        self.count = 0

    def prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def call(
        self,
        prompt: Sequence[int],
        text: str,
        grammar: str,
        *,
        temperature: float = 0.7,
        **more: Any,
    ) -> Transition:
        self.count += 1
        response = [*self.tokenizer.encode(text), self.eos]
        fields = {
            "attempt_id": "at-1",
            "call_id": f"call-{self.count}",
            "choice": 0,
            "policy": "writer",
            "prompt_ids": prompt,
            "response_ids": response,
            "logprobs": [-0.3 * (place % 3 + 1) for place in range(len(response))],
            "versions": [(0, len(response))],
            "sampling": Sampling(temperature=temperature),
            "grammar": grammar,
            "grammar_library": LIBRARY if grammar else "",
            **more,
        }
        record = TokenRecord.create(**fields)
        return Transition("ro-1", "at-1", "t", "g", "writer", "writer", record, 0)


@pytest.fixture
def calls(tokenizer: TransformersTokenizer) -> Calls:
    return Calls(tokenizer)


def rows_of(transitions: Sequence[Transition]) -> list[Row]:
    """Build rows with advantages of both signs and different weights."""
    signs = [1.3 if number % 2 else -0.8 for number in range(len(transitions))]
    weights = [0.05 + 0.02 * number for number in range(len(transitions))]
    return build_rows(transitions, advantages=signs, token_weights=weights).rows


def several_rows(calls: Calls) -> list[Row]:
    """Return rows with one prompt that differ in their grammars.

    Four rows have equal ids, under two grammars and none and at two temperatures. One row has two
    calls with a grammar each; one has no grammar.
    """
    prompt = calls.prompt("How many singers are there?")
    first = calls.call(prompt, "a1", NUMBER)
    history = first.record.prompt_ids + first.record.response_ids + calls.prompt(" Sure? ")
    rows = rows_of(
        [
            calls.call(prompt, "a12", NUMBER),
            calls.call(prompt, "a12", WORD),
            calls.call(prompt, "a12", ""),
            calls.call(prompt, "a12", NUMBER, temperature=1.0),
            calls.call(prompt, "a777", NUMBER),
            first,
            calls.call(history, "yes", YES, temperature=1.3),
            calls.call(prompt, "no idea", ""),
        ]
    )
    assert [len(row.constraints) for row in rows] == [1, 1, 0, 1, 1, 2, 0]
    assert rows[0].ids == rows[1].ids == rows[2].ids == rows[3].ids
    return rows


class Masked:
    """A model whose logits are -inf for the tokens that a row's grammars forbid."""

    def __init__(self, model: Any, row: Row, grammars: Grammars) -> None:
        self.model = model
        self.bias = torch.zeros(len(row.ids), grammars.vocabulary)
        for start, count, grammar in row.constraints:
            packed = grammars.masks(grammar, row.ids[start : start + count])
            keep = torch.from_numpy(allowed(packed, grammars.vocabulary).copy())
            # finite, so that the reference's own 0 · log 0 is 0
            self.bias[start - 1 : start + count - 1].masked_fill_(~keep, -1e9)

    def __call__(self, ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.model(ids).logits + self.bias)


@pytest.fixture
def grammars(tokenizer: TransformersTokenizer) -> Grammars:
    return Grammars(tokenizer.tokenizer, vocabulary=405, eos_ids=tokenizer.eos_ids)


def loss_of(
    model: Any, rows: Sequence[Row], grammars: Grammars, loss: Loss, base: Any = None, old: Any = ()
) -> Tensor:
    """Return the reference loss of the conformance suite, computed row by row on masked models."""
    total = torch.zeros(())
    for number, row in enumerate(rows):
        total = total + reference_loss(
            Masked(model, row, grammars),
            [row],
            loss,
            base=None if base is None else Masked(base, row, grammars),
            old=[old[number]] if old else None,
        )
    return total


def test_a_teacher_has_the_same_grammars(
    folder: Path, model: Any, calls: Calls, grammars: Grammars, tmp_path: Path
) -> None:
    """The divergence is that of two masked distributions at the temperature of each token."""
    rows = several_rows(calls)
    other = tiny_model(tmp_path / "other", seed=5, hidden=32)
    learner, frozen = TorchLearner({"writer": folder}), TorchLearner({"writer": other})
    states = FrozenStates(frozen.score_trained(rows).states, frozen.logits_of("writer"))
    with learner.taught(states):
        metrics = learner.update(rows, PolicyLoss())
    expected = []
    for row in rows:
        trained = torch.tensor(row.mask[1:])
        ids, temperatures = torch.tensor([row.ids]), torch.tensor(row.temperatures[1:])[:, None]
        p, q = (
            (Masked(each, row, grammars)(ids).logits[0, :-1] / temperatures).log_softmax(-1)
            for each in (model, load_model(other))
        )
        expected += (p.exp() * (p - q)).sum(-1)[trained].tolist()
    assert min(expected) == pytest.approx(0.0, abs=1e-6)  # some tokens are forced
    assert metrics["reverse_kl"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)


# --- log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("which", ["policy", "base"])
def test_scores_in_trees_and_row_by_row(
    folder: Path, model: Any, calls: Calls, grammars: Grammars, shared: bool, which: Any
) -> None:
    learner = TorchLearner({"writer": folder}, share_prefixes=shared)
    rows = several_rows(calls)
    scores = learner.score(rows, which)
    for row, score in zip(rows, scores, strict=True):
        with torch.no_grad():
            expected = token_logprobs(Masked(model, row, grammars), row).tolist()
        assert score == pytest.approx(expected, abs=1e-5)
    number, word, free = (score[len(rows[0].ids) - 3] for score in scores[:3])
    assert free < word - 0.1 < number - 0.2


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_loss_and_gradients_are_the_reference_s(
    folder: Path, model: Any, calls: Calls, grammars: Grammars, loss: Loss, shared: bool
) -> None:
    learner = TorchLearner({"writer": folder}, token_budget=60, share_prefixes=shared)
    rows = several_rows(calls)
    metrics, caught = gradients(learner, rows, loss)
    base = load_model(folder) if getattr(loss, "kl", 0) else None
    total = loss_of(model, rows, grammars, loss, base)
    total.backward()  # type: ignore[no-untyped-call]
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert_close(caught, gradients_of(model))


def test_ratios_of_masked_scores(
    folder: Path, model: Any, calls: Calls, grammars: Grammars
) -> None:
    """In the decoupled form, `old_logprobs` are the learner's masked scores."""
    learner = TorchLearner({"writer": folder})
    rows, loss = several_rows(calls), PolicyLoss(importance_cap=2.0)
    old = learner.score(rows)
    metrics, caught = gradients(learner, rows, loss, old_logprobs=old)
    loss_of(model, rows, grammars, loss, old=old).backward()  # type: ignore[no-untyped-call]
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert_close(caught, gradients_of(model))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_forced_tokens_teach_nothing(folder: Path, calls: Calls, loss: Loss) -> None:
    learner = TorchLearner({"writer": folder})
    rows = rows_of([calls.call(calls.prompt("Say it:"), "a12", FORCED)])
    assert learner.score(rows)[0][-4:] == [0.0, 0.0, 0.0, 0.0]
    metrics, caught = gradients(learner, rows, loss)
    assert metrics["entropy"] == 0.0
    assert metrics["tokens"] == 4
    assert all(not gradient.any() for gradient in caught.values())


def test_forced_tokens_are_not_in_the_mean_of_gspo(
    folder: Path, calls: Calls, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare GSPO's ratio of each call with the mean over its free tokens, computed by hand.

    The gradient of a call of T tokens with n free ones is scaled by T/n.
    """
    scales: list[float] = []
    original = losses.gspo_loss

    def spy(*args: Any, **options: Any) -> Any:
        scales.extend(options["scales"].tolist())
        return original(*args, **options)

    monkeypatch.setattr(losses, "gspo_loss", spy)
    learner = TorchLearner({"writer": folder})
    prompt = calls.prompt("Say it:")
    rows = rows_of(
        [
            calls.call(prompt, "a12", NUMBER),
            calls.call(prompt, "yes", YES),
            calls.call(prompt, "a12", FORCED),
            calls.call(prompt, "a12", ""),
        ]
    )
    sums, kinds, expected = 0.0, set(), list[float]()
    for row, scores in zip(rows, learner.score(rows), strict=True):
        [(start, length)] = row.responses
        places = list(range(start, start + length))
        if row.constraints:
            masks = grammars.masks(row.constraints[0].grammar, row.ids[start:])
            counts = allowed(masks, 405).sum(-1).tolist()
            free = [place for place, count in zip(places, counts, strict=True) if count > 1]
        else:
            free = places
        kinds.add((len(free) > 0, len(free) < length))
        expected += [length / max(1, len(free))] * length
        logs = [scores[place] - row.logprobs[place] for place in free]
        sums += length * math.exp(sum(logs) / max(1, len(logs)))
    assert kinds == {(True, True), (False, True), (True, False)}
    metrics = learner.update(rows, PolicyLoss(form="gspo", clip_low=1.0, clip_high=1e6))
    assert metrics["ratio_mean"] == pytest.approx(sums / metrics["tokens"], rel=1e-5)
    assert sorted(scales) == pytest.approx(sorted(expected))


def test_rows_that_differ_in_their_grammar_alone_have_one_order(folder: Path, calls: Calls) -> None:
    rows = [replace(row, call_ids=()) for row in several_rows(calls)[:3]]
    for name in ("advantages", "weights"):
        rows = [replace(row, **{name: getattr(rows[0], name)}) for row in rows]
    learner = TorchLearner({"writer": folder})
    one, two = gradients(learner, rows, SFTLoss()), gradients(learner, rows[::-1], SFTLoss())
    assert one[0]["loss"] == two[0]["loss"]
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])


# --- what does not follow its grammar -----------------------------------------------------------


def test_records_that_do_not_follow_their_grammar_are_named(folder: Path, calls: Calls) -> None:
    learner = TorchLearner({"writer": folder})
    prompt = calls.prompt("How many?")
    good = calls.call(prompt, "a12", NUMBER).record
    free = calls.call(prompt, "a12", "", grammar_library="unheard of").record
    wrong = calls.call(prompt, "b12", NUMBER).record
    on = calls.call(prompt, "no!", YES, choice=3).record
    older = calls.call(prompt, "a12", NUMBER, grammar_library="llguidance 1.8.0").record
    unsaid = calls.call(prompt, "a12", NUMBER, grammar_library="").record
    broken = calls.call(prompt, "a12", "start: (").record
    damaged = msgspec.structs.replace(
        calls.call(prompt, "a1", NUMBER).record, response=pack_ids([-1, -1, -1])
    )
    assert learner.capabilities.trainable_grammar
    records = [good, free, wrong, on, older, unsaid, broken, damaged]
    reasons = learner.grammar_mismatches(records)
    assert list(reasons) == [
        ("at-1", record.call_id, record.choice)
        for record in (wrong, on, older, unsaid, broken, damaged)
    ]
    said = list(reasons.values())
    assert said[0].startswith('Parser Error: token "b" doesn\'t satisfy the grammar')
    assert said[2] == f"sampled with llguidance 1.8.0, not {LIBRARY}"
    assert said[3] == f"sampled with an unknown library, not {LIBRARY}"
    assert "Expected token ')'" in said[4]
    assert learner.grammar_mismatches([good, free]) == {}


def test_a_row_that_does_not_follow_its_grammar_changes_nothing(folder: Path, calls: Calls) -> None:
    learner = TorchLearner({"writer": folder})
    prompt = calls.prompt("How many?")
    rows = rows_of([calls.call(prompt, "a1", NUMBER), calls.call(prompt, "yes!", YES)])
    before = learner.weight_hash("writer")
    message = (
        rf"a row of rollout ro-1 \(call call-2/0\): its tokens {len(prompt)} to "
        rf"{len(rows[1].ids) - 1} do not follow their grammar: "
    )
    with pytest.raises(DataError, match=message):
        learner.score(rows)
    with pytest.raises(DataError, match=message):
        learner.update(rows, SFTLoss())
    assert learner.weight_hash("writer") == before


@pytest.mark.parametrize(
    "constraints",
    [
        (Constraint(0, 2, YES),),
        (Constraint(3, 4, YES),),
        (Constraint(1, 3, YES), Constraint(3, 1, YES)),
    ],
    ids=["first token", "beyond the row", "overlap"],
)
def test_wrong_constraints(folder: Path, calls: Calls, constraints: tuple[Constraint, ...]) -> None:
    [row] = rows_of([calls.call([7, 8, 9], "yes", YES)])
    assert len(row.ids) == 6
    with pytest.raises(DataError, match=r"has 6 ids and a grammar for . of them from place"):
        TorchLearner({"writer": folder}).score([replace(row, constraints=constraints)])


# --- the learner's tokenizer --------------------------------------------------------------------


def test_a_loaded_model_says_where_its_tokenizer_is(folder: Path, model: Any, calls: Calls) -> None:
    rows = several_rows(calls)
    expected = TorchLearner({"writer": folder}).score(rows)
    assert TorchLearner({"writer": model}, lora=LoRA()).score(rows) == expected


def test_a_model_from_nowhere_needs_a_tokenizer(
    folder: Path, tokenizer: TransformersTokenizer, model: Any, calls: Calls
) -> None:
    model.name_or_path = model.config._name_or_path = ""
    learner = TorchLearner({"writer": model})
    free, bound = rows_of([calls.call([7], "a1", ""), calls.call([8], "a1", NUMBER)])
    assert learner.update([free], SFTLoss())["skipped"] == 0
    with pytest.raises(ConfigError, match=r"give tokenizers=\{'writer': …\} to the learner"):
        learner.update([bound], SFTLoss())
    told = TorchLearner({"writer": model}, tokenizers={"writer": tokenizer})
    assert told.score([bound]) == TorchLearner({"writer": folder}).score([bound])


def test_tokenizers_of_unknown_policies(folder: Path, tokenizer: TransformersTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"tokenizers= names unknown policies: \['checker'\]"):
        TorchLearner({"writer": folder}, tokenizers={"checker": tokenizer})


# --- masks --------------------------------------------------------------------------------------


class Counted(Grammars):
    """Grammars that record which ids were replayed."""

    replayed: list[list[int]]

    def masks(self, grammar: str, ids: Sequence[int]) -> Any:
        self.replayed.append(list(ids))
        return super().masks(grammar, ids)


def test_one_replay_of_a_call(folder: Path, tokenizer: TransformersTokenizer, calls: Calls) -> None:
    counted = Counted(tokenizer.tokenizer, vocabulary=405, eos_ids=tokenizer.eos_ids)
    counted.replayed = []
    learner = TorchLearner({"writer": folder})
    learner._replays["writer"] = Replays(lambda: counted)
    transition = calls.call(calls.prompt("How many?"), "a12", NUMBER)
    assert learner.grammar_mismatches([transition.record]) == {}
    rows = rows_of([transition])
    learner.score(rows)
    learner.update(rows, PolicyLoss(kl=0.1))
    assert counted.replayed == [transition.record.response_ids]
