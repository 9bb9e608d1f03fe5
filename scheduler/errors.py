"""The exceptions a user of cotenant can meet.

::

    CotenantError
    ├── HintError        a hint has a value that is not accepted (names the field, the value and what is accepted)
    ├── NotConnected     no cotenant is reachable from here
    ├── JobNotFound      no job with that id
    ├── NotPlaceable     no device of this cluster could ever take the job
    └── NotPermitted     the caller may not do that
"""

from __future__ import annotations


class CotenantError(Exception):
    """Base of all errors raised for users."""


class HintError(CotenantError, ValueError):
    """A hint has a value that is not accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        super().__init__(field, value, accepted)

    def __str__(self) -> str:
        return f"{self.field}: {self.value!r} is not accepted; give {self.accepted}"


class NotConnected(CotenantError):
    """No cotenant is reachable from here; the message says what to do."""


class JobNotFound(CotenantError, KeyError):
    """No job with that id."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(job_id)

    def __str__(self) -> str:
        return f"no job {self.job_id!r}: 'cotenant ps --all' lists the jobs that are known"


class NotPlaceable(CotenantError):
    """No device of this cluster could ever take the job."""


class NotPermitted(CotenantError):
    """The caller may not do that."""
