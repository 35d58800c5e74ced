"""Follow docs/guides/preferences.md: write every file and run every command."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from pages import TRAIN, Follower, printed  # type: ignore[import-not-found]

pytest.importorskip("torch")

from lightspan_testing.scripted import ScriptedServer

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    with ScriptedServer(lambda request: f"About {request.last_text.split()[-1]}") as server:
        environment = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "key"}
        folder = tmp_path_factory.mktemp("preferences")
        yield Follower(folder, **environment).follow("guides/preferences.md")


def test_the_page_can_be_followed(followed: Follower) -> None:
    assert followed.installed == [f"pip install {TRAIN} openai"]


def test_verdicts_of_a_store_are_learned(followed: Follower) -> None:
    output = printed(followed, "python learn.py")
    assert output.startswith(
        "20 desirable and 10 undesirable answers for KTO, with weights 1 and 2; left out: nothing\n"
        "few: 30 verdicts, fewer than 100. "
    )
    accuracy = re.search(r"held out: accuracy 0\.50 -> (\d\.\d\d)\n$", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.5
    assert (followed.folder / "learned" / "config.json").is_file()


def test_pairs_of_a_file_are_learned(followed: Follower) -> None:
    output = printed(followed, "python pairs.py")
    assert output.startswith("2 pairs for DPO; left out: nothing\nfew: 2 pairs")
    losses = re.search(r"dpo: loss (\d\.\d\d) -> (\d\.\d\d)\n$", output)
    assert losses is not None
    assert float(losses[2]) < float(losses[1]) == 0.69
