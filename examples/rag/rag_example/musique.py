"""MuSiQue (Trivedi et al. 2022): questions of two to four hops, read from its published files.

    DIR/musique_ans_v1.0_train.jsonl      or musique_full_v1.0_train.jsonl
    DIR/musique_ans_v1.0_dev.jsonl        or musique_full_v1.0_dev.jsonl

The files may lie in DIR/data, as the archive has them. A line is a question with some twenty
paragraphs; here the paragraphs of all questions of a split are one corpus, so that they have to be
searched for. What cannot be answered is left out: the files named "full" have such questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightspan.errors import DataError
from rag_example.corpora import Corpus, Split, index_name, json_lines, text_of, texts_of
from rag_example.index import Passage
from rag_example.worlds import Task

LISTS: Final[Mapping[Split, Sequence[str]]] = {
    "train": ("musique_ans_v1.0_train.jsonl", "musique_full_v1.0_train.jsonl"),
    "test": ("musique_ans_v1.0_dev.jsonl", "musique_full_v1.0_dev.jsonl"),
}
"""The file of each split, the preferred first; the published test set has no answers."""


def is_here(directory: str | Path) -> bool:
    """Whether a folder has a file of MuSiQue."""
    return any(_find(Path(directory), names) is not None for names in LISTS.values())


def read(directory: str | Path, split: Split, *, limit: int | None = None) -> Corpus:
    """The questions of a split in the order of the file, and all its paragraphs.

    Args:
        split: `test` is MuSiQue's development set: its own test set has no answers.
        limit: questions at most; the passages are those of all.

    Raises:
        DataError: no such file, a malformed one, or no question that can be answered.
    """
    file = _find(Path(directory), LISTS[split])
    if file is None:
        raise DataError(
            f"{directory}: no MuSiQue file for {split}; one of {', '.join(LISTS[split])}"
        )
    by_text: dict[tuple[str, str], Passage] = {}
    tasks: list[Task] = []
    skipped: list[str] = []
    for where, entry in json_lines(file):
        _add_paragraphs(by_text, entry, split, where)
        if entry.get("answerable", True) is not True:
            skipped.append(f"{where}: it cannot be answered")
        elif limit is None or len(tasks) < limit:
            tasks.append(_task(entry, where))
    if not tasks:
        raise DataError(f"{file} has no question that can be answered: {skipped[:3]}")
    passages = list(by_text.values())
    name = index_name(f"musique-{split}", passages)
    tasks = [{**task, "documents": name} for task in tasks]
    return Corpus(name=name, tasks=tasks, passages=passages, files=[file], skipped=skipped)


def _find(directory: Path, names: Sequence[str]) -> Path | None:
    places = [folder / name for folder in (directory, directory / "data") for name in names]
    return next((place for place in places if place.is_file()), None)


def _add_paragraphs(
    passages: dict[tuple[str, str], Passage], entry: Mapping[str, Any], split: Split, where: str
) -> None:
    """Add the paragraphs that no earlier question had."""
    paragraphs = entry.get("paragraphs")
    if not isinstance(paragraphs, list) or not all(isinstance(p, Mapping) for p in paragraphs):
        raise DataError(f"{where}: paragraphs has to be a list of objects")
    for place, paragraph in enumerate(paragraphs):
        at = f"{where}, paragraph {place}"
        key = text_of(paragraph, "title", at), text_of(paragraph, "paragraph_text", at)
        if key not in passages:
            passages[key] = Passage(f"{split}-{len(passages):06d}", *key)


def _task(entry: Mapping[str, Any], where: str) -> Task:
    answers = [text_of(entry, "answer", where), *texts_of(entry, "answer_aliases", where)]
    steps = entry.get("question_decomposition")
    if not isinstance(steps, list) or not steps:
        raise DataError(f"{where}: question_decomposition has to be a list of the question's steps")
    return Task(
        id=text_of(entry, "id", where),
        question=text_of(entry, "question", where),
        answers=list(dict.fromkeys(answers)),
        hops=len(steps),
        documents="",
    )
