"""Warm start of a small model: supervised fine-tuning on imperfect demonstrations, before RL."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightspan import Optimizer
from lightspan.progress import Reporter
from lightspan_examples.recipe import Imitation, Recipe

if TYPE_CHECKING:
    from lightspan import SFT

TOKENIZER_CHATS = 3000
"""Number of demonstrations that the tokenizer is trained on."""


@dataclass(frozen=True)
class WarmStart:
    """Warm start of an example's small model; call it as `start(cache_dir, seed, reporter)`."""

    recipe: Recipe
    """Recipe that is used if the caller passes none."""
    demonstrate: Callable[[int, int], Sequence[Mapping[str, Any]]]
    """Function (count, seed) → `count` demonstrations, each a chat that ends with the assistant's
    message.
    """
    sources: Sequence[ModuleType]
    """Modules that generate the demonstrations. A change of their code invalidates the cache."""
    builder: str = "lightspan_examples.small_model"
    """Module whose `build_model` makes the untrained model. It is imported when it is needed, since
    it loads torch, which runners do without: they import the training module with the app."""

    def __call__(
        self, cache_dir: Path, seed: int, reporter: Reporter, recipe: Recipe | None = None
    ) -> tuple[Path, float]:
        """Return a small model trained on demonstrations, from the cache if it was made before.

        The cache key is the seed, the settings and the source code of `sources`.

        Returns:
            The folder of the model, and the CPU-seconds that its training took.
        """
        builder = importlib.import_module(self.builder)
        settings = (recipe or self.recipe).imitation
        digest = _digest(settings, (*self.sources, builder))
        folder = cache_dir / f"warm-start-{digest}-{seed}"
        complete = folder / "complete"
        if complete.exists():
            reporter.line(f"warm start of seed {seed}: cached in {folder}")
            return folder, float(complete.read_text())
        reporter.line("warm start: a small model imitates imperfect demonstrations")
        chats = self.demonstrate(settings.demonstrations, seed)
        base = folder.with_name(f"{folder.name}-untrained")
        builder.build_model(
            base,
            chats[:TOKENIZER_CHATS],
            seed=seed,
            vocabulary=settings.vocabulary,
            context=settings.context,
        )
        sft = make_sft(base, seed, settings)
        result = sft.fit(chats, folder, reporter=reporter, resume=True)  # after a Ctrl-C
        shutil.rmtree(base)
        complete.write_text(f"{result.seconds:.1f}")
        return folder, result.seconds


def make_sft(model: Path, seed: int, settings: Imitation, *, updates: int | None = None) -> SFT:
    """Return the supervised fine-tuning of the warm start.

    It passes once over the demonstrations, while the learning rate falls to a twentieth.

    Args:
        updates: number of optimiser steps in place of one pass; None for one pass.
    """
    from lightspan import SFT, Torch  # of lightspan-torch, which runners do without

    each = settings.demonstrations // settings.batch
    optimizer = Optimizer(
        name="muon",
        learning_rate=settings.learning_rate,
        muon_learning_rate=settings.muon_learning_rate,
        warmup_steps=settings.warmup_steps,
        decay_steps=max(1, (updates or each) - settings.warmup_steps),
    )
    return SFT(
        model,
        optimizer=optimizer,
        batch_size=settings.batch,
        prompt_weight=settings.prompt_weight,
        turns=settings.turns,
        learner=Torch(train_vision=settings.train_vision),
        epochs=1.0 if updates is None else updates * settings.batch / settings.demonstrations,
        seed=seed,
    )


def _digest(settings: Imitation, sources: Iterable[ModuleType]) -> str:
    """Return a hash of the settings and of the source code of `sources`."""
    text = json.dumps(asdict(settings), sort_keys=True)
    for module in sources:
        text += inspect.getsource(module)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
