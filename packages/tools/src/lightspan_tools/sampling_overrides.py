"""Read which sampling options of an app's requests the training algorithm replaced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightspan.schema import semconv as c


def overrides_of(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the request fields that were overridden: field → (value of the app, value used).

    The training algorithm overrides a field if its own sampling options have another value than the
    app's request.
    """
    overrides = json.loads(str(attributes.get(c.SAMPLING_OVERRIDES) or "{}"))
    return {field: (requested, used) for field, (requested, used) in overrides.items()}
