"""Describe a rollout, its spans and its calls.

Which calls were trained, and why not, and how an advantage was computed comes from
`lightspan_tools.rollout_view`, as in `lightspan inspect`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from lightspan.algorithms.recorded_attempts import Query, read_attempts
from lightspan.errors import NotFoundError
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Call
from lightspan.lightning.selection import CallCoverage, CallStatus, Rejection
from lightspan.lightning.span_tree import build_tree, walk
from lightspan.schema import semconv as c
from lightspan.schema.records import Attempt, Mode, RolloutState
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.protocol import Store
from lightspan.training.folder import RunFolder
from lightspan.training.rewards import Scored
from lightspan_tools.rollout_view import RolloutView, read_views, view_of
from lightspan_tools.sampling_overrides import overrides_of
from lightspan_ui import views
from lightspan_ui.catalogue import Catalogue, task_text
from lightspan_ui.entries import Entry
from lightspan_ui.facts import images_of, messages_of, text_of_content, tool_text
from lightspan_ui.tokens import Tokenizer, token_views

MAX_SPANS: Final = 5_000
"""Maximum spans of a rollout in an answer."""
MAX_TOTAL: Final = 4 * views.MAX_TEXT
"""Maximum characters of all texts of a rollout's spans; those of later spans are then cut short."""
_SHORT: Final = 1_000
"""Maximum characters of a text once `MAX_TOTAL` is used up."""
_BODIES: Final = (c.MESSAGE_BODY, c.OBJECT_JSON, c.OPERATION_OUTPUT, c.COMMAND_STDOUT)
_RESULTS: Final = (c.TOOL_CALL_RESULT, *_BODIES, "output.value", "traceloop.entity.output")
_ARGUMENTS: Final = (
    *(c.TOOL_CALL_ARGUMENTS, c.OPERATION_INPUT, "input.value", "traceloop.entity.input"),
)


async def views_of(
    catalogue: Catalogue, folder: RunFolder | None, entries: Sequence[Entry]
) -> list[RolloutView]:
    """Return the views of rollouts, without those that no runner ever started.

    Args:
        catalogue: the rollouts.
        folder: folder of their run; None for those of a store.
        entries: which of the rollouts.
    """
    states = await catalogue.states(entries)
    if folder is None:
        return await production_views(catalogue.store, states)
    return await run_views(folder, catalogue.store, states, catalogue.scoring.rewards)


async def production_views(store: Store, states: Sequence[RolloutState]) -> list[RolloutView]:
    """Return the views of rollouts in a store without the folder of a run.

    They count as recorded only: which calls of a training were trained is in its run's folder.

    Args:
        store: the open store.
        states: the rollouts; those that no runner ever started are left out.
    """
    ids = [state.rollout.rollout_id for state in states]
    return [as_recorded(view_of(each)) async for each in read_attempts(store, Query(), ids)]


async def run_views(
    folder: RunFolder,
    store: Store,
    states: Sequence[RolloutState],
    rewards: Mapping[str, Scored] | None,
) -> list[RolloutView]:
    """Return the views of a run's rollouts. Those of a search for prompts count as recorded only.

    The arguments are those of `read_views`.
    """
    config = folder.read_config()
    rollouts = await read_views(folder, store, config, states, rewards)
    is_search = config.get("algorithm") in SEARCHES
    return [as_recorded(view) for view in rollouts] if is_search else rollouts


SEARCHES: Final = ("GEPA", "APO")
"""Algorithms that search for prompts and train no weights."""


def as_recorded(view: RolloutView) -> RolloutView:
    """Return the view of a rollout whose calls count as recorded only, not as frozen."""
    rollout = msgspec.structs.replace(view.state.rollout, mode=Mode.PRODUCTION)
    return replace(view, state=msgspec.structs.replace(view.state, rollout=rollout))


def rollout_detail(
    view: RolloutView,
    row: views.RolloutRow,
    attempts: Sequence[Attempt],
    spans: Sequence[Span],
    **others: Any,
) -> views.RolloutDetail:
    """Return a rollout with the spans and calls of its latest attempt.

    Args:
        view: the rollout with what became of its calls.
        row: its row of the table.
        attempts: all its attempts.
        spans: all spans of its latest attempt, late ones and feedback too.
        others: further fields of the answer.
    """
    episode = view.episode
    is_rated = row.mode == Mode.PRODUCTION and any(map(c.is_feedback, spans))
    trace_id = next((span.trace_id for span in spans if span.trace_id), "")
    return views.RolloutDetail(
        row=row,
        task=cut(task_text(view.state.rollout.task))[0],
        source="feedback" if is_rated else str(episode.reward_source or ""),
        capture_errors=list(episode.capture_errors),
        notes=[*filter(None, [episode.unscored, span_note(len(spans))]), *episode.notes],
        attempts=[
            views.AttemptRow(
                attempt_id=each.attempt_id,
                number=each.number,
                status=str(each.status),
                message=each.message,
            )
            for each in attempts
        ],
        spans=span_rows(spans),
        calls=[call_row(view, entry) for entry in view.coverage.entries],
        ratings=[rating(span) for span in spans if c.is_feedback(span)],
        trace_id=trace_id,
        **others,
    )


def span_note(count: int) -> str:
    """Return a note if not all spans of a rollout are shown; else an empty text."""
    return f"the first {MAX_SPANS:,} of {count:,} spans are shown" if count > MAX_SPANS else ""


# --- spans --------------------------------------------------------------------------------------
def span_rows(spans: Sequence[Span]) -> list[views.SpanRow]:
    """Return spans in the order of their tree, with texts that are cut to a total size."""
    nodes = list(walk(build_tree(spans)))[:MAX_SPANS]
    first = min((node.span.start_ns for _, node in nodes), default=0)
    rows, used = [], 0
    for depth, node in nodes:
        row = span_row(node.span, depth, first, text_size(used))
        used += sum(len(message.text) for message in (*row.input, *row.output))
        used += len(row.arguments) + len(row.result)
        rows.append(row)
    return rows


def text_size(used: int) -> int:
    """Return the maximum characters of a text, after `used` characters of earlier spans."""
    if used < MAX_TOTAL:
        return views.MAX_TEXT
    return _SHORT if used < 4 * MAX_TOTAL else 0


def span_row(span: Span, depth: int, first_ns: int, size: int) -> views.SpanRow:
    """Return a span as a row.

    Args:
        span: the span.
        depth: its depth in the tree.
        first_ns: start of the first span.
        size: maximum characters of a text.
    """
    attributes = span.attributes
    is_call = span.kind is SpanKind.LLM
    return views.SpanRow(
        span_id=span.span_id,
        parent=span.parent_id or "",
        depth=depth,
        kind=str(span.kind),
        name=span.name,
        status=str(span.status),
        start=(span.start_ns - first_ns) / 1e9,
        end=(max(span.end_ns, span.start_ns) - first_ns) / 1e9,
        agent=str(attributes.get(c.AGENT_PATH) or c.agent_name_of(attributes) or ""),
        call_id=str(attributes.get(c.CALL_ID) or f"span:{span.span_id}") if is_call else "",
        message=span.status_message if span.status is SpanStatus.ERROR else "",
        reward=_reward(attributes) if span.kind is SpanKind.REWARD else None,
        input=message_views(attributes, c.INPUT_MESSAGES, size) if is_call else [],
        output=message_views(attributes, c.OUTPUT_MESSAGES, size) if is_call else [],
        arguments="" if is_call else cut(_first(attributes, _ARGUMENTS), size)[0],
        result="" if is_call else cut(_first(attributes, _RESULTS), size)[0],
        is_late=span.late,
    )


def span_detail(spans: Sequence[Span], span_id: str) -> views.SpanDetail:
    """Return a span with all its attributes, uncut.

    Raises:
        NotFoundError: there is no such span.
    """
    for depth, node in walk(build_tree(spans)):
        if node.span.span_id == span_id:
            span = node.span
            row = span_row(span, depth, min(s.start_ns for s in spans), MAX_UNCUT)
            attributes = {key: text_of_value(value) for key, value in span.attributes.items()}
            return views.SpanDetail(row=row, attributes=attributes | _events(span))
    raise NotFoundError(f"the rollout has no span {span_id!r}")


MAX_UNCUT: Final = 50_000_000
"""Maximum characters of a text of a single span."""


def _events(span: Span) -> dict[str, str]:
    """Return the events of a span as attributes, such as the stack of an exception."""
    return {
        f"event {number}: {event.name}: {key}": text_of_value(value)
        for number, event in enumerate(span.events, 1)
        for key, value in (event.attributes or {"": ""}).items()
    }


def message_views(attributes: Mapping[str, Any], key: str, size: int) -> list[views.Message]:
    """Return recorded messages, with texts of at most `size` characters."""
    return [message_view(message, size) for message in messages_of(attributes, key)]


def message_view(message: Mapping[str, Any], size: int) -> views.Message:
    """Return a message with a text of at most `size` characters."""
    text, is_cut = cut(text_of_content(message.get("content")), size)
    thoughts, thoughts_cut = cut(str(message.get("reasoning_content") or ""), size)
    tools = [cut(tool_text(call), size) for call in message.get("tool_calls") or ()]
    return views.Message(
        role=str(message.get("role") or ""),
        text=text,
        thoughts=thoughts,
        tools=[tool for tool, _ in tools],
        images=[_image(part) for part in images_of(message.get("content"))],
        is_cut=is_cut or thoughts_cut or any(tool_cut for _, tool_cut in tools),
    )


def _image(part: Mapping[str, Any]) -> views.MessageImage:
    size = part.get("size")
    return views.MessageImage(
        digest=str(part["sha256"]),
        media_type=str(part.get("mime_type") or ""),
        size=size if isinstance(size, int) else 0,
    )


def rating(span: Span) -> views.Rating:
    """Return feedback that arrived after an attempt."""
    attributes = span.attributes
    return views.Rating(
        reward=_reward(attributes),
        comment=str(attributes.get(c.FEEDBACK_COMMENT) or ""),
        call_id=str(attributes.get(c.REWARD_CALL_ID) or ""),
        at=span.start_ns / 1e9,
    )


def cut(text: str, size: int = views.MAX_TEXT) -> tuple[str, bool]:
    """Return at most `size` characters of a text, and whether it was cut."""
    return (text, False) if len(text) <= size else (text[:size], True)


def text_of_value(value: Any) -> str:
    """Return the value of an attribute as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _first(attributes: Mapping[str, Any], keys: Sequence[str]) -> str:
    return next((text_of_value(attributes[key]) for key in keys if key in attributes), "")


def _reward(attributes: Mapping[str, Any]) -> float | None:
    value = attributes.get(c.REWARD_VALUE)
    return float(value) if isinstance(value, int | float) else None


# --- calls --------------------------------------------------------------------------------------
def call_row(view: RolloutView, entry: CallCoverage) -> views.CallRow:
    """Return a call with what became of it."""
    call = entry.call
    why = view.explanation(call)
    record = call.record
    attributes = {} if call.span is None else call.span.attributes
    prompt_tokens, tokens = c.usage_of(attributes)
    temperature = attributes.get(c.REQUEST_TEMPERATURE)
    if record is not None:
        prompt_tokens, tokens = len(record.prompt) // 4, len(record.response) // 4
        temperature = record.sampling.temperature
    return views.CallRow(
        call_id=call.call_id,
        choice=call.choice,
        span_id=call.span_id,
        agent=call.agent_path,
        fate=fate_of(view, entry),
        reason=reason_of(view, entry),
        why=" ".join(view.explanation_lines(call)),
        advantage=None if why is None else why.advantage,
        policy=call.policy or entry.policy,
        versions=[] if record is None else [version for version, _ in record.versions],
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        temperature=float(temperature) if isinstance(temperature, int | float) else None,
        replayed_from=str(attributes.get(c.REPLAYED_ROLLOUT, "")),
        is_fork=bool(attributes.get(c.REPLAY_FORK)),
    )


def reason_of(view: RolloutView, entry: CallCoverage) -> str:
    """Return why a call was not trained; empty if it was.

    For a call that is recorded only, return its outcome unless it succeeded.
    """
    if fate_of(view, entry) == "recorded":
        return "" if entry.call.outcome is CallOutcome.OK else f"the call: {entry.call.outcome}"
    return entry.reason


def fate_of(view: RolloutView, entry: CallCoverage) -> views.Fate:
    """Return what became of a call."""
    is_searched = entry.status is CallStatus.FROZEN and has_searched_prompt(entry)
    if view.state.rollout.mode is Mode.PRODUCTION or is_searched:
        return "recorded"
    if entry.rejection is Rejection.MODE_NOT_TRAIN:
        return "evaluation"
    return _FATES[entry.status]


def has_searched_prompt(entry: CallCoverage) -> bool:
    """Return whether the instructions of a call are a prompt that the run learns."""
    span = entry.call.span
    return span is not None and not span.attributes.keys().isdisjoint(_PROMPTS)


_PROMPTS: Final = (c.PROMPT_ORIGINAL, c.PROMPT_APPLIED, c.PROMPT_NAME)


_FATES: Final[Mapping[CallStatus, views.Fate]] = {
    CallStatus.TRAINED: "trained",
    CallStatus.FROZEN: "frozen",
    CallStatus.REJECTED: "rejected",
}


def call_detail(
    view: RolloutView,
    row: views.RolloutRow,
    call_id: str,
    tokenizer: Tokenizer | None,
    group: Sequence[Entry],
) -> views.CallDetail:
    """Return a call with its choices.

    Args:
        view: the rollout of the call.
        row: its row of the table.
        call_id: id of the call.
        tokenizer: tokenizer of the policy; None if there is none.
        group: the rollouts with which the rollout is compared.

    Raises:
        NotFoundError: the rollout has no such call.
    """
    entries = [entry for entry in view.coverage.entries if entry.call.call_id == call_id]
    if not entries:
        raise NotFoundError(f"the rollout has no call {call_id!r}")
    first = entries[0].call
    attributes: Mapping[str, Any] = {} if first.span is None else first.span.attributes
    return views.CallDetail(
        rollout=row,
        call_id=call_id,
        agent=first.agent_path,
        input=message_views(attributes, c.INPUT_MESSAGES, views.MAX_TEXT),
        overrides=overrides_text(attributes),
        prompt_applied=prompt_text(attributes),
        choices=[choice_detail(view, entry, tokenizer, group) for entry in entries],
    )


def choice_detail(
    view: RolloutView,
    entry: CallCoverage,
    tokenizer: Tokenizer | None,
    group: Sequence[Entry],
) -> views.ChoiceDetail:
    """Return a choice of a call; the arguments are those of `call_detail`."""
    call, why = entry.call, view.explanation(entry.call)
    record = call.record
    tokens, left_out = ([], 0) if record is None else token_views(record, tokenizer)
    return views.ChoiceDetail(
        call=call_row(view, entry),
        reasons=None if why is None else reasons(why),
        mates=list(mates(view, why, group)),
        output=choice_messages(call),
        tokens=tokens,
        tokens_left_out=left_out,
        prompt_text=""
        if record is None or tokenizer is None
        else tokenizer.text(record.prompt_ids),
        grammar="" if record is None else cut(record.grammar)[0],
    )


def choice_messages(call: Call) -> list[views.Message]:
    """Return the answer of a choice. Other programs may have recorded one answer for all."""
    attributes = {} if call.span is None else call.span.attributes
    messages = message_views(attributes, c.OUTPUT_MESSAGES, views.MAX_TEXT)
    return messages[call.choice : call.choice + 1] if len(messages) > call.choice else messages


def mates(
    view: RolloutView, why: Explanation | None, group: Sequence[Entry]
) -> Iterator[views.Mate]:
    """Yield the rollouts with which a call's rollout was compared, with their returns.

    A return is the number that the estimator used. For rollouts without a trained call, it is the
    reward.
    """
    if why is None:
        return
    returns = {
        each.rollout_id: each.value
        for each in view.explanations.values()
        if each.group_id == why.group_id
    }
    for entry in group:
        rollout_id = entry.summary.rollout_id
        yield views.Mate(
            rollout_id=rollout_id,
            value=returns.get(rollout_id, entry.reward),
            is_this=rollout_id == view.state.rollout.rollout_id,
        )


def reasons(why: Explanation) -> views.Reasons:
    """Return the numbers from which an advantage was computed."""
    return views.Reasons(
        estimator=why.estimator,
        unit=why.unit,
        credit_rule=why.credit_rule,
        weighting=why.weighting,
        value=why.value,
        credit=why.credit,
        baseline=why.baseline,
        scale=why.scale,
        size=why.size,
        share=why.share,
        tokens=why.tokens,
        token_weight=why.token_weight,
        shaping=why.shaping,
        penalty=why.penalty,
        expected=why.expected,
        zero_reason=str(why.zero_reason or ""),
        turn=why.turn,
    )


def overrides_text(attributes: Mapping[str, Any]) -> str:
    """Return which sampling parameters of the app were replaced; empty if none was."""
    return "; ".join(
        f"{field}: {asked!r} asked, {used!r} used"
        for field, (asked, used) in sorted(overrides_of(attributes).items())
    )


def prompt_text(attributes: Mapping[str, Any]) -> str:
    """Return what became of the app's own prompt while prompts are learned."""
    if c.PROMPT_APPLIED not in attributes:
        return ""
    original, reason = attributes.get(c.PROMPT_ORIGINAL), attributes.get(c.PROMPT_REASON)
    return f"as in the app: {reason}" if reason else f"in place of the app's: {original}"


# --- a group ------------------------------------------------------------------------------------
def group_rollout(view: RolloutView, row: views.RolloutRow) -> views.GroupRollout:
    """Return a rollout of a group with the answers of its agents."""
    answers = []
    for entry in view.coverage.entries:
        call, why = entry.call, view.explanation(entry.call)
        text = "\n".join(
            "\n".join(filter(None, [message.text, *message.tools]))
            for message in choice_messages(call)
        )
        answers.append(
            views.Answer(
                call_id=call.call_id,
                choice=call.choice,
                agent=call.agent_path,
                text=cut(text, MAX_ANSWER)[0],
                fate=fate_of(view, entry),
                reason=reason_of(view, entry),
                advantage=None if why is None else why.advantage,
            )
        )
    return views.GroupRollout(row=row, answers=answers)


MAX_ANSWER: Final = 20_000
"""Maximum characters of an answer in a group."""
