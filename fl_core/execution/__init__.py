"""How clients are executed fast: worker processes, stacked clients, caches. A first reading can skip it."""
