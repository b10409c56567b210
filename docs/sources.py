"""Gathers the site's pages in a folder: the repository's own at their own places, and what is made from its lists.

No heavy part of the packages is imported. Registered members are read from the sources. Results of the papers come
from the pages that ``figures`` wrote.
"""

from __future__ import annotations

import csv
import html
import json
import os
import re
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docs import commands, interface, lists
from fl_core.algorithms.base import defaults_of
from fl_core.registry import first_line

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md", "benchmarks/README.md",
    "figures/decision/PREREGISTERED.md", "figures/decision/REGISTERED_FINISHED.md",
    "figures/decision/REGISTERED_KNOWN.md", "figures/decision/REGISTERED_DIFFERS.md",
    "benchmarks/leaderboard/REGISTERED.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "figures").glob("*.md"))),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")) if path.stem != "index"),
)  # fmt: skip
"""Pages that stand in the site as in the repository; figures' pages and the notebooks come to them."""
OWNER = ""
"""The account of the repository on GitHub. Notebooks of the site have a link to Colab once it is set."""
PAPERS = {
    "player_fl": "PLayer-FL",
    "scheduling": "Layer scheduling",
    "fedpft": "FedPFT",
    "pfedla": "pFedLA",
    "fedra": "FedRA",
}
LINK = re.compile(r"(?P<image>!?)\[(?P<label>[^\]\[]*)\]\((?P<target>[^)\s]+)\)")
IMAGE = re.compile(r'<img src="([^"]+)"[^>]*? alt="([^"]*)">')
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
FACTS = (
    ("trains", "trained"),
    ("travels", "sent"),
    ("keeps", "kept"),
    ("cost", "cost"),
    ("paper", "from"),
)


def write(out: Path) -> int:
    """Write all pages of the site below ``out``; returns their number."""
    own = [ROOT / name for name in PAGES]
    figures = sorted((ROOT / "figures" / "pictures").glob("*.md"))
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    wanted = {
        path.relative_to(ROOT).as_posix() for path in (*own, *figures, *notebooks)
    }
    sources: set[str] = set()
    for path in (*own, *figures):
        text = path.read_text(encoding="utf-8")
        text = relinked(text, path, wanted, sources, out)
        _put(
            out,
            path.relative_to(ROOT).as_posix(),
            text + _files(path, text) if path in figures else text,
        )
    for path in (each.with_suffix(".csv") for each in figures):
        if path.is_file():
            _copy(path, out / path.relative_to(ROOT))
    for path in notebooks:
        name = path.relative_to(ROOT).as_posix()
        _put(out, name, with_colab(path.read_text(encoding="utf-8"), name, OWNER))
    metrics, rules = interface.metrics(ROOT, sources), interface.rules(ROOT, sources)
    for name in sorted(sources):
        _put(out, f"{name}.md", _source(name))
    pages = interface.pages(ROOT)
    made = {
        "scorecard.md": scorecard(),
        "catalogue.md": figures_by_paper(wanted),
        "algorithms.md": algorithms(),
        "metrics.rst": metrics,
        "rules.rst": rules,
        **commands.pages(),
        **{f"api/{name}.rst": text for name, text in pages.items()},
    }
    for name, text in made.items():
        _put(out, name, text)
    for name, text in groups(
        (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    ).items():
        _put(out, name, text)
    _copy(ROOT / "docs" / "conf.py", out / "conf.py")
    shutil.copytree(ROOT / "docs" / "static", out / "_static")
    return len([*out.rglob("*.md"), *out.rglob("*.rst"), *out.rglob("*.ipynb")])


def with_colab(notebook: str, name: str, owner: str) -> str:
    """Return a notebook with a link to Colab below its title, or as it is without an owner.

    Args:
        name: its path in the repository.
        owner: the account of the repository on GitHub.
    """
    if not owner:
        return notebook
    read = json.loads(notebook)
    link = (
        f"https://colab.research.google.com/github/{owner}/fedlayers/blob/main/{name}"
    )
    first = read["cells"][0]
    line = f"[Open in Colab]({link}), and run `%pip install fedlayers` there first."
    first["source"] = [*first["source"], f"\n\n{line}"]
    return json.dumps(read, indent=1, ensure_ascii=False)


def _put(out: Path, name: str, text: str) -> None:
    path = out / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


# --- the repository's own pages ----------------------------------------------------------------------------------


TREE = re.compile(
    r"```{toctree}\n:caption: ([^\n]+)\n:hidden:\n\n(.*?)\n```\n?", re.DOTALL
)


def groups(index: str) -> dict[str, str]:
    """Return the index and a page for each of its captions, so that the sidebar's groups fold.

    What was written before the runs is the last page of how we know.
    """
    trees = dict(TREE.findall(index))
    named = {
        caption: f"group_{caption.lower().replace(' ', '_')}.md" for caption in trees
    }
    last = "Written before the runs"
    trees["How we know"] += f"\n{named[last]}"
    made = {}
    for caption, entries in trees.items():
        made[named[caption]] = (
            f"# {caption}\n\n```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```\n"
        )
    tops = "\n".join(named[caption] for caption in trees if caption != last)
    hidden = f"```{{toctree}}\n:hidden:\n\n{tops}\n```\n"
    return {"index.md": f"{TREE.sub('', index).rstrip()}\n\n{hidden}", **made}


SCREEN = 88
"""Characters of a line of code that fit on a page of 1,280 pixels."""


def narrowed(block: str) -> str:
    """Return a block of commands and outputs with its long lines wrapped. Tables and Python stay."""
    head, *lines = block.split("\n")
    if "python" in head:
        return block
    found = []
    for line in lines:
        text = line.strip()
        if len(line) <= SCREEN or "  " in text or len(text.split()) < 2:
            found.append(line)
            continue
        command = text.startswith(("$ ", "fedlayers ", "python ", "srun ", "flwr "))
        parts = textwrap.wrap(
            line,
            SCREEN - 2,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        found.append((" \\\n" if command else "\n").join(parts))
    return "\n".join([head, *found])


def relinked(
    text: str, path: Path, wanted: Iterable[str], sources: set[str], out: Path
) -> str:
    """A page's text whose links lead to pages of the site; pictures are copied, links to folders become plain text.

    Args:
        wanted: pages of the site, by their place in the repository.
        sources: gets the files that are linked and become pages of their own.
    """
    wanted = set(wanted)
    text = (
        IMAGE.sub(r"![\2](\1)", text).replace("<p>\n![", "![").replace(")\n</p>", ")")
    )

    def link(found: re.Match[str]) -> str:
        target = found["target"].partition("#")[0]
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        file = Path(os.path.normpath(path.parent / target))
        if not file.is_relative_to(ROOT) or not file.is_file():
            return found["label"]
        name = file.relative_to(ROOT).as_posix()
        if found["image"]:
            _copy(file, out / name)
        elif name not in wanted:
            sources.add(name)
            return f"[{found['label']}]({target}.md)"
        return found[0]

    parts, end = [], 0
    for fence in FENCE.finditer(text):  # what stands in a block of code is no link
        parts += [LINK.sub(link, text[end : fence.start()]), narrowed(fence[0])]
        end = fence.end()
    return "".join([*parts, LINK.sub(link, text[end:])])


def _source(name: str) -> str:
    """A page that shows a file."""
    path = ROOT / name
    if path.suffix == ".md":
        return f"---\norphan: true\n---\n\n{LINK.sub(lambda found: found['label'], path.read_text(encoding='utf-8'))}"
    language = {".py": "python", ".cff": "yaml"}.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8").rstrip()
    return f"---\norphan: true\n---\n\n# {name}\n\n````{language}\n{text}\n````\n"


def _files(page: Path, text: str) -> str:
    """The end of a figure's page: its numbers as a file, and its command."""
    made = "\n## How it is made\n"
    if page.with_suffix(".csv").is_file():
        made += f"\nIts numbers: {{download}}`{page.stem}.csv`.\n"
    return f"{made}\n```sh\npython -m figures {page.stem}\n```\n"


# --- what came out of the papers ---------------------------------------------------------------------------------


CELLS = ("claim", "the paper's value", "here", "distance", "setting", "verdict")


def scorecard() -> str:
    """The scorecard of ``figures/README.md`` as one table that can be filtered by paper and by verdict."""
    text = (ROOT / "figures" / "README.md").read_text(encoding="utf-8")
    text = text.partition("<!-- scorecard -->")[2].partition(
        "<!-- end of the scorecard -->"
    )[0]
    rows, papers, verdicts, paper = [], dict[str, None](), dict[str, None](), ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"\*\*(.+?)\*\*: .*", line):
            paper = heading[1]
            papers[paper] = None
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != len(CELLS) or not cells[-1].startswith("["):
            continue
        verdict = cells[-1][1:].partition("]")[0].strip("*")
        verdicts[verdict] = None
        shown = "".join(
            f'<td class="{name.split()[-1]}" data-name="{name}">{_html(cell)}</td>'
            for name, cell in zip(CELLS, cells, strict=True)
        )
        rows.append(
            f'<tr data-paper="{html.escape(paper)}" data-verdict="{verdict}"><td>{paper}</td>{shown}</tr>'
        )
    heads = "".join(f"<th>{name}</th>" for name in ("paper", *CELLS))
    return (
        "---\nhide-toc: true\n---\n\n# The scorecard\n\n"
        "Each row is a claim of a paper, with the paper's value, ours, and our verdict. ± is half a 95 % interval. Our "
        "measurements decide the *reproduced* and the *contradicted* claims, and leave the *undecided* ones open. "
        "Where a claim is *not comparable*, our setting is too far from the paper's, or cannot test it.\n\n"
        f'```{{raw}} html\n<div class="filters">{_choice("paper", papers)}{_choice("verdict", verdicts)}'
        f'<output aria-live="polite"></output></div>\n<div class="scorecard"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>\n```\n"
    )


def _choice(name: str, values: Iterable[str]) -> str:
    options = "".join(f"<option>{html.escape(value)}</option>" for value in values)
    return f'<label>{name} <select name="{name}"><option value="">all</option>{options}</select></label>'


def _html(cell: str) -> str:
    """A cell of a Markdown table as HTML."""
    text = html.escape(cell.replace("\\|", "|"))
    text = re.sub(
        r"\[([^\]]+)\]\((pictures/[^)]+)\.md\)",
        r'<a href="figures/\2.html">\1</a>',
        text,
    )
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def figures_by_paper(wanted: Iterable[str]) -> str:
    """A table of each paper's figures and tables, with the page or a reason; then all other studies."""
    wanted = set(wanted)
    with (ROOT / "figures" / "catalogue.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        lines = list(csv.DictReader(file))
    listed, parts = {line["name"] for line in lines}, list[str]()
    for paper, title in PAPERS.items():
        rows = []
        for line in (line for line in lines if line["name"].startswith(f"{paper}.")):
            page = f"figures/pictures/{line['name']}.md"
            state = f"[its page]({page})" if page in wanted else line["note"]
            shown = _heading(ROOT / page) if page in wanted else line["title"]
            rows.append(
                f"| `{line['name'].partition('.')[2]}` | {shown} | {state} | {line['lacks']} |"
            )
        head = "| name | what it shows | here | data that cannot be had |\n| --- | --- | --- | --- |"
        parts.append(f"## {title}\n\n{head}\n" + "\n".join(rows))
    names = sorted(
        Path(name).stem for name in wanted if name.startswith("figures/pictures/")
    )
    others = [name for name in names if name not in listed]
    parts.append("## Studies of this project's own\n\n" + "\n".join(
        f"- [{name}](figures/pictures/{name}.md)" for name in others
    ))  # fmt: skip
    links = "\n".join(f"figures/pictures/{name}.md" for name in names)
    tree = f"```{{toctree}}\n:hidden:\n\n{links}\n```"
    return (
        f"---\nhide-toc: true\n---\n\n# Every figure and table\n\n{tree}\n\n"
        + "\n\n".join(parts)
        + "\n"
    )


def _heading(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


# --- what is registered ------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return str(value).replace("``", "`")


def algorithms() -> str:
    """Return the algorithms family by family: what they train, send and keep, and the cost."""
    parts = [
        "# Algorithms\n\nCost: scalars that a client receives and sends a round; P is all of the model's.\n"
    ]
    known = lists.registry("algorithm")
    own = known.own
    for family, names in known.families().items():
        members = [name for name in names if name in own]
        if members:
            parts.append(f"## {_text(family).rstrip('.:')}\n")
        for name in members:
            member = own[name]
            facts = [
                f"- {word}: {_text(getattr(member, fact))}"
                for fact, word in FACTS
                if getattr(member, fact)
            ]
            if member.uses_plan:
                facts.append("- uses a plan")
            summary = _text(first_line(member.__doc__))
            parts.append(
                f"### `{name}`\n\n{summary}\n\n" + "\n".join(facts) + _options(member)
            )
    return "\n".join(parts) + "\n"


def _options(member: Any) -> str:
    shown = ", ".join(f"`{key}={value}`" for key, value in defaults_of(member).items())
    return f"\n- options (`--option`): {shown}\n" if shown else "\n"
