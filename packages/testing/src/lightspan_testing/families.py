"""Tiny random models of the architectures of transformers that people train.

Nothing is downloaded. Windows are 16 tokens, so that short sequences are longer than they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

WINDOW: Final = 16
"""Number of tokens that layers with a sliding window attend to."""
CONTEXT: Final = 512

_SHAPE: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW: Final = {"sliding_window": WINDOW}
_HEADS: Final = {"head_dim": 16}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: Final = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LATENT: Final = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_LINEAR: Final = {
    **_HEADS,
    "initializer_range": 0.1,  # larger weights amplify rounding
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_STATES: Final = {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2}
_HYBRID: Final = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
_SHARED_EXPERTS: Final = {"shared_expert_intermediate_size": 32, **_EXPERTS}

FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "Llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "Llama4Text": {
        **_HEADS,
        **_LOCAL_EXPERTS,
        "intermediate_size_mlp": 128,
        "attention_chunk_size": WINDOW,
        "num_hidden_layers": 4,
    },
    "Qwen2": {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen2Moe": _SHARED_EXPERTS,
    "Qwen3": _HEADS,
    "Qwen3Moe": {**_HEADS, **_EXPERTS},
    "Qwen3Next": {**_LINEAR, **_SHARED_EXPERTS},
    "Qwen3_5Text": _LINEAR,
    "Qwen3_5MoeText": {**_LINEAR, **_SHARED_EXPERTS},
    "Mistral": _WINDOW,
    "Ministral": {**_WINDOW, **_HEADS},
    "Ministral3": {
        **_HEADS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "Mixtral": {**_LOCAL_EXPERTS, **_WINDOW},
    "Gemma": _HEADS,
    "Gemma2": {**_WINDOW, **_HEADS, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "Gemma3Text": {**_WINDOW, **_HEADS, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "Gemma3nText": {
        **_WINDOW,
        **_HEADS,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 405,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": None,
        "intermediate_size": [128] * 5,
    },
    "Gemma4Text": {
        **_WINDOW,
        **_HEADS,
        "global_head_dim": 16,
        "num_hidden_layers": 6,
        "vocab_size_per_layer_input": 405,
        "hidden_size_per_layer_input": 8,
    },
    "Phi": {},
    "Phi3": _WINDOW,
    "Phi3 longrope": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 64,
        },
    },
    "Phimoe": {**_LOCAL_EXPERTS, **_WINDOW},
    "SmolLM3": {"num_hidden_layers": 4},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {**_WINDOW, "num_hidden_layers": 4},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "Granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "GraniteMoe": {**_LOCAL_EXPERTS, "logits_scaling": 2.0},
    "GraniteMoeHybrid": {
        **_HYBRID,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "GptOss": {**_WINDOW, **_HEADS, **_LOCAL_EXPERTS},
    "DeepseekV2": {**_LATENT, "topk_method": "greedy"},
    "DeepseekV3": _LATENT,
    "DeepseekV32": {
        **_LATENT,
        "index_topk": WINDOW,
        "index_n_heads": 32,  # with few heads scores are equal, and which are taken is chance
        "index_head_dim": 16,
    },
    "KimiLinear": {
        **_LATENT,
        "initializer_range": 0.1,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "Glm": _HEADS,
    "Glm4": _HEADS,
    "Glm4Moe": {**_HEADS, **_ROUTED},
    "Glm4MoeLite": _LATENT,
    "Cohere": {"logit_scale": 0.5},
    "Cohere2": {**_WINDOW, "num_hidden_layers": 4, "logit_scale": 0.5},
    "StableLm": {"use_qkv_bias": True},
    "Starcoder2": _WINDOW,
    "Nemotron": {},
    "Exaone4": {**_WINDOW, "num_hidden_layers": 4, "sliding_window_pattern": 4},
    "SeedOss": _HEADS,
    "HunYuanDenseV1": _HEADS,
    "Ernie4_5": _HEADS,
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "MiniMax": {**_LOCAL_EXPERTS, **_HEADS, "block_size": 16},
    "MiniMaxM2": {**_LOCAL_EXPERTS, **_HEADS},
    "MiniCPM3": {**_LATENT, "dim_model_base": 32, "scale_emb": 2, "scale_depth": 1.4},
    "Apertus": {},
    "Arcee": {},
    "NanoChat": {},
    "Dots1": {**_HEADS, **_ROUTED, "n_shared_experts": 1},
    "GPT2": {},
    "GPTBigCode": {},
    "GPTNeo": {
        "num_layers": 2,
        "num_heads": 4,
        "window_size": WINDOW,
        "attention_types": [[["global", "local"], 1]],
    },
    "GPTJ": {"rotary_dim": 8},
    "GPTNeoX": {},
    "CodeGen": {"rotary_dim": 8},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "Falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
    "FalconH1": {**_HYBRID, "mamba_d_ssm": 128, "lm_head_multiplier": 0.5},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
    "Mamba": {"state_size": 16},
    "Mamba2": _STATES,
    "FalconMamba": {"state_size": 16},
    "Jamba": {
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 16,
        "use_mamba_kernels": False,
    },
    "Bamba": {**_HYBRID, "attn_layer_indices": [1]},
    "NemotronH": {
        **_HEADS,
        "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "mlp_hidden_act": "relu2",
    },
    "Lfm2": {"full_attn_idxs": [1]},
    "Lfm2Moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "RecurrentGemma": {"attention_window_size": WINDOW, "num_hidden_layers": 3},
}
"""Name of a configuration class without `Config`, and what is special → its other options."""


def make_family(name: str, vocabulary: int, attention: str = "eager") -> Any:
    """Make a random model of a family in float32, in evaluation mode.

    All its weights are random, also those that begin as zeros or ones.

    Args:
        name: a key of `FAMILIES`.
        vocabulary: number of tokens.
        attention: transformers' implementation. `eager` alone computes capped scores and sinks.

    Returns:
        The model; None if the installed transformers lacks the family.
    """
    import torch
    import transformers

    config_class = getattr(transformers, f"{name.split()[0]}Config", None)
    if config_class is None:
        return None
    config = config_class(**{**_SHAPE, **FAMILIES[name], "vocab_size": vocabulary})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        make: Any = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.float32, attn_implementation=attention)
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return model.eval()
