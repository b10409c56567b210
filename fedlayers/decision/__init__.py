"""The decision: ways to train, one table of their losses, one answer, and the words of its views."""
