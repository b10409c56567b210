"""Shows where the tests' time goes, from a report of pytest.

PYTEST_ADDOPTS=--junitxml=out/tests.xml make test
python -m benchmarks.suite out/tests.xml
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd

BY = ("folder", "file", "test")


def times(report: Path) -> pd.DataFrame:
    """Return the seconds of each test case, with its folder, file and function."""
    lines = []
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").partition(".Test")[0]
        folder = ".".join(file.split(".")[:2])
        test = f"{file}::{case.get('name', '').partition('[')[0]}"
        lines.append((folder, file, test, float(case.get("time", "0"))))
    return pd.DataFrame(lines, columns=[*BY, "seconds"])


def tables(found: pd.DataFrame, rows: int = 25) -> str:
    """Return the number and the seconds of all tests, and the slowest folders, files and functions."""
    parts = [
        f"{len(found):,} tests, {found['seconds'].sum():,.0f} seconds in all processes together"
    ]
    for by in BY:
        sums = (
            found.groupby(by)["seconds"]
            .agg(["count", "sum", "max"])
            .nlargest(rows, "sum")
            .round(1)
        )
        parts.append(sums.to_string())
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(tables(times(Path(sys.argv[1]))))
