"""Questions that need many runs: comparisons, what a choice loses, and the whole study with its report."""
