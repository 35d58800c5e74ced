"""Test Preferences: what is read, what is said about it, what is learned, and that it resumes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import torch
from safetensors.torch import load_file

import lightspan
from lightspan import LightningRL, LoRA, Optimizer, Trainer
from lightspan.algorithms.recorded_attempts import Query
from lightspan.cli import main
from lightspan.errors import CheckpointError, ConfigError, DataError
from lightspan.lightning.episode import build_episode
from lightspan.progress import SilentReporter
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import AttemptStatus, Mode, Outcome
from lightspan.schema.spans import SpanKind, SpanStatus
from lightspan.schema.token_records import FinishReason, TokenRecord
from lightspan.stores import open_store
from lightspan_testing.scripted import Reply, ScriptedServer
from lightspan_testing.strategies import (
    make_attempt,
    make_call_span,
    make_record,
    make_rollout,
    make_span,
)
from lightspan_torch import Preferences
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.learner.config import Torch
from lightspan_torch.learner.torch import TorchLearner
from lightspan_torch.preferences.algorithm import HeldOut, earlier_was_better
from lightspan_torch.preferences.check import balanced_weights
from lightspan_torch.preferences.examples import Pair, Rated, Verdict, mismatched, pairs_of, split
from lightspan_torch.preferences.objectives import KTO, evaluation_points
from lightspan_torch.preferences.rated_calls import RatedCalls, _add, _episodes, load_rated_calls
from lightspan_torch.sft.rendering import Demonstration

QUIET = SilentReporter()


def _asked(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _verdict(question: str, text: str, label: bool) -> dict[str, Any]:
    return {"messages": [*_asked(question), _answer(text)], "label": label}


def _pair(question: str, chosen: str, rejected: str) -> dict[str, Any]:
    answers = {"chosen": _answer(chosen), "rejected": _answer(rejected)}
    return {"messages": _asked(question), **answers}


QUESTIONS = [f"{word}?" for word in ("capital", "colour", "sound", "count", "name", "age")]
VERDICTS = [_verdict(q, text, text == "yes") for q in QUESTIONS for text in ("yes", "no")]
PAIRS = [_pair(q, "yes", "no") for q in QUESTIONS]
FAST: dict[str, Any] = {"learning_rate": 3e-3, "batch_size": 4, "held_out": 0}


def _logprob(model: Path, question: str, text: str) -> float:
    """Return the log-probability of an answer and its end."""
    from lightspan_torch.sft.rendering import render_turn
    from lightspan_torch.sft.updates import training_row

    tokenizer = load_tokenizer(model)
    messages = [*_asked(question), _answer(text)]
    prompt, response, _ = render_turn(messages, None, tokenizer, "chat")
    size = len(prompt) + len(response)
    row = training_row([*prompt, *response], [False] * size, [0.0] * size, "row")
    [scores] = TorchLearner({"policy": str(model)}).score([row])
    return sum(scores[len(prompt) :])


@pytest.mark.slow
@pytest.mark.parametrize(("examples", "loss"), [(VERDICTS, "kto"), (PAIRS, "dpo")])
def test_the_better_answers_become_more_likely(
    tiny: Path, tmp_path: Path, examples: list[Any], loss: str
) -> None:
    """Check the held-out curve, for questions that are not trained, and the trained ones."""
    preferences = Preferences(tiny, learning_rate=3e-3, batch_size=4, epochs=12, held_out=0.34)
    result = preferences.fit(examples, tmp_path / "model", reporter=QUIET)
    assert result.check.loss == loss
    assert (result.examples, result.held_out) == ((8, 4) if loss == "kto" else (4, 2))
    assert len(result.losses) == (24 if loss == "kto" else 12)
    assert result.losses[-1] < 0.7 * result.losses[0]
    first, *_, last = result.curve
    assert (first.update, first.accuracy) == (0, 0.5)
    assert first.margin == pytest.approx(0, abs=1e-4)
    assert (last.update, last.accuracy) == (len(result.losses), 1.0)
    assert last.margin is not None
    assert last.margin > 0.5
    assert last.loss < first.loss
    assert len(result.curve) == 11
    for question in QUESTIONS:
        before = _logprob(tiny, question, "yes") - _logprob(tiny, question, "no")
        after = _logprob(result.model, question, "yes") - _logprob(result.model, question, "no")
        assert after > before + 1


@pytest.mark.slow
def test_training_starts_from_the_model(tiny: Path, tmp_path: Path, apps: Any) -> None:
    result = Preferences(tiny, **FAST).fit(VERDICTS, tmp_path / "model", reporter=QUIET)
    algorithm = LightningRL(result.model, optimize="writer", frozen="base", group_size=4)
    trainer = Trainer(algorithm, steps=1, folder=tmp_path / "run", reporter=QUIET)
    trainer.fit(apps.two, [{"q": "a"}])
    assert (tmp_path / "run" / "result.json").exists()


# --- a better point of the curve ---------------------------------------------------------------
def test_a_higher_accuracy_earlier_is_named(
    tiny: Path, tmp_path: Path, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = iter([0.5, 0.5, 1.0, 0.75, 0.25])
    monkeypatch.setattr(
        KTO, "evaluate", lambda *_: {"loss": 0.5, "margin": 0.0, "accuracy": next(accuracies)}
    )
    options = {**FAST, "held_out": 0.34, "epochs": 2}
    result = Preferences(tiny, **options).fit(VERDICTS, tmp_path / "model", reporter=lines)
    assert (result.held_out, len(result.losses)) == (4, 4)
    assert lines.texts[-1] == (
        "held-out accuracy: 1.00 after update 2 of 4, 0.25 at the end. Fewer epochs would do, such "
        "as epochs=1"
    )


def test_an_earlier_accuracy_within_a_standard_error_is_not_named() -> None:
    def said(*accuracies: float | None, held_out: int = 18) -> str:
        curve = [
            HeldOut(update=20 * n, loss=0.5, accuracy=accuracy)
            for n, accuracy in enumerate(accuracies)
        ]
        return earlier_was_better(curve, held_out, 3)

    assert said(0.5, 0.67, 0.67, 0.5) == (  # a standard error is 0.12
        "held-out accuracy: 0.67 after update 20 of 60, 0.50 at the end. Fewer epochs would do, "
        "such as epochs=1"
    )
    assert said(0.5, 0.61, 0.5) == ""
    assert said(0.5, 0.61, 0.5, held_out=100) != ""
    assert said(0.5, 0.4, 0.1) == ""  # never better than before the first update
    assert said(0.5, 0.6, 0.9) == ""
    assert said(None, None) == ""
    assert said() == ""


# --- stop and resume ------------------------------------------------------------------------
class Stopped(SilentReporter):
    """A reporter that sends SIGINT after a number of updates."""

    def __init__(self, after: int) -> None:
        self.after = after

    def advance(self, count: int = 1, **values: float | str) -> None:
        self.after -= count
        if self.after == 0:
            os.kill(os.getpid(), signal.SIGINT)


class Counter(SilentReporter):
    """A reporter that records numbers of updates: first those of the checkpoint."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    def advance(self, count: int = 1, **values: float | str) -> None:
        self.updates.append(count)


@pytest.mark.parametrize(("lora", "loss"), [(None, "kto"), (LoRA(rank=4), "dpo")])
def test_an_interrupted_run_continues_to_the_same_weights(
    tiny: Path, tmp_path: Path, lora: LoRA | None, loss: Any
) -> None:
    options: dict[str, Any] = {"learning_rate": 3e-3, "batch_size": 2, "held_out": 0.34}
    options |= {"lora": lora, "loss": loss, "epochs": 2}
    whole = Preferences(tiny, **options).fit(PAIRS, tmp_path / "whole", reporter=QUIET)
    target = tmp_path / "model"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Preferences(tiny, **options).fit(PAIRS, target, reporter=Stopped(after=2))
    finally:
        signal.signal(signal.SIGINT, handler)
    for changed in ({"beta": 0.2}, {"seed": 1}, {"learner": Torch(dtype="float64")}):
        with pytest.raises(ConfigError, match="was made with other settings"):
            Preferences(tiny, **{**options, **changed}).fit(
                PAIRS, target, reporter=QUIET, resume=True
            )
    resumed = Preferences(tiny, **options).fit(PAIRS, target, reporter=QUIET, resume=True)
    assert (resumed.losses, resumed.curve) == (whole.losses, whole.curve)
    weights = [(path / "model.safetensors").read_bytes() for path in (whole.model, target)]
    assert weights[0] == weights[1]
    assert not (tmp_path / "model.unfinished").exists()


KILLED: dict[str, Any] = {
    "learning_rate": 3e-3,
    "batch_size": 2,
    "epochs": 4,
    "held_out": 0.34,
    "checkpoint_every": 1,
}
PROGRAM = """
import json, sys
from lightspan.progress import SilentReporter
from lightspan_torch import Preferences

class Lines(SilentReporter):
    def advance(self, count=1, **values):
        print("updated", flush=True)

model, folder, options, examples = map(json.loads, sys.argv[1:])
Preferences(model, **options).fit(examples, folder, reporter=Lines())
"""


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_weights(tiny: Path, tmp_path: Path) -> None:
    """Kill -9 a process after some updates, perhaps while it writes a checkpoint."""
    target = tmp_path / "model"
    arguments = map(json.dumps, (str(tiny), str(target), KILLED, VERDICTS))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == "updated\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not target.exists()
    for examples, changed in ((VERDICTS[::-1], {}), (VERDICTS, {"desirable_weight": 3.0})):
        with pytest.raises(ConfigError, match="was made with other settings or examples"):
            Preferences(tiny, **{**KILLED, **changed}).fit(
                examples, target, reporter=QUIET, resume=True
            )
    counter = Counter()
    resumed = Preferences(tiny, **KILLED).fit(VERDICTS, target, reporter=counter, resume=True)
    assert counter.updates[0] > 0  # those of the process that was killed
    whole = Preferences(tiny, **KILLED).fit(VERDICTS, tmp_path / "whole", reporter=QUIET)
    assert (resumed.losses, resumed.curve) == (whole.losses, whole.curve)
    weights = [(path / "model.safetensors").read_bytes() for path in (whole.model, target)]
    assert weights[0] == weights[1]


def test_a_checkpoint_is_read_whose_renaming_was_cut_off(tiny: Path, tmp_path: Path) -> None:
    """Check the moments between the steps of writing a checkpoint."""
    options = {**FAST, "epochs": 2, "checkpoint_every": 1}
    whole = Preferences(tiny, **options).fit(VERDICTS, tmp_path / "whole", reporter=QUIET)
    target, unfinished = tmp_path / "model", tmp_path / "model.unfinished"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Preferences(tiny, **options).fit(VERDICTS, target, reporter=Stopped(after=3))
    finally:
        signal.signal(signal.SIGINT, handler)
    unfinished.rename(tmp_path / "model.unfinished.part")
    unfinished.mkdir()  # half deleted
    counter = Counter()
    resumed = Preferences(tiny, **options).fit(VERDICTS, target, reporter=counter, resume=True)
    assert counter.updates[0] == 3
    assert resumed.losses == whole.losses
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        target / "model.safetensors"
    ).read_bytes()
    unfinished.mkdir()
    (unfinished / "done.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*model.unfinished"):
        Preferences(tiny, **options).fit(VERDICTS, target, reporter=QUIET, resume=True)


# --- what is read ---------------------------------------------------------------------------
def _rows(examples: list[Any], model: Path) -> tuple[Any, Any]:
    rated = Rated()
    rated.add_passed(examples, load_tokenizer(model))
    return rated.answers, rated.pairs


def test_pairs_and_verdicts_of_other_trainers_are_the_same(tiny: Path) -> None:
    prompt, good, bad = _asked("capital?"), _answer("Rome"), _answer("Oslo")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    ours = {"messages": prompt, "tools": tools, "chosen": good, "rejected": bad}
    trl = {"prompt": prompt, "tools": tools, "chosen": [good], "rejected": [bad]}
    theirs = {
        "input": {"messages": prompt, "tools": tools, "parallel_tool_calls": True},
        "preferred_output": [good],
        "non_preferred_output": [bad],
    }
    (_, pairs) = _rows([ours, trl, theirs], tiny)
    assert pairs[0] == pairs[1] == pairs[2]
    tokenizer = load_tokenizer(tiny)
    assert pairs[0].prompt_ids == tokenizer.render(prompt, tools)
    [end] = tokenizer.encode("<|im_end|>")
    assert pairs[0].chosen_ids == [*tokenizer.encode("Rome"), end]
    whole = {"messages": [*prompt, good], "label": True}
    split_up = {"prompt": prompt, "completion": [good], "label": True}
    (answers, _) = _rows([whole, split_up], tiny)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ("text", r"examples\[1\] must be an object with messages, not 'text'"),
        ({"messages": "a"}, r"examples\[1\] needs messages, a list of chat messages"),
        ({"input": []}, r"examples\[1\]: input must be"),
        ({"messages": [*_asked("a"), _answer("b")]}, r'examples\[1\] needs "label": true or false'),
        (
            {"messages": [*_asked("a"), _answer("b")], "reward": float("nan")},
            r"reward=nan",
        ),
        ({**_verdict("a", "b", True), "label": "good"}, "label='good'"),
        (
            {**_pair("a", "b", "c"), "rejected": None},
            r"examples\[1\]: rejected must be one message",
        ),
        ({"messages": _asked("a"), "label": True}, r"must end with a message of the assistant"),
        (
            Verdict(prompt_ids=[5], response_ids=[6], desirable="false"),  # type: ignore[arg-type]
            r"examples\[1\]: Expected `bool`, got `str` - at `\$.desirable`",
        ),
        (
            Pair(prompt_ids=[5], chosen_ids=["6"], rejected_ids=[7]),  # type: ignore[list-item]
            r"examples\[1\]: Expected `int`, got `str` - at `\$.chosen_ids\[0\]`",
        ),
    ],
)
def test_malformed_examples(tiny: Path, example: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Preferences(tiny).check([VERDICTS[0], example], reporter=QUIET)


def test_what_cannot_be_learned_is_counted(tiny: Path, tmp_path: Path) -> None:
    """Check answers that are empty, too long or of other tokenizers, and pairs of equal answers."""
    examples = [
        *VERDICTS,
        _verdict("a", "", True),
        Verdict(prompt_ids=[5, 6], response_ids=[10**6], desirable=True),
        Verdict(prompt_ids=[5] * 512, response_ids=[6], desirable=False),
        Pair(prompt_ids=[5], chosen_ids=[6], rejected_ids=[6]),
    ]
    path = tmp_path / "verdicts.jsonl"
    check = Preferences(tiny).check(examples, reporter=QUIET)
    assert check.left_out == {
        "without an answer": 1,
        "not for this model": 2,
        "pairs of the same answer twice": 1,
    }
    path.write_text("\n".join(map(json.dumps, VERDICTS)))
    assert Preferences(tiny).check(path, reporter=QUIET).desirable == 6


def test_answers_to_one_prompt_make_pairs(tiny: Path) -> None:
    """Check best with worst, means of repeated verdicts, ties, and answers without a partner."""
    scores = [("a", 1.0), ("b", 0.5), ("c", 0.0), ("d", 0.5), ("c", 0.2), ("e", 0.9)]
    examples = [{"messages": [*_asked("?"), _answer(t)], "reward": s} for t, s in scores]
    examples += [{"messages": [*_asked("other?"), _answer("f")], "reward": 1.0}]
    rated = Rated()
    tokenizer = load_tokenizer(tiny)
    rated.add_passed(examples, tokenizer)
    texts = [
        tuple(tokenizer.decode(ids[:-1]) for ids in (pair.chosen_ids, pair.rejected_ids))
        for pair in pairs_of(rated)
    ]
    assert texts[0] == ("a", "c")
    assert texts[1][0] == "e"
    assert texts[1][1] in "bd"
    assert len(texts) == 2
    [(reason, count)] = rated.left_out.items()
    assert (reason, count) == ("without another answer to the same prompt, rated differently", 2)
    check = Preferences(tiny, loss="dpo").check(examples, reporter=QUIET)
    assert check.lines()[0] == f"2 pairs for DPO; left out: 2 {reason}"


@pytest.mark.parametrize("scores", [(0.1 + 0.2, 0.3), (0.1 + 0.2 - 0.3, 0.0), (3e9 + 1e-6, 3e9)])
def test_scores_that_differ_by_rounding_make_no_pair(
    tiny: Path, scores: tuple[float, float]
) -> None:
    examples = [
        {"messages": [*_asked("?"), _answer(text)], "reward": score}
        for text, score in zip("ab", scores, strict=True)
    ]
    rated = Rated()
    rated.add_passed(examples, load_tokenizer(tiny))
    assert scores[0] != scores[1]
    assert pairs_of(rated) == []
    assert rated.left_out == {
        "without another answer to the same prompt, rated differently": 2,
    }


def test_labels_that_contradict_each_other_count_by_their_numbers(tiny: Path) -> None:
    labels = [("a", True)] * 9 + [("a", False)] + [("b", True)] + [("b", False)] * 9
    rated, tokenizer = Rated(), load_tokenizer(tiny)
    rated.add_passed([_verdict("?", *each) for each in labels], tokenizer)
    [pair] = pairs_of(rated)
    assert tokenizer.decode(pair.chosen_ids[:-1]) == "a"


def test_whole_prompts_are_held_out() -> None:
    prompts = [[number // 3] for number in range(30)]
    train, held_out = split(prompts, 0.25, seed=3)
    assert sorted([*train, *held_out]) == list(range(30))
    assert len(held_out) == 6
    assert not {prompts[i][0] for i in train} & {prompts[i][0] for i in held_out}
    assert split(prompts[:3], 0.25, seed=3) == ([0, 1, 2], [])
    assert evaluation_points(3, 10) == [0, 1, 2, 3]
    assert evaluation_points(40, 10) == list(range(0, 41, 4))


def test_the_turns_of_a_chat_are_on_one_side() -> None:
    """The prompt of a later turn begins with that of the earlier ones."""
    chats = [[7, chat] + [8] * (3 * turn) for turn in range(3) for chat in range(40)]
    train, held_out = split(chats, 0.25, seed=3)
    assert len(held_out) == 30
    assert not {chats[i][1] for i in train} & {chats[i][1] for i in held_out}


def test_the_weights_balance_the_verdicts_that_are_trained(tiny: Path) -> None:
    verdicts = [
        Verdict(prompt_ids=[n], response_ids=[n + 1], desirable=n % 3 == 0) for n in range(30)
    ]
    check = Preferences(tiny, held_out=0.5, seed=1).check(verdicts, reporter=QUIET)
    train, _ = split([[n] for n in range(30)], 0.5, 1)
    good = sum(n % 3 == 0 for n in train)
    assert (len(train), check.desirable, check.undesirable) == (15, 10, 20)
    weights = check.desirable_weight, check.undesirable_weight
    assert weights == balanced_weights(good, 15 - good) != balanced_weights(10, 20)


@pytest.mark.parametrize(("examples", "loss"), [(VERDICTS, "kto"), (PAIRS, "dpo")])
def test_held_out_answers_change_no_update(
    tiny: Path, tmp_path: Path, examples: list[Any], loss: Any
) -> None:
    """Check it by other answers to the held-out prompts, neither trained nor references of KTO."""
    answers, pairs = _rows(examples, tiny)
    prompts = [each.prompt_ids for each in pairs or [demo for demo, _ in answers]]
    train, held_out = split(prompts, 0.34, 0)
    assert min(held_out) < len(train)  # places among the trained ones are not those among all
    others = [
        json.loads(json.dumps(example).replace('"yes"', '"of"')) if place in held_out else example
        for place, example in enumerate(examples)
    ]
    options = FAST | {"held_out": 0.34, "epochs": 3, "beta": 1.0, "loss": loss}
    results = [
        Preferences(tiny, **options).fit(each, tmp_path / name, reporter=QUIET)
        for name, each in (("one", examples), ("two", others))
    ]
    assert results[1].losses == pytest.approx(results[0].losses, abs=1e-4)
    assert results[1].curve[-1].loss != pytest.approx(results[0].curve[-1].loss, abs=1e-3)


def test_the_reference_points_answers_are_of_other_prompts() -> None:
    verdicts = [
        Verdict(prompt_ids=[n // 2], response_ids=[10 + n] * (n + 1), desirable=True)
        for n in range(8)
    ]
    for verdict, other in zip(verdicts, mismatched(verdicts, 100, seed=0), strict=True):
        assert other is not None
        [owner] = [v for v in verdicts if v.response_ids == other]
        assert owner.prompt_ids != verdict.prompt_ids
    short = mismatched(verdicts, 3, seed=0)  # the answers of the first prompt alone fit
    assert [other is None or len(other) for other in short[:2]] == [True, True]
    assert all(other is not None and len(other) <= 2 for other in short[2:])
    assert mismatched(verdicts[:1], 100, seed=0) == [None]
    one = mismatched(verdicts[:2], 100, seed=0)
    assert one == [verdicts[1].response_ids, verdicts[0].response_ids]


def test_the_threshold_is_the_lowest_score_of_a_desirable_answer(tiny: Path) -> None:
    example = {"messages": [*_asked("?"), _answer("yes")]}
    examples = [{**example, "reward": reward} for reward in (0.49, 0.5, 0.51)]
    check = Preferences(tiny).check(examples, reporter=QUIET)
    assert (check.desirable, check.undesirable) == (2, 1)


def test_the_default_threshold_is_refused_for_stars(tiny: Path, tmp_path: Path) -> None:
    """With 0.5, the worst of five stars would be desirable, and only thumbs down undesirable."""
    stars = [
        {"messages": [*_asked(f"{n}?"), _answer("yes")], "reward": n % 5 + 1.0} for n in range(10)
    ]
    examples = [*stars, _verdict("0?", "no", False)]
    scale = (
        "scale: the highest score is 5, and the default threshold 0.5 is for scores up to 1: give "
        "threshold=, the lowest score of a desirable answer"
    )
    assert Preferences(tiny).check(examples, reporter=QUIET).notes[-1] == scale
    with pytest.raises(DataError, match="examples: scale: the highest score is 5"):
        Preferences(tiny).fit(examples, tmp_path / "model", reporter=QUIET)
    for threshold, desirable in ((4.0, 4), (0.5, 10)):
        check = Preferences(tiny, threshold=threshold).check(examples, reporter=QUIET)
        assert check.desirable == desirable
        assert not any(note.startswith("scale") for note in check.notes)
    check = Preferences(tiny, loss="dpo").check(examples, reporter=QUIET)
    assert not any(note.startswith("scale") for note in check.notes)


# --- what is said about it ------------------------------------------------------------------
def test_few_unbalanced_and_contradictory_verdicts_are_reported(
    tiny: Path, tmp_path: Path, lines: Any
) -> None:
    verdicts = [_verdict(f"question {n}?", "yes", True) for n in range(19)]
    verdicts += [_verdict("question 0?", "yes", False)]
    preferences = Preferences(tiny, learning_rate=1e-3, held_out=0)
    check = preferences.check(verdicts, reporter=QUIET)
    assert (check.desirable, check.undesirable, check.contradictory) == (19, 1, 1)
    assert (check.desirable_weight, check.undesirable_weight) == (1.0, 19.0)
    few, unbalanced, contradictory = check.notes
    assert few.startswith("few: 20 verdicts, fewer than 100.")
    assert unbalanced.startswith(
        "unbalanced: 95% of the verdicts are alike. What the 1 undesirable"
    )
    assert contradictory.startswith("contradictory: 1 answers have both verdicts")
    preferences.fit(verdicts, tmp_path / "model", reporter=lines)
    assert lines.texts[:4] == check.lines() == str(check).split("\n")
    assert lines.texts[0] == (
        "19 desirable and 1 undesirable answers for KTO, with weights 1 and 19; left out: nothing"
    )
    many = [_verdict(f"{n}?", "yes", n % 2 == 0) for n in range(100)]
    assert Preferences(tiny).check(many, reporter=QUIET).notes == []


def test_a_weight_that_was_given_is_not_called_balanced(tiny: Path) -> None:
    verdicts = [_verdict(f"question {n}?", "yes", n > 0) for n in range(20)]
    preferences = Preferences(tiny, undesirable_weight=1.0)
    check = preferences.check(verdicts, reporter=QUIET)
    assert check.undesirable_weight == 1.0
    assert check.notes[1] == (
        "unbalanced: 95% of the verdicts are alike. Only 1 answers are undesirable: collect more "
        "of them"
    )


def test_an_answer_between_two_others_is_no_contradiction(tiny: Path) -> None:
    ranked = [_pair("a?", "good", "fair"), _pair("a?", "fair", "bad")]
    preferences = Preferences(tiny)
    check = preferences.check(ranked, reporter=QUIET)
    assert check.loss == "dpo"
    assert (check.contradictory, len(check.notes)) == (0, 1)
    check = preferences.check([*ranked, _pair("a?", "bad", "fair")], reporter=QUIET)
    assert check.contradictory == 1
    assert check.notes[1].startswith("contradictory: 1 pairs were also given the other way round.")


@pytest.mark.parametrize(
    ("desirable", "undesirable"), [(95, 5), (5, 95), (3, 3), (1, 0), (0, 1), (0, 0)]
)
def test_both_kinds_count_the_same(desirable: int, undesirable: int) -> None:
    good, bad = balanced_weights(desirable, undesirable)
    assert min(good, bad) == 1.0
    if desirable and undesirable:
        assert good * desirable == pytest.approx(bad * undesirable)


@pytest.mark.parametrize(
    ("options", "examples", "message"),
    [
        ({}, [], "examples: no answer has a verdict; left out: nothing"),
        (
            {},
            VERDICTS[::2],
            r"all 6 verdicts are desirable \(threshold=0.5\), but KTO compares both kinds. .*SFT",
        ),
        ({}, VERDICTS[1::2], "all 6 verdicts are undesirable"),
        ({"loss": "dpo"}, VERDICTS[::2], 'no pair for DPO: use loss="kto"'),
    ],
)
def test_nothing_to_learn(
    tiny: Path, tmp_path: Path, options: Any, examples: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Preferences(tiny, **options).fit(examples, tmp_path / "model", reporter=QUIET)
    assert not (tmp_path / "model").exists()


def test_a_kind_that_is_held_out_as_a_whole_is_refused(tiny: Path, tmp_path: Path) -> None:
    """KTO would train on verdicts that are all alike, although `check` counts both kinds."""
    [index] = split([[n] for n in range(10)], 0.1, 0)[1]
    verdicts = [
        Verdict(prompt_ids=[n], response_ids=[n + 1], desirable=n != index) for n in range(10)
    ]
    message = "all undesirable answers are held out .held_out=0.1, seed=0., but KTO"
    with pytest.raises(DataError, match=message):
        Preferences(tiny).fit(verdicts, tmp_path / "model", reporter=QUIET)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"beta": 0}, "beta=0 must be a finite number above 0"),
        ({"held_out": 1}, "held_out=1 must be"),
        ({"loss": "ipo"}, "loss='ipo'"),
        ({"desirable_weight": -1}, "desirable_weight=-1"),
        ({"lora": LoRA(dropout=0.1)}, r"LoRA\(dropout=0.1\): .* use dropout=0"),
        ({"agents": "writer"}, "select from a store: give from_store= too"),
        ({"run": "a"}, "select from a store: give from_store= too"),
        ({"run": "a", "service": "b"}, "give service, of production, or run, of a training"),
        ({"learning_rate": 1e-3, "optimizer": Optimizer()}, "give learning_rate or optimizer"),
    ],
)
def test_impossible_settings(tiny: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Preferences(tiny, **options)


def test_examples_come_from_one_place(tiny: Path, tmp_path: Path, production: str) -> None:
    with pytest.raises(ConfigError, match="give one"):
        Preferences(tiny, from_store=production).fit(VERDICTS, tmp_path / "model")
    with pytest.raises(ConfigError, match="give one"):
        Preferences(tiny).fit(folder=tmp_path / "model")
    with pytest.raises(ConfigError, match="needs a folder"):
        Preferences(tiny).fit(VERDICTS)


# --- from production ------------------------------------------------------------------------
ANSWERS = {"capital?": "Rome", "colour?": "red", "sound?": "loud"}


def _record(url: str, agents: tuple[str, ...]) -> None:
    """Record three questions to some agents, like and dislike, correct one, leave one unrated."""
    attempts, responses = [], []
    with (
        ScriptedServer(lambda request: ANSWERS[request.last_text]) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        lightspan.record(url, service="desk"),
    ):
        for question in ANSWERS:
            with lightspan.operation("ask"):
                for agent in agents:
                    with lightspan.agent(agent):
                        messages: Any = _asked(question)
                        reply = client.chat.completions.create(model="m", messages=messages)
                    if agent == "answerer":
                        responses.append(reply.id)
                attempts.append(str(lightspan.current_attempt_id()))
    lightspan.feedback(attempts[0], 1.0, store=url)
    lightspan.feedback(attempts[1], 0.0, store=url)
    lightspan.feedback(responses[1], 0.0, correction="blue", store=url)


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store with calls of two agents: rated well, rated badly and corrected, unrated."""
    url = f"sqlite:{tmp_path_factory.mktemp('production') / 'production.db'}"
    _record(url, ("answerer", "checker"))
    return url


def _texts(model: Path, url: str, **options: Any) -> list[tuple[str, float]]:
    """Return answer and score of each rated call that suits the model."""
    query = Query.of(options.get("service"), None, None)
    calls = load_rated_calls(url, query, options.get("agents", []))
    rated = Rated()
    rated.add_stored(calls.calls, load_tokenizer(model))
    tokenizer = load_tokenizer(model)
    return [(tokenizer.decode(demo.response_ids[:-1]), score) for demo, score in rated.answers]


def test_verdicts_on_attempts_are_those_of_the_agents_calls(tiny: Path, production: str) -> None:
    assert _texts(tiny, production, agents=["answerer"]) == [
        ("Rome", 1.0),
        ("red", 0.0),
        ("blue", float("inf")),
    ]
    preferences = Preferences(tiny, from_store=production, agents="answerer")
    check = preferences.check(reporter=QUIET)
    assert (check.loss, check.desirable, check.undesirable) == ("kto", 2, 1)
    assert check.left_out == {"of other agents": 3, "unscored": 1}
    pairs = Preferences(tiny, from_store=production, loss="dpo", agents="answerer")
    check = pairs.check(reporter=QUIET)
    assert check.desirable == 1
    assert check.left_out["without another answer to the same prompt, rated differently"] == 1


def test_two_answers_that_are_compared_make_a_pair(tiny: Path, tmp_path: Path) -> None:
    """A comparison is feedback on both responses."""
    url, answers = f"sqlite:{tmp_path / 'compared.db'}", iter(["yes", "no"])
    with (
        ScriptedServer(lambda request: next(answers)) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        lightspan.record(url),
    ):
        messages: Any = _asked("capital?")
        better, worse = (
            client.chat.completions.create(model="m", messages=messages).id for _ in range(2)
        )
    lightspan.feedback(better, 1.0, store=url)
    lightspan.feedback(worse, 0.0, store=url)
    check = Preferences(tiny, from_store=url, loss="dpo").check(reporter=QUIET)
    assert (check.desirable, check.left_out) == (1, {})
    assert Preferences(tiny, from_store=url).check(reporter=QUIET).undesirable == 1


def test_a_correction_of_an_attempt_is_of_its_only_call(
    tiny: Path, tmp_path: Path, production: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:{tmp_path / 'copy.db'}"
    shutil.copy(production.removeprefix("sqlite:"), tmp_path / "copy.db")
    attempt = asyncio.run(_first_attempt(url))
    arguments = ["feedback", "--store", url, attempt, "0", "--correction", "Paris"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("0 on attempt")
    assert ("Paris", float("inf")) in _texts(tiny, url, agents=["answerer"])
    assert main(["inspect", url, attempt]) == 0
    assert "better: 'Paris'" in capsys.readouterr().out
    both = load_rated_calls(url, Query(), [])
    assert both.left_out["corrections of attempts with several calls"] == 1
    none = load_rated_calls(url, Query(), ["nobody"])
    assert +none.left_out == {
        "of other agents": 6,
        "corrections of attempts without a call of the chosen agents": 1,
    }


async def _first_attempt(url: str) -> str:
    from lightspan.stores import open_existing

    async with open_existing(url) as store:
        rows = (await store.summaries(newest=True)).rows
        return str(rows[-1].attempt_id)


def test_an_answer_that_was_cut_off_has_no_end(tiny: Path, tmp_path: Path) -> None:
    """SFT leaves it out. Answers that a filter cut off are left out here too."""
    url, finishes = f"sqlite:{tmp_path / 'cut.db'}", iter(["length", "content_filter"])
    with (
        ScriptedServer(
            lambda request: Reply(text="Rome is", finish_reason=next(finishes))
        ) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        lightspan.record(url),
    ):
        messages: Any = _asked("capital?")
        ids = [client.chat.completions.create(model="m", messages=messages).id for _ in range(2)]
    for identifier in ids:
        lightspan.feedback(identifier, 0.0, store=url)
    calls = load_rated_calls(url, Query(), [])
    assert calls.left_out["cut off"] == 1
    rated, tokenizer = Rated(), load_tokenizer(tiny)
    rated.add_stored(calls.calls, tokenizer)
    [(demo, score)] = rated.answers
    assert (demo.response_ids, score) == (tokenizer.encode("Rome is"), 0.0)


def test_an_agent_that_no_call_has_is_reported(tiny: Path, production: str, lines: Any) -> None:
    preferences = Preferences(tiny, from_store=production, agents=["answerer", "chekcer"])
    preferences.check(reporter=lines)
    assert any("no agent matches 'chekcer'" in line for line in lines.texts)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def test_other_agents_change_no_bit(tiny: Path, tmp_path: Path, production: str) -> None:
    """Compare with a store in which the other agent never was; the start stays as it is."""
    before = _digest(tiny)
    alone = f"sqlite:{tmp_path / 'alone.db'}"
    _record(alone, ("answerer",))
    models = [
        Preferences(tiny, from_store=url, agents="answerer", epochs=3, **FAST)
        .fit(folder=tmp_path / name, reporter=QUIET)
        .model
        for url, name in ((production, "two"), (alone, "one"))
    ]
    weights = [(model / "model.safetensors").read_bytes() for model in models]
    assert weights[0] == weights[1]
    assert _digest(tiny) == before
    start, trained = (load_file(f / "model.safetensors") for f in (tiny, models[0]))
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert changed  # LoRA changes linear layers alone
    assert all("_proj" in name for name in changed)


# --- from a training ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(tiny: Path, apps: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train one step and return the URL of its store."""
    folder = tmp_path_factory.mktemp("stored") / "run"
    algorithm = LightningRL(tiny, optimize="writer", frozen="base", group_size=4, tasks_per_step=2)
    Trainer(algorithm, steps=1, folder=folder, reporter=QUIET).fit(
        apps.two, [{"q": "a"}, {"q": "b"}]
    )
    return f"sqlite:{folder / 'store.db'}"


@pytest.mark.slow
def test_calls_of_a_training_have_their_exact_tokens(
    tiny: Path, tmp_path: Path, trained: str
) -> None:
    from lightspan.schema.records import Mode
    from lightspan_testing.stored_episodes import stored_episodes

    calls = load_rated_calls(trained, Query(), ["writer"]).calls
    expected = [
        (call.record.prompt_ids, call.record.response_ids, episode.reward)
        for episode in stored_episodes(trained.removeprefix("sqlite:"), mode=Mode.TRAIN)
        for call in episode.calls
        if call.agent == "writer" and call.record is not None
    ]
    results = [(c.answer.prompt_ids, c.answer.response_ids, c.score) for c in calls]
    assert sorted(results) == sorted(expected)
    assert len(results) == 8
    options: dict[str, Any] = {**FAST, "from_store": trained, "agents": "writer"}
    result = Preferences(tiny, loss="dpo", **options).fit(folder=tmp_path / "model", reporter=QUIET)
    assert result.check.desirable > 0
    assert result.left_out["of other agents"] == 8


@pytest.mark.slow
def test_a_time_without_production_does_not_choose_trainings(tmp_path: Path, trained: str) -> None:
    folder = shutil.copytree(Path(trained.removeprefix("sqlite:")).parent, tmp_path / "run")
    url, before = f"sqlite:{folder / 'store.db'}", time.time()
    assert load_rated_calls(url, Query(until=before), []).calls
    _record(url, ("answerer",))
    assert not load_rated_calls(url, Query(until=before), []).calls


def _episode(record: TokenRecord, **fields: Any) -> Any:
    attempt = make_attempt(status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK, **fields)
    return build_episode(attempt, make_rollout(), [], [record])


def _answered(record: TokenRecord, text: str) -> Any:
    """Return an episode whose only call has a record and a text, with a reward of 1."""
    attributes = {
        c.CALL_ID: record.call_id,
        c.OUTPUT_MESSAGES: genai_messages.dump([_answer(text)]),
    }
    span = make_span(record.call_id, attributes=attributes, sequence_start=1, sequence_end=2)
    return build_episode(make_attempt(), make_rollout(), [span], [record])


def test_policies_of_another_tokenizer_of_equal_size_are_left_out(tiny: Path) -> None:
    """All of its token ids are in the vocabulary, but mean other texts."""
    tokenizer = load_tokenizer(tiny)
    result = RatedCalls()
    shifts = {"own": (0, 0, 1, 0), "foreign": (1, 1, 1, 1), "chance": (1, 0, 1, 1)}
    for policy, shift in shifts.items():
        for number, text in enumerate(("Rome", "blue", "loud", "loud")):
            ids = [id + shift[number] for id in tokenizer.encode(text)]
            record = make_record(f"{policy}-{number}", (7, 8), ids, policy=policy)
            _add(_answered(record, text), [], result)
    rated = Rated()
    rated.add_stored(result.calls, tokenizer)
    texts = [tokenizer.decode(demo.response_ids) for demo, _ in rated.answers]
    assert texts[:2] + texts[3:] == ["Rome", "blue", "loud"]
    assert rated.left_out == {"with token ids of another tokenizer": 8}
    assert "an answer of policy 'chance' is 'loud', but its token ids are" in rated.example


def test_one_of_several_trainings_is_chosen(tiny: Path, tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'store.db'}"

    async def write() -> None:
        async with open_store(url) as store:
            rollouts = [
                make_rollout(name, run_id=name, task_id=name) for name in ("first", "second")
            ]
            held_out = make_rollout("held", run_id="second", task_id="held", mode=Mode.VAL)
            await store.enqueue([*rollouts, held_out])
            assert len(await store.claim("runner", 3, 60.0)) == 3

    async def read() -> list[str]:
        async with open_store(url) as store:
            return [each.rollout_id async for each in _episodes(store, Query(), "second")]

    asyncio.run(write())
    assert asyncio.run(read()) == ["ro-second"]
    message = "2 trainings: 'first' .1 rollout., 'second' .1 rollout.. Choose one by run="
    with pytest.raises(ConfigError, match=message):
        Preferences(tiny, from_store=url).check(reporter=QUIET)
    with pytest.raises(ConfigError, match=r"run='third': store .* has the trainings 'first'"):
        Preferences(tiny, from_store=url, run="third").check(reporter=QUIET)
    assert Preferences(tiny, from_store=url, run="second").check(reporter=QUIET).desirable == 0


def test_records_of_another_tokenizer_are_counted(tiny: Path) -> None:
    """Token ids outside the vocabulary would be an error of the model."""
    result = RatedCalls()
    for ids in ((9, 10), (9, 200_000)):
        _add(_episode(make_record("c", (7, 8), ids)), [], result)
    rated = Rated()
    rated.add_stored(result.calls, load_tokenizer(tiny))
    assert len(rated.answers) == 1
    assert rated.left_out == {"not for this model": 1}
    assert "call 1 has the token 200000, but the model's tokenizer has" in rated.example


def _in_a_failed_try(record: TokenRecord) -> Any:
    """Return an episode whose only call is of an agent that failed and was tried again."""
    agent: dict[str, Any] = {"attributes": {c.AGENT_PATH: "writer"}}
    spans = [
        make_span("1", SpanKind.AGENT, status=SpanStatus.ERROR, start_ns=1, end_ns=3, **agent),
        make_span("2", SpanKind.AGENT, start_ns=4, end_ns=6, **agent),
        make_call_span(record.call_id, parent_id="1"),
    ]
    attempt = make_attempt(status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK)
    return build_episode(attempt, make_rollout(), spans, [record])


def test_damaged_and_truncated_records_are_counted() -> None:
    whole = make_record("c", (7, 8), (9, 10))
    cut = msgspec.structs.replace(whole, response=whole.response[:-1])
    short = msgspec.structs.replace(whole, logprob_data=whole.logprob_data[:4])
    empty = msgspec.structs.replace(whole, response=b"", logprob_data=b"")
    result = RatedCalls()
    for record in (whole, cut, short, empty):
        _add(_episode(record), [], result)
    _add(_episode(whole, capture_errors=["lost a span"]), [], result)
    broken = msgspec.structs.replace(whole, finish_reason=FinishReason.CANCELLED)
    _add(_episode(broken), [], result)
    _add(replace(_episode(whole), status=AttemptStatus.RUNNING, outcome=None), [], result)
    _add(replace(_episode(whole), departed="another prompt"), [], result)
    _add(replace(_episode(whole), outcome=Outcome.APP_ERROR), [], result)
    _add(_in_a_failed_try(whole), [], result)
    late = _episode(whole)
    _add(replace(late, calls=(), late_calls=late.calls), [], result)
    assert [call.answer for call in result.calls] == [
        Demonstration(prompt_ids=[7, 8], response_ids=[9, 10])
    ]
    assert +result.left_out == {
        "with damaged token records": 3,
        "of damaged attempts": 1,
        "that the app broke off": 1,
        "of attempts that did not end by themselves": 2,
        "of rollouts whose app failed": 1,
        "in failed tries": 1,
        "late": 1,
    }
