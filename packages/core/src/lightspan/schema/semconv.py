"""Attribute names: what lightspan writes, and how it reads three dialects.

lightspan writes OpenTelemetry's GenAI attributes (`gen_ai.*`) and, so that Phoenix and its like
show agents as agents, a few of OpenInference's. It reads `gen_ai.*`, OpenInference and OpenLLMetry
(`traceloop.*`, `llm.*`). The GenAI constants in OpenTelemetry's semantic conventions package are
all marked "moved", so the strings stand here.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, Final

from lightspan.schema.redaction import kept_text
from lightspan.schema.spans import Attributes, SpanKind, text_of

# --- OpenTelemetry GenAI ------------------------------------------------------------------
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STOP: Final = "gen_ai.request.stop_sequences"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
AGENT_NAME: Final = "gen_ai.agent.name"
AGENT_ID: Final = "gen_ai.agent.id"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_CALL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_CALL_RESULT: Final = "gen_ai.tool.call.result"
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

# --- OpenInference (also written, for Phoenix) --------------------------------------------
OPENINFERENCE_KIND: Final = "openinference.span.kind"
OPENINFERENCE_AGENT: Final = "agent.name"
OPENINFERENCE_NODE: Final = "graph.node.id"
OPENINFERENCE_PARENT: Final = "graph.node.parent_id"

# --- ours ---------------------------------------------------------------------------------
ROLLOUT_ID: Final = "lightspan.rollout.id"
ATTEMPT_ID: Final = "lightspan.attempt.id"
CALL_ID: Final = "lightspan.call.id"
AGENT_PATH: Final = "lightspan.agent.path"
"""The agents from the outermost to the acting one, joined by `/`; a `/` in a name is `%2F`."""
SELECTED: Final = "lightspan.agent.selected"
POLICY: Final = "lightspan.policy"
ROUTE: Final = "lightspan.route"
"""Where the call went: `policy`, `base`, `shared`, `endpoint` or `app`."""
SAMPLING_OVERRIDES: Final = "lightspan.sampling.overrides"
"""JSON: {field: [what the app asked, what was used]}."""
CALL_OUTCOME: Final = "lightspan.call.outcome"
"""A value of `lightspan.schema.token_records.CallOutcome`."""
CLIENT: Final = "lightspan.client"
"""The class of a model client that asked past lightspan, such as `langchain_ollama.ChatOllama`."""
CLIENT_FIX: Final = "lightspan.client.fix"
"""What to do so that its calls can be trained."""
REQUESTS_PAST: Final = "lightspan.requests.past"
"""JSON, on an attempt of a dry run: [[agent path, client, model, URL, count], …] of requests to
models that no SDK made (`origins`)."""
CALL_REFUSED: Final = "lightspan.call.refused"
"""The field that the gateway refused the request for; empty where it is of none."""
CONTEXT_OVERFLOW: Final = "context_length_exceeded"
"""OpenAI's code for a prompt that does not fit; runners read it to tell the outcome."""
UNSUPPORTED_CONTENT: Final = "unsupported_content"
"""`error.type` of a refused call with an image, a sound or a file: no model of ours reads them, in
whichever mode."""
KEYS_REPLACED: Final = "lightspan.keys.replaced"
"""True: keys stood in its texts, which say `<key>` there; so they are not what was said."""
CHAT_ONLY: Final = "chat_only"
"""`error.type` of a refused call at an endpoint that is asked for chat completions only."""
CALL_RESAMPLED: Final = "lightspan.call.resampled"
"""True: sampled anew after a try whose tokens are gone, whatever the outcome says later."""
REQUEST_HASH: Final = "lightspan.request.hash"
"""Hash of the request's body: tells a retry from another call after a restart."""
INSTRUCTIONS: Final = "lightspan.request.instructions"
"""True: the first input message is a response's `instructions`, which no later one inherits."""
PROMPT_NAME: Final = "lightspan.prompt.name"
"""Of a text that the app asked for by name (`lightspan.prompt`)."""
PROMPT_CALL: Final = "lightspan.prompt.call"
"""The call whose instructions these are, where the call's own span cannot say so."""
PROMPT_ORIGINAL: Final = "lightspan.prompt.original"
"""The instructions that the app gave, where others may be sent: `gen_ai.input.messages` has those
that were."""
PROMPT_APPLIED: Final = "lightspan.prompt.applied"
"""Whether the text of a candidate, or a learned one, was sent (it may be equal)."""
PROMPT_REASON: Final = "lightspan.prompt.reason"
"""Why it was not."""
SEQUENCE_START: Final = "lightspan.sequence.start"
SEQUENCE_END: Final = "lightspan.sequence.end"
SPAN_KIND: Final = "lightspan.span.kind"
SPAN_LATE: Final = "lightspan.span.late"
SPAN_SCHEMA: Final = "lightspan.span.schema"
REWARD_VALUE: Final = "lightspan.reward.value"
REWARD_DIMENSION: Final = "lightspan.reward.dimension."
"""Prefix: `lightspan.reward.dimension.<name>` is a float."""
REWARD_CALL_ID: Final = "lightspan.reward.call_id"
REWARD_SPAN_ID: Final = "lightspan.reward.span_id"
EPISODE_REWARD: Final = "lightspan.episode.reward"
"""Of an attempt's outermost spans, as they are sent elsewhere: what the attempt earned."""
CALL_REWARD: Final = "lightspan.call.reward"
"""Of a call, as it is sent elsewhere; a list where it has several answers that differ."""
ADVANTAGE: Final = "lightspan.advantage"
"""Likewise: what the learner was told of the call."""
STEP: Final = "lightspan.step"
"""Likewise: the iteration of the training."""
FEEDBACK: Final = "lightspan.feedback"
"""True on a reward that came after the fact (`lightspan.feedback`)."""
FEEDBACK_COMMENT: Final = "lightspan.feedback.comment"
ANNOTATION: Final = "lightspan.annotation."
MESSAGE_BODY: Final = "lightspan.message.body"
OBJECT_TYPE: Final = "lightspan.object.type"
OBJECT_JSON: Final = "lightspan.object.json"
OPERATION_INPUT: Final = "lightspan.operation.input"
OPERATION_OUTPUT: Final = "lightspan.operation.output"
COMMAND_ARGUMENTS: Final = "process.command_args"
COMMAND_STATUS: Final = "process.exit.code"
COMMAND_STDOUT: Final = "lightspan.command.stdout"
COMMAND_STDERR: Final = "lightspan.command.stderr"

# --- HTTP between the shim and the gateway ------------------------------------------------
HEADER_CALL_ID: Final = "x-lightspan-call-id"
HEADER_ATTEMPT: Final = "x-lightspan-attempt"
HEADER_AGENT: Final = "x-lightspan-agent"
"""The agent path, each name percent-encoded, joined by `/`."""
HEADER_PARENT: Final = "traceparent"
NO_PARENT: Final = "0000000000000001"
"""The parent in `traceparent` where there is none (it may not be all zeros)."""
HEADER_PROTOCOL: Final = "x-lightspan-protocol"
PROTOCOL_VERSION: Final = 2
"""2: runners show their claims with heartbeats and all reports too; `finish` is asked."""
HEADER_VERSION: Final = "x-lightspan-version"
"""Of the lightspan that answers, for people."""
HEADER_RELAYED: Final = "x-lightspan-relayed"
"""On what a store's server hands on. Where that is cut off, the server may have died, or the
network, and whoever asked comes again."""
ROUTING_PATH: Final = "/lightspan/routing"
"""Where a server says which agents it answers."""

UNNAMED_AGENT: Final = "app"

_KINDS: Final = frozenset(str(kind) for kind in SpanKind)
_KIND_OF_OPERATION: Final = {
    "chat": SpanKind.LLM,
    "text_completion": SpanKind.LLM,
    "generate_content": SpanKind.LLM,
    "execute_tool": SpanKind.TOOL,
    "invoke_agent": SpanKind.AGENT,
    "create_agent": SpanKind.OTHER,
    "invoke_workflow": SpanKind.CHAIN,
}
_KIND_OF_OPENINFERENCE: Final = {
    "LLM": SpanKind.LLM,
    "TOOL": SpanKind.TOOL,
    "AGENT": SpanKind.AGENT,
    "CHAIN": SpanKind.CHAIN,
}
_KIND_OF_OPENLLMETRY: Final = {
    "workflow": SpanKind.CHAIN,
    "task": SpanKind.CHAIN,
    "agent": SpanKind.AGENT,
    "tool": SpanKind.TOOL,
}


def kind_of(attributes: Mapping[str, Any]) -> SpanKind:
    """The kind that a span's attributes say, in whichever dialect; OTHER if none does."""
    own = str(attributes.get(SPAN_KIND))
    if own in _KINDS:
        return SpanKind(own)
    by_dialect = (
        _KIND_OF_OPERATION.get(str(attributes.get(OPERATION_NAME))),
        _KIND_OF_OPENINFERENCE.get(str(attributes.get(OPENINFERENCE_KIND)).upper()),
        _KIND_OF_OPENLLMETRY.get(str(attributes.get("traceloop.span.kind"))),
        SpanKind.LLM if "llm.request.type" in attributes else None,
    )
    return next((kind for kind in by_dialect if kind is not None), SpanKind.OTHER)


def agent_name_of(attributes: Mapping[str, Any]) -> str | None:
    """The agent that a span names, in whichever dialect."""
    for key in (AGENT_NAME, OPENINFERENCE_AGENT, OPENINFERENCE_NODE):
        if attributes.get(key):
            return str(attributes[key])
    if attributes.get("traceloop.span.kind") == "agent" and attributes.get("traceloop.entity.name"):
        return str(attributes["traceloop.entity.name"])
    return None


def model_of(attributes: Mapping[str, Any]) -> str | None:
    """The model that a span names, in whichever dialect."""
    for key in (REQUEST_MODEL, RESPONSE_MODEL, "llm.model_name", "llm.request.model"):
        if attributes.get(key):
            return str(attributes[key])
    return None


def usage_of(attributes: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """(prompt tokens, completion tokens) in whichever dialect."""
    prompt = _first_int(
        attributes,
        INPUT_TOKENS,
        "gen_ai.usage.prompt_tokens",
        "llm.token_count.prompt",
        "llm.usage.prompt_tokens",
    )
    completion = _first_int(
        attributes,
        OUTPUT_TOKENS,
        "gen_ai.usage.completion_tokens",
        "llm.token_count.completion",
        "llm.usage.completion_tokens",
    )
    return prompt, completion


def _first_int(attributes: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = attributes.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _stack_of(error: BaseException) -> str:
    try:
        return kept_text("".join(traceback.format_exception(error)))
    except BaseException as failure:  # an exception may make anything of its own parts
        return f"<no stack: {type(failure).__name__}>"


def exception_attributes(error: BaseException) -> Attributes:
    """OpenTelemetry's exception attributes."""
    return {
        EXCEPTION_TYPE: type(error).__qualname__,
        EXCEPTION_MESSAGE: text_of(error),
        EXCEPTION_STACKTRACE: _stack_of(error),
        ERROR_TYPE: type(error).__qualname__,
    }
