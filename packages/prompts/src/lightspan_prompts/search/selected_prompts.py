"""Prompts selected by a search: what the app gets, and how they have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightspan.schema.prompts import LearnedPrompt, PromptTemplate
from lightspan.schema.resources import INSTRUCTIONS, Resources
from lightspan.schema.system_prompts import Instructions
from lightspan_prompts.search.prompt_discovery import Surveyed


@dataclass(frozen=True)
class SelectedPrompts:
    """The currently selected texts.

    Args:
        prompts: initial prompts that the app takes as arguments.
        optimize: patterns of agents, and of prompts that the app requests by name.
        surveyed: texts discovered in the app; None before the discovery.
        templates: name → template of all prompts; None before a selection.
        asked: task → names of the agents that were called when the run first ran this task.
    """

    prompts: Mapping[str, PromptTemplate]
    optimize: Sequence[str] = ()
    surveyed: Surveyed | None = None
    templates: Mapping[str, str] | None = None
    asked: Mapping[str, list[str]] = field(default_factory=dict)

    def resources(self) -> Resources:
        """Return what an app gets: prompts as arguments, and instructions for its agents.

        Before texts are discovered, the instructions of the app stay unchanged and are recorded.
        """
        arguments = self.arguments()
        if self.surveyed is not None and self.templates is not None:
            return {**arguments, INSTRUCTIONS: self.surveyed.instructions(self.templates)}
        if not self.optimize:
            return arguments
        return {**arguments, INSTRUCTIONS: Instructions(surveyed=list(self.optimize))}

    def arguments(self) -> dict[str, PromptTemplate]:
        """Return the prompts that the app takes as arguments."""
        templates = self.templates or {}
        return {
            name: PromptTemplate(templates.get(name, prompt.template), engine=prompt.engine)
            for name, prompt in self.prompts.items()
        }

    def learned(self) -> dict[str, LearnedPrompt]:
        """Return name → text before and after learning, for every text that is known so far."""
        after = self.arguments()
        learned = {
            name: LearnedPrompt(before=prompt, after=after[name])
            for name, prompt in self.prompts.items()
        }
        if self.surveyed is not None and self.templates is not None:
            for name in self.surveyed.components:
                learned[name] = self.surveyed.learned(name, self.templates[name])
        return learned
