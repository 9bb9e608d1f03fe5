"""Schedulers on recorded work in virtual time: the shipped core and the usual policies, measured alike."""
