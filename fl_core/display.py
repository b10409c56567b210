"""Display of objects as text and in notebooks. Untrusted names are escaped, so that no program runs them."""

from __future__ import annotations

import ast
import hashlib
import html
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

LINES = 12
"""The most lines of an object as text, without the text at its end."""
ROWS = 20
"""The most rows of a table in a notebook. A line says how many more there are."""


@dataclass(frozen=True)
class Summary:
    """The contents of an object's display, as text and as HTML.

    Attributes:
        lead: one sentence or several, each on its own line.
        columns, rows: one table. Without columns there is none.
        layers: for each layer from input to output, whether it is shared. It is empty
            without a plan. Only :meth:`html` shows it.
        end: a text below the table.
    """

    lead: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    layers: Mapping[str, bool] = field(default_factory=dict)
    end: str = ""

    @classmethod
    def of_frame(
        cls, lead: str, frame: Any, layers: Any = None, end: str = ""
    ) -> Summary:
        """Return the summary of a pandas table. Its index makes the first columns, unless it only numbers the rows.

        Args:
            lead, end: as the attributes.
            frame: the table.
            layers: as the attribute. None means no layers.
        """
        if list(frame.index) != list(range(len(frame))):
            frame = frame.reset_index()
        rows = list(frame.itertuples(index=False, name=None))
        return cls(lead, [str(name) for name in frame.columns], rows, layers or {}, end)

    def text(self) -> str:
        """Return the summary as text: at most :data:`LINES` lines of ``lead`` and table, and then ``end``."""
        lines = self.lead.splitlines()
        if self.columns:
            lines += aligned([self.columns, *(map(_cell, row) for row in self.rows)])
        if len(lines) > LINES:
            lines = [*lines[: LINES - 1], f"... {len(lines) - LINES + 1} more lines"]
        return "\n".join([*lines, *self.end.splitlines()])

    def html(self) -> str:
        """Return the summary as plain HTML, without script. Its colours follow the page's.

        A table has at most :data:`ROWS` rows, and a line says how many more there are.
        There is no SVG: JupyterLab removes its tags from a notebook that it does not
        trust yet.
        """
        html_parts = ["<br>".join(map(in_html, self.lead.split("\n")))]
        boxes = []
        # a filled box and a bold name, or an outline
        for name, is_shared in self.layers.items():
            tag, word, opacity = (
                ("b", "shared", 0.35) if is_shared else ("span", "local", 0)
            )
            label = in_html(name)
            boxes.append(
                f'<{tag} title="{label}: {word}" style="display:inline-block;margin:4px 4px 4px 0;'
                f'padding:1px 8px;border:1px solid gray;background-color:rgba(128,128,128,{opacity})">'
                f"{label}</{tag}>"
            )
        if boxes:
            body = "".join(boxes)
            html_parts.append(f"<div>{body}</div>")
        if self.columns:
            lines = []
            for tag, row in [
                ("th", self.columns),
                *(("td", row) for row in self.rows[:ROWS]),
            ]:
                texts = map(in_html, map(_cell, row))
                cells_html = "".join(f"<{tag}>{text}</{tag}>" for text in texts)
                lines.append(f"<tr>{cells_html}</tr>")
            n_more = len(self.rows) - ROWS
            note = ""
            if n_more > 0:
                note = f"<div>{n_more} more rows</div>"
            body = "".join(lines)
            html_parts.append(f"<table>{body}</table>{note}")
        if self.end:
            end_html = "<br>".join(map(in_html, self.end.splitlines()))
            html_parts.append(f"<div>{end_html}</div>")
        return '<div style="color:inherit">' + "\n".join(html_parts) + "</div>"


class Displayed:
    """An object that shows its :meth:`summary` as text and in a notebook."""

    def summary(self) -> Summary:
        """Return the contents of the object's display. Subclasses define it."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summary().text()

    def _repr_html_(self) -> str:
        return self.summary().html()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def aligned(rows: Sequence[Any]) -> list[str]:
    """Return rows of cells as lines of text whose columns are aligned. All rows must have the same number of cells."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


MANY = 8
"""The largest number of clients that are shown or named one by one.

Of more clients only the lowest, the median and the highest are shown.
"""
_FORMULA = "=+-@＝＋－＠"
"""Signs that begin a formula in a spreadsheet."""
_SPLIT = re.compile(r'(;[\s"]*)(?=[' + re.escape(_FORMULA) + "])")
"""A semicolon before a sign that begins a formula. It ends a cell where it is the list separator."""
_HIDDEN = ("Cc", "Cs", "Zl", "Zp")
_TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Signs that change the direction of the following text."""
_NUMBERS = re.compile(
    r"[-+±\d.,;:%\[\] ]+|[-+]?(inf|nan|[\d.]+e[-+]?\d+)", re.IGNORECASE
)
"""A pattern of texts of digits and signs alone, such as numbers with their interval, and of inf and nan."""
_LONGEST = 60


def natural(name: str) -> tuple[list[str | int], str]:
    """Return a sort key by which numbers within names are ordered as numbers: ``ward_2`` before ``ward_10``."""
    pieces = re.split(r"([0-9]+)", name)
    return [int(piece) if k % 2 else piece for k, piece in enumerate(pieces)], name


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in display order. Alphabetical names are sorted by their numbers; any other order stays the same.

    >>> in_order(["ward_1", "ward_10", "ward_2"])
    ['ward_1', 'ward_2', 'ward_10']
    >>> in_order(["10", "9", "a"]), in_order(["a", "a10b2", "a10b9", "a9"])
    (['9', '10', 'a'], ['a', 'a9', 'a10b2', 'a10b9'])
    >>> in_order(["south", "north"]), in_order(["s²", "s१"]), in_order([])
    (['south', 'north'], ['s²', 's१'], [])
    """
    name_list = list(names)
    if name_list == sorted(name_list):
        return sorted(name_list, key=natural)
    return name_list


def printable(text: str) -> str:
    r"""Return text with control characters, line ends and changes of writing direction as escapes.

    >>> printable("Café\n\x00")
    'Café\\n\\x00'
    """
    if text.isprintable():
        return text
    is_hidden = (
        character in _TURNS or unicodedata.category(character) in _HIDDEN
        for character in text
    )
    return "".join(
        character.encode("unicode_escape").decode() if must_escape else character
        for character, must_escape in zip(text, is_hidden, strict=True)
    )


def message_line(text: str) -> str:
    """Return a message as one printable line. Paths below the working directory are relative to it.

    >>> message_line(f"got\\n{Path.cwd()}/wards/a.csv")
    'got wards/a.csv'
    """
    text = " ".join(text.split())
    with suppress(FileNotFoundError):  # the working directory is gone
        folder = re.escape(str(Path.cwd()))
        text = re.sub(rf"(?<![^\s'\"(=,]){folder}/", "", text)
    return printable(text)


_WORD = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|-?\d(?:[\d.e+-]*\d)?|[A-Z]\w*"
_WORDS = rf"(?:(?:{_WORD})(?:: |, )?)*"
_SETTING = re.compile(
    rf"(?<![\w'\"])([a-z_]+)=(\[{_WORDS}\]|\{{{_WORDS}\}}|{_WORD})(, (?=[a-z_]+=))?"
)
"""A pattern of a keyword of Python with its value, and of the comma before another keyword."""
_NAME = re.compile(r"(?<![\w'\"`./\\=\[(-])[a-z][a-z_]*(?![\w'\"`/\\=\[(-]|\.\w)")
"""A pattern of a word that stands alone. It may name an argument of Python."""


def with_flags(text: str, flags: Mapping[str, str]) -> str:
    """Return an error message with flags of the command line in place of keyword arguments of Python.

    A keyword with its value is replaced wherever it stands. A keyword without a value
    is replaced at the beginning, before ``must``, or if it has an underscore. A list
    becomes words, a dictionary NAME=VALUE, and True only the flag.

    >>> flags = {"label_column": "--label", "exclude": "--exclude", "keep_ids": "--keep-ids", "options": "--option"}
    >>> with_flags("Pass label_column='died at', exclude=['id', 'no'], keep_ids=True.", flags)
    "Pass --label 'died at' --exclude id no --keep-ids."
    >>> with_flags("Add options={'mu': VALUE}, or exclude=NAME.", flags)
    'Add --option mu=VALUE, or --exclude NAME.'
    >>> with_flags("exclude must be names, not 'label_column'. Leave out keep_ids.", flags)
    "--exclude must be names, not 'label_column'. Leave out --keep-ids."

    Args:
        flags: the flag of each keyword. Other keywords stay as they are.
    """

    def as_flag(setting: re.Match[str]) -> str:
        key, value_text, comma = setting.groups()
        if key not in flags:
            return setting[0]
        texts = [
            str(ast.literal_eval(word)) if word[0] in "'\"" else word
            for word in re.findall(_WORD, value_text)
        ]
        if value_text[0] == "{":
            texts = [*map("=".join, zip(texts[::2], texts[1::2], strict=True))]
        elif value_text == "True":
            texts = []
        words = [shlex.quote(text) for text in texts]
        if any(text.startswith("-") for text in texts):
            line = " ".join(f"{flags[key]}={word}" for word in words)
        else:
            line = " ".join([flags[key], *words])
        return line + " " * bool(comma)

    def named(word: re.Match[str]) -> str:
        is_first = word.start() == 0 and text[word.end() :].startswith(" must ")
        if is_first or "_" in word[0]:
            return flags.get(word[0], word[0])
        return word[0]

    return _SETTING.sub(as_flag, _NAME.sub(named, text))


def in_html(text: str) -> str:
    """Return text escaped for an element or an attribute of HTML, on one printable line.

    >>> in_html("<script>")
    '&lt;script&gt;'
    """
    return html.escape(printable(text))


def in_csv(value: object) -> Any:
    """Return a cell of a CSV table. An apostrophe is put before a text that a spreadsheet would compute.

    Spreadsheets may split a text at semicolons, so each part gets an apostrophe if it
    needs one. Control characters become escapes. A value that is no text is returned as
    it is.

    >>> in_csv("=cmd()"), in_csv("-1"), in_csv(-1)
    ("'=cmd()", '-1', -1)
    >>> in_csv("+0.1 ± 0.3"), in_csv("+1+cmd")
    ('+0.1 ± 0.3', "'+1+cmd")
    >>> in_csv("c;@SUM(1)")
    "c;'@SUM(1)"
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    if _NUMBERS.fullmatch(text):
        return text
    text = _SPLIT.sub(r"\1'", text)
    if text.lstrip()[:1] in tuple(_FORMULA):
        return f"'{text}"
    return text


def csv_bytes(table: pd.DataFrame, **options: object) -> bytes:
    """Return the bytes of a table as a CSV file, without its index.

    Texts and names of columns are made safe for spreadsheets (:func:`in_csv`).

    >>> import pandas as pd
    >>> table = pd.DataFrame({"class": ["-1", "+1", None], "x": [-0.5, None, 2.0]})
    >>> csv_bytes(table) == table.to_csv(index=False).encode()
    True
    >>> csv_bytes(table, float_format="%.2f").splitlines()[1]
    b'-1,-0.50'

    Args:
        table: the table, which is not changed.
        options: further arguments of pandas' ``DataFrame.to_csv``.
    """
    safe_table = table.set_axis([in_csv(name) for name in table.columns], axis=1)
    safe_table = safe_table.apply(
        lambda column: (
            column
            if column.dtype.kind in "biufc"
            else column.astype(object).map(in_csv)
        )
    )
    return str(safe_table.to_csv(index=False, **options)).encode()


def in_file_name(text: str) -> str:
    """Return a file name for a text. A changed name ends in a digest, so that names stay distinct.

    Other characters than letters, digits and a few signs become underscores. A long
    text is cut.

    >>> in_file_name("macro_f1_clients"), in_file_name("../x")
    ('macro_f1_clients', 'x-d6b96a97')
    >>> [name for name in ("cleveland", "Sao Paulo", "Köln", "prompts.0") if name != in_file_name(name)]
    []
    """
    readable_part = (
        re.sub(r"[^\w.,=+ -]", "_", text)[:_LONGEST].lstrip("._- ").rstrip(". ")
    )
    if readable_part == text:
        return text
    name_start = readable_part or "name"
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{name_start}-{digest}"
