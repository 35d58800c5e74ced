"""Convert an app's return value to a reward: a number, or several named numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from lightspan.errors import RewardError
from lightspan.schema.redaction import clean_text
from lightspan.schema.semconv import REWARD_DIMENSION, REWARD_VALUE

LARGEST: Final = 1e100
"""Largest absolute value of a reward. Sums and squares of larger values would overflow, such as of
`-sys.float_info.max`, which an app may use for a failure."""


class Reward(msgspec.Struct, frozen=True, gc=False):
    """A reward: a number, which is `value`, and further named numbers, which are `dimensions`."""

    value: float | None
    """The number; None if the rollout is unscored, which is not the same as zero."""
    dimensions: dict[str, float] = msgspec.field(default_factory=dict)


def parse_reward(value: Any, primary: str | None = None) -> Reward | None:
    """Return an app's return value as a reward; None if the app returned None.

    A number or bool becomes the reward's value. NaN, infinity and numbers beyond `LARGEST` count as
    no value. A mapping of names to numbers becomes the `dimensions` of the reward, and one of these
    numbers becomes the value.

    Args:
        value: what the app returned.
        primary: name of the dimension that becomes the value. None for the dimension `"reward"`, or
            for the only dimension.

    Raises:
        RewardError: `value` is a string or of another type; the mapping is empty; `primary` is not
            among the names; or `primary` is None and none of several names is `"reward"`.
    """
    if value is None or isinstance(value, Reward):
        return value
    if isinstance(value, Mapping):
        return _parse_dimensions(value, primary)
    return Reward(usable(_number(value)))


def usable(number: Any) -> float | None:
    """Return a number or bool as a float; None for NaN, infinity and numbers beyond `LARGEST`.

    None for anything else, too.
    """
    is_number = isinstance(number, int | float)
    return float(number) if is_number and -LARGEST <= number <= LARGEST else None


def reward_attributes(reward: Reward) -> dict[str, float | None]:
    """Return the attributes of a span that records a reward."""
    dimensions = {REWARD_DIMENSION + name: number for name, number in reward.dimensions.items()}
    return {**dimensions, REWARD_VALUE: reward.value}


def reward_of(attributes: Mapping[str, Any]) -> Reward:
    """Return the reward in the attributes of a span, without numbers that are not `usable`."""
    dimensions = {
        key.removeprefix(REWARD_DIMENSION): number
        for key, value in sorted(attributes.items())
        if key.startswith(REWARD_DIMENSION) and (number := usable(value)) is not None
    }
    return Reward(usable(attributes.get(REWARD_VALUE)), dimensions)


def _parse_dimensions(value: Mapping[Any, Any], primary: str | None) -> Reward:
    if not value:
        raise RewardError("a reward with named dimensions needs at least one: got {}")
    named = {clean_text(str(name)): number for name, number in value.items()}
    dimensions = {name: _number(v, f"{name!r} of a reward") for name, v in named.items()}
    primary = primary or (next(iter(dimensions)) if len(dimensions) == 1 else "reward")
    if primary not in dimensions and primary == "reward":
        raise RewardError(
            f"which of {', '.join(map(repr, dimensions))} is the reward? Give the number to learn "
            "from the name 'reward', or name it: emit_reward(values, primary=...)"
        )
    if primary not in dimensions:
        raise RewardError(f"primary reward {primary!r} is not among {sorted(dimensions)}")
    finite = {name: number for name, number in dimensions.items() if usable(number) is not None}
    return Reward(usable(dimensions[primary]), finite)


def _number(value: Any, what: str = "a reward") -> float:
    if isinstance(value, str | bytes):
        raise RewardError(f"{what} must be a number, not the text {value!r}; convert it first")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        more = ", or None or a mapping of names to numbers" if what == "a reward" else ""
        kinds = f"a number or a bool{more}, not {type(value).__name__}"
        raise RewardError(f"{what} must be {kinds}: {value!r}") from error
    except OverflowError:
        return float("inf")  # no float can hold it, so it is not `usable`
