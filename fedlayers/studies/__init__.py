"""Studies of many runs: comparisons, races, regret of a choice, and the whole study with its report."""
