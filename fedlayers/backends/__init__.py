"""Backends that train whole runs: this process, a pool of processes, or the nodes of a cluster."""
