"""SFT: supervised fine-tuning on demonstrations, episodes or recorded production calls."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from lightspan.algorithms.protocol import local_model
from lightspan.algorithms.recorded_attempts import Query, Time, reward_bound
from lightspan.errors import ConfigError, DataError
from lightspan.lightning.episode import Episode
from lightspan.lightning.rows import Row
from lightspan.progress import Reporter, default_reporter
from lightspan.protocols.learner import LearnerRequest, LoRA, Optimizer, SFTLoss, check_lora
from lightspan.schema.records import Json
from lightspan.schema.routing import matches
from lightspan.schema.token_records import CallOutcome
from lightspan.schema.validation import check_kind, check_number, check_whole
from lightspan.stores import open_store, public_url
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer
from lightspan_torch.learner.config import Torch
from lightspan_torch.sft.chat_dataset import (
    counted,
    described,
    load_chats,
    nothing_to_imitate,
    report_unmatched,
)
from lightspan_torch.sft.checkpoint import Unfinished
from lightspan_torch.sft.rendering import (
    Demonstration,
    Turns,
    read_examples,
    render_or_leave_out,
)
from lightspan_torch.sft.updates import POLICY, run_updates, shuffled_batches, training_row

__all__ = ["SFT", "Demonstration", "SFTResult", "Turns", "demonstrations_from"]


class SFTResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a fine-tuning returns."""

    model: Path
    """Folder of the fine-tuned model."""
    losses: list[float]
    """Mean loss of each update."""
    seconds: float
    """CPU seconds that the learner used."""
    demonstrations: int = 0
    """Number of demonstrations that were imitated."""
    left_out: dict[str, int] = {}
    """Reason → number of demonstrations, answers of them, or calls of the store that were not
    imitated; `LOST_THOUGHTS` → number of answers that were imitated without their thoughts."""


@dataclass(kw_only=True, eq=False)
class SFT:
    """Supervised fine-tuning on demonstrations passed to `fit`, or on calls recorded in a store.

    Answers that were sampled under a grammar are imitated without masking by the grammar, so that
    the model learns the format.

    From a store (`lightspan.record`), each call whose score is at least `min_reward` is imitated:
    prompt, tools and answer. The score of a call is the last feedback or reward on the call, or if
    there is none, on its attempt. With `min_reward=None`, calls without a score are imitated too.
    Calls are left out that failed, were truncated, or were recorded after their attempt had ended.
    So are calls with several answers, calls of damaged attempts, calls of an agent that ended in an
    error and was then repeated, and calls whose prompt is not whole, because the provider keeps a
    part of it.

    Chats from any source are left out if they are too long for the model or its chat template
    refuses them. Answers are left out that have no text and no tool call, or `"weight": 0` in their
    message. If the template has no place for thoughts (`reasoning_content`), the answer is imitated
    without them. `SFTResult.left_out` counts what was left out. If the template does not end an
    answer, the model's end-of-sequence token is added.

    Args:
        model: initial weights: a folder or a hub name.
        learning_rate: AdamW's learning rate; None for 1e-5. For other settings pass `optimizer`
            instead.
        batch_size: demonstrations per update.
        epochs: how often each demonstration is imitated.
        prompt_weight: weight of a prompt token in the loss; an answer token has weight 1.
        turns: which assistant messages of a chat are imitated: `"last"` or `"all"`. The prompt of a
            message is all messages before it. `"all"` needs a chat template that renders earlier
            messages unchanged.
        optimizer: settings of the optimiser, instead of `learning_rate`.
        lora: settings of LoRA adapters; None to train full weights.
        device: device of the learner, such as `"cuda"`, unless `learner` names one.
        seed: seed of the order of the demonstrations and of the learner.
        learner: settings of the torch learner; None for the defaults of `Torch`.
        from_store: URL of a store with recorded production calls; None to pass demonstrations to
            `fit`.
        min_reward: minimum score of an imitated call; None to imitate calls without a score too.
        service: imitate only calls of this service; None for all services.
        agents: imitate only calls of these agents: names, or globs on agent paths; empty for all.
        since: imitate only attempts that began at this time or later (see
            `lightspan.algorithms.recorded_attempts.Time`); None for no limit.
        until: imitate only attempts that began before this time; None for no limit.

    Raises:
        ConfigError: an option is invalid, or needs `from_store` but there is none.
    """

    model: str | Path = field(kw_only=False)
    learning_rate: float | None = None
    batch_size: int = 16
    epochs: float = 1.0
    prompt_weight: float = 0.0
    turns: Turns = "last"
    optimizer: Optimizer | None = None
    lora: LoRA | None = None
    device: str = "cpu"
    seed: int = 0
    learner: Torch | None = None
    from_store: str | os.PathLike[str] | None = None
    min_reward: float | None = None
    service: str | None = None
    agents: str | Sequence[str] = ()
    since: Time | None = None
    until: Time | None = None

    def __post_init__(self) -> None:
        rate = self.learning_rate
        if self.optimizer is not None and rate is not None:
            raise ConfigError("give learning_rate or optimizer, not both")
        check_kind("optimizer", self.optimizer, Optimizer)
        check_lora(self.lora)
        if rate is not None:
            check_number("learning_rate", rate, above=0)
        self.min_reward = reward_bound("min_reward", self.min_reward)
        selection = described(self._selection())
        if self.from_store is not None:
            Query.of(self.service, self.since, self.until)
            open_store(self.from_store)
            self.from_store = public_url(self.from_store)
        elif selection:
            raise ConfigError(f"{selection} selects from a store: give from_store= too")
        if self.turns not in get_args(Turns):
            raise ConfigError(f"turns={self.turns!r} must be one of {', '.join(get_args(Turns))}")
        if self.turns == "all" and self.from_store is not None:
            raise ConfigError('a store\'s calls are imitated one by one: leave turns="all" out')
        check_whole("batch_size", self.batch_size, 1)
        check_number("epochs", self.epochs, above=0)
        check_number("prompt_weight", self.prompt_weight, low=0, high=1)
        self.model = local_model(self.model)
        self.optimizer = self.optimizer or Optimizer(learning_rate=1e-5 if rate is None else rate)

    def _selection(self) -> dict[str, Any]:
        """Return the options that select calls of a store: name → value."""
        names = ("min_reward", "service", "agents", "since", "until")
        return {name: getattr(self, name) for name in names}

    def fit(
        self,
        demonstrations: Sequence[Json | Demonstration] | str | Path | None = None,
        folder: str | Path | None = None,
        *,
        reporter: Reporter | None = None,
        resume: bool = False,
    ) -> SFTResult:
        """Fine-tune the model and write it to `folder`.

        Call `fit(chats, folder)`, or with `from_store` `fit(folder=folder)`. Ctrl-C leaves a
        checkpoint in `FOLDER.unfinished`.

        Args:
            demonstrations: a list of chats or `Demonstration`s (token ids), a `Dataset` of Hugging
                Face with a chat in each row, or the path of a `.jsonl` file with a chat on each
                line. Nulls in a `Dataset`'s tool calls and tools are left out, because Arrow adds
                them. A chat is `{"messages": […], "tools": […]}`
                or a list of messages; its last message is the assistant's. An answer may have a
                `"weight"`, 0 or 1, as in OpenAI's format. None with `from_store`.
            folder: folder for the model, created if necessary.
            reporter: reports progress; None for the terminal.
            resume: whether to continue from the checkpoint that Ctrl-C left. If there is no
                checkpoint, the fine-tuning starts from the beginning.

        Raises:
            CheckpointError: the checkpoint cannot be read or written.
            ConfigError: `folder` is missing, both or neither of `demonstrations` and `from_store`
                are given, or the checkpoint has other settings or examples.
            DataError: the file cannot be read, or no demonstration can be imitated. Or a
                demonstration does not end with the assistant, has an empty prompt or answer, has an
                `earlier` outside its prompt, or the chat template renders its prompt differently
                once the answer is there, or the weight of a message is invalid, or `tools` is no
                list or has a parameter without a schema. Or `demonstrations` is a table of pandas.
            KeyboardInterrupt: on Ctrl-C, after the checkpoint is written.
            ModelError: the model or its tokenizer cannot be loaded, or a loss is not finite.
        """
        if folder is None:
            raise ConfigError("SFT.fit needs a folder for the model: fit(…, folder=)")
        if (demonstrations is None) is (self.from_store is None):
            raise ConfigError("SFT imitates the demonstrations of fit(), or from_store=: give one")
        reporter = reporter or default_reporter()
        if demonstrations is not None:
            demonstrations = read_examples(demonstrations, "demonstrations", "chat", reporter)
        tokenizer = load_tokenizer(self.model)
        left_out: Counter[str] = Counter()
        if demonstrations is None:
            prepared = self._from_store(tokenizer, left_out, reporter)
        else:
            prepared = self._from_caller(demonstrations, tokenizer, left_out, reporter)
        request = LearnerRequest(
            models={POLICY: self.model},
            lora={POLICY: self.lora},
            optimizer=self.optimizer or Optimizer(),
            seed=self.seed,
            device=self.device,
        )
        learner = (self.learner or Torch()).build(request)
        target = Path(folder)
        unfinished = Unfinished(target)
        progress = unfinished.progress(learner, self._work(prepared), resume=resume)
        batches = shuffled_batches(len(prepared), self.epochs, self.batch_size, self.seed)

        def imitate(batch: Sequence[int]) -> dict[str, float]:
            rows = self._rows([prepared[index] for index in batch])
            metrics = learner.update(rows, SFTLoss())
            return {name: metrics[name] for name in ("loss", "grad_norm")}

        title = "imitating", f"imitated {len(prepared)} demonstrations"
        run_updates(learner, batches, imitate, progress, unfinished, reporter, title)
        learner.export(POLICY, target, merge=True)  # plain weights, which training can start from
        unfinished.remove()
        return SFTResult(
            model=target,
            losses=progress.losses,
            seconds=progress.seconds,
            demonstrations=len(prepared),
            left_out=dict(left_out),
        )

    def _from_store(
        self, tokenizer: TransformersTokenizer, left_out: Counter[str], reporter: Reporter
    ) -> list[Demonstration]:
        """Read the demonstrations from the store.

        Args:
            tokenizer: the model's tokenizer.
            left_out: reason → number of calls left out, to which this method adds.
            reporter: reports progress.

        Raises:
            DataError: the store has no call to imitate.
        """
        stored = load_chats(str(self.from_store), **self._selection())
        left_out.update(stored.left_out)
        prepared, example = self._rendered(stored.chats, tokenizer, left_out, is_strict=False)
        report_unmatched(self.agents, stored.agents, reporter)
        if not prepared:
            error = nothing_to_imitate(str(self.from_store), self._selection(), left_out)
            raise DataError(f"{error}{example}")
        line = f"{len(prepared)} calls of {self.from_store}; left out: {counted(left_out)}"
        reporter.line(f"{line}{example}")
        return prepared

    def _from_caller(
        self,
        demonstrations: Sequence[Json | Demonstration],
        tokenizer: TransformersTokenizer,
        left_out: Counter[str],
        reporter: Reporter,
    ) -> list[Demonstration]:
        """Convert the demonstrations passed to `fit` to token ids.

        Args:
            demonstrations: the demonstrations.
            tokenizer: the model's tokenizer.
            left_out: reason → number of demonstrations left out, to which this method adds.
            reporter: reports progress.

        Raises:
            DataError: a demonstration is malformed, or none can be imitated.
        """
        prepared, example = self._rendered(demonstrations, tokenizer, left_out, is_strict=True)
        reasons = counted(left_out)
        if not prepared:
            raise DataError(
                "there is no demonstration to imitate; give at least one"
                f"{example or (left_out and f'; left out: {reasons}') or ''}"
            )
        if left_out:
            count = len(demonstrations)
            reporter.line(
                f"{len(prepared)} of {count} demonstrations; left out: {reasons}{example}"
            )
        return prepared

    def _rendered(
        self,
        demonstrations: Sequence[Json | Demonstration],
        tokenizer: TransformersTokenizer,
        left_out: Counter[str],
        *,
        is_strict: bool,
    ) -> tuple[list[Demonstration], str]:
        """Convert the demonstrations to token ids; leave out those that do not suit the model.

        Args:
            demonstrations: the demonstrations.
            tokenizer: the model's tokenizer.
            left_out: reason → number of demonstrations left out, to which this method adds.
            is_strict: whether malformed demonstrations are errors; otherwise they are left out too.

        Returns:
            The demonstrations as token ids, and why one of those left out was left out ("" if none
            was).

        Raises:
            DataError: a demonstration is malformed.
        """
        prepared, example = [], ""
        for index, demo in enumerate(demonstrations):
            label = f"demonstrations[{index}]"
            ids, reason = render_or_leave_out(
                demo, tokenizer, label, self.turns, left_out, is_strict=is_strict
            )
            prepared += [] if ids is None else [ids]
            example = f" ({reason})" if reason else example
        return prepared, example

    def _work(self, demonstrations: Sequence[Demonstration]) -> str:
        """Return a hash of the demonstrations and of all settings that affect the result.

        `fit` compares it with the hash in a checkpoint, before it resumes from that checkpoint.
        """
        settings = {
            "model": str(self.model),
            "optimizer": self.optimizer,
            "lora": self.lora,
            "dtype": (self.learner or Torch()).weights_dtype(self.device, self.lora is not None),
            "order": [self.seed, self.batch_size, self.epochs],
            "weights": [self.prompt_weight, self.turns],
        }
        return hashlib.sha256(msgspec.json.encode([settings, demonstrations])).hexdigest()

    def _rows(self, demonstrations: Sequence[Demonstration]) -> list[Row]:
        """Return a row for each demonstration. The weights of all tokens of all rows sum to 1."""
        weights = [_weights(demo, self.prompt_weight) for demo in demonstrations]
        total = sum(map(sum, weights))
        return [
            training_row(
                [*demo.prompt_ids, *demo.response_ids],
                [weight > 0 for weight in row],
                [weight / total for weight in row],
                f"demonstration-{index}",
                demo.images,
            )
            for index, (demo, row) in enumerate(zip(demonstrations, weights, strict=True))
        ]


def demonstrations_from(
    episodes: Sequence[Episode],
    *,
    min_reward: float,
    optimize: str | Sequence[str] = "*",
    keep: Callable[[Episode], bool] | None = None,
) -> list[Demonstration]:
    """Return the calls of the episodes whose reward is at least `min_reward`, as demonstrations.

    A demonstration has the exact token ids of the call. So the model to fine-tune must have the
    same tokenizer as the model that sampled them. Calls are left out that have no ids, failed,
    did not reach the app, or are in a failed try of an agent (`Episode.retried`).

    Args:
        episodes: the episodes.
        min_reward: minimum reward of an episode.
        optimize: which agents' calls to return: names, or globs on agent paths.
        keep: returns whether to include an episode; None to include all.
    """
    patterns = [optimize] if isinstance(optimize, str) else list(optimize)
    demonstrations = []
    for episode in episodes:
        if episode.capture_errors or episode.reward is None or episode.reward < min_reward:
            continue
        if keep is not None and not keep(episode):
            continue
        for call in episode.calls:
            record = call.record
            is_selected = any(matches(pattern, call.agent_path) for pattern in patterns)
            is_imitable = call.outcome is CallOutcome.OK and call.key not in episode.retried
            if not is_selected or record is None or not is_imitable:
                continue
            if record.prompt and record.response:
                demonstrations.append(
                    Demonstration(
                        prompt_ids=record.prompt_ids,
                        response_ids=record.response_ids,
                        images=record.images,
                    )
                )
    return demonstrations


def _weights(demo: Demonstration, prompt_weight: float) -> list[float]:
    """Return the weight of each token in the loss.

    The weight is 1 in answers and `prompt_weight` elsewhere. It is 0 for placeholders of images,
    and for the first token, because no token before it predicts it.
    """
    weights = [0.0, *[prompt_weight] * (len(demo.prompt_ids) - 1), *[1.0] * len(demo.response_ids)]
    for image in demo.images:
        weights[image.start : image.start + image.length] = [0.0] * image.length
    for start, end in demo.earlier:
        weights[start:end] = [1.0] * (end - start)
    return weights
