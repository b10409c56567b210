"""Federated learning over named layers: trees, layers, plans, data, models, algorithms and the round loop."""

__version__: str


def __getattr__(name: str) -> str:
    """Return the package's ``__version__``, read from its metadata on first use, since reading takes long.

    Without metadata, as in a checkout that is not installed, it is ``unknown``.

    Raises:
        AttributeError: the name is another one.
    """
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        globals()[name] = version("fedlayers")
    except PackageNotFoundError:  # a checkout on the path, not installed
        globals()[name] = "unknown"
    return str(globals()[name])
