"""The example's names for the command line of `train.py`."""

from __future__ import annotations

from lightspan_examples.example import Example


class TerminalExample(Example):
    """The repair of packages as an `Example`."""

    name = "terminal"
    training = "terminal_example.training"
