"""Notebooks that tell the story in cells, and what keeps them executed (:mod:`notebooks.execute`)."""
