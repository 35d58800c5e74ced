"""Read chats for fine-tuning from recorded calls that succeeded and scored well."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lightspan.algorithms.recorded_attempts import (
    Query,
    Time,
    read_attempts,
    reward_bound,
    score_of,
)
from lightspan.errors import DataError
from lightspan.lightning.episode import Call, Episode
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.genai_messages import joined_text
from lightspan.schema.records import Json, Mode
from lightspan.schema.routing import matches
from lightspan.schema.token_records import CallOutcome
from lightspan.stores import open_existing, public_url
from lightspan.stores.aio import run_sync
from lightspan.stores.protocol import Store
from lightspan_torch.engine.tokenizer import is_reference


@dataclass(slots=True)
class Chats:
    """Chats to fine-tune on, made of recorded calls."""

    chats: list[dict[str, Json]] = field(default_factory=list)
    """`{"messages": […], "tools": […]}` of each call, "tools" only if it had any. The last message
    is the answer."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason → number of calls that are not in `chats` for this reason."""
    agents: set[str] = field(default_factory=set)
    """Paths of the agents of all calls that were read."""


async def read_chats(
    store: Store, query: Query, min_reward: float | None, agents: Sequence[str]
) -> Chats:
    """Read the chats of calls that scored at least `min_reward` and that `chat_of` accepts.

    Args:
        store: an open store.
        query: which attempts of the store to read.
        min_reward: minimum score; None to include calls without a score.
        agents: names or globs on agent paths; empty for all agents.
    """
    result = Chats()
    async for _, _, episode in read_attempts(store, query):
        for call in episode.calls:
            result.agents.add(call.agent_path)
            reason = _rejection(episode, call, min_reward, agents)
            chat = None if reason else chat_of(call)
            if isinstance(chat, dict):
                result.chats.append(chat)
            else:
                result.left_out[reason or str(chat)] += 1
        if episode.late_calls:
            result.left_out["late"] += len(episode.late_calls)
    return result


def _rejection(
    episode: Episode, call: Call, min_reward: float | None, agents: Sequence[str]
) -> str:
    """Return the reason to leave a call out; "" if there is none."""
    if agents and not any(matches(pattern, call.agent_path) for pattern in agents):
        return "of other agents"
    if episode.capture_errors:
        return "of damaged attempts"
    if call.key in episode.retried:
        return "in failed tries"
    score = score_of(episode, call)
    if min_reward is None or (score is not None and score >= min_reward):
        return ""
    return "unscored" if score is None else "scored too low"


NO_ANSWER: Final = "without an answer"
"""Reason to leave out an answer for which `has_answer` is False."""


def has_answer(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a text or a tool call."""
    content = message.get("content")
    return bool(joined_text(content) or message.get("tool_calls"))


_COMPLETE: Final = ("stop", "tool_calls", "function_call", "None")
"""Finish reasons of complete answers. "None" is for servers that send no finish reason."""


def chat_of(call: Call) -> dict[str, Json] | str:
    """Convert a call to a chat that ends with the call's answer.

    Calls with several answers are not converted, because feedback does not say which it is for.

    Returns:
        The chat; or a text, the reason why the call cannot be converted.
    """
    attributes: Mapping[str, Any] = {} if call.span is None else call.span.attributes
    if call.outcome is not CallOutcome.OK:
        return f"ended with {call.outcome}"
    if attributes.get(c.KEYS_REPLACED):
        return "with keys in them, which are not kept"
    try:
        prompt, answers = (
            genai_messages.input_messages_of(attributes),
            genai_messages.output_messages_of(attributes),
        )
        tools = json.loads(str(attributes.get(c.TOOL_DEFINITIONS, "null")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "unreadable"
    if not prompt or not answers:
        return "without messages"
    if any(map(_has_media, (*prompt, *answers))):
        return "with images, sounds or files, of which references are kept"
    if len(answers) > 1:
        return "with several answers"
    if str(call.finish) not in _COMPLETE:
        return "cut off"
    if not has_answer(answers[0]):
        return NO_ANSWER
    return {"messages": [*prompt, answers[0]], **({} if tools is None else {"tools": tools})}


def _has_media(message: Mapping[str, Any]) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and any(is_reference(part) for part in parts)


def load_chats(
    store: str | os.PathLike[str],
    *,
    min_reward: float | None = None,
    service: str | None = None,
    agents: str | Sequence[str] = (),
    since: Time | None = None,
    until: Time | None = None,
) -> Chats:
    """Open a store, and read the chats of its calls that scored well (see `read_chats`).

    Args:
        store: URL of the store.
        min_reward: minimum score; None to include calls without a score.
        service: read only calls of this service; None for all services.
        agents: names or globs on agent paths; empty for all agents.
        since: read only attempts that began at this time or later; None for no limit.
        until: read only attempts that began before this time; None for no limit.

    Raises:
        ConfigError: an argument is invalid.
        DataError: the store has rollouts of a training and none of production.
    """
    query, min_reward = Query.of(service, since, until), reward_bound("min_reward", min_reward)
    patterns = [agents] if isinstance(agents, str) else list(agents)

    async def read() -> Chats:
        async with open_existing(store) as opened:
            chats = await read_chats(opened, query, min_reward, patterns)
            if chats.agents or await opened.rollouts(mode=Mode.PRODUCTION):
                return chats
            if await opened.rollouts():
                raise DataError(
                    f"store {public_url(store)} is that of a training, and has no call of "
                    "production (lightspan.record): write the calls of the run to a file, "
                    "lightspan export RUN messages -o chats.jsonl, and pass it to fit"
                )
            return chats

    return run_sync(read())
