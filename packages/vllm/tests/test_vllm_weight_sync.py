"""Test that an engine with other weights than the learner's is detected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lightspan.errors import EngineError
from lightspan.lightning.rows import Row
from lightspan.protocols.engine import Score
from lightspan_testing.engine_suite import of_tokens, perturbed, reference, with_weights
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.torch import TorchLearner
from lightspan_vllm.weight_sync_check import Probe, check_probes

PROMPT = [5, 6, 7, 8, 9]
IDS = [20, 30, 40, 50]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("likeness") / "model", seed=1)


@pytest.fixture(scope="module")
def score(folder: Path) -> Score:
    learner = TorchLearner({"p": str(folder)})

    async def scores(rows: Sequence[Row]) -> list[list[float]]:
        return learner.score(rows)

    return scores


def probe(model: Any, where: str = "server 0") -> Probe:
    """Return the answer that a server with this model would give to the check."""
    return Probe(
        where=where,
        version=3,
        prompt_ids=PROMPT,
        ids=IDS,
        logprobs=of_tokens(reference(model, PROMPT, IDS), IDS),
        tolerance=1e-3,
    )


async def test_other_weights_end_the_run_and_the_server_is_named(
    folder: Path, score: Score
) -> None:
    model = load_model(folder)
    other = with_weights(folder, perturbed(model, seed=3))
    message = r"server 1 reports version 3 of policy p, but .* of 4 sampled tokens differ from"
    with pytest.raises(EngineError, match=message):
        await check_probes([probe(model), probe(other, "server 1")], "p", 3, score)


async def test_log_probabilities_that_are_no_numbers_do_not_pass(
    folder: Path, score: Score
) -> None:
    wrong = msgspec.structs.replace(probe(load_model(folder)), logprobs=[float("nan")] * 4)
    with pytest.raises(EngineError, match="differ from the learner's by nan"):
        await check_probes([wrong], "p", 3, score)


async def test_an_answer_without_tokens_does_not_pass(folder: Path, score: Score) -> None:
    fine = probe(load_model(folder))
    empty = msgspec.structs.replace(fine, where="server 1", ids=[], logprobs=[])
    with pytest.raises(EngineError) as caught:
        await check_probes([fine, empty], "p", 3, score)
    assert str(caught.value) == (
        "weight sync unchecked: server 1 answered a prompt of 5 tokens with no tokens after the "
        "update of policy p to version 3, so its weights cannot be compared with the learner's. "
        "Training stopped; the last checkpoint is intact"
    )
