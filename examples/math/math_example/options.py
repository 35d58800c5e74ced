"""The command line of `train.py`, and the names that follow from it."""

from __future__ import annotations

from lightspan_examples.example import Example


class MathExample(Example):
    """The word problem agent."""

    name = "math"
    training = "math_example.training"
    data_help = "the folder of Calc-X or GSM8K, instead of generated problems"
