"""A BM25 index of passages, on tantivy: a search library made for it, like Lucene.

    index = Index.build(passages)
    index.search("who founded Oslo", 5)       # the best first
    index.save("corpus")                      # Index.load("corpus") in the app

Title and text are searched as one: words are runs of letters and digits, compared without case and
accents, so writing without spaces between words (Chinese, Japanese, Thai) is not divided. A passage
scores by BM25 with k1 = 1.2 and b = 0.75 (Robertson and Zaragoza 2009; the idf that is never
negative, as Lucene has it), summed over the different words of the query:

    ln(1 + (N - n + 0.5) / (n + 0.5)) · f · (k1 + 1) / (f + k1 · (1 - b + b · length / mean))

with N passages, n of them with the word, f times in this one. Lengths above 40 words are rounded
down to one of some 200 steps. The files are mapped into memory, not read into it, and nothing in
them is executed.
"""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Final, NamedTuple

import tantivy

VERSION: Final = 1
"""The layout of a saved index."""

_ABOUT: Final = "passages.json"
_WRITER_BYTES: Final = 128 << 20
"""Words collected in memory before they are written."""
_ANALYZER: Final = "words"
_LONGEST_WORD: Final = 100
"""Bytes; longer words are left out."""
_DECIMALS: Final = 4
"""Scores are sums of 32-bit floats: alike passages may differ behind these."""


class Passage(NamedTuple):
    """What is searched for."""

    id: str
    title: str
    text: str


class Hit(NamedTuple):
    """A passage found."""

    passage: Passage
    score: float
    """BM25, above 0."""


class Index:
    """Passages that can be searched; safe to use from several threads.

    Made by `Index.build` or `Index.load`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = tantivy.Index.open(str(folder))
        self._index.register_tokenizer(_ANALYZER, _analyzer())
        self._index.config_reader(reload_policy="manual")  # else a thread watches the folder
        self._index.reload()
        self._searcher = self._index.searcher()
        self._words = _analyzer()

    @classmethod
    def build(cls, passages: Iterable[Passage]) -> Index:
        """An index in a temporary folder, until it is saved.

        Args:
            passages: each is looked at once; a generator need not fit into memory.

        Raises:
            ValueError: two passages have one id.
        """
        folder = Path(mkdtemp(prefix="passages-"))
        try:
            _write(passages, folder)
            built = cls(folder)
            (folder / _ABOUT).write_text(json.dumps({"version": VERSION, "passages": len(built)}))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(built, shutil.rmtree, folder, ignore_errors=True)
        return built

    @classmethod
    def load(cls, folder: str | Path) -> Index:
        """A saved index.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or of another version.
        """
        folder = Path(folder)
        about = folder / _ABOUT
        if not about.is_file():
            raise FileNotFoundError(f"{folder} is no index of passages: it has no {_ABOUT}")
        try:
            said = json.loads(about.read_bytes())
            version, count = said["version"], said["passages"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{about} is damaged: save the index again") from error
        if version != VERSION:
            raise ValueError(
                f"{folder} is an index of version {version}, read is {VERSION}: build it again"
            )
        try:
            loaded = cls(folder)
        except Exception as error:  # tantivy's have no class of their own
            raise ValueError(f"{folder} cannot be read, build it again: {error}") from error
        if len(loaded) != count:
            raise ValueError(f"{folder} has {len(loaded)} of its {count} passages: build it again")
        return loaded

    def save(self, folder: str | Path) -> None:
        """Write the index to a folder that does not exist or is empty; whole, or not at all.

        Raises:
            FileExistsError: there is something in it.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} is not empty: name a new folder, or remove it first")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as near:
            whole = Path(near) / "index"
            shutil.copytree(self._folder, whole, ignore=shutil.ignore_patterns("*.lock"))
            whole.replace(folder)

    def __len__(self) -> int:
        return self._searcher.num_docs

    def search(self, query: str, k: int = 10) -> list[Hit]:
        """The k best passages that have a word of the query, the best first.

        Passages of equal score come in the order that the index was built from.

        Args:
            query: any text; none of it is syntax.
            k: passages at most.

        Returns:
            Fewer than `k` where fewer match; none for a query without known words.

        Raises:
            ValueError: `k` is negative.
        """
        if k < 0:
            raise ValueError(f"k is {k}: ask for 0 passages or more")
        words = dict.fromkeys(self._words.analyze(_utf8(query)))
        if not words or not k or not len(self):
            return []
        schema = self._index.schema
        alternatives = [
            (tantivy.Occur.Should, tantivy.Query.term_query(schema, "words", word))
            for word in words
        ]
        best = self._best(tantivy.Query.boolean_query(alternatives), k)
        return [Hit(self._passage(address), score) for score, address in best]

    def _best(self, query: tantivy.Query, k: int) -> list[tuple[float, tantivy.DocAddress]]:
        """The k best by score, then place.

        More are asked for until all that equal the last are seen.
        """
        limit = min(k + 1, len(self))
        while True:
            hits = self._searcher.search(query, limit=limit, count=False).hits
            scored = [(round(score, _DECIMALS), address) for score, address in hits]
            if len(scored) < limit or limit == len(self) or scored[-1][0] < scored[k - 1][0]:
                break
            limit = min(4 * limit, len(self))
        equals = [pair for pair in scored if pair[0] >= scored[min(k, len(scored)) - 1][0]]
        places = self._searcher.fast_field_values("place", [address for _, address in equals])
        order = sorted(range(len(equals)), key=lambda i: (-equals[i][0], places[i]))
        return [equals[i] for i in order[:k]]

    def _passage(self, address: tantivy.DocAddress) -> Passage:
        return Passage(*json.loads(bytes(self._searcher.doc(address)["passage"][0])))


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("words", tokenizer_name=_ANALYZER, index_option="freq")
    builder.add_unsigned_field("place", fast=True)
    builder.add_bytes_field("passage", stored=True)
    return builder.build()


def _analyzer() -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    for part in (
        tantivy.Filter.remove_long(_LONGEST_WORD),
        tantivy.Filter.lowercase(),
        tantivy.Filter.ascii_fold(),
    ):
        builder = builder.filter(part)
    return builder.build()


def _write(passages: Iterable[Passage], folder: Path) -> None:
    index = tantivy.Index(_schema(), path=str(folder))
    index.register_tokenizer(_ANALYZER, _analyzer())
    writer = index.writer(heap_size=_WRITER_BYTES, num_threads=1)
    try:
        for document in _documents(passages):
            writer.add_document(document)
        writer.commit()
    finally:
        writer.wait_merging_threads()


def _documents(passages: Iterable[Passage]) -> Iterator[tantivy.Document]:
    seen: set[str] = set()
    for place, passage in enumerate(passages):
        if passage.id in seen:
            raise ValueError(f"two passages have the id {passage.id!r}: ids tell passages apart")
        seen.add(passage.id)
        document = tantivy.Document()
        document.add_unsigned("place", place)
        document.add_text("words", _utf8(f"{passage.title}\n{passage.text}"))
        document.add_bytes("passage", json.dumps(passage).encode())
        yield document


def _utf8(text: str) -> str:
    """The text without what cannot be encoded: halves of surrogate pairs."""
    return text.encode(errors="replace").decode()
