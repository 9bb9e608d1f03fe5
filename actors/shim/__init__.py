"""The in-job shim: standard library only, injected into unmodified jobs.

Inside a job this package is loaded by path as ``_cotenant_shim`` (see ``site/sitecustomize.py``), because the job's
interpreter need not be able to import ``cotenant``; on the host agent's side, and where a program puts itself under a
lease, it is ``cotenant.actors.shim``. Its modules therefore import each other relatively, and nothing but the standard
library otherwise.
"""

from .bootstrap import Attachment, attach

__all__ = ["Attachment", "attach"]
