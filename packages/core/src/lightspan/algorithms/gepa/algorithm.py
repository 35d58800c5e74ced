"""GEPA: its settings, and its one step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from lightspan.algorithms.gepa.journal import Journal
from lightspan.algorithms.gepa.reflection import Reflector
from lightspan.algorithms.gepa.search import Found, Search, Split
from lightspan.algorithms.gepa.survey import survey
from lightspan.algorithms.protocol import Algorithm, Metrics, PolicySpec, World
from lightspan.errors import ConfigError, DataError, how_to_install
from lightspan.lightning.episode import Episode
from lightspan.progress import many
from lightspan.runners.app import INJECTED
from lightspan.schema.checks import check_number, check_url, check_whole
from lightspan.schema.instructions import Instructions
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import LearnedPrompt, PromptTemplate
from lightspan.schema.records import Json, task_id
from lightspan.schema.resources import INSTRUCTIONS, ROUTING, Resources
from lightspan.schema.routing import Routing

JOURNAL: Final = "journal"
"""The folder in the run's."""
CANDIDATES: Final = "candidates.json"
"""In it: what the search found."""


@dataclass(kw_only=True, eq=False)
class GEPA(Algorithm):
    """Learns the texts of prompts: a language model reads what rollouts showed and proposes others,
    and a Pareto front of candidates keeps what is best at some task (arXiv 2507.19457).

    No weights are trained: calls go where the app points them, with the app's own key.

    Args:
        prompts: name → template. The app gets each as an argument called like it, or all of them
            as `resources`. They are optimised together, as parts of one candidate.
        optimize: agents whose instructions are learned in an app that nobody edits: names, or globs
            on agent paths as for `LightningRL(optimize=)`. Their texts are found in the calls of
            the first evaluation, and others sent in their place. Also names of prompts that the app
            asks for by `lightspan.prompt(name, text)`. They are parts of the candidate too.
        reflection: the model that proposes other texts. Its `sampling` goes into each question.
        max_rollouts: of the app, at most, beside those of the held-out tasks.
        max_reflections: questions to the reflection model, at most.
        max_tokens: of the reflection model and the app's calls together, as their endpoints count
            them. It is looked at before each iteration, so that the last one may exceed it.
        selection: the share of the training tasks that candidates are compared by; reflections see
            the others. The seed splits them. The held-out tasks have no part in any choice.
        minibatch: tasks that a candidate is proposed from, and first tried on.
        proposals: candidates that are proposed and run side by side in an iteration.
        merge: also make candidates of two others, where there are several prompts.
        perfect_reward: with it on every task of the selection split the search ends, and a
            minibatch that has it everywhere is not reflected on. None: no reward is the highest.
        failure_reward: of a rollout whose app failed; and what one without a reward counts for
            where candidates are compared.
        timeout_s: of one rollout.
        reflection_timeout_s: of one question.
        patience_s: how long a question is put off in all by an endpoint that is busy (429).
        seed: of the split and of every choice.

    Raises:
        ConfigError: an option that cannot be honoured.
        ModuleNotFoundError: the library `gepa`, or the OpenAI SDK, is missing.
    """

    prompts: Mapping[str, PromptTemplate] = field(kw_only=False, default_factory=dict)
    reflection: LLM = field(kw_only=False, default=None)  # type: ignore[assignment]
    optimize: str | Sequence[str] = ()
    max_rollouts: int = 300
    max_reflections: int | None = None
    max_tokens: int | None = None
    selection: float = 0.5
    minibatch: int = 3
    proposals: int = 1
    merge: bool = True
    perfect_reward: float | None = 1.0
    failure_reward: float = 0.0
    timeout_s: float | None = 600.0
    reflection_timeout_s: float = 300.0
    patience_s: float = 1800.0
    seed: int = 0

    def __post_init__(self) -> None:
        for module in ("gepa", "openai"):
            if find_spec(module) is None:
                raise ModuleNotFoundError(
                    f"GEPA needs {module!r}: {how_to_install('prompts')}", name=module
                )
        self.prompts = dict(self.prompts)  # the user's own may change later
        optimize = self.optimize
        self.optimize = [optimize] if isinstance(optimize, str) else list(optimize)
        _check_prompts(self.prompts)
        _check_optimize(self.optimize, self.prompts)
        if not isinstance(self.reflection, LLM):
            raise ConfigError(f"reflection={self.reflection!r:.100}: use LLM(base_url=…, model=…)")
        check_url(self.reflection.base_url, "the reflection model's base URL")
        self.reflection.api_key()  # before any rollout
        for name in ("max_rollouts", "minibatch", "proposals"):
            check_whole(name, getattr(self, name), 1)
        for name in ("max_reflections", "max_tokens"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_number("selection", self.selection, above=0, below=1)
        check_number("failure_reward", self.failure_reward)
        check_number("reflection_timeout_s", self.reflection_timeout_s, above=0)
        check_number("patience_s", self.patience_s, low=0)
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, above=0)
        if self.perfect_reward is not None:
            check_number("perfect_reward", self.perfect_reward)
        self.found: Found | None = None
        """What the search found; None before its end."""

    # --- what a trainer asks ----------------------------------------------------------------
    @property
    def tasks_per_step(self) -> int:
        return self.max_rollouts

    @property
    def total_steps(self) -> int:
        return 1

    def policies(self) -> dict[str, PolicySpec]:
        return {}

    def routing(self) -> Routing:
        return Routing()

    def resources(self) -> Resources:
        """The prompts: as they were given, and when the search is over as they were chosen; and
        what agents are told, which until then is what the app says, and written down."""
        if self.found is None:
            given: dict[str, PromptTemplate | Instructions] = {**self.prompts}
            if self.optimize:
                given[INSTRUCTIONS] = Instructions(surveyed=list(self.optimize))
            return given
        chosen = self.found.candidates[self.found.chosen].templates
        learned: dict[str, PromptTemplate | Instructions] = {
            name: PromptTemplate(chosen[name], engine=given.engine)
            for name, given in self.prompts.items()
        }
        if self.found.surveyed is not None:
            learned[INSTRUCTIONS] = self.found.surveyed.told(chosen)
        return learned

    def learned_prompts(self) -> dict[str, LearnedPrompt]:
        found = self.found
        chosen = None if found is None else found.candidates[found.chosen].templates
        learned = {
            name: LearnedPrompt(
                before=given,
                after=given if chosen is None else PromptTemplate(chosen[name], given.engine),
            )
            for name, given in self.prompts.items()
        }
        if found is not None and found.surveyed is not None and chosen is not None:
            for name in found.surveyed.components:
                learned[name] = found.surveyed.learned(name, chosen[name])
        return learned

    def look(self, episodes: Sequence[Episode]) -> list[str]:
        return survey(episodes, list(self.optimize)).lines() if self.optimize else []

    def state(self) -> dict[str, Json]:
        return {"found": msgspec.to_builtins(self.found)}

    def load_state(self, state: dict[str, Json]) -> None:
        self.found = msgspec.convert(state["found"], Found | None)

    def config(self) -> dict[str, Json]:
        budget = ("max_rollouts", "max_reflections", "max_tokens")
        same = ("minibatch", "proposals", "merge", "perfect_reward", "failure_reward")
        return {
            "algorithm": self.name,
            "seed": self.seed,
            "timeout_s": self.timeout_s,
            "prompts": msgspec.to_builtins(self.prompts),
            "optimize": list(self.optimize),
            "reflection": msgspec.to_builtins(self.reflection),
            "budget": {name: getattr(self, name) for name in budget},
            "selection_share": self.selection,  # `selection` is of the data
            **{name: getattr(self, name) for name in same},
        }

    # --- its one step -----------------------------------------------------------------------
    async def run_step(self, world: World) -> Metrics:
        """The whole search."""
        split = self.split(world.tasks)
        reflector = Reflector(
            self.reflection,
            timeout_s=self.reflection_timeout_s,
            patience_s=self.patience_s,
            note=world.note,
        )
        try:
            journal = Journal(world.path / JOURNAL)
            try:
                found = await Search(self, world, split, journal, reflector).run()
            finally:
                journal.close()
        finally:
            await reflector.close()
        self.found = found
        keep_found(found, world.path)
        best = found.candidates[found.chosen]
        what = "the prompts stay as they are" if not found.chosen else f"candidate {found.chosen}"
        world.note(
            f"{found.ended}. Of {many(len(found.candidates), 'candidate')} {what}: {best.mean:.3f} "
            f"on the selection split, {found.candidates[0].mean:.3f} before; the highest of "
            "several is high by luck too: what counts is the held-out reward"
        )
        if found.surveyed is not None:
            world.note(found.texts())
        if found.unusable:
            asked = many(found.reflections, "answer")
            world.note(f"{found.unusable} of {asked} of the reflection model were of no use")
        return _metrics(found)

    def split(self, tasks: Sequence[Json]) -> Split:
        """The training tasks in two parts; equal ones are one.

        Raises:
            DataError: there are too few.
        """
        distinct = {task_id(task): task for task in tasks}
        count = max(1, round(self.selection * len(distinct)))
        if count >= len(distinct):
            raise DataError(
                f"selection={self.selection:g} of {many(len(distinct), 'distinct training task')} "
                "leaves none to reflect on: give more tasks, or a smaller share"
            )
        names = random.Random(f"{self.seed}/selection").sample(list(distinct), count)
        taken = set(names)
        return Split(
            feedback=[task for name, task in distinct.items() if name not in taken],
            selection=[distinct[name] for name in names],
        )


def keep_found(found: Found, run: Path) -> None:
    """Write what a search found into a run's folder, where people and programs read it."""
    path = run / JOURNAL / CANDIDATES
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def read_found(run: Path) -> Found | None:
    """What the search of a run found; None if it found nothing yet, or there was none.

    Raises:
        ConfigError: the file is damaged.
    """
    path = run / JOURNAL / CANDIDATES
    try:
        return msgspec.json.decode(path.read_bytes(), type=Found)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _metrics(found: Found) -> Metrics:
    metrics: Metrics = {
        "rollouts": found.rollouts,
        "scored": found.rollouts - found.unscored,
        "failed": found.failed,
        "candidates": len(found.candidates),
        "reflections": found.reflections,
        "reflections/unusable": found.unusable,
        "tokens": found.tokens,
        "selection/before": found.candidates[0].mean,
        "selection/best": found.candidates[found.chosen].mean,
    }
    if found.surveyed is not None:
        metrics["texts/sent"] = found.applied
        metrics["texts/original"] = sum(found.kept.values())
        metrics["texts/unasked"] = sum(found.unasked.values())
    return metrics if found.mean is None else {**metrics, "reward": found.mean}


def _check_prompts(prompts: Mapping[str, PromptTemplate]) -> None:
    taken = {*INJECTED, ROUTING} - {"prompt"}
    for name, template in prompts.items():
        if not isinstance(template, PromptTemplate):
            raise ConfigError(
                f"prompts[{name!r}] is a {type(template).__name__}: use PromptTemplate(text)"
            )
        if not name.isidentifier() or name in taken:
            raise ConfigError(
                f"prompts[{name!r}]: the app gets it as an argument of this name, and that is "
                + ("taken" if name in taken else "no name of an argument")
            )


def _check_optimize(patterns: Sequence[str], prompts: Mapping[str, PromptTemplate]) -> None:
    if not patterns and not prompts:
        raise ConfigError(
            "GEPA has no prompt to learn: give prompts={name: PromptTemplate(…)}, which the app "
            'takes as arguments, or optimize=["agent"], whose instructions are found in its calls'
        )
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"optimize={list(patterns)!r:.200}: {pattern!r:.50} is no name")
        if pattern in prompts:
            raise ConfigError(f"{pattern!r} is in prompts and in optimize: keep it in one of them")
