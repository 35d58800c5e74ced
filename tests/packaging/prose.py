"""Check the language of the documents; run by `nox -s lint`.

    python tests/packaging/prose.py [PAGE …]

Sentences are counted in paragraphs and lists, not in code, tables and headings. Text in backticks
counts as one word.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["lightspan"]["prose"]
"""`dated`: globs of the pages that may name dates and commits; `made`: pages made from the code."""
MEAN_WORDS, LONG_WORDS, LONG_SHARE = 20.0, 35, 0.05
RULED_OUT = {
    r"^(Who|Whose|Whoever|Whatever|What|Of|Nor|Whether)\b[^?]*$": "begin with a noun",
    r"\b[Ww]hoever\b|\b[Ww]hichever\b|\b[Nn]obody\b": "name the user, the process or the value",
    r"\b[Bb]eside\b": "in addition to, next to, while",
    r"\bbut for\b": "except",
    r"\blikewise\b": "also",
    r"\bas ever\b": "as usual, or nothing",
    r"\bhears? of\b|\bis told\b|\bare told\b": "receives, logs, reports",
}
"""Pattern in a sentence → what to write."""
DATED = {
    r"\b20\d\d-\d\d-\d\d\b": "dates belong to the pages of evidence",
    r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b": "commits belong to evidence",
}
"""The same, except on the pages of evidence."""
_CODE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*`\[A-Z0-9])")


def main(names: list[str]) -> int:
    """Print each fault; return the exit status."""
    paths = [Path(name).resolve() for name in names] or pages()
    faults = [f"{path.relative_to(ROOT)}: {fault}" for path in paths for fault in faults_of(path)]
    print("\n".join(faults) or "the documents' language is plain")
    return bool(faults)


def pages() -> list[Path]:
    """Return the documents that are checked."""
    patterns = ("*.md", "docs/**/*.md", "packages/*/README.md", "examples/**/README.md")
    made = {path for pattern in SETTINGS["made"] for path in ROOT.glob(pattern)}
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)} - made)


def faults_of(path: Path) -> Iterator[str]:
    """Yield what is wrong with a page."""
    text = path.read_text("utf-8")
    lines = [sentence for paragraph in paragraphs(text) for sentence in sentences(paragraph)]
    lengths = [len(sentence.split()) for sentence in lines]
    if lengths and (mean := sum(lengths) / len(lengths)) >= MEAN_WORDS:
        yield f"sentences have {mean:.1f} words on average (under {MEAN_WORDS:.0f} wanted)"
    long = [line for line, length in zip(lines, lengths, strict=True) if length > LONG_WORDS]
    if len(long) > LONG_SHARE * len(lines):
        yield f"{len(long)} of {len(lines)} sentences have over {LONG_WORDS} words:"
        yield from (f"    {line[:90]}…" for line in long)
    is_dated = any(path.match(pattern) for pattern in SETTINGS["dated"])
    for pattern, advice in {**RULED_OUT, **({} if is_dated else DATED)}.items():
        for line in lines:
            if match := re.search(pattern, line):
                yield f"{match[0][:30]!r}: {advice} ({line[:70]}…)"
    for start in re.findall(r"^```\s*\n\n([a-z].*)", text, re.MULTILINE):
        yield f"a sentence runs across a code block ({start[:60]}…)"


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and the items of lists of a page, each in one line."""
    text = _CODE.sub("\n\n", _COMMENT.sub("", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)", text):
        line = " ".join(block.split())
        if line and not re.match(r"#|\||<|!\[|---|\[!|[-*]{3}|!!! |\?\?\? |::: ", line):
            yield re.sub(r"^(?:[-*+]|\d+\.|>)\s+", "", line)


def sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph, without Markdown."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    text = re.sub(r"`[^`]*`", lambda code: "_".join(code[0].split()), text)
    text = text.replace("**", "")
    return [sentence for sentence in _SENTENCE.split(text) if sentence]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
