"""The exceptions a user of cotenant can meet.

::

    CotenantError
    ├── NotAccepted      a field has a value that is not accepted (names the field, the value and what is accepted)
    │   └── HintError    … and the field is a hint or the job id
    ├── NotConnected     no cotenant is reachable from here
    ├── GoingDown        cotenant is being shut down and takes no new jobs
    ├── JobNotFound      no job with that id
    ├── OutputNotKept    the output of a job, or of one of its runs, cannot be read any more
    ├── NotHandled       the scheduler met a fault of its own with this request and set it aside
    ├── NotPlaceable     no device of this cluster could ever take the job
    ├── LeaseLost        the lease is not held any more; says why
    ├── TooManyRequests  the caller asks too often; says when the next request is answered
    └── NotPermitted     the caller may not do that
"""

from __future__ import annotations

import reprlib


class _Shortener(reprlib.Repr):
    """Writes a value as code, short whatever it is: errors about 200 kB of input must still be read by somebody."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = 160

    def repr_int(self, x: int, level: int) -> str:
        """Return an integer; very large ones have no decimal text in Python."""
        return super().repr_int(x, level) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


_SHORTENER = _Shortener()


def shown(value: object) -> str:
    """Return a value that was not accepted as it is written in an error: like ``repr``, but never long."""
    return _SHORTENER.repr(value)


class CotenantError(Exception):
    """Base of all errors raised for users."""


class NotAccepted(CotenantError, ValueError):
    """A field has a value that is not accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        super().__init__(field, value, accepted)

    def __str__(self) -> str:
        return f"{self.field[: _SHORTENER.maxstring]}: {shown(self.value)} is not accepted; give {self.accepted}"


class HintError(NotAccepted):
    """A hint, or the job id, has a value that is not accepted."""


class NotConnected(CotenantError):
    """No cotenant is reachable from here; the message says what to do."""


class GoingDown(CotenantError):
    """Cotenant is being shut down and takes no new jobs."""

    def __str__(self) -> str:
        return "cotenant is going down: no new jobs are taken"


class JobNotFound(CotenantError, KeyError):
    """No job with that id."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(job_id)

    def __str__(self) -> str:
        return f"no job {shown(self.job_id)}: 'cotenant ps --all' lists the jobs that are known"


class OutputNotKept(CotenantError):
    """The output of a run that is over cannot be read any more: it was deleted, or its host is gone."""

    def __init__(self, job_id: str, epoch: int, newest: int, host_id: str | None) -> None:
        self.job_id, self.epoch, self.newest, self.host_id = job_id, epoch, newest, host_id
        super().__init__(job_id, epoch, newest, host_id)

    def __str__(self) -> str:
        run = f"run {self.epoch} of " if self.newest > 1 else ""
        where = f" (it was on host {self.host_id})" if self.host_id else ""
        return f"the output of {run}job {self.job_id} is not kept any more{where}"


class NotPlaceable(CotenantError):
    """No device of this cluster could ever take the job."""


class NotHandled(CotenantError):
    """The scheduler met a fault of its own when it handled this request; it was set aside and changed nothing."""


class LeaseLost(CotenantError):
    """The lease is not held any more: stopped, lost with its host, or given back. The message says why."""


class TooManyRequests(CotenantError):
    """The caller asks too often.

    Attributes:
        retry_after_s: Seconds after which the next request is answered.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message, retry_after_s)

    def __str__(self) -> str:
        return f"{self.args[0]}; again in {self.retry_after_s:.1f} s"


class NotPermitted(CotenantError):
    """The caller may not do that."""
