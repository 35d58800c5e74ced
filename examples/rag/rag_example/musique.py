"""MuSiQue (Trivedi et al. 2022): questions of two to four hops, read from its published files.

    DIR/musique_ans_v1.0_train.jsonl      or musique_full_v1.0_train.jsonl
    DIR/musique_ans_v1.0_dev.jsonl        or musique_full_v1.0_dev.jsonl

The files may also be in DIR/data, as in the published archive. Each line has a question and about
twenty paragraphs. Here the paragraphs of all questions of a split form one corpus, so that the
right ones must be searched for. Unanswerable questions, which the "full" files have, are left out.
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
"""Split → names of its file, the preferred first. The published test set has no answers, so `test`
is the development set.
"""


def is_here(directory: str | Path) -> bool:
    """Return whether a folder has a file of MuSiQue."""
    return any(_find(Path(directory), names) is not None for names in LISTS.values())


def read(directory: str | Path, split: Split, *, limit: int | None = None) -> Corpus:
    """Return the questions of a split in the order of the file, and all paragraphs as passages.

    Args:
        split: `test` reads MuSiQue's development set, because its test set has no answers.
        limit: maximum number of questions; None for no limit. Passages are not limited.

    Raises:
        DataError: the file is missing or malformed, or has no answerable question.
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
    """Add those paragraphs of a question that `passages` does not have yet."""
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
