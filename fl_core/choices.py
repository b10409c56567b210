"""The allowed values of a configuration's keys, to be listed without loading what they name."""

BN = ("global", "local", "drop")
"""Running statistics of batch normalisation: averaged, each client's own, or none."""
WAYS = ("block", "module")
"""What a layer is: a weighted module with its normalisation, or every module by itself."""
OPTIMIZERS = ("sgd", "adam", "adamw")
LOSSES = ("cross_entropy", "focal", "player_focal", "bce", "mse", "mae", "huber")
CLASS_WEIGHTS = ("none", "balanced")
"""Weights of classes in the loss, beside W,W,...: none, or so that every class has the same total weight."""
STACKS = ("auto", "on", "off")
"""Whether clients are trained together in one process."""
FORMATS = ("auto", "contiguous", "channels_last")
"""How images lie in memory."""
