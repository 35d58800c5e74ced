"""Test that the small model is a usual transformers folder, whose chat template only appends."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightspan_examples.small_model import build_model
from sql_example.training import chats

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_model(directory, chats(600, 0), seed=1)
    return directory


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_the_model_loads_and_is_small(folder: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert round(size / 1e6, 1) == 0.8, "as the READMEs say"
    assert len(tokenizer) == model.config.vocab_size == 896
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_the_seed_decides_the_weights(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = torch.random.get_rng_state()
    for seed in (1, 2):
        build_model(tmp_path / str(seed), chats(600, 0), seed=seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = {
        path: (path / "model.safetensors").read_bytes()
        for path in (folder, tmp_path / "1", tmp_path / "2")
    }
    assert weights[folder] == weights[tmp_path / "1"] != weights[tmp_path / "2"]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (tmp_path / "1" / name).read_bytes()
    assert capfd.readouterr().err == ""  # no bar of a library's


def test_the_chat_template_with_tools(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "run", "arguments": {"query": "SELECT 1"}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
    ]
    assert tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False) == (
        "<|im_start|>system\n"
        'Call a function with <tool_call>{"name": ..., "arguments": ...}</tool_call>.\n<tools>\n'
        '{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}\n'
        "</tools><|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "run", "arguments": {"query": "SELECT 1"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "run", "arguments": {"query": "SELECT 1"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
    )


def test_a_longer_conversation_extends_the_shorter_one(tokenizer: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    for tools in (None, TOOLS):
        rendered = [
            tokenizer.apply_chat_template(messages[:count], tools=tools, return_dict=False)
            for count in range(1, 5)
        ]
        for shorter, longer in itertools.pairwise(rendered):
            assert longer[: len(shorter)] == shorter
        prompt = tokenizer.apply_chat_template(
            messages[:1], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert rendered[1][: len(prompt)] == prompt
        assert rendered[1][-2] == tokenizer.eos_token_id
