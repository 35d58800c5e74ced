"""Start runner processes with another Python interpreter, that of the app's own environment.

Such a process sees the folders of the app, but no packages of this environment. It first sends its
version of lightspan (`Greeting`). If its protocol version differs, it gets no further messages. It
runs the same `process_main` and is supervised in the same way. One rule differs: an older lightspan
sends no heartbeats, so its process is not ended when they are missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from lightspan import __version__
from lightspan.errors import ConfigError, how_to_install
from lightspan.runners.process_main import Assignment
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.semconv import PROTOCOL_VERSION

log = logging.getLogger(__name__)

Folders: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One folder, or several."""
_GREETING_S: Final = 60.0
"""Maximum seconds from the start of a process until it sends its greeting."""
_OLDEST_PYTHON: Final = (3, 11)
_HINT: Final = "create the app's environment first, such as with `python3 -m venv .venv-app`"

# Code of the process. The environment may have no lightspan, or another version, so the greeting
# needs only the standard library. "" is removed from the path, so that modules of the working
# folder are not imported.
_ENTRY: Final = """
import json, sys
from multiprocessing.connection import Connection
sys.path[:] = [path for path in sys.path if path]
pipe = Connection(int(sys.argv[1]))
greeting = {"python": sys.version.split()[0]}
try:
    import lightspan
    greeting["lightspan"] = str(getattr(lightspan, "__version__", "unknown"))
    from lightspan.schema import semconv
    greeting["protocol"] = getattr(semconv, "PROTOCOL_VERSION", 0)
    from lightspan.runners.process_main import serve
except Exception as error:
    greeting["error"] = type(error).__name__ + ": " + str(error)
pipe.send_bytes(json.dumps(greeting).encode())
if "error" not in greeting:
    serve(pipe)
"""


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The first message from a runner process to its parent: its versions."""

    python: str
    """Version of Python."""
    lightspan: str | None = None
    """Version of lightspan; None if lightspan is not installed."""
    protocol: int = 0
    """Protocol version; 0 if unknown."""
    error: str | None = None
    """Why the process cannot be a runner; None if it can."""


def find_interpreter(
    python: str | os.PathLike[str], *, option: str = "python", hint: str = _HINT
) -> str:
    """Return the absolute path of a Python interpreter.

    Symbolic links are not resolved, because the path identifies the virtual environment.

    Args:
        python: path of the interpreter, or its name on the PATH.
        option: name of the user's option, for the error message.
        hint: advice in the error message if the program does not exist.

    Raises:
        ConfigError: `python` is not an executable program.
    """
    path = os.path.expanduser(os.fspath(python))
    program = shutil.which(path)
    if Path(path).is_dir():
        inside = Path(path, "bin", "python")
        reason = f"it is a folder; did you mean {inside}?" if inside.exists() else "it is a folder"
    elif program is not None:
        return os.path.abspath(program)
    elif Path(path).exists():
        reason = "it cannot be executed"
    else:
        reason = f"there is no such program; {hint}"
    raise ConfigError(f"{option}={path!r} is no interpreter: {reason}")


def app_folders(folders: Folders | None) -> list[str]:
    """Return the folders of the app's modules, which precede the interpreter's own packages.

    Args:
        folders: the user's folders. None for the folder of the running script and the working
            folder, without a folder that belongs to a Python environment.

    Raises:
        ConfigError: one of `folders` is not a folder.
    """
    if folders is not None:
        return check_folders("app_dirs", folders)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    home = [] if script is None else [os.path.dirname(os.path.abspath(script))]
    return [path for path in dict.fromkeys([*home, os.getcwd()]) if not is_environment(path)]


def folder_paths(folders: Folders) -> list[str]:
    """Return a folder, or several folders, as a list of paths."""
    several = [folders] if isinstance(folders, str | os.PathLike) else folders
    return [os.fspath(folder) for folder in several]


def check_folders(option: str, folders: Folders) -> list[str]:
    """Return the absolute paths of folders.

    Args:
        option: name of the user's option, for the error message.
        folders: one folder, or several.

    Raises:
        ConfigError: a path is not a folder.
    """
    paths = [os.path.abspath(os.path.expanduser(path)) for path in folder_paths(folders)]
    for path in paths:
        if not os.path.isdir(path):
            raise ConfigError(f"{option}: there is no folder {path}")
    return paths


def is_environment(folder: str) -> bool:
    """Return whether `folder` is part of a Python environment.

    Such a folder must not be passed to the app's environment, which has its own packages.
    """
    inside = any(Path(folder).is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))
    return inside or "site-packages" in folder or "dist-packages" in folder


def foreign_environment() -> dict[str, str]:
    """Return the environment variables for a process of another interpreter.

    Variables that refer to this interpreter or its packages are left out.
    """
    own = {"PYTHONHOME", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__"}
    variables = {name: value for name, value in os.environ.items() if name not in own}
    folders = variables.pop("PYTHONPATH", "").split(os.pathsep)
    folders = [path for path in folders if path and not is_environment(os.path.abspath(path))]
    return variables | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})


class Subprocess(subprocess.Popen[bytes]):
    """A process of another interpreter, with the methods of `multiprocessing.Process`."""

    @property
    def exitcode(self) -> int | None:
        """Exit code, or the negative number of a signal; None while the process runs."""
        return self.poll()

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most `timeout` seconds; None for no limit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)

    def close(self) -> None:
        """Do nothing, because the process has no resources to release."""


def start(python: str) -> tuple[Subprocess, Connection]:
    """Start a runner process of another interpreter. It then waits for its `Assignment`.

    Args:
        python: path of the interpreter.

    Returns:
        The process, and the pipe for its messages.

    Raises:
        ConfigError: the interpreter cannot be executed.
    """
    parent_end, child_end = socket.socketpair()
    fd = child_end.fileno()
    with child_end:
        try:
            process = Subprocess(
                [python, "-c", _ENTRY, str(fd)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                env=foreign_environment(),
            )
        except OSError as error:
            parent_end.close()
            raise ConfigError(f"python={python!r} cannot be executed: {error}") from error
    return process, Connection(parent_end.detach())


def handshake(
    python: str, process: Subprocess, pipe: Connection, plan: RunnerPlan, name: str
) -> None:
    """Read the greeting of a process, check its versions, and send its `Assignment`.

    Args:
        python: path of the interpreter of the process, for error messages.
        process: the process.
        pipe: the pipe for its messages.
        plan: configuration of the runner.
        name: name of the runner.

    Raises:
        ConfigError: `python` is not a working Python interpreter, or its version of Python or
            lightspan is not supported.
    """
    if not pipe.poll(_GREETING_S):
        raise ConfigError(f"python={python!r} sent nothing for {_GREETING_S:g} s: is it Python?")
    try:
        greeting = msgspec.json.decode(pipe.recv_bytes(), type=Greeting)
    except (EOFError, OSError, msgspec.MsgspecError):
        process.join(5)
        raise ConfigError(
            f"python={python!r} ended (exit code {process.exitcode}) before it sent its version of "
            "lightspan: is it a working Python interpreter?"
        ) from None
    problem = find_problem(python, greeting)
    if problem is not None:
        raise ConfigError(problem)
    if greeting.lightspan != __version__:
        log.warning(
            "%s has lightspan %s, %s has %s: they are compatible, but the same version on both "
            "sides is tested better: %s",
            *(python, greeting.lightspan, sys.executable, __version__, _install(python)),
        )
    pipe.send_bytes(msgspec.json.encode(Assignment(plan=plan, name=name)))


def find_problem(python: str, greeting: Greeting) -> str | None:
    """Return why a process cannot be a runner, with advice; None if it can.

    Args:
        python: path of the interpreter of the process.
        greeting: the greeting that the process sent.
    """
    version = tuple(int(part) for part in greeting.python.split(".")[:2] if part.isdigit())
    if version < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return f"{python} is Python {greeting.python}, and lightspan needs {oldest} or newer"
    if greeting.lightspan is None:
        return (
            f"{python} (Python {greeting.python}) has no lightspan ({greeting.error}): "
            f"{_install(python)}"
        )
    if greeting.protocol and greeting.protocol != PROTOCOL_VERSION:
        return mismatch(python, greeting.lightspan, greeting.protocol)
    if greeting.error is not None:
        return (
            f"lightspan {greeting.lightspan} of {python} cannot work for lightspan {__version__} "
            f"of {sys.executable} ({greeting.error}): install the same version there, "
            f"{_install(python)}"
        )
    return None


def mismatch(python: str, lightspan: str, protocol: int) -> str:
    """Return the error message about a process with another protocol version.

    Args:
        python: path of the interpreter of the process; empty if unknown.
        lightspan: version of lightspan of the process.
        protocol: protocol version of the process.
    """
    return (
        f"{python or 'the other side'} has lightspan {lightspan} (protocol {protocol}), "
        f"{sys.executable} has {__version__} (protocol {PROTOCOL_VERSION}): install the same "
        f"version on both sides; there: {_install(python)}; or here: "
        f"{_install(sys.executable, lightspan)}"
    )


def _install(python: str, version: str = __version__) -> str:
    """Return the command that installs lightspan `version` into the environment of `python`."""
    return how_to_install(python=python or "python", version=version)
