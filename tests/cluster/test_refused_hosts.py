"""A host that cannot be what the settings ask for."""

from __future__ import annotations

import pytest

from cotenant.configs.settings import DeviceSettings, Settings
from cotenant.scheduler.errors import CotenantError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_up_says_why_a_host_agent_does_not_start(start, tmp_path):
    settings = Settings(device=DeviceSettings(backend="cpu", memory_bytes=1 << 60))
    refused = (
        r"^the agent of host \w+ did not start: ValueError: device.memory_bytes: \d+ is not accepted; give 1 to \d+"
    )
    with pytest.raises(CotenantError, match=refused):
        start(tmp_path, 1, settings)
