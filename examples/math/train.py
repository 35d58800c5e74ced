"""Train the word problem agent on this machine, or on a GPU with a real model.

python examples/math/train.py                    a small model, built here, on the CPU
python examples/math/train.py --resume           go on after Ctrl-C, a crash or `kill -9`
python examples/math/train.py --dev              look before training: a few problems, a report
python examples/math/train.py --model Qwen/Qwen2.5-1.5B-Instruct --device cuda
python examples/math/train.py --model ... --data DIR       on Calc-X or GSM8K
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightspan_examples.script import Example, main


class Math(Example):
    """The word problem agent."""

    name = "math"
    metric = "exact answers"
    training = "math_example.training"
    data_help = "the folder of Calc-X or GSM8K, instead of generated problems"


EXAMPLE = Math(cache=Path(__file__).parent / ".cache")

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__ or ""))
