"""Test `kill -9` of the server that forwards model calls to the gateway, during a call.

The app's client repeats the call, and no complete answer is sampled again.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from places import free_port  # type: ignore[import-not-found]

from lightspan.schema import semconv as c
from lightspan.schema.records import Claim
from lightspan.schema.resources import ROUTING
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.sqlite import SQLiteStore
from lightspan_gateway import Gateway
from lightspan_testing.scripted_engine import (
    Gate,
    Say,
    ScriptedEngine,
    tiny_chat_tokenizer,
)
from lightspan_testing.store_suite import make_rollout

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

KEY = "a-trainer-key-0123456789"


class Server:
    """Run `lightspan serve --store` at the same port after each restart."""

    def __init__(self, store: Path) -> None:
        self.port = free_port()
        self._store = store
        self.process = self.started()

    def started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lightspan.cli", "serve", "--store", str(self._store)]
        options = ["--port", str(self.port), "--trainer-key-env", "KEY"]
        process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, text=True, env={**os.environ, "KEY": KEY}
        )
        assert process.stdout is not None
        assert any(re.match("serving the store", line) for line in process.stdout)
        self.process = process
        return process

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "store.db")
    yield made
    made.kill()


def _asked(port: int, claim: Claim) -> str:
    """Return the answer to a client without lightspan, which has only the server's URL."""
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/gateway/v1",
        api_key=claim.attempt.call_token,
        default_headers={c.HEADER_CALL_ID: "call-1"},
        max_retries=12,
    )
    with client:
        reply = client.chat.completions.create(
            model="p", messages=[{"role": "user", "content": "hello"}]
        )
    return str(reply.choices[0].message.content)


@pytest.mark.parametrize("finished", [False, True])
async def test_kill_the_server_in_mid_call(tmp_path: Path, server: Server, finished: bool) -> None:
    """Check a kill during sampling, and one between the end of sampling and the response."""
    gate, asked = Gate(), list[object]()

    def script(request: object) -> Say:
        asked.append(request)
        return Say(text="a b c", gates={1: gate})

    engine = ScriptedEngine(tiny_chat_tokenizer(), script, policies={"p": 1})
    async with SQLiteStore(tmp_path / "store.db") as store, Gateway(store, engine) as gateway:
        routing = Routing(gateway_url=gateway.url, default=Target(route=Route.POLICY, policy="p"))
        resources_id = await store.put_resources({ROUTING: routing})
        await store.enqueue([make_rollout(resources_id=resources_id)])
        [claim] = await store.claim("runner", 1, 600.0)
        ids = [claim.attempt.attempt_id]
        call = asyncio.create_task(asyncio.to_thread(_asked, server.port, claim))
        await gate.reached.wait()
        if finished:
            server.process.send_signal(signal.SIGSTOP)
            gate.open()
            while not (await store.token_records(ids)).get(ids[0]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        server.kill()
        gate.open()
        await asyncio.to_thread(server.started)
        assert await call == "a b c"
        assert await asyncio.to_thread(_asked, server.port, claim) == "a b c"
        [record] = (await store.token_records(ids))[ids[0]]
        assert record.call_id == "call-1"
        assert record.outcome is CallOutcome.OK
        assert len(asked) == 1
        assert (await store.attempts(["ro-1"]))[0].capture_errors == []
