"""Destinations for a run's rows during training, next to its directory. Each module is imported on first use."""
