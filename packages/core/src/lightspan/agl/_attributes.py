"""Attributes of spans: nested values with dotted names, and values that OpenTelemetry allows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightspan.errors import DataError

_PLAIN = (str, int, float)  # a bool is an int


def flat(values: Any, *, expand_lists: bool = True) -> dict[str, Any]:
    """Dotted names of what is nested: `{"a": {"b": [1]}}` is `{"a.b.0": 1}`.

    Args:
        values: a mapping, or a list.
        expand_lists: number the items of lists of plain values of one type, too.

    Raises:
        DataError: a key that is no text.
    """
    return dict(_leaves(values, "", expand_lists))


def _leaves(value: Any, prefix: str, expand_lists: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise DataError(f"attributes have names of text, not {key!r} (in {prefix!r})")
            yield from _leaves(item, f"{prefix}.{key}" if prefix else key, expand_lists)
    elif isinstance(value, list) and (expand_lists or not prefix or not _is_uniform(value)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{prefix}.{number}" if prefix else str(number), expand_lists)
    else:
        yield prefix, value


def _is_uniform(values: Sequence[Any]) -> bool:
    kinds = {type(value) for value in values}
    return len(kinds) == 1 and all(isinstance(value, _PLAIN) for value in values)


def nested(attributes: Mapping[str, Any], prefix: str) -> Any:
    """What stands below a dotted name, as it was before `flat`; `{}` if nothing does.

    Numbered names become a list if no number is missing.

    Raises:
        DataError: the name itself is an attribute.
    """
    if prefix in attributes:
        raise DataError(
            f"{prefix} has a value of its own, {attributes[prefix]!r}: nothing below it"
        )
    root: dict[str, Any] = {}
    for name, value in attributes.items():
        if name.startswith(f"{prefix}."):
            *path, last = name[len(prefix) + 1 :].split(".")
            node = root
            for part in path:
                inner = node.get(part)
                if not isinstance(inner, dict):
                    inner = node[part] = {}
                node = inner
            node[last] = value
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists(value) for key, value in node.items()}
    numbers = [str(number) for number in range(len(items))]
    if items and items.keys() == set(numbers):
        return [items[number] for number in numbers]
    return items


def check(attributes: Mapping[str, Any]) -> None:
    """Raise `DataError` where a value is no text, number or bool, or list of one of them."""
    for name, value in attributes.items():
        is_list = isinstance(value, list)
        if _one_kind(value) is None if is_list else not isinstance(value, _PLAIN):
            raise DataError(
                f"the attribute {name!r} must be a text, number or bool, or a list of one of them, "
                f"not {value!r:.200}"
            )


def allowed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes with values that OpenTelemetry allows; others as JSON."""
    return {name: _allowed(value) for name, value in attributes.items()}


def _allowed(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    kept = _one_kind(value) if isinstance(value, list) else None
    return json.dumps(value, default=str) if kept is None else kept


def _one_kind(values: list[Any]) -> list[Any] | None:
    """The list with items of one type; None if they have none in common."""
    for kinds, kind in (((str,), None), ((bool,), None), ((int,), int), ((float, int), float)):
        if all(isinstance(value, kinds) for value in values):
            return list(values) if kind is None else [kind(value) for value in values]
    return None
