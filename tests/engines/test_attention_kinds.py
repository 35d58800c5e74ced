"""Test the embedded engine with other kinds of attention: exact log-probabilities, or a refusal.

The models are random, with sliding windows of 16 tokens and prompts of 40 to 67.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightspan.errors import ModelError
from lightspan_testing.engine_suite import TOLERANCE, generate, of_tokens, reference
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine

SHAPE = {
    "vocab_size": 405,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 16}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
EXACT: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": WINDOW,
    "Qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "Gemma2": {**WINDOW, "head_dim": 16},  # capped scores
    "Gemma3Text": {**WINDOW, "head_dim": 16, "num_hidden_layers": 6},
    "GptOss": {**WINDOW, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "DeepseekV3": LATENT,  # keys and values of different sizes
}
REFUSED: dict[str, dict[str, Any]] = {
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
    "Qwen3Next": LINEAR,
    "Mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TransformersTokenizer:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("kinds") / "model"
    return load_tokenizer(tiny_model(Path(folder), seed=1, context=512))


def make_model(kind: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **options})
    # capped scores and sinks are exact in the plain model with this implementation alone
    plain = {"attn_implementation": "eager"} if kind in ("Gemma2", "GptOss") else {}
    return transformers.AutoModelForCausalLM.from_config(config, **plain).eval()


@pytest.mark.parametrize("kind", EXACT)
async def test_logprobs_are_exact(kind: str, tokenizer: TransformersTokenizer) -> None:
    model = make_model(kind, EXACT[kind])
    engine = TransformersEngine({"writer": model}, tokenizers={"writer": tokenizer}, seed=0)
    await engine.start()
    rng = random.Random(0)
    stem = [rng.randrange(5, 400) for _ in range(40)]
    prompts = [stem + [rng.randrange(5, 400) for _ in range(3 * n)] for n in range(10)]
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
    model = make_model(kind, REFUSED[kind])
    with pytest.raises(ModelError, match=rf"{kind}\w+ cannot be served .*engine=VLLM"):
        TransformersEngine({"writer": model}, tokenizers={"writer": tokenizer})


def test_a_layer_with_a_limit_that_its_attention_is_not_told_is_refused(
    tokenizer: TransformersTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts as short as those of the check compute alike with and without the limit."""
    model = make_model("Llama", {})
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ModelError, match=r"layer 1 \(chunked_attention\) attends to fewer tokens"):
        TransformersEngine({"writer": model}, tokenizers={"writer": tokenizer})


def test_logits_that_depend_on_the_pieces_are_refused(tokenizer: TransformersTokenizer) -> None:
    """A layer mixes tokens outside its attention, so no argument is missing and nothing raises."""
    model = make_model("Llama", {})
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: output.cumsum(1))
    with pytest.raises(ModelError, match=r"its logits differ by .*engine=VLLM"):
        TransformersEngine({"writer": model}, tokenizers={"writer": tokenizer})
