"""PLayer-FL: its layer-wise measurements, its tables, and what its figures rest on."""

from figures.player_fl import epoch, layers, rests_on, runs, tables, transitions, views

__all__ = ["epoch", "layers", "rests_on", "runs", "tables", "transitions", "views"]
