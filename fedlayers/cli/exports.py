"""Commands on trained models outside of their run: export, predict."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from fedlayers.cli.arguments import check_place, option
from fedlayers.cli.base import Command, ModelCode, RunDirectory
from fl_core.errors import UsageError, check_known

WEIGHTS = Annotated[
    Positional[Path], option("File or folder that fedlayers export wrote.", "FILE")
]
FIRST, LATER = "sample", "predicted"
"""Columns of a table of predictions. Columns of ids are between them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(Command):
    """Write one model of a run to a file.

    It writes the weights, and a JSON file next to them that describes how to use them. A client's personal model is
    its shared layers with its own local layers.

    Next: fedlayers predict FILE

    Examples:
        fedlayers run --algorithm fedper --out runs/fedper
        fedlayers export runs/fedper --client va --out va.safetensors
        fedlayers export runs/fedper --client va --model local --out local.safetensors
    """

    dir: RunDirectory
    out: Annotated[Path, option("File to write, such as va.safetensors.", "FILE")]
    client: Annotated[
        str | None,
        option(
            "Client whose model to write. Needed if clients' models differ.", "NAME"
        ),
    ] = None
    model: Annotated[
        str | None,
        option(
            "personal, global (the server's), or local (the client's after its last training). Default: personal, or "
            "global if the run has no personal models.",
            "NAME",
        ),
    ] = None
    round: Annotated[
        str | None,
        option(
            "Round: N, last or best. Default: last; best if the run had --patience.",
            "ROUND",
        ),
    ] = None
    format: Annotated[
        str | None,
        option(
            "safetensors, or peft for the adapters of --adapt alone. Default: safetensors.",
            "NAME",
        ),
    ] = None
    allow_code: ModelCode = ()

    def main(self, line: str) -> None:
        from fl_core.stored_models import MODELS

        if self.model is not None:
            check_known("model", self.model, MODELS)

        from fl_core.exported_model import export

        asked = {
            "which": self.model,
            "client": self.client,
            "round": self.round,
            "format": self.format,
        }
        made = export(self.dir, self.out, allow_code=self.allow_code, **asked)
        print(
            f"{made.path}, {made.path.stat().st_size:,} bytes; how to use it: {made.path}.json"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict(Command):
    """Predict new samples with an exported model.

    The result is a table: one line a sample, with a score for each class. The column sample counts from 0; for images
    it is the path.

    Examples:
        fedlayers run --dataset hospitals.csv --algorithm fedper --out runs/fedper
        fedlayers export runs/fedper --client va --out va.safetensors
        fedlayers predict va.safetensors --data new_patients.csv
    """

    file: WEIGHTS
    data: Annotated[
        Path,
        option(
            "New samples without labels: a .csv, .npz or .jsonl file, or a folder of images.",
            "PATH",
        ),
    ]
    id_columns: Annotated[
        tuple[str, ...] | None,
        option(
            "Columns to copy that identify the samples. Default: columns with such names, such as record_id.",
            "NAME [NAME ...]",
        ),
    ] = None
    scores: Annotated[
        str, option("Scores in the table: probability, logit or none.", "NAME")
    ] = "probability"
    out: Annotated[Path, option("Table to write.", "FILE")] = Path("predictions.csv")
    allow_code: ModelCode = ()

    def main(self, line: str) -> None:
        _check_replaceable(self.out)

        from fl_core.exported_model import SCORES, predict
        from fl_core.names import csv_bytes
        from fl_core.storage.files import write_atomically

        check_known("kind of scores", self.scores, SCORES)
        made = predict(
            self.file, self.data, ids=self.id_columns, allow_code=self.allow_code
        )
        write_atomically(self.out, csv_bytes(made.frame(self.scores)))
        print(f"{len(made.samples)} predictions: {self.out}")


def _check_replaceable(path: Path) -> None:
    """Refuse an output file that cannot be written, or that is not an earlier table of predictions.

    Raises:
        UsageError: names the path.
    """
    check_place(path, "predictions.csv")
    names = path.read_bytes()[:10_000].splitlines()[:1] if path.exists() else []
    if path.exists() and not (
        names
        and names[0].startswith(f"{FIRST},".encode())
        and LATER.encode() in names[0]
    ):
        raise UsageError(
            f"--out must be a new file or an earlier table of predictions; got {path}. Choose another file."
        )
