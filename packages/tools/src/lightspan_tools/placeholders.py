"""Return the text of a learned prompt to paste into an app, and say what its placeholders are."""

from __future__ import annotations

from lightspan.schema.prompts import LearnedPrompt, PromptPlace
from lightspan.schema.system_prompts import Instructions


def text_to_paste(name: str, prompt: LearnedPrompt) -> str:
    """Return the learned text as it replaces the app's own text in the app's code.

    An agent's instructions are sent as they are, so their braces are single. A text that the app
    passes to `lightspan.prompt` has the braces that this function returns. An argument is the
    template itself.
    """
    if prompt.place is PromptPlace.AGENT:
        return prompt.after.text
    if prompt.place is PromptPlace.ARGUMENT:
        return prompt.template
    reading = Instructions(prompts={name: prompt}).text_of(name, prompt.before.template)
    return prompt.template if reading is None or reading.sent is None else reading.sent


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
