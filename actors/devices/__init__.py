"""Device backends: what a GPU is on this host, and how it is measured."""
