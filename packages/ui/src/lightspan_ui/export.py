"""Write the text of a program, and of a command, that train on what is shown."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from lightspan.schema.records import Mode
from lightspan.schema.routing import matches
from lightspan.stores import public_url
from lightspan_ui import views
from lightspan_ui.catalogue import Catalogue
from lightspan_ui.entries import Entry
from lightspan_ui.filters import Filters, time_of
from lightspan_ui.sources import Place

READING_S: Final = 2.0
"""Seconds for which an answer waits until the calls are counted."""
_STORE: Final = ("service", "since", "until", "reward_min", "agent")
_RUN: Final = ("mode", "reward_min", "agent")
"""Filters that fine-tuning and `lightspan export` have too, of a store and of a run."""
_MODEL: Final = '"MODEL"'


async def export_text(catalogue: Catalogue, filters: Filters, place: Place) -> views.Export:
    """Return how to train on the rollouts that pass filters.

    Args:
        catalogue: the rollouts.
        filters: the filters; those that fine-tuning lacks are named in a comment.
        place: the run or store.
    """
    catalogue.read_in_background()
    await catalogue.wait_read(READING_S)
    entries, _ = await catalogue.matching(filters)
    if place.run is None:
        entries = [entry for entry in entries if entry.summary.mode is Mode.PRODUCTION]
        url = public_url(place.url)
        program, command = store_program(url, filters), store_command(url, filters)
    else:
        folder = str(place.run.folder.path)
        program, command = run_program(filters), run_command(folder, filters)
    calls = sum(calls_of(entry, filters.agent) for entry in entries)
    return views.Export(attempts=len(entries), calls=calls, program=program, command=command)


def store_program(url: str, filters: Filters) -> str:
    """Return a program that fine-tunes a model on calls of a store."""
    options: dict[str, Any] = {
        "from_store": url,
        "service": filters.service,
        "agents": filters.agent,
        "min_reward": filters.reward_min,
        "since": _time_text(filters.since, "since"),
        "until": _time_text(filters.until, "until"),
    }
    lines = [f"    {name}={value!r}," for name, value in options.items() if value is not None]
    return _program(
        filters,
        _STORE,
        ["lightspan.SFT(", f"    {_MODEL},", *lines, ').fit(folder="runs/sft")'],
    )


def run_program(filters: Filters) -> str:
    """Return a program that fine-tunes a model on the file that `run_command` writes."""
    return _program(
        filters, _RUN, [f'lightspan.SFT({_MODEL}).fit("chats.jsonl", folder="runs/sft")']
    )


def store_command(url: str, filters: Filters) -> str:
    """Return the command that writes the calls of a store to a file."""
    options = {
        "--service": filters.service,
        "--agent": filters.agent,
        "--min-reward": filters.reward_min,
        "--since": _time_text(filters.since, "since"),
        "--until": _time_text(filters.until, "until"),
    }
    return _command(url, options)


def run_command(folder: str, filters: Filters) -> str:
    """Return the command that writes the calls of a run to a file."""
    options = {
        "--mode": filters.mode,
        "--agent": filters.agent,
        "--min-reward": filters.reward_min,
    }
    return _command(folder, options)


def calls_of(entry: Entry, agent: str | None) -> int:
    """Return the number of calls of a rollout; 0 while its spans were not read.

    Args:
        entry: the rollout.
        agent: name or pattern of the agents whose calls count; None for all.
    """
    agents = () if entry.facts is None else entry.facts.agents
    return sum(n for path, n in agents if agent is None or matches(agent, path))


def _program(filters: Filters, known: Sequence[str], lines: Sequence[str]) -> str:
    names = [
        name
        for name in filters.__struct_fields__
        if name not in known and getattr(filters, name) is not None
    ]
    comment = [f"# not applied, as fine-tuning has no such filter: {', '.join(names)}"]
    return "\n".join(["import lightspan", "", *(comment if names else []), *lines]) + "\n"


def _command(source: str, options: Mapping[str, Any]) -> str:
    words = ["lightspan", "export", source, "messages"]
    for name, value in options.items():
        # with "=", a value that begins with a hyphen is no option
        words += [] if value is None else [f"{name}={value}"]
    return shlex.join([*words, "-o", "chats.jsonl"])


def _time_text(value: str | None, name: str) -> str | None:
    """Return a time as ISO text, which does not move as an age would."""
    if value is None:
        return None
    moment = datetime.fromtimestamp(time_of(value, name), UTC)
    return moment.isoformat(timespec="milliseconds")
