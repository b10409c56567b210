"""What tests of processes share; it imports nothing heavy."""

from pathlib import Path


def alive(pid):
    """Whether a process still runs; one that has ended and waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
