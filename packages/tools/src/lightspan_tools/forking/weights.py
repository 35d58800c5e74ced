"""Choose which weights of a run answer the continuations of a rollout, and load them.

A run keeps the weights with which it started, its newest checkpoints, and its exported result. If
none of them has the weights that the rollout used, those of the nearest step are taken.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.errors import CheckpointError, ConfigError
from lightspan.lightning.episode import Episode
from lightspan.plugins import load_plugin
from lightspan.protocols.engine import EngineRequest, TokenEngine
from lightspan.protocols.learner import Critic, LearnerRequest, LoRA, Optimizer
from lightspan.schema.routing import BASE_POLICY, Route, Routing
from lightspan.stores.protocol import Store
from lightspan.training import checkpoints
from lightspan.training.backends import check_chat_templates, uses_base
from lightspan.training.folder import RunFolder
from lightspan.training.manifest import KEY, ServedRun

_MANIFEST: Final = "learner.json"
"""File of a checkpoint of the embedded learner; other learners write other files."""
_GIVE_MODEL: Final = "give the model that shall answer (--model NAME_OR_FOLDER)"


class Weights(NamedTuple):
    """The weights that answer, and where they come from."""

    text: str
    """Which weights they are, for the user."""
    is_exact: bool
    """Whether they are the weights that the rollout used."""
    models: Mapping[str, str]
    """Policy → model or folder from which the engine starts; empty if no policy answers."""
    step: int | None
    """Number of training steps behind them; None for a model of the user's choice."""
    versions: Mapping[str, int]
    """Policy → version under which the weights of a checkpoint are served."""
    learner: Path | None = None
    """Learner's part of a checkpoint, which is loaded into `models`; None for none."""


class _Source(NamedTuple):
    """Weights that the run keeps."""

    step: int
    kind: str
    """`start`, `checkpoint` or `export`."""
    path: Path | None = None


def policies_of(routing: Routing) -> list[str]:
    """Return the names of the policies that answer any agent, sorted."""
    routes = (Route.POLICY, Route.SHARED)
    return sorted({target.policy for target in routing.targets if target.route in routes})


async def versions_used(
    store: Store, run_id: str, episode: Episode, policies: Sequence[str]
) -> dict[str, tuple[int, range]]:
    """Return policy → (its version in most of the episode's tokens, the steps that ended with it).

    A step without an update publishes no version. The steps are empty if the store does not know
    the version. Policies without tokens are left out.
    """
    counts: dict[str, Counter[int]] = {}
    for call in episode.calls:
        for version, size in () if call.record is None else call.record.versions:
            counts.setdefault(call.policy, Counter())[version] += size
    used: dict[str, tuple[int, range]] = {}
    for policy in (policy for policy in policies if counts.get(policy)):
        [(version, _)] = counts[policy].most_common(1)
        published = await store.policy_versions(policy)
        steps = {each.version: each.step for each in published if each.run_id == run_id}
        if version not in steps:
            used[policy] = version, range(0)
            continue
        first = steps[version]
        later = [step for each, step in steps.items() if each > version]
        used[policy] = version, range(first, max(first + 1, min(later, default=sys.maxsize)))
    return used


def choose_weights(
    run: RunFolder,
    config: Mapping[str, Any],
    policies: Sequence[str],
    used: Mapping[str, tuple[int, range]],
    model: str | None = None,
) -> Weights:
    """Return the weights for the continuations of a rollout.

    Args:
        run: folder of the run.
        config: settings of the run.
        policies: names of the policies that answer.
        used: what `versions_used` returned for the rollout.
        model: a model to use in place of the run's own weights; None for those.

    Raises:
        CheckpointError: a checkpoint cannot be read.
        ConfigError: the run has several policies and `model` is given, or its starting weights are
            unknown or gone.
    """
    if not policies:
        text = "no weights of this machine: endpoints answer, as in the run"
        return Weights(text, is_exact=True, models={}, step=None, versions={})
    versions = {name: used[name][0] if name in used else 0 for name in policies}
    if model is not None:
        if len(policies) > 1:
            raise ConfigError(
                f"--model {model}: the run has the policies {', '.join(policies)}, and one model "
                "cannot stand for them: leave --model out"
            )
        models = dict.fromkeys(policies, model)
        return Weights(f"{model} (--model)", False, models, None, dict.fromkeys(policies, 0))
    known = [steps for _, steps in used.values() if steps]
    wanted = max((steps.start for steps in known), default=None)
    sources = _sources(run)
    exact = [each for each in sources if known and all(each.step in steps for steps in known)]
    is_exact = bool(exact)
    if exact:
        source = exact[-1]
    elif wanted is None:
        source = sources[-1]
    else:
        source = min(reversed(sources), key=lambda each: abs(each.step - wanted))
    version = ", ".join(f"{name} {number}" for name, number in versions.items() if name in used)
    text = f"{_name(source)}, which the rollout used" if is_exact else _name(source)
    if not is_exact and wanted is not None:
        text += (
            f", the nearest that the run keeps: the rollout used those of step {wanted} "
            f"(version of {version})"
        )
    if not is_exact:
        versions = dict.fromkeys(policies, 0)
    starts = _starting_models(config, run, policies)
    if source.kind == "export":
        served = msgspec.convert((run.read_result() or {})[KEY], ServedRun)
        starts = {name: str(run.path / served.policies[name].folder) for name in policies}
    learner = None if source.kind != "checkpoint" else source.path
    return Weights(text, is_exact, starts, source.step, versions, learner)


def _sources(run: RunFolder) -> list[_Source]:
    """Return the weights that a run keeps, in the order of their steps."""
    sources = [_Source(0, "start")]
    result = run.read_result() or {}
    if result.get(KEY) is not None and run.model.is_dir():
        kept = result.get("kept") or {}
        sources.append(_Source(kept.get("step", result["steps"]), "export", run.model))
    for path in checkpoints.list_checkpoints(run.checkpoints):
        step = checkpoints.load_state(path).step
        if step > 0 and (path / checkpoints.LEARNER / _MANIFEST).is_file():
            sources.append(_Source(step, "checkpoint", path / checkpoints.LEARNER))
    return sorted(sources, key=lambda source: source.step)


def _name(source: _Source) -> str:
    if source.kind == "start":
        return "the starting weights (step 0)"
    where = "the exported model" if source.kind == "export" else "a checkpoint"
    return f"the weights of step {source.step} ({where})"


def _starting_models(
    config: Mapping[str, Any], run: RunFolder, policies: Sequence[str]
) -> dict[str, str]:
    """Return policy → model from which its training started.

    Raises:
        ConfigError: a model is not in the run's settings, or its folder is gone.
    """
    optimize, own = config.get("optimize"), {}
    if isinstance(optimize, Mapping):
        settings = {k: v for k, v in optimize.items() if isinstance(v, Mapping)}
        own = {v.get("name") or k.rpartition("/")[2]: v.get("model") for k, v in settings.items()}
    models: dict[str, str] = {}
    for name in policies:
        model = own.get(name) or config.get("model")
        if not isinstance(model, str) or not model:
            raise ConfigError(
                f"{run.path} does not say from which model policy {name!r} started: {_GIVE_MODEL}"
            )
        if Path(model).is_absolute() and not Path(model).is_dir():
            raise ConfigError(
                f"{model} is gone, the weights from which policy {name!r} of {run.path} started: "
                f"restore them, or {_GIVE_MODEL}"
            )
        models[name] = model
    return models


async def open_engine(
    weights: Weights,
    routing: Routing,
    config: Mapping[str, Any],
    *,
    device: str,
    seed: int,
    folder: Path,
) -> TokenEngine:
    """Return a started engine in this process that serves the weights.

    Args:
        weights: the weights of the policies.
        routing: routing of the run; if it uses them, the starting weights are served too.
        config: settings of the run.
        device: device of the engine, such as `"cpu"`.
        seed: seed of the sampling.
        folder: folder for logs.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ModelError: a model cannot be loaded, or has no chat template.
    """
    models: dict[str, Any] = dict(weights.models)
    adapters = {name: path for name, path in models.items() if _is_adapter(path)}
    if adapters:
        models |= _starting_models(config, RunFolder(folder), list(adapters))
    if uses_base(routing):
        models[BASE_POLICY] = config.get("model") or next(iter(models.values()))
    request = EngineRequest(models=models, lora={}, device=device, seed=seed, folder=folder)
    engine: TokenEngine = await asyncio.to_thread(_build, "engines", "transformers", request)
    check_chat_templates(engine)
    await engine.start()
    if weights.learner is not None:
        request_of = await asyncio.to_thread(_learner_request, weights, device, seed)
        learner = await asyncio.to_thread(_build, "learners", "torch", request_of)
        await asyncio.to_thread(learner.load, weights.learner)
        await learner.publish(engine, weights.versions)
    for name in () if weights.learner is not None else weights.models:
        path = adapters.get(name)
        if path is not None:
            from lightspan_torch.learner.policy_model import load_adapter

            merged = await asyncio.to_thread(load_adapter, path, base=models[name])
            await engine.update(name, merged.state_dict(), weights.versions[name])
    return engine


def _build(kind: str, name: str, request: Any) -> Any:
    return load_plugin(kind, name)().build(request)


def _is_adapter(path: str) -> bool:
    from lightspan_torch.engine.hub import is_adapter

    return Path(path).is_dir() and is_adapter(Path(path))


def _learner_request(weights: Weights, device: str, seed: int) -> LearnerRequest:
    """Return the request for a learner that can load the checkpoint.

    Raises:
        CheckpointError: the checkpoint is not one of the embedded learner.
    """
    assert weights.learner is not None
    path = weights.learner / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
        adapters = {name: entry["lora"] for name, entry in manifest["policies"].items()}
        models = {name: weights.models[name] for name in adapters}
        critic = manifest.get("critic")
        return LearnerRequest(
            models=models,
            lora={n: None if a is None else msgspec.convert(a, LoRA) for n, a in adapters.items()},
            optimizer=msgspec.convert(manifest["optimizer"], Optimizer),
            critic=None if critic is None else msgspec.convert(critic, Critic),
            seed=seed,
            device=device,
        )
    except (OSError, ValueError, LookupError, TypeError, msgspec.ValidationError) as error:
        raise CheckpointError(
            f"{weights.learner} is no checkpoint of the embedded learner ({error}): {_GIVE_MODEL}"
        ) from error
