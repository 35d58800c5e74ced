"""Train the SQL agent: `train_sql_agent.py MODEL [--active-agent REGEX]`.

Only the import differs from the original.
"""

from __future__ import annotations

import argparse
from copy import deepcopy
from typing import Any, Dict, Optional  # noqa: UP035 - as scripts of then have it

import pyarrow.parquet as parquet  # type: ignore[import-untyped]
from sql_agent import LitSQLAgent  # type: ignore[import-not-found]

import lightspan_agl as agl

RL_TRAINING_CONFIG: Dict[str, Any] = {  # noqa: UP006
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {
        "train_files": "data/train_spider.parquet",
        "val_files": "data/test_dev_500.parquet",
        "train_batch_size": 32,
        "max_prompt_length": 4096,
        "max_response_length": 2048,
    },
    "actor_rollout_ref": {
        "rollout": {"n": 4, "multi_turn": {"format": "hermes"}, "name": "vllm"},
        "actor": {"ppo_mini_batch_size": 32, "optim": {"lr": 1e-6}, "use_kl_loss": False},
        "model": {"path": "Qwen/Qwen2.5-Coder-1.5B-Instruct"},
    },
    "trainer": {"logger": ["console", "wandb"], "test_freq": 32, "total_epochs": 2},
}


def config_train_tiny(model: str, format: str) -> Dict[str, Any]:  # noqa: UP006
    """Return the configuration of a short run for tests."""
    config = deepcopy(RL_TRAINING_CONFIG)
    config["actor_rollout_ref"]["rollout"]["multi_turn"]["format"] = format
    config["actor_rollout_ref"]["model"]["path"] = model
    config["actor_rollout_ref"]["actor"]["optim"]["lr"] = 1e-3
    config["data"]["train_batch_size"] = 2
    config["data"]["max_prompt_length"] = 500
    config["data"]["max_response_length"] = 12
    config["trainer"]["total_epochs"] = 1
    config["trainer"]["total_training_steps"] = 2
    return config


def train(config: Dict[str, Any], active_agent: Optional[str]) -> None:  # noqa: UP006, UP045
    """Train the SQL agent with the given configuration."""
    agent = LitSQLAgent()
    algorithm = agl.VERL(config)
    trainer = agl.Trainer(n_runners=10, algorithm=algorithm, adapter={"agent_match": active_agent})
    print("Adapter agent match acknowledged:", trainer.adapter.agent_match)

    train_data = parquet.read_table(config["data"]["train_files"]).to_pylist()
    val_data = parquet.read_table(config["data"]["val_files"]).to_pylist()
    trainer.fit(agent, train_dataset=train_data, val_dataset=val_data)


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--format", default="hermes")
    parser.add_argument("--active-agent", type=str)
    args = parser.parse_args()
    train(config_train_tiny(args.model, args.format), args.active_agent)


if __name__ == "__main__":
    main()
