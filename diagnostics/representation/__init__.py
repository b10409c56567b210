"""Compares clients' representations layer by layer: measures, passes over probe samples, and rows."""
