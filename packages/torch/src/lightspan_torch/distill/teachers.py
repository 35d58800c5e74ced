"""Settings of teachers. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from lightspan.algorithms.protocol import local_model
from lightspan.errors import ConfigError
from lightspan.schema.validation import (
    check_choice,
    check_device_name,
    check_number,
    check_url,
    check_whole,
)
from lightspan_torch.learner.config import DTYPES


class TeacherModel(msgspec.Struct, frozen=True, kw_only=True):
    """A teacher in the trainer's process: a model that is loaded once and never changed.

    Raises:
        ConfigError: a device or data type is unknown, or a value is out of range.
    """

    model: str
    """Folder, or name on the Hugging Face hub. The folder may hold a LoRA adapter, as a run with
    `lora=` writes it; it is merged into its base model."""
    device: str | None = None
    """Device, such as `"cuda:1"`; None for the learner's."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Data type of the weights; None for float32 on a CPU and bfloat16 on a GPU."""
    token_budget: int | None = None
    """Maximum number of tokens in one forward pass; None for a default."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not str(self.model):
            raise ConfigError(f"TeacherModel: model={self.model!r} must be a folder or a hub name")
        msgspec.structs.force_setattr(self, "model", local_model(self.model))
        if self.device is not None:
            check_device_name(self.device)
        if self.dtype is not None:
            check_choice("TeacherModel: dtype", self.dtype, DTYPES)
        check_whole("TeacherModel: token_budget", self.token_budget, 1, optional=True)

    def __str__(self) -> str:
        return self.model


class TeacherServer(msgspec.Struct, frozen=True, kw_only=True):
    """A teacher behind a vLLM server (its route `/v1/completions`, with `prompt_logprobs`).

    vLLM computes log-probabilities of a prompt at temperature 1 and without a grammar. So the
    student samples at temperature 1 too, and calls under a grammar are rejected.

    Raises:
        ConfigError: the URL is invalid, or a value is out of range.
    """

    url: str
    """Address of the server, such as `http://gpu-1:8000`, with or without `/v1`."""
    model: str = ""
    """Name under which the server serves the teacher; empty for its only model."""
    api_key_env: str = ""
    """Name of the environment variable that has the server's key; empty for no key."""
    concurrency: int = 16
    """Maximum number of requests at once."""
    timeout_s: float = 120.0
    """Seconds that a request may take."""
    patience_s: float = 300.0
    """Seconds for which a request that failed (no connection, a time-out, HTTP 408, 429 or 5xx) is
    repeated. Then the training ends with an error, and `resume=True` continues it."""

    def __post_init__(self) -> None:
        check_url(self.url, "TeacherServer: url")
        for name in ("model", "api_key_env"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"TeacherServer: {name}={getattr(self, name)!r} must be a text")
        check_whole("TeacherServer: concurrency", self.concurrency, 1)
        check_number("TeacherServer: timeout_s", self.timeout_s, above=0)
        check_number("TeacherServer: patience_s", self.patience_s, low=0)
        base = self.url.rstrip("/").removesuffix("/v1")
        msgspec.structs.force_setattr(self, "url", base)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request.

        Raises:
            ConfigError: the environment variable with the key is not set.
        """
        if not self.api_key_env:
            return {}
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ConfigError(
                f"TeacherServer: api_key_env={self.api_key_env!r}, and the environment has no such "
                "variable: set it to the server's key"
            )
        return {"Authorization": f"Bearer {key}"}

    def __str__(self) -> str:
        return f"{self.model or 'the model'} at {self.url}"


Teacher = TeacherModel | TeacherServer


def parse_teacher(teacher: Any) -> Teacher:
    """Return the settings of a teacher that was given as such, as a URL, a folder or a hub name.

    Raises:
        ConfigError: it is something else, or invalid.
    """
    if isinstance(teacher, TeacherModel | TeacherServer):
        return teacher
    if isinstance(teacher, str) and teacher.startswith(("http://", "https://")):
        return TeacherServer(url=teacher)
    if isinstance(teacher, str | Path) and str(teacher):
        return TeacherModel(model=str(teacher))
    raise ConfigError(
        f"Distill: teacher={teacher!r} must be a model (a folder or a hub name), the URL of a vLLM "
        "server, TeacherModel(…) or TeacherServer(…)"
    )
