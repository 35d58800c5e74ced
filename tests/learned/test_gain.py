"""What a finished run of an example left behind; LIGHTSPAN_RUN names its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lightspan.training.statistics import paired_gain


def test_the_held_out_gain_is_above_zero() -> None:
    """The lower end of the paired 95 % interval: what must hold on any machine."""
    files = sorted((Path(os.environ["LIGHTSPAN_RUN"]) / "evaluations").glob("step-*.json"))
    before, *_, after = (json.loads(path.read_text()) for path in files)
    gain = paired_gain(before["rewards"], after["rewards"], after["clusters"])
    assert gain.n == len(before["rewards"]) == len(after["rewards"]) >= 200
    assert gain.low > 0
