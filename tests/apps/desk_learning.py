"""Learns the instructions of `desk_graph`'s router, in a process of its own that may be killed.

python desk_learning.py FOLDER APP_URL REFLECTION_URL
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import desk_graph

import lightspan
import lightspan_langgraph

DESKS = {"bill": "accounts", "password": "support", "parcel": "shipping"}
RULES = "bill: accounts. password: support. parcel: shipping. Answer with the desk alone."

lightspan_langgraph.instrument()


@lightspan.rollout
def route(task: dict[str, Any]) -> float:
    done = desk_graph.graph.invoke({"text": task["mail"], "records": task["records"]})
    lightspan.emit_message(f"the right desk is {task['desk']}")
    return float(done["desk"] == task["desk"])


_answers: dict[str, str] = {}


@lightspan.rollout
def remembered(task: dict[str, Any]) -> float:
    """An app with a cache of its own, which knows nothing of candidates."""
    if task["mail"] not in _answers:
        done = desk_graph.graph.invoke({"text": task["mail"], "records": task["records"]})
        _answers[task["mail"]] = done["desk"]
    return float(_answers[task["mail"]] == task["desk"])


def speaks(request: Any) -> str:
    """The app's model, which knows what its system message says."""
    told, asked = request.messages[0]["content"], request.last_text
    if told.startswith("You are a clerk"):
        return "We are on it."
    known = dict(rule.split(": ") for rule in RULES.split(". ")[:3]) if RULES in told else {}
    return next((desk for what, desk in known.items() if what in asked), "which desk is it?")


def reflects(request: Any) -> str:
    """The reflection model: knows one rule, and keeps the placeholders."""
    text = request.last_text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
    return f"<prompt>\n{text.replace('Say which desk the mail is for.', RULES)}\n</prompt>"


def tasks(begin: int, end: int) -> list[dict[str, Any]]:
    """Each with a customer of its own."""
    names = list(DESKS)
    return [
        {
            "mail": f"about my {names[n % 3]}, no. {n}",
            "desk": DESKS[names[n % 3]],
            "records": [
                f"{'calls' if n % 2 else 'writes'} since week {n}",
                *["pays late"] * (n % 4),
            ],
        }
        for n in range(begin, end)
    ]


def train(folder: Path, reflection_url: str, app: Any = route, **options: Any) -> Any:
    from lightspan import GEPA, LLM, Trainer
    from lightspan.progress import SilentReporter

    reporter = options.pop("reporter", None) or SilentReporter()
    algorithm = GEPA(
        reflection=LLM(base_url=reflection_url, model="thinker"),
        **{"optimize": ["router"], "max_rollouts": 60, "finalists": 0, **options},
    )
    trainer = Trainer(algorithm, runners=2, folder=folder, reporter=reporter)
    return trainer.fit(app, tasks(0, 16), tasks(30, 34), resume=folder.exists())


if __name__ == "__main__":
    os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = sys.argv[2], "own-key"
    train(Path(sys.argv[1]), sys.argv[3])
    heavy = ("torch", "matplotlib", "transformers", "litellm", "peft")
    print([name for name in heavy if name in sys.modules])
