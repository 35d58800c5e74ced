"""Find the app's prompts in recorded calls of the unchanged app."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.errors import ConfigError, UnknownAgentError
from lightspan.lightning.episode import Episode
from lightspan.lightning.selection import unknown_agents
from lightspan.schema import semconv as c
from lightspan.schema.prompts import LearnedPrompt, PromptPlace, PromptTemplate
from lightspan.schema.routing import matches
from lightspan.schema.spans import SpanKind
from lightspan.schema.system_prompts import ASKS, NO_INSTRUCTIONS, Instructions
from lightspan_prompts.search.dates import date_literals, days_around, undated_sentences
from lightspan_prompts.search.template_inference import SeveralPrompts, infer_template


class Component(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text of the app that was found and is to be learned."""

    template: str
    place: PromptPlace = PromptPlace.AGENT
    agent: str = ""
    """Path of the agent whose instructions the text is; empty for a prompt requested by name."""


class Surveyed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The texts that were found in the app and are to be learned."""

    components: dict[str, Component] = msgspec.field(default_factory=dict)
    """Name → text; the name is the pattern, or the agent's path if the pattern matches several."""
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    """Agents matched by a glob whose instructions cannot be learned → reason."""
    patterns: list[str] = msgspec.field(default_factory=list)
    asking: list[str] = msgspec.field(default_factory=list)
    """Agents that request their texts by name (`lightspan.prompt`), or have the name of such a
    text; their requests are not rewritten."""
    dates: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Name of a text → its literals that look like today's date."""

    def concerns(self, text: Text) -> bool:
        """Return whether a text is to be learned: whether a pattern matches its name.

        A text without a name is an agent's instructions, and the agent's path is matched.
        """
        if text.name is None and text.agent in self.asking:
            return False
        return any(matches(pattern, text.name or text.agent) for pattern in self.patterns)

    def lines(self) -> list[str]:
        """Describe each discovered text, and each agent whose texts stay as they are, in a line."""
        lines = []
        for name, component in self.components.items():
            template = PromptTemplate(component.template)
            fields = f", with {' '.join(template.fields)} in it" if template.fields else ""
            lines.append(f"found the text of {name!r}: {len(template.text)} characters{fields}")
            lines += date_warnings(name, self.dates.get(name, ()), component.place)
        for path, why in self.left_out.items():
            lines.append(f"the agent {path!r} is not learned: {why}")
        return lines

    def instructions(self, templates: Mapping[str, str]) -> Instructions:
        """Return the replacements that put a candidate's texts into the app's requests.

        Args:
            templates: name → template of each text to learn; other names are ignored.
        """
        return Instructions(
            surveyed=self.patterns,
            left_out={**self.left_out, **dict.fromkeys(self.asking, ASKS)},
            prompts={name: self.learned(name, templates[name]) for name in self.components},
        )

    def learned(self, name: str, template: str) -> LearnedPrompt:
        """Return the discovered text `name` with its template before and after learning."""
        component = self.components[name]
        return LearnedPrompt(
            before=PromptTemplate(component.template),
            after=PromptTemplate(template),
            place=component.place,
            agent=component.agent,
        )


_DATE_REMEDIES: Final = {
    PromptPlace.ARGUMENT: "it stays in the learned text as it is: write a {placeholder} for it",
    PromptPlace.CODE: (
        "once it changes, the learned text is no longer sent: write a {placeholder} for it, and "
        "fill it in the text that lightspan.prompt returns"
    ),
    PromptPlace.AGENT: (
        "if it changes from day to day, the learned text is sent today only: request the text by "
        "name in the app, lightspan.prompt(name, text), with a {placeholder} for it"
    ),
}


def date_warnings(name: str, literals: Iterable[str], place: PromptPlace) -> list[str]:
    """Return a warning for each of `literals` in the text `name`; they look like today's date."""
    return [
        f"the text of {name!r} contains {literal!r}, which looks like today: "
        f"{_DATE_REMEDIES[place]}"
        for literal in literals
    ]


class Text(NamedTuple):
    """A text that the app sent: instructions of an agent, or a prompt requested by name."""

    agent: str
    """Path of the acting agent."""
    name: str | None
    """Name of a prompt that the app requested; None for the instructions of a call."""
    text: str | None
    """The app's own text; None if no text could be replaced."""
    reason: str
    """Reason why a learned text could not be sent; empty for no reason."""
    applied: bool


def texts_of(episode: Episode) -> Iterator[Text]:
    """Yield the texts of an episode, unordered."""
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
        uncaptured = f"its call was made by {client}, which lightspan does not capture: {fix}"
    else:
        uncaptured = "it was answered without a captured request, for example by a cache"
    return Text(
        agent=path,
        name=name,
        text=None if original is None else str(original),
        reason=str(reason) if reason is not None else "" if is_read else uncaptured,
        applied=attributes.get(c.PROMPT_APPLIED) is True,
    )


def survey(episodes: Sequence[Episode], patterns: Sequence[str]) -> Surveyed:
    """Find the texts to learn in rollouts of the unchanged app.

    Raises:
        UnknownAgentError: a pattern matches no agent and no prompt.
        ConfigError: a matched text cannot be learned.
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
        for path, texts in calls.items():
            agents[path].append(texts)
    _check_patterns(patterns, episodes, [*agents, *named])
    asking = {text.agent for texts in named.values() for text in texts}
    # an agent with the name of a prompt may get its text from where it is built
    learned = [name for name in named if any(matches(pattern, name) for pattern in patterns)]
    asking |= {path for path in agents if any(matches(name, path) for name in learned)}
    components: dict[str, Component] = {}
    left_out: dict[str, str] = {}
    days = _days_of(episodes)
    for pattern in patterns:
        is_glob = "*" in pattern
        prompts = [name for name in named if matches(pattern, name)]
        for name in prompts:
            components.setdefault(name, _named_component(name, named[name]))
        if prompts and not is_glob:  # the app requests it under this name
            continue
        paths = [path for path in agents if matches(pattern, path)]
        paths = [path for path in paths if not (is_glob and path in asking)]
        for path in paths:
            name = pattern if len(paths) == 1 and not is_glob else path
            try:
                component = _agent_component(path, agents[path], days)
            except _NotLearnable as error:
                if not is_glob:
                    raise ConfigError(_not_learnable(pattern, path, str(error))) from None
                left_out[path] = str(error)
            else:
                if all(one.agent != path for one in components.values()):
                    components[name] = component
    if not components:
        raise ConfigError(" ".join(_not_learnable(p, p, why) for p, why in left_out.items()))
    return Surveyed(
        components=components,
        left_out=left_out,
        patterns=list(patterns),
        asking=sorted(asking - {one.agent for one in components.values()}),
        dates={name: dates for name, one in components.items() if (dates := _dates_of(one, days))},
    )


def _days_of(episodes: Iterable[Episode]) -> frozenset[date]:
    """Return the days on which the rollouts were run, with the days before and after.

    In the app's time zone, it may be another day.
    """
    starts = (span.start_ns for episode in episodes for span in episode.spans)
    return days_around({datetime.fromtimestamp(start / 1e9, UTC).date() for start in starts})


def _dates_of(component: Component, days: Collection[date]) -> list[str]:
    template = PromptTemplate(component.template)
    return date_literals(template, days) + undated_sentences(template)


def _check_patterns(
    patterns: Sequence[str], episodes: Sequence[Episode], names: Sequence[str]
) -> None:
    unmatched = [p for p in patterns if not any(matches(p, path) for path in names)]
    if unmatched:
        message = next((episode.message for episode in episodes if episode.message), "")
        why = f". A rollout ended with: {message[-300:]}" if message else ""
        raise UnknownAgentError(unknown_agents(unmatched, names) + why)


class _NotLearnable(Exception):
    """Raised if the text of an agent cannot be learned; the message is the reason."""


def _named_component(name: str, requested: Sequence[Text]) -> Component:
    texts = {text.text for text in requested if text.text is not None}
    if len(texts) > 1:
        raise ConfigError(
            f"lightspan.prompt({name!r}, …) got {len(texts)} different texts: pass the template "
            "with its {placeholders}, and fill in the result"
        )
    return Component(template=texts.pop(), place=PromptPlace.CODE)


def _agent_component(
    path: str, rollouts: Sequence[Sequence[Text]], days: Collection[date]
) -> Component:
    """Infer the template of an agent's instructions from the texts of its calls.

    Args:
        path: the agent's path.
        rollouts: the texts of the agent's calls, per rollout.
        days: days on which the rollouts ran. Dates that are true of them become placeholders.
    """
    reasons = [text.reason for calls in rollouts for text in calls if text.text is None]
    # calls of one rollout often have equal texts
    all_texts = [t for calls in rollouts for t in dict.fromkeys(call.text for call in calls)]
    texts = [text for text in all_texts if text is not None]
    # among others, a call without instructions is left alone and counted
    refusals = [reason for reason in reasons if reason != NO_INSTRUCTIONS or not texts]
    if refusals:
        raise _NotLearnable(refusals[0])
    try:
        template = infer_template(texts, days)
    except SeveralPrompts as error:
        raise _NotLearnable(str(error)) from None
    return Component(template=template.template, agent=path)


def _not_learnable(name: str, path: str, why: str) -> str:
    return (
        f"the instructions of the agent {path!r} cannot be learned from its requests: {why}. "
        f"Request the text by name in the app: text = lightspan.prompt({name!r}, text)"
    )
