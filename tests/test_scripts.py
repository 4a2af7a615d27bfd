"""What every script shares (script.py): one sentence for an error, bounds of numbers, plain files,
and a reader that leaves."""
import argparse
import errno
import importlib
import io
import os
import re
import signal
import subprocess
import sys

import pytest
from cases import parametrize, put, rows, value_error, write

import script
import tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPTS = """tokenizer.py model_cpu.py checkpoint.py train.py sft.py rl.py chat.py gradcheck.py""".split()


def run(folder, script, *arguments, **options):
    return subprocess.run([sys.executable, f"{ROOT}/{script}", *map(str, arguments)], cwd=folder, text=True,
                          **{"capture_output": True, "timeout": 600, **options})


@parametrize("script", SCRIPTS)
def test_a_wrong_option_is_one_sentence(tmp_path, script):
    needed = {"checkpoint.py": ["out/small"], "tokenizer.py": ["show", "x"]}.get(script, [])
    done = run(tmp_path, script, "--nonsense", *needed)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: ")
    assert "--nonsense" in done.stderr and done.stderr.endswith("; --help lists the options.\n") and done.stderr.count("\n") == 1
    with pytest.raises(SystemExit, match="^0$"):
        importlib.import_module(script[:-3]).main(["--help"])
    assert not os.listdir(tmp_path)


@parametrize("script, option, value, words", rows("""
    train | --lr           | inf       | above 0
    train | --lr           | 0         | above 0
    train | --decay        | 1         | below 1
    train | --decay        | nan       | at least 0
    train | --clip         | 0         | above 0
    train | --mtp-weight   | -1        | at least 0
    train | --mtp-weight   | inf       | at least 0
    train | --memory-limit | .         | 12GB
    train | --memory-limit | 0         | 12GB
    train | --memory-limit | 12 apples | 12GB
    train | --lr           | 9^400     | --lr
    train | --memory-limit | 9^400     | --memory-limit
    train | --seed         | 9^400     | --seed
    train | --seed         | 2.0       | at least 0
    train | --seed         | x         | at least 0
    sft   | --epochs       | 9^400     | --epochs
    chat  | --max-tokens   | 9^400     | --max-tokens"""))
def test_numbers_out_of_bounds(err_text, script, option, value, words):
    """9^400: a number of 400 digits."""
    with pytest.raises(SystemExit) as left:
        importlib.import_module(script).main([option, value.replace("9^400", "9" * 400)])
    said = err_text()
    assert left.value.code == 2 and said.startswith("error: ") and words in said and said.count("\n") == 1 and len(said) < 400


@parametrize("script, option, least, most", rows("""
    train | --steps        | 1   | 1000000000
    train | --batch-tokens | 1   | 16777216
    train | --micro-batch  | 1   | 65535
    train | --warmup       | 0   | 1000000000
    train | --seed         | 0   | 9223372036854775808
    train | --eval-every   | 1   | 1000000000
    train | --save-every   | 1   | 1000000000
    train | --threads      | 1   | 1024
    train | --gpus         | 1   | 1024
    train | --dim          | 1   | 1048576
    train | --heads        | 1   | 1048576
    train | --kv-heads     | 1   | 1048576
    train | --layers       | 1   | 1048576
    train | --context      | 1   | 1048576
    train | --vocab        | 264 | 1048576
    sft   | --epochs       | 1   | 1000000000
    sft   | --show         | 1   | 1000000000
    sft   | --threads      | 1   | 1024
    sft   | --context      | 1   | 1048576"""))
def test_the_bounds_of_whole_numbers(err_text, script, option, least, most):
    parse = importlib.import_module(script).parse_arguments
    for good in least, most:
        assert getattr(parse([option, good]), option[2:].replace("-", "_")) == int(good)
    for bad in int(least) - 1, int(most) + 1:
        with pytest.raises(SystemExit):
            parse([option, str(bad)])
        assert f"argument {option}: must be a whole number of at least {least} and at most {int(most):,}, not '{bad}'" in err_text()


@parametrize("name, good, bad", rows("""
    below_1       | 0.99 | 1
    up_to_a_third | 0.33 | 0.34"""))
def test_numbers_with_an_end(name, good, bad):
    parse = vars(script)[name]
    assert parse("0") == 0 and parse(good)
    for text in "-0.1", bad:
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)


def test_errors_as_sentences():
    full = OSError(errno.ENOSPC, "No space left on device")
    assert script.explain(full) == "Input or output failed: No space left on device."
    for function in open, script.read_chunk:
        with pytest.raises(OSError) as error:
            function("/no/such/file")
        assert script.explain(error.value) == "Cannot use /no/such/file: No such file or directory."
    for cause, words in [(full, "Cannot use here: No space left on device."),
                         (OSError(errno.EIO, "Input/output error", "there"), "Cannot use there: Input/output error."),
                         (OSError("A sentence of ours."), "A sentence of ours.")]:
        with pytest.raises(OSError) as error, script.naming("here"):
            raise cause
        assert script.explain(error.value) == words
    assert script.explain(ValueError("a name\nof \x1b[1mothers\x07.")) == "a name of \ufffd[1mothers\ufffd."
    assert script.explain(MemoryError()) == "There is not enough memory."
    assert script.explain(MemoryError("Unable to allocate 7 GiB")) == "There is not enough memory (Unable to allocate 7 GiB)."
    assert script.explain(ValueError("One sentence.")) == "One sentence."


OF_THE_GPU = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})


@parametrize("error, code, words", [
    (ValueError("It is so."), 2, "error: It is so.\n"), (MemoryError(), 2, "error: There is not enough memory.\n"),
    (FileNotFoundError(2, "No such file", "x"), 2, "error: Cannot use x: No such file.\n"), (KeyboardInterrupt(), 130, "Stopped.\n"),
    (script.GpuError("it is lost"), 2, "error: The GPU: it is lost\n"), (OF_THE_GPU("it is lost"), 2, "error: The GPU: it is lost\n"),
    (RuntimeError("a mistake of ours"), None, "")])
def test_a_script_ends_with_one_sentence(monkeypatch, err_text, error, code, words):
    def main(arguments):
        assert sys.stdin.read() == ""                   # which was closed
        raise error
    monkeypatch.setattr(os, "_exit", sys.exit)          # which does not give back what a broken GPU would refuse
    put(monkeypatch, sys, stdin=None, stdout=io.TextIOWrapper(io.BytesIO()), stderr=sys.stderr)     # run_script wraps them
    with pytest.raises(SystemExit if code else RuntimeError) as left:
        script.run_script(main)
    assert code is None or (left.value.code, err_text()) == (code, words)


@parametrize("name, body, code, words", [
    ("numpy", "raise ImportError", 2, "NumPy is missing: run `make`, then `. .venv/bin/activate` (or `pip install -r requirements.txt`).\n"),
    ("numpy", "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 130, "Stopped.\n"),
    ("cupy", "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 130, "Stopped.\n")])
def test_without_numpy_and_ctrl_c_while_a_script_imports(tmp_path, name, body, code, words):
    write(tmp_path / f"{name}.py", body)
    for script in SCRIPTS[1:]:
        if name == "numpy" or script in ("train.py", "sft.py", "rl.py"):
            done = run(tmp_path, script, env={**os.environ, "PYTHONPATH": str(tmp_path)})
            assert (done.returncode, done.stdout, done.stderr) == (code, "", words), script


def test_what_is_text(tmp_path):
    """UTF-8, but for one byte in a thousand."""
    path = tmp_path / "text"
    for data, words in [(b"words" * 200 + "\u732b\0".encode(), None), (b"a" * 999 + b"\xff", None), (b"a" * 998 + b"\xff", "Latin-1 or Windows-1252"),
                        (b"a" * 998 + b"\0", "UTF-16, or binary"), ("caf\xe9".encode("cp1252"), "Latin-1"), ("caf\xe9".encode("utf-16"), "UTF-16"),
                        (b"", "empty"), (b"a" * (1 << 20) + b"\xff" * 9, None)]:
        path.write_bytes(data)
        if words is None:
            script.check_text(path)
        else:
            with value_error(words):
                script.check_text(path)


def test_what_is_no_plain_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/zero", tmp_path / "zero")
    signal.alarm(600)                               # a read would never end
    for name in "pipe", "zero", ".":
        for read in script.read_chunk, script.read_json, script.check_plain, tokenizer.Tokenizer.load:
            with value_error("is not a plain file, so it is not read"):
                read(f"{tmp_path}/{name}")
    for data in b"[" * 100_000, b'"\xe9"', b"1" * 5000:
        write(tmp_path / "x.json", data)
        with value_error("x.json is damaged: it is no JSON"):
            script.read_json(f"{tmp_path}/x.json")
    os.mkfifo(tmp_path / "new.json.new")            # of no run of ours: it is replaced, not waited for
    with script.replace_file(tmp_path / "new.json") as file:
        file.write(b"7")
    assert script.read_json(tmp_path / "new.json") == 7 and not os.path.exists(tmp_path / "new.json.new")
    signal.alarm(0)


class Broken(io.StringIO):
    """A stream whose reader has left, or whose disk is full."""
    def __init__(self, number, fd):
        super().__init__()
        self.number, self.fd = number, fd

    def write(self, text):
        raise OSError(self.number, os.strerror(self.number))
    flush = fileno = None


@parametrize("number, survives", [(errno.EPIPE, True), (errno.EIO, True), (errno.ENOSPC, False), (errno.EBADF, False)])
def test_output_outlives_its_reader_but_not_its_disk(number, survives):
    fd = os.dup(1)
    stream = Broken(number, fd)
    stream.fileno = lambda: fd
    stream.flush = lambda: stream.write("")
    out = script.Outliving(stream)
    for action in lambda: print("x", file=out), out.flush:
        if survives:
            action()
            assert os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev      # what is still buffered goes nowhere
        else:
            with pytest.raises(OSError):
                action()
    os.close(fd)
    nowhere = script.Outliving(None)
    nowhere.write("x")
    nowhere.flush()
    assert not nowhere.isatty()


@parametrize("to_the_end", [False, True])
def test_a_script_goes_on_without_a_reader_if_its_work_is_more_than_its_output(monkeypatch, to_the_end):
    read, write = os.pipe()
    os.close(read)
    reached = []

    def main(argv):
        print("x", flush=True)
        reached.append("the end")
    with open(write, "w") as nobody, pytest.raises(SystemExit) as left:
        put(monkeypatch, sys, stdout=nobody, stderr=sys.stderr)
        script.run_script(main, **{"to_the_end": True} if to_the_end else {})
    assert left.value.code in (0, None) and bool(reached) == to_the_end


def test_steps_that_have_a_line(out_text):
    """Where the output is no terminal: the first, every tenth and the last."""
    for step in range(1, 24):
        script.print_step(step, [f"{step}", "a"], step == 23)
    assert out_text() == "1  a\n10  a\n20  a\n23  a\n"


def test_gradcheck_reaches_its_verdict_without_a_reader(tmp_path):
    line = f"set -o pipefail; {sys.executable} {os.path.join(ROOT, 'gradcheck.py')} --break rope_sign | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


@parametrize("arguments", [["tokenizer.py", "show", "some words", "--tokenizer", "tokenizer.json"], "train.py big --dry-run --memory-limit 12GB".split(),
                                       ["model_cpu.py"], ["gradcheck.py", "--list"]])
def test_closed_standard_streams(tmp_path, arguments):
    """Whoever starts a script, cron say, may have closed all three."""
    tokenizer.Tokenizer.train(["some words"], 260).save(tmp_path / "tokenizer.json")
    done = subprocess.run(["bash", "-c", '"$@" <&- >&- 2>&-', "-", sys.executable, f"{ROOT}/{arguments[0]}", *arguments[1:]],
                          cwd=tmp_path, timeout=600)
    assert done.returncode == 0


def test_the_tour_prints_its_shapes_and_numbers_that_agree(tmp_path):
    shown = run(tmp_path, "model_cpu.py").stdout
    for name, shape in rows("""
            layer 0: x_in      | (64, 128)
            layer 0: qkv       | (64, 256)
            layer 0: P         | (1, 2, 2, 64, 64)
            layer 0: gate_up   | (64, 688)
            final = rmsnorm(x) | (64, 128)
            logits (B,T,K,V)   | (1, 64, 4, 304)"""):
        line = rf"^   {re.escape(name)} +{re.escape(shape)} +root mean square [0-9.]+$"
        assert re.search(line, shown, re.MULTILINE), shown
    def numbers(words):
        return map(float, re.search(words, shown).groups())
    first, guess = numbers(r"first loss of head 0: ([0-9.]+)\..* ln V = ([0-9.]+)")
    by_hand, numeric = numbers(r"by hand (\S+), by finite difference (\S+)\n")
    before, after = numbers(r"loss of head 0 ([0-9.]+) -> ([0-9.]+)\n")
    assert abs(first - guess) < 0.2 and before == first > after + 0.1
    assert abs(by_hand) > 1e-3 and abs(by_hand / numeric - 1) < 1e-9
    # the table of the same text: stopped after the last layer, the loss is that of the model
    table = [float(line[12:20]) for line in shown.splitlines()
             if re.match("(embedding|layer [0-9]) +[0-9]", line)]
    assert len(table) == 5 and table[-1] == after and "\n64 tokens read, the next of each predicted" in shown


def test_how_fast_something_goes(monkeypatch, out_text):
    """Progress elsewhere than on a terminal: nothing until the end."""
    clock = iter([5.0, 5.5, 9.0])
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    progress = script.show_progress("counted:")
    progress(1_999_999, 2_000_000)
    assert out_text() == ""
    progress(2_000_000, 2_000_000)
    assert out_text() == "counted: 2 MB, 0.5 MB/s, 4.0 s\n"
