"""Count requests to models that lightspan did not record, because it does not know the client.

A dry run writes the counts to an attribute of the attempt's root span.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lightspan.schema import semconv as c
from lightspan.schema.spans import Attributes, Span


class Request(NamedTuple):
    """A request to a model, sent by a client whose requests lightspan does not record."""

    agent: str
    """Path of the agent that sent the request."""
    client: str
    """Package that called the HTTP client, such as `litellm` or the app's own."""
    model: str
    """Name of the model; empty if the body of the request does not name it."""
    url: str
    """URL without query and credentials."""


def uncaptured_attributes(requests: Mapping[Request, int]) -> Attributes:
    """Return the span attribute that lists unrecorded requests with their numbers.

    It is written to the root span of an attempt. The result is empty if there are no requests.

    Args:
        requests: request → how often it was sent.
    """
    if not requests:
        return {}
    return {c.REQUESTS_PAST: json.dumps([(*request, n) for request, n in requests.items()])}


def requests_of(spans: Iterable[Span]) -> Counter[Request]:
    """Read from root spans of attempts how often each unrecorded request was sent.

    The numbers are summed over `spans`.
    """
    requests: Counter[Request] = Counter()
    for span in spans:
        for *request, count in json.loads(str(span.attributes.get(c.REQUESTS_PAST, "[]"))):
            requests[Request(*request)] += count
    return requests
