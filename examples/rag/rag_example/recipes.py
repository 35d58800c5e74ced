"""Settings and data of training, which are the same for both frameworks.

docs/evidence/rag.md measures these recipes. Settings were chosen on the development
worlds; the test worlds were used once, for the report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lightspan.progress import Reporter
from lightspan_examples import recipe as common
from lightspan_examples.data import Loaded, generated, report_loaded
from lightspan_examples.recipe import Imitation
from rag_example import corpora, documents, musique, worlds
from rag_example.demonstrations import COUNT, PASSAGES
from rag_example.index import Index
from rag_example.library import Library
from rag_example.worlds import Split, Task


@dataclass(frozen=True, kw_only=True)
class Recipe(common.Recipe):
    """Settings of the example's training; `max_searches` is the app's maximum of searches."""

    max_searches: int = 3
    passages: int = PASSAGES
    """Number of passages that a search shows."""


RECIPE = Recipe(
    imitation=Imitation(demonstrations=COUNT, batch=16, prompt_weight=0.1, turns="all"),
    steps=10,
    group_size=8,
    tasks_per_step=8,
    minibatches=2,
    temperature=0.7,
    max_tokens=48,
)
CREW = replace(RECIPE, imitation=replace(RECIPE.imitation, demonstrations=3 * COUNT // 2))
"""The crew's recipe; it has more demonstrations, because two agents share them."""
REAL_MODEL = replace(
    RECIPE,
    steps=400,
    tasks_per_step=16,
    max_tokens=512,
    max_searches=6,
    passages=4,
)
"""Recipe for a model of `--model`; it has not been run on a GPU yet."""


class TrainingTask(Task):
    """A task with the folder of its documents and the app's settings."""

    data: str
    max_tokens: int
    max_searches: int
    passages: int


def load_tasks(
    cache_dir: Path, split: Split, recipe: Recipe = RECIPE, reporter: Reporter | None = None
) -> list[TrainingTask]:
    """Return the tasks of a split for `answer`; the first call generates the worlds."""
    data = generated(cache_dir, worlds.generate, "documents and questions", reporter)
    return [_training_task(task, data, recipe) for task in worlds.load(data, split)]


def load_data(
    source: Path,
    split: corpora.Split,
    reporter: Reporter,
    recipe: Recipe,
    *,
    cache: Path,
    limit: int | None = None,
) -> list[TrainingTask]:
    """Return tasks of MuSiQue's files (`musique`), or of a folder of your own (`documents`)."""
    reader = musique if musique.is_here(source) else documents
    corpus = reader.read(source, split, limit=limit)
    beside = f"{len(corpus.passages):,} passages"
    loaded = Loaded(corpus.tasks, corpus.files, corpus.skipped)
    report_loaded(split, loaded, "questions", reporter, beside=beside)
    corpus.save_index(cache)
    return [_training_task(task, cache, recipe) for task in corpus.tasks]


def library_of(task: TrainingTask) -> Library:
    """Return the documents of a task's question."""
    return _library(Path(task["data"]) / task["documents"], task["passages"])


@cache
def _library(folder: Path, passages: int) -> Library:
    return Library(Index.load(folder), passages=passages)


def _training_task(task: Task, data: Path, recipe: Recipe) -> TrainingTask:
    return TrainingTask(
        **task,
        data=str(data.resolve()),
        max_tokens=recipe.max_tokens,
        max_searches=recipe.max_searches,
        passages=recipe.passages,
    )
