"""The vocabulary of the generated worlds: the names of people, places, companies and works.

All splits share the names; `worlds` divides their pairs, so that no fact of one split occurs in
another. A model of less than a million parameters does not learn to spell unseen names in a warm
start of a few minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["person", "place", "company", "work"]

NAMES: Mapping[Kind, tuple[str, ...]] = {
    "person": tuple(
        """
        Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Juna Karl Lena
        Milo Nora Otto Pia Rosa Sam Tess Ugo Vera Walt Yara Zoe
        """.split()  # noqa: SIM905
    ),
    "place": tuple(
        """
        Alder Birch Cedar Dorset Elm Ferry Grove Heath Isle Juniper Kent Linden
        Maple Norfolk Oak Poplar Quarry Rowan Surrey Thorn Upton Vale Willow York
        """.split()  # noqa: SIM905
    ),
    "company": tuple(
        """
        Apex Atlas Cobalt Delta Ember Falcon Gamma Halo Ion Jade Kappa Lunar
        Metro Nova Orion Pearl Quartz Rapid Solar Titan Union Vital Xenon Zenith
        """.split()  # noqa: SIM905
    ),
    "work": tuple(
        """
        Autumn Bridges Candles Dust Echoes Feathers Glass Harbour Ivory Journey Kingdom Letters
        Mirrors Night Ocean Paper Rain Shadows Thunder Umbra Voyage Winter Islands Smoke
        """.split()  # noqa: SIM905
    ),
}
"""Kind → names."""

KINDS: tuple[Kind, ...] = ("person", "place", "company", "work")
