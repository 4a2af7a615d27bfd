"""What every script shares and nobody comes to read: errors as sentences, options, files, progress, signals,
how a script starts under MPI, work in several processes, which sizes of a model are refused, and the English inside
Python (the last section).

Read before it: nothing.  Nothing here explains a language model: skip it, and come back when one of its names
puzzles you.  It needs the standard library alone.

What it does not do: it computes nothing of a model.
"""
import os
import sys


def stopped(kind, error, trace):
    """In place of sys.excepthook: what Ctrl-C says while a script still imports, which takes a second or two.
    So the scripts import this file before the large ones."""
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, trace)
    print("Stopped.", file=sys.stderr)
    os._exit(130)


sys.excepthook = stopped

import argparse
import ast
import errno
import functools
import glob
import hashlib
import itertools
import json
import math
import mmap
import re
import shutil
import signal
import threading
import time
import warnings
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from os.path import dirname


def newest_checkpoint(instead):
    """The folder in out/ whose weights were written last.  instead: what else the user can do, for the error
    message where there is no such folder."""
    weights = glob.glob("out/*/model.safetensors")
    require(weights, f"there is no trained model in out/: run `make` or `python train.py`, or {instead}.")
    return dirname(max(weights, key=os.path.getmtime))


def require(good, sentence):
    """Raise a ValueError with this sentence if `good` is false."""
    if not good:
        raise ValueError(sentence)


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


def check_text(path):
    """ValueError for a file that is no text in UTF-8, by its first megabyte.  Up to one byte in a thousand may
    be damaged; such bytes are kept, and learned like any others."""
    start = read_chunk(path, 0, 1 << 20)
    require(start, f"{path} is empty: there is no text in it.")
    damaged = re.findall("[\0\udc80-\udcff]", start.decode("utf-8", "surrogateescape"))
    kind = "UTF-16, or binary (it holds NUL bytes)" if "\0" in damaged else "Latin-1 or Windows-1252"
    require(1000 * len(damaged) <= len(start), f"{path} is no text in UTF-8: it seems to be {kind}.")


def read_json(path):
    """The value in a JSON file.  ValueError, in one sentence, if the file holds none."""
    data = read_chunk(path)
    with refusing(f"{path} is damaged: it is no JSON"):
        return json.loads(data.decode())


def json_values(path):
    """-> list of the values in a file that holds one list, or one value a line.  ValueError names the line
    that is not JSON, or not UTF-8."""
    data = read_chunk(path).removeprefix(b"\xef\xbb\xbf")      # some editors mark UTF-8 with these bytes
    what = "is not JSON; the file must hold one list of records, or one record a line"
    if data.lstrip().startswith(b"["):
        with refusing(f"{path} {what}"):
            return json.loads(data.decode())
    values = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            with refusing(f"{path}, line {number}, {what}"):
                values.append(json.loads(line.decode()))
    return values


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
            print(f"{line}, {seconds:.1f} s")
    return progress


def print_step(step, parts, last):
    """The progress line.  A terminal's is rewritten in place, and without its last parts where they do not
    fit, or every step would leave a line.  Elsewhere the first step and every tenth have lines of their own.
    """
    if sys.stdout.isatty():
        while len("  ".join(parts)) >= shutil.get_terminal_size().columns and len(parts) > 1:
            parts.pop()
        print(f"\r{'  '.join(parts)}\033[K", end="\n" if last else "", flush=True)
    elif last or step == 1 or step % 10 == 0:
        print("  ".join(parts))


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
        raise argparse.ArgumentTypeError(f"must be {what}, not {text!r:.40}")
    return parse


def whole_number(least, most=10**9):
    """An argparse type: an int within these bounds."""
    return number_type(int, lambda x: least <= x <= most, f"a whole number of at least {least} and at most {most:,}")


positive = number_type(float, lambda x: 0 < x < math.inf, "a number above 0")
positive_or_inf = number_type(float, lambda x: x > 0, "a number above 0, or inf")
not_negative = number_type(float, lambda x: 0 <= x < math.inf, "a number of at least 0")
below_1 = number_type(float, lambda x: 0 <= x < 1, "at least 0 and below 1")
up_to_a_third = number_type(float, lambda x: 0 <= x <= 1 / 3, "a number from 0 to 1/3")


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


def explain(error):
    """An error as one sentence.  Control characters are replaced, so that a file's content cannot command the
    terminal.  None for a mistake of ours: its traceback should show."""
    if is_of_gpu(error):
        short = "OutOfMemory" in type(error).__name__
        advice = "  Use a smaller --micro-batch, a smaller model or --device cpu." if short else ""
        return f"The GPU: {printable(' '.join(str(error).splitlines()))}{advice}"
    if isinstance(error, OSError) and error.strerror:
        where = f"Cannot use {os.fsdecode(error.filename)}" if error.filename else "Input or output failed"
        return f"{where}: {error.strerror}."
    if isinstance(error, BrokenExecutor):
        return "A process of the tokenizer ended early.  If memory is short, allow fewer cores: taskset -c 0 python ..."
    if isinstance(error, MemoryError):
        return f"There is not enough memory ({error})." if str(error) else "There is not enough memory."
    if isinstance(error, (ValueError, OSError)):
        return printable(" ".join(str(error).splitlines()))
    return None


def is_of_gpu(error):
    return isinstance(error, GpuError) or type(error).__module__.startswith("cupy")


def run_script(main, to_the_end=False):
    """Run main(arguments) and exit with the code that it returns.  An error that the user can mend becomes
    one sentence and exit code 2.  to_the_end: the script's work is more than its output, so it goes on when
    nobody reads that."""
    # a stream is None if it was closed before the script began
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    # for characters that the terminal lacks; and a line is seen when it is printed, also where that is a file
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
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
        print("Stopped.", file=sys.stderr)
        code = 130
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        if is_of_gpu(error):
            os._exit(2)                                     # a usual exit frees GPU memory, and fails loudly
        code = 2
    sys.exit(code)


class Stop:
    """Ctrl-C, SIGTERM, or SIGHUP of a terminal that is closed ask for an end after the step under way; a
    second one leaves at once.  What is ignored when the script starts, as SIGHUP under nohup, stays
    ignored."""
    def __init__(self):
        self.signal = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.ask)

    def ask(self, number, frame):
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        # not print, which may be under way; and nobody may be there to read
        with suppress(OSError):
            os.write(sys.stderr.fileno(), b"\nFinishing the step, then saving; once more to leave at once.\n")


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


def file_hash(path):
    """The SHA-256 of a file, which may be larger than the memory, but must not be empty."""
    with open(path, "rb") as file:
        return hashlib.sha256(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).hexdigest()


def short_hash(*texts):
    return hashlib.sha256(os.fsencode(" ".join(texts))).hexdigest()[:12]


def available_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_pyplot():
    """matplotlib's pyplot, which draws to files.  ValueError, in one sentence, if matplotlib is missing."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib.") from None
    pyplot.switch_backend("Agg")
    warnings.filterwarnings("ignore", "Glyph")              # a character that the font does not have
    return pyplot


MPI_IS_MISSING = "Several processes need MPI: pip install mpi4py mpich"


def start_under_mpiexec(gpus):
    """The script starts itself anew, as that many processes."""
    # pip puts it beside Python
    mpiexec = shutil.which("mpiexec", path=f"{dirname(sys.executable)}:{os.environ.get('PATH', '')}")
    require(mpiexec, f"{MPI_IS_MISSING} (there is no mpiexec).")
    os.execv(mpiexec, [mpiexec, "-n", str(gpus), sys.executable, *sys.argv])


def set_threads():
    """The threads here are slices of the batch, a core each, so BLAS must not start its own.  It reads their
    number when NumPy loads."""
    names = "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"
    os.environ.update(dict.fromkeys(names, "1"))


def parse_size(text):
    """12GB, 800MB, 1.5GiB or a number of bytes -> bytes."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


memory_size = number_type(parse_size, lambda size: 1 <= size < 1e18, "a size such as 12GB or 800MB")


# ------------------------------------------------------------------------------------------------------------
# Work on parts of files in several processes
# ------------------------------------------------------------------------------------------------------------
# bytes; a process starts in the time that it takes to encode one or two megabytes
WORTH_A_PROCESS = 1 << 21
# bytes of a file that are looked through for a place to cut it
CUT_WINDOW = 1 << 16


def find_chunks(file, size, find_cut):
    """Cut a file into chunks of about `size` bytes -> list of (path, start, end).  file: a path, or (path,
    start, end) for a part in bytes; find_cut: bytes -> the offset into them where a cut does no harm.

    Where it is cut depends on the file alone, not on the number of processes, and each cut reads 64 KiB only.
    """
    path, start, end = file if isinstance(file, tuple) else (file, 0, os.path.getsize(file))
    places = range(start + size, end - CUT_WINDOW, size)
    cuts = [place + find_cut(read_chunk(path, place, place + CUT_WINDOW)) for place in places]
    return [(path, a, b) for a, b in itertools.pairwise([start, *cuts, end])]


def run_chunks(function, chunks, processes, progress):
    """Yield function(*chunk) of each chunk, in order, from this process, or from several where each gets
    WORTH_A_PROCESS bytes or more.

    function: one that can be pickled; chunks: list of (path, start, end); processes: None for all cores;
    progress: None, or called as progress(done bytes, all bytes) for each chunk."""
    sizes = [end - start for _, start, end in chunks]
    processes = min(processes or available_cores(), len(chunks), sum(sizes) // WORTH_A_PROCESS)
    results = itertools.starmap(function, chunks)
    if processes > 1:
        results = run_processes(function, chunks, processes)
    done = 0
    for result, size in zip(results, sizes):
        done += size
        if progress:
            progress(done, sum(sizes))
        yield result


def run_processes(function, chunks, processes):
    """Yield function(*chunk) of each chunk, in order.  Each worker gets the function once, when it starts, so
    that what it remembers between chunks, as the tokenizer's cache, is kept.  At most 64 results for each
    worker wait to be taken, so memory stays bounded."""
    size = 64 * processes
    with ProcessPoolExecutor(processes, initializer=start_worker, initargs=(function,)) as pool:
        for i in range(0, len(chunks), size):
            yield from pool.map(work, chunks[i:i + size])


def start_worker(function):
    """Runs first in a worker.  Ctrl-C is for its parent, and it ends with its parent, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    threading.Thread(target=lambda: parent.join() or os._exit(1), daemon=True).start()
    work.function = function


def work(chunk):
    """Runs in a worker.  Only this name and a chunk are sent there."""
    return work.function(*chunk)


# ------------------------------------------------------------------------------------------------------------
# The sizes of a model
# ------------------------------------------------------------------------------------------------------------
def check_config(c):
    """ValueError if the sizes of a Config do not fit together."""
    values = vars(c)
    sizes = ["dim", "heads", "kv_heads", "layers", "context", "vocab", "predict", "hidden"]
    if c.positions is not None:
        sizes.append("positions")
    for name in sizes:
        require(type(values[name]) is int and 1 <= values[name] <= 1 << 20,
                f"{name} must be a whole number from 1 to {1 << 20:,}, not {values[name]!r:.20}.")
    for name, least in (("mtp_weight", 0), ("norm_eps", 0), ("rope_theta", 1)):
        require(type(values[name]) in (int, float) and least <= values[name] <= 1e308,
                f"{name} must be a finite number of at least {least}, not {values[name]!r:.20}.")
    for name in ("dim", "hidden", "vocab"):
        require(values[name] % 8 == 0, f"{name} ({values[name]}) must be a multiple of 8.")
    require(c.vocab <= 1 << 16, f"vocab_size ({c.vocab}) is more than {1 << 16:,}: ids are uint16.")
    require(c.dim % (2 * c.heads) == 0,
            f"dim ({c.dim}) must be a multiple of 2 x heads (2 x {c.heads}): heads must divide {c.dim // 2}.")
    require(c.heads % c.kv_heads == 0,
            f"heads ({c.heads}) must be a multiple of kv_heads: {c.kv_heads} does not divide it.")
    require(c.context <= (c.positions or c.context),
            f"the context ({c.context}) cannot be more than the model's positions ({c.positions}).")
    require(c.tied is False or c.tied is True and c.predict == 1,
            f"tied must be true or false, and true needs predict 1: it is {c.tied!r:.20}, and predict {c.predict}.")


# ------------------------------------------------------------------------------------------------------------
# The English inside every Python: what the small model learns from where there is no network
# ------------------------------------------------------------------------------------------------------------
def python_docstrings():
    """Yield [(qualified name, docstring), ...] of each module of the standard library: the module's own
    first, then those of its classes and functions as they stand in the file."""
    library = dirname(os.__file__)
    others = "test tests idle_test site-packages dist-packages lib2to3".split()
    for folder, folders, _ in os.walk(library):
        folders[:] = sorted(set(folders).difference(others))
        for path in sorted(glob.glob(f"{glob.escape(folder)}/*.py")):
            module = os.path.relpath(path, library)[:-3].replace(os.sep, ".").removesuffix(".__init__")
            with suppress(SyntaxError, ValueError), open(path, encoding="utf-8") as file:
                yield list(docstrings_below(ast.parse(file.read()), module))


def docstrings_below(node, name):
    """Yield (name, docstring) of a syntax tree's node, which has that name, and of all definitions in it,
    depth first."""
    definition = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, (ast.Module, *definition)):
        docstring = ast.get_docstring(node)
        if docstring:
            yield name, docstring
    for child in ast.iter_child_nodes(node):
        yield from docstrings_below(child, f"{name}.{child.name}" if isinstance(child, definition) else name)


def is_prose(paragraph):
    """Whether a paragraph is long enough, almost all letters, and no example of code."""
    letters = sum(char.isalpha() or char in " ,.;:'-" for char in paragraph)
    return len(paragraph) >= 40 and letters > 0.9 * len(paragraph) and ">>>" not in paragraph


def write_python_corpus(path, separator):
    """About 2 MB of English that every interpreter carries: the language reference (pydoc_data.topics) and
    the docstrings of the standard library.  Prose paragraphs only, each once; a document a topic or module,
    with lines of `separator` between them."""
    import pydoc_data.topics
    documents = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    documents += ["\n\n".join(text for _, text in docstrings) for docstrings in python_docstrings()]
    seen = set()
    kept = []
    for document in documents:
        paragraphs = dict.fromkeys(" ".join(part.split()) for part in re.split(r"\n\s*\n", document))
        prose = [paragraph for paragraph in paragraphs if is_prose(paragraph) and paragraph not in seen]
        seen.update(prose)
        if prose:
            kept.append("\n\n".join(prose))
    os.makedirs(dirname(path), exist_ok=True)
    write_file(path, f"\n\n{separator}\n\n".join(kept).encode())


def find_corpus(preset, separator):
    """The files to train on when none are named: for the larger models data/books*.txt and data/web*.txt;
    else what `fetch_data.sh tiny` has brought; else the text inside Python."""
    large = sorted(glob.glob("data/books*.txt") + glob.glob("data/web*.txt"))
    if preset != "small" and large:
        return large
    if os.path.exists("data/tiny.txt"):
        return ["data/tiny.txt"]
    path = "data/python-{}.{}.txt".format(*sys.version_info)
    if not os.path.exists(path):
        print("No corpus in data/ (./fetch_data.sh brings one): taking the English of Python.")
        write_python_corpus(path, separator)
    return [path]
