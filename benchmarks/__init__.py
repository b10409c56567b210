"""Timings against named baselines, in alternating runs; ``python -m benchmarks NAME`` makes one table."""
