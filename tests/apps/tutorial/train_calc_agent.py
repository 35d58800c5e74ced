"""Train the calculator agent: `train_calc_agent.py MODEL`. Only the import differs.

The options and their handling are those of the original's script.
"""

from __future__ import annotations

import argparse
from typing import Any, Dict, Optional  # noqa: UP035 - as scripts of then have it

import pyarrow.parquet as parquet  # type: ignore[import-untyped]
from calc_agent import MathProblem, calc_agent  # type: ignore[import-not-found]

import lightspan_agl as agl
from lightspan_agl.env_var import LightningEnvVar, resolve_bool_env_var, resolve_str_env_var


def verl_default_config() -> Dict[str, Any]:  # noqa: UP006
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 2, "max_prompt_length": 480, "max_response_length": 8},
        "actor_rollout_ref": {
            "rollout": {
                "tensor_model_parallel_size": 1,
                "n": 4,
                "log_prob_micro_batch_size_per_gpu": 4,
                "multi_turn": {"format": "hermes"},
                "name": "vllm",
                "gpu_memory_utilization": 0.6,
                "engine_kwargs": {
                    "vllm": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
                },
            },
            "actor": {
                "ppo_mini_batch_size": 2,
                "ppo_micro_batch_size_per_gpu": 4,
                "optim": {"lr": 1e-3},
                "use_kl_loss": False,
                "kl_loss_coef": 0.0,
                "entropy_coeff": 0,
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.3,
                "fsdp_config": {"param_offload": True, "optimizer_offload": True},
            },
            "ref": {"fsdp_config": {"param_offload": True}},
            "model": {"use_remove_padding": True, "enable_gradient_checkpointing": True},
        },
        "trainer": {
            "n_gpus_per_node": 1,
            "val_before_train": True,
            "critic_warmup": 0,
            "logger": ["console"],
            "project_name": "AgentLightning",
            "experiment_name": "calc_x",
            "nnodes": 1,
            "test_freq": 32,
            "total_epochs": 1,
            "total_training_steps": 1,
        },
    }


def train(*, train_file: str, val_file: str, model: str, llm_proxy: bool, n_runners: int) -> None:
    train_dataset: agl.Dataset[MathProblem] = parquet.read_table(train_file).to_pylist()
    val_dataset: agl.Dataset[MathProblem] = parquet.read_table(val_file).to_pylist()
    config = verl_default_config()
    config["actor_rollout_ref"]["model"]["path"] = model
    if resolve_str_env_var(LightningEnvVar.AGL_CURRENT_ROLE) != "runner":
        print("this process trains")
    algorithm = agl.VERL(config)
    store: Optional[agl.LightningStore] = None  # noqa: UP045
    if llm_proxy:
        tracer = agl.OtelTracer()
        adapter = agl.LlmProxyTraceToTriplet()
        trainer = agl.Trainer(
            algorithm=algorithm, n_runners=n_runners, store=store, tracer=tracer, adapter=adapter
        )
    else:
        trainer = agl.Trainer(algorithm=algorithm, n_runners=n_runners, store=store)
    trainer.fit(calc_agent, train_dataset, val_dataset=val_dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-file", type=str, default="data/train.parquet")
    parser.add_argument("--val-file", type=str, default="data/test.parquet")
    parser.add_argument("--model", type=str, required=True)
    parser.add_argument("--llm-proxy", action="store_true")
    parser.add_argument("--n-runners", type=int, default=10)
    args = parser.parse_args()
    if resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE, fallback=True):
        print("the store is managed")
    agl.setup_logging("INFO")
    train(**vars(args))


if __name__ == "__main__":
    main()
