"""Ids of requests: by them a write that makes ids itself may be repeated, by who got no answer.

A claim needs no table of the requests that were made: the ids of the attempts that it begins are
made of the request's, so that the same request finds them again.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from lightspan.errors import DataError

_ID: Final = re.compile(r"[a-z]+-(?P<time>[0-9a-f]{16})[0-9a-f]{16}")


def check_id(request_id: str) -> None:
    """Raise `DataError` unless `records.new_id` makes such ids."""
    if not _ID.fullmatch(request_id):
        raise DataError(
            f"request id {request_id!r:.100} is none: make it with `schema.records.new_id`, as a "
            "word, a hyphen and 32 hex digits"
        )


def derived_id(prefix: str, request_id: str, place: int | str) -> str:
    """An id as `new_id` makes it, of a request's and of a place in what it asked for.

    It begins with the time, as the request's does, and does not tell the rest: apps know the id of
    their attempt, and must not be able to ask for their runner's claim.
    """
    found = _ID.fullmatch(request_id)
    assert found is not None, "check_id has seen it"
    named = f"{request_id}/{place}".encode()
    return f"{prefix}-{found['time']}{hashlib.blake2b(named, digest_size=8).hexdigest()}"
