"""Teach the small model to imitate demonstrations: its vision part and its text part.

This is a plain training loop, because `SFT` leaves the vision part of a model as it is.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lightspan.progress import Reporter
from lightspan.schema.images import PromptImage
from lightspan_examples.recipe import Imitation
from lightspan_examples.small_model import Chat
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model, without_bars

FINAL_RATE: Final = 0.05
"""Learning rate of the last update, as a share of the largest one."""


class _Example:
    """A demonstration as the model takes it."""

    def __init__(self, chat: Chat, tokenizer: Any) -> None:
        *prompt, _ = chat["messages"]
        ids, self.images = tokenizer.render_images(prompt)
        whole, _ = tokenizer.render_images(chat["messages"], add_generation_prompt=False)
        end = whole.index(tokenizer.end_id, len(ids)) + 1
        self.ids = whole[:end]
        self.prompt = len(ids)


def imitate(
    base: Path,
    folder: Path,
    chats: Sequence[Chat],
    settings: Imitation,
    seed: int,
    reporter: Reporter,
) -> float:
    """Train the model of `base` once over `chats`, save it in `folder`; return CPU-seconds.

    Each chat has one image. The rate falls to a twentieth, as in the other examples' warm starts.
    """
    started = time.thread_time()
    reporter.line(f"imitating {len(chats)} demonstrations")
    tokenizer: Any = load_tokenizer(base)
    model: Any = load_model(base)
    optimizers = _optimizers(model, settings)
    order = list(range(len(chats)))
    random.Random(seed).shuffle(order)
    updates = list(_batches(order, settings.batch))
    for number, places in enumerate(updates):
        rate = min(1.0, (number + 1) / settings.warmup_steps)
        rate *= 1 - (1 - FINAL_RATE) * number / len(updates)
        loss = _loss(model, tokenizer, [_Example(chats[place], tokenizer) for place in places])
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["largest"]
            optimizer.step()
            optimizer.zero_grad()
        if number % 100 == 99:
            reporter.line(f"update {number + 1} of {len(updates)}, loss {loss:.3f}")
    shutil.copytree(base, folder, dirs_exist_ok=True)  # tokenizer and image processor
    with without_bars():
        model.save_pretrained(folder)
    return time.thread_time() - started


def _batches(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _optimizers(model: Any, settings: Imitation) -> list[Any]:
    """Return Muon for the hidden matrices, and AdamW for all other parameters."""
    hidden, others = [], []
    for name, parameter in model.named_parameters():
        is_hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (hidden if is_hidden else others).append(parameter)
    return [
        torch.optim.Muon(
            [{"params": hidden, "largest": settings.muon_learning_rate}], weight_decay=0.0
        ),
        torch.optim.AdamW(
            [{"params": others, "largest": settings.learning_rate}], weight_decay=0.0
        ),
    ]


def _loss(model: Any, tokenizer: Any, examples: Sequence[_Example]) -> Tensor:
    """Return the mean loss of the answers' tokens."""
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), tokenizer.end_id)
    labels = torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        size = len(example.ids)
        ids[row, :size] = torch.tensor(example.ids)
        labels[row, example.prompt : size] = ids[row, example.prompt : size]
    images: list[PromptImage] = [image for example in examples for image in example.images]
    inputs = [tokenizer.images.prepare(image.digest, image.data).inputs for image in images]
    pixels = torch.cat([torch.as_tensor(each["pixel_values"]) for each in inputs])
    grids = torch.cat([torch.as_tensor(each["image_grid_thw"]) for each in inputs])
    # What follows an answer is not masked: no token before it attends to it.
    kinds = (ids == tokenizer.images.image_id).long()
    output = model(
        input_ids=ids,
        labels=labels,
        pixel_values=pixels,
        image_grid_thw=grids,
        mm_token_type_ids=kinds,
        use_cache=False,
    )
    loss: Tensor = output.loss
    return loss
