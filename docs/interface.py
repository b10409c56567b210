"""Makes reference pages from docstrings: what ``import fedlayers as fl`` gives, unimported, metrics and rules."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

from docs import lists

DOORS = "fedlayers/__init__.py"
STYLE: Any = Config(
    napoleon_use_rtype=False,
    napoleon_use_ivar=True,
    napoleon_custom_sections=[("Class attributes", "Attributes")],
)
Defined = ast.FunctionDef | ast.ClassDef
TOPICS = {
    "Train": "run resume RunResult RunConfig Run load_models assemble train_first_round Row row",
    "Choose layers": "choose Answer label_shift LabelShift study compare Comparison display_name tune Tuned",
    "Data": "load from_clients FederatedData partition dataset",
    "Models and layers": "model Layer layers_of LayerPlan",
    "Measure": "diagnose diagnose_features through_time load_weights tsne Nulls measure Report plots layer_metric "
    "cross_scores CrossScores LayerProbe NoValue metric Metric Measurement ClientModel batches probe_set set_mode",
    "From measurements to a plan": "select explain rule Rule regret cost_steps plan_cost",
    "Use a trained model": "export ExportedModel predict Predictions",
    "Write an algorithm": "Algorithm register Phase Context Message Round State Update",
    "Follow a run": "Logger LoggedRun Monitor",
    "Errors": "UsageError RunError",
}
"""The public names by topic."""


def pages(root: Path) -> dict[str, str]:
    """Return the pages in reStructuredText by name: ``index`` by topic, and one for each function, class or module."""
    made = {}
    for name, module, attribute in sorted(
        doors(root), key=lambda door: door[0].lower()
    ):
        if text := _page(root, name, module, attribute):
            made[name] = text
    head = _title("The Python interface")
    note = "The names in ``import fedlayers as fl``. The tests run every ``>>>`` as it stands here."
    trees = []
    for topic, names in TOPICS.items():
        listed = "\n".join(f"   {name}" for name in names.split() if name in made)
        trees.append(
            f".. toctree::\n   :maxdepth: 1\n   :caption: {topic}\n\n{listed}\n"
        )
    return {"index": f"{head}{note}\n\n{chr(10).join(trees)}", **made}


def doors(root: Path) -> Iterator[tuple[str, str, str]]:
    """Every public name with the module and the attribute that it stands for."""
    for node in ast.walk(ast.parse((root / DOORS).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "typing":
            for each in node.names:
                if each.asname and not each.asname.startswith("_"):
                    yield each.asname, node.module, each.name


def metrics(root: Path, sources: set[str]) -> str:
    """Return the page of all metrics, each with its formula, options, an example and its source."""
    entries = []
    for name, kind in lists.registry("metric").own.items():
        words = (
            f"{kind.description[:1].upper()}{kind.description[1:]}: {kind.direction}."
        )
        facts = {
            "How": kind.how,
            "Variants": ", ".join(kind.variants),
        }
        facts["Unit"] = getattr(kind.options_type, "unit", "")
        options = [
            _text(str(each.__doc__), name, "class")
            for each in kind.options_type.__mro__
            if "__dataclass_fields__" in vars(each)
        ]
        table = [
            f"   * - ``{key}``\n     - ``{value!r}``\n     - ``{_type(kind.option_types[key])}``"
            for key, value in kind.options.items()
        ]
        if table:
            head = "   * - option\n     - default\n     - type"
            options.append(
                "\n".join([".. list-table::\n   :header-rows: 1\n", head, *table])
            )
        example = f"fedlayers diagnose --dataset heart --metrics {name}"
        plain = [key for key, value in kind.options.items() if value is not None]
        if plain:
            example += f" --option {name}.{plain[0]}={kind.options[plain[0]]}"
        parts = (
            words,
            _text(inspect.getdoc(kind.compute) or "", name, "function"),
            *(options if table else ()),
            facts,
        )
        entries.append(_entry(root, sources, name, kind.compute, parts, example))
    return "\n\n".join([_title("Metrics").strip(), *entries])


def rules(root: Path, sources: set[str]) -> str:
    """Return the page of all rules, each with its docstring, an example and its source."""
    entries = []
    for name, kind in lists.registry("rule").own.items():
        words = f"{kind.summary[:1].upper()}{kind.summary[1:]}."
        parts = (
            words,
            _text(inspect.getdoc(kind.choose) or "", name, "function"),
            {"Reads": "curve" if kind.decides else "names"},
        )
        layers = "" if kind.decides else " --layers fc1,fc2"
        example = (
            "fedlayers diagnose --dataset heart --metrics federation_sensitivity\n"
            f"fedlayers select diagnosis --rule {name}{layers} --out plan.json"
        )
        entries.append(_entry(root, sources, name, kind.choose, parts, example))
    return "\n\n".join([_title("Rules").strip(), *entries])


def _entry(
    root: Path,
    sources: set[str],
    name: str,
    function: Any,
    parts: Iterable[Any],
    example: str,
) -> str:
    """Return the section of a registered function. Its file becomes a page of the site."""
    file = (
        Path(str(inspect.getsourcefile(inspect.unwrap(function))))
        .relative_to(root)
        .as_posix()
    )
    sources.add(file)
    title = f"``{name}``"
    shown = [title + "\n" + "-" * len(title)]
    for part in parts:
        if isinstance(part, dict):
            part = "\n".join(f":{key}: {value}" for key, value in part.items() if value)
            shown.append(part)
        else:  # |x| is a substitution of reStructuredText, outside literals
            part = part.replace(":ivar ", ":").replace(
                ":raises UsageError:", ":Refused:"
            )
            shown.append(re.sub(r"(``.*?``)|\|", lambda f: f[1] or r"\|", part))
    shown += [f".. code-block:: sh\n\n{_indented(example)}", f"Source: :doc:`/{file}`"]
    return "\n\n".join(filter(None, shown))


def _type(kind: Any) -> str:
    return (
        kind.__name__
        if isinstance(kind, type)
        else str(kind).replace("typing.", "").replace("collections.abc.", "")
    )


def _file(root: Path, module: str) -> Path | None:
    path = root / module.replace(".", "/")
    return next(
        (
            each
            for each in (path.with_suffix(".py"), path / "__init__.py")
            if each.is_file()
        ),
        None,
    )


def _page(root: Path, name: str, module: str, attribute: str) -> str:
    """The page of a name; empty of a plain value, such as a registry."""
    if whole := _file(root, f"{module}.{attribute}"):
        return _module(name, whole)
    node = _find(root, module, attribute)
    if node is None:
        return ""
    return f"{_title(f'fl.{name}')}{_described(node, f'fl.{name}')}\n"


def _find(root: Path, module: str, attribute: str) -> Defined | None:
    """The definition of a name, also where its module has it from another one."""
    path = _file(root, module)
    if path is None:
        return None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, Defined) and node.name == attribute:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                if (each.asname or each.name) == attribute:
                    return _find(root, node.module, each.name)
    return None


def _module(name: str, path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = [
        _title(f"fl.{name}"),
        _text(ast.get_docstring(tree) or "", f"fl.{name}", "module"),
    ]
    public = [
        node
        for node in tree.body
        if isinstance(node, Defined) and not node.name.startswith("_")
    ]
    parts += [
        _described(node, f"fl.{name}.{node.name}")
        for node in public
        if ast.get_docstring(node)
    ]
    return "\n\n".join(parts) + "\n"


def _described(node: Defined, name: str) -> str:
    """A directive with signature and docstring, of a class with its public methods."""
    lines = _text(
        ast.get_docstring(node) or "",
        name,
        "class" if isinstance(node, ast.ClassDef) else "function",
    )
    if isinstance(node, ast.ClassDef):
        init = next(
            (
                each
                for each in node.body
                if isinstance(each, ast.FunctionDef) and each.name == "__init__"
            ),
            None,
        )
        made = _signature(init, skip=1) if init else _fields(node)
        head = f".. py:class:: {name}{made}"
        parts = [lines]
        for each in node.body:
            if (
                isinstance(each, ast.FunctionDef)
                and not each.name.startswith("_")
                and ast.get_docstring(each)
            ):
                parts.append(_method(each))
        lines = "\n\n".join(parts)
    else:
        head = f".. py:function:: {name}{_signature(node)}"
    return f"{head}\n\n{_indented(lines)}"


def _fields(node: ast.ClassDef) -> str:
    """Return the constructor's parameters of a dataclass, which are its fields."""
    if not any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return ""
    found = []
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or "ClassVar" in ast.unparse(
            each.annotation
        ):
            continue
        value = "" if each.value is None else ast.unparse(each.value)
        if "init=False" not in value:
            default = "..." if value.startswith("field(") else value
            shown = f"{ast.unparse(each.target)}: {ast.unparse(each.annotation)}"
            found.append(f"{shown} = {default}" if value else shown)
    return f"({', '.join(found)})"


def _method(node: ast.FunctionDef) -> str:
    marks = {ast.unparse(each) for each in node.decorator_list}
    text = _indented(_text(ast.get_docstring(node) or "", node.name, "method"))
    if marks & {"property", "cached_property"}:
        return f".. py:property:: {node.name}\n\n{text}"
    kind = next(
        (f"\n   :{mark}:" for mark in ("staticmethod", "classmethod") if mark in marks),
        "",
    )
    return f".. py:method:: {node.name}{_signature(node, skip='staticmethod' not in marks)}{kind}\n\n{text}"


def _signature(node: ast.FunctionDef, skip: int = 0) -> str:
    """Parameters with annotations and defaults, and what is returned."""
    given = node.args
    given.args = given.args[skip:]
    returned = (
        f" -> {ast.unparse(node.returns)}"
        if node.returns and node.name != "__init__"
        else ""
    )
    return f"({ast.unparse(given)}){returned}"


def _text(doc: str, name: str, what: Any) -> str:
    return str(
        GoogleDocstring(inspect.cleandoc(doc), STYLE, what=what, name=name)
    ).strip()


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" if line else "" for line in text.splitlines())


def _title(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n\n"
