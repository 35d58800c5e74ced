"""Count requests to models that lightspan does not record, because of the client that sends them.

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
    """A request to a model by a client that is not captured."""

    agent: str
    """Path of the agent that sent the request."""
    client: str
    """Package that called the HTTP client, such as `litellm` or the app's own."""
    model: str
    """Name of the model; empty if the body of the request does not name it."""
    url: str
    """URL without query and credentials."""


def uncaptured_attributes(requests: Mapping[Request, int]) -> Attributes:
    """Return the attribute with the number of each uncaptured request, for an attempt's root span.

    Empty if there are no requests.
    """
    if not requests:
        return {}
    return {c.REQUESTS_PAST: json.dumps([(*request, n) for request, n in requests.items()])}


def requests_of(spans: Iterable[Span]) -> Counter[Request]:
    """Return how often each uncaptured request was sent, summed over the root spans of attempts."""
    requests: Counter[Request] = Counter()
    for span in spans:
        for *request, count in json.loads(str(span.attributes.get(c.REQUESTS_PAST, "[]"))):
            requests[Request(*request)] += count
    return requests
