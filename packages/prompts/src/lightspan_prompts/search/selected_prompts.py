"""The texts that a search is about, as they were last chosen: what apps are handed of them, and
what became of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightspan.schema.prompts import LearnedPrompt, PromptTemplate
from lightspan.schema.resources import INSTRUCTIONS, Resources
from lightspan.schema.system_prompts import Instructions
from lightspan_prompts.search.prompt_discovery import Surveyed


@dataclass(frozen=True)
class SelectedPrompts:
    """Texts, as they were last chosen.

    Args:
        prompts: those that the app takes as arguments, as they were given.
        optimize: patterns of agents, and of prompts that the app asks for.
        surveyed: the texts of these that were found in the app; None as long as nobody has looked.
        templates: name → template, of all of them; None as long as nothing was chosen.
        asked: task → who was asked in its first rollout of the run.
    """

    prompts: Mapping[str, PromptTemplate]
    optimize: Sequence[str] = ()
    surveyed: Surveyed | None = None
    templates: Mapping[str, str] | None = None
    asked: Mapping[str, list[str]] = field(default_factory=dict)

    def resources(self) -> Resources:
        """What apps are handed: arguments, and what agents are told. That is what the app says, and
        written down, as long as nobody has looked."""
        handed = self.arguments()
        if not self.optimize:
            return handed
        if self.surveyed is None or self.templates is None:
            return {**handed, INSTRUCTIONS: Instructions(surveyed=list(self.optimize))}
        return {**handed, INSTRUCTIONS: self.surveyed.told(self.templates)}

    def arguments(self) -> dict[str, PromptTemplate]:
        """Those that the app takes as arguments."""
        now = self.templates or {}
        return {
            name: PromptTemplate(now.get(name, given.template), engine=given.engine)
            for name, given in self.prompts.items()
        }

    def learned(self) -> dict[str, LearnedPrompt]:
        """What became of each text that is known."""
        after = self.arguments()
        learned = {
            name: LearnedPrompt(before=given, after=after[name])
            for name, given in self.prompts.items()
        }
        if self.surveyed is not None and self.templates is not None:
            for name in self.surveyed.components:
                learned[name] = self.surveyed.learned(name, self.templates[name])
        return learned
