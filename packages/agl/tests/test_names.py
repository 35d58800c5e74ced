"""Tests of the public names of Agent Lightning 0.3.0: each exists or is on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

import lightspan_agl as agl

NAMES = (Path(__file__).parent / "agentlightning-0.3.0.txt").read_text().split()


def test_every_name_is_here_or_on_the_page() -> None:
    assert len(NAMES) == 116
    page = (Path(__file__).parents[3] / "docs/from-agent-lightning.md").read_text()
    missing = set(NAMES) - {*agl.__all__, "reward"}  # `reward` is a module in both
    assert {name for name in missing if f"`{name}`" not in page} == set()
    assert set(agl.__all__) <= set(NAMES)


def test_a_missing_name_says_where_to_look() -> None:
    message = "lightspan_agl has no 'Hook': see docs/from-agent-lightning.md"
    with pytest.raises(ImportError, match=message):
        from lightspan_agl import Hook  # noqa: F401
    with pytest.raises(ImportError, match=message):
        agl.Hook  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "from lightspan_agl import Trainer, setup_logging",
        "from lightspan_agl.adapter import TraceToMessages, TracerTraceToTriplet",
        "from lightspan_agl.algorithm.apo import APO",
        "from lightspan_agl.algorithm.verl import VERL",
        "from lightspan_agl.algorithm import APO, VERL",
        "from lightspan_agl.emitter import emit_reward",
        "from lightspan_agl.env_var import LightningEnvVar, resolve_bool_env_var",
        "from lightspan_agl.litagent import LitAgent, rollout",
        "from lightspan_agl.logging import setup_logging",
        "from lightspan_agl.reward import emit_reward, find_final_reward",
        "from lightspan_agl.runner import LitAgentRunner",
        "from lightspan_agl.store import InMemoryLightningStore",
        "from lightspan_agl.tracer import AgentOpsTracer, OtelTracer",
        "from lightspan_agl.tracer.agentops import AgentOpsTracer",
        "from lightspan_agl.trainer import Trainer",
        "from lightspan_agl.types import Dataset, LLM, NamedResources, PromptTemplate, Rollout",
    ],
)
def test_modules_have_their_paths(statement: str) -> None:
    exec(statement)


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
