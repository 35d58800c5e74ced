"""Write the tables of benchmarks/README.md and docs/devices.md from benchmarks/results.

    python benchmarks/tables.py [--check]

A benchmark and a long test session write a file each (`nox -s bench`, `nox -s tests_vllm`, …). With
`--check` nothing is written, and the exit status is 1 if a table is not that of the files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from _report import Figure, cells

HERE: Final = Path(__file__).parent
PAGE: Final = HERE / "README.md"
DEVICES: Final = HERE.parent / "docs/devices.md"
_FIELDS: Final = Figure.__dataclass_fields__


def main() -> int:
    """Write or check the tables; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    results = {path.stem: json.loads(path.read_text()) for path in HERE.glob("results/*.json")}
    tables = {
        PAGE: {"figures": figures_table(results), "sessions": sessions_table(results)},
        DEVICES: {"gpu": parts_table(results)},
    }
    status = 0
    for path, own in tables.items():
        before = path.read_text("utf-8")
        after = fill(before, own)
        if not options.check:
            path.write_text(after, "utf-8")
        elif after != before:
            print(f"{path} is not what python benchmarks/tables.py writes")
            status = 1
    return status


def fill(page: str, tables: dict[str, str]) -> str:
    """Return the page with each table put between `<!-- NAME -->` and the next `<!-- end -->`."""
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page, number = re.subn(pattern, lambda m: f"{m[1]}\n{table}\n\n{m[2]}", page, flags=re.S)  # noqa: B023
        assert number == 1, f"the page has no place for {name}"
    return page


def figures_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each figure, after a row with date, commit and machine."""
    heads = ("what", "unit", "ours", "peer", "theirs", "ratio", "target", "")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, result in sorted(results.items()):
        if "figures" not in result:
            continue
        lines.append(f"| **[`{name}.py`]({name}.py)**, {_circumstances(result)} | | | | | | | |")
        rows = [cells(figure_of(row)) for row in result["figures"]]
        lines += [f"| {' | '.join(map(_escaped, row))} |" for row in rows]
    return "\n".join(lines)


def sessions_table(results: dict[str, Any]) -> str:
    """Return the results of the long test sessions, a row each."""
    lines = ["| session | passed | failed | skipped | minutes | run |", "|---|---|---|---|---|---|"]
    for name, result in sorted(results.items()):
        if "passed" in result:
            counts = (result["passed"], result["failed"] + result["error"], result["skipped"])
            row = (f"`{name}`", *counts, _minutes(result), _circumstances(result))
            lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def parts_table(results: dict[str, Any]) -> str:
    """Return a table of the parts of `gpu.py`, of a run on a GPU and of the rehearsal."""
    lines = ["| part | | seconds | measured |", "|---|---|---|---|"]
    for name in ("gpu", "gpu_rehearsal"):
        if (result := results.get(name)) is None:
            continue
        minutes = f"{result['seconds'] / 60:.1f} minutes"
        lines.append(f"| **{result['device']}**, {_circumstances(result)}, {minutes} | | | |")
        for part in result["parts"]:
            measured = "; ".join(filter(None, (part["reason"], *map(text_of, part["figures"]))))
            row = (part["what"], part["state"], f"{part['seconds']:.0f}", measured)
            lines.append(f"| {' | '.join(map(_escaped, row))} |")
    return "\n".join(lines)


def text_of(row: dict[str, Any]) -> str:
    """Return a figure as a sentence."""
    what, unit, ours, peer, theirs, _, target, note = cells(figure_of(row))
    beside = f"{peer} {theirs}" if theirs else ""
    return ", ".join(filter(None, (f"{what}: {ours} {unit}", beside, target, note.strip())))


def figure_of(row: dict[str, Any]) -> Figure:
    """Return the figure of a row of a result file."""
    return Figure(**{key: row[key] for key in _FIELDS if key in row})


def _minutes(result: dict[str, Any]) -> str:
    return "" if result["seconds"] is None else f"{result['seconds'] / 60:.0f}"


def _circumstances(result: dict[str, Any]) -> str:
    parts = [result["date"], result["commit"], result["machine"], f"Python {result['python']}"]
    versions = [f"{name} {version}" for name, version in result.get("versions", {}).items()]
    return ", ".join([*filter(None, parts), f"load {result['load']}", *versions])


def _escaped(cell: str) -> str:
    return cell.strip().replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
