"""Fast execution of clients: worker processes, stacked clients, caches. A first reading can skip it."""
