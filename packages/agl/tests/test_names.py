"""Tests of the public names of Agent Lightning 0.3.0: each exists or has a hint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lightspan_agl as agl
from lightspan.errors import ConfigError, UnsupportedError
from lightspan_agl._modules import MODULES
from lightspan_agl._unsupported import HINTS

NAMES = (Path(__file__).parent / "agentlightning-0.3.0.txt").read_text().split()


def test_every_name_is_here_or_has_a_hint() -> None:
    assert len(NAMES) == 116
    assert {*agl.__all__, *HINTS, "reward"} == set(NAMES)  # `reward` is a module in both
    assert not set(agl.__all__) & set(HINTS)


@pytest.mark.parametrize("name", sorted(HINTS))
def test_a_refused_name_says_what_to_use(name: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from lightspan_agl import {name}")
    assert not isinstance(caught.value, ModuleNotFoundError)
    assert str(caught.value) == f"lightspan_agl has no {name!r}: {HINTS[name]}"
    with pytest.raises(AttributeError) as missing:
        getattr(agl, name)
    assert str(missing.value) == str(caught.value)
    assert not hasattr(agl, name)


def test_other_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        agl.nonsense  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from lightspan_agl import nonsense  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    "statement",
    [
        "from lightspan_agl import LightningStore, Span, Trainer, configure_logger, setup_logging",
        "from lightspan_agl.adapter import TraceToMessages, TracerTraceToTriplet",
        "from lightspan_agl.algorithm import APO, VERL, algo",
        "from lightspan_agl.env_var import LightningEnvVar, resolve_bool_env_var",
        "from lightspan_agl.litagent import LitAgent, rollout",
        "from lightspan_agl.reward import emit_reward, find_final_reward",
        "from lightspan_agl.runner import LitAgentRunner",
        "from lightspan_agl.store import InMemoryLightningStore",
        "from lightspan_agl.tracer import AgentOpsTracer, OtelTracer",
        "from lightspan_agl.types import Dataset, Hook, LLM, NamedResources, Rollout, Span",
        "from lightspan_agl.adapter.messages import TraceToMessages",
        "from lightspan_agl.adapter.triplet import TracerTraceToTriplet",
        "from lightspan_agl.algorithm.apo.apo import APO",
        "from lightspan_agl.algorithm.verl.interface import VERL",
        "from lightspan_agl.emitter import find_final_reward",
        "from lightspan_agl.emitter.reward import emit_reward, find_final_reward",
        "from lightspan_agl.litagent.decorator import rollout",
        "from lightspan_agl.logging import setup",
        "from lightspan_agl.runner.agent import LitAgentRunner",
        "from lightspan_agl.store.memory import InMemoryLightningStore",
        "from lightspan_agl.tracer.otel import OtelTracer",
        "from lightspan_agl.trainer.trainer import Trainer",
        "from lightspan_agl.types.core import Rollout",
    ],
)
def test_modules_have_their_paths(statement: str) -> None:
    exec(statement)


def test_modules_refuse_names_too() -> None:
    with pytest.raises(ImportError, match=r"lightspan_agl.types has no 'Task': use Rollout"):
        from lightspan_agl.types import Task  # noqa: F401
    with pytest.raises(ImportError, match=r"lightspan_agl.types has no 'Task': use Rollout"):
        exec("from lightspan_agl.types.core import Task")
    with pytest.raises(AttributeError, match=r"__version__': use importlib\.metadata\.version"):
        agl.__version__  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(agl.Trainer(), "fit_v0")
    with pytest.raises(AttributeError, match=r"Trainer has no 'fit_v0': use fit\(agent"):
        agl.Trainer().fit_v0()  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_missing_modules_say_what_to_use(module: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(f"from lightspan_agl.{module} import anything")
    parent = module.partition(".")[0]
    assert str(caught.value) == f"lightspan_agl has no module {parent!r}: {MODULES[parent]}"


def test_submodules_of_missing_modules_say_what_to_use() -> None:
    with pytest.raises(ImportError, match="has no 'LightningStoreClient': use Trainer"):
        exec("from lightspan_agl.store.client_server import LightningStoreClient")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'lightspan_agl\.nonsense'$"):
        exec("import lightspan_agl.nonsense")


def test_the_decorator_reward_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"call emit_reward\(value\)"):
        agl.reward(lambda: 1.0)  # type: ignore[operator]
    with pytest.raises(ImportError, match=r"call emit_reward\(value\)"):
        exec("from lightspan_agl.reward import reward")


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = agl.LightningEnvVar.AGL_MANAGED_STORE
    monkeypatch.delenv("AGL_MANAGED_STORE", raising=False)
    assert agl.resolve_bool_env_var(variable, fallback=True) is True
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    assert agl.resolve_bool_env_var(variable, fallback=True) is False
    assert agl.resolve_str_env_var(variable) == "0"
    monkeypatch.setenv("AGL_MANAGED_STORE", "maybe")
    with pytest.raises(ValueError, match="AGL_MANAGED_STORE='maybe' must be one of"):
        agl.resolve_bool_env_var(variable)


def test_a_proxy_llm_of_the_users_own_takes_any_ids() -> None:
    own = agl.ProxyLLM(endpoint="http://host/v1", model="m")
    assert own.get_base_url() == own.get_base_url("r", "a") == "http://host/v1"
    of_attempt = agl.ProxyLLM(endpoint="http://host/v1", model="m", rollout_id="r", attempt_id="a")
    assert of_attempt.get_base_url("r", "a") == of_attempt.get_base_url() == "http://host/v1"
    with pytest.raises(ConfigError, match=r"\('r', 'b'\): this attempt is \('r', 'a'\)"):
        of_attempt.get_base_url("r", "b")


def test_a_proxy_llm_becomes_the_llm_of_an_attempt() -> None:
    proxy = agl.ProxyLLM(
        endpoint="http://host/v1",
        model="m",
        api_key="k",
        sampling_parameters={"temperature": 1},
        rollout_id="r",
        attempt_id="a",
    )
    attempt = agl.Attempt(rollout_id="r", attempt_id="a", start_time=0.0)
    rollout = agl.AttemptedRollout(rollout_id="r", input=1, start_time=0.0, attempt=attempt)
    llm = proxy.with_attempted_rollout(rollout)
    assert type(llm) is agl.LLM
    assert llm == agl.LLM(
        endpoint="http://host/v1", model="m", api_key="k", sampling_parameters={"temperature": 1}
    )
    attempt.attempt_id = "b"
    with pytest.raises(ConfigError, match=r"\('r', 'b'\): this attempt is \('r', 'a'\)"):
        proxy.with_attempted_rollout(rollout)


def test_resources_and_rollouts_have_methods_of_pydantic() -> None:
    llm = agl.LLM(endpoint="http://h/v1", model="m", sampling_parameters={"temperature": 1})
    other = llm.model_copy(update={"model": "n"}, deep=True)
    other.sampling_parameters["temperature"] = 2
    assert (llm.model, llm.sampling_parameters, other.model) == ("m", {"temperature": 1}, "n")
    assert json.loads(llm.model_dump_json()) == llm.model_dump()
    rollout = agl.Rollout(rollout_id="r", input={"q": 1}, start_time=0.0)
    assert rollout.model_dump()["input"] == {"q": 1}
    prompt = agl.PromptTemplate(template="a", engine="f-string")
    assert prompt.model_copy(update={"template": "b"}).template == "b"
    assert json.loads(prompt.model_dump_json())["template"] == "a"


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        (
            "At most {limit:.2f}. Question: {user-question}",
            {"user-question": "why?", "limit": 3.14159},
            "At most 3.14. Question: why?",
        ),
        ("{a b}, {q?}, {1a}", {"a b": 1, "q?": 2, "1a": 3}, "1, 2, 3"),
        ('{{"answer": {n}}}', {"n": 1, "unused": 2}, '{"answer": 1}'),
    ],
)
def test_templates_are_filled_as_by_python(
    template: str, values: dict[str, Any], text: str
) -> None:
    assert agl.PromptTemplate(template=template).format(**values) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{q} {user-question}",
            "the prompt template needs a value for 'user-question': give it to format(), or write "
            "{{ and }} for braces that are text",
        ),
        (
            '{"answer": 1} {q}',
            "the prompt template needs a value for '\"answer\"': give it to format(), or write "
            "{{ and }} for braces that are text",
        ),
    ],
)
def test_a_placeholder_without_a_value_is_an_error(template: str, message: str) -> None:
    with pytest.raises(KeyError) as caught:
        agl.PromptTemplate(template=template).format(q=1)
    assert isinstance(caught.value, ConfigError)
    assert str(caught.value) == message


@pytest.mark.parametrize("template", ["{q} {", "{q} {}", "{q:.2f}", "{q.x}"])
def test_what_python_cannot_fill_is_an_error(template: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be filled: .*; name every placeholder, and"):
        agl.PromptTemplate(template=template).format(q="a")


async def test_resources_of_a_wrong_type_are_named() -> None:
    store = agl.InMemoryLightningStore()
    with pytest.raises(ConfigError, match=r"^resources\['p'\] must be an LLM or PromptTemplate"):
        await store.add_resources({"p": "text"})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"^initial_resources must be a mapping of names to"):
        agl.Trainer(initial_resources=[1])  # type: ignore[arg-type]
