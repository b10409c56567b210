"""Gradients of the clients' losses: one pass that all metrics share, and what is computed from it layer by layer."""
