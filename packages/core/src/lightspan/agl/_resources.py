"""Resources as an agent is handed them, under the original's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from lightspan.agl._models import Model
from lightspan.agl._rollouts import AttemptedRollout
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.schema.prompts import PromptTemplate as KeptTemplate

MAIN_LLM = "main_llm"
"""The resource under which `VERL` offers the model that is trained."""


class Resource(Model, tag_field="resource_type", tag="resource"):
    """What an algorithm hands to agents."""

    @property
    def resource_type(self) -> str:
        """Which kind of resource it is."""
        return str(type(self).__struct_config__.tag)

    def _fields(self) -> dict[str, Any]:
        return {"resource_type": self.resource_type, **super()._fields()}


class LLM(Resource, tag="llm"):
    """An OpenAI-compatible endpoint."""

    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = msgspec.field(default_factory=dict)

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        """What to give a client as `base_url`."""
        return self.endpoint

    def __repr__(self) -> str:  # a key is in no log
        shown = {name: value for name, value in self._fields().items() if name != "api_key"}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"


class ProxyLLM(LLM, tag="proxy_llm"):
    """The trained model, as one attempt may use it.

    Clients of the OpenAI SDK need no key; other clients need `api_key`, which opens the model calls
    of this attempt and nothing else. One that is made by hand, of no attempt, is of the original's
    proxy: the ids stand in its address.
    """

    rollout_id: str = ""
    attempt_id: str = ""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """What to give a client as `base_url`.

        Args:
            rollout_id: that of the attempt, or nothing.
            attempt_id: likewise.

        Raises:
            ConfigError: one without the other; or they name another attempt, whose calls this one
                cannot make.
        """
        asked = rollout_id, attempt_id
        if asked in ((None, None), (self.rollout_id, self.attempt_id)):
            return self.endpoint
        if self.attempt_id:
            raise ConfigError(
                f"get_base_url: {asked} is not this attempt, which is "
                f"{(self.rollout_id, self.attempt_id)}: take both from the `rollout` argument"
            )
        if rollout_id is None or attempt_id is None:
            raise ConfigError(f"get_base_url: {asked} must be both ids, or none")
        origin = self.endpoint.removesuffix("/")
        version = "/v1" if origin.endswith("/v1") else ""
        return f"{origin.removesuffix('/v1')}/rollout/{rollout_id}/attempt/{attempt_id}{version}"

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """The endpoint as a plain `LLM`."""
        return LLM(
            endpoint=self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=dict(self.sampling_parameters),
        )

    def _fields(self) -> dict[str, Any]:
        ours = ("rollout_id", "attempt_id")
        return {name: value for name, value in super()._fields().items() if name not in ours}


class PromptTemplate(Resource, tag="prompt_template"):
    """A prompt with `{named}` placeholders."""

    template: str
    engine: Literal["jinja", "f-string", "poml"] = "f-string"

    def format(self, **values: Any) -> str:
        """Fill the placeholders. Braces of the text's own stay (`Answer as {"a": 1}: {question}`),
        which the original could not fill.

        Raises:
            UnsupportedError: another engine than f-string.
        """
        if self.engine != "f-string":
            raise UnsupportedError(
                f"PromptTemplate(engine={self.engine!r}) cannot be filled here: use 'f-string', or "
                "render `template` yourself"
            )
        try:
            return self.template.format(**values)
        except (KeyError, IndexError, ValueError):
            filled = _filled(self.template, values)
            if filled is None:
                raise
            return filled


def _filled(template: str, values: Mapping[str, Any]) -> str | None:
    """The text of lightspan's own template; None where that lacks a value too."""
    try:
        return KeptTemplate(template).format(**values)
    except ConfigError:
        return None


ResourceUnion = LLM | ProxyLLM | PromptTemplate
NamedResources = dict[str, ResourceUnion]


class ResourcesUpdate(Model):
    """One version of the resources."""

    resources_id: str
    create_time: float
    """Seconds since the epoch."""
    update_time: float
    version: int
    """1 for the first under this id."""
    resources: NamedResources


def check_resources(resources: Mapping[str, Any] | None) -> NamedResources:
    """The resources of `initial_resources=`.

    Raises:
        ConfigError: one of them is no resource.
    """
    for name, resource in (resources or {}).items():
        if not isinstance(resource, ResourceUnion):
            raise ConfigError(
                f"initial_resources[{name!r}] must be an LLM or PromptTemplate of lightspan.agl, "
                f"not {type(resource).__module__}.{type(resource).__qualname__}"
            )
    return dict(resources or {})
