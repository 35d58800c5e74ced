"""Log lines on the console."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from lightspan.progress import print_line
from lightspan_agl._unsupported import refuse_names as _refuse_names

__all__ = ["configure_logger", "setup", "setup_logging"]
__getattr__ = _refuse_names(__name__)

FORMAT: Final = "%(asctime)s [%(levelname)s] (process %(process)d %(name)s)  %(message)s"


def setup_logging(
    level: int | str = logging.INFO,
    *,
    apply_to: Iterable[str] | None = None,
    files: str | None = None,
    **options: Any,
) -> None:
    """Print log lines of lightspan, and of the loggers in `apply_to`, to standard error.

    Args:
        level: minimum level.
        apply_to: names of further loggers; None for none.
        files: path of an additional log file; None for none.
        options: further options of Agent Lightning, such as `color`; without effect, and named in
            a line.
    """
    names = [f"{name}={value!r}" for name, value in options.items()]
    if names:
        print_line(f"setup_logging: without effect: {', '.join(names)}")
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if files is not None:
        handlers.append(logging.FileHandler(files, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT))
    for name in ("lightspan", "lightspan_agl", *(apply_to or ())):
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers  # replaced, or a second call would duplicate each line
        logger.setLevel(level)
        logger.propagate = False


setup = setup_logging
"""The name of `setup_logging` in this module of Agent Lightning."""


def configure_logger(
    level: int | str = logging.INFO, name: str = "lightspan_agl"
) -> logging.Logger:
    """Print log lines of lightspan and of the logger `name`, and return that logger."""
    setup_logging(level, apply_to=[name])
    return logging.getLogger(name)


def copy_to_original(record: logging.LogRecord) -> bool:
    """Hand a log record to the handlers of Agent Lightning's logger of the same module, too.

    Scripts add the handler of a log file to a logger such as `agentlightning.algorithm.apo`. This
    function is installed as a filter of lightspan's logger. It returns True, so that the logger
    keeps the record.
    """
    name = record.name.replace("lightspan_agl", "agentlightning", 1)
    for handler in logging.getLogger(name).handlers:
        if record.levelno >= handler.level:
            handler.handle(record)
    return True
