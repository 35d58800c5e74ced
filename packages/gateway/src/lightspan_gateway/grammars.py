"""Grammars that force an answer into the form of a constraint, in llguidance's syntax.

A model family has its own format for tool calls:

    hermes   <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>, each on separate lines
    llama    {"name": …, "parameters": {…}}, several separated by "; "
    json     {"name": …, "arguments": {…}}, or an array of these

`lightspan_gateway.tools` parses the same formats. A grammar does not depend on the tokenizer. Marks
such as `<tool_call>` may be single tokens of a tokenizer. So a grammar only refers to rules for
these marks, which `lightspan_torch.engine.grammars` adds.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from lightspan.errors import UnsupportedError
from lightspan.protocols.engine import TokenEngine, ToolParserName
from lightspan.schema.genai_messages import CALL_OPEN, PYTHON_TAG
from lightspan_gateway.api_errors import bad_request
from lightspan_gateway.dialects.base import cannot_honour
from lightspan_gateway.dialects.constraints import Constraint, Schema, Tool
from lightspan_gateway.request_body import digest_of

MAX_LENGTH: Final = 2**18
"""Maximum characters of a grammar."""
COMPILE_THREADS: Final = 2
"""Size of the thread pool for compilation.

A compilation that takes minutes cannot be interrupted, so it must not occupy the threads that other
requests need."""
MAX_GRAMMARS: Final = 256
"""Maximum number of cached grammars."""
MIN_NUMBER: Final = -(2**63) + 2**10
"""Minimum of the numbers in a schema.

llguidance 1.9 overflows the stack, and so kills the process, on a number that it rounds to
-2**63."""
MAX_MULTIPLE: Final = 100_000
"""Maximum `multipleOf`: llguidance enumerates the remainders, which takes minutes and gigabytes."""

# Any amount of white space is valid JSON, so an untrained model may write nothing else.
_LAYOUT: Final = {
    "whitespace_pattern": r"( |\n[ ]{0,16})?",
    "item_separator": ",",
    "key_separator": ":",
}
_ANY_TEXT: Final = "/(?s:.*)/"
_SPACE: Final = r"[\s\x1c-\x1f]"
"""White space by the definition of Python's `strip`, which the parsers use."""
_CALL_STARTS: Final[Mapping[ToolParserName, str]] = {
    "llama": rf"\{{|{re.escape(PYTHON_TAG)}",
    "json": r"\{|\[|```",
}
"""Parser → pattern of the start of a call. An answer that is text must not match it."""

_encode = msgspec.json.Encoder().encode


class GrammarCache:
    """A cache of compiled grammars.

    Args:
        compile_timeout_s: seconds that a grammar may take to compile.
    """

    def __init__(self, compile_timeout_s: float) -> None:
        self._timeout_s = compile_timeout_s
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "lightspan-grammars")
        self._grammars: OrderedDict[tuple[str, str], str] = OrderedDict()
        """(policy, digest of the constraint) → grammar."""

    def close(self) -> None:
        """Cancel the waiting compilations. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def grammar(
        self, constraint: Constraint, engine: TokenEngine, policy: str, parser: ToolParserName
    ) -> str:
        """Return the grammar of a constraint, after the engine has compiled it once as a check.

        Args:
            constraint: the constraint.
            engine: the engine that serves the policy.
            policy: name of the policy.
            parser: parser of the tool calls of the policy's model.

        Raises:
            ApiError: 400 if the engine does not support the constraint, or takes too long to
                compile it.
        """
        if not engine.capabilities.grammars:
            raise cannot_honour(*constraint.source)
        key = policy, digest_of(_encode(constraint), 16)
        if key not in self._grammars:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(self._timeout_s):
                    self._grammars[key] = await loop.run_in_executor(
                        self._threads, _compile, constraint, engine, policy, parser
                    )
            except (UnsupportedError, TimeoutError) as error:
                field = constraint.source[0]
                reason = str(error) or f"it takes over {self._timeout_s:g} s to compile"
                raise bad_request(f"'{field}' cannot be honoured: {reason}", field) from error
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(key)
        return self._grammars[key]


def _compile(
    constraint: Constraint, engine: TokenEngine, policy: str, parser: ToolParserName
) -> str:
    schemas = [tool.parameters for tool in constraint.tools]
    if constraint.format is not None:
        schemas.append(constraint.format)
    for number in _numbers(schemas):
        if number < MIN_NUMBER:
            raise UnsupportedError(f"a schema has the number {number}; the minimum is {MIN_NUMBER}")
    for schema in _schemas(schemas):
        step = schema.get("multipleOf", 1)
        if isinstance(step, int | float) and not 0 < step <= MAX_MULTIPLE:
            raise UnsupportedError(f"multipleOf is {step}; it must be in (0, {MAX_MULTIPLE:,}]")
    grammar = grammar_of(constraint, parser)
    if len(grammar) > MAX_LENGTH:
        raise UnsupportedError(
            f"its schemas make a grammar of {len(grammar):,} characters; at most {MAX_LENGTH:,} "
            "are compiled"
        )
    engine.check_grammar(policy, grammar)
    return grammar


def grammar_of(constraint: Constraint, parser: ToolParserName) -> str:
    """Return the grammar that forces an answer to satisfy `constraint`.

    Args:
        constraint: the constraint.
        parser: name of the parser of the model's tool calls, which determines their format.

    Raises:
        UnsupportedError: there is no grammar for tool calls in this format.
    """
    if not constraint.tools:
        assert constraint.format is not None
        return _rules(start="answer", answer=_json(constraint.format))
    if parser not in _CALLS:
        raise UnsupportedError(
            f"there is no grammar for tool calls in the format of {parser!r}; there are those of "
            f"{', '.join(_CALLS)}"
        )
    calls = _CALLS[parser](constraint)
    if constraint.calls == "required":
        return _rules(start="calls", **calls)
    if constraint.format is not None:
        return _rules(start="answer | calls", answer=_json(constraint.format), **calls)
    if parser == "hermes":  # text may stand before the first call
        more = r'("\n" call)*' if constraint.parallel else ""
        return _rules(
            start=f"TEXT? | text_and_tool_call_open rest {more}",
            TEXT=f"{_ANY_TEXT} & ~/(?s:.*){CALL_OPEN}(?s:.*)/",
            **calls,
        )
    # a text that starts like a call would be parsed as one
    text = rf"{_ANY_TEXT} & ~/{_SPACE}*({_CALL_STARTS[parser]})(?s:.*)/"
    return _rules(start="TEXT? | calls", TEXT=text, **calls)


# --- calls ----------------------------------------------------------------------------------
def _hermes(constraint: Constraint) -> dict[str, str]:
    rules = {
        "call": "tool_call_open rest",
        "rest": r'"\n" body "\n" tool_call_close',
        "body": _json(_one_of(constraint.tools, "arguments")),
    }
    return {"calls": r'call ("\n" call)*' if constraint.parallel else "call", **rules}


def _llama(constraint: Constraint) -> dict[str, str]:
    calls = 'call ("; " call)*' if constraint.parallel else "call"
    return {"calls": calls, "call": _json(_one_of(constraint.tools, "parameters"))}


def _bare_json(constraint: Constraint) -> dict[str, str]:
    call = _one_of(constraint.tools, "arguments")
    if not constraint.parallel:
        return {"calls": _json(call)}
    definitions = call.pop("$defs")
    calls = {"type": "array", "items": call, "minItems": 1}
    return {"calls": _json({"anyOf": [call, calls], "$defs": definitions})}


_CALLS: Final[Mapping[ToolParserName, Callable[[Constraint], dict[str, str]]]] = {
    "hermes": _hermes,
    "llama": _llama,
    "json": _bare_json,
}


def _one_of(tools: Iterable[Tool], arguments: str) -> dict[str, Any]:
    """Return the JSON schema that allows a call of any one of the tools.

    The tools' schemas of arguments are placed in `$defs`; `$ref`s in them are changed accordingly.

    Args:
        tools: the tools.
        arguments: name of the field with the arguments of a call.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(tools):
        name = f"tool{number}"
        # `$id` would change the base of the references
        schema = {key: value for key, value in closed(tool.parameters).items() if key != "$id"}
        definitions[name] = _relocated(schema, f"#/$defs/{name}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    arguments: {"$ref": f"#/$defs/{name}"},
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


# --- text -----------------------------------------------------------------------------------
def _json(schema: Schema) -> str:
    document = {**closed(schema), "x-guidance": _LAYOUT}
    return "%json " + _encode(document).decode()


def _rules(**rules: str) -> str:
    return "".join(f"{name}: {body}\n" for name, body in rules.items())


# --- schemas --------------------------------------------------------------------------------
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
_DATA: Final = ("const", "enum", "default", "examples")
"""Keywords whose value is not a schema."""
_IN_PLACE: Final = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"}
)
"""Keywords whose schemas describe the same value as the schema that contains them."""
_COMBINING: Final = _IN_PLACE - {"$ref", "anyOf", "oneOf"}
_OPEN: Final = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_DESCRIBING: Final = frozenset({"properties", "required", *_OPEN})


def closed(schema: Schema) -> Schema:
    """Return a copy of a schema in which objects have no properties except the named ones.

    Otherwise a model could add properties without end. An object that explicitly allows more keeps
    them. A schema that describes one object in several parts (`allOf`, or properties next to an
    `anyOf` or a `$ref`) is returned unchanged, because each part names only some of the properties.
    """
    if any(_is_combined(part) for part in _schemas(schema)):
        return schema
    result: Schema = _closed(schema)
    return result


def _is_combined(schema: Schema) -> bool:
    in_place = _IN_PLACE & schema.keys()
    several = len(in_place) > 1 or bool(in_place and _DESCRIBING & schema.keys())
    return several or bool(_COMBINING & in_place)


def _closed(value: Any) -> Any:
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    result: dict[str, Any] = {}
    for key, part in value.items():
        if key in _NAMED and isinstance(part, Mapping):
            result[key] = {name: _closed(one) for name, one in part.items()}
        else:
            result[key] = part if key in _DATA else _closed(part)
    if "properties" in value and not _OPEN & value.keys():
        result["additionalProperties"] = False
    return result


def _schemas(value: Any) -> Iterator[Schema]:
    """Yield the schema `value` and every schema within it."""
    if isinstance(value, list):
        for item in value:
            yield from _schemas(item)
    elif isinstance(value, Mapping):
        yield value
        for key, part in value.items():
            if key in _NAMED and isinstance(part, Mapping):
                yield from _schemas(list(part.values()))
            elif key not in _DATA:
                yield from _schemas(part)


def _relocated(value: Any, pointer: str) -> Any:
    """Return a copy of a schema for use inside a larger document, with its `$ref`s changed.

    Args:
        value: the schema.
        pointer: JSON pointer to the place of the schema in the document.
    """
    if isinstance(value, list):
        return [_relocated(item, pointer) for item in value]
    if not isinstance(value, Mapping):
        return value
    result = {key: _relocated(part, pointer) for key, part in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        result["$ref"] = pointer + reference[1:]
    return result


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield all numbers of a JSON value."""
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value
