"""The example's names and options for the command line of `train.py`."""

from __future__ import annotations

from lightspan_examples.example import Example


class MathExample(Example):
    """The word problem agent as an `Example`."""

    name = "math"
    training = "math_example.training"
    data_help = "the folder of Calc-X or GSM8K, instead of generated problems"
