"""Test the reported causes of unmerged conversations, with real templates and a real tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightspan.lightning.episode import Call
from lightspan.lightning.rows import row_shares
from lightspan.lightning.transitions import Transition, TransitionKey
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.images import PromptImage
from lightspan.schema.spans import Attributes
from lightspan.schema.token_records import CallOutcome
from lightspan_testing.byte_tokenizer import ByteTokenizer, data_url, image_file
from lightspan_testing.scripted_engine import tiny_chat_tokenizer
from lightspan_testing.strategies import make_call_span, make_record
from lightspan_testing.tiny import CHAT_TEMPLATE
from lightspan_tools.merge_diagnostics import (
    CallMessages,
    Cause,
    Merging,
    Message,
    read_merging,
)

DROPS_THINKING = CHAT_TEMPLATE.replace(
    "(message.content or '')",
    "(message.content.split('</think>')[-1] if not loop.last else message.content)",
)
"""A template that keeps only the last turn's thinking, like Qwen3's."""
REWRITES = CHAT_TEMPLATE.replace(
    "(message.content or '')", "((message.content or '') ~ ('' if loop.last else '.'))"
)
"""A template that ends each message but the last with a full stop."""
TRIMS = CHAT_TEMPLATE.replace("(message.content or '')", "(message.content or '') | trim")
"""A template that removes white space around messages, like Llama's."""


class Chat:
    """The calls of one attempt, whose prompts are rendered by a real template.

    Args:
        template: chat template of the tokenizer.
        name: name of the attempt.
    """

    def __init__(self, template: str = CHAT_TEMPLATE, name: str = "1") -> None:
        self.tokenizer: Any = tiny_chat_tokenizer(template=template)
        self.transitions: list[Transition] = []
        self.exchanges: dict[TransitionKey, CallMessages] = {}
        self._name = name

    def call(
        self,
        asked: Sequence[Mapping[str, Any]],
        answer: str | Mapping[str, Any],
        *,
        sampled: Sequence[int] | None = None,
        agent: str = "writer",
        tools: Sequence[Mapping[str, Any]] | None = None,
        choice: int = 0,
    ) -> None:
        """Add a call: the template renders `asked`, and the model samples the tokens of `answer`.

        Args:
            asked: messages of the request.
            answer: the answer as a text or a message.
            sampled: token ids to sample instead of those of `answer`; None for none.
            agent: agent path.
            tools: tools of the request; None for none.
            choice: number of the choice.
        """
        said = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        if sampled is None:
            sampled = [*self.tokenizer.encode(str(said["content"])), self.end]
        number = f"c{len(self.transitions)}"
        prompt, images = self.render(_for_template(asked), tools)
        record = make_record(
            number, prompt, list(sampled), attempt=self._name, choice=choice, images=images
        )
        transition = Transition(
            f"ro-{self._name}", f"at-{self._name}", "t", "g", agent, "policy", record, 0
        )
        known: Attributes = {
            c.INPUT_MESSAGES: genai_messages.dump(asked),
            c.OUTPUT_MESSAGES: genai_messages.dump([said]),
        }
        if tools:
            known[c.TOOL_DEFINITIONS] = genai_messages.dump_json(tools)
        span = make_call_span(number, attributes=known)
        call = Call(number, 0, agent, CallOutcome.OK, 1, 2, record, span)
        self.transitions.append(transition)
        self.exchanges[transition.key] = CallMessages.of(call)

    def render(self, asked: Any, tools: Any) -> tuple[list[int], tuple[PromptImage, ...]]:
        return self.tokenizer.render(asked, tools), ()

    @property
    def end(self) -> int:
        return int(self.tokenizer.tokenizer.convert_tokens_to_ids("<|im_end|>"))

    def spelled(self, text: str) -> list[int]:
        """Return the token ids of a text, one token per letter."""
        return [token for letter in text for token in self.tokenizer.encode(letter)] + [self.end]

    def read(self) -> Merging:
        def decode(policy: str, ids: Sequence[int]) -> str:
            assert policy == "policy"
            return self.tokenizer.decode(ids, skip_special_tokens=False)

        return read_merging(self.transitions, self.exchanges, decode)

    def relations(self) -> list[str]:
        return [relation.value for relation in self.read().relations.values()]


class ImageChat(Chat):
    """A chat whose prompts may have images, with a token per byte and per patch of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = ByteTokenizer()

    def render(self, asked: Any, tools: Any) -> tuple[list[int], tuple[PromptImage, ...]]:
        ids, images = self.tokenizer.render_images(asked, tools)
        return ids, tuple(msgspec.structs.replace(image, data=b"") for image in images)

    @property
    def end(self) -> int:
        [end] = self.tokenizer.eos_ids
        return int(end)


def _for_template(asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(message) for message in asked]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


# --- what is no break ---------------------------------------------------------------------------


def test_a_conversation_that_goes_on_token_for_token_is_merged() -> None:
    """Check the tiny template, whose line break after each turn becomes a prompt token."""
    chat = Chat()
    chat.call([user("a")], "SELECT name")
    chat.call([user("a"), bot("SELECT name"), user("b")], "FROM singer")
    found = chat.read()
    assert chat.relations() == ["new", "merged"]
    assert (found.rows, found.breaks) == (1, [])
    assert found.row_tokens == chat.transitions[1].length
    assert found.call_tokens == sum(t.length for t in chat.transitions)
    assert found.counts() == {"merged": 1, "new": 1, "branch": 0, "broken": 0}
    assert found.causes() == {}


def test_agents_that_are_asked_afresh_begin_conversations() -> None:
    """Check interleaved agents with a common system message, and a repeated question."""
    system = {"role": "system", "content": "You write SQL."}
    chat = Chat()
    chat.call([system, user("a")], "x")
    chat.call([system, user("b")], "y", agent="checker")
    chat.call([system, user("b")], "x")
    chat.call([system, user("b")], "x")
    assert chat.relations() == ["new", "new", "new", "new"]
    assert chat.read().breaks == []


def test_following_up_two_answers_branches_off() -> None:
    chat = Chat()
    chat.call([user("a")], "x")
    chat.call([user("a"), bot("x"), user("b")], "y")
    chat.call([user("a"), bot("x"), user("other")], "z")
    assert chat.relations() == ["new", "merged", "branch"]
    assert chat.read().breaks == []


def test_of_several_choices_the_one_that_was_followed_up_is_meant() -> None:
    chat = Chat(TRIMS)
    chat.call([user("a")], " x", choice=0)
    chat.call([user("a")], " y", choice=1)
    chat.call([user("a"), bot(" x"), user("b")], "z")
    [found] = chat.read().breaks
    assert found.previous == ("at-1", "c0", 0)
    assert found.cause is Cause.TEMPLATE


# --- special tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("repeated", ["SELECT name", "SELECT", "SELECT name, age"])
def test_a_special_token_inside_an_answer_is_named(repeated: str) -> None:
    """Check a token that texts leave out, whatever else the app did to the answer."""
    chat = Chat()
    ids, special = chat.tokenizer.encode, chat.tokenizer.tokenizer.convert_tokens_to_ids
    sampled = [*ids("SELECT"), special("<|im_start|>"), *ids(" name"), chat.end]
    chat.call([user("a")], "SELECT name", sampled=sampled)
    chat.call([user("a"), bot(repeated), user("b")], "x")
    [found] = chat.read().breaks
    assert (found.cause, found.expected_text) == (Cause.SPECIAL, "<|im_start|>")
    assert found.detail == (
        "the model sampled the special token <|im_start|>, which texts leave out"
    )


def test_the_token_that_ends_an_answer_is_no_cause() -> None:
    chat = Chat()
    chat.call([user("a")], "SELECT name")
    chat.call([user("a"), bot("SELECT name, age"), user("b")], "x")
    [found] = chat.read().breaks
    assert (found.cause, found.expected_text) == (Cause.CONTEXT, "<|im_end|>")


# --- template -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "answer", "is_spelled", "cause", "expected_text"),
    [
        (DROPS_THINKING, "<think>three</think>SELECT name", False, Cause.THOUGHTS, "<"),
        (TRIMS, "SELECT name ", False, Cause.TEMPLATE, " "),
        # the model spelt a word in letters; encoding its text gives the word's own token
        (CHAT_TEMPLATE, "SELECT", True, Cause.RETOKENISATION, "S"),
        # trimmed later: the first token that differs decides
        (TRIMS, "SELECT ", True, Cause.RETOKENISATION, "S"),
    ],
)
def test_an_answer_that_comes_back_otherwise(
    template: str, answer: str, is_spelled: bool, cause: Cause, expected_text: str
) -> None:
    chat = Chat(template)
    chat.call([user("a")], answer, sampled=chat.spelled(answer) if is_spelled else None)
    chat.call([user("a"), bot(answer), user("b")], "x")
    found = chat.read()
    [broken] = found.breaks
    assert (broken.cause, broken.where) == (cause, "response")
    assert (
        broken.detail
        == {
            Cause.THOUGHTS: "the template leaves out earlier thoughts",
            Cause.TEMPLATE: "the template renders the answer differently from the sampled text",
            Cause.RETOKENISATION: "the same text has other tokens than were sampled",
        }[cause]
    )
    first = chat.transitions[0]
    place = broken.place - len(first.record.prompt_ids)
    assert broken.expected == first.record.response_ids[place] != broken.got
    assert broken.expected_text == expected_text
    assert found.rows == 2
    assert found.causes() == {cause.value: 1}


def test_a_template_that_rewrites_an_earlier_turn() -> None:
    """Check a message that has another text when it is no longer the last turn."""
    chat = Chat(REWRITES)
    first = [user("a"), bot("x")]
    chat.call(first[:1], "first")
    chat.call(first, "y")
    chat.call([*first, bot("y"), user("b")], "z")
    broken = chat.read().breaks[-1]
    assert (broken.cause, broken.where) == (Cause.TEMPLATE, "prompt")
    assert broken.detail == (
        "the template renders earlier messages differently once the conversation goes on"
    )


def test_a_tool_call_that_the_template_words_otherwise() -> None:
    """Check a call that the model wrote without spaces, and the app returns in parsed form."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    chat = Chat()
    written = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    function = {"name": "add", "arguments": '{"a":1}'}
    call = {"id": "call_1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    again = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_other", "function": {"name": "add", "arguments": json.dumps({"a": 1})}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    sampled = [*chat.tokenizer.encode(written), chat.end]
    chat.call([user("a")], answer, sampled=sampled, tools=tools)
    chat.call([user("a"), again, result], "2", tools=tools)
    [broken] = chat.read().breaks
    assert (broken.cause, broken.where) == (Cause.ARGUMENTS, "response")
    assert broken.detail == "the template writes the call of add in another way"
    assert (broken.expected_text, broken.got_text) == ("<tool_call>", "\n")


def test_a_prompt_that_ends_early_is_shorter() -> None:
    """Check a template that omits the last answer, although the app changed nothing."""
    template = CHAT_TEMPLATE.replace(
        "{%- elif message.role == 'assistant' %}",
        "{%- elif message.role == 'assistant' and loop.last %}{%- elif "
        "message.role == 'assistant' %}",
    ).replace("{%- if add_generation_prompt %}", "{%- if false %}")
    chat = Chat(template)
    chat.call([user("a")], "x")
    chat.call([user("a"), bot("x")], "y")
    [broken] = chat.read().breaks
    assert (broken.cause, broken.where) == (Cause.TEMPLATE, "shorter")
    assert (broken.got, broken.got_text) == (None, "")
    assert broken.expected == chat.transitions[0].record.response_ids[0]
    assert broken.place == len(chat.transitions[1].record.prompt_ids)


# --- what the app changes -----------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
EDITS = {"type": "function", "function": {"name": "edit", "parameters": {}}}
AT_NOON = "You fix bugs. Today is 2026-11-28, 12:00:07."
LATER = "You fix bugs. Today is 2026-11-28, 12:01:30."


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


RED, BLUE = image_file("red"), image_file("blue")
LARGE = image_file("blue", (40, 12))


def seen(*parts: bytes | str) -> dict[str, Any]:
    """Return a message of the user with texts and images."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": data_url(part)}}
            for part in parts
        ],
    }


def test_a_session_that_keeps_its_images_is_one_row() -> None:
    chat = ImageChat()
    chat.call([seen("Look: ", RED)], "red")
    chat.call([seen("Look: ", RED), bot("red"), seen(BLUE)], "blue")
    assert chat.relations() == ["new", "merged"]


@pytest.mark.parametrize(
    ("first", "later", "place", "where", "detail"),
    [
        # equal ids: the digests alone differ
        (
            [seen("Look: ", RED)],
            [seen("Look: ", BLUE)],
            12,
            "prompt",
            f"image {sha256(RED).hexdigest()[:12]} became image {sha256(BLUE).hexdigest()[:12]}",
        ),
        # the fifth placeholder is already that of another image
        (
            [seen("Look: ", RED)],
            [seen("Look: ", LARGE)],
            12,
            "prompt",
            f"image {sha256(RED).hexdigest()[:12]} became image {sha256(LARGE).hexdigest()[:12]}",
        ),
        (
            [seen("Look: ", RED, BLUE)],
            [seen("Look: ", RED)],
            18,
            "prompt",
            "the app changed the images of message 0 (user) (2 became 1)",
        ),
        # moved in its message
        (
            [seen("Look: ", RED)],
            [seen(RED, "Look: ")],
            6,
            "prompt",
            "the app changed the images of message 0 (user)",
        ),
    ],
    ids=["other", "larger", "removed", "moved"],
)
def test_another_image_begins_a_row(
    first: Any, later: Any, place: int, where: str, detail: str
) -> None:
    chat = ImageChat()
    chat.call(first, "It is a colour.")
    chat.call([*later, bot("It is a colour."), user("Sure?")], "yes")
    found = chat.read()
    [broken] = found.breaks
    assert (broken.cause, broken.place, broken.where) == (Cause.IMAGE, place, where)
    assert broken.detail == detail
    assert found.causes() == {"another image": 1}


def test_an_image_that_is_cut_in_another_way_begins_a_row() -> None:
    """Check that 2 by 3 patches are not 3 by 2, although ids and file are equal."""
    chat = ImageChat()
    chat.call([seen(RED)], "red")
    chat.call([seen(RED), bot("red"), user("Sure?")], "yes")
    record = chat.transitions[1].record
    turned = tuple(msgspec.structs.replace(image, grid=(3, 2)) for image in record.images)
    chat.transitions[1] = msgspec.structs.replace(
        chat.transitions[1], record=msgspec.structs.replace(record, images=turned)
    )
    [broken] = chat.read().breaks
    assert (broken.cause, broken.expected) == (Cause.IMAGE, broken.got)
    name = sha256(RED).hexdigest()[:12]
    assert broken.detail == f"image {name} is cut in another way: (2, 3) became (3, 2)"


def test_a_session_whose_program_only_appends_is_one_row() -> None:
    """Check fifty turns of a coding session."""
    chat, history = Chat(), [system(AT_NOON), user("Fix add.")]
    for turn in range(50):
        chat.call(history, f"step {turn}", tools=TOOLS)
        history = [*history, bot(f"step {turn}"), user("ok")]
    assert chat.read().causes() == {}
    assert row_shares(chat.transitions) == {"writer": [1.0]}


@pytest.mark.parametrize(
    ("template", "answer", "sent", "first", "later", "tools", "cause", "detail"),
    [
        # edited context: an old tool result is replaced by a note, to save tokens
        (
            CHAT_TEMPLATE,
            "I read it.",
            "I read it.",
            [user("the whole file")],
            [user("[removed]")],
            TOOLS,
            "edited context",
            "the app changed message 0 (user)",
        ),
        # a tool appears in the middle of the session
        (
            CHAT_TEMPLATE,
            "I read it.",
            "I read it.",
            [user("Fix add.")],
            [user("Fix add.")],
            [*TOOLS, EDITS],
            "changed tools",
            "the app changed the tools (added edit)",
        ),
        # the system prompt has the time
        (
            CHAT_TEMPLATE,
            "I read it.",
            "I read it.",
            [system(AT_NOON), user("Fix add.")],
            [system(LATER), user("Fix add.")],
            TOOLS,
            "dates",
            "the app changed a date or time in message 0 (system): '12:00:07' became '12:01:30'",
        ),
        # the app keeps the answer without its thoughts
        (
            CHAT_TEMPLATE,
            "<think>Which file?</think>I read it.",
            "I read it.",
            [user("Fix add.")],
            [user("Fix add.")],
            TOOLS,
            "dropped thoughts",
            "the app changed the thoughts of the answer before it sent it back (message 1)",
        ),
        # the template does, as Qwen3's
        (
            DROPS_THINKING,
            "<think>Which file?</think>I read it.",
            "<think>Which file?</think>I read it.",
            [user("Fix add.")],
            [user("Fix add.")],
            TOOLS,
            "dropped thoughts",
            "the template leaves out earlier thoughts",
        ),
        # thoughts of an earlier turn
        (
            CHAT_TEMPLATE,
            "I read it.",
            "I read it.",
            [user("Fix add."), bot("<think>1</think>Which?"), user("a.py")],
            [user("Fix add."), bot("Which?"), user("a.py")],
            TOOLS,
            "dropped thoughts",
            "the app left out the thoughts of message 1 (assistant)",
        ),
    ],
)
def test_why_the_turns_of_a_session_begin_a_new_row(
    template: str,
    answer: str,
    sent: str,
    first: list[dict[str, Any]],
    later: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    cause: str,
    detail: str,
) -> None:
    """Check three turns, of which the second differs from the first and the third appends."""
    chat = Chat(template)
    chat.call(first, answer, tools=TOOLS)
    chat.call([*later, bot(sent), user("go on")], "Done.", tools=tools)
    chat.call([*later, bot(sent), user("go on"), bot("Done."), user("ok")], "Yes.", tools=tools)
    found = chat.read()
    assert chat.relations() == ["new", "broken", "merged"]
    assert [(str(each.cause), each.detail) for each in found.breaks] == [(cause, detail)]
    assert found.causes() == {cause: 1}
    assert row_shares(chat.transitions) == {"writer": [pytest.approx(2 / 3)]}


@pytest.mark.parametrize(
    ("old", "new", "is_date"),
    [
        ("Sat Nov 28 2026", "Sun Nov 29 2026", True),
        ("on 28 November 2026 at 9:05 AM", "on 29 November 2026 at 10:15 PM", True),
        ("2026-11-28T12:00:00Z", "2026-11-28T12:00:01.5+01:00", True),
        ("28.11.2026", "29.11.2026", True),
        ("11/28/26", "11/29/26", True),
        ("3 files changed", "4 files changed", False),
        ("12:00 in a.py", "12:01 in b.py", False),
    ],
)
def test_what_is_a_date(old: str, new: str, is_date: bool) -> None:
    chat = Chat()
    chat.call([system(old), user("a")], "x")
    chat.call([system(new), user("a"), bot("x"), user("b")], "y")
    [found] = chat.read().breaks
    assert found.cause is (Cause.DATES if is_date else Cause.CONTEXT)


def test_only_calls_of_one_session_count_in_its_share() -> None:
    """Check two agents of one rollout, and an agent that is asked once."""
    chat = Chat()
    chat.call([user("a")], "x")
    chat.call([user("q")], "y", agent="checker")
    chat.call([user("a"), bot("x"), user("b")], "z")
    chat.call([user("other")], "w")
    chat.call([user("r")], "w", agent="titles")
    chat.call([user("s")], "y", agent="checker")
    assert row_shares(chat.transitions) == {"checker": [0.5], "writer": [pytest.approx(2 / 3)]}


@pytest.mark.parametrize(
    ("following", "detail"),
    [
        (
            [user("a"), bot("x!"), user("b")],
            "the app changed the answer before it sent it back (message 1)",
        ),
        ([user("a"), user("b")], "the app left the answer out (a message of user follows)"),
        ([user("A"), bot("x"), user("b")], "the app changed message 0 (user)"),
    ],
)
def test_what_the_app_changed(following: list[dict[str, Any]], detail: str) -> None:
    chat = Chat()
    chat.call([user("a")], "x")
    chat.call(following, "y")
    [broken] = chat.read().breaks
    assert (broken.cause, broken.detail) == (Cause.CONTEXT, detail)
    assert chat.relations() == ["new", "broken"]


def called(*calls: tuple[str, str]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    entries = [{"id": "c", "type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "x", "tool_calls": entries}


EDIT = ("Edit", '{"old": "a", "new": "b"}')


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (
            called(("Edit", '{"replace_all": false, "old": "a", "new": "b"}')),
            "the arguments of Edit (added replace_all)",
        ),
        (
            called(("Edit", '{"old": "A"}')),
            "the arguments of Edit (removed new; other value of old)",
        ),
        (called(("Edit", "[]")), "the arguments of Edit (another value)"),
        (called(("Edit", "[")), "the arguments of Edit (another value)"),
        (called(("Write", EDIT[1])), "the answer"),
        ({**called(EDIT), "content": "y"}, "the answer"),
    ],
)
def test_how_the_app_changed_an_answer(sent: dict[str, Any], what: str) -> None:
    """Check which arguments a program added, such as a tool's default values."""
    chat = Chat()
    chat.call([user("a")], called(EDIT), sampled=chat.spelled("x"))
    chat.call([user("a"), sent, user("b")], "y")
    [broken] = chat.read().breaks
    assert broken.cause is (Cause.CONTEXT if what == "the answer" else Cause.ARGUMENTS)
    assert broken.detail == f"the app changed {what} before it sent it back (message 1)"
    first = chat.transitions[0].record
    assert broken.repeated == len(first.prompt_ids) + len(first.response_ids)


# --- messages -----------------------------------------------------------------------------------


def test_messages_are_compared_by_what_a_template_sees() -> None:
    plain = Message.of({"role": "user", "content": "ab"})
    assert plain == Message.of({"role": "user", "content": [{"type": "text", "text": "ab"}]})
    assert plain != Message.of({"role": "user", "content": "ab", "name": "eve"})
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    assert Message.of({"role": "user", "content": [picture]}).text == json.dumps(
        picture, sort_keys=True
    )
    one = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    two = {"id": "2", "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}
    bad = {"id": "2", "function": {"name": "f", "arguments": '{"b":2'}}
    said = [Message.of({"role": "assistant", "content": "", "tool_calls": [f]}) for f in (one, two)]
    assert said[0] == said[1]
    assert Message.of({"role": "assistant", "tool_calls": [bad]}).calls == (("f", '"{\\"b\\":2"'),)
    assert Message.of({"role": "assistant", "content": " "}).empty


def test_a_call_without_a_span_is_a_new_conversation() -> None:
    record = make_record("c0", [1], [2])
    call = Call("c0", 0, "writer", CallOutcome.OK, 1, 2, record, None)
    assert CallMessages.of(call) == CallMessages(())


TURNS = st.lists(st.text(alphabet="SELECT name<think>/ 日\n", max_size=8), min_size=1, max_size=5)


@given(TURNS, st.sampled_from([CHAT_TEMPLATE, DROPS_THINKING, TRIMS]), st.booleans())
def test_every_call_has_one_relation_and_every_break_a_difference(
    turns: list[str], template: str, in_letters: bool
) -> None:
    chat, history = Chat(template), [user("go")]
    for said in turns:
        chat.call(history, said, sampled=chat.spelled(said) if in_letters else None)
        history = [*history, bot(said), user("on")]
    found = chat.read()
    assert sum(found.counts().values()) == len(turns)
    assert found.counts()["broken"] == len(found.breaks) == sum(found.causes().values())
    assert found.rows == len(turns) - found.counts()["merged"]
    by_key = {t.key: t for t in chat.transitions}
    for broken in found.breaks:
        before = by_key[broken.previous]
        expected = before.record.prompt_ids + before.record.response_ids
        got = by_key[broken.following].record.prompt_ids
        assert expected[: broken.place] == got[: broken.place]
        assert expected[broken.place] == broken.expected
        assert broken.got == (got[broken.place] if broken.place < len(got) else None)
        assert broken.cause in (Cause.TEMPLATE, Cause.THOUGHTS, Cause.RETOKENISATION)
        if template == CHAT_TEMPLATE:
            assert broken.cause is Cause.RETOKENISATION
