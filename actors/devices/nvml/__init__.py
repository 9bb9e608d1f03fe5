"""The ``nvml`` backend: NVIDIA GPUs, whole or as MIG instances, through the driver's management library."""
