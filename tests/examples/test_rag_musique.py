"""Test reading MuSiQue's files in the published layout, including unused fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import DataError
from rag_example import musique
from rag_example.index import Passage


def paragraph(idx: int, title: str, text: str, *, supports: bool = False) -> dict[str, Any]:
    return {"idx": idx, "title": title, "paragraph_text": text, "is_supporting": supports}


def entry(number: int = 0, **changes: Any) -> dict[str, Any]:
    """Return an entry as published, with some changed fields."""
    return {
        "id": f"2hop__{number}_13529",
        "paragraphs": [
            paragraph(0, "Lilli's Marriage", "Lilli's Marriage is a silent film.", supports=True),
            paragraph(1, "Jaap Speyer", "Jaap Speyer was born in Amsterdam.", supports=True),
            paragraph(2, "Jaap Speyer", f"Another paragraph, number {number}."),
        ],
        "question": "Where was the director of Lilli's Marriage born?",
        "question_decomposition": [
            {
                "id": 13548,
                "question": "Lilli's Marriage >> director",
                "answer": "Jaap Speyer",
                "paragraph_support_idx": 0,
            },
            {
                "id": 13529,
                "question": "#1 >> place of birth",
                "answer": "Amsterdam",
                "paragraph_support_idx": 1,
            },
        ],
        "answer": "Amsterdam",
        "answer_aliases": ["Amsterdam, Netherlands", "Amsterdam"],
        "answerable": True,
        **changes,
    }


def write(file: Path, entries: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in entries), encoding="utf-8")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Return a folder like the published archive's, with `data` and the lists of both kinds."""
    data = tmp_path / "musique" / "data"
    write(data / "musique_ans_v1.0_train.jsonl", [entry(n) for n in range(5)])
    write(data / "musique_ans_v1.0_dev.jsonl", [entry(n, answer_aliases=[]) for n in range(5, 8)])
    write(data / "musique_full_v1.0_train.jsonl", [entry(9)])
    write(data / "musique_ans_v1.0_test.jsonl", [{"id": "no answers"}])
    return tmp_path / "musique"


def test_the_published_folder(published: Path) -> None:
    corpus = musique.read(published, "train")
    assert [file.name for file in corpus.files] == ["musique_ans_v1.0_train.jsonl"]
    assert corpus.skipped == []
    assert corpus.tasks[0] == {
        "id": "2hop__0_13529",
        "question": "Where was the director of Lilli's Marriage born?",
        "answers": ["Amsterdam", "Amsterdam, Netherlands"],
        "hops": 2,
        "documents": corpus.name,
    }
    assert len(corpus.tasks) == 5
    assert corpus.passages[:3] == [
        Passage("train-000000", "Lilli's Marriage", "Lilli's Marriage is a silent film."),
        Passage("train-000001", "Jaap Speyer", "Jaap Speyer was born in Amsterdam."),
        Passage("train-000002", "Jaap Speyer", "Another paragraph, number 0."),
    ]
    assert len(corpus.passages) == 2 + 5  # paragraphs that questions share are one
    held_out = musique.read(published, "test")
    assert [task["answers"] for task in held_out.tasks] == [["Amsterdam"]] * 3
    assert held_out.name != corpus.name


def test_what_cannot_be_answered_is_left_out_by_name(tmp_path: Path) -> None:
    file = tmp_path / "musique_full_v1.0_dev.jsonl"
    write(file, [entry(0), entry(1, answerable=False), entry(2)])
    corpus = musique.read(tmp_path, "test")
    assert [task["id"] for task in corpus.tasks] == ["2hop__0_13529", "2hop__2_13529"]
    assert corpus.skipped == ["musique_full_v1.0_dev.jsonl:2: it cannot be answered"]
    assert len(corpus.passages) == 2 + 3  # its paragraphs are searched too
    write(file, [entry(0, answerable=False)])
    with pytest.raises(DataError, match="no question that can be answered"):
        musique.read(tmp_path, "test")


def test_whether_it_is_there(published: Path, tmp_path: Path) -> None:
    assert musique.is_here(published)
    assert musique.is_here(published / "data")
    assert not musique.is_here(tmp_path)
    with pytest.raises(DataError, match=r"no MuSiQue file for train; one of musique_ans_v1\.0_tr"):
        musique.read(tmp_path, "train")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"train\.jsonl:2 is no JSON"),
        ("[]", r"train\.jsonl:2 is no JSON object"),
        (json.dumps(entry(answer="")), r"jsonl:2: answer is ''; it has to be a text"),
        (json.dumps(entry(question=None)), r"jsonl:2: question is None"),
        (json.dumps(entry(answer_aliases="x")), r"answer_aliases is 'x'; it has to be a list"),
        (json.dumps(entry(paragraphs={})), r"jsonl:2: paragraphs has to be a list of objects"),
        (json.dumps(entry(paragraphs=[{"title": "t"}])), r"jsonl:2, paragraph 0: paragraph_text"),
        (json.dumps(entry(question_decomposition=[])), r"question_decomposition has to be a list"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = json.dumps(entry())
    file = tmp_path / "musique_ans_v1.0_train.jsonl"
    file.write_text(f"{good}\n{line}\n")
    with pytest.raises(DataError, match=message):
        musique.read(tmp_path, "train")
