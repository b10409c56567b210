"""Batch normalisations of a model, and other modules that keep running statistics."""

from __future__ import annotations

from torch import nn


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that can keep running statistics, by path."""
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.modules.batchnorm._NormBase)
    }


def normalises_batches(model: nn.Module, training: bool) -> bool:
    """Return whether a model normalises over the samples of a batch, in training or evaluation mode.

    It then refuses a single sample.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    return any(training or module.running_mean is None for module in norms)


def tensors_of(path: str, module: nn.Module) -> frozenset[str]:
    """Return the names of a module's parameters and statistics in the model."""
    return frozenset(f"{path}.{key}".lstrip(".") for key in module.state_dict())


def statistics_of(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's running statistics."""
    return frozenset(
        f"{name}.{key}"
        for name, m in batch_norms(model).items()
        for key, _ in m.named_buffers()
    )


def drop_statistics(model: nn.Module) -> None:
    """Remove running statistics from batch normalisations, so that they normalise by each batch, also in prediction."""
    for module in batch_norms(model).values():
        module.track_running_stats = False  # type: ignore[assignment]
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(module, key, None)
