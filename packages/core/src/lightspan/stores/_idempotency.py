"""Derive the ids of a claim's attempts from the id of the request that claims them.

A runner that got no answer repeats its request with the same id. The same attempt ids are derived,
so the store finds the attempts that the first request started. No table of requests is needed.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from lightspan.errors import DataError

_ID: Final = re.compile(r"[a-z]+-(?P<time>[0-9a-f]{16})[0-9a-f]{16}")


def check_id(request_id: str) -> None:
    """Raise `DataError` for a request id that is not in the format of `records.new_id`."""
    if not _ID.fullmatch(request_id):
        raise DataError(
            f"request id {request_id!r:.100} is not valid: make it with "
            "`lightspan.schema.records.new_id`, as a word, a hyphen and 32 hex digits"
        )


def derived_id(prefix: str, request_id: str, place: int | str) -> str:
    """Derive an id in the format of `new_id` from a request id and a place in the request.

    The result contains the time in the request id and a hash of the rest. The request id cannot be
    computed from it. So an app, which knows its attempt's id, cannot repeat the claim of its
    runner.

    Args:
        prefix: beginning of the id.
        request_id: id of the request.
        place: number of the item in the request, or a word for a special item.
    """
    match = _ID.fullmatch(request_id)
    assert match is not None, "the caller has called check_id"
    text = f"{request_id}/{place}".encode()
    return f"{prefix}-{match['time']}{hashlib.blake2b(text, digest_size=8).hexdigest()}"
