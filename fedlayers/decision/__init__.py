"""The decision: what to federate, from one table of losses."""
