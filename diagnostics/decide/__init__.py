"""From measured rows to a decision: curves, rules, budgets, how sure a choice is, and its explanation."""
