"""Tests of the package, with a way to type its commands."""

from fedlayers.cli import app


def command(line):
    """Run a line as a command in this process."""
    app.main(line.split())
