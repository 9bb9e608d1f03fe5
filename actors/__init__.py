"""Every process boundary: Ray actors, device and enforcement backends, job launching, the in-job shim."""

if __name__ != "cotenant.actors":
    raise ImportError(
        f"import this package as 'cotenant.actors', not as {__name__!r}: "
        "a second copy under another name would hold its own state"
    )
