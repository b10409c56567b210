"""Studies of many runs: comparisons, races, the regret of a choice, and a whole study with its report."""
