"""JSON schemas of requests: closed, moved into another document, and checked before they are
compiled. Pure.

The library compiles what it can at any cost, and has no limit that holds: `multipleOf: 9999991`
takes minutes and gigabytes, and `const: -9223372036854775808` ends the process. And it compiles
what no answer can follow to its end. All of these are refused here, by name.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from lightspan.errors import UnsupportedError
from lightspan.gateway.dialects.constraints import Schema

DEEPEST: Final = 100
"""Levels of a schema's JSON; the library reads 128, those around it included."""
MOST_PROPERTIES: Final = 2_000
"""Of all schemas of a request: the library looks at those that may follow at every token."""
MOST_SCHEMAS: Final = 5_000
"""Within all schemas of a request."""
LARGEST_MULTIPLE: Final = 10_000
"""Of `multipleOf`, without its decimal point, and of several that hold for one value together:
the library goes through every remainder."""
MOST_MULTIPLES: Final = 30_000
"""All different ones together."""
MOST_JOINED: Final = 10_000
"""Schemas that are joined, each time that they are: every alternative of one with every alternative
of another."""

_SCHEMA: Final = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_UNCLEAR: Final = frozenset({"not", "if", "then", "else", "dependentSchemas"})
"""Whose schemas hold beside others, or not at all."""
_IN_PLACE: Final = _UNCLEAR | {"anyOf", "oneOf", "allOf"}
"""Whose schemas are of the same value as the one that they stand in."""
_DESCRIBING: Final = _IN_PLACE | {
    *("properties", "required", "dependentRequired", "patternProperties"),
    *("additionalProperties", "unevaluatedProperties", "$ref"),
}
"""Keywords that say something of an object's properties."""
_OPEN: Final = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""Keywords that say which other properties there may be."""


def closed(schema: Any) -> Any:
    """The schema without properties that it does not name, where it leaves that open: whatever the
    model wrote there would be valid, at any length.

    Where several schemas describe one object (the parts of an `allOf`, properties beside an
    `anyOf`, a `$ref` beside either) none of them is closed: they do not name one another's.
    """
    shared: set[str] = set()
    while True:
        before = len(shared)
        result = _closed(schema, "#", shared, is_shared=False)
        if len(shared) == before:
            return result


def _closed(schema: Any, place: str, shared: set[str], *, is_shared: bool) -> Any:
    """One of its schemas, closed.

    Args:
        place: its JSON pointer.
        shared: pointers of schemas that are referred to beside others; more are added.
        is_shared: others describe the same value.
    """
    if not isinstance(schema, Mapping):
        return schema
    is_shared = is_shared or place in shared
    is_joined = is_shared or len(_DESCRIBING & schema.keys()) > 1
    if is_joined and isinstance(schema.get("$ref"), str):
        shared.add(schema["$ref"])

    def close(part: Any, key: str, step: str) -> Any:
        beside = is_joined or key in _UNCLEAR or (key == "allOf" and len(schema["allOf"]) > 1)
        return _closed(part, place + step, shared, is_shared=key in _IN_PLACE and beside)

    result = _mapped(schema, close)
    others = _OPEN | _IN_PLACE | {"$ref"}
    if "properties" in schema and not is_shared and not others & schema.keys():
        result["additionalProperties"] = False
    return result


def moved(schema: Any, place: str) -> Any:
    """The schema for another document, in which it stands at this JSON pointer."""
    if not isinstance(schema, Mapping):
        return schema
    result = _mapped(schema, lambda part, key, step: moved(part, place))
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        result["$ref"] = place + reference[1:]
    return result


def without_id(schema: Schema) -> Schema:
    """A tool's schema without a name of its own, against which its references would be read."""
    name = schema.get("$id")
    if not isinstance(name, str) or f'"$ref":"{name}' in msgspec.json.encode(schema).decode():
        return schema
    return {key: value for key, value in schema.items() if key != "$id"}


def _mapped(schema: Schema, change: Callable[[Any, str, str], Any]) -> dict[str, Any]:
    """The schema with its direct subschemas changed; what is data, such as `enum`, stays.

    Args:
        change: what is made of a subschema, its keyword, and its JSON pointer from here.
    """
    result = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMAS and isinstance(value, list):
            result[key] = [change(part, key, f"/{key}/{n}") for n, part in enumerate(value)]
        elif key in _SCHEMA:
            result[key] = change(value, key, f"/{key}")
        elif key in _NAMED and isinstance(value, Mapping):
            result[key] = {
                name: change(part, key, f"/{key}/{_escaped(name)}") for name, part in value.items()
            }
    return result


def _escaped(name: str) -> str:
    """As a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


# --- what is too costly, or has no end ------------------------------------------------------
def check_schemas(schemas: Iterable[tuple[str, Schema]]) -> None:
    """Refuse what costs too much to compile, or what no answer can follow to its end.

    Args:
        schemas: all those of a request, with the field of each.

    Raises:
        SchemaError: names the field, what is there and what is at most.
    """
    counted: Counter[str] = Counter()
    for field, schema in schemas:
        if is_deeper(schema, DEEPEST):
            raise SchemaError(field, f"it is nested more than {DEEPEST} levels deep")
        fatal = next(filter(_is_fatal, _numbers(schema)), None)
        if fatal is not None:
            raise SchemaError(
                field, f"it has the number {fatal}: none below -9223372036854774784 can be followed"
            )
        document = _Document(schema)
        wrong = next((one["multipleOf"] for one in document.schemas if _is_no_step(one)), None)
        if wrong is not None:
            raise SchemaError(field, f"multipleOf is {wrong}; it must be above 0")
        if document.multiple > LARGEST_MULTIPLE:
            raise SchemaError(
                field,
                f"multipleOf asks for multiples of {document.multiple:,} (without a decimal point, "
                f"and several for one value together); at most {LARGEST_MULTIPLE:,}",
            )
        counted["schemas"] += len(document.schemas)
        counted["properties"] += sum(len(_named(one)) for one in document.schemas)
        counted["multiples"] += sum({_multiple(one) for one in document.schemas} - {1})
        for what, most in _MOST.items():
            if counted[what] > most:
                raise SchemaError(field, f"{_NAMES[what]} are {counted[what]:,}, at most {most:,}")
        if document.joined > MOST_JOINED:
            raise SchemaError(
                field,
                "its allOf and $ref join schemas with one another more often than "
                f"{MOST_JOINED:,} times",
            )
        endless = document.endless()
        if endless is not None:
            raise SchemaError(
                field, f"no answer to it ends: {endless!r} asks for itself again and again"
            )


class SchemaError(UnsupportedError):
    """A schema that is not followed, and the field that it stands in."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


_MOST: Final = {
    "schemas": MOST_SCHEMAS,
    "properties": MOST_PROPERTIES,
    "multiples": MOST_MULTIPLES,
}
_NAMES: Final = {
    "schemas": "the schemas within the request's schemas",
    "properties": "the properties of the request's schemas",
    "multiples": "the different values of multipleOf, added up,",
}


class _Document:
    """A schema that is not deep, with what its references name."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self.schemas = list(_within(root))
        named = {one["$ref"] for one in self.schemas if isinstance(one.get("$ref"), str)}
        self._targets = {name: _pointed(root, name) for name in named}
        self.joined = 0
        """How often schemas are joined; counted no further than to one too many."""
        self.multiple = max(map(_multiple, self.schemas), default=1)
        """The largest that one value has to be a multiple of."""
        for one in self.schemas:
            if _joins(one) and self.joined <= MOST_JOINED:
                alternatives, multiple = self._join(one, frozenset())
                self.joined += alternatives
                self.multiple = max(self.multiple, multiple)

    def target(self, schema: Schema) -> Any:
        """What a schema refers to; None if it does not."""
        name = schema.get("$ref")
        return self._targets.get(name) if isinstance(name, str) else None

    def _join(self, schema: Any, seen: frozenset[str]) -> tuple[int, int]:
        """(alternatives, least common multiple) of a schema whose parts hold together."""
        self.joined += 1
        if not isinstance(schema, Mapping) or self.joined > MOST_JOINED:
            return 1, 1
        name = schema.get("$ref")
        parts = list(_parts(schema, "allOf"))
        if isinstance(name, str) and name not in seen:
            parts.append(self._targets[name])
            seen = seen | {name}
        alternatives, multiple = 1, _multiple(schema)
        for part in parts:
            count, factor = self._join(part, seen)
            alternatives, multiple = alternatives * count, math.lcm(multiple, factor)
        for key in ("anyOf", "oneOf"):
            found = [self._join(part, seen) for part in _parts(schema, key)]
            alternatives *= sum(count for count, _ in found) or 1
            multiple = math.lcm(multiple, max((factor for _, factor in found), default=1))
        for key, part in _direct(schema):
            if key not in _IN_PLACE and key not in ("$defs", "definitions"):
                self._join(part, seen)
        return min(alternatives, MOST_JOINED + 1), multiple

    def endless(self) -> str | None:
        """What has to hold itself, in every answer; None if an answer may end."""
        ending: set[str] = set()
        readers: dict[str, set[str]] = defaultdict(set)
        for name, target in self._targets.items():
            for one in _within(target):
                if isinstance(one.get("$ref"), str):
                    readers[one["$ref"]].add(name)
        open_names = list(self._targets)
        while open_names:
            name = open_names.pop()
            if name not in ending and _ends(self._targets[name], ending):
                ending.add(name)
                open_names += readers[name]
        if _ends(self._root, ending):
            return None
        return min((name for name in self._targets if name not in ending), default="#")


def is_deeper(value: Any, most: int) -> bool:
    """Whether JSON is nested deeper than so many levels."""
    level = [value]
    for _ in range(most):
        level = [
            item
            for one in level
            if isinstance(one, Mapping | list)
            for item in (one.values() if isinstance(one, Mapping) else one)
            if isinstance(item, Mapping | list)
        ]
        if not level:
            return False
    return True


def _numbers(value: Any) -> Iterator[int | float]:
    """All numbers of a JSON value."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping | list):
            left += one.values() if isinstance(one, Mapping) else one
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield one


def _is_fatal(number: int | float) -> bool:
    """Whether it may become the library's smallest integer, -2**63, as everything below that does:
    its compiler then asks itself for the same again, until the stack, and with it the process, ends
    (llguidance 1.9.1)."""
    return number < -(2**63) + 2**10  # 2**10: as a float it may be rounded to -2**63


def _direct(schema: Schema) -> Iterator[tuple[str, Any]]:
    """The direct subschemas, each with its keyword."""
    for key, value in schema.items():
        if key in _SCHEMAS and isinstance(value, list):
            yield from ((key, part) for part in value)
        elif key in _SCHEMA:
            yield key, value
        elif key in _NAMED and isinstance(value, Mapping):
            yield from ((key, part) for part in value.values())


def _within(schema: Any) -> Iterator[Schema]:
    """The schema and all those within it."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            yield one
            left += [part for _, part in _direct(one)]


def _pointed(root: Schema, name: str) -> Any:
    """What a reference names; None if it is not here, which the library judges."""
    if name != "#" and not name.startswith("#/"):
        return None
    found: Any = root
    for step in name[2:].split("/") if name != "#" else ():
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and step in found:
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def _parts(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _named(schema: Schema) -> Mapping[str, Any]:
    value = schema.get("properties")
    return value if isinstance(value, Mapping) else {}


_ANNOTATIONS: Final = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions"),
    }
)
"""Keywords that hold for no value. Pydantic writes some of them beside every `$ref` and `anyOf`."""


def _joins(schema: Schema) -> bool:
    """Whether its parts hold for one value together."""
    several = len(_parts(schema, "allOf")) > 1
    holding = schema.keys() - _ANNOTATIONS
    return several or (len(holding) > 1 and bool((_IN_PLACE | {"$ref"}) & holding))


def _multiple(schema: Schema) -> int:
    """Its `multipleOf` without a decimal point; 1 if there is none."""
    value = schema.get("multipleOf")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return 1
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    assert isinstance(exponent, int)  # it is finite
    written = int("".join(map(str, digits)))
    return written * 10 ** min(exponent, 9) if exponent > 0 else written


def _is_no_step(schema: Schema) -> bool:
    """Whether its `multipleOf` is no positive number. The library goes through the remainders of a
    negative one too."""
    value = schema.get("multipleOf", 1)
    return isinstance(value, bool) or not isinstance(value, int | float) or value <= 0


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether there is a value to it that ends, if only these references are to such schemas.
    In doubt there is."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return True
    name = schema.get("$ref")
    if isinstance(name, str) and name not in ending:
        return False
    if not all(_ends(part, ending) for part in _parts(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        parts = _parts(schema, key)
        if parts and not any(_ends(part, ending) for part in parts):
            return False
    kinds = schema.get("type")
    holding = {"object": _object_ends, "array": _array_ends}
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        return True
    return any(kind not in holding or holding[kind](schema, ending) for kind in kinds)


def _object_ends(schema: Schema, ending: set[str]) -> bool:
    required = schema.get("required")
    named = _named(schema)
    others = None if "patternProperties" in schema else schema.get("additionalProperties")
    return all(
        _ends(named.get(name, others), ending)
        for name in (required if isinstance(required, list) else ())
        if isinstance(name, str)
    )


def _array_ends(schema: Schema, ending: set[str]) -> bool:
    least = schema.get("minItems")
    if not isinstance(least, int | float):
        return True
    first, others = _parts(schema, "prefixItems"), schema.get("items")
    least = int(min(least, len(first) + 1))
    return all(_ends(part, ending) for part in [*first, others][:least])


# --- what could be taken for a call ---------------------------------------------------------
def may_be_call(schema: Schema, arguments: str, names: Collection[str]) -> bool:
    """Whether the schema asks for an object, or an array of these, that reads like a call of one of
    these tools. One that leaves its properties open does not ask for it."""
    document, left, seen = _Document(schema), [schema], set[int]()
    while left:
        one: Any = left.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        named = _named(one)
        if {"name", arguments} <= named.keys():
            fits = any(_may_be(named["name"], "string", name) for name in names)
            if fits and _may_be(named[arguments], "object"):
                return True
        left += [part for key, part in _direct(one) if key in _SAME_OR_ITEM]
        left.append(document.target(one))
    return False


_SAME_OR_ITEM: Final = ("anyOf", "oneOf", "allOf", "items", "prefixItems")


def _may_be(schema: Any, kind: str, value: str | None = None) -> bool:
    """Whether a value of this kind, or this value, may fit; in doubt it may."""
    if not isinstance(schema, Mapping):
        return True
    if value is not None and ("const" in schema or isinstance(schema.get("enum"), list)):
        return value in ([schema["const"]] if "const" in schema else schema["enum"])
    kinds = schema.get("type", kind)
    return kind in (kinds if isinstance(kinds, list) else [kinds])
