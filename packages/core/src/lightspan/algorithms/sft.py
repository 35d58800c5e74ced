"""SFT: supervised fine-tuning, for a warm start or from episodes that went well."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightspan.algorithms import local_model
from lightspan.engines import ChatTokenizer
from lightspan.errors import ConfigError, DataError
from lightspan.learners import Learner, LoRA, Optimizer, SFTLoss
from lightspan.lightning.episode import Episode
from lightspan.lightning.rows import Row
from lightspan.progress import Reporter, default_reporter
from lightspan.records import CallOutcome, Json
from lightspan.routing import matches

POLICY = "policy"


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the answer to imitate, as token ids."""

    prompt_ids: list[int]
    response_ids: list[int]


class SFTResult(msgspec.Struct, frozen=True, kw_only=True):
    """What fine-tuning gave."""

    model: Path
    losses: list[float]
    """Mean loss of each update."""
    seconds: float
    """CPU-seconds of the learner."""


class SFT:
    """Imitates demonstrations.

    Args:
        model: starting weights: a folder or a hub name.
        learning_rate: of AdamW; give `optimizer` for anything else.
        batch_size: demonstrations per update.
        epochs: passes over the demonstrations.
        prompt_weight: weight of the prompt's tokens in the loss; the answer's is 1.
        max_cpu_seconds: stop after this many CPU-seconds of the learner.
        optimizer: see `lightspan.Optimizer`.
        lora: adapters instead of full weights.
        device: such as `"cuda"`.
        seed: of the order of the demonstrations.
        learner_options: further arguments of the torch learner.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        learning_rate: float | None = None,
        batch_size: int = 16,
        epochs: float = 1.0,
        prompt_weight: float = 0.0,
        max_cpu_seconds: float | None = None,
        optimizer: Optimizer | None = None,
        lora: LoRA | None = None,
        device: str = "cpu",
        seed: int = 0,
        learner_options: Mapping[str, Any] | None = None,
    ) -> None:
        if optimizer is not None and learning_rate is not None:
            raise ConfigError("give learning_rate or optimizer, not both")
        if batch_size < 1 or epochs <= 0 or not 0 <= prompt_weight <= 1:
            raise ConfigError(
                f"batch_size={batch_size} must be at least 1, epochs={epochs} above 0 and "
                f"prompt_weight={prompt_weight} between 0 and 1"
            )
        self.model = local_model(model)
        self.optimizer = optimizer or Optimizer(learning_rate=learning_rate or 1e-5)
        self.batch_size = batch_size
        self.epochs = epochs
        self.prompt_weight = prompt_weight
        self.max_cpu_seconds = max_cpu_seconds
        self.lora = lora
        self.device = device
        self.seed = seed
        self._learner_options = dict(learner_options or {})

    def fit(
        self,
        demonstrations: Sequence[Json | Demonstration],
        folder: str | Path,
        *,
        reporter: Reporter | None = None,
    ) -> SFTResult:
        """Fine-tune and write the model to `folder`.

        Args:
            demonstrations: chats (`{"messages": […], "tools": […]}` or a list of messages) whose
                last message, the assistant's, is to be imitated, or token ids.

        Raises:
            DataError: no demonstration, or one that does not end with the assistant, says nothing,
                or is longer than the model's context.
            ModelError: the model or its tokenizer cannot be used.
        """
        from lightspan.engines.chat import load_tokenizer
        from lightspan.learners.torch import TorchLearner

        tokenizer = load_tokenizer(self.model)
        prepared = [_prepared(demo, tokenizer, i) for i, demo in enumerate(demonstrations)]
        if not prepared:
            raise DataError("there is no demonstration to imitate; give at least one")
        learner = TorchLearner(
            {POLICY: self.model},
            optimizer=self.optimizer,
            lora=self.lora,
            device=self.device,
            seed=self.seed,
            **self._learner_options,
        )
        losses = self._imitate(learner, prepared, reporter or default_reporter())
        target = Path(folder)
        learner.export(POLICY, target)
        return SFTResult(model=target, losses=losses, seconds=learner.usage()["cpu_s"])

    def _imitate(
        self, learner: Learner, demonstrations: Sequence[Demonstration], reporter: Reporter
    ) -> list[float]:
        batches = list(self._batches(len(demonstrations)))
        losses: list[float] = []
        reporter.start("imitating", len(batches))
        started = time.monotonic()
        for batch in batches:
            rows = self._rows([demonstrations[index] for index in batch])
            metrics = learner.update(rows, SFTLoss())
            losses.append(metrics["loss"])
            used = learner.usage()
            speed = used["tokens"] / max(1e-3, time.monotonic() - started)
            reporter.advance(1, loss=losses[-1], tokens_per_s=speed)
            if self.max_cpu_seconds is not None and used["cpu_s"] >= self.max_cpu_seconds:
                break
        reporter.finish(f"imitated {len(demonstrations)} demonstrations, loss {losses[-1]:.3f}")
        return losses

    def _batches(self, count: int) -> list[list[int]]:
        rng = random.Random(self.seed)
        order: list[int] = []
        while len(order) < self.epochs * count:
            epoch = list(range(count))
            rng.shuffle(epoch)
            order += epoch
        order = order[: max(1, round(self.epochs * count))]
        size = self.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _rows(self, demonstrations: Sequence[Demonstration]) -> list[Row]:
        """Rows whose weights sum to 1 over the batch."""
        prompt, answer = self.prompt_weight, 1.0
        total = sum(
            prompt * (len(d.prompt_ids) - 1) + answer * len(d.response_ids) for d in demonstrations
        )
        return [
            _row(d, prompt / total, answer / total, f"demonstration-{index}")
            for index, d in enumerate(demonstrations)
        ]


def demonstrations_from(
    episodes: Sequence[Episode],
    *,
    min_reward: float,
    optimize: str | Sequence[str] = "*",
    keep: Callable[[Episode], bool] | None = None,
) -> list[Demonstration]:
    """The calls of chosen agents in episodes whose reward is at least `min_reward`, by their exact
    token ids; calls without ids, and those that failed or were not delivered, are left out.

    They are ids of the tokenizer that sampled them: imitate them with a model of the same one.
    """
    patterns = [optimize] if isinstance(optimize, str) else list(optimize)
    found = []
    for episode in episodes:
        if episode.damage or episode.reward is None or episode.reward < min_reward:
            continue
        if keep is not None and not keep(episode):
            continue
        for call in episode.calls:
            record = call.record
            chosen = any(matches(pattern, call.agent_path) for pattern in patterns)
            if not chosen or record is None or call.outcome is not CallOutcome.OK:
                continue
            if record.prompt and record.response:
                found.append(
                    Demonstration(prompt_ids=record.prompt_ids, response_ids=record.response_ids)
                )
    return found


def _prepared(demo: Json | Demonstration, tokenizer: ChatTokenizer, index: int) -> Demonstration:
    """Token ids that the learner can take."""
    found = _tokenise(demo, tokenizer, index)
    if not found.prompt_ids or not found.response_ids:
        raise DataError(f"demonstrations[{index}] needs a prompt and an answer that are not empty")
    size = len(found.prompt_ids) + len(found.response_ids)
    if size > tokenizer.context_length:
        raise DataError(
            f"demonstrations[{index}] has {size} tokens, but the model's context holds "
            f"{tokenizer.context_length}: leave it out, or shorten it"
        )
    return found


def _tokenise(demo: Json | Demonstration, tokenizer: ChatTokenizer, index: int) -> Demonstration:
    if isinstance(demo, Demonstration):
        return demo
    messages, tools = (demo, None) if isinstance(demo, list) else _chat(demo, index)
    if not messages or messages[-1].get("role") != "assistant":
        raise DataError(f"demonstrations[{index}] must end with a message of the assistant")
    prompt = tokenizer.render(messages[:-1], tools)
    whole = tokenizer.render(messages, tools, add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:
        raise DataError(
            f"demonstrations[{index}]: the chat template renders the prompt differently once the "
            "answer is there; give token ids (Demonstration) instead"
        )
    response = whole[len(prompt) :]
    ends = [place for place, token in enumerate(response) if token in tokenizer.eos_ids]
    if ends:  # what the template writes after the end of the turn is not the model's to say
        response = response[: ends[-1] + 1]
    return Demonstration(prompt_ids=prompt, response_ids=response)


def _chat(demo: Any, index: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    if not isinstance(demo, Mapping) or not isinstance(demo.get("messages"), list):
        raise DataError(f'demonstrations[{index}] must be {{"messages": […]}}, not {demo!r:.200}')
    return demo["messages"], demo.get("tools")


def _row(demo: Demonstration, prompt: float, answer: float, name: str) -> Row:
    p, r = len(demo.prompt_ids), len(demo.response_ids)
    weights = [0.0, *[prompt] * (p - 1), *[answer] * r]
    return Row(
        rollout_id=name,
        policy=POLICY,
        ids=[*demo.prompt_ids, *demo.response_ids],
        mask=[weight > 0 for weight in weights],
        advantages=[0.0] * (p + r),
        weights=weights,
        logprobs=[0.0] * (p + r),
        versions=[0] * (p + r),
        temperatures=[1.0] * (p + r),
    )
