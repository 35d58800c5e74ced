"""Sandboxes: bubblewrap, as mini-swe-agent starts it, and pytest as the verifier in one of its own.

A command sees the system's programs, this environment's Python with pytest, and its working folder,
which alone it can change. It sees no network, no other process, no environment variable of ours and
no other file.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.exceptions import Submitted

SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_MAX_BYTES: Final = 100_000
"""Size above which a repaired file is not read."""
_PASSED: Final = re.compile(r"^(\d+) passed in [\d.]+s$")


def open_sandbox(files: Mapping[str, str], **options: Any) -> BubblewrapEnvironment:
    """Return a sandbox whose working folder has `files`; the folder is removed with the object.

    Args:
        files: path → text.
        options: further configuration of mini-swe-agent's environment.
    """
    # bubblewrap's own process is in the sandbox too, where /proc shows its environment
    sandbox = BubblewrapEnvironment(executable="env", wrapper_args=["-i", *_command()], **options)
    for path, text in files.items():
        file = sandbox.working_dir / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return sandbox


def passes(files: Mapping[str, str], tests: Mapping[str, str], **options: Any) -> bool:
    """Return whether pytest passes all `tests` of a package, in a new sandbox.

    Args:
        files: path → text of the package.
        tests: path → text of the tests.
        options: further configuration of mini-swe-agent's environment.
    """
    sandbox = open_sandbox({**files, **tests}, **options)
    try:
        done = sandbox.execute({"command": f"python -m pytest -q {' '.join(tests)}"})
    except Submitted:  # the package printed what ends a session
        return False
    finally:
        sandbox.cleanup()
    # a package that ends the process early reports no count
    last = (done["output"].strip().splitlines() or [""])[-1]
    passed = _PASSED.fullmatch(last)
    wanted = sum(text.count("def test_") for text in tests.values())
    return done["returncode"] == 0 and passed is not None and int(passed[1]) == wanted


def read_files(folder: Path, paths: Mapping[str, str]) -> dict[str, str] | None:
    """Return path → text of the files of a folder; None if one is not there or not readable."""
    try:
        return {path: _read(folder, path) for path in paths}
    except (OSError, ValueError):
        return None


def _read(folder: Path, path: str) -> str:
    """Return the text of a file. Links, with which a command could name a file outside its sandbox,
    are not followed.

    Raises:
        OSError: a part of the path is missing or a link.
        ValueError: it is not a file of at most `_MAX_BYTES` bytes of UTF-8.
    """
    *parents, name = Path(path).parts
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parents:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ValueError(f"{path} is no file of at most {_MAX_BYTES} bytes")
        return opened.read().decode()


def check() -> None:
    """Raise `RuntimeError` unless bubblewrap works on this machine."""
    sandbox = open_sandbox({})
    done = sandbox.execute({"command": "true"})
    sandbox.cleanup()
    if done["returncode"]:
        raise RuntimeError(
            f"bubblewrap cannot make a sandbox here: {done['output'].strip()}; it needs user "
            "namespaces, which a container or a kernel setting may forbid"
        )


def _command() -> list[str]:
    """Return bubblewrap with its arguments. What is in /tmp comes after /tmp.

    Raises:
        RuntimeError: bubblewrap is not installed.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise RuntimeError("bubblewrap is not installed: apt-get install bubblewrap")
    visible = dict.fromkeys([*SYSTEM, sys.base_prefix, sys.prefix])
    path = f"{sys.prefix}/bin:/usr/bin:/bin"
    return [
        *(program, "--unshare-all", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev"),
        *(part for name in visible for part in ("--ro-bind-try", name, name)),
        *("--setenv", "PATH", path),
    ]
