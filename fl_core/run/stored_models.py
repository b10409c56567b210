"""Several clients' models in one folder, next to a choice, so that they can be exported without its data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from fl_core import tree
from fl_core.data.table.read import warn_of_others
from fl_core.errors import (
    COUNT,
    DIGEST,
    ByName,
    CorruptError,
    MapOf,
    UsageError,
    check_known,
    damaged,
    listing,
)
from fl_core.kinds import Kind, kind_of, wrong_kind
from fl_core.models import lora
from fl_core.run import exported_model
from fl_core.run.exported_model import ExportedModel, Predictions, check_free, check_one
from fl_core.run.task import Task
from fl_core.storage import Folder, check_version, parsed_json, read_text, sha, sign

FORMAT = "fedlayers.models/1"
RECOMMENDED = "recommended"
"""The name of the models that a choice recommends. Others have the name of their baseline."""
FALLBACK = "fallback"
"""The name of the recommended models with a fallback to local training.

A client whose validation loss is lower with local training has its local model."""
STEM = 50
"""Characters of a client's name in a file's name at most."""
_FORM = {
    "about": {key: form for key, form in exported_model.FORM.items() if key != "file"},
    "clients": MapOf(
        {
            "sha256": DIGEST,
            "bytes": COUNT,
            "base_rate": [exported_model.BASE_RATE],
            "weights": str,
        }
    ),
}


def store(
    folder: Path,
    name: str,
    about: dict[str, Any],
    models: Mapping[str, nn.Module],
    bases: Mapping[str, Tensor],
    task: Task,
    model: object = None,
    allow_code: str | Collection[str] = (),
) -> None:
    """Store clients' models and their common description. Equal weights are stored once.

    Args:
        folder: the folder of the models.
        name: the name of the description's file, without ``.json``.
        about: the description from :func:`fl_core.run.exported_model.describe_model`, with the entries ``temperature``
            and ``base_rate``. The digest of the model's code is added to it.
        models: the trained models by client.
        bases: numbers that are added to each client's calibrated logits, [C] by client.
            They are not stored if the task has no classes.
        task, model, allow_code: the task, the model from Python and the allowed code, to check that the description
            rebuilds the first client's model.

    Raises:
        UsageError: the description gives another model, or none.
    """
    files = Folder(folder)
    keys: list[str] = []
    clients = {}
    for client, trained_model in models.items():
        weights = tree.state_dict(lora.merged(trained_model))
        if not keys:
            exported_model.checked_content(
                folder, about, trained_model, task, model, allow_code
            )
            keys = list(weights)
        content = save(weights)
        digest = sha(content)
        if not files.has(file := f"{digest}.safetensors"):
            files.write(file, content)
        base = bases[client].tolist() if task.data.classes else []
        clients[client] = {
            "bytes": len(content),
            "sha256": digest,
            "base_rate": base,
            "weights": tree.digest(weights),
        }
    description = {"format": FORMAT, "about": about, "clients": clients}
    files.write(f"{name}.json", sign(description))


def export(
    path: Path | str,
    out: Path | str,
    *,
    baseline: str = "",
    fallback: bool = False,
    client: str | None = None,
    **run: Any,
) -> ExportedModel | dict[str, ExportedModel]:
    """Write models of a run or of a choice for use elsewhere: one to a file, or each client's to a folder.

    Each model has two files, which contain no code and no pickle. See :func:`fl_core.run.exported_model.export`, for
    the files and for what a run takes. A choice gives its recommended model, or a baseline's, and needs no data.

    >>> import fedlayers as fl
    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> result = fl.run(dataset="heart", algorithm="fedper", rounds=1, out=f"{where.name}/fedper", progress=False)
    >>> made = fl.export(f"{where.name}/fedper", f"{where.name}/va.safetensors", client="va")
    >>> made.about["model"]["callable"], made.classes
    ('heart_mlp', ('0', '1', '2', '3', '4'))

    Args:
        path: a run directory, or the folder of a choice or a study.
        out: the file of weights, which must not exist. From a choice, a name without a suffix is a folder, unless
            ``client`` is named.
        baseline: a linear model next to the recommended one: ``linear_local`` or ``linear_pooled``.
        fallback: whether clients whose validation loss is lower with local training get their local model, from a
            choice.
        client: the model's client. None if all clients have the same model, or for a folder with all of them.
        run: ``which``, ``round``, ``data``, ``model``, ``loss`` and ``allow_code`` of a run.

    Returns:
        The exported model, or a dict of exported models by client if a folder was
        written.

    Raises:
        UsageError: there is no such run, choice, model or client, or the file exists.
            Or no client is named and one file cannot hold clients' models that differ.
            Or an argument of a run is given for a choice, or one of a choice for a run.
        CorruptError: stored files are damaged.
    """
    out, folders = Path(out), (Path(path), Path(path) / "race")  # a study's is in race
    choice = next(
        (candidate for candidate in folders if (candidate / "choice.json").is_file()),
        None,
    )
    if choice is None:
        if baseline or fallback:
            raise UsageError(
                f"a baseline or fallback is stored next to a choice; got the run {path}. Name the folder of fedlayers "
                "choose."
            )
        return exported_model.export(path, out, client=client, **run)
    if baseline and fallback:
        raise UsageError("baseline must be left out with fallback; got both. Name one.")
    options = [
        f"{k}=VALUE"
        for k, v in run.items()
        if not isinstance(v, str | tuple | None) or v
    ]
    if options:
        raise UsageError(
            f"{listing(options)} must be left out for a choice, whose model is known; got {path}."
        )
    folder = Folder(choice / "models")
    description, clients = _stored(choice, folder, FALLBACK if fallback else baseline)
    if client is not None:
        names = [check_known("client", client, clients)]
    elif out.suffix:
        check_one(
            {name: entry["sha256"] for name, entry in clients.items()},
            ", or a folder as out for all of them",
        )
        names = []
    else:
        names = list(clients)
    targets = dict(zip(names, _files(out, names, client), strict=True)) or {"": out}
    for target in targets.values():
        check_free(target)
    exports = {}
    for name, file in targets.items():
        entry = clients[name or next(iter(clients))]
        content = folder.read_checked(f"{entry['sha256']}.safetensors", entry["sha256"])
        base = entry["base_rate"] if name else description["base_rate"]
        client_about = {**description, "base_rate": base, "weights": entry["weights"]}
        client_about["run"] = {**description["run"], "client": name or None}
        exports[name] = exported_model.write(file, client_about, content)
    if client or out.suffix:
        return next(iter(exports.values()))
    return exports


def _files(out: Path, names: Sequence[str], client: str | None) -> list[Path]:
    """Return the file of each named client's model.

    It is ``out`` itself for a single ``client``, else a file in the folder ``out``.
    Names that give the same file name get their position in it.
    """
    if client is not None:
        return [out]
    stems = [file_name(name) for name in names]
    while duplicates := {stem for stem, count in Counter(stems).items() if count > 1}:
        stems = [
            f"{stem}-{k}" if stem in duplicates else stem
            for k, stem in enumerate(stems)
        ]
    return [out / f"{stem}.safetensors" for stem in stems]


def file_name(client: str) -> str:
    """Return a file name for a client's model, without a suffix.

    It has an underscore for each character but letters, digits, ``_``, ``.`` and ``-``. A long name is cut.

    >>> file_name("St. Mary's / east"), len(file_name("a" * 999))
    ('St._Mary_s___east', 50)
    """
    return re.sub(r"[^\w.-]", "_", client)[:STEM]


def _stored(
    choice: Path, folder: Folder, baseline: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the description of a choice's models, and each client's entry.

    Args:
        choice: the folder of the choice.
        folder: the folder of its models.
        baseline: the baseline's name, :data:`FALLBACK`, or empty for the recommended
            model.

    Raises:
        UsageError: the choice has no such models. The message says what can be
            exported.
        CorruptError: a file is damaged.
    """
    stems = [name[:-5] for name in folder.names() if name.endswith(".json")]
    baseline_names = [name for name in stems if name not in (RECOMMENDED, FALLBACK)]
    if baseline == FALLBACK:
        if FALLBACK not in stems:
            raise UsageError(
                f"{choice} has no fallback: no client's validation loss is lower alone. Leave it out."
            )
    elif baseline:
        check_known(
            f"baseline of {choice} that can be exported", baseline, baseline_names
        )
    elif RECOMMENDED not in stems:
        advice = f"Export one of its runs, which are below {choice}/arms"
        if baseline_names:
            advice = f"Export a baseline: baseline={baseline_names[0]!r}"
        with damaged(choice / "choice.json"):
            choice_content = parsed_json(read_text(choice / "choice.json"))
        run = None
        if isinstance(choice_content, dict):
            run = choice_content.get("run")
        if run:
            advice = f"Export its run: {choice / str(run)}"
        raise UsageError(f"{choice} must have a recommended model; got none. {advice}.")
    name = baseline or RECOMMENDED
    description = folder.read_signed(f"{name}.json", {"format": str, **_FORM})
    check_version(folder.path / f"{name}.json", description["format"], FORMAT)
    if not description["clients"]:
        raise CorruptError(
            f"{folder.path / name}.json is damaged: it has no client. Restore it from a copy."
        )
    return description["about"], description["clients"]


# --- predictions ----------------------------------------------------------------------------------------------


def predict(
    path: Path | str,
    new: Any,
    *,
    ids: str | Sequence[str] | None = None,
    model: Any = None,
    allow_code: str | Collection[str] = (),
) -> Predictions | dict[str, Predictions]:
    """Predict new samples with an exported model, or with a folder of exported models, one for each client.

    See :func:`fl_core.run.exported_model.predict`. A model that was exported for all
    clients predicts the samples of clients without a model of their own.

    >>> import fedlayers as fl, numpy as np
    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> result = fl.run(dataset="heart", rounds=1, out=f"{where.name}/heart", progress=False)
    >>> _ = fl.export(f"{where.name}/heart", f"{where.name}/heart.safetensors", which="global")
    >>> fl.predict(f"{where.name}/heart.safetensors", np.zeros((2, 10))).logits.shape
    torch.Size([2, 5])

    Args:
        path: an exported model, or a folder of them, whose names end in
            ``.safetensors``. A warning names the folder's other files.
        new: samples without labels. For a folder of models, a table with the column of clients that training had; or
            a folder, whose files or folders have the names of clients.
        ids, model, allow_code: as for :func:`fl_core.run.exported_model.predict`.

    Returns:
        The predictions. They are a dict by client for a folder of models, and for a
        folder of clients' samples. Those of one table have the numbers of its rows.

    Raises:
        UsageError: there is no such model, the samples differ in kind from training, a table has no column of clients,
            or a row or a file has the name of no client with a model, or of several. Or two models of a folder, or two
            files of samples, are of one client.
        CorruptError: a file of the model is damaged.
        NonFiniteError: the model's output is NaN or infinite.
    """
    path, arguments = Path(path), {"ids": ids, "model": model, "allow_code": allow_code}
    folder = None
    if isinstance(new, str | Path) and Path(new).is_dir():
        folder = Path(new)
        if kind_of(folder) in (Kind.RUN, Kind.RUNS, Kind.DECISION, Kind.MODELS):
            raise wrong_kind(folder, "data", "new samples")
    files, descriptions = [path], [Path(f"{path}.json")]
    if path.is_dir():
        descriptions = sorted(path.glob("*.safetensors.json"))
        files = [description.with_suffix("") for description in descriptions]
    elif folder is None or exported_model.read(path).inputs.images:
        return exported_model.predict(path, new, **arguments)
    # one file is also a model; without a client it is for all
    models: dict[str, Path] = {}
    exports: dict[str, ExportedModel] = {}
    for file in files:
        exported = exported_model.read(file)
        client = exported.about["run"]["client"] or ""
        if client in models:
            raise UsageError(
                f"{path} must have one model for each client; got {models[client].name} and {file.name} of "
                f"{client!r}. Remove one, or name the model's file."
            )
        models[client], exports[client] = file, exported
    if not models:
        raise wrong_kind(path, "exported model", "what fedlayers export wrote")
    if path.is_dir():
        warn_of_others(path, {*files, *descriptions})
    if folder is None:
        return _predict_rows(path, exports, new, **arguments)
    return _predict_files(folder, models, **arguments)


def _predict_files(folder: Path, models: Mapping[str, Path], **arguments: Any) -> Any:
    """Predict the samples of each client with the client's model.

    An entry of ``folder`` is a file or folder of samples, named after its client. The
    name may be as :func:`file_name` writes it.

    Returns:
        The predictions by client. The model of "" predicts entries of other names.

    Raises:
        UsageError: the folder is empty, an entry has the name of no client with a
            model, or of several, or two entries have the name of one client.
    """
    predictions = ByName("client")
    for entry in sorted(folder.glob("[!.]*")):
        stem = entry.name if entry.is_dir() else entry.stem
        clients = [stem] if stem in models else []
        clients = clients or [name for name in models if file_name(name) == stem]
        if len(clients) > 1:
            client_names = listing(map(repr, clients))
            raise UsageError(
                f"{entry} must have the name of one client; got that of {client_names}. Rename it, or "
                "predict it alone with one client's model."
            )
        client = clients[0] if clients else ""
        name = client or stem
        if name in predictions:
            raise UsageError(
                f"{folder} must have one file for each client; got {entry.name} and another of {name!r}. "
                "Join them, or remove one."
            )
        if client not in models:
            raise UsageError(
                f"{entry} must have the name of a client with a model: {listing(models)}; got {stem!r}. Rename it, or "
                "predict it alone with one client's model."
            )
        predictions[name] = exported_model.predict(models[client], entry, **arguments)
    if not predictions:
        raise UsageError(f"{folder} must have a file for each client; got none.")
    return predictions


def _predict_rows(
    path: Path, exports: Mapping[str, ExportedModel], new: Any, ids: Any, **how: Any
) -> dict[str, Predictions]:
    """Predict each row of a table with the model of its client. The table is read once.

    Args:
        path: the folder of the models.
        exports: the exported model of each client. The one of "" is for all other
            clients.
        new: the table of new samples, its path, or that of an .npz file.
        ids: as for :func:`predict`.
        how: ``model`` and ``allow_code``, as for :func:`predict`.

    Raises:
        UsageError: the models prepare rows differently, or a row is of a client without
            a model.
    """
    first_model, *other_models = exports.values()
    if any(exported.inputs != first_model.inputs for exported in other_models):
        raise UsageError(
            f"models in {path} must prepare rows alike to predict one table; got models of several trainings. "
            "Predict each client's rows with its own model."
        )
    rows = first_model.inputs.rows_of_clients(new)
    unknown_clients = [client for client in rows if client not in exports]
    if unknown_clients and "" not in exports:
        unknown_names = listing(map(repr, unknown_clients))
        raise UsageError(
            f"each row must be of a client with a model: {listing(exports)}; got {unknown_names}. "
            "Leave these rows out, or predict them with one client's model."
        )
    samples = first_model.inputs.samples(new, ids)
    predictions = ByName("client")
    for client, client_rows in rows.items():
        exported = exports[client if client in exports else ""]
        predictions[client] = exported_model.predict_samples(
            exported, samples.rows(client_rows), **how
        )
    return predictions
