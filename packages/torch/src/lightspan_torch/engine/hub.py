"""Locate models: in a folder, on the Hugging Face hub, or in the hub's cache. Imports no torch.

The hub's client sends `HF_TOKEN` (or the token of `hf auth login`) and honours `HF_ENDPOINT`,
`HF_HOME` and `HF_HUB_OFFLINE`. This module never reads, stores or prints a token.

A model is fetched into the cache and loaded from there. This module first makes one request to the
hub, with a timeout, and uses the cache alone if the request fails. transformers would retry for
each file, for half a minute each time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from lightspan.errors import ModelError

TIMEOUT_S: Final = 10.0
"""Seconds to wait for the hub's answer about a model."""

Part = Literal["tokenizer", "weights"]

_PATTERNS: Final[Mapping[Part, tuple[str, ...]]] = {
    "tokenizer": ("*.json", "*.txt", "*.model", "*.jinja"),
    "weights": ("config.json", "generation_config.json", "model*.safetensors*"),
}
"""File patterns of each part. Each part includes the model's configuration."""
_REQUIRED: Final[Mapping[Part, str]] = {"tokenizer": "tokenizer*", "weights": "model*.safetensors"}
_DESCRIPTIONS: Final[Mapping[Part, str]] = {
    "tokenizer": "tokenizer and configuration",
    "weights": "weights",
}
_IGNORED: Final = ("original/*", "onnx/*", "coreml/*")
"""Patterns of files not fetched: copies of the weights for other programs."""


class Origin(NamedTuple):
    """The place from which a model is loaded."""

    name: str
    """The model as the user named it: a folder or a name on the hub."""
    folder: Path
    """The model's folder, or its snapshot in the hub's cache."""
    cached_only: bool = False
    """Whether the hub could not be used. The files in the cache may then be incomplete."""


def locate(model: str | Path, part: Part) -> Origin:
    """Return the folder of a model; fetch the files first if the model is on the hub.

    Args:
        model: folder, or name on the hub.
        part: which files are needed.

    Raises:
        ModelError: `model` is a folder without a model, or neither the hub nor its cache has it.
    """
    name = check_model_path(model)
    return Origin(name, Path(name)) if Path(name).is_dir() else _on_hub(name, part)


def check_model_path(model: str | Path) -> str:
    """Return `model` as text: its name on the hub, or the path of an existing model folder.

    Raises:
        ModelError: `model` looks like a path but is no folder with a `config.json`.
    """
    name = str(model)
    path = Path(name).expanduser()
    looks_local = isinstance(model, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1
    if not (looks_local or path.is_dir()):
        return name
    if not path.is_dir():
        raise ModelError(f"the model folder {name} does not exist")
    if is_adapter(path):
        raise ModelError(
            f"the folder {name} holds a LoRA adapter, not a model: merge it with its base model "
            "first (lightspan_torch.learner.policy_model.merge_adapter)"
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"the folder {name} is not a model: it has no config.json")
    return str(path)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder contains a PEFT adapter (LoRA weights) without its base model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def cached_folder(name: str) -> Path | None:
    """Return the folder of a hub model in the cache; None if the model is not cached.

    The folder may lack files. The network is not used.
    """
    config = _in_cache(name, "config.json")
    return None if config is None else config.parent


def cannot_load(what: str, origin: Origin, error: BaseException) -> ModelError:
    """Return a `ModelError` for a part of a model that cannot be loaded from `origin`.

    Args:
        what: name of the part, such as "tokenizer".
        origin: where the part was loaded from.
        error: why loading failed.
    """
    where, advice = "as the Hugging Face hub has it", ""
    if Path(origin.name) == origin.folder:
        where = "from its folder"
    elif origin.cached_only:
        where = f"from the hub's cache {_cache()}, as the hub cannot be reached"
        advice = ". " + _FETCH_ELSEWHERE.format(name=origin.name)
    return ModelError(f"cannot load the {what} of {origin.name} {where}: {_reason(error)}{advice}")


def _on_hub(name: str, part: Part) -> Origin:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(name, timeout=TIMEOUT_S, files_metadata=True)
    except HFValidationError as error:
        raise ModelError(
            f"{name!r} is neither a folder nor a model's name on the hub: {error}"
        ) from error
    except OfflineModeIsEnabled as error:
        return _cached(name, part, "HF_HUB_OFFLINE is set", error)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status < 500 and status != 429:
            raise _cannot_fetch(part, name, _http_reason(name, error)) from error
        return _cached(name, part, f"{_endpoint()} answered {status}", error)
    except Exception as error:  # the exception type depends on the client's HTTP library
        return _cached(name, part, f"{_endpoint()} cannot be reached ({_reason(error)})", error)
    if part == "weights" and not sys.stderr.isatty():  # on a terminal the client shows progress
        _print_download(name, info)
    try:
        folder = snapshot_download(
            name, allow_patterns=list(_PATTERNS[part]), ignore_patterns=list(_IGNORED)
        )
    except Exception as error:
        raise _cannot_fetch(part, name, _http_reason(name, error)) from error
    return Origin(name, Path(folder))


def _cached(name: str, part: Part, reason: str, error: BaseException) -> Origin:
    """Return a model's files in the local cache, for when the hub cannot be used.

    Args:
        name: name of the model on the hub.
        part: which files are needed.
        reason: why the hub cannot be used, for the error message.
        error: the hub's error.

    Raises:
        ModelError: the cache lacks the files of `part`.
    """
    config = _in_cache(name, "config.json")
    if config is not None and any(config.parent.glob(_REQUIRED[part])):
        return Origin(name, config.parent, cached_only=True)
    advice = _FETCH_ELSEWHERE.format(name=name)
    reason = f"{reason}, and the cache {_cache()} does not hold them. {advice}"
    raise _cannot_fetch(part, name, reason) from error


def _cannot_fetch(part: Part, name: str, reason: str) -> ModelError:
    what = _DESCRIPTIONS[part]
    return ModelError(f"cannot fetch the {what} of {name} from the Hugging Face hub: {reason}")


_FETCH_ELSEWHERE: Final = (
    "Fetch it where there is a network (`hf download {name} --local-dir FOLDER`) and give that "
    "folder as the model"
)


def _http_reason(name: str, error: BaseException | None) -> str:
    """Return the hub's error and the advice on it, such as to set `HF_TOKEN`."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    assert error is not None
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, GatedRepoError):
            return (
                f"it is gated. Accept its licence at https://huggingface.co/{name} with your "
                f"account, then {_set_token()}"
            )
        if isinstance(link, RepositoryNotFoundError):
            return (
                f"there is no such model, or it is private. Check the name at "
                f"https://huggingface.co/{name}; if it is private, {_set_token()}"
            )
        if isinstance(link, HfHubHTTPError) and link.response.status_code in (401, 403):
            return f"access was refused ({link.response.status_code}): {_set_token()}"
        link = link.__cause__ or link.__context__
    return _reason(error)


def _set_token() -> str:
    from huggingface_hub import get_token

    if get_token() is None:
        return "set HF_TOKEN to an access token of it (none is set)"
    return "set HF_TOKEN to a token that may read it (the one that is set may not)"


def _print_download(name: str, info: Any) -> None:
    """Print the total size of the weights that must be fetched, if the hub states the sizes."""
    missing = [
        file.size
        for file in info.siblings or ()
        if fnmatch(file.rfilename, "model*.safetensors") and _in_cache(name, file.rfilename) is None
    ]
    if missing and None not in missing:
        gib = f"{sum(missing) / 2**30:.1f} GiB"
        print(f"fetching the weights of {name} ({gib}) from {_endpoint()}", file=sys.stderr)


def _in_cache(name: str, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:  # not a valid name on the hub
        return None
    return Path(cached) if isinstance(cached, str) else None  # or a marker that it does not exist


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:600] or type(error).__name__


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE
