"""Test the result of a finished run of an example, whose folder is LIGHTSPAN_RUN."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from lightspan.training.statistics import paired_gain
from tests.reports.ui_numbers import check_run


def test_the_held_out_gain_is_above_zero() -> None:
    """Check the lower end of the paired 95 % interval of the gain, which any machine should
    reach.
    """
    files = sorted((Path(os.environ["LIGHTSPAN_RUN"]) / "evaluations").glob("step-*.json"))
    before, *_, after = (json.loads(path.read_text()) for path in files)
    gain = paired_gain(before["rewards"], after["rewards"], after["clusters"])
    assert gain.n == len(before["rewards"]) == len(after["rewards"]) >= 200
    assert gain.low > 0


def test_the_page_has_the_numbers_of_inspect() -> None:
    asyncio.run(check_run(Path(os.environ["LIGHTSPAN_RUN"])))
