"""Tests of lightspan_agl's agents: arguments, serialization, refusals."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
import types
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

import lightspan
import lightspan_agl as agl
from lightspan.errors import AppError, ConfigError, DataError, UnsupportedError
from lightspan.runners.app import load_app
from lightspan.runners.attempt import AttemptRun
from lightspan.runners.runner import Runner
from lightspan.schema import semconv as c
from lightspan.schema.records import Attempt, Mode, Rollout
from lightspan.schema.resources import ROUTING
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import SpanKind
from lightspan.stores import open_store
from lightspan_agl._agent_match import instrument_advice
from lightspan_agl._agent_transport import AgentApp, AgentPool, MainLLM, agents, as_app
from lightspan_agl._dev import DevSummary
from lightspan_agl._main_block import changes_of_main
from lightspan_testing.scripted import ScriptedServer

LLM = MainLLM(
    model="Qwen/Qwen2.5", sampling={"train": {"temperature": 1.0}, "val": {"temperature": 0.25}}
)
NEVER = "http://127.0.0.1:9"


class Remembers(agl.LitAgent[dict[str, Any]]):
    """An agent that stores its arguments."""

    def __init__(self, factor: float = 1.0, *, names: list[str] | None = None) -> None:
        super().__init__()
        self.factor = factor
        self.names = names

    def rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        SEEN.append((self, task, resources, rollout))
        return self.factor * float(task["n"])


class Splits(agl.LitAgent[Any]):
    """An asynchronous agent with separate methods for training and validation."""

    async def training_rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        return 1.0

    async def validation_rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        return 2.0


class Emits(agl.LitAgent[Any]):
    """An agent that emits its reward instead of returning it."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> None:
        agl.emit_reward({"style": 0.25, "right": 0.75}, primary_key="right", attributes={"a": 1})
        agl.emit_annotation({"nested": {"deep": [1, 2], "flag": True}})
        agl.emit_message("hello", {"tag": "x"})
        agl.emit_object({"some": "thing"}, {"tag": {"deep": "y"}})
        agl.emit_exception(ValueError("handled"), {"tag": [1, "z"]})
        agl.emit_message("not this", propagate=False)


@agl.rollout
def by_llm(task: Any, llm: agl.LLM, rollout: agl.Rollout) -> float:
    SEEN.append((llm, task, None, rollout))
    return 0.5


@agl.rollout
async def by_prompt(task: Any, prompt_template: agl.PromptTemplate) -> float:
    return float(prompt_template.format(x=task["n"]))


SEEN: list[tuple[Any, Any, Any, Any]] = []


@pytest.fixture(autouse=True)
def _clean() -> None:
    SEEN.clear()


async def run_once(
    app: Any, task: Any = None, *, mode: Mode = Mode.TRAIN, gateway: str = NEVER
) -> tuple[Attempt, list[Any]]:
    """Return the attempt of one rollout, and its spans."""
    routing = Routing(
        gateway_url=gateway,
        rules=[Rule("*write*", Target(route=Route.POLICY, policy="policy"))],
        default=Target(route=Route.SHARED, policy="policy"),
    )
    async with open_store("memory:") as store:
        resources_id = await store.put_resources({ROUTING: routing} if gateway else {})
        rollout = Rollout(
            rollout_id="r1",
            task=task,
            task_id="t",
            group_id="g1",
            mode=mode,
            resources_id=resources_id,
        )
        await store.enqueue([rollout])
        [claim] = await store.claim("me", 1, 30)
        await AttemptRun(Runner(store, app), claim).run()
        [attempt] = await store.attempts(["r1"])
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        return attempt, spans


def arrived(agent: agl.LitAgent[Any]) -> Any:
    """Return the agent's app as a runner loads it."""
    return load_app(as_app(agent, LLM).reference)


class Nested:
    """Holder of settings, of a class of the user."""

    def __init__(self) -> None:
        self.parts = [Options()]


class Model(BaseModel):
    k: int = 1


@dataclass(slots=True)
class Slots:
    k: int = 1


@dataclass
class Options:
    limit: int = 1


class Tables(agl.LitAgent[Any]):
    """An agent with containers as attributes."""

    def __init__(self, names: list[str] | None = None) -> None:
        self.names = names
        self.table: dict[str, Any] = {"a": [1], "o": Nested()}
        self.tags = {"x"}
        self.options = Options()
        self.nested = Nested()
        self.models = [Model()]
        self.slots = Slots()
        self.ordered = OrderedDict(a=1)
        self.user_dict = UserDict(a=1)
        self.arguments = argparse.Namespace(k=1)
        self.handler = logging.StreamHandler()

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("table", lambda agent: agent.table.update(b=2)),
        ("table", lambda agent: agent.table["a"].append(1)),
        ("table", lambda agent: agent.table["a"].__setitem__(0, True)),
        ("tags", lambda agent: agent.tags.add("y")),
        ("options", lambda agent: setattr(agent.options, "limit", 2)),
        ("table", lambda agent: setattr(agent.table["o"], "parts", [])),
        ("nested", lambda agent: setattr(agent.nested.parts[0], "limit", 2)),
        ("models", lambda agent: setattr(agent.models[0], "k", 5)),
        ("ordered", lambda agent: agent.ordered.update(b=2)),
        ("user_dict", lambda agent: agent.user_dict.update(b=2)),
        ("slots", lambda agent: setattr(agent.slots, "k", 5)),
        ("arguments", lambda agent: setattr(agent.arguments, "k", 5)),
    ],
)
def test_changes_in_place_are_refused(name: str, change: Any) -> None:
    agent = Tables()
    change(agent)
    with pytest.raises(AppError, match=f"the agent Tables: {name} was set or changed after"):
        as_app(agent, LLM)


def test_arguments_and_objects_of_packages_may_change() -> None:
    names = ["a"]
    agent = Tables(names)
    names.append("b")
    agent.handler.level = 10
    [description] = [load_app(as_app(agent, LLM).reference)]
    with description._pool.agent() as copy:  # type: ignore[attr-defined]
        assert copy.names == ["a", "b"]


SCRIPT = """
LIMIT = 1
OTHER = 1
class Agent:
    def rollout(self, task):
        data = task
        return LIMIT, OTHER, data
def main():
    return data
if __name__ == "__main__":
    LIMIT = 2
    data = [1]
    own = 3
    def inner():
        return own
"""


def test_globals_that_only_the_main_block_sets_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    as_app(Remembers(), LLM)
    assert capsys.readouterr().out == ""  # the agent is not the script's
    monkeypatch.setattr(Remembers, "__module__", "__main__")
    as_app(Remembers(), LLM)
    assert "the script sets or changes LIMIT, data under `if __name__ ==" in capsys.readouterr().out
    script.write_text(SCRIPT.replace("    LIMIT = 2", "").replace("    data = [1]", ""))
    as_app(Remembers(), LLM)
    assert capsys.readouterr().out == ""


# --- what agents are handed -----------------------------------------------------------------


CHANGES = """
import json, os, settings
import numpy as np
from config import OPTIONS, UNUSED
CFG, LIST, SPACE, LEVEL, LOCAL = {"k": 1}, [], object(), 1, {}
class Agent:
    K = 0
    def rollout(self, task):
        return CFG, LIST, SPACE.k, level(), task.update(LOCAL)
def level():
    return LEVEL
def prepare(path):
    global LEVEL
    LEVEL = 5
    LOCAL = {}
    LOCAL["own"] = path
    settings.BONUS["v"] = path
def main():
    prepare("x")
if __name__ == "__main__":
    CFG["k"] = 5
    LIST.append(5)
    SPACE.k = 5
    Agent.K = 5
    OPTIONS.update(k=5)
    setattr(settings, "X", 5)
    os.environ["K"] = "5"
    own = np.append([], 1)
    own.k = json.loads("5")
    main()
"""


def test_changes_of_the_main_block_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHANGES)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert changes_of_main(is_of_script=True) == [
        *("Agent.K", "CFG['k']", "LEVEL", "LIST", "OPTIONS", "SPACE.k", "settings"),
        "settings.BONUS['v']",
    ]
    # an agent of another module reads what the script changes in modules
    assert changes_of_main(is_of_script=False) == ["OPTIONS", "settings", "settings.BONUS['v']"]


INSIDE = """
LEVEL, MODEL, OTHER = 1, None, 0
class Agent:
    def rollout(self, task):
        MODEL = make(task)
        def node(text):
            return MODEL(text), [LEVEL for _ in text]
        return node("x")
class Experiment:
    def run(self):
        global LEVEL, OTHER
        LEVEL = OTHER = 5
        print(OTHER)
if __name__ == "__main__":
    import numpy as np, settings
    MODEL = np.append([], 1)
    settings.K = 5
    Experiment().run()
"""


def test_changes_by_methods_and_of_modules_that_the_block_imports_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nested function that reads a local of its parent reads no global."""
    script = tmp_path / "script.py"
    script.write_text(INSIDE)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert changes_of_main(is_of_script=True) == ["LEVEL", "settings.K"]
    assert changes_of_main(is_of_script=False) == ["settings.K"]


async def test_the_agent_gets_task_resources_and_rollout() -> None:
    attempt, _ = await run_once(arrived(Remembers(2.0)), {"n": 3})
    assert attempt.reward is not None
    assert attempt.reward.value == 6.0
    [(agent, task, resources, rollout)] = SEEN
    assert (type(agent).__name__, agent.factor, task) == ("Remembers", 2.0, {"n": 3})
    assert (rollout.rollout_id, rollout.mode, rollout.input) == ("r1", "train", {"n": 3})
    assert rollout.attempt.attempt_id == attempt.attempt_id
    assert rollout.metadata == {"group_id": "g1", "step": 0, "data_id": "g1", "is_train": True}
    llm = resources["main_llm"]
    assert llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id) == f"{NEVER}/v1"
    assert llm.get_base_url() == llm.endpoint == f"{NEVER}/v1"
    assert (llm.model, llm.sampling_parameters) == ("Qwen/Qwen2.5", {"temperature": 1.0})
    assert llm.api_key == attempt.call_token
    assert attempt.call_token not in repr(llm)
    with pytest.raises(ConfigError, match="take both ids from the `rollout` argument"):
        llm.get_base_url("other", "attempt")


async def test_validation_has_its_own_mode_and_temperature() -> None:
    await run_once(arrived(Remembers()), {"n": 1}, mode=Mode.VAL)
    assert SEEN[0][3].mode == "val"
    assert SEEN[0][3].metadata["is_train"] is False
    assert SEEN[0][2]["main_llm"].sampling_parameters == {"temperature": 0.25}


@pytest.mark.parametrize(("mode", "reward"), [(Mode.TRAIN, 1.0), (Mode.VAL, 2.0)])
async def test_training_and_validation_may_differ(mode: Mode, reward: float) -> None:
    app = arrived(Splits())
    assert app.is_async
    attempt, _ = await run_once(app, mode=mode)
    assert attempt.reward is not None
    assert attempt.reward.value == reward


async def test_functions_are_agents() -> None:
    attempt, _ = await run_once(arrived(by_llm), {"n": 1})
    assert attempt.reward is not None
    assert attempt.reward.value == 0.5
    llm = SEEN[0][0]
    assert isinstance(llm, agl.LLM)
    assert llm.endpoint == f"{NEVER}/v1"
    assert by_llm({"n": 1}, llm, None) == 0.5


async def test_prompt_functions_get_the_prompt() -> None:
    template = agl.PromptTemplate(template="{x}.5", engine="f-string")
    assert await by_prompt.rollout_async({"n": 2}, {"p": template}, None) == 2.5  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="engine='jinja'"):
        agl.PromptTemplate(template="{{ x }}", engine="jinja")
    with pytest.raises(AppError, match="takes a LLM, and there is none in \\['p'\\]"):
        by_llm.rollout({}, {"p": template}, None)  # type: ignore[arg-type]


def test_functions_that_ask_for_the_unknown_are_refused() -> None:
    def other(x: int) -> None: ...
    def more(task: int, tool: int) -> None: ...

    with pytest.raises(AppError, match="must take `task` first"):
        agl.rollout(other)
    with pytest.raises(AppError, match="takes tool, which are unknown"):
        agl.rollout(more)


async def test_emitted_rewards_count_where_none_is_returned() -> None:
    _, spans = await run_once(AgentApp(_one(Emits()), {}), gateway="")
    kinds = [span.kind for span in spans if span.kind is not SpanKind.CHAIN]
    assert kinds == [
        *(SpanKind.REWARD, SpanKind.ANNOTATION),
        *(SpanKind.MESSAGE, SpanKind.OBJECT, SpanKind.EXCEPTION),
    ]
    by_kind = {span.kind: span for span in spans}
    reward = by_kind[SpanKind.REWARD]
    assert reward.attributes["lightspan.reward.value"] == 0.75
    assert reward.attributes["a"] == 1
    assert by_kind[SpanKind.MESSAGE].attributes["tag"] == "x"
    assert by_kind[SpanKind.OBJECT].attributes["tag.deep"] == "y"
    assert by_kind[SpanKind.EXCEPTION].attributes["tag"] == '[1,"z"]'
    nested = by_kind[SpanKind.ANNOTATION]
    assert nested.attributes["lightspan.annotation.nested.deep"] == [1, 2]
    assert nested.attributes["lightspan.annotation.nested.flag"] is True


def _one(agent: Any) -> Any:
    return AgentPool(lambda: agent)


# --- an agent belongs to one attempt at a time ----------------------------------------------


async def test_attempts_at_once_have_agents_of_their_own() -> None:
    app = arrived(Remembers(2.0))
    with app._pool.agent() as first, app._pool.agent() as second:
        assert first is not second
        assert (first.factor, second.factor) == (2.0, 2.0)
    with app._pool.agent() as third:
        assert third in (first, second)


# --- how agents travel ----------------------------------------------------------------------


def test_an_agent_is_made_again_from_its_arguments() -> None:
    app = as_app(Remembers(0.5, names=["a.b:c", "100 %2E"]), LLM)
    with load_app(app.reference)._pool.agent() as agent:  # type: ignore[attr-defined]
        assert type(agent).__qualname__ == "Remembers"
        assert (agent.factor, agent.names) == (0.5, ["a.b:c", "100 %2E"])


def test_an_agent_of_arguments_that_are_not_json_travels_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("agl_kept")
    module.agent = agent = Remembers(names=("tuple",))  # type: ignore[arg-type, attr-defined]
    monkeypatch.setitem(sys.modules, "agl_kept", module)
    assert '"agent":"agl_kept:agent"' in as_app(agent, LLM).reference
    with arrived(agent)._pool.agent() as found:
        assert found is agent


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Remembers(names=("a",)), r"names=\('a',\) is a tuple. Create that in __init__"),  # type: ignore[arg-type]
        (
            lambda: _changed(),
            "factor was set or changed after construction, and runners construct it again",
        ),
        (lambda: _local(), "is defined inside a function"),
    ],
)
def test_an_agent_that_cannot_be_made_again_is_an_error(make: Any, why: str) -> None:
    with pytest.raises(AppError, match=why):
        as_app(make(), LLM)


def _changed() -> Any:
    agent = Remembers()
    agent.factor = 7.0
    return agent


def _local() -> Any:
    class Local(Remembers):
        pass

    return Local()


def test_a_runner_that_cannot_make_the_agent_says_why() -> None:
    text = '{"agent":"nowhere:Agent","llm":{"model":"m","sampling":{}},"args":[]}'
    with pytest.raises(AppError, match="'nowhere:Agent' cannot be imported: ModuleNotFoundError"):
        getattr(agents, text)
    with pytest.raises(AttributeError):
        agents.anything_else  # noqa: B018


# --- calls that point elsewhere -------------------------------------------------------------


USER: Any = {"role": "user", "content": "?"}


def _say(client: openai.OpenAI) -> str | None:
    reply = client.chat.completions.create(model="j", messages=[USER])
    return reply.choices[0].message.content


class AsksMain(agl.LitAgent[Any]):
    """An agent that calls the trained model."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"]
        client = openai.OpenAI(base_url=llm.get_base_url(), api_key="dummy", max_retries=0)
        for name in ("write_query", "check_query"):
            with lightspan.agent(name):
                assert _say(client) == "answered"
        return 1.0


async def test_calls_of_main_llm_carry_the_agent_and_the_attempts_token() -> None:
    with ScriptedServer(lambda request: "answered") as gateway:
        origin = gateway.origin
        attempt, _ = await run_once(arrived(AsksMain()), {}, gateway=origin)
        requests = list(gateway.requests)
    assert attempt.message == ""
    assert [r.headers["authorization"] for r in requests] == [f"Bearer {attempt.call_token}"] * 2
    assert [r.headers[c.HEADER_AGENT.lower()] for r in requests] == ["write_query", "check_query"]


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"store": object()}, "leave it out; VERL's store is a SQLite file"),
        ({"runner": "agentlightning.LitAgentRunner"}, "leave it out; Trainer runs the agents"),
        ({"max_rollouts": 3}, r"leave it out; dev runs each task once"),
        (
            {
                "max_rollouts": 3,
                "algorithm": agl.VERL({"actor_rollout_ref": {"model": {"path": "m"}}}),
            },
            r"trainer\.total_training_steps of VERL\(config\) ends a run",
        ),
        (
            {"max_tasks": 3, "algorithm": agl.APO(openai.AsyncOpenAI(api_key="key"))},
            "beam_rounds, beam_width, branch_factor and the batch sizes of APO",
        ),
        ({"algorithm": object()}, r"use VERL\(config\), APO\(client\) or a function under @algo"),
        ({"adapter": {"reward_match": "first"}}, r"reward_match='first'\): leave it out"),
        ({"n_runners": 0}, "must be at least 1"),
        ({"initial_resources": {"main_llm": "gpt"}}, r"initial_resources\['main_llm'\] must be"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        agl.Trainer(**options)


def test_runners_have_two_names() -> None:
    assert agl.Trainer(n_workers=3).n_runners == 3
    adapter = agl.TracerTraceToTriplet(agent_match="x")
    assert agl.Trainer(adapter=adapter).adapter is adapter


def test_fit_needs_an_algorithm_and_dev_a_model() -> None:
    with pytest.raises(ConfigError, match=r"fit needs an algorithm"):
        agl.Trainer().fit(Remembers(), [{"n": 1}])
    with pytest.raises(ConfigError, match=r"dev needs a model for the agents"):
        agl.Trainer().dev(Remembers(), [{"n": 1}])


async def test_an_agent_without_a_rollout_is_an_error() -> None:
    class Half(agl.LitAgent[Any]):
        def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

    resources: Any = {"main_llm": agl.LLM(endpoint=NEVER, model="m")}
    with pytest.raises(ConfigError, match="must be a LitAgent"):
        agl.Trainer(initial_resources=resources).dev("agent", [{"n": 1}])  # type: ignore[arg-type]
    attempt, _ = await run_once(AgentApp(_one(Half()), {}), gateway="", mode=Mode.VAL)
    assert "Half does not define rollout(self, task, resources, rollout)" in attempt.message


def test_hooks_of_an_agent_are_refused() -> None:
    class Hooked(Remembers):
        def on_rollout_start(self, *_: Any) -> None: ...

    resources: Any = {"main_llm": agl.LLM(endpoint=NEVER, model="m")}
    with pytest.raises(UnsupportedError, match="defines on_rollout_start, which lightspan"):
        agl.Trainer(initial_resources=resources).dev(Hooked(), [{"n": 1}])


def test_logs_go_where_they_are_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logger = logging.getLogger("mine")
    try:
        agl.setup_logging("WARNING", apply_to=["mine"], color=False)
        assert "setup_logging: without effect: color=False" in capsys.readouterr().out
        agl.setup_logging("WARNING", apply_to=["mine"], files=str(tmp_path / "log"))
        logger.warning("seen")
        logger.info("nothing")
        assert capsys.readouterr().err.count("mine)  seen\n") == 1
        assert "nothing" not in (tmp_path / "log").read_text()
    finally:
        for name in ("lightspan", "lightspan_agl", "mine"):
            for handler in logging.getLogger(name).handlers[:]:
                logging.getLogger(name).removeHandler(handler)
                handler.close()
            logging.getLogger(name).propagate = True
            logging.getLogger(name).setLevel(logging.NOTSET)


# --- data -----------------------------------------------------------------------------------


class Numbers:
    """A data set with numpy values."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        import numpy

        return {"n": numpy.int64(index), "many": numpy.arange(2), "one": (1, "a")}


def test_types_that_json_lacks_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    from lightspan_agl._tasks import as_tasks

    task = {"b": Decimal("1.5"), "a": [{"z": (1,), "c": {2}}], "o": Options()}
    tasks = as_tasks([task, task], "val_dataset")
    assert repr(tasks[0]) == "{'b': '1.5', 'a': [{'z': [1], 'c': [2]}], 'o': {'limit': 1}}"
    [line] = capsys.readouterr().out.splitlines()
    assert line == (
        "val_dataset: tasks are JSON, so agents get other types: str in place of decimal.Decimal "
        "(such as val_dataset[0]['b']), list in place of tuple (such as val_dataset[0]['a'][0]"
        "['z']), list in place of set (such as val_dataset[0]['a'][0]['c']), dict in place of "
        "tests.agl.test_agents.Options (such as val_dataset[0]['o'])"
    )


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"a": [{1: 2}]}, r"^x\[0\]\['a'\]\[0\] has the key 1; keys are text: write '1'$"),
        ({"a": b"x"}, r"^x\[0\] is not JSON: Object of type bytes"),
        ({"a": float("nan")}, r"^x\[0\] is not JSON: Out of range float"),
        (
            {"a": [Model()]},
            r"^x\[0\]\['a'\]\[0\] is a Model: give x\[0\]\['a'\]\[0\].model_dump\(\)$",
        ),
    ],
)
def test_tasks_that_are_not_json_are_refused_everywhere(task: Any, why: str) -> None:
    from lightspan_agl._tasks import as_tasks

    with pytest.raises(DataError, match=why):
        as_tasks([task], "x")
    store = agl.InMemoryLightningStore()
    with pytest.raises(DataError, match=why.replace(r"x\[0\]", "input")):
        asyncio.run(store.enqueue_rollout(task))


def test_data_sets_become_tasks() -> None:
    from lightspan_agl._tasks import as_tasks

    many = {"many": [0, 1], "one": [1, "a"]}
    assert as_tasks(Numbers(), "x") == [{"n": 0, **many}, {"n": 1, **many}]
    for wrong in ("data.jsonl", {"a": 1}, 7):
        with pytest.raises(DataError, match="must"):
            as_tasks(wrong, "train_dataset")


# --- dev ------------------------------------------------------------------------------------


class Dev(agl.LitAgent[Any]):
    """An agent that calls the model as `writer`, fails for some tasks, and earns a reward."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float | None:
        llm = resources["main_llm"]
        url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        client = openai.OpenAI(base_url=url, api_key=llm.api_key or "dummy", max_retries=0)
        with lightspan.agent("rewrite_query"):
            _say(client)
        with lightspan.agent("check_query"):
            _say(client)
        if task["n"] == 2:
            raise ValueError("cannot do twos")
        return None if task["n"] == 3 else float(rollout.mode == "val")


def test_dev_tells_what_every_agent_did(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with ScriptedServer(lambda request: "fine") as server:
        llm = agl.LLM(endpoint=server.url, model="gpt", api_key="secret")
        trainer = agl.Trainer(
            n_runners=3,
            initial_resources={"main_llm": llm},
            adapter={"agent_match": "write"},
        )
        summary = trainer.dev(Dev(), [{"n": n} for n in (1, 2, 3)], val_dataset=[{"n": 1}])
        keys = {request.headers["authorization"] for request in server.requests}
    assert isinstance(summary, DevSummary)
    assert keys == {"Bearer secret"}
    assert capsys.readouterr().out.splitlines() == [
        "4 rollouts, 2 scored, mean reward 0.500",
        "  task 0: 0",
        "  task 1: failed: ValueError: cannot do twos",
        "  task 2: no reward",
        "  task 3: 1",
        "  agent check_query: 4 calls, would not be trained",
        "  agent rewrite_query: 4 calls, would be trained",
    ]


def test_dev_counts_only_calls_that_can_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    """A judge at another endpoint and a call that fails are named; several choices are one call."""

    def asks(at: str, model: str, **options: Any) -> None:
        with openai.OpenAI(base_url=at, api_key="k", max_retries=0) as client:
            client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "hi"}], **options
            )

    with ScriptedServer(lambda request: "fine") as server, ScriptedServer("7") as judge:

        @agl.rollout
        def agent(task: int, llm: agl.LLM) -> float:
            asks(llm.endpoint, llm.model, n=task)
            asks(judge.url, "judge")
            with contextlib.suppress(openai.APIConnectionError):
                asks("http://127.0.0.1:9/v1", "search")
            return 1.0

        resources: Any = {"main_llm": agl.LLM(endpoint=server.url, model="gpt")}
        agl.Trainer(initial_resources=resources).dev(agent, [1, 3])
        host = judge.origin.removeprefix("http://")
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"  agent app: 6 calls, 2 would be trained; not: 2 to {host}, not to main_llm, "
        "2 to 127.0.0.1:9, not to main_llm"
    )


def test_dev_says_that_no_agent_matches(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(lambda request: "fine") as server:
        llm = agl.LLM(endpoint=server.url, model="gpt")
        trainer = agl.Trainer(
            initial_resources={"main_llm": llm}, adapter={"agent_match": "^write"}
        )
        trainer.dev(Dev(), dev_dataset=[{"n": 1}])
    text = capsys.readouterr().out
    assert "agent_match='^write' matches no agent's name: " in text


def test_dev_says_what_to_write_if_no_agent_calls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "autogen_core", types.ModuleType("autogen_core"))
    resources: Any = {"main_llm": agl.LLM(endpoint=NEVER, model="m")}
    agl.Trainer(initial_resources=resources).dev(Remembers(), [{"n": 2}])
    text = capsys.readouterr().out
    assert "no agent called a model" in text
    assert "api_key=llm.api_key" in text
    assert "lightspan_autogen.instrument()" in text


def test_a_notebooks_loop_does_not_hinder_dev() -> None:
    resources: Any = {"main_llm": agl.LLM(endpoint=NEVER, model="m")}

    async def inside() -> DevSummary:
        return agl.Trainer(initial_resources=resources).dev(Remembers(), [{"n": 2}])

    assert asyncio.run(inside()).rewards == [2.0]


@pytest.mark.parametrize(
    ("modules", "advice"),
    [
        ([], "call instrument() of its adapter at the top"),
        (["langgraph"], "run the graph with {'callbacks': [self.tracer.get_langchain_handler()]}"),
        (["crewai"], "call lightspan_crewai.instrument() at the top"),
    ],
)
def test_advice_for_names_is_that_of_the_framework(
    modules: list[str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("agents.models.interface", "autogen_core", "crewai", "langgraph"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert instrument_advice().startswith(advice)
