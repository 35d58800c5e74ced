"""What an OpenTelemetry span says of identity, in whichever dialect: pure.

Names, ids and kinds are read (`READ`), and nothing that was said: neither prompts nor answers,
neither arguments nor results. An agent is what OpenTelemetry's GenAI conventions call an
`invoke_agent`, OpenInference an AGENT, OpenLLMetry an `agent`. The names of attributes are those of
`lightspan.schema.semconv`, which says why they stand there.
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
"""All attributes that are ever looked at. `graph.node.id` is none of them: it is another one in
each run, where it names no agent."""

_INVOKES: Final = "invoke_agent "
_EXECUTES: Final = "execute_tool "

_METHOD: Final = re.compile(r"(?P<name>[^.\s][^.]*)\.(a?run|a?stream|a?invoke|a?call)(_\w+)?")
"""The span of an agent whose instrumentation has no other place for its name: `writer.run`."""

_UUID: Final = r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}"
_ID: Final = re.compile(rf"{_UUID}|[0-9a-f]{{24,}}", re.IGNORECASE)
_GENERATED: Final = re.compile(r"(?=[0-9a-f]*\d)[0-9a-f]{8,}", re.IGNORECASE)


class Role(StrEnum):
    """What a span is, as far as it matters who acts."""

    AGENT = "agent"
    TOOL = "tool"
    WORKFLOW = "workflow"
    """What agents are run by; where nothing is around it, it is an attempt in production."""
    OTHER = "other"


_OPERATIONS: Final = {
    "invoke_agent": Role.AGENT,
    "execute_tool": Role.TOOL,
    "invoke_workflow": Role.WORKFLOW,
}
_OPENINFERENCE: Final = {"AGENT": Role.AGENT, "TOOL": Role.TOOL, "CHAIN": Role.WORKFLOW}
_OPENLLMETRY: Final = {"agent": Role.AGENT, "tool": Role.TOOL, "workflow": Role.WORKFLOW}


def role_of(name: str, attributes: Mapping[str, Any]) -> Role:
    """What a span is. Of an agent one dialect's word is enough: another may say what the
    agent does at the moment.

    Args:
        name: of the span.
        attributes: those that it has by now.
    """
    said = [
        _OPERATIONS.get(str(attributes.get(c.OPERATION_NAME))),
        _OPENINFERENCE.get(str(attributes.get(c.OPENINFERENCE_KIND)).upper()),
        _OPENLLMETRY.get(str(attributes.get(OPENLLMETRY_KIND))),
        Role.AGENT if name.startswith(_INVOKES) else None,
        Role.TOOL if name.startswith(_EXECUTES) else None,
    ]
    roles = [role for role in Role if role in said]
    return roles[0] if roles else Role.OTHER


def agent_name(name: str, attributes: Mapping[str, Any], *, may_guess: bool) -> str | None:
    """The name of the agent that a span is; None if it has none, or one that is an id.

    Args:
        name: of the span.
        attributes: those that it has by now.
        may_guess: take it from the span's own name where that is a method's, such as `writer.run`:
            no attribute that comes later will say more.
    """
    keys = (c.AGENT_NAME, c.OPENINFERENCE_AGENT)
    is_openllmetrys = str(attributes.get(OPENLLMETRY_KIND)) == "agent"
    found = [attributes.get(key) for key in (*keys, *[OPENLLMETRY_NAME] * is_openllmetrys)]
    if not any(found) and name.startswith(_INVOKES):
        found.append(name.removeprefix(_INVOKES))
    if not any(found) and may_guess:
        method = _METHOD.fullmatch(name)
        found.append(method["name"] if method is not None else None)
    names = [str(each).strip() for each in found if each]
    return next((each for each in names if each and not _is_id(each, attributes)), None)


def _is_id(name: str, attributes: Mapping[str, Any]) -> bool:
    """Whether a name was made up: it would be another one in each process, or each run."""
    if _ID.fullmatch(name):
        return True
    return name == str(attributes.get(c.AGENT_ID)) and _GENERATED.search(name) is not None


def tool_name(name: str, attributes: Mapping[str, Any]) -> str:
    """The name of the tool that a span is."""
    is_openllmetrys = str(attributes.get(OPENLLMETRY_KIND)) == "tool"
    for key in (c.TOOL_NAME, OPENINFERENCE_TOOL, *[OPENLLMETRY_NAME] * is_openllmetrys):
        if attributes.get(key):
            return str(attributes[key])
    return name.removeprefix(_EXECUTES)


def tool_call_id(attributes: Mapping[str, Any]) -> str | None:
    """The model's id of the tool call that a span is."""
    found = attributes.get(c.TOOL_CALL_ID) or attributes.get(OPENINFERENCE_TOOL_CALL)
    return str(found) if found else None
