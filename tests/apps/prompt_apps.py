"""Apps with learned prompts and no trained weights; the task names the endpoint of their model."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import openai

import lightspan
from lightspan import LLM, PromptTemplate
from lightspan.algorithms import Algorithm, Metrics, PolicySpec, TrainerContext
from lightspan.schema.routing import Routing


def ask(url: str, text: str) -> str:
    """Return the answer of the app's own model."""
    client = openai.OpenAI(base_url=url, api_key="own-key", max_retries=0)
    messages: Any = [{"role": "user", "content": text}]
    reply = client.chat.completions.create(model="own", messages=messages)
    return reply.choices[0].message.content or ""


@lightspan.rollout
def echo(task: dict[str, Any]) -> float:
    """Return 1 if the model's answer is the one that the task wants."""
    with lightspan.agent("speaker"):
        return float(ask(task["url"], task["q"]) == task["want"])


@lightspan.rollout
def styled(task: dict[str, Any], style: PromptTemplate) -> float:
    """Fill in the prompt `style`, which the app takes as an argument."""
    return float(ask(task["url"], style.format(q=task["q"])) == task["want"])


@lightspan.rollout
def styled_and_checked(task: dict[str, Any], style: PromptTemplate) -> float:
    """Ask a second question, whose failure ends the attempt."""
    answer = ask(task["url"], style.format(q=task["q"]))
    ask(task["url"], f"check {task['q']}")
    return float(answer == task["want"])


@lightspan.rollout
def styled_by_http(task: dict[str, Any], style: PromptTemplate) -> float:
    """Do what `styled` does, without an SDK."""
    messages = [{"role": "user", "content": style.format(q=task["q"])}]
    data = json.dumps({"model": "own", "messages": messages}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{task['url']}/chat/completions", data, headers)
    with urllib.request.urlopen(request) as reply:
        answer = json.load(reply)["choices"][0]["message"]["content"]
    return float(answer == task["want"])


@lightspan.rollout
def worded(task: dict[str, Any]) -> float:
    """Ask for a prompt of the app by name; the test changes its text, as a user edits a file."""
    text = lightspan.prompt("style", os.environ.get("STYLE", "SHOUT it."))
    return float(ask(task["url"], f"{text} Q: {task['q']}") == task["want"])


@lightspan.rollout
def wants_llm(task: dict[str, Any], llm: LLM) -> float:
    """Take an argument `llm`, which a run without policies does not have."""
    return 0.0


@lightspan.rollout
def given(task: dict[str, Any], style: PromptTemplate) -> float:
    """Return the reward that the task names; fail without one."""
    return float(task["reward"])


class Trial(Algorithm):
    """Try several prompts in each step, and keep the best."""

    def __init__(self, texts: list[str], *, steps: int | None = None) -> None:
        self.texts = texts
        self.best = texts[0]
        self.log: list[int] = []
        self._total = steps

    @property
    def tasks_per_step(self) -> int:
        return 2

    @property
    def total_steps(self) -> int | None:
        return self._total

    def policies(self) -> dict[str, PolicySpec]:
        return {}

    def routing(self) -> Routing:
        return Routing()

    def resources(self) -> dict[str, PromptTemplate]:
        return {"style": PromptTemplate(self.best)}

    async def run_step(self, world: TrainerContext) -> Metrics:
        tasks = world.next_tasks(2)
        offers = [{"style": PromptTemplate(text)} for text in self.texts for _ in tasks]
        episodes = await world.rollouts(tasks * len(self.texts), 1, resources=offers)
        rewards = [episode.reward or 0.0 for episode in episodes]
        sums = [sum(rewards[2 * i : 2 * i + 2]) for i in range(len(self.texts))]
        self.best = self.texts[sums.index(max(sums))]
        self.log.append(world.step)
        return {"reward": max(sums) / 2}

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "log": self.log}

    def load_state(self, state: dict[str, Any]) -> None:
        self.best, self.log = state["best"], state["log"]


@lightspan.rollout
def told(task: dict[str, Any], rules: PromptTemplate, form: PromptTemplate) -> dict[str, float]:
    """Use two prompts: half of the reward is for capitals, half for the right letters."""
    with lightspan.agent("speaker"):
        said = ask(task["url"], f"{rules.format()}\n{form.format(q=task['q'])}")
    lightspan.emit_message(f"it was to be {task['want']}")
    loud, backwards = float(said.isupper()), float(said.lower() == task["want"].lower())
    return {"reward": (loud + backwards) / 2, "loud": loud}
