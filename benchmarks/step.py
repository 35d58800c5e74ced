"""CPU-seconds of one training step, rollouts included, compared with TRL's GRPO.

Both have the same model (random, with the layers of SmolLM2-135M), the same prompts (groups of 8;
125 tokens, of which the first 40 are common to all), as many sampled tokens, one optimiser step
over the whole batch, GRPO's group statistics without a reference model, AdamW and full weights.
Rewards are random numbers, because their values do not affect the cost.

Ours is what a training does between two versions of the weights: the embedded engine samples,
token records become episodes and rows, the learner updates, the new weights are published to the
engine. App, HTTP and store are left out, since TRL's loop has none. TRL generates with
transformers' `generate`, and in a second run with transformers' continuous batching; the cheaper
one is compared. Its gradient checkpointing is off, which costs less CPU, and it takes 16 sequences
a pass. CPU-seconds are those of the whole process during a step, with one thread of torch each; the
first step warms up, and the best of the others counts. Exit status 1 if ours takes more than half.

Run: python benchmarks/step.py [--groups 4] [--answer 8] [--steps 1] [--json PATH]
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from _peers import run_peer
from _report import Figure, finish, options_of
from _workload import pretrained_shape

from lightspan import LightningRL
from lightspan.lightning.episode import Episode, build_episode
from lightspan.protocols.engine import GenerationRequest
from lightspan.protocols.learner import Optimizer, PolicyLoss
from lightspan.schema.records import Attempt, AttemptStatus, Mode, Outcome, Rollout
from lightspan.schema.reward import Reward
from lightspan.schema.token_records import Sampling, TokenRecord
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.learner.torch import TorchLearner

PEER: Final = "trl-1.16.0"
POLICY: Final = "policy"
GROUP: Final = 8
PROMPT, COMMON = 125, 40
TEMPERATURE: Final = 1.0
LEARNING_RATE: Final = 1e-5
FASTER: Final = 2.0


# --- the workload -----------------------------------------------------------------------------
def make_prompts(groups: int, vocabulary: int) -> list[list[int]]:
    """Return the prompt ids of each group."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(count)]

    common = ids(COMMON)
    return [common + ids(PROMPT - COMMON) for _ in range(groups)]


def make_model(folder: Path) -> int:
    """Write the model, and a tokenizer with a word `tN` for each id N.

    Return the size of the vocabulary.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = pretrained_shape()
    model.save_pretrained(folder)
    size = int(model.config.vocab_size)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, "t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t0"
    )
    tokenizer.save_pretrained(folder)
    return size


# --- ours -------------------------------------------------------------------------------------
async def our_steps(
    model: Path, prompts: Sequence[Sequence[int]], answer: int, steps: int
) -> list[dict[str, float]]:
    """Return CPU seconds, sampled tokens and sequences of each step, the warm-up step included."""
    engine = TransformersEngine({POLICY: str(model)}, seed=0)
    learner = TorchLearner({POLICY: str(model)}, optimizer=Optimizer(learning_rate=LEARNING_RATE))
    algorithm = LightningRL(str(model), group_size=GROUP, learning_rate=LEARNING_RATE)
    rewards = random.Random(1)
    measured = []
    await engine.start()
    try:
        await learner.publish(engine, {POLICY: 1})
        for step in range(1, steps + 1):
            start = time.process_time()
            episodes = await asyncio.gather(
                *(
                    _rollout(engine, f"{step}-{group}", member, prompt, answer, rewards.random())
                    for group, prompt in enumerate(prompts)
                    for member in range(GROUP)
                )
            )
            rows = algorithm.build(episodes).rows
            await asyncio.to_thread(learner.update, rows, PolicyLoss())
            await learner.publish(engine, {POLICY: step + 1})
            measured.append(
                {
                    "cpu_s": time.process_time() - start,
                    "tokens": float(sum(sum(row.mask) for row in rows)),
                    "sequences": float(len(episodes)),
                }
            )
    finally:
        await engine.close()
    return measured


async def _rollout(
    engine: TransformersEngine,
    group: str,
    member: int,
    prompt: Sequence[int],
    answer: int,
    reward: float,
) -> Episode:
    """Sample one answer, and return it as an episode with `reward`, as a store would."""
    name = f"{group}-{member}"
    sampling = Sampling(max_tokens=answer, temperature=TEMPERATURE)
    request = GenerationRequest(
        request_id=name, policy=POLICY, prompt_ids=list(prompt), sampling=sampling
    )
    chunks = [chunk async for chunk in engine.generate(request, stream=False)]
    ids = [token for chunk in chunks for token in chunk.ids]
    record = TokenRecord.create(
        prompt_ids=list(prompt),
        response_ids=ids,
        logprobs=[value for chunk in chunks for value in chunk.logprobs],
        versions=[(chunk.version, len(chunk.ids)) for chunk in chunks],
        attempt_id=name,
        call_id="call",
        choice=0,
        policy=POLICY,
        agent_path="app",
        sequence_start=1,
        sequence_end=2,
        sampling=sampling,
    )
    attempt = Attempt(
        attempt_id=name,
        rollout_id=name,
        number=1,
        epoch=1,
        status=AttemptStatus.SUCCEEDED,
        outcome=Outcome.OK,
        reward=Reward(reward),
    )
    rollout = Rollout(rollout_id=name, task=None, task_id=group, group_id=group, mode=Mode.TRAIN)
    return build_episode(attempt, rollout, [], [record])


# --- both -------------------------------------------------------------------------------------
def best(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the cheapest step; the first step is the warm-up and does not count."""
    return min(steps[1:], key=lambda step: step["cpu_s"])


def their_steps(
    model: Path, prompts: Sequence[Sequence[int]], answer: int, steps: int, *options: str
) -> list[dict[str, float]]:
    """Return the same figures as `our_steps` of TRL, in its own environment."""
    texts = model / "prompts.json"
    texts.write_text(json.dumps([" ".join(f"t{id_}" for id_ in prompt) for prompt in prompts]))
    given = ("--model", str(model), "--prompts", str(texts), "--answer", str(answer))
    also = ("--steps", str(steps), "--learning-rate", str(LEARNING_RATE), "--group", str(GROUP))
    found: list[dict[str, float]] = run_peer(
        PEER, "peer_step.py", *given, *also, *options, timeout_s=3_600.0
    )
    return found


def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--groups", type=int, default=4, help="prompts, 8 rollouts each (4)")
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer (8)")
    parser.add_argument("--steps", type=int, default=1, help="measured steps, one more before (1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        prompts = make_prompts(options.groups, make_model(model))
        counts = (options.answer, options.steps + 1)
        theirs = {
            "generate": best(their_steps(model, prompts, *counts)),
            "continuous batching": best(their_steps(model, prompts, *counts, "--batching")),
        }
        ours = best(asyncio.run(our_steps(model, prompts, *counts)))
    way, peer = min(theirs.items(), key=lambda item: item[1]["cpu_s"])
    _check_same_work(ours, peer)
    what = f"{options.groups * GROUP} rollouts of {options.groups} prompts, {options.answer} tokens"
    others = ", ".join(f"{name} {found['cpu_s']:.1f}" for name, found in theirs.items())
    figure = Figure(
        what=f"a step: {what}",
        unit="CPU-s",
        ours=ours["cpu_s"],
        peer=f"{PEER}, {way}",
        theirs=peer["cpu_s"],
        at_least=FASTER,
        note=f"({others})",
    )
    return finish([figure], options.json)


def _check_same_work(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise `SystemExit` if tokens or sequences of both sides differ by more than 2 %.

    Small differences are normal: about one answer in 6,000 ends early.
    """
    for what in ("tokens", "sequences"):
        if abs(ours[what] - theirs[what]) > 0.02 * ours[what]:
            raise SystemExit(f"not the same work: {what} {ours[what]} and {theirs[what]}")


if __name__ == "__main__":
    sys.exit(main())
