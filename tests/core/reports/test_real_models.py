"""docs/real-models.md: its table is the forecast's, its commands and settings exist.

`python -m tests.core.reports.test_real_models` prints the table anew.
"""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightspan.engines.transformers import BLOCK_TOKENS, GPU_CACHE_TOKENS
from lightspan.gateway.tools import PARSERS
from lightspan.learners import LoRA, Optimizer
from lightspan.learners.budgets import TOKEN_BUDGETS
from lightspan.learners.models import default_dtype
from lightspan.reports.forecast import (
    MemoryInputs,
    ModelShape,
    PolicySize,
    memory_forecast,
    shape_of_config,
)

ROOT = Path(__file__).parents[3]
DOC = ROOT / "docs" / "real-models.md"
GPUS = (16, 24, 40, 48, 80, 141)
PASSES = (2048, 4096, 8192)
TOLERANCE = 0.1
"""How far the table may be from the forecast: estimates are shown in whole GiB."""

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


def shape(name: str) -> ModelShape:
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
    return shape_of_config(config, name)


def need(model: ModelShape, lora: LoRA | None, tokens: int) -> float:
    """GiB on the GPU at the peak."""
    kept = default_dtype("cuda", lora).itemsize
    forecast = memory_forecast(
        MemoryInputs(
            policies={"policy": PolicySize(shape=model, lora=lora, weight_bytes=kept)},
            base=None,
            device="cuda",
            optimizer=Optimizer(),
            cache_tokens=GPU_CACHE_TOKENS,
            microbatch_tokens=tokens,
            trained_share=0.25,
            process_bytes=0,
        )
    )
    assert forecast.device_bytes is not None
    return forecast.device_bytes / 2**30


def cell(gib: float) -> str:
    fits = [size for size in GPUS if gib * 1.1 + 1 <= size]
    return f"{gib:.0f} GiB: " + (f"{fits[0]} GB" if fits else "none")


def table() -> str:
    """The table as Markdown."""
    columns = "".join(f" {tokens:,} tokens |" for tokens in PASSES)
    lines = [f"| model | |{columns}", "|---|---|" + "---|" * len(PASSES)]
    for name in MODELS:
        model = shape(name)
        for lora in (None, LoRA(rank=16)):
            cells = "".join(f" {cell(need(model, lora, tokens))} |" for tokens in PASSES)
            lines.append(f"| {name} | {'LoRA' if lora else 'full'} |{cells}")
    return "\n".join(lines)


def _rows(markdown: str) -> dict[tuple[str, str], list[tuple[float, str]]]:
    found = {}
    for line in markdown.splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if parts[0] in MODELS:
            cells = [re.fullmatch(r"(\d+) GiB: (.+)", part) for part in parts[2:]]
            found[parts[0], parts[1]] = [(float(c[1]), c[2]) for c in cells if c is not None]
    return found


def test_the_table_is_what_the_forecast_says() -> None:
    written, computed = _rows(DOC.read_text()), _rows(table())
    assert written.keys() == computed.keys()
    for key, cells in computed.items():
        for (shown, gpu), (expected, _) in zip(written[key], cells, strict=True):
            fresh = f"print the table anew: python -m {__spec__.name if __spec__ else __name__}"
            assert shown == pytest.approx(expected, rel=TOLERANCE, abs=0.6), (key, fresh)
            fits = [f"{size} GB" for size in GPUS if (shown + 0.5) * 1.1 + 1 <= size]
            near = [f"{size} GB" for size in GPUS if (shown - 0.5) * 1.1 + 1 <= size]
            assert gpu in {(fits or ["none"])[0], (near or ["none"])[0]}, key


def test_parameters_are_the_published_models() -> None:
    """In billions, as their model cards say: the sizes above are theirs."""
    published = {"Qwen2.5 0.5B": 0.49, "Qwen2.5 1.5B": 1.54, "Qwen2.5 3B": 3.09}
    published |= {"Qwen2.5 7B": 7.61, "Llama 3.2 1B": 1.23, "Llama 3.2 3B": 3.21}
    published["Llama 3.1 8B"] = 8.03
    for name, billions in published.items():
        assert shape(name).parameters / 1e9 == pytest.approx(billions, abs=0.011), name


def test_the_commands_are_understood() -> None:
    [block] = re.findall(r"```sh\n(.*?)```", DOC.read_text(), re.DOTALL)
    program = SimpleNamespace(**runpy.run_path(str(ROOT / "examples/sql/train.py")))
    for line in block.strip().splitlines():
        python, script, *arguments = shlex.split(line)
        assert (python, script) == ("python", "examples/sql/train.py")
        options = program.EXAMPLE.parser("").parse_args(arguments)
        assert options.device == "cuda"
        assert options.model.count("/") == 1
    assert program.EXAMPLE.parser("").parse_args(["--dev"]).dev


def test_what_the_page_says_of_settings() -> None:
    text = DOC.read_text()
    for parser in PARSERS:
        assert f"| `{parser}` |" in text
    assert TOKEN_BUDGETS["cuda"] == 4096
    assert "| 4,096 tokens in one pass |" in text
    assert GPU_CACHE_TOKENS // BLOCK_TOKENS == 2048
    assert "keys and values | 2,048 |" in text
    assert f"with {GPU_CACHE_TOKENS:,} tokens of cache" in text


if __name__ == "__main__":
    print(table())
