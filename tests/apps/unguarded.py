"""A script without a main guard: it starts a training in every process that imports it."""

from __future__ import annotations

import sys
from pathlib import Path

from toy_apps import two  # type: ignore[import-not-found]

from lightspan import LightningRL, Trainer

trainer = Trainer(LightningRL(Path(sys.argv[2]), optimize="writer"), steps=1, folder=sys.argv[1])
trainer.fit(two, [{"q": "question"}])
