"""The rounds of a run: the engine, its clients, where they train, and what listens."""
