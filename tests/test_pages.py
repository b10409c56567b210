"""What a page names is there: links, files, folders and flags, and each place in the code of the glossary."""

import re
from pathlib import Path
from pkgutil import resolve_name

import pandas as pd
import pytest

import fedlayers as fl
from docs.sources import FENCE, PAGES
from fedlayers.cli.app import COMMANDS, command_class
from fl_core import data
from fl_core.config import KEYS
from fl_core.rounds import engine

ROOT = Path(__file__).parents[1]
IN_CODE = r"(?m)`([A-Z]\w+(?:\.\w+)?)`(?=[^|\n]*\|$)"
MEMBERS = set(re.findall(IN_CODE, (ROOT / "docs" / "glossary.md").read_text("utf-8")))
FIELDS = (command_class(name).__dataclass_fields__ for name in COMMANDS)
FLAGS = {
    *(field.replace("_", "-") for field in set(KEYS).union(*FIELDS)),
    *re.findall(r"\S+", "help version budget only pack train federations cluster"),
    *("extra-index-url", "trusted-entities"),
}
"""With those of figures, pip, Flower and an example."""
DOTTED = r"^(?:fl|fl_core|diagnostics|fedlayers|figures|benchmarks)(?:\.\w+)+"
THERE = [
    f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}"
    for kind in ("", "*.py")
    for path in ROOT.glob(f"[!.]*/**/{kind}")
]


@pytest.mark.parametrize("page", [name for name in PAGES if "REGISTERED" not in name])
def test_what_a_page_names_is_there(page):
    """Lines on a commit name what was there."""
    text = FENCE.sub("", (ROOT / page).read_text("utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)|src=\"([^\"]+)", text):
        path = "".join(target)
        assert path[:4] == "http" or (ROOT / page).parent.joinpath(path).exists(), path
    present = text.partition("\n### Changed")[0]
    for name in re.findall(
        r"`([^`\s][^`\n]*)`", re.sub("(?m)^.*commit.*$", "", present)
    ):
        path, _, function = name.partition("::")
        if re.fullmatch(r"(?!my_|arms/)[\w./-]+(/|\.py)", path):
            assert any(path_there.endswith(f"/{path}") for path_there in THERE), name
            assert not function or f"def {function}(" in (ROOT / path).read_text(), name
        for dotted in re.findall(DOTTED, name):
            resolve_name(re.sub(r"^fl\b", "fedlayers", dotted))
        assert set(re.findall("^fedlayers ([a-z]+)", name)) <= {*COMMANDS}, name
        if name.startswith(("--", "fedlayers", *COMMANDS)):
            assert set(re.findall("--([a-z][a-z-]*)", name)) <= FLAGS, name


def test_each_way_through_the_code_counts_its_files():
    """The steps of a way are numbered, and each begins with its file. A listed function stands in the file."""
    page = (ROOT / "docs/code.md").read_text()
    ways = re.findall(r"^## ([^\n]+): (\d+) files\n\n(.+?)\n\n", page, re.M | re.S)
    assert len(ways) == 7
    for way, count, text in ways:
        files = re.findall(r"^\d+\. `([\w/]+\.py)` ", text, re.M)
        assert len({*files}) == int(count) == text.count("\n") + 1, way
    for path, name in re.findall(r"`([\w/]+\.py)`: `(?:\w+\.)?(\w+)`", page):
        assert re.search(rf"(def|class) {name}\b", (ROOT / path).read_text()), name


def test_a_question_on_the_code_is_answered_by_at_most_two_files():
    """Mostly by one."""
    page = (ROOT / "docs/code.md").read_text()
    before, _, _ = page.partition("\n## ")
    rows = re.findall(r"(?m)^\| (?!question|to change|---)(.+) \| (.+) \|$", before)
    counts = [
        len(re.findall(r"`[\w./]+(?:\.(?:py|yml|toml|mplstyle)|/)`", files))
        for _, files in rows
    ]
    assert len(counts) >= 24
    assert {*counts} == {1, 2}
    assert sorted(counts)[len(counts) // 2] == 1


def test_each_promise_names_a_test_that_is_there():
    """So does each line of the page on load. The page of promises is short."""
    page = (ROOT / "SECURITY.md").read_text()
    load = (ROOT / "docs/under_load.md").read_text()
    assert len(page.split()) <= 900
    for row in re.findall(r"(?m)^\| (?!promise|what was).+", page + load):
        named = re.findall(r"`(tests/[^`]+)`", row.split("|")[-2])
        assert named, row
        for file, _, test in (promise.partition("::") for promise in named):
            assert f"def {test}(" in (ROOT / file).read_text() or not test, test


@pytest.mark.parametrize("place", sorted(MEMBERS))
def test_what_a_term_is_called_in_the_code_is_there(place):
    owner, _, member = place.partition(".")
    home = next(
        getattr(module, owner)
        for module in (engine, data, fl)
        if hasattr(module, owner)
    )
    assert not member or hasattr(home, member) or member in home.__dataclass_fields__


def test_the_profile_of_lora_layers_has_the_numbers_of_its_rows():
    page = ROOT / "docs/results/which_lora_layers.md"
    rows = pd.read_csv(page.with_suffix(".csv"))
    for row in rows.query("client.isna() and variant == 'fall'").itertuples():
        line = f"| `{row.layer}` | {row.value:.3f} | {row.stderr:.3f} |"
        assert line in page.read_text()


README_PARTS = (
    *("Install", "Quickstart", "Your own table", "Your own models, in a notebook"),
    *("What it can do", "What is known", "Reproduced papers", "Extend"),
)
MOST_WORDS = 900


def test_the_readme_is_short_and_in_order():
    """Words of code and its comments count. The picture stands above the first part."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.split()) <= MOST_WORDS
    assert tuple(re.findall(r"(?m)^## (.+)", text)) == README_PARTS
    lead, *parts = re.split(r"(?m)^## .+", text)
    assert lead.count("![") == text.count("![") == 1
    install, _, table, models, can_do, *_ = parts
    assert {"make demo", "make test"} <= {*install.splitlines()}
    assert table.count("```") == models.count("```") == 2
    assert len(re.findall("(?m)^- ", can_do)) == 10
