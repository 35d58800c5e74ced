"""Read the calls of a store that have a verdict: their prompts, answers and scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lightspan.algorithms.recorded_attempts import (
    CHUNK_SIZE,
    Query,
    chat_of,
    has_answer,
    is_of,
    read_attempts,
    score_of,
)
from lightspan.errors import ConfigError
from lightspan.lightning.answers import answer_message
from lightspan.lightning.episode import Call, Episode, build_episode
from lightspan.lightning.rollout_checks import app_failed
from lightspan.progress import plural
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import joined_text
from lightspan.schema.images import Image, with_data
from lightspan.schema.records import Mode
from lightspan.schema.token_records import CallOutcome, FinishReason, TokenRecord
from lightspan.stores import open_existing
from lightspan.stores.aio import run_sync
from lightspan.stores.protocol import Store
from lightspan_torch.sft.chat_dataset import images_of
from lightspan_torch.sft.rendering import Demonstration

CUT_OFF: Final = "cut off"
"""Reason of `chat_of` to leave out an answer that is not complete."""
CORRECTED: Final = math.inf
"""Score of a correction, which ranks above all answers to its prompt."""
SEVERAL_CALLS: Final = "corrections of attempts with several calls"
NO_CHOSEN_CALL: Final = "corrections of attempts without a call of the chosen agents"
_ID_SIZE: Final = 4
"""Size of a token id and of a log-probability in a token record, in bytes."""


@dataclass(frozen=True, slots=True)
class RatedCall:
    """An answer with a score."""

    answer: Any
    """The prompt and the answer: `Demonstration` with the exact token ids, or a chat."""
    score: float
    is_cut: bool = False
    """Whether the answer of the chat was cut off by the limit of tokens, so that it has no end."""
    policy: str = ""
    """The policy that sampled the token ids; empty for a chat, or a frozen endpoint."""
    text: str = ""
    """A text that the decoded token ids contain; empty if none was recorded."""


@dataclass(slots=True)
class RatedCalls:
    """The rated answers of a store."""

    calls: list[RatedCall] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason → number of calls that are not in `calls`."""
    agents: set[str] = field(default_factory=set)
    """Paths of the agents of all calls that were read."""


def load_rated_calls(
    url: str, query: Query, agents: Sequence[str], run: str | None = None
) -> RatedCalls:
    """Read the rated calls of a store: those of production, or if there are none, of trainings.

    The score of a call is the feedback or reward on it, else the feedback or reward of its attempt.
    Corrections are further answers. Calls of trainings have exact token ids and the rewards of
    their rollouts; evaluations are not read.

    Args:
        url: URL of the store.
        query: which attempts to read.
        agents: names or globs on agent paths; empty for all agents.
        run: id of the training to read; None for production, or the store's only training.

    Raises:
        ConfigError: the store does not exist, or has no such training, or has several and `run` is
            None.
    """

    async def read() -> RatedCalls:
        result = RatedCalls()
        async with open_existing(url, read_only=True) as store:
            async for episode in _episodes(store, query, run):
                _add(episode, agents, result, await images_of(store, episode))
        return result

    return run_sync(read())


async def _episodes(store: Store, query: Query, run: str | None) -> AsyncIterator[Episode]:
    """Yield the episodes of production, or if the store has none, those of its training."""
    if run is None:
        async for _, _, episode in read_attempts(store, query):
            yield episode
        # not those of a training because no attempt of production began in the chosen time
        page = await store.summaries(mode=Mode.PRODUCTION, limit=1)
        if page.rows or query.service is not None:
            return
    await _check_run(store, query, run)
    states = await store.rollouts(mode=Mode.TRAIN, run_id=run)
    for start in range(0, len(states), CHUNK_SIZE):
        chunk = {state.rollout.rollout_id: state for state in states[start : start + CHUNK_SIZE]}
        attempts = [a for a in await store.attempts(list(chunk)) if query.matches(a)]
        ids = [attempt.attempt_id for attempt in attempts]
        spans, records = await store.spans(ids), await store.token_records(ids)
        for attempt in attempts:
            rollout, key = chunk[attempt.rollout_id].rollout, attempt.attempt_id
            yield build_episode(attempt, rollout, spans.get(key, []), records.get(key, []))


async def _check_run(store: Store, query: Query, run: str | None) -> None:
    """Raise `ConfigError` if a training is to be chosen, or the chosen one is missing.

    Trainings may be of different models, whose token ids mean different texts.
    """
    rows = (await store.summaries(mode=Mode.TRAIN)).rows
    sizes = Counter(row.run_id for row in rows if query.matches(row))
    runs = ", ".join(f"{name!r} ({plural(count, 'rollout')})" for name, count in sizes.items())
    if run is None and len(sizes) > 1:
        raise ConfigError(
            f"store {store.url} has the rollouts of {len(sizes)} trainings: {runs}. Choose one by "
            "run=, because the token ids of another model mean other texts"
        )
    if run is not None and run not in {row.run_id for row in rows}:
        raise ConfigError(f"run={run!r}: store {store.url} has the trainings {runs or 'of none'}")


def _add(
    episode: Episode, agents: Sequence[str], result: RatedCalls, images: Mapping[str, Image] = {}
) -> None:
    """Add the rated calls of an episode to `result`, and count the others.

    Args:
        episode: the episode.
        agents: names or globs on agent paths; empty for all agents.
        result: the calls, to which this function adds.
        images: digest → image, for the images of the episode's calls.
    """
    corrections = {
        span.attributes.get(c.REWARD_CALL_ID): str(span.attributes[c.FEEDBACK_CORRECTION])
        for span in episode.spans
        if c.is_feedback(span) and c.FEEDBACK_CORRECTION in span.attributes
    }
    selected = []
    for call in episode.calls:
        result.agents.add(call.agent_path)
        if is_of(call, agents):
            selected.append(call)
        else:
            result.left_out["of other agents"] += 1
    if None in corrections:  # a correction of the whole attempt is of its only call
        text = corrections.pop(None)
        if len(selected) == 1:
            corrections.setdefault(selected[0].call_id, text)
        else:
            result.left_out[SEVERAL_CALLS if selected else NO_CHOSEN_CALL] += 1
    for call in selected:
        answer, rejection = _answer_of(episode, call, images)
        is_cut = rejection == CUT_OFF and _is_cut(answer["messages"], call)
        score = score_of(episode, call)
        if score is None or (rejection and not is_cut):
            # as SFT, which looks at the score last
            result.left_out[rejection if rejection and not is_cut else "unscored"] += 1
            continue
        policy = "" if call.record is None else call.record.policy
        text = "" if call.record is None else _text_of(call)
        result.calls.append(RatedCall(answer, score, is_cut, policy, text))
        if call.call_id in corrections and not isinstance(answer, Demonstration):
            correction = {"role": "assistant", "content": corrections[call.call_id]}
            chat = {**answer, "messages": [*answer["messages"][:-1], correction]}
            result.calls.append(RatedCall(chat, CORRECTED))
    result.left_out["late"] += len(episode.late_calls)


def _answer_of(episode: Episode, call: Call, images: Mapping[str, Image]) -> tuple[Any, str]:
    """Return the prompt and the answer of a call, and why it must not be learned from ("": it may).

    They are exact token ids if the call has a token record, else a chat.
    """
    record = call.record
    if record is None:
        chat = chat_of(episode, call, images)
        tools = {} if chat.tools is None else {"tools": chat.tools}
        return {"messages": chat.messages, **tools}, chat.rejection
    prompt_images = with_data(record.images, images)
    checks = {
        "of attempts that did not end by themselves": not episode.finished,
        "of damaged attempts": bool(episode.capture_errors),
        "of rollouts whose app failed": app_failed(episode),
        "in failed tries": call.key in episode.retried,
        f"ended with {call.outcome}": call.outcome is not CallOutcome.OK,
        "that the app broke off": record.finish_reason is FinishReason.CANCELLED,
        "with damaged token records": not _is_whole(record),
        "whose images are not kept": prompt_images is None,
    }
    rejection = next((reason for reason, holds in checks.items() if holds), "")
    if rejection or prompt_images is None:
        return None, rejection
    return Demonstration(
        prompt_ids=record.prompt_ids, response_ids=record.response_ids, images=prompt_images
    ), ""


def _text_of(call: Call) -> str:
    """Return a text of the recorded answer: its content, or else the name of a tool that it calls.

    Empty if neither was recorded.
    """
    try:
        message = answer_message(call) or {}
        names = [each["function"]["name"] for each in message.get("tool_calls") or []]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    return joined_text(message.get("content")) or next(map(str, names), "")


def _is_cut(messages: Sequence[Mapping[str, Any]], call: Call) -> bool:
    """Return whether an answer is a text that the limit of tokens cut off, and nothing else.

    SFT must not imitate it. A verdict on it is as good as on others, because the app got it so.
    """
    *prompt, answer = messages
    is_text = has_answer(answer) and not answer.get("tool_calls")
    return is_text and call.finish == "length" and prompt[-1]["role"] != "assistant"


def _is_whole(record: TokenRecord) -> bool:
    """Return whether a token record has a prompt, a response and a log-probability per token."""
    sizes = len(record.prompt), len(record.response), len(record.logprob_data)
    return all(sizes) and sizes[1] == sizes[2] and not any(size % _ID_SIZE for size in sizes)
