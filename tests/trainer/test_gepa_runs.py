"""Test GEPA in a `Trainer`, with real apps, HTTP and stores."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gepa_toy as toy  # type: ignore[import-not-found]
import msgspec
import prompt_apps  # type: ignore[import-not-found]
import pytest

import lightspan
from lightspan import GEPA, LLM, PromptTemplate, Trainer
from lightspan.cli import main
from lightspan.errors import AppError, ConfigError, DataError
from lightspan.progress import SilentReporter
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.training.folder import RunFolder
from lightspan.training.results import OWN_TEXT
from lightspan_prompts.search.candidates import NO_CALLS, read_found
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.inspect import inspect_run
from lightspan_tools.rollout_view import failure_rewards

pytestmark = pytest.mark.slow

Run = tuple[Path, Any]


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedServer]:
    """Run the endpoint of the app's model."""
    with ScriptedServer(toy.speaks) as server:
        yield server


@pytest.fixture(scope="module")
def thinker() -> Iterator[ScriptedServer]:
    """Run the endpoint of the reflection model."""
    with ScriptedServer(toy.reflects) as server:
        yield server


@pytest.fixture(scope="module")
def run(model: ScriptedServer, thinker: ScriptedServer, tmp_path_factory: Any) -> Run:
    """Train; return the run's folder and its result. Tests must not change them."""
    folder = tmp_path_factory.mktemp("gepa") / "run"
    return folder, toy.train(folder, model.url, thinker.url)


def test_the_prompts_are_learned(run: Run) -> None:
    _, result = run
    assert result.model is None
    assert [evaluation.mean for evaluation in result.evaluations] == [0.0, 1.0]
    assert result.gain.mean == 1.0
    assert {name: each.template for name, each in result.prompts.items()} == {
        "rules": "SHOUT Speak.",
        "form": 'REVERSE As {"text": …}. Q: {q}',
    }
    assert result.prompts["rules"].diff() == (
        "--- before\n+++ after\n@@ -1 +1 @@\n-Speak.\n+SHOUT Speak."
    )
    assert "held-out reward: 0.00 -> 1.00" in result.summary()


def test_the_held_out_tasks_are_run_before_and_after_only(
    run: Run, model: ScriptedServer, thinker: ScriptedServer
) -> None:
    said = Counter(request.last_text.rpartition("Q: ")[2] for request in model.requests)
    assert (said["word20"], said["word21"]) == (2, 2)
    asked = "".join(request.last_text for request in thinker.requests)
    assert "word2" in asked or "word3" in asked
    assert "word20" not in asked
    assert "word21" not in asked


def test_the_folder_says_what_was_found(run: Run) -> None:
    folder, _ = run
    found = read_found(folder)
    assert found is not None
    [train] = [line for line in result_lines(folder) if line["kind"] == "train"]
    in_training = [e for e in stored_episodes(folder / "store.db") if e.mode == "train"]
    assert train["rollouts"] == train["scored"] == found.rollouts == len(in_training) <= 60
    assert train["selection/best"] == 1.0
    assert json.loads((folder / "prompts.json").read_bytes())["rules"] == {
        "before": {"type": "prompt", "template": "Speak."},
        "after": {"type": "prompt", "template": "SHOUT Speak."},
    }
    text = inspect_run(folder)
    assert text.startswith(f"{folder}: GEPA\napp prompt_apps:told\n")
    assert "candidate 0, as given: selection 0.000 (0 0 0 0; again 0 0 0 0)\n" in text
    chosen = f"candidate {found.chosen}, of 1: selection 1.000 (1 1 1 1; again 1 1 1 1), chosen\n"
    assert chosen in text
    assert "candidate 1, of 0: " in text
    assert "prompt rules:\n  --- before\n  +++ after\n  @@ -1 +1 @@\n  -Speak.\n  +SHOUT" in text


def test_they_are_exported_as_plain_texts(
    run: Run, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder, out = str(run[0]), tmp_path / "texts"
    form = b'REVERSE As {"text": \xe2\x80\xa6}. Q: {q}'
    assert main(["export", folder, "prompts", "--prompt", "form"]) == 0
    assert capsysbinary.readouterr().out == form + b"\n"
    assert main(["export", folder, "prompts"]) == 0
    both = b"=== rules\nSHOUT Speak.\n=== form\n" + form + b"\n"
    assert capsysbinary.readouterr().out == both
    assert main(["export", folder, "prompts", "-o", str(out)]) == 0
    assert capsysbinary.readouterr().err == f"2 prompts to {out}\n".encode()
    texts = {file.name: file.read_bytes() for file in out.iterdir()}
    assert texts == {"rules.txt": b"SHOUT Speak.", "form.txt": form}
    for arguments, said in {
        ("prompts", "-o", str(out)): "exists; prompts go into a new folder",
        ("prompts", "--prompt", "from"): "the run has the prompts rules, form, no 'from'",
    }.items():
        assert main(["export", folder, *arguments]) == 1
        assert said.encode() in capsysbinary.readouterr().err


def test_instructions_of_an_agent_are_exported_as_they_are_sent(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template of a text that was found in an agent's requests has doubled braces."""
    copy = tmp_path / "run"
    shutil.copytree(run[0], copy)
    found = {
        "before": {"type": "prompt", "template": "Answer {{desk}}."},
        "after": {"type": "prompt", "template": "Answer {{desk}}, not {{{{x}}}}."},
    }
    learned = {"desk": {**found, "place": "agent", "agent": "desk"}, "form": found}
    (copy / "prompts.json").write_text(json.dumps(learned))
    assert main(["export", str(copy), "prompts", "-o", str(tmp_path / "texts")]) == 0
    assert capsys.readouterr().err == f"2 prompts to {tmp_path / 'texts'}\n"
    texts = {file.stem: file.read_text() for file in (tmp_path / "texts").iterdir()}
    assert texts == {
        "desk": "Answer {desk}, not {{x}}.",
        "form": "Answer {{desk}}, not {{{{x}}}}.",
    }


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ('As {"desk": 1}.', 'As {{"desk": 1}}, {{desk}}.', 'As {"desk": 1}, {desk}.'),
        ("Help {who}.", "Help {who}: {{desk}}.", "Help {who}: {{desk}}."),
        ('Help {who}: {"a": 1}', 'Help {who}: {{"a": {{desk}}}}', 'Help {who}: {"a": {desk}}'),
    ],
)
def test_a_text_of_the_code_is_exported_with_the_braces_that_the_code_needs(
    run: Run,
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    before: str,
    after: str,
    text: str,
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run[0], copy)
    texts = {"before": before, "after": after}
    learned = {when: {"type": "prompt", "template": each} for when, each in texts.items()}
    (copy / "prompts.json").write_text(json.dumps({"desk": {**learned, "place": "code"}}))
    assert main(["export", str(copy), "prompts"]) == 0
    assert capsysbinary.readouterr().out == text.encode() + b"\n"
    with lightspan.apply_prompts(copy):
        assert lightspan.prompt("desk", before) == text


def test_a_prompts_name_leads_nowhere_else(run: Run, tmp_path: Path) -> None:
    """Check a prompt whose name is a path, as in a run that somebody else made."""
    copy, out = tmp_path / "run", tmp_path / "out" / "texts"
    shutil.copytree(run[0], copy)
    (learned, *_) = json.loads((copy / "prompts.json").read_bytes()).values()
    (copy / "prompts.json").write_text(json.dumps({"../../x": learned, "crew/writer": learned}))
    assert main(["export", str(copy), "prompts", "-o", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["..%2F..%2Fx.txt", "crew%2Fwriter.txt"]
    (copy / "prompts.json").unlink()
    assert main(["export", str(copy), "prompts"]) == 1


def result_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_learned_prompts_are_evaluated(
    run: Run, model: ScriptedServer, thinker: ScriptedServer
) -> None:
    folder, result = run
    algorithm = GEPA(
        {name: each.before for name, each in result.prompts.items()},
        LLM(base_url=thinker.url, model="thinker"),
        max_rollouts=60,
        minibatch=2,
        significance=None,
    )
    trainer = Trainer(algorithm, runners=1, folder=folder, reporter=SilentReporter())
    assert trainer.evaluate(prompt_apps.told, toy.tasks(model.url, 30), resume=True).mean == 1.0


def test_held_out_tasks_that_choose_too_are_told_of(
    model: ScriptedServer, thinker: ScriptedServer, tmp_path: Path, lines: Any
) -> None:
    algorithm = GEPA(
        {"style": PromptTemplate("Say it. Q: {q}")},
        LLM(base_url=thinker.url, model="thinker"),
        max_rollouts=14,
        minibatch=1,
    )
    trainer = Trainer(algorithm, runners=1, folder=tmp_path / "run", reporter=lines)
    train = toy.tasks(model.url, *range(4))
    trainer.fit(prompt_apps.styled, train, [*train[:2], *toy.tasks(model.url, 20)])
    said = "2 of the 3 held-out tasks are training tasks too: prompts may be chosen by them"
    assert next(line for line in lines.texts if "held-out tasks" in line).startswith(said)


def held_out_asked(model: ScriptedServer) -> int:
    return sum("word20" in request.last_text for request in model.requests)


@pytest.mark.parametrize(
    ("options", "tasks", "error"),
    [
        ({"max_rollouts": 5}, 8, r"GEPA\(max_rollouts=5\) is too few for one new candidate"),
        ({}, 1, r"selection=0.5 of 1 distinct training task leaves none to reflect on"),
        ({"prompts": {}, "optimize": ["speeker"]}, 8, r"Did you mean 'speaker'\?"),
    ],
)
def test_what_cannot_be_searched_is_known_before_held_out_tasks_are_run(
    model: ScriptedServer,
    thinker: ScriptedServer,
    tmp_path: Path,
    options: dict[str, Any],
    tasks: int,
    error: str,
) -> None:
    before = held_out_asked(model)
    prompts = {"style": PromptTemplate("Say it. Q: {q}")}
    llm = LLM(base_url=thinker.url, model="thinker")
    algorithm = GEPA(**{"prompts": prompts, "reflection": llm, "max_rollouts": 60, **options})
    trainer = Trainer(algorithm, runners=1, folder=tmp_path / "run", reporter=SilentReporter())
    app = prompt_apps.styled if algorithm.prompts else prompt_apps.echo
    with pytest.raises((ConfigError, DataError), match=error):
        trainer.fit(app, toy.tasks(model.url, *range(tasks)), toy.tasks(model.url, 20))
    assert held_out_asked(model) == before


def test_a_selection_split_of_the_trainer_is_refused(
    model: ScriptedServer, thinker: ScriptedServer, tmp_path: Path
) -> None:
    """It would be run twice and choose nothing: the search has one step."""
    llm = LLM(base_url=thinker.url, model="thinker")
    algorithm = GEPA({"style": PromptTemplate("Say it. Q: {q}")}, llm)
    trainer = Trainer(algorithm, folder=tmp_path / "run", validate_every=1)
    train, selection = toy.tasks(model.url, 1, 2), toy.tasks(model.url, 3)
    for kind in (trainer.fit, trainer.dev):
        with pytest.raises(
            ConfigError, match="leave it out, as with GEPA and APO: they have one step"
        ):
            kind(prompt_apps.styled, train, selection=selection)


def test_a_search_ends_if_the_app_fails_alike_on_every_task(tmp_path: Path) -> None:
    """As a training does, and before it pays for a question."""
    with ScriptedServer(toy.reflects) as thinker:
        llm = LLM(base_url=thinker.url, model="thinker")
        algorithm = GEPA({"style": PromptTemplate("Say it. Q: {q}")}, llm, max_rollouts=60)
        trainer = Trainer(algorithm, runners=2, folder=tmp_path / "run", reporter=SilentReporter())
        with pytest.raises(AppError, match=r"all failed alike .*KeyError: 'url'"):
            trainer.fit(prompt_apps.styled, [{"q": f"word{n}"} for n in range(8)])
    assert not thinker.requests


def test_a_finished_search_with_another_budget(
    model: ScriptedServer, thinker: ScriptedServer, tmp_path: Path
) -> None:
    """With a smaller one it ends earlier in its log, and with a larger one it goes on."""
    folder = tmp_path / "run"
    toy.train(folder, model.url, thinker.url, max_rollouts=18)
    first, asked = read_found(folder), len(model.requests)
    toy.train(folder, model.url, thinker.url, max_rollouts=18)
    assert (read_found(folder), len(model.requests)) == (first, asked)
    reflected = len(thinker.requests)
    toy.train(folder, model.url, thinker.url, max_rollouts=13)
    smaller = read_found(folder)
    assert first is not None
    assert smaller is not None
    assert "max_rollouts=13" in smaller.ended
    assert smaller.rollouts == first.rollouts  # what was paid counts
    assert len(thinker.requests) == reflected
    result = toy.train(folder, model.url, thinker.url, max_rollouts=60)
    found = read_found(folder)
    assert found is not None
    assert 18 < found.rollouts <= 60
    # now there are finalists, with which the initial prompts are run a second time
    assert found.candidates[0].again.keys() == found.candidates[0].rewards.keys()
    assert msgspec.structs.replace(found.candidates[0], again={}) == first.candidates[0]
    assert [evaluation.mean for evaluation in result.evaluations] == [0.0, 1.0]
    log = (folder / "journal" / "gepa.jsonl").read_text().splitlines()
    runs = [len(json.loads(line).get("seen", ())) for line in log]
    assert found.rollouts == sum(runs)
    lines = [line for line in RunFolder(folder).metrics() if line["kind"] == "search"]
    assert [(line["step"], line["rollouts"]) for line in lines] == [
        (1, proposal.rollouts) for proposal in found.proposals
    ]
    whole = toy.train(tmp_path / "whole", model.url, thinker.url, max_rollouts=60)
    assert {name: each.after for name, each in whole.prompts.items()} == {
        name: each.after for name, each in result.prompts.items()
    }


def searching(thinker: ScriptedServer, folder: Path, reporter: Any) -> Trainer:
    llm = LLM(base_url=thinker.url, model="thinker")
    prompts = {"style": PromptTemplate("SHOUT it. Q: {q}")}
    algorithm = GEPA(prompts, llm, max_rollouts=40, minibatch=2, significance=None)
    return Trainer(algorithm, runners=2, folder=folder, reporter=reporter)


def test_an_evaluation_of_another_text_of_the_app_is_said(
    model: ScriptedServer, thinker: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an app that was edited after the search, before its last evaluation."""
    llm = LLM(base_url=thinker.url, model="thinker")
    algorithm = GEPA(reflection=llm, optimize=["style"], max_rollouts=40, significance=None)
    trainer = Trainer(algorithm, runners=1, folder=tmp_path / "run", reporter=SilentReporter())
    tasks, held_out = toy.tasks(model.url, *range(8)), toy.tasks(model.url, 20, 21)
    result = trainer.fit(prompt_apps.worded, tasks, held_out)
    assert [(one.mean, one.own_text) for one in result.evaluations] == [(0.0, 0), (1.0, 0)]
    assert OWN_TEXT not in result.summary()
    monkeypatch.setenv("STYLE", "SHOUT it, please.")
    last = trainer.evaluate(prompt_apps.worded, held_out, resume=True)
    assert (last.mean, last.own_text) == (0.0, 2)
    assert f", 2 {OWN_TEXT}; sampled" in last.text("reward")
    both = dataclasses.replace(result, evaluations=(result.evaluations[0], last))
    assert f"; held out: {OWN_TEXT} 0 -> 2" in both.summary()


@pytest.mark.parametrize("kind", ["argument", "request"])
def test_an_algorithm_that_is_used_again_starts_with_the_prompts_of_the_app(
    model: ScriptedServer, thinker: ScriptedServer, tmp_path: Path, kind: str
) -> None:
    llm, held_out = LLM(base_url=thinker.url, model="thinker"), toy.tasks(model.url, 20, 21)
    options: dict[str, Any] = {"reflection": llm, "max_rollouts": 40, "significance": None}
    app = prompt_apps.worded
    if kind == "argument":
        options["prompts"] = {"style": PromptTemplate("SHOUT. Q: {q}")}
        app = prompt_apps.styled
    else:
        options["optimize"] = ["style"]
    algorithm, tasks = GEPA(**options), toy.tasks(model.url, *range(8))

    def trainer(name: str) -> Trainer:
        folder = tmp_path / name
        return Trainer(algorithm, runners=1, folder=folder, reporter=SilentReporter())

    first = trainer("first").fit(app, tasks, held_out)
    assert [one.mean for one in first.evaluations] == [0.0, 1.0]
    assert trainer("apart").evaluate(app, held_out).mean == 0.0
    assert trainer("first").evaluate(app, held_out, resume=True).mean == 1.0
    assert trainer("dry").dev(app, tasks).rewards.mean == 0.0
    second = trainer("second").fit(app, tasks, held_out)
    assert [one.mean for one in second.evaluations] == [0.0, 1.0]
    assert second.prompts["style"].before == first.prompts["style"].before


def test_an_attempt_that_an_endpoint_ended_is_paid_for(
    thinker: ScriptedServer, tmp_path: Path
) -> None:
    """Its first answer came; the second call got a 503, and the app was run again."""
    failed = itertools.count()

    def speaks(request: Request) -> Reply | str:
        is_failure = request.last_text == "check word1" and next(failed) < 1
        return Reply(status=503, text="busy") if is_failure else toy.speaks(request)

    llm = LLM(base_url=thinker.url, model="thinker")
    algorithm = GEPA({"style": PromptTemplate("Say. Q: {q}")}, llm, max_rollouts=14, minibatch=1)
    with ScriptedServer(speaks) as model:
        trainer = Trainer(algorithm, runners=1, folder=tmp_path / "run", reporter=SilentReporter())
        trainer.fit(prompt_apps.styled_and_checked, toy.tasks(model.url, *range(4)))
        answered = len(model.requests) - 1
    found = algorithm.found
    assert found is not None
    assert (found.repeated, found.failed) == (1, 0)
    assert found.calls == 2 * found.rollouts
    episodes = stored_episodes(tmp_path / "run" / "store.db", mode=Mode.TRAIN)
    calls = [call for e in episodes for one in (*e.earlier, e) for call in one.calls]
    paid = [c.usage_of(call.span.attributes) for call in calls if call.span is not None]
    assert len(calls) == answered + 1 == 2 * found.rollouts + 2
    parts = zip(*paid, strict=True)
    assert found.usage["own"] == tuple(sum(n or 0 for n in part) for part in parts)


def test_no_held_out_reward_is_shown_as_that_of_failures(
    thinker: ScriptedServer, tmp_path: Path
) -> None:
    """The lowest reward of training is 0.5, so failures have 0; of the whole run it is -50."""
    llm, asked = LLM(base_url=thinker.url, model="thinker"), len(thinker.requests)
    prompts = {"style": PromptTemplate("Say. Q: {q}")}
    algorithm = GEPA(prompts, llm, max_rollouts=30, significance=None)
    trainer = Trainer(algorithm, runners=1, folder=tmp_path, reporter=SilentReporter())
    tasks = [{"n": n, **({"reward": 0.5} if n % 2 else {})} for n in range(8)]
    trainer.fit(prompt_apps.given, tasks, [{"held": 1, "reward": -50.0}, {"held": 2}])
    questions = "\n".join(request.last_text for request in thinker.requests[asked:])
    shown = {line for line in questions.splitlines() if line.startswith("Reward: ")}
    assert shown == {"Reward: 0", "Reward: 0.5"}
    assert "-50" not in (tmp_path / "journal" / "gepa.jsonl").read_text()
    [train] = [line for line in result_lines(tmp_path) if line["kind"] == "train"]
    assert train["failure_reward"] == 0.0
    assert "scored failure_reward='lowest', now 0\n" in inspect_run(tmp_path)
    folder = RunFolder(tmp_path)
    reward = failure_rewards(folder, folder.read_config())
    assert [reward(mode, step) for mode in (Mode.TRAIN, Mode.VAL) for step in (0, 1)] == [
        *(0.0, 0.0),
        *(-50.0, -50.0),
    ]


def test_an_app_needs_no_sdk(
    model: ScriptedServer, thinker: ScriptedServer, tmp_path: Path, lines: Any
) -> None:
    """The reward suffices; that reflections show no calls is said in `dev` and in `fit`."""
    trainer = searching(thinker, tmp_path / "run", lines)
    app, tasks, held_out = (
        prompt_apps.styled_by_http,
        toy.tasks(model.url, *range(8)),
        toy.tasks(model.url, 20, 21),
    )
    report = trainer.dev(app, tasks, held_out)
    assert report.warnings == []
    assert NO_CALLS in report.text() == str(report)
    result = trainer.fit(app, tasks, held_out)
    assert "policy" not in result.summary()
    assert [evaluation.mean for evaluation in result.evaluations] == [0.0, 1.0]
    assert "REVERSE" in result.prompts["style"].template
    assert any(NO_CALLS in line for line in lines.texts)


def test_a_dry_run_of_a_search_reads_as_one(
    model: ScriptedServer, thinker: ScriptedServer, tmp_path: Path
) -> None:
    trainer = searching(thinker, tmp_path / "run", SilentReporter())
    tasks, held_out = toy.tasks(model.url, *range(8)), toy.tasks(model.url, 20, 21)
    report = trainer.dev(prompt_apps.styled, [*tasks, *tasks], held_out)
    text = report.text()
    assert report.warnings == [
        "of 16 training tasks 8 are distinct: others repeat them",
        "fit counts equal training tasks once while prompts are compared and shown",
    ]
    assert [agent.unseen for agent in report.agents] == [[]]  # it uses the SDK
    assert "44 rollouts: 40 at most in 1 search phase + 2 x 2 evaluated" in text
    assert "answered by" in text
    unused = ("trains", "trained ", "frozen,", "rejected", "teaches", "vary", "updates", "REPLAY")
    for word in unused:
        assert word not in text
