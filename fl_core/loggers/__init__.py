"""Where a run's rows can be sent while it trains, beside its own directory; a module each, imported when asked for."""
