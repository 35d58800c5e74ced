"""The texts that agents are given in place of the app's own, while they are learned or applied."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from lightspan.capture._globals import ActivePrompts, state
from lightspan.capture.context import AgentContext, current_agent, make_span
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.spans import Attributes, SpanKind, SpanStatus
from lightspan.schema.system_prompts import Body, Instructions, Reading

log = logging.getLogger(__name__)

PROMPTS_VARIABLE: Final = "LIGHTSPAN_PROMPTS"
"""Names the run whose prompts are applied, once somebody asks for that."""


def prompt(name: str, text: str) -> str:
    """The text to use for a prompt of the app's: in an attempt that tries another one that one, and
    after `lightspan.apply_prompts` the learned one; else `text` itself.

    Use it where the text is made, so that `optimize=["router"]` finds it:

        ROUTER = "Which desk is this for? {mail}"
        …
        content = lightspan.prompt("router", ROUTER).format(mail=mail)

    Args:
        name: what `optimize=` calls it.
        text: always the same one: with placeholders, written as for `str.format`, that the app
            fills afterwards, or with none. Then what is returned is not to be filled.
    """
    try:
        current = current_agent()
        told = instructions_of(current)
        reading = None if told is None else told.text_of(name, text)
        active = _active_prompts(current)
        if active is not None:
            _look(active, name, reading)
        if reading is None:
            return text
        if current is not None:
            attributes: Attributes = {c.PROMPT_NAME: name, **reading_attributes(reading)}
            note(current, attributes)
        return text if reading.sent is None else reading.sent
    except Exception as error:  # ours: the app gets its text
        current = current_agent()
        if current is not None:
            current.scope.recorder.add_capture_error(
                f"the prompt {name!r} could not be read: {error!r}"
            )
        return text


def note(current: AgentContext, attributes: Attributes) -> None:
    """Record what was read, beside the calls."""
    span = make_span(current, "lightspan.prompt", SpanKind.OTHER, attributes, status=SpanStatus.OK)
    current.scope.recorder.add(span)


def instructions_of(current: AgentContext | None) -> Instructions | None:
    """What agents are told where this one acts; None: what the app says."""
    if current is not None and current.scope.instructions is not None:
        return current.scope.instructions
    active = _active_prompts(current)
    return None if active is None else active.instructions


def _active_prompts(current: AgentContext | None) -> ActivePrompts | None:
    """Return the prompts of `lightspan.apply_prompts`, where they apply."""
    return state.active_prompts[-1] if state.active_prompts and _is_in_production(current) else None


def _is_in_production(current: AgentContext | None) -> bool:
    """Whether the prompts of `lightspan.apply_prompts` apply here."""
    if state.starters:  # a runner's process, where a call outside of attempts may belong to one
        return False
    if current is None:
        return True
    return current.scope.is_outside or current.scope.mode is Mode.PRODUCTION


def reading_of(current: AgentContext, body: Body) -> Reading | None:
    """What a request of whoever acts is to say; None: what it says."""
    told = instructions_of(current)
    reading = None if told is None else told.read(current.path, body)
    active = _active_prompts(current)
    if active is not None:
        active.calls += 1
        _look(active, current.path, reading)
    return reading


def _look(active: ActivePrompts, name: str, reading: Reading | None) -> None:
    """Tell once of a learned text that is not applied."""
    if reading is None:
        return
    active.asked.add(name)
    said = f"{name}: {reading.reason}"
    if reading.sent is None and said not in active.warned:
        active.warned.add(said)
        log.warning(
            "lightspan.apply_prompts: the text that was learned for %r is not applied, and the "
            "app's own is sent: %s (said once)",
            name,
            reading.reason,
        )


def reading_attributes(reading: Reading) -> Attributes:
    """What a span says of it."""
    attributes: Attributes = {}
    if reading.original is not None:
        attributes[c.PROMPT_ORIGINAL] = reading.original
    if reading.sent is not None:
        attributes[c.PROMPT_APPLIED] = True
    elif reading.reason:
        attributes |= {c.PROMPT_APPLIED: False, c.PROMPT_REASON: reading.reason}
    return attributes


def with_text(options: Any, reading: Reading) -> Any:
    """A copy of a request with the text that is to be sent."""
    slot, text = reading.slot, reading.sent
    assert slot is not None
    assert text is not None
    sent = options.model_copy()
    for name in ("extra_json", "json_data"):  # the first covers the second
        body = getattr(sent, name)
        if isinstance(body, Mapping) and slot.key in body:
            setattr(sent, name, {**body, slot.key: slot.put(body, text)})
            break
    return sent


__all__ = ["instructions_of", "note", "prompt", "reading_attributes", "reading_of", "with_text"]
