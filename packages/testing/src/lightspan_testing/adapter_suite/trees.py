"""Expected span trees as text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from lightspan.schema import semconv as c


def ordered(lines: Sequence[str], is_ordered: bool) -> list[str]:
    """Return the lines of a tree, with siblings sorted by their text unless `is_ordered`."""
    blocks: list[list[str]] = []
    margin = min((_indent(line) for line in lines), default=0)
    for line in lines:
        if _indent(line) == margin:
            blocks.append([line[margin:]])
        else:
            blocks[-1].append(line[margin:])
    sorted_blocks = [[block[0], *_deeper(block[1:], is_ordered)] for block in blocks]
    return [line for b in (sorted_blocks if is_ordered else sorted(sorted_blocks)) for line in b]


def _deeper(lines: Sequence[str], is_ordered: bool) -> list[str]:
    return [f"  {line}" for line in ordered(lines, is_ordered)] if lines else []


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def without_call_status(lines: Sequence[str]) -> list[str]:
    """Return the lines of a tree without the status of model calls."""
    return [re.sub(r"^( *chat @\S+).*", r"\1", line) for line in lines]


def inside(outer: str, lines: str) -> str:
    """Return the lines of a tree after moving it below a new root, the agent `outer`."""
    moved = re.sub(rf"@{c.UNNAMED_AGENT}\b", f"@{outer}", textwrap.dedent(lines).strip("\n"))
    moved = re.sub(rf"@(?!{outer}( |$))", f"@{outer}/", moved, flags=re.MULTILINE)
    return f"invoke_agent {outer} @{outer}\n{textwrap.indent(moved, '  ')}"


def calls_of(lines: str) -> list[str]:
    """Return the agent path of every model call in an expected tree."""
    return re.findall(r"^ *chat @(\S+)", lines, re.MULTILINE)
