"""Enforcement backends: how a share is held on a running job."""
