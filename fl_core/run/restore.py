"""Restoring of a run directory: its task and models, and checks that checkpoint, packages and own code fit it.

Digests show damage, not forgery.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from fl_core import tree
from fl_core.algorithms.base import Algorithm, Round, State
from fl_core.config import AUTO, RunConfig, absolute
from fl_core.data import FederatedData, Partition
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.reading import current, new_form
from fl_core.data.table.read import is_table
from fl_core.errors import (
    CorruptError,
    UsageError,
    about,
    check_known,
    damaged,
    listing,
    warn,
)
from fl_core.models.adapter import original
from fl_core.models.building import without_weights
from fl_core.plan import LayerPlan
from fl_core.records import writing
from fl_core.records.store import Checkpoint, Run
from fl_core.rows import USED
from fl_core.run.own_code import (
    allowed_code,
    changed_code,
    check_allowed_options,
    check_code,
    code_of,
)
from fl_core.run.task import Task, assemble
from fl_core.training.losses import Loss

_BESIDE = [
    "shape",
    "classes",
    "words",
    "preprocessing",
    "table",
    "given",
    "in_force",
    "command",
    "code",
    "own",
    "environment",
    "files",
    "rows",
]
"""The keys of a run's config.json that are no keys of its configuration."""


def stored_config(stored: Mapping[str, Any]) -> tuple[RunConfig, LayerPlan | None]:
    """Return the configuration of a run and the plan given to it, from its ``config.json``.

    The plan is None if the run was given none. Settings of an earlier version get their
    present form, with the columns that the run used.

    Args:
        stored: the contents of ``config.json``, from
            :attr:`fl_core.records.store.Run.config`.
    """
    settings = {name: value for name, value in stored.items() if name not in _BESIDE}
    path = Path(str(settings.get("dataset")))
    is_text_table = str(path).endswith((".csv", ".tsv")) or (
        path.is_dir() and is_table(path)
    )
    columns = (stored.get("preprocessing") or {}).get("columns")
    is_earlier_table = settings.get("keep_ids") or (
        "separator" in settings and is_table(path)
    )
    settings, _ = current(settings, is_text_table)
    if is_earlier_table and columns:
        settings |= {"columns": list(columns), "exclude_columns": None}
    plan = None if stored["given"] is None else LayerPlan.from_json(stored["given"])
    config = RunConfig(**settings)
    return (config.with_keys(plan=None) if plan is not None else config), plan


def check_current(run: Run) -> None:
    """Refuse to continue a run of an earlier version with settings that no longer exist.

    Raises:
        UsageError: there are such settings. The message names them and their new forms.
    """
    _, removed_keys = current(run.config)
    if removed_keys:
        advice = " ".join(new_form(key, run.config[key]) for key in removed_keys)
        raise UsageError(
            f"{run.path} must have settings of this version to be continued; got {listing(removed_keys)}. "
            f"{advice} Begin a new run."
        )


def task_of(
    run: Run, trained: bool = False, data_root: Path | str | None = None, **given: Any
) -> Task:
    """Rebuild the task of a run directory, with its initial weights and partition.

    A federation from Python keeps its own splits instead. Nothing is downloaded.

    Args:
        run: the stored run.
        trained: whether its model gets trained weights, so that no others are loaded for it.
        data_root: the folder of the datasets' files, in place of the stored one.
        given: the user's own ``data``, ``model`` and ``loss``. ``data`` is required,
            and may be None.

    Raises:
        CorruptError: the run's files are damaged or have other contents.
        UsageError: something that the files name does not exist here or does not fit.
    """
    path = run.path / "config.json"
    stored = run.config
    start = run.start()
    with damaged(path, UsageError):
        config, plan = stored_config(stored)
    for key, is_stored in (("plan", plan), ("init", start)):
        if config.value(key) not in (None, AUTO) and is_stored is None:
            config_value = config.value(key)
            raise CorruptError(
                f"{path} is damaged: it names the {key} {config_value!r} and has none"
            )
    if data_root is not None:
        config = config.with_keys(data_root=absolute("data_root", data_root))
    config = config.with_keys(download=False)
    partition_arguments = (
        {} if isinstance(given["data"], FederatedData) else _dealt(run, stored)
    )
    if trained:
        options = without_weights(str(config.model.model), config.model.model_options)
        config = config.with_keys(model_options=options)
    with about(str(run.path)):
        return assemble(config, **given, **partition_arguments, plan=plan, start=start)


def _dealt(run: Run, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored partition and preprocessing, as :func:`assemble` takes them.

    The preprocessing is None if the run stores none.

    Raises:
        CorruptError: one of them is damaged.
    """
    with damaged(run.path / "partition.safetensors", UsageError):
        partition = Partition.from_tree(run.partition())
    preprocessing = stored.get("preprocessing")
    with damaged(run.path / "config.json", UsageError):
        stored_parts = (
            None if preprocessing is None else Preprocessing.from_json(preprocessing)
        )
    return {"partition": partition, "preprocessing": stored_parts}


def check(run: Run, checkpoint: Checkpoint, task: Task) -> Algorithm:
    """Read all states of a checkpoint, and check that its clients, plan and models are those of this task.

    Returns:
        The algorithm with its plan at that checkpoint.

    Raises:
        CorruptError: the states do not fit the task.
        UsageError: they do not fit the task, and the user's code was edited since the run trained.
    """
    run.stopping_rule()  # which checks what is stored of it
    initial = tree.state_dict(task.model)
    names = task.data.names
    report_damage = damaged(run.checkpoint_path(checkpoint.round), UsageError)
    if edited_parts := changed_code(run, task):
        report_damage = about(
            f"{run.path} must be read with the code that it began with; got other code of its {listing(edited_parts)}"
        )
    with report_damage:
        algorithm = _under_its_plan(task, checkpoint.server)
        unknown_client = next(iter(set(checkpoint.clients) ^ set(names)), None)
        if unknown_client is not None:
            raise UsageError(
                f"clients must be the same as in the run; got a difference in {unknown_client!r}. "
                "Give the data of the run."
            )
        states = chain([checkpoint.server], checkpoint.clients.values())
        models_by_kind = checkpoint.models.values()
        client_models = chain.from_iterable(
            models.values() for models in models_by_kind
        )
        for tensors in chain(
            (state.trees.get("model", {}) for state in states), client_models
        ):
            expected = {name: initial[name] for name in tensors if name in initial}
            tree.check_same(expected, tensors, "the model", "the checkpoint")
    return algorithm


def _under_its_plan(task: Task, server: State) -> Algorithm:
    algorithm = task.algorithm(task.plan)
    if "plan" not in server.meta:
        if task.plan is None and (
            task.config.federation.plan == AUTO or algorithm.decides
        ):
            raise UsageError(
                f"the plan must be there, since {algorithm.name} chose it in its first round; got none."
            )
        return algorithm
    plan = LayerPlan.from_json(server.meta["plan"])
    plan.check_tensors(algorithm.task_info.tensors)
    return algorithm.with_plan(plan)


# --- permission to resume here ------------------------------------------------------------------------------------


def check_own(
    path: Path,
    stored: Mapping[str, Any],
    allow_code: str | Collection[str],
    weights: bool,
    **given: object,
) -> None:
    """Check that a run is resumed with its own data and model from Python, and with permission for its code.

    Args:
        path: the run's path, for messages.
        stored: the run's ``config.json``.
        allow_code: as for :func:`fl_core.run.runner.resume`.
        weights: whether stored tensors replace pretrained weights.
        given: ``data`` and ``model`` from Python, or None.

    Raises:
        UsageError: data or model are missing, or code or an option is not allowed.
    """
    check_given(path, stored, **given)
    code = allowed_code(allow_code)
    is_passed = {
        "model": given["model"] is not None,
        "dataset": given["data"] is not None,
    }
    check_code(
        path,
        {key: name for key, name in code_of(stored).items() if not is_passed.get(key)},
        code,
    )
    if not is_passed["model"]:
        model = str(stored["model"])
        options = stored["model_options"]
        check_allowed_options(str(path), model, options, code, weights)


def check_given(path: Path, stored: Mapping[str, Any], **given: object) -> None:
    """Refuse to continue a run without its own data or model from Python.

    Args:
        path: the run's path, for the message.
        stored: the run's ``config.json``.
        given: ``data`` and ``model`` from Python, or None.

    Raises:
        UsageError: data or model are missing. The message names the argument.
    """
    for kind in stored["own"]:
        if given[kind] is None:
            further_advice = (
                ", loss=... if given, or own_model=... of fl.diagnose"
                if kind == "model"
                else ""
            )
            raise UsageError(
                f"{path} must be read with its own {kind}, which it does not store; got none. "
                f"Pass {kind}=...{further_advice}"
            )


def check_same_start(task: Task, path: Path, weights: bool) -> None:
    """Check that a task's data and initial model equal those in the header of a run's rows.

    Args:
        path: the run's path.
        weights: whether initial weights are compared, too. They always are if adapters have a frozen base, since the
            run does not store it.

    Raises:
        UsageError: the data, the layers or the weights differ.
    """
    stored_header = Run(path).header()
    header = task.header("")
    names = [
        [
            [layer["name"], *layer["parameters"], *layer["buffers"]]
            for layer in start["layers"]
        ]
        for start in (stored_header, header)
    ]
    for is_same, part_name, got_text in (
        (stored_header["data"] == header["data"], "data", "other data"),
        (names[0] == names[1], "model", "other layers"),
        (
            not (weights or tree.frozen_base(task.model))
            or stored_header["checkpoint"] == header["checkpoint"],
            "model",
            "other weights",
        ),
    ):
        if not is_same:
            raise UsageError(
                f"{path} must be resumed with the same {part_name}; got {got_text}. "
                "Choose another directory for a new run."
            )


def changes(began: Mapping[str, Any]) -> list[str]:
    """Return versions that differ from an earlier environment, such as ``torch 2.14.0 (now 2.14.1)``.

    A package that was or is not installed is ``missing``.

    Args:
        began: the environment, as from :func:`fl_core.records.writing.versions`.
    """
    versions_now = writing.versions()
    versions_by_package = {
        name: (old_version, versions_now["versions"].get(name, ""))
        for name, old_version in began["versions"].items()
    }
    versions_by_package["python"] = (began["python"], versions_now["python"])
    differing_versions = {
        name: versions
        for name, versions in versions_by_package.items()
        if versions[0] != versions[1]
    }
    lines = []
    for name, versions in differing_versions.items():
        old_version, new_version = (version or "missing" for version in versions)
        lines.append(f"{name} {old_version} (now {new_version})")
    return lines


# --- models -----------------------------------------------------------------------------------------------------

MODELS = ("local", "personal", "global")


def load_models(
    path: Path | str,
    round: int | str | None = None,
    which: str = "local",
    *,
    data: object = None,
    model: object = None,
    loss: object = None,
    allow_code: str | Collection[str] = (),
) -> tuple[dict[str, nn.Module], Task]:
    """Return the models of a checkpoint by the clients' names, with their task.

    Only ``local`` models may be missing for some clients. A model's ``label_names`` are the
    names of its classes, and its ``training_loss`` is the loss.

    >>> from fl_core.config import RunConfig
    >>> from fl_core.run.runner import run
    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> engine = run(RunConfig(dataset="heart", rounds=1), f"{where.name}/first", progress=False)
    >>> models, task = load_models(f"{where.name}/first", which="global")
    >>> sorted(models)
    ['cleveland', 'hungarian', 'switzerland', 'va']
    >>> test = task.data.clients[0].test
    >>> models["cleveland"](test.x).shape == (len(test), len(task.data.classes))
    True

    Args:
        path: the run directory.
        round: a round with a checkpoint, ``"last"``, or ``"best"``: these models' best round under a stopping rule.
            None = ``best`` if the run has a stopping rule, else ``last``.
        which: ``local`` (after local training, before aggregation), ``personal``
            (fine-tuned if the algorithm does this), or ``global``. A run stores
            ``local`` models of at most :data:`~fl_core.rounds.engine.LOCAL_MODELS`
            clients that trained in that round and replied.
        data, model, loss, allow_code: as in :func:`fl_core.run.runner.resume`.

    Raises:
        UsageError: the round or model does not exist (the message lists others), or data or model differ from the
            run's.
        CorruptError: stored files are damaged.
    """
    objects = {"data": data, "model": model, "loss": loss, "allow_code": allow_code}
    _, _, models, task = next(load_rounds(path, [round], (which,), **objects))
    return {
        name: with_labels(original(model), task.data.classes, task.criterion)
        for name, model in models.items()
    }, task


def with_labels(model: Any, names: Sequence[str], loss: Loss) -> nn.Module:
    """Set a model's ``label_names`` and ``training_loss``, and return the model.

    Args:
        model: the model.
        names: the names of its classes, in the order of its outputs.
        loss: the loss that it was trained with.
    """
    model.label_names, model.training_loss = tuple(names), loss
    labelled_model: nn.Module = model
    return labelled_model


def load_rounds(
    path: Path | str,
    rounds: Sequence[int | str | None],
    which: Sequence[str] = USED,
    **own: Any,
) -> Iterator[tuple[int, str, dict[str, nn.Module], Task]]:
    """Yield each round's number, the name of its models, the models by client, and their task, which is made once.

    Args:
        rounds: numbers, ``last`` or ``best``. With several models ``best`` is the best round of the one that decides
            when to stop. None means the round of :meth:`~fl_core.records.store.Run.used_round`.
        which: names of models. The first one that the round has is taken.
        own: ``data``, ``model``, ``loss`` and ``allow_code``, as for
            :func:`load_models`.

    Raises:
        UsageError, CorruptError: as :func:`load_models`, when the iterator gets there.
    """
    for kind in which:
        check_known("model", kind, MODELS)
    run, task = Run(path), None
    for round in rounds:
        model_name = None
        if len(which) == 1:
            model_name = which[0]
        if round == "best":
            round = run.best_round(model_name)
        elif round is None:
            round = run.used_round(model_name)
        checkpoint = run.checkpoint(round)
        if task is None:
            task = _task_to_read(run, **own)
        algorithm = check(run, checkpoint, task)
        kind, trees = _trees_of_first(run, checkpoint, algorithm, task, which)
        models = {name: copy_with(task.model, values) for name, values in trees.items()}
        yield checkpoint.round, kind, models, task


def _trees_of_first(
    run: Run,
    checkpoint: Checkpoint,
    algorithm: Algorithm,
    task: Task,
    order: Sequence[str],
) -> tuple[str, dict[str, tree.Tree]]:
    """Return the first kind in ``order`` that a checkpoint has models of, with these.

    The models are tensors by name, by client.

    Raises:
        CorruptError: the algorithm cannot make models from the stored states.
        UsageError: there is no model of these kinds, or a client's model is only a
            part.
    """
    with damaged(
        run.checkpoint_path(checkpoint.round), Exception
    ):  # what a hook raises for states that do not fit
        trees = trees_of(checkpoint, algorithm)
    kind_name = next((kind for kind in order if kind in trees), None)
    if kind_name is None:
        raise UsageError(
            f"model must be one of {listing(trees)} after round {checkpoint.round}; got {order[0]!r}."
        )
    all_names = tree.named_tensors(task.model).keys()
    client_trees = trees[kind_name]
    for client, model in client_trees.items():
        if model.keys() < all_names:
            raise UsageError(
                f"client {client!r} must have a whole {kind_name!r} model to load; got a part of it."
            )
    return kind_name, {
        name: client_trees[name] for name in task.data.names if name in client_trees
    }


def trees_of(
    checkpoint: Checkpoint, algorithm: Algorithm
) -> dict[str, dict[str, tree.Tree]]:
    """Return the models of a checkpoint by kind and client.

    A stored model comes before one that the algorithm makes from the states.

    Args:
        checkpoint: the checkpoint.
        algorithm: the run's algorithm, with its plan.
    """
    trees = {kind: dict(source) for kind, source in checkpoint.models.items()}
    for name, state in checkpoint.clients.items():
        for kind, values in algorithm.models(
            checkpoint.server, state, Round(checkpoint.round)
        ).items():
            trees.setdefault(kind, {}).setdefault(name, values)
    return trees


def _task_to_read(
    run: Run, allow_code: str | Collection[str] = (), **objects: Any
) -> Task:
    """Return the task of a finished or interrupted run, for reading its models.

    A warning names parts of the user's code that have changed since the run trained.

    Raises:
        UsageError, CorruptError: as :func:`load_models`.
    """
    objects = {"data": None, "model": None, **objects}
    check_own(run.path, run.config, allow_code, True, **objects)
    task = task_of(run, trained=True, **objects)
    check_same_start(task, run.path, weights=False)
    if changed_parts := changed_code(run, task):
        warn(
            f"{run.path} was trained with other code of its {listing(changed_parts)}: "
            "its scores may be those of that code"
        )
    return task


def copy_with(model: nn.Module, source: tree.Tree) -> nn.Module:
    """Return a copy of a model with the values of a tree of tensors.

    Raises:
        UsageError: the tree has other names or shapes than the model.
    """
    model_copy = tree.copied(model)
    tree.load(model_copy, source)
    return model_copy
