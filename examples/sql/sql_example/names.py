"""The vocabulary of the generated worlds: table names, column names and values.

All splits share the words; `worlds` divides their combinations. A model of less than a million
parameters does not learn to spell unseen table names in a warm start of two minutes.
"""

from __future__ import annotations

TABLES = tuple(
    """
    singers concerts players teams books doctors patients students teachers hotels guests rooms
    planes pilots trains drivers ships farms horses dogs owners trees shops clients orders cakes
    wines movies actors songs bands museums banks tools cars rivers islands castles robots games
    """.split()  # noqa: SIM905
)
"""Table names; always plural, so that a question can use them as they are."""

LABELS = ("name", "title", "code")
"""Columns whose values are unique in their table."""

NUMBERS = (
    *("age", "price", "weight", "height", "score", "size", "cost"),
    *("speed", "length", "votes", "points", "hours", "wins", "depth"),
)
"""Integer columns."""

RANGE = range(10, 100)
"""Values of integer columns."""

TEXTS: dict[str, tuple[str, ...]] = {
    "country": ("France", "Spain", "Italy", "Japan"),
    "city": ("Paris", "Rome", "Oslo", "Lima"),
    "color": ("red", "blue", "green", "black"),
    "status": ("open", "closed", "lost", "sold"),
    "genre": ("jazz", "rock", "folk", "drama"),
    "season": ("spring", "summer", "autumn", "winter"),
    "level": ("junior", "senior", "expert", "novice"),
    "region": ("north", "south", "east", "west"),
}
"""Text column → its possible values."""

SYLLABLES = ("ba", "co", "da", "fi", "go", "ha", "ka", "li", "mo", "na", "pe", "ri", "so", "tu")
"""Syllables of the values of label columns."""
