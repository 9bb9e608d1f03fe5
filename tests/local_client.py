"""The real client, API and command line on a real scheduler with fake hosts, without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from fake_hosts import FakeFleet, FakeHost, PromptScheduler

from cotenant.actors.scheduler_actor import Scheduler
from cotenant.configs.settings import Settings
from cotenant.dashboards.api import create_app
from cotenant.scheduler.client import Client


class LocalLink:
    """Calls the scheduler in this process; see ``transport.Link``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def scheduler(self, method: str, *args: object) -> Any:
        """Call the scheduler."""
        return getattr(self._scheduler, method)(*args)

    def device_readings(self) -> dict[str, tuple[float, float | None, float | None]]:
        """Nothing is measured here."""
        return {}

    def origin(self) -> tuple[None, None]:
        """This process is on no host of the cluster."""
        return None, None

    def close(self) -> None:
        """Nothing is held."""


class LocalCotenant:
    """A scheduler whose hosts do at once what they are told."""

    def __init__(
        self, home: Path, *hosts: FakeHost, settings: Settings | None = None, identity: str | None = None
    ) -> None:
        self.hosts = hosts
        config = (settings or Settings()).model_dump_json()
        fleet = FakeFleet(*hosts, identity=identity)
        self.scheduler = PromptScheduler(config, f"sqlite:///{home}/journal.db", str(home), fleet)  # type: ignore[arg-type]
        self.client = Client(LocalLink(self.scheduler))  # type: ignore[arg-type]
        self.report()

    def report(self) -> None:
        """Every host reports, twice: what it started on the first is known after the second."""
        for host in (*self.hosts, *self.hosts):
            message = host.message()
            host.answered(message, self.scheduler.report(message))

    def http(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Send a request to the API in front of it."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(create_app(lambda: self.client, None))
            async with httpx.AsyncClient(transport=transport, base_url="http://api/api/v1") as session:
                return await session.request(method, path, json=body, headers=headers)

        return asyncio.run(send())

    def close(self) -> None:
        """End the scheduler's threads."""
        self.scheduler.close()
