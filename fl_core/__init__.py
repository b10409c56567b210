"""Federated learning over named layers: trees, layers, plans, data, models, algorithms and the round loop."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fedlayers")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "unknown"
