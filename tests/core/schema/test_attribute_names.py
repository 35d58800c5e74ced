"""Names of attributes are those of OpenTelemetry's and OpenInference's own packages.

The strings stand in lightspan, whose capture plane would else bring both packages to every app, and
the GenAI constants, all of them incubating, move; so they are held against the packages here.
"""

from __future__ import annotations

from types import ModuleType

import pytest
from openinference.semconv import trace
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, process_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    exception_attributes,
    server_attributes,
)

from lightspan.otel import identity, vocabulary
from lightspan.schema import conventions as c

OTHERS = ("gen_ai.", "error.", "exception.", "server.", "process.")
OURS = {
    name: value
    for name, value in vars(c).items()
    if name.isupper() and isinstance(value, str) and value.startswith(OTHERS)
}


def said(module: ModuleType) -> set[str]:
    return {str(value) for name, value in vars(module).items() if name.isupper()}


OPENTELEMETRY = (
    said(gen_ai_attributes)
    | said(process_attributes)
    | said(error_attributes)
    | said(exception_attributes)
    | said(server_attributes)
)
OPENINFERENCE = {
    value
    for kind in vars(trace).values()
    if isinstance(kind, type)
    for name, value in vars(kind).items()
    if isinstance(value, str) and not name.startswith("_")
}


@pytest.mark.parametrize("name", OURS)
def test_opentelemetry_has_it(name: str) -> None:
    assert OURS[name] in OPENTELEMETRY


def test_there_are_some() -> None:
    assert len(OURS) >= 32


@pytest.mark.parametrize(
    "name",
    [
        *(c.OPENINFERENCE_KIND, c.OPENINFERENCE_AGENT, c.OPENINFERENCE_NODE),
        *(c.OPENINFERENCE_PARENT, "llm.model_name", "llm.tools", "tool.json_schema"),
        *(identity.OPENINFERENCE_TOOL, identity.OPENINFERENCE_TOOL_CALL),
        *vocabulary._OPENINFERENCE.values(),
        *("input.value", "output.value", "tool.parameters", "tool_call.function.arguments"),
        *("tool_call.id", "tool_call.function.name"),
        *("message.role", "message.content", "message.contents", "message.tool_calls"),
        *("message.name", "message.tool_call_id"),
        *("message_content.text", "message_content.image", "image.url"),
        *("llm.token_count.prompt", "llm.token_count.completion"),
    ],
)
def test_openinference_has_it(name: str) -> None:
    assert name in OPENINFERENCE


def test_kinds_of_spans() -> None:
    """Those that a kind of ours is read from."""
    kinds = {kind.value for kind in trace.OpenInferenceSpanKindValues}
    assert set(c._KIND_OF_OPENINFERENCE) <= kinds
    operations = {kind.value for kind in gen_ai_attributes.GenAiOperationNameValues}
    assert set(c._KIND_OF_OPERATION) <= operations
