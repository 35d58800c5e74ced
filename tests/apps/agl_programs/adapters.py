"""Spans to triplets and to messages."""

from __future__ import annotations

import json
from typing import Any

from agl_programs.program import fails, shows


def node(
    agl: Any, span_id: str, parent: str | None, start: float, end: float, name: str, **said: Any
) -> Any:
    attributes = {key.replace("__", "."): value for key, value in said.items()}
    return agl.Span.from_attributes(
        attributes=attributes,
        span_id=span_id,
        parent_id=parent,
        trace_id="t" * 32,
        start_time=start,
        end_time=end,
        name=name,
    )


def call(agl: Any, span_id: str, parent: str | None, start: float, **said: Any) -> Any:
    return node(
        agl,
        span_id,
        parent,
        start,
        start + 0.5,
        "openai.chat.completion",
        **{
            "gen_ai__response__id": f"id-{span_id}",
            "gen_ai__request__model": "m",
            "gen_ai__prompt__0__role": "user",
            "gen_ai__prompt__0__content": f"asked {span_id}",
            "gen_ai__completion__0__role": "assistant",
            "gen_ai__completion__0__content": f"answered {span_id}",
            "prompt_token_ids": [1, int(start)],
            "response_token_ids": [2, int(start)],
            **said,
        },
    )


def earned(agl: Any, span_id: str, parent: str | None, start: float, value: float) -> Any:
    said = {"agentlightning__reward__0__name": "primary", "agentlightning__reward__0__value": value}
    return node(agl, span_id, parent, start, start, "agentlightning.annotation", **said)


def episode(agl: Any) -> list[Any]:
    """A writer that is called twice, a checker in between, rewards and a judge."""
    return [
        node(agl, "root", None, 0, 30, "session"),
        node(agl, "w1", "root", 1, 6, "agent", agent__name="write_query"),
        call(agl, "c1", "w1", 2),
        node(agl, "inner", "w1", 3, 4, "tool"),
        call(agl, "c2", "inner", 3),
        earned(agl, "r1", "root", 7, 0.25),
        node(agl, "k", "root", 8, 12, "agent", recipient_agent_type="check_query"),
        call(agl, "c3", "k", 9),
        node(
            agl,
            "w2",
            "root",
            13,
            20,
            "agent",
            agentops__span__kind="agent",
            operation__name="rewrite_query",
        ),
        call(agl, "c4", "w2", 14, logprobs__content='[{"logprob": -0.5}]'),
        node(agl, "dup", "c4", 14.1, 14.4, "openai.chat.completion"),
        node(
            agl,
            "j",
            "w2",
            16,
            18,
            "agentlightning.operation",
            agentlightning__operation__name="agentlightning.reward",
        ),
        call(agl, "c5", "j", 17),
        earned(agl, "r2", "w2", 19, 1.0),
        node(agl, "lc", "root", 21, 25, "langchain.Chain.x", lc_name="Tail"),
        call(agl, "c6", "lc", 22, prompt_token_ids="none"),
        earned(agl, "r3", "root", 26, 0.5),
    ]


@shows("TracerTraceToTriplet", "TraceToTripletBase", "Triplet")
def triplets(agl: Any) -> Any:
    def adapted(spans: list[Any], **options: Any) -> Any:
        adapter = agl.TracerTraceToTriplet(repair_hierarchy=False, **options)
        return [triplet.model_dump() for triplet in adapter(spans)]

    def calls(spans: list[Any], **options: Any) -> Any:
        return [
            [t["metadata"]["response_id"], t["metadata"]["agent_name"], t["reward"]]
            for t in adapted(spans, **options)
        ]

    spans = episode(agl)
    images = [
        call(
            agl,
            "i",
            None,
            1,
            gen_ai__prompt__0__content=json.dumps(
                [
                    {"type": "image_url", "image_url": {"url": "http://pic"}},
                    {"type": "text", "text": "x"},
                ]
            ),
        )
    ]
    return {
        "whole": adapted(spans),
        "write": calls(spans, agent_match="write"),
        "anchored": calls(spans, agent_match="^write"),
        "nobody": calls(spans, agent_match="nobody"),
        "judges too": calls(spans, exclude_llm_call_in_reward=False),
        "siblings": calls(spans, reward_match="first_sibling"),
        "tools": calls(spans, llm_call_match="^tool$"),
        "with tokens": calls(spans, _skip_empty_token_spans=True),
        "an orphan": calls([call(agl, "o", "unknown", 1), earned(agl, "r", "unknown", 2, 1.5)]),
        "images": adapted(images),
        "is": issubclass(agl.TracerTraceToTriplet, agl.TraceToTripletBase),
        "adapter": isinstance(agl.TracerTraceToTriplet(), agl.TraceAdapter),
    }


@shows("TraceToMessages", "TraceAdapter", "OtelTraceAdapter", "Adapter")
def messages(agl: Any) -> Any:
    asks = call(
        agl,
        "a",
        None,
        1,
        gen_ai__prompt__0__role="system",
        gen_ai__prompt__1__role="user",
        gen_ai__prompt__1__content="?",
        gen_ai__request__functions__0__name="look",
        gen_ai__request__functions__0__description="Looks",
        gen_ai__request__functions__0__parameters='{"type": "object", "properties": {}}',
    )
    tool = node(
        agl,
        "t",
        "a",
        1.1,
        1.2,
        "tool",
        tool__name="look",
        tool__parameters='{"x": 1}',
        tool__call__id="call-1",
        tool__call__type="function",
    )
    last = call(agl, "b", None, 3)

    class Counts(agl.TraceAdapter):  # type: ignore[misc, name-defined]
        def adapt(self, source: Any) -> int:
            return len(source)

    class Reads(agl.OtelTraceAdapter):  # type: ignore[misc, name-defined]
        def adapt(self, source: Any) -> list[str]:
            return [s.name for s in source]

    class Doubles(agl.Adapter):  # type: ignore[misc, name-defined]
        def adapt(self, source: int) -> int:
            return 2 * source

    kept = agl.TraceToMessages().adapt([asks, tool, last])
    for conversation in kept:  # 0.3.0 says of some messages that they are of no tool call
        for message in conversation["messages"]:
            if message.get("tool_call_id", 0) is None:
                del message["tool_call_id"]
    return {
        "messages": kept,
        "none": agl.TraceToMessages()([tool]),
        "own": [Counts()([1, 2]), Reads()([asks]), Doubles()(3)],
        "is": [
            isinstance(Counts(), agl.Adapter),
            isinstance(agl.TraceToMessages(), agl.TraceAdapter),
        ],
        "must": fails(lambda: agl.Adapter().adapt(1)),
    }
