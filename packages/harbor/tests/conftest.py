"""The folder of the tests' own sandbox and agents, which host processes import."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
