"""Replace agents' prompts while they are learned, or once learned prompts are applied."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from lightspan.capture._globals import ActivePrompts, state
from lightspan.capture.context import AgentContext, current_agent, make_span
from lightspan.errors import ConfigError
from lightspan.schema import semconv as c
from lightspan.schema.prompts import PromptPlace, PromptTemplate
from lightspan.schema.records import Mode
from lightspan.schema.spans import Attributes, SpanKind, SpanStatus
from lightspan.schema.system_prompts import Body, Instructions, Reading

log = logging.getLogger(__name__)

PROMPTS_VARIABLE: Final = "LIGHTSPAN_PROMPTS"
"""Environment variable that names the run whose prompts are applied."""
OUTSIDE: Final = "the call is outside every agent, as in a thread that does not run in its context"
"""Reason for which a text of an agent is sent that has a learned one."""


class PromptNotAppliedError(ConfigError):
    """A learned text is not applied, because the app's own text is not the one that was learned.

    Raised only with `apply_prompts(strict=True)`.
    """


def prompt(name: str, text: str) -> str:
    """Return the text to use for a prompt of the app.

    In an attempt that evaluates a candidate text, the candidate is returned. After
    `lightspan.apply_prompts`, the learned text is returned, and otherwise `text` itself. Call the
    function where the app uses the text, so that `optimize=["router"]` finds the prompt:

        ROUTER = "Which desk is this for? {mail}"
        …
        content = lightspan.prompt("router", ROUTER).format(mail=mail)

    Args:
        name: name of the prompt in `optimize=`.
        text: the app's own text, the same in every call. If it has placeholders, written as for
            `str.format`, the app fills them in the returned text. If it has none, the app must not
            format the returned text.

    Raises:
        TypeError: `text` is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"lightspan.prompt({name!r}, …) takes a text, such as TEMPLATE.template")
    try:
        current = current_agent()
        instructions, active = _instructions_of(current, name=name)
        reading = None if instructions is None else instructions.text_of(name, text)
        _count(active, name, reading)
        if reading is None:
            return text
        if current is not None:
            record_prompt(current, {c.PROMPT_NAME: name, **reading_attributes(reading)})
        return text if reading.sent is None else reading.sent
    except Exception as error:  # a capture error: the app gets its own text
        if isinstance(error, PromptNotAppliedError):
            raise
        current = current_agent()
        if current is not None:
            current.add_capture_error(f"the prompt {name!r} could not be read", error)
        return text


def prompt_argument(name: str) -> PromptTemplate | None:
    """Return the learned prompt for an argument of the app that the app's caller leaves out.

    None unless `lightspan.apply_prompts` applies a prompt that was learned as an argument of this
    name.
    """
    _, active = _instructions_of(current_agent(), name=name)
    prompts = {} if active is None else active.instructions.prompts
    if name == "prompt" and len(prompts) == 1:  # as in a rollout
        [name] = prompts
    learned = prompts.get(name)
    if learned is None or learned.place is not PromptPlace.ARGUMENT:
        return None
    _count(active, name, Reading(None, learned.template))
    return learned.after


def record_prompt(current: AgentContext, attributes: Attributes) -> None:
    """Record `attributes`, which describe a prompt and its replacement, in a new span."""
    span = make_span(current, "lightspan.prompt", SpanKind.OTHER, attributes, status=SpanStatus.OK)
    current.scope.recorder.add(span)


def _instructions_of(
    current: AgentContext | None, *, agent: str = "", name: str = ""
) -> tuple[Instructions | None, ActivePrompts | None]:
    """Return the prompts that replace the app's own in the context `current`.

    If several runs' prompts are applied, they are those of the last one that has the prompt.

    Args:
        current: the context; None outside every attempt.
        agent: path of the agent whose instructions are meant; empty for another prompt.
        name: name of the other prompt.

    Returns:
        The prompts; None if there are none. The `ActivePrompts` to which they belong; None if they
        are those of a rollout.
    """
    if current is not None and current.scope.instructions is not None:
        return current.scope.instructions, None
    # In a runner's process a call outside every attempt may belong to a rollout.
    if not state.active_prompts or "runner" in state.carriers:
        return None, None
    if current is None or current.scope.is_outside or current.scope.mode is Mode.PRODUCTION:
        owners = [one for one in state.active_prompts if (agent, name) in one.targets]
        active = (owners or state.active_prompts)[-1]
        return active.instructions, active
    return None, None


def reading_of(current: AgentContext, body: Body) -> Reading | None:
    """Find an agent's instructions in its request, and the text that replaces them.

    Return None if the agent's instructions are neither recorded nor replaced. If the call is
    outside every agent and has the instructions of one with a learned text, it is counted there.

    Args:
        current: context of the agent.
        body: body of the request.

    Raises:
        PromptNotAppliedError: learned instructions do not replace the app's, and
            `lightspan.apply_prompts` was called with `strict=True`.
    """
    instructions, active = _instructions_of(current, agent=current.path)
    reading = None if instructions is None else instructions.read(current.path, body)
    for applied in () if active is None else state.active_prompts:
        applied.calls += 1
    _count(active, current.path, reading)
    if active is not None and reading is None and not current.frames:
        for each, path in [(e, p) for e in state.active_prompts for p, _ in e.targets if p]:
            found = each.instructions.read(path, body)
            if found is not None and found.sent not in (None, found.original):
                _count(each, path, found._replace(sent=None, reason=OUTSIDE))
    return reading


def _count(active: ActivePrompts | None, name: str, reading: Reading | None) -> None:
    """Count whether a learned text was applied to a request.

    If it was not, log the reason; each reason is logged once.

    Args:
        active: the learned prompts, in which the request is counted; None for those of a rollout,
            which are not counted.
        name: name of the prompt, or path of the agent.
        reading: the app's text and its replacement; None if there are none.

    Raises:
        PromptNotAppliedError: the text is not applied, and `active` is strict.
    """
    if active is None or reading is None:
        return
    reason = reading.reason if reading.sent is None else ""
    message = f"lightspan.apply_prompts: the learned text for {name!r} is not applied, "
    if reason and active.is_strict:  # nothing is sent, so nothing is counted
        raise PromptNotAppliedError(f"{message}and strict=True: {reason}")
    with state.lock:
        active.counts.setdefault(name, Counter())[reason] += 1
        is_first = active.counts[name][reason] == 1
    if reason and is_first:
        log.warning("%sand the app's own is sent: %s (logged once)", message, reason)


def reading_attributes(reading: Reading) -> Attributes:
    """Describe an agent's instructions and their replacement as attributes of a span."""
    attributes: Attributes = {}
    if reading.original is not None:
        attributes[c.PROMPT_ORIGINAL] = reading.original
    if reading.sent is not None:
        attributes[c.PROMPT_APPLIED] = True
    elif reading.reason:
        attributes |= {c.PROMPT_APPLIED: False, c.PROMPT_REASON: reading.reason}
    return attributes


def with_text(options: Any, reading: Reading) -> Any:
    """Return a copy of the request `options` in which the instructions are `reading.sent`."""
    slot, text = reading.slot, reading.sent
    assert slot is not None and text is not None  # noqa: PT018
    sent = options.model_copy()
    for name in ("extra_json", "json_data"):  # the first overrides the second
        body = getattr(sent, name)
        if isinstance(body, Mapping) and slot.key in body:
            setattr(sent, name, {**body, slot.key: slot.put(body, text)})
            break
    return sent
