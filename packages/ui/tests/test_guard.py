"""Which requests the server refuses: the checks alone, without a server."""

from __future__ import annotations

import pytest

from lightspan_ui.guard import HEADERS, Guard, Head, is_own_host, new_token

TOKEN = "t" * 43
GUARD = Guard("127.0.0.1", 8765, TOKEN)
HEAD = Head("GET", "/api/v1/places", "127.0.0.1:8765", authorization=f"Bearer {TOKEN}")


def status(**changes: object) -> int:
    refusal = GUARD.refusal(HEAD._replace(**changes))
    return 200 if refusal is None else refusal.status


def test_a_token_in_cookie_or_header_is_accepted_and_nothing_else() -> None:
    assert status() == 200
    assert status(authorization=None, cookie=TOKEN) == 200
    assert status(authorization=f"bearer  {TOKEN}") == 200
    for wrong in (None, "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"):
        assert status(authorization=wrong) == 401, wrong
    assert status(authorization=None, cookie="é\udcff") == 401
    assert status(authorization=None, cookie="") == 401


def test_tokens_are_long_and_random() -> None:
    assert len(new_token()) >= 32
    assert new_token() != new_token()


def test_a_token_in_the_address_opens_pages_but_not_the_api() -> None:
    page = HEAD._replace(path="/runs/sql", authorization=None, token=TOKEN)
    assert GUARD.refusal(page) is None
    assert GUARD.signs_in(page)
    assert status(authorization=None, token=TOKEN) == 401
    wrong = GUARD.refusal(page._replace(token="wrong", cookie=TOKEN))
    assert wrong is not None
    assert wrong.status == 401


def test_health_alone_is_open() -> None:
    assert status(path="/health", host="elsewhere", authorization=None) == 200
    assert status(path="/health", method="POST", authorization=None) == 401
    assert status(path="/healthy", authorization=None) == 401


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8765", "localhost:8765", "LOCALHOST:8765", "[::1]:8765", "127.0.0.2:8765"),
    ],
)
def test_names_of_loopback_with_the_port_are_served(host: str) -> None:
    assert is_own_host(host, "127.0.0.1", 8765)


@pytest.mark.parametrize(
    "host",
    [
        *("", "127.0.0.1", "127.0.0.1:8766", "localhost:80", "evil.example:8765", "10.0.0.1:8765"),
        *("localhost.evil.example:8765", "127.0.0.1.evil.example:8765", "evil@127.0.0.1:8765"),
        *("127.0.0.1:8765@evil.example", "127.0.0.1:8765/", "[::1]:99999", "[::1", "x:8765:8765"),
        "127.0.0.1:8765\n",
    ],
)
def test_other_hosts_are_refused(host: str) -> None:
    assert not is_own_host(host, "127.0.0.1", 8765)
    assert status(host=host) == 403


def test_an_open_interface_serves_addresses_but_no_foreign_names() -> None:
    assert is_own_host("10.0.0.1:8765", "0.0.0.0", 8765)
    assert is_own_host("localhost:8765", "0.0.0.0", 8765)
    assert is_own_host("box.lan:8765", "box.lan", 8765)
    assert not is_own_host("evil.example:8765", "0.0.0.0", 8765)


def test_port_80_may_be_left_out() -> None:
    assert is_own_host("localhost", "127.0.0.1", 80)


@pytest.mark.parametrize(
    "origin",
    [
        *("http://127.0.0.1:9000", "http://localhost:8765", "https://127.0.0.1:8765", "null", ""),
        *("http://evil.example", "http://127.0.0.1:8765.evil.example", "http://127.0.0.1"),
    ],
)
def test_foreign_origins_are_refused(origin: str) -> None:
    assert status(origin=origin) == 403


def test_the_own_origin_is_accepted() -> None:
    assert status(origin="http://127.0.0.1:8765", fetch_site="same-origin") == 200
    assert status(fetch_site="none") == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything"])
def test_requests_of_other_pages_are_refused(site: str) -> None:
    assert status(fetch_site=site) == 403
    assert status(fetch_site=site, fetch_mode="navigate") == 403
    assert status(fetch_site=site, path="/app.js", fetch_mode="no-cors") == 403
    # a link elsewhere may open a page, which holds no data
    assert status(fetch_site=site, path="/runs/sql", fetch_mode="navigate") == 200
    assert status(fetch_site=site, path="/", fetch_mode="navigate", method="POST") == 403


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_writes_take_json_only(kind: str) -> None:
    assert status(method="POST", content_type=kind) == 415
    assert status(method="DELETE", content_type=kind) == 415
    assert status(method="POST", content_type="application/json") == 200


def test_the_host_is_checked_before_the_token_and_the_token_before_the_type() -> None:
    assert status(host="evil.example", authorization=None) == 403
    assert status(origin="http://evil.example", authorization=None) == 403
    assert status(method="POST", authorization=None) == 401


def test_the_cookie_is_named_by_the_port() -> None:
    assert GUARD.cookie == "lightspan-ui-8765"


def test_the_policy_lets_nothing_in_from_elsewhere() -> None:
    policy = dict(part.split(" ", 1) for part in HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    assert HEADERS["Cache-Control"] == "no-store"
