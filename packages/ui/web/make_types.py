"""Write `src/api.d.ts`, the TypeScript types of the API, from the structs in `lightspan_ui.views`.

Run `python packages/ui/web/make_types.py` after every change of the structs. With `--check`, write
nothing, and fail if the file differs from what would be written.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec

HERE: Final = Path(__file__).parent
OUTPUT: Final = HERE / "src" / "api.d.ts"
VIEWS: Final = HERE.parent / "src" / "lightspan_ui" / "views.py"

_SIMPLE: Final[dict[type, str]] = {
    msgspec.inspect.StrType: "string",
    msgspec.inspect.IntType: "number",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.BoolType: "boolean",
    msgspec.inspect.NoneType: "null",
}


def main() -> int:
    """Write or check the file; return the exit status."""
    text = types_text(VIEWS.read_text())
    if "--check" in sys.argv[1:]:
        if not OUTPUT.exists() or OUTPUT.read_text() != text:
            print(f"{OUTPUT} is not up to date: run python {sys.argv[0]}")
            return 1
        return 0
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(text)
    return 0


def types_text(source: str) -> str:
    """Return the content of `api.d.ts` for the source text of a module of structs."""
    # compiled from its source, so that the types can be made before the package is installed
    module = ModuleType("views")
    sys.modules["views"] = module  # where msgspec looks up the annotations
    exec(compile(source, str(VIEWS), "exec"), module.__dict__)
    parts = [
        "\n".join(_interface(node, getattr(module, node.name)))
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name != "View"
    ]
    return "\n\n".join(["// Made from views.py by make_types.py. Do not edit.", *parts]) + "\n"


def _interface(node: ast.ClassDef, struct: type[msgspec.Struct]) -> Iterator[str]:
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    comments = _field_comments(node)
    yield from _comment(ast.get_docstring(node), "")
    yield f"export interface {node.name} {{"
    for field in info.fields:
        yield from _comment(comments.get(field.name), "  ")
        # a field of an answer is always sent, with its default if need be
        optional = "" if field.required or not node.name.endswith("Request") else "?"
        yield f"  {field.encode_name}{optional}: {type_text(field.type)};"
    yield "}"


def type_text(kind: msgspec.inspect.Type) -> str:
    """Return a type of msgspec as TypeScript."""
    match kind:
        case msgspec.inspect.StructType():
            return kind.cls.__name__
        case msgspec.inspect.ListType():
            item = type_text(kind.item_type)
            return f"({item})[]" if " | " in item else f"{item}[]"
        case msgspec.inspect.DictType():
            return f"Record<{type_text(kind.key_type)}, {type_text(kind.value_type)}>"
        case msgspec.inspect.UnionType():
            return " | ".join(type_text(part) for part in kind.types)
        case msgspec.inspect.LiteralType():
            return " | ".join(f'"{value}"' for value in kind.values)
    return _SIMPLE[type(kind)]


def _field_comments(node: ast.ClassDef) -> dict[str, str]:
    """Return the docstrings of a class's fields: the text that follows each field."""
    comments = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            comments[field.target.id] = str(after.value.value)
    return comments


def _comment(text: str | None, indent: str) -> Iterator[str]:
    if text:
        text = re.sub(r"\bNone\b", "null", " ".join(text.split()))
        yield f"{indent}/** {text} */"


if __name__ == "__main__":
    sys.exit(main())
