"""Apply a run's prompts in the whole process: `lightspan.apply_prompts("runs/desk")`.

The instructions of agents are replaced in the app's requests, as in training. The requests still go
to the provider that the app uses. `lightspan.prompt` returns the learned text. Recording need not
be enabled. Requests inside rollouts are not changed.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import msgspec

from lightspan.capture import context, context_propagation, sdk_instrumentation, sdks
from lightspan.capture._globals import ActivePrompts, state
from lightspan.capture.prompt_overrides import PROMPTS_VARIABLE
from lightspan.errors import ConfigError
from lightspan.schema.prompts import LearnedPrompt, PromptPlace
from lightspan.schema.system_prompts import Instructions

log = logging.getLogger(__name__)

PROMPTS: Final = "prompts.json"
"""Name of the file with the learned prompts, in a run's folder."""


class AppliedPrompts(AbstractContextManager["AppliedPrompts"]):
    """The result of `apply_prompts`. In a `with` statement, prompts apply until the block ends."""

    def __init__(self, prompts: Mapping[str, LearnedPrompt], *, strict: bool, source: str) -> None:
        self.prompts = dict(prompts)
        """Name → prompt: `applied.prompts["router"].template` is the learned text. Empty if nothing
        is applied."""
        self._active = ActivePrompts(Instructions(prompts=self.prompts), strict, source=source)
        self._is_open = bool(prompts)
        text = "lightspan.apply_prompts: %r of %s is applied in place of that of %s, until closed"
        for target, prompt in self._active.targets.items():
            for other in state.active_prompts:
                if other.targets.get(target, prompt) != prompt:
                    log.warning(text, "".join(target), source, other.source)
        if prompts:
            context.push_prompts(self._active)
            context_propagation.carry(context_propagation.PROMPTS)
            atexit.register(self.close)

    @property
    def sent(self) -> dict[str, int]:
        """Name of the prompt → number of requests in which the learned text was sent."""
        return {name: counts.get("", 0) for name, counts in self._counts().items()}

    @property
    def not_sent(self) -> dict[str, dict[str, int]]:
        """Name of the prompt → reason → number of requests in which the app's own text was sent."""
        return {
            name: {reason: count for reason, count in counts.items() if reason}
            for name, counts in self._counts().items()
        }

    def _counts(self) -> dict[str, Mapping[str, int]]:
        return {n: self._active.counts.get(p.agent or n, {}) for n, p in self.prompts.items()}

    def close(self) -> None:
        """Stop applying the prompts. Idempotent.

        Logs a warning if the app's own text was sent instead of a learned one, or if no model call
        of an agent with a learned prompt was seen.
        """
        if self._is_open:
            self._is_open = False
            atexit.unregister(self.close)
            context.pop_prompts(self._active)
            if not state.active_prompts:
                context_propagation.stop_carrying(context_propagation.PROMPTS)
            self._warn()

    def _warn(self) -> None:
        text = "lightspan.apply_prompts: %d of %d requests for %r got the app's own text"
        agents = {name for name, each in self.prompts.items() if each.agent and each.is_changed}
        for name, counts in self._counts().items():
            if own := sum(counts.values()) - counts.get("", 0):
                log.warning(text, own, sum(counts.values()), name)
            elif self._active.calls and not counts and name in agents:
                log.warning(
                    "lightspan.apply_prompts: no model call of %r was seen, so its text changed "
                    "nothing: is it named as in training, and was instrument() called?",
                    name,
                )

    def __exit__(self, *error: object) -> None:
        self.close()


def apply_prompts(
    run: str | os.PathLike[str] | None = None, *, strict: bool = False
) -> AppliedPrompts:
    """Apply the prompts that a run learned, in this process until it ends.

    The prompts of several runs can be applied together; of two with the same name the one that was
    applied last is used, and a warning names both runs.

    Rollouts are not affected. If an agent's own text has changed since the training, that text is
    sent and a warning is logged once. Once the prompts are applied, no error reaches the app,
    unless `strict` is set.

    Args:
        run: folder of the run, or the path of its `prompts.json`. None for the value of the
            environment variable `LIGHTSPAN_PROMPTS`; if that is not set, nothing is applied. If it
            is set, an adapter's `instrument()` applies the prompts too. A value that cannot be
            applied is logged, and the app goes on with its own texts, unless `strict` is set.
        strict: whether to raise `PromptNotAppliedError` in the app if an agent's own text has
            changed since the training. If not, that text is sent.

    Raises:
        ConfigError: the file of `run` is missing or damaged, or no client of OpenAI or Anthropic is
            installed.
    """
    chosen = run or os.environ.get(PROMPTS_VARIABLE)
    try:
        prompts = read_prompts(Path(chosen)) if chosen else {}
        agents = [name for name, prompt in prompts.items() if prompt.place is PromptPlace.AGENT]
        if agents and not sdks.any_installed():
            raise ConfigError(
                f"the instructions of {', '.join(map(repr, agents))} cannot be applied: no client "
                "of OpenAI or Anthropic is installed in this environment: pip install openai"
            )
        if agents:
            sdk_instrumentation.install()
    except Exception as error:
        if run or strict:
            raise
        log.error("lightspan: no learned prompt of %s is applied: %s", PROMPTS_VARIABLE, error)
        prompts = {}
    return AppliedPrompts(prompts, strict=strict, source=str(chosen))


def read_prompts(path: Path) -> dict[str, LearnedPrompt]:
    """Return the prompts that a run learned, by name.

    Args:
        path: folder of the run, or its `prompts.json`.

    Raises:
        ConfigError: the file cannot be read, has no prompt, or has an agent's prompt whose texts
            before and after training have different placeholders.
    """
    file = path / PROMPTS if path.is_dir() else path
    try:
        prompts = msgspec.json.decode(file.read_bytes(), type=dict[str, LearnedPrompt])
    except FileNotFoundError:
        why = "has learned no prompts, or is incomplete" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {why}: name the folder of a run, with its {PROMPTS}") from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not prompts:
        raise ConfigError(f"{file} contains no prompt")
    for name, prompt in prompts.items():
        fields = set(prompt.after.fields) ^ set(prompt.before.fields)
        if fields and prompt.place is PromptPlace.AGENT:  # the file may have been edited
            raise ConfigError(
                f"{file}: the texts of {name!r} before and after differ in their placeholders: "
                f"{', '.join(sorted(fields))} is in only one of them"
            )
    return prompts


# --- by the environment ---------------------------------------------------------------------
_applied: Final[dict[str, AppliedPrompts]] = {}
"""Name of an enabled adapter → applied prompts. All adapters share one object."""


def hold(owner: str) -> None:
    """Apply the prompts of the run in `LIGHTSPAN_PROMPTS` until `release` is called for `owner`.

    Does nothing if the variable is not set. Never raises (see `apply_prompts`).

    Args:
        owner: name of the adapter that applies them.
    """
    if os.environ.get(PROMPTS_VARIABLE):
        _applied[owner] = next(iter(_applied.values()), None) or apply_prompts()


def release(owner: str) -> None:
    """Undo `hold` for the adapter `owner`. The prompts apply until no adapter holds them."""
    applied = _applied.pop(owner, None)
    if applied is not None and not _applied:
        applied.close()
