"""Runs of the scripts, as a user starts them; but in a fork of this process, which spares the imports.

    run("train.py --data text --out out", folder)       -> its CompletedProcess; it has to leave with exit code 0
    process = start("train.py ...", folder)             while it runs; then finish(process)
"""
import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import traceback

from cases import read, write

import script

LIMIT = 300         # seconds: a run that takes longer hangs
TINY = "--dim 16 --heads 2 --kv-heads 1 --layers 1 --context 32 --vocab 272 --batch-tokens 128 --device cpu"
TEXT = "".join(f"The cat {i} sat on the mat, and the dog lay on the rug.\n" for i in range(300))
# A run of each kind, in a folder that has what `prepare` puts there.
JOBS = {"train": f"train.py --data text {TINY} --eval-every 4",
        "sft": "sft.py --base base --data chats.json --batch-tokens 128 --eval-every 4",
        "reinforce": "rl.py --base base --data chats.json --batch-tokens 512 --reward short --eval-every 8",
        "dpo": "rl.py --base base --data chats.json --method dpo --batch-tokens 128 --eval-every 4"}


def prepare():
    """Put into the current folder a text, conversations, which are pairs, too, and a model of three steps."""
    write("text", TEXT)
    script.write_records("chats.json", [(f"{i} and {i}?", f"{i + i}{'!' * (i % 3)} it is.") for i in range(20)])
    run(f"{JOBS['train']} --steps 3 --out base")


def become(command):
    """This process, a fork, is the script from here on, and ends with it."""
    code = 1
    try:
        sys.argv = command.split()
        module = __import__(sys.argv[0].removesuffix(".py"))
        script.run_script(module.main, to_the_end=sys.argv[0] != "chat.py")
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def start(command, folder=".", trap=lambda: None):
    """The script in a fork of this process -> its CompletedProcess, which has no exit code yet.  An alarm ends what hangs.
    trap: is called in the fork, before the script runs: it may plant what is to happen."""
    process = subprocess.CompletedProcess(command, None)
    process.files = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2)]
    process.pid = os.fork()
    if process.pid == 0:
        signal.alarm(LIMIT)
        os.chdir(folder)
        for number, file in enumerate(process.files, 1):
            os.dup2(file.fileno(), number)
        sys.stdin = open(os.devnull)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", 1)
        os.fsync = lambda file: None                # no machine loses its power here, and waiting for a disk is long
        trap()
        become(command)
    return process


def finish(process):
    """Wait for its end -> the same, with its exit code and what it has printed."""
    _, status = os.waitpid(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    for file in process.files:
        file.seek(0)
    process.stdout, process.stderr = [file.read() for file in process.files]
    return process


# Traps.  Each is made here and called in the fork.
def send(*signals):
    """-> an action: this process gets these signals."""
    def action():
        for number in signals:
            os.kill(os.getpid(), number)
    return action


def at(where, names, number, action):
    """-> a trap: before this one, counted from 1, of the calls of these functions of `where` comes the action."""
    def trap():
        calls = itertools.count(1)

        def put(name, function):
            def called(*arguments, **options):
                if next(calls) == number:
                    action()
                return function(*arguments, **options)
            setattr(where, name, called)
        for name in names.split():
            put(name, getattr(where, name))
    return trap


def kill_before(number):
    """-> a trap: SIGKILL comes before this one, counted from 1, of the calls that change the disk."""
    return at(os, "fsync replace rename remove unlink rmdir mkdir", number, send(signal.SIGKILL))


def as_on_a_gpu():
    """A trap: the loop takes the run for one on a GPU, and reads numbers only now and then."""
    import train
    loop = train.train

    def train_on_gpu(training, job, stop):
        training.settings.device = "gpu"
        return loop(training, job, stop)
    train.train = train_on_gpu


def run(command, folder=".", code=0, trap=lambda: None):
    """-> the CompletedProcess of a script, which has to leave with this exit code."""
    process = finish(start(command, folder, trap))
    assert process.returncode == code, (command, process.stderr)
    return process


def refused(command, folder="."):
    """-> the sentence with which a script refuses a command: one line, and exit code 2."""
    words = run(command, folder, code=2).stderr
    assert words.startswith("error: ") and words.count("\n") == 1, words
    return words


def read_log(folder):
    """The log without the seconds, which no run repeats."""
    lines = pathlib.Path(folder, "log.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def result_of(folder):
    """All that a run leaves and that has to be the same: its log, and the bytes of its weights."""
    return read_log(folder), read(f"{folder}/model.safetensors")
