"""Fixtures of the tests of the vLLM engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightspan_testing.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("vllm") / "model", seed=1, context=256)
