"""The metrics, one module each and named as the metric: a file here with ``@metric`` above its function is known."""
