"""An app whose answers a judge scores, and reward functions.

python judged_app.py FOLDER APP_URL JUDGE_URL
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

import lightspan
from lightspan import LLM, Judge, PromptTemplate, Trainer
from lightspan.algorithms import Algorithm, Metrics, PolicySpec, TrainerContext
from lightspan.lightning.answers import answer_of
from lightspan.lightning.episode import Episode
from lightspan.schema.routing import Routing


@lightspan.rollout
def counts(task: dict[str, Any], style: PromptTemplate) -> float:
    """Call the app's own model; the app's own reward is always 0.25."""
    client = openai.OpenAI(base_url=task["url"], api_key="own-key", max_retries=0)
    messages: Any = [{"role": "user", "content": style.format(q=task["q"])}]
    with lightspan.agent("counter"):
        client.chat.completions.create(model="own", messages=messages)
    if task.get("fails"):
        raise ValueError("the app failed")
    return 0.25


def counted(request: Any) -> str:
    """Return the answer of the app's model: the number of letters of the question.

    It is one more if the question is in capitals.
    """
    text = request.last_text
    return f"number {len(text) + text.isupper()}"


def tasks(url: str, *numbers: int) -> list[dict[str, Any]]:
    return [{"q": "q" * n, "url": url} for n in numbers]


class Sees(Algorithm):
    """Run each task with three prompts, and store the episodes and rewards."""

    texts = ("{q}", "{q}!", "{q}!!")

    def __init__(self) -> None:
        self.rewards: list[float | None] = []
        self.episodes: list[Episode] = []

    @property
    def tasks_per_step(self) -> int:
        return 2

    def policies(self) -> dict[str, PolicySpec]:
        return {}

    def routing(self) -> Routing:
        return Routing()

    def resources(self) -> dict[str, PromptTemplate]:
        return {"style": PromptTemplate("{q}")}

    async def run_step(self, world: TrainerContext) -> Metrics:
        given = world.next_tasks(2)
        offers = [{"style": PromptTemplate(text)} for text in self.texts for _ in given]
        self.episodes = await world.rollouts(given * 3, 2, resources=offers)
        self.rewards = [episode.reward for episode in self.episodes]
        return {"rollouts": len(self.episodes)}


# --- reward functions -------------------------------------------------------------------------
def length(task: Any, answer: str) -> dict[str, float]:
    """Reward an answer; both parameters are given by name."""
    assert answer.startswith("number ")
    return {"reward": float(answer.split()[1]), "letters": float(len(task["q"]))}


async def ranked(episodes: Sequence[Episode]) -> list[float]:
    """Reward all episodes of a group at once."""
    numbers = [float(answer_of(episode).split()[1]) for episode in episodes]
    return [number - min(numbers) for number in numbers]


def in_an_array(episodes: Sequence[Episode]) -> Any:
    import numpy

    return numpy.array([float(answer_of(episode).split()[1]) for episode in episodes])


def moody(answer: str) -> Any:
    """Raise, or return None, NaN or a number, depending on the answer."""
    number = int(answer.split()[1])
    if number == 1:
        raise LookupError("nothing to compare with")
    return {2: None, 3: float("nan")}.get(number, 1.0)


def texts(answer: str) -> Any:
    return "good"


def too_few(episodes: Sequence[Episode]) -> Any:
    return [1.0]


def train(folder: Path, app_url: str, judge_url: str) -> Any:
    trainer = Trainer(
        Sees(),
        runners=2,
        steps=2,
        folder=folder,
        reward=Judge("More is better.", LLM(base_url=judge_url, model="wise"), concurrency=1),
    )
    return trainer.fit(counts, tasks(app_url, 1, 2, 3, 4), resume=folder.exists())


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:4])
