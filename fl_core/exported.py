"""Trained models outside their run: weights in one file, and their description in a JSON file next to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save
from torch import Tensor, nn

import fl_core
from fl_core import models, restore, tree
from fl_core.algorithms.base import Algorithm, find
from fl_core.algorithms.options import configurations
from fl_core.data.columns import BETWEEN
from fl_core.data.inputs import Inputs
from fl_core.errors import NonFiniteError, UsageError, check_known, listing
from fl_core.models import lora, programs
from fl_core.models.options import check_stored, without_weights
from fl_core.records import store
from fl_core.restore import allowed_code
from fl_core.scores import CLASSIFICATION, MULTILABEL, REGRESSION
from fl_core.storage import blobs
from fl_core.storage.files import Folder, check_version, sha, signed
from fl_core.stored_models import load_kind
from fl_core.task import Task, drop_statistics
from fl_core.training import evaluate

FORMAT = "fedlayers.model/1"
OTHERS: dict[str, Callable[[nn.Module, Tensor], bytes]] = {"onnx": programs.onnx, "torch_export": programs.torch_export}
"""Writers of other programs' formats by name: from a model and an example input to the bytes of a file."""
PEFT = "peft"
FORMATS = ("safetensors", *OTHERS, PEFT)
SUFFIXES = {".safetensors": "safetensors", ".onnx": "onnx", ".pt2": "torch_export"}
"""Formats by the suffix of a file of weights."""


@dataclass(frozen=True)
class Exported:
    """A trained model written by :func:`export`, with the description from its JSON file.

    Attributes:
        path: the file of weights. The JSON file has the same name followed by ``.json``.
        about: the contents of the JSON file: ``model`` (callable, options, seed, and the algorithm that extended it),
            ``inputs`` (how raw samples are prepared), ``classes``, ``layers``, ``plan``, ``run`` (id, round, client,
            digests), and ``file``.
    """

    path: Path
    about: Mapping[str, Any]

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
        """Return the task from :data:`fl_core.scores.TASKS`."""
        return str(self.about.get("task") or (CLASSIFICATION if self.classes else REGRESSION))

    def model(self, *, model: Any = None, allow_code: str | Collection[str] = ()) -> nn.Module:
        """Return the model with its trained weights, in evaluation mode.

        Args:
            model: your own, if the run was given one from Python. It is copied.
            allow_code: ``package.module:name`` of the code that the file names, to allow it, as in resume.

        Raises:
            UsageError: code or a model is missing, or the weights do not fit.
            CorruptError: the file of weights is missing or damaged.
        """
        file = self.about["file"]
        if file["format"] != "safetensors":
            raise UsageError(
                f"{self.path} must be an export as safetensors; got {file['format']}, which other programs run. "
                "Export it without --format."
            )
        built = _built(self.path, self.about, model, allow_code)
        weights = Folder(self.path.parent).read_as(blobs.tensors, self.path.name, file["sha256"])
        tree.load(built, weights)
        return built.eval()


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's predictions for new samples.

    Attributes:
        samples: numbers from 0 in a table, array or list; paths within a folder of images.
        classes: names of the C classes. Empty means that the model predicts a number.
        outputs: the model's, float32 [n, C]. They are [n, 1] for a predicted number, or for one logit of the second of
            two classes.
        ids: columns of a table that name its records, by column.
        task: of :data:`fl_core.scores.TASKS`. For survival the output is the log relative hazard: higher is earlier.
            For multilabel the classes are labels, each with a logit of its own.
    """

    samples: tuple[str, ...]
    classes: tuple[str, ...]
    outputs: Tensor
    ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    task: str = ""

    @cached_property
    def logits(self) -> Tensor:
        """Return a logit for each class, float32 [n, C].

        These are the outputs. For a single output of two classes they are 0 and the output.

        Raises:
            UsageError: the model predicts a number.
        """
        if not self.classes:
            raise UsageError("the model must predict classes; got a number. Use the outputs.")
        if self.task == MULTILABEL:
            return self.outputs
        single = self.outputs.shape[1] == 1 and len(self.classes) == 2
        return torch.cat([torch.zeros_like(self.outputs), self.outputs], dim=1) if single else self.outputs

    @cached_property
    def probabilities(self) -> Tensor:
        """Return the softmax of the logits, float64 [n, C]. Each row sums to 1. Labels have the sigmoid of theirs."""
        logits = self.logits.double()
        return logits.sigmoid() if self.task == MULTILABEL else logits.softmax(dim=1)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return the class with the largest logit, for ties the first. Of labels, those above 0 with commas between."""
        if self.task == MULTILABEL:
            return tuple(BETWEEN.join(compress(self.classes, row)) for row in (self.outputs > 0).tolist())
        return tuple(self.classes[k] for k in self.logits.double().numpy().argmax(axis=1))

    def frame(self, scores: str = "probability") -> pd.DataFrame:
        """Return a table with a line for each sample.

        Its columns are ``sample``, the ids, ``predicted``, and ``SCORE CLASS`` for each class.

        Args:
            scores: of :data:`SCORES`: ``probability``, ``logit`` or ``none``. Predicted numbers have none.

        Raises:
            UsageError: ``scores`` is unknown.
        """
        check_known("kind of scores", scores, SCORES)
        names = {"sample": self.samples, **self.ids}
        if not self.classes:
            return pd.DataFrame({**names, "predicted": self.outputs[:, 0].numpy()})
        values = SCORES[scores](self)
        lines = pd.DataFrame({**names, "predicted": self.labels})
        if values is None:
            return lines
        columns = [f"{scores} {name}" for name in self.classes]
        return pd.concat([lines, pd.DataFrame(np.asarray(values), columns=columns)], axis=1)


SCORES: dict[str, Callable[[Predictions], Tensor | None]] = {
    "probability": lambda made: made.probabilities,
    "logit": lambda made: made.logits,
    "none": lambda made: None,
}


def export(
    path: Path | str,
    out: Path | str,
    *,
    which: str | None = None,
    client: str | None = None,
    round: int | str | None = None,
    format: str | None = None,
    data: Any = None,
    model: Any = None,
    allow_code: str | Collection[str] = (),
) -> Exported:
    """Write one model of a run for use elsewhere: its weights to ``out``, and their description to ``out``.json.

    Neither file contains code or a pickle. The JSON file names the model's callable with its options, classes, layers
    and plan. It describes the shape of a sample and how raw samples are prepared, with the fitted numbers. It also
    identifies the run by its digests. :func:`predict` reads both files.

    >>> import fedlayers as fl
    >>> result = fl.run(dataset="heart", algorithm="fedper", rounds=1, out="runs/fedper", progress=False)
    >>> made = fl.export("runs/fedper", "va.safetensors", client="va")
    >>> made.about["model"]["callable"], made.classes
    ('heart_mlp', ('0', '1', '2', '3', '4'))

    Args:
        path: the run's directory.
        out: the file of weights, which must not exist.
        which: ``personal``, ``global`` or ``local`` (see :func:`fl_core.stored_models.load_models`). None means
            ``personal`` if the run has such models, and ``global`` otherwise.
        client: the model's client. None if all clients have the same model.
        round: one with a checkpoint, ``last``, or ``best``: the stopping rule's. None = ``best`` if the run has a
            stopping rule, else ``last``.
        format: ``safetensors``; or for other programs ``onnx``, which needs the packages onnx and onnxscript, or
            ``torch_export``, PyTorch's .pt2. These take any number of samples, prepared as the JSON file describes.
            With adapters, all of these add the adapters to the base. ``peft`` writes them alone into a new folder
            ``out``, which ``peft.PeftModel.from_pretrained`` loads into the model as it began.
            None follows the suffix of ``out`` in :data:`SUFFIXES`, and is ``safetensors`` for any other.
        data, model, allow_code: as of :func:`fl_core.runner.resume`.

    Raises:
        UsageError: the run, round, model or client does not exist; the file exists or has another format's suffix; or
            the format cannot store the model.
        CorruptError: stored files are damaged.
    """
    out = Path(out)
    format = format_of(out, format)
    check_free(out)
    found = store.Run(path)
    if round in (None, "best"):
        round = "last" if round is None and found.stopping() is None else found.best_round(which)
    which, trained, task = load_kind(path, round, which, data=data, model=model, allow_code=allow_code)
    chosen = trained[_client(trained, which, client)]
    if format == PEFT and task.config.adapt is None:
        raise UsageError(f"format peft must have a run with --adapt; got {path}, one without. Leave --format out.")
    about = described(found, task, chosen, which, client, round)
    return write(out, format, about, chosen, task, model=model, allow_code=allow_code)


def write(
    out: Path,
    format: str,
    about: dict[str, Any],
    trained: nn.Module,
    task: Task,
    *,
    model: Any = None,
    allow_code: str | Collection[str] = (),
) -> Exported:
    """Write a model's weights and its description, after a check that the description gives the same model."""
    rebuilt = _built(out, about, model, allow_code)
    adapted, trained = trained, lora.merged(trained)
    tree.load(rebuilt, tree.state_dict(trained))
    example = models.example(task.data.shape)
    with tree.one_thread():
        if not torch.equal(evaluate.predict(rebuilt, example), evaluate.predict(trained, example)):
            raise UsageError(
                f"{about['model']['callable']} must give the same model when it is called again; got another."
            )
    if format == PEFT:
        content, settings = lora.peft_files(adapted, lora.parse(str(task.config.adapt)))
        out.mkdir()
        out = out / lora.PEFT_WEIGHTS
        Folder(out.parent).write(lora.PEFT_CONFIG, settings)
    elif format == "safetensors":
        content = save(tree.state_dict(rebuilt))
    else:
        content = OTHERS[format](rebuilt.eval(), example)
    about["file"] = {"format": format, "bytes": len(content), "sha256": sha(content)}
    folder = Folder(out.parent)
    folder.write(out.name, content)
    folder.write(f"{out.name}.json", signed({"format": FORMAT, **about}))
    return Exported(out, about)


def read(path: Path | str) -> Exported:
    """Read an export of :func:`export` from the JSON file next to the weights.

    Raises:
        UsageError: the file does not exist, or a newer version of this package wrote it.
        CorruptError: it was edited or damaged.
    """
    path = Path(path).resolve()  # links may lead to its folder, but not within it
    folder, name = Folder(path.parent), f"{path.name}.json"
    if not path.parent.is_dir() or not folder.has(name):
        raise UsageError(f"{path} must be an exported model with {name} next to it; got none. Copy both files.")
    about = folder.read_signed(name)
    known = check_version(path.parent / name, about.pop("format", None), FORMAT)
    if not known or not about.keys() >= {"model", "inputs", "classes", "file"}:
        raise UsageError(
            f"{path.parent / name} must describe an exported model; got other data. Export the model again."
        )
    return Exported(path, about)


def predict(
    path: Path | str,
    new: Any,
    *,
    ids: Sequence[str] | None = None,
    model: Any = None,
    allow_code: str | Collection[str] = (),
) -> Predictions:
    """Predict new samples with an exported model. They are prepared exactly as the training samples were.

    >>> import fedlayers as fl, numpy as np
    >>> result = fl.run(dataset="heart", rounds=1, out="runs/heart", progress=False)
    >>> _ = fl.export("runs/heart", "heart.safetensors", which="global")
    >>> fl.predict("heart.safetensors", np.zeros((2, 10))).logits.shape
    torch.Size([2, 5])

    Args:
        path: the file of weights from :func:`export`.
        new: a .csv table, an .npz file with an array ``x``, a folder of images, or texts in a .csv or .jsonl file, as
            for :func:`fl_core.data.files.read` but without labels; or an array [n, ...], or a list of texts.
        ids: columns of a table that name its records. The predictions get them. By default these are columns with
            such a name, like ``record_id``, that are not features.
        model, allow_code: as of :meth:`Exported.model`.

    Raises:
        UsageError: there is no exported model, its code is not allowed, or the samples differ in kind from training.
        CorruptError: a file of the model is damaged.
        NonFiniteError: the model's output is NaN or infinite.
    """
    exported = read(path)
    built = exported.model(model=model, allow_code=allow_code)
    samples = exported.inputs.samples(new, ids)
    with tree.one_thread():
        outputs = evaluate.predict(built, samples.x)
    bad = torch.flatten((~torch.isfinite(outputs).all(dim=1)).nonzero()).tolist()
    if bad:
        first = samples.names[bad[0]]
        raise NonFiniteError(
            f"outputs must be finite; got NaN or infinity for {len(bad)} of {len(outputs)} samples, first for {first}."
        )
    return Predictions(samples.names, exported.classes, outputs, samples.ids, exported.task)


# --- the contents of the JSON file -----------------------------------------------------------------------------


def described(
    found: store.Run, task: Task, trained: nn.Module, which: str, client: str | None, round: int | str
) -> dict[str, Any]:
    """Return the description of a run's model, as in its JSON file."""
    config, data = task.config, task.data
    checkpoint = found.checkpoint(round, lazy=True)
    below = find(config.algorithm).base_algorithm(config.options)
    extends = below.wrap_model.__func__ is not Algorithm.wrap_model.__func__  # type: ignore[attr-defined]
    plan = checkpoint.server.meta.get("plan") or found.config.get("in_force")
    return {
        "model": {
            "outputs": evaluate.predict(trained, models.example(data.shape)).shape[1],
            "callable": "" if "model" in found.config["own"] else config.model,
            "class": f"{type(trained).__module__}.{type(trained).__qualname__}",
            "options": without_weights(str(config.model), config.model_options),
            "seed": config.seed,
            "bn": config.batchnorm,
            "extended_by": {"algorithm": config.algorithm, "options": dict(config.options)} if extends else None,
        },
        "inputs": Inputs.of(data, config.reading).to_json(),
        "classes": list(data.classes),
        "task": data.task,
        "layers": [asdict(layer) for layer in task.layers],
        "plan": plan,
        "weights": tree.digest(tree.state_dict(lora.merged(trained))),
        "run": {
            "id": found.id,
            "name": found.path.resolve().name,
            "algorithm": config.algorithm,
            "model": which,
            "client": client,
            "round": checkpoint.round,
            "dataset": config.dataset,
            "data": data.digest,
            "source": data.source_digest,
        },
        "version": fl_core.__version__,
    }


def _built(
    path: Path, about: Mapping[str, Any], model: nn.Module | None, allow_code: str | Collection[str]
) -> nn.Module:
    """Return the model that the JSON file names, with fresh weights."""
    allowed = allowed_code(allow_code)
    said, inputs = about["model"], Inputs.from_json(about["inputs"])
    extended = said["extended_by"] or {"algorithm": Algorithm.name, "options": {}}
    named = {**extended, "model": said["callable"]}
    restore.check_code(
        path, {key: name for key, name in restore.code_of(named).items() if model is None or key != "model"}, allowed
    )
    shape, n_classes, seed = inputs.model_shape, said["outputs"], said["seed"]
    if model is not None:
        made = models.copied(model, shape, n_classes, seed=seed, options=said["options"])
    elif not said["callable"]:
        raise UsageError(
            f"{path} must be loaded with its own model, {said['class']}; got none. Pass it again, model=..."
        )
    else:
        check_stored(str(path), said["callable"], said["options"], allowed)
        made = models.build(said["callable"], shape, n_classes, seed=seed, options=said["options"])
    if said["bn"] == "drop":
        drop_statistics(made)
    if said["extended_by"] is not None:
        algorithm = find(extended["algorithm"])
        below, options = (
            algorithm.base_algorithm(extended["options"]),
            configurations(algorithm, extended["options"])[-1],
        )
        made = below.wrap_model(made, options, shape=shape, n_classes=n_classes, seed=seed)
        if said["bn"] == "drop":
            drop_statistics(made)
    return made


# --- checks ----------------------------------------------------------------------------------------------------


def format_of(out: Path, asked: str | None) -> str:
    """Return the requested format, or otherwise that of the file's name."""
    named = SUFFIXES.get(out.suffix.lower())
    if asked is None:
        return named or FORMATS[0]
    check_known("format of a model", asked, FORMATS)
    if asked == PEFT and named is not None:
        raise UsageError(f"format peft must have a new folder; got {out}, the name of a file. Name it {out.stem}.")
    if named not in (None, asked):
        suffix = next(suffix for suffix, name in SUFFIXES.items() if name == asked)
        raise UsageError(
            f"name of a file of format {asked} must end in {suffix}; got {out}, which is {named}. "
            f"Name it {out.with_suffix(suffix).name}, or leave the format out."
        )
    return asked


def check_free(out: Path) -> None:
    """Refuse a file of weights that cannot be written or is there already.

    Raises:
        UsageError: names the path.
    """
    if not out.parent.is_dir():
        raise UsageError(f"folder {out.parent} must be there to export to; got none. Make it first.")
    for path in (out, out.with_name(f"{out.name}.json")):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} must be a new file; got one that is there. Choose another name, or remove it.")


def _client(trained: Mapping[str, nn.Module], which: str, client: str | None) -> str:
    if client is not None:
        return check_known(f"client with a {which} model", client, trained)
    if len({tree.digest(tree.state_dict(model)) for model in trained.values()}) > 1:
        raise UsageError(
            f"client must be one of {listing(trained)}, which have {which} models of their own; got none. "
            "Pass --client NAME."
        )
    return next(iter(trained))
