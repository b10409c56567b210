"""The metrics: a function with ``@metric`` in a module of this folder is registered by its name."""
