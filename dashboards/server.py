"""The admin API in a detached actor: uvicorn in a thread, on the head node's loopback unless configured otherwise."""

from __future__ import annotations

import os
import threading
import time

import uvicorn

from cotenant.configs.settings import ApiSettings
from cotenant.dashboards.api import create_app
from cotenant.scheduler.client import Client

START_TIMEOUT_S = 20.0


class Api:
    """Methods of the API actor."""

    def __init__(self, settings_json: str, token: str | None) -> None:
        settings = ApiSettings.model_validate_json(settings_json)
        self._client: Client | None = None
        self._lock = threading.Lock()
        config = uvicorn.Config(
            create_app(self._connected, token), host=settings.host, port=settings.port, log_level="warning"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="uvicorn", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise OSError(
                    f"the admin API cannot listen on {settings.host}:{settings.port}: is the port taken, by another "
                    "cotenant perhaps? Set another: COTENANT_API__PORT=8267 (0: any that is free)"
                )
            time.sleep(0.02)

    def ping(self) -> int:
        """Return the process id; used by health checks."""
        return os.getpid()

    def url(self) -> str:
        """Return where the API listens."""
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def _connected(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = Client.connect()
            return self._client
