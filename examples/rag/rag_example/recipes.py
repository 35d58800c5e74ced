"""What training has in common, whichever framework the app is written with.

The recipes are frozen: the README's figures come from them. Settings were chosen on the development
worlds; the test worlds were looked at once, to report.
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
    """Every setting of the example's training."""

    max_searches: int = 3
    passages: int = PASSAGES
    """Passages that a search shows."""


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
"""The crew's recipe: its demonstrations are shared by two agents."""
REAL_MODEL = replace(
    RECIPE,
    steps=400,
    tasks_per_step=16,
    max_tokens=512,
    max_searches=6,
    passages=4,
)
"""The recipe for a model that was not built here; not yet run on a GPU."""


class TrainingTask(Task):
    """A task with where its documents are, and how the app is to be run."""

    data: str
    max_tokens: int
    max_searches: int
    passages: int


def load_tasks(
    cache_dir: Path, split: Split, recipe: Recipe = RECIPE, reporter: Reporter | None = None
) -> list[TrainingTask]:
    """The tasks of a split as the app takes them; the worlds are generated on the first call."""
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
    """The tasks of MuSiQue's files, or of a folder of one's own (see `musique`, `documents`)."""
    reader = musique if musique.is_here(source) else documents
    corpus = reader.read(source, split, limit=limit)
    beside = f"{len(corpus.passages):,} passages"
    loaded = Loaded(corpus.tasks, corpus.files, corpus.skipped)
    report_loaded(split, loaded, "questions", reporter, beside=beside)
    corpus.save_index(cache)
    return [_training_task(task, cache, recipe) for task in corpus.tasks]


def library_of(task: TrainingTask) -> Library:
    """The documents that a task asks about."""
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
