"""Train a shipped example whose app has its own environment without torch."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app_environment import app_environment  # type: ignore[import-not-found]

from lightspan import LightningRL, LocalRunners, Trainer
from lightspan.lightning.episode import Episode
from lightspan.progress import SilentReporter
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_testing.tiny import tiny_model
from tests.reports.ui_numbers import check_run


def trained_apart(
    folder: Path,
    app: str,
    tasks: Sequence[Any],
    optimize: Sequence[str],
    distributions: Sequence[str],
    *,
    context: int = 512,
) -> list[Episode]:
    """Train one step, check the numbers of the run's page, and return the episodes.

    The runners' interpreter is that of an environment with `distributions`, their requirements and
    core. The trainer knows the app only by its name.

    Args:
        folder: folder of the environment and the run.
        app: import name of the app.
        tasks: tasks of the step.
        optimize: agents to train.
        distributions: distributions to install in the app's environment.
        context: context length of the untrained model in tokens; long prompts need more.
    """
    python = app_environment(folder / "app", *distributions)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    look = "from importlib.util import find_spec as f; print(f('torch'), f('transformers'))"
    found = subprocess.run([python, "-c", look], env=env, capture_output=True, check=True)
    assert found.stdout == b"None None\n"
    algorithm = LightningRL(
        tiny_model(folder / "start", seed=0, context=context),
        optimize=list(optimize),
        frozen="base",
        group_size=2,
        tasks_per_step=2,
    )
    runners = LocalRunners(2, python=python, app_dirs=folder)
    trainer = Trainer(
        algorithm, runners=runners, steps=1, folder=folder / "run", reporter=SilentReporter()
    )
    trainer.fit(app, tasks)
    episodes: list[Episode] = stored_episodes(trainer.folder.store_url)
    asyncio.run(check_run(trainer.folder.path))
    assert len(episodes) == 4
    assert all(episode.finished for episode in episodes)
    assert len({call.call_id for episode in episodes for call in episode.calls}) >= 4
    return episodes
