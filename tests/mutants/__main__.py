"""Run each stored mutant against the tests that reach it: ``make mutants``.

A mutant is one small change of one function. It is killed if a test fails. Its state is stored next to it. One whose
code is gone is removed. The exit code is 1 if a mutant lives that was killed before.
"""

import argparse
import subprocess
import sys
from contextlib import ExitStack
from itertools import islice

from tests.mutants.changes import PACKAGES, draw
from tests.mutants.running import (
    ROOT,
    copied_tree,
    exists,
    load,
    reach,
    run_all,
    store,
)


def main():
    """Draw mutants, or run the stored ones."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__
    )
    parser.add_argument(
        "--draw",
        type=int,
        metavar="N",
        help="draw N mutants that tests reach, in place of the stored",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--since",
        metavar="COMMIT",
        help="draw from files that changed since a commit, next to the stored",
    )
    parser.add_argument(
        "--reach",
        action="store_true",
        help="first find the tests of survivors again, and of those that lost some",
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    arguments = parser.parse_args()
    if arguments.draw:
        files, stored = None, []
        if arguments.since:
            command = ["git", "diff", "--name-only", arguments.since, "--", *PACKAGES]
            changed = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=True
            )
            files, stored = changed.stdout.splitlines(), load()
        with copied_tree() as tree:
            mutants = list(
                islice(draw(tree, arguments.seed, files), arguments.draw * 4 // 3)
            )
            reach(mutants, tree)
        reached = [mutant for mutant in mutants if mutant.tests]
        store(stored + reached[: arguments.draw])
        return 0
    mutants = load()
    if arguments.reach:
        with copied_tree() as tree:
            lost = [
                mutant
                for mutant in mutants
                if not all(exists(test, tree) for test in mutant.tests)
            ]
            reach(
                lost
                + [
                    mutant
                    for mutant in mutants
                    if mutant.state == "survived" and mutant not in lost
                ],
                tree,
            )
    with ExitStack() as stack:
        good = run_all(
            mutants, [stack.enter_context(copied_tree()) for _ in range(arguments.jobs)]
        )
    store([mutant for mutant in mutants if mutant.state != "gone"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
