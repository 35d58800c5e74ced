"""The tables of the figures that `learning.py --json` keeps; it needs no lightspan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any, Final

FIGURES: Final = (
    *("before → after", "gain (95% CI)", "development, on the way", "engine + learner CPU-s"),
    *("warm start CPU-s", "minutes", "date, commit, load"),
)

Run = Mapping[str, Any]


def runs(result: Mapping[str, Any]) -> str:
    """Return a table with a row for each run of the recipe."""
    rows = ((str(run["seed"]), *_cells(run)) for run in _runs(result) if run["name"] == "RL")
    return "\n".join(_lines(("seed", *FIGURES), rows))


def controls(result: Mapping[str, Any]) -> str:
    """Return a table with a row for each other run."""
    others = (run for run in _runs(result) if run["name"] != "RL")
    rows = ((run["name"], str(run["seed"]), *_cells(run)) for run in others)
    return "\n".join(_lines(("control", "seed", *FIGURES), rows))


def exchanged(result: Mapping[str, Any]) -> str:
    """Return a table with the scores of runs whose pictures were exchanged after training."""
    found = [run for run in _runs(result) if run.get("exchanged") is not None]
    found.sort(key=lambda run: (str(run["name"]), int(run["seed"])))
    rows = (
        (
            run["name"],
            str(run["seed"]),
            f"{fmean(run['after'].values()):.3f}",
            f"{run['exchanged']:.3f}",
        )
        for run in found
    )
    return "\n".join(_lines(("run", "seed", "its own picture", "another one"), rows))


def kinds(result: Mapping[str, Any]) -> str:
    """Return a table with the scores before and after for each kind of held-out task."""
    found = list(_runs(result))
    names = list(dict.fromkeys(kind for run in found for kind in run["kinds"].values()))
    rows = (
        (run["name"], str(run["seed"]), *(_of_kind(run, name) for name in names)) for run in found
    )
    return "\n".join(_lines(("run", "seed", *names), rows))


def _runs(result: Mapping[str, Any]) -> list[Run]:
    return [each for each in result["figures"].values() if "points" in each]


def _lines(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _cells(run: Run) -> tuple[str, ...]:
    before, after = (fmean(run[when].values()) for when in ("before", "after"))
    return (
        f"{before:.3f} → {after:.3f}",
        run["gain"],
        ", ".join(f"{mean:.2f}" for _, mean in run["points"]),
        f"{run['engine_cpu_s']} + {run['learner_cpu_s']}",
        f"{run['warm_start_cpu_s']:.0f}",
        f"{run['wall_s'] / 60:.1f}",
        _where(run),
    )


def _where(run: Run) -> str:
    """Return date, commit and load of a run; "see above" for a run without its own."""
    where = run.get("circumstances")
    return f"{where['date']}, {where['commit']}, {where['load']}" if where else "see above"


def _of_kind(run: Run, name: str) -> str:
    tasks = [task for task, kind in run["kinds"].items() if kind == name]
    before, after = (fmean(run[when][task] for task in tasks) for when in ("before", "after"))
    return f"{before:.2f} → {after:.2f}"
