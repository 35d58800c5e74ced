"""Test a folder of the user's documents: which files are read, and how they are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lightspan.errors import DataError
from rag_example import documents
from rag_example.index import Index, Passage

GUIDE = """\
Before any heading.

# Guide
## Install
First line
second line.

Another paragraph.

```
# no heading
```

## Empty
## Use
Text.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with documents of several kinds."""
    root = tmp_path / "handbook"
    (root / "b").mkdir(parents=True)
    (root / "guide.md").write_text(GUIDE)
    (root / "b" / "notes.txt").write_text("# Plain text has no headings.\n\nZoë lives in Malmö.\n")
    questions = [{"question": "Where does Zoë live?", "answer": "Malmö"}]
    (root / "train.jsonl").write_text("\n".join(json.dumps(q) for q in questions))
    more = {"question": "q", "answer": "a", "answer_aliases": ["b", "a"], "hops": 2}
    (root / "test.jsonl").write_text(f"{json.dumps(more)}\n\n{json.dumps(more)}\n")
    return root


def test_passages_of_a_folder(folder: Path) -> None:
    passages, skipped = documents.read_passages(folder)
    assert skipped == []
    assert passages == [
        Passage("guide.md#0", "guide", "Before any heading."),
        Passage(
            "guide.md#1",
            "guide / Guide / Install",
            "First line second line.\n\nAnother paragraph.\n\n``` # no heading ```",
        ),
        Passage("guide.md#2", "guide / Guide / Empty", "Empty"),
        Passage("guide.md#3", "guide / Guide / Use", "Text."),
        Passage("b/notes.txt#0", "notes", "# Plain text has no headings.\n\nZoë lives in Malmö."),
    ]


def test_questions_and_the_index(folder: Path, tmp_path: Path) -> None:
    corpus = documents.read(folder, "train")
    assert corpus.tasks == [
        {
            "id": "train.jsonl:1",
            "question": "Where does Zoë live?",
            "answers": ["Malmö"],
            "hops": 1,
            "documents": corpus.name,
        }
    ]
    test = documents.read(folder, "test", limit=1)
    assert [task["answers"] for task in test.tasks] == [["a", "b"]]
    assert [task["hops"] for task in test.tasks] == [2]
    assert test.name == corpus.name  # both splits ask about the same documents
    index = Index.load(corpus.save_index(tmp_path))
    assert index.search("malmo", 1)[0].passage.id == "b/notes.txt#0"
    (folder / "guide.md").write_text("Changed.")
    assert documents.read(folder, "train").name != corpus.name


paragraphs = st.lists(
    st.lists(st.sampled_from(["a", "bb.", "ccc", "d!"]), min_size=1, max_size=30).map(" ".join),
    max_size=6,
)


@given(paragraphs, st.integers(1, 12))
def test_no_word_is_lost_and_no_passage_too_long(texts: list[str], words: int) -> None:
    packed = list(documents.pack(texts, words))
    assert " ".join(packed).split() == " ".join(texts).split()
    assert all(0 < len(piece.split()) <= words for piece in packed)


def test_where_paragraphs_are_divided() -> None:
    text = "One two. Three four five. " + "six " * 7
    assert list(documents.pack([text], 5)) == [
        "One two. Three four five.",
        "six six six six six",
        "six six",
    ]
    assert list(documents.pack(["a b c", "d e", "f"], 5)) == ["a b c\n\nd e", "f"]


def test_what_is_left_out_is_said(folder: Path) -> None:
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "binary.txt").write_bytes(b"text\0more")
    (folder / "latin.txt").write_bytes("Malmö".encode("latin-1"))
    (folder / "broken.txt").write_bytes(b"\xff\xfea")
    (folder / "empty.md").write_text(" \n\n")
    (folder / ".env").write_text("SECRET=1")
    (folder / ".git").mkdir()
    (folder / ".git" / "notes.txt").write_text("hidden")
    (folder / "link").symlink_to(folder / "b")
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    (folder / "b" / "train.jsonl").write_text("{}")
    passages, skipped = documents.read_passages(folder)
    assert {passage.id.partition("#")[0] for passage in passages} == {"guide.md", "b/notes.txt"}
    assert sorted(skipped) == [
        ".env: a hidden file",
        ".git: a hidden folder",
        "b/train.jsonl: not one of .txt, .md, .markdown",
        "binary.txt: it is binary",
        "broken.txt: byte 2 is no utf-16: convert it to UTF-8",
        "dangling.txt: no file, or a link to nothing",
        "empty.md: it has no text",
        "latin.txt: byte 4 is no utf-8: convert it to UTF-8",
        "link: a link to a folder",
        "picture.png: not one of .txt, .md, .markdown",
    ]
    assert documents.read(folder, "train").skipped == skipped


def test_encodings(tmp_path: Path) -> None:
    for name, encoding in (("a", "utf-8"), ("b", "utf-8-sig"), ("c", "utf-16")):
        (tmp_path / f"{name}.TXT").write_bytes("Malmö\r\n\r\n東京".encode(encoding))
    passages, skipped = documents.read_passages(tmp_path)
    assert skipped == []
    assert passages == [Passage(f"{name}.TXT#0", name, "Malmö\n\n東京") for name in "abc"]


def test_bad_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such folder"):
        documents.read_passages(tmp_path / "nowhere")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"no document to read \(\.txt, .*\): it is empty"):
        documents.read_passages(tmp_path / "none")
    (tmp_path / "none" / "x.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match=r"no document to read .*: x\.pdf: not one of"):
        documents.read_passages(tmp_path / "none")
    with pytest.raises(DataError, match="words is 0: a passage has at least one"):
        documents.read_passages(folder, words=0)


def test_bad_questions(folder: Path) -> None:
    file = folder / "train.jsonl"
    for line, message in (
        ("", r"train\.jsonl has no question"),
        ('{"question": "q"}', r"train\.jsonl:1: answer is None"),
        ('{"question": "q", "answer": 3}', r"train\.jsonl:1: answer is 3"),
        ('{"question": "q", "answer": "a", "hops": 0}', r"train\.jsonl:1: hops is 0"),
        ('{"question": "q", "answer": "a", "answer_aliases": [1]}', "answer_aliases is"),
    ):
        file.write_text(line)
        with pytest.raises(DataError, match=message):
            documents.read(folder, "train")
    file.unlink()
    with pytest.raises(DataError, match=r'no questions for train: write train\.jsonl, .*"answer"'):
        documents.read(folder, "train")
