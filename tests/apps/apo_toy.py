"""Learns the two prompts of `prompt_apps.told` with APO, in a process that may be killed.

python apo_toy.py FOLDER APP_URL REFLECTION_URL
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def reflects(request: Any) -> str:
    """The critic says what one of the prompts lacks, the editor puts it in."""
    asked = request.last_text
    word = "SHOUT" if 'called "rules"' in asked else "REVERSE"
    if "<critique>" not in asked:
        return f"It is to say {word}."
    text = asked.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
    return f"I think so.\n<prompt>\n{word} {text.strip()}\n</prompt>"


def train(folder: Path, app_url: str, reflection_url: str, **options: Any) -> Any:
    import gepa_toy  # type: ignore[import-not-found]
    import prompt_apps  # type: ignore[import-not-found]

    from lightspan import APO, LLM, PromptTemplate, Trainer
    from lightspan.progress import SilentReporter

    form = PromptTemplate('As {"text": …}. Q: {q}')  # braces of its own
    prompts = {"rules": PromptTemplate("Speak."), "form": form}
    small = {
        "beam_width": 2,
        "branch_factor": 1,
        "beam_rounds": 2,
        "gradient_batch_size": 2,
        "val_batch_size": 4,
    }
    algorithm = APO(prompts, LLM(base_url=reflection_url, model="thinker"), **{**small, **options})
    trainer = Trainer(algorithm, runners=2, folder=folder, reporter=SilentReporter())
    train, held_out = gepa_toy.tasks(app_url, *range(8)), gepa_toy.tasks(app_url, 20, 21)
    return trainer.fit(prompt_apps.told, train, held_out, resume=folder.exists())


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:4])
    heavy = ("torch", "matplotlib", "transformers", "litellm", "peft", "gepa")
    print([name for name in heavy if name in sys.modules])
