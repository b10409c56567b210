"""The home of costs: FLOPs and bytes of a training step, of layers, of rounds, and of a plan."""
