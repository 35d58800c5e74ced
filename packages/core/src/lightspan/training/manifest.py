"""Describe a run in its folder: its data in `config.json`, its result in `result.json`.

`result.json` also has the trained policies, from which the run can be served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from lightspan.algorithms.protocol import Algorithm
from lightspan.schema.records import Json, fingerprint
from lightspan.schema.routing import Routing
from lightspan.training.folder import RunFolder
from lightspan.training.results import Evaluation, FitResult, Outcomes, mismatch_text

KEY: Final = "serving"
"""Key in `result.json` of the trained policies (`ServedRun`)."""


def data_config(
    train: Sequence[Json], val: Sequence[Json] | None, selection: Sequence[Json] | None
) -> dict[str, Json]:
    """Return for each split the number and a hash of its tasks, for `config.json`.

    The value is None for a split that the run does not have.
    """
    splits = {"train": train, "val": val, "selection": selection}
    return {
        name: tasks and {"tasks": len(tasks), "fingerprint": fingerprint(list(tasks))}
        for name, tasks in splits.items()
    }


def fit_result(
    folder: RunFolder, steps: int, seconds: Mapping[str, float], kept: Evaluation | None = None
) -> FitResult:
    """Return the result of the run in `folder`, whose model or prompts were already written.

    Args:
        folder: folder of the run.
        steps: number of completed iterations.
        seconds: CPU-seconds by part, such as `engine`.
        kept: evaluation by which the best weights were chosen; None if the run keeps its last
            weights.
    """
    evaluations, metrics = folder.evaluations(), folder.metrics()
    failure_reward = evaluations[-1].failure_reward if evaluations else None
    return FitResult(
        folder=folder.path,
        model=folder.model if folder.model.is_dir() else None,
        prompts=folder.prompts(),
        evaluations=tuple(each.restated(failure_reward) for each in evaluations),
        seconds=dict(seconds),
        steps=steps,
        kept=kept,
        outcomes=Outcomes.of(metrics),
        mismatch=mismatch_text(metrics),
    )


def finished_result(folder: RunFolder, step: int, kept: Evaluation | None) -> FitResult | None:
    """Return the result of a complete run.

    Args:
        folder: folder of the run.
        step: step with which the training has ended.
        kept: evaluation by which the best weights were chosen; None if the run keeps its last
            weights.

    Returns:
        The result. None if it has to be written again, because `result.json` or the model is
            missing, or `result.json` belongs to another step or evaluation.
    """
    saved = folder.read_result()
    if saved is None or saved["steps"] != step or saved.get("kept") != _kept_step(kept):
        return None
    if saved.get(KEY) is not None and not folder.model.is_dir():
        return None
    return fit_result(folder, step, saved.get("seconds", {}), kept)


def _kept_step(kept: Evaluation | None) -> dict[str, Json] | None:
    """Return the value of `kept` in `result.json`, which describes the chosen weights.

    Args:
        kept: evaluation by which the weights were chosen; None if the run keeps its last weights.
    """
    return None if kept is None else {"step": kept.step, "selection": kept.metrics()}


def write_result(folder: RunFolder, result: FitResult, served: ServedRun | None, name: str) -> None:
    """Write `result.json`, which marks the run as complete.

    Args:
        folder: folder of the run.
        result: result of the run.
        served: trained policies; None if no weights were trained.
        name: name of the reward.
    """
    folder.write_result(
        {
            "steps": result.steps,
            "summary": result.summary(name),
            "evaluations": [{"step": each.step, **each.metrics()} for each in result.evaluations],
            "training": result.outcomes._asdict(),
            "seconds": result.seconds,
            "kept": _kept_step(result.kept),
            KEY: served,
        }
    )


class ServedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A trained policy with the folder of its weights."""

    folder: str
    """Folder of the model or PEFT adapter, relative to the run's folder."""
    model: str
    """Starting weights, on which a PEFT adapter is loaded."""
    version: int = 0


class ServedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The trained policies of a complete run and the routing of agents to them, for serving."""

    policies: dict[str, ServedPolicy]
    base_model: str
    """Starting weights for agents that are frozen as `"base"`."""
    routing: Routing

    @classmethod
    def of(cls, algorithm: Algorithm, folder: RunFolder, versions: Mapping[str, int]) -> ServedRun:
        """Return the algorithm's policies with the folders to which they are exported.

        A single policy is exported to the run's folder `model`, several policies to subfolders.

        Args:
            versions: policy → last published version.
        """
        specs = algorithm.policies()
        model = folder.model.relative_to(folder.path)
        policies = {
            name: ServedPolicy(
                folder=str(model if len(specs) == 1 else model / name),
                model=spec.model,
                version=versions.get(name, 0),
            )
            for name, spec in specs.items()
        }
        return cls(policies=policies, base_model=algorithm.base_model, routing=algorithm.routing())
