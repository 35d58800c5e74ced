"""Export recorded rollouts as files for other programs.

| what | each line or row is | for |
|---|---|---|
| `spans` | a span, ordered by start time | tracing and analysis |
| `transitions` | a call of a selected agent, trained or not | trainers that take token ids |
| `messages` | a call as chat messages, the answer last | fine-tuning, reading |
| `tasks` | the input of an attempt recorded in production | `Trainer.fit`, `lightspan dev` |

Parquet has a fixed schema, in which values of varying shape (attributes of spans, messages, tools)
are JSON text. Rollouts are read and written in portions, so that a run may be larger than memory.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

import msgspec

from lightspan.algorithms.recorded_attempts import (
    Query,
    chat_of,
    read_attempts,
    reward_bound,
    score_of,
    score_of_attempt,
)
from lightspan.errors import ConfigError, DataError, UnknownAgentError
from lightspan.lightning.advantages import ZeroReason
from lightspan.lightning.episode import Call
from lightspan.lightning.selection import CallCoverage, CallStatus, unknown_agents
from lightspan.progress import plural
from lightspan.schema import genai_messages
from lightspan.schema.images import Image
from lightspan.schema.records import Json, Mode, fingerprint
from lightspan.schema.routing import matches
from lightspan.schema.token_records import CallOutcome
from lightspan.stores import open_existing
from lightspan.stores.protocol import Store
from lightspan.training.folder import RunFolder
from lightspan_tools.images import read_images, references_of
from lightspan_tools.recorded_tasks import images_of_task, put_images
from lightspan_tools.rollout_view import RolloutView, ViewReader, trained_rewards, view_of

What = Literal["spans", "transitions", "messages", "tasks"]
Format = Literal["jsonl", "parquet"]
FORMATS: Final[tuple[Format, ...]] = ("jsonl", "parquet")

PORTION: Final = 128
"""Number of rollouts that are in memory at once."""

Row = dict[str, Json]
Write = Callable[[Sequence[Json]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Selects the rollouts and calls to export."""

    mode: Mode | None = None
    """Mode of the rollouts; None for every mode."""
    agents: tuple[str, ...] = ()
    """Names or globs on agent paths; empty for every agent. Filters calls but not spans."""
    min_reward: float | None = None
    """Minimum reward of a rollout; None for no minimum. Unscored rollouts do not reach a minimum.
    Messages are then only those of calls that `SFT(from_store=)` would imitate.

    In messages of production it applies to each call: to the feedback or reward on the call or, if
    there is none, to the feedback on the attempt or its reward.
    """

    images: bool = False
    """Whether messages have the recorded images, as `data:` URLs, instead of references to them."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` unless `min_reward` is a finite number."""
        reward_bound("min_reward", self.min_reward)

    def takes(self, view: RolloutView, what: What) -> bool:
        """Return whether a rollout passes `mode` and `min_reward`.

        When messages of production are exported, `min_reward` is not checked here but by
        `takes_score`.
        """
        mode = view.state.rollout.mode
        if self.mode is not None and mode is not self.mode:
            return False
        if mode is Mode.PRODUCTION:
            return what == "messages" or self._reaches(score_of_attempt(view.episode))
        return self._reaches(view.episode.reward)

    def takes_call(self, call: Call) -> bool:
        """Return whether a call's agent is one of `agents`; True if `agents` is empty."""
        return not self.agents or any(matches(name, call.agent_path) for name in self.agents)

    def takes_score(self, view: RolloutView, call: Call) -> bool:
        """Return whether the score of a call reaches `min_reward`.

        Only calls in production have their own scores. Other calls pass, because `takes` has
        checked the reward of their rollout.
        """
        in_production = view.state.rollout.mode is Mode.PRODUCTION
        return not in_production or self._reaches(score_of(view.episode, call))

    def _reaches(self, reward: float | None) -> bool:
        return self.min_reward is None or (reward is not None and reward >= self.min_reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """The number of rows and rollouts in an export, and what was left out."""

    rows: int
    rollouts: int
    left_out: Mapping[str, int]
    """Reason → number of calls or rollouts without a row."""
    unknown: str = ""
    """Which patterns of agents match no call; empty if all match."""
    unwritten_images: int = 0
    """Number of calls with images whose messages have references only, as `Filter.images` is
    False."""

    def text(self, what: What, out: Path | None) -> str:
        """Return the counts as one line of text."""
        target = "" if out is None else f" to {out}"
        text = f"{self.rows} {what} of {self.rollouts} rollouts{target}"
        if self.unknown:
            text += f"; {self.unknown}"
        if self.left_out:
            reasons = (f"{count} {reason}" for reason, count in sorted(self.left_out.items()))
            text += f"; left out: {', '.join(reasons)}"
        if self.unwritten_images:
            text += (
                f"; {plural(self.unwritten_images, 'call')} with images: --images puts in those "
                "that the store has, as SFT(from_store=) does"
            )
        return text


def export_run(
    folder: Path,
    what: What,
    out: Path | IO[bytes],
    *,
    format: Format | None = None,
    only: Filter | None = None,
) -> ExportSummary:
    """Export the recordings of a run.

    Args:
        folder: folder of the run.
        what: kind of rows; see the module.
        out: file, which is replaced atomically, or open stream for JSONL.
        format: file format; None for Parquet if `out` ends in `.parquet`, else JSONL.
        only: filter; None for everything.

    Raises:
        ConfigError: the folder holds no run, or the format is unknown or needs a file or a package.
        DataError: the file cannot be written.
        UnknownAgentError: none of the agents' patterns matches a call.
    """
    run = RunFolder(folder)
    config = run.read_config()
    if what == "tasks":
        raise ConfigError(f"tasks come from a store that production wrote; {folder} is a run")
    url = config.get("store") or run.store_url
    chosen = _format(format, out)

    async def views(store: Store) -> AsyncIterator[RolloutView]:
        states = await store.rollouts(run_id=config.get("run_id"))
        reader = ViewReader(run, store, config, trained_rewards(run, config))
        for start in range(0, len(states), PORTION):
            portion = states[start : start + PORTION]
            for view in await reader.read(portion):
                yield view

    return asyncio.run(_export(url, views, what, out, chosen, only or Filter()))


def export_store(
    url: str,
    what: What,
    out: Path | IO[bytes],
    *,
    format: Format | None = None,
    only: Filter | None = None,
    query: Query | None = None,
) -> ExportSummary:
    """Export the recordings of production in a store.

    Args:
        url: URL of the store.
        what: kind of rows; see the module. Equal tasks are written once, and only as JSONL.
        out: file, which is replaced atomically, or open stream for JSONL.
        format: file format; None for Parquet if `out` ends in `.parquet`, else JSONL.
        only: filter; None for everything.
        query: which attempts of the store to export; None for all.

    Raises:
        ConfigError: the format is unknown or needs a file or a package; or `what` is transitions,
            which production does not record.
        DataError: the file cannot be written.
        UnknownAgentError: none of the agents' patterns matches a call.
    """
    if what == "transitions":
        raise ConfigError("production has no token ids, and so no transitions: export messages")
    chosen = _format(format, out)
    if what == "tasks" and chosen != "jsonl":
        raise ConfigError("tasks are JSONL: -o FILE.jsonl")

    async def views(store: Store) -> AsyncIterator[RolloutView]:
        async for recorded in read_attempts(store, query or Query()):
            yield view_of(recorded)

    return asyncio.run(_export(url, views, what, out, chosen, only or Filter()))


async def _export(
    url: str,
    views: Callable[[Store], AsyncIterator[RolloutView]],
    what: What,
    out: Path | IO[bytes],
    format: Format,
    only: Filter,
) -> ExportSummary:
    rows = rollouts = unwritten_images = 0
    written_tasks: set[str] = set()
    left_out: Counter[str] = Counter()
    paths: set[str] = set()
    async with open_existing(url, read_only=True) as store:
        with _writer(what, format, out) as write:
            async for view in views(store):
                if not only.takes(view, what):
                    left_out["rollouts of another mode or reward"] += 1
                    continue
                paths.update(call.agent_path for call in view.episode.calls)
                files: Mapping[str, Image] = {}
                if what == "tasks":
                    files = await images_of_task(store, view.state.rollout.task)
                elif only.images:
                    files = await read_images(store, view.episode.calls)
                if what == "messages" and not only.images:
                    unwritten_images += sum(
                        only.takes_call(call)
                        and only.takes_score(view, call)
                        and bool(references_of(call))
                        for call in view.episode.calls
                    )
                portion = list(_ROWS[what](view, only, left_out, files))
                if what == "tasks":
                    new = [task for task in portion if fingerprint(task) not in written_tasks]
                    left_out["tasks that were there already"] += len(portion) - len(new)
                    written_tasks.update(map(fingerprint, new))
                    portion = new
                write(portion)
                rows += len(portion)
                rollouts += 1
            patterns = only.agents if paths else ()
            unmatched = [p for p in patterns if not any(matches(p, path) for path in paths)]
            unknown = unknown_agents(unmatched, sorted(paths)) if unmatched else ""
            if unmatched and len(unmatched) == len(only.agents):
                raise UnknownAgentError(unknown)  # before an earlier file is replaced
    return ExportSummary(
        rows=rows,
        rollouts=rollouts,
        left_out=+left_out,
        unknown=unknown,
        unwritten_images=unwritten_images,
    )


# --- rows -----------------------------------------------------------------------------------
def _rollout_fields(view: RolloutView) -> Row:
    rollout, episode = view.state.rollout, view.episode
    return {
        "rollout_id": rollout.rollout_id,
        "attempt_id": episode.attempt_id,
        "task_id": rollout.task_id,
        "group_id": rollout.group_id,
        "fork_of": rollout.fork.attempt_id if rollout.fork is not None else "",
        "mode": str(rollout.mode),
        "step": view.step,
        "status": str(view.state.status),
        "rollout_reward": episode.reward,
        "reward_dimensions": dict(episode.dimensions),
    }


def _span_rows(
    view: RolloutView, only: Filter, left_out: Counter[str], files: Mapping[str, Image]
) -> Iterator[Row]:
    fields = _rollout_fields(view)
    if view.episode.late:
        left_out["late spans or records"] += view.episode.late
    for span in sorted(view.episode.spans, key=lambda span: (span.start_ns, span.span_id)):
        yield {
            **fields,
            "trace_id": span.trace_id,
            "span_id": span.span_id,
            "parent_id": span.parent_id,
            "name": span.name,
            "kind": str(span.kind),
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "span_status": str(span.status),
            "status_message": span.status_message,
            "sequence_start": span.sequence_start,
            "sequence_end": span.sequence_end,
            "late": span.late,
            "attributes": dict(span.attributes),
            "resource": dict(span.resource),
            "events": msgspec.to_builtins(span.events),
            "links": msgspec.to_builtins(span.links),
        }


def _transition_rows(
    view: RolloutView, only: Filter, left_out: Counter[str], files: Mapping[str, Image]
) -> Iterator[Row]:
    for entry in _entries(view, only, left_out):
        call, record = entry.call, entry.call.record
        if entry.status is CallStatus.FROZEN:
            left_out["calls of frozen agents"] += 1
        elif record is None:
            left_out["calls without token ids"] += 1
        else:
            explanation = view.explanation(call)
            yield {
                **_rollout_fields(view),
                **_call_fields(view, entry),
                "prompt_ids": record.prompt_ids,
                "response_ids": record.response_ids,
                "images": msgspec.to_builtins(record.images),
                "logprobs": record.logprobs,
                "versions": [version for version, n in record.versions for _ in range(n)],
                "temperature": record.sampling.temperature,
                "top_p": record.sampling.top_p,
                "top_k": record.sampling.top_k,
                "finish_reason": str(record.finish_reason),
                "credit": None if explanation is None else explanation.credit,
                "advantage": None if explanation is None else explanation.advantage,
                "token_weight": None if explanation is None else explanation.token_weight,
            }


def _task_rows(
    view: RolloutView, only: Filter, left_out: Counter[str], files: Mapping[str, Image]
) -> Iterator[Json]:
    if view.state.rollout.task is None:
        left_out["attempts whose input is not known"] += 1
    else:
        task, missing = put_images(view.state.rollout.task, files)
        left_out["images, sounds or files of tasks, of which references are kept"] += missing
        yield task


def _message_rows(
    view: RolloutView, only: Filter, left_out: Counter[str], files: Mapping[str, Image]
) -> Iterator[Row]:
    for entry in _entries(view, only, left_out):
        if not only.takes_score(view, entry.call):
            left_out["calls that scored too low, or not at all"] += 1
            continue
        chat = chat_of(view.episode, entry.call, files)
        if only.min_reward is not None and chat.rejection:
            left_out[f"calls {chat.rejection}"] += 1
        elif not chat.messages:
            left_out["calls without an answer"] += 1
        else:
            yield {
                **_rollout_fields(view),
                **_call_fields(view, entry),
                "rejection": chat.rejection or None,
                "messages": chat.messages,
                "tools": chat.tools,
            }


def _entries(view: RolloutView, only: Filter, left_out: Counter[str]) -> Iterator[CallCoverage]:
    for entry in view.coverage.entries:
        if not only.takes_call(entry.call):
            left_out["calls of other agents"] += 1
        elif entry.call.outcome is CallOutcome.REPLAYED:
            left_out["replayed calls, which are rows of the rollout that they repeat"] += 1
        else:
            yield entry


_NO_ADVANTAGE: Final = {
    ZeroReason.IDENTICAL: "advantage 0: all rollouts of its group have the same reward",
    ZeroReason.GROUP_OF_ONE: "advantage 0: no other rollout of its group could be compared",
    ZeroReason.UNSCORED: "advantage 0: no rollout of its group has a reward",
}


def _call_fields(view: RolloutView, entry: CallCoverage) -> Row:
    call = entry.call
    why = view.explanation(call) if entry.status is CallStatus.TRAINED else None
    zero = None if why is None or why.advantage else why.zero_reason
    return {
        "call_id": call.call_id,
        "choice": call.choice,
        "agent": call.agent,
        "agent_path": call.agent_path,
        "policy": call.policy,
        "verdict": str(entry.status),
        "reason": entry.reason if zero is None else _NO_ADVANTAGE[zero],
        "call_reward": call.reward,
    }


_Rows = Callable[[RolloutView, Filter, Counter[str], Mapping[str, Image]], Iterator[Json]]
_ROWS: Final[Mapping[What, _Rows]] = {
    "spans": _span_rows,
    "transitions": _transition_rows,
    "messages": _message_rows,
    "tasks": _task_rows,
}


# --- files ----------------------------------------------------------------------------------
def _format(format: Format | None, out: Path | IO[bytes]) -> Format:
    if format is None:
        is_parquet = isinstance(out, Path) and out.suffix.lower() == ".parquet"
        return "parquet" if is_parquet else "jsonl"
    if format not in FORMATS:
        raise ConfigError(f"format={format!r}: use one of {', '.join(FORMATS)}")
    if format == "parquet" and not isinstance(out, Path):
        raise ConfigError("Parquet needs a file: -o FILE.parquet")
    return format


_DESCRIPTORS: Final = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")


@contextmanager
def _writer(what: What, format: Format, out: Path | IO[bytes]) -> Iterator[Write]:
    """Open a writer of rows.

    A file is written under a temporary name and renamed at the end, so that an export that fails
    keeps the earlier file. Only its owner may read it, as it holds users' messages. A link stays a
    link. Devices, pipes and open descriptors are not replaced: they are written to.

    Raises:
        DataError: the file cannot be written.
    """
    if not isinstance(out, Path):
        yield _jsonl(out)
        return
    if out.is_dir():
        raise DataError(f"{out} cannot be written: it is a folder")
    is_descriptor = str(out).startswith(_DESCRIPTORS)
    if is_descriptor or (out.exists() and not out.is_file()):
        if format == "parquet":
            raise DataError(f"{out} cannot be written: Parquet needs a regular file")
        try:
            with out.open("wb") as stream:
                yield _jsonl(stream)
        except OSError as error:
            raise DataError(f"{out} cannot be written: {error.strerror or error}") from error
        return
    out = out.resolve()
    temporary = out.with_name(f".{out.name}.part")
    try:
        try:
            temporary.unlink(missing_ok=True)  # of a process that was killed
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(descriptor, "wb") as stream:
                if format == "parquet":
                    with _parquet(stream, what) as write:
                        yield write
                else:
                    yield _jsonl(stream)
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}") from error


def _jsonl(stream: IO[bytes]) -> Write:
    encoder = msgspec.json.Encoder()

    def write(rows: Sequence[Json]) -> None:
        for row in rows:
            stream.write(encoder.encode(_finite(row)) + b"\n")

    return write


def _finite(row: Json) -> Json:
    """Replace NaN and infinity, which JSON lacks, by null."""
    if not isinstance(row, dict):
        return row
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


@contextmanager
def _parquet(stream: IO[bytes], what: What) -> Iterator[Write]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError("Parquet needs pyarrow: pip install pyarrow, or export JSONL") from error
    types = {
        "text": pyarrow.string(),
        "json": pyarrow.string(),
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "bool": pyarrow.bool_(),
        "ids": pyarrow.list_(pyarrow.int32()),
        "floats": pyarrow.list_(pyarrow.float32()),
    }
    columns = _COLUMNS[what]
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    as_text = [name for name, kind in columns.items() if kind == "json"]

    def write(rows: Sequence[Row]) -> None:
        if not rows:
            return
        flat = [
            {**row, **{name: genai_messages.dump_json(row[name]) for name in as_text}}
            for row in rows
        ]
        writer.write_table(pyarrow.Table.from_pylist(flat, schema=schema))

    with parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        yield write


_ROLLOUT_COLUMNS: Final = {
    **dict.fromkeys(("rollout_id", "attempt_id", "task_id", "group_id"), "text"),
    **dict.fromkeys(("fork_of", "mode"), "text"),
    "step": "int",
    "status": "text",
    "rollout_reward": "float",
    "reward_dimensions": "json",
}
_CALL_COLUMNS: Final = {
    "call_id": "text",
    "choice": "int",
    **dict.fromkeys(("agent", "agent_path", "policy", "verdict", "reason"), "text"),
    "call_reward": "float",
}
_COLUMNS: Final[Mapping[What, Mapping[str, str]]] = {
    "spans": {
        **_ROLLOUT_COLUMNS,
        **dict.fromkeys(("trace_id", "span_id", "parent_id", "name", "kind"), "text"),
        **dict.fromkeys(("start_ns", "end_ns"), "int"),
        **dict.fromkeys(("span_status", "status_message"), "text"),
        **dict.fromkeys(("sequence_start", "sequence_end"), "int"),
        "late": "bool",
        **dict.fromkeys(("attributes", "resource", "events", "links"), "json"),
    },
    "transitions": {
        **_ROLLOUT_COLUMNS,
        **_CALL_COLUMNS,
        **dict.fromkeys(("prompt_ids", "response_ids"), "ids"),
        "images": "json",
        "logprobs": "floats",
        "versions": "ids",
        **dict.fromkeys(("temperature", "top_p"), "float"),
        "top_k": "int",
        "finish_reason": "text",
        **dict.fromkeys(("credit", "advantage", "token_weight"), "float"),
    },
    "messages": {
        **_ROLLOUT_COLUMNS,
        **_CALL_COLUMNS,
        "rejection": "text",
        **dict.fromkeys(("messages", "tools"), "json"),
    },
}
"""Kind of rows → column of the Parquet file → type. `_ROWS` yields these columns."""
