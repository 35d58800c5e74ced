"""Merge diagnostics: why some conversations of an attempt became several rows.

Rows are merged by token ids and images alone (`lightspan.lightning.rows`). This module compares the
app's messages too, and names the cause where a conversation continued but its row did not. Each
trained call has one of four relations to the earlier calls of the same attempt, policy and agent
path:

`merged`    its prompt begins with every token of a row: it extends that row.
`new`       it continues no earlier call of the agent. A sub-agent that starts afresh each time, and
            a prompt that is sent twice, are new conversations and never breaks.
`branch`    it continues an earlier call token for token, but another call has extended that row
            (several answers to one prompt were each followed up).
`broken`    it continues an earlier call, but its tokens differ from the prompt and response of that
            call.

A call *continues* an earlier one if the earlier call's messages are a proper prefix of its own, or
else if the earlier call's answer is among its messages. Of several such calls, the one with the
longest prefix counts, then one whose answer comes next, then the latest.

The cause of a break (`Cause`) is that of the first differing token. If it stands for different
images in both sequences, it is `IMAGE`; the ids may be equal. If it is a special token inside the
answer, it is `SPECIAL`: the app got a text without it. If the texts of both sequences agree up to
the end of the differing tokens, it is `RETOKENISATION`. Otherwise it is what the app changed
first: its tools, a message or the answer. If it changed nothing, the chat template renders the past
differently: without its thoughts, with other arguments' text, or in another way.

Messages are compared by role, name, text, images, and name and arguments of tool calls (as JSON
values, so white space in them does not matter); ids of tool calls are not compared.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from lightspan.lightning.episode import Call
from lightspan.lightning.rows import common_prefix, merge
from lightspan.lightning.selection import Coverage
from lightspan.lightning.transitions import Transition, TransitionKey
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.images import PromptImage
from lightspan.schema.media import is_reference
from lightspan.schema.token_records import TokenRecord
from lightspan_tools.images import DIGITS

Where = Literal["prompt", "response", "shorter"]
Decode = Callable[[str, Sequence[int]], str]
"""(policy, token ids) → text with special tokens."""

WINDOW: Final = 32
"""Tokens after a difference that are decoded to compare texts."""
LEAD: Final = 4
"""Tokens before a difference that are decoded too: a token may be half a character, or lose its
leading space at the beginning of a text."""


class Cause(StrEnum):
    """Why a call that continues a conversation begins a new row (a token sequence for training)."""

    CONTEXT = "edited context"
    """The app changed, removed or shortened messages, or the answer."""
    IMAGE = "another image"
    """The app changed, removed or added an image of a message."""
    TOOLS = "changed tools"
    """The app changed the list of tools."""
    DATES = "dates"
    """The app changed a date or a time in a message, such as in the system prompt."""
    ARGUMENTS = "rewritten arguments"
    """The app or the template wrote the arguments of a tool call in another way."""
    THOUGHTS = "dropped thoughts"
    """The app or the template left out thoughts (`<think>…</think>`)."""
    SPECIAL = "special token"
    """The model sampled a special token inside its answer, such as the placeholder of an image.
    Texts leave such tokens out."""
    TEMPLATE = "template"
    """The template renders the past differently in another way, such as without white space."""
    RETOKENISATION = "retokenisation"
    """The same text has other tokens than the model sampled."""


_THOUGHTS: Final = re.compile(r"<think>.*?</think>|\s", re.DOTALL)
"""Thoughts and white space."""
_DATES: Final = re.compile(
    r"\d{4}-\d\d?-\d\d?(?:T(?=\d))?|\d\d?[./]\d\d?[./]\d{2,4}"
    r"|\d\d?:\d\d(?::\d\d(?:\.\d+)?)?(?:\s?[AP]M\b|Z|\s?[+-]\d\d:?\d\d)?"
    r"|(?:\d\d?\s)?\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
    r"(?:\s\d\d?\b)?(?:,?\s\d{4})?|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\b"
)
"""Dates and times, whole or in parts."""
_SPECIAL: Final = re.compile(r"<(?!/?think>)[^<>\s]+>")
"""Text of a special token; thoughts have a cause of their own."""


class Relation(StrEnum):
    """How a call relates to the earlier calls of its agent.

    `MERGED`: it extends a row, which is a token sequence for training. `NEW`: it continues no
    earlier call. `BRANCH`: it continues a call whose row another call has extended. `BROKEN`: it
    continues a call, but its prompt has other tokens than that call.
    """

    MERGED = "merged"
    NEW = "new"
    BRANCH = "branch"
    BROKEN = "broken"


class Message(msgspec.Struct, frozen=True):
    """A chat message in a form in which messages can be compared."""

    role: str
    text: str
    name: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as canonical JSON) of each tool call."""
    images: tuple[tuple[int, str], ...] = ()
    """(number of characters of `text` before it, digest) of each image."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Message:
        """Convert a message of an OpenAI request or answer."""
        calls = message.get("tool_calls") or ()
        text, images = _content(message.get("content"))
        return cls(
            str(message.get("role", "")),
            text,
            str(message.get("name") or ""),
            tuple(_tool_call(call) for call in calls),
            images,
        )

    @property
    def empty(self) -> bool:
        return not self.text.strip() and not self.calls


class CallMessages(msgspec.Struct, frozen=True):
    """Request and answer of a call, as the app saw them."""

    messages: tuple[Message, ...]
    answer: Message | None = None
    tools: str = ""
    """Tools of the request, as JSON text."""

    @classmethod
    def of(cls, call: Call) -> CallMessages:
        """Read the messages of a call from its span.

        The result is empty if there is no span or it has no messages.
        """
        if call.span is None:
            return cls(())
        attributes = call.span.attributes
        messages = genai_messages.input_messages_of(attributes)
        answers = genai_messages.output_messages_of(attributes)
        answer = Message.of(answers[call.choice]) if call.choice < len(answers) else None
        tools = str(attributes.get(c.TOOL_DEFINITIONS, ""))
        return cls(tuple(map(Message.of, messages)), answer, tools)


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """A call that continues a conversation but begins a new row (a token sequence for training)."""

    previous: TransitionKey
    following: TransitionKey
    rollout_id: str
    agent_path: str
    cause: Cause
    detail: str
    """The difference in words."""
    place: int
    """Index of the first differing token in the following prompt, or the prompt's length."""
    where: Where
    """Part of the previous call in which the first differing token is: `prompt` or `response`;
    `shorter` if the following prompt ends before this token."""
    expected: int
    """Token id of the previous call at index `place`; equal to `got` if it stands for an image."""
    got: int | None
    """Token id of the following prompt at index `place`; None if the prompt ends there."""
    expected_text: str
    got_text: str
    before: str
    """Common text just before the first differing token."""
    repeated: int = 0
    """Tokens of the previous call, prompt and answer, whose row this call would have extended. The
    new row has about as many again."""


class Merging(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of how calls merge into rows (token sequences for training), and where they do not."""

    relations: dict[TransitionKey, Relation]
    breaks: list[Break]
    rows: int
    row_tokens: int
    """Number of tokens of all rows, which the learner computes."""
    call_tokens: int
    """Number of tokens of all calls, which the learner would compute without merging."""

    def counts(self) -> dict[str, int]:
        """Return relation → number of calls, for every relation."""
        calls = Counter(self.relations.values())
        return {relation.value: calls[relation] for relation in Relation}

    def causes(self) -> dict[str, int]:
        """Return cause → number of calls that were not merged for this cause, for each cause."""
        return {str(cause): n for cause, n in Counter(b.cause for b in self.breaks).items()}


def exchanges_of(coverages: Iterable[Coverage]) -> dict[TransitionKey, CallMessages]:
    """Return the request and answer of each trained call."""
    return {
        (coverage.attempt_id, *call.key): CallMessages.of(call)
        for coverage in coverages
        for call in coverage.trained
    }


def read_merging(
    transitions: Sequence[Transition],
    exchanges: Mapping[TransitionKey, CallMessages],
    decode: Decode,
) -> Merging:
    """Find out how each call relates to earlier calls, and why calls that should merge do not.

    The module's docstring describes the relations and the causes.

    Args:
        transitions: trained calls of any attempts. Those of one attempt are in causal order.
        exchanges: request and answer of each transition.
        decode: function that decodes tokens.
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
    """The earlier calls of one agent in an attempt, to look up which call another one continues."""

    def __init__(self) -> None:
        self._by_messages: dict[int, list[Earlier]] = {}
        """Digest of all messages → the calls with these messages."""
        self._by_answer: dict[Message, Earlier] = {}

    def add(self, transition: Transition, exchange: CallMessages) -> None:
        if exchange.messages:
            digest = _digests(exchange.messages)[-1]
            self._by_messages.setdefault(digest, []).append((transition, exchange))
        if exchange.answer is not None and not exchange.answer.empty:
            self._by_answer[exchange.answer] = (transition, exchange)

    def continued(self, exchange: CallMessages) -> Earlier | None:
        """Return the earlier call that `exchange` continues; None if it begins a conversation."""
        digests = _digests(exchange.messages)
        for size in range(len(digests) - 1, 0, -1):
            candidates = self._by_messages.get(digests[size - 1])
            if candidates:
                following = exchange.messages[size]
                answered = [earlier for earlier in candidates if earlier[1].answer == following]
                return (answered or candidates)[-1]
        for message in reversed(exchange.messages):
            if message.role == "assistant" and message in self._by_answer:
                return self._by_answer[message]
        return None


def _digests(messages: Sequence[Message]) -> list[int]:
    """Return a digest for each prefix of the messages, the shortest first."""
    digest = 0
    return [digest := hash((digest, message)) for message in messages]


def _break(
    previous: Transition,
    before: CallMessages,
    following: Transition,
    after: CallMessages,
    decode: Decode,
) -> Break | None:
    """Describe the first token at which the prompt of `following` differs from `previous`.

    The prompt and the answer of `previous` are compared. Return None if the prompt of `following`
    begins with all of their tokens.
    """
    prompt_ids, got = previous.record.prompt_ids, following.record.prompt_ids
    expected = prompt_ids + previous.record.response_ids
    place = common_prefix(
        _numbers(previous.record.prompt_key + previous.record.response),
        _numbers(following.record.prompt_key),
    )
    if place == len(expected):
        return None
    where: Where = "prompt" if place < len(prompt_ids) else "response"
    if place == len(got):
        where = "shorter"
    start = max(0, place - LEAD)

    def text(ids: Sequence[int], count: int) -> str:
        """Return the text of tokens around the first difference.

        It ends `count` tokens after the difference.
        """
        return decode(previous.policy, ids[start : place + count])

    def token(ids: Sequence[int]) -> str:
        return decode(previous.policy, ids[place : place + 1])

    # whether both texts are the same up to the end of both differing tokens
    length = max(len(text(ids, 1)) for ids in (expected, got))
    left, right = (text(ids, WINDOW)[:length] for ids in (expected, got))
    cause, detail = Cause.RETOKENISATION, "the same text has other tokens than were sampled"
    old, new = (_image_at(each.record, place) for each in (previous, following))
    if old is not None and new is not None:
        cause, detail = Cause.IMAGE, _difference_of(old, new)
    elif len(prompt_ids) <= place < len(expected) - 1 and _is_left_out(token(expected), before):
        cause = Cause.SPECIAL
        detail = f"the model sampled the special token {token(expected)}, which texts leave out"
    elif where == "shorter" or old or new or left != right or len(left) != length:
        change = _change(before, after)
        sampled = expected[len(prompt_ids) : max(place, len(prompt_ids))]
        texts = [decode(previous.policy, ids) for ids in (expected, got, sampled)]
        cause, detail = change or _rendering(texts[0], texts[1], texts[2], before.answer, where)
    return Break(
        previous=previous.key,
        following=following.key,
        rollout_id=following.rollout_id,
        agent_path=following.agent_path,
        cause=cause,
        detail=detail,
        place=place,
        where=where,
        expected=expected[place],
        got=got[place] if place < len(got) else None,
        expected_text=token(expected),
        got_text=token(got),
        before=text(expected, 0),
        repeated=len(expected),
    )


def _is_left_out(token: str, exchange: CallMessages) -> bool:
    """Return whether a token of an answer is a special token that the app did not get."""
    answer = exchange.answer
    if answer is None or answer.calls:  # markers of calls are left out too
        return False
    return _SPECIAL.fullmatch(token) is not None and token not in answer.text


def _numbers(key: bytes) -> Sequence[int]:
    """Return a key of a prompt as one number for each token, as it has bits of images' digests."""
    return [number for (number,) in struct.iter_unpack("<i", key)]


def _image_at(record: TokenRecord, place: int) -> PromptImage | None:
    """Return the image for which the token at an index of a prompt stands; None for no image."""
    images = (i for i in record.images if i.start <= place < i.start + i.length)
    return next(images, None)


def _difference_of(old: PromptImage, new: PromptImage) -> str:
    """Describe how two images at the same place of two prompts differ."""
    names = [image.digest[:DIGITS] for image in (old, new)]
    if names[0] != names[1]:
        return f"image {names[0]} became image {names[1]}"
    return f"image {names[0]} is cut in another way: {old.grid} became {new.grid}"


def _rendering(
    expected: str, got: str, given: str, answer: Message | None, where: Where
) -> tuple[Cause, str]:
    """Describe how the template renders a conversation that the app repeated unchanged.

    Args:
        expected: text of the previous call, prompt and answer.
        got: text of the following prompt.
        given: text of the sampled answer up to the first difference.
        answer: the answer as the app got it.
        where: where the first differing token is.
    """
    is_repeated = _THOUGHTS.sub("", got).startswith(_THOUGHTS.sub("", expected))
    if is_repeated and got.count("</think>") < expected.count("</think>"):
        return Cause.THOUGHTS, "the template leaves out earlier thoughts"
    calls = () if answer is None or answer.text.strip() not in given else answer.calls
    if where == "response" and calls:
        names = ", ".join(name for name, _ in calls)
        return Cause.ARGUMENTS, f"the template writes the call of {names} in another way"
    return Cause.TEMPLATE, _RENDERED[where]


_RENDERED: Final[Mapping[Where, str]] = {
    "prompt": "the template renders earlier messages differently once the conversation goes on",
    "response": "the template renders the answer differently from the sampled text",
    "shorter": "the template renders less than was sampled",
}


def _change(before: CallMessages, after: CallMessages) -> tuple[Cause, str] | None:
    """Describe what the app changed between two calls; None if it repeated everything unchanged.

    `before` and `after` have the messages of the calls.
    """
    if before.tools != after.tools:
        how = _difference(*(json.dumps(_by_name(each.tools)) for each in (before, after)))
        return Cause.TOOLS, f"the app changed the tools ({how or 'another order'})"
    earlier = before.messages
    for place, (old, new) in enumerate(zip(earlier, after.messages, strict=False)):
        if old != new:
            what = f"message {place} ({old.role})"
            if msgspec.structs.replace(old, text=new.text, images=new.images) != new:
                return Cause.CONTEXT, f"the app changed {what}"
            if old.text == new.text:
                return Cause.IMAGE, f"the app changed the images of {what}{_counts(old, new)}"
            if _lost_thoughts(old.text, new.text):
                return Cause.THOUGHTS, f"the app left out the thoughts of {what}"
            if _DATES.sub("", old.text) == _DATES.sub("", new.text):
                dates = (_DATES.findall(each.text) for each in (old, new))
                pairs = zip(*dates, strict=False)
                first = next((f": {x!r} became {y!r}" for x, y in pairs if x != y), "")
                return Cause.DATES, f"the app changed a date or time in {what}{first}"
            return Cause.CONTEXT, f"the app changed {what}"
    if len(after.messages) <= len(earlier):
        return Cause.CONTEXT, "the app shortened the conversation"
    following = after.messages[len(earlier)]
    if following == before.answer:
        return None
    if following.role != "assistant":
        left_out = f"the app left the answer out (a message of {following.role} follows)"
        return Cause.CONTEXT, left_out
    cause, what = Cause.CONTEXT, "the answer"
    if before.answer is not None:
        cause, what = _rewritten(before.answer, following)
    return cause, f"the app changed {what} before it sent it back (message {len(earlier)})"


def _counts(old: Message, new: Message) -> str:
    """Return how many images two messages have, if the numbers differ."""
    before, after = len(old.images), len(new.images)
    return "" if before == after else f" ({before} became {after})"


def _lost_thoughts(old: str, new: str) -> bool:
    """Return whether `new` is `old` with fewer thoughts, apart from white space."""
    is_repeated = _THOUGHTS.sub("", old) == _THOUGHTS.sub("", new)
    return is_repeated and new.count("</think>") < old.count("</think>")


def _by_name(tools: str) -> dict[str, Any]:
    """Return the tools of a request, by name."""
    values = [each.get("function") or each for each in json.loads(tools or "[]")]
    return {str(value.get("name") or value.get("type")): value for value in values}


def _rewritten(answer: Message, sent: Message) -> tuple[Cause, str]:
    """Return which part of an answer the app changed.

    Args:
        answer: the answer.
        sent: the message in its place.
    """
    names, others = ([name for name, _ in each.calls] for each in (answer, sent))
    if names == others and answer.text.strip() == sent.text.strip():
        pairs = zip(answer.calls, sent.calls, strict=True)
        # programs add the default values of a tool's arguments, for example
        parts = [
            f"the arguments of {name} ({_difference(old, new)})"
            for (name, old), (_, new) in pairs
            if old != new
        ]
        return (Cause.ARGUMENTS if parts else Cause.CONTEXT), " and ".join(parts) or "the answer"
    if answer.calls == sent.calls and _lost_thoughts(answer.text, sent.text):
        return Cause.THOUGHTS, "the thoughts of the answer"
    return Cause.CONTEXT, "the answer"


def _difference(old: str, new: str) -> str:
    """Describe how the arguments of a call differ; both are JSON."""
    before, after = map(json.loads, (old, new))  # a text that is no JSON was encoded as one
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return "another value"
    kinds = {
        "added": after.keys() - before.keys(),
        "removed": before.keys() - after.keys(),
        "other value of": {key for key in before.keys() & after if before[key] != after[key]},
    }
    return "; ".join(f"{kind} {', '.join(sorted(keys))}" for kind, keys in kinds.items() if keys)


def _content(content: Any) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Return the text and the images of a message; see `Message`."""
    if not isinstance(content, list):
        return "" if content is None else str(content), ()
    text, images = "", []
    for part in content:
        if is_reference(part) and part["modality"] == "image" and "sha256" in part:
            images.append((len(text), str(part["sha256"])))
        else:
            text += _part(part)
    return text, tuple(images)


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
