"""Apply the prompts of a run: `lightspan.apply_prompts("runs/desk")`, for the whole process.

The instructions of agents are replaced as they were while they were learned, in requests that go
where the app points them; a text that the app asks for (`lightspan.prompt`) is the learned one. It
makes no difference whether calls are recorded. Inside rollouts it changes nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from lightspan.capture import context, sdk_instrumentation, sdks
from lightspan.capture._globals import ActivePrompts
from lightspan.capture.prompt_overrides import PROMPTS_VARIABLE
from lightspan.errors import ConfigError
from lightspan.schema.prompts import LearnedPrompt, PromptPlace
from lightspan.schema.system_prompts import Instructions, Rewrite

log = logging.getLogger(__name__)

PROMPTS: Final = "prompts.json"
"""In the folder of a run: what it learned."""


class AppliedPrompts:
    """What `apply_prompts` returns; as a context manager it ends with the block."""

    def __init__(self, prompts: Mapping[str, LearnedPrompt]) -> None:
        self.prompts = dict(prompts)
        """Name → prompt: `applied.prompts["router"].template` is the text. Empty if nothing
        is applied."""
        self._active = ActivePrompts(_instructions(prompts)) if prompts else None
        if self._active is not None:
            context.push_prompts(self._active)
            atexit.register(self._warn)

    def close(self) -> None:
        """Let the app's own prompts apply again. Idempotent."""
        active, self._active = self._active, None
        if active is not None:
            atexit.unregister(self._warn)
            context.pop_prompts(active)
            _warn_of_missing_agents(active)

    def _warn(self) -> None:
        if self._active is not None:
            _warn_of_missing_agents(self._active)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def apply_prompts(run: str | os.PathLike[str] | None = None) -> AppliedPrompts:
    """Apply the prompts that a run learned, in this process, until it ends. Rollouts have those of
    their algorithm.

    Where an agent's text is not the one that was found while it was learned, the app's own is sent,
    and a warning says so once. What fails later never reaches the app.

    Args:
        run: its folder, or its `prompts.json` alone; None for `LIGHTSPAN_PROMPTS`, and if that is
            not set nothing is applied, so that the line can stay in the app. With the variable
            alone, an adapter's `instrument()` does the same.

    Raises:
        ConfigError: there is no such file, it is damaged, or there is no client of OpenAI or
            Anthropic whose requests could say it.
    """
    chosen = run or os.environ.get(PROMPTS_VARIABLE)
    if not chosen:
        return AppliedPrompts({})
    prompts = read_prompts(Path(chosen))
    agents = [name for name, each in prompts.items() if each.place is PromptPlace.AGENT]
    if agents and not sdks.any_installed():
        raise ConfigError(
            f"the instructions of {', '.join(map(repr, agents))} cannot be applied: there is no "
            "client of OpenAI or Anthropic in this environment: pip install openai"
        )
    if agents:
        sdk_instrumentation.install()
    return AppliedPrompts(prompts)


def read_prompts(path: Path) -> dict[str, LearnedPrompt]:
    """The prompts that a run learned.

    Args:
        path: its folder, or the file.

    Raises:
        ConfigError: they cannot be read, or there are none.
    """
    file = path / PROMPTS if path.is_dir() else path
    try:
        prompts = msgspec.json.decode(file.read_bytes(), type=dict[str, LearnedPrompt])
    except FileNotFoundError:
        why = "has learned no prompts, or is not complete" if path.is_dir() else "is not there"
        raise ConfigError(f"{path} {why}: name the folder of a run, with its {PROMPTS}") from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not prompts:
        raise ConfigError(f"{file} has no prompt in it")
    for name, each in prompts.items():
        others = set(each.after.fields) ^ set(each.before.fields)
        if others and each.place is PromptPlace.AGENT:  # somebody may have edited it
            raise ConfigError(
                f"{file}: the texts of {name!r} before and after differ in their placeholders: "
                f"{', '.join(sorted(others))} is in one of them alone"
            )
    return prompts


def _instructions(prompts: Mapping[str, LearnedPrompt]) -> Instructions:
    agents = [each for each in prompts.values() if each.place is PromptPlace.AGENT]
    return Instructions(
        rewrites=[
            Rewrite(agent=each.agent, template=each.before.template, text=each.after.template)
            for each in agents
        ],
        # one that was an argument may be asked for, too
        prompts={name: each for name, each in prompts.items() if each not in agents},
    )


def _warn_of_missing_agents(active: ActivePrompts) -> None:
    names = [rewrite.agent for rewrite in active.instructions.rewrites]
    missing = [name for name in names if name not in active.asked] if active.calls else []
    if missing:
        log.warning(
            "lightspan.apply_prompts: of %s no model call was seen, so what was learned for it "
            "changed nothing: are the agents called as they were, with the adapter's instrument()?",
            ", ".join(map(repr, missing)),
        )


# --- by the environment ---------------------------------------------------------------------
_held: Final[dict[str, Any]] = {}
"""Adapter → True, and the one `AppliedPrompts` of all of them."""
_APPLIED: Final = "applied"


def hold(owner: str) -> None:
    """Apply what the environment names while `owner` (an adapter, by its `instrument()`) is on.
    Never raises: what is wrong is logged, and then nothing is applied."""
    if not os.environ.get(PROMPTS_VARIABLE):
        return
    try:
        if _APPLIED not in _held:
            _held[_APPLIED] = apply_prompts()
        _held[f"of {owner}"] = True
    except Exception as error:
        log.error("lightspan: no learned prompt is applied: %s", error)


def release(owner: str) -> None:
    """Undo `hold`."""
    _held.pop(f"of {owner}", None)
    if _held.keys() == {_APPLIED}:
        _held.pop(_APPLIED).close()


__all__ = ["AppliedPrompts", "apply_prompts", "hold", "read_prompts", "release"]
