"""The rules that choose layers: a function in this folder with ``@rule`` above it is registered by its name."""
