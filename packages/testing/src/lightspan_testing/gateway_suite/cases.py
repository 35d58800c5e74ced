"""Combinations of request, answer and event (cells) that the gateway is tested with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from lightspan_testing.gateway_suite.harness import TOOLS, Answered, Reading, Rig
from lightspan_testing.scripted_engine import Gate, Say, logprob_of


@dataclass(frozen=True, slots=True)
class Shape:
    """What the engine generates for a choice, and the message that the client has to get for it."""

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
ENDINGS: Final = ("finished", "stopped", "length", "cancelled", "restarted", "retried")
LENGTH: Final = 8
"""`max_tokens` of the cells that end by length."""
HELD: Final = 3
"""Tokens sampled before a cell's generation is held."""


TEXT_PROMPTS: Final[Mapping[str, Sequence[str]]] = {
    "text": ["SELECT name"],
    "texts": ["SELECT name", "How many singers are there?"],
    "ids": ["The answer is"],
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of request, answer and event, for chat completions."""

    stream: bool
    what: str
    """Key of the scripted text in `SHAPES`."""
    n: int
    ending: str
    operation: ClassVar[str] = "chat"

    def __str__(self) -> str:
        form = "streamed" if self.stream else "unstreamed"
        return f"{form}-{self.what}-n{self.n}-{self.ending}".replace(" ", "_")

    @property
    def is_held(self) -> bool:
        """Return whether the engine waits after the first tokens, so that the event can happen."""
        return self.ending in ("cancelled", "restarted", "retried")

    @property
    def count(self) -> int:
        """Return the number of choices in the answer."""
        return self.n

    def prompts(self, rig: Rig) -> list[list[int]]:
        """Return the prompt's token ids for each choice."""
        return [rig.prompt()] * self.n

    def text(self, index: int) -> str:
        """Return the text that the engine generates for the choice with the number `index`."""
        text = SHAPES[self.what](index).text
        return f"{text} STOP and more" if self.ending == "stopped" else text

    async def ask(self, rig: Rig) -> Reading:
        """Make the cell's call to the gateway, and read its answer."""
        return await rig.ask(tools=TOOLS, **self.body(), logprobs=True)

    def body(self) -> dict[str, Any]:
        """Return the fields of the request that chat and text completions have in common."""
        body: dict[str, Any] = {"n": self.n, "extra_body": {"return_token_ids": True}}
        if self.ending == "stopped":
            body["stop"] = ["never", "STOP"]
        if self.ending == "length":
            body["max_tokens"] = LENGTH
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def ids(self, rig: Rig, index: int) -> list[int]:
        """Return the token ids that the gateway has to record for choice number `index`."""
        ids = rig.engine.ids(self.text(index))
        if self.ending == "length":
            return ids[:LENGTH]
        if self.ending == "stopped":
            lengths = range(1, len(ids) + 1)
            return ids[: next(k for k in lengths if "STOP" in rig.tokenizer.decode(ids[:k]))]
        return ids

    def expected(self, rig: Rig, index: int) -> Answered:
        """Return what the client has to get for choice number `index`.

        The ids of tool calls are left empty.
        """
        shape, ids = SHAPES[self.what](index), self.ids(rig, index)
        answered = Answered(shape.content, list(shape.calls), [], shape.reason)
        if self.ending == "length":
            answered = Answered(rig.tokenizer.decode(ids), [], [], "length")
        elif self.ending == "stopped" and not shape.calls:
            answered.content = f"{shape.content} "
        answered.token_ids, answered.logprobs = ids, [logprob_of(token) for token in ids]
        return answered


class TextCell(Cell):
    """One combination of request, answer and event, for text completions.

    `what` is the name of its prompt in `TEXT_PROMPTS`.
    """

    operation = "text_completion"

    @property
    def count(self) -> int:
        return self.n * len(TEXT_PROMPTS[self.what])

    def prompts(self, rig: Rig) -> list[list[int]]:
        texts = TEXT_PROMPTS[self.what]
        return [rig.tokenizer.encode(text) for text in texts for _ in range(self.n)]

    def text(self, index: int) -> str:
        return f" tool_call {index} 12 + 7" + (" STOP more" if self.ending == "stopped" else "")

    async def ask(self, rig: Rig) -> Reading:
        texts = list(TEXT_PROMPTS[self.what])
        prompts: Any = {"text": texts[0], "texts": texts, "ids": self.prompts(rig)[0]}
        body = {"max_tokens": 100, **self.body()}
        return await rig.ask_text(prompt=prompts[self.what], logprobs=0, **body)

    def expected(self, rig: Rig, index: int) -> Answered:
        ids = self.ids(rig, index)
        return Answered(
            content=rig.tokenizer.decode(ids).partition("STOP")[0],
            reason="length" if self.ending == "length" else "stop",
            token_ids=ids,
            logprobs=[logprob_of(token) for token in ids],
            prompt_ids=self.prompts(rig)[index],
        )


CELLS: Final = [
    *(Cell(*values) for values in itertools.product((False, True), SHAPES, (1, 3), ENDINGS)),
    *(
        TextCell(*values)
        for values in itertools.product((False, True), TEXT_PROMPTS, (1, 3), ENDINGS)
    ),
]


def gated(cell: Cell) -> tuple[Callable[[Any], Say], list[Gate]]:
    """Return the engine's script for a cell, and one gate per choice.

    The engine waits at the gate after the first tokens of the choice. All gates are open at first,
    unless the cell's event needs an unfinished answer (`is_held`).
    """
    gates = [Gate() for _ in range(cell.count)]
    if not cell.is_held:
        for gate in gates:
            gate.open()

    def script(request: Any) -> Say:
        index = int(request.request_id.split("-")[-2])
        return Say(text=cell.text(index), gates={HELD: gates[index]})

    return script, gates
