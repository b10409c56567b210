"""A whole run: built from a configuration, started, stored, resumed and exported."""
