"""APO: the beam search of lightspan under the name and arguments of Agent Lightning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from lightspan.errors import ConfigError
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import filled_as
from lightspan.schema.records import Json, Mode, task_id
from lightspan.schema.validation import check_number, check_whole
from lightspan_agl._unsupported import refuse_names as _refuse_names
from lightspan_agl.types import NamedResources, PromptTemplate
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

BUSY_TIMEOUT_S: Final = 1800.0
"""Of a question that an endpoint answers with 429."""
MAX_CONCURRENT_QUESTIONS: Final = 4
_SIZES: Final = (
    *("gradient_batch_size", "val_batch_size", "beam_width", "branch_factor", "beam_rounds"),
)


class APO(Generic[T]):
    """Learns the prompt template of `initial_resources` by textual gradients and beam search.

    Args:
        async_openai_client: asks the two models; not closed.
        gradient_model: says what is wrong with a prompt.
        apply_edit_model: rewrites it.
        diversity_temperature: of both models.
        gradient_batch_size: tasks whose rollouts `gradient_model` reads for each new candidate.
        val_batch_size: tasks of `val_dataset` that the candidates of a round are compared by; the
            best one is then run on all of them.
        beam_width: candidates that go on to the next round.
        branch_factor: new candidates of each of these per round.
        beam_rounds: rounds.
        rollout_batch_timeout: seconds for the rollouts that are queued together; what takes longer
            is cancelled, and counts as 0.
        run_initial_validation: without effect; the first prompt is always compared, or a worse one
            would replace it.
        seed: of every choice.

    Raises:
        ConfigError: an option outside its range, or another client.
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
                f"APO({async_openai_client!r:.100}): give an openai.AsyncOpenAI, which asks "
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
        ignored = {"run_initial_validation": run_initial_validation is False}
        ignored["_poml_trace"] = _poml_trace
        for name, is_ignored in ignored.items():
            if is_ignored:
                log.info("APO(%s=%s) is without effect here", name, getattr(self, name, True))
        self._best: PromptTemplate | None = None

    def get_best_prompt(self) -> PromptTemplate:
        """Return the prompt with the best mean on the whole of `val_dataset`.

        Raises:
            ConfigError: `Trainer.fit` was not called.
        """
        if self._best is None:
            raise ConfigError("APO has no best prompt yet: call Trainer.fit first")
        return self._best

    async def search(
        self, runs: Runs, resources: NamedResources, train: Sequence[Json], val: Sequence[Json]
    ) -> None:
        """Search for the best prompt.

        Args:
            runs: runs the agent.
            resources: the initial ones, with the prompt to begin with.
            train: tasks whose rollouts `gradient_model` reads.
            val: tasks that candidates are compared by.

        Raises:
            RewardError: no rollout of the first prompt has a reward.
            EngineError: a model does not answer.
        """
        name, template = first_prompt(resources)
        split = Split(feedback=_distinct(train), selection=_distinct(val))
        prompts = {name: template}
        trials = Evaluator(runs, prompts, None, 0.0, Mode.VAL)
        client = _with_own_connections(self.async_openai_client)
        models = Models(
            self._reflector(client, self.gradient_model),
            self._reflector(client, self.apply_edit_model),
        )
        plan = BeamPlan(
            prompts=prompts,
            beam_width=self.beam_width,
            branch_factor=self.branch_factor,
            beam_rounds=self.beam_rounds,
            gradient_batch_size=self.gradient_batch_size,
            val_batch_size=self.val_batch_size,
            max_rollouts=None,
            max_reflections=None,
            perfect_reward=None,
            reflections_at_once=MAX_CONCURRENT_QUESTIONS,
            seed=self.seed,
        )
        search = Search(plan, trials, split, models, log.info)
        try:
            result = await search.run()
        finally:  # the best one so far, where it was interrupted
            self._best = PromptTemplate(filled_as(template.template, search.best[name]))
            if client is not self.async_openai_client:
                await client.close()
        for text in result.notes():
            log.info("%s", text)

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
    """Return the first prompt template of the resources, with its name.

    Raises:
        ConfigError: there is none.
    """
    for name, resource in resources.items():
        if isinstance(resource, PromptTemplate):
            return name, resource
    raise ConfigError(
        "APO needs the prompt to begin with: Trainer(initial_resources={'prompt_template': "
        "agl.PromptTemplate(template=…, engine='f-string')})"
    )


def _with_own_connections(client: AsyncOpenAI) -> AsyncOpenAI:
    """Return the client with connections of this event loop, or itself with the user's own."""
    import openai

    inner = type(getattr(client, "_client", None)).__name__
    if inner != "AsyncHttpxClientWrapper":  # what the SDK makes where none is given
        return client
    return client.copy(http_client=openai.DefaultAsyncHttpxClient())


def _distinct(tasks: Sequence[Json]) -> list[Json]:
    return list({task_id(task): task for task in tasks}.values())
