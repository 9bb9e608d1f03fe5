"""The admin API and the pages built on it."""

if __name__ != "cotenant.dashboards":
    raise ImportError(
        f"import this package as 'cotenant.dashboards', not as {__name__!r}: "
        "a second copy under another name would hold its own state"
    )
