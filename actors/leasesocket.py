"""Where the jobs of a host ask about their own leases: a Unix socket, one line of JSON each way."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from cotenant.actors.enforcement.mps import LONGEST_TEMP, make_private
from cotenant.actors.shim.resources import ANSWER_S, MOST_BYTES
from cotenant.scheduler.errors import CotenantError, NotPermitted, TooManyRequests

MOST_AT_ONCE = 8  # that are asked of the scheduler, of all jobs together; more wait for their turn
MOST_OPEN = 128  # connections; more are closed at once, and those who ask try again
ASK_S = 3.0  # a question is sent as a whole: whoever is held still in the middle of it asks once more
_LONGEST_PATH = 100
_OWN_FOLDER = "ct-agent-"

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class LeaseSocket:
    """Answers the jobs of a host until it is closed. A socket that an earlier agent left is replaced.

    Args:
        path: Where; see ``socket_path``.
        answer: Returns the answer to a question; a ``CotenantError`` is told to whoever asked.

    Raises:
        OSError: It cannot be made there.
    """

    def __init__(self, path: str, answer: Answer) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 - a socket
        self._path = path
        self._server = _Server(path, answer)
        Path(path).chmod(0o600)
        threading.Thread(target=self._server.serve_forever, name="lease-socket", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more, and leave nothing behind."""
        self._server.shutdown()
        self._server.server_close()
        Path(self._path).unlink(missing_ok=True)
        if Path(self._path).parent.name.startswith(_OWN_FOLDER):
            with contextlib.suppress(OSError):
                Path(self._path).parent.rmdir()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: str, answer: Answer) -> None:
        self.answer = answer
        self.turns = threading.Semaphore(MOST_AT_ONCE)
        self._open = threading.Semaphore(MOST_OPEN)
        super().__init__(path, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there may be one more connection: no job takes the files and threads of the agent."""
        return self._open.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer it in a thread of its own."""
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._open.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer it, and let the next one in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.release()


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        """Answer one question. Nobody waits for one who does not get it out: only an answer takes a turn."""
        server = cast(_Server, self.server)
        with contextlib.suppress(OSError):  # whoever asked may have hung up
            line = _question(self.request)
            with server.turns:
                reply = _reply(line, server.answer)
            self.request.settimeout(ANSWER_S)
            self.request.sendall(json.dumps(reply).encode() + b"\n")


def _question(link: socket.socket) -> bytes:
    """Return what is asked.

    Raises:
        OSError: It does not come in time.
    """
    deadline, line = time.monotonic() + ASK_S, b""
    while not line.endswith(b"\n") and len(line) < MOST_BYTES:
        if (left_s := deadline - time.monotonic()) <= 0.0:
            raise TimeoutError("the question did not come in time")
        link.settimeout(left_s)
        if not (more := link.recv(MOST_BYTES)):
            break
        line += more
    return line


def _reply(line: bytes, answer: Answer) -> Mapping[str, Any]:
    try:
        question = json.loads(line)
        if not isinstance(question, dict):
            raise NotPermitted("a question is a JSON object")
        return answer(question)
    except TooManyRequests as error:
        return {"error": str(error), "retry_after_s": error.retry_after_s}
    except (CotenantError, ValueError, RecursionError) as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - the job must not wait for an answer that never comes
        return {"error": f"the host agent failed: {type(error).__name__}"}


def socket_path(run_dir: Path) -> str:
    """Return the path of a host's socket: the same after a restart, and as short as sockets need it.

    Raises:
        OSError: There is no private place for it.
    """
    path = str(run_dir / "agent.sock")
    if len(path) <= _LONGEST_PATH:
        return path
    temp = tempfile.gettempdir()
    key = hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]
    folder = f"{temp if len(temp) <= LONGEST_TEMP else '/tmp'}/{_OWN_FOLDER}{os.getuid()}-{key}"
    make_private(folder)
    return f"{folder}/agent.sock"
