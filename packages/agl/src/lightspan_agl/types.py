"""Resources and rollouts for agents, with the names of Agent Lightning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, Protocol, Self, TypeVar, get_args

from msgspec.structs import replace as replace_fields

from lightspan.errors import ConfigError
from lightspan.schema.prompts import PromptTemplate as CorePromptTemplate, filled_as
from lightspan.schema.spans import Span
from lightspan_agl._unsupported import RefusesNames, refuse_names as _refuse_names

__all__ = [
    "LLM",
    "Attempt",
    "AttemptedRollout",
    "Dataset",
    "Hook",
    "NamedResources",
    "PromptTemplate",
    "ProxyLLM",
    "ResourcesUpdate",
    "Rollout",
    "RolloutMode",
    "Span",
]
__getattr__ = _refuse_names(__name__)

T_co = TypeVar("T_co", covariant=True)

MAIN_LLM: Final = "main_llm"
"""Name of the resource with the model that `VERL` trains."""

RolloutMode = Literal["train", "val", "test"]


def check_mode(mode: Any) -> None:
    """Raise `ConfigError` unless `mode` is a `RolloutMode` or None."""
    if mode not in (None, *get_args(RolloutMode)):
        raise ConfigError(f"mode={mode!r} must be one of {', '.join(get_args(RolloutMode))}")


class _Model(RefusesNames):
    """Methods of pydantic's models for a data class."""

    def model_dump(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    def model_dump_json(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(self.model_dump(), ensure_ascii=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy.

        Args:
            update: fields that get other values; None for none.
            deep: whether the values of the other fields are copied too.
        """
        return replace(deepcopy(self) if deep else self, **(update or {}))  # type: ignore[type-var]


@dataclass(kw_only=True)
class LLM(_Model):
    """An OpenAI-compatible endpoint."""

    endpoint: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    sampling_parameters: dict[str, Any] = field(default_factory=dict)
    resource_type: str = "llm"

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        """Return the endpoint, for use as a client's `base_url`."""
        return self.endpoint


@dataclass(kw_only=True)
class ProxyLLM(LLM):
    """The trained model's endpoint for one attempt.

    A client of the OpenAI SDK needs no key; other clients need `api_key`.
    """

    rollout_id: str | None = None
    """None, as is `attempt_id`, if the user constructed the object; then any ids are accepted."""
    attempt_id: str | None = None
    resource_type: str = "proxy_llm"

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the endpoint, for use as a client's `base_url`.

        Raises:
            ConfigError: `rollout_id` and `attempt_id` are not those of this endpoint's attempt.
        """
        ids, own = (rollout_id, attempt_id), (self.rollout_id, self.attempt_id)
        if (None, None) not in (ids, own) and ids != own:
            raise ConfigError(
                f"get_base_url{ids}: this attempt is {own}; take both ids from the `rollout` "
                "argument"
            )
        return self.endpoint

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """Return an `LLM` with the endpoint for a rollout's attempt.

        Raises:
            ConfigError: the attempt is not the one of this endpoint.
        """
        return LLM(
            endpoint=self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=dict(self.sampling_parameters),
        )


class _MissingValueError(ConfigError, KeyError):
    """A placeholder of a prompt template has no value."""

    def __str__(self) -> str:  # `KeyError` shows its message in quotes, with escapes
        return str(self.args[0])


class PromptTemplate(CorePromptTemplate, frozen=True, omit_defaults=True, tag="prompt"):
    """A prompt with `{named}` placeholders."""

    resource_type: str = "prompt_template"

    def format(self, **values: Any) -> str:
        """Return what `str.format` returns for the template and `values`.

        Raises:
            ConfigError: `str.format` fails; the error is also a `KeyError` if a placeholder has no
                value.
        """
        braces = "write {{ and }} for braces that are text"
        try:
            return self.template.format(**values)
        except KeyError as error:
            raise _MissingValueError(
                f"the prompt template needs a value for {error}: give it to format(), or {braces}"
            ) from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the prompt template {self.template!r:.200} cannot be filled: {error}; name every "
                f"placeholder, and {braces}"
            ) from error

    def model_dump(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        names = ("resource_type", "template", "engine")
        return {name: getattr(self, name) for name in names}

    def model_dump_json(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(self.model_dump(), ensure_ascii=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, in which the fields of `update` have other values."""
        return replace_fields(self, **(update or {}))


class _PlainPrompt(PromptTemplate, frozen=True, omit_defaults=True, tag="prompt"):
    """A prompt without placeholders, whose braces are text also for `format`."""

    def format(self, **values: Any) -> str:
        return self.template


def learned_prompt(original: CorePromptTemplate, learned: str) -> PromptTemplate:
    """Return the prompt that was learned in place of `original`.

    If `original` has no placeholder and no doubled brace, nothing shows that the agent fills it, so
    braces are single, as the agent's model has to see them. Else see `filled_as`.
    """
    if original.fields or original.has_doubled_braces:
        return PromptTemplate(filled_as(original.template, learned))
    return _PlainPrompt(PromptTemplate(learned).text)


NamedResources = dict[str, LLM | PromptTemplate]


@dataclass(kw_only=True)
class Attempt(_Model):
    """An attempt of a rollout."""

    rollout_id: str
    attempt_id: str
    start_time: float
    """Seconds since the epoch."""
    sequence_id: int = 1
    status: str = "running"
    end_time: float | None = None
    """Seconds since the epoch; None if the attempt has not ended."""
    metadata: dict[str, Any] | None = None


@dataclass(kw_only=True)
class Rollout(_Model):
    """One execution of an agent on a task."""

    rollout_id: str
    input: Any
    """The task."""
    start_time: float
    """Seconds since the epoch."""
    mode: RolloutMode | None = None
    status: str = "running"
    end_time: float | None = None
    """Seconds since the epoch; None if the rollout has not ended."""
    resources_id: str | None = None
    """Id of the rollout's resources in the store; None without a store, and if the store had no
    resources when the rollout was queued."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class AttemptedRollout(Rollout):
    """A rollout with its attempt; agents receive it as the argument `rollout`."""

    attempt: Attempt


@dataclass(kw_only=True)
class ResourcesUpdate(_Model):
    """Resources in a store, with their id."""

    resources_id: str
    resources: NamedResources
    create_time: float
    """Seconds since the epoch."""
    update_time: float
    """Seconds since the epoch."""
    version: int = 1


class Hook:
    """Methods that are called around each rollout in this process; override any of them.

    An exception in a hook is logged. Each method gets the `agent`, the `runner` (None in a
    `Trainer`) and the `rollout`.
    """

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        """Do something before a rollout."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Do something before the agent runs. Spans that the hook emits belong to the rollout."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Do something after the agent has returned.

        `tracer.get_last_trace()` returns the agent's spans.
        """

    async def on_rollout_end(
        self, *, agent: Any, runner: Any, rollout: Any, spans: list[Span]
    ) -> None:
        """Do something after a rollout, also after one that failed.

        Args:
            agent: the agent.
            runner: the runner; None in a `Trainer`.
            rollout: the rollout.
            spans: spans of the rollout; a reward that the agent returned is not among them.
        """


class Dataset(Protocol[T_co]):
    """Anything with a length and items by number, such as a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


def check_resources(
    resources: Mapping[str, Any] | None, what: str = "initial_resources"
) -> NamedResources:
    """Check the type of each resource and return copies of them; empty for None.

    Args:
        resources: the resources by name.
        what: name of the argument in messages.

    Raises:
        ConfigError: `resources` is no mapping, or a value is neither an `LLM` nor a
            `PromptTemplate`.
    """
    if not isinstance(resources, Mapping | None):
        raise ConfigError(
            f"{what} must be a mapping of names to resources, such as {{'main_llm': LLM(…)}}, not "
            f"{resources!r:.100}"
        )
    for name, resource in (resources or {}).items():
        if not isinstance(resource, LLM | CorePromptTemplate):
            raise ConfigError(
                f"{what}[{name!r}] must be an LLM or PromptTemplate of lightspan_agl, "
                f"not {type(resource).__module__}.{type(resource).__qualname__}"
            )
    return copy_resources(resources or {})


def copy_resources(resources: Mapping[str, LLM | CorePromptTemplate]) -> NamedResources:
    """Return a copy of resources, so that what an agent changes in it stays there."""
    return {
        name: PromptTemplate(resource.template)
        if isinstance(resource, CorePromptTemplate)
        else replace(resource, sampling_parameters=deepcopy(resource.sampling_parameters))
        for name, resource in resources.items()
    }
