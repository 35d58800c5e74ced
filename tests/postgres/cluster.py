"""Run a PostgreSQL server for tests, from the installed programs."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import psutil
import psycopg

OWNER: Final = "lightspan"
"""Name of the cluster's superuser."""
PASSWORD: Final = "s3cret/@:%&ü"
"""Password of the role `locked`, the only one with a password."""
_FOLDERS: Final = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
)
_HBA: Final = "local all locked scram-sha-256\nlocal all all trust\n"


def programs() -> Path | None:
    """Return the newest folder that contains `initdb` and `postgres`; None if there is none."""
    folders = [Path(folder) for pattern in _FOLDERS for folder in sorted(glob.glob(pattern))]
    on_path = shutil.which("initdb")
    folders += [Path(on_path).parent] if on_path else []
    whole = [
        folder for folder in folders if all((folder / p).exists() for p in ("initdb", "postgres"))
    ]
    return whole[-1] if whole else None


class Cluster:
    """A PostgreSQL server on a socket in a temporary folder, which is removed at the end.

    Args:
        programs: the folder of PostgreSQL's programs.
        place: parent of the temporary folder; None for a fast one.
        environment: further environment variables of the server.
    """

    def __init__(
        self,
        programs: Path,
        place: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self._programs = programs
        self._user = _user()
        self.folder = Path(tempfile.mkdtemp(prefix="lightspan-pg-", dir=place or _place()))
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if self._user is not None:
            os.chown(self.folder, pwd.getpwnam(self._user).pw_uid, -1)
        data = str(self.folder / "data")
        # a new cluster that a power loss damages is created again
        self._run("initdb", "-D", data, "-U", OWNER, "-A", "trust", "-E", "UTF8", "--no-sync")
        (self.folder / "data" / "pg_hba.conf").write_text(_HBA)
        self.start()
        with self.connect() as db:
            db.execute(f"CREATE ROLE locked LOGIN PASSWORD '{PASSWORD}'".encode())
            db.execute("GRANT CREATE ON DATABASE postgres TO locked")
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGQUIT)
            self._server.wait()
        shutil.rmtree(self.folder)

    def url(self, schema: str, user: str = OWNER) -> str:
        """Return the URL of a store in a schema."""
        return f"postgresql://{user}@/postgres?host={self.folder}&schema={schema}"

    def connect(self, user: str = OWNER, **options: Any) -> psycopg.Connection[Any]:
        """Open a database session of the test's own."""
        return psycopg.connect(
            host=str(self.folder), user=user, dbname="postgres", autocommit=True, **options
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [
                    *(str(self._programs / "postgres"), "-D", str(self.folder / "data")),
                    *("-k", str(self.folder), "-c", "listen_addresses="),
                ],
                cwd=self.folder,
                user=self._user,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while True:
            try:
                self.connect().close()
            except psycopg.OperationalError:
                if self._server.poll() is not None:
                    raise RuntimeError((self.folder / "log").read_text()) from None
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """Kill all processes of the server at once with SIGKILL."""
        assert self._server is not None
        server = psutil.Process(self._server.pid)
        server.suspend()  # so that it starts no other process meanwhile
        for process in (*server.children(recursive=True), server):
            process.kill()
        self._server.wait()

    def _run(self, name: str, *arguments: str) -> None:
        command = [str(self._programs / name), *arguments]
        subprocess.run(command, user=self._user, cwd=self.folder, check=True, capture_output=True)


def _place() -> str | None:
    """Return a folder in memory if there is enough space, else None.

    It is durable enough: killing the server loses no data that the kernel has.
    """
    memory = Path("/dev/shm")
    is_large = memory.is_dir() and shutil.disk_usage(memory).free > 2 << 30
    return str(memory) if is_large and os.access(memory, os.W_OK) else None


def _user() -> str | None:
    """Return the user to run the server as, because PostgreSQL refuses root; None for the
    current one.
    """
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)
