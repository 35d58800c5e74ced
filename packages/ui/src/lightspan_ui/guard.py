"""Decide which requests the server answers, and the headers of every answer.

Web pages of other hosts, other programs of the browser and other users of the machine can send
requests to a port of loopback. So every request needs the token, except `/health`; its host must be
this server's (against DNS rebinding); a request that a page sent must come from this server's own
pages; and a write must be JSON, which no form of another page can send. All checks are functions of
a request's head, and compare secrets in constant time.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from typing import Final, NamedTuple

from lightspan_gateway.serving.loopback import is_loopback

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "lightspan",
}
"""Headers of every answer."""
READS: Final = ("GET", "HEAD")
HEALTH: Final = "/health"
"""Path that is answered without a token."""
API: Final = "/api/"
"""Beginning of the paths of the API."""
MAX_BODY_BYTES: Final = 64 * 1024
"""Maximum size of a request's body."""
_HOST: Final = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>\d{1,5}))?")


class Head(NamedTuple):
    """The parts of a request that the guard reads. A missing header is None."""

    method: str
    path: str
    host: str
    origin: str | None = None
    fetch_site: str | None = None
    fetch_mode: str | None = None
    authorization: str | None = None
    cookie: str | None = None
    """Value of the server's own cookie."""
    content_type: str = ""
    token: str | None = None
    """Value of `token` in the query."""


class Refusal(NamedTuple):
    """A request that is refused: the status and what to do about it."""

    status: int
    text: str


class Guard(NamedTuple):
    """The address and the secret of a server."""

    host: str
    """Address of the interface on which the server listens."""
    port: int
    token: str

    @property
    def cookie(self) -> str:
        """Name of the cookie with the token. It has the port, because cookies apply to all ports
        of a host."""
        return f"lightspan-ui-{self.port}"

    def refusal(self, head: Head) -> Refusal | None:
        """Return why a request is refused; None if it is answered."""
        if head.path == HEALTH and head.method in READS:
            return None
        return (
            _host_refusal(head, self.host, self.port)
            or _origin_refusal(head)
            or _token_refusal(head, self.token)
            or _type_refusal(head)
        )

    def signs_in(self, head: Head) -> bool:
        """Return whether a request that was not refused is to get the cookie with the token."""
        return head.token is not None and _is_page(head)


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(32)


def is_own_host(header: str, host: str, port: int) -> bool:
    """Return whether a `Host` header names this server.

    A page of another host that resolves its name to this machine (DNS rebinding) sends its own
    name. So on loopback only loopback's names are valid, and elsewhere only addresses and this
    machine's names.

    Args:
        header: value of the header.
        host: address of the interface on which the server listens.
        port: port of the server.
    """
    match = _HOST.fullmatch(header.lower())
    if match is None or int(match["port"] or 80) != port:
        return False
    name = match["name"].strip("[]")
    if is_loopback(name) or is_loopback(host):
        return is_loopback(name)
    return _is_address(name) or name in (host.lower(), socket.gethostname().lower())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_refusal(head: Head, host: str, port: int) -> Refusal | None:
    if is_own_host(head.host, host, port):
        return None
    return Refusal(403, f"the host {head.host!r} is not served; open http://127.0.0.1:{port}")


def _origin_refusal(head: Head) -> Refusal | None:
    """Refuse requests of pages of another origin, except for links that open a page."""
    is_link = _is_page(head) and head.fetch_mode == "navigate"
    is_foreign = head.fetch_site not in (None, "none", "same-origin") and not is_link
    if is_foreign or (head.origin is not None and head.origin != f"http://{head.host}"):
        return Refusal(403, "requests of other pages are refused")
    return None


def _token_refusal(head: Head, token: str) -> Refusal | None:
    if head.token is not None and _is_page(head):
        is_valid = _equal(head.token, token)
    else:
        scheme, _, key = (head.authorization or "").partition(" ")
        is_valid = _equal(head.cookie or "", token) or (
            scheme.lower() == "bearer" and _equal(key.strip(), token)
        )
    if is_valid:
        return None
    return Refusal(401, "open the address that `lightspan ui` printed: it has the token")


def _type_refusal(head: Head) -> Refusal | None:
    if head.method in READS or head.content_type == "application/json":
        return None
    return Refusal(415, "send application/json")


def _is_page(head: Head) -> bool:
    return head.method in READS and not head.path.startswith(API)


def _equal(value: str, token: str) -> bool:
    """Return whether two texts are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(value.encode(errors="replace"), token.encode())
