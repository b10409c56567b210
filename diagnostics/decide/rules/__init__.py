"""The rules, by which layers are chosen: a function here with ``@rule`` above it is known by its name."""
