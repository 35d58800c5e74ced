"""The app with its reward, and the recipe that docs/evidence/terminal.md measures.

`answer` runs mini-swe-agent on a package and lets pytest verify it. The recipe was tuned on
the development packages; the test packages, whose kinds of bugs occur nowhere else, are for the
report.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from minisweagent import Model

import lightspan
from lightspan import PolicyLoss, rollout
from lightspan.progress import Reporter
from lightspan_examples import recipe as common
from lightspan_examples.data import generated
from lightspan_examples.recipe import Imitation
from lightspan_examples.warm_start import WarmStart
from terminal_example import app, bugs, packages, sandbox, sessions
from terminal_example.app import LIMIT
from terminal_example.packages import Split, Task
from terminal_example.sessions import COUNT

CACHE: Final = Path(__file__).parents[1] / ".cache"
"""Default folder of recorded sessions and warm starts."""
TRAINED = ["repair"]
"""The agents that are trained."""
AGENTS = ["repair"]
"""All agents of the app, so that a misspelt name raises an error before training."""
ATTEMPTS: Final = {"train": 1, "dev": 1, "test": 4}
"""How often a package of a split is repaired in an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Recipe(common.Recipe):
    """Settings of the example's training."""

    limit: int
    """Maximum number of model calls in a session."""
    kl: float
    """Weight of the KL divergence from the warm start.

    The score depends mostly on one choice, whether to list the folder first. Without this weight,
    noise alone moves that choice far, with permuted rewards too.
    """


RECIPE = Recipe(
    imitation=Imitation(demonstrations=COUNT, batch=6, turns="all", context=768),
    steps=16,
    group_size=8,
    tasks_per_step=12,
    minibatches=4,
    learning_rate=2e-4,
    warmup=8,
    decay=1.0,
    temperature=0.7,
    max_tokens=64,
    limit=3,  # as many as a session without a detour needs
    kl=0.2,
)
REAL_MODEL = replace(
    RECIPE, steps=100, learning_rate=None, warmup=0, decay=None, max_tokens=512, limit=LIMIT, kl=0.0
)
"""Recipe for a model of `--model`; it has not been run on a GPU yet."""


class TrainingTask(Task):
    """A package with the app's settings."""

    name: str
    """The id of the package; `id` names one of several attempts at it."""
    max_tokens: int
    limit: int


@rollout
def answer(task: TrainingTask) -> float:
    """Repair a package; return 1 if pytest passes its tests, else 0."""
    with lightspan.agent("repair"):
        session = app.repair(task, _model(task["max_tokens"]), limit=task["limit"])
    return float(app.solved(task, session))


@cache
def _model(max_tokens: int) -> Model:
    # Where the client points does not matter in training: calls go to the model that learns.
    return app.chat_model(
        "terminal",
        base_url="http://localhost/v1",
        api_key="unused",
        temperature=RECIPE.temperature,
        max_tokens=max_tokens,
    )


def load_tasks(
    cache_dir: Path, split: Split, recipe: Recipe = RECIPE, reporter: Reporter | None = None
) -> list[TrainingTask]:
    """Return the packages of a split for `answer`.

    Each package is there `ATTEMPTS` times, once after all others.
    """
    sandbox.check()
    apart = packages.sources(packages.generate("test")) if split != "test" else ()
    return [
        {
            **task,
            "id": f"{task['id']}/{attempt}",
            "name": task["id"],
            "max_tokens": recipe.max_tokens,
            "limit": recipe.limit,
        }
        for attempt in range(ATTEMPTS[split])
        for task in packages.generate(split, apart=apart)
    ]


def chats(count: int, seed: int, cache_dir: Path = CACHE) -> list[dict[str, Any]]:
    """Return `count` recorded sessions in an order of the seed; the first call records them."""
    return _recorded(count, seed, cache_dir, None)


def _recorded(
    count: int, seed: int, cache_dir: Path, reporter: Reporter | None
) -> list[dict[str, Any]]:
    sandbox.check()
    held_out = packages.generate("test") + packages.generate("dev")
    write = partial(sessions.write, count=count, seed=0, apart=packages.sources(held_out))
    folder = cache_dir.resolve() / f"sessions-{count}"
    found = sessions.load(generated(folder, write, "recorded sessions", reporter))
    random.Random(seed).shuffle(found)
    return found


def warm_start(
    cache_dir: Path, seed: int, reporter: Reporter, recipe: Recipe | None = None
) -> tuple[Path, float]:
    """Return a small model trained on recorded sessions, and the CPU-seconds that it took."""
    make_chats = partial(_recorded, cache_dir=cache_dir, reporter=reporter)
    start = WarmStart(RECIPE, make_chats, [sessions, app, packages, bugs])
    return start(cache_dir, seed, reporter, recipe)


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Return the arguments of `LightningRL` that the recipe sets."""
    loss = PolicyLoss(kl=recipe.kl)
    return {"optimize": TRAINED, "frozen": None, "seed": seed, "loss": loss, **recipe.settings}
