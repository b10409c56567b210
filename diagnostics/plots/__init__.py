"""Pictures of rows, plans and tables.

A function draws on one Axes and returns it. Functions with several panels return a list
of Axes, and :func:`~diagnostics.plots.maps.layer_map` returns a figure.

Nothing is measured here. A picture shows values of the frame, or means over clients or seeds that it names. Without an
Axes, a new figure has the package's own style. A given Axes keeps its caller's style. A missing value leaves a gap, and
a note beneath the picture gives the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.registry import attach

if TYPE_CHECKING:
    from diagnostics.plots.drawing import style as style
    from diagnostics.plots.layers import (
        cka_matrices as cka_matrices,
        costs as costs,
        metric as metric,
        spectral_density as spectral_density,
        tsne as tsne,
        tsne_panels as tsne_panels,
    )
    from diagnostics.plots.maps import layer_map as layer_map, plan as plan
    from diagnostics.plots.runs import (
        clients as clients,
        comparison as comparison,
        cost_steps as cost_steps,
        learning as learning,
        partition as partition,
    )

__getattr__, __dir__, __all__ = attach(__name__, __file__)
