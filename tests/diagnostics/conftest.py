"""Pictures of these tests are drawn without a screen."""

import matplotlib as mpl

mpl.use("Agg")
