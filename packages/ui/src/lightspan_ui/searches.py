"""Show searches for prompts."""

from __future__ import annotations

from lightspan_ui import views
from lightspan_ui.run_files import LiveRunFolder


def prompts_of(folder: LiveRunFolder, state: views.RunState) -> views.Prompts:
    return views.Prompts(searches=[], prompts=[])
