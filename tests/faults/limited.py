"""A call in a child process, with limits of memory and of the processor's time."""

import os
import resource
from pathlib import Path

SECONDS, MEGABYTES = 5, 512


def growth():
    """Return the resident megabytes now and at most, and those that are set aside for data."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    names = ("VmRSS", "VmHWM", "VmData")
    return [int(fields[name].split()[0]) // 1024 for name in names]


def limited(act, *errors):
    """Call in a fork. Return the message of an error, or why the child ended, and its megabytes and seconds."""
    reads, writes = os.pipe()
    if child := os.fork():
        os.close(writes)
        with os.fdopen(reads) as pipe:
            answer = pipe.read()
        status, used = os.wait4(child, 0)[1:]
        seconds = used.ru_utime + used.ru_stime
        text, _, memory = answer.rpartition("\n")
        return text or f"ended by {status}", int(memory or MEGABYTES), seconds
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before, _, data = growth()
        most = (data + 2 * MEGABYTES) * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        try:
            act()
            text = "no error"
        except errors as error:
            text = str(error)
        except BaseException as error:
            text = f"raw: {type(error).__name__}: {error}"
        os.write(writes, f"{text}\n{growth()[1] - before}".encode(errors="replace"))
    finally:
        os._exit(0)
