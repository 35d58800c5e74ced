"""Tests of https, with a TLS proxy and a private certificate authority."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lightspan.errors import StoreError
from lightspan.schema.records import PeerRole
from lightspan.schema.resources import ROUTING
from lightspan.schema.reward import Reward
from lightspan.schema.routing import Route, Routing, Target
from lightspan.stores import open_store
from lightspan.stores.sqlite import SQLiteStore
from lightspan_gateway import Gateway
from lightspan_testing.scripted_engine import ScriptedEngine, tiny_chat_tokenizer
from lightspan_testing.store_suite import make_peer, make_rollout
from packages.gateway.tests.remote_store.served import serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")

COUNTS = """
import asyncio, sys
from lightspan.stores import open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        print(await store.count())

asyncio.run(main())
"""


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Create a self-signed certificate for 127.0.0.1, with its key."""
    certificate = tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=lightspan", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(tmp_path / "key.pem"), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate


@contextmanager
def encrypted(upstream: str, certificate: Path) -> Iterator[str]:
    """Run a TLS proxy in front of the server; yield its address."""
    host, port = upstream.removeprefix("http://").split(":")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.parent / "key.pem")
    up, down, errors = threading.Event(), asyncio.Event(), list[Any]()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        except OSError:  # one side has disconnected
            pass
        finally:
            writer.close()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, behind[1]), copy(behind[0], writer))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # a client does not trust the certificate
        server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=context)
        errors.extend([loop, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
        up.set()
        await down.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    up.wait()
    loop, url = errors
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join()


async def test_https(tmp_path: Path, certificate: Path) -> None:
    """Check that an unknown authority is refused, unless SSL_CERT_FILE has its certificate."""
    with (
        serving(lambda: SQLiteStore(tmp_path / "store.db")) as served,
        encrypted(served.url, certificate) as url,
    ):
        with pytest.raises(StoreError, match=r"is not trusted .*SSL_CERT_FILE"):
            await open_store(url).open()
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", COUNTS, url],
            env={**os.environ, "SSL_CERT_FILE": str(certificate)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout == "{}\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("days", "name", "words"),
    [
        ((-9, -1), "127.0.0.1", ["certificate has expired (", "renew it at the server"]),
        ((1, 9), "127.0.0.1", ["certificate is not valid yet (", "set the clocks"]),
        ((-1, 9), "127.0.0.2", ["certificate is for another name (", "name that is in it"]),
    ],
)
async def test_a_certificate_that_no_authority_mends(
    tmp_path: Path, days: tuple[int, int], name: str, words: list[str]
) -> None:
    """Check that the remedy is not SSL_CERT_FILE, which is set."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lightspan")])
    first, last = (datetime.now(UTC) + timedelta(days=day) for day in days)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), 1, first, last)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(name))]), False)
        .sign(key, hashes.SHA256())
    )
    certificate = tmp_path / "certificate.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    with (
        serving(lambda: SQLiteStore(tmp_path / "store.db")) as served,
        encrypted(served.url, certificate) as url,
    ):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", COUNTS, url],
            env={**os.environ, "SSL_CERT_FILE": str(certificate)},
            capture_output=True,
            text=True,
            check=False,
        )
    [line] = [line for line in done.stderr.splitlines() if "StoreError: " in line]
    assert "SSL_CERT_FILE" not in line
    for word in words:
        assert word in line


ASKS = """
import openai
from lightspan import agent, rollout

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)
messages = [{"role": "user", "content": "hello"}]

def said(reply):
    return float(reply.choices[0].message.content)

@rollout
def asks(task, llm):
    own = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0)
    with agent("writer"):
        by_shim = client.chat.completions.create(model="any", messages=messages)
        by_url = own.chat.completions.create(model="any", messages=messages)
    return said(by_shim) + said(by_url) + 100 * llm.base_url.startswith("https://127.0.0.1:")
"""


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_model_calls_of_a_runner_behind_https(tmp_path: Path, certificate: Path) -> None:
    """Check that the OTLP sender trusts the same authorities as the store's client."""
    (tmp_path / "far_app.py").write_text(ASKS)
    environment = {**os.environ, "SSL_CERT_FILE": str(certificate)}
    command = [sys.executable, "-m", "lightspan.cli", "runner", "far_app:asks"]
    engine = ScriptedEngine(tiny_chat_tokenizer(), "7")
    trainer = make_peer("run-1", role=PeerRole.TRAINER, app="far_app:asks", run_id="run-1")
    with (
        serving(lambda: SQLiteStore(tmp_path / "store.db")) as served,
        encrypted(served.url, certificate) as url,
    ):
        async with open_store(served.url) as store, Gateway(store, engine) as gateway:
            target = Target(route=Route.POLICY, policy="policy")
            routing = Routing(gateway_url=gateway.url, default=target)
            resources_id = await store.put_resources({ROUTING: routing})
            fields = {"run_id": "run-1", "app": "far_app:asks", "resources_id": resources_id}
            await store.announce(trainer)
            await store.enqueue([make_rollout("ro-1", **fields)])
            runner = await asyncio.create_subprocess_exec(
                *(*command, "--store", url, "--app-dir", str(tmp_path)), env=environment
            )
            try:
                cursor = 0
                while not all(state.status.final for state in await store.rollouts()):
                    cursor = (await store.watch(cursor, timeout_s=5.0)).cursor
                await store.announce(msgspec.structs.replace(trainer, complete=True))
                assert await runner.wait() == 0
            finally:
                if runner.returncode is None:
                    runner.kill()
                    await runner.wait()
            [attempt] = await store.attempts(["ro-1"])
    assert attempt.reward == Reward(114.0), attempt.message
