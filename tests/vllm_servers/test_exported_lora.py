"""Serve an exported LoRA adapter with vLLM, as docs/guides/export.md does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightspan import LoRA
from lightspan_torch.learner.policy_model import TrainedModel

PROMPT = [5, 9, 14, 30, 7, 22]
TOKENS = 8


def test_it_answers_as_the_merged_model_does(
    start: Callable[..., str], served: Path, tmp_path: Path
) -> None:
    trained = TrainedModel(
        str(served), lora=LoRA(rank=8), device="cpu", dtype=torch.float32, seed=0
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained.trainable().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    trained.export(tmp_path / "adapter")
    trained.export(tmp_path / "merged", merge=True)
    expected = _greedy(tmp_path / "merged")
    assert expected[0] != _greedy(served)[0]
    modules = ("--lora-modules", f"writer={tmp_path / 'adapter'}")
    address = start("--enable-lora", *modules, "--max-lora-rank", "8", flags=())
    with openai.OpenAI(base_url=f"{address}/v1", api_key="-") as client:
        answer = client.completions.create(
            model="writer",
            prompt=PROMPT,
            max_tokens=TOKENS,
            temperature=0,
            logprobs=1,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == expected[0]
    assert choice.logprobs.token_logprobs == pytest.approx(expected[1], abs=1e-4)


def _greedy(folder: Path) -> tuple[list[int], list[float]]:
    """Return the likeliest answer of a model to `PROMPT`, and its log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids, logprobs = list(PROMPT), []
    with torch.no_grad():
        for _ in range(TOKENS):
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return ids[len(PROMPT) :], logprobs
