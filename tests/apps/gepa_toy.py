"""Learn the two prompts of `prompt_apps.told`, in a process that tests kill.

python gepa_toy.py FOLDER APP_URL REFLECTION_URL
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def speaks(request: Any) -> str:
    """Return the answer of the app's model, which follows the words in capitals in its prompt."""
    text = request.last_text
    said: str = text.rpartition("Q:")[2].strip()
    said = said[::-1] if "REVERSE" in text else said
    return said.upper() if "SHOUT" in text else said


def reflects(request: Any) -> str:
    """Return the reflection model's proposal, which adds one word to the prompt."""
    asked = request.last_text
    text = asked.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
    word = "SHOUT" if 'called "rules"' in asked else "REVERSE"
    return f"I think so.\n<prompt>\n{word} {text.strip()}\n</prompt>"


def tasks(url: str, *numbers: int) -> list[dict[str, str]]:
    return [{"q": f"word{n}", "want": f"word{n}"[::-1].upper(), "url": url} for n in numbers]


def prompts() -> dict[str, Any]:
    from lightspan import PromptTemplate

    form = PromptTemplate('As {"text": …}. Q: {q}')  # braces of its own
    return {"rules": PromptTemplate("Speak."), "form": form}


def fit(folder: Path, app_url: str, algorithm: Any) -> Any:
    """Learn, or resume."""
    import prompt_apps

    from lightspan import Trainer
    from lightspan.progress import SilentReporter

    trainer = Trainer(algorithm, runners=2, folder=folder, reporter=SilentReporter())
    train, held_out = tasks(app_url, *range(8)), tasks(app_url, 20, 21)
    return trainer.fit(prompt_apps.told, train, held_out, resume=folder.exists())


def train(folder: Path, app_url: str, reflection_url: str, **options: Any) -> Any:
    from lightspan import GEPA, LLM

    # four tasks of the selection split are too few for the verdict
    options = {"max_rollouts": 60, "minibatch": 2, "significance": None, **options}
    llm = LLM(base_url=reflection_url, model="thinker")
    return fit(folder, app_url, GEPA(prompts(), llm, **options))


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:4])
    heavy = ("torch", "matplotlib", "transformers", "litellm", "peft")
    print([name for name in heavy if name in sys.modules])
