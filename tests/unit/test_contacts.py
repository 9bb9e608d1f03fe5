"""What the scheduler remembers of the agents that report to it."""

from __future__ import annotations

from dataclasses import replace

from scheduling import host

from cotenant.actors.contacts import HostContact
from cotenant.actors.messages import HostReport


def test_an_agent_that_ended_and_was_started_anew_is_told() -> None:
    """One that was killed came back within seconds, and nothing showed that it had ever been away."""
    contact = HostContact(0.0)
    for number, (since, note) in enumerate([(10.0, ""), (10.0, "a note"), (10.0, "")]):
        contact.heard(HostReport(replace(host(), joined_at=since), (), (), "", note, {}, number))
        assert contact.told()["note"] == note
    for ends, since in enumerate((5000.0, 9000.0), start=1):
        for note in ("", "a note"):
            contact.heard(HostReport(replace(host(), joined_at=since), (), (), "", note, {}, 9))
            told = str(contact.told()["note"])
            assert told.startswith(note)
            assert "its agent had ended and was started anew at 19" in told
            assert told.endswith(f"(ends so far: {ends})")
