"""What threads of ours import while an app is recorded, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

APP = """
import sys, threading
import lightspan, openai
from lightspan.production import record

found = []

def watch(event, arguments):
    if event == "import" and threading.current_thread() is not threading.main_thread():
        found.append(f"{threading.current_thread().name}: {arguments[0]}")

client = openai.OpenAI(base_url=sys.argv[1], api_key="key")
sys.addaudithook(watch)
record.hold("test")
with lightspan.agent("writer"):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    lightspan.emit_reward(0.5)
assert record.flush()
print(len(threading.enumerate()), *found, sep="\\n")
"""


def imports_of_threads(endpoint: str, **environment: str) -> list[str]:
    """Of an app that asks a model once: each with the thread's name; how many threads, first."""
    command = [sys.executable, "-c", APP, endpoint]
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=True, capture_output=True, text=True
    )
    assert done.stderr == "", done.stderr
    return done.stdout.split("\n")[:-1]
