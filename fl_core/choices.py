"""The allowed values of a configuration's keys, for lists without loading their modules."""

BN = ("global", "local", "drop")
"""Running statistics of batch normalisation: averaged, each client's own, or none."""
WAYS = ("block", "module")
"""Definitions of a layer: a weighted module with its normalisation, or every module by itself."""
OPTIMIZERS = ("sgd", "adam", "adamw")
STOPPING_INTERVAL = 2
"""Rounds between evaluations, at most, of a run that may stop when validation no longer improves."""
LOSSES = (
    "cross_entropy",
    "focal",
    "player_focal",
    "bce",
    "mse",
    "mae",
    "huber",
    "cox",
    "multilabel_bce",
)
CLASS_WEIGHTS = ("none", "balanced")
"""Weights of classes in the loss, next to W,W,...: none, or such that every class has the same total weight."""
WEIGHTS = ("samples", "uniform")
"""Weights of clients in averages: their training samples, or equal weights."""
STACKS = ("auto", "on", "off")
"""Whether clients are trained together in one process."""
ON_DIVERGENCE = ("note", "stop")
"""Reactions to a loss that is finite and far above the initial one."""
PRECISIONS = ("float32", "bf16")
"""Number types of the model's passes in local training."""
SCALES = ("none", "standard", "minmax", "robust", "imagenet")
"""Scaling of columns of numbers: none, to mean 0 and deviation 1, to 0..1, or by median and quartiles. The last is of
colour images: by ImageNet's mean and deviation."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The mean and the standard deviation of ImageNet's channels in 0..1."""
IMPUTES = ("none", "mean", "median", "most_frequent")
"""Values for missing numbers: none (they are errors), or a statistic of the column's training samples."""
METRIC_ALIASES = {
    "hessian_eigensum": "hessian_trace",
    "probe": "linear_probe",
    "sensitivity": "federation_sensitivity",
}
"""Words of papers for metrics."""
