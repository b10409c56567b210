"""Each reader of a file of others meets each kind of bomb: one line, or harmless, within 512 MB and 5 s."""

import ast
import contextlib
import json
import warnings
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.torch import save_file

from fl_core import formats, storage
from fl_core.data.reading import PLAIN
from fl_core.data.table.read import open_table
from fl_core.errors import LONGEST, CorruptError, UsageError
from tests.faults.drawn import drawn, sound
from tests.faults.hostile import BOMBS, READERS, SPECIAL, png, special
from tests.faults.limited import MEGABYTES, SECONDS, limited
from tests.faults.test_strangers import low_rank
from tests.made import lines

DIAGONAL = 7
"""One bomb in so many is met in each run of the tests. The others are slow."""
LIBRARIES = ("model/config.json", "model/tokenizer.json", "model/adapter_config.json")
"""Files whose readers import what takes seconds."""


def write_neighbours(folder, name):
    """Write the sound files next to one."""
    images = {"images/b/1.png": "images", "pixels/config.json": "pixels/images"}
    if name in images:
        folder = folder / images[name] / "a"
        folder.mkdir(parents=True)
        (folder / "0.png").write_bytes(png(8, 8, bytes(72)))
    elif name == "words.txt":
        texts = "\n".join(json.dumps(line) for line in lines())
        (folder / "texts.jsonl").write_text(texts)
        keys = {"name": "a", "path": "texts.jsonl", "vocabulary": name}
        text = "\n".join(f"{key} = {value!r}" for key, value in keys.items())
        (folder / "site.toml").write_text(text)
    elif name == "model/adapter_config.json":
        low_rank(3)(folder / "model/adapter_model.safetensors")
    elif name == "model/adapter_model.safetensors":
        (folder / "model/adapter_config.json").write_text('{"r": 1}')
    elif name == "model/config.json":
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.BertConfig(**sizes, **layers)
        state = transformers.BertForSequenceClassification(config).state_dict()
        save_file(state, folder / "model/model.safetensors")


def check(read, path):
    """Return what a reader says: one line that names the file, or the list of a table's faults, or nothing."""

    def act():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(path)

    message, megabytes, seconds = limited(act, UsageError, CorruptError)
    assert "\n" not in message or "must be a tidy table" in message.splitlines()[0], (
        message
    )
    assert not message.startswith(("raw", "ended")), message[:300]
    assert len(message) <= LONGEST, message[:300]
    assert megabytes < MEGABYTES, message[:300]
    assert seconds < SECONDS, message[:300]
    return message


def meet(name, kinds, folder):
    """Let a reader meet bombs, and return what is wrong."""
    reader = READERS[name]
    if name.startswith(("data", "images")):
        READERS["data.csv"].read("heart")
    if name == "model/adapter_config.json":
        pytest.importorskip("peft")
    with contextlib.suppress(UsageError, CorruptError, OSError):
        reader.read(folder / name)  # what it imports is no cost of a bomb
    faults = []
    for kind in kinds:
        path = folder / kind.replace(" ", "_") / name
        path.parent.mkdir(parents=True)
        write_neighbours(folder / kind.replace(" ", "_"), name)
        if kind in SPECIAL:
            special(path, kind)
        else:
            path.write_bytes(BOMBS[reader.form][kind]())
        try:
            message = check(reader.read, path)
            if kind in SPECIAL:
                assert message != "no error"
        except AssertionError as error:
            faults.append(f"{kind}: {str(error)[:300]}")
    return faults


def kinds_of(name):
    return (*BOMBS[READERS[name].form], *SPECIAL)


@pytest.mark.parametrize("name", [name for name in READERS if name not in LIBRARIES])
def test_each_reader_meets_some_bombs(name, tmp_path):
    first = list(READERS).index(name) % DIAGONAL
    assert not meet(name, kinds_of(name)[first::DIAGONAL], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_each_reader_meets_each_bomb(name, tmp_path):
    faults = meet(name, kinds_of(name), tmp_path)
    assert not faults, "\n".join(faults)


CHANGING = ("plan.json", "rows.jsonl", "run.toml", "data.csv", "data.npz", "data.jsonl")
CHANGING += ("weights.safetensors", "weights.pt", "arrays.npz")


@pytest.mark.parametrize("name", CHANGING)
def test_a_file_that_changes_after_its_check(name, tmp_path, monkeypatch):
    """It is none any more, or a pipe, which is not waited for."""
    check_regular, path = storage.check_regular, tmp_path / name
    for kind in ("none", "a pipe"):
        path.unlink(missing_ok=True)
        path.write_bytes(b"a")

        def change(checked, most=None, kind=kind):
            size = check_regular(checked, most)
            path.unlink()
            if kind != "none":
                special(path, kind)
            return size

        monkeypatch.setattr(storage, "check_regular", change)
        message = "(?i)no such file|does not exist|a pipe or a device|no file"
        with pytest.raises((UsageError, CorruptError), match=message) as caught:
            READERS[name].read(path)
        assert "\n" not in str(caught.value)


SEEDS, STEP = (*range(300), *range(1000, 1100)), 19
"""Hostile files that are drawn, and each of so many is no slow test, so that each reader meets one."""


def draw_files(seeds, folder, left_out=()):
    """Let readers meet drawn files, and return what is wrong."""
    contents = sound(folder)
    names, faults = list(contents), []
    READERS["data.csv"].read("heart")
    for seed in seeds:
        name = names[seed % len(names)]
        if name in left_out:
            continue
        path = folder / str(seed) / name
        path.parent.mkdir(parents=True)
        write_neighbours(folder / str(seed), name)
        path.write_bytes(drawn(contents[name], READERS[name].form, seed))
        try:
            check(READERS[name].read, path)
        except AssertionError as error:
            faults.append(f"{seed} {name}: {str(error)[:300]}")
        path.unlink()
    return faults


def test_some_drawn_files_end_in_one_line(tmp_path):
    assert not draw_files(SEEDS[::STEP], tmp_path, LIBRARIES)


@pytest.mark.slow
def test_drawn_files_end_in_one_line(tmp_path):
    pytest.importorskip("peft")  # which is no cost of a file
    faults = draw_files(SEEDS, tmp_path)
    assert not faults, "\n".join(faults)


DOORS = {
    *("read_text", "read_bytes", "read_toml", "opened", "open_zip", "open_parquet"),
    *("tensor_sizes", "read_csv", "np.load", "Image.open", "pd.read_table", "pickle.load"),
}  # fmt: skip
"""What opens a file."""
OWN = {
    "fl_core.storage", "fl_core.formats", "fl_core.registry.attach", "diagnostics.metrics._stored",
    "diagnostics.plots.page.Page.html", "diagnostics.regret.read_truth", "diagnostics.regret.read_benchmark",
    "fedlayers.cli.options.stored_lists",
    "fedlayers.cli.options.check_file", "fedlayers.flower.site.supernode", "fl_core.data.named",
    "fl_core.data.loading.load", "fedlayers.flower.site.Site._read", "fl_core.rounds.workers.receive",
}  # fmt: skip
"""The doors themselves, files of the package or of the system, and calls of a reader below."""
ROWS = {
    "diagnostics.load_weights": "model/adapter_config.json",
    "fedlayers.cli.options.read_config": "run.toml",
    "fedlayers.decision.search.Tuned.load": "tuned.json",
    "fedlayers.flower.federation.read_keys": "site.toml",
    "fedlayers.flower.site.Site._common": "words.txt",
    "fl_core.config.with_pixels": "pixels/config.json",
    "fl_core.data.files.read_arrays": "data.npz",
    "fl_core.data.files.headers": "data.npz",
    "fl_core.data.files._decoded": "images/b/1.png",
    "fl_core.data.files._header": "images/b/1.png",
    "fl_core.data.table.read.Csv": "data.csv",
    "fl_core.data.table.read._open_file": "data.csv",
    "fl_core.data.table.read._json_lines": "data.jsonl",
    "fl_core.data.table.read._parquet": "data.parquet",
    "fl_core.models.folders.from_transformers": "model/config.json",
    "fl_core.models.tokens.Tokenizer": "model/tokenizer.json",
    "fl_core.models.weights": "weights.pt",
    "fl_core.plan.LayerPlan.load": "plan.json",
    "fl_core.rows.read": "rows.jsonl",
    "fl_core.rows.read_header": "rows.jsonl",
    "fl_core.run.stored_models._stored": "choice.json",
}
"""The row of :data:`READERS` for each function that opens a file of others."""


def opening():
    """Yield the name of each function of the packages that calls a door."""
    for package in ("fl_core", "diagnostics", "fedlayers"):
        for path in sorted(Path(package).rglob("*.py")):
            module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            todo = [(module, ast.parse(path.read_text(encoding="utf-8")))]
            while todo:
                name, node = todo.pop()
                for child in ast.iter_child_nodes(node):
                    inner = isinstance(child, ast.FunctionDef | ast.ClassDef)
                    todo.append((f"{name}.{child.name}" if inner else name, child))
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    if {called, called.rpartition(".")[2]} & DOORS:
                        yield name
                    links = any(key.arg == "links" for key in node.keywords)
                    if called.endswith("Folder") and links:
                        yield name


def test_a_reader_without_a_row_is_found():
    readers = set(opening())
    rows_and_own = (*OWN, *ROWS)
    new = [
        n for n in readers if not any(f"{n}.".startswith(f"{k}.") for k in rows_and_own)
    ]
    assert not new
    assert {*ROWS.values()} <= READERS.keys()
    assert {reader.form for reader in READERS.values()} == BOMBS.keys()
    gone = [
        k for k in rows_and_own if not any(f"{n}.".startswith(f"{k}.") for n in readers)
    ]
    assert not gone


def test_honest_tables_of_300_mb_pass_the_bound(tmp_path, monkeypatch):
    """The bound is that of the file's own bytes, and the environment allows more."""
    path = tmp_path / "data.parquet"
    path.write_bytes(b"a")
    monkeypatch.setattr(storage, "check_regular", lambda path: 300_000_000)
    monkeypatch.setattr(storage, "memory", lambda: 64 << 30)
    formats.check_table(path, 7_500_000, 10)  # of 4 bytes each
    formats.check_table(path, 75_000, 1000)
    monkeypatch.setattr(storage, "check_regular", lambda path: 1076)
    with pytest.raises(UsageError) as caught:
        formats.check_table(path, 7_500_000, 10)
    remedy = str(caught.value).rpartition(": ")[2].rstrip(".").split("=")
    monkeypatch.setenv(*remedy)
    formats.check_table(path, 7_500_000, 10)
    monkeypatch.setenv("FEDLAYERS_UNPACKED", "much")
    with pytest.raises(UsageError, match="must be a number of bytes"):
        formats.check_table(path, 7_500_000, 10)


@pytest.mark.slow
def test_an_honest_table_of_300_mb_is_read(tmp_path):
    """Its cells take about as many bytes in memory as in the file."""
    path, draw = tmp_path / "data.parquet", np.random.default_rng(0)
    columns = {f"x{k}": draw.random(4_000_000) for k in range(9)}
    columns["label"] = draw.integers(0, 2, 4_000_000)
    parquet.write_table(pyarrow.table(columns), path)
    del columns
    assert path.stat().st_size > 280e6
    assert open_table(path, PLAIN).frame.shape == (4_000_000, 10)
