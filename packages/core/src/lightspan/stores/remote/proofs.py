"""Whose an attempt is: who claimed it knows the id of the claim's request, and nobody else does.

The ids of attempts are made of that id (`_requests.derived_id`), so a server can see that the two
belong together without asking the store. A client remembers what it claimed, for the whole process:
a runner's guard has a connection of its own. Who looks after a runner in another process shares a
secret with it, of which its claims' ids are made (`ClaimIds`), and shows of its attempts what it
would have shown, once it is dead.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from lightspan.errors import DataError
from lightspan.schema import clock
from lightspan.stores._leases import ALONE
from lightspan.stores._requests import check_id, derived_id

_MOST: Final = 10_000
"""Attempts of which a process knows the proof: far more than it has under way."""
_lock = threading.Lock()
_known: OrderedDict[str, str] = OrderedDict()


class ClaimIds:
    """Ids of claims, made of a secret and the time: like those of `records.new_id` to all who do
    not know it.

    Args:
        secret: any text that cannot be guessed.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._latest = 0
        """Of one thread: the runner's loop."""

    def new(self) -> str:
        """One that was not there before."""
        self._latest = max(self._latest + 1, clock.now_ns())
        return self._at(f"{self._latest:016x}")

    def keep_proofs(self, attempt_ids: Sequence[str]) -> None:
        """Remember by which requests these were claimed: their ids begin with the claims' times."""
        for attempt_id in attempt_ids:
            keep_proofs(self._at(attempt_id.partition("-")[2][:16]), [attempt_id])

    def _at(self, time: str) -> str:
        digest = hashlib.blake2b(time.encode(), key=self._secret, digest_size=8)
        return f"claim-{time}{digest.hexdigest()}"


def keep_proofs(request_id: str, attempt_ids: Sequence[str]) -> None:
    """Remember by which request these attempts were claimed."""
    wanted = set(attempt_ids)
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
