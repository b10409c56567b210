"""The command line: its commands, and the flags they share."""
