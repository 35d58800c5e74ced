"""Test dry runs with the algorithm's own model: each section of the report is exact.

A dry run changes no run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan import LLM, DevReport, Trainer
from lightspan.errors import ConfigError, OutOfMemoryError
from lightspan.lightning.selection import Coverage
from lightspan.progress import SilentReporter
from lightspan.schema.records import Mode, Outcome
from lightspan.schema.routing import Routing
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.scripted_engine import tiny_chat_tokenizer
from lightspan_tools.dry_run.analysis import (
    Findings,
    failure_warnings,
    read_rewards,
    shared_ids,
)
from lightspan_tools.inspect import inspect_run
from lightspan_tools.inspect_report import RunReport
from lightspan_torch.learner.torch import TorchLearner
from packages.core.tests.algorithms.scripted_world import episode
from tests.reports.dry_runs import dev, scripted

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("more help please") as running:
        yield running


ANSWERS = {
    "plan easy": ["look"],
    "plan hard": ["wait"],
    "please": ["1", "1", "0", "0.5"],
    "fine?": ["yes"],
}


@pytest.fixture(scope="module")
def report(
    dry_apps: Any, server: ScriptedServer, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> DevReport:
    """Run a dry run of two tasks with four rollouts each."""
    from lightspan import LightningRL

    algorithm = LightningRL(tiny, optimize="planner", frozen={"checker": "base"}, temperature=0.7)
    trainer = Trainer(
        algorithm,
        engine=scripted(ANSWERS),
        steps=5,
        validate_every=2,
        max_frozen_calls=100,
        folder=tmp_path_factory.mktemp("dry") / "run",
        reporter=SilentReporter(),
    )
    tasks = [{"q": q, "url": server.url, "id": q} for q in ("easy", "hard")]
    val = [{"q": "val", "url": server.url, "id": str(n)} for n in range(10)]
    known = ["team/planner", "team/planner/helper", "checker", "idle"]
    return trainer.dev(dry_apps.research, tasks, val, agents=known)


def test_every_agent_is_there_with_what_becomes_of_its_calls(report: DevReport) -> None:
    agents = {agent.path: agent for agent in report.agents}
    assert list(agents) == ["checker", "idle", "team", "team/planner", "team/planner/helper"]
    shown = [
        (a.path, a.policy, a.route, a.calls, a.calls_per_rollout, a.trained, a.frozen, a.rejected)
        for a in report.agents
    ]
    assert shown == [
        ("checker", None, "base", 8, 1.0, 0, 8, []),
        ("idle", None, "app", 0, 0.0, 0, 0, []),
        ("team", None, "app", 0, 0.0, 0, 0, []),
        ("team/planner", "policy", "policy", 16, 2.0, 16, 0, []),
        ("team/planner/helper", None, "app", 8, 1.0, 0, 8, []),
    ]
    assert agents["team/planner"].goes_to == ["policy policy"]
    assert agents["checker"].goes_to == ["the starting weights"]


def test_frozen_calls_name_the_endpoint(report: DevReport, server: ScriptedServer) -> None:
    host = server.origin.removeprefix("http://")
    helper = next(a for a in report.agents if a.path == "team/planner/helper")
    assert helper.goes_to == [f"any at {host}"]
    [endpoint] = report.costs.endpoints
    assert (endpoint.name, endpoint.agents) == (f"any at {host}", ["team/planner/helper"])
    assert (endpoint.calls, endpoint.expected_calls) == (8, 680.0)
    # the server counts words: "help" in, "more help please" out
    assert (endpoint.expected_prompt_tokens, endpoint.expected_response_tokens) == (680.0, 2040.0)


def test_overrides_are_told_with_what_was_asked(report: DevReport) -> None:
    assert [(o.agent, o.field, o.asked, o.used, o.calls) for o in report.overrides] == [
        ("team/planner", "presence_penalty", 0.5, None, 16),
        ("team/planner", "seed", 7, None, 16),
        ("team/planner", "temperature", 0.2, 0.7, 16),
    ]


def test_rewards_by_group(report: DevReport) -> None:
    rewards = report.rewards
    assert (rewards.rollouts, rewards.scored, rewards.unscored, rewards.failed) == (8, 8, 0, 0)
    assert (rewards.lost, rewards.damaged, rewards.failures) == (0, 0, [])
    groups = {group.task_id: group for group in rewards.groups}
    assert set(groups) == {"easy", "hard"}
    for group in groups.values():
        assert sorted(group.rewards, key=lambda value: value or 0.0) == [0.0, 0.5, 1.0, 1.0]
        assert group.mean == 0.625
        assert group.varies
    assert rewards.mean == 0.625
    assert rewards.varying == 2


def test_rows_merge_token_for_token(report: DevReport) -> None:
    rows = report.rows
    assert rows is not None
    assert (rows.calls, rows.rows, rows.merged, rows.new) == (16, 8, 8, 8)
    assert (rows.branch, rows.broken, rows.breaks) == (0, 0, [])
    assert rows.row_tokens < rows.call_tokens
    lengths = [_row_length("easy", "look", "0.5"), _row_length("hard", "wait", "0.5")]
    assert rows.longest_row == max(lengths)


def _row_length(question: str, plan: str, answer: str) -> int:
    tokenizer = tiny_chat_tokenizer()
    messages = [
        {"role": "user", "content": f"plan {question}"},
        {"role": "assistant", "content": plan},
        {"role": "user", "content": "more help please"},
    ]
    return len(tokenizer.render(messages)) + len(tokenizer.encode(answer)) + 1


def test_costs_of_a_whole_fit(report: DevReport) -> None:
    costs = report.costs
    # evaluations: before, after steps 2 and 4, and after the last
    assert costs.plan == "5 steps x 16 tasks x 8 + 4 x 10 evaluated"
    assert costs.rollouts == 5 * 128 + 40
    [search] = costs.tools
    assert (search.name, search.calls) == ("search", 16)
    assert search.expected_calls == 1360.0
    assert costs.expected_frozen_calls == 680.0
    assert costs.max_frozen_calls == 100


def test_warnings_come_first_and_say_what_matters(report: DevReport) -> None:
    assert report.warnings == [
        "fit would stop: its evaluations sample as the app asks, so they refuse "
        "presence_penalty=0.5, seed=7 of team/planner, which training sets aside. Leave that out "
        "of the app's requests",
        "fit would make about 680 calls to endpoints and stop at max_frozen_calls=100",
    ]
    lines = report.text().splitlines()
    assert lines[0].startswith("dry run of dry_apps:research: lightning_rl on ")
    assert lines[0].endswith("nothing was trained")
    assert lines[1] == report.choices[0]
    page = "docs/troubleshooting.md#evaluations-sample-as-the-app-asks"
    assert lines[3] == f"! {report.warnings[0]} ({page})"


def test_what_is_not_known_of_engines_of_your_own(report: DevReport) -> None:
    assert report.memory is None
    assert report.missing == ["memory: engine= or learner= is your own"]


def test_json_is_plain_and_complete(report: DevReport) -> None:
    plain = json.loads(json.dumps(report.json(), allow_nan=False))
    assert msgspec.convert(plain, DevReport) == report


def test_text_is_made_of_aligned_sections(report: DevReport) -> None:
    text = report.text()
    headings = [part.partition("\n")[0] for part in text.split("\n\n")[1:]]
    sections = "AGENTS, SAMPLING SET BY TRAINING, REWARDS, ROWS, WHAT FIT WOULD CALL"
    assert ", ".join(headings[1:]) == f"{sections}, REPLAY, NOT KNOWN"
    assert "  8 rollouts cannot be repeated: call " in text
    assert "of 'team/planner/helper', is not a call of the gateway" in text
    assert "  team/planner  seed              7      left out  16 calls" in text
    assert (
        "  16 calls make 8 rows: 8 go on in a row, 8 begin a conversation, 0 branch off, 0 break;"
        in text
    )
    assert "  checker: frozen, it is not selected; answered by the starting weights" in text
    assert "  idle: called no model" in text
    assert "  680 rollouts: 5 steps x 16 tasks x 8 + 4 x 10 evaluated" in text
    lines = [line.partition(" (docs/troubleshooting.md#")[0] for line in text.splitlines()]
    assert max(map(len, lines)) < 220


# --- what is wrong with a run ---------------------------------------------------------------------


def test_a_misspelt_agent_is_named_with_what_there_is(
    rl: Callable[..., Any], dry_apps: Any
) -> None:
    report = dev(rl, dry_apps.says, ["1", "0"], algorithm={"optimize": "writter"})
    assert report.warnings[0].startswith("4 of 4 rollouts were lost, first of all: infrastructure")
    assert report.warnings[1].startswith(
        "not reached yet, as no rollout ended well: no agent matches 'writter'. Did you mean "
        "'writer'? Agents: 'writer'; checked once one does. To check"
    )
    assert "no call would be trained (no selected agent called a model)" in report.warnings
    [writer] = report.agents
    assert (writer.calls, writer.frozen, writer.trained) == (4, 4, 0)


def test_calls_that_no_agent_made_beside_those_of_agents(
    rl: Callable[..., Any], dry_apps: Any
) -> None:
    report = dev(rl, dry_apps.forgets_a_name, ["1", "0"])
    assert [(agent.path, agent.calls) for agent in report.agents] == [("app", 4), ("writer", 4)]
    assert report.warnings[-1] == (
        "4 of 8 calls were made outside every agent (their path is `app`): if one is an agent's, "
        'name it by `with lightspan.agent("name"):` around the call, or as your '
        "framework's page in docs/guides says"
    )


def test_failures_and_missing_rewards(rl: Callable[..., Any], dry_apps: Any) -> None:
    report = dev(rl, dry_apps.says, ["1", "none", "oops", "0"])
    rewards = report.rewards
    assert (rewards.scored, rewards.unscored, rewards.failed) == (3, 1, 1)
    [group] = rewards.groups
    assert sorted(map(str, group.rewards)) == ["0.0", "0.0", "1.0", "None"]
    [failure] = rewards.failures
    assert failure.startswith("app_error: ")
    assert failure.endswith("(1 of 4 rollouts)")
    assert report.warnings[0] == (
        f"1 of 4 rollouts failed, first of all: {failure}; fit scores those without a reward "
        "failure_reward='lowest'"
    )
    assert report.warnings[1].startswith("1 of 4 rollouts have no usable reward")
    [writer] = report.agents
    assert (writer.trained, sum(reason.calls for reason in writer.rejected)) == (3, 1)
    [unscored] = writer.rejected
    assert (unscored.code, unscored.calls) == ("unscored", 1)
    assert unscored.text == "the episode has no usable reward, which is not a reward of zero"
    assert report.warnings[2].startswith("1 of 4 calls would be rejected (1 unscored: ")


def test_failures_that_differ_in_a_number_are_one(rl: Callable[..., Any], dry_apps: Any) -> None:
    report = dev(rl, dry_apps.says, ["oops1", "oops2", "1", "oops3"])
    [failure] = report.rewards.failures
    assert failure.endswith("(3 of 4 rollouts)")
    assert report.rewards.reasons == {"failed": failure}


def test_each_kind_of_failure_has_its_own_reason() -> None:
    built = [
        episode("a", 0, None, outcome=Outcome.INFRASTRUCTURE, message="gone"),
        episode("a", 1, 0.0, outcome=Outcome.APP_ERROR, message="no 0"),
        episode("a", 2, 0.0, outcome=Outcome.APP_ERROR, message="no 1"),
        episode("a", 3, 1.0, capture_errors=["a hole"]),
    ]
    coverages = [Coverage(attempt_id=each.attempt_id, entries=()) for each in built]
    findings = Findings(episodes=built, coverages=coverages, routing=Routing())
    rewards = read_rewards(findings, by_batch=False, failure_reward="lowest")
    assert rewards.reasons == {
        "failed": "app_error: no 0 (2 of 4 rollouts)",
        "lost": "infrastructure: gone (1 of 4 rollouts)",
        "damaged": "damaged: a hole (1 of 4 rollouts)",
    }
    failed, lost, damaged = failure_warnings(rewards)
    assert failed.startswith("2 of 4 rollouts failed, first of all: app_error: no 0 (2 of 4")
    assert lost == "1 of 4 rollouts were lost, first of all: infrastructure: gone (1 of 4 rollouts)"
    assert damaged.endswith("first of all: damaged: a hole (1 of 4 rollouts)")


def test_rollouts_that_a_cache_of_the_app_answers(rl: Callable[..., Any], dry_apps: Any) -> None:
    trainer = Trainer(rl(), engine=scripted({"": ["1", "0"]}), steps=1, reporter=SilentReporter())
    tasks = [{"q": "a", "id": "a"}, {"q": "b", "id": "b", "cached": True}]
    report = trainer.dev(dry_apps.remembers, tasks)
    [warning] = [text for text in report.warnings if "without a call of the policy" in text]
    assert warning.startswith("4 of 8 rollouts ended without a call of the policy, so they teach")


def test_an_own_endpoint_that_is_down_or_was_not_reached(
    rl: Callable[..., Any], dry_apps: Any
) -> None:
    helper = LLM(base_url="http://127.0.0.1:9/v1", model="m")
    report = dev(rl, dry_apps.survives, ["1", "0"])
    assert (
        '  helper: 4 of 4 calls to its endpoint failed: Connection error.. With frozen="base", the '
        "starting weights answer in its place"
    ) in report.text()
    frozen = {"algorithm": {"frozen": {"helper": helper}}, "agents": ["writer", "helper"]}
    report = dev(rl, dry_apps.says, ["1", "0"], **frozen)
    assert report.costs.unreached == ["helper"]
    assert "because no rollout reached them: calls to the endpoints of helper" in report.text()
    assert "no tool and no endpoint" not in report.text()
    report = dev(rl, dry_apps.says, ["oops"])
    assert "calls to tools and endpoints are not known: no rollout ended well" in report.text()


def test_what_fit_would_call_without_held_out_tasks(rl: Callable[..., Any], dry_apps: Any) -> None:
    report = dev(rl, dry_apps.says, ["1", "0"])
    assert report.costs.plan.endswith(
        "; evaluations of held-out tasks (val) would come on top: none were given"
    )
    assert "\n  at this dry run's speed, they take about " in report.text()


def test_different_tasks_with_one_id_are_named(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    one, two, other = {"id": "a", "q": "x"}, {"id": "a", "q": "y"}, {"id": 2, "q": "x"}
    assert (
        list(shared_ids([one, other, {"q": "x", "id": "a"}, "text", "text"], searches=False)) == []
    )
    twice = [one, two, other, {"id": "2", "q": "x"}]
    assert list(shared_ids([one, two], searches=True)) == [
        "train[0] and train[1] differ and have one id (a): fit refuses them; give each task an id "
        "of its own"
    ]
    assert list(shared_ids(twice, searches=False)) == [
        "train[0] and train[1] differ and have one id (a) (likewise 1 other id): messages, inspect "
        "and export show them as one task; give each task an id of its own"
    ]
    algorithm = rl(group_size=2, tasks_per_step=1)
    trainer = Trainer(
        algorithm, engine=scripted({"": ["1", "0"]}), reporter=SilentReporter(), folder=tmp_path
    )
    report = trainer.dev(dry_apps.says, [other, one, two], count=1, group_size=2)
    assert any(text.startswith("train[1] and train[2] differ") for text in report.warnings)


def test_calls_of_a_failed_try_are_counted_and_rejected_without_a_failure_reward(
    rl: Callable[..., Any], dry_apps: Any
) -> None:
    answers = ["what?", "huh", "1"]
    report = dev(rl, dry_apps.retries, answers, group_size=1)
    [writer] = report.agents
    assert (writer.calls, writer.trained, writer.retried) == (3, 3, 2)
    assert "writer: 2 trained with failure_reward: the agent ended in an error" in report.text()
    assert "means of the named rewards: tries 3" in report.text()
    unscored = {"failure_reward": None}
    report = dev(rl, dry_apps.retries, answers, group_size=1, algorithm=unscored)
    [writer] = report.agents
    assert [(reason.code, reason.calls) for reason in writer.rejected] == [("retried", 2)]


def test_rewards_on_calls_without_effect_are_named(rl: Callable[..., Any], dry_apps: Any) -> None:
    warnings = dev(rl, dry_apps.rewards_calls, ["1", "0"]).warnings
    assert any(text.startswith("4 rewards on a call went to an id that no") for text in warnings)
    assert any(text.startswith("the reward of 4 calls had no effect") for text in warnings)
    options = {"algorithm": {"credit": "discounted"}}
    warnings = dev(rl, dry_apps.rewards_calls, ["1", "0"], **options).warnings
    assert not any("had no effect: credit" in text for text in warnings)


def test_calls_that_are_too_long_are_rejected_by_name(
    rl: Callable[..., Any], dry_apps: Any
) -> None:
    report = dev(rl, dry_apps.says, ["1", "0"], algorithm={"max_length": 5})
    [writer] = report.agents
    assert [(r.code, r.calls) for r in writer.rejected] == [("out_of_context", 4)]
    assert report.warnings[0].startswith("no call would be trained (4 out_of_context: ")


def test_a_broken_conversation_is_shown_with_its_first_differing_token(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    trainer = Trainer(
        rl(), engine=scripted({"q": ["name"], "and?": ["1", "0"]}), reporter=SilentReporter()
    )
    report = trainer.dev(dry_apps.edits, [{"q": "q"}], group_size=2, folder=tmp_path / "dry")
    rows = report.rows
    assert rows is not None
    assert (rows.calls, rows.rows, rows.new, rows.broken, rows.merged) == (4, 4, 2, 2, 0)
    assert rows.causes == {"edited context": 2}
    assert rows.one_row == {"writer": 0.5}
    tokenizer = tiny_chat_tokenizer()
    prompt = tokenizer.render([{"role": "user", "content": "q"}])
    expected, got = tokenizer.encode("name")[0], tokenizer.encode("NAME")[0]
    texts = tokenizer.decode([expected]), tokenizer.decode([got])
    detail = "the app changed the answer before it sent it back (message 1)"
    for example in rows.breaks:
        assert example.startswith(f"writer, token {len(prompt)} (response), after ")
        assert f": {texts[0]!r} ({expected}) became {texts[1]!r} ({got}): {detail} " in example
    assert report.warnings[0] == (
        "2 of 2 calls that go on with a conversation begin a new row (2 edited context): the "
        f"learner computes their history again, {rows.repeated_tokens} of {rows.row_tokens} tokens"
    )
    assert rows.repeated_tokens == 2 * (len(prompt) + len(tokenizer.encode("name")) + 1)
    share = rows.repeated_tokens / rows.row_tokens
    assert f"  breaks repeat {rows.repeated_tokens} of these tokens ({share:.0%})" in report.text()
    assert "  writer: 50% of a rollout's calls are in one row\n" in report.text()
    assert f"  2 breaks by edited context\n    {rows.breaks[0]}\n" in report.text()
    [(rollout, call)] = re.findall(r"rollout (\S+), call (\S+)\)$", rows.breaks[0])
    shown = inspect_run(tmp_path / "dry", rollout, call)
    assert shown.startswith(f"call {call}, choice 0, agent writer")
    lines = inspect_run(tmp_path / "dry").splitlines()
    assert "share of a rollout's calls in one row: writer 50%" in lines
    start = lines.index("calls that continue a conversation in a new row: edited context 2")
    place = f"writer, rollout {rollout}, call {call}"
    assert lines[start + 1] == f"  edited context: {detail} ({place})"


def test_a_training_counts_what_is_in_one_row(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    engine = scripted({"q": ["name"], "and?": ["1", "0"]})
    algorithm = rl(group_size=2, tasks_per_step=1)
    trainer = Trainer(algorithm, engine=engine, steps=1, folder=tmp_path, reporter=SilentReporter())
    trainer.fit(dry_apps.edits, [{"q": "q"}])
    [line] = trainer.folder.metrics()
    assert line["agent/writer/one_row"] == 0.5
    report = json.loads(inspect_run(tmp_path, as_json=True))
    assert (report["one_row"], report["breaks"]) == ({"writer": 0.5}, {"edited context": 2})


def test_a_learner_that_runs_out_of_memory_leaves_a_report(
    rl: Callable[..., Any], dry_apps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a failure in the second update, the first one in which the optimizer has states."""
    updates: list[None] = []

    def update(*_: Any, **__: Any) -> dict[str, float]:
        updates.append(None)
        if len(updates) == 2:
            raise OutOfMemoryError("lower token_budget")
        return {}

    monkeypatch.setattr(TorchLearner, "update", update)
    report = dev(rl, dry_apps.says, ["1", "0"])
    assert report.warnings == ["fit would stop: lower token_budget"]


# --- what it leaves alone -------------------------------------------------------------------------


def test_the_trainers_folder_and_store_are_not_touched(
    rl: Callable[..., Any], apps: Any, tmp_path: Path, ask: Callable[..., Any]
) -> None:
    """Check with the real model that a run can be resumed as if there had been no dry run."""
    reporter = SilentReporter()
    folder = tmp_path / "run"
    Trainer(rl(), steps=1, folder=folder, reporter=reporter).fit(apps.spell, ask(2))
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    trainer = Trainer(rl(), steps=2, folder=folder, reporter=reporter)
    report = trainer.dev(apps.spell, ask(2), count=1)
    assert report.rollouts == 4
    after = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    assert after == before
    assert trainer.fit(apps.spell, ask(2), resume=True).steps == 2


def test_nothing_is_kept_unless_asked(
    rl: Callable[..., Any],
    dry_apps: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    report = dev(rl, dry_apps.says, ["1", "0"])
    assert report.folder is None
    # Python's multiprocessing makes a folder of its own once in a process
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")] == []


def test_impossible_requests_are_refused(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    trainer = Trainer(rl(), folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="is the trainer's own folder"):
        trainer.dev(dry_apps.says, [{"q": "a"}], folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="count=0, group_size=None: both must be at least 1"):
        trainer.dev(dry_apps.says, [{"q": "a"}], count=0)


def test_inspect_shows_the_failure_reward_of_a_dry_run(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    report = dev(rl, dry_apps.says, ["-0.5", "oops"], group_size=2, folder=tmp_path, replay=False)
    assert [group.rewards for group in report.rewards.groups] == [[-0.5, -0.5]]
    shown = msgspec.json.decode(inspect_run(tmp_path, as_json=True), type=RunReport)
    rows = sorted((row.status, row.reward) for row in shown.rows)
    assert rows == [("failed", -0.5), ("succeeded", -0.5)]


def test_a_folder_that_holds_a_dry_run_is_refused(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    """Check that a second dry run in a folder is refused, which would hide the first one's
    rollouts.
    """
    folder = tmp_path / "dry"
    report = dev(rl, dry_apps.says, ["1", "0"], folder=folder)
    assert report.folder == str(folder)
    assert f"rollouts: lightspan inspect {folder}" in report.text()
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"dry holds a run already.*another folder, or delete"):
        dev(rl, dry_apps.says, ["1", "0"], folder=folder)
    assert (folder / "config.json").read_bytes() == before
    shown = inspect_run(folder)
    assert "8 rollouts, 4 of them forks or replays; calls by agent: writer 4" in shown
    assert (
        "coverage of calls: rejected:replayed 4, trained 4" in shown
    )  # as the report says, not `mode_not_train`


def test_an_algorithm_says_what_a_dry_run_reckons_with(tiny: Path, dry_apps: Any) -> None:
    """Check the attributes that the algorithm's protocol declares for dry runs."""
    from lightspan.algorithms import Algorithm, Metrics, PolicySpec, TrainerContext
    from lightspan.lightning.batch import BatchConfig
    from lightspan.lightning.selection import Rejection, Selection, classify_calls
    from lightspan.protocols.learner import Loss, SFTLoss

    class Own(Algorithm):
        minibatches = 3
        batch_config = BatchConfig(estimator="rloo")

        @property
        def group_size(self) -> int:
            return 2

        @property
        def loss(self) -> Loss:
            return SFTLoss()

        def coverages(self, episodes: Any, *, modes: Any = (Mode.TRAIN,)) -> list[Coverage]:
            found = [classify_calls(episode, self.routing(), modes=modes) for episode in episodes]
            return [
                one.reject({c.key: Rejection.OUT_OF_CONTEXT for c in one.trained}) for one in found
            ]

        def policies(self) -> dict[str, PolicySpec]:
            return {"policy": PolicySpec(model=str(tiny))}

        def routing(self) -> Routing:
            return Selection.of({"writer": "policy"}).routing

        async def run_step(self, world: TrainerContext) -> Metrics:
            raise AssertionError("a dry run trains nothing")

    algorithm = Own()
    assert (algorithm.minibatches, algorithm.loss) == (3, SFTLoss())
    trainer = Trainer(algorithm, engine=scripted({"": ["1"]}), steps=1, reporter=SilentReporter())
    report = trainer.dev(dry_apps.says, [{"q": "a"}])
    assert (report.group_size, report.rollouts, report.agents[0].trained) == (2, 2, 0)


def test_a_critic_compares_no_group(rl: Callable[..., Any], dry_apps: Any) -> None:
    """Check one rollout per task with equal rewards: `fit` learns from them with a critic."""
    algorithm = {"estimator": "ppo", "group_size": 1}
    report = dev(rl, dry_apps.says, ["1"], tasks=2, algorithm=algorithm)
    assert (report.group_size, report.rewards.varying) == (1, 0)
    assert not any("group" in warning for warning in report.warnings)
    assert "2 of 2 rollouts scored; 2 groups, not compared inside" in report.text()
    assert "teaches nothing" not in report.text()


# --- replays ----------------------------------------------------------------------------------
def test_an_app_that_replays_to_the_byte(rl: Callable[..., Any], dry_apps: Any) -> None:
    engine = scripted({"": ["1", "0", "0.5"]})
    trainer = Trainer(rl(), engine=engine, steps=1, reporter=SilentReporter())
    report = trainer.dev(dry_apps.says, [{"q": "one", "id": "1"}], group_size=3)
    assert report.replays is not None
    assert (report.replays.repeated, report.replays.exact, report.replays.calls) == (3, 3, 3)
    assert len(engine.requests) == 3  # no model was asked again
    line = "your app replays to the byte: 3 of 3 rollouts, 3 calls; no model was asked"
    assert f"REPLAY\n  {line}" in report.text()
    assert (report.rollouts, report.rewards.rollouts, report.agents[0].calls) == (3, 3, 3)


def test_a_replay_can_be_left_out(rl: Callable[..., Any], dry_apps: Any) -> None:
    report = dev(rl, dry_apps.says, ["1", "0"], replay=False)
    assert report.replays is None
    assert "REPLAY" not in report.text()


def test_an_app_with_a_clock_in_its_prompt(rl: Callable[..., Any], apps: Any) -> None:
    """Check also that a departure is no failure in the report's other sections."""
    trainer = Trainer(
        rl(frozen="base"),
        engine=scripted({"": ["1", "0"]}),
        steps=1,
        reporter=SilentReporter(),
    )
    tasks = [{"q": "one", "id": "a", "clock": True}, {"q": "two", "id": "b", "words": True}]
    report = trainer.dev(apps.converses, tasks, group_size=2)
    assert report.replays is not None
    assert (report.replays.repeated, report.replays.exact) == (4, 2)
    assert (report.replays.calls, report.replays.replayed) == (16, 10)
    text = report.text()
    assert "2 of 4 rollouts replay to the byte, 10 of 16 calls; no model was asked" in text
    assert "departed: task a: the attempt departed after 1 of 4 calls: call 2, of 'writer'" in text
    assert "(a time of day)" in text
    assert (report.rewards.failed, report.rewards.lost, report.rewards.damaged) == (0, 0, 0)


def test_a_reward_that_is_no_function_of_the_answers(
    rl: Callable[..., Any], apps: Any, tmp_path: Path
) -> None:
    """Check an app whose reward is the number of its rollouts so far."""
    trainer = Trainer(rl(), engine=scripted({"": ["1"]}), steps=1, reporter=SilentReporter())
    tasks = [{"q": "one", "id": "a", "count": str(tmp_path / "count")}]
    report = trainer.dev(apps.counts, tasks, group_size=1)
    assert "1 rollout got another reward for the same answers: task a: 1.0 and 2.0" in report.text()
