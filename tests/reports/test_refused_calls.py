"""Test what `dev` and `fit` say of a program whose calls were refused, and that survives that."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightspan import Command, LightningRL, Trainer
from lightspan.errors import UnknownAgentError, UnsupportedError
from lightspan.progress import SilentReporter
from lightspan_programs import system
from tests.reports.dry_runs import scripted

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, sys, urllib.error, urllib.request
fields, key, mode = json.loads(sys.argv[1]), sys.argv[2], os.environ["LIGHTSPAN_MODE"]
if mode == "val" and len(sys.argv) > 3:
    fields = json.loads(sys.argv[3])
body = {"model": os.environ["LIGHTSPAN_MODEL"], "input": "hi", "max_output_tokens": 4, **fields}
headers = {
    "Content-Type": "application/json",
    "User-Agent": "harness/2.1",
    "Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"]),
}
url = os.environ["OPENAI_BASE_URL"] + "/responses"
reward = 0.0
try:
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    answer = json.loads(urllib.request.urlopen(request).read())
    reward = float(answer["output"][0]["content"][0]["text"])
except urllib.error.HTTPError as error:
    print("the program shows:", error, file=sys.stderr)
print(reward)
"""


def program(folder: Path, fields: Any, *, key: str = "", val_fields: Any = None) -> Command:
    (folder / "program.py").write_text(PROGRAM)
    arguments = [json.dumps(fields), key]
    arguments += [] if val_fields is None else [json.dumps(val_fields)]
    return Command([sys.executable, str(folder / "program.py"), *arguments])


def trainer_of(tiny: Path, folder: Path) -> Trainer:
    algorithm = LightningRL(tiny, optimize="*", group_size=2, tasks_per_step=1, learning_rate=1e-3)
    engine = scripted({"": ("1", "0")})
    reporter = SilentReporter()
    return Trainer(
        algorithm, engine=engine, steps=1, runners=1, folder=folder / "run", reporter=reporter
    )


def test_an_evaluation_whose_calls_were_all_refused_is_an_error(tiny: Path, tmp_path: Path) -> None:
    """Check a refusal that training would not have: a reward of 0 would look like a model's."""
    refused = {"tools": [{"type": "local_shell"}]}
    app = program(tmp_path, {}, val_fields=refused)
    said = "the gateway refused all 1 call of an evaluation: tools[0] is of type 'local_shell'"
    report = trainer_of(tiny, tmp_path).dev(app, [{"n": 0}], [{"n": 1}])
    assert next(text for text in report.warnings if "fit would stop" in text).startswith(
        f"fit would stop: {said}"
    )
    assert report.failure
    with pytest.raises(UnsupportedError) as caught:
        trainer_of(tiny, tmp_path).fit(app, [{"n": 0}], [{"n": 1}])
    assert str(caught.value).startswith(said)


def test_a_parameter_that_evaluations_refuse_is_an_error_though_the_program_survives_it(
    tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="so they refuse a call of app: 'seed' = 7"):
        trainer_of(tiny, tmp_path).fit(program(tmp_path, {"seed": 7}), [{"n": 0}], [{"n": 1}])


def test_fields_of_coding_programs_are_evaluated(tiny: Path, tmp_path: Path) -> None:
    app = program(tmp_path, {"client_metadata": {"session_id": "s"}, "a_new_field": {"a": "b"}})
    report = trainer_of(tiny, tmp_path).dev(app, [{"n": 0}], [{"n": 1}])
    assert not [text for text in report.warnings if "fit would stop" in text]
    [override] = [each for each in report.overrides if each.used is None]
    assert (override.field, override.asked) == ("a_new_field", {"a": "b"})
    run = trainer_of(tiny, tmp_path).fit(app, [{"n": 0}], [{"n": 1}])
    assert [list(each.rewards.values()) for each in run.evaluations] == [[1.0], [0.0]]


def test_calls_with_a_wrong_key_are_counted_and_named(tiny: Path, tmp_path: Path) -> None:
    app = program(tmp_path, {}, key="a-key-of-its-own")
    said = (
        "The gateway refused {} without the attempt's key (HTTP 401; the first: POST "
        "/v1/responses of harness/2.1, with another key). A program finds its key in "
        "OPENAI_API_KEY, and in ANTHROPIC_API_KEY"
    )
    report = trainer_of(tiny, tmp_path).dev(app, [{"n": 0}], count=1)
    assert report.warnings[0].startswith(said.format("2 requests"))
    with pytest.raises((UnsupportedError, UnknownAgentError)) as caught:
        trainer_of(tiny, tmp_path).fit(app, [{"n": 0}])
    assert said.format("2 requests") in str(caught.value)


SIDE = """
import json, os, urllib.request
def ask(instructions):
    body = {"model": os.environ["LIGHTSPAN_MODEL"], "input": "hi", "instructions": instructions}
    headers = {"Content-Type": "application/json"}
    headers["Authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
    url = os.environ["OPENAI_BASE_URL"] + "/responses"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    answer = json.loads(urllib.request.urlopen(request).read())
    return answer["output"][0]["content"][0]["text"]
ask("Generate a title.")
ask("You mend code.")
print(ask("You mend code."))
"""


def test_calls_of_another_kind_are_named_and_can_be_an_agent_of_their_own(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "side.py").write_text(SIDE)
    arguments = [sys.executable, str(tmp_path / "side.py")]
    report = trainer_of(tiny, tmp_path).dev(Command(arguments), [{"n": 0}])
    [app] = report.agents
    [note] = app.side_calls
    assert note.startswith("2 calls of 6 begin a conversation of another kind (system prompt 'Gen")
    assert 'Command(agents={"NAME": system("Generate a title.*")})' in note
    assert f"  app: {note}" in report.text()
    # with the name, they are frozen
    named = Command(arguments, agents={"title": system("Generate a title*")})
    algorithm = LightningRL(tiny, optimize="app", frozen="base", group_size=2, tasks_per_step=1)
    engine, reporter = scripted({"": ("1", "0")}), SilentReporter()
    trainer = Trainer(algorithm, engine=engine, steps=1, runners=1, reporter=reporter)
    agents = trainer.dev(named, [{"n": 0}]).agents
    counts = [(agent.path, agent.calls, agent.trained, agent.frozen) for agent in agents]
    assert counts == [("app", 4, 4, 0), ("title", 2, 0, 2)]
    assert [agent.side_calls for agent in agents] == [[], []]
