"""A BM25 index of passages, built with tantivy, a search library like Lucene.

    index = Index.build(passages)
    index.search("who founded Oslo", 5)       # the best first
    index.save("corpus")                      # Index.load("corpus") in the app

Title and text are searched together. Words are runs of letters and digits, compared without case
and accents. Text without spaces between words (Chinese, Japanese, Thai) is therefore not divided
into words. A passage scores by BM25 with k1 = 1.2 and b = 0.75 (Robertson and Zaragoza 2009, with
Lucene's idf, which is never negative), summed over the different words of the query:

    ln(1 + (N - n + 0.5) / (n + 0.5)) · f · (k1 + 1) / (f + k1 · (1 - b + b · length / mean))

N is the number of passages, n the number of passages with the word, f the count of the word in this
passage. Lengths above 40 words are rounded down to one of about 200 steps. Files are memory-mapped,
and nothing in them is executed.
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
"""Version of the format of a saved index."""

_ABOUT: Final = "passages.json"
_WRITER_BYTES: Final = 128 << 20
"""Size of the writer's memory buffer in bytes."""
_ANALYZER: Final = "words"
_LONGEST_WORD: Final = 100
"""Maximum length of a word in bytes; longer words are not indexed."""
_DECIMALS: Final = 4
"""Number of decimals to which scores are rounded: sums of 32-bit floats of equal passages may
differ after them.
"""


class Passage(NamedTuple):
    """A text that can be found by a search."""

    id: str
    title: str
    text: str


class Hit(NamedTuple):
    """A passage that a search found."""

    passage: Passage
    score: float
    """BM25 score, above 0."""


class Index:
    """A search index of passages; safe to use from several threads.

    Use `Index.build` or `Index.load` to make one.
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
        """Build an index in a temporary folder, which is deleted with the `Index` object.

        Args:
            passages: passages, read once in order, so a generator need not fit into memory.

        Raises:
            ValueError: two passages have the same id.
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
        """Load a saved index.

        Raises:
            FileNotFoundError: `folder` has no index.
            ValueError: the index is damaged, or of another version.
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
        """Write the index to a folder that does not exist or is empty.

        After a failure the folder does not exist, or is empty as before.

        Raises:
            FileExistsError: `folder` is not empty.
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
        """Return the `k` best passages that contain a word of the query, the best first.

        Passages of equal score are in the order in which the index was built.

        Args:
            query: any text; it has no special syntax.
            k: maximum number of passages.

        Returns:
            Fewer than `k` passages if fewer match; none if no word of the query is in the index.

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
        """Return the `k` best (score, address), by score and then by position in the index.

        The limit of the underlying search is raised until all passages with the score of the last
        one are found.
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
    """Return the text with unpaired surrogates, which UTF-8 cannot encode, replaced."""
    return text.encode(errors="replace").decode()
