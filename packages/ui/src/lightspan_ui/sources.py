"""Find the runs and stores that were named on the command line, and open their stores to read.

They are a fixed table: a request names an entry of it, never a path or URL.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote

from lightspan.errors import ConfigError, LightspanError, NotFoundError
from lightspan.stores import names_store, open_existing, public_url
from lightspan.stores.protocol import Store
from lightspan.training.folder import CONFIG, METRICS
from lightspan_ui.catalogue import Catalogue
from lightspan_ui.entries import Scoring
from lightspan_ui.run_files import stamp_of
from lightspan_ui.runs import Run, secretless

MAX_RUNS: Final = 2_000
"""Maximum number of runs in a folder that are shown; the last by name."""
PATIENCE_S: Final = 5.0
"""Seconds for which an operation is retried while the server of a store is unreachable."""
_UNSAFE: Final = re.compile(r"[^\w.-]+")


class Place:
    """A run or a store with rollouts.

    Args:
        name: name in addresses, such as `runs/sql` or `stores/app`.
        url: returns the URL of the store.
        run_id: returns the id of the run in the store; None for all rollouts.
    """

    def __init__(
        self,
        name: str,
        url: Callable[[], str],
        run_id: Callable[[], str | None] = lambda: None,
        run: Run | None = None,
    ) -> None:
        self.name = name
        self.run = run
        """The run; None for a store."""
        self._url = url
        self._run_id = run_id
        self.used = 0.0
        """Time (monotonic clock) at which a page last needed the store."""
        self._catalogue: Catalogue | None = None
        self._path: tuple[str, Path] | None = None
        self._file: tuple[int, ...] | None = None
        self._lock = asyncio.Lock()

    @property
    def url(self) -> str:
        """URL of the store."""
        return self._url()

    @property
    def run_id(self) -> str | None:
        """Id of the run in the store; None for all rollouts."""
        return self._run_id()

    @property
    def file(self) -> Path | None:
        """The store's file; None if it does not exist yet, or if the store is no file."""
        if self._path is None or self._path[0] != self.url:
            path = store_file(self.url)
            self._path = None if path is None else (self.url, path)
        return None if self._path is None else self._path[1]

    @property
    def is_open(self) -> bool:
        return self._catalogue is not None

    @property
    def progress(self) -> int:
        """Number that grows while more of the open store is read in the background."""
        return 0 if self._catalogue is None else self._catalogue.progress

    async def catalogue(self, scoring: Scoring | None = None) -> Catalogue:
        """Return the rollouts of the place, as they are now.

        Args:
            scoring: how rewards and steps are computed now; None if that is unchanged.

        Raises:
            LightspanError: the store cannot be read.
        """
        async with self._lock:
            catalogue = await self._open()
            try:
                await catalogue.refresh(scoring)
            except (LightspanError, OSError):  # but not if the page was closed meanwhile
                await self._close()
                raise
            return catalogue

    async def count(self) -> dict[str, int]:
        """Return the number of rollouts by status, without reading their summaries.

        Raises:
            LightspanError: the store cannot be read.
        """
        async with self._lock:
            store = (await self._open()).store
            return {str(status): n for status, n in (await store.count()).items()}

    async def _open(self) -> Catalogue:
        """Open the store, unless it is open and its file is still the same."""
        file = self._file_id()
        if self._catalogue is not None and file != self._file:  # moved, or replaced by another
            await self._close()
        if self._catalogue is None:
            store = open_to_read(self.url)
            await store.open()
            self._catalogue, self._file = Catalogue(store, self._run_id()), file
        return self._catalogue

    async def close(self) -> None:
        """Close the store. Idempotent."""
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        catalogue, self._catalogue = self._catalogue, None
        if catalogue is not None:
            await catalogue.close()
            with suppress(Exception):
                await catalogue.store.close()

    def _file_id(self) -> tuple[int, ...] | None:
        """Return the identity of the store's file; None if the store is no file."""
        stamp = None if self.file is None else stamp_of(self.file)
        return None if stamp is None else stamp[:1]


class Sources:
    """The runs and stores that are shown.

    Args:
        names: folders of runs, a run's folder, and URLs of stores.

    Raises:
        ConfigError: a folder does not exist or is that of a model, or a name is that of a file.
    """

    def __init__(self, names: Sequence[str]) -> None:
        folders = [name for name in names if not names_store(name)]
        for name in folders:
            if not Path(name).is_dir():
                raise ConfigError(
                    f"{secretless(name)} is no folder: name a run such as runs/sql, a folder of "
                    "runs, or a store such as sqlite:app.db"
                )
            if is_model(Path(name)) and not is_run(Path(name)):
                raise ConfigError(
                    f"{secretless(name)} is the folder of a model, not of a run: name a run such "
                    "as runs/sql, or a folder of runs. Fine-tuning (SFT) writes a model alone, "
                    "without rollouts"
                )
        self._roots = [Path(name) for name in folders]
        self.runs: dict[str, Place] = {}
        self._paths: dict[Path, str] = {}
        self._gone: list[Place] = []
        """Runs whose folder is gone, and whose store is not closed yet."""
        self.stores: dict[str, Place] = {}
        for url in filter(names_store, names):
            if url.startswith("memory:"):
                raise ConfigError("a store in memory: belongs to one process, and cannot be shown")
            name = unique(store_name(url), self.stores)
            self.stores[name] = Place(f"stores/{name}", partial(str, url))

    def scan(self) -> None:
        """Add the runs that began, and remove those whose folder is gone."""
        paths = [path for root in self._roots for path in run_folders(root)]
        for path in paths:
            if path not in self._paths:
                name = unique(shown_name(path), self.runs)
                self._paths[path] = name
                self.runs[name] = place_of_run(Run(name, path))
        for path in self._paths.keys() - set(paths):
            self._gone.append(self.runs.pop(self._paths.pop(path)))

    def find(self, kind: str, name: str) -> Place:
        """Return a place by its kind, `runs` or `stores`, and its name.

        Raises:
            NotFoundError: there is none.
        """
        table = self.runs if kind == "runs" else self.stores
        if name not in table:
            self.scan()
        if name not in table:
            names = ", ".join(list(table)[:5]) or "none"
            raise NotFoundError(
                f"there is no {kind[:-1]} {name!r}; there are, for example: {names}"
            )
        return table[name]

    @property
    def front_page(self) -> str:
        """Path of the page to open: that of the only place, or the list of places."""
        self.scan()
        names = [place.name for place in self.places()]
        kind, _, name = names[0].partition("/") if len(names) == 1 else ("", "", "")
        return f"/{kind}/{quote(name, safe='')}" if kind else "/"

    def places(self) -> Iterator[Place]:
        """Yield all places."""
        yield from self.runs.values()
        yield from self.stores.values()

    async def close_unused(self, before: float) -> None:
        """Close the stores that no page has needed since a time of the monotonic clock."""
        for place in list(self.places()):
            if place.is_open and place.used < before:
                await place.close()
        while self._gone:
            await self._gone.pop().close()

    async def close(self) -> None:
        """Close all stores."""
        for place in [*self.places(), *self._gone]:
            await place.close()


def place_of_run(run: Run) -> Place:
    """Return the place of a run, whose store its settings name."""
    folder = run.folder
    return Place(
        f"runs/{run.name}",
        lambda: str(folder.read_config().get("store") or folder.store_url),
        lambda: folder.read_config().get("run_id"),
        run,
    )


def open_to_read(url: str) -> Store:
    """Return the store of a URL, which must exist, without opening it."""
    store = open_existing(url, read_only=True)
    if (set_patience := getattr(store, "set_patience", None)) is not None:
        set_patience(PATIENCE_S)
    return store


def run_folders(root: Path) -> list[Path]:
    """Return the folders of runs: the folder itself if it is one, or else those in it.

    They are sorted by name. The list is empty if the folder cannot be read.
    """
    root = root.resolve()
    if is_run(root):
        return [root]
    try:
        with os.scandir(root) as entries:
            paths = [Path(entry.path) for entry in entries if entry.is_dir()]
    except OSError:
        return []
    return sorted(path for path in paths if is_run(path))[-MAX_RUNS:]


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run."""
    if not (path / CONFIG).exists():
        return False
    return (path / METRICS).exists() or not is_model(path)  # most are known by their metrics


def is_model(path: Path) -> bool:
    """Return whether a folder is that of a model, which has a `config.json` like a run."""
    return any((path / name).exists() for name in MODEL_FILES)


MODEL_FILES: Final = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
    *("adapter_config.json", "tokenizer_config.json"),
)
"""Files of which transformers writes at least one, and a run none, next to `config.json`."""


def shown_name(path: Path) -> str:
    """Return the name of a folder as text that JSON can hold."""
    return path.name.encode(errors="surrogateescape").decode(errors="replace")


def store_name(url: str) -> str:
    """Return a short name of a store for addresses, such as `app` for `sqlite:app.db`."""
    text = secretless(public_url(url)).partition("?")[0]
    scheme, _, rest = text.partition("://")
    if scheme not in ("http", "https"):  # the name of the file or of the database
        rest = text.rpartition("/")[2].removeprefix("sqlite:")
    name = rest.removesuffix(".db").removesuffix(".sqlite")
    return _UNSAFE.sub("-", name).strip("-.") or "store"


def store_file(url: str) -> Path | None:
    """Return the path of a store's file; None if the store is no file."""
    with suppress(ConfigError, NotFoundError):
        path: Path | None = getattr(open_existing(url), "path", None)
        return path
    return None


def unique(name: str, names: Collection[str]) -> str:
    """Return the name, with a number if it is among `names`."""
    number, result = 1, name
    while result in names:
        number += 1
        result = f"{name}~{number}"
    return result
