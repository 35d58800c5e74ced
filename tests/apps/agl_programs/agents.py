"""Agents, and the small helpers: environment, events, logs, components."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from typing import Any

from agl_programs.program import raised, shows


@shows("LightningEnvVar", "resolve_bool_env_var", "resolve_int_env_var", "resolve_str_env_var")
def environment(agl: Any) -> Any:
    variable = agl.LightningEnvVar.AGL_SERVER_PORT
    found: dict[str, Any] = {"names": sorted(v.value for v in agl.LightningEnvVar)}
    resolvers = (agl.resolve_bool_env_var, agl.resolve_int_env_var, agl.resolve_str_env_var)
    try:
        for text in (None, "12", "yes", " OFF ", "x"):
            if text is None:
                os.environ.pop(variable.value, None)
            else:
                os.environ[variable.value] = text
            found[str(text)] = []
            for resolve in resolvers:
                try:
                    value = [resolve(variable), resolve(variable, 1), resolve(variable, fallback=0)]
                except ValueError:
                    value = ["ValueError", resolve(variable, 1)]
                found[str(text)].append(value)
    finally:
        os.environ.pop(variable.value, None)
    return found


@shows("ThreadingEvent", "MultiprocessingEvent", "ExecutionEvent")
def events(agl: Any) -> Any:
    found = {}
    for event in (agl.ThreadingEvent(), agl.MultiprocessingEvent()):
        said = [event.is_set(), event.wait(0.01)]
        event.set()
        said += [event.is_set(), event.wait(), event.wait(1.0)]
        event.clear()
        found[type(event).__name__] = [*said, event.is_set()]
    return found


@shows("setup_logging", "setup_module_logging", "configure_logger")
def logs(agl: Any) -> Any:
    import warnings

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "deep", "lines.log")
        agl.setup_logging(
            "INFO",
            console=False,
            apply_to=["mine"],
            submodule_levels={"mine.deep": "ERROR"},
            files=path,
        )
        mine, deep = logging.getLogger("mine"), logging.getLogger("mine.deep")
        mine.warning("seen")
        deep.warning("not seen")
        for handler in mine.handlers:
            handler.flush()
        with open(path) as file:
            lines = file.read().count("seen")
        levels = [mine.level, deep.level, mine.propagate]
        for logger in (
            mine,
            deep,
            logging.getLogger("agentlightning"),
            logging.getLogger("lightspan"),
        ):
            for handler in logger.handlers:
                handler.close()
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)
            logger.propagate = True
    own = agl.setup_module_logging("WARNING", name="own", console=True, propagate=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = agl.configure_logger(logging.DEBUG, name="old")
    said = [[x.name, x.level, x.propagate, len(x.handlers)] for x in (own, old)]
    for logger in (own, old):
        logger.handlers.clear()
    return {"lines": lines > 0, "levels": levels, "loggers": said}


class Part:
    """A component."""

    def __init__(self, size: int = 1, store: Any = None) -> None:
        self.size, self.store = size, store


class LargePart(Part):
    """A larger one."""


@shows("build_component")
def components(agl: Any) -> Any:
    here = f"{__name__}.LargePart"
    own = Part(7)

    def built(spec: Any, **options: Any) -> Any:
        try:
            part = agl.build_component(spec, expected_type=Part, spec_name="part", **options)
        except (ValueError, TypeError) as error:
            return "TypeError" if isinstance(error, TypeError) else "ValueError"
        return part if part is None else [type(part).__name__, part.size, part.store]

    return {
        "itself": agl.build_component(own, expected_type=Part, spec_name="part") is own,
        "class": built(LargePart),
        "function": built(lambda: Part(3)),
        "text": built(here),
        "mapping": built({"type": here, "size": 4}),
        "none": [built(None), built(None, allow_none=True), built(None, default_factory=Part)],
        "defaults": built(LargePart, optional_defaults={"size": 9, "store": lambda: "s", "x": 1}),
        "given": built({"type": here, "size": 2}, optional_defaults={"size": 9}),
        "short": [
            built("large", registry={"large": here}),
            built({"name": "large"}, registry={"large": here}),
        ],
        "plain": built({"size": 5}, dict_requires_type=False, dict_default_cls=Part),
        "wrong": [built({"size": 5}), built(3.5), built(lambda: "text"), built(dict)],
    }


def agent_of(agl: Any) -> Any:
    class Doubles(agl.LitAgent):  # type: ignore[misc, name-defined]
        """Its reward is what it is asked, doubled."""

        def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
            agl.emit_message(f"working on {task}")
            if task == "fail":
                raise ValueError("cannot do that")
            if task == "emit":
                agl.emit_reward(0.125)
                return None
            if task == "spans":
                return [
                    agl.SpanCoreFields(
                        name="made",
                        status=agl.TraceStatus(status_code="OK"),
                        attributes={"by": "hand"},
                        start_time=1.0,
                        end_time=2.0,
                    ),
                    agl.emit_reward(0.75, propagate=False),
                ]
            if task == "template":
                return float(resources["prompt"].format(x=1))
            return 2.0 * task

    return Doubles


@shows("LitAgent", "rollout", "llm_rollout", "prompt_rollout")
def agents(agl: Any) -> Any:
    class Splits(agl.LitAgent):  # type: ignore[misc, name-defined]
        def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

        def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 2.0

    class Awaits(agl.LitAgent):  # type: ignore[misc, name-defined]
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            return 3.0

    class Plain(agl.LitAgent):  # type: ignore[misc, name-defined]
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 4.0

    @agl.rollout
    def asks(task: Any, llm: Any) -> Any:
        return [task, type(llm).__name__, llm.endpoint, llm.sampling_parameters]

    @agl.llm_rollout(strip_proxy=False)
    def raw(task: Any, llm: Any, rollout: Any) -> Any:
        return [type(llm).__name__, rollout.rollout_id]

    @agl.prompt_rollout
    async def says(task: Any, prompt_template: Any, rollout: Any) -> str:
        return str(prompt_template.format(x=task))

    resources = {
        "prompt": agl.PromptTemplate(template="{x}!", engine="f-string"),
        "llm": agl.ProxyLLM(endpoint="http://e/v1", model="m", sampling_parameters={"n": 1}),
    }
    attempt = agl.Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=1)
    rollout = agl.AttemptedRollout(rollout_id="r", input=1, start_time=1, attempt=attempt)
    llm = agl.LLM(endpoint="http://x", model="m")
    return {
        "async": [kind().is_async() for kind in (Splits, Awaits, Plain)]
        + [function.is_async() for function in (asks, raw, says)],
        "splits": [
            Splits().training_rollout(1, {}, rollout),
            Splits().validation_rollout(1, {}, rollout),
        ],
        "plain": [
            Plain().training_rollout(1, {}, rollout),
            Plain().validation_rollout(1, {}, rollout),
        ],
        "awaits": asyncio.run(Awaits().training_rollout_async(1, {}, rollout)),
        "llm": asks.rollout("t", resources, rollout),
        "raw": raw.rollout("t", resources, rollout),
        "prompt": asyncio.run(says.rollout_async("hello", resources, rollout)),
        "called": asks("t", llm),
        "name": asks.__name__,
        "is": isinstance(asks, agl.LitAgent),
        "missing": raised(lambda: asks.rollout("t", {}, rollout)),
    }
