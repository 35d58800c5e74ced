"""An attack on a victim, from its first request to its last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tests.attack.attacker import Outcome, attack
from tests.attack.hostile import requests
from tests.attack.victims import Victim

RENEWED: Final = 300
"""Requests of one attempt; then comes another, as in a training."""
LOOKS: Final = 20
"""How often the victim's memory is looked at."""


async def attacked(
    victim: Victim, count: int, seed: int, *, say: Callable[[str], object] = lambda text: None
) -> Outcome:
    """Attack with so many requests; what was reached is said on the way."""
    sent = requests(seed, host=f"{victim.host}:{victim.port}", token=lambda: victim.token)
    started = time.monotonic()

    def each(outcome: Outcome) -> None:
        if outcome.tried % RENEWED == 0:
            victim.renew()
        if outcome.tried % max(1, count // LOOKS) == 0:
            seconds, memory = time.monotonic() - started, victim.memory()
            outcome.memory.append((outcome.tried, memory))
            say(f"{victim.name}: {outcome.text()}; {seconds:,.0f} s, {memory / 2**20:,.0f} MiB")

    return await attack(victim.host, victim.port, sent, count, each=each)
