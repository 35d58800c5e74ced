"""What is attacked, each a process of its own: a training's gateway, and `lightspan serve`.

    python -m tests.attack.victims FOLDER [scripted]

is a training's gateway as a `Trainer` opens it, on a store in the folder and an engine with a tiny
model, or with a script in its place: it prints its address and a call token as JSON, and for every
line on its standard input the call token of another attempt.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from lightspan.engines.protocol import TokenEngine
from lightspan.gateway import Gateway
from lightspan.gateway.pauses import short_pauses
from lightspan.schema.records import Mode, Rollout
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.tokens import Sampling
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan.training.manifest import KEY, Served, ServedPolicy

KEY_VARIABLE: Final = "ATTACKED_KEY"
CONTEXT: Final = 192
"""Tokens that the tiny model's context holds: what asks for as long an answer as possible is not to
take all of the time."""
LONG: Final = 131_072
"""Where delays are measured: so long that megabytes are rendered and tokenised."""
SCRIPTED: Final = "scripted"
ROUTING: Final = Routing(
    rules=[Rule("writer", Target(route=Route.POLICY, policy="policy", sampling=Sampling()))],
    default=Target(route=Route.SHARED, policy="policy"),
)


@dataclass
class Victim:
    """A process under attack."""

    name: str
    process: subprocess.Popen[str]
    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def memory(self) -> int:
        """Bytes that it holds."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def renew(self) -> None:
        """Another attempt, as a training has; of an endpoint that serves, the key stays."""
        if self.name == "gateway":
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            self.token = json.loads(self.process.stdout.readline())["token"]


@contextmanager
def gateway(folder: Path) -> Iterator[Victim]:
    """A training's."""
    with _training(folder) as victim:
        yield victim


@contextmanager
def scripted(folder: Path) -> Iterator[Victim]:
    """A training's gateway whose engine says what a script says, with a long context."""
    with _training(folder, SCRIPTED) as victim:
        yield victim


@contextmanager
def _training(folder: Path, *options: str) -> Iterator[Victim]:
    command = [sys.executable, "-m", "tests.attack.victims", str(folder), *options]
    with _running(command) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        yield Victim("gateway", process, "127.0.0.1", told["port"], told["token"])


@contextmanager
def serve(folder: Path, context: int = CONTEXT) -> Iterator[Victim]:
    """`lightspan serve` with a key."""
    run = _write_run(folder, context)
    options = ["--port", "0", "--api-key-env", KEY_VARIABLE]
    command = [sys.executable, "-m", "lightspan.cli", "serve", str(run), *options]
    with _running(command, **{KEY_VARIABLE: "sesame"}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if ready := re.match(r"serving .* at http://127.0.0.1:(\d+)/v1 ", line):
                yield Victim("serve", process, "127.0.0.1", int(ready[1]), "sesame")
                return
        raise RuntimeError("it serves nothing")


VICTIMS: Final = {"gateway": gateway, "serve": serve}
DELAYED: Final = {"gateway": scripted, "serve": partial(serve, context=LONG)}
"""Whose delays are measured."""


@contextmanager
def _running(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()  # it says what it did, to somebody who listens


def _write_run(folder: Path, context: int) -> Path:
    """A folder as a complete run leaves it."""
    from lightspan.testing.tiny import tiny_model

    model = str(tiny_model(folder / "model", seed=0, context=context))
    policies = {"policy": ServedPolicy(folder="model", model=model, version=3)}
    served = Served(policies=policies, base_model=model, routing=ROUTING)
    (folder / "config.json").write_text("{}")
    (folder / "result.json").write_text(json.dumps({"steps": 1, KEY: served.as_json()}))
    return folder


async def _train(folder: Path, *, is_scripted: bool) -> None:
    """Be a training's gateway until the standard input ends."""
    engine = await asyncio.to_thread(_script if is_scripted else _model, folder)
    async with open_store(f"sqlite:///{folder}/run.db") as store:
        await engine.start()
        try:
            async with Gateway(store, engine) as served:
                with short_pauses():
                    port = int(served.url.rpartition(":")[2])
                    print(json.dumps({"port": port, "token": await _attempt(store, 0)}), flush=True)
                    number = 0
                    while await asyncio.to_thread(sys.stdin.readline):
                        number += 1
                        print(json.dumps({"token": await _attempt(store, number)}), flush=True)
        finally:
            await engine.close()


def _model(folder: Path) -> TokenEngine:
    from lightspan.engines.transformers import TransformersEngine
    from lightspan.testing.tiny import tiny_model

    return TransformersEngine(
        {"policy": str(tiny_model(folder / "model", seed=0, context=CONTEXT))}
    )


def _script(folder: Path) -> TokenEngine:
    from lightspan.testing.scripted_engine import ScriptedEngine, tiny_chat_tokenizer

    return ScriptedEngine(tiny_chat_tokenizer(context_length=LONG))


async def _attempt(store: Store, number: int) -> str:
    """The call token of a fresh attempt, every other one of a training's own kind."""
    resources = await store.put_resources({"routing": ROUTING})
    mode = Mode.VAL if number % 2 else Mode.TRAIN
    rollout = Rollout(
        rollout_id=f"ro-{number}", task={}, task_id="t", resources_id=resources, mode=mode
    )
    await store.enqueue([rollout])
    [claim] = await store.claim("runner", 1, 36_000)
    return claim.attempt.call_token


if __name__ == "__main__":
    asyncio.run(_train(Path(sys.argv[1]), is_scripted=SCRIPTED in sys.argv[2:]))
