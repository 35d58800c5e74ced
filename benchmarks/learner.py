"""Transitions per CPU-second of one update, against a plain padded torch loop.

250 transitions of about 75 tokens, 20 of them trained, on a random Qwen2 of 0.7 M parameters: what
an iteration of the SQL example trains. The peer is the loop that one would write by hand: batches
of 32 in the given order, padded, an attention mask, logits of all positions, the same loss and
optimiser. Runs alternate, and the best of each is kept.

Run: python benchmarks/learner.py [--transitions 250] [--repeats 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightspan.learners import Optimizer, PolicyLoss
from lightspan.learners.torch import TorchLearner
from lightspan.lightning.rows import Row

VOCABULARY, TRAINED = 640, 20
LOSS = PolicyLoss()
OPTIMIZER = Optimizer(learning_rate=4e-4)


def make_model() -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )


def make_rows(count: int) -> list[Row]:
    rng = random.Random(0)
    rows = []
    for number in range(count):
        size = rng.randint(50, 100)
        mask = [False] * (size - TRAINED) + [True] * TRAINED
        rows.append(
            Row(
                rollout_id=f"ro-{number}",
                policy="policy",
                ids=[rng.randrange(VOCABULARY) for _ in range(size)],
                mask=mask,
                advantages=[rng.gauss(0, 1) if m else 0.0 for m in mask],
                weights=[1 / count if m else 0.0 for m in mask],
                logprobs=[-6.4 if m else 0.0 for m in mask],
                versions=[0] * size,
                temperatures=[0.7 if m else 1.0 for m in mask],
            )
        )
    return rows


def plain_loop(model: Any, optimizer: torch.optim.Optimizer, rows: Sequence[Row]) -> None:
    """One update, written plainly."""
    optimizer.zero_grad()
    for start in range(0, len(rows), 32):
        batch = rows[start : start + 32]
        length = max(len(row.ids) for row in batch)

        def padded(name: str, length: int = length, batch: Sequence[Row] = batch) -> Any:
            return torch.tensor(
                [[*getattr(row, name), *[0] * (length - len(row.ids))] for row in batch]
            )

        ids, mask = padded("ids"), padded("mask").bool()
        attention = torch.tensor([[1] * len(r.ids) + [0] * (length - len(r.ids)) for r in batch])
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        scaled = logits / padded("temperatures").clamp(min=0.1)[:, 1:, None]
        found = scaled.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        ratio = (found - padded("logprobs")[:, 1:]).clamp(-20, 20).exp()
        gain = padded("advantages")[:, 1:]
        loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.28))
        loss = torch.where(gain < 0, torch.minimum(loss, -3 * gain), loss)
        (loss * padded("weights")[:, 1:] * mask[:, 1:]).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transitions", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, model = make_rows(options.transitions), make_model()
    learner = TorchLearner({"policy": model}, optimizer=OPTIMIZER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.learning_rate)
    ours, theirs = [], []
    for _ in range(options.repeats + 1):
        ours.append(cpu_seconds(lambda: learner.update(rows, LOSS)))
        theirs.append(cpu_seconds(lambda: plain_loop(model, optimizer, rows)))
    tokens = sum(len(row.ids) for row in rows)
    rates = {"learner": len(rows) / min(ours[1:]), "peer": len(rows) / min(theirs[1:])}
    ratio = rates["learner"] / rates["peer"]
    if options.json:
        print(json.dumps({"rates": rates, "ratio": ratio, "tokens": tokens}))
        return
    for name, rate in rates.items():
        print(
            f"{name:8} {rate:6.0f} transitions per CPU-s ({rate * tokens / len(rows):.0f} tokens)"
        )
    print(f"learner / plain padded loop: {ratio:.2f}x")


if __name__ == "__main__":
    main()
