"""The program ``fedlayers``, also ``python -m fedlayers``. Ctrl-C ends it with one line, even during its imports."""

from fl_core.interrupts import ending


def main() -> None:
    """Run the command line with the program's arguments."""
    with ending():
        from fedlayers.cli.main import main as command

        command()


if __name__ == "__main__":
    main()
