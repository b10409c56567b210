"""Checks the search of a built site by its own script: questions lead to their pages. Node.js runs the script."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

FIRST = 3
"""Hits among which the page must be."""
PAGES = {
    "which client is hurt": "docs/questions",
    "decimal comma": "docs/questions",
    "my own model": "docs/your_model",
    "t-SNE": "docs/questions",
    "restart": "docs/questions",
}
"""Questions, and the page that answers each."""
SCRIPT = """
const [site, ...questions] = process.argv.slice(1);
const read = name => require("fs").readFileSync(site + "/" + name, "utf8");
globalThis.window = globalThis;
globalThis.document = {getElementById: () => null, addEventListener: () => {}};
globalThis.localStorage = {setItem: () => {}};
const SPHINX_HIGHLIGHT_ENABLED = false, _ready = () => {}, _ = text => text;
const Search = eval(read("_static/language_data.js") + read("_static/searchtools.js") + ";Search");
globalThis.Search = Search;
eval(read("searchindex.js"));
const hits = each => Search._performSearch(...Search._parseQuery(each)).reverse().map(hit => hit[0]);
console.log(JSON.stringify(questions.map(hits)));
"""


def lost(site: Path) -> Iterator[str]:
    """A line on each question whose page is not among the first hits."""
    node = shutil.which("node")
    if node is None:
        print("the search is not checked: Node.js is not installed")
        return
    command = [node, "-e", SCRIPT, str(site), *PAGES]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    for (question, page), hits in zip(
        PAGES.items(), json.loads(found.stdout), strict=True
    ):
        first = list(dict.fromkeys(hits))[:FIRST]
        if page not in first:
            yield f"the search for {question!r} finds {first}, not {page}"
