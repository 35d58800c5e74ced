"""Write the text of a program, and of a command, that train on what is shown."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from lightspan.algorithms.recorded_attempts import chat_of, score_of
from lightspan.schema.images import Image
from lightspan.schema.records import Mode
from lightspan.stores import public_url
from lightspan_tools.export import Filter
from lightspan_tools.images import read_images
from lightspan_tools.rollout_view import RolloutView
from lightspan_ui import views
from lightspan_ui.catalogue import PORTION, Catalogue
from lightspan_ui.entries import Entry
from lightspan_ui.filters import Filters, time_of
from lightspan_ui.rollouts import views_of
from lightspan_ui.sources import Place

COUNTING_S: Final = 2.0
"""Seconds for which an answer waits until the calls are counted."""
_STORE: Final = ("service", "since", "until", "reward_min", "agent")
_RUN: Final = ("mode", "reward_min", "agent")
"""Filters that fine-tuning and `lightspan export` have too, of a store and of a run."""
_MODEL: Final = '"MODEL"'


@dataclass
class Taken:
    """What the program takes, and what the command writes."""

    attempts: int = 0
    calls: int = 0
    rows: int = 0
    """Number of calls that the command writes."""
    has_images: bool = False
    """Whether one of these calls has images that the store has."""
    read: int = 0
    """Number of attempts that were read."""
    is_complete: bool = False
    """Whether all attempts were read."""


async def export_text(catalogue: Catalogue, filters: Filters, place: Place) -> views.Export:
    """Return how to train on the rollouts that pass filters.

    Args:
        catalogue: the rollouts.
        filters: the filters; the note names those that fine-tuning lacks.
        place: the run or store.
    """
    applicable = _STORE if place.run is None else _RUN
    used, others = split(filters, applicable, is_store=place.run is None)
    # the score of a call may pass where that of its attempt does not
    wider = msgspec.structs.replace(used, agent=None)
    if place.run is None:
        wider = msgspec.structs.replace(wider, reward_min=None, mode=str(Mode.PRODUCTION))
    entries, _ = await catalogue.matching(wider)
    entries = [entry for entry in entries if entry.summary.attempt_id is not None]
    taken = await count_taken(catalogue, place, entries, used)
    note, preferences = note_of(others, taken, len(entries)), ""
    images = taken.has_images or not taken.is_complete  # without images, the option changes nothing
    if place.run is None:
        url = public_url(place.url)
        program, command = store_program(url, used, note), store_command(url, used, images=images)
        preferences = preferences_program(url, used, others)
    else:
        folder = str(place.run.folder.path)
        program, command = run_program(note), run_command(folder, used, images=images)
    return views.Export(
        attempts=taken.attempts,
        calls=taken.calls,
        program=program,
        command=command,
        preferences=preferences,
        note=note,
    )


def split(filters: Filters, known: Sequence[str], *, is_store: bool) -> tuple[Filters, list[str]]:
    """Return the filters that fine-tuning has too, and the names of the others.

    Args:
        filters: all filters.
        known: names of the filters that fine-tuning has.
        is_store: whether the place is a store, of which only production is fine-tuned.
    """
    values = {name: getattr(filters, name) for name in filters.__struct_fields__}
    others = [name for name, value in values.items() if value is not None and name not in known]
    if is_store and filters.mode == Mode.PRODUCTION:
        others.remove("mode")
    used = msgspec.structs.replace(filters, **dict.fromkeys(others), mode=None)
    if not is_store:
        used = msgspec.structs.replace(used, mode=filters.mode)
    if used.reward_min is not None:  # the edge of a bin has digits that are no more than rounding
        used = msgspec.structs.replace(used, reward_min=float(f"{used.reward_min:.12g}"))
    return used, others


def note_of(others: Sequence[str], taken: Taken, count: int) -> str:
    """Return what the page shows and the program does not do; empty if they agree.

    Args:
        others: names of filters that fine-tuning lacks.
        taken: what the program takes.
        count: number of attempts that it reads.
    """
    notes = []
    if others:
        notes.append(
            f"not applied, as neither SFT nor lightspan export has such a filter: "
            f"{', '.join(others)}"
        )
    if not taken.is_complete:
        notes.append(f"counted in the newest {taken.read:,} of {count:,} attempts only")
    if taken.rows > taken.calls:
        notes.append(
            f"the command also writes {taken.rows - taken.calls:,} calls that SFT leaves out, "
            "such as failed ones (field `rejection`)"
        )
    return "; ".join(notes)


# --- what is taken ------------------------------------------------------------------------------
async def count_taken(
    catalogue: Catalogue, place: Place, entries: Sequence[Entry], filters: Filters
) -> Taken:
    """Count the calls that the program takes of rollouts, the newest first, for a short time."""
    taken = Taken()
    only = Filter(
        agents=() if filters.agent is None else (filters.agent,), min_reward=filters.reward_min
    )
    folder = None if place.run is None else place.run.folder
    deadline = time.monotonic() + COUNTING_S
    for start in range(0, len(entries), PORTION):
        for view in await views_of(catalogue, folder, entries[start : start + PORTION]):
            if taken.read and time.monotonic() > deadline:
                return taken
            stored = await read_images(catalogue.store, view.episode.calls)
            # without their bytes, which would be encoded to no use
            images = {d: msgspec.structs.replace(image, data=b"") for d, image in stored.items()}
            rows, calls, has_images = calls_of(view, only, images, is_store=place.run is None)
            taken.rows += rows
            taken.calls += calls
            taken.has_images |= has_images
            taken.attempts += calls > 0
            taken.read += 1
    taken.is_complete = True
    return taken


def calls_of(
    view: RolloutView, only: Filter, images: Mapping[str, Image], *, is_store: bool
) -> tuple[int, int, bool]:
    """Count a rollout's calls that the command writes, and that SFT takes.

    SFT takes all that the command wrote of a run.

    Args:
        view: the rollout.
        only: which agents and rewards.
        images: the stored images of the rollout, by digest.
        is_store: whether SFT reads the store itself.

    Returns:
        (calls that the command writes, calls that SFT takes, whether a written call has images)
    """
    if not is_store and not only.takes(view, "messages"):
        return 0, 0, False
    rows = calls = 0
    has_images = False
    for call in (entry.call for entry in view.coverage.entries):
        if not only.takes_call(call):
            continue
        score = score_of(view.episode, call)
        if is_store and only.min_reward is not None and (score is None or score < only.min_reward):
            continue
        chat = chat_of(view.episode, call, images)
        is_written = bool(chat.messages) and not (only.min_reward is not None and chat.rejection)
        rows += is_written
        calls += is_written and not (is_store and chat.rejection)
        has_images |= is_written and any(map(_has_image, chat.messages))
    return rows, calls, has_images


def _has_image(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, Mapping) and part.get("type") == "image_url" for part in parts)


# --- texts --------------------------------------------------------------------------------------
def store_program(url: str, filters: Filters, note: str) -> str:
    """Return a program that fine-tunes a model on calls of a store."""
    lines = [*_store_options(url, filters), *_options({"min_reward": filters.reward_min})]
    return _program(note, ["lightspan.SFT(", f"    {_MODEL},", *lines, ').fit(folder="runs/sft")'])


def preferences_program(url: str, filters: Filters, others: Sequence[str]) -> str:
    """Return a program that learns from good and bad ratings in a store.

    Args:
        url: URL of the store.
        filters: the filters that fine-tuning has too.
        others: names of the other filters.
    """
    lacking = [*others, *(["reward_min"] if filters.reward_min is not None else [])]
    note = f"not applied, as Preferences has no such filter: {', '.join(lacking)}"
    lines = ["Preferences(", f"    {_MODEL},", *_store_options(url, filters)]
    lines.append(').fit(folder="runs/preferences")')
    return _program(note if lacking else "", lines, "from lightspan_torch import Preferences")


def _store_options(url: str, filters: Filters) -> list[str]:
    """Return the arguments that SFT and Preferences share, a line each."""
    return _options(
        {
            "from_store": url,
            "service": filters.service,
            "agents": filters.agent,
            "since": _time_text(filters.since, "since"),
            "until": _time_text(filters.until, "until"),
        }
    )


def _options(values: Mapping[str, Any]) -> list[str]:
    return [f"    {name}={value!r}," for name, value in values.items() if value is not None]


def run_program(note: str) -> str:
    """Return a program that fine-tunes a model on the file that `run_command` writes."""
    return _program(note, [f'lightspan.SFT({_MODEL}).fit("chats.jsonl", folder="runs/sft")'])


def store_command(url: str, filters: Filters, *, images: bool) -> str:
    """Return the command that writes the calls of a store, and images if asked, to a file."""
    options = {
        "--service": filters.service,
        "--agent": filters.agent,
        "--min-reward": filters.reward_min,
        "--since": _time_text(filters.since, "since"),
        "--until": _time_text(filters.until, "until"),
    }
    return _command(url, options, images=images)


def run_command(folder: str, filters: Filters, *, images: bool) -> str:
    """Return the command that writes the calls of a run, and images if asked, to a file."""
    options = {
        "--mode": filters.mode,
        "--agent": filters.agent,
        "--min-reward": filters.reward_min,
    }
    return _command(folder, options, images=images)


def _program(note: str, lines: Sequence[str], imports: str = "import lightspan") -> str:
    comments = [f"# {line}" for line in note.split("; ")] if note else []
    return "\n".join([imports, "", *comments, *lines]) + "\n"


def _command(source: str, options: Mapping[str, Any], *, images: bool) -> str:
    words = ["lightspan", "export", source, "messages"]
    for name, value in options.items():
        # with "=", a value that begins with a hyphen is no option
        words += [] if value is None else [f"{name}={value}"]
    return shlex.join([*words, *(["--images"] if images else []), "-o", "chats.jsonl"])


def _time_text(value: str | None, name: str) -> str | None:
    """Return a time as ISO text, which does not move as an age would."""
    if value is None:
        return None
    moment = datetime.fromtimestamp(time_of(value, name), UTC)
    return moment.isoformat(timespec="milliseconds")
