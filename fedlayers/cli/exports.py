"""Commands on trained models outside of their run: export, predict."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from fedlayers.cli.arguments import check_place, option
from fedlayers.cli.base import Command, ModelCode, RunDirectory
from fl_core.choices import JOIN_EPOCHS
from fl_core.errors import UsageError, check_known

WEIGHTS = Annotated[Positional[Path], option("A file of weights, or the folder of a mixture, from export.", "FILE")]
FIRST, LATER = "sample", "predicted"
"""Columns of a table of predictions. Columns of ids are between them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(Command):
    """Write one model of a run to a file of weights, with a JSON file next to it; or a mixture to a folder.

    The personal model is the one with which a client predicts: shared layers under its own local layers. The JSON file
    describes how to use the weights.

    Next: fedlayers predict.

    Examples:
        fedlayers export runs/fedper --client va --out va.safetensors
        fedlayers export runs/fedavg --model global --round 10 --out heart.safetensors
        fedlayers export runs/fedavg --model global --out heart.pt2
        fedlayers export out/choose --client va --out va_mixture
    """

    dir: Annotated[Positional[Path], option("A run directory, or the folder of choose --mix.", "DIR")]
    model: Annotated[
        str | None,
        option(
            "personal (with which a client predicts), global (the server's), or local (after its training). Default: "
            "personal, or global if the run has no personal models."
        ),
    ] = None
    client: Annotated[str | None, option("The client; not needed if all have the same model.", "NAME")] = None
    round: Annotated[
        str | None, option("A round with a checkpoint, last, or best; default best after --patience, else last.")
    ] = None
    format: Annotated[
        str | None,
        option(
            "safetensors; for other programs onnx or torch_export; peft for a folder of adapters. Default: by the "
            "suffix of --out.",
            "NAME",
        ),
    ] = None
    out: Annotated[Path, option("The new file of weights; for a mixture a folder.", "FILE")]
    allow_code: ModelCode = ()

    def main(self, line: str) -> None:
        from fl_core.stored_models import MODELS

        if self.model is not None:
            check_known("model", self.model, MODELS)

        from fl_core.exported import ExportedMixture, export

        asked = {"which": self.model, "client": self.client, "round": self.round, "format": self.format}
        made = export(self.dir, self.out, allow_code=self.allow_code, **asked)
        n_bytes, beside = made.path.stat().st_size, f"{made.path}.json"
        if isinstance(made, ExportedMixture):
            n_bytes, beside = made.n_bytes, f"{made.path / 'mixture.json'} and {len(made.members)} models next to it"
        print(f"{made.path}, {n_bytes:,} bytes; how to use it: {beside}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Join(Command):
    """Give a new client a model of a finished run: the shared layers, and a few epochs on its own samples.

    Layers that are not shared start as in the run's initial model. The client's validation samples choose the number of
    epochs. Its test samples score it, next to training alone.

    Next: fedlayers predict FILE --data ...

    Examples:
        fedlayers join runs/fedper --data new_hospital.csv --out new_hospital.safetensors
    """

    dir: RunDirectory
    data: Annotated[Path, option("The new client's table, with labels and the columns of the run.", "FILE")]
    client: Annotated[str, option("Its name; of a table with several clients, its rows are used.", "NAME")] = "new"
    own_epochs: Annotated[
        tuple[int, ...], option("Numbers of epochs that the new client tries alone.", "N [N ...]")
    ] = JOIN_EPOCHS
    out: Annotated[Path, option("The new file of weights, for predict.", "FILE")]
    allow_code: ModelCode = ()

    def main(self, line: str) -> None:
        from fl_core.joining import join

        asked = {"client": self.client, "epochs": self.own_epochs, "out": self.out, "allow_code": self.allow_code}
        made = join(self.dir, self.data, **asked)  # type: ignore[arg-type]
        print(f"{newcomer(made)}\n{self.out}, {self.out.stat().st_size:,} bytes")


def newcomer(made: Any) -> str:
    """Return a new client's scores and the answer, for a terminal."""
    title = f"{made.main} of {made.client} on test samples, after epochs on its own training samples"
    meaning = (
        "joined: begins with the shared layers and trains all layers; joined_head: trains only the other layers\n"
        "alone: begins without the shared layers"
    )
    return f"{title}\n{meaning}\n{made.table.round(4).to_string(na_rep='')}\n\n{made.text()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict(Command):
    """Predict new samples with an exported model: one line each, with a score for each class.

    New samples are a .csv, .npz or .jsonl file or a folder of images, as for training but without labels. The column
    sample of the table counts from 0. For a folder of images it is the path in the folder.

    Examples:
        fedlayers predict va.safetensors --data new_patients.csv --out predictions.csv
    """

    file: WEIGHTS
    data: Annotated[Path, option("The new samples.", "FILE or DIR")]
    id_columns: Annotated[
        tuple[str, ...] | None,
        option(
            "Columns of a table that name its records and are copied; default those named so, such as record_id.",
            "NAME [NAME ...]",
        ),
    ] = None
    scores: Annotated[str, option("probability, logit or none.")] = "probability"
    out: Annotated[Path, option("The table of predictions.", "FILE")] = Path("predictions.csv")
    allow_code: ModelCode = ()

    def main(self, line: str) -> None:
        _check_replaceable(self.out)

        from fl_core.exported import predict
        from fl_core.names import csv_bytes
        from fl_core.predictions import SCORES
        from fl_core.storage.files import write_atomically

        check_known("kind of scores", self.scores, SCORES)
        made = predict(self.file, self.data, ids=self.id_columns, allow_code=self.allow_code)
        write_atomically(self.out, csv_bytes(made.frame(self.scores)))
        print(f"{len(made.samples)} predictions: {self.out}")


def _check_replaceable(path: Path) -> None:
    """Refuse an output file that cannot be written, or that is not an earlier table of predictions.

    Raises:
        UsageError: names the path.
    """
    check_place(path, "predictions.csv")
    names = path.read_bytes()[:10_000].splitlines()[:1] if path.exists() else []
    if path.exists() and not (names and names[0].startswith(f"{FIRST},".encode()) and LATER.encode() in names[0]):
        raise UsageError(
            f"--out must be a new file or an earlier table of predictions; got {path}. Choose another file."
        )
