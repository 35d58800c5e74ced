"""Tests of the verdict on a search's gain: noise keeps the first prompts, a real gain does not."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from lightspan_prompts.gepa.search import Search
from lightspan_prompts.search import verdict
from lightspan_prompts.search.candidates import Candidate, SearchResult, Split, read_found
from lightspan_prompts.search.evaluator import Trial
from lightspan_prompts.search.verdict import DRAWS, chance_of, judged, sign_flip_tail
from lightspan_testing.scripted import ScriptedServer
from packages.prompts.tests.made_up import World, apo, gepa, is_edit, search, text_of

Draw = Callable[[random.Random], float]
DISTRIBUTIONS: dict[str, Draw] = {
    "coins": lambda rng: float(rng.random() < 0.5),
    "rare successes": lambda rng: float(rng.random() < 0.1),
    "numbers": lambda rng: rng.random(),
    "with outliers": lambda rng: rng.gauss(0, 1) ** 3,
}


def candidate(rewards: list[float], again: list[float] | None = None) -> Candidate:
    runs = [rewards, *([again] if again else [])]
    return Candidate(
        templates={"p": str(rewards)},
        parents=[],
        rewards={str(n): reward for n, reward in enumerate(rewards)},
        again={str(n): reward for n, reward in enumerate(again or [])},
        mean=sum(map(sum, runs)) / len(runs) / len(rewards),
        rollouts=0,
    )


def result(candidates: list[Candidate]) -> SearchResult:
    means = [each.mean for each in candidates]
    return SearchResult(
        candidates=candidates,
        chosen=means.index(max(means)),
        ended="over",
        rollouts=0,
        unscored=0,
        failed=0,
        mean=0.0,
        reflections=0,
        unusable=0,
        tokens=0,
    )


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("repeats", [False, True])
def test_noise_is_seldom_taken_for_a_gain(name: str, repeats: bool) -> None:
    """Also where a prompt's rewards are the same again, as with a temperature of 0."""
    draw, rng = DISTRIBUTIONS[name], random.Random(name)
    taken, changed = 0, 0
    for number in range(600):
        tasks, others = (3, 5, 10, 25)[number % 4], (1, 4, 12)[number % 3]
        rewards = [[draw(rng) for _ in range(tasks)] for _ in range(others + 1)]
        best = max(range(1, others + 1), key=lambda n: sum(rewards[n]))
        again = rewards[best] if repeats else [draw(rng) for _ in range(tasks)]
        candidates = [
            candidate(each, again if n == best else None) for n, each in enumerate(rewards)
        ]
        taken += result(candidates).chosen != 0
        changed += judged(result(candidates), 0.05).chosen != 0
    assert taken > 240
    assert changed <= 0.05 * 600


@pytest.mark.parametrize(
    ("before", "after", "others"),
    [
        ([0.0] * 8, [1.0] * 8, 6),
        ([0.0] * 10, [1.0] * 7 + [0.0] * 3, 6),
        ([float(n % 2) for n in range(20)], [1.0] * 18 + [0.0, 1.0], 4),
        ([0.3, 0.5, 0.4, 0.6, 0.35, 0.4], [0.6, 0.75, 0.75, 0.85, 0.7, 0.5], 3),
    ],
)
def test_a_gain_is_told_from_chance(before: list[float], after: list[float], others: int) -> None:
    candidates = [candidate(before), *[candidate(before)] * (others - 1), candidate(after)]
    found = judged(result(candidates), 0.05)
    assert found.chance is not None
    assert found.chance < 0.05
    assert found.chosen == found.best == others
    assert found.verdict().startswith(f"candidate {others} is chosen, the best of {others} new")
    assert "split, a gain that chance alone would give with probability 0.0" in found.verdict()


def test_what_cannot_be_told() -> None:
    candidates = [candidate([0.0, 1.0, 0.0]), candidate([1.0, 1.0, 0.0])]
    found = judged(result(candidates), 0.05)
    assert (found.best, found.chosen) == (1, 0)
    assert found.verdict().startswith(
        "no gain that can be told from chance, so the prompts stay unchanged: candidate 1, the "
        "best of 1 new candidate, has 0.333 -> 0.667 on 3 tasks of the selection split, a gain "
        "that chance alone would give with probability 0."
    )
    assert judged(result(candidates), None).chosen == 1
    assert result(candidates).verdict() == (  # as of a search for which nobody asks the verdict
        "candidate 1 is chosen: 0.333 -> 0.667 on 3 tasks of the selection split"
    )
    assert judged(result(candidates[:1]), 0.05).verdict() == (
        "the prompts stay unchanged: none of 0 new candidates is better than they are, 0.333 on "
        "the selection split"
    )
    assert chance_of([candidate([0.0]), candidate([1.0])], 1) == 0.5


@pytest.mark.parametrize("count", [1, 2, 5, 9, 12])
@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.1, 0.2, 0.7), (-1.0, 0.0, 1.0)])
def test_the_probability_is_that_of_all_signs(count: int, values: tuple[float, ...]) -> None:
    """Check against an enumeration in exact fractions of all tasks, the unchanged ones too."""
    rng = random.Random(f"{count}{values}")
    for _ in range(5):
        pairs = [(rng.choice(values), rng.choice(values)) for _ in range(count)]
        gains = [Fraction(str(b)) - Fraction(str(a)) for a, b in pairs]
        signs = [*itertools.product((1, -1), repeat=count)]
        sums = [sum(map(operator.mul, gains, one)) for one in signs]
        expected = sum(one >= sum(gains) for one in sums) / len(sums)
        if sum(gains) > 0:
            assert sign_flip_tail([b - a for a, b in pairs]) == expected
        else:
            assert sign_flip_tail([b - a for a, b in pairs]) == 1.0


def test_twelve_tasks_of_which_eight_are_gained() -> None:
    """It is the sign test, of which Student's t would be ten times surer."""
    candidates = [candidate([0.0] * 12), candidate([1.0] * 8 + [0.0] * 4)]
    assert chance_of(candidates, 1) == pytest.approx(2**-8)


@pytest.mark.parametrize("losses", [0, 4, 11])
def test_many_tasks_are_sampled(losses: int) -> None:
    """Check the drawn signs against the binomial distribution, and that they are always equal."""
    gains = [1.0] * (30 - losses) + [-1.0] * losses
    exact = sum(math.comb(30, n) for n in range(losses + 1)) / 2**30
    drawn = sign_flip_tail(gains)
    assert drawn == sign_flip_tail(gains)
    error = math.sqrt(exact * (1 - exact) / DRAWS)
    assert exact - 4 * error <= drawn <= exact + 4 * error + 1 / DRAWS
    assert drawn > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [gepa, apo])
async def test_a_search_in_noise_keeps_the_first_prompts(
    make: Any, tmp_path: Path, server: ScriptedServer
) -> None:
    """Of 12 such searches, 9 would end with another prompt."""

    def rewrites(request: Any) -> str:
        number = len(server.requests)
        return f"<prompt>\n{text_of(request)} {number}\n</prompt>" if is_edit(request) else "vague"

    changed, best = 0, 0
    for seed in range(12):
        rng = random.Random(seed)

        def noise(task: Any, texts: Mapping[str, str], rng: random.Random = rng) -> float:
            return float(rng.random() < 0.5)

        world = World(tmp_path / str(seed), noise)
        if make is apo:
            server.script = rewrites
        algorithm = make(server, seed=seed, significance=0.05, max_rollouts=150)
        found = await search(algorithm, world)
        changed, best = changed + (found.chosen != 0), best + (found.best != 0)
        assert found.verdict() in world.notes
        assert read_found(tmp_path / str(seed)) == found
        if not found.chosen:
            assert all(not each.is_changed for each in algorithm.learned_prompts().values())
    assert best >= 6
    assert changed <= 1


async def test_finalists_of_skewed_rewards_seldom_win_by_chance(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts are equally good. A second run of the finalists alone would favour them: the
    initial prompts would have the larger variance, and with it the more frequent low means.
    """
    monkeypatch.setattr(verdict, "DRAWS", 2_000)
    rng, chosen, count = random.Random(1), 0, 1_000
    world = World(tmp_path, lambda task, texts: rng.lognormvariate(0, 2))
    tasks = [{"n": n} for n in range(20)]
    for _ in range(count):
        settings = gepa(server, max_rollouts=1_000)
        nothing: Any = None
        searching = Search(settings, world, Split([], tasks), nothing, nothing)  # type: ignore[arg-type]
        for number in range(3):
            texts = {"first": f"{number}", "second": ""}
            [run] = await searching._trials.evaluate([Trial("selection", texts, tasks)])
            searching._runs.append([run.seen])
            searching._candidates.append(
                Candidate(templates=texts, parents=[], rewards={}, mean=0.0, rollouts=0)
            )
        best = await searching._confirmed()
        found = searching._trials.result(searching._candidates, best, "over")
        chosen += judged(found, 0.05).chosen > 0
    assert chosen / count <= 0.05
