"""Images in the embedded engine and learner: CPU seconds of a group over one image, and memory.

    python benchmarks/vision.py --json benchmarks/results/vision.json

The model is a random Qwen2.5-VL of 10 M parameters, half of them its vision part. An image of 224
by 224 pixels has 64 placeholders, and a question of about 40 tokens follows it. A group of eight
samples answers of 32 tokens.

- engine: the group asks about one image. It is compared with the same engine asked about eight
  images of equal size, and with transformers' `generate` for the same eight prompts, which encodes
  the image of each.
- learner: an update on the eight rows of the group, the vision part frozen. It is compared with a
  loop over transformers' model with the same loss, which encodes the image of each row.
- step: a whole step of GRPO over four images, a group of eight for each, without app and HTTP,
  compared with TRL 1.16's `GRPOTrainer`.
- memory: growth of the process during the first update, which encodes the image. It is compared
  with an update on eight rows of text of equal length, in the same places.

Each measurement has a process of its own. CPU time is that of the process, of the best of three
rounds; an engine's is divided by the tokens that it sampled. Exit status 1 if a group over one
image costs more than half of one over eight images or more than transformers' `generate`, or an
update on its rows more than half of the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from _peers import run_peer
from _report import Figure, finish, options_of

from lightspan.lightning.rows import Response, Row
from lightspan.protocols.engine import GenerationRequest, ImageTokenizer
from lightspan.protocols.learner import Optimizer, PolicyLoss, SFTLoss
from lightspan.schema.images import PromptImage
from lightspan.schema.token_records import Sampling
from lightspan_testing.tiny_vision import image_chat, picture, tiny_vision_model
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.torch import TorchLearner
from lightspan_torch.vision import features

GROUP: Final = 8
IMAGES: Final = 4
RATE: Final = 1e-4
ANSWER: Final = 32
SIZE: Final = 224
ROUNDS: Final = 3
QUESTION: Final = "Which of the bars is the highest, and what is its colour? " * 3
COLOURS: Final = ("red", "green", "blue", "black", "white", "yellow", "purple", "orange")
TWICE: Final = 2.0
"""How many times cheaper a group over one image must be than eight encodings."""
Prompt = tuple[list[int], tuple[PromptImage, ...]]


def make_model(folder: Path) -> Path:
    """Save a random model whose vision part is as large as its text part; return its folder."""
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    tiny_vision_model(folder, seed=0, hidden=256, layers=6, heads=8, max_pixels=SIZE * SIZE)
    config = Qwen2_5_VLConfig.from_pretrained(folder)
    for name, value in {
        "depth": 6,
        "hidden_size": 256,
        "num_heads": 8,
        "intermediate_size": 512,
        "window_size": 112,
        "fullatt_block_indexes": [2, 5],
    }.items():
        setattr(config.vision_config, name, value)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def prompts(folder: Path, images: int) -> list[Prompt]:
    """Return the prompts of a group about one image, or about as many as there are prompts."""
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, ImageTokenizer)
    shown = [picture(colour, (SIZE, SIZE)) for colour in COLOURS[:images]]
    chats = [image_chat(shown[number % images], QUESTION) for number in range(GROUP)]
    return [tokenizer.render_images(chat) for chat in chats]


def rows(folder: Path, *, with_images: bool) -> list[Row]:
    """Return the rows of a group: a prompt about one image, or of text, and random answers."""
    torch.manual_seed(1)
    built = []
    for number, (prompt, images) in enumerate(prompts(folder, 1)):
        ids = list(prompt)
        if not with_images:
            for image in images:
                places = range(image.start, image.start + image.length)
                for place in places:
                    ids[place] = 20 + place % 50
        answer = torch.randint(20, 300, (ANSWER,)).tolist()
        prompt_of = (ids, images if with_images else ())
        built.append(row_of(str(number), prompt_of, answer, [0.0] * ANSWER, 1.0))
    return built


def row_of(
    name: str, prompt: Prompt, answer: list[int], logprobs: list[float], advantage: float
) -> Row:
    """Return the row of one answer."""
    ids, images = prompt
    before, size = len(ids), len(answer)
    return Row(
        rollout_id=name,
        policy="policy",
        ids=[*ids, *answer],
        mask=[False] * before + [True] * size,
        advantages=[advantage] * (before + size),
        weights=[1 / (GROUP * size)] * (before + size),
        logprobs=[0.0] * before + logprobs,
        versions=[0] * (before + size),
        temperatures=[1.0] * (before + size),
        call_ids=((name, 0),),
        responses=(Response(before, size),),
        images=images,
    )


# --- the measurements -----------------------------------------------------------------------
def engine(folder: Path, images: int) -> dict[str, float]:
    """Return the CPU milliseconds per sampled token of a group about so many images."""
    asked = prompts(folder, images)

    async def rounds() -> float:
        best = float("inf")
        for _ in range(ROUNDS):
            features._CACHE = features._Cache(features.CACHE_BYTES)
            running = TransformersEngine({"policy": folder}, seed=0)
            await running.start()
            started = time.process_time()
            answers = await asyncio.gather(
                *(sample(running, str(n), prompt) for n, prompt in enumerate(asked))
            )
            tokens = sum(len(ids) for ids, _ in answers)
            best = min(best, 1e3 * (time.process_time() - started) / tokens)
            await running.close()
        return best

    return {"cpu_ms": asyncio.run(rounds())}


def transformers_generate(folder: Path) -> dict[str, float]:
    """Return the CPU milliseconds per token of transformers for the group, an image each."""
    model = load_model(folder)
    inputs = model_inputs(folder, [prompt for prompt, _ in prompts(folder, 1)])
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        with torch.no_grad():
            model.generate(
                **inputs, do_sample=True, min_new_tokens=ANSWER, max_new_tokens=ANSWER, top_k=0
            )
        best = min(best, 1e3 * (time.process_time() - started) / (GROUP * ANSWER))
    return {"cpu_ms": best}


def model_inputs(folder: Path, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return the inputs of transformers' model for equally long sequences about one image."""
    from PIL import Image
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    images = [Image.new("RGB", (SIZE, SIZE), COLOURS[0])] * len(sequences)
    pixels = processor(images=images, return_tensors="pt")
    ids = torch.tensor(sequences)
    is_image = ids == load_model(folder).config.image_token_id
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": is_image.long(),
        **pixels,
    }


def learner(folder: Path, with_images: bool) -> dict[str, float]:
    """Return the CPU seconds of an update, and by how much the first one lets the process grow."""
    batch = rows(folder, with_images=with_images)
    learning = TorchLearner({"policy": folder}, optimizer=Optimizer(learning_rate=1e-3))
    before, best = peak_mib(), float("inf")
    first = 0.0
    for number in range(ROUNDS):
        features._CACHE = features._Cache(features.CACHE_BYTES)
        started = time.process_time()
        learning.update(batch, SFTLoss())
        best = min(best, time.process_time() - started)
        if not number:
            first = peak_mib() - before
    return {"cpu_s": best, "mib": first, "tokens": sum(len(row.ids) for row in batch)}


def plain_loop(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of the same update by a loop over transformers' model."""
    model = load_model(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".visual." not in f".{name}")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = rows(folder, with_images=True)
    inputs = model_inputs(folder, [row.ids for row in batch])
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        logits = model(**inputs, use_cache=False, logits_to_keep=ANSWER + 1).logits[:, :-1]
        chosen = inputs["input_ids"][:, -ANSWER:, None]
        loss = -logits.float().log_softmax(-1).gather(-1, chosen).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        best = min(best, time.process_time() - started)
    return {"cpu_s": best}


def step(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of steps over `IMAGES` images: answers, then an update on them."""
    shown = [picture(colour, (SIZE, SIZE)) for colour in COLOURS[:IMAGES]]
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, ImageTokenizer)
    asked = [tokenizer.render_images(image_chat(file, QUESTION)) for file in shown]
    optimizer = Optimizer(learning_rate=RATE)
    rng = random.Random(1)

    async def steps() -> list[dict[str, float]]:
        learning = TorchLearner({"policy": folder}, optimizer=optimizer)
        running = TransformersEngine({"policy": folder}, seed=0)
        await running.start()
        found = []
        for version in range(1, ROUNDS + 1):
            started = time.process_time()
            groups = [(n, m) for n in range(IMAGES) for m in range(GROUP)]
            answers = await asyncio.gather(
                *(sample(running, f"{n}-{m}", asked[n]) for n, m in groups)
            )
            built = []
            for (n, m), (ids, logprobs) in zip(groups, answers, strict=True):
                built.append(row_of(f"{n}-{m}", asked[n], ids, logprobs, rng.choice((-1.0, 1.0))))
            learning.update(built, PolicyLoss())
            await learning.publish(running, {"policy": version})
            tokens = sum(len(ids) for ids, _ in answers)
            found.append({"cpu_s": time.process_time() - started, "tokens": tokens})
        await running.close()
        return found

    return best_step(asyncio.run(steps()))


async def sample(
    engine: TransformersEngine, name: str, prompt: Prompt
) -> tuple[list[int], list[float]]:
    """Return the ids of an answer and their log-probabilities."""
    request = GenerationRequest(
        request_id=name,
        policy="policy",
        prompt_ids=prompt[0],
        images=prompt[1],
        sampling=Sampling(max_tokens=ANSWER),
    )
    ids: list[int] = []
    logprobs: list[float] = []
    async for chunk in engine.generate(request, stream=False):
        ids += chunk.ids
        logprobs += chunk.logprobs
    return ids, logprobs


def best_step(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the CPU milliseconds per sampled token of the best step, and its tokens."""
    found = [(1e3 * each["cpu_s"] / each["tokens"], each["tokens"]) for each in steps]
    return dict(zip(("cpu_ms", "tokens"), min(found), strict=True))


def trl_step(folder: Path) -> dict[str, float]:
    """Return the same of TRL's GRPO, in its own environment."""
    with tempfile.TemporaryDirectory() as images:
        for number, colour in enumerate(COLOURS[:IMAGES]):
            (Path(images) / f"{number}.png").write_bytes(picture(colour, (SIZE, SIZE)))
        options = {
            "--model": folder,
            "--images": images,
            "--question": QUESTION,
            "--answer": ANSWER,
            "--steps": ROUNDS,
            "--group": GROUP,
            "--learning-rate": RATE,
        }
        arguments = [str(word) for pair in options.items() for word in pair]
        return best_step(run_peer("trl-1.16.0-images", "peer_vision.py", *arguments))


def peak_mib() -> float:
    """Return the maximum resident size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


MEASUREMENTS: Final[dict[str, Callable[[Path], dict[str, float]]]] = {
    "engine, one image": lambda folder: engine(folder, 1),
    "engine, eight images": lambda folder: engine(folder, GROUP),
    "transformers, generate": transformers_generate,
    "learner, images": lambda folder: learner(folder, with_images=True),
    "learner, text": lambda folder: learner(folder, with_images=False),
    "transformers, loop": plain_loop,
    "step": step,
    "TRL, step": trl_step,
}


def main() -> int:
    """Measure, print the table, and return the exit status."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--only", choices=list(MEASUREMENTS), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        print(json.dumps(MEASUREMENTS[options.only](options.model)))
        return 0
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model")
        for name in MEASUREMENTS:
            command = [sys.executable, __file__, "--only", name, "--model", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr[-3000:]}")
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(name, found[name], flush=True)
    return finish(figures(found), options.json)


def figures(found: dict[str, dict[str, float]]) -> list[Figure]:
    """Return the figures of the measurements."""
    one, eight = (found[f"engine, {count} image{s}"] for count, s in (("one", ""), ("eight", "s")))
    images, text = found["learner, images"], found["learner, text"]
    asked = {
        "what": "engine, a group of 8 over one image, a sampled token",
        "unit": "CPU-ms",
        "ours": one["cpu_ms"],
    }
    return [
        Figure(**asked, peer="eight images", theirs=eight["cpu_ms"], at_least=TWICE),
        Figure(
            **asked,
            peer="transformers",
            theirs=found["transformers, generate"]["cpu_ms"],
            at_least=1,
        ),
        Figure(
            what="learner, an update on the group's rows",
            unit="CPU-s",
            ours=images["cpu_s"],
            peer="transformers",
            theirs=found["transformers, loop"]["cpu_s"],
            at_least=TWICE,
        ),
        Figure(
            what="a step over 4 images in groups of 8, a sampled token",
            unit="CPU-ms",
            ours=found["step"]["cpu_ms"],
            peer="TRL 1.16 GRPO",
            theirs=found["TRL, step"]["cpu_ms"],
            at_least=TWICE,
        ),
        Figure(
            what="learner, memory of the first update, the image encoded in it",
            unit="MiB",
            ours=images["mib"],
            peer="rows of text",
            theirs=text["mib"],
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
