"""The guard as it is served: status and headers of real requests."""

from __future__ import annotations

import asyncio
import hashlib
import re
import runpy
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
from aiohttp import ClientSession

import lightspan_ui.views as v
from lightspan.errors import ConfigError
from lightspan.progress import SilentReporter
from lightspan_ui.filters import Filters
from lightspan_ui.guard import HEADERS
from lightspan_ui.main import UiOptions, address, serve, take_token
from lightspan_ui.server import PREFIX, UiServer
from lightspan_ui.sources import Sources
from packages.ui.tests.recorded import make_production_store, make_run
from packages.ui.tests.ui_client import TOKEN, Answer, Client, serving

WEB = Path(__file__).parents[1] / "web"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    await make_run(tmp_path / "runs" / "first")
    url = await make_production_store(tmp_path / "app.db")
    async with serving(tmp_path / "runs", url, write=True) as running:
        yield running


def paths() -> list[str]:
    """Return a path of each kind."""
    run, store = f"{PREFIX}/runs/first", f"{PREFIX}/stores/app"
    return [
        *("/", "/runs/first", "/nowhere", "/static/missing.js", f"{PREFIX}/places"),
        *(f"{PREFIX}/nothing", run, f"{run}/metrics", f"{run}/prompts"),
        *(f"{PREFIX}/compare?run=first", f"{run}/rollouts", f"{run}/facets", f"{run}/groups"),
        *(f"{run}/groups/group-1?step=1", f"{run}/rollouts/ro-1-0", f"{run}/export"),
        *(f"{store}/rollouts", f"{store}/rollouts/at-ro-1", f"{store}/facets", f"{store}/export"),
        *(f"{store}/rollouts/at-ro-1/spans/{1:016x}", f"{run}/rollouts/ro-1-0/calls/none"),
        *(f"{store}/rollouts/at-ro-1/calls/call-at-ro-1-0", f"{store}/images/none"),
    ]


def has_headers(answer: Answer) -> bool:
    """Return whether an answer has all headers of security; files may be kept by browsers."""
    return all(
        answer.headers.get(name) == value or (name, answer.headers.get(name)) == _KEPT
        for name, value in HEADERS.items()
    )


_KEPT = ("Cache-Control", "no-cache")


async def test_every_path_needs_the_token_and_has_the_headers(client: Client) -> None:
    for path in paths():
        answer = await client.send(path)
        assert answer.status in (200, 404), (path, answer)
        assert has_headers(answer), path
        for other in (None, "Bearer wrong", f"Basic {TOKEN}"):
            refused = await client.send(path, Authorization=other)
            assert refused.status == 401, path
            assert has_headers(refused), path
            assert "lightspan ui" in refused.error


async def test_health_is_open_and_tells_nothing(client: Client) -> None:
    answer = await client.send("/health", Authorization=None, Host="elsewhere.example")
    assert (answer.status, answer.body) == (200, b"ok")
    assert has_headers(answer)


async def test_other_hosts_and_origins_are_refused(client: Client) -> None:
    port = client.server.port
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{port}"},
        {"Host": f"127.0.0.1:{port + 1}"},
        {"Origin": "http://evil.example"},
        {"Origin": f"http://127.0.0.1:{port + 1}"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        for path in (f"{PREFIX}/places", f"{PREFIX}/events", "/static/index.html"):
            answer = await client.send(path, **headers)
            assert answer.status == 403, (path, headers)
            assert has_headers(answer)
    own = f"http://127.0.0.1:{port}"
    answer = await client.send(f"{PREFIX}/places", Origin=own, **{"Sec-Fetch-Site": "same-origin"})
    assert answer.status == 200


async def test_the_printed_address_becomes_a_cookie(client: Client) -> None:
    target = address(client.server, "/", TOKEN).removeprefix(client.server.url)
    answer = await client.send(f"{target}&sort=best", Authorization=None)
    assert (answer.status, answer.headers["Location"]) == (303, "/?sort=best")
    cookie = answer.headers["Set-Cookie"]
    name, _, rest = cookie.partition("=")
    assert name == f"lightspan-ui-{client.server.port}"
    assert rest.split("; ") == [TOKEN, "HttpOnly", "Path=/", "SameSite=Strict"]
    signed_in = f"{name}={TOKEN}"
    assert (await client.send("/", Authorization=None, Cookie=signed_in)).status == 200
    wrong = await client.send(f"/?token={TOKEN}x", Authorization=None, Cookie=signed_in)
    assert wrong.status == 401
    assert "Set-Cookie" not in wrong.headers
    # a path that begins with two slashes would lead to another host
    away = await client.send(f"//evil.example/?token={TOKEN}", Authorization=None)
    assert away.headers["Location"] == "/evil.example/"


async def test_a_link_of_another_site_signs_in(client: Client) -> None:
    headers = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    answer = await client.send(f"/?token={TOKEN}&sort=best", Authorization=None, **headers)
    # a redirect would go on without the strict cookie, and end with 401
    assert (answer.status, answer.headers["Refresh"]) == (200, "0; url=/?sort=best")
    assert "SameSite=Strict" in answer.headers["Set-Cookie"]
    away = await client.send(f"//evil.example/?token={TOKEN}", Authorization=None, **headers)
    assert away.headers["Refresh"] == "0; url=/evil.example/"
    wrong = await client.send("/?token=wrong", Authorization=None, **headers)
    assert (wrong.status, "Set-Cookie" in wrong.headers) == (401, False)


async def test_writes_are_json_from_our_own_pages(client: Client) -> None:
    path = f"{PREFIX}/stores/app/feedback"
    wish = {"id": "at-ro-1", "reward": 1.0}
    form = b"id=at-ro-1&reward=1"
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data", None):
        answer = await client.send(path, method="POST", body=form, Content_Type=kind)
        assert answer.status == 415, kind
        assert has_headers(answer)
    foreign = await client.send(path, method="POST", body=wish, Origin="http://evil.example")
    assert foreign.status == 403
    assert (await client.send(path, method="POST", body=wish, Authorization=None)).status == 401
    for method in ("PUT", "DELETE", "PATCH"):
        answer = await client.send(path, method=method, body=wish)
        assert answer.status in (404, 405), method
        assert has_headers(answer)
    large = {"id": "at-ro-1", "reward": 1.0, "comment": "x" * 70_000}
    assert (await client.send(path, method="POST", body=large)).status == 413
    assert (await client.send(path, method="POST", body=wish)).status == 200


async def test_without_write_nothing_can_be_rated(tmp_path: Path) -> None:
    url = await make_production_store(tmp_path / "app.db")
    async with serving(url) as client:
        path = f"{PREFIX}/stores/app/feedback"
        answer = await client.send(path, method="POST", body={"id": "at-ro-1", "reward": 1.0})
        assert answer.status == 403
        assert "--write" in answer.error
        assert not (await client.get("/places", v.Places)).write


async def test_places_are_a_fixed_table(client: Client, tmp_path: Path) -> None:
    await make_run(tmp_path / "hidden")
    for name in ("..", "../hidden", "%2e%2e", str(tmp_path / "hidden"), "hidden", "first/../first"):
        answer = await client.send(f"{PREFIX}/runs/{quote(name, safe='')}")
        assert answer.status == 404, name
    for name in ("../server.py", "%2e%2e/server.py", "..%2fserver.py", "/etc/passwd"):
        answer = await client.send(f"/static/{name}")
        assert answer.status == 404 or b"<html" in answer.body, name


async def test_static_files_have_types_and_tags(client: Client) -> None:
    page = await client.send("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    same = await client.send("/static/index.html", If_None_Match=page.headers["ETag"])
    assert (same.status, same.body) == (304, b"")
    for path in ("/", "/compare?run=a", "/runs/first/rollouts/x.js", "/stores/app?open=ro-1"):
        answer = await client.send(path)
        assert hashlib.sha256(answer.body).digest() == hashlib.sha256(page.body).digest()


async def test_invalid_parameters_are_named(client: Client) -> None:
    run = f"{PREFIX}/runs/first"
    for path, name in (
        ("/rollouts?limit=0", "limit"),
        ("/rollouts?limit=201", "limit"),
        ("/rollouts?limit=x", "limit"),
        ("/rollouts?sort=anything", "sort"),
        ("/rollouts?step=1.5", "step"),
        ("/rollouts?since=never", "since"),
        ("/rollouts?reward_min=low", "reward_min"),
        ("/rollouts?rated=perhaps", "rated"),
        (f"/rollouts?text={'x' * 1001}", "text"),
        ("/metrics?points=0", "points"),
        ("/metrics?after=-1", "after"),
        ("/groups?sort=longest", "sort"),
    ):
        answer = await client.send(run + path)
        assert answer.status == 400, path
        assert name in answer.error
    assert (await client.send(f"{PREFIX}/compare")).status == 400


def test_every_field_of_the_page_is_a_filter_of_the_api() -> None:
    """Check that the API knows each filter of the page: it ignores those that it does not know."""
    fields = WEB.joinpath("src", "filters.tsx").read_text("utf-8")
    [listed] = re.findall(r"const FILTERS = \[(.*?)\n\];", fields, re.DOTALL)
    assert set(re.findall(r'"(\w+)"', listed)) == set(Filters.__struct_fields__)


def test_the_page_is_compiled_from_its_sources() -> None:
    """Check it without node, which only `nox -s ui` has: by digests and the types of the API."""
    build = runpy.run_path(str(WEB / "build.py"))
    assert (WEB / "compiled.sha256").read_text("utf-8") == build["digest"](), "run web/build.py"
    types = runpy.run_path(str(WEB / "make_types.py"))
    written = types["types_text"](types["VIEWS"].read_text("utf-8"))
    assert types["OUTPUT"].read_text("utf-8") == written, "run web/build.py"


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            serve(UiOptions(places=(str(tmp_path),), port=port), reporter=SilentReporter())


def test_other_hosts_need_a_key() -> None:
    environment = {"KEY": "k" * 32, "SHORT": "k"}
    anywhere = UiOptions(places=(), host="0.0.0.0")
    with pytest.raises(ConfigError, match="--key-env"):
        take_token(anywhere, environment)
    for name in ("SHORT", "MISSING"):
        with pytest.raises(ConfigError, match=name):
            take_token(UiOptions(places=(), key_variable=name), environment)
    options = UiOptions(places=(), host="0.0.0.0", key_variable="KEY")
    assert take_token(options, environment) == "k" * 32
    assert "KEY" not in environment


def test_places_that_cannot_be_shown_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        Sources([str(tmp_path / "missing")])
    with pytest.raises(ConfigError, match="memory:"):
        Sources(["memory:"])
    with pytest.raises(ConfigError, match="mysql") as error:
        Sources(["mysql://me:secret@host/x"])
    assert "secret" not in str(error.value)


async def test_the_only_place_is_opened_at_once(tmp_path: Path) -> None:
    url = await make_production_store(tmp_path / "app.db")
    assert Sources([url]).front_page == "/stores/app"
    await make_run(tmp_path / "a run")
    assert Sources([str(tmp_path)]).front_page == "/runs/a%20run"
    assert Sources([str(tmp_path), url]).front_page == "/"


async def test_it_closes_at_once_while_pages_are_open(tmp_path: Path) -> None:
    await make_run(tmp_path / "first")
    async with serving(tmp_path) as client:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        streams = [
            await client.session.get(f"{client.server.url}{PREFIX}/events", headers=headers)
            for _ in range(3)
        ]
        async with asyncio.timeout(5):
            await client.server.close()
        assert all(stream.status == 200 for stream in streams)
        for stream in streams:
            stream.close()


async def test_the_ipv6_loopback_is_served(tmp_path: Path) -> None:
    server = UiServer(Sources([str(tmp_path)]), host="::1", port=0, token=TOKEN)
    try:
        await server.start()
    except ConfigError as error:
        pytest.skip(str(error))
    async with ClientSession() as session:
        answer = await Client(server, session).send("/")
    assert (server.url, answer.status) == (f"http://[::1]:{server.port}", 200)
    await server.close()
