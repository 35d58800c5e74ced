"""Write the tables of benchmarks/README.md and of docs/ from the files in benchmarks/results.

    python benchmarks/tables.py [--check]

A benchmark and a long test session write a file each (`nox -s bench`, `nox -s tests_vllm`, …). With
`--check` nothing is written, and the exit status is 1 if a table is not that of the files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import _coding_programs_table as coding_programs
import _distill_table as distill
import _learning_table as learning
import _task_choice_table as task_choice
import _verdicts_table as verdicts
from _report import Figure, cells as figure_cells

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent
EXACT: Final = 1e-4
"""Largest error of a log-probability, in nats, that counts as rounding."""
_FIELDS: Final = Figure.__dataclass_fields__


def main() -> int:
    """Write or check the tables; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    results = {path.stem: json.loads(path.read_text()) for path in HERE.glob("results/*.json")}
    stale = 0
    for page, tables in pages(results).items():
        before = page.read_text("utf-8")
        after = fill(before, tables)
        if options.check and after != before:
            print(f"{page.relative_to(ROOT)} is not what python benchmarks/tables.py writes")
            stale = 1
        elif not options.check:
            page.write_text(after, "utf-8")
    return stale


def pages(results: dict[str, Any]) -> dict[Path, dict[str, str]]:
    """Return the tables of each page by their names."""
    return {
        HERE / "README.md": {
            "figures": figures_table(results),
            "sessions": sessions_table(results),
        },
        ROOT / "docs/guides/coding-agents.md": {
            "coding_programs": coding_programs.table(
                coding_programs.rows_of(coding_programs.RESULTS)
            )
        },
        ROOT / "docs/guides/environments.md": {
            "environments": environments_table(results["environments"])
        },
        ROOT / "docs/evidence/charts.md": {
            "runs": learning.runs(results["learning_charts"]),
            "controls": learning.controls(results["learning_charts"]),
            "exchanged": learning.exchanged(results["learning_charts"]),
        },
        ROOT / "docs/evidence/credit-comparison.md": {
            "baselines": baselines_table(results["baselines"])
        },
        ROOT / "docs/evidence/defaults.md": results["defaults"]["stages"],
        ROOT / "docs/evidence/distill.md": {
            "distill": distill.table(distill.rows_of(distill.RESULTS)),
            "curves": distill.curves(distill.rows_of(distill.RESULTS)),
        },
        ROOT / "docs/evidence/peers.md": {"peers": results["peers_learning"]["table"]},
        ROOT / "docs/evidence/terminal.md": {
            "runs": learning.runs(results["learning_terminal"]),
            "controls": learning.controls(results["learning_terminal"]),
            "kinds": learning.kinds(results["learning_terminal"]),
        },
        ROOT / "docs/evidence/verdicts.md": {
            "verdicts": verdicts.table(verdicts.rows_of(verdicts.RESULTS))
        },
        ROOT / "docs/guides/fork.md": {"losses": losses_table(results["losses"])},
        ROOT / "docs/evidence/gpu.md": {"gpu": parts_table(results)},
        ROOT / "docs/guides/task-choice.md": {
            name: task_choice.table(task_choice.rows_of(HERE / f"results/{name}.jsonl"))
            for name in ("task_choice", "task_choice_pilot")
        },
        ROOT / "docs/reference/families.md": {
            "families": families_table(results["families"]),
            "versions": versions_table(results),
        },
    }


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
        if not isinstance(result.get("figures"), list):
            continue
        lines.append(f"| **[`{name}.py`]({name}.py)**, {_circumstances(result)} | | | | | | | |")
        rows = [figure_cells(figure_of(row)) for row in result["figures"]]
        lines += [f"| {' | '.join(map(_escaped, row))} |" for row in rows]
    return "\n".join(lines)


def losses_table(result: dict[str, Any]) -> str:
    """Return in how many lost rollouts the very call was named, a row per figure."""
    lines = ["| measured | |", "|---|---|"]
    lines += [f"| {row['what']} | {row['ours']:.3g} |" for row in result["figures"]]
    return "\n".join([*lines, "", f"<!-- {_circumstances(result)} -->"])


def sessions_table(results: dict[str, Any]) -> str:
    """Return the results of the long test sessions, a row each."""
    lines = ["| session | passed | failed | skipped | minutes | run |", "|---|---|---|---|---|---|"]
    for name, result in sorted(results.items()):
        if "passed" in result:
            counts = (result["passed"], result["failed"] + result["error"], result["skipped"])
            row = (f"`{name}`", *counts, _minutes(result), _circumstances(result))
            lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def baselines_table(result: dict[str, Any]) -> str:
    """Return the gain of each baseline, and what a lambda below 1 leaves, a row each."""
    lines = [f"| {_circumstances(result)} | gain | |", "|---|---|---|"]
    for figure in map(figure_of, result["figures"]):
        gain = f"{figure.ours:.2f} left" if figure.ratio is None else f"{figure.ratio:.2f}"
        lines.append(f"| {figure.what} | {gain} | {figure.note} |")
    return "\n".join(lines)


def environments_table(result: dict[str, Any]) -> str:
    """Return which packages can be installed together with training, a row each."""
    shown = ("torch", "transformers", "llguidance", "numpy", "openai")
    heads = ("with training", *shown, "")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in result["environments"]:
        versions = dict(row["versions"])
        columns = [versions.pop(name, "") for name in shown]
        rest = ", ".join(f"{name} {version}" for name, version in versions.items())
        note = rest if row["versions"] else f"**impossible**: {row['why']}"
        lines.append(f"| {' | '.join(map(_escaped, (row['name'], *columns, note)))} |")
    return "\n".join([*lines, "", f"<!-- resolved {_circumstances(result)} -->"])


def families_table(result: dict[str, Any]) -> str:
    """Return the cells of all families, a row each, and a table of refusals and remarks."""
    families: dict[str, dict[str, Any] | None] = result["families"]
    kinds = next(list(cells) for cells in families.values() if cells)
    heads = ("family", *kinds)
    lines = [f"<!-- {_circumstances(result)} -->", "", f"With {_versions(result)}:", ""]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    remarks: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, cells in families.items():
        if cells is None:
            absent = f"not in transformers {result['versions']['transformers']}"
            lines.append(f"| {name} | {absent} |{' |' * (len(kinds) - 1)}")
            continue
        lines.append(f"| {name} | {' | '.join(_outcome(cell) for cell in cells.values())} |")
        for kind, cell in cells.items():
            remark = cell.get("refusal") or cell.get("failure") or cell.get("note")
            if remark and not (kind != "engine" and remark == cells["engine"].get("refusal")):
                remarks[kind, _general(remark)].append(name)
    lines += ["", "| cell | families | what it says |", "|---|---|---|"]
    for (kind, remark), names in remarks.items():
        lines.append(f"| {kind} | {', '.join(names)} | {_escaped(remark)} |")
    return "\n".join(lines)


def versions_table(results: dict[str, Any]) -> str:
    """Return in which cells other versions of transformers end otherwise than in `families`.

    A result of another version is a file `families_VERSION.json`.
    """
    lines = ["| transformers | cell | families | what it says |", "|---|---|---|---|"]
    own = results["families"]["families"]
    for result in (results[name] for name in sorted(results) if name.startswith("families_")):
        differences: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, cells in result["families"].items():
            if cells is None and own.get(name):
                differences["", "not there"].append(name)
            for kind, cell in (cells or {}).items():
                before = (own.get(name) or {}).get(kind, {})
                if _is_exact(cell) != _is_exact(before):
                    wrong = f"**off by {cell['error']:.1f}**" if "error" in cell else ""
                    remark = cell.get("refusal") or cell.get("failure") or wrong
                    remark = "exact" if _is_exact(cell) else remark
                    differences[kind, _general(remark)].append(name)
        for (kind, remark), names in differences.items():
            version = f"{result['versions']['transformers']}, {len(result['families'])} run"
            lines.append(f"| {version} | {kind} | {', '.join(names)} | {_escaped(remark)} |")
    return "\n".join(lines)


def _general(remark: str) -> str:
    """Return a sentence without names of classes, layers and figures, the same for all families."""
    names = r"\w+(ForCausalLM|LMHeadModel)|model\.layers\.[\w.]+|\d\.\d+e\S+"
    names += r"| \(model_type=.*?\)"
    return re.sub(names, lambda found: "" if found[0].startswith(" ") else "…", remark)


def _is_exact(cell: dict[str, Any]) -> bool:
    return bool(cell.get("error", 1.0) <= EXACT)


def _outcome(cell: dict[str, Any]) -> str:
    if "error" in cell:
        return f"{cell['error']:.0e}" if _is_exact(cell) else f"**off by {cell['error']:.0e}**"
    return "refused" if "refusal" in cell else "**failed**"


def parts_table(results: dict[str, Any]) -> str:
    """Return a table of the parts of `gpu.py`, of a run on a GPU and of the rehearsal."""
    lines = ["| part | | seconds | measured |", "|---|---|---|---|"]
    for name in ("gpu", "gpu_rehearsal"):
        if (result := results.get(name)) is None:
            continue
        minutes = f"{result['seconds'] / 60:.1f} minutes"
        lines.append(f"| **{result['device']}**, {_circumstances(result)}, {minutes} | | | |")
        for part in result["parts"]:
            measured = "<br>".join(filter(None, (part["reason"], *map(text_of, part["figures"]))))
            row = (part["what"], part["state"], f"{part['seconds']:.0f}", measured)
            lines.append(f"| {' | '.join(map(_escaped, row))} |")
    return "\n".join(lines)


def text_of(row: dict[str, Any]) -> str:
    """Return a figure as a sentence."""
    what, unit, ours, peer, theirs, _, target, note = figure_cells(figure_of(row))
    beside = f"{peer} {theirs}" if theirs else ""
    return ", ".join(filter(None, (f"{what}: {ours} {unit}", beside, target, note.strip())))


def figure_of(row: dict[str, Any]) -> Figure:
    """Return the figure of a row of a result file."""
    return Figure(**{key: row[key] for key in _FIELDS if key in row})


def _minutes(result: dict[str, Any]) -> str:
    return "" if result["seconds"] is None else f"{result['seconds'] / 60:.0f}"


def _circumstances(result: dict[str, Any]) -> str:
    parts = [result["date"], result["commit"], result["machine"], f"Python {result['python']}"]
    return ", ".join(filter(None, [*parts, f"load {result['load']}", _versions(result)]))


def _versions(result: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())


def _escaped(cell: str) -> str:
    return cell.strip().replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
