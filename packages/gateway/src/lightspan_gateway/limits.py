"""Limits and times of the servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lightspan.errors import ConfigError

MAX_CALL_BYTES: Final = 16 * 2**20
"""Maximum size of the body of a model call, in bytes."""
_HOST: Final = re.compile(r"((\*\.)?[\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits of the images in a request, and the hosts from which images are fetched."""

    max_images: int = 64
    """Maximum number of images in a request."""
    max_bytes: int = 10 * 2**20
    """Maximum size of an image file, in bytes."""
    max_side: int = 8_192
    """Maximum width and height, in pixels."""
    max_pixels: int = 2**24
    """Maximum number of decoded pixels: 4096 by 4096."""
    hosts: tuple[str, ...] = ()
    """Hosts from which images are fetched: `cdn.example.com`, with its port unless that is the
    scheme's (`127.0.0.1:8080`), or `*.example.com`, which must not lead to private addresses.
    Images with addresses at other hosts are refused."""
    max_fetched_bytes: int = 32 * 2**20
    """Maximum size of all images of a request that are fetched, in bytes."""
    fetch_timeout_s: float = 20.0
    """Seconds for which the images of a request may be fetched."""

    def __post_init__(self) -> None:
        """Check the hosts.

        Raises:
            ConfigError: a host is none, such as a URL.
        """
        for host in self.hosts:
            if _HOST.fullmatch(host) is None:
                raise _no_hosts(host)


def _no_hosts(value: str) -> ConfigError:
    return ConfigError(
        f"image_hosts: {value!r} is not in a list of hosts, without scheme and path, such as "
        '["cdn.example.com", "*.example.com", "127.0.0.1:8080"]'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of every server."""

    max_body_bytes: int = MAX_CALL_BYTES
    """Maximum size of a request's body, in bytes."""
    keepalive_s: float = 75.0
    """Seconds after which an idle connection is closed.

    Longer than the idle limits of HTTP clients (5 to 15 s), so that the client closes first: a
    request that arrives while the server closes the connection is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits(ServerLimits):
    """Limits of a gateway."""

    store_timeout_s: float = 90.0
    """Maximum seconds for which an answer is held until the store has recorded its call. Longer
    than the time for which a remote store's client retries."""
    relayed_s: float = 30.0
    """Seconds for which a relayed call continues after its client disconnected.

    A relayed call reached the gateway through the store's server. If that server restarts within
    this time, a retry of the client gets the answer. Otherwise the call is cancelled, and a retry
    samples again. This favours short answers, so resampled calls are not trained.
    """
    replay_wait_s: float = 30.0
    """Seconds without progress for which a call of a forked attempt waits for its turn, beyond the
    time that the recorded attempt took. Then the attempt does not repeat the recorded one."""
    compile_timeout_s: float = 10.0
    """Seconds that a grammar may take to compile."""
    images: ImageLimits = field(default_factory=ImageLimits)
    """Limits of images."""

    def with_hosts(self, hosts: Sequence[str]) -> GatewayLimits:
        """Return a copy that also fetches images from `hosts` (`ImageLimits.hosts`).

        Raises:
            ConfigError: a host is none.
        """
        if isinstance(hosts, str):
            raise _no_hosts(hosts)
        return replace(self, images=replace(self.images, hosts=(*self.images.hosts, *hosts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreServerLimits(ServerLimits):
    """Limits of a store's server."""

    max_body_bytes: int = 64 * 2**20
    """Maximum size of a request's body, in bytes."""
    max_concurrent: int = 256
    """Maximum number of requests that are executed at once."""
    max_relayed_bytes: int = MAX_CALL_BYTES
    """Maximum size of the body of a model call that is forwarded to a gateway, in bytes."""
    max_relayed: int = 1024
    """Maximum number of model calls that are forwarded to one gateway at once."""
    health_timeout_s: float = 5.0
    """Maximum seconds of a health check."""
    health_interval_s: float = 1.0
    """Minimum seconds between two health checks; the requests in between share the result."""
    shutdown_s: float = 10.0
    """Seconds for which requests may continue while the server stops."""
