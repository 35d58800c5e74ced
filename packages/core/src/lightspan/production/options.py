"""Read the options of recording from arguments and the environment."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Final

from lightspan.errors import ConfigError
from lightspan.production.redact import Redact, find_hook
from lightspan.schema.semconv import SERVICE_NAME as SERVICE_NAME
from lightspan.stores import open_store

STORE_VARIABLE: Final = "LIGHTSPAN_STORE"
SAMPLE_VARIABLE: Final = "LIGHTSPAN_SAMPLE"
IMAGES_VARIABLE: Final = "LIGHTSPAN_IMAGES"
REDACT_VARIABLE: Final = "LIGHTSPAN_REDACT"
SERVICE_VARIABLE: Final = "OTEL_SERVICE_NAME"
RESOURCE_VARIABLE: Final = "OTEL_RESOURCE_ATTRIBUTES"
UNNAMED_SERVICE: Final = "unknown_service"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """The options of a recording."""

    store: str
    service: str
    sample: float = 1.0
    redact: Redact | str | None = None
    images: bool = True


def read_options(
    store: str | os.PathLike[str] | None,
    service: str | None,
    sample: float | None,
    redact: Redact | str | None,
    images: bool | None,
) -> RecordOptions | None:
    """Return the options of recording, from the arguments and the environment.

    None if no store is given, so that nothing is to be recorded.

    Raises:
        ConfigError: the store is in memory, `sample` is not from 0 to 1, `LIGHTSPAN_IMAGES` is not
            0 or 1, or `redact` is not a function or its name, or cannot be imported.
    """
    url = os.fspath(store) if store is not None else os.environ.get(STORE_VARIABLE)
    if not url:
        return None
    if not open_store(url).capabilities.multi_process:
        raise ConfigError(
            f"store {url!r} exists in this process only, so the recording could not be read: use "
            "another store, such as sqlite:runs.db"
        )
    hook = redact or os.environ.get(REDACT_VARIABLE)
    switch = os.environ.get(IMAGES_VARIABLE) or ("0" if hook else "1")
    if switch not in ("0", "1"):
        raise ConfigError(f"{IMAGES_VARIABLE}={switch!r}: give 1 to store images, or 0")
    return RecordOptions(
        store=open_store(url).url,  # absolute: the process may change its folder
        service=service or service_of_environment() or UNNAMED_SERVICE,
        sample=_share(sample),
        redact=find_hook(hook) if hook else None,
        images=switch == "1" if images is None else images,
    )


def resource_of_environment() -> dict[str, Any]:
    """Return the resource attributes in OpenTelemetry's environment variables; empty without any.

    `OTEL_RESOURCE_ATTRIBUTES` has them, and `OTEL_SERVICE_NAME` overrides `service.name`.
    """
    if not (os.environ.get(SERVICE_VARIABLE) or os.environ.get(RESOURCE_VARIABLE)):
        return {}
    from opentelemetry.sdk.resources import OTELResourceDetector

    return dict(OTELResourceDetector().detect().attributes)


def service_of_environment() -> str | None:
    """Return the name of the service from the environment; None if it is not set."""
    return str(resource_of_environment().get(SERVICE_NAME) or "") or None


def _share(sample: float | None) -> float:
    """Return the share of attempts to keep, from 0 to 1.

    If `sample` is None, it is the value of `LIGHTSPAN_SAMPLE`, or 1 if that is not set.

    Raises:
        ConfigError: the value is not a number from 0 to 1.
    """
    value: Any = os.environ.get(SAMPLE_VARIABLE) or 1.0 if sample is None else sample
    name = SAMPLE_VARIABLE if sample is None else "sample"
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"{name}={value!r}: give the share of attempts to keep, from 0 to 1")
    return share
