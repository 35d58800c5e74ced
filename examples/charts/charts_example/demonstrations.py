"""Imperfect readings, for the warm start before reinforcement learning.

They teach the model to read charts and to answer in the form that the computer reads. Two values of
five are wrong, in one way for each form of chart: reinforcement learning can remove such a habit.
"""

from __future__ import annotations

import base64
import itertools
import random
from typing import Any, Final, TypeAlias

from charts_example.app import ASKED
from charts_example.charts import Chart, draw
from charts_example.questions import write_reading
from charts_example.tasks import stream

Chat: TypeAlias = dict[str, Any]

COUNT: Final = 18_000
"""Number of demonstrations of a warm start."""
MISTAKE_RATE: Final = 0.4
"""Probability that a value is misread.

- In bars and tables it is one too low; 1 is read as 2.
- In a line it is the value of the next point; of the last point, the first one's.
"""


def demonstrate(count: int = COUNT, seed: int = 0) -> list[Chat]:
    """Return readings of newly drawn charts in the style of the training charts.

    Equal arguments give equal lists.
    """
    rng = random.Random(f"mistakes {seed}")
    tasks = itertools.islice(stream("train", f"demonstrations {seed}"), count)
    found = [_chat(task["chart"], rng) for task in tasks]
    rng.shuffle(found)
    return found


def read(chart: Chart, name: str, rng: random.Random) -> int:
    """Return the value of a column as the demonstrator reads it."""
    columns = chart["columns"]
    if rng.random() >= MISTAKE_RATE:
        return columns[name]
    if chart["form"] == "line":
        names = list(columns)
        return columns[names[(names.index(name) + 1) % len(names)]]
    return columns[name] - 1 or 2


def _chat(chart: Chart, rng: random.Random) -> Chat:
    values = {name: read(chart, name, rng) for name in chart["columns"]}
    url = f"data:image/png;base64,{base64.b64encode(draw(chart)).decode()}"
    return {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": ASKED},
                    {"type": "image_url", "image_url": {"url": url}},
                ],
            },
            {"role": "assistant", "content": write_reading(values)},
        ]
    }
