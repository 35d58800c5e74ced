"""The reward of an answer, and what is earned without looking at the right chart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from charts_example.questions import parse
from charts_example.tasks import Task


def score(answer: int | None, task: Task) -> float:
    """Return 1.0 for the right answer, else 0.0."""
    return float(answer == task["answer"])


def exchanged(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks, each with the chart of another; questions and answers stay.

    The n-th task gets the chart that comes half of the list later.
    """
    half = len(tasks) // 2
    return [
        Task(**{**task, "chart": tasks[(number + half) % len(tasks)]["chart"]})
        for number, task in enumerate(tasks)
    ]


def exchanged_score(tasks: Sequence[Task]) -> float:
    """Return the mean reward of a perfect reader whose charts are exchanged.

    It is the mean over all pairs of a task and another task's chart.
    """
    right = sum(
        parse(task["question"]).answer(other["chart"]["columns"]) == task["answer"]
        for task in tasks
        for other in tasks
        if other is not task
    )
    return right / (len(tasks) * (len(tasks) - 1))


def constant_scores(tasks: Sequence[Task]) -> dict[str, float]:
    """Return answer → the mean reward if it answers all questions; and of the best one for each
    kind of question, with the name `the best for each kind of question`.
    """
    counts = Counter(task["answer"] for task in tasks)
    by_kind: dict[str, Counter[int]] = {}
    for task in tasks:
        kind = parse(task["question"]).kind.text
        by_kind.setdefault(kind, Counter())[task["answer"]] += 1
    best = math.fsum(of.most_common(1)[0][1] for of in by_kind.values())
    scores = {str(answer): count / len(tasks) for answer, count in counts.items()}
    return {**scores, "the best for each kind of question": best / len(tasks)}
