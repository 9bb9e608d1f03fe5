"""Behaviour signatures, demand forecasts and interference prediction."""

if __name__ != "cotenant.forecasting":
    raise ImportError(
        f"import this package as 'cotenant.forecasting', not as {__name__!r}: "
        "a second copy under another name would hold its own state"
    )
