"""Local training: the one trainer of all algorithms, its steps and losses, and evaluation."""
