"""Resources and rollouts as an agent is handed them, under the original's names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightspan.errors import ConfigError, UnsupportedError

MAIN_LLM = "main_llm"
"""The resource under which `VERL` offers the model that is trained."""

RolloutMode = Literal["train", "val", "test"]


@dataclass(kw_only=True)
class LLM:
    """An OpenAI-compatible endpoint."""

    endpoint: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    sampling_parameters: dict[str, Any] = field(default_factory=dict)
    resource_type: str = "llm"

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        """What to give a client as `base_url`."""
        return self.endpoint


@dataclass(kw_only=True)
class ProxyLLM(LLM):
    """The trained model, as one attempt may use it.

    Clients of the OpenAI SDK need no key; other clients need `api_key`, which opens the model calls
    of this attempt and nothing else.
    """

    resource_type: str = "proxy_llm"
    rollout_id: str = ""
    attempt_id: str = ""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """What to give a client as `base_url`.

        Args:
            rollout_id: that of the attempt, or nothing.
            attempt_id: likewise.

        Raises:
            ConfigError: they name another attempt, whose calls this one cannot make.
        """
        asked = rollout_id, attempt_id
        if asked not in ((None, None), (self.rollout_id, self.attempt_id)):
            raise ConfigError(
                f"get_base_url: {asked} is not this attempt, which is "
                f"{(self.rollout_id, self.attempt_id)}: take both from the `rollout` argument"
            )
        return self.endpoint

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """The endpoint as a plain `LLM`."""
        return LLM(
            endpoint=self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=dict(self.sampling_parameters),
        )


@dataclass(kw_only=True)
class PromptTemplate:
    """A prompt with `{named}` placeholders."""

    template: str
    engine: Literal["jinja", "f-string", "poml"] = "f-string"
    resource_type: str = "prompt_template"

    def format(self, **values: Any) -> str:
        """Fill the placeholders.

        Raises:
            UnsupportedError: another engine than f-string.
        """
        if self.engine != "f-string":
            raise UnsupportedError(
                f"PromptTemplate(engine={self.engine!r}) cannot be filled here: use 'f-string', or "
                "render `template` yourself"
            )
        return self.template.format(**values)


Resource = LLM | PromptTemplate
NamedResources = dict[str, Resource]


@dataclass(kw_only=True)
class Attempt:
    """One try of a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int = 1
    start_time: float = field(default_factory=time.time)
    end_time: float | None = None
    status: str = "running"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None


@dataclass(kw_only=True)
class Rollout:
    """One execution asked for on a task."""

    rollout_id: str
    input: Any
    mode: RolloutMode | None = None
    resources_id: str | None = None
    start_time: float = field(default_factory=time.time)
    end_time: float | None = None
    status: str = "running"
    metadata: dict[str, Any] | None = None


@dataclass(kw_only=True)
class AttemptedRollout(Rollout):
    """A rollout with the attempt under way. It is what agents get as `rollout`."""

    attempt: Attempt


def check_resources(resources: Mapping[str, Any] | None) -> NamedResources:
    """The resources of `initial_resources=`.

    Raises:
        ConfigError: one of them is no resource.
    """
    for name, resource in (resources or {}).items():
        if not isinstance(resource, LLM | PromptTemplate):
            raise ConfigError(
                f"initial_resources[{name!r}] must be an LLM or PromptTemplate of lightspan.agl, "
                f"not {type(resource).__module__}.{type(resource).__qualname__}"
            )
    return dict(resources or {})
