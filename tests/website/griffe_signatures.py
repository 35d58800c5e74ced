"""Show the parameters of constructors that griffe cannot read from the source.

These are constructors decorated with `@signature_from(Settings)`, and those of msgspec's structs.
mkdocs.yml names this file as an extension of griffe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Give classes the parameters with which users construct them."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the classes of a loaded package."""
        for each in list(classes_of(pkg)):
            init = each.members.get("__init__")
            if isinstance(init, griffe.Function):
                if settings := settings_of(each, init):
                    init.parameters = parameters_of(settings)
                else:
                    allow_positions(each, init)
            elif any(str(base) in ("Struct", "msgspec.Struct") for base in each.bases):
                init = griffe.Function("__init__", parameters=parameters_of(each))
                each.set_member("__init__", init)


def classes_of(scope: griffe.Object) -> Iterator[griffe.Class]:
    """Yield the classes of a module and of its submodules."""
    for member in scope.members.values():
        if isinstance(member, griffe.Class):
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from classes_of(member)


def allow_positions(owner: griffe.Class, init: griffe.Function) -> None:
    """Let fields of a dataclass that are `field(kw_only=False)` be given by position."""
    for parameter in init.parameters:
        field = owner.all_members.get(parameter.name)
        if "kw_only=False" in str(getattr(field, "value", "")):
            parameter.kind = griffe.ParameterKind.positional_or_keyword
    order = {griffe.ParameterKind.keyword_only: 1}
    init.parameters = griffe.Parameters(
        *sorted(init.parameters, key=lambda each: order.get(each.kind, 0))
    )


def settings_of(owner: griffe.Class, init: griffe.Function) -> griffe.Class | None:
    """Return the class in the decorator `@signature_from(…)` of a constructor, or None."""
    for decorator in init.decorators:
        name, _, argument = str(decorator.value).partition("(")
        if name == "signature_from":
            settings = owner.modules_collection[owner.module.resolve(argument.removesuffix(")"))]
            assert isinstance(settings, griffe.Class)
            return settings
    return None


def parameters_of(settings: griffe.Class) -> griffe.Parameters:
    """Return the parameters of a constructor that takes the fields of a class."""
    self = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    fields = (field for field in settings.members.values() if isinstance(field, griffe.Attribute))
    return griffe.Parameters(self, *(parameter for f in fields if (parameter := _parameter(f))))


def _parameter(field: griffe.Attribute) -> griffe.Parameter | None:
    value = "" if field.value is None else str(field.value)
    is_field = field.annotation is not None and not field.name.startswith("_")
    if not is_field or "ClassVar" in str(field.annotation) or "property" in field.labels:
        return None
    keyword, default = griffe.ParameterKind.keyword_only, value or None
    if "kw_only=False" in value:
        keyword, default = griffe.ParameterKind.positional_or_keyword, None
    elif "default_factory=" in value:
        default = value.partition("default_factory=")[2].rstrip(")").partition(",")[0] + "()"
    return griffe.Parameter(field.name, annotation=field.annotation, kind=keyword, default=default)
