"""Learn the two prompts of `prompt_apps.told` with APO, in a process that tests kill.

python apo_toy.py FOLDER APP_URL REFLECTION_URL
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def reflects(request: Any) -> str:
    """Return the critic's text, which names what a prompt lacks, or the editor's, which adds it."""
    asked = request.last_text
    word = "SHOUT" if 'called "rules"' in asked else "REVERSE"
    if "<critique>" not in asked:
        return f"It is to say {word}."
    text = asked.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
    return f"I think so.\n<prompt>\n{word} {text.strip()}\n</prompt>"


def train(folder: Path, app_url: str, reflection_url: str, **options: Any) -> Any:
    from gepa_toy import fit, prompts  # type: ignore[import-not-found]

    from lightspan import APO, LLM

    small = {
        "beam_width": 2,
        "branch_factor": 1,
        "beam_rounds": 2,
        "gradient_batch_size": 2,
        "val_batch_size": 4,
        "significance": None,  # four tasks of the selection split are too few for the verdict
    }
    llm = LLM(base_url=reflection_url, model="thinker")
    return fit(folder, app_url, APO(prompts(), llm, **{**small, **options}))


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:4])
    heavy = ("torch", "matplotlib", "transformers", "litellm", "peft", "gepa")
    print([name for name in heavy if name in sys.modules])
