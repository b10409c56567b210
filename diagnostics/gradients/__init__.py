"""Gradients of the clients' losses: one pass shared by all metrics that need them, and their statistics by layer."""
