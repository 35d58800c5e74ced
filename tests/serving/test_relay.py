"""Tests of the relay: a store's server forwards model calls to the gateway of a training."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from lightspan.errors import StoreError
from lightspan.runners.discovery import make_peer
from lightspan.schema import semconv as c
from lightspan.schema.records import Claim, Peer, PeerRole
from lightspan.schema.resources import ROUTING
from lightspan.schema.routing import Route, Routing, Target
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan.stores.sqlite import SQLiteStore
from lightspan_gateway import Gateway
from lightspan_gateway.api_errors import call_token_error
from lightspan_gateway.limits import GatewayLimits, StoreServerLimits
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_testing.scripted_engine import (
    Gate,
    Say,
    ScriptedEngine,
    TokenScript,
    tiny_chat_tokenizer,
)
from lightspan_testing.store_suite import make_report, make_rollout
from lightspan_testing.wait import until
from packages.gateway.tests.remote_store.served import KEYS, RUNNER, TRAINER, Served, serving

BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
TOKENIZER = tiny_chat_tokenizer()


class Training:
    """A gateway whose address is registered in the store."""

    def __init__(self, store: Store, engine: ScriptedEngine, gateway: Gateway) -> None:
        self.store = store
        self.engine = engine
        self.gateway = gateway

    async def claim(self, name: str, url: str | None = None) -> Claim:
        """Return a new claimed attempt.

        Args:
            name: name of the rollout.
            url: address to register instead of the gateway's; None for the gateway's.
        """
        routing = Routing(
            gateway_url=self.gateway.url if url is None else url,
            default=Target(route=Route.POLICY, policy="policy"),
        )
        resources_id = await self.store.put_resources({ROUTING: routing})
        await self.store.enqueue([make_rollout(name, run_id=name, resources_id=resources_id)])
        [claim] = await self.store.claim("runner", 1, 60.0, name)
        return claim


@asynccontextmanager
async def training(
    store: Store, script: TokenScript, limits: GatewayLimits | None = None
) -> AsyncIterator[Training]:
    engine = ScriptedEngine(TOKENIZER, script)
    async with Gateway(store, engine, limits=limits) as gateway:
        yield Training(store, engine, gateway)


class Place:
    """A served store, and requests to its relay."""

    def __init__(self, served: Served, store: Store, session: aiohttp.ClientSession) -> None:
        self.served = served
        self.store = store
        self.session = session

    def ask(self, claim: Claim | str, path: str = "/v1/chat/completions", **fields: Any) -> Any:
        token = claim if isinstance(claim, str) else claim.attempt.call_token
        headers = {"Authorization": f"Bearer {token}", **fields.pop("headers", {})}
        url = URL(f"{self.served.url}/gateway{path}", encoded=True)
        return self.session.post(url, json={**BODY, **fields}, headers=headers)

    async def said(self, claim: Claim | str, *path: str, **fields: Any) -> tuple[int, str]:
        """Send a call; return the status, and the answer's text or the error's message."""
        async with self.ask(claim, *path, **fields) as answer:
            reply = await answer.json()
            if answer.status == 200:
                return 200, reply["choices"][0]["message"]["content"]
            return answer.status, reply["error"]["message"]


@asynccontextmanager
async def opened(tmp_path: Path, limits: StoreServerLimits | None = None) -> AsyncIterator[Place]:
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), limits=limits) as served:
        async with open_store(served.url) as store, aiohttp.ClientSession() as session:
            yield Place(served, store, session)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with opened(tmp_path) as place:
        yield place


async def test_a_trainer_whose_gateway_cannot_be_reached_is_refused(place: Place) -> None:
    """Check that the server tries the gateway when the trainer is announced, and only then."""

    def trainer(gateway: str, **fields: Any) -> Peer:
        peer = {"run_id": "run", "gateway": gateway, "remote": True, **fields}
        return make_peer("run", PeerRole.TRAINER, "my_app:answer", **peer)

    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    for wrong in (gone, "http://localhost:0", place.served.url):  # the last is another server
        with pytest.raises(StoreError, match="cannot be reached from the store's server") as error:
            await place.store.announce(trainer(wrong))
        assert f"the gateway {wrong} of the training run " in str(error.value)
        assert 'Trainer(gateway="HOST")' in str(error.value)
    assert await place.store.peers() == []
    await place.store.announce(trainer(gone, remote=False))  # runners of its own machine only
    await place.store.announce(trainer(gone, complete=True))  # to a server that has restarted
    async with training(place.store, "one") as one:
        here = trainer(one.gateway.url)
        await place.store.announce(here)
    await place.store.announce(here)  # it may be busy later
    [peer] = await place.store.peers()
    assert (peer.gateway, peer.remote) == (one.gateway.url, True)


async def test_two_trainings_each_at_its_own_gateway(place: Place) -> None:
    """Check that forwarded calls are recorded with exact tokens like direct calls."""
    async with training(place.store, "one") as one, training(place.store, "two") as two:
        claims = {name: await each.claim(name) for name, each in (("a", one), ("b", two))}
        answers = await asyncio.gather(
            *(place.said(claims[name]) for name in ("a", "b") for _ in range(4))
        )
        assert answers == [(200, "one")] * 4 + [(200, "two")] * 4
        for name, each, text in (("a", one, "one"), ("b", two, "two")):
            direct = await each.claim(f"direct-{name}")
            headers = {"Authorization": f"Bearer {direct.attempt.call_token}"}
            url = f"{each.gateway.url}/v1/chat/completions"
            async with place.session.post(url, json=BODY, headers=headers) as answer:
                assert (await answer.json())["choices"][0]["message"]["content"] == text
            ids = [claims[name].attempt.attempt_id, direct.attempt.attempt_id]
            records = await place.store.token_records(ids)
            relayed, plain = (records[attempt_id] for attempt_id in ids)
            assert len(relayed) == 4
            [known] = plain
            for record in relayed:
                assert record.prompt_ids == known.prompt_ids
                assert record.response_ids == known.response_ids
                assert record.logprobs == known.logprobs


async def test_agents_by_their_path_and_query(place: Place) -> None:
    """Check that percent-encoding is kept, because it is part of the agent's name."""
    async with training(place.store, "yes") as run:
        claim = await run.claim("a")
        path = "/agents/team/a%2Fb%20c/v1/chat/completions?api-version=1"
        assert await place.said(claim, path) == (200, "yes")
        [span] = (await place.store.spans([claim.attempt.attempt_id]))[claim.attempt.attempt_id]
        assert span.attributes[c.AGENT_PATH] == "team/a%2Fb c"


async def test_a_stream_comes_as_it_is_made(place: Place) -> None:
    """Check that the first part arrives while the model waits before its last token."""
    gate = Gate()
    last = len(TOKENIZER.encode("a b c")) - 1
    async with training(place.store, [Say(text="a b c", gates={last: gate})]) as run:
        claim = await run.claim("a")
        async with place.ask(claim, stream=True) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            assert answer.headers["X-Accel-Buffering"] == "no"
            first = await answer.content.readline()
            assert first.startswith(b"data: ")
            await gate.reached.wait()
            gate.open()
            rest = await answer.content.read()
        events = [line for line in (first + rest).split(b"\n") if line.startswith(b"data: ")]
        assert events[-1] == b"data: [DONE]"
        parts = [json.loads(event[6:])["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(part.get("content") or "" for part in parts) == "a b c"


async def test_who_leaves_leaves_at_the_gateway_too(place: Place) -> None:
    """Check that an abandoned call is cancelled, and that its retries share one new call."""
    gate, requests = Gate(), list[object]()

    def script(request: object) -> Say:
        requests.append(request)
        return Say(text="a b", gates={1: gate})

    async with training(place.store, script, GatewayLimits(relayed_s=0.1)) as run:
        claim = await run.claim("a")
        headers = {c.HEADER_CALL_ID: "call-1"}
        first = asyncio.create_task(place.said(claim, headers=headers))
        await gate.reached.wait()
        [account] = run.gateway.access.sessions()
        assert account.is_busy
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        while account.is_busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        gate.open()
        for _ in range(3):
            assert await place.said(claim, headers=headers) == (200, "a b")
        assert len(requests) == 2  # the abandoned call and the answered one
        ids = [claim.attempt.attempt_id]
        [record] = (await place.store.token_records(ids))[ids[0]]
        assert record.call_id == "call-1"


async def test_a_gateway_that_breaks_off(place: Place) -> None:
    """Check that the client's connection is closed if the gateway closes its own."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health "):
            health = b'{"status": "ok", "protocol": %d, "policies": {}}' % c.PROTOCOL_VERSION
            head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % len(health) + health)
        else:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Connection: close, X-Hop\r\nX-Hop: here\r\nX-Far: there\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n6\r\ndata: \r\n"
            )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, training(place.store, "unasked") as run:
        claim = await run.claim("a", f"http://127.0.0.1:{port}")
        async with place.ask(claim, stream=True) as answer:
            assert (answer.headers["X-Far"], "X-Hop" in answer.headers) == ("there", False)
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()


def timers(port: int) -> list[str]:
    """Return the kernel's timers of the connections to a local port."""
    entries = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [entry[5][:2] for entry in entries if entry[2].endswith(f":{port:04X}")]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux alone tells of its timers")
async def test_a_trainers_machine_that_is_gone_without_a_word_is_noticed(place: Place) -> None:
    """Check that TCP keepalive (timer 2) is active while a call waits."""
    gate = Gate()
    async with training(place.store, lambda request: Say(text="a b", gates={1: gate})) as run:
        asking = asyncio.create_task(place.said(await run.claim("a")))
        await gate.reached.wait()
        port = int(run.gateway.url.rpartition(":")[2])
        await until(lambda: timers(port) == ["02"])  # after the acknowledgement of the sent data
        gate.open()
        assert await asking == (200, "a b")


async def test_a_gateway_that_is_gone_and_comes_back(place: Place) -> None:
    async with training(place.store, "here") as run:
        claim = await run.claim("a")
        assert await place.said(claim) == (200, "here")
        port = int(run.gateway.url.rpartition(":")[2])
        await run.gateway.close()
        for path in ("/v1/chat/completions", "/v1/messages"):
            status, message = await place.said(claim, path)
            assert status == 502
            assert "the trainer may have ended or stopped" in message
            assert 'Trainer(gateway="HOST")' in message
        engine = ScriptedEngine(TOKENIZER, "again")
        async with Gateway(place.store, engine, port=port):
            assert await place.said(claim) == (200, "again")


async def test_what_opens_nothing(place: Place) -> None:
    """Check a missing token, a wrong one, a store's key, and tokens of other and ended attempts."""
    async with training(place.store, "never") as run:
        claim, other = await run.claim("a"), await run.claim("b")
        assert await place.said("") == (401, call_token_error("").message)
        for token in ("nonsense", TRAINER, RUNNER, f"{claim.attempt.call_token}x"):
            assert await place.said(token) == (401, call_token_error(token).message)
        foreign = {c.HEADER_ATTEMPT: other.attempt.attempt_id}
        status, message = await place.said(claim, headers=foreign)
        assert (status, other.attempt.attempt_id in message) == (403, True)
        await place.store.report([make_report(other.attempt)])
        assert await place.said(other) == (
            403,
            f"attempt {other.attempt.attempt_id} has ended (succeeded)",
        )
        health = f"{place.served.url}/gateway/health"
        for token, status in ((other.attempt.call_token, 200), ("nonsense", 401)):
            headers = {"Authorization": f"Bearer {token}"}
            async with place.session.get(health, headers=headers) as answer:
                assert answer.status == status
        assert run.engine.usage() == ScriptedEngine(TOKENIZER, "never").usage()


async def test_an_ended_attempt_is_refused_without_its_gateway(place: Place) -> None:
    """The store's server refuses the call itself: nothing is forwarded."""
    async with training(place.store, "never") as run:
        claim = await run.claim("a")
    await place.store.report([make_report(claim.attempt)])
    message = f"attempt {claim.attempt.attempt_id} has ended (succeeded)"
    assert await place.said(claim) == (403, message)


async def test_a_call_token_opens_nothing_of_the_store(tmp_path: Path) -> None:
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), Keys(KEYS)) as served:
        async with (
            SQLiteStore(tmp_path / "store.db") as store,
            training(store, "yes") as run,
            aiohttp.ClientSession() as session,
        ):
            claim = await run.claim("a")
            assert await Place(served, store, session).said(claim) == (200, "yes")
            headers = {"Authorization": f"Bearer {claim.attempt.call_token}"}
            for path in ("/store/v1", "/anything"):
                async with session.get(f"{served.url}{path}", headers=headers) as answer:
                    assert answer.status == 401


@pytest.mark.parametrize(
    "path",
    [
        "/http://127.0.0.1:{port}/v1/chat/completions",
        "@127.0.0.1:{port}/v1/chat/completions",
        "/v1/../store/v1",
        "/v1/%2e%2e/%2E%2E/health",
        "/lightspan/routing",
    ],
)
async def test_a_request_chooses_no_upstream(place: Place, path: str) -> None:
    """Check that neither path nor header selects the destination, and that it gets no request."""
    heard = list[bytes]()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, training(place.store, "right") as run:
        claim = await run.claim("a")
        elsewhere = f"127.0.0.1:{port}"
        headers = {
            "X-Forwarded-Host": elsewhere,
            "Forwarded": f"host={elsewhere}",
            "X-Original-URL": f"http://{elsewhere}/",
            "X-Lightspan-Gateway": f"http://{elsewhere}",
        }
        assert await place.said(claim, headers={**headers, "Host": elsewhere}) in (
            (200, "right"),
            (403, "a request for or from"),
        )
        target = f"/gateway{path.format(port=port)}"
        for form in (target, f"http://{elsewhere}{target}"):
            assert await _status_of(place, form, claim) in (b"400", b"404", b"409")
        form = f"http://{elsewhere}/gateway/v1/models"
        assert (
            await _status_of(place, form, claim) == b"200"
        )  # the health check of the training's gateway
    assert heard == []


async def _status_of(place: Place, target: str, claim: Claim) -> bytes:
    """Send a request with exactly this target, which HTTP clients would normalise; return its
    status.
    """
    host, port = place.served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    token = claim.attempt.call_token
    head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode())
    status = (await reader.readline()).split()[1]
    writer.close()
    return status


@pytest.mark.parametrize(
    ("url", "status", "said"),
    [
        ("", 404, "registered no gateway"),
        ("http://user:pw@127.0.0.1:1", 404, "registered no gateway"),
        ("itself", 502, "no gateway of a training"),
        ("nobody", 502, "cannot be reached"),
    ],
)
async def test_what_is_registered_is_no_gateway(
    place: Place, url: str, status: int, said: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
        registered = {"itself": place.served.url, "nobody": nobody}.get(url, url)
        async with training(place.store, "unasked") as run:
            found, message = await place.said(await run.claim("a", registered))
    assert (found, said in message) == (status, True), message


async def test_limits(tmp_path: Path) -> None:
    """Check that a too large body is refused, and that calls beyond the number of slots wait."""
    limits = StoreServerLimits(max_relayed_bytes=1_000, max_relayed=1)
    gate = Gate()
    script = [Say(text="a b", gates={1: gate}), "second"]
    async with opened(tmp_path, limits) as place, training(place.store, script) as run:
        claim = await run.claim("a")
        large = {"messages": [{"role": "user", "content": "x" * 1_000}]}
        assert await place.said(claim, **large) == (
            413,
            "the request body is too large: at most 1,000 bytes are read",
        )
        first = asyncio.create_task(place.said(claim))
        await gate.reached.wait()
        second = asyncio.create_task(place.said(claim))
        [slots] = place.served.server._proxy._slots.values()
        await until(lambda: bool(slots._waiters))
        async with training(place.store, "another") as other:  # its own slots are free
            assert await place.said(await other.claim("b")) == (200, "another")
        gate.open()
        assert await asyncio.gather(first, second) == [(200, "a b"), (200, "second")]
