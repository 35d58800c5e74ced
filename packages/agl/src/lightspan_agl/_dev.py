"""Implement `Trainer.dev` with `initial_resources`: run an agent in this process and summarize."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from lightspan.lightning.episode import Call
from lightspan.lightning.rollout_checks import app_failed
from lightspan.schema import semconv as c
from lightspan.schema.records import Json, Mode
from lightspan.schema.routing import matches
from lightspan.schema.token_records import CallOutcome
from lightspan_agl._agent_match import globs_of, instrument_advice
from lightspan_agl._hooks import HookCalls
from lightspan_agl._local import check_rewards, local_runs
from lightspan_agl.litagent import LitAgent
from lightspan_agl.types import LLM, MAIN_LLM, NamedResources

_PORTS: Final = {"http": 80, "https": 443}
"""Scheme → its port, which is not recorded."""


class DevSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a trial run."""

    rewards: list[float | None]
    """Reward per task, in order; None if the task's rollout has no reward."""
    failures: dict[int, str]
    """Index of a failed task in `rewards` → error message."""
    calls: dict[str, int]
    """Agent path → number of model calls. Several choices (`n`) are one call."""
    others: dict[str, dict[str, int]]
    """Agent path → reason → number of calls that `fit` would not train for this reason."""
    trained: list[str]
    """Agent paths that `agent_match` selects."""
    agent_match: str | None

    def text(self) -> str:
        """Format the summary for printing."""
        scored = [reward for reward in self.rewards if reward is not None]
        mean = f", mean reward {math.fsum(scored) / len(scored):.3f}" if scored else ""
        lines = [f"{len(self.rewards)} rollouts, {len(scored)} scored{mean}"]
        for number, reward in enumerate(self.rewards):
            why = self.failures.get(number)
            outcome = f"failed: {why}" if why else "no reward" if reward is None else f"{reward:g}"
            lines.append(f"  task {number}: {outcome}")
        for path, count in sorted(self.calls.items()):
            others = self.others.get(path, {}) if path in self.trained else {}
            what = "would be trained" if path in self.trained else "would not be trained"
            if others:
                reasons = ", ".join(f"{number} {reason}" for reason, number in others.items())
                what = f"{count - sum(others.values())} would be trained; not: {reasons}"
            lines.append(f"  agent {path}: {count} calls, {what}")
        if not self.calls:
            lines.append(
                "  no agent called a model by OpenAI's or Anthropic's SDK in the rollout: give "
                "another client base_url=llm.get_base_url(…) and api_key=llm.api_key; for a "
                f"framework {instrument_advice()}"
            )
        elif not self.trained:
            lines.append(
                f"  agent_match={self.agent_match!r} matches no agent's name: {instrument_advice()}"
            )
        return "\n".join(lines)


async def try_out(
    agent: LitAgent[Any],
    resources: NamedResources,
    train: Sequence[Json],
    val: Sequence[Json],
    *,
    slots: int,
    agent_match: str | None,
    hooks: HookCalls,
) -> DevSummary:
    """Run the agent once per task and summarize the rollouts.

    Args:
        agent: the agent.
        resources: the agent's resources.
        train: training tasks.
        val: held-out tasks.
        slots: maximum concurrent rollouts.
        agent_match: regular expression of the agents that would be trained; None for all.
        hooks: hooks and tracer of the agent.

    Raises:
        RewardError: the agent returned an invalid reward.
    """
    async with local_runs(agent, resources, slots=slots, hooks=hooks) as runs:
        episodes = [
            *await runs.rollouts(train, mode=Mode.TRAIN),
            *await runs.rollouts(val, mode=Mode.VAL),
        ]
    check_rewards(episodes)
    made = [call for episode in episodes for call in episode.calls if not call.choice]
    calls = Counter(call.agent_path for call in made)
    main = _main_address(resources)
    others: dict[str, Counter[str]] = {}
    for call in made:
        if reason := _why_not_trained(call, main):
            others.setdefault(call.agent_path, Counter())[reason] += 1
    globs = globs_of(agent_match)
    return DevSummary(
        rewards=[episode.reward for episode in episodes],
        failures={n: e.message for n, e in enumerate(episodes) if app_failed(e) or not e.finished},
        calls=dict(calls),
        others={path: dict(reasons) for path, reasons in others.items()},
        trained=sorted(path for path in calls if any(matches(glob, path) for glob in globs)),
        agent_match=agent_match,
    )


def _main_address(resources: NamedResources) -> str | None:
    """Return host and port of `main_llm`, or of the first endpoint; None if there is none."""
    endpoints = {name: each for name, each in resources.items() if isinstance(each, LLM)}
    llm = endpoints.get(MAIN_LLM) or next(iter(endpoints.values()), None)
    if llm is None:
        return None
    url = urlsplit(llm.endpoint)
    return _address(url.hostname, url.port if url.port != _PORTS.get(url.scheme) else None)


def _why_not_trained(call: Call, main: str | None) -> str:
    """Return why `fit` would not train a call of a selected agent; empty if it would.

    Args:
        call: the call.
        main: host and port of `main_llm`; None to accept calls to any endpoint.
    """
    attributes = call.span.attributes if call.span is not None else {}
    address = _address(attributes.get(c.SERVER_ADDRESS), attributes.get(c.SERVER_PORT))
    if main is not None and address != main:
        return f"to {address or 'an unknown host'}, not to {MAIN_LLM}"
    return "failed" if call.outcome is CallOutcome.ERROR else ""


def _address(host: Any, port: Any) -> str:
    return f"{host or ''}:{port}" if port else str(host or "")
