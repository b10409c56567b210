"""The metrics, one module each: a file in this folder with ``@metric`` above its function is registered by name."""
