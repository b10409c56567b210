"""The program ``fedlayers``, also ``python -m fedlayers``. Ctrl-C ends it with one line, even during its imports."""

import os

from fl_core.progress import end_on_signals


def main() -> None:
    """Run the command line with the program's arguments."""
    # threads that wait for a core let others have it
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with end_on_signals():
        from fedlayers.cli.app import main as command

        command()


if __name__ == "__main__":
    main()
