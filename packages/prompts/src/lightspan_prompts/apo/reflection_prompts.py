"""Prompts of the reflection models: criticise a prompt, and edit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightspan.schema.prompts import PromptTemplate
from lightspan_prompts.search.feedback import Evidence, examples
from lightspan_prompts.search.reflection import rules_of
from lightspan_prompts.transcript import shortened

MAX_CRITIQUE_LENGTH: Final = 8_000
"""Maximum characters of a critique; the middle of a longer one is left out."""

_CRITIQUE: Final = """\
An application fills in the text below, called "{name}", and sends it to a language model.

The text, between the marks:
<prompt>
{text}
</prompt>
{rules}
The runs that follow used it. Each shows the task, what was asked and answered, what went wrong, \
and the reward, of which more is better:

{runs}

{angle} Say in a short list what is to be changed in the text and why, each point with the runs \
that show it. Speak of the text alone: the model, the tasks and the application stay as they are. \
Do not write the new text yet."""

ANGLES: Final = (
    "Look for what the text leaves out: rules, facts and conditions that the runs with little "
    "reward needed and that the model was not told.",
    "Look for what the text says badly: where the model could read it in two ways, did something "
    "that was not wanted, or answered in another form than the application can use.",
    "Compare the runs with much reward with those with little, and look for what in the text makes "
    "the difference: what should it insist on, and what should it leave out?",
)
"""Aspects to look for. One is drawn at random per critique, so that critiques of one prompt differ.
"""

_EDIT: Final = """\
A text called "{name}" tells a language model what to do. Somebody has looked at what came of it \
and says what is to be changed.

The text, between the marks:
<prompt>
{text}
</prompt>
{rules}
What is to be changed, between the marks:
<critique>
{critique}
</critique>

{way} Where the critique contradicts itself, follow the point that does most; where it asks for \
the answers of single tasks, put down the rule behind them instead.

Answer with the whole new text between <prompt> and </prompt>, and nothing after it."""

WAYS: Final = (
    "Mend the text: change what the critique names, and keep all else as it stands.",
    "Write the text anew, such that it does what the old one was for and all that the critique "
    "asks, as clearly and briefly as you can.",
)
"""Ways to edit. One is drawn at random per edit."""


def critique(name: str, template: PromptTemplate, evidence: Sequence[Evidence], angle: str) -> str:
    """Build the request for a critique (textual gradient) of the prompt `name`.

    Args:
        name: name of the prompt.
        template: the prompt.
        evidence: rollouts with this prompt, which the request shows.
        angle: one of `ANGLES`: what the critique should look at.
    """
    return _CRITIQUE.format(
        name=name,
        text=template.text,
        rules=rules_of(template, "A new text"),
        runs=examples(evidence),
        angle=angle,
    )


def edit(name: str, template: PromptTemplate, critique: str, way: str) -> str:
    """Build the request to rewrite the prompt `name` according to a critique.

    Args:
        name: name of the prompt.
        template: the prompt.
        critique: the critique.
        way: one of `WAYS`: how the prompt should be rewritten.
    """
    return _EDIT.format(
        name=name,
        text=template.text,
        rules=rules_of(template, "A new text"),
        critique=shortened(critique.strip(), MAX_CRITIQUE_LENGTH),
        way=way,
    )
