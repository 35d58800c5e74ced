"""Preferences: learn from verdicts (KTO) and from pairs of answers (DPO)."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from lightspan.algorithms.protocol import local_model
from lightspan.algorithms.recorded_attempts import Query, Time
from lightspan.errors import ConfigError, DataError
from lightspan.progress import Reporter, default_reporter
from lightspan.protocols.learner import Learner, LearnerRequest, LoRA, Optimizer, check_lora
from lightspan.schema.validation import check_choice, check_kind, check_number, check_whole
from lightspan.stores import open_store, public_url
from lightspan_torch.engine.parameter_count import count_parameters
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer
from lightspan_torch.learner.config import Torch
from lightspan_torch.learning_rate import default_rate
from lightspan_torch.preferences.check import (
    THRESHOLD,
    LossName,
    PreferenceCheck,
    check_examples,
)
from lightspan_torch.preferences.examples import (
    Pair,
    Rated,
    Verdict,
    highest_score,
    mismatched,
    pairs_of,
    prompt_identity,
    split,
    verdicts_of,
)
from lightspan_torch.preferences.objectives import DPO, KTO, Answers, evaluation_points
from lightspan_torch.preferences.rated_calls import load_rated_calls
from lightspan_torch.sft.chat_dataset import report_unmatched
from lightspan_torch.sft.checkpoint import Progress, Unfinished
from lightspan_torch.sft.rendering import read_examples
from lightspan_torch.sft.updates import POLICY, run_updates, shuffled_batches

CURVE_POINTS: Final = 10
"""Number of intervals of the held-out curve."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of the held-out verdicts or pairs, at one point of the training."""

    update: int
    """Number of updates before."""
    loss: float
    margin: float | None = None
    """Mean of β·(log p - log p₀) of the better answers, minus that of the worse. None if the
    held-out verdicts are all alike."""
    accuracy: float | None = None
    """Share of the combinations of a better and a worse answer in which the log-probability of the
    better one has risen more, or fallen less; 0.5 at the start. With DPO, only the two answers of a
    pair are compared. None if the held-out verdicts are all alike."""


class PreferencesResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `Preferences.fit` returns."""

    model: Path
    """Folder of the trained model."""
    losses: list[float]
    """Mean loss of each update."""
    seconds: float
    """CPU seconds that the learner used."""
    check: PreferenceCheck
    """What was learned from: the loss, counts, and what is unusual."""
    curve: list[HeldOut]
    """Metrics of the held-out examples, before the first update and up to ten times later. Empty if
    nothing was held out."""
    examples: int
    """Number of verdicts or pairs that were trained."""
    held_out: int
    """Number of verdicts or pairs that were held out."""

    @property
    def left_out(self) -> dict[str, int]:
        """Reason → number of calls, answers or pairs that were not used."""
        return self.check.left_out


def earlier_was_better(curve: Sequence[HeldOut], held_out: int, epochs: float) -> str:
    """Return a line if the held-out accuracy was clearly higher earlier; "" if it was not.

    It was if the difference is more than a standard error of a share of the held-out examples,
    which is at most 0.5/√n.

    Args:
        curve: the held-out metrics.
        held_out: number of held-out verdicts or pairs.
        epochs: number of epochs of the whole training.
    """
    known = [(each.accuracy, each.update) for each in curve if each.accuracy is not None]
    if not known:
        return ""
    last, updates = known[-1]
    best, update = max(known, key=lambda point: (point[0], -point[1]))
    if not update or best - last <= 0.5 / math.sqrt(held_out):
        return ""
    return (
        f"held-out accuracy: {best:.2f} after update {update} of {updates}, {last:.2f} at the end. "
        f"Fewer epochs would do, such as epochs={epochs * update / updates:.2g}"
    )


@dataclass(frozen=True, slots=True)
class _Data:
    """Examples of one loss, with their check."""

    check: PreferenceCheck
    verdicts: list[Verdict]
    pairs: list[Pair]
    sides: tuple[list[int], list[int]]
    """Indices of the examples to train on, and of those that are held out."""
    highest: float
    """The highest score; -inf if there are only labels and pairs."""
    example: str
    """Why one of those that the model cannot read was left out; empty if there is none."""

    @property
    def examples(self) -> Sequence[Verdict] | Sequence[Pair]:
        return self.verdicts if self.check.loss == "kto" else self.pairs


@dataclass(kw_only=True, eq=False)
class Preferences:
    """Training on verdicts ("good", "bad") or on pairs of answers, without a reward function.

    KTO (arXiv 2402.01306) learns from single verdicts, DPO (arXiv 2305.18290) from pairs of answers
    to the same prompt. The formulas are in `lightspan_torch.preferences.losses`. Both compare with
    the starting weights, whose log-probabilities are computed once before the training.

    From a store of production (`lightspan.record`), each call with a score is an answer that was
    rated. The score is the last feedback or reward on the call, or if there is none, on its
    attempt. The correction of an answer (`lightspan.feedback(…, correction=)`) is another answer,
    which ranks above all others. Answers to the same prompt make pairs: the best with the worst,
    the second best with the second worst, and so on. The calls that `SFT` leaves out are left out
    and counted here too, except answers that the limit of tokens cut off: these are learned from
    without the token that ends an answer.

    From the store of a training, the calls of its rollouts are read with their exact token ids and
    rewards. The model must have the tokenizer of the run's model: the calls of policies whose token
    ids are not the recorded texts are left out and counted. Rollouts whose app failed are left out
    too, as `RejectionSampling` does. If a store has several trainings, choose one by `run`.

    Args:
        model: initial weights: a folder or a hub name.
        from_store: URL of a store; None to pass examples to `fit`.
        loss: `"kto"`, `"dpo"`, or `"auto"`: DPO if pairs were passed to `fit`, else KTO. With KTO,
            the answers of a pair count as a desirable and an undesirable one.
        threshold: lowest score of a desirable answer, for KTO. None for 0.5, with which scores
            above 1 are refused, because it may be no good one on their scale.
        beta: β of both losses. The higher, the closer the weights stay to the start.
        desirable_weight: weight of a desirable answer in KTO's loss; None for 1, or more if
            desirable answers are rarer, so that both kinds of those that are not held out count
            the same if `undesirable_weight` is None too.
        undesirable_weight: the same of an undesirable answer.
        learning_rate: AdamW's learning rate; None for that of `LightningRL`, which depends on the
            model's size. For other settings pass `optimizer` instead.
        batch_size: verdicts or pairs per update.
        epochs: how often each verdict or pair is used.
        held_out: share of the chats whose verdicts are not trained, but evaluated; 0 for none. A
            prompt and those that continue it are one chat.
        lora: settings of LoRA adapters; None to train full weights.
        optimizer: settings of the optimiser, instead of `learning_rate`.
        checkpoint_every: number of updates after which a checkpoint is written; None to write it
            only on Ctrl-C.
        device: device of the learner, such as `"cuda"`, unless `learner` names one.
        seed: seed of the order, of the held-out prompts and of the learner.
        learner: settings of the torch learner; None for the defaults of `Torch`.
        service: read only calls of this service; None for all services.
        agents: read only calls of these agents: names, or globs on agent paths; empty for all.
        since: read only attempts that began at this time or later (see
            `lightspan.algorithms.recorded_attempts.Time`); None for no limit.
        until: read only attempts that began before this time; None for no limit.
        run: id of the training whose rollouts are read; None for production, or for the store's
            only training.

    Raises:
        ConfigError: an option is invalid, or needs `from_store` but there is none.
    """

    model: str | Path = field(kw_only=False)
    from_store: str | os.PathLike[str] | None = None
    loss: Literal["auto", "kto", "dpo"] = "auto"
    threshold: float | None = None
    beta: float = 0.1
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    learning_rate: float | None = None
    batch_size: int = 16
    epochs: float = 1.0
    held_out: float = 0.1
    lora: LoRA | None = field(default_factory=LoRA)
    optimizer: Optimizer | None = None
    checkpoint_every: int | None = 50
    device: str = "cpu"
    seed: int = 0
    learner: Torch | None = None
    service: str | None = None
    agents: str | Sequence[str] = ()
    since: Time | None = None
    until: Time | None = None
    run: str | None = None

    def __post_init__(self) -> None:
        if self.optimizer is not None and self.learning_rate is not None:
            raise ConfigError("give learning_rate or optimizer, not both")
        check_kind("optimizer", self.optimizer, Optimizer)
        check_lora(self.lora)
        if self.lora is not None and self.lora.dropout:
            raise ConfigError(
                f"LoRA(dropout={self.lora.dropout:g}): the losses compare log-probabilities of the "
                "same weights, which dropout changes; use dropout=0 (SFT supports it)"
            )
        check_choice("loss", self.loss, ("auto", *get_args(LossName)))
        check_number("threshold", self.threshold, optional=True)
        for name in ("desirable_weight", "undesirable_weight", "learning_rate"):
            check_number(name, getattr(self, name), above=0, optional=True)
        check_number("beta", self.beta, above=0)
        check_whole("batch_size", self.batch_size, 1)
        check_number("epochs", self.epochs, above=0)
        check_number("held_out", self.held_out, low=0, below=1)
        check_whole("checkpoint_every", self.checkpoint_every, 1, optional=True)
        query = Query.of(self.service, self.since, self.until)
        if self.run is not None and self.service is not None:
            raise ConfigError("give service, of production, or run, of a training, not both")
        if self.from_store is not None:
            open_store(self.from_store)
            self.from_store = public_url(self.from_store)
        elif query != Query() or self.agents or self.run is not None:
            raise ConfigError(
                "service, agents, since, until and run select from a store: give from_store= too"
            )
        self.model = local_model(self.model)

    def check(
        self,
        examples: Sequence[Any] | str | Path | None = None,
        *,
        reporter: Reporter | None = None,
    ) -> PreferenceCheck:
        """Read the verdicts or pairs, and return what is unusual about them, without training.

        Args:
            examples: as in `fit`.
            reporter: reports what was left out while reading; None for the terminal.

        Raises:
            ConfigError: both or neither of `examples` and `from_store` are given.
            DataError: as in `fit`.
            ModelError: the tokenizer cannot be loaded.
        """
        reporter = reporter or default_reporter()
        return self._read(examples, load_tokenizer(self.model), reporter).check

    def fit(
        self,
        examples: Sequence[Any] | str | Path | None = None,
        folder: str | Path | None = None,
        *,
        reporter: Reporter | None = None,
        resume: bool = False,
    ) -> PreferencesResult:
        """Train the model and write it to `folder`.

        Call `fit(examples, folder)`, or with `from_store` `fit(folder=folder)`. What `check`
        returns is reported first. Every `checkpoint_every` updates, and on Ctrl-C, a checkpoint is
        written in `FOLDER.unfinished`.

        Args:
            examples: a list of verdicts or pairs, a `Dataset` of Hugging Face with one in each row,
                or the path of a `.jsonl` file with one on each line. A verdict is
                `{"messages": […], "label": true}`, whose last message is the answer, or has
                `"reward": 0.8` instead of the label. A pair is
                `{"messages": […], "chosen": {…}, "rejected": {…}}`, whose messages are the prompt.
                Both may have `"tools"`. TRL's form (`"prompt"`, `"completion"`) and OpenAI's
                (`"input"`, `"preferred_output"`, `"non_preferred_output"`) are read too, and
                `Verdict` and `Pair` of token ids. None with `from_store`.
            folder: folder for the model, created if necessary.
            reporter: reports progress; None for the terminal.
            resume: whether to continue from the checkpoint. If there is none, the training starts
                from the beginning.

        Raises:
            CheckpointError: the checkpoint cannot be read or written.
            ConfigError: `folder` is missing, both or neither of `examples` and `from_store` are
                given, or the checkpoint has other settings or examples.
            DataError: the file cannot be read, an example is malformed, nothing is rated, or the
                loss is KTO and all verdicts are alike, or those that are not held out, or a score
                is above 1 without a `threshold`, or the loss is DPO and there is no pair.
            KeyboardInterrupt: on Ctrl-C, after the checkpoint is written.
            ModelError: the model or its tokenizer cannot be loaded, or a loss or a gradient is
                not finite.
        """
        if folder is None:
            raise ConfigError("Preferences.fit needs a folder for the model: fit(…, folder=)")
        reporter = reporter or default_reporter()
        tokenizer = load_tokenizer(self.model)
        data = self._read(examples, tokenizer, reporter)
        for number, line in enumerate(data.check.lines()):
            reporter.line(line if number else f"{line}{data.example}")
        self._refuse(data)
        request = LearnerRequest(
            models={POLICY: self.model},
            lora={POLICY: self.lora},
            optimizer=self._optimizer(),
            seed=self.seed,
            device=self.device,
        )
        learner = (self.learner or Torch()).build(request)
        target = Path(folder)
        unfinished = Unfinished(target)
        train, held_out = data.sides
        self._refuse_split(data, train)
        objective = self._objective(data, (train, held_out), tokenizer.context_length)
        answers = Answers(learner, objective.answers())  # before a checkpoint changes the weights
        progress = unfinished.progress(learner, self._work(data), resume=resume)
        self._train(learner, objective, answers, (train, held_out), progress, unfinished, reporter)
        learner.export(POLICY, target, merge=True)  # plain weights, which training can start from
        unfinished.remove()
        curve = msgspec.convert(progress.curve, list[HeldOut], strict=False)
        if line := earlier_was_better(curve, len(held_out), self.epochs):
            reporter.line(line)
        return PreferencesResult(
            model=target,
            losses=progress.losses,
            seconds=progress.seconds,
            check=data.check,
            curve=curve,
            examples=len(train),
            held_out=len(held_out),
        )

    def _read(
        self,
        examples: Sequence[Any] | str | Path | None,
        tokenizer: TransformersTokenizer,
        reporter: Reporter,
    ) -> _Data:
        """Read the examples that were passed, or those of the store, as token ids.

        Raises:
            ConfigError: both or neither of `examples` and `from_store` are given.
            DataError: an example is malformed.
        """
        if (examples is None) is (self.from_store is None):
            raise ConfigError(
                "Preferences learns from the examples of fit(), or from_store=: give one"
            )
        rated = Rated()
        if examples is None:
            patterns = [self.agents] if isinstance(self.agents, str) else list(self.agents)
            query = Query.of(self.service, self.since, self.until)
            stored = load_rated_calls(str(self.from_store), query, patterns, self.run)
            report_unmatched(patterns, stored.agents, reporter)
            rated.left_out.update(stored.left_out)
            rated.add_stored(stored.calls, tokenizer)
        else:
            read = read_examples(examples, "examples", "verdict or pair", reporter)
            rated.add_passed(read, tokenizer)
        loss: LossName = "dpo" if rated.pairs else "kto"
        loss = loss if self.loss == "auto" else self.loss
        verdicts = verdicts_of(rated, self._threshold)
        pairs = pairs_of(rated) if loss == "dpo" else []
        weights = self.desirable_weight, self.undesirable_weight
        learned: Sequence[Verdict | Pair] = verdicts if loss == "kto" else pairs
        sides = split([prompt_identity(each) for each in learned], self.held_out, self.seed)
        train = sides[0] if loss == "kto" else None
        check = check_examples(loss, verdicts, pairs, weights, rated.left_out, train)
        highest = highest_score(rated)
        if note := self._scale_note(loss, highest):
            check = msgspec.structs.replace(check, notes=[*check.notes, note])
        return _Data(check, verdicts, pairs, sides, highest, rated.example)

    @property
    def _threshold(self) -> float:
        return THRESHOLD if self.threshold is None else self.threshold

    def _scale_note(self, loss: LossName, highest: float) -> str:
        """Return a note if the default threshold may not suit the scores; empty if it does."""
        if loss == "dpo" or self.threshold is not None or highest <= 1:
            return ""
        return (
            f"scale: the highest score is {highest:g}, and the default threshold {THRESHOLD:g} is "
            "for scores up to 1: give threshold=, the lowest score of a desirable answer"
        )

    def _refuse(self, data: _Data) -> None:
        """Raise `DataError` if there is nothing to learn."""
        check = data.check
        source = "examples" if self.from_store is None else f"store {self.from_store}"
        left_out = ", ".join(f"{n} {reason}" for reason, n in check.left_out.items()) or "nothing"
        end = f"left out: {left_out}{data.example}"
        if not data.verdicts:
            raise DataError(f"{source}: no answer has a verdict; {end}")
        if check.loss == "dpo" and not data.pairs:
            raise DataError(
                f"{source}: no two answers to the same prompt were rated differently, so there is "
                f'no pair for DPO: use loss="kto", which learns from single verdicts; {end}'
            )
        if check.loss == "kto" and not (check.desirable and check.undesirable):
            kind = "desirable" if check.desirable else "undesirable"
            raise DataError(
                f"{source}: all {len(data.verdicts)} verdicts are {kind} (threshold="
                f"{self._threshold:g}), but KTO compares both kinds. Set another threshold, or "
                f"imitate the good answers with SFT; {end}"
            )
        if note := self._scale_note(check.loss, data.highest):
            raise DataError(f"{source}: {note}")

    def _refuse_split(self, data: _Data, train: Sequence[int]) -> None:
        """Raise `DataError` if KTO's verdicts are all alike without the held-out ones."""
        if data.check.loss == "dpo":
            return
        kinds = {data.verdicts[index].desirable for index in train}
        if len(kinds) == 1:
            kind = "undesirable" if kinds == {True} else "desirable"
            raise DataError(
                f"all {kind} answers are held out (held_out={self.held_out:g}, seed={self.seed}), "
                f"but KTO compares both kinds: collect more {kind} ones, or give held_out=0"
            )

    def _optimizer(self) -> Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        rate = self.learning_rate
        if rate is None:
            rate = default_rate(count_parameters(self.model), lora=self.lora is not None)
        return Optimizer(learning_rate=rate)

    def _objective(
        self, data: _Data, sides: tuple[list[int], list[int]], context: int
    ) -> KTO | DPO:
        """Return the loss on all examples.

        Args:
            data: the examples.
            sides: indices of the examples to train on, and of the held-out ones.
            context: length of the model's context in tokens.
        """
        if data.check.loss == "dpo":
            return DPO(data.pairs, self.beta)
        others: list[list[int] | None] = [None] * len(data.verdicts)
        for side in sides:
            chosen = mismatched([data.verdicts[index] for index in side], context, self.seed)
            for index, other in zip(side, chosen, strict=True):
                others[index] = other
        weights = data.check.desirable_weight, data.check.undesirable_weight
        return KTO(data.verdicts, others, self.beta, weights)

    def _work(self, data: _Data) -> str:
        """Return a hash of the examples and of all settings that affect the result."""
        settings = {
            "model": str(self.model),
            "optimizer": self._optimizer(),
            "lora": self.lora,
            "dtype": (self.learner or Torch()).weights_dtype(self.device, self.lora is not None),
            "order": [self.seed, self.batch_size, self.epochs, self.held_out],
            "loss": [data.check.loss, self.beta],
            "weights": [data.check.desirable_weight, data.check.undesirable_weight],
        }
        return hashlib.sha256(msgspec.json.encode([settings, data.examples])).hexdigest()

    def _train(
        self,
        learner: Learner,
        objective: KTO | DPO,
        answers: Answers,
        sides: tuple[list[int], list[int]],
        progress: Progress,
        unfinished: Unfinished,
        reporter: Reporter,
    ) -> None:
        """Make the updates that `progress` does not contain yet, and evaluate held-out examples.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after a checkpoint is written.
        """
        train, held_out = sides
        batches = shuffled_batches(len(train), self.epochs, self.batch_size, self.seed)
        points = evaluation_points(len(batches), CURVE_POINTS) if held_out else []

        def evaluate() -> dict[str, float]:
            done = len(progress.losses)
            if done in points:  # a checkpoint has no entry of its last update yet
                progress.curve.append({"update": done, **objective.evaluate(answers, held_out)})
            last = progress.curve[-1] if progress.curve else {}
            return {"held_out_accuracy": last["accuracy"]} if "accuracy" in last else {}

        def update(batch: Sequence[int]) -> dict[str, float]:
            metrics = evaluate()
            return {**objective.update(answers, [train[index] for index in batch]), **metrics}

        name = "verdicts" if isinstance(objective, KTO) else "pairs"
        title = f"learning from {name}", f"learned from {len(train)} {name}"
        run_updates(
            learner,
            batches,
            update,
            progress,
            unfinished,
            reporter,
            title,
            checkpoint_every=self.checkpoint_every,
        )
        evaluate()
