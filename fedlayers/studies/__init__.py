"""Studies of many runs: comparisons, races, and a whole study with its report."""
