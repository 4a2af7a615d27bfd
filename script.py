"""What every script shares: errors, options, files, processes.

    1. errors              they become sentences
    2. running a script    options, output, progress, signals
    3. plain files         texts and records are read; a file is written whole or not at all
    4. parts of files      several processes of one machine work on them, for tokenizer.py
    5. ranks               several processes train one model (MPI)
    6. sizes               which sizes of a model are refused
    7. texts               what is made without a network: conversations of a play, the English inside Python

Read before it: nothing.  Almost nothing here explains a language model: skip it, and come back for the forms of records
(section 3: make_turns, make_pair) and for how several processes train one model (section 5).  It needs only the
standard library, and mpi4py where there are several processes.

What it does not do: it computes nothing of a model.
"""
import argparse
import ast
import dataclasses
import glob
import hashlib
import itertools
import json
import mmap
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from os.path import dirname, exists, getmtime, getsize, isdir, isfile, splitext


# ------------------------------------------------------------------------------------------------------------
# 1. Errors as sentences
# ------------------------------------------------------------------------------------------------------------
def require(good, sentence):
    """Raise a ValueError with this sentence if `good` is false."""
    if not good:
        raise ValueError(sentence)


@contextmanager
def refusing(what):
    """with refusing("FILE is damaged"): an error in this block, which uses the content of a file, becomes one line:
    "FILE is damaged (the reason)."  OSError and MemoryError pass: `explain` has sentences for
    them.  (SystemExit: a user's reward may call sys.exit.)"""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{what} ({reason}).") from None


class GpuError(RuntimeError):
    """CUDA, or a library of CUDA, refuses a call."""


def is_of_gpu(error):
    return isinstance(error, GpuError) or type(error).__module__.startswith("cupy")


def printable(text):
    """-> the text with U+FFFD in place of each control character except tab and line end.  A terminal would obey such a
    character instead of showing it."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def visible(token):
    r"""The bytes of a token as printable text: a line end as \n or \r, a tab as \t, a backslash as \\, and any other
    byte that cannot be seen as \xNN."""
    text = token.replace(b"\\", rb"\\").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else repr(char.encode())[2:-1] for char in text)


def explain(error):
    """-> a line about an error that the user can mend.  None for a mistake of ours: its traceback should show."""
    words = printable(" ".join(str(error).splitlines()))
    if is_of_gpu(error):
        advice = "  Use a smaller --micro-batch, a smaller model or --device cpu."
        return f"The GPU: {words}{advice if isinstance(error, MemoryError) else ''}"
    if isinstance(error, OSError) and error.strerror:
        where = f"Cannot use {error.filename}" if error.filename else "Input or output failed"
        word = re.search("(?:data|out)/(tiny|books|web|instructions|preferences|blimp|smollm2)", where)
        advice = f"  ./fetch_data.sh {word[1]} brings it." if word and isinstance(error, FileNotFoundError) else ""
        return printable(f"{where}: {error.strerror}.{advice}")
    if isinstance(error, BrokenExecutor):
        return "A process of the tokenizer ended early.  If memory is short, allow fewer cores: taskset -c 0 python ..."
    if isinstance(error, MemoryError):
        return f"There is not enough memory ({words})."
    return words if isinstance(error, (ValueError, OSError)) else None


# ------------------------------------------------------------------------------------------------------------
# 2. How a script runs: options, output, signals
# ------------------------------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """argparse, but an error message is one line, without ten lines about usage before it."""
    def parse_args(self, arguments):
        for argument in arguments:
            if argument.endswith("=--"):        # argparse takes --data=-- for --data without a value
                self.error(f"{argument} has no value")
        return super().parse_args(arguments)

    def error(self, message):
        self.exit(2, f"error: {message}; --help lists the options.\n")


def bounded(kind, least, most):
    """An argparse type: a number of this kind, int or float, within these bounds."""
    def parse(text):
        with suppress(ValueError):
            value = kind(text)
            if least <= value <= most:                      # a NaN fails every comparison
                return value
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {what} from {least:,} to {most:,}, not {text!r:.40}")
    return parse


def whole_number(least, most=10**9):
    """An argparse type: an int within these bounds."""
    return bounded(int, least, most)


def read_fields(kind, record):
    """-> an object of a dataclass from a dict of its fields, such as JSON holds.  An error for a field that is missing,
    of another type, or out of the bounds in its metadata."""
    for field in dataclasses.fields(kind):
        value = record[field.name]
        possible = field.metadata.get("choices", [value])       # without choices any value is
        require(type(value) is field.type and value in possible, f"{field.name} is {value!r:.40}")
        field.metadata.get("type", str)(str(value))             # argparse's type: an error outside the bounds
    return kind(**record)


def option_of(name):
    """"batch_tokens" -> "--batch-tokens"."""
    return "--" + name.replace("_", "-")


def outlive_reader(stream):
    """Let a script finish its work even if nobody reads this stream, its standard output or error.  If the reader
    leaves, as in `train.py | head`, or if the terminal is closed, what is written is thrown away."""
    write = stream.write

    def write_or_lose(text):
        try:
            write(text)
        except OSError:
            to_nowhere(stream)
    stream.write = write_or_lose


def to_nowhere(stream):
    """From now on, what is written to this stream is lost."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run_script(main, to_the_end=False):
    """Run main(arguments) and exit with the code that it returns.  An error that the user can mend becomes
    one line and exit code 2.  to_the_end: the script's work is more than its output, so it goes on when
    nobody reads that."""
    # a stream is None if it was closed before the script began
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    outlive_reader(sys.stderr)
    # Characters that the terminal lacks are printed as escapes, and each line is written at once, also to a file.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    if to_the_end:
        outlive_reader(sys.stdout)
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
            os._exit(2)                                     # after such an error the usual exit prints more errors
        code = 2
    sys.exit(code)


class Stop:
    """Ctrl-C and SIGTERM ask the loop to stop after the step that it works on, and so does SIGHUP, which a terminal
    sends when it is closed.  (Several GPUs stop when they report, at most ten steps later.)  A second signal ends the
    process at once.  A signal that is ignored when the script starts, such as SIGHUP under nohup, stays ignored."""
    def __init__(self):
        self.signal = None
        hangup = getattr(signal, "SIGHUP", signal.SIGINT)               # Windows has no SIGHUP
        for number in (signal.SIGINT, signal.SIGTERM, hangup):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.ask)

    def ask(self, number, frame):
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        # The signal may have come in the middle of a print, so this does not print.  Perhaps nobody is there to read.
        with suppress(OSError):
            os.write(sys.stderr.fileno(), b"\nFinishing the step, then saving; once more to leave at once.\n")


def show_progress(what):
    """-> a function progress(done, total).  Both count bytes, or rows, or tokens.  On a terminal it prints a line that
    rewrites itself, and disappears when done is total.  Elsewhere it prints nothing."""
    start = time.monotonic()

    def progress(done, total):
        if sys.stdout.isatty():
            left = (time.monotonic() - start) * (total - done) / max(done, 1)
            line = f"{what}: {done:,} of {total:,}, {100 * done / total:.0f}%, {left:.0f} s left"
            rewrite_line(line if done < total else "", "")
    return progress


def print_step(step, parts, last):
    """Print the progress line of a step.  On a terminal it is rewritten in place.  Elsewhere the first step, every
    tenth, and the last one before a save or a stop have a line each."""
    line = "  ".join(filter(None, parts))
    if sys.stdout.isatty():
        rewrite_line(line, "\n" if last else "")
    elif last or step == 1 or step % 10 == 0:
        print(line)


def print_record(record, in_full):
    """Print the record of an evaluation: its numbers, those of each kind of text if there are several, and the samples,
    one line of each or in full."""
    words = [f"{name} {value:.4f}" for name, value in record.items() if isinstance(value, float)]
    kinds = record.get("val", {})
    if len(kinds) > 1:
        words += [f"{name} {loss:.4f} {bpb:.4f}" for name, (loss, bpb) in kinds.items()]
    margin = " " * 11
    print(textwrap.fill(", ".join(words), 79, initial_indent=margin, subsequent_indent=margin))
    for title, text in record["samples"]:
        print(f"--- {printable(title)}\n{printable(text)}" if in_full else
              f"{margin}{printable(title)!r:.24} {printable(text)!r:.42}")


def rewrite_line(line, end):
    """Print a line over the last one.  It is cut between two words if it is too long for the terminal, because a line
    that breaks cannot be rewritten."""
    line = textwrap.shorten(line, shutil.get_terminal_size().columns - 1, placeholder="")
    print(f"\r{line}\033[K", end=end, flush=True)


def available_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def set_threads():
    """Let BLAS use one thread.  model_cpu.py cuts the batch into slices and gives each slice a core, so BLAS must not
    start threads of its own.  BLAS reads these variables when NumPy loads."""
    names = "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"
    os.environ.update(dict.fromkeys(names, "1"))


def newest_checkpoint():
    """-> the folder in out/ whose weights were written last."""
    weights = glob.glob("out/*/model.safetensors")
    require(weights, "there is no trained model in out/: run `make` or `python train.py`, or name a folder.")
    return dirname(max(weights, key=getmtime))


# ------------------------------------------------------------------------------------------------------------
# 3. Plain files
# ------------------------------------------------------------------------------------------------------------
def read_chunk(path, start=0, end=None):
    """Bytes [start, end) of a file; by default all bytes.  ValueError for a folder; for a pipe or a device, whose
    reading might never end; and for the few lines of text that Git LFS leaves in the place of a large file."""
    require(not isdir(path), f"{path} is a folder; name the files in it, such as {path}/*.")
    require(isfile(path) or not exists(path),       # open() complains about a missing file
            f"{path} is not a plain file, so it is not read.")
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(-1 if end is None else end - start)
    require(start or not data.startswith(b"version https://git-lfs"),
            f"{path} is a pointer of Git LFS, and not the file: run `git lfs pull` in its folder.")
    return data


def holds_records(path):
    """Whether a file is one of records, by its name: .json and .jsonl are one kind."""
    return path.lower().endswith((".json", ".jsonl"))


def check_text(path):
    """ValueError for a file that is no text in UTF-8, as far as its first megabyte shows.  One byte in a thousand may
    be damaged: a few such bytes are kept, and learned like any others."""
    require(not holds_records(path), f"{path} holds records, not a text: sft.py and rl.py learn from records.")
    start = read_chunk(path, 0, 1 << 20)
    # a tenth is held out, and that must be a byte at least
    require(len(start) > 9, f"{path} is empty, or almost: there is no text in it.")
    damaged = re.findall("[\0\udc80-\udcff]", start.decode("utf-8", "surrogateescape"))
    kind = "UTF-16, or binary (it holds NUL bytes)" if "\0" in damaged else "Latin-1 or Windows-1252"
    require(1000 * len(damaged) <= len(start), f"{path} is no text in UTF-8: it seems to be {kind}.")


def with_plain_lines(path):
    """-> the path of the same text with line ends "\\n" and without a byte order mark: this path, or that of a copy in
    data/.  Otherwise a model would learn the line ends of Windows, "\\r\\n"."""
    check_text(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(b"\r") < 0 and data[:3] != b"\xef\xbb\xbf":
            return path
    copy = f"data/plain-{hash_files([path])}.txt"
    if not exists(copy):
        # Python's way to read text turns \r\n and \r into \n, and utf-8-sig drops the mark
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as text, replace_file(copy) as new:
            for line in text:
                new.write(line.encode("utf-8", "surrogateescape"))
    return copy


def read_json(path):
    """The value in a JSON file.  ValueError, in one sentence, if the file holds none."""
    data = read_chunk(path)
    with refusing(f"{path} is damaged: it is no JSON"):
        return json.loads(data.decode())


def json_values(path):
    """-> list of the values in a file that holds one list, or one value a line.  ValueError names the first line that
    is no value by itself."""
    data = read_chunk(path).removeprefix(b"\xef\xbb\xbf")      # some editors mark UTF-8 with these bytes
    with suppress(ValueError, RecursionError):                  # then it may be one value a line
        values = json.loads(data.decode())
        if isinstance(values, list):
            return values
    values = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            with refusing(f"{path}, line {number}, is not JSON; the file must hold one list of records, or one record "
                          "a line"):
                values.append(json.loads(line.decode()))
    return values


def read_records(paths, make):
    """-> [make(record), ...] of all records in these files.  ValueError names the first record that cannot be used."""
    values = []
    for path in paths:
        for number, record in enumerate(json_values(path), 1):
            with refusing(f"{path}, record {number}, cannot be used"):
                values.append(make(record))
    require(values, f"{', '.join(paths)}: there is no record.")
    return values


def make_turns(record):
    """A record -> a conversation: (system text or None, [(user text, response), ...]), every text as it stands.  The
    forms of a record are
        {"instruction", "input" (may be missing), "output"}
        {"prompt", "completion"}: two texts, or two lists of messages
        {"messages": [{"role", "content"}, ...]}, or the list alone.
    ValueError for another record."""
    if isinstance(record, list):
        record = {"messages": record}
    # The last form fits no record.  It stands in the error's sentence, to say what rl.py can read
    check_names(record, "instruction and output", "prompt and completion", "messages",
                "for rl.py prompt, chosen, rejected")
    if "messages" in record:
        return make_conversation(as_messages(record["messages"], "user"))
    if "instruction" in record:
        question = "\n\n".join(filter(None, [record["instruction"], record.get("input")]))
        return make_conversation([("user", question), ("assistant", record["output"])])
    prompt = as_messages(record["prompt"], "user")
    return make_conversation(prompt + as_messages(record["completion"], "assistant"))


def make_pair(record):
    """{"prompt", "chosen", "rejected"} -> (the conversation with the chosen answer, the rejected text).  Each is a
    text or a list of messages.  chosen and rejected may begin with the prompt's messages, and the prompt may then be
    missing.  ValueError for all else."""
    check_names(record, "chosen and rejected")
    chosen = as_messages(record["chosen"], "assistant")
    rejected = as_messages(record["rejected"], "assistant")
    prompt = as_messages(record["prompt"], "user") if "prompt" in record else chosen[:-1]
    require(prompt, f"it has {', '.join(record)}, and no prompt")
    for messages in (chosen, rejected):
        require(messages[:-1] in ([], prompt), "an answer must be one message, or begin with the prompt's messages")
    make_conversation([*prompt, rejected[-1]])                      # ValueError for what is none
    return make_conversation([*prompt, chosen[-1]]), rejected[-1][1]


def check_names(record, *forms):
    """ValueError if the record fits none of the forms.  It fits "instruction and output" if it has both names."""
    names = record if isinstance(record, dict) else ()
    complete = [form for form in forms if set(form.split(" and ")) <= set(names)]
    require(complete, f"it has {', '.join(names) or 'no names'}, and needs {', or '.join(forms)}")


def as_messages(value, role):
    """A text of this role, or a list of messages -> [(role, text), ...]."""
    if isinstance(value, str):
        return [(role, value)]
    for message in value:
        check_names(message, "role and content")
    return [(message["role"], message["content"]) for message in value]


def make_conversation(messages):
    """[(role, text), ...] -> a conversation.  ValueError where user and assistant do not take turns."""
    system = None
    if messages and messages[0][0] == "system":
        _, system = messages.pop(0)
    roles = [role for role, _ in messages]
    texts = [text for _, text in messages]
    require(roles and roles == ["user", "assistant"] * (len(roles) // 2), "user and assistant must take turns")
    # from an empty response a model would learn to be silent
    require(all(isinstance(text, str) for text in texts) and all(map(str.strip, texts[1::2])), "a message has no text")
    return system, list(zip(texts[::2], texts[1::2]))


def find_corpus(preset):
    """The files to train on when none are named: for the larger models data/books*.txt and data/web*.txt;
    else what `fetch_data.sh tiny` has brought; else the English inside Python."""
    large = sorted(glob.glob("data/books*.txt") + glob.glob("data/web*.txt"))
    if preset != "small" and large:
        return large
    if exists("data/tiny.txt"):
        return ["data/tiny.txt"]
    if not exists("data/english.txt"):
        print("There is no data/tiny.txt (./fetch_data.sh tiny brings it; --data names another text): taking the "
              "English of Python.")
        make_english()
    return ["data/english.txt"]


def tokenizer_sample(parts):
    """What a tokenizer is trained on: all of these parts of files, (path, 0, end).  If they are more than 100 MB, it is
    about a hundred pieces of 1 MB from all over them.  These show as well as gigabytes which pairs are frequent."""
    total = sum(end for *_, end in parts)
    if total <= 100_000_000:
        return parts
    return [(path, place, min(place + 1_000_000, end))
            for path, _, end in parts
            for place in range(0, end, total // 100)]


@contextmanager
def replace_file(path):
    """Open a binary file for writing.  It takes the place of `path` when all is written, and not before.  Its name has
    the number of the process, because two runs may make the same tokens at the same time."""
    new = f"{os.fspath(path)}.{os.getpid()}.new"
    os.makedirs(dirname(new) or ".", exist_ok=True)
    try:
        with open(new, "wb") as file:
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


def file_hash(path):
    """The SHA-256 of a file, which may be larger than the memory, but must not be empty."""
    with open(path, "rb") as file:
        return hashlib.sha256(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).hexdigest()


def hash_files(paths):
    """A fingerprint of these files."""
    return short_hash(" ".join(map(file_hash, paths)))


def short_hash(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------------------
# 4. Work on parts of files in several processes
# ------------------------------------------------------------------------------------------------------------
WORTH_A_PROCESS = 1 << 21   # bytes.  To start a process takes as long as to encode one or two megabytes.
CUT_WINDOW = 1 << 16        # bytes of a file in which a place to cut it is looked for


def find_chunks(file, size, find_cut):
    """Cut a file into chunks of about `size` bytes -> list of (path, start, end).  file: a path, or (path,
    start, end) for a part in bytes; find_cut: bytes -> the offset into them where a cut does least harm.

    Where it is cut depends on the file alone, not on the number of processes, and each cut reads 64 KiB only.
    """
    path, start, end = file if isinstance(file, tuple) else (file, 0, getsize(file))
    places = range(start + size, end - CUT_WINDOW, size)
    cuts = [place + find_cut(read_chunk(path, place, place + CUT_WINDOW)) for place in places]
    return [(path, a, b) for a, b in itertools.pairwise([start, *cuts, end])]


def run_chunks(function, chunks, progress):
    """Yield function(*chunk) of each chunk, in order.  It works in a process for each core if each gets at least
    WORTH_A_PROCESS bytes, else in fewer, or in this one.

    function: one that can be pickled; chunks: list of (path, start, end);
    progress: None, or called as progress(done bytes, all bytes) for each chunk."""
    sizes = [end - start for _, start, end in chunks]
    processes = min(available_cores(), len(chunks), sum(sizes) // WORTH_A_PROCESS)
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
    """Yield function(*chunk) of each chunk, in order.  Each worker gets the function once, when it starts.  So it keeps
    what the function remembers between chunks, such as the tokenizer's cache.  At most 64 results a worker wait to be
    taken, so memory stays bounded."""
    size = 64 * processes
    with ProcessPoolExecutor(processes, initializer=start_worker, initargs=(function,)) as pool:
        for i in range(0, len(chunks), size):
            yield from pool.map(work, chunks[i:i + size])


def start_worker(function):
    """Runs first in a worker.  The worker ignores Ctrl-C, which is for its parent, and ends when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    # join waits for the end of the parent, and returns None: then os._exit is called
    threading.Thread(target=lambda: parent.join() or os._exit(1), daemon=True).start()
    work.function = function


def work(chunk):
    """Runs in a worker.  Only this name and a chunk are sent there."""
    return work.function(*chunk)


# ------------------------------------------------------------------------------------------------------------
# 5. Several processes: data parallel training
# ------------------------------------------------------------------------------------------------------------
# A process of a run is called a rank.  Each rank has all the weights and takes its slice of a step's rows.  The loss is
# a sum over all targets, divided by their number in the whole step.  So its gradient is the sum of the gradients of the
# slices.  The ranks add up their gradients (an all-reduce) and make the same update, so the weights stay the same on
# all ranks.  Only rank 0 prints (and a rank that fails), logs and saves.
#
# How a gradient gets from rank to rank: after the step's last micro-batch Model.backward calls
# model.communicator.all_reduce with the gradient of all parameters, which is one flat array.  The communicator is the
# object of the class Ranks, below, where the ranks are CPUs: MPI sums.  Where they are GPUs it is one of the class Nccl
# in model_gpu.py: NVIDIA's NCCL sums.  (train.open_run sets it.)
#
# MPI also starts the ranks, carries their messages, and ends all ranks when one dies.

# The variables in which a launcher writes how many ranks there are: of MPICH and Intel MPI, of Open MPI, of srun.
RANK_COUNTS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


class Ranks:
    """The processes of a run.  world: mpi4py's communicator, or None where there is one process."""
    def __init__(self, world=None, local=0):
        self.world = world
        self.rank = world.rank if world else 0
        self.size = world.size if world else 1
        self.local = local                          # the rank's number on its host

    def meet(self):
        """Wait for all ranks.  MPI itself would wait in a busy loop, which takes a core from the ranks that still work.
        This loop sleeps between two looks."""
        if self.world:
            request = self.world.Ibarrier()
            while not request.Test():
                time.sleep(0.0005)

    def all_gather(self, value):
        """-> [value of rank 0, value of rank 1, ...], on every rank."""
        if not self.world:
            return [value]
        self.meet()
        return self.world.allgather(value)

    def all_reduce(self, array):
        """A NumPy array becomes its sum over all ranks."""
        if self.world:
            from mpi4py import MPI
            self.meet()
            self.world.Allreduce(MPI.IN_PLACE, array)

    def part(self, count):
        """-> the slice of `count` rows that this rank takes.  It is empty for some ranks if there are more ranks than
        rows."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)


def run_ranks(run):
    """-> run(ranks), where ranks are the processes that mpiexec or srun has started, or this process alone.  A rank
    that fails prints its error and ends all ranks.  All ranks but 0 wait for a second before they print: so if all fail
    alike, only rank 0 prints."""
    if not any(int(os.environ.get(name, 1)) > 1 for name in RANK_COUNTS):
        return run(Ranks())
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"Several processes need MPI: pip install mpi4py mpich ({error}).") from None
    world = MPI.COMM_WORLD
    stderr = sys.stderr
    if world.rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")             # rank 0 alone prints
    try:
        return run(Ranks(world, world.Split_type(MPI.COMM_TYPE_SHARED).rank))
    except BaseException as error:
        time.sleep(min(world.rank, 1))
        sentence = explain(error) or "".join(traceback.format_exception(error))
        print(f"error: rank {world.rank}: {sentence}", file=stderr, flush=True)
    time.sleep(0.3)                                 # until mpiexec has passed the word on
    world.Abort(2)


# ------------------------------------------------------------------------------------------------------------
# 6. The sizes of a model
# ------------------------------------------------------------------------------------------------------------
def check_config(c):
    """ValueError if the sizes of a Config do not fit together."""
    sizes = [c.dim, c.heads, c.kv_heads, c.layers, c.context, c.vocab, c.predict, c.hidden]
    require(all(type(size) is int and 1 <= size <= 1 << 20 for size in sizes),
            f"sizes must be whole numbers from 1 to {1 << 20:,}: {c}.")
    numbers = [c.mtp_weight, c.norm_eps, c.rope_theta]
    require(all(type(number) in (int, float) and 0 <= number < 1e308 for number in numbers),
            f"mtp_weight, norm_eps and rope_theta must be finite numbers, not negative: {c}.")
    for name in ("dim", "hidden", "vocab"):
        value = getattr(c, name)
        require(value % 8 == 0, f"{name} ({value}) must be a multiple of 8.")
    require(c.vocab <= 1 << 16, f"vocab_size ({c.vocab}) is more than {1 << 16:,}: ids are uint16.")
    require(c.dim % (2 * c.heads) == 0,
            f"dim ({c.dim}) must be a multiple of 2 x heads (2 x {c.heads}): heads must divide {c.dim // 2}.")
    require(c.heads % c.kv_heads == 0,
            f"heads ({c.heads}) must be a multiple of kv_heads: {c.kv_heads} does not divide it.")
    require(c.predict == 1 or not c.tied, f"a tied head needs predict 1, not {c.predict}.")


# ------------------------------------------------------------------------------------------------------------
# 7. What is made without a network
# ------------------------------------------------------------------------------------------------------------
# Conversations from a play, and a text from Python's documentation.  A text data/NAME.txt has questions and answers,
# data/NAME-chat.json, from which sft.py and rl.py learn.
def find_records(path):
    """-> the path of the conversations that go with the text at `path`: play.txt has play-chat.json.  If that file is
    missing, it is made from the text, which must be a play.  Its paragraphs are "NAME:\\nspeech"; each speech is a
    question, and the next speech its answer.  Only the end of the play is used, 90 kB or an eleventh, whichever
    is less.  Pretraining holds out a little more (tokenizer.split_point), if no separator stands near the end.  If
    `path` is a file of records, it is returned as it is."""
    if holds_records(path):
        return path
    records = splitext(path)[0] + "-chat.json"
    if not exists(records):
        text = read_chunk(with_plain_lines(path))
        held_out = text[-min(90_000, len(text) // 11):].decode("utf-8", "replace").strip()
        _, *speeches = re.split(r"\n\n[^\n:]{1,40}:\n", held_out)
        require(speeches[1:], f"{path} is no play, so it gives no questions; name instructions with --data "
                "(./fetch_data.sh instructions brings some).")
        write_records(records, itertools.pairwise(speeches))
    elif getmtime(records) < getmtime(path):
        print(f"note: {records} is older than {path}:\ndelete it if it was made from another text.")
    return records


def write_records(path, conversations):
    """Write the file of records that goes with a text.  conversations: [(question, answer), ...].  Each becomes a
    record for sft.py, which is also a pair for rl.py: the true answer is chosen, and its words in reverse order are
    rejected.  (The answer to another question would not do: there it is the chosen one.)"""
    records = []
    for question, answer in conversations:
        question = " ".join(question.split())
        records.append({"instruction": question, "output": answer,
                        "prompt": question, "chosen": answer, "rejected": " ".join(reversed(answer.split()))})
    write_file(path, json.dumps(records).encode())


def make_english():
    """Write data/english.txt: 1.5 MB of English that every interpreter carries.  Its sources are the language reference
    (pydoc_data.topics), and the docstrings of the functions and classes of the standard library.  Their paragraphs of
    prose are the text, each once.

    Write the records that go with it, too.  A question is the path of a file and the name of a function or class in
    it, such as random/seed.  Its answer is the first paragraph of the documentation.  Only paragraphs that are too
    short for the text, or no prose, are taken.  So hardly any answer was learned before."""
    from pydoc_data.topics import topics
    texts = [*topics.items()]                               # (name, documentation); the name of a topic has no slash
    library = dirname(os.__file__)
    for path in sorted(glob.glob("**/*.py", root_dir=library, recursive=True)):
        # installed packages are not a part of Python, and tests hold examples of what Python refuses
        if re.search("test|packages", path):
            continue
        for node in ast.walk(ast.parse(read_chunk(f"{library}/{path}"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                texts += [(f"{path[:-3]}/{node.name}", ast.get_docstring(node) or "")]
    documents = []
    conversations = []
    seen = set()
    for name, text in texts:
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
        # the long ones of almost only letters, spaces and commas: no code and no table
        prose = [paragraph for paragraph in paragraphs if len(paragraph) >= 40
                 and len(re.findall(r"[^\W\d_]|[ ,.;:'-]", paragraph)) > 0.9 * len(paragraph)]
        documents.append("\n\n".join(paragraph for paragraph in prose if paragraph not in seen))
        seen.update(prose)
        first = paragraphs[0]
        if "/" in name and " " in first and first not in prose:
            conversations += [(name, first)]
    write_file("data/english.txt", "\n\n<|endoftext|>\n\n".join(filter(None, documents)).encode())
    write_records("data/english-chat.json", conversations)
