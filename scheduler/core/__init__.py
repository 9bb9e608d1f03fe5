"""The pure scheduling core: events in, commands out, no I/O, no clock."""
