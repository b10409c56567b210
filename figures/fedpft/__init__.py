"""FedPFT: what its transformation does, and what is dealt and sent."""

from figures.fedpft import counts, dealt, insides, pictures

__all__ = ["counts", "dealt", "insides", "pictures"]
