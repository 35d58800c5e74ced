"""A folder of one's own documents, and questions about them.

    DIR/train.jsonl, DIR/test.jsonl       {"question": ..., "answer": ..., "answer_aliases": [...]}
    DIR/**/*.txt, *.md, *.markdown        the documents

Documents are cut into passages of up to `words` words (what spaces divide): paragraphs are kept
together where they fit, and divided at the ends of sentences where they do not. A passage's title
is its file's name and, in Markdown, the headings above it. Files are UTF-8, or UTF-16 with a byte
order mark; whatever else lies in the folder is left out and reported.
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
"""The questions of each split, in the folder itself."""
MARKDOWN: Final = (".md", ".markdown")
KINDS: Final = (".txt", *MARKDOWN)
"""Files that are read, by the end of their names."""
WORDS: Final = 100
"""Words that a passage has at most."""
LARGEST: Final = 64 << 20
"""Bytes of one file."""

_HEADING: Final = re.compile(r"(#{1,6})\s+(.*?)(?:\s+#+)?\s*$")
_FENCE: Final = re.compile(r"\s{0,3}(`{3,}(?=[^`]*$)|~{3,})")
"""Opens fenced code; three backticks with others behind them on the line are code in the text."""
_FENCE_END: Final = re.compile(r"\s{0,3}(`{3,}|~{3,})\s*$")
_SENTENCE: Final = re.compile(r"(?<=[.!?…。])\s+")


class Section(NamedTuple):
    """Paragraphs under one heading."""

    headings: tuple[str, ...]
    """From the top down; none for plain text."""
    paragraphs: list[str]


def read(directory: str | Path, split: Split, *, limit: int | None = None) -> Corpus:
    """The questions of a split, and the passages of the documents.

    Args:
        limit: questions at most.

    Raises:
        DataError: no such folder, no or malformed questions, or no document that can be read.
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
    """The passages of all documents in a folder and those in it, in the order of their names.

    Args:
        words: of a passage at most; 1 or more.

    Returns:
        The passages, and what was left out and why.

    Raises:
        DataError: there is no such folder, or nothing in it that can be read.
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
    """The passages of one document.

    Args:
        name: of its file; what ends as Markdown does is read as Markdown.
        words: of a passage at most.
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
    """The parts of a Markdown text between its headings (those that begin with `#`).

    A heading over nothing but further headings is in their titles; one over nothing at all is kept
    as its own text.
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
    """Each line, with level and text if it is a heading; none is inside fenced code."""
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
    """The section, if it has text; else, to be kept, with its heading as its text."""
    names = tuple(text for _, text in headings)
    paragraphs = _paragraphs("\n".join(lines)) or (list(names[-1:]) if keep else [])
    if paragraphs:
        yield Section(names, paragraphs)


def _paragraphs(text: str) -> list[str]:
    """What blank lines divide, each on one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def pack(paragraphs: Iterable[str], words: int) -> Iterator[str]:
    """Texts of up to `words` words, with all words of the paragraphs in their order.

    Example:
        >>> list(pack(["a b", "c", "d e f g. h"], 3))
        ['a b\\n\\nc', 'd e f', 'g. h']
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
    """A paragraph whole, else by sentences, else by words."""
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
    """Files by name, with why they are not read; of a folder that is not entered only itself."""
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
    """The name without bytes that are no text, which are shown as such."""
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
    """What a file says, or why that is not known."""
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
