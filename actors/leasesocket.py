"""Where the jobs of a host ask about their own leases: a Unix socket, one line of JSON each way."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socketserver
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from cotenant.actors.enforcement.mps import LONGEST_TEMP, make_private
from cotenant.actors.shim.resources import ANSWER_S, MOST_BYTES
from cotenant.scheduler.errors import CotenantError, NotPermitted, TooManyRequests

MOST_AT_ONCE = 8  # of all jobs together; more wait for their turn in the backlog
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
        super().__init__(path, _Handler)


class _Handler(socketserver.StreamRequestHandler):
    timeout = ANSWER_S

    def handle(self) -> None:
        """Answer one question."""
        server = cast(_Server, self.server)
        with contextlib.suppress(OSError), server.turns:  # whoever asked may have hung up
            reply = _reply(self.rfile.readline(MOST_BYTES), server.answer)
            self.wfile.write(json.dumps(reply).encode() + b"\n")


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
