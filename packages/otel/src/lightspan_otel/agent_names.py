"""Agent and tool names read from a span's attributes. Pure.

Three sets of attribute names, or dialects, are read: those of OpenTelemetry's GenAI conventions, of
OpenInference and of OpenLLMetry.

Only names, ids and kinds are read (`READ`): no prompts, answers, arguments or results. An agent's
span is an `invoke_agent` in OpenTelemetry's GenAI conventions, an AGENT in OpenInference, an
`agent` in OpenLLMetry. `lightspan.schema.semconv` lists the attribute names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from lightspan.schema import semconv as c

OPENINFERENCE_TOOL: Final = "tool.name"
OPENINFERENCE_TOOL_CALL: Final = "tool_call.id"
OPENLLMETRY_KIND: Final = "traceloop.span.kind"
OPENLLMETRY_NAME: Final = "traceloop.entity.name"

READ: Final = frozenset(
    {
        *(c.OPERATION_NAME, c.AGENT_NAME, c.AGENT_ID, c.TOOL_NAME, c.TOOL_CALL_ID, c.ERROR_TYPE),
        *(c.OPENINFERENCE_KIND, c.OPENINFERENCE_AGENT, OPENINFERENCE_TOOL, OPENINFERENCE_TOOL_CALL),
        *(OPENLLMETRY_KIND, OPENLLMETRY_NAME),
    }
)
"""Attributes that are read. `graph.node.id` is left out: unless it is an agent's name, its value
differs from run to run."""

_INVOKES: Final = "invoke_agent "
_EXECUTES: Final = "execute_tool "

_RUNS: Final = "workflow.run"
"""Name of the span of a workflow's run in Microsoft's Agent Framework, which has no operation."""

_METHOD: Final = re.compile(r"(?P<name>[^.\s][^.]*)\.(a?run|a?stream|a?invoke|a?call)(_\w+)?")
"""Span name made of an agent's name and the name of a called method, such as `writer.run`."""

_UUID: Final = r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}"
_ID: Final = re.compile(rf"{_UUID}|[0-9a-f]{{24,}}", re.IGNORECASE)
_GENERATED: Final = re.compile(r"(?=[0-9a-f]*\d)[0-9a-f]{8,}", re.IGNORECASE)


class Role(StrEnum):
    """What a span represents, which determines whether it changes the current agent."""

    AGENT = "agent"
    TOOL = "tool"
    WORKFLOW = "workflow"
    """A run of agents. In production, a workflow without an enclosing span becomes an attempt."""
    OTHER = "other"


_OPERATIONS: Final = {
    "invoke_agent": Role.AGENT,
    "execute_tool": Role.TOOL,
    "invoke_workflow": Role.WORKFLOW,
    # of Strands
    "execute_structured_output": Role.AGENT,
    "invoke_swarm": Role.WORKFLOW,
    "invoke_graph": Role.WORKFLOW,
}
_OPENINFERENCE: Final = {"AGENT": Role.AGENT, "TOOL": Role.TOOL, "CHAIN": Role.WORKFLOW}
_OPENLLMETRY: Final = {"agent": Role.AGENT, "tool": Role.TOOL, "workflow": Role.WORKFLOW}


def role_of(name: str, attributes: Mapping[str, Any]) -> Role:
    """Return what a span represents, such as an agent, a tool or a model call.

    A span may have attributes of several conventions, and they may contradict each other. If one of
    them says agent, the role is `AGENT`: another may name what the agent is doing, such as a model
    call.

    Args:
        name: the span's name.
        attributes: the span's attributes so far.
    """
    candidates = [
        _OPERATIONS.get(str(attributes.get(c.OPERATION_NAME))),
        _OPENINFERENCE.get(str(attributes.get(c.OPENINFERENCE_KIND)).upper()),
        _OPENLLMETRY.get(str(attributes.get(OPENLLMETRY_KIND))),
        Role.AGENT if name.startswith(_INVOKES) else None,
        Role.TOOL if name.startswith(_EXECUTES) else None,
        Role.WORKFLOW if name == _RUNS else None,
    ]
    roles = [role for role in Role if role in candidates]
    return roles[0] if roles else Role.OTHER


def agent_name(name: str, attributes: Mapping[str, Any], *, may_guess: bool) -> str | None:
    """Return the name of the agent that a span represents; None if no name is known.

    Generated ids are no names.

    Args:
        name: the span's name.
        attributes: the span's attributes so far.
        may_guess: whether to derive the name from a span name such as `writer.run`. False for an
            open span, on which the library may still set an attribute with the name.
    """
    keys = (c.AGENT_NAME, c.OPENINFERENCE_AGENT)
    is_openllmetry = str(attributes.get(OPENLLMETRY_KIND)) == "agent"
    values = [attributes.get(key) for key in (*keys, *[OPENLLMETRY_NAME] * is_openllmetry)]
    if not any(values) and name.startswith(_INVOKES):
        values.append(name.removeprefix(_INVOKES))
    if not any(values) and may_guess:
        method = _METHOD.fullmatch(name)
        values.append(method["name"] if method is not None else None)
    stripped = [str(value).strip() for value in values if value]
    return next((text for text in stripped if text and not _is_id(text, attributes)), None)


def _is_id(name: str, attributes: Mapping[str, Any]) -> bool:
    """Return whether an agent's name is a generated id, such as a UUID.

    Such an id differs in each process, so it cannot identify the agent.
    """
    if _ID.fullmatch(name):
        return True
    return name == str(attributes.get(c.AGENT_ID)) and _GENERATED.search(name) is not None


def tool_name(name: str, attributes: Mapping[str, Any]) -> str:
    """Return the name of the tool that a span represents."""
    is_openllmetry = str(attributes.get(OPENLLMETRY_KIND)) == "tool"
    for key in (c.TOOL_NAME, OPENINFERENCE_TOOL, *[OPENLLMETRY_NAME] * is_openllmetry):
        if attributes.get(key):
            return str(attributes[key])
    return name.removeprefix(_EXECUTES)


def tool_call_id(attributes: Mapping[str, Any]) -> str | None:
    """Return the model's id of the tool call that a span represents; None if it is missing."""
    call_id = attributes.get(c.TOOL_CALL_ID) or attributes.get(OPENINFERENCE_TOOL_CALL)
    return str(call_id) if call_id else None
