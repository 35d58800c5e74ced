"""Follow docs/guides/policies.md: write every file and run every command."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from pages import TRAIN, Follower, printed  # type: ignore[import-not-found]

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    follower = Follower(tmp_path_factory.mktemp("policies"))
    try:
        yield follower.follow("guides/policies.md")
    finally:
        follower.stop()


def test_each_agent_has_a_policy_and_each_policy_a_folder(followed: Follower) -> None:
    assert followed.installed == [f"pip install {TRAIN} openai"]
    assert printed(followed, "python learn.py").splitlines()[-1] == "policies: answer route"
    run = followed.folder / "runs" / "desk"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "train"][-1]
    assert last["learner/route/tokens"] > 0
    assert last["learner/answer/tokens"] > 0
    served = json.loads((run / "result.json").read_text())["serving"]
    assert {name: policy["folder"] for name, policy in served["policies"].items()} == {
        "route": "model/route",
        "answer": "model/answer",
    }


def test_each_is_served_by_the_name_of_its_agent(followed: Follower) -> None:
    said = printed(followed, "python ask.py").splitlines()
    assert said == ["models: answer route", "route: route", "answer: answer"]


def test_each_is_exported(followed: Follower) -> None:
    adapter, model = followed.folder / "route-adapter", followed.folder / "answer-model"
    assert (adapter / "adapter_config.json").is_file()
    assert not (adapter / "config.json").is_file()
    assert (model / "config.json").is_file()
    assert not (model / "adapter_config.json").is_file()
