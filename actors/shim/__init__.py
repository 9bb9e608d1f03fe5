"""The in-job shim: standard library only, injected into unmodified jobs.

Inside a job its modules are loaded by path, as those of ``_cotenant_shim`` (see ``site/sitecustomize.py``), because
the job's interpreter need not be able to import ``cotenant``; on the host agent's side, and where a program puts itself
under a lease, the package is ``cotenant.actors.shim``. The modules therefore import each other relatively, and nothing
but the standard library otherwise.
"""

from .attachment import Attachment, attach, refuse_second_share

__all__ = ["Attachment", "attach", "refuse_second_share"]
