"""A model's folder, as Hugging Face has it, served as if it were a run of one policy for all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from lightspan.errors import ConfigError, ModelError
from lightspan.schema.routing import BASE_POLICY, Route, Routing, Target
from lightspan.training.manifest import ServedPolicy, ServedRun
from lightspan_torch.engine.hub import check_model_path, is_adapter

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
FALLBACK: Final = "model"
"""What the model is called where its folder's name could be misread."""


def is_model_folder(folder: Path) -> bool:
    """Whether the folder says that it is a model: its configuration does, and a run's does not."""
    config = _config(folder)
    return "model_type" in config or "architectures" in config


def served_model(folder: Path) -> ServedRun:
    """One policy, called as the folder is, that answers every agent.

    Raises:
        ModelError: it lacks weights, a tokenizer or a chat template.
    """
    source = check_model_path(folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"the model folder {folder} has no weights that are loaded here (*.safetensors; "
            "pickles such as pytorch_model.bin are never read): save the model with "
            "save_pretrained"
        )
    from lightspan_torch.engine.tokenizer import load_tokenizer

    load_tokenizer(source).render([{"role": "user", "content": "Hello"}])  # has it a template?
    name = _name(folder)
    return ServedRun(
        policies={name: ServedPolicy(folder=".", model=source)},
        base_model=source,
        routing=Routing(default=Target(route=Route.POLICY, policy=name)),
    )


def neither(folder: Path) -> ConfigError:
    """What to say of a path that is neither a run nor a model."""
    if is_adapter(folder):
        return ConfigError(
            f"{folder} holds a LoRA adapter, which is no run of lightspan and no model: serve the "
            "run that it was trained in, or merge it (`lightspan export RUN model --merge -o "
            "FOLDER`) and serve that"
        )
    if not folder.is_dir():
        return ConfigError(
            f"{folder} is no run of lightspan and no model: there is no such folder (a model of "
            "the Hugging Face hub is served from one: `hf download NAME --local-dir FOLDER`)"
        )
    return ConfigError(f"{folder} is no run of lightspan and no model: it has no config.json")


def _name(folder: Path) -> str:
    name = folder.resolve().name
    return name if _NAME.fullmatch(name) and name != BASE_POLICY else FALLBACK


def _config(folder: Path) -> dict[str, Any]:
    """What `config.json` says; nothing if it cannot be read, which is said elsewhere."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
