"""The measurement suite: what workloads do alone on a device, and how they slow each other down when they share it."""
