"""Test `lightspan inspect`, which prints the numbers that the learner used."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan import LightningRL, Trainer
from lightspan.cli import main
from lightspan.errors import NotFoundError
from lightspan.lightning.rows import Row
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptRef, AttemptStatus, Report
from lightspan.schema.resources import ROUTING
from lightspan.stores import open_store
from lightspan.stores.protocol import StoredCall
from lightspan.training.folder import RunFolder
from lightspan_testing.strategies import (
    make_call_span,
    make_record,
    make_reward_span,
    make_rollout,
)
from lightspan_tools import overview
from lightspan_tools.export import export_run
from lightspan_tools.inspect import inspect_run
from lightspan_tools.inspect_report import CallReport, RolloutReport, RunReport
from lightspan_tools.pagination import Page, TableRow, matching_rows


def _rollouts(run: Path) -> list[str]:
    text = inspect_run(run, page=Page(limit=0))
    short = re.findall(r"^(\S+) +train ", text, re.MULTILINE)
    heads = [inspect_run(run, name).split(" ", 2)[1] for name in short]
    assert all(whole.endswith(name) for whole, name in zip(heads, short, strict=True))
    return heads


def test_it_says_what_was_forgotten(
    apps: Any, rl: Any, ask: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the message about steps whose rollouts were pruned from the store."""
    folder = tmp_path / "run"
    Trainer(rl(), steps=3, folder=folder).fit(apps.spell, ask(6))
    assert "no longer in the store" not in inspect_run(folder)
    assert main(["prune", str(folder / "store.db"), "--older-than", "0s", "--yes"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    # what came and what moved last is kept
    [count] = [line for line in lines if re.match(r"[12] rollouts; calls by agent", line)]
    assert lines[lines.index(count) + 1] == (
        "rollouts of steps 1 to 2 are no longer in the store, as after lightspan prune"
    )


def test_named_rewards_and_failures_are_shown(apps: Any, rl: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tasks = [{"q": give, "give": give} for give in ("named", "low", "gone")]
    Trainer(rl(tasks_per_step=3), steps=1, folder=folder).fit(apps.odd, tasks, tasks)
    text = inspect_run(folder)
    assert "n=3, 1 failed, -1.125 without these), style 0.25 (n=1)" in text
    assert "step 1: training reward -1.750, style 0.25 (n=4)" in text
    assert "of training (33 %): scored failure_reward='lowest', now -3" in text
    shown = "\n".join(inspect_run(folder, name) for name in _rollouts(folder))
    assert (shown.count("reward -3 (failure)"), shown.count("reward -3 (returned)")) == (4, 4)
    assert shown.count("\n  style: 0.25") == 4
    export_run(folder, "messages", out := tmp_path / "out.jsonl")
    rows = [msgspec.json.decode(row) for row in out.read_text().splitlines()]
    named = {row["rollout_reward"]: row["reward_dimensions"] for row in rows}
    assert named == {0.75: {"style": 0.25, "reward": 0.75}, -3.0: {}}


def test_failures_with_a_reward_of_their_own_are_told_apart(
    apps: Any, rl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    tasks = [{"q": "a", "give": "named"}, {"q": "b", "give": "gone", "emit": 0.25}]
    Trainer(rl(tasks_per_step=2), steps=1, folder=folder).fit(apps.odd, tasks, tasks)
    text = inspect_run(folder)
    assert "of training (50 %): 4 with a reward of their own, which counts" in text
    assert "failure_reward=" not in text
    assert "n=2, 1 failed, 1 with a reward of their own, 0.750 without" in text
    assert "1 failed (1 with a reward of their own; 0.750 without these)" in capsys.readouterr().out


def test_printed_advantages_and_weights_are_those_the_learner_used(
    one_step: tuple[Path, list[Row]],
) -> None:
    run, rows = one_step
    assert rows, "no group varied: change the seed of the test"
    printed: dict[str, tuple[str, str]] = {}
    for rollout in _rollouts(run):
        text = inspect_run(run, rollout)
        found = re.findall(
            r"(call-\w+)/0 writer: trained\n +temperature: .*\n +advantage (\S+) = .* of weight "
            r"(\S+) \(",
            text,
        )
        printed |= {call: (advantage, weight) for call, advantage, weight in found}
    for row in rows:
        used = [
            (f"{advantage:+.6g}", f"{weight:.6g}")
            for advantage, weight, trained_token in zip(
                row.advantages, row.weights, row.mask, strict=True
            )
            if trained_token
        ]
        # each call's tokens carry what was printed for that call, in the order of the calls
        expected = [printed[call] for call, _ in row.call_ids]
        assert list(dict.fromkeys(used)) == list(dict.fromkeys(expected))


def test_calls_of_skipped_minibatches_are_told(
    apps: Any, rl: Any, ask: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that `target_kl` below what any update moves skips the second of two updates."""
    folder = tmp_path / "run"
    algorithm = rl(minibatches=2, target_kl=1e-12)
    Trainer(algorithm, steps=1, folder=folder).fit(apps.spell, ask(2))
    [line] = RunFolder(folder).metrics()
    assert line["learner/kl_skipped"] == 1
    assert line["learner/rows"] < line["batch/rows"]
    assert "so 1 of 2 updates were skipped" in capsys.readouterr().out
    shown = [inspect_run(folder, name) for name in _rollouts(folder)]
    skipped = ["rejected target_kl skipped its minibatch: the policy had" in text for text in shown]
    counted = line["calls/rejected:target_kl"]
    # a call whose advantage is 0 by chance has no row
    assert sum(skipped) == counted >= line["batch/rows"] - line["learner/rows"] > 0
    [counts] = re.findall("coverage of calls: (.*)", inspect_run(folder))
    count = line["calls/trained"]
    assert {*counts.split(", ")} >= {f"trained {count:.0f}", f"rejected:target_kl {counted:.0f}"}
    rows = tmp_path / "rows"
    with rows.open("wb") as stream:
        export_run(folder, "transitions", stream)
    exported = [json.loads(row) for row in rows.read_text().splitlines()]
    left_out = [row for row in exported if row["verdict"] == "rejected"]
    assert len(left_out) == counted == sum(row["token_weight"] == 0 for row in exported)
    assert {row["reason"] for row in left_out} == {
        "target_kl skipped its minibatch: the policy had moved further"
    }


def test_a_critic_and_the_share_of_replayed_rows_are_start(tmp_path: Path) -> None:
    """Check that a step counts by its rows, and that old settings of a critic can be read."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.release()
    asyncio.run(_empty_store(run.store_url))
    config = {"algorithm": "lightning_rl", "run_id": "run-x", "model": "m"}
    run.write_config({**config, "critic": {"lam": 1.0, "warmup": 9}})
    start = "critic=: calls are compared with what a critic expects too (lambda "
    assert f"\n{start}1)\n" in inspect_run(run.path)
    for step, (rows, share) in enumerate(((90.0, 0.1), (10.0, 0.5), (0.0, 0.0)), 1):
        line = {"kind": "train", "step": step, "rollouts": 8, "batch/rows": rows}
        more = {"replay/groups": int(share > 0), "replay/age": 2.0, "replay/row_share": share}
        run.add_metrics({**line, **more, "learner/lambda": 0.9, "learner/explained_variance": 0.25})
    run.write_config({**config, "critic": {"lam": 0.9, "warmup": 9}})
    text = inspect_run(run.path)
    assert (
        f"\n{start}0.9, 1 until its values are trusted); in step 3 lambda 0.9, explained variance "
        "0.25\n"
    ) in text
    assert "replay: 2 groups trained again, after 2.0 steps on average, 14 % of the rows\n" in text
    run.write_config(config)
    assert "critic=" not in inspect_run(run.path)


async def _empty_store(url: str) -> None:
    async with open_store(url):
        pass


def test_run_shows_agents_coverage_and_evaluations(one_step: tuple[Path, list[Row]]) -> None:
    text = inspect_run(one_step[0])
    assert "calls by agent: writer 28, checker 14" in text
    assert "coverage of calls: trained 24, frozen 14, rejected:mode_not_train 4" in text
    assert "sampling overridden, in calls: temperature 24\n" in text
    assert re.search(r"step 0: held-out reward \d\.\d{3} ", text)
    assert len(_rollouts(one_step[0])) == 12


def test_rollout_shows_the_span_tree(one_step: tuple[Path, list[Row]]) -> None:
    text = inspect_run(one_step[0], _rollouts(one_step[0])[0])
    tree = [re.sub(r" \([\d.]+ ms\)$", "", line) for line in text.splitlines() if "ms)" in line]
    assert tree == [
        "attempt",
        "  invoke_agent writer",
        "    chat any [writer] -> trained",
        "    chat any [writer] -> trained",
        "  invoke_agent checker",
        "    chat any [checker] -> frozen",
    ]
    assert re.search(rf"^  run by runner-\w+-{re.escape(socket.gethostname())}-\d+$", text, re.M)
    assert "coverage: trained 2, frozen 1" in text
    assert "writer: trained" in text
    assert text.count("temperature: 0.3 asked, 1.0 used") == 2
    assert "checker: frozen agent checker is not selected" in text


def test_call_shows_its_tokens_and_text(one_step: tuple[Path, list[Row]]) -> None:
    rollout = _rollouts(one_step[0])[0]
    call = re.findall(r"(call-\w+)/0 writer", inspect_run(one_step[0], rollout))[0]
    text = inspect_run(one_step[0], rollout, call)
    assert text.splitlines()[0] == f"call {call}, choice 0, agent writer"
    assert re.search(r"policy policy: \d+ prompt tokens, \d sampled \(\d of version 1\)", text)
    assert re.search(r"^response ids \[\d+(, \d+)*\]$", text, re.MULTILINE)
    assert "--- user\nsay " in text


def test_the_start_or_end_of_an_id_is_enough_unless_several_share_it(
    one_step: tuple[Path, list[Row]],
) -> None:
    run, rollouts = one_step[0], _rollouts(one_step[0])
    assert inspect_run(run, rollouts[-1]).startswith(f"rollout {rollouts[-1]}")
    call = re.findall(r"(call-\w+)/0 writer", inspect_run(run, rollouts[-1]))[0]
    assert inspect_run(run, rollouts[-1], call[-8:]) == inspect_run(run, rollouts[-1], call)
    with pytest.raises(NotFoundError, match="14 rollouts start or end with 'run-'"):
        inspect_run(run, "run-")
    with pytest.raises(NotFoundError, match="there is no rollout 'nobody'; there are, for example"):
        inspect_run(run, "nobody")


async def _stepwise_run(folder: RunFolder, status: AttemptStatus = AttemptStatus.SUCCEEDED) -> None:
    """Write a run of one attempt, whose only reward is on its only call."""
    async with open_store(folder.store_url) as store:
        routing = LightningRL("a/model", optimize="writer").routing()
        resources_id = await store.put_resources({ROUTING: routing})
        await store.enqueue([make_rollout(resources_id=resources_id, run_id="run")])
        [claim] = await store.claim("runner", 1, 60.0)
        attempt = claim.attempt
        ids = {"attempt_id": attempt.attempt_id, "rollout_id": attempt.rollout_id}
        record = msgspec.structs.replace(make_record("c"), attempt_id=attempt.attempt_id)
        span = make_call_span("c", sequence=(1, 2)).replace(**ids)
        await store.add_calls([StoredCall(span=span, records=[record], epoch=attempt.epoch)])
        reward = make_reward_span("r", 0.5, {c.REWARD_CALL_ID: "c"}).replace(**ids)
        ref = AttemptRef(attempt.attempt_id, attempt.epoch)
        await store.add_spans(ref, [reward])
        ended = Report(attempt_id=attempt.attempt_id, epoch=attempt.epoch, status=status)
        await store.report([ended])


@pytest.mark.parametrize(
    ("credit", "coverage"),
    [
        ("terminal", "rejected:unscored 1"),
        ("discounted", "trained 1"),
    ],
)
def test_rewards_on_calls_count_as_they_did_in_the_run(
    tmp_path: Path, credit: Any, coverage: str
) -> None:
    folder = RunFolder(tmp_path)
    config = LightningRL("a/model", credit=credit).config()
    folder.write_config({**config, "run_id": "run"})
    asyncio.run(_stepwise_run(folder))
    folder.add_metrics({"kind": "train", "step": 0})
    assert f"coverage of calls: {coverage}\n" in inspect_run(tmp_path)


def test_a_rollout_that_ran_out_of_time_has_its_own_status(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config({**LightningRL("a/model").config(), "run_id": "run"})
    asyncio.run(_stepwise_run(folder, AttemptStatus.TIMEOUT))
    [row] = inspect_run(tmp_path, page=Page(status="timeout")).splitlines()[-1:]
    assert re.match(r"\S+ +train +0 +timeout ", row)
    none = "no rollout is failed; there are: timeout 1"
    assert inspect_run(tmp_path, page=Page(status="failed")).endswith(none)
    assert ": timeout\n" in inspect_run(tmp_path, row.split()[0])


def test_command_prints_or_fails_with_one_line(
    one_step: tuple[Path, list[Row]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(one_step[0])]) == 0
    assert "calls by agent" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"lightspan: {tmp_path} is no run of lightspan")


def test_the_commands_options_choose_the_page(
    one_step: tuple[Path, list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*options: str) -> tuple[list[tuple[str, float]], str]:
        """Return (rollout id, reward) of each listed rollout, and the last line."""
        assert main(["inspect", str(one_step[0]), *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        found = (re.match(r"(\S+) +(?:train|val) +\d+ +\w+ +(\S+) ", line) for line in lines)
        return [(each[1], float(each[2])) for each in found if each], lines[-1]

    whole, _ = shown()
    assert len(whole) == 14
    lowest_first = sorted(whole, key=lambda row: row[1])
    assert lowest_first != whole, "change the seed of the test"
    assert shown("--sort", "reward")[0] == lowest_first
    page, last = shown("--limit", "3")
    assert page == whole[-3:]
    assert last.startswith("the last 3 of 14 rollouts; --limit 0 shows all")
    nothing = ([], "no rollout is failed; there are: succeeded 14")
    assert shown("--status", "failed") == nothing


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_changes_nothing_on_disk(one_step: tuple[Path, list[Row]]) -> None:
    before = _files(one_step[0])
    inspect_run(one_step[0])
    inspect_run(one_step[0], _rollouts(one_step[0])[0])
    assert _files(one_step[0]) == before


def test_json_has_the_figures_of_the_text(one_step: tuple[Path, list[Row]]) -> None:
    run = one_step[0]
    report = msgspec.json.decode(inspect_run(run, page=Page(limit=0), as_json=True), type=RunReport)
    assert (report.total, report.counted, report.matching, len(report.rows)) == (14, 14, 14, 14)
    assert report.agents == {"writer": 28, "checker": 14}
    assert report.calls == {"trained": 24, "frozen": 14, "rejected:mode_not_train": 4}
    assert report.overridden == {"temperature": 24}
    assert report.config["algorithm"] == RunFolder(run).read_config()["algorithm"]
    assert report.metrics == RunFolder(run).metrics()
    rows = [row for row in report.rows if row.mode == "train"]
    assert [row.id for row in rows] == _rollouts(run)
    row = rows[0]
    text = inspect_run(run, row.id)
    rollout = msgspec.json.decode(inspect_run(run, row.id, as_json=True), type=RolloutReport)
    assert (rollout.rollout_id, rollout.reward) == (row.id, row.reward)
    assert f"  run by {rollout.runner}\n" in text
    assert rollout.coverage == {"trained": 2, "frozen": 1}
    assert [(span.depth, span.name) for span in rollout.spans][:3] == [
        (0, "attempt"),
        (1, "invoke_agent writer"),
        (2, "chat any"),
    ]
    call = rollout.calls[0]
    assert call.explanation is not None
    assert f"advantage {call.advantage:+.6g} = " in text
    assert f"; share {call.explanation.share:.1%} of the rollout per policy: " in text
    assert call.overridden == {"temperature": (0.3, 1.0)}
    [whole] = msgspec.json.decode(
        inspect_run(run, row.id, call.call_id, as_json=True), type=list[CallReport]
    )
    assert f"response ids {whole.response_ids}" in inspect_run(run, row.id, call.call_id)
    assert len(whole.logprobs) == len(whole.response_ids)
    assert whole.messages[0]["role"] == "user"


@pytest.mark.parametrize(
    ("pattern", "shown"),
    [
        ("expert", ["a/b/expert", "desk/expert", "expert"]),
        ("desk/*", ["desk/expert"]),
        ("*/expert", ["desk/expert"]),
        ("preds[0]", ["Multi/preds[0]"]),
        ("Multi/preds[0]", ["Multi/preds[0]"]),
    ],
)
def test_agents_of_rows_are_chosen_as_those_to_train(pattern: str, shown: list[str]) -> None:
    paths = ["a/b/expert", "desk/expert", "expert", "Multi/preds[0]", "writer"]
    rows = [TableRow(row_id=path, status="ok", reward=1.0, agents={path: 1}) for path in paths]
    assert [row.row_id for row in matching_rows(rows, Page(agent=pattern))] == shown


def test_rows_by_agent_and_text(
    one_step: tuple[Path, list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = one_step[0]

    def shown(*options: str) -> RunReport:
        assert main(["inspect", str(run), "--json", *options]) == 0
        return msgspec.json.decode(capsys.readouterr().out, type=RunReport)

    assert shown("--agent", "wri*").matching == 14
    nothing = shown("--agent", "editor")
    assert (nothing.matching, nothing.rows, nothing.total) == (0, [], 14)
    first = next(row.id for row in shown("--limit", "0").rows if row.mode == "train")
    assert [row.id for row in shown("--grep", first).rows] == [first]
    assert shown("--grep", "a text of no span").rows == []
    assert main(["inspect", str(run), "--grep", "a text of no span"]) == 0
    assert "no rollout of 14 has such an agent or text" in capsys.readouterr().out
    assert main(["inspect", str(run), "--grep", first]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "calls by agent: writer 28, checker 14" in "\n".join(lines)
    assert len([line for line in lines if " train " in line]) == 1


@pytest.mark.parametrize("part", [3, 512])
def test_a_run_too_large_to_count_every_call(
    one_step: tuple[Path, list[Row]], monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    run = one_step[0]
    usual, rows = inspect_run(run), inspect_run(run, page=Page(limit=3)).splitlines()[-4:]
    monkeypatch.setattr(overview, "MAX_READ", 5)
    monkeypatch.setattr(overview, "PART", part)
    lines = inspect_run(run, page=Page(limit=3)).splitlines()
    assert lines[-4:] == rows
    assert (
        "calls of 3 of 14 are counted, those shown below; --all counts every call, which takes "
        "longer"
    ) in lines
    assert "14 rollouts; calls by agent, of the 3 shown: writer 6, checker 3" in lines
    assert any(line.startswith("coverage of calls, of the 3 shown: ") for line in lines)
    assert inspect_run(run, page=Page(is_whole=True)) == usual
    by_reward = inspect_run(run, page=Page(sort="reward"))
    assert "calls by agent: writer 28, checker 14" in by_reward
    report = msgspec.json.decode(inspect_run(run, page=Page(limit=3), as_json=True), type=RunReport)
    assert (report.total, report.counted, len(report.rows)) == (14, 3, 3)
