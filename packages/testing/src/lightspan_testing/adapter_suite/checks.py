"""Checks of recorded attempts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from lightspan.lightning import Episode, Rejection, build_episode, classify_calls
from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan.schema.media import digests_in
from lightspan.schema.records import Attempt, AttemptStatus, Rollout
from lightspan.schema.routing import Route, agent_name, split_path
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome
from lightspan.training.collector import load_records
from lightspan_testing.adapter_harness import POLICY, Part, Played, Stage, sampled_text
from lightspan_testing.adapter_suite.scenarios import BYPASSED, App, Impossible
from lightspan_testing.attempts import Captured, path_of
from lightspan_testing.byte_tokenizer import PLACEHOLDER


# --- images ---------------------------------------------------------------------------------
def check_image(stage: Stage, played: Played, data: bytes) -> None:
    """Check that the only call of an attempt has an image as the app sent it.

    The call's span refers to the image, and the image is recorded. If the call went to the policy,
    the image is in its place in the recorded prompt, as the engine got it.

    Args:
        stage: the scripted endpoint, and the gateway of a policy that takes images.
        played: the ended attempt.
        data: the image file.
    """
    image = Image.of(data, "image/png")
    [span] = played.llm_spans
    assert digests_in(span.attributes) == {image.digest}
    if not played.through_gateway:
        assert played.scope.recorder.images_of([span]) == [image]
        return
    name = played.scope.attempt_id
    [record] = played.records = stage.wait(load_records(stage.store, [name]))[name]
    request = stage.engine.requests[-1]
    assert (record.prompt_ids, record.images) == (request.prompt_ids, request.images)
    [placed] = record.images
    assert (placed.digest, placed.data) == (image.digest, data)
    assert placed.length == placed.grid[0] * placed.grid[1] > 1
    places = [place for place, token in enumerate(record.prompt_ids) if token == PLACEHOLDER]
    assert places == [*range(placed.start, placed.start + placed.length)]
    # nothing but the missing reward keeps the call from training
    counts = classify_calls(stage.episode(played), POLICY).counts()
    assert counts == {"rejected:unscored": 1}


# --- attempts -------------------------------------------------------------------------------
def check_names(played: Played, app: App) -> None:
    """Check that every call is recorded for the right agent and the right attempt.

    The prompt of the call names both.
    """
    for span in played.llm_spans:
        prompt = str(span.attributes[c.INPUT_MESSAGES])
        assert set(re.findall(r"task-\d+", prompt)) == {played.tag}
        assert is_named(span, app), f"{path_of(span)} asked {prompt}"


def is_named(span: Span, app: App) -> bool:
    """Return whether a call is recorded for the agent that its prompt names.

    That agent has to be the last one in the recorded agent path.
    """
    agent = Part({}, app.marks).agent_of(str(span.attributes[c.INPUT_MESSAGES])) or ""
    return agent_name(path_of(span)) == app.names.get(agent, agent)


def check_attributes(played: Played) -> None:
    """Check that every span has the ids of the attempt.

    Also check all attributes of the spans of agents and tools.
    """
    scope = played.scope
    by_id = {span.span_id: span for span in played.spans}
    for span in played.spans:
        ids = (span.rollout_id, span.attempt_id, span.trace_id)
        assert ids == (scope.rollout_id, scope.attempt_id, scope.trace_id)
        assert span.start_ns <= span.end_ns
        if span.kind is SpanKind.AGENT:
            assert _plain(span) == _agent_attributes(span, by_id)
        if span.kind is SpanKind.TOOL:
            _check_tool(span)


_ERRORS: Final = (c.ERROR_TYPE, c.EXCEPTION_TYPE, c.EXCEPTION_MESSAGE, c.EXCEPTION_STACKTRACE)


def _plain(span: Span) -> dict[str, Any]:
    has_failed = span.status is SpanStatus.ERROR
    assert (c.ERROR_TYPE in span.attributes) is has_failed, span.name
    return {key: value for key, value in span.attributes.items() if key not in _ERRORS}


def _agent_attributes(span: Span, by_id: Mapping[str, Span]) -> dict[str, Any]:
    names = split_path(path_of(span))
    attributes = {
        c.OPERATION_NAME: "invoke_agent",
        c.AGENT_NAME: names[-1],
        c.AGENT_PATH: path_of(span),
        c.OPENINFERENCE_KIND: "AGENT",
        c.OPENINFERENCE_AGENT: names[-1],
        c.OPENINFERENCE_NODE: names[-1],
    }
    assert span.name == f"invoke_agent {names[-1]}"
    if len(names) > 1:
        attributes[c.OPENINFERENCE_PARENT] = names[-2]
    return attributes


_TOOLS: Final = {"look": "seven: 7", "count": "5 letters"}


def _check_tool(span: Span) -> None:
    attributes = _plain(span)
    name = span.name.removeprefix("execute_tool ")
    fixed = {
        c.OPERATION_NAME: "execute_tool",
        c.TOOL_NAME: name,
        c.AGENT_PATH: path_of(span),
        c.OPENINFERENCE_KIND: "TOOL",
    }
    assert {key: attributes[key] for key in fixed} == fixed
    assert attributes.keys() - fixed.keys() <= {
        c.TOOL_CALL_ID,
        c.TOOL_CALL_ARGUMENTS,
        c.TOOL_CALL_RESULT,
    }
    arguments = json.loads(str(attributes[c.TOOL_CALL_ARGUMENTS]))
    if name in _TOOLS and span.status is SpanStatus.OK:
        assert arguments == {"what": "seven"}
        assert _TOOLS[name] in str(attributes[c.TOOL_CALL_RESULT])


def check_calls(played: Played, stage: Stage) -> None:
    """Check that every model call is recorded once.

    A call counts once even if the SDK retried it.
    """
    calls = [call for call in stage.brain.calls_in(played.tag) if call.turn.status < 500]
    assert len(played.llm_spans) == len(calls)
    call_ids = [span.attributes[c.CALL_ID] for span in played.llm_spans]
    assert len(set(call_ids)) == len(call_ids)


def check_bypassing(played: Played, stage: Stage) -> None:
    """Check the calls of an app whose own model client does not use the OpenAI SDK.

    The client's answer is recorded as one call without tokens. If the client tried the OpenAI SDK
    before, these calls are recorded too.
    """
    sdk_calls = len(stage.brain.calls_in(played.tag))
    own = [span for span in played.llm_spans if BYPASSED in str(span.attributes)]
    assert len(played.llm_spans) == len(own) + sdk_calls
    assert len(own) == 1
    assert not any(record.response_ids for record in played.records)
    assert own[0].attributes[c.ROUTE] == Route.APP
    assert BYPASSED in str(own[0].attributes[c.OUTPUT_MESSAGES])
    if not sdk_calls:
        check_untrained(played)


def episode_of(captured: Captured) -> Episode:
    """Build an attempt's episode (the recorded rollout) from its spans, without token records."""
    rollout_id, attempt_id = captured.scope.rollout_id, captured.scope.attempt_id
    attempt = Attempt(attempt_id=attempt_id, rollout_id=rollout_id, number=1, epoch=1)
    ended = replace(attempt, status=AttemptStatus.SUCCEEDED)
    rollout = Rollout(rollout_id=rollout_id, task={}, task_id="t")
    return build_episode(ended, rollout, captured.spans, [])


def check_untrained(captured: Captured) -> None:
    """Check that no call of the attempt can be trained, because no call has tokens."""
    coverage = classify_calls(episode_of(captured), POLICY)
    assert [entry.rejection for entry in coverage.entries] == [
        Rejection.NO_TOKENS for _ in captured.llm_spans
    ]


def check_tokens(played: Played, stage: Stage) -> None:
    """Check that recorded tokens equal those of the engine.

    Also check that each token record agrees with the span of its call.
    """
    spans = {span.span_id: span for span in played.llm_spans}
    complete = [record for record in played.records if record.response_ids]
    recorded = [(record.prompt_ids, record.response_ids) for record in complete]
    assert sorted(recorded) == sorted(answers_of(played, stage))
    for record in complete:
        assert record.logprobs == stage.engine.logprobs(record.response_ids)
        assert record.versions == [(1, len(record.response_ids))]
        span = spans[record.span_id]
        assert record.agent_path == path_of(span)
        assert record.call_id == span.attributes[c.CALL_ID]


def answers_of(played: Played, stage: Stage) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, answer ids) of each call that the gateway has answered to the end."""
    calls = [call for call in stage.brain.calls_in(played.tag) if call.turn.status == 200]
    complete = sum(bool(record.response_ids) for record in played.records)
    return [
        (call.prompt_ids, stage.engine.ids(sampled_text(call.turn)))
        for call in calls
        if not call.turn.delay_s or complete == len(played.llm_spans)
    ]


def check_stopped(played: Played) -> None:
    """Check that a call of the app's own client, under way at the stop, is recorded as cancelled.

    Its answer came after the attempt's end, so it is not recorded.
    """
    [call] = played.llm_spans
    assert call.attributes[c.CALL_OUTCOME] == CallOutcome.CANCELLED
    assert played.tag in str(call.attributes[c.INPUT_MESSAGES])
    assert c.OUTPUT_MESSAGES not in call.attributes


# --- the framework --------------------------------------------------------------------------
def changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Compare two snapshots of the framework's attributes; return the names of those that differ.

    An attribute differs if it is another object. Lists and numbers are compared by value.
    """
    same = {key for key, value in first.items() if _same(value, second.get(key, Impossible))}
    return sorted((first.keys() | second.keys()) - same)


def assert_unchanged(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Check that no attribute differs between two snapshots of the framework (see `changed`)."""
    differences = changed(first, second)
    assert differences == [], f"no longer what it was: {', '.join(differences)}"


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(
            a is b or a == b for a, b in zip(first, second, strict=True)
        )
    return isinstance(first, int | str | bool | float | type(None)) and first == second
