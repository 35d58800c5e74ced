"""The search for the call after which a rollout was lost: a bisection over its calls.

A *point* is a place in the recorded rollout at which it can be continued. At a point the rollout
can still succeed, or no continuation was seen to succeed. The end of the rollout, which failed,
follows the last point. The search assumes that a rollout that is lost stays lost: then the points
at which it can succeed come first, and bisection finds the last of them.

Continuations are sampled, so a point at which few of them succeed can look like a lost one. The
search therefore tests the point after the last good one twice. If the second test succeeds, the
search goes on behind it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LossSearch:
    """The result of a search; it is filled while the search runs, so that it can be interrupted."""

    points: int
    """Number of points, without the end."""
    last_good: int | None = None
    """The last point at which a continuation succeeded; None if there is none."""
    first_lost: int = field(init=False)
    """The first point after `last_good` at which none succeeded; `points` for the end."""
    tests: list[tuple[int, bool]] = field(default_factory=list)
    """Each test in its order: the point, and whether a continuation succeeded."""
    reversals: list[int] = field(default_factory=list)
    """Points at which none succeeded in the first test, and one in the second."""
    is_complete: bool = False

    def __post_init__(self) -> None:
        self.first_lost = self.points


async def find_loss(
    search: LossSearch,
    succeeds: Callable[[int], Awaitable[bool]],
    *,
    starts_good: bool = False,
    confirm: bool = True,
) -> None:
    """Find two neighbouring points, of which the first can succeed and the second cannot.

    If the points at which the rollout can succeed all come before the others, they are the only two
    such neighbours. Without `confirm`, at most 1 + ceil(log2(points)) points are tested.

    Args:
        search: a new search, which gets the tests and the result.
        succeeds: tests a point: returns whether any continuation from it succeeds.
        starts_good: whether the rollout is known to succeed from the first point, which is then not
            tested.
        confirm: whether a point is tested again before it counts as lost.
    """

    async def test(point: int) -> bool:
        result = await succeeds(point)
        search.tests.append((point, result))
        return result

    failures = [search.points]  # points that failed, the first of them last
    confirmed = {search.points} if confirm else set(range(search.points + 1))
    low = 0 if starts_good else -1
    search.last_good = low if starts_good else None
    while True:
        high = search.first_lost = failures[-1]
        # The start is tested before anything else, because nothing can be found without it.
        middle = 0 if low < 0 else (low + high) // 2
        if low < middle < high:
            if await test(middle):
                low = search.last_good = middle
            else:
                failures.append(middle)
        elif high in confirmed:
            break
        elif await test(high):
            search.reversals.append(high)
            failures.pop()
            low = search.last_good = high
        else:
            confirmed.add(high)
    search.is_complete = True
