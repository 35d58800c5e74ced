"""Breaks: why some conversations of an attempt fell apart into several rows.

Rows are decided by token ids alone (`lightspan.lightning.rows`). This module looks at what the app
said too, and names the cause where a conversation that went on did not go on in its row. Each
trained call has one of four relations to the calls before it, of the same attempt, policy and
agent path:

`merged`    its prompt begins with every token of a row: it extends that row.
`new`       no earlier call of the agent is continued by it. A sub-agent that is asked afresh each
            time, and a prompt that is asked twice, are new conversations and never breaks.
`branch`    it continues an earlier call token for token, but another call has taken that row
            (several answers to one prompt were each followed up).
`broken`    it continues an earlier call, and its tokens differ from what that call consumed and
            sampled.

A call *continues* an earlier one if the earlier call's messages are a proper prefix of its own, or
else if the earlier call's answer stands among its messages. Of several such calls the one with the
longest prefix is meant, of those one whose answer comes next, of those the latest.

The cause of a break is that of the first token that differs:

1. `retokenisation`: the texts of both sequences agree up to the end of the differing tokens: the
   same text was cut into other tokens than the model sampled.
2. `template`: the text differs although the app repeated the earlier messages, the answer and the
   tools unchanged: the chat template renders the past otherwise than it was (drops earlier
   thinking, trims white space, words a tool call in its own way).
3. `other`: the app changed something: a message, the answer, the tools, or the order.

Messages are compared by role, name, text, and name and arguments of tool calls (as JSON values, so
that white space between them does not matter); ids of tool calls are not compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from lightspan.lightning.episode import Call
from lightspan.lightning.rows import common_prefix, merge
from lightspan.lightning.transitions import Transition, TransitionKey
from lightspan.schema import genai_messages, semconv as c

Where = Literal["prompt", "response", "shorter"]
Decode = Callable[[str, Sequence[int]], str]
"""(policy, token ids) → text, special tokens shown."""

WINDOW: Final = 32
"""Tokens after a difference that are read to compare texts."""
LEAD: Final = 4
"""Tokens before it: a token may be half a character, or lose its leading space when it is first."""


class Cause(StrEnum):
    """Why a conversation broke (see the module)."""

    TEMPLATE = "template"
    RETOKENISATION = "retokenisation"
    OTHER = "other"


class Relation(StrEnum):
    """What a call is to those before it (see the module)."""

    MERGED = "merged"
    NEW = "new"
    BRANCH = "branch"
    BROKEN = "broken"


class Message(msgspec.Struct, frozen=True):
    """A message as it is compared."""

    role: str
    text: str
    name: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as canonical JSON) of each tool call."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Message:
        """The message of an OpenAI request or answer, for comparison."""
        calls = message.get("tool_calls") or ()
        return cls(
            str(message.get("role", "")),
            _text(message.get("content")),
            str(message.get("name") or ""),
            tuple(_tool_call(call) for call in calls),
        )

    @property
    def empty(self) -> bool:
        return not self.text.strip() and not self.calls


class CallMessages(msgspec.Struct, frozen=True):
    """What a call asked and got, as the app saw it."""

    messages: tuple[Message, ...]
    answer: Message | None = None
    tools: str = ""
    """The tools of the request, as JSON text."""

    @classmethod
    def of(cls, call: Call) -> CallMessages:
        """What a call's span says; empty without a span, or without messages in it."""
        if call.span is None:
            return cls(())
        attributes = call.span.attributes
        asked, answers = (
            genai_messages.input_messages_of(attributes),
            genai_messages.output_messages_of(attributes),
        )
        answer = Message.of(answers[call.choice]) if call.choice < len(answers) else None
        tools = str(attributes.get(c.TOOL_DEFINITIONS, ""))
        return cls(tuple(map(Message.of, asked)), answer, tools)


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that went on, but not in its row."""

    previous: TransitionKey
    following: TransitionKey
    agent_path: str
    cause: Cause
    detail: str
    """What differs, for people."""
    place: int
    """Index of the first token of the following prompt that differs, or the prompt's length."""
    where: Where
    """Whether it lies in the previous call's prompt or response; `shorter`: the following prompt
    ends inside what came before."""
    expected: int
    """The token id of the previous call there."""
    got: int | None
    """The token id of the following prompt there; None if it has ended."""
    expected_text: str
    got_text: str
    before: str
    """The text just before, the same in both."""


class Merging(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the calls of some attempts."""

    relations: dict[TransitionKey, Relation]
    breaks: list[Break]
    rows: int
    row_tokens: int
    """Tokens of all rows: what the learner computes."""
    call_tokens: int
    """Tokens of all calls, each by itself."""

    def counts(self) -> dict[str, int]:
        """Relation → calls; every relation is there."""
        calls = Counter(self.relations.values())
        return {relation.value: calls[relation] for relation in Relation}

    def causes(self) -> dict[str, int]:
        """Cause → breaks; every cause is there."""
        breaks = Counter(broken.cause for broken in self.breaks)
        return {cause.value: breaks[cause] for cause in Cause}


def read_merging(
    transitions: Sequence[Transition],
    exchanges: Mapping[TransitionKey, CallMessages],
    decode: Decode,
) -> Merging:
    """How these calls merge, and where they do not, why (see the module).

    Args:
        transitions: of any attempts, each attempt's in causal order.
        exchanges: what each of them asked and got.
        decode: token ids of a policy as text.
    """
    chains = merge(transitions)
    opened = {chain[0].key for chain in chains}
    histories: dict[tuple[str, str, str], _History] = {}
    relations: dict[TransitionKey, Relation] = {}
    breaks: list[Break] = []
    for transition in transitions:
        exchange = exchanges.get(transition.key, CallMessages(()))
        agent = (transition.attempt_id, transition.policy, transition.agent_path)
        history = histories.setdefault(agent, _History())
        relation = Relation.MERGED
        if transition.key in opened:
            earlier = history.continued(exchange)
            broken = None if earlier is None else _break(*earlier, transition, exchange, decode)
            relation = Relation.NEW if earlier is None else Relation.BRANCH
            if broken is not None:
                relation = Relation.BROKEN
                breaks.append(broken)
        relations[transition.key] = relation
        history.add(transition, exchange)
    return Merging(
        relations=relations,
        breaks=breaks,
        rows=len(chains),
        row_tokens=sum(chain[-1].length for chain in chains),
        call_tokens=sum(transition.length for transition in transitions),
    )


Earlier = tuple[Transition, CallMessages]


class _History:
    """The earlier calls of one agent in an attempt. Finding the continued one is linear in the
    messages of the call that asks."""

    def __init__(self) -> None:
        self._by_messages: dict[int, list[Earlier]] = {}
        """Digest of all messages → the calls that asked them."""
        self._by_answer: dict[Message, Earlier] = {}

    def add(self, transition: Transition, exchange: CallMessages) -> None:
        if exchange.messages:
            digest = _digests(exchange.messages)[-1]
            self._by_messages.setdefault(digest, []).append((transition, exchange))
        if exchange.answer is not None and not exchange.answer.empty:
            self._by_answer[exchange.answer] = (transition, exchange)

    def continued(self, exchange: CallMessages) -> Earlier | None:
        """The call that this one continues; None: it begins a conversation."""
        digests = _digests(exchange.messages)
        for size in range(len(digests) - 1, 0, -1):
            asked_this = self._by_messages.get(digests[size - 1])
            if asked_this:
                following = exchange.messages[size]
                answered = [earlier for earlier in asked_this if earlier[1].answer == following]
                return (answered or asked_this)[-1]
        for said in reversed(exchange.messages):
            if said.role == "assistant" and said in self._by_answer:
                return self._by_answer[said]
        return None


def _digests(said: Sequence[Message]) -> list[int]:
    """One per prefix of the messages, from the first message alone to all of them."""
    digests, digest = [], 0
    for message in said:
        digest = hash((digest, message))
        digests.append(digest)
    return digests


def _break(
    previous: Transition,
    before: CallMessages,
    following: Transition,
    after: CallMessages,
    decode: Decode,
) -> Break | None:
    """What differs; None if the following prompt begins with every token of the previous call."""
    expected = previous.prompt_ids + previous.response_ids
    got = following.prompt_ids
    place = common_prefix(expected, got)
    if place == len(expected):
        return None
    where: Where = "prompt" if place < len(previous.prompt_ids) else "response"
    if place == len(got):
        where = "shorter"
    texts = _Texts(expected, got, place, lambda ids: decode(previous.policy, ids))
    cause, detail = Cause.RETOKENISATION, "the same text, cut into other tokens than were sampled"
    if not texts.agree():
        changed = _changed(before, after)
        cause = Cause.OTHER if changed else Cause.TEMPLATE
        detail = changed or _RENDERED[where]
    return Break(
        previous=previous.key,
        following=following.key,
        agent_path=following.agent_path,
        cause=cause,
        detail=detail,
        place=place,
        where=where,
        expected=expected[place],
        got=got[place] if place < len(got) else None,
        expected_text=texts.token(expected),
        got_text=texts.token(got),
        before=texts.lead,
    )


_RENDERED: Final[Mapping[Where, str]] = {
    "prompt": "the template renders earlier messages otherwise once the conversation goes on",
    "response": "the template renders the answer otherwise than it was sampled",
    "shorter": "the template renders less than was sampled",
}


class _Texts:
    """The texts of two sequences around the first token that differs."""

    def __init__(
        self,
        expected: Sequence[int],
        got: Sequence[int],
        place: int,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._start, self._place = max(0, place - LEAD), place
        self._expected, self._got = expected, got
        self._decode = decode
        self.lead = decode(expected[self._start : place])

    def agree(self) -> bool:
        """Whether both texts are the same up to the end of both differing tokens."""
        if self._place >= len(self._got):
            return False
        through = max(len(self._slice(ids, 1)) for ids in (self._expected, self._got))
        left, right = (self._slice(ids, WINDOW)[:through] for ids in (self._expected, self._got))
        return left == right and len(left) == through

    def token(self, ids: Sequence[int]) -> str:
        """The differing token's text; empty if there is none."""
        return self._decode(ids[self._place : self._place + 1])

    def _slice(self, ids: Sequence[int], count: int) -> str:
        return self._decode(ids[self._start : self._place + count])


def _changed(before: CallMessages, after: CallMessages) -> str:
    """What the app changed between the calls; empty if it repeated everything."""
    if before.tools != after.tools:
        return "the app changed the tools"
    kept = list(before.messages)
    for place, (old, new) in enumerate(zip(kept, after.messages, strict=False)):
        if old != new:
            return f"the app changed message {place} ({old.role})"
    if len(after.messages) <= len(kept):
        return "the app shortened the conversation"
    if after.messages[len(kept)] == before.answer:
        return ""
    role = after.messages[len(kept)].role
    if role != "assistant":
        return f"the app left the answer out (a message of {role} follows)"
    return f"the app changed the answer before it sent it back (message {len(kept)})"


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return str(content)


def _part(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        return str(part.get("text"))
    return json.dumps(part, sort_keys=True, default=str)


def _tool_call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = arguments
    return str(function.get("name")), json.dumps(value, sort_keys=True, default=str)
