"""Local training: the loop that trains one client, its steps and losses, and evaluation."""
