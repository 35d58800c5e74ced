"""What is known of a message on its way through the app, whichever framework it is written with."""

from __future__ import annotations

from typing import Required, TypedDict


class State(TypedDict, total=False):
    """The caller gives `message`; the app adds the rest."""

    message: Required[str]
    department: str | None
    """None: the router named none that there is."""
    product: str
    answer: str
    """What the customer gets."""
