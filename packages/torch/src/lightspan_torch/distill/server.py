"""A teacher behind a vLLM server, which scores prompts of token ids."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import compress
from typing import Any, Final

from lightspan.algorithms.protocol import TrainerContext
from lightspan.errors import ConfigError, EngineError, UnsupportedError
from lightspan.lightning.rows import Row
from lightspan_torch.distill.same_tokens import (
    check_ids,
    check_vocabularies,
    probe_texts,
)
from lightspan_torch.distill.scorer import Scorer, TeacherScores
from lightspan_torch.distill.teachers import TeacherServer
from lightspan_torch.engine.tokenizer import load_tokenizer

RETRY_BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds before a failed request is repeated; the last number counts for all later tries."""
_TEMPORARY: Final = frozenset({408, 429, 500, 502, 503, 504})
_ROUNDING: Final = 1e-3
"""Log-probabilities up to this number are taken as rounded."""
_MAX_REASON: Final = 300
"""Maximum characters of a server's text in an error message."""


class Unreachable(EngineError):
    """The server did not answer, or not for the moment; the request may be repeated."""


class Refused(EngineError):
    """The server refused a request, and would refuse it again."""


class ServerTeacher(Scorer[TeacherServer]):
    """Computes the log-probabilities of a teacher by requests to a vLLM server (`Scorer`)."""

    _model = ""
    """Name of the served model; empty before `check`."""
    _is_noted = False
    """Whether a note of this step says that the server does not answer."""

    def describe(self) -> str:
        """Return a line about the teacher."""
        return f"teacher {self._settings}: a server scores the student's tokens (at temperature 1)"

    def check(self) -> None:
        """Check that the server has one model with the student's tokens, and is long enough.

        Raises:
            ConfigError: the server has no such model or other tokens, its context is shorter than a
                call, or the key's environment variable is not set.
            EngineError: the server does not answer.
            ModelError: the student's tokenizer cannot be loaded.
        """
        models = self._request("/v1/models")
        entries = models.get("data") if isinstance(models, Mapping) else None
        served = {str(each["id"]): each for each in entries or () if "id" in each}
        name = self._settings.model or (next(iter(served)) if len(served) == 1 else "")
        if name not in served:
            problem = f"no model {name!r}" if name else f"{len(served)} models and none was chosen"
            raise ConfigError(
                f"the server at {self._settings.url} has {problem}: give TeacherServer(model=) "
                f"one of {', '.join(map(repr, served)) or 'its models'}"
            )
        first = load_tokenizer(self._students[0])
        for model in self._students:
            student = load_tokenizer(model)
            names = (self._students[0], model)
            check_vocabularies(first.tokenizer, student.tokenizer, names)
            context = served[name].get("max_model_len")
            if isinstance(context, int):  # vLLM samples one token after the prompt
                self._check_context(student, context - 1)
        self._compare(first.tokenizer, name)
        self._model = name

    def _compare(self, tokenizer: Any, model: str) -> None:
        """Compare the ids of texts.

        Raises:
            ConfigError: an id differs, or the server has no route `/tokenize`.
            EngineError: the server does not answer.
        """
        for text in probe_texts(tokenizer):
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            try:
                ids = self._request("/tokenize", body)["tokens"]
            except (Refused, KeyError, TypeError) as error:
                raise ConfigError(
                    f"the tokens of the teacher {self._settings} cannot be compared with the "
                    f"student's, because it does not tokenise texts (/tokenize: {error!r:.300}): "
                    "give the address of the vLLM server itself, not of a proxy without this route"
                ) from error
            check_ids(tokenizer, text, ids, str(self._settings))

    async def score(self, trainer: TrainerContext, rows: Sequence[Row]) -> TeacherScores:
        """Compute log q of the rows' trained tokens.

        Raises:
            ConfigError: as `check`, at the first call, or the server gives no log-probabilities of
                prompts.
            EngineError: the server refused a request, or did not answer for `patience_s`.
            UnsupportedError: a row has images, which the server would not get.
        """
        if any(row.images for row in rows):
            raise UnsupportedError(
                f"calls have images, which the teacher {self._settings} does not read: give "
                "Distill(teacher=) a model that takes images, not a server"
            )
        if not self._model:
            await asyncio.to_thread(self.check)
        self._is_noted = False
        with ThreadPoolExecutor(self._settings.concurrency, "lightspan-teacher") as pool:
            tasks = [asyncio.create_task(self._score(row, pool, trainer)) for row in rows]
            try:
                scores = await asyncio.gather(*tasks)
            finally:  # the others would go on asking a server that is away
                for task in tasks:
                    task.cancel()
        return TeacherScores(scores)

    async def _score(
        self, row: Row, pool: ThreadPoolExecutor, trainer: TrainerContext
    ) -> list[float]:
        # by the row's last trained token, because later tokens change nothing
        last = max(compress(range(len(row.mask)), row.mask), default=-1)
        ids = row.ids[: last + 1]
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 1,  # the most probable token, and the prompt's own
            "add_special_tokens": False,
        }
        send = partial(self._request, "/v1/completions", body)
        answer = await self._repeated(send, pool, trainer)
        entries = self._entries(answer, ids)
        return [
            float(entries[place]["logprob"]) if is_trained and place else 0.0
            for place, is_trained in enumerate(row.mask[: last + 1])
        ] + [0.0] * (len(row.ids) - last - 1)

    async def _repeated(self, send: Any, pool: ThreadPoolExecutor, trainer: TrainerContext) -> Any:
        """Send a request, and repeat it while the server is away, for `patience_s`."""
        loop, end, tries = asyncio.get_running_loop(), math.inf, 0
        while True:
            try:
                return await loop.run_in_executor(pool, send)
            except Unreachable as error:
                now = time.monotonic()
                if tries == 0:
                    end = now + self._settings.patience_s
                if now >= end:
                    raise EngineError(
                        f"{error}, for {self._settings.patience_s:g} s (TeacherServer(patience_s=))"
                        ": nothing was trained in this step; start the server again, and continue "
                        "with resume=True"
                    ) from error
                if not self._is_noted:
                    self._is_noted = True
                    trainer.note(f"{error}; trying again for {self._settings.patience_s:g} s")
                wait = RETRY_BACKOFF_S[min(tries, len(RETRY_BACKOFF_S) - 1)]
                await asyncio.sleep(min(wait, max(0.0, end - now)))
                tries += 1

    def _entries(self, answer: Any, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return for each id the server's entry with its log-probability; the first is empty.

        Raises:
            ConfigError: the answer has no log-probabilities of the prompt, but logits or nothing.
            EngineError: they are not those of `ids`.
        """
        url = self._settings.url
        try:
            choice = answer["choices"][0]
            values = choice.get("prompt_logprobs", answer.get("prompt_logprobs"))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise EngineError(f"the teacher at {url} sent no completion: {answer!r:.200}") from None
        if values is None:
            raise ConfigError(
                f"the server at {url} gives no log-probabilities of prompts (prompt_logprobs), "
                "which vLLM does: use a vLLM server, or a local teacher, TeacherModel(…)"
            )
        if len(values) != len(ids):
            raise EngineError(
                f"the teacher at {url} scored {len(values)} tokens of a prompt of {len(ids)}: it "
                "does not read token ids as they are"
            )
        entries: list[dict[str, Any]] = [{}]
        for token, by_id in zip(ids[1:], values[1:], strict=True):
            entry = dict((by_id or {}).get(str(token)) or {})
            logprob = entry.get("logprob")
            if not isinstance(logprob, int | float) or math.isnan(logprob):
                raise EngineError(
                    f"the teacher at {url} has no log-probability of token {token}: {by_id!r:.200}"
                )
            if logprob > _ROUNDING:
                raise ConfigError(
                    f"the teacher at {url} gives {logprob:g} as the log-probability of token "
                    f"{token}, which is above 0: it sends logits; start vLLM with "
                    "--logprobs-mode raw_logprobs, its default"
                )
            entries.append(entry)
        return entries

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, and return the decoded body of the response.

        Raises:
            Refused: the response has an error status that a repetition would not change.
            Unreachable: no connection, a time-out, a status that passes, or a body that is no JSON.
        """
        url = self._settings.url + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        for name, value in self._settings.headers.items():
            # a redirect must not send the key to another server
            request.add_unredirected_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=self._settings.timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(_MAX_REASON).decode("utf-8", "replace")
            message = f"the teacher at {url} answered HTTP {error.code}: {' '.join(text.split())}"
            if error.code in _TEMPORARY:
                raise Unreachable(message) from error
            raise Refused(message) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise Unreachable(f"the teacher at {url} does not answer ({reason})") from error
