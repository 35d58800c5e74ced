"""Hugging Face models, which `lightspan serve` serves like a run with one policy.

The policy answers the calls of all agents.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

from lightspan.errors import ConfigError, ModelError
from lightspan.schema.routing import BASE_POLICY, Route, Routing, Target
from lightspan.training.manifest import ServedPolicy, ServedRun
from lightspan_torch.engine.hub import check_model_path, is_adapter

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
FALLBACK: Final = "model"
"""Name of the model if its folder's name is not a valid model name."""


def is_model_folder(folder: Path) -> bool:
    """Return whether the folder's `config.json` is that of a model."""
    config = _config(folder)
    return "model_type" in config or "architectures" in config


def served_model(folder: Path) -> ServedRun:
    """Describe the model in `folder` as a run with one policy that answers every agent.

    The policy is named after the folder.

    Raises:
        ModelError: the model lacks weights, a tokenizer or a chat template.
    """
    source = check_model_path(folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"the model folder {folder} has no weights in *.safetensors (pickles such as "
            "pytorch_model.bin are never read): save the model with save_pretrained"
        )
    from lightspan_torch.engine.tokenizer import load_tokenizer

    load_tokenizer(source).render([{"role": "user", "content": "Hello"}])  # check the template
    name = _name(folder)
    return ServedRun(
        policies={name: ServedPolicy(folder=".", model=source)},
        base_model=source,
        routing=Routing(default=Target(route=Route.POLICY, policy=name)),
    )


def not_servable(folder: Path) -> ConfigError:
    """Return the error for a path that is neither a run nor a model."""
    if is_adapter(folder):
        return ConfigError(
            f"{folder} has a LoRA adapter, which is no run of lightspan and no model: serve the "
            "run in which it was trained, or merge it (`lightspan export RUN model --merge -o "
            "FOLDER`) and serve that"
        )
    if not folder.is_dir():
        return ConfigError(
            f"{folder} is no run of lightspan and no model: there is no such folder (a model of "
            "the Hugging Face hub is served from one: `hf download NAME --local-dir FOLDER`)"
        )
    return ConfigError(f"{folder} is no run of lightspan and no model: it has no config.json")


def _name(folder: Path) -> str:
    name = Path(os.path.abspath(folder)).name  # not that of a link's target
    return name if _NAME.fullmatch(name) and name != BASE_POLICY else FALLBACK


def _config(folder: Path) -> dict[str, Any]:
    """Return `config.json`; empty if it is missing or invalid."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
