"""List words in docstrings and comments that CONTRIBUTING.md rules out; run by `nox -s lint`."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RULED_OUT = {
    r"\bwhoever\b|\bwhom\b|\bnobody\b": "name the user, the process or the function",
    r"\bsuch a one\b|\bthat one's\b|\beach one\b": "repeat the noun",
    r"\btold\b|\btells\b": "is passed, is notified, shows",
    r"\bsaid\b": "name the text, the message or the value",
    r"\bhears?\b|\bheard\b": "receives, records",
    r"\bbeside\b": "in addition to, next to",
}
"""Pattern → what to write."""


def main() -> int:
    """Print each place; return the exit status."""
    places = [
        place for path in sorted(ROOT.glob("packages/*/src/**/*.py")) for place in found(path)
    ]
    print("\n".join(places) or "no word is ruled out")
    return bool(places)


def found(path: Path) -> Iterator[str]:
    """Yield the places of one file."""
    for line, text in prose(path.read_text("utf-8")):
        for pattern, advice in RULED_OUT.items():
            for match in re.finditer(pattern, text):
                number = line + text[: match.start()].count("\n")
                yield f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: {advice}"


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


if __name__ == "__main__":
    sys.exit(main())
