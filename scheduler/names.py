"""Names under which cotenant's actors are found in a Ray cluster, and where its files live."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from cotenant.scheduler.errors import CotenantError

NAMESPACE = "cotenant"
SCHEDULER = "scheduler"
PRM = "prm"
API = "api"
SET_ENVIRONMENT = 'eval "$(cotenant env)"'


def agent_name(host_id: str) -> str:
    """Return the actor name of the host agent on a Ray node."""
    return f"agent-{host_id}"


def claim_name(host_id: str) -> str:
    """Return the name of the placement group that claims a node's GPUs."""
    return f"cotenant-claim-{host_id}"


def home() -> Path:
    """Return the state directory of the head: ``$COTENANT_HOME``, else ``~/.cotenant``."""
    configured = os.environ.get("COTENANT_HOME")
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cotenant"


def run_dir(session: str, host_id: str) -> Path:
    """Return the directory of running jobs on a host; ``session`` is the Ray session name."""
    base = os.environ.get("COTENANT_RUN_DIR") or str(Path(tempfile.gettempdir()) / f"cotenant-{os.getuid()}")
    return Path(base) / session / host_id[:12]


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """What ``cotenant up`` wrote down about the cluster it serves, so that later commands find it.

    Attributes:
        address: Ray address (host:port).
        auth_mode: Value for ``RAY_AUTH_MODE``, which every process of a cluster must agree on.
        auth_token_path: File with Ray's token; None when the mode needs none or Ray's own default place is used.
        ray_pid: Process id of the Ray head that ``up --local`` started; None when the cluster was there before.
        api_url: Where the admin API listens; None when it is off.
    """

    address: str
    auth_mode: str
    auth_token_path: str | None
    ray_pid: int | None
    api_url: str | None

    def environment(self) -> dict[str, str]:
        """Return the variables with which Ray's own tools reach this cluster."""
        token = {} if self.auth_token_path is None else {"RAY_AUTH_TOKEN_PATH": self.auth_token_path}
        return {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": self.auth_mode, **token}

    def disagrees(self) -> str:
        """Say that this process talks to Ray otherwise than the cluster wants, and what helps; empty when it does not,
        or says nothing of it (then ``prepare_ray_environment`` sets what the cluster wants).
        """
        mode = os.environ.get("RAY_AUTH_MODE", self.auth_mode)
        if mode == self.auth_mode:
            return ""
        wants = "asks for a token" if self.auth_mode == "token" else f"has RAY_AUTH_MODE={self.auth_mode}"
        return f"it {wants}, and RAY_AUTH_MODE is {mode} here; unset it, or set what it wants: {SET_ENVIRONMENT}"

    def save(self) -> None:
        """Write the record; readable by the owner only."""
        path = home() / "cluster.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    @classmethod
    def load(cls) -> ClusterRecord | None:
        """Return the record, or None when there is none.

        Raises:
            CotenantError: The file holds something else, as one from another version does.
        """
        path = home() / "cluster.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CotenantError(
                f"{path}: is no record of this version of cotenant ({error}); end what runs from there, then remove it"
            ) from error

    @staticmethod
    def remove() -> None:
        """Forget the cluster."""
        (home() / "cluster.json").unlink(missing_ok=True)


def secret(path: Path) -> Path:
    """Make a random secret in a file that only the owner can read, unless it is there; returns the path."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
    return path


@cache
def ray_came_first() -> bool:
    """Whether this process had imported Ray before anything said how to authenticate: Ray never learns it then.

    It is found out once, when the environment is first prepared: afterwards that says how, which Ray does not read.
    """
    return "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ


def prepare_ray_environment(*, local: bool) -> None:
    """Set Ray's authentication mode, before Ray is imported (that is when it reads it); what the user has set stays.

    A cluster that ``up`` recorded is joined with its own mode. A Ray that is about to be started here is made
    to ask for a token: its ports listen on all interfaces, and whoever reaches them without one can run code.

    Args:
        local: A Ray head is about to be started on this machine unless the recorded one still runs.
    """
    ray_came_first()
    record = ClusterRecord.load()
    wanted = {} if record is None else record.environment()
    wanted.pop("RAY_ADDRESS", None)
    if not wanted:
        wanted["RAY_AUTH_MODE"] = "token" if local else "disabled"
    if "RAY_AUTH_MODE" in os.environ:
        return
    if wanted["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in wanted:
        wanted["RAY_AUTH_TOKEN_PATH"] = str(secret(home() / "ray-token"))
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
