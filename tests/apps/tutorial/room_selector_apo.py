"""Learn the agent's prompt: `room_selector_apo.py`. Only the import differs from the original."""

from __future__ import annotations

import logging

from openai import AsyncOpenAI
from room_selector import (  # type: ignore[import-not-found]
    RoomTask,
    load_train_val_dataset,
    prompt_template_baseline,
    room_selector,
)

from lightspan_agl import Trainer, setup_logging
from lightspan_agl.adapter import TraceToMessages
from lightspan_agl.algorithm.apo import APO


def setup_apo_logger(file_path: str = "apo.log") -> None:
    """Write what the algorithm logs into a file, too."""
    file_handler = logging.FileHandler(file_path)
    file_handler.setLevel(logging.INFO)
    file_handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
    logging.getLogger("agentlightning.algorithm.apo").addHandler(file_handler)


def main() -> None:
    setup_logging()
    setup_apo_logger()
    openai_client = AsyncOpenAI()
    algo = APO[RoomTask](
        openai_client,
        val_batch_size=4,
        gradient_batch_size=2,
        beam_width=2,
        branch_factor=2,
        beam_rounds=2,
        _poml_trace=True,
    )
    trainer = Trainer(
        algorithm=algo,
        n_runners=4,
        initial_resources={"prompt_template": prompt_template_baseline()},
        adapter=TraceToMessages(),
    )
    dataset_train, dataset_val = load_train_val_dataset()
    trainer.fit(agent=room_selector, train_dataset=dataset_train, val_dataset=dataset_val)
    best = algo.get_best_prompt()
    print(f"best prompt ({best.engine}): {best.template}")


if __name__ == "__main__":
    main()
