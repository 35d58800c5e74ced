"""In how many lost rollouts `lightspan fork` names the very call that lost them.

The app is `_bridge_app.cross`: 16 calls, about one in eight of which breaks a bridge for good.
Which answer does is a function of its text, so the call that lost a rollout is known without
sampling. A small random model answers. The lost rollouts of one training step are searched, those
of groups in which another rollout succeeded, in the order of their tasks.

    python benchmarks/losses.py [--rollouts 12] [-n 8] [--once] [--json PATH]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

import _bridge_app as bridge
from _report import Figure, finish, options_of

from lightspan import LightningRL, LocalRunners, Trainer
from lightspan.lightning.episode import Episode
from lightspan.progress import SilentReporter
from lightspan.schema.records import Mode
from lightspan.stores import open_existing
from lightspan.training.collector import read_episodes
from lightspan.training.folder import RunFolder
from lightspan_testing.tiny import tiny_model
from lightspan_tools.forking.report import ForkReport, answer_of
from lightspan_tools.forking.run import ForkCommand, run_fork

PLANKS: Final = 16
GROUP: Final = 8


def main() -> int:
    """Measure and print; return the exit status."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--rollouts", type=int, default=12, help="lost rollouts (12)")
    parser.add_argument("-n", "--count", type=int, default=8, help="continuations per call (8)")
    parser.add_argument("--once", action="store_true", help="no second test, as the option of fork")
    parser.add_argument("--tasks", type=int, default=6, help="tasks of the training step (6)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lost = train(folder, options.tasks)[: options.rollouts]
        found: list[tuple[int, ForkReport]] = []
        for episode in lost:
            command = ForkCommand(
                folder / "run",
                episode.rollout_id,
                None,
                count=options.count,
                confirm=not options.once,
                runners=options.count,
                reporter=SilentReporter(),
            )
            report = run_fork(command)
            found.append((truth(episode), report))
            print(line(*found[-1]), file=sys.stderr, flush=True)
    return finish(figures(found, options.count, once=options.once), options.json)


def train(folder: Path, tasks: int) -> list[Episode]:
    """Train one step; return the lost rollouts of groups in which another one succeeded."""
    tiny_model(folder / "model", seed=0)
    algorithm = LightningRL(
        folder / "model", optimize="walker", group_size=GROUP, tasks_per_step=tasks, seed=0
    )
    trainer = Trainer(
        algorithm,
        runners=LocalRunners(8),
        steps=1,
        folder=folder / "run",
        reporter=SilentReporter(),
    )
    trainer.fit(bridge.cross, [{"name": f"bridge {n}", "planks": PLANKS} for n in range(tasks)])
    episodes = asyncio.run(recorded(RunFolder(folder / "run").store_url))
    solved = {episode.group_id for episode in episodes if episode.reward == 1}
    return [each for each in episodes if each.reward == 0 and each.group_id in solved]


async def recorded(url: str) -> list[Episode]:
    """Return the training rollouts in the order of their ids."""
    async with open_existing(url, read_only=True) as store:
        states = await store.rollouts(mode=Mode.TRAIN)
        episodes = await read_episodes(store, states)
    return sorted(episodes, key=lambda episode: episode.rollout_id)


def truth(episode: Episode) -> int:
    """Return the number of the call that broke the bridge."""
    answers = [answer_of(call) for call in episode.calls]
    return 1 + next(n for n, answer in enumerate(answers) if bridge.breaks(answer))


def line(number: int, report: ForkReport) -> str:
    """Return the outcome of one search as text."""
    assert report.loss is not None
    named = ", ".join(str(call.number) for call in report.loss.calls)
    tests = " ".join(f"{p.call.number}:{p.successes}/{len(p.scored)}" for p in report.points)
    return f"lost at {number}, named {named or 'none'}; {tests}"


def figures(found: list[tuple[int, ForkReport]], count: int, *, once: bool) -> list[Figure]:
    """Return the figures of all searches."""
    numbers = [(n, [call.number for call in r.loss.calls] if r.loss else []) for n, r in found]
    exact = sum(named == [number] for number, named in numbers)
    near = sum(any(abs(each - number) <= 1 for each in named) for number, named in numbers)
    size, tests = len(found), sum(len(report.points) for _, report in found)
    sampled = sum(report.sampled for _, report in found)
    note = f"{PLANKS} calls, n = {count}{', tested once' if once else ''}"
    return [
        Figure(what=f"the very call named, of {size} lost rollouts", unit="rollouts", ours=exact,
               note=note),
        Figure(what="named within one call", unit="rollouts", ours=near),
        Figure(what="tests per rollout", unit="tests", ours=tests / size),
        Figure(what="sampled calls per rollout", unit="calls", ours=sampled / size),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
