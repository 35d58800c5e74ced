"""Plugins of a third party: an engine, a learner, a store scheme, runners, a sink, a command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightspan import LocalRunners
from lightspan.protocols.engine import EngineRequest, ModelSize
from lightspan.protocols.learner import LearnerRequest
from lightspan.stores.protocol import Store
from lightspan.stores.sqlite import SQLiteStore
from lightspan.training.listeners import RunEvent
from lightspan.training.sinks import SinkRun
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.learner.torch import TorchLearner


class AcmeEngine:
    """An engine that `Trainer(engine="acme")` finds by its name."""

    def build(self, request: EngineRequest) -> TransformersEngine:
        """Return an engine of a class that the core does not know."""
        return _Engine(request.models, device=request.device, seed=request.seed)

    def describe(self, folder: Path) -> str:
        """Return the line that the trainer prints."""
        return f"the acme engine logs to {folder.name}"

    def copies(self, request: EngineRequest) -> list[tuple[str, ...]]:
        """Return the policies of each copy of weights."""
        return [(name,) for name in request.models]

    def memory(self, size: ModelSize, device: str, policies: int = 1) -> dict[str, int]:
        """Return component → bytes of memory."""
        return {"engine weights": size.parameters}


class _Engine(TransformersEngine):
    """An engine class that the core does not know."""


class AcmeLearner:
    """A learner that `Trainer(learner="acme")` finds by its name."""

    def check(self, device: str) -> None:
        """Accept any device."""

    def build(self, request: LearnerRequest) -> TorchLearner:
        """Return a learner that prints a line when the run closes it."""
        return _Learner(
            request.models,
            optimizer=request.optimizer,
            lora=request.lora,
            seed=request.seed,
            device=request.device,
        )

    def describe(self, device: str) -> str:
        """Return the line that the trainer prints."""
        return f"the acme learner is on {device}"

    def memory(self, parameters: int, lora: int, *, device: str, reference: bool) -> dict[str, int]:
        """Return component → bytes of memory."""
        return {"learner weights": parameters}


class _Learner(TorchLearner):
    def close(self) -> None:
        """Print that the run has closed the learner."""
        print("the acme learner is closed")


class _Stores:
    """Open stores by URLs such as `acme:///absolute/path`."""

    IS_SHARED = False

    def make_store(self, url: str, *, create: bool) -> Store:
        """Return a SQLite store at the URL's path."""
        return _Store(Path(url.removeprefix("acme://")))

    def public_url(self, url: str) -> str:
        """Return the URL unchanged, because it contains no secret."""
        return url

    def take_credentials(self, url: str) -> None:
        """Do nothing, because no credentials are needed."""

    def relay_url(self, url: str) -> str:
        """Return an empty text: this store relays no model calls."""
        return ""


class _Store(SQLiteStore):
    @property
    def url(self) -> str:
        """Return the URL that opens the same store in a runner's process."""
        return f"acme://{self.path}"


stores = _Stores()


def runners() -> LocalRunners:
    """Return three runners on this machine, for `Trainer(runners="acme")`."""
    return LocalRunners(3)


class AcmeSink:
    """A sink for `Trainer(sinks=["acme"])` that writes a file into the run's folder."""

    def open(self, run: SinkRun) -> None:
        """Create the file."""
        self._file = (run.folder / "acme-sink.jsonl").open("w")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line for a step."""
        print(json.dumps({"step": step, "names": len(values)}), file=self._file)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def listen(event: RunEvent) -> None:
    """Write the event to a file of the run's folder."""
    with (event.folder / "acme-events.txt").open("a") as file:
        print(event.kind, event.step, file=file)


class _Command:
    def add(self, commands: Any) -> None:
        """Add `lightspan acme NAME`."""
        parser = commands.add_parser("acme", help="greet")
        parser.add_argument("name")
        parser.set_defaults(run=self.run)

    def run(self, options: argparse.Namespace) -> str:
        """Return what the command prints."""
        return f"hello {options.name}"


command = _Command()
acme_names = ["engine", "learner"]
