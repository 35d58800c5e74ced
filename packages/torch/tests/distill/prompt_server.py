"""A server with vLLM's routes that scores prompts, over real HTTP, with the weights of a model.

The forms of requests and responses are those of vLLM 0.32: `/v1/models`, `/tokenize`, and
`/v1/completions` with a prompt of token ids and `prompt_logprobs`.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model

DROP = 0
"""Used in place of an HTTP status: the connection is closed without a response."""


class PromptServer:
    """A server of one model.

    Args:
        folder: folder of the model.
        name: name under which the model is served.
    """

    def __init__(self, folder: Path, name: str = "large") -> None:
        self.name = name
        self.context = 512
        self.refuse: dict[str, list[tuple[int, str]]] = {}
        """Route → statuses and texts of its next responses. The text of a redirect is its URL."""
        self.requests: Counter[str] = Counter()
        self.headers: list[str | None] = []
        self.bodies: list[dict[str, Any]] = []
        self.has_logprobs = True
        self._model = load_model(folder)
        self._tokenizer = load_tokenizer(folder).tokenizer
        self._lock = threading.Lock()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": self.name, "max_model_len": self.context}]}
        assert body["model"] == self.name
        if path == "/tokenize":
            assert body["add_special_tokens"] is False
            ids = self._tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return {"tokens": ids, "count": len(ids), "max_model_len": self.context}
        assert path == "/v1/completions"
        assert body["max_tokens"] == 1
        self.bodies.append(body)
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
        if self.has_logprobs:
            choice["prompt_logprobs"] = self._scored(body["prompt"], body["prompt_logprobs"])
        return {"choices": [choice]}

    @torch.no_grad()
    def _scored(self, ids: list[int], count: int) -> list[Any]:
        with self._lock:
            logits = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        logprobs = logits.float().log_softmax(-1)
        entries: list[Any] = [None]
        for place, token in enumerate(ids[1:]):
            row = logprobs[place]
            named = {token, *row.topk(count).indices.tolist()} if count else {token}
            entries.append(
                {
                    str(each): {
                        "logprob": float(row[each]),
                        "rank": int((row > row[each]).sum()) + 1,
                        "decoded_token": self._tokenizer.decode([each]),
                    }
                    for each in named
                }
            )
        return entries

    @contextmanager
    def running(self, port: int = 0) -> Iterator[PromptServer]:
        """Listen in the `with` block, at a free port if `port` is 0."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._respond({})

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                self._respond(json.loads(self.rfile.read(size)))

            def _respond(self, body: dict[str, Any]) -> None:
                outer.requests[self.path] += 1
                outer.headers.append(self.headers["Authorization"])
                status, text = 200, ""
                if refusals := outer.refuse.get(self.path):
                    status, text = refusals.pop(0)
                if status == DROP:
                    self.connection.close()
                    return
                octets = text.encode()
                if status == 200:
                    octets = text.encode() or json.dumps(outer.answer(self.path, body)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(octets)))
                if status == 302:
                    self.send_header("Location", text)
                self.end_headers()
                self.wfile.write(octets)

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
