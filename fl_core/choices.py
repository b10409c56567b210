"""The allowed values of a configuration's keys, to be listed without loading what they name."""

BN = ("global", "local", "drop")
"""Running statistics of batch normalisation: averaged, each client's own, or none."""
WAYS = ("block", "module")
"""What a layer is: a weighted module with its normalisation, or every module by itself."""
OPTIMIZERS = ("sgd", "adam", "adamw")
KEPT_OPTIMIZERS = ("adam", "adamw")
"""Those whose state a client keeps from round to round by default: second moments need more steps than a round has."""
LOSSES = ("cross_entropy", "focal", "player_focal", "bce", "mse", "mae", "huber")
CLASS_WEIGHTS = ("none", "balanced")
"""Weights of classes in the loss, beside W,W,...: none, or so that every class has the same total weight."""
WEIGHTS = ("samples", "uniform")
"""How much clients count where their replies are averaged: by their training samples, or all the same."""
STACKS = ("auto", "on", "off")
"""Whether clients are trained together in one process."""
ON_DIVERGENCE = ("note", "stop")
"""What becomes of a run whose loss is still finite and far above where it began."""
FORMATS = ("auto", "contiguous", "channels_last")
"""How images lie in memory."""
PRECISIONS = ("float32", "bf16")
"""In what numbers the model's passes of local training are computed."""
SCALES = ("none", "standard", "minmax", "robust")
"""How columns of numbers are scaled: not, to mean 0 and deviation 1, to 0..1, or by median and quartiles."""
IMPUTES = ("none", "mean", "median", "most_frequent")
"""What missing numbers are filled with: nothing (they are refused), or that of the training samples' column."""
