"""Drawing: the common style, and the pictures of runs, features and regret behind ``diagnostics.plots``."""
