"""Origins of agents and calls, as an attempt's root span tells of them (`capture.sightings`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lightspan.schema import conventions as c
from lightspan.schema.spans import Span


class Framework(NamedTuple):
    """One whose agents act."""

    name: str
    """Of its distribution; of the instrumentation scope where that names none."""
    version: str
    """The installed one; empty where no distribution has that name."""
    told_by: str
    """The adapter, or the spans of an instrumentation scope."""


class Request(NamedTuple):
    """One to a model, by a client that the wire shim does not see."""

    agent: str
    """The path of who asked."""
    client: str
    """What sent it: a library, or the class of an HTTP client."""
    caller: str
    """The module that called the HTTP client; empty where the library is the client."""
    provider: str
    """As LiteLLM calls it; else empty."""
    model: str
    """Empty where the request names none."""
    url: str
    """Without a query, and without a key that may stand before the host."""


def frameworks_of(spans: Iterable[Span]) -> dict[Framework, set[str]]:
    """Framework → the paths of its agents."""
    found: dict[Framework, set[str]] = {}
    for *framework, path in _told(spans, c.FRAMEWORKS):
        found.setdefault(Framework(*framework), set()).add(path)
    return found


def requests_of(spans: Iterable[Span]) -> Counter[Request]:
    """How often each was sent."""
    found: Counter[Request] = Counter()
    for *request, count in _told(spans, c.REQUESTS_PAST):
        found[Request(*request)] += count
    return found


def _told(spans: Iterable[Span], key: str) -> Iterator[list[Any]]:
    for span in spans:
        yield from json.loads(str(span.attributes.get(key, "[]")))


__all__ = ["Framework", "Request", "frameworks_of", "requests_of"]
