"""Compare the table of docs/guides/gpu.md with the memory estimate.

`python -m tests.reports.test_real_models` prints the table.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lightspan import Torch
from lightspan_torch.engine.parameter_count import ModelSize, size_of_config
from lightspan_torch.engine.transformers import GPU_CACHE_TOKENS

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs/guides/gpu.md"
RANK = 16

# hidden, layers, heads, key-value heads, MLP, vocabulary, tied: of the published configurations
MODELS: dict[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "Qwen2.5 0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151_936, True),
    "Qwen2.5 1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151_936, True),
    "Qwen2.5 3B": ("qwen2", 2048, 36, 16, 2, 11_008, 151_936, True),
    "Qwen2.5 7B": ("qwen2", 3584, 28, 28, 4, 18_944, 152_064, False),
    "Llama 3.2 1B": ("llama", 2048, 16, 32, 8, 8192, 128_256, True),
    "Llama 3.2 3B": ("llama", 3072, 28, 24, 8, 8192, 128_256, True),
    "Llama 3.1 8B": ("llama", 4096, 32, 32, 8, 14_336, 128_256, False),
}


def size_of(name: str) -> ModelSize:
    from transformers import AutoConfig

    family, hidden, layers, heads, key_heads, mlp, vocabulary, tied = MODELS[name]
    config = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
    )
    return size_of_config(config, name)


def need(size: ModelSize, lora: bool) -> float:
    """Return the needed memory on the GPU in GiB, without activations and logits."""
    engine = size.weight_bytes * (size.parameters + GPU_CACHE_TOKENS * size.cache_values)
    adapters = RANK * size.lora_values if lora else 0
    learner = Torch().memory(size.parameters, adapters, device="cuda", reference=False)
    return (engine + sum(learner.values())) / 2**30


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| memory without activations | full weights | LoRA |", "|---|---|---|"]
    for name in MODELS:
        full, lora = (f"{need(size_of(name), each):.0f} GiB" for each in (False, True))
        lines.append(f"| {name} | {full} | {lora} |")
    return "\n".join(lines)


def test_the_table_is_the_estimate() -> None:
    assert table() in DOC.read_text()


def test_parameters_are_the_published_models() -> None:
    """Compare the parameters in billions with the models' cards."""
    published = {"Qwen2.5 0.5B": 0.49, "Qwen2.5 1.5B": 1.54, "Qwen2.5 3B": 3.09}
    published |= {"Qwen2.5 7B": 7.61, "Llama 3.2 1B": 1.23, "Llama 3.2 3B": 3.21}
    published["Llama 3.1 8B"] = 8.03
    for name, billions in published.items():
        assert abs(size_of(name).parameters / 1e9 - billions) <= 0.011, name


if __name__ == "__main__":
    print(table())
