"""An app whose import takes as long as a file is there, in a folder that its environment names."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lightspan_testing.sample_apps import waits

__all__ = ["waits"]

_folder = Path(os.environ["SLOW_FOLDER"])
(_folder / f"imports-{os.getpid()}").touch()
while (_folder / "hold").exists():
    time.sleep(0.02)
