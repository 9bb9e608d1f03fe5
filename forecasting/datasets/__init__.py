"""Measured data on disk: schemas, loaders, checks and the tables made of raw measurements. Never on a decision path."""
