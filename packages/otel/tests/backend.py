"""A tracing backend for tests: an OTLP receiver over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lightspan.schema.spans import Span
from lightspan_otel.otlp import decode_request

Reply = tuple[int, dict[str, str], bytes]


class Backend:
    """A receiver that stores requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.reply: Callable[[int], Reply] = lambda number: (200, {}, b"")
        self.held = threading.Event()
        self.pause_s = 0.0
        """Seconds that the receiver takes for each request."""
        self.held.set()
        backend = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                backend.held.wait(60)
                time.sleep(backend.pause_s)
                headers = {key.lower(): value for key, value in self.headers.items()}
                backend.requests.append(({**headers, "path": self.path}, body))
                status, more, answer = backend.reply(len(backend.requests))
                self.send_response(status)
                for key, value in {**more, "Content-Length": str(len(answer))}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.held.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def spans(self) -> list[Span]:
        """Return all received spans."""
        found: list[Span] = []
        for headers, body in self.requests:
            decoded = decode_request(body, headers["content-type"])
            assert decoded.refused == []
            found += [arrival.span for arrival in decoded.arrivals]
        return found
