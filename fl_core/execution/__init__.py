"""What makes a run fast, and where its clients are: processes, stacked clients, caches. A first reading can skip it."""
