"""The leaderboard: personalised methods with equal tuning on the same federations. ``REGISTERED.md`` has the rules."""
