"""An error of ours that leaves what people call shows their line and the message, and neither how
we came to raise it nor what a library said on the way."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightspan
import lightspan.progress
from lightspan import SFT, LightningRL, Trainer, agl
from lightspan.errors import AppError, ConfigError, LightspanError, short_tracebacks

NOWHERE = "sqlite:/nowhere/at-all.db"


class Answers:
    """A user's own, whose app is a method of it."""

    def answer(self, task: Any) -> float:
        return 0.0


def fitted(method: str, *data: Any) -> Callable[[], object]:
    """Call a method of a trainer that is as it should be."""
    trainer = Trainer(LightningRL("a/model"), reporter=lightspan.progress.SilentReporter())
    return lambda: getattr(trainer, method)(Answers, *data)


WRONG: dict[str, list[Callable[[], object]]] = {
    "AIR": [lambda: lightspan.AIR(mode="both")],  # type: ignore[arg-type]
    "APO": [lambda: lightspan.APO({}, reflection=None)],  # type: ignore[arg-type]
    "Alternate": [lambda: lightspan.Alternate(7, 7, max_rollouts=1)],  # type: ignore[arg-type]
    "Command": [lambda: lightspan.Command([])],
    "Critic": [lambda: lightspan.Critic(learning_rate=-1.0)],
    "ExternalRunners": [lambda: lightspan.ExternalRunners(0)],
    "GEPA": [lambda: lightspan.GEPA({}, reflection=None)],  # type: ignore[arg-type]
    "Judge": [lambda: lightspan.Judge(rubric="", llm=lightspan.LLM(base_url="b", model="m"))],
    "LightningRL": [
        lambda: LightningRL("a/model", group_size=0),
        lambda: LightningRL("a/model", air=7),  # type: ignore[arg-type]
    ],
    "LoRA": [lambda: lightspan.LoRA(rank=0)],
    "LocalRunners": [
        lambda: lightspan.LocalRunners(0),
        lambda: lightspan.LocalRunners(python="/nowhere/python"),
    ],
    "Optimizer": [lambda: lightspan.Optimizer(learning_rate=-1.0)],
    "Overlong": [lambda: lightspan.Overlong(max_tokens=0, buffer=1)],
    "PolicyLoss": [lambda: lightspan.PolicyLoss(kl=-1.0)],
    "Price": [lambda: lightspan.Price(input=-1.0, output=1.0)],
    "PromptTemplate": [
        lambda: lightspan.PromptTemplate("{{ q }}", engine="jinja"),
        lambda: lightspan.PromptTemplate("{q}").format(),
        lambda: lightspan.PromptTemplate("{q:d}").format(q="no number"),
    ],
    "RayRunners": [
        lambda: lightspan.RayRunners(0),
        lambda: lightspan.RayRunners(2, actors=3),
        lambda: lightspan.RayRunners(address="ray://192.0.2.1:10001"),
    ],
    "SFT": [
        lambda: SFT("a/model", batch_size=0),
        lambda: SFT("nowhere/model").fit([[{"role": "user", "content": "q"}]], "model"),
        lambda: SFT("a/model").fit("nowhere.jsonl", "model"),
        lambda: SFT("a/model", from_store="mongodb://somewhere"),
    ],
    "Torch": [
        lambda: lightspan.Torch(token_budget=0),
        lambda: lightspan.Torch(device="tpu"),
    ],
    "Trainer": [
        lambda: Trainer(LightningRL("a/model"), steps=-1),
        fitted("fit", []),
        fitted("fit", "nowhere.jsonl"),
        fitted("evaluate", []),
        fitted("dev", []),
    ],
    "VLLM": [
        lambda: lightspan.VLLM(),
        lambda: lightspan.VLLM(addresses=["http://192.0.2.1:8000"]),  # type: ignore[arg-type]
    ],
    "Verl": [
        lambda: lightspan.Verl(python=""),
        lambda: lightspan.Verl(python="verl-env/bin/python", ranks=0),
        lambda: Trainer(
            LightningRL("a/model"),
            learner=lightspan.Verl(python="verl-env/bin/python", ranks=2),
            device="cuda:1",
        ),
    ],
    "connect": [
        lambda: lightspan.connect("nowhere"),
        lambda: lightspan.connect("http://127.0.0.1:9"),
    ],
    "emit_reward": [lambda: lightspan.emit_reward("1.0")],  # type: ignore[arg-type]
    "feedback": [
        lambda: lightspan.feedback("at-1", "good", store=NOWHERE),  # type: ignore[arg-type]
        lambda: lightspan.feedback("at-1", 1.0, store=NOWHERE),
    ],
    "open_store": [lambda: lightspan.open_store("mongodb://somewhere")],
    "record": [
        lambda: lightspan.record("mongodb://somewhere"),
        lambda: lightspan.record(NOWHERE, redact="nowhere:at_all"),
    ],
    "rollout": [lambda: lightspan.rollout(Answers.answer)],
    "tasks_from_store": [lambda: lightspan.tasks_from_store(NOWHERE)],
    "use": [lambda: lightspan.use("nowhere")],
}
"""What is wrong with each thing that `lightspan` offers; more ways where the error comes from
deeper, such as from a file or a library."""

REFUSES_NOTHING = {
    *("DevReport", "FitResult", "LLM", "Policy", "__version__", "agent", "current_attempt_id"),
    *("emit_annotation", "emit_exception", "emit_message", "emit_object"),
    *("map_text", "operation", "prompt", "tool"),
}


def test_all_that_is_offered_is_looked_at() -> None:
    assert {*WRONG, *REFUSES_NOTHING} == set(lightspan.__all__)


@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name, ways in WRONG.items() for n in range(len(ways))]
)
def test_an_error_shows_the_line_that_called_and_the_message(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_shown(WRONG[name][number])


@pytest.mark.parametrize(
    "way",
    [
        lambda: agl.Trainer(runner=7),
        lambda: agl.Trainer().fit(Answers),
        lambda: agl.Trainer().dev(Answers, []),
    ],
)
def test_so_do_the_original_tutorials_names(way: Callable[[], object]) -> None:
    check_shown(way)


def check_shown(way: Callable[[], object]) -> None:
    """Look at the whole text that a script would end with."""
    with pytest.raises(LightspanError) as caught:
        way()
    shown = traceback.format_exception(caught.value)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames if frame.filename != __file__] == ["door"]
    assert frames[-1].name == "door"
    assert len(shown) == len(frames) + 2, "".join(shown)  # and no error that it came of


def test_what_an_except_of_the_users_caught_is_shown_too() -> None:
    """Without `from`, as most people write it."""

    def called_back() -> None:
        try:
            {}["mine"]
        except KeyError:
            raise ConfigError("nothing is called mine")  # noqa: B904

    with pytest.raises(ConfigError) as caught:
        short_tracebacks(called_back)()
    assert "KeyError: 'mine'" in "".join(traceback.format_exception(caught.value))


def test_a_module_of_the_users_that_cannot_be_imported_shows_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many errors of ours are between."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_hook.py").write_text("broken = 1 / 0\n")
    with pytest.raises(LightspanError) as caught:
        lightspan.record(NOWHERE, redact="broken_hook:hook")
    shown = "".join(traceback.format_exception(caught.value))
    assert "broken_hook.py" in shown
    assert "broken = 1 / 0" in shown


def test_an_own_error_between_hides_nothing_of_the_users() -> None:
    from lightspan.errors import short_tracebacks

    def theirs() -> None:
        raise KeyError("theirs")

    @short_tracebacks
    def door() -> None:
        try:
            try:
                theirs()
            except KeyError as error:
                raise AppError("inner").with_traceback(None) from error
        except AppError as error:
            error.__traceback__ = None
            raise AppError("outer") from error

    with pytest.raises(AppError, match="outer") as caught:
        door()
    assert isinstance(caught.value.__cause__, KeyError)
