"""Log lines on the console, as the original's scripts ask for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

FORMAT: Final = "%(asctime)s [%(levelname)s] (process %(process)d %(name)s)  %(message)s"


def setup_logging(
    level: int | str = logging.INFO,
    *,
    console: bool = True,
    color: bool | Mapping[str, Any] = True,
    propagate: bool = False,
    disable_existing_loggers: bool = False,
    capture_warnings: bool = False,
    submodule_levels: Mapping[str, int | str] | None = None,
    extra_handlers: Sequence[logging.Handler] | None = None,
    formatter: logging.Formatter | None = None,
    apply_to: Iterable[str] | None = None,
    files: str | Mapping[str, str] | None = None,
) -> None:
    """Show log lines of lightspan, and of the loggers in `apply_to`.

    Args:
        level: the least that is shown.
        console: write to the standard error.
        color: accepted; lines are plain.
        propagate: hand lines to the root logger too.
        disable_existing_loggers: silence every other logger that there is.
        capture_warnings: show Python's warnings as log lines.
        submodule_levels: logger → its own level.
        extra_handlers: further handlers.
        formatter: None for time, level, process, name and text.
        apply_to: names of further loggers.
        files: a file that lines go to as well; or logger → its file. Folders are made.
    """
    handlers = list(extra_handlers or ())
    if console:
        handlers.append(logging.StreamHandler())
    if isinstance(files, str):
        handlers.append(_file(files))
    for handler in handlers:
        handler.setFormatter(formatter or logging.Formatter(FORMAT))
    names = ("lightspan", *(apply_to or ()))
    if disable_existing_loggers:
        _silence(names)
    for name in names:
        _set(logging.getLogger(name), handlers, level, propagate)
    for name, own in (submodule_levels or {}).items():
        logging.getLogger(name).setLevel(own)
    if isinstance(files, Mapping):
        for name, path in files.items():
            handler = _file(path)
            handler.setFormatter(formatter or logging.Formatter(FORMAT))
            logging.getLogger(name).addHandler(handler)
    if capture_warnings:
        logging.captureWarnings(True)


def setup_module_logging(
    level: int | str = logging.INFO,
    *,
    name: str = "lightspan",
    console: bool = True,
    color: bool | Mapping[str, Any] = True,
    propagate: bool = False,
    disable_existing_loggers: bool = False,
) -> logging.Logger:
    """The logger of this name, made to write to the console; see `setup_logging`."""
    handlers: list[logging.Handler] = [logging.StreamHandler()] if console else []
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT))
    if disable_existing_loggers:
        _silence((name,))
    logger = logging.getLogger(name)
    _set(logger, handlers, level, propagate)
    return logger


def configure_logger(level: int = logging.INFO, name: str = "lightspan") -> logging.Logger:
    """The logger of this name, made to write to the console only."""
    return setup_module_logging(level, name=name)


def _file(path: str) -> logging.Handler:
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    return logging.FileHandler(path, encoding="utf-8")


def _silence(but: Iterable[str]) -> None:
    """Every logger that there is, but for these and what is below them."""
    kept = tuple(but)
    for name, logger in logging.Logger.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and not f"{name}.".startswith(
            tuple(f"{own}." for own in kept)
        ):
            logger.disabled = True


def _set(
    logger: logging.Logger,
    handlers: Sequence[logging.Handler],
    level: int | str,
    propagate: bool,
) -> None:
    logger.handlers[:] = handlers  # replaced: scripts that set up twice would show each line twice
    logger.setLevel(level)
    logger.propagate = propagate
