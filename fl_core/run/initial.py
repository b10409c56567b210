"""Initial weights from a file, or from the global model or the shared layers of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fl_core import tree
from fl_core.errors import UsageError, listing
from fl_core.models import weights
from fl_core.models.building import batch_norms
from fl_core.models.extended import head_path
from fl_core.plan import LayerPlan
from fl_core.records import store
from fl_core.tree import Tree


def start(
    model: nn.Module,
    path: str | Path,
    example: Tensor,
    words: Sequence[str] | None = None,
) -> list[str]:
    """Copy trained weights into a fresh model, and return notes on the parts that stay fresh.

    All tensors must exist under the model's own names and in its shapes, with one exception. The linear layer of the
    logits stays fresh if the weights have another number of classes.

    Args:
        path: a run's directory, for its global model after the last checkpoint, or at its best round under a stopping
            rule. Without a global model it is the server's: the shared layers, and the others as the run began. Or a
            file of weights (see :mod:`fl_core.models.weights`).
        example: a batch that the model takes.
        words: the data's vocabulary, for texts. A run must have the same one. A file does not name its words.

    Returns:
        Notes, one sentence each.

    Raises:
        UsageError: there is nothing or no common model at the path, or tensors are missing, unexpected or of another
            shape. The message names the first of them.
        CorruptError: the run's bytes are damaged.
    """
    path = Path(path)
    stored, known, kept, local = (
        _of_run(path) if path.is_dir() else (weights.read(path), None, False, [])
    )
    own = {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    if words is not None and known is not None and list(words) != list(known):
        raise UsageError(
            f"{path} must have the vocabulary of the data; got another. Leave init out."
        )
    notes = _keep_classifier(model, stored, own, example, path)
    copy_into(model, stored, str(path))
    if local:
        notes.append(
            f"{listing(local)} start as {path} began: its clients kept their own"
        )
    if kept and any(norm.track_running_stats for norm in batch_norms(model).values()):
        notes.append(
            f"running statistics are those that {path} started with: its clients kept their own (bn=local)"
        )
    return notes


def _of_run(path: Path) -> tuple[Tree, Sequence[str] | None, bool, list[str]]:
    """Return a run's last common model, its vocabulary, whether clients kept running statistics, and their layers."""
    run = store.Run(path)
    config = run.config
    whole = bool((run.rows()[1]["model"] == "global").any())
    plan = run.plan()
    if config.get("adapt") is not None:
        raise UsageError(
            f"init must be a run without adapters; got {path}. Export its model, and name that file."
        )
    which = (
        "last"
        if run.stopping_rule() is None
        else run.best_round("global" if whole else None)
    )
    server = run.checkpoint(which, lazy=True).server.trees
    if not (whole or plan) or "model" not in server:
        raise UsageError(
            "init must be a run with a global model or with shared layers, such as one of fedavg or fedper; "
            f"got {path}, a run of {config['algorithm']}. Choose another run."
        )
    kept = config["batchnorm"] == "local"
    if whole or plan is None:
        return dict(server["model"]), config.get("words"), kept, []
    shared = LayerPlan.from_json(plan)
    local = [layer.name for layer in shared.layers if layer.name not in shared.shared]
    return dict(server["model"]), config.get("words"), kept, local


def _keep_classifier(
    model: nn.Module, stored: Tree, own: Tree, example: Tensor, path: Path
) -> list[str]:
    try:
        head = head_path(model, example)
    except UsageError:
        return []  # without a linear classifier nothing may differ; this is checked with the rest
    names = [name for name in (f"{head}.weight", f"{head}.bias") if name in own]
    if any(
        name not in stored or stored[name].shape[1:] != own[name].shape[1:]
        for name in names
    ):
        return []
    theirs, ours = len(stored[names[0]]), len(own[names[0]])
    if theirs == ours:
        return []
    stored.update({name: own[name] for name in names})
    return [
        f"the classifier {head!r} starts fresh: {path} is of {theirs} classes, the data have {ours}"
    ]


def copy_into(model: nn.Module, stored: Mapping[str, Tensor], where: str) -> None:
    """Copy a state dict into ``model``. Error messages call it ``where``.

    Tied tensors may be stored under any of their names, or under several names if the values agree.

    Raises:
        UsageError: a name or shape does not fit. The message names the first.
    """
    live = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    ties: dict[int, list[str]] = {}
    for name, tensor in live.items():
        ties.setdefault(id(tensor), []).append(name)
    given = dict(stored)
    for names in ties.values():
        held = [name for name in names if name in given]
        for name in held[1:]:
            if not torch.equal(given[held[0]], given.pop(name)):
                raise UsageError(
                    f"tied tensors {held[0]!r} and {name!r} must have the same values; got different ones in {where}."
                )
        if held:
            given[names[0]] = given.pop(held[0])
    targets = {names[0]: live[names[0]] for names in ties.values()}
    tree.check_same(given, targets, where, "the model")
    tree.assign(targets, given)
