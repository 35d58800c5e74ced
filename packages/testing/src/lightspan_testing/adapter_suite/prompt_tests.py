"""Tests that an agent's instructions are found and replaced, and that nothing else is changed."""

from __future__ import annotations

import json

import pytest

from lightspan.schema import semconv as c
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.routing import agent_name
from lightspan.schema.system_prompts import Instructions, Slot, find
from lightspan_prompts.search.prompt_discovery import survey
from lightspan_testing.adapter_harness import Part, Played, Stage
from lightspan_testing.adapter_suite.base import AdapterTests
from lightspan_testing.adapter_suite.checks import episode_of
from lightspan_testing.adapter_suite.scenario_runner import part_of, play_opened
from lightspan_testing.adapter_suite.scenarios import MODES, App
from lightspan_testing.attempts import path_of
from lightspan_testing.scripted import Request

FINELY = "Write finely."
"""Addition to the writer's instructions, for which the script has another answer."""


class PromptTests(AdapterTests):
    """Test that the instructions of the agent `writer` can be learned in an unchanged app."""

    @pytest.mark.parametrize("mode", MODES)
    def test_instructions(self, stage: Stage, mode: str) -> None:
        """The instructions of the agent `writer` are found in its requests and replaced.

        The requests of the agent `checker` stay unchanged.
        """
        name = self.app(stage, "team", mode).names.get("writer", "writer")
        with self.adapter.instrument():
            plain = self._played(stage, mode, None)
            surveyed = self._played(stage, mode, Instructions(surveyed=[name]))
            discovered = survey([episode_of(surveyed)], [name])
            [component] = discovered.components.values()
            template = PromptTemplate(component.template)
            better = template.rewritten(f"{template.text} {FINELY}").template
            instructions = discovered.instructions(dict.fromkeys(discovered.components, better))
            sent = self._played(stage, mode, instructions)
        assert list(discovered.components) == [name]
        assert agent_name(component.agent) == name
        requests = [_by_agent(stage, attempt) for attempt in (plain, surveyed, sent)]
        writers, checkers = zip(*requests, strict=True)
        assert writers[0] == writers[1]
        assert len(writers[0]) == len(writers[2]) > 0
        for before, after in zip(writers[0], writers[2], strict=True):
            one, other = find(json.loads(before)), find(json.loads(after))
            assert isinstance(one, Slot)
            assert isinstance(other, Slot)
            assert other.text == f"{one.text} {FINELY}"
            assert after == before.replace(
                json.dumps(one.text)[1:-1], json.dumps(other.text)[1:-1], 1
            )
        assert checkers[0] == checkers[1] != []
        # the checker's requests may contain the writer's answer
        assert [text.replace("A fine draft", "A draft") for text in checkers[2]] == checkers[0]
        for span in sent.llm_spans:
            is_writer = agent_name(path_of(span)) == name
            answer = str(span.attributes[c.OUTPUT_MESSAGES])
            assert ("A fine draft" in answer) is is_writer
            assert (span.attributes.get(c.PROMPT_APPLIED) is True) is is_writer
            assert (c.PROMPT_ORIGINAL in span.attributes) is is_writer

    def _played(self, stage: Stage, mode: str, instructions: Instructions | None) -> Played:
        app = self.app(stage, "team", mode)  # its client is closed after the run
        played = stage.open(_part_of(app), through_gateway=False, instructions=instructions)
        return play_opened(stage, app, played, "team", mode)


def _part_of(app: App) -> Part:
    """Return the script of the scenario `team`, with a different answer for changed instructions.

    The different answer is given to prompts that contain `FINELY`.
    """
    part = part_of(app, "team")
    return Part(
        {**part.says, "fine writer": ["A fine draft of {task}."]},
        {FINELY: "fine writer", **part.marks},
    )


def _by_agent(stage: Stage, played: Played) -> tuple[list[str], list[str]]:
    """Return the bodies of the requests of the agent `writer`, and those of the agent `checker`."""
    writers: list[str] = []
    checkers: list[str] = []
    requests: list[Request] = stage.requests_of(played.tag)
    for request, call in zip(requests, stage.brain.calls_in(played.tag), strict=True):
        assert request.headers["authorization"] == "Bearer key"
        body = json.dumps(request.body).replace(played.tag, "TASK")
        (checkers if call.agent == "checker" else writers).append(body)
    return writers, checkers
