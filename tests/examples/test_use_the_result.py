"""Follow the guides on serving, candidates and export on two short runs of the quickstart."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import DOCS, Follower, blocks, printed  # type: ignore[import-not-found]
from pyarrow import parquet

from lightspan_vllm.requirements import LORA_RANKS

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]

APP = ("newsroom.py", "learning.py", "prepare.py")
TRAIN = """
from learning import answer

from lightspan import LightningRL, LoRA, Trainer

if __name__ == "__main__":
    for name, lora in {"newsroom": None, "lora": LoRA(rank=8)}.items():
        algorithm = LightningRL("start", optimize="headline", lora=lora, tasks_per_step=4, frozen="base")
        Trainer(algorithm, steps=1, folder=f"runs/{name}").fit(answer, "train.jsonl", "val.jsonl")
"""  # noqa: E501


class Reader(Follower):  # type: ignore[misc]
    """Follow a page of the repository's quickstart, without the commands that need a network."""

    def run(self, command: str) -> None:
        if "SERVE_KEY" not in command:
            super().run(command)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    """Return a reader with the quickstart's app and its runs, with full weights and with LoRA."""
    reader = Reader(tmp_path_factory.mktemp("newsroom"))
    for _, name, text in blocks("start/your-own-app.md"):
        if name in APP:
            reader.write(name, text)
    reader.write("train.py", TRAIN)
    try:
        for command in ("python prepare.py", "python train.py"):
            reader.run(command)
        yield reader
    finally:
        reader.stop()


def test_it_is_served(reader: Follower) -> None:
    reader.follow("guides/serve.md")
    shown = next(text for kind, _, text in blocks("guides/serve.md") if kind == "text")
    expected = shown.replace("8000", reader.port).replace(
        "base from start", f"base from {reader.folder / 'start'}"
    )
    assert printed(reader, "lightspan serve runs/newsroom") == expected
    assert "  every agent -> start\n" in printed(reader, "lightspan serve start")
    assert printed(reader, "python connected.py").strip()
    assert re.findall(r"^(?:headline|base)\b", printed(reader, "python client.py"), re.MULTILINE)


def test_a_candidate_is_compared(reader: Follower, tmp_path: Path) -> None:
    folder = tmp_path / "newsroom"
    shutil.copytree(reader.folder, folder, ignore=shutil.ignore_patterns(".bin", "*.log"))
    (folder / "runs/lora").rename(folder / "runs/newer")
    other = Reader(folder)
    try:
        other.follow("guides/candidate.md")
        started = printed(other, "lightspan serve")
        [comparison] = re.findall(
            r"runs/newer answers 0\.5 of attempts \(comparison (\w{8})", started
        )
        status = printed(other, "lightspan candidate status")
        assert status.startswith(
            f"comparison {comparison}: 0.5 of new attempts go to the candidate"
        )
        sides = re.findall(r"^(candidate|current) +(\d+) +0 +0 +(\d+) \(", status, re.MULTILINE)
        assert [sum(map(int, counts)) for counts in list(zip(*sides, strict=True))[1:]] == [40, 20]
        assert "the candidate was rolled back: runs/newsroom answers all new attempts" in printed(
            other, "lightspan candidate roll-back"
        )
    finally:
        other.stop()


def test_it_is_exported(reader: Follower) -> None:
    reader.follow("guides/export.md")
    folder = reader.folder
    assert (folder / "headline-model/model.safetensors").is_file()
    assert not (folder / "headline-lora/config.json").exists()
    config = json.loads((folder / "headline-lora/adapter_config.json").read_bytes())
    assert (config["r"], config["base_model_name_or_path"]) == (8, str(folder / "start"))
    assert (folder / "headline-merged/model.safetensors").is_file()
    assert printed(reader, "python load.py").startswith("PeftModelForCausalLM ")
    kept = parquet.read_table(folder / "transitions.parquet").to_pylist()
    assert {row["agent"] for row in kept} == {"headline"}
    assert {row["verdict"] for row in kept} == {"trained", "rejected"}
    assert (folder / "spans.jsonl").stat().st_size


def test_the_ranks_of_vllm_are_those_that_lightspan_knows() -> None:
    page = (DOCS / "guides/export.md").read_text("utf-8")
    [ranks] = re.findall(r"accepts `--max-lora-rank` ([\d, and]+)\.", page)
    assert tuple(map(int, re.findall(r"\d+", ranks))) == LORA_RANKS
