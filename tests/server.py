"""A web server on 127.0.0.1 that serves a folder with byte ranges, counts what it sends and can be made to fail."""
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class RangeServer(ThreadingHTTPServer):
    """url: of the folder; sent: bytes of shards sent; requests: (name, begin, end) of every range sent; failures: so many
    requests are answered with 503 first; ranges: whether byte ranges are honoured."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.url = folder, f"http://127.0.0.1:{self.server_port}"
        self.sent, self.failures, self.ranges = 0, 0, True
        self.requests: list[tuple[str, int, int]] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(False)

    def do_GET(self):
        self._answer(True)

    def _answer(self, body: bool) -> None:
        server, path = self.server, self.server.folder / self.path.lstrip("/")
        if server.failures:
            server.failures -= 1
            return self._send(503, b"", {})
        if not path.is_file():
            return self._send(404, b"", {})
        content, asked = path.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not (asked and server.ranges):
            return self._send(200, content, {"Accept-Ranges": "bytes"}, body)
        begin, end = int(asked[1]), min(int(asked[2]) + 1, len(content))
        server.requests.append((path.name, begin, end))
        server.sent += end - begin
        self._send(206, content[begin:end], {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def serving(folder: Path):
    with RangeServer(folder) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()
