"""Test the embedded engine with other kinds of attention: exact log-probabilities, or a refusal.

Sliding windows are 16 tokens, prompts 40 to 67. `benchmarks/families.py` has all families.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.errors import ModelError
from lightspan_testing.engine_suite import TOLERANCE, generate, of_tokens, reference
from lightspan_testing.families import make_family
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine

EXACT = [
    "Llama", "Qwen3", "Mistral", "Qwen2",
    "Gemma2",  # capped scores
    "Gemma3Text",
    "GptOss",  # sinks
    "DeepseekV3",  # keys and values of different sizes
    "Ministral3",  # queries scaled by their positions
]  # fmt: skip
REFUSED = ["Bloom", "Falcon", "Qwen3Next", "Mamba2"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TransformersTokenizer:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("kinds") / "model"
    return load_tokenizer(tiny_model(Path(folder), seed=1, context=512))


def make_model(kind: str) -> Any:
    return make_family(kind, 405)


@pytest.mark.parametrize("kind", EXACT)
async def test_logprobs_are_exact(kind: str, tokenizer: TransformersTokenizer) -> None:
    model = make_model(kind)
    engine = TransformersEngine({"writer": model}, tokenizers={"writer": tokenizer}, seed=0)
    await check_exact(engine, model, stem=40)


async def check_exact(engine: TransformersEngine, model: Any, stem: int) -> None:
    """Sample for ten prompts with a common stem, and compare with a plain forward pass."""
    await engine.start()
    rng = random.Random(0)
    common = [rng.randrange(5, 400) for _ in range(stem)]
    prompts = [common + [rng.randrange(5, 400) for _ in range(3 * n)] for n in range(10)]
    answers = await asyncio.gather(
        *(
            generate(engine, prompt, request_id=str(n), max_tokens=12)
            for n, prompt in enumerate(prompts)
        )
    )
    await engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = of_tokens(reference(model, prompt, answer.ids), answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_computed_in_pieces_is_refused(
    kind: str, tokenizer: TransformersTokenizer
) -> None:
    model = make_model(kind)
    with pytest.raises(ModelError, match=rf"{kind}\w+ cannot be served .*engine=VLLM"):
        TransformersEngine({"writer": model}, tokenizers={"writer": tokenizer})


def test_a_layer_with_a_limit_that_its_attention_is_not_told_is_refused(
    tokenizer: TransformersTokenizer,
) -> None:
    """Prompts as short as those of the check compute alike with and without the limit."""
    model = make_model("Llama")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ModelError, match=r"layer 1 \(chunked_attention\) attends to fewer tokens"):
        TransformersEngine({"writer": model}, tokenizers={"writer": tokenizer})


def test_logits_that_depend_on_the_pieces_are_refused(tokenizer: TransformersTokenizer) -> None:
    """A layer mixes tokens outside its attention, so no argument is missing and nothing raises."""
    model = make_model("Llama")
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: output.cumsum(1))
    with pytest.raises(ModelError, match=r"its logits differ by .*engine=VLLM"):
        TransformersEngine({"writer": model}, tokenizers={"writer": tokenizer})


def test_a_mask_of_the_model_s_own_is_refused(tokenizer: TransformersTokenizer) -> None:
    """It may hide only what is far away, which the short prompts of the check do not show."""
    model = make_model("Llama")

    def add_mask(_: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        length = options["hidden_states"].shape[1]
        return args, {
            **options,
            "attention_mask": torch.ones(length, length).tril()[None, None].log(),
        }

    model.model.layers[1].self_attn.register_forward_pre_hook(add_mask, with_kwargs=True)
    with pytest.raises(ModelError, match="changes its attention by a mask or bias of its own"):
        TransformersEngine({"writer": model}, tokenizers={"writer": tokenizer})


async def test_positions_that_depend_on_the_longest_request(
    tokenizer: TransformersTokenizer,
) -> None:
    """Phi-3's long form scales the positions of all requests of a batch by the longest one."""
    model = make_model("Phi3 longrope")
    with pytest.raises(ModelError, match=r"over 64 tokens .*context_length=64\)"):
        TransformersEngine({"writer": model}, tokenizers={"writer": tokenizer})
    engine = TransformersEngine(
        {"writer": model}, tokenizers={"writer": tokenizer}, context_length=64, seed=0
    )
    await check_exact(engine, model, stem=24)
