"""The program ``fedlayers``, also as ``python -m fedlayers``: Ctrl-C ends it with one line from its first import on."""

from fl_core.interrupts import ending


def main() -> None:
    """Run the command line on the program's arguments."""
    with ending():
        from fedlayers.cli.main import main as command

        command()


if __name__ == "__main__":
    main()
