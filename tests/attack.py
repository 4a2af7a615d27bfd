"""Attacks a run in the ways that files, signals and full disks do, and compares with a run that nobody touched.

    python tests/attack.py checkpoints --count 500 --seed 0     altered files: refused in one sentence, or without effect
    python tests/attack.py signals --count 20                   SIGKILLs; SIGHUP, SIGTERM, Ctrl-C; readers that leave
    python tests/attack.py pairs --count 10                     two new runs at once in one folder
    python tests/attack.py disks                                a disk that is full at eight sizes

An attack ends well in two ways.  The script says one sentence and leaves with exit code 2 (or with 128 + the signal, and
can be resumed).  Or log and weights are those of the run that nobody touched, bit for bit.  A traceback, a hang, or
another result without a word is a failure, and the exit code is then 1.  tests/test_attack.py runs a few of each.
"""
import argparse
import contextlib
import functools
import glob
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path

import conftest         # before NumPy loads: it sets the number of BLAS's threads

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
QUICK = """--data corpus.txt --dim 32 --heads 2 --kv-heads 1 --layers 2 --batch-tokens 256 --growth 0.25 --steps 12
    --eval-every 4 --save-every 4 --threads 1""".split()
PATIENCE = 600                                  # seconds after which a run counts as hanging


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------
def command(script, *arguments):
    return [sys.executable, f"{ROOT}/{script}", *arguments]


def be(script, arguments):
    """This process, a fork, is the script from here on, and ends with it."""
    code = 1
    try:
        sys.argv = [script, *arguments]
        from script import run_script
        module = __import__(script.removesuffix(".py"))
        run_script(module.main, to_the_end=script != "chat.py")
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def call(script, arguments, folder):
    """Run a script in a fork of this process, which spares the imports -> (exit code, standard error)."""
    said = f"{folder}/said.txt"
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        signal.alarm(PATIENCE)                                  # ends a run that hangs
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd, file in (0, nowhere), (1, nowhere), (2, os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)):
            os.dup2(file, fd)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), mode) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
        with contextlib.suppress(ValueError):                   # a huge array is a MemoryError, not the machine's end
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
        be(script, arguments)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, Path(said).read_text(errors="replace")


def write_corpus(path):
    """Invented documents, about 200 kB."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 7))) for _ in range(300)]
    Path(path).write_text(" ".join(rng.choices([*words, *3 * ["\n\n<|endoftext|>\n\n"]], k=40_000)))


def result(folder):
    """What a finished run leaves: the log without its seconds, and the weights and moments."""
    with open(f"{folder}/log.jsonl", encoding="utf-8") as file:
        log = [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in file]
    raw = [Path(folder, name).read_bytes() for name in ("model.safetensors", "train_state.safetensors")]
    return log, [data[8 + struct.unpack("<Q", data[:8])[0]:] for data in raw]


def prepare(folder):
    """In `folder`: corpus.txt, the finished run out/whole, and the same run stopped in its middle, out/half -> what
    out/whole left."""
    write_corpus(f"{folder}/corpus.txt")
    done = subprocess.run(command("train.py", *QUICK, "--out", "out/whole"), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code, said = interrupt(folder, "train.py", QUICK, "out/half", 4, lambda process: process.terminate())
    assert code == 128 + signal.SIGTERM, said
    return result(f"{folder}/out/whole")


# Runs a script of which every training step waits, from one on, until a file says that it may go on.
GATED = """
import os, sys, time
(root, gate, step, script), parent = sys.argv[1:5], os.getppid()
sys.path.insert(0, root)
sys.argv = [os.path.join(root, script), *sys.argv[5:]]
import train
from script import run_script
module, learning_rate = __import__(script.removesuffix(".py")), train.learning_rate
def gated(at, settings):                                # asked once a step, of the steps from 0 on
    while at >= int(step) and not os.path.exists(gate + ".open"):
        open(gate + ".reached", "w").close()
        time.sleep(0.01)
        if os.getppid() != parent:                      # who should open it is gone
            os._exit(1)
    return learning_rate(at, settings)
train.learning_rate = gated
run_script(module.main, to_the_end=True)
"""


def interrupt(folder, script, arguments, out, step, blow, **options):
    """Start a new run, and let `blow` do its work while the run waits with so many steps behind it, however fast the
    machine is -> (exit code, standard error)."""
    gate = os.path.join(folder, os.path.basename(out) + "-gate")
    process = subprocess.Popen([sys.executable, "-c", GATED, ROOT, gate, str(step), script, *arguments, "--out", out], cwd=folder,
                               text=True, **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **options})
    while not os.path.exists(gate + ".reached"):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    blow(process)
    open(gate + ".open", "w").close()
    said = process.communicate(timeout=PATIENCE)[1]
    return process.returncode, said


def lines(path):
    with contextlib.suppress(FileNotFoundError):
        return Path(path).read_bytes().count(b"\n")
    return 0


def wait_for_steps(process, log, count):
    """Until the log has so many more lines, or the process has ended."""
    limit, before = time.monotonic() + PATIENCE, lines(log)
    while lines(log) < before + count and process.poll() is None:
        assert time.monotonic() < limit, "the run hangs"
        time.sleep(0.002)


def is_one_sentence(said):
    return ("\n" + said).count("\nerror: ") == 1 and "Traceback" not in said


# ---------------------------------------------------------------------------------------------------------------------
# Altered files.  Each alteration takes (path of a file, rng) and changes it -> what it did.
# ---------------------------------------------------------------------------------------------------------------------
def edit_bytes(path, rng):
    """Cut, lengthened, one bit flipped, or a token id changed."""
    raw = bytearray(Path(path).read_bytes())
    place = rng.choice([rng.randrange(len(raw)), rng.randrange(min(len(raw), 600))])
    what = rng.choice("cut longer bit id".split())
    if what == "cut":
        del raw[rng.choice([0, 1, len(raw) - 1, place]):]
    elif what == "longer":
        raw += rng.choice([b"\0", b" ", b"\n", b"{}", rng.randbytes(100)])
    elif what == "bit":
        raw[place] ^= 1 << rng.randrange(8)
    else:
        raw[place // 2 * 2:place // 2 * 2 + 2] = rng.choice([b"\xff\xff", b"\0\2", b"\1\0", b"aa"])
    Path(path).write_bytes(raw)
    return f"{what} at {place}"


def replace_special(path, rng):
    """Something else in place of the file."""
    os.remove(path)
    what = rng.choice("pipe zero folder nothing dangling".split())
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        os.mkdir(path)
    elif what != "nothing":
        os.symlink({"zero": "/dev/zero", "dangling": "/no/such/file"}[what], path)
    return f"replaced by: {what}"


WRONG = [None, True, -1, 0, 10**9, 3_000_000, 1 << 70, float("nan"), "x", "", [], {}, [[1]], "\ud800"]


def edit_json(path, rng):
    """One value of a JSON file changed, or left out."""
    value = json.loads(Path(path).read_text())
    at, key = value, rng.choice(list(value))
    while isinstance(at[key], dict) and at[key] and rng.random() < 0.8:
        at, key = at[key], rng.choice(list(at[key]))
    old = at.pop(key)
    if rng.random() < 0.8:
        at[key] = rng.choice(WRONG + ([old // 2, old + 1, -old] if type(old) is int else []))
    text = json.dumps(value)
    if rng.random() < 0.15:
        text = rng.choice(["[" * 100_000, '{"a":' * 100_000, "7", "null", "[]", '"x"', "{}", "1" * 5000, "\ufeff{}"])
    Path(path).write_text(text)
    return f"{key}: {str(old)[:30]}, now {text[:20]} ..."


def read_header(path):
    raw = Path(path).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + size]), raw[8 + size:]


def sign(path, header, data):
    """Write a safetensors file with a right checksum, whatever is in it.  header: a dict, or text."""
    if isinstance(header, dict):
        header["__metadata__"]["crc32"] = "00000000"
        header = json.dumps(header, separators=(",", ":"))
    text = header.encode("utf-8", "surrogatepass")
    length = struct.pack("<Q", len(text))
    crc = f"{zlib.crc32(data, zlib.crc32(length + text)):08x}"
    Path(path).write_bytes(length + text.replace(b'"crc32":"00000000"', f'"crc32":"{crc}"'.encode(), 1) + data)


def edit_header(path, rng):
    """Nonsense under a right checksum."""
    header, data = read_header(path)
    metadata = header["__metadata__"]
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    start, end = entry["data_offsets"]
    wrong = {"data_offsets": [[-4, end - start - 4], [start + 4, end + 4], [start, end - 4], [end, start], "x", [start, 1 << 60],
                              [0.5, 1.5], None],
             "shape": [[1 << 40, 1 << 40], [-8, -16], [0], [], "x", None, [1.0], [*entry["shape"], 0]],
             "dtype": ["F64", "F16", "I32", "X", None, 7]}
    what = rng.choice([*wrong, *"step nan nested lost extra state".split()])
    if what in wrong:
        entry[what] = rng.choice(wrong[what])
    elif what == "nan":
        place = rng.randrange(start // 4, end // 4) * 4
        data = data[:place] + struct.pack("<f", rng.choice([float("nan"), float("inf"), -float("inf")])) + data[place + 4:]
    elif what == "nested":
        header = rng.choice(['{"__metadata__":' + "[" * 100_000, '{"a":' * 50_000, '["crc32":"00000000"'])
    elif what == "lost":
        del header[name]
    elif what == "extra":
        header["more"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
        data += b"\0\0\0\0"
    elif what == "state" and "state" in metadata:
        metadata["state"] = rng.choice(
            ["[" * 100_000, "", "x", "null", "[]", "5", '"x"', "{}", '{"settings": 7}', '{"settings": {}, "script": "train.py"}'])
    else:
        metadata["step"] = rng.choice([None, "-1", "x", "", 4, "1e3", "٣x", "9" * 5000])
        if rng.random() < 0.4:
            del metadata["step"]
    sign(path, header, data)
    return what


def edit_log(path, rng):
    kept = Path(path).read_bytes().splitlines(keepends=True)
    place = rng.randrange(len(kept))
    kept[place] = rng.choice([b"5\n", b"{}\n", b"\n", b"null\n", b"[" * 100_000 + b"\n", b"\0\0\0\n", b'{"step": "x"}\n',
                              b'{"step": null}\n', b"\xff\xfe\n", b'{"step": 1e400}\n', b"1" * 5000 + b"\n"])
    Path(path).write_bytes(b"".join(kept))
    return f"line {place + 1} is now {kept[place][:20]!r}"


BYTES, JSON = [edit_bytes, edit_bytes, edit_bytes, replace_special], [edit_json, edit_json]
ALTERATIONS = {"config.json": BYTES + JSON, "tokenizer.json": BYTES + JSON, "tokenizer_config.json": BYTES + JSON,
               "model.safetensors": BYTES + 6 * [edit_header], "train_state.safetensors": BYTES + 6 * [edit_header],
               "log.jsonl": [edit_log, edit_log, replace_special], "train-*.bin": BYTES, "val-*.bin": BYTES}


def attack_checkpoint(folder, expected, seed):
    """One alteration of out/half or of data/, then `chat.py` and `train.py --resume` -> (what was done, complaint or
    None)."""
    rng = random.Random(seed)
    name = rng.choice(list(ALTERATIONS))
    alter = rng.choice(ALTERATIONS[name])
    place = tempfile.mkdtemp(prefix="altered-", dir=folder)
    try:
        for part in "data", "out/half":
            shutil.copytree(f"{folder}/{part}", f"{place}/{part}")
        shutil.copy(f"{folder}/corpus.txt", place)
        path = f"{place}/out/half/{name}"
        if name.endswith(".bin"):
            path = rng.choice(sorted(glob.glob(f"{place}/data/{name}")))
        did = f"{name}, {alter.__name__}: {alter(path, rng)}"
        for script, arguments in [("chat.py", """--model out/half --prompt a --temperature 0 --max-tokens 5
                                              --device cpu""".split()), ("train.py", "--resume --out out/half".split())]:
            code, said = call(script, arguments, place)
            if code == 2 and is_one_sentence(said):
                continue
            if code != 0 or "Traceback" in said or "error: " in said:
                return did, f"{script} left with {code} and said: {said[-600:]}"
            if script == "train.py":
                log, tensors = result(f"{place}/out/half")
                # of an altered log, of which nothing but the steps is read, only what was written since must be right
                since = [record for record in log if record in expected[0]] if name == "log.jsonl" else log
                if tensors != expected[1] or since != expected[0][-len(since):]:
                    return did, "another result, and not a word"
        return did, None
    finally:
        shutil.rmtree(place)


def checkpoints(folder, count, seed):
    expected, failures = prepare(folder), 0
    for i in range(count):
        did, complaint = attack_checkpoint(folder, expected, f"{seed} {i}")
        if complaint:
            failures += 1
            print(f"{i}: {did}\n    {complaint}", flush=True)
    print(f"{count} altered checkpoints: {count - failures} refused in one sentence, or without effect", flush=True)
    return failures


# ---------------------------------------------------------------------------------------------------------------------
# Signals, and readers that leave
# ---------------------------------------------------------------------------------------------------------------------
def finish(folder, out, expected, what):
    """Resume the run -> 1, and a complaint, unless it ends as the one that nobody touched did."""
    done = subprocess.run(command("train.py", "--resume", "--out", out), cwd=folder, capture_output=True, text=True,
                          timeout=PATIENCE)
    good = done.returncode == 0 and result(f"{folder}/{out}") == expected
    print(f"{what}: {'as if never touched' if good else 'ANOTHER RESULT ' + done.stderr}", flush=True)
    return not good


def kill_again_and_again(folder, script, arguments, out, count, seed):
    """SIGKILL at random moments: of a new run, then of the one that resumes it, and so on."""
    rng, killed, new = random.Random(seed), 0, [*arguments, "--out", out]
    arguments = new
    while killed < count:
        process = subprocess.Popen(command(script, *arguments), cwd=folder, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        wait_for_steps(process, f"{folder}/{out}/log.jsonl", 1)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        if process.wait() == 0:                         # it had come to its end: again from the start
            shutil.rmtree(f"{folder}/{out}")
            arguments = new
        else:
            killed, arguments = killed + 1, ["--resume", "--out", out]


def kills(folder, expected, count, seed):
    """Of a run that saves at every step, so that many a blow falls into a save."""
    kill_again_and_again(folder, "train.py", [*QUICK, "--save-every", "1"], "out/killed", count, seed)
    return finish(folder, "out/killed", expected, f"{count} SIGKILLs")


FAR = [*QUICK, "--save-every", "1000"]           # no save on the way


def ask_to_stop(folder, expected, number):
    """A signal to the script alone."""
    out = f"out/{number.name}"
    code, said = interrupt(folder, "train.py", FAR, out, 2, lambda process: process.send_signal(number))
    if code != 128 + number or f"Saved {out}" not in said or "Traceback" in said:
        print(f"{number.name}: left with {code} and said {said}")
        return 1
    return finish(folder, out, expected, number.name)


def interrupt_both(folder, expected):
    """Ctrl-C at `train.py | tee log.txt`: the signal reaches both, and tee dies first."""
    out, tee = "out/tee", subprocess.Popen(["tee", f"{folder}/log.txt"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def blow(process):
        tee.stdin.close()                               # of this process, so that tee is the only reader
        tee.send_signal(signal.SIGINT)
        tee.wait()
        process.send_signal(signal.SIGINT)
    code, said = interrupt(folder, "train.py", FAR, out, 2, blow, stdout=tee.stdin)
    if code != 130 or f"Saved {out}" not in said or "Traceback" in said:
        print(f"Ctrl-C through tee: left with {code} and said {said}")
        return 1
    return finish(folder, out, expected, "Ctrl-C through tee")


def leave(folder, expected):
    """`train.py | head -1`: the reader leaves, and the run goes on to its end."""
    out = "out/head"
    line = f"set -o pipefail; {' '.join(command('train.py', *FAR, '--out', out))} | head -1"
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    good = done.returncode == 0 and not done.stderr and result(f"{folder}/{out}") == expected
    print(f"| head -1: {'as if read to the end' if good else f'left with {done.returncode} and said {done.stderr}'}")
    return not good


def signals(folder, count, seed):
    expected = prepare(folder)
    failures = kills(folder, expected, count, seed)
    failures += sum(ask_to_stop(folder, expected, number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT))
    return failures + leave(folder, expected) + interrupt_both(folder, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Two runs at once; a full disk
# ---------------------------------------------------------------------------------------------------------------------
def pair(folder, expected, i):
    """Two new runs in one folder: one gets it, and the other one says so, or comes after it."""
    out = f"{folder}/out/pair{i}"
    both = [subprocess.Popen(command("train.py", *QUICK, "--out", out), cwd=folder, text=True, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=PATIENCE)[1] for process in both]
    codes = [process.returncode for process in both]
    left = [path for path in (out, out + ".1") if os.path.exists(path)]
    good = (codes.count(0) == len(left) and set(codes) <= {0, 2} and all(result(path) == expected for path in left)
            and all("in use by another run" in text for text, code in zip(said, codes) if code))
    print(f"pair {i}: {codes}, {'well' if good else f'BADLY: {said}'}", flush=True)
    return not good


def pairs(folder, count, seed):
    expected = prepare(folder)
    return sum(pair(folder, expected, i) for i in range(count))


def disk(folder, expected, size):
    """No file grows beyond `size` bytes: what does not fit is one sentence, and the rest goes on later."""
    out = f"out/disk{size}"
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    shutil.copytree(f"{folder}/out/half", f"{folder}/{out}")
    done = subprocess.run(command("train.py", "--resume", "--out", out), cwd=folder, capture_output=True, text=True,
                          timeout=PATIENCE, preexec_fn=limit)
    if (done.returncode, is_one_sentence(done.stderr) and out in done.stderr) not in ((0, False), (2, True)):
        print(f"disk full at {size:,} bytes: left with {done.returncode} and said {done.stderr}")
        return 1
    return finish(folder, out, expected, f"a disk full at {size:,} bytes, {done.stderr.strip() or 'which was enough'}")


def disks(folder, count, seed):
    expected = prepare(folder)
    model, state, log = (os.path.getsize(f"{folder}/out/half/{name}")
                         for name in ("model.safetensors", "train_state.safetensors", "log.jsonl"))
    sizes = [1, log + 1, log + 500, 20_000, model // 2, model - 1, model + 1000, state - 1]
    return sum(disk(folder, expected, size) for size in sizes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("attack", choices=("checkpoints", "signals", "pairs", "disks"))
    parser.add_argument("--count", type=int, default=10, help="how many altered checkpoints, SIGKILLs or pairs (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    conftest.pytest_configure()                         # signals that are ignored here would be by what is started
    with tempfile.TemporaryDirectory() as folder:
        failures = globals()[args.attack](folder, args.count, args.seed)
    print(f"{failures} failures")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
