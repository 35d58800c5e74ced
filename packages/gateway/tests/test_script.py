"""Test `Script` against a small model of an app whose calls overlap."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings, strategies as st

from lightspan_gateway.forks import Role, Script, ScriptCall


class Model:
    """An app: each call is made when the answers of some earlier calls are there.

    Args:
        needs: for each call, the earlier calls whose answers it needs.
    """

    def __init__(self, needs: list[set[int]]) -> None:
        self.needs = needs

    def enabled(self, begun: set[int], answered: set[int]) -> list[int]:
        return [n for n, needs in enumerate(self.needs) if n not in begun and needs <= answered]

    def record(self, rng: random.Random) -> list[ScriptCall]:
        """Run the app; return its calls with the sequence numbers of their starts and ends."""
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        clock = 0
        while len(ends) < len(self.needs):
            begin = self.enabled({*starts}, {*ends})
            end = [n for n in starts if n not in ends]
            clock += 1
            event = rng.choice([*(("begin", n) for n in begin), *(("end", n) for n in end)])
            (starts if event[0] == "begin" else ends)[event[1]] = clock
        return [
            ScriptCall(f"call-{n}", f"agent-{n % 2}", f"hash-{n}", starts[n], ends[n])
            for n in range(len(self.needs))
        ]


@st.composite
def apps(draw: st.DrawFn) -> list[set[int]]:
    size = draw(st.integers(1, 7))
    return [set(draw(st.lists(st.integers(0, n - 1)))) if n else set() for n in range(size)]


def replay(
    needs: list[set[int]], calls: list[ScriptCall], script: Script, rng: random.Random
) -> tuple[list[int], list[int], list[int]]:
    """Run the app again; return the calls that were replayed in order, the fork, and the others.

    Requests arrive in any order that the app allows, and answers of sampled calls come at any time.
    """
    model, waiting, sampled = Model(needs), dict[int, Role](), list[int]()
    begun, answered = set[int](), set[int]()
    replayed, forked = list[int](), list[int]()
    while len(answered) < len(needs):
        begin = model.enabled(begun, answered)
        ready = []
        for n, role in waiting.items():
            placement = script.place(f"request-{n}", calls[n].agent_path, calls[n].body_hash)
            assert placement is not None
            assert placement.role is role  # a retry gets the same role
            ready += [n] if script.is_ready(placement) else []
        assert begin or ready  # the app and the script never wait for each other
        n = rng.choice([*begin, *ready])
        if n not in begun:
            begun.add(n)
            placement = script.place(f"request-{n}", calls[n].agent_path, calls[n].body_hash)
            assert placement is not None, f"call {n} departed"
            waiting[n] = placement.role
            if rng.random() < 0.2 and placement.role in (Role.PREFIX, Role.CONCURRENT):
                script.withdraw(f"request-{n}")  # its client left, and comes again
                placement = script.place(f"request-{n}", calls[n].agent_path, calls[n].body_hash)
                assert placement is not None
            continue
        role = waiting.pop(n)
        answered.add(n)
        if role is Role.PREFIX:
            replayed.append(n)
            script.answer(f"call-{n}")
        else:
            (forked if role is Role.FORK else sampled).append(n)
    return replayed, forked, sampled


@settings(max_examples=400, deadline=None)
@given(apps(), st.integers(0, 2**32))
def test_an_app_that_repeats_itself_never_departs_and_never_hangs(
    needs: list[set[int]], seed: int
) -> None:
    rng = random.Random(seed)
    calls = Model(needs).record(rng)
    ordered = sorted(calls, key=lambda call: call.start)
    if all(a.end < b.start for a, b in pairwise(ordered)):  # each call waited for the one before
        order = [calls.index(call) for call in ordered]
        needs = [
            {order[order.index(n) - 1]} if order.index(n) else set() for n in range(len(calls))
        ]
    for place in [None, *range(len(calls))]:
        fork = "" if place is None else f"call-{place}"
        script = Script(calls, fork)
        replayed, forked, sampled = replay(needs, calls, script, rng)
        limit = None if place is None else calls[place].start
        prefix = [n for n, call in enumerate(calls) if limit is None or call.end < limit]
        assert replayed == sorted(prefix, key=lambda n: calls[n].end)
        assert forked == ([] if place is None else [place])
        assert {*replayed, *forked, *sampled} == {*range(len(calls))}
        assert script.answered == len(prefix)
        assert script.has_forked == (place is not None)


@settings(max_examples=200, deadline=None)
@given(apps(), st.integers(0, 2**32), st.data())
def test_another_request_departs(needs: list[set[int]], seed: int, data: st.DataObject) -> None:
    """Check a request that was never made, at any moment before the fork."""
    rng = random.Random(seed)
    calls = Model(needs).record(rng)
    last = max(calls, key=lambda call: call.start)
    script = Script(calls, last.call_id)
    for call in sorted(script.prefix, key=lambda call: call.start):
        if data.draw(st.booleans()):
            break
        assert script.place(call.call_id, call.agent_path, call.body_hash) is not None
    assert script.place("other", "agent-0", "never") is None
    assert script.place("other", "agent-7", calls[0].body_hash) is None
    assert not script.has_forked


def test_equal_requests_are_taken_in_their_order() -> None:
    """Check three equal requests at once, as of best-of-n."""
    calls = [ScriptCall(f"call-{n}", "a", "same", 1 + n, 10 - n) for n in range(3)]
    script = Script(calls)
    placed = [script.place(f"request-{n}", "a", "same") for n in range(3)]
    assert [each.call_id for each in placed if each] == ["call-0", "call-1", "call-2"]
    assert [script.is_ready(each) for each in placed if each] == [False, False, True]
    assert script.place("request-3", "a", "same") is None
