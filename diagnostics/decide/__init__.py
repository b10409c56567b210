"""From measured rows to a plan: curves, rules, budgets, the stability of a choice, and its explanation."""
