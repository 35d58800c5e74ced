"""Find and open the tokenizer of a run, to decode its tokens without its model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

FILE: Final = "tokenizer.json"


def find_tokenizer(run: Path, config: Mapping[str, Any]) -> Path | None:
    """Return the path of the tokenizer of a run; None if there is none on this machine.

    The run's own model exists only at its end. Before, it is that of the starting weights.
    """
    return next((path for path in _candidates(run, config) if path.is_file()), None)


def _candidates(run: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    yield run / "model" / FILE
    yield from sorted((run / "model").glob(f"*/{FILE}"))  # a folder for each of several policies
    name = config.get("model")
    if not isinstance(name, str) or not name:
        return
    yield Path(name) / FILE
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    yield from sorted((cache / f"models--{name.replace('/', '--')}").glob(f"snapshots/*/{FILE}"))


def open_decoder(run: Path, config: Mapping[str, Any]) -> Callable[[str, Sequence[int]], str]:
    """Return a function of a policy and token ids that returns their text, with special tokens.

    If the tokenizer is not on this machine, or the package `tokenizers` is not installed, the text
    is that of the ids as a list.
    """
    path = find_tokenizer(run, config)
    if path is None or importlib.util.find_spec("tokenizers") is None:
        return lambda policy, ids: str(list(ids))
    import tokenizers

    tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
    return lambda policy, ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
