"""Test how token ids become text without the model of a run."""

from __future__ import annotations

from pathlib import Path

from lightspan_tools.tokenizer_files import open_decoder


def test_ids_of_a_run_without_a_tokenizer(tmp_path: Path) -> None:
    decode = open_decoder(tmp_path, {"model": str(tmp_path / "gone")})
    assert decode("policy", (1, 2)) == "[1, 2]"
