"""Compare names of attributes with those in OpenTelemetry's and OpenInference's packages.

lightspan copies the names, so that apps need not install both packages. The GenAI names may still
change, because they are incubating.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest
from openinference.semconv import trace
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, process_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    exception_attributes,
    server_attributes,
    service_attributes,
)

import lightspan
import lightspan_otel
from lightspan.schema import semconv as c
from lightspan_otel import agent_names, normalize, span_kinds

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
    | said(service_attributes)
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


@pytest.mark.parametrize(
    "name",
    [
        *(c.OPENINFERENCE_KIND, c.OPENINFERENCE_AGENT, c.OPENINFERENCE_NODE),
        *(c.OPENINFERENCE_PARENT, "llm.model_name", "llm.tools", "tool.json_schema"),
        *(agent_names.OPENINFERENCE_TOOL, agent_names.OPENINFERENCE_TOOL_CALL),
        *normalize._OPENINFERENCE.values(),
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
    """Check OpenInference's span kinds from which lightspan's kinds are derived."""
    kinds = {kind.value for kind in trace.OpenInferenceSpanKindValues}
    assert set(span_kinds._KIND_OF_OPENINFERENCE) <= kinds
    operations = {kind.value for kind in gen_ai_attributes.GenAiOperationNameValues}
    assert set(span_kinds._KIND_OF_OPERATION) <= operations


# --- no name of ours in theirs ----------------------------------------------------------------
LIKE_AN_ATTRIBUTE = re.compile(
    r"(gen_ai|llm|tool|tool_call|message|message_content|image|openinference|agent|graph|input"
    r"|output|error|exception|server|process|service|event)(\.[a-z0-9_]+)+"
)
PARTS = {"message_content.image.image.url": ("message_content.image", "image.url")}
"""Name that OpenInference composes → its two parts."""
ELSEWHERE = {
    # OpenLLMetry's, in versions of its own package that are no more
    *("llm.request.functions", "llm.request.model", "llm.request.type"),
    *("llm.usage.completion_tokens", "llm.usage.prompt_tokens"),
}
"""Names that are only read from spans of other libraries."""
INSTRUMENTATIONS = "openinference.instrumentation"
"""Prefix of names of modules, which are no attributes."""
CORE = Path(lightspan.__file__).parent
OTEL = Path(str(lightspan_otel.__file__)).parent
READERS = [*OTEL.glob("*.py"), *CORE.glob("schema/*.py"), *CORE.glob("capture/*.py")]


def names_in(path: Path) -> set[str]:
    texts = (node for node in ast.walk(ast.parse(path.read_text())))
    found = {n.value for n in texts if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {text for text in found if LIKE_AN_ATTRIBUTE.fullmatch(text)}


def test_every_string_that_looks_like_an_attribute_is_one() -> None:
    used = {name for path in READERS for name in names_in(path)}
    used = {name for name in used if not name.startswith(INSTRUMENTATIONS)}
    known = OPENTELEMETRY | OPENINFERENCE | ELSEWHERE
    lacking = {name for name in used if not all(part in known for part in PARTS.get(name, (name,)))}
    assert lacking == set()
    assert used >= ELSEWHERE  # nothing is allowed that is not there
    assert len(used) > 60
