"""Conformance tests of learners: subclass `LearnerSuite` and implement `make_learner`.

    class TestMyLearner(LearnerSuite):
        def make_learner(self, models, **options):
            return MyLearner(models, **options)

Gradients are tested by their updates: the published weights are compared with those of a simple
training loop that takes the same step. Needs pytest, pytest-asyncio (`asyncio_mode = "auto"`),
torch and transformers. No test depends on time.

The tests are in `score_tests`, `loss_tests`, `update_tests`, `state_tests`, and `value_tests` (for
critics). `image_tests` has `ImageLearnerSuite`, for learners of vision models. `reference` has
the expected results, `rows` the data, and `base` common parts.
"""

from __future__ import annotations

from lightspan_testing.learner_suite.base import BOTH_CLIPS
from lightspan_testing.learner_suite.image_tests import ImageLearnerSuite
from lightspan_testing.learner_suite.loss_tests import LossTests
from lightspan_testing.learner_suite.reference import (
    WeightSink,
    distance,
    published,
    reference_loss,
)
from lightspan_testing.learner_suite.rows import (
    make_branching_rows,
    make_call_rows,
    make_image_rows,
    make_rows,
    token_logprobs,
)
from lightspan_testing.learner_suite.score_tests import ScoreTests
from lightspan_testing.learner_suite.state_tests import StateTests
from lightspan_testing.learner_suite.update_tests import UpdateTests
from lightspan_testing.learner_suite.value_tests import ValueTests


class LearnerSuite(ScoreTests, LossTests, UpdateTests, StateTests, ValueTests):
    """Tests of the protocol `lightspan.protocols.learner.Learner`.

    The module's docstring shows how to subclass it.
    """


__all__ = [
    "BOTH_CLIPS",
    "ImageLearnerSuite",
    "LearnerSuite",
    "WeightSink",
    "distance",
    "make_branching_rows",
    "make_call_rows",
    "make_image_rows",
    "make_rows",
    "published",
    "reference_loss",
    "token_logprobs",
]
