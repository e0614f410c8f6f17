"""A chat on this machine that keeps the messages which a search sends it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


class Chat:
    """What the chat received, and its address."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[bytes] = []

    @property
    def texts(self) -> list[str]:
        return [json.loads(body)["text"] for body in self.bodies]


@contextmanager
def open_chat(status: int = 200, *, secret: str) -> Iterator[Chat]:
    """Open a chat whose address has a secret part and that answers every message with the status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            chat.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        chat = Chat(f"http://127.0.0.1:{server.server_address[1]}/hook/{secret}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield chat
        server.shutdown()
