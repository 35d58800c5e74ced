"""Plots of learning curves, and of searches for the call that lost a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightspan.errors import ConfigError
from lightspan.training.folder import RunFolder
from lightspan.training.listeners import RunEvent
from lightspan_tools import notebook
from lightspan_tools.forking.report import ForkReport, interval_of, shortened

HELD_OUT: Final = "tab:blue"
TRAINING: Final = "0.55"
SELECTION: Final = "tab:olive"
COLOURS: Final = ("tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink")
LABELLED: Final = 12
"""Maximum number of held-out points that are all labelled.

Of more points, only the first, the best and the last are labelled.
"""

Line = Mapping[str, Any]


def draw(event: RunEvent) -> None:
    """Draw the learning curve of a run into the run's folder, if the run trains weights.

    This is a listener, which the trainer calls with each event of the run. It ignores the event at
    the end of a step, except in a notebook. There it also shows the curve.
    """
    shown = notebook.is_notebook()
    if not event.trains_weights or (event.kind == "step" and not shown):
        return
    folder = RunFolder(event.folder)
    title, path = f"{event.folder.name}: {event.algorithm}", folder.path / "learning_curve.png"
    learning_curve(folder.metrics(), path, title=title, metric=event.metric)
    if shown:
        notebook.show_picture(path)


def learning_curve(
    metrics: Sequence[Line], path: Path, *, title: str, metric: str = "reward"
) -> None:
    """Draw the rewards of evaluations with their confidence interval, and the rewards in training.

    The curve of training is drawn as a whole and for each agent.

    Args:
        metrics: the lines of `metrics.jsonl`. Lines of kind "eval", "selection" and "train" are
            drawn.
        path: path of the PNG file.
        title: title of the plot.
        metric: name of the reward, for the axis.
    """
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would choose a GUI backend
    from matplotlib.ticker import MaxNLocator

    held_out = [line for line in metrics if line.get("kind") == "eval" and _is_finite(line, "mean")]
    held_out = sorted(held_out, key=_weights)
    selection = [line for line in metrics if line.get("kind") == "selection"]
    training = [line for line in metrics if line.get("kind") == "train"]
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
        axes = figure.subplots()
        _held_out(axes, held_out)
        _curve(axes, training, "reward", color=TRAINING, linewidth=1.3, label="training")
        _curve(axes, selection, "mean", color=SELECTION, linewidth=1.3, label="selection split")
        _agents(axes, training)
        axes.set_xlabel("training step")
        axes.set_ylabel(metric)
        axes.set_title(_headline(title, held_out, metric))
        axes.grid(visible=True, alpha=0.25)
        axes.margins(x=0.04, y=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
        figure.savefig(path)


def _headline(title: str, held_out: Sequence[Line], metric: str) -> str:
    if len(held_out) < 2:
        return title
    return f"{title}\nheld-out {metric} {held_out[0]['mean']:.2f} → {held_out[-1]['mean']:.2f}"


def _held_out(axes: Any, points: Sequence[Line]) -> None:
    if not points:
        return
    steps = [_weights(line) for line in points]
    means = [line["mean"] for line in points]
    low, high = (
        [line["mean"] if line[end] is None else line[end] for line in points]
        for end in ("low", "high")
    )
    axes.fill_between(steps, low, high, alpha=0.18, color=HELD_OUT, linewidth=0)
    last = points[-1]
    counts = "".join(f", {last[key]} {key}" for key in ("unscored", "failed") if last.get(key))
    label = f"held out, with 95% interval (n={last['n']}{counts})"
    axes.errorbar(
        steps,
        means,
        yerr=[
            [mean - bound for mean, bound in zip(means, low, strict=True)],
            [bound - mean for mean, bound in zip(means, high, strict=True)],
        ],
        fmt="o-",
        color=HELD_OUT,
        linewidth=2.5,
        elinewidth=1,
        capsize=3,
        label=label,
        zorder=3,
    )
    for place in _labelled(means):
        axes.annotate(
            f"{means[place]:.2f}",
            (steps[place], high[place]),
            textcoords="offset points",
            xytext=(0, 4),
            ha="center",
            color=HELD_OUT,
            fontweight="bold",
            zorder=4,
        )


def _weights(line: Line) -> int:
    """Return the training step whose weights were evaluated, from a line of `metrics.jsonl`."""
    step: int = line.get("weights", line["step"])
    return step


def _labelled(means: Sequence[float]) -> list[int]:
    """Return the indices of the points that get a label: all, or only the first, best and last."""
    if len(means) <= LABELLED:
        return list(range(len(means)))
    return sorted({0, means.index(max(means)), len(means) - 1})


def _agents(axes: Any, training: Sequence[Line]) -> None:
    """Draw, for each agent, the mean reward of the rollouts in which the agent acts.

    An agent that acts in all rollouts is left out: its curve would be equal to the curve of
    training.
    """
    keys = sorted({key for line in training for key in line if _is_agent_reward(key)})
    distinct = [
        key for key in keys if any(line.get(key) != line.get("reward") for line in training)
    ]
    for number, key in enumerate(distinct):
        name = key.removeprefix("agent/").removesuffix("/reward")
        color, label = COLOURS[number % len(COLOURS)], f"training, where {name} acts"
        _curve(axes, training, key, color=color, linewidth=1, linestyle="--", label=label)


def _curve(axes: Any, lines: Sequence[Line], key: str, **style: Any) -> None:
    points = [line for line in lines if _is_finite(line, key)]
    if points:
        marker = "." if len(points) == 1 else None  # a line needs two points
        axes.plot([p["step"] for p in points], [p[key] for p in points], marker=marker, **style)


def _is_finite(line: Line, key: str) -> bool:
    value = line.get(key)
    return isinstance(value, int | float) and math.isfinite(value)


def _is_agent_reward(key: str) -> bool:
    return key.startswith("agent/") and key.endswith("/reward")


def check_picture_path(path: Path, name: str) -> None:
    """Check that a plot can be written to a path.

    Args:
        path: path of the picture.
        name: name of the option, for the error.

    Raises:
        ConfigError: its folder does not exist, it is a folder, or matplotlib writes no such format.
    """
    from matplotlib.figure import Figure

    if not path.parent.is_dir():
        raise ConfigError(f"{name} {path}: there is no folder {path.parent}; create it first")
    if path.is_dir():
        raise ConfigError(f"{name} {path} is a folder; name a file, such as {path / 'loss.png'}")
    formats = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ConfigError(
            f"{name} {path}: {path.suffix} is no format of pictures; use one of "
            f".{', .'.join(formats)}"
        )


def loss_plot(report: ForkReport, path: Path) -> None:
    """Draw the share of successful continuations of each tested call, with its 95 % interval.

    Tests of one call are drawn together. The calls that lost the rollout are marked.

    Args:
        report: the report of a search for the call that lost a rollout.
        path: path of the PNG file.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    tests: dict[int, list[float]] = {}
    for point in report.points:
        count = len(point.scored)
        hits = [float(number < (point.successes or 0)) for number in range(count)]
        tests.setdefault(point.call.number, []).extend(hits)
    shares = [(number, interval_of(hits)) for number, hits in sorted(tests.items()) if hits]
    known = [(number, share) for number, share in shares if share is not None]
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(8, 4), dpi=100, layout="constrained")
        axes = figure.subplots()
        for call in () if report.loss is None else report.loss.calls:
            axes.axvline(call.number, color=COLOURS[2], linewidth=6, alpha=0.25)
        numbers, means = [number for number, _ in known], [share.mean for _, share in known]
        below = [share.mean - share.low if share.is_known else 0.0 for _, share in known]
        above = [share.high - share.mean if share.is_known else 0.0 for _, share in known]
        axes.errorbar(
            numbers, means, yerr=[below, above], fmt="o", color=HELD_OUT, elinewidth=1.5, capsize=4
        )
        end = report.calls + 1
        axes.plot([end], [0.0], marker="x", color=TRAINING, linestyle="none")
        axes.annotate("the end", (end, 0.0), textcoords="offset points", xytext=(0, 8), ha="center")
        axes.set_xlabel("continued from call")
        axes.set_ylabel("share of successes")
        axes.set_title(_loss_title(report))
        axes.set_xlim(0.4, end + 0.6)
        axes.set_ylim(-0.05, 1.05)
        axes.grid(visible=True, alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)


def _loss_title(report: ForkReport) -> str:
    calls = () if report.loss is None else report.loss.calls
    names = " or ".join(f"{call.number} ({call.agent})" for call in calls[:3])
    if not names:
        return "no continuation succeeded"
    where = f"lost at call {names}{' or others' if len(calls) > 3 else ''}"
    return f"{where}\nwhat it answered: {shortened(calls[0].answer)}" if len(calls) == 1 else where
