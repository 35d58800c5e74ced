"""Test of the nginx configuration of `docs/guides/store-over-http.md`, if nginx is installed."""

from __future__ import annotations

import io
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from lightspan.schema import semconv as c
from lightspan.stores import open_store
from lightspan.stores.sqlite import SQLiteStore
from lightspan_testing.scripted_engine import Gate, Say
from packages.gateway.tests.remote_store.served import serving
from tests.serving.test_relay import BODY, TOKENIZER, training
from tests.stores.test_remote_tls import certificate  # noqa: F401

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
PAGE = Path(__file__).parents[2] / "docs/guides/store-over-http.md"
AROUND = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/proxied;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{block}
}}
"""

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(NGINX is None, reason="runs nginx (apt-get install nginx)"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate"),
]


@contextmanager
def proxied(upstream: str, folder: Path, certificate: Path) -> Iterator[str]:  # noqa: F811
    """Run nginx in front of the server; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    [block] = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for there, here in {
        "server 127.0.0.1:8000": f"server {upstream.removeprefix('http://')}",
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/ssl/agents.example.pem": str(certificate),
        "/etc/ssl/agents.example.key": str(certificate.parent / "key.pem"),
    }.items():
        assert block.count(there) == 1
        block = block.replace(there, here)
    (folder / "nginx.conf").write_text(AROUND.format(folder=folder, block=block))
    command = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    process = subprocess.Popen([*command, "-e", str(folder / "error.log")])
    try:
        while True:
            assert process.poll() is None, (folder / "error.log").read_text()
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def test_nginx_in_front_of_it(tmp_path: Path, certificate: Path) -> None:  # noqa: F811
    """Check that large bodies, streams and encoded paths pass unchanged, and certificates are
    verified.
    """
    gate = Gate()
    last = len(TOKENIZER.encode("a b c")) - 1
    with (
        serving(lambda: SQLiteStore(tmp_path / "store.db")) as served,
        proxied(served.url, tmp_path, certificate) as url,
    ):
        script = ["whole", Say(text="a b c", gates={last: gate})]
        async with (
            open_store(served.url) as store,
            training(store, script) as run,
            aiohttp.ClientSession() as session,
        ):
            large, count = io.BytesIO(bytes(20_000_000)), f"{url}/store/v1/count"
            version = {c.HEADER_PROTOCOL: str(c.PROTOCOL_VERSION)}
            async with session.post(count, data=large, headers=version, ssl=False) as answer:
                assert b"the arguments of count cannot be read" in await answer.read()
            claim = await run.claim("a")
            headers = {"Authorization": f"Bearer {claim.attempt.call_token}"}
            path = "/gateway/agents/team/a%2Fb%20c/v1/chat/completions"
            named = URL(f"{url}{path}", encoded=True)
            async with session.post(named, json=BODY, headers=headers, ssl=False) as answer:
                reply = await answer.json()
                assert reply["choices"][0]["message"]["content"] == "whole"
            body = {**BODY, "stream": True}
            plain = f"{url}/gateway/v1/chat/completions"
            async with session.post(plain, json=body, headers=headers, ssl=False) as answer:
                assert (await answer.content.readline()).startswith(b"data: ")
                await gate.reached.wait()
                gate.open()
                assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
            spans = (await store.spans([claim.attempt.attempt_id]))[claim.attempt.attempt_id]
            assert "team/a%2Fb c" in {span.attributes.get("lightspan.agent.path") for span in spans}
