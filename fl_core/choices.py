"""The allowed values of a configuration's keys, to be listed without loading what they name."""

BN = ("global", "local", "drop")
"""Running statistics of batch normalisation: averaged, each client's own, or none."""
WAYS = ("block", "module")
"""What a layer is: a weighted module with its normalisation, or every module by itself."""
OPTIMIZERS = ("sgd", "adam", "adamw")
LOSSES = ("cross_entropy", "focal", "player_focal")
STACKS = ("auto", "on", "off")
"""Whether clients are trained together in one process."""
ON_DIVERGENCE = ("note", "stop")
"""What becomes of a run whose loss is still finite and far above where it began."""
FORMATS = ("auto", "contiguous", "channels_last")
"""How images lie in memory."""
