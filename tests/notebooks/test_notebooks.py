"""Every notebook runs from a clean kernel and shows pictures; what is stored is whole, small, and of no machine."""

import inspect
import re
from typing import TYPE_CHECKING

import pytest

import fedlayers as fl
from fedlayers.cli.app import COMMANDS
from fl_core.config import KEYS
from fl_core.errors import RunError
from notebooks import __main__ as command, execute
from tests.conftest import on_first_use

if TYPE_CHECKING:
    import nbformat
else:
    nbformat = on_first_use("nbformat")


def stored(name):
    return nbformat.read(execute.HERE / f"{name}.ipynb", as_version=4)


def outputs(notebook):
    return [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]


def pictures(notebook):
    return [
        output.data["image/png"]
        for output in outputs(notebook)
        if "image/png" in output.get("data", {})
    ]


def words(notebook):
    """The words of the outputs in order, such as names of layers, metrics and candidates.

    What differs between processors is left out: numbers, digests, and fine-tuning that an answer adds.
    """
    texts = [
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for output in outputs(notebook)
    ]
    text = re.sub(
        r"\b[0-9a-f]{12}\b|, then let each client fine-tune[^.]*", "", "\n".join(texts)
    )
    return sorted(set(re.findall(r"[a-z_]{4,}", text)))


@pytest.mark.slow
@pytest.mark.parametrize("name", execute.names())
def test_runs_twice_in_one_folder_without_any_data(name, tmp_path):
    """As after "Restart and run all". The stored outputs are current, and nothing is left in the folder."""
    for _ in range(2):
        notebook = execute.executed(name, tmp_path)
        assert not [
            output for output in outputs(notebook) if output.output_type == "error"
        ]
        assert execute.errors_in(notebook) == []
        assert execute.paths_in(notebook) == []
        assert not any(tmp_path.iterdir())
        assert len(pictures(notebook)) == len(pictures(stored(name))) >= 1
        assert words(notebook) == words(stored(name)), "outputs are old: make notebooks"


@pytest.mark.parametrize("name", execute.names())
def test_takes_own_data_in_one_cell_and_imports_public_names(name):
    code = [cell.source for cell in stored(name).cells if cell.cell_type == "code"]
    assert sum("# Your own data: edit this cell" in source for source in code) == 1
    imported = re.findall(r"^(?:import|from) (\w+)", "\n".join(code), re.MULTILINE)
    assert {"fl_core", "diagnostics", "notebooks"}.isdisjoint(imported)
    twin = (execute.HERE / f"{name}.md").read_text(encoding="utf-8")
    assert twin == execute.twin(stored(name))


@pytest.mark.parametrize("name", execute.names())
def test_what_is_stored_is_executed_in_order_and_tidy(name):
    path = execute.HERE / f"{name}.ipynb"
    notebook = stored(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert execute.errors_in(notebook) == []
    assert execute.paths_in(notebook) == []
    assert path.stat().st_size <= execute.BYTES
    assert notebook == execute.tidied(stored(name))


@pytest.mark.parametrize("name", execute.names())
def test_opens_with_what_one_will_learn_and_ends_with_what_to_try(name):
    cells = stored(name).cells
    assert cells[0].cell_type == cells[-1].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert "You will\n\n1. " in cells[0].source
    (last,) = (
        k for k, cell in enumerate(cells) if "## What to try next" in cell.source
    )
    assert all(
        cell.cell_type == "code" or cell.source.startswith("- ")
        for cell in cells[last + 1 :]
    )


@pytest.mark.parametrize("name", execute.names())
def test_a_plan_is_selected_from_a_measurement_or_the_notebook_says_why_not(name):
    kinds = {"code": "", "markdown": ""}
    for cell in stored(name).cells:
        kinds[cell.cell_type] += cell.source
    selects = "fl.select(" in kinds["code"]
    assert selects != ("No plan is selected from a measurement" in kinds["markdown"])


@pytest.mark.parametrize("name", execute.names())
def test_what_to_try_next_names_what_there_is(name):
    """Every call with keywords that a closing list proposes, and every command."""
    (text,) = (
        cell.source
        for cell in stored(name).cells
        if "## What to try next" in cell.source
    )
    for call in re.findall(r"`(?:fl\.)?(\w+)\((.*?)\)`", text.replace("...", "")):
        parameters = inspect.signature(getattr(fl, call[0])).parameters
        assert set(re.findall(r"(?<![\"\w])(\w+)=", call[1])) <= {*parameters, *KEYS}
    for proposed in re.findall(r"`fedlayers (\w+)", text):
        assert proposed in COMMANDS


def test_the_site_names_every_notebook():
    index = (execute.HERE.parent / "docs/index.md").read_text(encoding="utf-8")
    assert len(execute.names()) == 11
    for name in execute.names():
        assert f"notebooks/{name}.ipynb" in index


def small(*sources):
    cells = [
        nbformat.v4.new_markdown_cell("# Small"),
        *map(nbformat.v4.new_code_cell, sources),
    ]
    return nbformat.v4.new_notebook(cells=cells, metadata={"widgets": {"a": 1}})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder in place of the notebooks'."""
    home = tmp_path / "notebooks"
    home.mkdir()
    monkeypatch.setattr(execute, "HERE", home)
    return home


def put(folder, *sources):
    nbformat.write(small(*sources), folder / "small.ipynb")


def test_the_command_stores_outputs_and_nothing_of_the_machine(
    folder, capsys, monkeypatch
):
    monkeypatch.setenv("FEDLAYERS_DATA_ROOT", str(folder))
    put(
        folder,
        "import os\n'FEDLAYERS_DATA_ROOT' in os.environ",
        "open('left.txt', 'w').write('a')",
    )
    assert command.main(["small"]) == 0
    assert "small: " in capsys.readouterr().out
    notebook = stored("small")
    assert [o.data["text/plain"] for o in outputs(notebook)] == ["True", "1"]
    assert (notebook.metadata, [cell.id for cell in notebook.cells]) == (
        execute.KERNEL,
        ["cell-0", "cell-1", "cell-2"],
    )
    assert sorted(path.name for path in folder.iterdir()) == ["small.ipynb", "small.md"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print(__import__('os').getcwd())", "paths of this machine: /"),
        ("print('x' * 700_000)", "more than 600,000"),
        ("import sys; print('look out', file=sys.stderr)", "shows a warning: look out"),
    ],
)
def test_what_should_not_be_stored_leaves_the_old_one(folder, capsys, source, said):
    put(folder, source)
    before = (folder / "small.ipynb").read_bytes()
    assert command.main(["small"]) == 1
    assert said in capsys.readouterr().err
    assert (folder / "small.ipynb").read_bytes() == before


def test_a_cell_that_fails_and_a_path_of_the_machine_are_errors(folder, tmp_path):
    put(folder, "1 / 0")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute.executed("small", tmp_path)
    notebook = small("1")
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="/tmp/x")]
    with pytest.raises(RunError, match="paths"):
        execute.store("small", notebook)
