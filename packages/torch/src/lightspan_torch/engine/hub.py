"""Where a model comes from: a folder, the Hugging Face hub, or the hub's cache. Loads no torch.

The hub's client sends `HF_TOKEN` (or the token of `hf auth login`) by itself and honours
`HF_ENDPOINT`, `HF_HOME` and `HF_HUB_OFFLINE`; no token is read, kept or shown here.

A model is fetched into the cache first and loaded from there. A hub that cannot be reached is asked
once, for a few seconds, and the cache is used: transformers would try again for each file, half a
minute each time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from lightspan.errors import ModelError

TIMEOUT_S: Final = 10.0
"""How long the hub may take to say that it knows a model."""

Part = Literal["tokenizer", "weights"]

_PARTS: Final[Mapping[Part, tuple[str, ...]]] = {
    "tokenizer": ("*.json", "*.txt", "*.model", "*.jinja"),
    "weights": ("config.json", "generation_config.json", "model*.safetensors*"),
}
"""Files that belong to each part; each takes the configuration along."""
_NEEDED: Final[Mapping[Part, str]] = {
    "tokenizer": "tokenizer*",
    "weights": "model*.safetensors",
}
_NEVER: Final = ("original/*", "onnx/*", "coreml/*")
"""The same weights once more, for other programs."""


class Origin(NamedTuple):
    """Where a model is loaded from."""

    name: str
    """Its folder as it was given, or its name on the hub."""
    folder: Path
    """Its folder, or that of the hub's cache."""
    cached_only: bool = False
    """The hub could not be asked; its cache holds the model, or some of it."""


def locate(model: str | Path, part: Part) -> Origin:
    """Find a model; of one on the hub, fetch what is not in the cache yet.

    Raises:
        ModelError: it is not there, or neither the hub nor its cache has it.
    """
    name = check_model_path(model)
    return Origin(name, Path(name)) if Path(name).is_dir() else _on_hub(name, part)


def check_model_path(model: str | Path) -> str:
    """The model's name on the hub, or the path of its folder, which is there.

    Raises:
        ModelError: a path that is not a folder with a `config.json`.
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
    """Whether the folder holds a PEFT adapter, and no model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def cached_folder(name: str) -> Path | None:
    """Where the hub's cache holds a model, or a part of it. Uses no network."""
    config = _in_cache(name, "config.json")
    return None if config is None else config.parent


def cannot_load(what: str, origin: Origin, error: BaseException) -> ModelError:
    """An error that says what could not be loaded, from where, and why."""
    if Path(origin.name) == origin.folder:
        where, advice = "from its folder", ""
    elif origin.cached_only:
        where = f"from the hub's cache {_cache()}, as the hub cannot be reached"
        advice = ". " + _ELSEWHERE.format(name=origin.name)
    else:
        where, advice = "as the Hugging Face hub has it", ""
    return ModelError(f"cannot load the {what} of {origin.name} {where}: {_reason(error)}{advice}")


def _on_hub(name: str, part: Part) -> Origin:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    what = _WHAT[part]
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
            raise _cannot_fetch(what, name, error) from error
        return _cached(name, part, f"{_endpoint()} answered {status}", error)
    except Exception as error:  # the hub's client uses one HTTP library or another: any may raise
        return _cached(name, part, f"{_endpoint()} cannot be reached ({_reason(error)})", error)
    if part == "weights":
        _announce(name, what, _missing_bytes(name, info))
    try:
        return Origin(name, _snapshot(name, part, cached_only=False))
    except Exception as error:
        raise _cannot_fetch(what, name, error) from error


_WHAT: Final[Mapping[Part, str]] = {
    "tokenizer": "tokenizer and configuration",
    "weights": "weights",
}


def _snapshot(name: str, part: Part, *, cached_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    folder: str = snapshot_download(
        name,
        allow_patterns=list(_PARTS[part]),
        ignore_patterns=list(_NEVER),
        local_files_only=cached_only,
    )
    return Path(folder)


def _cached(name: str, part: Part, reason: str, error: BaseException) -> Origin:
    """The part as the cache holds it.

    Raises:
        ModelError: it does not.
    """
    config = _in_cache(name, "config.json")
    if config is not None and any(config.parent.glob(_NEEDED[part])):
        return Origin(name, config.parent, cached_only=True)
    raise ModelError(
        f"cannot fetch the {_WHAT[part]} of {name} from the Hugging Face hub: {reason}, and the "
        f"cache {_cache()} does not hold them. {_ELSEWHERE.format(name=name)}"
    ) from error


def _cannot_fetch(what: str, name: str, error: BaseException) -> ModelError:
    return ModelError(
        f"cannot fetch the {what} of {name} from the Hugging Face hub: {_why(name, error)}"
    )


def _announce(name: str, what: str, size: int | None) -> None:
    """Say what is about to be fetched; on a terminal the hub's client shows its progress itself."""
    if size is not None and not sys.stderr.isatty():
        gib = f"{size / 2**30:.1f} GiB"
        print(f"fetching the {what} of {name} ({gib}) from {_endpoint()}", file=sys.stderr)


_ELSEWHERE: Final = (
    "Fetch it where there is a network (`hf download {name} --local-dir FOLDER`) and give that "
    "folder as the model"
)


def _why(name: str, error: BaseException) -> str:
    """What the hub said, and what to do."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    for link in _chain(error):
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
    return _reason(error)


def _set_token() -> str:
    from huggingface_hub import get_token

    if get_token() is None:
        return "set HF_TOKEN to an access token of it (none is set)"
    return "set HF_TOKEN to a token that may read it (the one that is set may not)"


def _missing_bytes(name: str, info: Any) -> int | None:
    """Bytes of the weights that the cache does not hold; None for none, or if it is unknown."""
    missing = [
        file.size
        for file in info.siblings or ()
        if fnmatch(file.rfilename, "model*.safetensors") and _in_cache(name, file.rfilename) is None
    ]
    return sum(missing) if missing and None not in missing else None


def _in_cache(name: str, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:  # it cannot be the name of a model on the hub
        return None
    return Path(cached) if isinstance(cached, str) else None  # or a mark: the hub has no such file


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:600] or type(error).__name__


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE
