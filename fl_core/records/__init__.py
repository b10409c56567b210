"""The run directory: written atomically, signed and checked when read, without pickle."""
