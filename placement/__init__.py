"""Packing objective, placement engine and share arithmetic."""

if __name__ != "cotenant.placement":
    raise ImportError(
        f"import this package as 'cotenant.placement', not as {__name__!r}: "
        "a second copy under another name would hold its own state"
    )
