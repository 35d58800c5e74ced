"""Read questions and documents from a folder of your own.

    DIR/train.jsonl, DIR/test.jsonl       {"question": ..., "answer": ..., "answer_aliases": [...]}
    DIR/**/*.txt, *.md, *.markdown        the documents

Documents are cut into passages of up to `words` words, which are separated by spaces. Paragraphs
stay together if they fit; longer paragraphs are cut at the ends of sentences. The title of a
passage is its file's name and, in Markdown, the headings above it. Files are UTF-8, or UTF-16 with
a byte order mark. All other files in the folder are left out and reported.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightspan.errors import DataError
from rag_example.corpora import Corpus, Split, index_name, json_lines, text_of, texts_of
from rag_example.index import Passage
from rag_example.worlds import Task

LISTS: Final[Mapping[Split, str]] = {"train": "train.jsonl", "test": "test.jsonl"}
"""Split → name of its file of questions."""
MARKDOWN: Final = (".md", ".markdown")
KINDS: Final = (".txt", *MARKDOWN)
"""Suffixes of the files that are read."""
WORDS: Final = 100
"""Maximum number of words of a passage."""
LARGEST: Final = 64 << 20
"""Maximum size of a file in bytes."""

_HEADING: Final = re.compile(r"(#{1,6})\s+(.*?)(?:\s+#+)?\s*$")
_FENCE: Final = re.compile(r"\s{0,3}(`{3,}(?=[^`]*$)|~{3,})")
"""Matches the beginning of fenced code. Three backticks with more backticks later on the line are
inline code.
"""
_FENCE_END: Final = re.compile(r"\s{0,3}(`{3,}|~{3,})\s*$")
_SENTENCE: Final = re.compile(r"(?<=[.!?…。])\s+")


class Section(NamedTuple):
    """Paragraphs under one heading."""

    headings: tuple[str, ...]
    """Headings above the paragraphs, from the top level down; empty for plain text."""
    paragraphs: list[str]


def read(directory: str | Path, split: Split, *, limit: int | None = None) -> Corpus:
    """Return the questions of a split, and the passages of the documents.

    Args:
        limit: maximum number of questions; None for no limit.

    Raises:
        DataError: the folder does not exist, its questions are missing or malformed, or none of its
            documents can be read.
    """
    directory = Path(directory)
    passages, skipped = read_passages(directory)
    file = directory / LISTS[split]
    if not file.is_file():
        raise DataError(
            f"{directory}: no questions for {split}: write {LISTS[split]}, on each line "
            '{"question": "...", "answer": "..."}'
        )
    name = index_name("documents", passages)
    tasks = [_task(entry, where, name) for where, entry in json_lines(file)][:limit]
    if not tasks:
        raise DataError(f"{file} has no question")
    return Corpus(name=name, tasks=tasks, passages=passages, files=[file], skipped=skipped)


def read_passages(directory: str | Path, *, words: int = WORDS) -> tuple[list[Passage], list[str]]:
    """Return the passages of all documents in a folder and its subfolders, sorted by file name.

    Args:
        words: maximum number of words of a passage, at least 1.

    Returns:
        The passages, and one line per file that was left out: which, and why.

    Raises:
        DataError: the folder does not exist, or none of its files can be read.
    """
    directory = Path(directory)
    if words < 1:
        raise DataError(f"words is {words}: a passage has at least one")
    if not directory.is_dir():
        raise DataError(f"{directory}: there is no such folder")
    passages: list[Passage] = []
    skipped: list[str] = []
    for file, reason in _files(directory):
        name = file.relative_to(directory).as_posix()
        if not name.isascii() and (shown := _shown(name)) != name:
            name, reason = shown, "its name is not UTF-8: rename it"
        text, reason = ("", reason) if reason else _text(file)
        pieces = list(cut(text, name, words=words))
        if not pieces:
            skipped.append(f"{name}: {reason or 'it has no text'}")
        passages += pieces
    if not passages:
        some = "; ".join(skipped[:3]) or "it is empty"
        raise DataError(f"{directory}: no document to read ({', '.join(KINDS)}): {some}")
    return passages, skipped


def cut(text: str, name: str, *, words: int = WORDS) -> Iterator[Passage]:
    """Yield the passages of one document.

    Args:
        name: name of the file; `.md` or `.markdown` at its end means that `text` is Markdown.
        words: maximum number of words of a passage.
    """
    is_markdown = name.lower().endswith(MARKDOWN)
    stem = Path(name).stem
    number = 0
    for section in sections(text) if is_markdown else [Section((), _paragraphs(text))]:
        title = " / ".join((stem, *section.headings))
        for piece in pack(section.paragraphs, words):
            yield Passage(f"{name}#{number}", title, piece)
            number += 1


def sections(markdown: str) -> Iterator[Section]:
    """Yield the parts of a Markdown text between its headings, which begin with `#`.

    A heading without text before its first subheading yields no section, but stays in the headings
    of the following sections. A heading with nothing below it yields a section with the heading as
    its text.
    """
    headings: list[tuple[int, str]] = []
    lines: list[str] = []
    for heading, line in _marked(markdown):
        if heading is None:
            lines.append(line)
            continue
        level, text = heading
        is_parent = bool(headings) and level > headings[-1][0]
        yield from _section(headings, lines, keep=not is_parent)
        headings = [*((at, name) for at, name in headings if at < level), (level, text)]
        lines = []
    yield from _section(headings, lines, keep=True)


def _marked(markdown: str) -> Iterator[tuple[tuple[int, str] | None, str]]:
    """Yield (level and text if the line is a heading, else None; line) for each line.

    Lines in fenced code are no headings.
    """
    fence = ""
    for line in markdown.splitlines():
        if fence:
            end = _FENCE_END.match(line)
            fence = "" if end and end[1].startswith(fence) else fence
        elif opening := _FENCE.match(line):
            fence = opening[1]
        heading = None if fence else _HEADING.match(line)
        yield (len(heading[1]), heading[2]) if heading and heading[2] else None, line


def _section(
    headings: Iterable[tuple[int, str]], lines: Iterable[str], *, keep: bool
) -> Iterator[Section]:
    """Yield the section if it has text. Without text and with `keep`, yield its heading as its
    text.
    """
    names = tuple(text for _, text in headings)
    paragraphs = _paragraphs("\n".join(lines)) or (list(names[-1:]) if keep else [])
    if paragraphs:
        yield Section(names, paragraphs)


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, which blank lines separate, each joined to one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def pack(paragraphs: Iterable[str], words: int) -> Iterator[str]:
    r"""Yield texts of up to `words` words; together they have all words of the paragraphs in order.

    Example:
        >>> list(pack(["a b", "c", "d e f g. h"], 3))
        ['a b\n\nc', 'd e f', 'g. h']
    """
    held: list[str] = []
    size = 0
    for piece in (piece for paragraph in paragraphs for piece in _divided(paragraph, words)):
        length = len(piece.split())
        if held and size + length > words:
            yield "\n\n".join(held)
            held, size = [], 0
        held.append(piece)
        size += length
    if held:
        yield "\n\n".join(held)


def _divided(paragraph: str, words: int) -> Iterator[str]:
    """Yield a paragraph whole if it fits into `words`, else cut at sentences, else at words."""
    if len(paragraph.split()) <= words:
        yield paragraph
        return
    held: list[str] = []
    for sentence in _SENTENCE.split(paragraph):
        parts = sentence.split()
        if held and len(held) + len(parts) > words:
            yield " ".join(held)
            held = []
        held += parts
        while len(held) > words:
            yield " ".join(held[:words])
            held = held[words:]
    if held:
        yield " ".join(held)


# --- files ----------------------------------------------------------------------------------
def _files(directory: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield (file, why it is not read, or None) for each file, sorted by name.

    A folder that is not searched is yielded once, in place of its files.
    """
    shut: list[OSError] = []
    for folder, folders, names in os.walk(directory, onerror=shut.append):
        here = Path(folder)
        for name in sorted(folders):
            if reason := _closed(here / name):
                yield here / name, reason
        folders[:] = sorted(name for name in folders if not _closed(here / name))
        for name in sorted(names):
            file = here / name
            if not (here == directory and name in LISTS.values()):
                yield file, _unread(file)
    for error in shut:
        yield Path(error.filename), f"it cannot be read: {error.strerror}"


def _shown(name: str) -> str:
    """Return the name with bytes that are not UTF-8 written as escapes."""
    return name.encode(errors="backslashreplace").decode()


def _closed(folder: Path) -> str | None:
    if folder.name.startswith("."):
        return "a hidden folder"
    return "a link to a folder" if folder.is_symlink() else None


def _unread(file: Path) -> str | None:
    if file.name.startswith("."):
        return "a hidden file"
    if file.suffix.lower() not in KINDS:
        return f"not one of {', '.join(KINDS)}"
    if not file.is_file():
        return "no file, or a link to nothing"
    size = file.stat().st_size
    return f"{size:,} bytes are over {LARGEST:,}: divide it" if size > LARGEST else None


def _text(file: Path) -> tuple[str, str | None]:
    """Return (text of a file, None), or (empty, why the file cannot be read)."""
    try:
        data = file.read_bytes()
    except OSError as error:
        return "", f"it cannot be read: {error.strerror}"
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "utf-16" if is_utf16 else "utf-8-sig"
    if not is_utf16 and b"\0" in data:
        return "", "it is binary"
    try:
        return data.decode(encoding), None
    except UnicodeDecodeError as error:
        return "", f"byte {error.start} is no {encoding.removesuffix('-sig')}: convert it to UTF-8"


# --- questions ------------------------------------------------------------------------------
def _task(entry: Mapping[str, Any], where: str, documents: str) -> Task:
    answers = [text_of(entry, "answer", where), *texts_of(entry, "answer_aliases", where)]
    hops = entry.get("hops", 1)
    if not isinstance(hops, int) or hops < 1:
        raise DataError(f"{where}: hops is {hops!r}; it has to be a number of 1 or more")
    return Task(
        id=where,
        question=text_of(entry, "question", where),
        answers=list(dict.fromkeys(answers)),
        hops=hops,
        documents=documents,
    )
