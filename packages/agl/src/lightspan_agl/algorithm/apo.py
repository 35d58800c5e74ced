"""APO: lightspan's beam search with the name and arguments of Agent Lightning."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from string import Formatter
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from lightspan.errors import ConfigError
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json, Mode
from lightspan.schema.validation import check_number, check_whole
from lightspan_agl._unsupported import refuse_names as _refuse_names
from lightspan_agl.logging import copy_to_original
from lightspan_agl.types import NamedResources, PromptTemplate, learned_prompt
from lightspan_prompts.apo.search import BeamPlan, Models, Search
from lightspan_prompts.endpoint_client import EndpointClient
from lightspan_prompts.search.candidates import Split
from lightspan_prompts.search.evaluator import Evaluator, Runs

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["APO"]
__getattr__ = _refuse_names(__name__)

T = TypeVar("T")

log = logging.getLogger(__name__)
log.addFilter(copy_to_original)

BUSY_TIMEOUT_S: Final = 1800.0
"""Total seconds of waiting on rate limits (429) per request."""
MAX_CONCURRENT_QUESTIONS: Final = 4
FAILURE_REWARD: Final = 0.0
"""Reward of rollouts without a reward, such as those that failed or did not end in time."""
_SIZES: Final = (
    *("gradient_batch_size", "val_batch_size", "beam_width", "branch_factor", "beam_rounds"),
)


_NAME_WITH_SIGNS: Final = re.compile(r"[^\W\d]\w*([ ?-]+\w*)+")
"""A name that only `str.format` accepts, such as `user-question`."""


class APO(Generic[T]):
    """Learn the prompt template of `initial_resources` by textual gradients and beam search.

    Args:
        async_openai_client: client for both models; not closed.
        gradient_model: model that criticises a prompt.
        apply_edit_model: model that rewrites a prompt.
        diversity_temperature: temperature of both models.
        gradient_batch_size: number of tasks whose rollouts `gradient_model` reads per critique.
        val_batch_size: number of tasks of `val_dataset` on which a round compares candidates; the
            best candidate is then run on the whole of `val_dataset`.
        beam_width: number of candidates that continue in the next round.
        branch_factor: number of new candidates per candidate and round.
        beam_rounds: number of rounds.
        rollout_batch_timeout: seconds for the rollouts of one prompt on one batch of tasks;
            rollouts that have not ended by then are cancelled and count as 0. Batches are run one
            after another, so each has all runners.
        run_initial_validation: without effect; the initial prompt is always evaluated.
        seed: seed of every random choice.

    Raises:
        ConfigError: an option is out of range, or the client has another type.
    """

    def __init__(
        self,
        async_openai_client: AsyncOpenAI,
        *,
        gradient_model: str = "gpt-5-mini",
        apply_edit_model: str = "gpt-4.1-mini",
        diversity_temperature: float = 1.0,
        gradient_batch_size: int = 4,
        val_batch_size: int = 16,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        rollout_batch_timeout: float = 3600.0,
        run_initial_validation: bool = True,
        _poml_trace: bool = False,
        seed: int = 0,
    ) -> None:
        from openai import AsyncOpenAI

        if not isinstance(async_openai_client, AsyncOpenAI):
            raise ConfigError(
                f"APO({async_openai_client!r:.100}): pass an openai.AsyncOpenAI for "
                "gradient_model and apply_edit_model"
            )
        self.async_openai_client = async_openai_client
        self.gradient_model = gradient_model
        self.apply_edit_model = apply_edit_model
        self.diversity_temperature = diversity_temperature
        self.gradient_batch_size = gradient_batch_size
        self.val_batch_size = val_batch_size
        self.beam_width = beam_width
        self.branch_factor = branch_factor
        self.beam_rounds = beam_rounds
        self.rollout_batch_timeout = rollout_batch_timeout
        self.run_initial_validation = run_initial_validation
        self.seed = seed
        for name in _SIZES:
            check_whole(name, getattr(self, name), 1)
        check_number("diversity_temperature", diversity_temperature, low=0)
        check_number("rollout_batch_timeout", rollout_batch_timeout, above=0)
        if not run_initial_validation:
            log.info("APO(run_initial_validation=False) has no effect")
        if _poml_trace:
            log.info("APO(_poml_trace=True) has no effect")
        self._best: PromptTemplate | None = None

    def get_best_prompt(self) -> PromptTemplate:
        """Return the prompt with the highest mean reward on the whole of `val_dataset`.

        Raises:
            ConfigError: `Trainer.fit` was not called.
        """
        if self._best is None:
            raise ConfigError("APO has no best prompt yet: call Trainer.fit first")
        return self._best

    async def search(
        self, runs: Runs, resources: NamedResources, train: Sequence[Json], val: Sequence[Json]
    ) -> None:
        """Search for the best prompt; `get_best_prompt` returns it.

        Args:
            runs: runner of the agent's rollouts.
            resources: initial resources, including the initial prompt.
            train: tasks whose rollouts `gradient_model` reads.
            val: tasks on which candidates are compared. A repeated task counts as often as it is
                listed.

        Raises:
            RewardError: no rollout of the initial prompt has a reward.
            EngineError: a model fails.
        """
        name, template = first_prompt(resources)
        names = [key for key, value in resources.items() if isinstance(value, PromptTemplate)]
        if len(names) > 1:
            log.warning(
                "APO learns the prompt template %r; without a change: %s",
                *(name, ", ".join(map(repr, names[1:]))),
            )
        split = Split(feedback=list(train), selection=list(val))
        prompts = {name: template}
        trials = Evaluator(runs, prompts, None, FAILURE_REWARD, Mode.VAL)
        client = _with_own_connections(self.async_openai_client)
        models = Models(
            self._reflector(client, self.gradient_model),
            self._reflector(client, self.apply_edit_model),
        )
        plan = BeamPlan(
            prompts=prompts,
            **{name: getattr(self, name) for name in _SIZES},
            max_rollouts=None,
            max_reflections=None,
            reflections_at_once=MAX_CONCURRENT_QUESTIONS,
            seed=self.seed,
        )
        # each trial has its own `rollout_batch_timeout`
        search = Search(plan, trials, split, models, log.info, rollouts_at_once=1)
        try:
            result = await search.run()
        finally:  # also the best so far if interrupted
            self._best = learned_prompt(template, search.best[name])
            if client is not self.async_openai_client:
                await client.close()
        for text in result.notes():
            log.info("%s", text)
        if result.unusable and len(result.candidates) == 1:  # only the initial prompt
            reasons = [proposal.why for proposal in result.proposals if proposal.why]
            log.warning(
                "APO: none of the %d answers of gradient_model and apply_edit_model had a usable "
                "prompt, so the best prompt is the initial one. The last reason: %s",
                *(result.reflections, reasons[-1] if reasons else "none was given"),
            )

    def _reflector(self, client: AsyncOpenAI, model: str) -> EndpointClient:
        return EndpointClient(
            LLM(
                base_url=str(client.base_url),
                model=model,
                sampling={"temperature": self.diversity_temperature},
            ),
            timeout_s=None,
            patience_s=BUSY_TIMEOUT_S,
            note=log.info,
            client=client,
        )


def first_prompt(resources: NamedResources) -> tuple[str, PromptTemplate]:
    """Return the name and value of the first prompt template in the resources.

    Raises:
        ConfigError: no resource is a prompt template, or it has a placeholder such as
            `{user-question}`, which `str.format` fills and the search would not keep.
    """
    for name, resource in resources.items():
        if isinstance(resource, PromptTemplate):
            for field in _fields(resource.template):
                if _NAME_WITH_SIGNS.fullmatch(field):
                    own = re.sub(r"\W", "_", field)
                    raise ConfigError(
                        f"APO cannot keep the placeholder {{{field}}} of {name!r}: a name has "
                        f"letters, digits and _ only; write {{{own}}}"
                    )
            return name, resource
    raise ConfigError(
        "APO needs an initial prompt: Trainer(initial_resources={'prompt_template': "
        "agl.PromptTemplate(template=…, engine='f-string')})"
    )


def _fields(template: str) -> list[str]:
    """Return the names of the placeholders that `str.format` finds; empty if it finds an error."""
    try:
        return [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError:
        return []


def _with_own_connections(client: AsyncOpenAI) -> AsyncOpenAI:
    """Return a copy of `client` that opens new connections.

    The connections of `client` itself may belong to another event loop. If the user gave `client`
    its own HTTP client, return `client` unchanged.
    """
    import openai

    inner = type(getattr(client, "_client", None)).__name__
    if inner != "AsyncHttpxClientWrapper":  # the SDK's default
        return client
    return client.copy(http_client=openai.DefaultAsyncHttpxClient())
