"""Prompt of the reflection model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightspan.schema.prompts import PromptTemplate
from lightspan_prompts.search.feedback import Evidence, examples
from lightspan_prompts.search.reflection import rules_of

_QUESTION: Final = """\
You improve one text of an application that asks language models: the prompt called "{name}". \
An application fills it in and sends it; you see below what came of it.

The prompt as it is, between the marks:
<prompt>
{text}
</prompt>
{rules}
These runs used it. Each shows the task, what was asked and answered, what went wrong, and the \
reward, of which more is better:

{runs}

Find out what the runs with little reward lacked and what the others did right. Write a prompt \
with which such tasks would be done better: say clearly what is to be done and in which form it \
is to be answered, and put down what the runs show about this kind of task, rules and facts \
included, since the model that reads the prompt sees none of this. Do not put the answers of these \
very tasks in.

Answer with the whole new prompt between <prompt> and </prompt>, and nothing after it."""


def question(name: str, template: PromptTemplate, evidence: Sequence[Evidence]) -> str:
    """Return the request to rewrite the prompt `name`, which shows the rollouts of `evidence`."""
    rules, runs = rules_of(template, "The new prompt"), examples(evidence)
    return _QUESTION.format(name=name, text=template.text, rules=rules, runs=runs)
