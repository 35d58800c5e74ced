"""Runner processes of another interpreter: that of the app's own environment.

Nothing of this environment goes there but the folders of the app. The process says at once which
lightspan it has, before it is sent anything that another version might read otherwise. What is in
it is the same `worker`, guarded in the same way; one that never says that it is well, because its
lightspan is older, is not ended for its silence.
"""

from __future__ import annotations

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
GREETING_S: Final = 60.0
"""How long a process has to say what it is."""
OLDEST_PYTHON: Final = (3, 11)
MAKE_APPS: Final = "make the app's environment first, such as with `python3 -m venv .venv-app`"

# The other side may have no lightspan, or another one: nothing but the standard library is relied
# on before it has said so. A working folder is no place for modules.
_ENTRY: Final = """
import json, sys
from multiprocessing.connection import Connection
sys.path[:] = [path for path in sys.path if path]
line = Connection(int(sys.argv[1]))
greeting = {"python": sys.version.split()[0]}
try:
    import lightspan
    greeting["lightspan"] = str(getattr(lightspan, "__version__", "unknown"))
    from lightspan.schema import semconv
    greeting["protocol"] = getattr(semconv, "PROTOCOL_VERSION", 0)
    from lightspan.runners.process_main import serve
except Exception as error:
    greeting["error"] = type(error).__name__ + ": " + str(error)
line.send_bytes(json.dumps(greeting).encode())
if "error" not in greeting:
    serve(line)
"""


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself first."""

    python: str
    lightspan: str | None = None
    protocol: int = 0
    error: str | None = None
    """Why it cannot be a runner."""


def find_interpreter(
    python: str | os.PathLike[str], *, option: str = "python", remedy: str = MAKE_APPS
) -> str:
    """The interpreter's path, links kept: they tell a virtual environment.

    Args:
        option: what it was given as.
        remedy: what to do where there is no such program.

    Raises:
        ConfigError: there is no such program.
    """
    path = os.path.expanduser(os.fspath(python))
    program = shutil.which(path)
    if program is not None and not Path(path).is_dir():
        return os.path.abspath(program)
    if Path(path).is_dir():
        inside = Path(path, "bin", "python")
        hint = f"it is a folder; did you mean {inside}?" if inside.exists() else "it is a folder"
    elif Path(path).exists():
        hint = "it cannot be executed"
    else:
        hint = f"there is no such program; {remedy}"
    raise ConfigError(f"{option}={path!r} is no interpreter: {hint}")


def app_folders(folders: Folders | None) -> list[str]:
    """Where the other interpreter looks for the app before its own packages.

    Args:
        folders: of the user's; None for the folder of the running script and the working folder,
            as far as they belong to no environment.

    Raises:
        ConfigError: one of them is no folder.
    """
    if folders is not None:
        return check_folders("app_dirs", folders)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    home = [] if script is None else [os.path.dirname(os.path.abspath(script))]
    return [path for path in dict.fromkeys([*home, os.getcwd()]) if not of_environment(path)]


def check_folders(option: str, folders: Folders) -> list[str]:
    """The absolute paths of the folders. Raises `ConfigError` if one is no folder."""
    several = [folders] if isinstance(folders, str | os.PathLike) else folders
    paths = [os.path.abspath(os.path.expanduser(os.fspath(folder))) for folder in several]
    for path in paths:
        if not os.path.isdir(path):
            raise ConfigError(f"{option}: there is no folder {path}")
    return paths


def of_environment(folder: str) -> bool:
    """Whether the folder lies in this environment, whose packages must not be seen there."""
    inside = any(Path(folder).is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))
    return inside or "site-packages" in folder or "dist-packages" in folder


def environment_for_others() -> dict[str, str]:
    """The environment without what belongs to this interpreter."""
    ours = {"PYTHONHOME", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    if "PYTHONPATH" in kept:
        folders = kept.pop("PYTHONPATH").split(os.pathsep)
        folders = [path for path in folders if path and not of_environment(os.path.abspath(path))]
        if folders:
            kept["PYTHONPATH"] = os.pathsep.join(folders)
    return kept


class Subprocess:
    """A process of another interpreter, with the methods of `multiprocessing`'s."""

    def __init__(self, python: str, theirs: socket.socket) -> None:
        fd = theirs.fileno()
        self._popen = subprocess.Popen(
            [python, "-c", _ENTRY, str(fd)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            env=environment_for_others(),
        )

    @property
    def pid(self) -> int | None:
        return self._popen.pid

    @property
    def exitcode(self) -> int | None:
        """Negative: the signal that ended it. None while it runs."""
        return self._popen.poll()

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or for so long."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        """Nothing to do: this class holds nothing that `multiprocessing`'s would."""


def start(python: str) -> tuple[Subprocess, Connection]:
    """Start a process; it waits to be told what it is to do.

    Raises:
        ConfigError: it cannot be executed.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = Subprocess(python, theirs)
        except OSError as error:
            ours.close()
            raise ConfigError(f"python={python!r} cannot be executed: {error}") from error
    return process, Connection(ours.detach())


def greet(python: str, process: Subprocess, line: Connection, plan: RunnerPlan, name: str) -> None:
    """Hear which lightspan the process has, and tell it its plan.

    Raises:
        ConfigError: it is no Python, or has no lightspan that fits this one.
    """
    try:
        said = line.recv_bytes() if line.poll(GREETING_S) else None
        greeting = None if said is None else msgspec.json.decode(said, type=Greeting)
    except (EOFError, OSError, msgspec.MsgspecError):
        process.join(5)
        raise ConfigError(
            f"python={python!r} ended (exit code {process.exitcode}) before it said which "
            "lightspan it has: is it a Python interpreter that works?"
        ) from None
    if greeting is None:
        raise ConfigError(f"python={python!r} said nothing for {GREETING_S:g} s: is it a Python?")
    wrong = complaint(python, greeting)
    if wrong is not None:
        raise ConfigError(wrong)
    if greeting.lightspan != __version__:
        log.warning(
            "%s has lightspan %s, %s has %s: they understand each other, but the same version on "
            "both sides is tested better: %s",
            *(python, greeting.lightspan, sys.executable, __version__, _install(python)),
        )
    line.send_bytes(msgspec.json.encode(Assignment(plan=plan, name=name)))


def complaint(python: str, greeting: Greeting) -> str | None:
    """What is wrong with the other side, and what to do; None if it fits."""
    remedy = _install(python)
    version = tuple(int(part) for part in greeting.python.split(".")[:2] if part.isdigit())
    if version < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        return f"{python} is Python {greeting.python}, and lightspan needs {needed} or newer"
    if greeting.lightspan is None:
        return f"{python} (Python {greeting.python}) has no lightspan ({greeting.error}): {remedy}"
    if greeting.protocol and greeting.protocol != PROTOCOL_VERSION:
        return mismatch(python, greeting.lightspan, greeting.protocol)
    if greeting.error is not None:
        return (
            f"lightspan {greeting.lightspan} of {python} cannot work for lightspan {__version__} "
            f"of {sys.executable} ({greeting.error}): install the same version there, {remedy}"
        )
    return None


def mismatch(python: str, lightspan: str, protocol: int) -> str:
    """The message where the other side speaks another protocol."""
    return (
        f"{python or 'the other side'} has lightspan {lightspan} (protocol {protocol}), "
        f"{sys.executable} has {__version__} (protocol {PROTOCOL_VERSION}): install the same "
        f"version on both sides; there: {_install(python)}; or here: "
        f"{_install(sys.executable, lightspan)}"
    )


def _install(python: str, version: str = __version__) -> str:
    """What brings a version of lightspan into an environment."""
    return how_to_install(python=python or "python", version=version)
