"""Log lines on the console, as the original's scripts ask for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

FORMAT: Final = "%(asctime)s [%(levelname)s] (process %(process)d %(name)s)  %(message)s"


def setup_logging(
    level: int | str = logging.INFO,
    *,
    console: bool = True,
    propagate: bool = False,
    submodule_levels: Mapping[str, int | str] | None = None,
    extra_handlers: Sequence[logging.Handler] | None = None,
    formatter: logging.Formatter | None = None,
    apply_to: Iterable[str] | None = None,
) -> None:
    """Show log lines of lightspan, and of the loggers in `apply_to`.

    Args:
        level: the least that is shown.
        console: write to the standard error.
        propagate: hand lines to the root logger too.
        submodule_levels: logger → its own level.
        extra_handlers: further handlers.
        formatter: None for time, level, process, name and text.
        apply_to: names of further loggers.
    """
    handlers = list(extra_handlers or ())
    if console:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(formatter or logging.Formatter(FORMAT))
    for name in ("lightspan", *(apply_to or ())):
        _set(logging.getLogger(name), handlers, level, propagate)
    for name, own in (submodule_levels or {}).items():
        logging.getLogger(name).setLevel(own)


def configure_logger(level: int = logging.INFO, name: str = "lightspan") -> logging.Logger:
    """The logger of this name, made to write to the console only."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.getLogger(name)
    _set(logger, [handler], level, propagate=False)
    return logger


def _set(
    logger: logging.Logger,
    handlers: Sequence[logging.Handler],
    level: int | str,
    propagate: bool,
) -> None:
    logger.handlers[:] = handlers  # replaced: scripts that set up twice would show each line twice
    logger.setLevel(level)
    logger.propagate = propagate
