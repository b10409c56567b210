"""What a run directory stands for: its task again, and whether a checkpoint holds what the run can go on from.

Digests tell what was damaged, not what was made up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_core import tree
from fl_core.algorithms.base import Algorithm, Round, State
from fl_core.config import AUTO, DEALING, READING, RunConfig
from fl_core.config import check as check_config
from fl_core.data import Partition
from fl_core.data.preprocessing import Preprocessing
from fl_core.errors import CorruptError, UsageError, listing
from fl_core.models import is_code
from fl_core.models.options import check_stored, shown, without_weights
from fl_core.plan import LayerPlan
from fl_core.records.store import Checkpoint, Run, blob_name
from fl_core.registry import is_outside
from fl_core.schedule import sampled_clients
from fl_core.task import Task, assemble
from fl_core.tree import Tree

FEDERATION = "federation"
"""The key of a run's configuration that says which sites it is of, if its clients are not here."""


@contextmanager
def as_corruption(path: Path) -> Iterator[None]:
    """Tell what does not fit within the block as damage to a stored file.

    Raises:
        CorruptError: in place of a UsageError, which is about what the user asks for.
    """
    try:
        yield
    except UsageError as error:
        raise CorruptError(f"{path} is damaged: {error}") from error


BEFORE: dict[str, Any] = {"scale": "none", "keep_ids": True}
"""What runs of earlier versions did where their configuration does not say it."""


def stored_config(stored: Mapping[str, Any]) -> tuple[RunConfig, LayerPlan | None]:
    """The configuration of a run and the plan given to it, from its ``config.json``."""
    beside: tuple[str, ...] = (
        *(
            "shape",
            "classes",
            "words",
            "preprocessing",
            "given",
            "in_force",
            "command",
            "own",
            "lost_replies",
            FEDERATION,
        ),
    )
    if "data" in stored["own"]:  # earlier runs also stored how data would have been dealt
        beside += (*READING, *DEALING)
    rest = {name: value for name, value in {**BEFORE, **stored}.items() if name not in beside}
    plan = None if stored["given"] is None else LayerPlan.from_json(stored["given"])
    config = RunConfig.from_json(rest)
    return (replace(config, plan=None) if plan is not None else config), plan


def task_of(run: Run, trained: bool = False, **given: Any) -> Task:
    """The task of a run directory, with what it began with if it has begun; ``given``: the user's own data and model.

    Args:
        trained: its model gets trained weights, so that no others are loaded for it.

    Raises:
        CorruptError: its files are damaged, or do not hold what they are there for.
        UsageError: what they name is not here, or does not fit.
    """
    stored = run.task_config()
    with as_corruption(run.path / "config.json"):
        config, plan = stored_config(stored)
        check_config(config)
    config = replace(config, download=False)  # a file never makes this machine fetch anything
    if trained:
        config = replace(config, model_options=without_weights(str(config.model), config.model_options))
    dealt: dict[str, Any] = {}
    start = None
    if run.begun:
        dealt = {} if given["data"] is not None else _dealt(run, stored)
        start = run.start()
    try:
        task = assemble(config, **given, **dealt, plan=plan, start=start)
    except UsageError as error:
        raise UsageError(f"{run.path}: {error}") from error
    names = {client.name for client in task.data.clients}
    task.lost_replies = [tuple(lost) for lost in stored.get("lost_replies", [])]
    for lost in task.lost_replies:
        if len(lost) != 2 or not isinstance(lost[0], int) or lost[1] not in names:
            raise CorruptError(f"{run.path / 'config.json'} is damaged: {lost} is no round and client of this run")
    return task


def _dealt(run: Run, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Who held which sample, and what was fitted on the training samples, as :func:`assemble` takes them."""
    with as_corruption(run.path / "partition.safetensors"):
        partition = Partition.from_tree(run.partition())
    fitted = stored.get("preprocessing")
    with as_corruption(run.path / "config.json"):
        return {
            "partition": partition,
            "preprocessing": None if fitted is None else Preprocessing.from_json(fitted),
        }


def check(run: Run, checkpoint: Checkpoint, task: Task, goes_on: bool = False, clients: bool = True) -> Algorithm:
    """Refuse a checkpoint that this task cannot have left, before anything is made of it.

    A tensor of the model's name has the model's shape, whatever keeps it; one that there was at the beginning keeps its
    type as well, and so does what stands beside the tensors. What cannot be foreseen, such as what a round adds, is put
    to the algorithm: it must find every client's models, and if the run goes on also what to send next.

    Args:
        clients: whether the clients' states are in it, and not at their sites.

    Returns:
        The algorithm, under the plan that the run had decided on by then if it had.

    Raises:
        CorruptError: names the file of the first tensor that does not fit, or else the checkpoint's.
    """
    path, server = run.checkpoint_path(checkpoint.round), checkpoint.server
    entries = run.manifest(checkpoint.round)["states"]
    initial, names = tree.state_dict(task.model), [client.name for client in task.data.clients]

    def check_one(name: str, state: State, begun: State) -> None:
        found = _misfit(state, begun, initial)
        if found:
            wrong, in_tensors = found
            where = run.path / blob_name(entries[name]["blob"]) if in_tensors else path
            raise CorruptError(f"{where} is damaged: {wrong} (of {name} after round {checkpoint.round})")

    with as_corruption(path):
        algorithm = _under_its_plan(task, server)
        stranger = next(iter(set(checkpoint.clients) ^ set(names)), None)
        if stranger is not None:
            raise UsageError(f"{stranger!r} is no client of this run, or is missing")
        bad = next(filter(None, map(tree.first_nonfinite, server.trees.values())), None)
        if bad is not None:
            raise UsageError(f"{bad!r} of the server is not finite, which no round leaves behind")
    check_one("server", server, algorithm.server_state(tree.clone(initial)))
    upcoming = _upcoming(task, algorithm, checkpoint.round) if goes_on else None
    for client, name in enumerate(names if clients else ()):
        state = checkpoint.clients[name]
        check_one(f"client/{name}", state, algorithm.client_state(initial, client))
        try:
            for kind, model in algorithm.models(server, state, Round(checkpoint.round)).items():
                tree.check_same(initial, model, "the model", f"its {kind!r} model")
            if upcoming and client in upcoming.sampled:
                algorithm.server_message(server, client, upcoming)
        except Exception as error:  # whatever a hook makes of what is not there, or of another kind
            reason = f"{algorithm.name} cannot go on from it with {name!r} ({type(error).__name__}: {error})"
            raise CorruptError(f"{path} is damaged: {' '.join(reason.split())}") from error
    for kind, models in checkpoint.models.items():
        for name in models:
            check_one(f"{kind}/{name}", State({"model": models[name]}), State({"model": initial}))
    return algorithm


def _under_its_plan(task: Task, server: State) -> Algorithm:
    algorithm = task.algorithm(task.plan)
    if "plan" not in server.meta:
        if task.plan is None and (task.config.plan == AUTO or algorithm.decides):
            raise UsageError(f"it has no plan, which {algorithm.name} had decided on in its first round")
        return algorithm
    plan = LayerPlan.from_json(server.meta["plan"])
    plan.check_tensors(algorithm.task_info.tensors)
    return algorithm.with_plan(plan)


def _upcoming(task: Task, algorithm: Algorithm, done: int) -> Round | None:
    if done >= int(task.config.rounds or 1):
        return None
    sampled = sampled_clients(task.config.seed, done, len(task.data.clients), task.config.participation)
    return Round(done, algorithm.exchanges(done)[0], sampled)


def _misfit(state: State, begun: State, initial: Tree) -> tuple[str, bool] | None:
    """What of a state does not fit, in words, and whether it is a tensor."""
    for kind, held in state.trees.items():
        for name, tensor in held.items():
            like = begun.trees.get(kind, {}).get(name)
            if kind == "model" and name not in initial:
                return f"the model has no tensor {name!r}", True
            if like is not None and tensor.dtype != like.dtype:
                return f"its tensor {name!r} is {tensor.dtype}, not {like.dtype}", True
            shape = like.shape if like is not None else initial[name].shape if name in initial else tensor.shape
            if tensor.shape != shape:
                return f"its tensor {name!r} has the shape {list(tensor.shape)}, not {list(shape)}", True
    for key, value in begun.meta.items():
        if key in state.meta and not _alike(state.meta[key], value):
            return f"{key!r} is {type(state.meta[key]).__name__}, not {type(value).__name__}", False
    return None


def _alike(one: Any, other: Any) -> bool:
    numbers = (int, float)
    return other is None or type(one) is type(other) or (isinstance(one, numbers) and isinstance(other, numbers))


# --- whether it may go on here ------------------------------------------------------------------------------------


def check_at_home(path: Path, stored: Mapping[str, Any], at_sites: bool) -> None:
    """Refuse a federation's run directory where its sites are needed, and an ordinary one where they are not.

    Raises:
        UsageError: says what the run is.
    """
    if FEDERATION in stored and not at_sites:
        names = listing(site["name"] for site in stored[FEDERATION]["sites"])
        raise UsageError(
            f"{path} is a federation's run: what its clients keep is at their sites, {names}; fedlayers federate "
            f"--resume {path} goes on with it"
        )
    if at_sites and FEDERATION not in stored:
        raise UsageError(f"{path} is no federation's run: fedlayers resume {path} goes on with it")


def code_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The user's own code that a configuration names, ``package.module:name``, by the configuration's key."""
    named = {key: config.get(key) for key in ("algorithm", "dataset", "partition", "rule")}
    named |= {f"option {key}": value for key, value in config["options"].items()}
    code = {key: value for key, value in named.items() if isinstance(value, str) and is_outside(value)}
    return {**code, "model": config["model"]} if is_code(str(config["model"])) else code


def allowed_by(config: RunConfig) -> set[str]:
    """What a command's own configuration allows a stored run to name: its code, and its model options."""
    return {*code_of(config.to_json()).values(), *(shown(key, value) for key, value in config.model_options.items())}


def allowed_code(code: Collection[str], allow_code: str | Collection[str] | None) -> set[str]:
    """The code that a caller allows to be run, as a set of names, from both keywords."""
    names = [(each,) if isinstance(each, str) else (each or ()) for each in (code, allow_code)]
    return {name for group in names for name in group}


def check_own(path: Path, stored: Mapping[str, Any], code: Collection[str], weights: bool, **given: Any) -> None:
    """Refuse to resume without what the run began with: data or a model from Python, or permission for its code.

    Args:
        weights: whether tensors are there that take the place of pretrained weights.
    """
    for kind in stored["own"]:
        if given[kind] is None:
            raise UsageError(f"{path} began with {kind} of your own: pass the same again, {kind}=...")
    passed = {"model": given["model"] is not None, "dataset": given["data"] is not None}
    check_code(path, {key: name for key, name in code_of(stored).items() if not passed.get(key)}, code)
    if not passed["model"]:
        model, options = str(stored["model"]), stored["model_options"]
        check_stored(str(path), model, options, code, weights)


def check_code(path: Path, needed: Mapping[str, str], code: Collection[str]) -> None:
    """Refuse to import code that only a file names, and the user has not named again.

    Args:
        needed: ``package.module:name`` by what it is in the file.
        code: what the user has named.

    Raises:
        UsageError: names the file, what is missing, and how to say it.
    """
    for key, name in needed.items():
        if name not in code:
            raise UsageError(
                f"{path} names code as its {key}, {name!r}; if it is yours, say so: "
                f"--allow-code {' '.join(needed.values())} (code={list(needed.values())} in Python)"
            )


def check_same_start(task: Task, path: Path, weights: bool) -> None:
    """Refuse to resume with other data or another initial model than the rows' header names."""
    began = Run(path).header()
    now = task.header("")
    if began["data"] != now["data"]:
        raise UsageError(f"{path} began with other data; pass the same data to go on")
    names = [[layer["name"], *layer["parameters"], *layer["buffers"]] for layer in (*began["layers"], *now["layers"])]
    if names[: len(began["layers"])] != names[len(began["layers"]) :]:
        raise UsageError(f"{path} began with a model of other layers; pass the same model to go on")
    if weights and began["checkpoint"] != now["checkpoint"]:
        raise UsageError(f"{path} began with other weights and has no checkpoint yet; pass the same model")
