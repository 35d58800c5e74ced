"""Find the state and checkpoint from which a run starts or resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightspan.errors import CheckpointError, ConfigError
from lightspan.progress import Reporter
from lightspan.schema.records import new_id
from lightspan.stores.protocol import Store
from lightspan.training import checkpoints
from lightspan.training.checkpoints import TrainerState
from lightspan.training.folder import RunFolder
from lightspan.training.settings import RECORDED

FREE: Final = frozenset({"run_id", "app", *RECORDED, "store", "timeout_s", "budget", "reflection"})
"""Settings that may change when a run is resumed, because completed steps do not depend on them."""


def find_start(
    folder: RunFolder, config: Mapping[str, Any], reporter: Reporter, *, resume: bool
) -> tuple[TrainerState, Path | None]:
    """Return the state in which a run starts or resumes, and its checkpoint (None for a new run).

    If the checkpoints of a run were deleted, there is none either: the step is that of its result,
    or -1 if the run is not complete.

    Args:
        folder: folder of the run.
        config: settings of the run, for `config.json`.
        reporter: reporter that prints a line if there is no checkpoint to resume from.
        resume: whether to resume the run from the latest checkpoint.

    Raises:
        ConfigError: the folder has a run that has begun and `resume` is false, or the settings of
            its run differ from `config`.
        CheckpointError: the checkpoint cannot be read.
    """
    saved = checkpoints.latest(folder.checkpoints)
    if saved is None and not folder.metrics():  # which follow the first checkpoint
        if resume:
            reporter.line(f"{folder.path} holds no checkpoint to resume from: starting anew")
        return TrainerState(run_id=new_id("run")), None
    if not resume:
        raise ConfigError(
            f"{folder.path} holds a run already: resume it (resume=True, --resume), or give "
            "another folder"
        )
    _check_settings(folder, config)
    if saved is None:
        return TrainerState(run_id="", step=(folder.read_result() or {"steps": -1})["steps"]), None
    return checkpoints.load_state(saved), saved


def no_checkpoint(folder: RunFolder) -> CheckpointError:
    """Return the error that a run has begun and its checkpoints were deleted."""
    return CheckpointError(
        f"the run in {folder.path} has begun, and {folder.checkpoints} is empty, so it cannot go "
        "on: restore the checkpoints, or start anew in another folder"
    )


def _check_settings(folder: RunFolder, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `config` differs from the run's settings.

    The settings in `FREE` may differ.
    """
    before, now = folder.read_config(), json.loads(json.dumps(config, default=str))
    differing = [
        f"{key}: {before.get(key)!r:.200} before, {now[key]!r:.200} now"
        for key in sorted(now.keys() - FREE)
        if before.get(key) != now[key]
    ]
    if differing:
        raise ConfigError(
            f"the run in {folder.path} was started with other settings, so it cannot go on with "
            f"these ({'; '.join(differing)}): use the same ones, or another folder"
        )


async def check_store(store: Store, state: TrainerState) -> None:
    """Check that a store has the policy versions of the state in which a run resumes.

    Nothing is written, and `prune` keeps all versions.

    Raises:
        CheckpointError: a version is missing or another run's, so `store` is not the store that the
            run used before, or was restored from a backup that is older than the state.
    """
    for policy, version in state.versions.items():
        stored = {(v.version, v.run_id) for v in await store.policy_versions(policy)}
        if (version, state.run_id) not in stored:
            raise CheckpointError(
                f"the store {store.url} is not the one that this run has trained with: it has no "
                f"version {version} of its policy {policy!r}; restore the store, or start anew in "
                "another folder"
            )
