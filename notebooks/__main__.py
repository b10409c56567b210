"""python -m notebooks [NAME ...]: execute the notebooks anew and store them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from fl_core.errors import RunError, UsageError, check_known
from notebooks.execute import executed, names, store, tidied


def main(asked: list[str]) -> int:
    """Execute the named notebooks, or all, with the data below ``FEDLAYERS_DATA_ROOT`` where that is set."""
    try:
        for name in [
            check_known("notebook", name, names()) for name in asked
        ] or names():
            with tempfile.TemporaryDirectory() as folder:
                notebook = tidied(
                    executed(name, Path(folder), os.environ.get("FEDLAYERS_DATA_ROOT"))
                )
            print(f"{name}: {store(name, notebook):,} bytes")
    except (UsageError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
