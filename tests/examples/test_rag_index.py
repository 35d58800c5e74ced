"""Test the RAG example's BM25 index: scores, deterministic order, and files."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from rag_example.index import VERSION, Hit, Index, Passage

OSLO = Passage("a", "Oslo", "Oslo is the capital of Norway.")
PARIS = Passage("b", "Paris", "A café in Paris, run by Zoë from München.")
SAME = Passage("c", "Oslo", "Oslo is the capital of Norway.")


@pytest.fixture(scope="module")
def index() -> Index:
    return Index.build([OSLO, PARIS, SAME])


def ids(hits: list[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


def bm25(passages: list[Passage], query: str) -> dict[str, float]:
    """Return the scores of all passages by the formula in the module's docstring."""
    texts = {p.id: re.findall(r"\w+", f"{p.title} {p.text}".lower()) for p in passages}
    mean = sum(map(len, texts.values())) / len(texts)
    scores = dict.fromkeys(texts, 0.0)
    for word in set(query.lower().split()):
        n = sum(word in words for words in texts.values())
        idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
        for key, words in texts.items():
            f = words.count(word)
            scores[key] += idf * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * len(words) / mean))
    return {key: score for key, score in scores.items() if score > 0}


def test_the_best_first(index: Index) -> None:
    assert index.search("capital cafe paris", 2) == [
        Hit(PARIS, index.search("cafe paris", 1)[0].score),
        Hit(OSLO, index.search("capital", 1)[0].score),
    ]
    assert ids(index.search("norway", 10)) == ["a", "c"]


words = st.sampled_from(["one", "two", "three", "four", "five"])
texts = st.lists(words, max_size=12).map(" ".join)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(words, texts), min_size=1, max_size=8), texts, st.integers(1, 10))
def test_scores_are_those_of_the_formula(
    contents: list[tuple[str, str]], query: str, k: int
) -> None:
    passages = [Passage(str(i), title, text) for i, (title, text) in enumerate(contents)]
    expected = bm25(passages, query)
    hits = Index.build(passages).search(query, k)
    assert len(hits) == min(k, len(expected))
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    for hit in hits:
        assert hit.score == pytest.approx(expected[hit.passage.id], abs=2e-4)
        assert hit.passage == passages[int(hit.passage.id)]
    worst = min((hit.score for hit in hits), default=0.0)
    left_out = expected.keys() - set(ids(hits))
    assert all(expected[key] <= worst + 2e-4 for key in left_out)
    for one, other in itertools.pairwise(hits):
        if one.score == other.score:
            assert int(one.passage.id) < int(other.passage.id)


def test_no_known_word_finds_nothing(index: Index) -> None:
    for query in ("", "   ", "?!", "unknown", "unknown wörd", '"', "AND OR NOT", "+-*:^(", "\0"):
        assert index.search(query, 5) == [], query


def test_unicode(index: Index) -> None:
    for query in ("CAFÉ", "cafe", "zoë", "Zoe", "MÜNCHEN", "munchen"):
        assert ids(index.search(query, 5)) == ["b"], query
    odd = Passage("名", "東京 😀", "Ελλάδα Привет \ud800 naïve \0 " + "x" * 200)
    index = Index.build([odd])
    for query in ("東京", "ελλάδα", "ПРИВЕТ", "naive", "\ud800 naive"):
        assert index.search(query, 1)[0].passage == odd, query
    assert index.search("x" * 200, 1) == []


def test_saved_and_loaded_in_another_process(index: Index, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "corpus"
    index.save(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["corpus"]
    loaded = Index.load(folder)
    assert loaded.search("capital cafe", 3) == index.search("capital cafe", 3)
    code = (
        "import sys; from rag_example.index import Index; "
        "print(Index.load(sys.argv[1]).search('capital cafe', 3))"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.stdout == f"{index.search('capital cafe', 3)}\n", done.stderr
    again = tmp_path / "again"
    loaded.save(again)
    assert Index.load(again).search("oslo", 3) == index.search("oslo", 3)


def test_nothing_is_overwritten(index: Index, tmp_path: Path) -> None:
    index.save(tmp_path / "corpus")
    before = {path: path.read_bytes() for path in (tmp_path / "corpus").iterdir()}
    with pytest.raises(FileExistsError, match="is not empty: name a new folder"):
        Index.build([PARIS]).save(tmp_path / "corpus")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        index.save(tmp_path / "file")
    assert {path: path.read_bytes() for path in (tmp_path / "corpus").iterdir()} == before
    (tmp_path / "there").mkdir()
    index.save(tmp_path / "there")
    assert len(Index.load(tmp_path / "there")) == 3


def test_what_is_no_index(index: Index, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no index of passages: it has no passages\.json"):
        Index.load(tmp_path / "nowhere")
    folder = tmp_path / "corpus"
    index.save(folder)
    about = folder / "passages.json"
    for text, message in [
        ("{", "damaged"),
        ("[]", "damaged"),
        (json.dumps({"version": VERSION + 1, "passages": 3}), f"version {VERSION + 1}, read is"),
        (json.dumps({"version": VERSION, "passages": 4}), "has 3 of its 4 passages"),
    ]:
        about.write_text(text)
        with pytest.raises(ValueError, match=message):
            Index.load(folder)
    about.write_text(json.dumps({"version": VERSION, "passages": 3}))
    next(folder.glob("*.term")).unlink()
    with pytest.raises(ValueError, match="cannot be read, build it again"):
        Index.load(folder)
