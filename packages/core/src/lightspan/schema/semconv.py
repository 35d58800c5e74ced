"""Define the names of span attributes, and read attributes in three conventions.

lightspan writes OpenTelemetry's GenAI attributes (`gen_ai.*`) and a few of OpenInference's, by
which Phoenix displays agents. It reads `gen_ai.*`, OpenInference and OpenLLMetry (`traceloop.*`,
`llm.*`). The GenAI constants in OpenTelemetry's semantic conventions package are all deprecated
("moved"), so the names are defined here.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, Final

from lightspan.schema.redaction import bounded_text
from lightspan.schema.spans import Attributes, Span, SpanKind, text_of

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

SERVICE_NAME: Final = "service.name"
"""Resource attribute with the name of the service; all recorded spans have it."""

# --- OpenInference (also written, for Phoenix) --------------------------------------------
OPENINFERENCE_KIND: Final = "openinference.span.kind"
OPENINFERENCE_AGENT: Final = "agent.name"
OPENINFERENCE_NODE: Final = "graph.node.id"
OPENINFERENCE_PARENT: Final = "graph.node.parent_id"

# --- lightspan ----------------------------------------------------------------------------
ROLLOUT_ID: Final = "lightspan.rollout.id"
ATTEMPT_ID: Final = "lightspan.attempt.id"
CALL_ID: Final = "lightspan.call.id"
AGENT_PATH: Final = "lightspan.agent.path"
"""Names of the agents from the outermost to the current one, joined by `/` (`routing`)."""
AGENT_RESUMED: Final = "lightspan.agent.resumed"
"""Whether a run of an agent goes on from a checkpoint, and keeps what an earlier run answered."""
SELECTED: Final = "lightspan.agent.selected"
POLICY: Final = "lightspan.policy"
ROUTE: Final = "lightspan.route"
"""Destination of the call: `policy`, `base`, `shared`, `endpoint` or `app`."""
SAMPLING_OVERRIDES: Final = "lightspan.sampling.overrides"
"""JSON: {field: [value in the app's request, value used]}."""
CALL_OUTCOME: Final = "lightspan.call.outcome"
"""A value of `lightspan.schema.token_records.CallOutcome`."""
CALL_REPEATS: Final = "lightspan.call.repeats"
"""How often the SDK sent the request again, after an error or a timeout; absent if never. The
usage is that of the answer alone, although the provider may charge for the others too."""
CACHED: Final = "lightspan.call.cached"
"""True if a cache of the app's framework answered. No model was called, and there is no usage."""
CLIENT: Final = "lightspan.client"
"""Class of a model client that bypassed lightspan, such as `langchain_ollama.ChatOllama`."""
CLIENT_FIX: Final = "lightspan.client.fix"
"""Advice to the user on how to make the client's calls trainable."""
REQUEST_PAST: Final = "lightspan.request.past"
"""JSON, in a dry run: a request to a model that bypassed lightspan, as [client, model, URL]."""
CALL_REFUSED: Final = "lightspan.call.refused"
"""Name of the field in the request because of which the gateway rejected the call; empty if the
cause is no field."""
CONTEXT_OVERFLOW: Final = "context_length_exceeded"
"""OpenAI's error code for a prompt that is too long; runners derive the outcome from it."""
UNSUPPORTED_CONTENT: Final = "unsupported_content"
"""`error.type` of a rejected call with a sound, a file, or an image that the policy cannot get or
see."""
UNSUPPORTED_PARAMETER: Final = "unsupported_parameter"
"""`error.type` of a call that was rejected because of a parameter that training sets aside, and
evaluations and `serve` refuse."""
KEYS_REPLACED: Final = "lightspan.keys.replaced"
"""True if keys in the recorded texts were replaced by `<key>`."""
CALL_CONTEXT: Final = "lightspan.call.context"
"""The part of the prompt that the provider of the Responses API keeps: the `previous_response_id`
of the request, else `conversation` or `prompt`. The recorded messages are without it."""
INVALID_IMAGE: Final = "invalid_image"
"""`error.type` of a call that was rejected because an image of it is broken, of another format, or
beyond a limit."""
CHAT_ONLY: Final = "chat_only"
"""`error.type` of a call that was rejected because its endpoint supports chat completions only."""
CALL_RESAMPLED: Final = "lightspan.call.resampled"
"""True if the call was sampled again after a try whose tokens are lost. Unlike the outcome, it
never changes."""
REPLAYED_FROM: Final = "lightspan.replay.attempt_id"
"""Id of the attempt whose recorded answer was given again. There the call has the same call id."""
REPLAYED_ROLLOUT: Final = "lightspan.replay.rollout_id"
"""Id of the rollout of that attempt."""
REPLAY_REQUEST: Final = "lightspan.replay.request_id"
"""Call id that the client sent with a replayed call, which is recorded under the id of the call
that it repeats."""
REPLAY_FORK: Final = "lightspan.replay.fork"
"""True on the call at which a fork ended its replay: the first call that was sampled anew."""
REPLAY_DEPARTED: Final = "replay_departed"
"""`error.type` of a call that was rejected because the attempt does not repeat the recorded one."""
TOKEN_IDS: Final = "lightspan.call.token_ids"
"""JSON list: the ids of the prompt, then those of each choice, from an endpoint that returns ids as
vLLM does (`prompt_token_ids`, `token_ids`); null where there are none."""
REQUEST_HASH: Final = "lightspan.request.hash"
"""Hash of the request's body. After a restart of the gateway it distinguishes a retry of a call
from a new call."""
INSTRUCTIONS: Final = "lightspan.request.instructions"
"""True if the first input message is `instructions`, which later responses do not inherit."""
PROMPT_NAME: Final = "lightspan.prompt.name"
"""Name of a prompt in the app's code (`lightspan.prompt`)."""
PROMPT_CALL: Final = "lightspan.prompt.call"
"""Id of the model call whose instructions the `lightspan.prompt.*` attributes of this span
describe. It is set only if the gateway writes the span of the call itself."""
PROMPT_ORIGINAL: Final = "lightspan.prompt.original"
"""The app's own instructions; `gen_ai.input.messages` has those that were sent."""
PROMPT_APPLIED: Final = "lightspan.prompt.applied"
"""Whether a candidate or learned text, which may equal the original, was sent instead of it."""
PROMPT_REASON: Final = "lightspan.prompt.reason"
"""Reason for which no candidate or learned text was sent."""
REWARD_VALUE: Final = "lightspan.reward.value"
REWARD_DIMENSION: Final = "lightspan.reward.dimension."
"""Prefix: `lightspan.reward.dimension.<name>` is a float."""
REWARD_CALL_ID: Final = "lightspan.reward.call_id"
REWARD_SPAN_ID: Final = "lightspan.reward.span_id"
FEEDBACK: Final = "lightspan.feedback"
"""True on a reward given after the attempt (`lightspan.feedback`)."""
FEEDBACK_COMMENT: Final = "lightspan.feedback.comment"
FEEDBACK_CORRECTION: Final = "lightspan.feedback.correction"
"""A better answer than that of the call, or of the attempt's only call."""
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

# --- HTTP between the SDK instrumentation and the gateway ---------------------------------
HEADER_CALL_ID: Final = "x-lightspan-call-id"
HEADER_ATTEMPT: Final = "x-lightspan-attempt"
HEADER_AGENT: Final = "x-lightspan-agent"
"""The agent path, each name percent-encoded, joined by `/`."""
HEADER_PARENT: Final = "traceparent"
NO_PARENT: Final = "0000000000000001"
"""Parent id in `traceparent` for a call without parent, because all zeros are invalid."""
HEADER_PROTOCOL: Final = "x-lightspan-protocol"
PROTOCOL_VERSION: Final = 3
"""Version of the protocol between processes. Changes of version 2: heartbeats and reports carry
claim tokens, and there is `finish`. Changes of version 3: there are `summaries` and `search`."""
HEADER_VERSION: Final = "x-lightspan-version"
"""Header with the version of lightspan that sent the response, to show to users."""
HEADER_RELAYED: Final = "x-lightspan-relayed"
"""Header of a response that a store's server relays. If the response is cut off, the server or the
network may have failed, so the client retries."""
ROUTING_PATH: Final = "/lightspan/routing"
"""Path at which a server lists the agents that it serves."""

UNNAMED_AGENT: Final = "app"


def agent_name_of(attributes: Mapping[str, Any]) -> str | None:
    """Return the agent's name in a span's attributes; None if there is none.

    The attributes may follow any of the three conventions of this module.
    """
    name = _first_text(attributes, AGENT_NAME, OPENINFERENCE_AGENT, OPENINFERENCE_NODE)
    if name is None and attributes.get("traceloop.span.kind") == "agent":
        return _first_text(attributes, "traceloop.entity.name")
    return name


def model_of(attributes: Mapping[str, Any]) -> str | None:
    """Return the model's name in a span's attributes; None if there is none.

    The attributes may follow any of the three conventions of this module.
    """
    keys = (REQUEST_MODEL, RESPONSE_MODEL, "llm.model_name", "llm.request.model")
    return _first_text(attributes, *keys)


def _first_text(attributes: Mapping[str, Any], *keys: str) -> str | None:
    return next((str(attributes[key]) for key in keys if attributes.get(key)), None)


def is_feedback(span: Span) -> bool:
    """Return whether the span is feedback, which always arrives late."""
    return span.kind is SpanKind.REWARD and bool(span.attributes.get(FEEDBACK))


def usage_of(attributes: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the numbers of prompt and completion tokens in a span's attributes.

    A missing number is None. The attributes may follow any of the three conventions of this module.
    """
    prompt = ("gen_ai.usage.prompt_tokens", "llm.token_count.prompt", "llm.usage.prompt_tokens")
    completion = (
        *("gen_ai.usage.completion_tokens", "llm.token_count.completion"),
        "llm.usage.completion_tokens",
    )
    return (
        _first_int(attributes, INPUT_TOKENS, *prompt),
        _first_int(attributes, OUTPUT_TOKENS, *completion),
    )


def _first_int(attributes: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = attributes.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _stack_of(error: BaseException) -> str:
    try:
        return bounded_text("".join(traceback.format_exception(error)))
    except BaseException as failure:  # formatting an app's exception may raise anything
        return f"<no stack: {type(failure).__name__}>"


def exception_attributes(error: BaseException) -> Attributes:
    """Return OpenTelemetry's attributes of an exception."""
    return {
        EXCEPTION_TYPE: type(error).__qualname__,
        EXCEPTION_MESSAGE: text_of(error),
        EXCEPTION_STACKTRACE: _stack_of(error),
        ERROR_TYPE: type(error).__qualname__,
    }
