"""The run directory: written atomically, signed, checked when it is read, without pickle."""
