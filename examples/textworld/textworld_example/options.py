"""The example's names for the command line of `train.py`."""

from __future__ import annotations

from lightspan_examples.example import Example


class TextWorldExample(Example):
    """The games of TextWorld as an `Example`."""

    name = "textworld"
    training = "textworld_example.training"
