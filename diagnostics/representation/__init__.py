"""How representations are compared: the measures, their one pass over a probe, and the rows they give."""
