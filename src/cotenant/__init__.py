"""cotenant: many jobs on one GPU of a Ray cluster, measured, forecast, packed and enforced."""

__version__ = "0.1.0"
