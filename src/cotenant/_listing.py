"""Which jobs ``ps`` lists, and what it leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotenant.scheduler.client import Client
    from cotenant.scheduler.views import JobView


def some_jobs(client: Client, show_all: bool, limit: int | None) -> tuple[list[JobView], str]:
    """Return the jobs that ``ps`` shows, and a remark where there are more of them; empty where there are not."""
    views = client.jobs(active_only=not show_all, limit=None if limit is None else limit + 1)
    if limit is not None and len(views) > limit:
        return views[:limit], f"there are older ones too: these are the newest {limit}"
    if not views and not show_all and client.jobs(limit=1):
        return views, "all jobs have ended: 'cotenant ps --all' lists them"
    return views, ""
