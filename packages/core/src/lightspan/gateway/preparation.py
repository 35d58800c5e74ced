"""What a request needs before a model is asked: its grammar, and its prompts as token ids.

Both are made beside the event loop, unless they are small: rendering, tokenising and compiling take
seconds where a client wants them to, and other calls go on meanwhile. What holds all of Python in
one step, such as handing out the ids of a text, is bounded by the length of what is said, and a
text that has far more tokens than the context holds is given up on the way.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from lightspan.engines.protocol import ChatTokenizer, TokenEngine, ToolParserName
from lightspan.errors import UnsupportedError
from lightspan.gateway.bodies import digest_of, letters_of
from lightspan.gateway.dialects.constraints import Constraint
from lightspan.gateway.dialects.shared import ModelRequest, cannot_honour
from lightspan.gateway.grammars import LONGEST, grammar_of, is_ambiguous, parts_of, schemas_of
from lightspan.gateway.refusal import ApiError, bad_request
from lightspan.gateway.schemas import SchemaError, check_schemas
from lightspan.gateway.workers import Workers
from lightspan.schema import conventions as c

BYTES_A_TOKEN: Final = 32
"""Of JSON, for each token of the context: what is longer is not tokenised to find out that it is
too long. Texts have 3 to 6; the rest is for what a template leaves out, as earlier thoughts."""
PROMPTING: Final = 4
"""Threads that render and tokenise: who brings a long chat waits for three such calls at once, and
not for them to end. More would keep more texts in memory while they are tokenised."""
KEPT: Final = 256
"""Grammars that are remembered by what asks for them."""

_encode = msgspec.json.Encoder().encode


class Preparation:
    """Prepares requests. Lives on the event loop."""

    def __init__(self) -> None:
        self._prompting = Workers("prompts", PROMPTING)
        self._compiling = Workers("grammars")
        self._grammars: OrderedDict[tuple[str, str], str] = OrderedDict()
        """(policy, digest of the constraint) → its grammar, which was compiled."""

    def close(self) -> None:
        """Give up what nobody waits for any more. Idempotent."""
        self._prompting.close()
        self._compiling.close()

    async def prompts(
        self, asked: ModelRequest, tokenizer: ChatTokenizer, *, size: int
    ) -> list[list[int]]:
        """The token ids of each prompt.

        Args:
            asked: the request.
            tokenizer: of the model that is asked.
            size: of what the prompts are made of, in bytes, or more.

        Raises:
            ApiError: 400, the template refuses them, or they are far too long.
        """
        return await self._prompting.run(_prompts, asked, tokenizer, size=size)

    async def grammar(
        self, asked: ModelRequest, engine: TokenEngine, policy: str, tokenizer: ChatTokenizer
    ) -> str:
        """The grammar of what a request constrains; empty if it constrains nothing.

        Raises:
            ApiError: 400, this engine or its library cannot hold an answer to it.
        """
        constraint = asked.constraint
        if constraint is None:
            return ""
        if not engine.capabilities.grammars:
            raise cannot_honour(*constraint.asked)
        key = policy, digest_of(_encode(constraint), 16)
        if key not in self._grammars:
            self._grammars[key] = await self._compiling.run(
                _grammar, constraint, engine, policy, tokenizer.tool_parser
            )
            if len(self._grammars) > KEPT:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(key)
        return self._grammars[key]


def _prompts(asked: ModelRequest, tokenizer: ChatTokenizer) -> list[list[int]]:
    most = BYTES_A_TOKEN * asked.count * tokenizer.context_length
    size = letters_of(asked.said)
    if size <= most:  # else it is not worded either: that is a step for which all of Python waits
        size = len(_encode(asked.said))
    if size > most:
        raise bad_request(
            f"'{asked.asks_with}' has at least {size:,} bytes as JSON, and at most {most:,} are "
            f"read, {BYTES_A_TOKEN} for each token that the model's context holds; shorten the "
            f"{asked.asks_with}",
            asked.asks_with,
            c.CONTEXT_OVERFLOW,
        )
    return asked.prompts(tokenizer)


def _grammar(
    constraint: Constraint, engine: TokenEngine, policy: str, parser: ToolParserName
) -> str:
    try:
        check_schemas(schemas_of(constraint))
    except SchemaError as error:
        raise _unfollowed(error.field, error) from error
    if is_ambiguous(constraint, parser):
        assert constraint.format is not None
        raise bad_request(
            f"'{constraint.format.field}' cannot be honoured beside these tools: this model writes "
            "a call as JSON with a name and arguments, and so would be an answer to its schema; "
            "rename one of its properties, or say with an enum what the name may be",
            constraint.format.field,
        )
    grammar = grammar_of(constraint, parser)
    if len(grammar) > LONGEST:
        raise bad_request(
            f"the request's schemas make a grammar of {len(grammar):,} characters; at most "
            f"{LONGEST:,} are followed"
        )
    try:
        engine.check_grammar(policy, grammar)
    except UnsupportedError as error:
        raise _which(constraint, engine, policy, parser, error) from error
    return grammar


def _which(
    constraint: Constraint,
    engine: TokenEngine,
    policy: str,
    parser: ToolParserName,
    error: UnsupportedError,
) -> ApiError:
    """The refusal that names the field."""
    for field, part in parts_of(constraint, parser):
        try:
            engine.check_grammar(policy, part)
        except UnsupportedError as reason:
            return _unfollowed(field, reason)
    return bad_request(f"what is asked of the answer cannot be honoured: {error}", "tools")


def _unfollowed(field: str, reason: Exception) -> ApiError:
    return bad_request(f"'{field}' cannot be honoured: {reason}", field)
