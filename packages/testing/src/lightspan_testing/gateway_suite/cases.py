"""Cells of the gateway's tables: requests, scripted answers and expected results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightspan_testing.gateway_suite.harness import TOOLS, Answered, Rig, shared_tokenizer
from lightspan_testing.scripted_engine import Gate, Say, logprob_of


@dataclass(frozen=True, slots=True)
class Shape:
    """Scripted text of a choice, and the expected message."""

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
ENDINGS: Final = ("finished", "stopped", "length", "cancelled", "retried")
LENGTH: Final = 8
"""`max_tokens` of the cells that end by length."""
HELD: Final = 3
"""Tokens sampled before a cell's generation is held."""


def _expected_ids(rig: Rig, text: str, ending: str) -> list[int]:
    ids = rig.engine.ids(text)
    if ending == "length":
        return ids[:LENGTH]
    if ending == "stopped":
        lengths = range(1, len(ids) + 1)
        return ids[: next(k for k in lengths if "STOP" in rig.tokenizer.decode(ids[:k]))]
    return ids


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the chat table."""

    stream: bool
    shape: str
    n: int
    ending: str

    def __str__(self) -> str:
        form = "streamed" if self.stream else "unstreamed"
        return f"{form}-{self.shape}-n{self.n}-{self.ending}".replace(" ", "_")

    def shape_of(self, index: int) -> Shape:
        return SHAPES[self.shape](index)

    def text(self, index: int) -> str:
        """Return the engine's scripted text."""
        text = self.shape_of(index).text
        return f"{text} STOP and more" if self.ending == "stopped" else text

    def body(self) -> dict[str, Any]:
        """Return the request."""
        body: dict[str, Any] = {"n": self.n, "tools": TOOLS, "logprobs": True}
        return {**body, **_common(self)}

    def ids(self, rig: Rig, index: int) -> list[int]:
        """Return the expected token ids."""
        return _expected_ids(rig, self.text(index), self.ending)

    def expected(self, rig: Rig, index: int) -> Answered:
        """Return the expected choice, without the ids of its tool calls."""
        shape, ids = self.shape_of(index), self.ids(rig, index)
        answered = Answered(shape.content, list(shape.calls), [], shape.reason)
        if self.ending == "length":
            answered = Answered(rig.tokenizer.decode(ids), [], [], "length")
        elif self.ending == "stopped" and not shape.calls:
            answered.content = f"{shape.content} "
        answered.token_ids, answered.logprobs = ids, [logprob_of(token) for token in ids]
        return answered


def _common(cell: Cell | TextCell) -> dict[str, Any]:
    """Return the fields of the request that both APIs have."""
    body: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    if cell.ending == "stopped":
        body["stop"] = ["never", "STOP"]
    if cell.ending == "length":
        body["max_tokens"] = LENGTH
    if cell.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


CELLS: Final = [
    Cell(*values) for values in itertools.product((False, True), SHAPES, (1, 3), ENDINGS)
]


# --- text completions -----------------------------------------------------------------------
TEXT_PROMPTS: Final[Mapping[str, Sequence[str]]] = {
    "text": ["SELECT name"],
    "texts": ["SELECT name", "How many singers are there?"],
    "ids": ["The answer is"],
}


@dataclass(frozen=True, slots=True)
class TextCell:
    """A cell of the table of text completions."""

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
        """Return the prompt ids of each choice."""
        texts = TEXT_PROMPTS[self.prompt]
        return [shared_tokenizer().encode(text) for text in texts for _ in range(self.n)]

    def text(self, index: int) -> str:
        """Return the engine's scripted text."""
        return f" tool_call {index} 12 + 7" + (" STOP more" if self.ending == "stopped" else "")

    def body(self) -> dict[str, Any]:
        """Return the request."""
        texts = list(TEXT_PROMPTS[self.prompt])
        prompts: Any = {"text": texts[0], "texts": texts, "ids": self.prompts[0]}
        return {
            "prompt": prompts[self.prompt],
            "n": self.n,
            "logprobs": 0,
            "max_tokens": 100,
            **_common(self),
        }

    def expected(self, rig: Rig, index: int) -> Answered:
        """Return the expected choice."""
        ids = _expected_ids(rig, self.text(index), self.ending)
        return Answered(
            content=rig.tokenizer.decode(ids).partition("STOP")[0],
            reason="length" if self.ending == "length" else "stop",
            token_ids=ids,
            logprobs=[logprob_of(token) for token in ids],
            prompt_ids=self.prompts[index],
        )


TEXT_CELLS: Final = [
    TextCell(*values) for values in itertools.product((False, True), TEXT_PROMPTS, (1, 3), ENDINGS)
]


# --- held answers ---------------------------------------------------------------------------
HELD_ENDINGS: Final = ("cancelled", "retried")
"""Endings that need a held answer."""


def gated(cell: Cell | TextCell, count: int) -> tuple[Callable[[Any], Say], list[Gate]]:
    """Return the engine's script for a cell, and the gate in each choice."""
    gates = [Gate() for _ in range(count)]
    if cell.ending not in HELD_ENDINGS:
        for gate in gates:
            gate.open()

    def script(request: Any) -> Say:
        index = int(request.request_id.split("-")[-2])
        return Say(text=cell.text(index), gates={HELD: gates[index]})

    return script, gates
