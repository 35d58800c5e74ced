"""A teacher in this process: a frozen model, computed as the learner computes the student."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch

from lightspan.algorithms.protocol import TrainerContext
from lightspan.errors import ModelError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import LoRA
from lightspan_torch.distill.same_tokens import check_vocabularies
from lightspan_torch.distill.scorer import Scorer, TeacherScores
from lightspan_torch.distill.teachers import TeacherModel
from lightspan_torch.engine.parameter_count import count_parameters
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer
from lightspan_torch.engine.weights import load_model, without_bars
from lightspan_torch.learner.policy_model import ADAPTER_CONFIG, default_dtype, quiet_peft
from lightspan_torch.learner.token_losses import FrozenStates
from lightspan_torch.learner.torch import TorchLearner

NAME: Final = "teacher"
GIB: Final = 2**30


class LocalTeacher(Scorer[TeacherModel]):
    """Computes the log-probabilities of a teacher that is loaded into this process (`Scorer`)."""

    _learner: TorchLearner | None = None
    """The loaded teacher; None before the first call of `score`."""

    def describe(self) -> str:
        """Return a line about the teacher, with the memory that its weights need."""
        teacher = self._settings
        try:
            count = count_parameters(_base(teacher.model))
        except ModelError as error:
            return f"teacher {teacher}: its size is unknown ({error})"
        dtype = self._dtype(teacher.device or "cpu")
        kind = str(dtype).removeprefix("torch.")
        is_open = teacher.dtype is None and teacher.device is None
        return (
            f"teacher {teacher}: {count / 1e6:,.3g} M parameters, beside the student's: "
            f"{count * dtype.itemsize / GIB:.2f} GiB as {kind}"
            f"{', half of it on a GPU' if is_open else ''}"
        )

    def check(self) -> None:
        """Check that the teacher has the student's tokens, and is long enough. Loads no weights.

        Raises:
            ConfigError: the tokenizers differ, or the teacher's context is shorter than a call.
            ModelError: a tokenizer cannot be loaded.
        """
        teacher = self._tokenizer()
        for name in self._students:
            student = load_tokenizer(name)
            names = (name, self._settings.model)
            check_vocabularies(student.tokenizer, teacher.tokenizer, names)
            self._check_context(student, teacher.context_length)

    async def score(self, trainer: TrainerContext, rows: Sequence[Row]) -> TeacherScores:
        """Compute log q of the rows' trained tokens, and the states from which q is computed.

        The teacher's distribution has the temperature and the grammar of each token.

        Raises:
            ConfigError, ModelError: as `check`, at the first call.
            ModelError: a log-probability is NaN.
            OutOfMemoryError: the teacher does not fit into memory.
        """
        if self._learner is None:
            self.check()
            self._learner = await trainer.learn(partial(self._load, trainer.learner.state()))
        own = [replace(row, policy=NAME, value_targets=()) for row in rows]
        scores = await trainer.learn(partial(self._learner.score_trained, own))
        if any(map(math.isnan, chain.from_iterable(scores.logprobs))):
            raise ModelError(
                f"the teacher {self._settings} gives NaN as the log-probability of a token, so "
                "nothing was trained in this step: its weights are damaged, or too large for their "
                'data type; give TeacherModel(dtype="float32")'
            )
        if not scores.states:
            return TeacherScores(scores.logprobs)
        states = FrozenStates(scores.states, self._learner.logits_of(NAME))
        return TeacherScores(scores.logprobs, states)

    def _load(self, learner: dict[str, Any]) -> TorchLearner:
        device = self._settings.device or str(learner.get("device", "cpu"))
        source = self._settings.model
        with ExitStack() as stack:
            if _base(source) != source:
                scratch = tempfile.TemporaryDirectory(prefix="lightspan-teacher-")
                source = _merged(source, Path(stack.enter_context(scratch)))
            return TorchLearner(
                {NAME: source},
                device=device,
                dtype=self._dtype(device),
                token_budget=self._settings.token_budget,
                tokenizers={NAME: self._tokenizer()},
            )

    def _tokenizer(self) -> TransformersTokenizer:
        return load_tokenizer(_base(self._settings.model))

    def _dtype(self, device: str) -> torch.dtype:
        name = self._settings.dtype
        if name is not None:
            return getattr(torch, name)  # type: ignore[no-any-return]
        return default_dtype(device, LoRA())  # as weights under adapters, which are frozen too


def _base(model: str) -> str:
    """Return the base model of a folder with a LoRA adapter; `model` itself if it is none."""
    path = Path(model) / ADAPTER_CONFIG
    if not path.is_file():
        return model
    try:
        return str(json.loads(path.read_bytes())["base_model_name_or_path"])
    except (ValueError, KeyError) as error:
        raise ModelError(f"{path} does not name its base model: {error!r}") from error


def _merged(adapter: str, folder: Path) -> str:
    """Save the model with a merged LoRA adapter in `folder`, and return the folder.

    Raises:
        ModelError: the adapter cannot be read.
    """
    from peft import PeftModel

    base = load_model(_base(adapter))
    try:
        with quiet_peft(), without_bars():
            merged: Any = PeftModel.from_pretrained(base, adapter).merge_and_unload()
            merged.save_pretrained(folder)
    except Exception as error:  # whatever peft raises
        raise ModelError(f"cannot load the LoRA adapter in {adapter}: {error}") from error
    return str(folder)
