"""The pictures behind ``diagnostics.plots``, and their common style."""
