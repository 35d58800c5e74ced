"""Train the text-to-SQL app on this machine, or on a GPU with a real model.

python examples/sql/train.py                     a small model, built here, on the CPU
python examples/sql/train.py --resume            go on after Ctrl-C, a crash or `kill -9`
python examples/sql/train.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --device cuda
"""

from __future__ import annotations

import argparse
import resource
import sys
from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF

from lightspan import FitResult, LoRA, Trainer
from lightspan.errors import LightspanError
from lightspan.progress import Reporter, default_reporter
from sql_example import training

HERE = Path(__file__).parent


def main() -> int:
    """Train, print the gain; returns the exit status."""
    options = _parser().parse_args()
    reporter = default_reporter()
    try:
        result = train(options, reporter)
    except LightspanError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"go on with: {_resume_command()}", file=sys.stderr)
        return 130
    _report(result, reporter)
    return 0


def train(options: argparse.Namespace, reporter: Reporter) -> FitResult:
    """Everything: data, warm start, reinforcement learning."""
    _one_torch_thread(options.device)
    recipe = training.RECIPE if options.model is None else training.REAL_MODEL
    if options.steps is not None:
        recipe = replace(recipe, steps=options.steps)
    reporter.line("generating databases and questions (first time only)")
    train_tasks = training.load_tasks(options.cache, "train", recipe)
    test_tasks = training.load_tasks(options.cache, "test", recipe)[: options.held_out]
    model: str | Path = options.model or ""
    if options.model is None:
        reporter.line("warm start: a small model imitates imperfect demonstrations")
        model, seconds = training.warm_start(options.cache, options.seed, reporter, recipe)
        reporter.line(f"the warm start took {seconds:.0f} CPU-seconds")
    lora = LoRA(rank=16) if options.lora else None
    trainer = Trainer(
        training.make_algorithm(model, options.seed, recipe, lora=lora),
        runners=options.runners,
        steps=recipe.steps,
        folder=_folder(options),
        validate_every=max(1, recipe.steps // 2),
        checkpoint_every=1 if options.model is None else 20,
        device=options.device,
        metric="execution accuracy",
        reporter=reporter,
    )
    return trainer.fit(
        training.answer,
        train_tasks,
        test_tasks,
        agents=training.AGENTS,
        resume=options.resume,
    )


def _one_torch_thread(device: str) -> None:
    """At this size a second thread gives nothing, and the app needs the other core."""
    if device == "cpu":
        import torch

        torch.set_num_threads(1)


def _report(result: FitResult, reporter: Reporter) -> None:
    spent = ", ".join(f"{part} {seconds:.1f}" for part, seconds in result.seconds.items())
    reporter.line(f"CPU-seconds: {spent}")
    reporter.line(f"peak memory: {_peak_gib():.2f} GiB (trainer and largest runner)")
    reporter.line(f"run: {result.folder}  curve: {result.folder / 'learning_curve.png'}")
    reporter.line(f"model: {result.model}  look inside: lightspan inspect {result.folder}")
    reporter.line(result.summary("execution accuracy"))


def _peak_gib() -> float:
    used = [resource.getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    per_gib = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, Linux KiB
    return sum(used) / per_gib


def _folder(options: argparse.Namespace) -> Path:
    name = "sql" if options.model is None else f"sql-{Path(options.model).name}"
    return Path(options.folder or Path("runs") / f"{name}-seed{options.seed}")


def _resume_command() -> str:
    arguments = [part for part in sys.argv[1:] if part != "--resume"]
    return " ".join(["python", sys.argv[0], *arguments, "--resume"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the warm start and training (0)")
    parser.add_argument(
        "--model", help="folder or hub name of a chat model; without it a small one is built"
    )
    parser.add_argument("--device", default="cpu", help='"cpu", "cuda" or "cuda:1" (cpu)')
    parser.add_argument("--lora", action="store_true", help="train adapters, not the full weights")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--steps", type=int, help="training iterations")
    parser.add_argument("--held-out", type=int, default=500, help="held-out questions (500)")
    parser.add_argument("--runners", type=int, default=16, help="attempts at once (16)")
    parser.add_argument("--folder", type=Path, help="of the run (runs/sql-seed<seed>)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=HERE / ".cache",
        help="where databases and warm starts are kept (examples/sql/.cache)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
