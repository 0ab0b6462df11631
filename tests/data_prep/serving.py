"""A server of a real target in this process, which can be told to fail: what the tests of `--server` talk to."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from data_prep.generate import generate
from data_prep.model import load_model
from data_prep.target import stop_token_ids
from data_prep.tokens import load_tokenizer

# What a server can do instead of answering: called with the handler and the answer's bytes.
Fault = Callable[["_Handler", bytes], None]


class Oracle:
    """Real greedy generation of `target`, each prompt once."""

    def __init__(self, target: Path):
        self.model, self.tokenizer = load_model(target), load_tokenizer(target)
        self.stops = stop_token_ids(target, self.tokenizer)
        self.known: dict[tuple, list[int]] = {}
        self.lock = threading.Lock()

    def __call__(self, prompt: list[int], limit: int) -> list[int]:
        key = (*prompt, -limit)
        with self.lock:
            if key not in self.known:
                self.known[key] = generate(self.model, [prompt], limit, self.stops)[0]
            return self.known[key]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids[:-1] if ids[-1] in self.stops else ids)


class TargetServer(ThreadingHTTPServer):
    """Speaks like vLLM; with `sglang` like SGLang, with `ids` False like servers that return text only.

    `fault(number, prompt)` is asked before the `number`-th answer (from 0) and returns a Fault or None.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, oracle, fault=lambda number, prompt: None, *, sglang=False, ids=True, models=None, context=4096):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.oracle, self.fault, self.sglang, self.ids = oracle, fault, sglang, ids
        owner = "sglang" if sglang else "vllm"
        self.models = models or [{"id": "tiny", "root": "/models/tiny", "owned_by": owner, "max_model_len": context}]
        self.lock = threading.Lock()
        self.asked: list[list[int]] = []  # prompts, in the order they came
        self.bodies: list[dict] = []
        self.times: list[float] = []
        self.keys: set[str | None] = set()
        self.open = self.most_open = 0

    def __enter__(self) -> "TargetServer":
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address) -> None:
        """Clients that went away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: TargetServer

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self.server.keys.add(self.headers.get("Authorization"))
        if self.path == "/v1/models":
            self.send(200, json.dumps({"object": "list", "data": self.server.models}).encode())
        else:
            self.send(404, b"not found")

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        native = self.path == "/generate"
        if native != server.sglang or not native and self.path != "/v1/completions":
            return self.send(404, b"not found")
        prompt = body["input_ids"] if native else body["prompt"]
        limit = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        with server.lock:
            number = len(server.asked)
            server.asked.append(prompt)
            server.bodies.append(body)
            server.times.append(time.monotonic())
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        try:
            ids = server.oracle(prompt, limit)
            fault = server.fault(number, prompt)
            answer = json.dumps(self._native(ids) if native else self._completion(prompt, ids)).encode()
            if fault:
                fault(self, answer)
            else:
                self.send(200, answer)
        finally:
            with server.lock:
                server.open -= 1

    def _completion(self, prompt: list[int], ids: list[int]) -> dict:
        stopped = ids[-1] in self.server.oracle.stops
        choice = {"index": 0, "text": self.server.oracle.text(ids), "finish_reason": "stop" if stopped else "length"}
        choice["stop_reason"] = ids[-1] if stopped and ids[-1] != self.server.oracle.tokenizer.eos_token_id else None
        if self.server.ids:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        return {"object": "text_completion", "model": "tiny", "choices": [choice]}

    def _native(self, ids: list[int]) -> dict:
        stopped = ids[-1] in self.server.oracle.stops
        finish = {"type": "stop", "matched": ids[-1]} if stopped else {"type": "length", "length": len(ids)}
        answer = {"text": self.server.oracle.text(ids), "meta_info": {"finish_reason": finish}}
        return answer | ({"output_ids": ids} if self.server.ids else {})

    def send(self, status: int, content: bytes, claimed: int | None = None, **headers: str) -> None:
        """An answer whose length is said to be `claimed` (default: what it is)."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content) if claimed is None else claimed))
        self.end_headers()
        self.wfile.write(content)


def status(code: int, **headers: str) -> Fault:
    return lambda handler, answer: handler.send(code, b"told to fail", **headers)


def reset(handler: _Handler, answer: bytes) -> None:
    """The connection breaks without a byte."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.connection.close()


def stall(seconds: float) -> Fault:
    def fault(handler: _Handler, answer: bytes) -> None:
        time.sleep(seconds)
        handler.send(200, answer)

    return fault


def trickle(handler: _Handler, answer: bytes) -> None:
    """Bytes come in time, one after another, and never end."""
    handler.send(200, b"", claimed=len(answer))
    for i in range(len(answer)):
        handler.wfile.write(answer[i : i + 1])
        time.sleep(0.1)


def truncate(handler: _Handler, answer: bytes) -> None:
    """The body ends before its announced length."""
    handler.send(200, answer[: len(answer) // 2], claimed=len(answer))
    handler.close_connection = True


def replace(content: bytes) -> Fault:
    return lambda handler, answer: handler.send(200, content)


def change(**fields: object) -> Fault:
    """The answer with other `fields` in its first choice."""

    def fault(handler: _Handler, answer: bytes) -> None:
        whole = json.loads(answer)
        whole["choices"][0] |= fields
        handler.send(200, json.dumps(whole).encode())

    return fault
