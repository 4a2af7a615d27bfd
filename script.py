"""What every script shares and nobody comes to read: errors as sentences, options, files, progress.

Read before it: nothing.  Nothing here is about language models: skip it, and come back when one of its names
puzzles you.  It needs the standard library alone.

What it does not do: it knows no tokens and no tensors.
"""
import argparse
import errno
import functools
import glob
import json
import os
import re
import sys
import time
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress


def newest_checkpoint(instead):
    """The folder in out/ whose weights were written last.  instead: what else the user can do, for the error
    message where there is no such folder."""
    weights = glob.glob("out/*/model.safetensors")
    require(weights, f"there is no trained model in out/: run `make` or `python train.py`, or {instead}.")
    return os.path.dirname(max(weights, key=os.path.getmtime))


def require(good, sentence, error=ValueError):
    """Raise an error with this sentence if `good` is false."""
    if not good:
        raise error(sentence)


@contextmanager
def naming(path):
    """An OSError that is raised inside names this file.  The error of a full disk, or of a failed read, names
    no file by itself."""
    try:
        yield
    except OSError as error:
        if error.strerror:                      # else it is a sentence of ours
            error.filename = error.filename or os.fspath(path)
        raise


@contextmanager
def refusing(what):
    """Inside, something is made from the content of a file.  If that fails, the error becomes one sentence:
    `what`, and the reason in brackets."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{what} ({error}).") from None


def check_plain(path):
    """ValueError for a pipe, a device or a folder in place of a file: reading it might never end."""
    require(os.path.isfile(path) or not os.path.exists(path),       # open() complains about a missing file
            f"{path} is not a plain file, so it is not read.")


def read_json(path):
    """The value in a JSON file.  ValueError, in one sentence, if the file holds none."""
    data = read_chunk(path)
    with refusing(f"{path} is damaged: it is no JSON"):
        return json.loads(data.decode("utf-8"))


@contextmanager
def replace_file(path):
    """Open a binary file for writing.  It takes the place of `path` when all is written, and not before."""
    new = f"{os.fspath(path)}.new"
    try:
        with suppress(FileNotFoundError):
            os.remove(new)    # left by a killed run; if it were a pipe, open() would wait for a reader
        with naming(new), open(new, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        with suppress(OSError):
            os.remove(new)    # it is still there only after an error


def write_file(path, data):
    """Replace the file at `path` by one with these bytes.  A crash leaves the old bytes or the new."""
    with replace_file(path) as file:
        file.write(data)


def show_progress(what, unit="MB", size=1e6):
    """-> a function progress(done, total), in bytes, or in something else of which `size` make a unit.  On a
    terminal it prints a line that rewrites itself.  Elsewhere it prints one line at the end, if there was at
    least one unit to do."""
    start = time.monotonic()

    def progress(done, total):
        seconds = max(time.monotonic() - start, 1e-9)
        line = f"{what} {done / size:,.0f} {unit}, {done / size / seconds:,.1f} {unit}/s"
        if sys.stdout.isatty():
            line += f", {100 * done / total:.0f}%, {seconds * (total - done) / max(done, 1):.0f} s left"
            print(f"\r{line} \033[K", end="\n" if done >= total else "", flush=True)
        elif done >= total >= size:
            print(f"{line}, {seconds:.1f} s", flush=True)
    return progress


class Parser(argparse.ArgumentParser):
    """argparse, but an error message is one sentence, without ten lines of usage before it."""
    def error(self, message):
        self.exit(2, f"error: {message}; --help lists the options.\n")


def number_type(kind, good, what):
    """An argparse type: kind(text), if good(value) holds for it.  Else the error is one sentence, which says
    `what` the value must be."""
    def parse(text):
        with suppress(ValueError, TypeError, OverflowError):
            value = kind(text)
            if good(value):                                 # a NaN fails every comparison
                return value
        shown = text if len(text) <= 40 else text[:40] + "..."
        raise argparse.ArgumentTypeError(f"must be {what}, not {shown!r}")
    return parse


def whole_number(least, most=10**9):
    """An argparse type: an int within these bounds."""
    what = f"a whole number of at least {least} and at most {most:,}"
    return number_type(int, lambda x: least <= x <= most, what)


def to_nowhere(stream):
    """From now on, what is written to this stream is lost."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Outliving:
    """The standard output or error of a script that must finish its work even if nobody reads its output.
    When the reader has left, as `head` does, or a terminal that is closed, the output goes nowhere."""
    def __init__(self, stream):
        self.stream = stream or open(os.devnull, "w")

    def __getattr__(self, name):
        found = getattr(self.stream, name)
        return functools.partial(self.survive, found) if name in ("write", "flush") else found

    def survive(self, function, *arguments):
        try:
            function(*arguments)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO): # a full disk, for example
                raise
            to_nowhere(self.stream)


class GpuError(RuntimeError):
    """CUDA, or a library of CUDA, refuses a call."""


# Errors that a user can do something about.  Any other error is a mistake of ours, and shows its traceback.
MENDABLE = ValueError, OSError, MemoryError, BrokenExecutor


def explain(error):
    """An error as one sentence.  It may quote a file, so it holds no control characters for the terminal."""
    if isinstance(error, OSError) and error.strerror:
        where = f"Cannot use {os.fsdecode(error.filename)}" if error.filename else "Input or output failed"
        return f"{where}: {error.strerror}."
    if isinstance(error, BrokenExecutor):
        return "A process of the tokenizer ended early; if memory is short, use fewer processes."
    if isinstance(error, MemoryError):
        return f"There is not enough memory{f' ({error})' if str(error) else ''}."
    return printable(" ".join(str(error).splitlines()))


def run_script(main, to_the_end=False):
    """Run main(arguments) and exit with the code that it returns.  An error that the user can mend becomes
    one sentence and exit code 2.  to_the_end: the script's work is more than its output, so it goes on when
    nobody reads that."""
    # a stream is None if it was closed before the script began
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stdout.reconfigure(errors="backslashreplace")       # for characters that the terminal lacks
    sys.stderr = Outliving(sys.stderr)
    if to_the_end:
        sys.stdout = Outliving(sys.stdout)
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:                                 # the reader has seen enough
        to_nowhere(sys.stdout)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        of_gpu = isinstance(error, GpuError) or type(error).__module__.startswith("cupy")
        if not of_gpu and not isinstance(error, MENDABLE):
            raise
        where = "The GPU: " if of_gpu else ""
        print(f"error: {where}{explain(error)}", file=sys.stderr, flush=True)
        if of_gpu:
            os._exit(2)                                     # a usual exit frees GPU memory, and fails loudly
        code = 2
    sys.exit(code)


def printable(text):
    """A text in which U+FFFD stands for each control character but tab and line end: a terminal would obey
    those instead of showing them."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def read_chunk(path, start=0, end=None):
    """Bytes [start, end) of a plain file; by default all bytes."""
    check_plain(path)
    with naming(path), open(path, "rb") as file:
        file.seek(start)
        return file.read(-1 if end is None else end - start)


def available_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_pyplot():
    """matplotlib's pyplot, which draws to files.  ValueError, in one sentence, if matplotlib is missing."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib.") from None
    pyplot.switch_backend("Agg")
    return pyplot
