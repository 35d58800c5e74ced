"""Judge: a language model that scores rollouts by a rubric."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import msgspec

from lightspan.errors import BudgetError, ConfigError, EngineError
from lightspan.progress import plural
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json
from lightspan.schema.redaction import bounded_text
from lightspan.schema.validation import check_choice, check_number, check_whole
from lightspan.training.jsonl_log import append, read
from lightspan.training.rewards import (
    JOURNAL,
    Member,
    Scored,
    Scoring,
    ScoringPosition,
    check_reward_name,
)
from lightspan_prompts.endpoint_client import LONG_WAIT_S, EndpointClient
from lightspan_prompts.judge_prompts import LETTERS, Ballot, ballots, comment, scores
from lightspan_prompts.search.validation import check_installed, check_reflection
from lightspan_prompts.transcript import task_text, transcript, without_keys

MAX_REASON_LENGTH: Final = 200
"""Maximum characters of the reason why a request failed."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Score rollouts by a language model and a rubric: `Trainer(reward=Judge(…))`.

    The rollouts of a group are compared with each other.

    The model sees the task and the part of each rollout that `show` selects. It gives scores from 0
    to 10, which are rewards of 0 to 1. Its calls belong to the trainer: they are in no attempt and
    are neither trained on nor counted as the app's. A rollout without a score is unscored, which
    differs from 0. Equal transcripts are scored once.

    Args:
        rubric: what is good and what is bad, in words.
        llm: the endpoint. Its `sampling` is part of each request.
        together: maximum rollouts of a group per request; 1 judges each alone. Rollouts of
            evaluations are alone in their group, so they are judged alone.
        orders: number of orders in which a group is shown; a rollout's score is the mean. The first
            is shuffled, the second is its reverse, so that a linear position bias cancels.
        show: the whole `"conversation"` (messages, answers, tool results, the app's `emit_message`)
            or only the last `"answer"`.
        images: maximum number of images of the rollouts per request, for a model that takes
            images. With 0 they are named by their digests.
        name: name of the reward in the run's folder.
        concurrency: maximum concurrent requests.
        max_calls: maximum requests of the run, across restarts.
        max_tokens: maximum tokens of the run by the endpoint's count, across restarts. Checked
            before each request, so requests in flight may exceed it.
        timeout_s: seconds per request.
        patience_s: total seconds of waiting on rate limits (429) per request.
        seed: seed of the orders.

    Raises:
        ConfigError: an option is invalid.
        ModuleNotFoundError: the OpenAI SDK is missing.
    """

    rubric: str = field(kw_only=False)
    llm: LLM = field(kw_only=False)
    together: int = 8
    orders: int = 2
    show: Literal["conversation", "answer"] = "conversation"
    images: int = 0
    name: str = "judge"
    concurrency: int = 8
    max_calls: int | None = None
    max_tokens: int | None = None
    timeout_s: float = 300.0
    patience_s: float = 1800.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rubric, str) or not self.rubric.strip():
            raise ConfigError(f"rubric={self.rubric!r:.40}: describe in words what is good")
        check_installed("Judge", ["openai"])
        check_reflection("llm", self.llm)
        check_whole("together", self.together, 1)
        if self.together > len(LETTERS):
            raise ConfigError(f"together={self.together} must be at most {len(LETTERS)}")
        for name in ("orders", "concurrency"):
            check_whole(name, getattr(self, name), 1)
        for name in ("max_calls", "max_tokens"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_whole("images", self.images, 0)
        check_choice("show", self.show, ("conversation", "answer"))
        check_number("timeout_s", self.timeout_s, above=0)
        check_number("patience_s", self.patience_s, low=0)
        check_reward_name(self.name)

    def config(self) -> dict[str, Json]:
        """Return the options that determine rewards, so without the address and the budgets."""
        names = ("name", "rubric", "together", "orders", "show", "seed")
        model = {"model": self.llm.model, "sampling": dict(self.llm.sampling)}
        shown = {"images": self.images} if self.images else {}
        return {**{name: getattr(self, name) for name in names}, **shown, **model}

    @asynccontextmanager
    async def opened(self, place: ScoringPosition) -> AsyncIterator[Scoring]:
        """Open the judge for a run (see `Scorer`).

        Raises:
            ConfigError: the API key is not set, or the log of earlier answers cannot be read.
        """
        async with aclosing(_OpenJudge(self, place)) as scoring:
            yield scoring


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A request and its answer, a line of the judge's log."""

    key: str
    asked: str
    answer: str
    finish_reason: str
    input_tokens: int
    output_tokens: int


class _OpenJudge:
    """A judge that is open for a run; implements `Scoring`."""

    def __init__(self, judge: Judge, place: ScoringPosition) -> None:
        self._judge = judge
        self._place = place
        self._path = None
        if place.folder is not None:
            self._path = place.folder / JOURNAL / f"{judge.name}.jsonl"
        judgements = [] if self._path is None else read(self._path, Judgement)
        self._judgements = {judgement.key: judgement for judgement in judgements}
        self._earlier = set(self._judgements)
        """Keys of answers of an earlier process; unusable ones are asked for again."""
        self._calls = len(judgements)
        self._tokens = sum(one.input_tokens + one.output_tokens for one in judgements)
        self._next_note = 0.0
        self._model = EndpointClient(
            judge.llm,
            timeout_s=judge.timeout_s,
            patience_s=judge.patience_s,
            note=self._note_seldom,
            role="judge",
            images=place.images,
            max_images=judge.images,
        )

    async def aclose(self) -> None:
        await self._model.aclose()

    def spent(self) -> Mapping[str, float]:
        return {"calls": self._calls, "tokens": self._tokens}

    async def score(self, groups: Sequence[Sequence[Member]]) -> list[list[Scored]]:
        whole = self._judge.show == "conversation"
        shown = [[transcript(one.episode, whole=whole) for one in group] for group in groups]
        requests = [self._ballots(group, texts) for group, texts in zip(groups, shown, strict=True)]
        answers = await self._answers([ballot for of_group in requests for ballot in of_group])
        return [
            [_scored(text, of_group, answers) for text in texts]
            for texts, of_group in zip(shown, requests, strict=True)
        ]

    def _ballots(self, group: Sequence[Member], texts: Sequence[str]) -> list[Ballot]:
        judge = self._judge
        return ballots(
            judge.rubric,
            task_text(group[0].task),
            texts,
            together=judge.together,
            orders=judge.orders,
            seed=judge.seed,
        )

    async def _answers(self, requests: Sequence[Ballot]) -> dict[str, _Answer]:
        """Return the answer to each request, from the log or the endpoint."""
        keys = {ballot.prompt: _key(self._judge, ballot.prompt) for ballot in requests}
        for ballot in requests:
            key = keys[ballot.prompt]
            if key in self._earlier and self._is_unusable(ballot, self._judgements[key]):
                del self._judgements[key]
        self._earlier -= set(keys.values())
        fresh = [text for text, key in keys.items() if key not in self._judgements]
        was_answered = bool(self._judgements)
        self._check_calls(len(fresh))
        turns = asyncio.Semaphore(self._judge.concurrency)
        failed: dict[str, str] = {}
        skipped: list[str] = []

        async def ask(text: str) -> None:
            async with turns:
                if self._has_spent_tokens:  # requests in flight are paid for and may end
                    skipped.append(text)
                    return
                why = await self._ask(keys[text], text)
                if why is not None:
                    failed[text] = why

        async with asyncio.TaskGroup() as tasks:
            for text in fresh:
                tasks.create_task(ask(text))
        if skipped:
            raise self._spent(f"max_tokens={self._judge.max_tokens} is reached")
        if fresh and len(failed) == len(fresh) and not was_answered:
            raise EngineError(f"the judge's first requests all failed: {failed[fresh[0]]}")
        results: dict[str, _Answer] = {}
        for ballot in requests:
            judgement = self._judgements.get(keys[ballot.prompt])
            if judgement is None:
                results[ballot.prompt] = _Answer([failed[ballot.prompt]] * len(ballot.shown), "")
            else:
                values = scores(ballot, judgement.answer, judgement.finish_reason)
                results[ballot.prompt] = _Answer(values, comment(judgement.answer))
        return results

    @staticmethod
    def _is_unusable(ballot: Ballot, judgement: Judgement) -> bool:
        values = scores(ballot, judgement.answer, judgement.finish_reason)
        return any(isinstance(value, str) for value in values)

    async def _ask(self, key: str, text: str) -> str | None:
        """Send the request `text` and log the answer under `key`.

        Return None if there is an answer, or else the reason why there is none.

        Raises:
            EngineError: the request failed for a reason that would make every request fail.
        """
        try:
            answer = await self._model.ask(text)
        except EngineError as error:
            if _is_permanent(error):
                raise
            return bounded_text(str(error), MAX_REASON_LENGTH)
        judgement = Judgement(
            key=key,
            asked=text,
            answer=without_keys(answer.text),
            finish_reason=answer.finish_reason,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
        )
        if self._path is not None and self._place.keeps:
            append(self._path, [judgement])
        self._judgements[key] = judgement
        self._calls += 1
        self._tokens += answer.input_tokens + answer.output_tokens
        return None

    def _check_calls(self, count: int) -> None:
        most = self._judge.max_calls
        if count and most is not None and self._calls + count > most:
            raise self._spent(f"{plural(count, 'question')} more would exceed max_calls={most}")

    @property
    def _has_spent_tokens(self) -> bool:
        most = self._judge.max_tokens
        return most is not None and self._tokens >= most

    def _spent(self, why: str) -> BudgetError:
        return BudgetError(
            f"the judge has answered {plural(self._calls, 'question')} ({self._tokens:,} tokens), "
            f"and {why}; the progress so far is saved: continue with resume=True (--resume) and a "
            "larger budget"
        )

    def _note_seldom(self, text: str) -> None:
        """Print a message unless one was printed a few seconds ago.

        Many concurrent requests may wait for the same rate limit, and one message is enough.
        """
        if time.monotonic() >= self._next_note:
            self._next_note = time.monotonic() + LONG_WAIT_S
            self._place.note(text)


class _Answer(NamedTuple):
    """The judge's scores and comment in answer to one request (a ballot).

    `scores` has an entry per transcript in the request: the score, or a text that says why there is
    none. `comment` is about all of these transcripts.
    """

    scores: list[float | str]
    comment: str


def _scored(
    text: str, ballots_of_group: Sequence[Ballot], answers: Mapping[str, _Answer]
) -> Scored:
    """Return the mean of the scores that a transcript got in several requests (ballots).

    The transcript has no score at all if one of these requests gave none. The requests show the
    transcripts in different orders, and the mean is fair only over all orders.
    """
    showing = [ballot for ballot in ballots_of_group if text in ballot.shown]
    values = [answers[ballot.prompt].scores[ballot.shown.index(text)] for ballot in showing]
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return Scored(why=next(value for value in values if isinstance(value, str)))
    reasons = [_reasons(text, ballot, answers[ballot.prompt].comment) for ballot in showing]
    return Scored(value=math.fsum(numbers) / len(numbers), reasons="\n".join(filter(None, reasons)))


def _reasons(text: str, ballot: Ballot, remark: str) -> str:
    """Return the judge's comment on a transcript.

    If several transcripts were compared, the comment begins with the letter of this transcript.
    """
    if not remark or len(ballot.shown) == 1:
        return remark
    letter = LETTERS[ballot.shown.index(text)]
    return f"(named {letter}, compared with {len(ballot.shown) - 1} others) {remark}"


def _key(judge: Judge, prompt: str) -> str:
    """Return the key under which a request and its answer are logged."""
    shown = [judge.images] if judge.images else []
    asked = [judge.llm.model, judge.llm.sampling, prompt, *shown]
    data = msgspec.json.encode(asked, order="sorted")
    return hashlib.sha256(data).hexdigest()[:24]


def _is_permanent(error: EngineError) -> bool:
    """Return whether a request failed for a reason that would make every further request fail.

    Such reasons are a wrong key, a wrong address, and a rate limit that lasted too long.
    """
    import openai

    return isinstance(
        error.__cause__,
        openai.AuthenticationError
        | openai.PermissionDeniedError
        | openai.NotFoundError
        | openai.RateLimitError,
    )
