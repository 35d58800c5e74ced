"""Records: spans, rollouts, resources, and the words in them."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from agl_programs.program import SHOWN, raised, shows, span


@shows("Span", "SpanContext", "TraceStatus", "OtelResource", "SpanCoreFields", "Event", "Link")
def spans(agl: Any) -> Any:
    core = agl.SpanCoreFields(
        name="core",
        status=agl.TraceStatus(status_code="ERROR", description="bad"),
        attributes={"k": [1, 2]},
        start_time=1.5,
        end_time=2,
    )
    from_core = agl.Span.from_core_fields(core, rollout_id="r", attempt_id="a", sequence_id=3)
    whole = span(agl, attributes={"x": 1}, name="n", rollout_id="r", start_time=1, end_time=2.5)
    event = agl.Event(name="e", attributes={"z": True}, timestamp=3)
    link = agl.Link(context=whole.context, attributes={"why": "so"})
    full = whole.model_copy(update={"events": [event], "links": [link]})
    again = agl.Span.model_validate_json(full.model_dump_json())
    resource = agl.OtelResource(attributes={"service.name": "s"}, schema_url="u")
    return {
        "core": from_core.model_dump(exclude={"trace_id", "span_id", "context"}),
        "whole": whole.model_dump(),
        "full": full.model_dump(mode="json"),
        "again": again == full,
        "types": [type(again.events[0]).__name__, type(again.links[0].context).__name__],
        "random": len({agl.Span.from_attributes(attributes={}).span_id for _ in range(3)}),
        "default": [agl.Span.from_attributes(attributes={}).name, whole.resource.model_dump()],
        "resource": span(agl, resource=resource).resource.model_dump(),
        "wrong": [
            raised(lambda: agl.TraceStatus(status_code="FINE")),
            raised(lambda: agl.SpanContext(trace_id=1, span_id="", is_remote=0, trace_state={})),
            raised(lambda: agl.Span.model_validate({"name": "n"})),
        ],
    }


@shows("Span", "Event", "Link", "SpanContext", "TraceStatus", "OtelResource")
def spans_of_opentelemetry(agl: Any) -> Any:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "x"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("programs")
    outer = tracer.start_span("outer", attributes={"k": (1, 2), "t": "x"}, start_time=10**18)
    outer.add_event("happened", {"z": 1.5}, timestamp=10**18 + 10**9)
    outer.set_status(trace.StatusCode.ERROR, "bad")
    inner = tracer.start_span(
        "inner",
        context=trace.set_span_in_context(outer),
        links=[trace.Link(outer.get_span_context(), {"l": 1})],
        start_time=10**18,
    )
    inner.end(10**18 + 5)
    outer.end(10**18 + 2 * 10**9)
    first, second = (
        agl.Span.from_opentelemetry(s, "r", "a", n) for n, s in enumerate(kept.get_finished_spans())
    )
    ids = {"trace_id", "span_id", "parent_id", "context", "parent", "links"}
    return {
        "inner": first.model_dump(mode="json", exclude=ids),
        "outer": second.model_dump(mode="json", exclude=ids),
        "child": first.parent_id == second.span_id == first.parent.span_id,
        "link": [first.links[0].context.span_id == second.span_id, first.links[0].attributes],
        "lengths": [len(first.trace_id), len(first.span_id)],
    }


@shows("SpanNames", "SpanAttributeNames", "StatusCode", "RolloutMode", "RolloutStatus")
def words(agl: Any) -> Any:
    literals = ("StatusCode", "RolloutMode", "RolloutStatus", "AttemptStatus", "WorkerStatus")
    return {
        **{name: sorted(typing.get_args(getattr(agl, name))) for name in literals},
        "SpanNames": {name.name: name.value for name in agl.SpanNames},
        "SpanAttributeNames": {name.name: name.value for name in agl.SpanAttributeNames},
        "text": agl.SpanNames.REWARD == "agentlightning.reward",
    }


SHOWN["words"] |= {"AttemptStatus", "WorkerStatus"}


@shows("Attributes", "AttributeValue", "TraceState", "SpanLike", "TaskInput", "RolloutRawResult")
def annotations(agl: Any) -> Any:
    plain = {str, bool, int, float}
    return {
        "Attributes": typing.get_origin(agl.Attributes).__name__,
        "AttributeValue": sorted(
            kind.__name__ for kind in typing.get_args(agl.AttributeValue) if kind in plain
        ),
        "TraceState": [kind.__name__ for kind in typing.get_args(agl.TraceState)],
        "SpanLike": agl.Span in typing.get_args(agl.SpanLike),
        "TaskInput": agl.TaskInput is Any,
        "RolloutRawResult": [
            kind in typing.get_args(agl.RolloutRawResult) for kind in (float, type(None))
        ],
        "NamedResources": typing.get_origin(agl.NamedResources).__name__,
        "FilterField": sorted(agl.FilterField.__annotations__),
        "SortOptions": sorted(agl.SortOptions.__annotations__),
        "FilterOptions": issubclass(dict, typing.get_origin(agl.FilterOptions)),
        "store": [
            sorted(agl.LightningStoreCapabilities.__annotations__),
            {"name", "total_rollouts"} <= set(agl.LightningStoreStatistics.__annotations__),
        ],
        "protocols": [
            hasattr(agl.SpanRecordingContext, "record_exception"),
            hasattr(agl.SpanRecordingContext, "get_recorded_span"),
            hasattr(agl.Dataset[int], "__getitem__"),
            hasattr(agl.ExecutionEvent, "wait"),
        ],
    }


SHOWN["annotations"] |= {
    *("NamedResources", "FilterField", "SortOptions", "FilterOptions", "SpanRecordingContext"),
    *("Dataset", "ExecutionEvent", "LightningStoreCapabilities", "LightningStoreStatistics"),
}


@shows("Rollout", "Attempt", "AttemptedRollout", "RolloutConfig", "EnqueueRolloutRequest", "Worker")
def rollouts(agl: Any) -> Any:
    attempt = agl.Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=1)
    rollout = agl.Rollout(rollout_id="r", input={"q": [1]}, start_time=2.5, mode="val")
    nested = {"rollout_id": "r", "input": 1, "start_time": 1.0, "attempt": attempt.model_dump()}
    attempted = agl.AttemptedRollout.model_validate(nested)
    wrong = {**nested, "rollout_id": "other"}
    config = agl.RolloutConfig(max_attempts=3, retry_condition=["failed", "timeout"])
    return {
        "attempt": attempt.model_dump(),
        "rollout": rollout.model_dump(),
        "attempted": [type(attempted.attempt).__name__, attempted.model_dump()],
        "isinstance": isinstance(attempted, agl.Rollout),
        "config": config.model_dump(),
        "request": agl.EnqueueRolloutRequest(input="x", config=config).model_dump(),
        "worker": agl.Worker(worker_id="w", status="busy").model_dump(exclude_none=True),
        "own defaults": agl.Rollout(rollout_id="r", input=1, start_time=1).config
        is not rollout.config,
        "wrong": [
            raised(lambda: agl.AttemptedRollout(**wrong)),
            raised(lambda: agl.RolloutConfig(max_attempts=0)),
            raised(lambda: agl.RolloutConfig(retry_condition=["tired"])),
            raised(lambda: agl.Rollout(rollout_id="r", input=1, start_time=1, mode="dev")),
            raised(lambda: agl.Worker(worker_id=7)),
        ],
    }


@shows("Triplet", "PaginatedResult", "ParallelWorkerBase", "Hook")
def others(agl: Any) -> Any:
    page = agl.PaginatedResult(items=["a", "b", "c"], limit=3, offset=1, total=9)
    worker = agl.ParallelWorkerBase()
    before = worker.worker_id
    worker.init()
    worker.init_worker(4)
    hooks = ("on_rollout_start", "on_rollout_end", "on_trace_start", "on_trace_end")
    return {
        "triplet": agl.Triplet(prompt=[1], response="x", reward=1).model_dump(),
        "page": [len(page), page[0], list(page[1:]), list(page), "b" in page, page.total],
        "limits": [page.limit, page.offset],
        "worker": [before, worker.worker_id, worker.run()],
        "hooks": [inspect.iscoroutinefunction(getattr(agl.Hook, name)) for name in hooks],
        "hook": isinstance(agl.Hook(), agl.ParallelWorkerBase),
    }


@shows("LLM", "ProxyLLM", "PromptTemplate", "Resource", "ResourceUnion", "ResourcesUpdate")
def resources(agl: Any) -> Any:
    llm = agl.LLM(endpoint="http://e/v1", model="m", sampling_parameters={"temperature": 0.5})
    rollout = agl.AttemptedRollout(
        rollout_id="r",
        input=1,
        start_time=1,
        attempt=agl.Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=1),
    )
    proxies = [
        agl.ProxyLLM(endpoint=url, model="m", api_key="k")
        for url in ("http://e", "http://e/", "http://e/v1", "http://e/v1/")
    ]
    prompt = agl.PromptTemplate(template="Say {x} and {y!r}", engine="f-string")
    update = agl.ResourcesUpdate(
        resources_id="rs",
        create_time=1,
        update_time=2,
        version=1,
        resources={"llm": llm, "proxy": proxies[0], "prompt": prompt},
    )
    again = agl.ResourcesUpdate.model_validate_json(update.model_dump_json())
    return {
        "llm": [llm.get_base_url(), llm.get_base_url("r", "a"), llm.model_dump()],
        "proxies": [proxy.get_base_url("r", "a") for proxy in proxies],
        "none": proxies[0].get_base_url(None, None),
        "half": raised(lambda: proxies[0].get_base_url("r", None)),
        "baked": proxies[2].with_attempted_rollout(rollout).model_dump(),
        "prompt": [prompt.format(x=1, y="z"), prompt.model_dump()],
        "kinds": [isinstance(item, agl.Resource) for item in (llm, proxies[0], prompt)],
        "is an LLM": isinstance(proxies[0], agl.LLM),
        "update": update.model_dump(mode="json"),
        "again": {name: type(item).__name__ for name, item in again.resources.items()},
        "equal": again.resources["llm"] == llm,
        "one of": len(typing.get_args(agl.ResourceUnion)) >= 2,
        "wrong": [
            raised(lambda: agl.LLM(endpoint=1, model="m")),
            raised(lambda: agl.PromptTemplate(template="x", engine="mustache")),
            raised(lambda: agl.ResourcesUpdate.model_validate({"resources_id": "x"})),
        ],
    }
