"""The in-job shim: standard library only, injected into unmodified jobs."""
