"""Figures and tables of PLayer-FL: layer-wise measurements, scores, and the choices behind them."""

from figures.player_fl import (  # noqa: F401
    epoch,
    layers,
    rests_on,
    retained,
    runs,
    tables,
    transitions,
    tuned,
    views,
)
