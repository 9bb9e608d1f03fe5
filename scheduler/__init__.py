"""The scheduling core, its journal and the client through which everything else talks to it."""

if __name__ != "cotenant.scheduler":
    raise ImportError(
        f"import this package as 'cotenant.scheduler', not as {__name__!r}: "
        "a second copy under another name would hold its own state"
    )
