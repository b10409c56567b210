"""FedRA: clients of unequal depth."""

from figures.fedra import depth

__all__ = ["depth"]
