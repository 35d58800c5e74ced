"""Learn the instructions of `desk_graph`'s router, in a process that tests kill.

python desk_learning.py FOLDER APP_URL REFLECTION_URL [KIND]
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
GUESSES = ("press", "garage", "kitchen", "archive", "legal")
RULES = "bill: accounts. password: support. parcel: shipping. Answer with the desk alone."

lightspan_langgraph.instrument()


@lightspan.rollout
def route(task: dict[str, Any]) -> float:
    done = desk_graph.graph.invoke({"text": task["mail"], "records": task["records"]})
    lightspan.emit_message(f"the right desk is {task['desk']}")
    return float(done["desk"] == task["desk"])


@lightspan.rollout
def courteous(task: dict[str, Any]) -> float:
    """Run the help desk; the router's answer and the clerk's give half of the reward each."""
    done = desk_graph.graph.invoke({"text": task["mail"], "records": task["records"]})
    return (done["desk"] == task["desk"]) / 2 + done["answer"].endswith("dear customer.") / 2


def speaks(request: Any) -> str:
    """Return the answer of the app's model, which is right if its system message has the rule."""
    told, asked = request.messages[0]["content"], request.last_text
    if told.startswith("You are a clerk"):
        return "We are on it."
    known = dict(rule.split(": ") for rule in RULES.split(". ")[:3]) if RULES in told else {}
    return next((desk for what, desk in known.items() if what in asked), "which desk is it?")


def speaks_variously(request: Any) -> str:
    """Answer like `speaks`, but guess as the router without a rule, and be polite as the clerk."""
    told = request.messages[0]["content"]
    if told.startswith("You are a clerk"):
        return "We are on it, dear customer." if told.endswith("Be kind.") else "We are on it."
    return speaks(request) if RULES in told else GUESSES[sum(map(ord, request.last_text)) % 5]


def reflects(request: Any) -> str:
    """Return the reflection model's proposal: one rule for each agent, with the placeholders
    kept.
    """
    text = request.last_text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
    text = text.replace("Say which desk the mail is for.", RULES).replace("Be brief.", "Be kind.")
    return f"<prompt>\n{text}\n</prompt>"


def tasks(begin: int, end: int) -> list[dict[str, Any]]:
    """Return tasks with a different customer each."""
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


BEAM: dict[str, Any] = {
    "beam_width": 2,
    "branch_factor": 2,
    "beam_rounds": 2,
    "gradient_batch_size": 2,
    "val_batch_size": 4,
}


def train(
    folder: Path, reflection_url: str, app: Any = route, *, kind: str = "GEPA", **options: Any
) -> Any:
    from lightspan import APO, GEPA, LLM, Trainer
    from lightspan.progress import SilentReporter

    reporter = options.pop("reporter", None) or SilentReporter()
    llm = LLM(base_url=reflection_url, model="thinker")
    options = {"optimize": ["router"], **options}
    algorithm: Any = (
        GEPA(reflection=llm, **{"max_rollouts": 60, "finalists": 0, **options})
        if kind == "GEPA"
        else APO(reflection=llm, **{**BEAM, **options})
    )
    trainer = Trainer(algorithm, runners=2, folder=folder, reporter=reporter)
    return trainer.fit(app, tasks(0, 16), tasks(30, 34), resume=folder.exists())


if __name__ == "__main__":
    os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = sys.argv[2], "own-key"
    train(Path(sys.argv[1]), sys.argv[3])
    heavy = ("torch", "matplotlib", "transformers", "litellm", "peft")
    print([name for name in heavy if name in sys.modules])
