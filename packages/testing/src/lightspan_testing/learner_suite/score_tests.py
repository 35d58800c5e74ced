"""Tests of log-probabilities."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.errors import DataError
from lightspan.lightning.rows import Constraint
from lightspan.protocols.learner import Learner
from lightspan_testing.learner_suite.base import LearnerTests
from lightspan_testing.learner_suite.rows import make_rows, random_row, token_logprobs
from lightspan_torch.engine.tokenizer import load_tokenizer


class ScoreTests(LearnerTests):
    """Test the log-probabilities that a learner computes."""

    def test_protocol(self, folder: Path) -> None:
        learner = self.make_learner({"writer": folder, "checker": folder})
        assert isinstance(learner, Learner)
        assert learner.policies() == ["writer", "checker"]
        assert learner.usage() == {"cpu_s": 0.0, "tokens": 0.0, "updates": 0.0}
        assert isinstance(learner.state(), dict)

    def test_score(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_rows(model)
        for which in ("policy", "base"):
            scores = learner.score(rows, which)
            for row, score in zip(rows, scores, strict=True):
                assert score[0] == 0.0
                with torch.no_grad():
                    assert score == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-5)

    def test_score_of_the_shortest_rows(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        one = replace(make_rows(model, 1)[0], ids=[7], mask=[False])
        one = replace(
            one, advantages=[0.0], weights=[0.0], logprobs=[0.0], versions=[0], temperatures=[1.0]
        )
        assert learner.score([one]) == [[0.0]]
        assert learner.score([]) == []

    def test_score_under_a_grammar(self, folder: Path, model: Any) -> None:
        """Tokens that a call's grammar excludes get no probability."""
        learner = self.make_learner({"writer": folder})
        if not learner.capabilities.trainable_grammar:
            pytest.skip("this learner does not train calls under a grammar")
        encode = load_tokenizer(folder).encode
        ids = encode("Say:a7")
        row = random_row(ids, random.Random(0), "ro-0", "writer")
        row = replace(row, constraints=(Constraint(len(ids) - 2, 2, 'start: "a" /[0-9]/'),))
        with torch.no_grad():
            scaled = model(torch.tensor([ids])).logits[0, -2] / row.temperatures[-1]
            expected = token_logprobs(model, row).tolist()[:-2]
        digits = scaled[[encode(digit)[0] for digit in "0123456789"]].log_softmax(-1)
        assert learner.score([row])[0] == pytest.approx(
            [*expected, 0.0, float(digits[7])], abs=1e-5
        )
        with pytest.raises(DataError, match="rollout ro-0"):
            learner.score([replace(row, ids=[*ids[:-1], ids[-2]])])
