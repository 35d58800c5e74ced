"""Sampling options of an app that the algorithm overrode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightspan.schema import semconv as c


def overrides_of(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return request field → (the app's value, the value used) for the fields that were overridden.

    The algorithm overrides a field when its sampling options differ from those of the app's
    request.
    """
    overrides = json.loads(str(attributes.get(c.SAMPLING_OVERRIDES) or "{}"))
    return {field: (requested, used) for field, (requested, used) in overrides.items()}
