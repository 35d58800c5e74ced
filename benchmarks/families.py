"""Tiny random models of every family through engine, learner, LoRA, export and reload.

Each model of `lightspan_testing.families` is saved, and loaded as a user's folder. Its reference is
a plain forward pass of transformers with the attention `eager`, sequence by sequence. A cell is the
worst error of a log-probability, in nats, or the refusal:

- engine: tokens that the engine samples for requests with a common prefix, computed in pieces, with
  prompts of 40 to 67 tokens (windows are 16), and for turns that extend them.
- learner: tokens that the learner scores in rows with common prefixes, before and after a step with
  full weights, whose gradient norm and weights are compared too.
- LoRA: the same before and after a step with an adapter on all linear layers, or where that is
  refused, on some of them.
- adapter in the engine: tokens that the engine samples with that adapter, against the learner; with
  the adapter merged where it cannot be served otherwise.
- export: what `fit` leaves, loaded again by transformers: the whole model, the adapter, and the
  adapter merged.

Exit status 1 if a cell is worse than 1e-4, or failed without a refusal.

Run: python benchmarks/families.py [FAMILY …] [--json PATH]
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from _report import circumstances, options_of

from lightspan.errors import ConfigError, LightspanError, UnsupportedError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import LoRA, Optimizer, SFTLoss
from lightspan_testing.engine_suite import Answer, generate, of_tokens, reference
from lightspan_testing.families import FAMILIES, WINDOW, make_family
from lightspan_testing.learner_suite import (
    distance,
    make_branching_rows,
    published,
    reference_loss,
    token_logprobs,
)
from lightspan_testing.tiny import TEXTS, tiny_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.learner.policy_model import load_adapter
from lightspan_torch.learner.torch import TorchLearner

CELLS: Final = ("engine", "learner", "LoRA", "adapter in the engine", "export")
LIMIT: Final = 1e-4
"""Maximum error of a log-probability in float32, in nats."""
NORM_LIMIT: Final = 1e-3
"""Maximum relative error of a gradient's norm."""
STEP: Final = Optimizer(learning_rate=1e-3, max_grad_norm=1e6)
ADAPTER: Final = LoRA(rank=4)
ADAPTER_STEP: Final = Optimizer(learning_rate=1e-2, max_grad_norm=1e6)
FEW_LAYERS: Final = (["q_proj", "v_proj"], ["q_b_proj", "kv_b_proj"], ["in_proj"])
"""Layers to adapt where not all linear ones can be: the first that the model has."""
MOVED: Final = 1e-3
"""Minimum change of some log-probability by a step."""
VERSIONS: Final = ("torch", "transformers", "peft")

Cell = dict[str, Any]


class Mismatch(Exception):
    """A cell that is neither exact nor refused."""


def check_family(name: str) -> dict[str, Cell] | None:
    """Return the cells of a family; None if the installed transformers lacks it."""
    tokenizer = tiny_tokenizer(tuple(TEXTS), 400, "", "qwen2")
    model = make_family(name, len(tokenizer))
    if model is None:
        return None
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "model"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            family = _Family(folder)
        except Exception as error:  # some versions cannot load what they saved
            return {name: {"failure": f"not loaded: {type(error).__name__}"} for name in CELLS}
        checks = (family.engine, family.learner, family.lora, family.served_adapter, family.export)
        return {name: _cell(check) for name, check in zip(CELLS, checks, strict=True)}


def _cell(check: Callable[[], Cell]) -> Cell:
    """Return what a check returns, its refusal, or its failure."""
    try:
        return check()
    except LightspanError as error:
        return {"refusal": clause(str(error))}
    except Mismatch as error:
        return {"failure": str(error)}
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}


def clause(message: str) -> str:
    """Return the first sentence of an error, without temporary folders."""
    message = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+/", "", message)
    return re.split(r"[.;] ", message, maxsplit=1)[0].rstrip(".")


class _Family:
    """The checks of one family; later ones use the learners of earlier ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plain = load_plain(folder)
        self._rows = make_branching_rows(self._plain, long=100)
        self._whole: TorchLearner | None = None
        self._adapter: TorchLearner | None = None

    def engine(self) -> Cell:
        engine = TransformersEngine({"writer": self._folder}, seed=0, batch_tokens=96)
        pairs = asyncio.run(_sample(engine))
        return {
            "error": max(
                _worst(answer.logprobs, of_tokens(expected, answer.ids))
                for prompt, answer in pairs
                for expected in [reference(self._plain, prompt, answer.ids)]
            )
        }

    def learner(self) -> Cell:
        learner = self._learner(None)
        before = self._score_error(learner, self._plain)
        expected = _gradient_norm(self._plain, self._rows)
        start = asyncio.run(published(learner))
        scores = learner.score(self._rows)
        metrics = learner.update(self._rows, SFTLoss())
        if not abs(metrics["grad_norm"] - expected) <= NORM_LIMIT * expected:
            raise Mismatch(f"the gradient's norm is {metrics['grad_norm']:.5g}, not {expected:.5g}")
        weights = asyncio.run(published(learner))
        if not distance(start, weights) > 0:
            raise Mismatch("a step does not change the weights")
        self._check_moved(learner, scores)
        after = self._score_error(learner, _with(self._folder, weights))
        self._whole = learner
        sharing = learner.state()["share_prefixes"]["writer"]
        return {"error": max(before, after), "note": sharing}

    def lora(self) -> Cell:
        note = ""
        try:
            learner = self._learner(ADAPTER)
        except ConfigError as error:
            note = clause(str(error))
            names = {name.rpartition(".")[2] for name, _ in self._plain.named_modules()}
            layers = next(layers for layers in FEW_LAYERS if names.issuperset(layers))
            learner = self._learner(LoRA(rank=ADAPTER.rank, target_modules=layers))
        before = self._score_error(learner, self._plain)
        scores = learner.score(self._rows)
        learner.update(self._rows, SFTLoss())
        self._check_moved(learner, scores)
        merged = _with(self._folder, asyncio.run(published(learner)))
        self._adapter = learner
        return {"error": max(before, self._score_error(learner, merged)), "note": note}

    def served_adapter(self) -> Cell:
        learner = self._adapter
        if learner is None:
            raise Mismatch("no adapter")
        merged = ""
        try:
            engine = TransformersEngine({"writer": self._folder}, lora={"writer": 4}, seed=0)
            pairs = asyncio.run(_sample(engine, learner))
        except UnsupportedError as error:
            merged = clause(str(error))
            engine = TransformersEngine({"writer": self._folder}, seed=0)
            pairs = asyncio.run(_sample(engine, learner))
        rows = [_row(prompt, answer) for prompt, answer in pairs]
        return {
            "error": max(
                _worst(answer.logprobs, scores[len(prompt) :])
                for (prompt, answer), scores in zip(pairs, learner.score(rows), strict=True)
            ),
            "note": merged,
        }

    def export(self) -> Cell:
        if self._whole is None or self._adapter is None:
            raise Mismatch("no trained model")
        exports = self._folder.parent
        self._whole.export("writer", exports / "whole")
        self._adapter.export("writer", exports / "adapter")
        self._adapter.export("writer", exports / "merged", merge=True)
        adapted = load_adapter(exports / "adapter")
        adapted.set_attn_implementation("eager")
        return {
            "error": max(
                self._score_error(self._whole, load_plain(exports / "whole")),
                self._score_error(self._adapter, load_plain(exports / "merged")),
                self._score_error(self._adapter, adapted),
            )
        }

    def _learner(self, lora: LoRA | None) -> TorchLearner:
        optimizer = STEP if lora is None else ADAPTER_STEP
        return TorchLearner({"writer": self._folder}, optimizer=optimizer, lora=lora)

    def _score_error(self, learner: TorchLearner, plain: Any) -> float:
        with torch.no_grad():
            expected = [token_logprobs(plain, row).tolist() for row in self._rows]
        scores = learner.score(self._rows)
        return max(_worst(*pair) for pair in zip(scores, expected, strict=True))

    def _check_moved(self, learner: TorchLearner, before: Sequence[Sequence[float]]) -> None:
        """Raise `Mismatch` unless an update has changed some log-probability."""
        after = learner.score(self._rows)
        if max(_worst(*pair) for pair in zip(before, after, strict=True)) < MOVED:
            raise Mismatch("a step does not change the log-probabilities")


def load_plain(folder: Path) -> Any:
    """Load a model as transformers does, with the attention that is exact in every family."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )


def _with(folder: Path, weights: Mapping[str, torch.Tensor]) -> Any:
    model: Any = load_plain(folder)
    model.load_state_dict(dict(weights))
    return model


def _gradient_norm(model: Any, rows: Sequence[Row]) -> float:
    model.zero_grad()
    reference_loss(model, rows, SFTLoss()).backward()  # type: ignore[no-untyped-call]
    squares = (p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    norm = float(sum(squares, torch.zeros(())).sqrt())
    model.zero_grad()
    return norm


async def _sample(
    engine: TransformersEngine, learner: TorchLearner | None = None
) -> list[tuple[list[int], Answer]]:
    """Sample with an engine, then close it; return the prompts with the answers.

    Args:
        engine: the engine.
        learner: learner whose adapter the engine gets first; None for the engine's own weights.
    """
    rng = random.Random(0)

    def some(count: int) -> list[int]:
        return [rng.randrange(5, 400) for _ in range(count)]

    stem = some(5 * WINDOW // 2)
    prompts = [stem + some(3 * n) for n in range(10)]
    await engine.start()
    try:
        if learner is not None:
            await learner.publish(engine, {"writer": 1})
        answers = await _answers(engine, prompts)
        turns = [
            [*prompt, *answer.ids, *some(7)]
            for prompt, answer in zip(prompts[::4], answers[::4], strict=True)
        ]
        answers += await _answers(engine, turns)
        return list(zip(prompts + turns, answers, strict=True))
    finally:
        await engine.close()


async def _answers(engine: TransformersEngine, prompts: Sequence[list[int]]) -> list[Answer]:
    calls = (
        generate(engine, prompt, request_id=str(number), max_tokens=12)
        for number, prompt in enumerate(prompts)
    )
    return await asyncio.gather(*calls)


def _row(prompt: list[int], answer: Answer) -> Row:
    """Return a row of an answer, for scoring."""
    ids = [*prompt, *answer.ids]
    zeros = [0.0] * len(ids)
    return Row(
        rollout_id="r",
        policy="writer",
        ids=ids,
        mask=[False] * len(prompt) + [True] * len(answer.ids),
        advantages=zeros,
        weights=zeros,
        logprobs=zeros,
        versions=[0] * len(ids),
        temperatures=[1.0] * len(ids),
    )


def _worst(values: Sequence[float], expected: Sequence[float]) -> float:
    differences = (abs(a - b) for a, b in zip(values, expected, strict=True))
    return max(d if d == d else float("inf") for d in differences)  # NaN is no small error


def is_wrong(cell: Cell) -> bool:
    """Return whether a cell is neither exact nor refused."""
    return "failure" in cell or not cell.get("error", 0.0) <= LIMIT


def text_of(cell: Cell) -> str:
    """Return a cell's text: the error, or why there is none."""
    if "error" in cell:
        return f"{cell['error']:.0e}"
    return f"refused: {cell['refusal']}" if "refusal" in cell else f"FAILED: {cell['failure']}"


def main() -> int:
    """Run the benchmark and print the cells; return 1 if one is wrong, else 0."""
    parser = options_of(__doc__ or "")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="families (all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.disable(logging.WARNING)
    families: dict[str, dict[str, Cell] | None] = {}
    wrong = []
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    run = {**circumstances(), "versions": versions}
    for name in options.families or FAMILIES:
        start = time.thread_time()
        families[name] = cells = check_family(name)
        print(f"{name} ({time.thread_time() - start:.1f} CPU-s)", flush=True)
        for kind, cell in (cells or {}).items():
            print(f"    {kind:22} {text_of(cell)}  {cell.get('note', '')}", flush=True)
            if is_wrong(cell):
                wrong.append(f"{name}, {kind}")
        if cells is None:
            print(f"    not in transformers {transformers.__version__}")
        if options.json:
            options.json.write_text(json.dumps({**run, "families": families}, indent=2) + "\n")
    for where in wrong:
        print(f"wrong: {where}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
