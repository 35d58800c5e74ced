"""The example's names for the command line of `train.py`."""

from __future__ import annotations

from lightspan_examples.example import Example


class ChartsExample(Example):
    """The reading of charts as an `Example`."""

    name = "charts"
    training = "charts_example.training"
