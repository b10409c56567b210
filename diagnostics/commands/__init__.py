"""The commands of the command line, and the flags they share."""
