"""The cells of the tables: what is asked, what is said, and what a client is to get."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightspan_testing.gateway_suite.harness import TOOLS, Answered, Rig, shared_tokenizer
from lightspan_testing.scripted_engine import Gate, Say, logprob_of


@dataclass(frozen=True, slots=True)
class Shape:
    """What one choice says, and what a client is to make of it."""

    text: str
    content: str | None
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        return "tool_calls" if self.calls else "stop"


def _tool(expression: str) -> str:
    arguments = f'{{"expression": "{expression}"}}'
    return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'


SHAPES: Final[Mapping[str, Callable[[int], Shape]]] = {
    "text": lambda i: Shape(f"The answer is {33 + i}.", f"The answer is {33 + i}."),
    "one call": lambda i: Shape(
        f"Let me see.\n{_tool(f'12 + {i}')}",
        "Let me see.",
        (("calculator", f'{{"expression": "12 + {i}"}}'),),
    ),
    "parallel calls": lambda i: Shape(
        f"{_tool(f'7 * {i}')}\n{_tool('3')}",
        None,
        (
            ("calculator", f'{{"expression": "7 * {i}"}}'),
            ("calculator", '{"expression": "3"}'),
        ),
    ),
    "malformed call": lambda i: Shape(
        f'Hm {i}: <tool_call>\n{{"name": "calculator", "arguments": {{"expression"\n</tool_call>',
        f'Hm {i}: <tool_call>\n{{"name": "calculator", "arguments": {{"expression"\n</tool_call>',
    ),
}
LENGTH: Final = 8
"""`max_tokens` of the cells whose length is over."""
HELD: Final = 3
"""Tokens that are sampled before a cell's generation is held."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table."""

    stream: bool
    shape: str
    n: int
    ending: str

    def __str__(self) -> str:
        form = "streamed" if self.stream else "unstreamed"
        return f"{form}-{self.shape}-n{self.n}-{self.ending}".replace(" ", "_")

    def said(self, index: int) -> Shape:
        return SHAPES[self.shape](index)

    def text(self, index: int) -> str:
        """What the engine is scripted to say."""
        text = self.said(index).text
        return f"{text} STOP and more" if self.ending == "stopped" else text

    def body(self) -> dict[str, Any]:
        """The request."""
        body: dict[str, Any] = {
            "n": self.n,
            "tools": TOOLS,
            "logprobs": True,
            "extra_body": {"return_token_ids": True},
        }
        if self.ending == "stopped":
            body["stop"] = ["never", "STOP"]
        if self.ending == "length":
            body["max_tokens"] = LENGTH
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def ids(self, rig: Rig, index: int) -> list[int]:
        """The token ids that the answer consists of."""
        ids = rig.engine.ids(self.text(index))
        if self.ending == "length":
            return ids[:LENGTH]
        if self.ending == "stopped":
            lengths = range(1, len(ids) + 1)
            return ids[: next(k for k in lengths if "STOP" in rig.tokenizer.decode(ids[:k]))]
        return ids

    def expected(self, rig: Rig, index: int) -> Answered:
        """What a client is to get for a choice, but for the ids of its tool calls."""
        said, ids = self.said(index), self.ids(rig, index)
        answered = Answered(said.content, list(said.calls), [], said.reason)
        if self.ending == "length":
            answered = Answered(rig.tokenizer.decode(ids), [], [], "length")
        elif self.ending == "stopped" and not said.calls:
            answered.content = f"{said.content} "
        answered.token_ids, answered.logprobs = ids, [logprob_of(token) for token in ids]
        return answered


CELLS: Final = [
    Cell(*values)
    for values in itertools.product(
        (False, True), SHAPES, (1, 3), ("finished", "stopped", "length", "cancelled", "retried")
    )
]


# --- text completions -----------------------------------------------------------------------
TEXT_PROMPTS: Final[Mapping[str, Sequence[str]]] = {
    "text": ["SELECT name"],
    "texts": ["SELECT name", "How many singers are there?"],
    "ids": ["The answer is"],
}


@dataclass(frozen=True, slots=True)
class TextCell:
    """One cell of the text completions' table."""

    stream: bool
    prompt: str
    n: int
    ending: str

    def __str__(self) -> str:
        return (
            f"{'streamed' if self.stream else 'unstreamed'}-{self.prompt}-n{self.n}-{self.ending}"
        )

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt ids of each choice."""
        texts = TEXT_PROMPTS[self.prompt]
        return [shared_tokenizer().encode(text) for text in texts for _ in range(self.n)]

    def text(self, index: int) -> str:
        """What the engine is scripted to say."""
        return f" tool_call {index} 12 + 7" + (" STOP more" if self.ending == "stopped" else "")

    def body(self) -> dict[str, Any]:
        """The request."""
        texts = list(TEXT_PROMPTS[self.prompt])
        prompts: Any = {"text": texts[0], "texts": texts, "ids": self.prompts[0]}
        body: dict[str, Any] = {
            "prompt": prompts[self.prompt],
            "n": self.n,
            "logprobs": 0,
            "max_tokens": LENGTH if self.ending == "length" else 100,
            "extra_body": {"return_token_ids": True},
        }
        if self.ending == "stopped":
            body["stop"] = "STOP"
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def expected(self, rig: Rig, index: int) -> Answered:
        """What a client is to get for a choice."""
        ids = rig.engine.ids(self.text(index))
        if self.ending == "length":
            ids = ids[:LENGTH]
        if self.ending == "stopped":
            lengths = range(1, len(ids) + 1)
            ids = ids[: next(k for k in lengths if "STOP" in rig.tokenizer.decode(ids[:k]))]
        return Answered(
            content=rig.tokenizer.decode(ids).partition("STOP")[0],
            reason="length" if self.ending == "length" else "stop",
            token_ids=ids,
            logprobs=[logprob_of(token) for token in ids],
            prompt_ids=self.prompts[index],
        )


TEXT_CELLS: Final = [
    TextCell(*values)
    for values in itertools.product(
        (False, True),
        TEXT_PROMPTS,
        (1, 3),
        ("finished", "stopped", "length", "cancelled", "retried"),
    )
]


# --- answers that wait in their middle ------------------------------------------------------
HELD_ENDINGS: Final = ("cancelled", "retried")
"""They need an answer that waits in its middle."""


def gated(cell: Cell | TextCell, count: int) -> tuple[Callable[[Any], Say], list[Gate]]:
    """What the engine says in a cell, and the gate in the middle of each choice."""
    gates = [Gate() for _ in range(count)]
    if cell.ending not in HELD_ENDINGS:
        for gate in gates:
            gate.open()

    def script(request: Any) -> Say:
        index = int(request.request_id.split("-")[-2])
        return Say(text=cell.text(index), gates={HELD: gates[index]})

    return script, gates
