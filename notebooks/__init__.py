"""Tutorial notebooks, and the tools that keep their outputs up to date (:mod:`notebooks.execute`)."""
