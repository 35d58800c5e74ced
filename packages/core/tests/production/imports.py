"""Find out what lightspan's threads import while an app in a new process is recorded."""

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
    """Return the modules that lightspan's threads import in an app that calls a model once.

    Each line has the thread's name; the first line is the number of threads.
    """
    command = [sys.executable, "-c", APP, endpoint]
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=True, capture_output=True, text=True
    )
    assert done.stderr == "", done.stderr
    return done.stdout.split("\n")[:-1]
