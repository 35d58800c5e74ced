"""The interface of teachers that compute log-probabilities, and what their kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from lightspan.algorithms.protocol import TrainerContext
from lightspan.errors import ConfigError
from lightspan.lightning.rows import Row
from lightspan_torch.engine.tokenizer import TransformersTokenizer

if TYPE_CHECKING:
    from lightspan_torch.learner.token_losses import FrozenStates

_S = TypeVar("_S")


class TeacherScores(NamedTuple):
    """What a teacher says about the trained tokens of rows."""

    logprobs: list[list[float]]
    """For each row, log q of its trained tokens, and 0 for other tokens."""
    states: FrozenStates | None = None
    """From which q of all tokens is computed; None if only that of the rows' tokens is known."""


class Scorer(ABC, Generic[_S]):
    """Computes the log-probabilities of a teacher.

    Args:
        settings: the teacher's settings.
        students: folders or hub names of the students.
        max_length: maximum tokens of a call of a student; None for the student's context.
    """

    def __init__(self, settings: _S, students: Sequence[str], max_length: int | None) -> None:
        self._settings = settings
        self._students = students
        self._max_length = max_length

    @abstractmethod
    def describe(self) -> str:
        """Return a line about the teacher."""

    @abstractmethod
    def check(self) -> None:
        """Check that the teacher has the students' tokens, and reads their longest calls.

        Raises:
            ConfigError: the tokenizers differ, or the teacher's context is shorter than a call.
            EngineError: a server does not answer.
            ModelError: a tokenizer cannot be loaded.
        """

    @abstractmethod
    async def score(self, trainer: TrainerContext, rows: Sequence[Row]) -> TeacherScores:
        """Compute log q of the rows' trained tokens."""

    def _check_context(self, student: TransformersTokenizer, context: int) -> None:
        """Raise `ConfigError` if a call of the student may be longer than the teacher's context.

        Args:
            student: the student's tokenizer.
            context: maximum tokens that the teacher reads.
        """
        longest = min(self._max_length or student.context_length, student.context_length)
        if longest > context:
            raise ConfigError(
                f"the teacher {self._settings} reads at most {context:,} tokens, and a call of the "
                f"student may have {longest:,}: give Distill(max_length={context}), which leaves "
                "longer calls out, or a teacher with a longer context"
            )
