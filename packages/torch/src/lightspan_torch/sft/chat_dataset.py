"""Read chats for fine-tuning from recorded calls that succeeded and scored well."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightspan.algorithms.recorded_attempts import (
    Query,
    Time,
    chat_of,
    is_of,
    read_attempts,
    reward_bound,
    score_of,
)
from lightspan.errors import DataError
from lightspan.lightning.episode import Episode
from lightspan.lightning.selection import unknown_agents
from lightspan.progress import Reporter
from lightspan.schema.images import Image
from lightspan.schema.media import digests_in
from lightspan.schema.records import Json, Mode
from lightspan.schema.routing import matches
from lightspan.stores import open_existing, public_url
from lightspan.stores.aio import run_sync
from lightspan.stores.protocol import Store


@dataclass(slots=True)
class Chats:
    """Chats to fine-tune on, made of recorded calls."""

    chats: list[dict[str, Json]] = field(default_factory=list)
    """`{"messages": […], "tools": […]}` of each call, "tools" only if it had any. The last message
    is the answer."""
    scores: list[float | None] = field(default_factory=list)
    """The score of each of these calls; None if it has none."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason → number of calls that are not in `chats` for this reason."""
    agents: set[str] = field(default_factory=set)
    """Paths of the agents of all calls that were read."""


def report_unmatched(
    agents: str | Sequence[str], paths: Collection[str], reporter: Reporter
) -> None:
    """Report the patterns of agents that match no agent of a store.

    Args:
        agents: names or globs on agent paths.
        paths: paths of the agents of all calls that were read; nothing is reported if there are
            none.
        reporter: reports the patterns.
    """
    patterns = [agents] if isinstance(agents, str) else agents
    unmatched = [p for p in patterns if not any(matches(p, path) for path in paths)]
    if unmatched and paths:
        reporter.line(f"agents=: {unknown_agents(unmatched, sorted(paths))}")


def nothing_to_imitate(
    store: str | os.PathLike[str], options: Mapping[str, Any], left_out: Counter[str]
) -> DataError:
    """Return the error for a store without a call to imitate.

    Args:
        store: URL of the store.
        options: the options that select calls.
        left_out: reason → number of calls that were left out.
    """
    return DataError(
        f"store {public_url(store)} has no call to imitate with "
        f"{described(options) or 'these settings'}; left out: {counted(left_out)}"
    )


def described(options: Mapping[str, Any]) -> str:
    """Return the options that were set, as source code: `min_reward=0.5, service='sql'`."""
    return ", ".join(f"{k}={v!r}" for k, v in options.items() if v is not None and v != ())


def counted(left_out: Counter[str]) -> str:
    """Return the numbers of calls that were left out as text: `2 unscored, 1 cut off`."""
    return ", ".join(f"{n} {reason}" for reason, n in left_out.most_common()) or "no call"


async def images_of(store: Store, episode: Episode) -> dict[str, Image]:
    """Return the images of an episode's calls that the store has: digest → image."""
    digests = set[str]()
    for call in episode.calls:
        if call.span is not None:
            digests |= digests_in(call.span.attributes)
        if call.record is not None:
            digests.update(image.digest for image in call.record.images)
    return await store.images(sorted(digests)) if digests else {}


async def read_chats(
    store: Store, query: Query, min_reward: float | None, agents: Sequence[str]
) -> Chats:
    """Read the chats of calls that scored at least `min_reward` and that may be imitated.

    Args:
        store: an open store.
        query: which attempts of the store to read.
        min_reward: minimum score; None to include calls without a score.
        agents: names or globs on agent paths; empty for all agents.
    """
    result = Chats()
    async for _, _, episode in read_attempts(store, query):
        files = await images_of(store, episode)
        for call in episode.calls:
            result.agents.add(call.agent_path)
            if not is_of(call, agents):
                result.left_out["of other agents"] += 1
                continue
            chat, score = chat_of(episode, call, files), score_of(episode, call)
            # the score last, so that `min_reward` changes no other reason
            if reason := chat.rejection or _low(score, min_reward):
                result.left_out[reason] += 1
                continue
            result.scores.append(score)
            tools = {} if chat.tools is None else {"tools": chat.tools}
            result.chats.append({"messages": chat.messages, **tools})
        if episode.late_calls:
            result.left_out["late"] += len(episode.late_calls)
    return result


def _low(score: float | None, min_reward: float | None) -> str:
    """Return the reason to leave out a call with this score; "" if there is none."""
    if min_reward is None or (score is not None and score >= min_reward):
        return ""
    return "unscored" if score is None else "scored too low"


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
