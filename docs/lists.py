"""``python -m docs.lists``: writes the lists of algorithms, metrics, rules, datasets and models, and the typed keys.

They stand on pages, and in the file that ``fedlayers list`` prints. The keys of a run stand in :mod:`fl_core.config`.
:mod:`fl_core.keys` repeats their types for editors and type checkers, which cannot derive them.

A list stands between ``<!-- list:KIND -->`` and ``<!-- end -->``. The rest of a page stays as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diagnostics.metrics import STORED
from fedlayers.cli import options
from fl_core import config, data, keys
from fl_core.algorithms.base import defaults_of
from fl_core.data.registry import general
from fl_core.errors import UsageError, check_known
from fl_core.models.building import describe
from fl_core.models.tokens import TokenShape
from fl_core.registry import Registry, first_line, import_object
from fl_core.storage import write_json

BLOCK = re.compile(r"(<!-- list:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


HOMES = {
    "algorithm": "fl_core.algorithms.base:ALGORITHMS",
    "metric": "diagnostics.metrics.base:METRICS",
    "rule": "diagnostics.select:RULES",
    "dataset": "fl_core.data.registry:DATASETS",
    "partition": "fl_core.data.partitions.base:PARTITIONS",
    "model": "fl_core.models.building:MODELS",
}
"""The registry of each kind."""


def registry(kind: str) -> Registry[Any]:
    """Return the registry of a kind, one of :data:`HOMES`."""
    return import_object("registry", HOMES[check_known("kind", kind, HOMES)])


# --- the keys of a run for type checkers -------------------------------------------------------------------------

KEYS_FILE = Path(keys.__file__)
KEYS_SOURCE = '''"""The types of a run's keys for editors. ``make lists`` writes them from :mod:`fl_core.config`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from fl_core.plan import LayerPlan


class Keys(TypedDict, total=False):
    """The keys of a configuration by name that every study takes."""

{shared}

class RunKeys(Keys, total=False):
    """Keys, with the options of the one algorithm."""

{of_algorithm}

class AllKeys(RunKeys, total=False):
    """All keys of :class:`~fl_core.config.RunConfig`."""

{of_configuration}'''
CLASS_OF = {
    "options": "of_algorithm",
    "model": "of_configuration",
    "plan": "of_configuration",
}
"""The keys that some functions take as another argument."""


def typed_keys() -> str:
    """Return the source of :mod:`fl_core.keys`: each key of a configuration with the type that a call takes."""
    lines = dict.fromkeys(("shared", "of_algorithm", "of_configuration"), "")
    for key, declared in config.KEYS.items():
        hint = declared.accepts
        if hint in (bool, int, float, str):
            hint = hint.__name__
        plain = re.sub(r"\b[a-zA-Z_]\w*\.", "", str(hint))  # without names of modules
        types = sorted(plain.split(" | "), key="None".__eq__)
        lines[CLASS_OF.get(key, "shared")] += f"    {key}: {' | '.join(types)}\n"
    return KEYS_SOURCE.format(**lines)


# --- what ``fedlayers list`` prints -----------------------------------------------------------------------------

Blocks = dict[str, dict[str, str]]
"""Title -> name -> text."""


def all_algorithms() -> Blocks:
    """Return algorithms by family, with their papers, options and costs. The texts say what is trained, sent and kept.

    The cost is the number of scalars that a client receives and sends in a round. P stands for all of the model's.
    """
    known = registry("algorithm")
    cost = "Cost: scalars that a client receives and sends a round; P = all of the model's. Plan: uses --plan."
    blocks: Blocks = {cost: {}}
    for family, names in known.families().items():
        about = {}
        for name in names:
            kind = known[name]
            parts = [
                kind.paper,
                f"trained: {kind.trains}",
                f"sent: {kind.travels}",
                f"kept: {kind.keeps}",
                f"cost: {kind.cost}",
            ]
            if kind.uses_plan:
                parts.append("plan")
            if options := _options(defaults_of(kind)):
                parts.append(f"--option {options}")
            about[name] = " | ".join(parts)
        blocks[family] = about
    return blocks


def all_datasets() -> Blocks:
    """Return every dataset with its defaults, and those of a user's own data.

    >>> datasets = all_datasets()[""]
    >>> print(datasets["heart"])
    clients=4, partition=natural, model=heart_mlp, ... loss_options=(gamma=3.0, alpha=…), scale=none, ...
    >>> "dirichlet, alpha=0.5" in datasets["cifar10"], "player_focal" in datasets["heart"]
    (True, True)
    """
    shapes = {"table": (1,), "images": (3, 32, 32), "texts": TokenShape((1,), 3)}
    own = {f"your {name}": general(shape, False) for name, shape in shapes.items()}
    about = {}
    for name, recipe in {**data.datasets(), **own}.items():
        keys = {key: value for key, value in vars(recipe).items() if value}
        if recipe.partition != "dirichlet":
            del keys["alpha"]
        about[name] = _options(keys)
    return {"": about}


def all_metrics() -> Blocks:
    """Return every metric with its meaning, direction and variants."""
    about = {}
    for name, kind in registry("metric").members().items():
        parts = kind.description, kind.direction, ", ".join(kind.variants)
        about[name] = " | ".join(filter(None, parts))
    return {"": about}


LISTINGS: dict[str, Callable[[], Blocks]] = {
    "algorithms": all_algorithms,
    "datasets": all_datasets,
    "models": lambda: {"": describe()},
    "metrics": all_metrics,
    "rules": lambda: {"": registry("rule").summaries()},
}


def _options(options: Mapping[str, Any]) -> str:
    """Format options. A list, with one number per class, is abbreviated."""
    shown = []
    for key, value in options.items():
        if isinstance(value, dict):
            value = f"({_options(value)})"
        shown.append(f"{key}={'…' if isinstance(value, list) else value}")
    return ", ".join(shown)


# --- the tables on pages ----------------------------------------------------------------------------------------


def algorithms() -> str:
    """Return the table of algorithms, one row per family. Names in bold use a plan."""
    own = _own("algorithm")
    rows = []
    for family, members in registry("algorithm").families().items():
        names = [
            f"**`{name}`**" if own[name].uses_plan else f"`{name}`"
            for name in members
            if name in own
        ]
        if names:
            rows.append((family, " ".join(names)))
    return _table(("family", "algorithms"), rows)


def metrics() -> str:
    """Return the table of metrics, with their meaning and how they are computed."""
    return _table(
        ("metric", "what it says of a layer", "its value", "how"),
        (
            (
                f"`{name}`",
                member.description,
                member.direction,
                member.how,
            )
            for name, member in _own("metric").items()
        ),
    )


def datasets() -> str:
    """Return the table of datasets, with their default clients and models."""
    rows, recipes = [], data.datasets()
    for name, member in _own("dataset").items():
        recipe = recipes[name]
        clients = (
            "its natural clients"
            if recipe.partition == "natural"
            else f"{recipe.clients}, {recipe.partition}"
        )
        summary = first_line(member.__doc__)
        rows.append((f"`{name}`", summary, clients, f"`{recipe.model}`"))
    return _table(("dataset", "samples", "clients", "model"), rows)


def facts() -> dict[str, dict[str, Any]]:
    """Return what pictures need of each metric, as it is stored."""
    known = {name: asdict(metric) for name, metric in _own("metric").items()}
    for each in known.values():
        del each["compute"], each["options_type"]
    return known


LISTS: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "metrics": metrics,
    "rules": lambda: _described("rule", "what it decides"),
    "datasets": datasets,
    "models": lambda: _described("model", "what it is"),
}


def updated(text: str) -> str:
    """Return a page's text with its lists written again.

    >>> page = "Rules:\\n<!-- list:rules -->\\nan old list\\n<!-- end -->\\nThe end."
    >>> print(updated(page).splitlines()[2])
    | rule | what it decides |

    Raises:
        UsageError: an unknown kind of list, or a page without lists.
    """
    if not BLOCK.search(text):
        raise UsageError("The page has no <!-- list:KIND --> ... <!-- end -->.")
    return BLOCK.sub(
        lambda found: (
            found[1] + LISTS[check_known("list", found[2], LISTS)]() + found[3]
        ),
        text,
    )


def _own(kind: str) -> dict[str, Any]:
    """Return this project's members of a kind. Other installed packages do not belong in the pages."""
    return registry(kind).own


def _described(kind: str, says: str) -> str:
    """Return the table of a kind whose members have a line of description each."""
    own, every = _own(kind), LISTINGS[f"{kind}s"]()[""].items()
    rows = ((f"`{name}`", line) for name, line in every if name in own or ":" in name)
    return _table((kind, says), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [
        heads,
        ["---"] * len(heads),
        *([_cell(text) for text in row] for row in rows),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _cell(text: str) -> str:
    return text.rstrip(".").replace("``", "`").replace("|", "\\|")


def main(*paths: Path) -> None:
    """Write the lists of the given pages, by default all pages of ``docs``."""
    for path in paths or sorted(Path("docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if paths or BLOCK.search(text):
            path.write_text(updated(text), encoding="utf-8")
    KEYS_FILE.write_text(typed_keys(), encoding="utf-8")
    write_json(STORED, facts())
    listings = {what: make() for what, make in LISTINGS.items()}
    write_json(options.STORED, listings)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
