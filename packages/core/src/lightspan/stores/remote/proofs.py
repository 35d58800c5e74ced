"""Whose an attempt is: who claimed it knows the id of the claim's request, and nobody else does.

The ids of attempts are made of that id (`_requests.derived_id`), so a server can see that the two
belong together without asking the store. A client remembers what it claimed, for the whole process:
a runner's guard has a connection of its own.
"""

from __future__ import annotations

import hmac
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from lightspan.errors import DataError
from lightspan.schema.records import Claim
from lightspan.stores._leases import ALONE
from lightspan.stores._requests import check_id, derived_id

_MOST: Final = 10_000
"""Attempts of which a process knows the proof: far more than it has under way."""
_lock = threading.Lock()
_known: OrderedDict[str, str] = OrderedDict()


def keep_proofs(request_id: str, claims: Sequence[Claim]) -> None:
    """Remember by which request these attempts were claimed."""
    wanted = {claim.attempt.attempt_id for claim in claims}
    places: Iterator[int | str] = itertools.chain([ALONE], range(_MOST))
    for place in places:
        if not wanted:
            return
        attempt_id = derived_id("at", request_id, place)
        if attempt_id in wanted:
            wanted.remove(attempt_id)
            with _lock:
                _known[attempt_id] = f"{request_id}/{place}"
                if len(_known) > _MOST:
                    _known.popitem(last=False)


def proof_of(attempt_id: str) -> str:
    """What shows that this process has claimed the attempt; empty if it has not."""
    with _lock:
        return _known.get(attempt_id, "")


def proves(proof: str, attempt_id: str) -> bool:
    """Whether who has the proof has claimed the attempt."""
    request_id, _, place = proof.partition("/")
    try:
        check_id(request_id)
    except DataError:
        return False
    made = derived_id("at", request_id, place)
    return hmac.compare_digest(made.encode(), attempt_id.encode(errors="surrogatepass"))
