"""Judge: a language model that scores what rollouts did, by a rubric."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final, Literal, NamedTuple

import msgspec

from lightspan.errors import (
    BudgetError,
    ConfigError,
    EngineError,
    how_to_install,
)
from lightspan.lightning.transcript import task_text, transcript, without_keys
from lightspan.progress import plural
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json
from lightspan.schema.redaction import bounded_text
from lightspan.schema.validation import check_choice, check_number, check_url, check_whole
from lightspan.training.jsonl_log import append, read
from lightspan.training.rewards import OWN, Member, Scored, Scoring, ScoringPosition
from lightspan_prompts.endpoint_client import EndpointClient
from lightspan_prompts.judge_prompts import LETTERS, Ballot, ballots, scores, words

JOURNAL: Final = "journal"
"""The folder in the run's."""
_NAME: Final = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)
_OF_A_SEARCH: Final = re.compile(r"(?:gepa|apo)$|step-")
MAX_WHY_LENGTH: Final = 200
"""Characters of why a question has no answer."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Scores rollouts by a rubric, those of a group against each other: `Trainer(reward=Judge(…))`.

    The model sees the task, and of each rollout what `show` says. It gives scores from 0 to 10,
    which are rewards of 0 to 1. Its calls are the trainer's: no attempt has them, and none is
    trained or counted as the app's. A rollout that it gives no score is unscored, which is not 0.
    Rollouts that say the same are asked about once.

    Args:
        rubric: what is good and what is bad, in words.
        llm: the endpoint. Its `sampling` goes into each question.
        together: how many rollouts of a group one question shows at most; 1: each alone. Those of
            evaluations are alone in their group, so they are judged alone.
        orders: in how many orders a group is shown; a rollout's score is their mean. The first is
            shuffled and the second its reverse: what the judge adds by place cancels if it grows
            evenly from the first to the last.
        show: the whole `"conversation"` (messages, answers, tool results, what the app says with
            `emit_message`), or the last `"answer"` alone.
        name: of the reward in the run's folder.
        concurrency: questions at once.
        max_calls: questions, at most, over all lives of the run.
        max_tokens: that the endpoint counts, over all lives of the run. It is looked at before each
            question, so that those under way may exceed it.
        timeout_s: of one question.
        patience_s: how long a question is put off in all by an endpoint that is busy (429).
        seed: of the orders.

    Raises:
        ConfigError: an option that cannot be honoured.
        ModuleNotFoundError: the OpenAI SDK is missing.
    """

    rubric: str = field(kw_only=False)
    llm: LLM = field(kw_only=False)
    together: int = 8
    orders: int = 2
    show: Literal["conversation", "answer"] = "conversation"
    name: str = "judge"
    concurrency: int = 8
    max_calls: int | None = None
    max_tokens: int | None = None
    timeout_s: float = 300.0
    patience_s: float = 1800.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rubric, str) or not self.rubric.strip():
            raise ConfigError(f"rubric={self.rubric!r:.40}: say in words what is good")
        if not isinstance(self.llm, LLM):
            raise ConfigError(f"llm={self.llm!r:.100}: use LLM(base_url=…, model=…)")
        if find_spec("openai") is None:
            raise ModuleNotFoundError(
                f"Judge needs 'openai': {how_to_install('prompts')}", name="openai"
            )
        check_url(self.llm.base_url, "the judge's base URL")
        _ = self.llm.api_key  # raises before any rollout
        check_whole("together", self.together, 1)
        if self.together > len(LETTERS):
            raise ConfigError(f"together={self.together} must be at most {len(LETTERS)}")
        for name in ("orders", "concurrency"):
            check_whole(name, getattr(self, name), 1)
        for name in ("max_calls", "max_tokens"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_choice("show", self.show, ("conversation", "answer"))
        check_number("timeout_s", self.timeout_s, above=0)
        check_number("patience_s", self.patience_s, low=0)
        check_name(self.name)

    def config(self) -> dict[str, Json]:
        """What decides the rewards; the endpoint's address and the budgets do not."""
        names = ("name", "rubric", "together", "orders", "show", "seed")
        asked = {"model": self.llm.model, "sampling": dict(self.llm.sampling)}
        return {**{name: getattr(self, name) for name in names}, **asked}

    @asynccontextmanager
    async def opened(self, place: ScoringPosition) -> AsyncIterator[Scoring]:
        """See `Scorer`.

        Raises:
            ConfigError: the key is not set, or what it answered before cannot be read.
        """
        bench = _Bench(self, place)
        try:
            yield bench
        finally:
            await bench.close()


def check_name(name: str) -> None:
    """Raise `ConfigError` unless a reward can be called so: it names a file."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or name == OWN:
        raise ConfigError(
            f"name={name!r}: a reward is called by letters, digits, - and _, and not {OWN!r}, "
            "which is the app's own"
        )
    if _OF_A_SEARCH.match(name):
        raise ConfigError(
            f"name={name!r}: a search for prompts keeps what is called so in the run's "
            f"{JOURNAL}: use another name"
        )


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What the judge was asked and answered: a line of its journal."""

    key: str
    asked: str
    answer: str
    finish_reason: str
    input_tokens: int
    output_tokens: int


class _Bench:
    """A judge at work."""

    def __init__(self, judge: Judge, place: ScoringPosition) -> None:
        self._judge = judge
        self._place = place
        self._path = None
        if place.folder is not None:
            self._path = place.folder / JOURNAL / f"{judge.name}.jsonl"
        known = [] if self._path is None else read(self._path, Judgement)
        self._known = {each.key: each for each in known}
        self._calls = len(known)
        self._tokens = sum(each.input_tokens + each.output_tokens for each in known)
        self._before = (self._calls, self._tokens)
        self._is_busy_told = False
        self._model = EndpointClient(
            judge.llm,
            timeout_s=judge.timeout_s,
            patience_s=judge.patience_s,
            note=self._busy,
            role="judge",
        )

    async def close(self) -> None:
        await self._model.close()

    def spent(self) -> Mapping[str, float]:
        """See `Scoring`."""
        calls, tokens = self._calls - self._before[0], self._tokens - self._before[1]
        return {"calls": calls, "tokens": tokens}

    async def score(self, groups: Sequence[Sequence[Member]]) -> list[list[Scored]]:
        """See `Scoring`."""
        shown = [[self._shown(member) for member in group] for group in groups]
        asked = [self._ballots(group, texts) for group, texts in zip(groups, shown, strict=True)]
        answers = await self._answers([ballot for of_group in asked for ballot in of_group])
        return [
            [_scored(text, of_group, answers) for text in texts]
            for texts, of_group in zip(shown, asked, strict=True)
        ]

    def _shown(self, member: Member) -> str:
        return transcript(member.episode, whole=self._judge.show == "conversation")

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

    async def _answers(self, asked: Sequence[Ballot]) -> dict[str, _Answer]:
        """What each question was answered, by its text: what is known, and what is asked now."""
        keys = {ballot.asked: _key(self._judge.llm, ballot.asked) for ballot in asked}
        fresh = [text for text, key in keys.items() if key not in self._known]
        was_answered = bool(self._known)
        self._check_calls(len(fresh))
        turns = asyncio.Semaphore(self._judge.concurrency)
        failed: dict[str, str] = {}
        left: list[str] = []

        async def ask(text: str) -> None:
            async with turns:
                if self._has_spent_tokens:  # those under way are paid for: let them end
                    left.append(text)
                    return
                why = await self._ask(keys[text], text)
                if why is not None:
                    failed[text] = why

        async with asyncio.TaskGroup() as tasks:
            for text in fresh:
                tasks.create_task(ask(text))
        if left:
            raise self._spent(f"max_tokens={self._judge.max_tokens} is reached")
        if fresh and len(failed) == len(fresh) and not was_answered:
            raise EngineError(f"the judge has answered nothing yet: {failed[fresh[0]]}")
        found: dict[str, _Answer] = {}
        for ballot in asked:
            known = self._known.get(keys[ballot.asked])
            if known is None:
                found[ballot.asked] = _Answer([failed[ballot.asked]] * len(ballot.shown), "")
            else:
                given = scores(ballot, known.answer, known.finish_reason)
                found[ballot.asked] = _Answer(given, words(known.answer))
        return found

    async def _ask(self, key: str, text: str) -> str | None:
        """Ask, and keep the answer; why there is none.

        Raises:
            EngineError: there never will be.
        """
        try:
            answer = await self._model.ask(text)
        except EngineError as error:
            if _lasts(error):
                raise
            return bounded_text(str(error), MAX_WHY_LENGTH)
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
        self._known[key] = judgement
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
            f"and {why}; what was learned is kept: go on with resume=True (--resume) and a larger "
            "budget"
        )

    def _busy(self, text: str) -> None:
        """Told once: many questions wait at a time."""
        if not self._is_busy_told:
            self._is_busy_told = True
            self._place.note(text)


class _Answer(NamedTuple):
    """Of a ballot: the score of each that is shown, or why there is none; and what else it says."""

    scores: list[float | str]
    words: str


def _scored(text: str, asked: Sequence[Ballot], answers: Mapping[str, _Answer]) -> Scored:
    """The mean of a transcript's scores; none where one is missing: what is added by place would
    not cancel."""
    about = [ballot for ballot in asked if text in ballot.shown]
    given = [answers[ballot.asked].scores[ballot.shown.index(text)] for ballot in about]
    values = [each for each in given if not isinstance(each, str)]
    if len(values) < len(given):
        return Scored(why=next(each for each in given if isinstance(each, str)))
    reasons = [_reasons(text, ballot, answers[ballot.asked].words) for ballot in about]
    return Scored(value=math.fsum(values) / len(values), reasons="\n".join(filter(None, reasons)))


def _reasons(text: str, ballot: Ballot, said: str) -> str:
    """What was said of a transcript; of several that were compared, how it was called there."""
    if not said or len(ballot.shown) == 1:
        return said
    return f"(called {LETTERS[ballot.shown.index(text)]} beside {len(ballot.shown) - 1}) {said}"


def _key(llm: LLM, asked: str) -> str:
    """What is asked of which model, as a name."""
    said = msgspec.json.encode([llm.model, llm.sampling, asked], order="sorted")
    return hashlib.sha256(said).hexdigest()[:24]


def _lasts(error: EngineError) -> bool:
    """Whether every question would fail so, or was put off for too long."""
    import openai

    return isinstance(
        error.__cause__,
        openai.AuthenticationError
        | openai.PermissionDeniedError
        | openai.NotFoundError
        | openai.RateLimitError,
    )
