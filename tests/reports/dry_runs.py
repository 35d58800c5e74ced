"""Dry runs of small apps with a scripted model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightspan import DevReport, Trainer
from lightspan.progress import SilentReporter
from lightspan.protocols.engine import GenerationRequest
from lightspan_testing.scripted_engine import ScriptedEngine, tiny_chat_tokenizer


class Script:
    """A script of an engine: a prompt that ends with a key gets the key's texts in turn,
    repeatedly.
    """

    def __init__(self, answers: Mapping[str, Sequence[str]]) -> None:
        self.tokenizer = tiny_chat_tokenizer()
        self._answers = answers
        self._turns: dict[str, int] = {}

    def __call__(self, request: GenerationRequest) -> str:
        prompt = self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        asked = prompt.removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        key = next(key for key in self._answers if asked.endswith(key))
        turn = self._turns[prompt] = self._turns.get(prompt, -1) + 1
        return self._answers[key][turn % len(self._answers[key])]


def scripted(answers: Mapping[str, Sequence[str]]) -> ScriptedEngine:
    script = Script(answers)
    return ScriptedEngine(script.tokenizer, script, policies={"policy": 0, "base": 0})


def dev(
    rl: Callable[..., Any], app: Any, answers: Sequence[str], tasks: int = 1, **options: Any
) -> DevReport:
    """Run `dev` on an app of one call, whose model gives `answers` in turn."""
    algorithm = options.pop("algorithm", {})
    engine = scripted({"": answers})
    trainer = Trainer(rl(**algorithm), engine=engine, steps=1, reporter=SilentReporter())
    asked = [{"q": f"question {number}", "id": str(number)} for number in range(tasks)]
    return trainer.dev(app, asked, **options)
