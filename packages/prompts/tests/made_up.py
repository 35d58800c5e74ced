"""Simulated rollouts for searches."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightspan import APO, GEPA, LLM, PromptTemplate
from lightspan.lightning.episode import Call, Episode, score_failure
from lightspan.schema.images import Image
from lightspan.schema.records import AttemptStatus, Mode, Outcome, task_id
from lightspan.schema.spans import Span, SpanKind
from lightspan.schema.token_records import CallOutcome
from lightspan_prompts.search.candidates import SearchResult
from lightspan_testing.scripted import Request, ScriptedServer

TASKS: list[Any] = [{"n": n} for n in range(10)]
WORDS = ("ALPHA", "BETA")
STATUSES = {Outcome.OK: AttemptStatus.SUCCEEDED, Outcome.INFRASTRUCTURE: AttemptStatus.LOST}


def score(task: Any, texts: Mapping[str, str]) -> float | None:
    """Return 1 if the prompt has the word that the task needs, else 0."""
    name, word = ("first", "second")[task["n"] % 2], WORDS[task["n"] // 2 % 2]
    return float(word in texts[name])


class World:
    """Stand-in for the trainer's context that computes rewards from task and prompts.

    An `Outcome` in place of a reward is that of an app that failed, or of a lost worker.
    """

    def __init__(
        self,
        path: Path,
        reward: Callable[..., float | Outcome | None] = score,
        calls: Sequence[Call] = (),
    ) -> None:
        self.path = path
        self.calls = calls
        self.tasks = TASKS
        self.reward = reward
        self.rollouts_done = 0
        """Number of rollouts."""
        self.notes: list[str] = []
        self.recorded: list[dict[str, Any]] = []
        self.lowest = 0.0
        """Lowest reward so far, which a rollout whose app failed has, as in a run."""
        self.unscored = ""
        """Why a scorer gave no reward."""
        self.batches: list[int] = []
        self.stored: list[Episode] = []
        """Rollouts in the store of which no earlier process may have got the results."""
        self.files: dict[str, Image] = {}
        """Digest → image that a call shows."""

    async def rollouts(
        self, tasks: Sequence[Any], group_size: int, mode: Mode = Mode.TRAIN, *, resources: Any
    ) -> list[Episode]:
        assert group_size == 1
        self.batches.append(len(tasks))
        episodes = []
        for task, offered in zip(tasks, resources, strict=True):
            self.rollouts_done += 1
            texts = {name: prompt.format(q="Q") for name, prompt in offered.items()}
            name = f"ro-{self.rollouts_done}"
            reward = self.reward(task, texts)
            outcome = reward if isinstance(reward, Outcome) else Outcome.OK
            episodes.append(
                Episode(
                    rollout_id=name,
                    attempt_id=f"at-{name}",
                    task_id=task_id(task),
                    group_id=name,
                    mode=mode,
                    status=STATUSES.get(outcome, AttemptStatus.FAILED),
                    outcome=outcome,
                    reward=None if isinstance(reward, Outcome) else reward,
                    reward_source=None if reward is None or outcome is reward else "returned",
                    unscored=self.unscored,
                    calls=list(self.calls),
                )
            )
        rewards = [each.reward for each in episodes if each.reward is not None]
        self.lowest = min([self.lowest, *rewards])
        return [score_failure(each, self.lowest) for each in episodes]

    async def interrupted(self, known: Container[str]) -> list[Episode]:
        return [each for each in self.stored if each.rollout_id not in known]

    async def images(self, digests: Sequence[str]) -> dict[str, Image]:
        return {digest: self.files[digest] for digest in digests if digest in self.files}

    def record(self, kind: str, metrics: dict[str, float]) -> None:
        self.recorded.append({"kind": kind, **metrics})

    def note(self, text: str) -> None:
        self.notes.append(text)


def call(number: int, model: str, request_text: int, answered: int, choice: int = 0) -> Call:
    """Return a call of an app to an endpoint that counts tokens."""
    span = Span(
        trace_id="1" * 32,
        span_id=f"{number:016x}",
        name="chat",
        kind=SpanKind.LLM,
        start_ns=number,
        end_ns=number + 1,
        attributes={
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": request_text,
            "gen_ai.usage.output_tokens": answered,
        },
    )
    return Call(f"call-{number}", choice, "agent", CallOutcome.OK, span=span)


def pool(found: SearchResult) -> list[Any]:
    return [(each.templates, each.parents, each.rewards, each.mean) for each in found.candidates]


def is_edit(request: Request) -> bool:
    return "<critique>" in request.last_text


def text_of(request: Request) -> str:
    return request.last_text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]


def reflects(request: Request) -> str:
    """Answer as a reflection model: add a word that depends only on the whole request.

    APO's critic names the word, and its editor adds it.
    """
    word = random.Random(request.last_text).choice([*WORDS, "nothing"])
    if is_edit(request):
        word = request.last_text.partition("it lacks ")[2].split()[0]
    return f"it lacks {word}\n<prompt>\n{text_of(request)} {word}\n</prompt>"


def _options(server: ScriptedServer) -> dict[str, Any]:
    prompts = {"first": PromptTemplate("Do {q}."), "second": PromptTemplate("Then {q}.")}
    llm = LLM(base_url=server.url, model="thinker")
    return {"prompts": prompts, "reflection": llm, "perfect_reward": None, "significance": None}


def gepa(server: ScriptedServer, **options: Any) -> GEPA:
    return GEPA(**{**_options(server), "max_rollouts": 150, **options})


SMALL: dict[str, Any] = {
    "beam_width": 1,
    "branch_factor": 1,
    "beam_rounds": 1,
    "gradient_batch_size": 2,
    "val_batch_size": 3,
}
BEAM: dict[str, Any] = {**SMALL, "beam_width": 2, "branch_factor": 2, "beam_rounds": 3}


def apo(server: ScriptedServer, **options: Any) -> APO:
    return APO(**{**_options(server), **BEAM, **options})


async def search(algorithm: GEPA | APO, world: World) -> SearchResult:
    await algorithm.run_step(world)  # type: ignore[arg-type]
    assert algorithm.found is not None
    return algorithm.found
