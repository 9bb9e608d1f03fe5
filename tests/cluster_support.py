"""Settings shared by the tests that start Ray."""

from __future__ import annotations

import socket

# Ray reads these when its processes start. Node deaths are noticed in about a second instead of thirteen.
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}

# What the NVIDIA node of the tests has, as lines of the stand-in for NVML.
GPUS = tuple(f"gpu {index} uuid=GPU-{name} name=NVIDIA_H100 total={16 << 30}" for index, name in enumerate("ab"))


def free_port() -> int:
    """A port nobody listens on: Ray leaks a socket when its dashboard port is taken, an error to pytest."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
