"""Typed settings and their defaults."""

if __name__ != "cotenant.configs":
    raise ImportError(
        f"import this package as 'cotenant.configs', not as {__name__!r}: "
        "a second copy under another name would hold its own state"
    )
