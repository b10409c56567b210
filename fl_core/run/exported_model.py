"""Trained models outside their run: weights in one file, and their description in a JSON file next to it."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import save
from torch import Tensor, nn

import fl_core
from fl_core import models, tree
from fl_core.algorithms.base import Algorithm, extends_model, find
from fl_core.config import BATCHNORM
from fl_core.data.inputs import Inputs, Samples
from fl_core.data.reading import BETWEEN
from fl_core.display import Displayed, Summary
from fl_core.errors import (
    COUNT,
    DIGEST,
    NUMBER,
    Bound,
    CorruptError,
    MapOf,
    NonFiniteError,
    UsageError,
    check_known,
    listing,
    plural,
    validate,
    warn,
)
from fl_core.kinds import Kind, kind_of, wrong_kind
from fl_core.models import lora
from fl_core.models.adapter import PackedShape, adapt
from fl_core.models.building import TRIAL, drop_statistics, without_weights
from fl_core.records import store
from fl_core.rows import CLASSIFICATION, MULTILABEL, TASKS, USED
from fl_core.run import own_code, restore
from fl_core.run.initial import wrapped
from fl_core.run.task import Task
from fl_core.storage import (
    Folder,
    check_folder,
    check_size,
    check_version,
    sha,
    sign,
    write_atomically,
)
from fl_core.training import evaluate
from fl_core.training.losses import Standardised, build
from fl_core.tree import Tree

FORMAT = "fedlayers.model/1"
ROUNDING = 1e-9
"""The relative error of a temperature at the ends of its range."""
MOST_BASE = 1000
"""The largest size of a number that is added to logits. The logarithm of a float64 is below 750."""
DESCRIPTION_BYTES = 2**23
"""Bytes of a model's description at most, which has each word of a table or a text."""
SHOWN = 8
"""The most samples that predictions show as text.

With more classes than this they show no probabilities."""
TEMPERATURE = Bound(
    f"a number from {evaluate.COLDEST:g} to {evaluate.HOTTEST:g}",
    lambda value: (
        NUMBER.holds(value)
        and (1 - ROUNDING) * evaluate.COLDEST <= value <= (1 + ROUNDING) * evaluate.HOTTEST
    ),
)  # fmt: skip
"""The bound on a stored temperature, which is that of the fit."""
BASE_RATE = Bound(
    f"a number from {-MOST_BASE:,} to {MOST_BASE:,}",
    lambda value: NUMBER.holds(value) and abs(value) <= MOST_BASE,
)
"""The bound on a stored number that is added to logits."""
FORM = {
    "model": {
        "outputs": COUNT,
        "callable": str,
        "class": str,
        "options": dict,
        "seed": int,
        "bn": Bound(listing(BATCHNORM), BATCHNORM.__contains__),
        "code": MapOf(DIGEST),
        "extended_by": ({"algorithm": str, "options": dict}, None),
    },
    "inputs": dict,
    "classes": [str],
    "task": str,
    "temperature": TEMPERATURE,
    "base_rate": [BASE_RATE],
    "run": {"model": str, "client": (str, None), "algorithm": str, "round": COUNT},
    "file": {"sha256": DIGEST},
}
"""The form of a model's description, for :func:`fl_core.errors.validate`."""
COLUMNS = ("sample", "unlike training", "clipped", "predicted")
"""Columns that a table of predictions has of its own."""


@dataclass(frozen=True, repr=False)
class ExportedModel(Displayed):
    """A trained model written by :func:`export`, with the description from its JSON file.

    Attributes:
        path: the file of weights. The JSON file has the same name followed by ``.json``.
        about: the contents of the JSON file: ``model`` (callable, options, seed, and
            the algorithm that extended it), ``inputs`` (how raw samples are prepared),
            ``classes``, ``temperature`` (by which logits are divided, fitted on the
            clients' validation samples), ``base_rate`` (a number for each class that is
            then added to the logits; empty without classes), ``layers``, ``plan``,
            ``run`` (id, round, client, digests), and ``file``.
    """

    path: Path
    about: Mapping[str, Any]

    def summary(self) -> Summary:
        run = self.about["run"]
        client_text = ""
        if run["client"]:
            client_text = f" of client {run['client']}"
        lead = f"{self.path}: the {run['model']} model{client_text}, {run['algorithm']}, round {run['round']}"
        classes = listing(map(str, self.classes), 6)
        return Summary(f"{lead}\n{self.task}: {classes}" if classes else lead)

    @property
    def inputs(self) -> Inputs:
        """Return the model's inputs, with the preparation of raw samples."""
        return Inputs.from_json(self.about["inputs"])

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes, in the order of the logits."""
        return tuple(self.about["classes"])

    @property
    def task(self) -> str:
        """Return the name of the task, one of :data:`fl_core.rows.TASKS`."""
        return str(self.about["task"])

    @property
    def temperature(self) -> float:
        """Return the number by which logits are divided before they become probabilities."""
        return float(self.about["temperature"])

    def model(
        self, *, model: Any = None, allow_code: str | Collection[str] = ()
    ) -> nn.Module:
        """Return the model with its trained weights, in evaluation mode.

        Args:
            model: your own, if the run was given one from Python. It is copied.
            allow_code: ``package.module:name`` of the code that the file names, to allow it, as in resume.

        Raises:
            UsageError: code or a model is missing, or the weights do not fit.
            CorruptError: the file of weights is missing or damaged.
        """
        digest = self.about["file"]["sha256"]
        weights = Folder(self.path.parent).read_tensors(self.path.name, digest)
        return built_from(self.path, self.about, model, allow_code, weights).eval()


def export(
    path: Path | str,
    out: Path | str,
    *,
    which: str | None = None,
    client: str | None = None,
    round: int | str | None = None,
    data: object = None,
    model: object = None,
    loss: object = None,
    allow_code: str | Collection[str] = (),
) -> ExportedModel:
    """Write one model of a run for use elsewhere: its weights to ``out``, and their description to ``out``.json.

    Neither file contains code or a pickle. The JSON file names the model's callable with its options, classes, layers
    and plan. It describes the shape of a sample and how raw samples are prepared, with the fitted numbers. It also
    identifies the run by its digests. :func:`predict` reads both files.

    >>> import fedlayers as fl
    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> result = fl.run(dataset="heart", algorithm="fedper", rounds=1, out=f"{where.name}/fedper", progress=False)
    >>> made = fl.export(f"{where.name}/fedper", f"{where.name}/va.safetensors", client="va")
    >>> made.about["model"]["callable"], made.classes
    ('heart_mlp', ('0', '1', '2', '3', '4'))

    Args:
        path: the run's directory.
        out: the file of weights, which must not exist.
        which: ``personal``, ``global`` or ``local`` (see :func:`fl_core.run.restore.load_models`). None means
            ``personal`` if the run has such models, and ``global`` otherwise.
        client: the model's client. None if all clients have the same model.
        round: one with a checkpoint, ``last``, or ``best``: the stopping rule's. None = ``best`` if the run has a
            stopping rule, else ``last``.
        data, model, loss, allow_code: as for :func:`fl_core.run.runner.resume`.

    Raises:
        UsageError: the run, round, model or client does not exist, or no client is
            named and their models differ. Or samples have several inputs, or labels
            that do not give the task alone, such as labels at positions. Or a loss of
            your own took outputs that are not one for each class. Or the file exists or
            has another format's suffix.
        CorruptError: stored files are damaged.
    """
    out = Path(out)
    check_free(out)
    run = store.Run(path)
    if round is None:
        round = run.used_round(which)
    elif round == "best":
        round = run.best_round(which)
    objects = {"data": data, "model": model, "loss": loss, "allow_code": allow_code}
    order = USED if which is None else (which,)
    _, which, trained_models, task = next(
        restore.load_rounds(path, [round], order, **objects)
    )
    if isinstance(task.data.shape, PackedShape) or task.data.kind:
        raise UsageError(
            f"an exported model must have one input and one label; that of {path} has several. "
            "Save its state_dict() with torch.save."
        )
    if client is None:
        check_one(
            {k: tree.digest(tree.state_dict(m)) for k, m in trained_models.items()}
        )
    else:
        check_known(f"client with a {which} model", client, trained_models)
    chosen_model = trained_models[client or next(iter(trained_models))]
    description = describe_model(
        task, chosen_model, **of_run(run, which, client, round)
    )
    if fault := _classes_fault(description):
        raise UsageError(
            f"an exported model's {fault}. Save its state_dict() with torch.save."
        )
    data, criterion = task.data, task.criterion
    bases = {
        key: evaluate.base_outputs(data, criterion, client and key)
        for key in trained_models
    }
    description["temperature"], weight = evaluate.calibration_of(
        data, criterion, trained_models, bases
    )
    base = weight * bases[client or next(iter(trained_models))]
    description["base_rate"] = base.tolist() if task.data.classes else []
    content = checked_content(out, description, chosen_model, task, model, allow_code)
    return write(out, description, content)


def checked_content(
    where: Path,
    about: dict[str, Any],
    trained: nn.Module,
    task: Task,
    model: Any = None,
    allow_code: str | Collection[str] = (),
) -> bytes:
    """Check that a model's description rebuilds it, and return its weights as the bytes of a safetensors file.

    Args:
        where: the file or folder of the export, for messages.
        about: the description from :func:`describe_model`. The digest of the model's code is added to it.
        trained: the trained model.
        task: the task of the model's run.
        model, allow_code: as for :meth:`ExportedModel.model`.

    Raises:
        UsageError: the description gives another model, or none.
    """
    trained = lora.merged(trained)
    rebuilt_model = built_from(
        where, about, model, allow_code, tree.state_dict(trained)
    )
    about["model"]["code"] = own_code.of_model(
        rebuilt_model, model, about["model"]["callable"]
    )
    example = models.example(task.data.shape)
    with tree.one_thread():
        if not torch.equal(
            evaluate.predict(adapt(rebuilt_model), example),
            evaluate.predict(trained, example),
        ):
            raise UsageError(
                f"{about['model']['callable']} must give the same model when it is called again; got another."
            )
    return save(tree.state_dict(rebuilt_model))


def write(out: Path, about: dict[str, Any], content: bytes) -> ExportedModel:
    """Write a model's weights and its description, and return the exported model.

    Args:
        out: the file of weights. The description is written to ``out``.json.
        about: the description. Size and digest of the file are added to it as ``file``.
        content: the bytes of the weights.

    Raises:
        UsageError: the description has more than :data:`DESCRIPTION_BYTES`.
    """
    about["file"] = {"bytes": len(content), "sha256": sha(content)}
    description = sign({"format": FORMAT, **about})
    check_size(f"{out}.json", len(description), DESCRIPTION_BYTES)
    for path, data in ((out, content), (Path(f"{out}.json"), description)):
        write_atomically(path, data)
    return ExportedModel(out, about)


def read(path: Path | str) -> ExportedModel:
    """Read an export of :func:`export` from the JSON file next to the weights.

    The weights themselves are read by :meth:`ExportedModel.model`.

    Args:
        path: the file of weights.

    Raises:
        UsageError: the file does not exist, another version of this package wrote it, or it does not describe a model.
        CorruptError: it was edited or damaged.
    """
    path = Path(
        os.path.realpath(path)
    )  # links may lead to its folder, but not within it
    folder, name = Folder(path.parent), f"{path.name}.json"
    if not path.parent.is_dir() or not folder.has(name):
        if kind_of(path) is not Kind.FILE:
            raise wrong_kind(path, "exported model", "what fedlayers export wrote")
        raise UsageError(
            f"{path} must be an exported model with {name} next to it; got none. Copy both files."
        )
    check_size(path.parent / name, folder.size(name), DESCRIPTION_BYTES, CorruptError)
    description = folder.read_signed(name)
    current_format = check_version(
        path.parent / name, description.pop("format", None), FORMAT
    )
    fault = "it has no known format"
    if current_format:
        fault = validate(description, FORM) or _value_fault(description)
    if fault:
        raise UsageError(
            f"{path.parent / name} must describe an exported model: {fault}. Export the model again."
        )
    return ExportedModel(path, description)


def _value_fault(about: Mapping[str, Any]) -> str:
    """Return what is wrong with the values of a description whose entries have their types; empty if nothing is."""
    n_bases, n_classes = len(about["base_rate"]), len(about["classes"])
    if n_bases and n_bases != n_classes:
        return f"base_rate must have a number for each class; got {n_bases}"
    if about["task"] not in TASKS:
        return f"task must be one of {listing(TASKS)}; got {about['task']!r}"
    if (about["task"] in (CLASSIFICATION, MULTILABEL)) != bool(n_classes):
        return f"classes must fit task {about['task']}; got {n_classes}"
    return _classes_fault(about)


def _classes_fault(about: Mapping[str, Any]) -> str:
    """Return the fault that a model has another number of outputs than classes, or an empty text.

    There may be a single output for two classes.
    """
    n_outputs, n_classes = about["model"]["outputs"], len(about["classes"])
    if not n_classes or n_outputs == n_classes or (n_outputs, n_classes) == (1, 2):
        return ""
    return f"outputs must be one for each class; got {n_outputs} for {n_classes}"


def predict(
    path: Path | str,
    new: object,
    *,
    ids: str | Sequence[str] | None = None,
    model: object = None,
    allow_code: str | Collection[str] = (),
) -> Predictions:
    """Predict new samples with an exported model. They are prepared exactly as the training samples were.

    >>> import fedlayers as fl, numpy as np
    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> result = fl.run(dataset="heart", rounds=1, out=f"{where.name}/heart", progress=False)
    >>> _ = fl.export(f"{where.name}/heart", f"{where.name}/heart.safetensors", which="global")
    >>> fl.predict(f"{where.name}/heart.safetensors", np.zeros((2, 10))).logits.shape
    torch.Size([2, 5])

    Args:
        path: the file of weights from :func:`export`.
        new: a .csv table, an .npz file with an array ``x``, a folder of images, or texts in a .csv or .jsonl file, as
            for :func:`fl_core.data.files.read` but without labels; or an array [n, ...], or a list of texts.
        ids: columns of a table that name its records. The predictions get them. By default these are columns with
            such a name, like ``record_id``, that are not features.
        model, allow_code: as for :meth:`ExportedModel.model`.

    Raises:
        UsageError: there is no exported model, its code is not allowed, or the samples differ in kind from training.
        CorruptError: a file of the model is damaged.
        NonFiniteError: the model's output is NaN or infinite.
    """
    model_read = read(path)
    samples = model_read.inputs.samples(new, ids)
    return predict_samples(model_read, samples, model=model, allow_code=allow_code)


def predict_samples(
    exported: ExportedModel,
    samples: Samples,
    *,
    model: object = None,
    allow_code: str | Collection[str] = (),
) -> Predictions:
    """Predict prepared samples. See :func:`predict` for arguments and errors.

    Args:
        exported: the exported model.
        samples: the samples from :meth:`fl_core.data.inputs.Inputs.samples`.
        model, allow_code: as for :meth:`ExportedModel.model`.
    """
    if own_names := [name for name in samples.ids if name in COLUMNS]:
        raise UsageError(
            f"ids must name columns other than {listing(COLUMNS)}, which predictions have; got {own_names[0]!r}. "
            "Rename it in the table."
        )
    adapted_model = adapt(exported.model(model=model, allow_code=allow_code))
    with tree.one_thread():
        outputs = evaluate.predict(adapted_model, samples.x)
    bad_rows = torch.flatten((~torch.isfinite(outputs).all(dim=1)).nonzero()).tolist()
    if bad_rows:
        first_name = samples.names[bad_rows[0]]
        raise NonFiniteError(
            f"outputs must be finite; got NaN or infinity for {len(bad_rows)} of {len(outputs)} samples, "
            f"first for {first_name}."
        )
    target = getattr(exported.inputs.preprocessing, "target", ())
    if target:
        mean, deviation = target
        outputs = Standardised(build("mse"), mean, deviation).logits(outputs)
    return Predictions(
        samples.names,
        exported.classes,
        outputs,
        samples.ids,
        exported.task,
        exported.temperature,
        tuple(exported.about["base_rate"]),
        samples.notes,
        samples.clipped,
    )


# --- descriptions -----------------------------------------------------------------------------------------------


def of_run(
    stored_run: store.Run, which: str, client: str | None, round: int | str
) -> dict[str, Any]:
    """Return the entries ``plan`` and ``run`` of a model's description.

    The plan is None for a run without one.

    Args:
        which: the kind of model: ``personal``, ``global`` or ``local``.
        client: the model's client, or None if all clients have it.
        round: the number of a round with a checkpoint, or ``last``.
    """
    checkpoint = stored_run.checkpoint(round, lazy=True)
    plan = checkpoint.server.meta.get("plan") or stored_run.config.get("in_force")
    run = {
        "id": stored_run.id,
        "name": Path(os.path.realpath(stored_run.path)).name,
        "model": which,
    }
    return {"plan": plan, "run": {**run, "client": client, "round": checkpoint.round}}


def describe_model(
    task: Task, trained: nn.Module, plan: object, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the description of a model, as in its JSON file.

    It lacks the entries ``temperature`` and ``base_rate``, the digest of the code, and
    ``file``. The functions that write a model add these.

    Args:
        task: the task of the model's run.
        trained: the trained model.
        plan: the plan under which the model was trained.
        run: the run that trained it, as :func:`of_run` describes it.
    """
    config, data = task.config, task.data
    algorithm = find(config.federation.algorithm, config.federation.options)
    names = {
        "algorithm": config.federation.algorithm,
        "options": dict(config.federation.options),
    }
    module_name = type(trained).__module__
    class_name = type(trained).__qualname__
    return {
        "model": {
            "outputs": evaluate.predict(trained, models.example(data.shape)).shape[1],
            "callable": "" if task.own["model"] is not None else config.model.model,
            "class": f"{module_name}.{class_name}",
            "options": without_weights(
                str(config.model.model), config.model.model_options
            ),
            "seed": config.execution.seed,
            "bn": config.model.batchnorm,
            "extended_by": names if extends_model(algorithm) else None,
        },
        "inputs": Inputs.from_federation(data, config.data).to_json(),
        "classes": list(data.classes),
        "task": data.task,
        "layers": [asdict(layer) for layer in task.layers],
        "plan": plan,
        "weights": tree.digest(tree.state_dict(lora.merged(trained))),
        "run": {
            "algorithm": config.federation.algorithm,
            **run,
            "dataset": config.data.dataset,
            "data": data.digest,
            "source": data.source_digest,
        },
        "version": fl_core.__version__,
    }


def built_from(
    path: Path,
    about: Mapping[str, Any],
    model: nn.Module | None,
    allow_code: str | Collection[str],
    weights: Tree,
) -> nn.Module:
    """Return the model that an export describes, with its weights.

    Names and shapes of the weights are compared before the first forward pass. Only a
    model with lazy layers, and one that an algorithm extends, need a pass before. Samples
    of more than :data:`TRIAL` numbers get no test pass. A warning says if the model's code
    has changed since the export.

    Args:
        path: path of the file of weights, for messages.
        about: the export's description, its ``.json`` file.
        model, allow_code: as for :meth:`ExportedModel.model`.
        weights: its tensors by name.

    Raises:
        UsageError: code or a model is missing, the weights do not fit, or the samples are too large for an algorithm
            that tries the model to extend it.
    """
    allowed = own_code.allowed_code(allow_code)
    description = about["model"]
    inputs = Inputs.from_json(about["inputs"])
    extension = description["extended_by"] or {
        "algorithm": Algorithm.name,
        "options": {},
    }
    named_code = {**extension, "model": description["callable"]}
    own_code.check_code(
        path,
        {
            key: name
            for key, name in own_code.code_of(named_code).items()
            if model is None or key != "model"
        },
        allowed,
    )
    shape = inputs.model_shape
    n_classes = description["outputs"]
    is_extended = description["extended_by"] is not None
    seed, is_small = description["seed"], math.prod(shape) <= TRIAL
    if is_extended and not is_small:
        raise UsageError(
            f"{path} must have samples of at most {TRIAL:,} numbers, since {extension['algorithm']} extends its model; "
            f"got shape {shape}. Train it on smaller samples."
        )
    if model is None:
        if not description["callable"]:
            raise UsageError(
                f"{path} must be loaded with its own model, {description['class']}; got none. Pass it again, model=..."
            )
        own_code.check_allowed_options(
            str(path), description["callable"], description["options"], allowed
        )
    new_model = models.copy_user_model(
        description["callable"] if model is None else model,
        shape,
        n_classes,
        seed=seed,
        options=description["options"],
        trial=is_extended,
    )
    if description["bn"] == "drop":
        drop_statistics(new_model)
    if is_extended:
        sizes = {"shape": shape, "n_classes": n_classes, "seed": seed}
        algorithm = find(extension["algorithm"], extension["options"])
        new_model = wrapped(
            new_model, algorithm, extension["options"], description["bn"], **sizes
        )
    if (
        description.get(
            "code",
            fault := own_code.of_model(new_model, model, description["callable"]),
        )
        != fault
    ):
        warn(
            f"{path} was exported with other code of its model: its predictions may be those of that code"
        )
    tree.load(new_model, weights)
    if is_small:
        models.check_fit(
            description["callable"] or type(new_model).__name__,
            new_model,
            shape,
            n_classes,
        )
    return new_model


# --- checks ----------------------------------------------------------------------------------------------------


def check_free(out: Path) -> None:
    """Refuse a file of weights that cannot be written or is there already.

    Args:
        out: the file of weights. Its JSON file, ``out``.json, must not exist either.

    Raises:
        UsageError: one of the two exists, the folder is a run or a file, or the suffix
            is another one than ``.safetensors``. The message names the path.
    """
    if out.suffix not in ("", ".safetensors"):
        raise UsageError(
            f"{out} must end in .safetensors. Other formats are torch's, of fl.load_models."
        )
    check_folder(out.parent)
    for path in (out, Path(f"{out}.json")):
        if path.exists() or path.is_symlink():
            raise UsageError(
                f"{path} must be a new file; got one that is there. Choose another name, or remove it."
            )


def check_one(digests: Mapping[str, str], way: str = "") -> None:
    """Refuse to export one model for all clients if their models differ.

    Args:
        digests: the digest of each client's model, by name.
        way: what the caller may pass in place of a client's name. It ends the message.

    Raises:
        UsageError: two digests differ.
    """
    if len({*digests.values()}) > 1:
        raise UsageError(
            f"client must be one of {listing(digests)}, which have models of their own; got none. Pass "
            f"client=NAME{way}."
        )


@dataclass(frozen=True, eq=False, repr=False)
class Predictions(Displayed):
    """A model's predictions for new samples.

    Attributes:
        samples: a name for each of the n samples. It is the number from 0 in a table,
            an array or a list, and the path within a folder of images.
        classes: names of the C classes. Empty means that the model predicts a number or
            a hazard.
        outputs: the model's outputs, float32 [n, C]. They are [n, 1] for one logit of
            the second of two classes, for a hazard, or for a predicted number in the
            targets' unit. The number is float64 if training standardised the targets.
        ids: the cells of columns that identify a table's records, by column.
        task: one of :data:`fl_core.rows.TASKS`. For survival the output is the log relative hazard: higher is earlier.
            For multilabel the classes are labels, each with a logit of its own.
        temperature: the number by which logits are divided before they become probabilities.
        base_rate: numbers that are then added to the logits, [C]; empty for zeros.
        notes: for each sample the columns that are unlike the training samples. Empty without such columns.
        clipped: for each sample the columns whose number was clipped. Empty if none was.
    """

    samples: tuple[str, ...]
    classes: tuple[str, ...]
    outputs: Tensor
    ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    task: str = ""
    temperature: float = 1.0
    base_rate: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    clipped: tuple[str, ...] = ()

    @cached_property
    def logits(self) -> Tensor:
        """Return a logit for each class, [n, C].

        These are the outputs. For a single output of two classes they are 0 and the output.

        Raises:
            UsageError: the model has no classes, as it predicts a number or a hazard.
        """
        if not self.classes:
            raise UsageError(
                "the model must predict classes; got a number. Use the outputs."
            )
        has_one_output = self.outputs.shape[1] < len(self.classes)
        if has_one_output:
            return build("bce").logits(self.outputs)
        return self.outputs

    @cached_property
    def probabilities(self) -> Tensor:
        """Return the calibrated probabilities of the classes, float64 [n, C].

        Logits are divided by the temperature, and the base rate is added. Then the softmax is taken over classes, or
        for multilabel the sigmoid of each logit.

        Raises:
            UsageError: as :attr:`logits`.
        """
        base_rate = torch.tensor(self.base_rate or (0.0,), dtype=torch.float64)
        logits = self.logits.double() / self.temperature + base_rate
        if self.task == MULTILABEL:
            return logits.sigmoid()
        return logits.softmax(dim=1)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return the class of each sample: the one with the largest logit, for ties the first.

        For multilabel these are all labels with a logit above 0, with commas between them.
        The text is empty if there is none.

        Scores of runs count these classes. Since probabilities include the base rate,
        another class may have a larger one.

        Raises:
            UsageError: as :attr:`logits`, unless the task is multilabel.
        """
        if self.task == MULTILABEL:
            return tuple(
                BETWEEN.join(compress(self.classes, row))
                for row in (self.outputs > 0).tolist()
            )
        return tuple(
            self.classes[k] for k in self.logits.double().numpy().argmax(axis=1)
        )

    def summary(self) -> Summary:
        """Return the number of samples, and a line for each of the first samples.

        At most :data:`SHOWN` samples have a line. It has probabilities if there are at
        most that many classes.
        """
        lead = f"Predictions for {plural(len(self.samples), 'sample')}"
        if len(self.samples) > SHOWN:
            lead += f"; the first {SHOWN}"
        table = self.frame("probability" if len(self.classes) <= SHOWN else "none")
        return Summary.of_frame(lead, table.head(SHOWN))

    def frame(self, scores: str = "probability") -> pd.DataFrame:
        """Return a table with a line for each sample.

        Its columns are ``sample``, the ids, ``unlike training`` if there are notes, ``clipped`` if a number was,
        ``predicted`` (the class or the number), and ``SCORE CLASS`` for each class.

        Args:
            scores: one of :data:`SCORES`: ``probability``, ``logit`` or ``none``, which
                leaves the scores out. Predicted numbers have no scores.

        Raises:
            UsageError: ``scores`` is unknown.
        """
        check_known("kind of scores", scores, SCORES)
        names = {"sample": self.samples, **self.ids}
        if self.notes:
            names["unlike training"] = self.notes
        if self.clipped:
            names["clipped"] = self.clipped
        if not self.classes:
            return pd.DataFrame({**names, "predicted": self.outputs[:, 0].numpy()})
        table = pd.DataFrame({**names, "predicted": self.labels})
        if scores == "none":
            return table
        columns = [f"{scores} {name}" for name in self.classes]
        values = pd.DataFrame(getattr(self, SCORES[scores]).numpy(), columns=columns)
        return pd.concat([table, values], axis=1)


SCORES = {"probability": "probabilities", "logit": "logits", "none": ""}
