"""Runs an algorithm without policies, in a process of its own, and prints what that imported.

python without_policies.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    import prompt_apps

    from lightspan import Trainer
    from lightspan.progress import SilentReporter
    from lightspan_testing.scripted import ScriptedServer

    with ScriptedServer(lambda request: request.last_text.upper()) as server:
        tasks = [{"q": f"q{n}", "want": f"SAY Q{n}", "url": server.url} for n in range(6)]
        algorithm = prompt_apps.Trial(["{q}", "say {q}"])
        trainer = Trainer(algorithm, steps=2, runners=2, folder=folder, reporter=SilentReporter())
        trainer.dev(prompt_apps.styled, tasks[:2], count=1)
        result = trainer.fit(prompt_apps.styled, tasks[:4], tasks[4:])
        trainer.evaluate(prompt_apps.styled, tasks[4:], resume=True)
    heavy = ("torch", "matplotlib", "transformers", "litellm", "peft", "numpy")
    said = {
        "model": result.model,
        "means": [evaluation.mean for evaluation in result.evaluations],
        "loaded": [name for name in heavy if name in sys.modules],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
