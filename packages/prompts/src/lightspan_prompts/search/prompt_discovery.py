"""The survey: what the calls of the first evaluation, of the app as it is, say of the texts that
are to be learned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lightspan.errors import ConfigError, UnknownAgentError
from lightspan.lightning.episode import Episode
from lightspan.lightning.selection import unknown_agents
from lightspan.schema import semconv as c
from lightspan.schema.prompts import LearnedPrompt, PromptPlace, PromptTemplate
from lightspan.schema.routing import matches
from lightspan.schema.spans import SpanKind
from lightspan.schema.system_prompts import ASKS, NO_INSTRUCTIONS, Instructions, Rewrite
from lightspan_prompts.search.template_inference import SeveralPrompts, template_of


class Component(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text that was found, to be learned."""

    template: str
    place: PromptPlace = PromptPlace.AGENT
    agent: str = ""
    """The path of the agent whose instructions it is."""


class Surveyed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found."""

    components: dict[str, Component] = msgspec.field(default_factory=dict)
    """Name → text; the name is the pattern, or where that matches several the agent's path."""
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    """Agents that a pattern with `*` matches, whose instructions cannot be learned, and why."""
    patterns: list[str] = msgspec.field(default_factory=list)
    asking: list[str] = msgspec.field(default_factory=list)
    """Agents that ask for their texts by name (`lightspan.prompt`): nothing is put into their
    requests."""

    def concerns(self, text: Text) -> bool:
        """Whether this is one of the texts that were found, or should have been."""
        if text.name is None and text.agent in self.asking:
            return False
        return any(matches(pattern, text.name or text.agent) for pattern in self.patterns)

    def lines(self) -> list[str]:
        """The same for people."""
        lines = []
        for name, component in self.components.items():
            template = PromptTemplate(component.template)
            fields = f", with {' '.join(template.fields)} in it" if template.fields else ""
            lines.append(f"found the text of {name!r}: {len(template.text)} characters{fields}")
        for path, why in self.left_out.items():
            lines.append(f"the agent {path!r} stays as it is: {why}")
        return lines

    def told(self, templates: Mapping[str, str]) -> Instructions:
        """What agents are told by a candidate.

        Args:
            templates: name → template, of these components among others.
        """
        agents = {n: each for n, each in self.components.items() if each.agent}
        return Instructions(
            surveyed=self.patterns,
            left_out={**self.left_out, **dict.fromkeys(self.asking, ASKS)},
            rewrites=[
                Rewrite(agent=each.agent, template=each.template, text=templates[name])
                for name, each in agents.items()
            ],
            prompts={
                name: self.learned(name, templates[name])
                for name in self.components.keys() - agents.keys()
            },
        )

    def learned(self, name: str, template: str) -> LearnedPrompt:
        """What became of a component."""
        component = self.components[name]
        return LearnedPrompt(
            before=PromptTemplate(component.template),
            after=PromptTemplate(template),
            place=component.place,
            agent=component.agent,
        )


class Text(NamedTuple):
    """What a call, or the app itself, gave as the text of an agent."""

    agent: str
    """The path of who acted."""
    name: str | None
    """Of a prompt that the app asks for; None: it is the instructions of a call."""
    text: str | None
    """None: there is none that could be replaced."""
    reason: str
    """Why a text that was learned was not sent."""
    applied: bool


def texts_of(episode: Episode) -> Iterator[Text]:
    """Those of an episode, in no order."""
    elsewhere = {
        span.attributes[c.PROMPT_CALL]: span.attributes
        for span in episode.spans
        if c.PROMPT_CALL in span.attributes
    }
    for span in episode.spans:
        if c.PROMPT_NAME in span.attributes:
            path = str(span.attributes.get(c.AGENT_PATH))
            yield _text(path, str(span.attributes[c.PROMPT_NAME]), span.attributes)
    for call in episode.calls:
        if call.choice == 0 and call.span is not None and call.span.kind is SpanKind.LLM:
            attributes = elsewhere.get(call.call_id, call.span.attributes)
            yield _text(call.agent_path, None, attributes)


def _text(path: str, name: str | None, attributes: Mapping[str, Any]) -> Text:
    original, reason = attributes.get(c.PROMPT_ORIGINAL), attributes.get(c.PROMPT_REASON)
    is_read = original is not None or reason is not None
    client, fix = attributes.get(c.CLIENT), attributes.get(c.CLIENT_FIX)
    if client is not None:
        unseen = f"its call was made by {client}, past lightspan: {fix}"
    else:
        unseen = "it was answered without a request that lightspan saw: by a cache, say"
    return Text(
        agent=path,
        name=name,
        text=None if original is None else str(original),
        reason=str(reason) if reason is not None else "" if is_read else unseen,
        applied=attributes.get(c.PROMPT_APPLIED) is True,
    )


def survey(episodes: Sequence[Episode], patterns: Sequence[str]) -> Surveyed:
    """What is to be learned.

    Raises:
        UnknownAgentError: a pattern matches no agent and no prompt.
        ConfigError: the text of one cannot be learned.
    """
    named: dict[str, list[Text]] = defaultdict(list)
    agents: dict[str, list[list[Text]]] = defaultdict(list)
    for episode in episodes:
        calls: dict[str, list[Text]] = defaultdict(list)
        for text in texts_of(episode):
            if text.name is not None:
                named[text.name].append(text)
            else:
                calls[text.agent].append(text)
        for path, several in calls.items():
            agents[path].append(several)
    _check_patterns(patterns, episodes, [*agents, *named])
    asking = {text.agent for several in named.values() for text in several}
    components: dict[str, Component] = {}
    left_out: dict[str, str] = {}
    for pattern in patterns:
        is_glob = "*" in pattern
        prompts = [name for name in named if matches(pattern, name)]
        for name in prompts:
            components.setdefault(name, _named_component(name, named[name]))
        if prompts and not is_glob:  # it is the app's own word for it
            continue
        paths = [path for path in agents if matches(pattern, path)]
        paths = [path for path in paths if not (is_glob and path in asking)]
        for path in paths:
            name = pattern if len(paths) == 1 and not is_glob else path
            try:
                found = _agent_component(path, agents[path])
            except _Refused as refused:
                if not is_glob:
                    raise ConfigError(_refusal(pattern, path, str(refused))) from None
                left_out[path] = str(refused)
            else:
                if all(each.agent != path for each in components.values()):
                    components[name] = found
    if not components:
        raise ConfigError(" ".join(_refusal(path, path, why) for path, why in left_out.items()))
    return Surveyed(
        components=components,
        left_out=left_out,
        patterns=list(patterns),
        asking=sorted(asking - {each.agent for each in components.values()}),
    )


def _check_patterns(
    patterns: Sequence[str], episodes: Sequence[Episode], known: Sequence[str]
) -> None:
    unmatched = [p for p in patterns if not any(matches(p, path) for path in known)]
    if unmatched:
        said = next((episode.message for episode in episodes if episode.message), "")
        why = f". A rollout ended with: {said[-300:]}" if said else ""
        raise UnknownAgentError(unknown_agents(unmatched, known) + why)


class _Refused(Exception):
    """The text of an agent cannot be learned; says why."""


def _named_component(name: str, several: Sequence[Text]) -> Component:
    texts = {text.text for text in several if text.text is not None}
    if len(texts) > 1:
        raise ConfigError(
            f"lightspan.prompt({name!r}, …) was given {len(texts)} texts: give it the text before "
            "it is filled, with {placeholders}, and fill what it returns"
        )
    return Component(template=texts.pop(), place=PromptPlace.CODE)


def _agent_component(path: str, rollouts: Sequence[Sequence[Text]]) -> Component:
    """The text of an agent.

    Args:
        path: its own.
        rollouts: what its calls said, of each rollout.
    """
    reasons = [text.reason for calls in rollouts for text in calls if text.text is None]
    # many calls of one rollout may say the same
    all_texts = [t for calls in rollouts for t in dict.fromkeys(each.text for each in calls)]
    texts = [text for text in all_texts if text is not None]
    # a call without any beside others is left alone, and counted
    refusals = [reason for reason in reasons if reason != NO_INSTRUCTIONS or not texts]
    if refusals:
        raise _Refused(refusals[0])
    try:
        template = template_of(texts)
    except SeveralPrompts as error:
        raise _Refused(str(error)) from None
    return Component(template=template.template, agent=path)


def _refusal(name: str, path: str, why: str) -> str:
    return (
        f"the instructions of the agent {path!r} cannot be learned as its requests carry them: "
        f"{why}. Let the app ask for the text where it makes it: "
        f"text = lightspan.prompt({name!r}, text)"
    )
