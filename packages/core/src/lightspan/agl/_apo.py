"""APO under the original's name: lightspan's beam search over a store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from lightspan.agl._algorithms import Algorithm
from lightspan.agl._resources import PromptTemplate
from lightspan.agl._rollouts import Dataset, EnqueueRolloutRequest
from lightspan.algorithms.apo.search import BeamPlan, Models, Search
from lightspan.algorithms.endpoint_client import EndpointClient
from lightspan.algorithms.prompts.candidates import Split
from lightspan.algorithms.prompts.trials import Prompts, Trials
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.lightning.episode import Episode
from lightspan.schema.checks import check_number, check_whole
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate as KeptTemplate, filled_as
from lightspan.schema.records import Json, Mode, task_id
from lightspan.schema.resources import Resources
from lightspan.training.collector import read_episodes

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from lightspan.agl._store import LightningStore

T = TypeVar("T")

log = logging.getLogger(__name__)

PATIENCE_S: Final = 1800.0
"""How long a question is put off in all by an endpoint that is busy (429)."""
AT_ONCE: Final = 4
"""Questions that are under way together."""
_SIZES: Final = (
    *("gradient_batch_size", "val_batch_size", "beam_width", "branch_factor", "beam_rounds"),
)


class APO(Algorithm, Generic[T]):
    """Learns the prompt template of `initial_resources` by textual gradients and beam search.

    Unlike the original it draws by a seed; a rollout that did not end in time, or that has no
    reward, stays in the mean as 0; a candidate that lost a placeholder is run on nothing; and
    candidates run side by side. It keeps everything in memory: `lightspan.APO` is journalled, and
    can go on.

    Args:
        async_openai_client: asks the two models; not closed.
        gradient_model: says what is wrong with a prompt.
        apply_edit_model: rewrites it by that.
        diversity_temperature: of both.
        gradient_batch_size: tasks whose rollouts `gradient_model` is shown, for each new candidate.
        val_batch_size: tasks of `val_dataset` that the candidates of a round are compared by. The
            best one is then run on all of it.
        beam_width: candidates that go on to the next round.
        branch_factor: new ones from each of these per round.
        beam_rounds: rounds.
        rollout_batch_timeout: seconds for the rollouts that are queued together. What has not ended
            then is cancelled.
        run_initial_validation: without effect: the prompt as it is is always compared, or a worse
            one would take its place.
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
        for name, is_given in ignored.items():
            if is_given:
                log.info("APO(%s=%s) is without effect here", name, getattr(self, name, True))
        self._best: PromptTemplate | None = None

    def get_seed_prompt_template(self) -> tuple[str, PromptTemplate]:
        """The first prompt template of the initial resources, and its name.

        Raises:
            ConfigError: there is none.
            UnsupportedError: its engine is not f-string.
        """
        for name, resource in (self.get_initial_resources() or {}).items():
            if isinstance(resource, PromptTemplate):
                if resource.engine != "f-string":
                    raise UnsupportedError(
                        f"APO learns templates of the engine 'f-string', and {name!r} is of "
                        f"{resource.engine!r}: write its placeholders as {{name}}"
                    )
                return name, resource
        raise ConfigError(
            "APO needs the prompt to begin with: Trainer(initial_resources={'prompt_template': "
            "agl.PromptTemplate(template=…, engine='f-string')})"
        )

    def get_best_prompt(self) -> PromptTemplate:
        """The best prompt of all rounds, by its mean on the whole of `val_dataset`: the first one
        of equals.

        Raises:
            ConfigError: `fit` was not called yet.
        """
        if self._best is None:
            raise ConfigError("APO has no best prompt yet: call Trainer.fit first")
        return self._best

    async def run(
        self,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Search.

        Args:
            train_dataset: tasks whose rollouts `gradient_model` sees.
            val_dataset: tasks that candidates are compared by.

        Raises:
            ConfigError: one of them is missing, or the prompt to begin with.
            RewardError: no rollout of the prompt as it is has a reward.
            EngineError: a model does not answer.
        """
        from lightspan.agl._trainer import as_tasks

        name, given = self.get_seed_prompt_template()
        split = Split(
            feedback=_distinct(as_tasks(train_dataset, "train_dataset")),
            selection=_distinct(as_tasks(val_dataset, "val_dataset")),
        )
        prompts = {name: KeptTemplate(given.template)}
        runs = _StoreRuns(
            self.get_store(), self.get_initial_resources() or {}, self.rollout_batch_timeout
        )
        trials = Trials(runs, prompts, None, 0.0, Mode.VAL)
        client = _own(self.async_openai_client)
        models = Models(
            self._reflector(client, self.gradient_model),
            self._reflector(client, self.apply_edit_model),
        )
        search = Search(self._plan(prompts), trials, split, models, log.info)
        try:
            found = await search.run()
        finally:  # what was the best when it was stopped
            best = filled_as(given.template, search.best[name])
            self._best = PromptTemplate(template=best, engine="f-string")
            if client is not self.async_openai_client:
                await client.close()
        for text in found.notes():
            log.info("%s", text)

    def _plan(self, prompts: Prompts) -> BeamPlan:
        return BeamPlan(
            prompts=prompts,
            beam_width=self.beam_width,
            branch_factor=self.branch_factor,
            beam_rounds=self.beam_rounds,
            gradient_batch_size=self.gradient_batch_size,
            val_batch_size=self.val_batch_size,
            max_rollouts=None,
            max_reflections=None,
            perfect_reward=None,
            reflections_at_once=AT_ONCE,
            seed=self.seed,
        )

    def _reflector(self, client: AsyncOpenAI, model: str) -> EndpointClient:
        return EndpointClient(
            LLM(
                base_url=str(client.base_url),
                model=model,
                sampling={"temperature": self.diversity_temperature},
            ),
            timeout_s=None,
            patience_s=PATIENCE_S,
            note=log.info,
            client=client,
        )


class _StoreRuns:
    """Runs candidates by the runners of a store.

    Args:
        store: the algorithm's.
        others: the initial resources, which every candidate is handed beside its own.
        timeout_s: of the rollouts that are queued together.
    """

    def __init__(self, store: LightningStore, others: Mapping[str, Any], timeout_s: float) -> None:
        self._store = store
        self._others = dict(others)
        self._timeout_s = timeout_s
        self._ids: dict[tuple[str, ...], str] = {}
        """Texts → the version of the resources that has them."""

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Sequence[Resources] | None = None,
    ) -> list[Episode]:
        """The episodes, after all rollouts have ended or the time is over."""
        handed: Sequence[Resources] = [{}] * len(tasks) if resources is None else resources
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode="train" if mode is Mode.TRAIN else "val",
                resources_id=await self._resources_id(offered),
            )
            for task, offered in zip(tasks, handed, strict=True)
            for _ in range(group_size)
        ]
        queued = await self._store.enqueue_many_rollouts(requests)
        ids = [rollout.rollout_id for rollout in queued]
        ended = await self._store.wait_for_rollouts(rollout_ids=ids, timeout=self._timeout_s)
        late = set(ids) - {rollout.rollout_id for rollout in ended}
        if late:
            log.warning(
                "%d of %d rollouts have not ended within rollout_batch_timeout=%g s: they are "
                "cancelled, and count as 0 in the mean",
                *(len(late), len(ids), self._timeout_s),
            )
            await self._store.store.cancel(sorted(late))
        states = {
            state.rollout.rollout_id: state for state in await self._store.store.rollouts(ids)
        }
        return await read_episodes(self._store.store, [states[each] for each in ids])

    async def _resources_id(self, handed: Resources) -> str:
        offered = {name: each for name, each in handed.items() if isinstance(each, KeptTemplate)}
        texts = tuple(prompt.template for prompt in offered.values())
        if texts not in self._ids:
            templates = {
                name: PromptTemplate(
                    template=filled_as(self._others[name].template, prompt.template),
                    engine="f-string",
                )
                for name, prompt in offered.items()
            }
            update = await self._store.add_resources({**self._others, **templates})
            self._ids[texts] = update.resources_id
        return self._ids[texts]


def _own(client: AsyncOpenAI) -> AsyncOpenAI:
    """The client with connections of its own, which are of this event loop and closed with it: the
    user's may be asked in another one later. One with an HTTP client that the user made (a proxy,
    certificates) is asked as it is."""
    import openai

    given = type(getattr(client, "_client", None)).__name__
    if given != "AsyncHttpxClientWrapper":  # what the SDK makes where nothing is given
        return client
    return client.copy(http_client=openai.DefaultAsyncHttpxClient())


def _distinct(tasks: Sequence[Json]) -> list[Json]:
    return list({task_id(task): task for task in tasks}.values())
