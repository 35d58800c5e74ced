"""Conformance tests of token engines: subclass `EngineSuite` and implement `make_engine`.

    class TestMyEngine(EngineSuite):
        def make_engine(self, models):
            return MyEngine(models)

Results are compared with plain forward passes of the same tiny model (`lightspan_testing.tiny`).
Needs pytest, pytest-asyncio (`asyncio_mode = "auto"`), torch and transformers. No test depends on
time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightspan.errors import ContextOverflowError, EngineClosedError, LightspanError, NotFoundError
from lightspan.protocols.engine import GenerationRequest, LoRAWeights, TokenEngine
from lightspan.schema.token_records import FinishReason, Sampling
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model

CONTEXT = 256
UPDATES = 5
"""Number of updates to try at most, until an update takes effect during a call."""
TOLERANCE = 1e-5
"""Tolerance between log-probabilities of the engine and of a plain forward pass, both in
float32."""


@dataclass
class Answer:
    """All tokens of a generation, with their log-probabilities and versions."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    chunks: int = 0
    finish: FinishReason | None = None


async def generate(
    engine: TokenEngine,
    prompt: Sequence[int],
    *,
    policy: str = "writer",
    stream: bool = False,
    request_id: str = "r",
    started: asyncio.Semaphore | None = None,
    **sampling: Any,
) -> Answer:
    """Generate an answer to the end, and check each chunk and the order of the chunks.

    Args:
        started: semaphore to release at the first chunk of a stream; None for none.
        sampling: sampling parameters of the request.
    """
    request = GenerationRequest(
        request_id=request_id,
        policy=policy,
        prompt_ids=list(prompt),
        sampling=Sampling(**{"max_tokens": 16, **sampling}),
    )
    answer = Answer()
    async for chunk in engine.generate(request, stream=stream):
        assert answer.finish is None, "a chunk after the last"
        assert len(chunk.ids) == len(chunk.logprobs)
        if started is not None and stream and answer.chunks == 0:
            started.release()
        assert all(math.isfinite(value) and value <= 0 for value in chunk.logprobs)
        answer.ids += chunk.ids
        answer.logprobs += chunk.logprobs
        answer.versions += [chunk.version] * len(chunk.ids)
        answer.chunks += 1
        answer.finish = chunk.finish_reason
    assert answer.finish is not None
    return answer


@torch.no_grad()
def reference(
    model: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Return the log-probabilities of all tokens at each position of an answer.

    They are computed by one forward pass. The shape is [len(ids), vocabulary].
    """
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    distribution: Tensor = (logits / temperature).log_softmax(-1)
    return distribution


def of_tokens(distribution: Tensor, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token in `ids`.

    `distribution` has the log-probabilities of all tokens at each position.
    """
    return distribution.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def perturbed(model: Any, seed: int) -> dict[str, Tensor]:
    """Return the model's weights with random noise added, for `TokenEngine.update`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.03 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.named_parameters()
    }


def low_rank(model: Any, seed: int, *, rank: int = 4) -> LoRAWeights:
    """Return random LoRA weights for every linear layer except the output embeddings."""
    generator = torch.Generator().manual_seed(seed)
    layers = {
        name: (
            0.1 * torch.randn(rank, layer.in_features, generator=generator),
            0.1 * torch.randn(layer.out_features, rank, generator=generator),
        )
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings()
    }
    return LoRAWeights(rank=rank, scale=2.0, layers=layers)


def with_weights(model_folder: Path, weights: Mapping[str, Tensor]) -> Any:
    """Load the model in `model_folder`, and replace the weights that `weights` contains."""
    model = load_model(model_folder)
    model.load_state_dict(dict(weights), strict=False)
    return model


class EngineSuite:
    """Tests of a token engine; the module's docstring shows how to subclass it."""

    tolerance = TOLERANCE
    """Tolerance of log-probabilities; overridden for engines with other float types."""
    started = 6
    """Number of streams that have to begin before an update.

    Streams of an engine in another process continue meanwhile, and may end before all have begun.
    """
    tokens_in_flight = 120
    """Maximum tokens of each call that is running during an update."""

    def make_engine(self, models: Mapping[str, Path]) -> TokenEngine:
        """Return an unstarted engine that serves `models` (policy name → folder)."""
        raise NotImplementedError

    def other(self, folder: Path, model: Any, seed: int) -> tuple[Any, Any]:
        """Return random weights for an update, and a model that has these weights."""
        weights = perturbed(model, seed)
        return weights, with_weights(folder, weights)

    def wrong(self, model: Any) -> list[tuple[Any, str]]:
        """Return pairs: weights that do not fit the model, and a pattern of the expected error."""
        weights = perturbed(model, seed=9)
        name = next(iter(weights))
        partial = {key: value for key, value in weights.items() if key != name}
        return [
            ({**weights, "no.such": weights[name]}, r"no\.such"),
            (partial, name),
            ({**weights, name: weights[name][:-1]}, name),
            (low_rank(model, seed=9), "writer is served with whole weights but got LoRA"),
        ]

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_model(tmp_path_factory.mktemp("engine") / "model", seed=1, context=CONTEXT)

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, folder: Path) -> Any:
        torch.set_num_threads(1)
        return load_model(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def prompt(cls, folder: Path) -> list[int]:
        question = [{"role": "user", "content": "How many singers are there?"}]
        return load_tokenizer(folder).render(question)

    @asynccontextmanager
    async def running(self, **models: Path) -> AsyncIterator[TokenEngine]:
        engine = self.make_engine(models)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    @pytest.fixture
    async def engine(self, folder: Path) -> AsyncIterator[TokenEngine]:
        """Return a running engine of one policy, `writer`."""
        async with self.running(writer=folder) as engine:
            yield engine

    def expect(
        self,
        answer: Answer,
        model: Any,
        prompt: list[int],
        version: int = 0,
        *,
        temperature: float = 1.0,
    ) -> None:
        """Check that all tokens of `answer` have the given version and the right log-probabilities.

        The right log-probability is the one that `model` computes.
        """
        assert answer.versions == [version] * len(answer.ids)
        expected = of_tokens(reference(model, prompt, answer.ids, temperature), answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=self.tolerance)

    async def test_policies_and_tokenizers(self, folder: Path) -> None:
        async with self.running(writer=folder, checker=folder) as engine:
            assert isinstance(engine, TokenEngine)
            assert engine.policies() == {"writer": 0, "checker": 0}
            tokenizer = engine.tokenizer("writer")
            assert tokenizer.context_length == CONTEXT
            assert tokenizer.decode(tokenizer.encode("SELECT 1")) == "SELECT 1"

    async def test_an_unknown_policy_is_named(self, engine: TokenEngine, model: Any) -> None:
        with pytest.raises(NotFoundError, match="critic"):
            engine.tokenizer("critic")
        with pytest.raises(NotFoundError, match="critic"):
            await generate(engine, [5, 6], policy="critic")
        with pytest.raises(NotFoundError, match="critic"):
            await engine.update("critic", dict(model.named_parameters()), 1)

    async def test_top_p_and_top_k(
        self, engine: TokenEngine, model: Any, prompt: list[int]
    ) -> None:
        if not (engine.capabilities.top_p and engine.capabilities.top_k):
            pytest.skip("the engine declares no truncation")
        nucleus, top = await asyncio.gather(
            generate(engine, prompt, top_p=0.6, request_id="p"),
            generate(engine, prompt, top_k=3, request_id="k"),
        )
        for answer, mask in ((nucleus, _nucleus), (top, _top)):
            distribution = reference(model, prompt, answer.ids)
            distribution = distribution.masked_fill(~mask(distribution), -math.inf)
            expected = of_tokens(distribution.log_softmax(-1), answer.ids)
            assert answer.logprobs == pytest.approx(expected, abs=10 * self.tolerance)

    async def test_greedy_takes_the_largest(
        self, engine: TokenEngine, model: Any, prompt: list[int]
    ) -> None:
        """Greedy generation yields the most likely tokens, streamed or not."""
        whole = await generate(engine, prompt, temperature=0.0)
        stream = await generate(engine, prompt, temperature=0.0, stream=True)
        assert whole.ids == stream.ids
        assert stream.chunks > 1
        assert whole.ids == reference(model, prompt, whole.ids).argmax(-1).tolist()
        assert whole.logprobs == pytest.approx([0.0] * len(whole.ids), abs=self.tolerance)

    @pytest.mark.parametrize("length", [1, 7])
    async def test_length(self, engine: TokenEngine, prompt: list[int], length: int) -> None:
        answer = await generate(engine, prompt, max_tokens=length, temperature=0.0)
        assert (len(answer.ids), answer.finish) == (length, FinishReason.LENGTH)

    async def test_the_turn_ends_with_its_token(self, engine: TokenEngine, model: Any) -> None:
        (end,) = engine.tokenizer("writer").eos_ids
        answer = await generate(engine, _leads_to(model, end), temperature=0.0)
        assert (answer.ids, answer.finish) == ([end], FinishReason.STOP)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_stop_strings_end_the_ids_at_the_completing_token(
        self, engine: TokenEngine, prompt: list[int], stream: bool
    ) -> None:
        if not engine.capabilities.stop_strings:
            pytest.skip("the engine declares no stop strings")
        tokenizer = engine.tokenizer("writer")
        free = await generate(engine, prompt, temperature=0.0, max_tokens=40)
        texts = [tokenizer.token_bytes(token).decode(errors="replace") for token in free.ids]
        stop = _across_two_tokens(texts)
        answer = await generate(
            engine, prompt, temperature=0.0, max_tokens=40, stop=("zq", stop), stream=stream
        )
        texts = [tokenizer.decode(free.ids[: n + 1]) for n in range(len(free.ids))]
        first = next(n for n, text in enumerate(texts) if stop in text)
        assert answer.ids == free.ids[: first + 1]
        assert answer.finish is FinishReason.STOP

    async def test_a_prompt_beyond_the_context(self, engine: TokenEngine) -> None:
        with pytest.raises(ContextOverflowError, match=str(CONTEXT)):
            await generate(engine, [5] * CONTEXT)
        last = await generate(engine, [5] * (CONTEXT - 1), max_tokens=50)
        assert len(last.ids) == 1
        some = await generate(engine, [5] * (CONTEXT - 4), max_tokens=50, temperature=0.0)
        assert len(some.ids) == 4 or some.finish is FinishReason.STOP

    async def test_logprobs_are_of_the_distribution_sampled_from(
        self, engine: TokenEngine, model: Any, prompt: list[int]
    ) -> None:
        """Log-probabilities are exact in many concurrent calls.

        Each call has its own prompt, temperature and length.
        """
        prompts = [prompt + [5 + number] * (number % 9) for number in range(64)]
        calls = [
            generate(
                engine,
                each,
                temperature=0.5 + number / 64,
                stream=number % 3 == 0,
                max_tokens=4 + number % 20,
                request_id=f"r{number}",
            )
            for number, each in enumerate(prompts)
        ]
        for number, answer in enumerate(await asyncio.gather(*calls)):
            self.expect(answer, model, prompts[number], temperature=0.5 + number / 64)

    async def test_an_update_splits_the_versions_exactly(
        self, engine: TokenEngine, folder: Path, model: Any, prompt: list[int]
    ) -> None:
        """Every token of a call has the version of the weights that sampled it.

        The update has to happen while calls run. If it does not, the test makes another update.
        That can happen with an engine in another process.
        """
        models = {0: model}
        for version in range(3, 3 + UPDATES):
            weights, models[version] = self.other(folder, model, seed=version)
            answers = await self._update_in_flight(engine, prompt, weights, version)
            for answer in answers:
                assert answer.versions == sorted(answer.versions)
                expected = _by_version(models, prompt, answer, temperature=0.8)
                assert answer.logprobs == pytest.approx(expected, abs=self.tolerance)
            if any(len(set(answer.versions)) == 2 for answer in answers):
                return
        pytest.fail(f"none of {UPDATES} updates cut a call")

    async def _update_in_flight(
        self, engine: TokenEngine, prompt: list[int], weights: Any, version: int
    ) -> list[Answer]:
        """Update the weights while calls are running.

        Returns:
            The answer of a call that began after the update, followed by the answers of the running
                calls.
        """
        started = asyncio.Semaphore(0)
        tasks = [
            asyncio.create_task(
                generate(
                    engine,
                    prompt,
                    stream=n % 2 == 0,
                    request_id=f"r{n}",
                    started=started,
                    max_tokens=self.tokens_in_flight,
                    temperature=0.8,
                )
            )
            for n in range(12)
        ]
        for _ in range(self.started):
            await started.acquire()
        await engine.update("writer", weights, version)
        assert engine.policies() == {"writer": version}
        after = await generate(engine, prompt, temperature=0.8)
        assert after.versions == [version] * len(after.ids)
        return [after, *await asyncio.gather(*tasks)]

    async def test_no_prefix_outlives_an_update(
        self, engine: TokenEngine, folder: Path, model: Any
    ) -> None:
        """The engine does not reuse what it has cached of a prompt before an update of the weights.

        The prompt is long enough to fill whole blocks of a KV cache.
        """
        prompt = [5 + number % 300 for number in range(200)]
        weights, moved = self.other(folder, model, seed=11)
        self.expect(await generate(engine, prompt), model, prompt)
        await engine.update("writer", weights, 1)
        self.expect(await generate(engine, prompt), moved, prompt, 1)

    async def test_each_policy_has_weights_of_its_own(
        self, folder: Path, model: Any, prompt: list[int]
    ) -> None:
        weights, moved = self.other(folder, model, seed=8)
        async with self.running(writer=folder, checker=folder) as engine:
            await engine.update("writer", weights, 1)
            assert engine.policies() == {"writer": 1, "checker": 0}
            self.expect(await generate(engine, prompt, policy="checker"), model, prompt)
            self.expect(await generate(engine, prompt), moved, prompt, 1)

    async def test_a_failed_update_changes_nothing(
        self, engine: TokenEngine, model: Any, prompt: list[int]
    ) -> None:
        for wrong, message in self.wrong(model):
            with pytest.raises(LightspanError, match=message):
                await engine.update("writer", wrong, 2)
        assert engine.policies() == {"writer": 0}
        self.expect(await generate(engine, prompt), model, prompt)

    async def test_a_closed_iterator_cancels_only_itself(
        self, engine: TokenEngine, model: Any, prompt: list[int]
    ) -> None:
        other = asyncio.create_task(generate(engine, prompt, request_id="other"))
        request = GenerationRequest(
            request_id="gone", policy="writer", prompt_ids=prompt, sampling=Sampling(max_tokens=200)
        )
        async with aclosing(engine.generate(request, stream=True)) as chunks:  # type: ignore[type-var]
            await anext(chunks)
        task = asyncio.create_task(generate(engine, prompt, max_tokens=200, request_id="t"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        self.expect(await other, model, prompt)
        self.expect(await generate(engine, prompt, request_id="gone"), model, prompt)

    async def test_closing_ends_what_is_in_flight(
        self, engine: TokenEngine, prompt: list[int]
    ) -> None:
        tasks = [
            asyncio.create_task(generate(engine, prompt, max_tokens=200, request_id=str(n)))
            for n in range(4)
        ]
        await asyncio.sleep(0)
        await engine.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineClosedError)
        with pytest.raises(EngineClosedError):
            await generate(engine, prompt)
        await engine.close()

    async def test_usage_counts(self, engine: TokenEngine, prompt: list[int]) -> None:
        assert engine.usage() == {"tokens": 0, "requests": 0, "cpu_s": 0.0}
        first = await generate(engine, prompt, max_tokens=5)
        second = await generate(engine, prompt, max_tokens=5, stream=True)
        usage = engine.usage()
        assert usage["tokens"] == len(first.ids) + len(second.ids)
        assert usage["requests"] == 2
        assert usage["cpu_s"] >= 0


def _by_version(
    models: Mapping[int, Any], prompt: list[int], answer: Answer, temperature: float
) -> list[float]:
    """Return the log-probability of each token of an answer, from the right version of the weights.

    It is the version that sampled the token. `models` is version → model.
    """
    by_version = {
        version: of_tokens(reference(model, prompt, answer.ids, temperature), answer.ids)
        for version, model in models.items()
    }
    return [by_version[version][place] for place, version in enumerate(answer.versions)]


def _nucleus(distribution: Tensor) -> Tensor:
    """Return which tokens remain when sampling with `top_p=0.6`, as a mask."""
    ordered, places = distribution.exp().sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(before, dtype=torch.bool).scatter(1, places, before < 0.6)


def _top(distribution: Tensor) -> Tensor:
    """Return which tokens remain when sampling with `top_k=3`, as a mask."""
    return distribution >= distribution.topk(3).values[:, -1:]


def _leads_to(model: Any, token: int) -> list[int]:
    """Return a prompt after which `token` is the model's most likely next token."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        ids = torch.randint(5, 300, (1, 6), generator=generator)
        ids[0, -1] = token
        with torch.no_grad():
            if int(model(ids).logits[0, -1].argmax()) == token:
                return [int(value) for value in ids[0]]
    raise AssertionError("no such prompt")


def _across_two_tokens(texts: Sequence[str]) -> str:
    """Return a text of two characters that begins in one token and ends in the next."""
    for place in range(3, len(texts)):
        stop = texts[place - 1][-1:] + texts[place][:1]
        if len(stop) == 2 and stop.isascii() and "\ufffd" not in stop:
            return stop
    raise AssertionError("no two neighbouring tokens of plain text")
