"""Durable storage of the scheduler: the only storage in this folder."""
