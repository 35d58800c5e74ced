"""State of a message in the app, which both frameworks share."""

from __future__ import annotations

from typing import Required, TypedDict


class State(TypedDict, total=False):
    """A message with the app's results; the caller passes `message`."""

    message: Required[str]
    department: str | None
    """The department that the router named; None if it named none."""
    product: str
    answer: str
    """Answer to the customer."""
