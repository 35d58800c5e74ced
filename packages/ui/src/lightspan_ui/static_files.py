"""Serve the files of the page, which the package contains."""

from __future__ import annotations

import hashlib
import mimetypes
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from aiohttp import web

from lightspan.errors import NotFoundError

PREFIX: Final = "/static/"
INDEX: Final = "index.html"
"""The page itself, which every address of a page answers."""
_TYPES: Final = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain",
}


class File(NamedTuple):
    """A file of the page."""

    content: bytes
    type: str
    tag: str
    """Hash of the content, as an `ETag`."""


class StaticFiles:
    """The files of the page by their paths, a fixed table."""

    def __init__(self) -> None:
        self._files = dict(_read(files("lightspan_ui") / "static", ""))

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a file below `/static/`, or else the page itself, which reads the address.

        Raises:
            NotFoundError: there is no such file.
        """
        is_file = request.path.startswith(PREFIX)
        name = request.path.removeprefix(PREFIX) if is_file else INDEX
        file = self._files.get(name)
        if file is None:
            raise NotFoundError(f"there is no file {name!r}")
        # `no-cache` asks every time whether the file is still the same
        headers = {"ETag": file.tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == file.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=file.content, content_type=file.type, charset=_charset(file.type), headers=headers
        )


def _read(folder: Traversable, prefix: str) -> list[tuple[str, File]]:
    """Return the files of a folder and of its subfolders, by their paths."""
    found: list[tuple[str, File]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _read(entry, f"{prefix}{entry.name}/")
        else:
            content = entry.read_bytes()
            ending = "." + entry.name.rpartition(".")[2]
            kind = _TYPES.get(ending) or mimetypes.guess_type(entry.name)[0]
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found.append(
                (f"{prefix}{entry.name}", File(content, kind or "application/octet-stream", tag))
            )
    return found


def _charset(kind: str) -> str | None:
    return "utf-8" if kind.startswith("text/") else None
