"""Errors raised by lightspan. A class's docstring is its default message.

LightspanError
├── ConfigError              an option that cannot be honoured, or contradicts another
│   ├── UnknownAgentError    `optimize=` or `frozen=` names an agent that does not exist
│   └── UnsupportedError     a backend does not support an option
├── BudgetError              a run has made more calls to endpoints than it may
├── DataError                malformed tasks or records
├── RewardError              a reward of a type that is not a reward
├── AppError                 the app cannot be imported or called
├── ModelError               a model or tokenizer cannot be loaded or used
├── CheckpointError          a checkpoint cannot be read or written
├── OutOfMemoryError         too little memory; the message names an option to lower
├── RankError                a process of the learner has ended, or does not answer
├── StoreError
│   ├── StoreClosedError
│   ├── StoreUnreachableError  the store's server does not answer now
│   ├── StoreFormatError     a foreign, newer or damaged store file
│   ├── NotFoundError        an id that the store does not know
│   ├── ConflictError        one id was used for two different things
│   └── IllegalMoveError     a change of status that the state machine forbids
└── EngineError
    ├── ContextOverflowError prompt longer than the context
    ├── CancelledError       a generation that was cancelled
    ├── EngineMemoryError    the engine ran out of memory; also an OutOfMemoryError
    └── EngineClosedError

Narrower errors are defined where they are raised, such as `runners.program.ProgramError`.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

PAGE: Final = "docs/troubleshooting.md"
"""The page that explains warnings and errors. It is in the repository, not in the packages."""
_TABLE: Final = Path(__file__).with_name("troubleshooting.tsv")
"""Anchor and heading of each message on `PAGE`, the longest heading first. It is made by
`tests/website/reference.py`."""


@cache
def _headings() -> tuple[tuple[str, list[str]], ...]:
    """Return the rows of the table: each anchor, and the parts of its heading between ellipses.

    Empty if the table cannot be read, because the error of a user is more important than its note.
    """
    try:
        rows = [row.split("\t") for row in _TABLE.read_text("utf-8").splitlines()]
        return tuple((anchor, heading.strip("…").split("…")) for anchor, heading in rows)
    except (OSError, ValueError):
        return ()


def page_of(message: str) -> str:
    """Return `PAGE` with the anchor of the first heading that matches; empty if none does.

    An ellipsis in a heading stands for a value.
    """
    text = " ".join(message.split())[:2000]
    for anchor, parts in _headings():
        # the patterns alone take milliseconds, and some errors are raised for each of many calls
        if all(p in text for p in parts) and re.search(".*".join(map(re.escape, parts)), text):
            return f"{PAGE}#{anchor}"
    return ""


class LightspanError(Exception):
    """lightspan failed. A note names the part of the documentation that explains the message."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)
        if page := page_of(message or ""):
            self.add_note(f"see {page}")


class ConfigError(LightspanError, ValueError):
    """An option cannot be honoured."""


class UnknownAgentError(ConfigError):
    """An agent name matches nothing."""


class UnsupportedError(ConfigError):
    """The backend does not support this option."""


class BudgetError(LightspanError):
    """The run has made more calls to endpoints than it may."""


class DataError(LightspanError, ValueError):
    """The data is malformed."""


class RewardError(LightspanError, TypeError):
    """A reward must be a number, a bool, None, or a mapping of names to numbers."""


class AppError(LightspanError):
    """The app cannot be imported or called."""


class ModelError(LightspanError):
    """The model or its tokenizer cannot be used."""


class CheckpointError(LightspanError):
    """The checkpoint cannot be read or written."""


class OutOfMemoryError(LightspanError, MemoryError):
    """Memory ran out."""


class RankError(LightspanError):
    """A process of the learner has ended, or does not answer."""


class StoreError(LightspanError):
    """The store failed."""


class StoreClosedError(StoreError):
    """The store is closed. Open it first: `async with open_store(url) as store`."""


class StoreUnreachableError(StoreError):
    """The store's server does not answer; try again later."""


class StoreFormatError(StoreError):
    """The file is not a store that this version of lightspan can read."""


class NotFoundError(StoreError, KeyError):
    """The store does not know this id."""

    def __str__(self) -> str:  # `KeyError` shows its message in quotes, with escapes
        return str(self.args[0])


class ConflictError(StoreError):
    """The same id was used for two different things."""


class IllegalMoveError(StoreError):
    """The state machine forbids this move."""


class EngineError(LightspanError):
    """The engine failed."""


class ContextOverflowError(EngineError):
    """The prompt does not fit the model's context."""


class CancelledError(EngineError):
    """The generation was cancelled."""


class EngineMemoryError(EngineError, OutOfMemoryError):
    """The engine ran out of memory."""


class EngineClosedError(EngineError):
    """The engine is closed."""


def folders_of(extra: str) -> list[str]:
    """Return the folders of `packages/` that an extra of lightspan needs besides the core's."""
    needs = next((each.requires for each in distributions(name="lightspan")), None) or ()
    matches = (re.match(r"lightspan-(\w+).* extra == .(\w+).$", each) for each in needs)
    return [match[1] for match in matches if match and match[2] == extra]


def how_to_install(extra: str = "", *, python: str = "", version: str = "") -> str:
    """Return the command that installs lightspan, for an error message.

    lightspan is on no package index yet, and another project may register the name. So the command
    installs from a checkout, with every folder that the extra needs.

    Args:
        extra: extra of `lightspan`, such as `train`; empty for the core alone.
        python: interpreter of the environment; empty for the active environment.
        version: version of the checkout; empty for any.
    """
    pip = f"{python} -m pip" if python else "pip"
    core = f"'./packages/core[{extra}]'" if extra else "./packages/core"
    packages = " ".join([core, *(f"./packages/{name}" for name in folders_of(extra))])
    checkout = f"lightspan {version}" if version else "lightspan"
    return f"`{pip} install {packages}`, from a checkout of {checkout}"
