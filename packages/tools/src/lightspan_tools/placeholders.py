"""Say what the placeholders of a learned prompt stand for."""

from __future__ import annotations

from lightspan.schema.prompts import LearnedPrompt, PromptPlace


def placeholder_note(prompt: LearnedPrompt) -> str:
    """Return what the placeholders of an agent's learned instructions stand for.

    A search finds the parts of the instructions that it must not change, such as dates and JSON.
    The result is empty if there is none, or if the app itself fills the placeholders.
    """
    fields = prompt.after.fields
    if prompt.place is not PromptPlace.AGENT or not fields:
        return ""
    verb = "stands for a part" if len(fields) == 1 else "stand for parts"
    return (
        f"{', '.join(fields)} {verb} of the app's own instructions, which stays as it is in each "
        "request: write it there if you copy this text"
    )
