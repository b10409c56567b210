"""Compare ways of choosing the shared layers over many federations, by their regret."""
