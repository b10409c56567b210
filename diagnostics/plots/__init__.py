"""Pictures of rows, plans and tables: each function draws on an Axes and returns it.

Nothing is measured here. A picture shows values of the frame, or means over clients or seeds that it names. Without an
Axes, a new figure has the package's own style. A given Axes keeps its caller's style. A missing value leaves a gap, and
a note beneath the picture gives the reason.
"""

# ruff: noqa: F401 - the names are for whoever imports this package

from .drawing import style
from .layer_map import layer_map, plan
from .layers import cka_matrices, costs, metric, tsne, tsne_panels
from .runs import calibration, clients, comparison, cost_steps, learning, partition, roc
