"""Servers that share one line of requests: so many open ones each, retries, and what one fails at taken by others.

A server that fails waits, twice as long every time in a row, and the others answer what it left; after FAILURES times
without a single answer it is given up. A prompt that servers got to and failed at ATTEMPTS times is given up alone.
"""

import queue
import random
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import requests
from tqdm import tqdm

from .conversations import Turn
from .errors import UserError
from .servers import Misconfigured, Refused, Reply, Server, Unavailable

FIRST_WAIT = 1.0  # seconds
LONGEST_WAIT = 60.0
LONGEST_ASKED = 600.0  # that a server's Retry-After may ask for
FAILURES = 14  # about ten minutes of waiting: long enough to restart a server with a large model
ATTEMPTS = 5


@dataclass(eq=False)
class Request:
    turn: Turn
    seed: int
    attempts: int = 0


@dataclass(eq=False)
class _State:
    """How a server has fared: failures in a row, when it may be asked again, why it was given up."""

    server: Server
    changed: threading.Condition
    failures: int = 0
    failed_at: float = 0.0
    ready_at: float = 0.0
    given_up: str | None = None


@dataclass(eq=False)
class Fleet:
    """Threads that answer requests until `close`. They are daemons: an interrupted process does not wait for them."""

    servers: list[Server]
    concurrency: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    todo: deque[Request] = field(default_factory=deque)
    done: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)  # (request, Reply | Exception)
    closed: bool = False

    def __post_init__(self) -> None:
        self.states = [_State(server, threading.Condition(self.lock)) for server in self.servers]

    def __enter__(self) -> "Fleet":
        for state in self.states:
            for _ in range(self.concurrency):
                threading.Thread(target=self._work, args=(state,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.closed = True
            for state in self.states:
                state.changed.notify_all()

    @property
    def capacity(self) -> int:
        """Requests to have in hand so that no thread waits for the next one."""
        return 2 * self.concurrency * len(self.servers)

    def submit(self, request: Request) -> None:
        """Queue `request`; its outcome comes out of `take`."""
        with self.lock:
            self.todo.append(request)
            self._wake()

    def take(self) -> tuple[Request, Reply | Refused | Unavailable]:
        """The next finished request. UserError when all servers have been given up, or one changes prompts."""
        while True:
            try:
                request, outcome = self.done.get(timeout=0.5)
            except queue.Empty:
                if all(state.given_up for state in self.states):
                    reasons = "; ".join(f"{state.server.url}: {state.given_up}" for state in self.states)
                    raise UserError(
                        f"no server answers any more ({reasons}); finished responses are kept: start the servers and "
                        "run the same command again."
                    ) from None
                continue
            if isinstance(outcome, (Reply, Refused, Unavailable)):
                return request, outcome
            raise outcome

    def _work(self, state: _State) -> None:
        """One thread's life: request after request on one connection."""
        with requests.Session() as session:
            while (request := self._next(state)) is not None:
                started = time.monotonic()
                try:
                    outcome = state.server.ask(session, request.turn.prompt.tolist(), request.seed)
                except Misconfigured as error:
                    self._give_up(state, str(error))
                    self._retry(request)
                except Unavailable as error:
                    self._pause(state, error, started)
                    request.attempts += not error.blameless
                    if request.attempts < ATTEMPTS:
                        self._retry(request)
                    else:
                        self.done.put((request, error))
                except Exception as error:  # Refused, and what the main thread has to raise
                    state.failures = 0
                    self.done.put((request, error))
                else:
                    state.failures = 0
                    self.done.put((request, outcome))

    def _next(self, state: _State) -> Request | None:
        """The next request once the server may be asked; None at the end."""
        with self.lock:
            while not self.closed and state.given_up is None:
                wait = state.ready_at - time.monotonic()
                if wait <= 0 and self.todo:
                    request = self.todo.popleft()
                    if self.todo:
                        state.changed.notify()  # those that were not woken because the server was resting
                    return request
                state.changed.wait(wait if wait > 0 else None)
            return None

    def _retry(self, request: Request) -> None:
        with self.lock:
            self.todo.appendleft(request)
            self._wake()

    def _wake(self) -> None:
        now = time.monotonic()
        for state in self.states:
            if state.ready_at <= now:
                state.changed.notify()

    def _pause(self, state: _State, error: Unavailable, started: float) -> None:
        """Let the server rest; requests that were open when it failed are the same failure."""
        with self.lock:
            if started < state.failed_at:
                return
            state.failures += 1
            state.failed_at = time.monotonic()
            wait = min(FIRST_WAIT * 2 ** (state.failures - 1), LONGEST_WAIT) * random.uniform(0.5, 1.5)
            if error.wait is not None:
                wait = min(error.wait, LONGEST_ASKED)
            state.ready_at = state.failed_at + wait
            failures = state.failures
        if failures > FAILURES:
            self._give_up(state, f"{failures} failures in a row, the last: {error}")
        else:
            tqdm.write(f"{state.server.url}: {error}; asking again in {wait:.0f} s", file=sys.stderr)

    def _give_up(self, state: _State, reason: str) -> None:
        with self.lock:
            if state.given_up is None:
                state.given_up = reason
                state.changed.notify_all()
                tqdm.write(f"warning: {state.server.url} is given up: {reason}", file=sys.stderr)
