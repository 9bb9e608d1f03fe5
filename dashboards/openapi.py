"""Writes the OpenAPI document: ``python -m cotenant.dashboards.openapi [docs/openapi.json]``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cotenant.dashboards.api import create_app
from cotenant.scheduler.client import Client
from cotenant.scheduler.errors import NotConnected


def document() -> str:
    """Return the document as text, the same for the same code."""
    return json.dumps(create_app(_no_client, token=None).openapi(), indent=2, sort_keys=True) + "\n"


def _no_client() -> Client:
    raise NotConnected("describing the API needs no cluster")


def main() -> None:
    """Write the document where the argument says."""
    parser = argparse.ArgumentParser(description="Write the OpenAPI document of the admin API.")
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/openapi.json"))
    path: Path = parser.parse_args().path
    path.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
