"""Make the runs that the tests of the web page show: `python make_runs.py MODEL DATA`.

MODEL is the folder of the SQL example's small model after its warm start, DATA that of its
databases (examples/sql/.cache has both after `nox -s quickstart`). The runs are small, real
trainings; paths and names of this machine are kept out of them. The result is data/runs.tar.xz
beside this file.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

from lightspan import GEPA, LLM, LightningRL, PromptTemplate, Trainer, rollout
from lightspan_testing.scripted import Request, ScriptedServer

HERE: Final = Path(__file__).parent
ARCHIVE: Final = HERE / "data" / "runs.tar.xz"
FOLDER: Final = Path(tempfile.gettempdir()) / "lightspan-runs"
"""Folder of the trainings; its path is in the tasks that they record."""
HELD_OUT: Final = 100
RULES: Final = {
    "parcel": "Name the day on which the parcel comes.",
    "refund": "Say how long a refund takes.",
    "return": "Offer a label for the way back.",
}
"""Word of a question → the rule that a good prompt has for it."""


def train_sql(model: str, data: str) -> None:
    """Train the SQL example on a tenth of its rollouts, with two learning rates."""
    from sql_example.training import AGENTS, RECIPE, _training_task, answer
    from sql_example.worlds import load

    folder = Path(data)
    train, test = (
        [_training_task(task, folder, RECIPE) for task in load(folder, split)]
        for split in ("train", "test")
    )
    for name, learning_rate, steps in (("sql", 4e-4, 9), ("sql-low-rate", 4e-6, 5)):
        algorithm = LightningRL(
            model,
            optimize=["write_query", "rewrite_query"],
            frozen="base",
            group_size=4,
            tasks_per_step=8,
            temperature=0.7,
            max_tokens=48,
            learning_rate=learning_rate,
        )
        options = {"metric": "execution accuracy", "cluster": "schema"}
        trainer = Trainer(algorithm, steps=steps, folder=f"runs/{name}", **options)
        trainer.fit(answer, train, test[:: len(test) // HELD_OUT], agents=AGENTS)


def reply(request: Request) -> str:
    """Answer for the help desk: well if the prompt has the rule for the question."""
    text = request.last_text
    question = text.rpartition("Question: ")[2]
    good = [word for word, rule in RULES.items() if word in question and rule in text]
    return f"Certainly, about your {good[0]}: done." if good else "Please contact us."


def reflect(request: Request) -> str:
    """Propose the prompt with one more rule."""
    text = request.last_text
    prompt = text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
    missing = [rule for word, rule in RULES.items() if rule not in prompt and word in text]
    extra = missing[0] if missing else "Be brief."
    return f"<prompt>\n{extra}\n{prompt}\n</prompt>"


@rollout
def help_desk(task: dict[str, str], prompt: PromptTemplate) -> float:
    """Answer a question; 1 for an answer that helps, else 0."""
    import openai

    client = openai.OpenAI(base_url=task["url"], api_key="unused")
    text = prompt.format(question=task["question"])
    answer = client.chat.completions.create(
        model="help-desk", messages=[{"role": "user", "content": text}]
    )
    return float(str(answer.choices[0].message.content).startswith("Certainly"))


def search_prompts() -> None:
    """Search prompts of a help desk, whose model and reflections are scripted."""
    from make_runs import help_desk as app  # runners import it by this name

    with ScriptedServer(reply) as model, ScriptedServer(reflect) as thinker:

        def tasks(first: int, count: int) -> list[dict[str, str]]:
            words = list(RULES)
            numbers = range(first, first + count)
            return [
                {"question": f"What about {words[n % 3]} {n}?", "url": model.url} for n in numbers
            ]

        prompt = PromptTemplate("Answer the customer.\nQuestion: {question}")
        llm = LLM(base_url=thinker.url, model="thinker")
        search = GEPA({"prompt": prompt}, llm, max_rollouts=160, minibatch=3)
        trainer = Trainer(search, runners=2, folder="runs/prompts", metric="helpful answers")
        trainer.fit(app, tasks(0, 24), tasks(100, 12))


def clean(run: Path) -> None:
    """Remove what a page does not show, and what is this machine's."""
    for name in ("checkpoints", "learning_curve.png", "lock"):
        path = run / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for path in run.glob("model/*"):
        if not path.name.startswith(("tokenizer", "chat_template")):
            path.unlink()
    with sqlite3.connect(run / "store.db") as database:
        database.execute("UPDATE attempts SET runner_id = 'runner', call_token = attempt_id")
        database.execute("DELETE FROM peers")
    database.close()
    with sqlite3.connect(run / "store.db", isolation_level=None) as database:
        database.execute("PRAGMA journal_mode = DELETE")
        database.execute("VACUUM")
    database.close()
    config = json.loads((run / "config.json").read_bytes())
    (run / "config.json").write_text(json.dumps(without_paths(config), indent=2) + "\n")
    for path in (each for each in run.rglob("*") if each.is_file()):
        data = path.read_bytes()
        for secret in (str(HERE.parents[1]), socket.gethostname(), str(Path.home()), sys.prefix):
            if len(secret) > 5 and secret.encode() in data:
                raise SystemExit(f"{path} contains {secret!r}")


def without_paths(value: Any) -> Any:
    """Return a setting with relative paths in place of absolute ones."""
    if isinstance(value, dict):
        return {name: without_paths(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_paths(each) for each in value]
    if isinstance(value, str) and value.startswith(("/", "sqlite:///")):
        return Path(value).name if value.startswith("/") else None
    return value


def main(model: Path, data: Path) -> None:
    """Make the runs in `FOLDER`, and pack them."""
    model, data = model.resolve(), data.resolve()
    FOLDER.mkdir()
    os.chdir(FOLDER)
    shutil.copytree(model, "warm-start")
    shutil.copytree(data, "databases")
    train_sql("warm-start", "databases")
    search_prompts()
    for run in sorted(Path("runs").iterdir()):
        clean(run)
    ARCHIVE.parent.mkdir(exist_ok=True)
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        archive.add("runs")
    shutil.rmtree(FOLDER)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(*map(Path, sys.argv[1:]))
