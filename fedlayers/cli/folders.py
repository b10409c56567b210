"""Commands on tables, stored runs, plans and models, and the command of lists.

They are check, verify, runs, clean, export, predict, plan and list.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlayers.cli.options import FLAGS, Command, check_file, stored_lists
from fl_core.config import KEYS, RunConfig
from fl_core.data.reading import Reading
from fl_core.display import with_flags
from fl_core.errors import (
    BusyError,
    CorruptError,
    UsageError,
    check_known,
    plural,
    warn,
)
from fl_core.kinds import Kind, kind_of, wrong_kind
from fl_core.rows import CLASSIFICATION

if TYPE_CHECKING:
    from fl_core.data.table.prepare import Findings
    from fl_core.records.store import Run


MOST_CLIENTS, MOST_CLASSES = 20, 10
"""The most clients, and the most classes, whose counts ``check`` prints."""


class Check(Command):
    """Check a table of yours, and print what each column is taken as.

    It lists all faults, each with one option or one line of pandas. It exits with 1 if there are faults. --write makes
    a script of these lines, which writes a tidy table.

    Examples:
        fedlayers check patients.csv --label-column died
        fedlayers check messy --label-column died --write tidy.py
    """

    data: str
    """Your table, a folder with tables, or one table for each client."""
    write: Path | None = None
    """Write a script that repairs the faults, such as tidy.py. It writes a table next to itself, such as tidy.csv."""
    json: bool = False
    """Print one object as JSON. All else goes to stderr."""
    keys: RunConfig

    argument = "data"
    without = KEYS.keys() - {field.name for field in dataclasses.fields(Reading)}

    def main(self, line: str) -> Any:
        from fl_core.data import near_copies
        from fl_core.data.registry import DATASETS, path_of
        from fl_core.data.table.prepare import find_faults
        from fl_core.data.table.read import UNPACK, is_table

        # the list of datasets imports what reads images
        if not Path(self.data).exists() and self.data in DATASETS:
            raise UsageError(
                f"DATA must be a table of yours; got the dataset {self.data!r}, which needs no check. "
                f"Write fedlayers choose {self.data}."
            )
        path = path_of(self.data)
        if kind_of(path) in (Kind.RUN, Kind.DECISION):
            raise wrong_kind(path, "table", "a table or a folder of tables")
        if not is_table(path):
            raise UsageError(
                f"DATA must be a table or a folder of tables; got {self.data!r}. "
                f"{UNPACK} Images and arrays need no check: use choose."
            )
        if self.write is not None:
            earlier_file = "an earlier script of check"
            check_file(self.write, earlier_file, "import pandas as pd", "--write")
        findings = find_faults(path, self.keys.data)
        if not findings.table.columns:
            raise findings.error
        for note in findings.notes:
            warn(note)
        if findings.source is not None and (
            copies := near_copies.copies_of(findings.source).note
        ):
            warn(copies)
        works = _command(findings.settings)
        if findings.faults:
            print(with_flags("\n".join(findings.lines), FLAGS))
            works = self._repair(findings, works)
            print(findings.table)
        else:
            _print_table(path, findings, works)
        source = findings.source
        return {
            "command": works,
            "faults": [with_flags(str(fault), FLAGS) for fault in findings.faults],
            "columns": findings.table.to_json(),
            "clients": {} if source is None else source.counts().to_dict("index"),
        }

    def _repair(self, findings: Findings, works: str) -> str:
        """Print what to do about faults, and write the script if it was asked for. Return the command that follows."""
        from fl_core.storage import write_atomically

        if not findings.repairs:
            print(f"Then try: {works}")
            return works
        script = self.write or Path("tidy.py")
        tidy = script.with_suffix(".csv")
        works = _command(findings.settings_of(tidy))
        if self.write is None:
            source = shlex.quote(self.data)
            command = f"fedlayers check {source} --write {script}"
            print(f"To write these lines into a script: {command}")
        else:
            write_atomically(script, findings.script(str(tidy)).encode())
            print(f"Wrote {script}. Read it, then run it: python {script}")
        print(f"Then try: {works}")
        return works


def _command(settings: str) -> str:
    """Return the command that decides with some settings."""
    flags = with_flags(settings, FLAGS).removeprefix("--dataset ")
    return f"fedlayers choose {flags}"


def _print_table(path: Path, findings: Findings, works: str) -> None:
    """Print a table without faults: its size, the command that reads it, its columns and its clients."""
    from fl_core.data.partitions import make
    from fl_core.display import aligned

    source = findings.source
    assert source is not None
    counts = source.counts()
    sizes = [plural(len(source), "row"), plural(len(source.table.columns), "column")]
    if source.owner is not None:
        make(source, "natural")
        sizes.append(plural(len(source.owner_names), "client"))
    if source.classes:
        label_kind = "labels"
        if source.task == CLASSIFICATION:
            label_kind = "classes"
        sizes.append(f"{len(source.classes)} {label_kind}")
    shown_counts = counts.iloc[:MOST_CLIENTS, :MOST_CLASSES]
    size_text = ", ".join(sizes)
    print(
        f"{path}: {size_text}",
        f"This works: {works}",
        source.table,
        "",
        *aligned([["client", *shown_counts], *shown_counts.itertuples()]),
        sep="\n",
    )
    if shown_counts.size < counts.size:
        print(f"... of {plural(len(counts), 'client')} and {counts.shape[1]:,} classes")
    if source.owner is None:
        print(
            "no column names the clients, so a run makes them up. Name it: --client-column NAME"
        )


class Verify(Command):
    """Check that the files of a run are unchanged.

    It compares SHA-256 digests. It does not check timing.jsonl, and rows after the last checkpoint.

    Examples:
        fedlayers run --algorithm playerfl --out runs/playerfl
        fedlayers verify runs/playerfl
    """

    dir: Path
    """Run directory."""

    argument = "dir"

    def main(self, line: str) -> None:
        from fl_core.records.store import Run

        print("\n".join(Run(self.dir).verify()))
        print(f"{self.dir}: all files are unchanged")


class OfFolder(Command):
    """The base of commands on all runs in a folder."""

    dir: Path
    """Run directory, or a folder with runs."""

    argument = "dir"


class Runs(OfFolder):
    """List the runs in a folder, with scores and sizes.

    Examples:
        fedlayers run --algorithm fedavg --out runs/fedavg
        fedlayers runs runs
    """

    def main(self, line: str) -> None:
        paths = _below(self.dir)

        import pandas as pd

        from fl_core.display import aligned

        table = pd.DataFrame([_describe(path, self.dir) for path in paths]).fillna("")
        print(*aligned([list(table), *table.to_numpy()]), sep="\n")


class Clean(OfFolder):
    """Remove old checkpoints of the runs in a folder.

    The last and the best checkpoint stay. All runs can still be resumed.

    Examples:
        fedlayers run --algorithm fedavg --out runs/fedavg
        fedlayers clean runs
    """

    def main(self, line: str) -> None:
        paths = _below(self.dir)

        from fl_core.records.writing import clean

        removed = 0
        for path in paths:
            try:
                removed += clean(path)
            except (CorruptError, BusyError, UsageError) as error:
                print(f"{path} stays as it is: {error}")
        print(f"{self.dir}: {removed / 1e6:.1f} MB removed")


def _below(path: Path) -> list[Path]:
    """Return the run directories in a folder, at any depth, and the folder itself if it is one.

    Every folder with a ``config.json`` counts.

    Raises:
        UsageError: there is none.
    """
    paths = sorted(file.parent for file in path.rglob("config.json"))
    if not paths:
        raise wrong_kind(path, "DIR", "a run, or a folder with runs")
    return paths


def _describe(path: Path, below: Path) -> dict[str, str]:
    """Return the texts of a run's line by column.

    They are its path in the folder ``below``, its size, algorithm, seed and rounds, and
    its test scores after the last evaluation. A damaged run has path, size and
    ``status``, and possibly some of the others.
    """
    from fl_core.records.store import Run

    size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
    line = {"run": str(path.relative_to(below)), "MB": f"{size / 1e6:.1f}"}
    try:
        run = Run(path)
        config, rounds = run.config, run.rounds
        line |= {
            "algorithm": config["algorithm"],
            "seed": str(config["seed"]),
            "rounds": f"{max(rounds, default=0)}/{config['rounds']}",
        }
        return line | _scores(run)
    except (CorruptError, UsageError) as error:
        return line | {"status": f"damaged: {error}"}


def _scores(run: Run) -> dict[str, str]:
    """Return each model's main score at the last evaluation as text, by column.

    It is the mean over clients on test samples, weighted by training samples. Clients
    whose samples cannot give the score are left out.
    """
    from fl_core.rows import client_mean, main_score, without_score

    rows = run.rows()[1]
    rows = rows[(rows["split"] == "test") & (rows["client"] != "")]
    ranking_score = main_score(set(rows["metric"]))
    rows = rows[
        (rows["round"] == rows["round"].max()) & (rows["metric"] == ranking_score)
    ]
    lacks_score = without_score(rows)
    means: dict[str, str] = {}
    for model, scores in rows.groupby("model"):
        mean = client_mean(scores, lacks_score)
        means[f"{ranking_score} {model}"] = f"{mean:.4f}"
    return means


class Export(Command):
    """Write a model of a run, or the models that a choice recommends.

    It writes the weights, and a JSON file next to them that describes how to use them. A client's personal model is
    its shared layers with its own local layers. A choice needs no data: without --client, --out is a folder that gets
    a model for each client.

    Next: fedlayers predict FILE

    Examples:
        fedlayers run --dataset heart --algorithm fedper --out runs/fedper
        fedlayers export runs/fedper --client va --out va.safetensors
        fedlayers choose --dataset heart --out out/heart
        fedlayers export out/heart --out out/heart_models
        fedlayers export out/heart --baseline linear_local --out simple
    """

    dir: Path
    """Run directory, or the folder of choose or study."""
    out: Path | None = None
    """File to write, such as va.safetensors, or a folder for all clients' models of a choice."""
    baseline: str = ""
    """Of a choice, the simple model in place of the recommended one: linear_local or linear_pooled."""
    fallback: bool = False
    """Of a choice, train alone the clients whose validation loss is lower alone."""
    client: str | None = None
    """Client whose model to write. Needed if clients' models differ."""
    model: str | None = None
    """personal, global (the server's), or local (the client's after its last training). Default: personal, or global
    if the run has no personal models."""
    round: str | None = None
    """Round: N, last or best. Default: last; best if the run had --patience."""
    allow_code: tuple[str, ...] = ()
    """Custom code that this run may import and call, as package.module:name. A model option that is no size or rate
    needs it too, such as pretrained=true."""

    argument = "dir"

    def main(self, line: str) -> None:
        kind = kind_of(self.dir)
        if kind not in (Kind.RUN, Kind.DECISION) and not (self.dir / "race").is_dir():
            raise wrong_kind(self.dir, "DIR", "a run, or the folder of a decision")
        if self.out is None:
            name = "model.safetensors"
            if kind is Kind.DECISION:
                name = f"{self.dir}_models"
            raise UsageError(
                f"--out must be a new file or folder; got none. Write fedlayers export {self.dir} --out {name}."
            )

        from fl_core.run.stored_models import export

        exported = export(
            self.dir,
            self.out,
            baseline=self.baseline,
            fallback=self.fallback,
            client=self.client,
            which=self.model,
            round=self.round,
            allow_code=self.allow_code,
        )
        if isinstance(exported, dict):
            print(f"{plural(len(exported), 'model')}: {self.out}")
            print(f"Next: fedlayers predict {self.out} --data TABLE")
        else:
            print(
                f"{exported.path}, {exported.path.stat().st_size:,} bytes; how to use it: {exported.path}.json"
            )


class Predict(Command):
    """Predict new samples with an exported model, or with one for each client.

    The result is a table: one line a sample, with a score for each class. The column sample counts from 0; for images
    it is the path. With a folder of models, the data are a table with the column of clients that training had, or a
    folder with a file for each client, named after it.

    Examples:
        fedlayers choose icu.csv --client-column ward --label-column died --out out/icu
        fedlayers export out/icu --out out/icu_models
        fedlayers predict out/icu_models --data icu.csv
        fedlayers predict out/icu_models/neuro.safetensors --data new_patients.csv
    """

    file: Path
    """File that fedlayers export wrote, or a folder of them."""
    data: Path | None = None
    """New samples, whose labels are not read: a .csv, .npz or .jsonl file, a folder of images, or a folder with these
    for each client."""
    id_columns: tuple[str, ...] | None = None
    """Columns to copy that identify the samples. Default: columns with such names, such as record_id."""
    scores: str = "probability"
    """Scores in the table: probability, logit or none."""
    out: Path = Path("predictions.csv")
    """Table to write."""
    allow_code: tuple[str, ...] = ()
    """Custom code that this run may import and call, as package.module:name. A model option that is no size or rate
    needs it too, such as pretrained=true."""

    argument = "file"

    def main(self, line: str) -> None:
        if self.data is None:
            if kind_of(self.file) not in (Kind.MODELS, Kind.FILE):
                raise wrong_kind(
                    self.file, "exported model", "what fedlayers export wrote"
                )
            raise UsageError(
                f"--data must be the new samples; got none. Write fedlayers predict {self.file} --data TABLE."
            )
        earlier_file = "an earlier table of predictions"
        check_file(self.out, earlier_file, r"sample,[^\n]*predicted")

        import pandas as pd

        from fl_core.display import csv_bytes
        from fl_core.run.exported_model import SCORES
        from fl_core.run.stored_models import predict
        from fl_core.storage import write_atomically

        check_known("kind of scores", self.scores, SCORES)
        predictions = predict(
            self.file, self.data, ids=self.id_columns, allow_code=self.allow_code
        )
        if isinstance(predictions, dict):
            if "client" in (self.id_columns or ()):
                raise UsageError(
                    "--id-columns must be without client, which names each row's model here; got it. Leave it out."
                )
            parts = [
                prediction.frame(self.scores) for prediction in predictions.values()
            ]
            table = pd.concat(parts, keys=predictions, names=["client"]).reset_index(
                "client"
            )
            table.insert(0, "sample", table.pop("sample"))
            if not self.data.is_dir():  # in the order of its rows
                order = table["sample"].astype(int).argsort(kind="stable")
                table = table.iloc[order.to_numpy()]
        else:
            table = predictions.frame(self.scores)
        write_atomically(self.out, csv_bytes(table))
        print(f"{len(table)} predictions: {self.out}")


class Plan(Command):
    """Print a plan in the form that another framework takes.

    Forms: names, flower, nvflare, fl4health, peft. docs/elsewhere.md shows each in use.

    Examples:
        fedlayers choose --dataset heart --out out/heart
        fedlayers plan export out/heart/plan.json --to nvflare
        fedlayers run --dataset heart --algorithm fedper --out runs/fedper
        fedlayers plan export runs/fedper --to names
    """

    words: tuple[str, ...]
    """export, and the plan's file or a run directory."""
    to: str = ""
    """Form: names, flower, nvflare, fl4health or peft."""

    argument = "words"

    def main(self, line: str) -> None:
        import json

        from fl_core.run.task import plan_at

        if len(self.words) != 2 or self.words[0] != "export":
            words_text = " ".join(self.words)
            raise UsageError(
                f"WORDS must be export and a plan; got {words_text!r}. "
                "Write fedlayers plan export PLAN --to FORM."
            )
        if not self.to:
            raise UsageError(
                f"--to must be names, flower, nvflare, fl4health or peft; got none. Write fedlayers plan export "
                f"{self.words[1]} --to names."
            )
        print(json.dumps(plan_at(self.words[1]).to(self.to), indent=1))


# --- lists of what there is by name -----------------------------------------------------------------------------

WIDTH = 110


class List(Command):
    """List algorithms, datasets, models, metrics or rules.

    Examples:
        fedlayers list algorithms
        fedlayers list datasets
    """

    what: str
    """What to list: algorithms, datasets, models, metrics or rules."""

    argument = "what"

    def main(self, line: str) -> None:
        print(listing_of(self.what))


def listing_of(what: str) -> str:
    """Return the text of ``fedlayers list WHAT``, from the file that ``make lists`` writes. Torch is not imported.

    Args:
        what: ``algorithms``, ``datasets``, ``models``, ``metrics`` or ``rules``.

    Raises:
        UsageError: there is no such list.
    """
    lists = stored_lists()
    texts = []
    for title, entries_by_name in lists[check_known("listing", what, lists)].items():
        entries = _entries(entries_by_name)
        texts.append(f"{title}\n{entries}".strip("\n"))
    return "\n\n".join(texts)


def _entries(about: Mapping[str, str]) -> str:
    """Format each name with its text, wrapped next to it."""
    import shutil
    import textwrap

    indent = max(map(len, about), default=0) + 4
    width = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
    return "\n".join(
        textwrap.fill(
            text,
            width,
            initial_indent=f"  {name}".ljust(indent),
            subsequent_indent=" " * indent,
        )
        for name, text in about.items()
    )
