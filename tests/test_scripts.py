"""What every script does (script.py): help, errors in one sentence, plain files, output that nobody reads, progress."""
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import time

import pytest
from cases import once_a_module, parametrize, put, value_error, write
from runs import TEXT, TINY, read_log, refused, run

import checkpoint
import script
import tokenizer
from model_cpu import CONFIGS

ROOT = os.path.dirname(script.__file__)


def start(command, folder, **environment):
    """A script as a user starts it, in a shell -> its CompletedProcess."""
    return subprocess.run(f"{sys.executable} {os.path.join(ROOT, command)}", cwd=folder, shell=True, capture_output=True, text=True,
                          env={**os.environ, **environment})


@parametrize("name", "tokenizer model_cpu train sft rl chat gradcheck".split())
def test_help_from_another_folder(tmp_path, name):
    done = start(f"{name}.py --help", tmp_path)
    assert done.stdout.startswith(f"usage: {name}.py") and done.stderr == "" and os.listdir(tmp_path) == []


@once_a_module
def folder(tmp_path_factory):
    """m: a model, of a text in which one byte is damaged; files that are no texts or records; a pipe."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, data in {"text": b"\xff" + TEXT.encode(), "empty": "", "latin": b"\xe9" * 99, "wide": "text".encode("utf-16"), "short": TEXT[:40],
                       "cut.jsonl": '{"instruction": "a", "output": "b"}\n{"inst', "odd.json": '[{"instruction": "a"}]',
                       "share.json": '[[{"from": "human", "value": "Q"}]]', "long.jsonl": json.dumps({"good": "b", "bad": TEXT, "name": "c"})}.items():
        write(folder / name, data)
    write(folder / "pairs.json", json.dumps([{"instruction": c + "ä", "output": c, "prompt": c, "chosen": "é", "rejected": "日"} for c in "abcé"]))
    os.mkfifo(folder / "pipe")
    run(f"train.py --data text --steps 1 --out m {TINY}", folder)
    return folder


REFUSED = {
    "train.py --lr nan": "--lr: must be a number from 1e-09 to 100, not 'nan'",
    "train.py --decay 11": "--decay: must be",
    "train.py --steps 1.5": "--steps: must be a whole number from 1 to 1,000,000,000, not '1.5'",
    "train.py --data none": "Cannot use none: No such file or directory.",
    "train.py --data empty": "empty is empty, or almost",
    "train.py --data latin": "latin is no text in UTF-8: it seems to be Latin-1",
    "train.py --data text wide": "wide is no text in UTF-8: it seems to be UTF-16, or binary",
    "train.py --evaluate m --data .": ". is a folder; name the files in it",
    "train.py --evaluate m small --data text --seed 1 --steps 9": "leave out preset, steps, seed.",
    "train.py --evaluate m --data odd.json": "(it has instruction, and needs good and bad and name).",
    "train.py --data odd.json": "odd.json holds records, not a text",
    "train.py --data none.JSON": "none.JSON holds records, not a text",
    "train.py --data data/tiny.txt": "./fetch_data.sh tiny brings it.",
    "train.py text": "A text is named by --data, a model to begin with by --base",
    "train.py --out=": "--out . is the current folder",
    "train.py --out text": "--out text is a file",
    "train.py --seed=--": "--seed=-- has no value",
    "train.py --evaluate m --data long.jsonl": "long.jsonl, record 1, cannot be used (a sentence must have 1 to",
    f"train.py --data short {TINY}": "the corpus is too short: 27 tokens",
    "train.py --base m --dim 8": "has its sizes",
    "train.py --resume --out none": "there is nothing to resume in none",
    "sft.py --base none": "there is no model in none",
    "sft.py --base m --data empty": "empty: there is no record.",
    "sft.py --base m --data cut.jsonl": "cut.jsonl, line 2, is not JSON",
    "sft.py --base m --data odd.json": "odd.json, record 1, cannot be used (it has instruction, and needs instruction and output, or prompt",
    "sft.py --base m --data share.json": "share.json, record 1, cannot be used (it has from, value, and needs role and content).",
    "rl.py --base m --method dpo --data odd.json": "record 1, cannot be used (it has instruction, and needs chosen and rejected).",
    "rl.py --base m --data pipe": "pipe is not a plain file",
    "rl.py --base m --data odd.json --reward good": "the reward must be",
    "chat.py --model .": "Cannot use ./config.json: No such file",
    "chat.py --model m --lens a": "needs a text of at least 2 tokens",
    "chat.py --prompt a --lens ab": "not allowed with",
    "chat.py --model m --context 33": "the context is 32 at most, not 33",
    "tokenizer.py show x": "there is no trained model in out/",
    "tokenizer.py show x --tokenizer pipe": "pipe is not a plain file",
    "tokenizer.py show x --tokenizer odd.json": "odd.json",
    "gradcheck.py --hint": "--hint goes with",
    "gradcheck.py --nonsense": "unrecognized arguments: --nonsense; --help lists the options."}


@parametrize("command", REFUSED)
def test_one_sentence_refuses_a_command(folder, command):
    assert REFUSED[command] in refused(command, folder)


@parametrize("error, words", [
    (FileNotFoundError(2, "No such file", "x"), "Cannot use x: No such file."),
    (OSError(28, "Full"), "Input or output failed: Full."),
    (OSError("Ours."), "Ours."),
    (ValueError("of\n\x1b[1mothers."), "of \ufffd[1mothers."),
    (MemoryError("7 GiB"), "There is not enough memory (7 GiB)."),
    (type("OutOfMemory", (MemoryError,), {"__module__": "cupy.cuda.memory"})("full."), "The GPU: full.  Use a smaller --micro-batch, a smaller model or --device cpu."),
    (script.BrokenExecutor(), "A process of the tokenizer ended early")])
def test_errors_as_sentences(error, words):
    assert str(script.explain(error)).startswith(words)


@parametrize("error, code, words", [
    (ValueError("It is so."), 2, "error: It is so.\n$"),
    (KeyboardInterrupt(), 130, "Stopped.\n$"),
    (script.GpuError("lost"), 2, "error: The GPU: lost\n$"),
    (KeyError("a mistake of ours"), 1, r"Traceback (.|\n)*KeyError: 'a mistake of ours'\n$")])
def test_the_end_of_a_script_that_fails(error, code, words):
    def plant():
        def main(argv):
            raise error
        tokenizer.main = main
        sys.stderr.reconfigure(line_buffering=True)
    assert re.match(words, run("tokenizer.py", code=code, trap=plant).stderr)


def test_two_processes_may_write_the_same_file_at_once(tmp_path, monkeypatch):
    with script.replace_file(tmp_path / "x") as first:
        first.write(b"all")
        monkeypatch.setattr(os, "getpid", lambda: 1)
        script.write_file(tmp_path / "x", b"all")
    assert (tmp_path / "x").read_bytes() == b"all" and os.listdir(tmp_path) == ["x"]


def test_nobody_reads_the_output(folder):
    """Training goes on; a printer ends in silence."""
    for command in f"train.py --data text --steps 3 --out unread {TINY}", "tokenizer.py show x --tokenizer m/tokenizer.json":
        assert start(f"{command} | true", folder).stderr == ""
    assert read_log(folder / "unread")[-1]["step"] == 3


def test_closed_standard_streams(folder):
    assert start("chat.py --model m <&- >&- 2>&-", folder).returncode == 0


def test_the_tour_prints_numbers_that_agree(tmp_path):
    shown = run("model_cpu.py", tmp_path).stdout.partition("\n3. ")[2]
    first, guess, by_hand, numeric, _, before, after, *table = map(float, re.findall(r"-?\d+\.\d{4,}", shown))
    assert abs(first - guess) < 0.2 and before == first > after + 0.1 and table[4] == after
    assert abs(by_hand) > 1e-3 and by_hand == pytest.approx(numeric, 1e-6)


def test_progress_lines(monkeypatch, out_text):
    """Elsewhere than on a terminal steps 1, 10, 20 .. and the last have one; on a terminal they fit it."""
    clock = itertools.count(0, 2)
    put(monkeypatch, script.time, monotonic=lambda: next(clock))
    script.show_progress("read")(1, 2)
    for step in range(1, 24):
        script.print_step(step, [str(step), "a"], step == 23)
    assert out_text() == "1  a\n10  a\n20  a\n23  a\n"
    monkeypatch.setenv("COLUMNS", "20")
    put(monkeypatch, sys.stdout, isatty=lambda: True)
    script.show_progress("read")(2000000, 6000000)
    script.print_step(7, ["eleven_char", "eight_ch", "x"], False)
    script.print_step(8, ["nineteen_characters", "x"], True)
    assert out_text() == "\rread: 2,000,000 of\x1b[K\releven_char\x1b[K\rnineteen_characters\x1b[K\n"
    script.show_progress("read")(1, 1)
    assert out_text() == "\r\x1b[K"                     # when all is done it disappears


def test_an_evaluation_fits_eighty_columns(out_text):
    numbers = dict.fromkeys("dpo accuracy margin chosen rejected".split(), -123.4567)
    script.print_record({**numbers, "val": {"a": [1, 2], "b": [3, 4]}, "samples": [("a" * 99, "b" * 99)]}, False)
    shown = out_text()
    assert max(map(len, shown.splitlines())) < 80
    assert "chosen -123.4567, rejected -123.4567, a 1.0000 2.0000, b 3.0000 4.0000" in " ".join(shown.split())


def test_a_clock_that_stands_still(folder):
    run(f"train.py --data text --steps 2 --out still {TINY}", folder, trap=lambda: setattr(time, "monotonic", lambda: 7.0))


ANY_JOB = [f"train.py --data text --steps 2 {TINY} --out NAME", "sft.py --base m --data pairs.json --steps 2 --out NAME-sft",
           "rl.py --base m --data pairs.json --method dpo --steps 2 --out NAME-dpo"]


WINDOWS = """
import runpy, signal, sys
del signal.SIGHUP
sys.modules["fcntl"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@parametrize("command", ANY_JOB)
def test_what_windows_lacks_is_not_needed(folder, command):
    """Nor does a locale of ASCII change anything.  The lock is a file there."""
    write(folder / "windows.py", WINDOWS)
    command = command.replace("NAME", "windows")
    lock = folder / f".{command.split()[-1]}.lock"
    for code, said in (0, ""), (2, "is in use by another run"):
        done = start(f"{folder}/windows.py {ROOT}/{command}", folder, PYTHONPATH=ROOT, LC_ALL="C",
                     PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
        assert (done.returncode, bool(done.stderr), lock.exists()) == (code, code > 0, code > 0) and said in done.stderr
        write(lock, "")


def test_control_characters_are_not_printable():
    assert script.printable("a\t\0\b\v\r\x1b\x7f\x9bé\n") == "a\t" + "\ufffd" * 7 + "é\n"


def test_records_are_one_list_or_one_a_line(tmp_path):
    path = tmp_path / "records"
    write(path, '[{"a": 1}]\n[2]\n')                       # of messages, say
    assert script.json_values(path) == [[{"a": 1}], [2]]
    for data in b'[{"a": 1}, 2]', b'\n {"a": 1}\r\n\r\n2', b'\xef\xbb\xbf{"a": 1}\n2\n':
        write(path, data)
        assert script.json_values(path) == [{"a": 1}, 2]
    for data, words in (b'1\n\n"\xff"', "line 3, is not JSON"), (b'[1, {"a', "one list of records, or one record a line"):
        write(path, data)
        with value_error(words):
            script.json_values(path)


SIZES = {
    "dim 132": "dim (132) must be a multiple of 8",
    "hidden 100": "hidden (100) must",
    "vocab 65544": "vocab_size (65544) is more than 65,536",
    "heads 128": "must be a multiple of 2 x heads",
    "kv_heads 3": "3 does not divide it",
    "layers 0": "whole numbers from 1 to 1,048,576",
    "context 1.5": "whole numbers from 1 to 1,048,576",
    "norm_eps Infinity": "finite numbers",
    "rope_theta -1": "not negative",
    "tied true": "a tied head needs predict 1"}


@parametrize("size", SIZES)
def test_sizes_that_do_not_fit(size):
    name, value = size.split()
    with value_error(re.escape(SIZES[size])):
        dataclasses.replace(CONFIGS["small"], **{name: json.loads(value)})


def test_a_preset_that_is_named_beside_a_base_gives_its_defaults(folder):
    run("sft.py medium --base m --data pairs.json --steps 1 --device cpu --out s", folder)
    settings = checkpoint.read_state(folder / "s")[0]["settings"]
    assert (settings["preset"], settings["lr"]) == ("medium", 5e-4)
