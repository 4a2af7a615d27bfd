"""The Makefile in a folder of its own, with stand-ins for Python and for what is called: what it runs, what it says."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from cases import parametrize, write
from packaging.specifiers import SpecifierSet

ROOT = pathlib.Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is missing")


@pytest.fixture
def folder(tmp_path):
    """The Makefile and an environment that is already there; its Python writes down what it is called with."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tests/peers").mkdir(parents=True)
    for name in "requirements.txt", "tests/requirements.txt", "tests/peers/requirements.txt":
        write(tmp_path / name, "")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    script(tmp_path / ".venv/bin/python", 'if [ "$1" = -c ]; then echo runs; else echo "$@" >>called; fi')
    (tmp_path / ".venv/packages").touch()
    script(tmp_path / "fetch_data.sh", 'echo "fetch $@ in $FETCH_TIMEOUT s" >>called; echo error: offline >&2; exit 2')
    return tmp_path


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make(folder, *arguments, **environment):
    """-> (exit code, standard output, standard error, what was called)"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    done = subprocess.run(["make", *arguments], cwd=folder, env={**clean, **environment}, capture_output=True,
                          text=True, timeout=600)    # so that a hang ends
    called = folder / "called"
    return done.returncode, done.stdout, done.stderr, called.read_text().splitlines() if called.exists() else []


def test_help_names_every_target(folder):
    code, out, _, called = make(folder, "help")
    targets = set(re.search(r"^\.PHONY: (all .*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())
    assert code == 0 and not called
    assert set(re.findall(r"^make ([a-z-]+)  ", out, re.MULTILINE)) == targets - {"all", "model", "help"}


def test_offline_it_says_so_and_trains_all_the_same(folder):
    code, out, err, called = make(folder)
    assert code == 0
    assert called == ["fetch tiny in 10 s", "train.py small"]
    assert "error: offline" in err and "the English that ships inside Python" in out
    assert out.endswith("    . .venv/bin/activate\n")


def test_a_run_that_has_begun_is_resumed_and_nothing_fetched(folder):
    (folder / "out/small").mkdir(parents=True)
    (folder / "out/small/config.json").touch()
    assert make(folder)[3] == ["train.py small --resume"]


@parametrize("target, expected", [
    ("check", ["gradcheck.py", '-m pytest .*-m not slow .*--ignore=tests/peers .*tests']),
    ("check-gpu", ["gradcheck.py --gpu", "-m pytest .* tests/test_on_gpu.py"]),
    ("check-peers", ["-m pytest .* tests/peers", "-m pytest .* -m slow tests/test_flash.py tests/test_kernels.py"])])
def test_what_a_check_runs(folder, target, expected):
    for name in "packages-tests", "packages-peers":
        (folder / ".venv" / name).touch()
    code, _, _, called = make(folder, target)
    assert code == 0 and all(map(re.fullmatch, expected, called)) and len(called) == 2


def test_a_failing_gradient_check_fails_the_check(folder):
    (folder / ".venv/packages-tests").touch()
    script(folder / ".venv/bin/python", 'if [ "$1" = -c ]; then echo runs; else echo "$@" >>called; exit 1; fi')
    code, _, _, called = make(folder, "check")
    assert code == 2 and called == ["gradcheck.py"]


def test_changed_requirements_are_installed(folder):
    script(folder / "python", 'test "$1" != -m || { rm -r .venv; mkdir -p .venv/bin; cp stand-in .venv/bin/python; }')
    shutil.copy(folder / ".venv/bin/python", folder / "stand-in")
    os.utime(folder / ".venv/packages", (1e9, 1e9))     # older than the file that it was made from
    (folder / ".venv/packages-tests").touch()           # must go with the old environment
    assert make(folder, "check", "PYTHON=./python")[0] == 0
    installed = [line.split("-r ")[1] for line in make(folder, "check", "PYTHON=./python")[3] if "pip install" in line]
    assert installed == ["requirements.txt", "tests/requirements.txt"]     # each once, though make ran twice


@parametrize("python, message", [
    ("exit 1", "error: no Python of 3.10 or later was found (./python); install one"),
    ('case "$2" in *ensurepip*) exit 1;; esac', "error: ./python cannot make environments, its modules venv and")])
def test_what_is_missing_is_said_in_one_sentence(folder, python, message):
    shutil.rmtree(folder / ".venv")
    script(folder / "python", python)
    code, _, err, called = make(folder, "PYTHON=./python")
    assert code == 2 and not called
    ours, makes = err.splitlines()
    assert ours.startswith(message) and makes.startswith("make: ***")


@parametrize("name", ["requirements.txt", "tests/peers/requirements.txt"])
def test_the_numpy_that_multiplies_wrongly_is_refused(name):
    line, = re.findall("^numpy([^ ]*)", (ROOT / name).read_text(), re.MULTILINE)
    assert list(SpecifierSet(line).filter("1.25 1.26 2.5.0 2.5.1".split())) == ["1.26", "2.5.1"]


def test_a_broken_environment_is_made_anew(folder):
    (folder / ".venv/bin/python").unlink()
    (folder / ".venv/bin/python").symlink_to("/nonexistent/python3")
    script(folder / "python", "exit 1")
    assert "no Python of 3.10 or later was found" in make(folder, "PYTHON=./python")[2]


def test_gpu_without_a_gpu_installs_nothing(folder):
    script(folder / "nvidia-smi", "exit 9")
    code, _, err, called = make(folder, "gpu", PATH=f"{folder}:{os.environ['PATH']}")
    assert code == 2 and not called and err.startswith("error: no NVIDIA GPU with its driver was found")


@parametrize("gpus, size, nccl", [(1, "0.8 GB", False), (4, "1.2 GB", True)])
def test_gpu_says_how_much_it_downloads(folder, gpus, size, nccl):
    script(folder / "nvidia-smi", "\n".join(f"echo 'GPU {i}: a card'" for i in range(gpus)))
    code, out, _, called = make(folder, "gpu", PATH=f"{folder}:{os.environ['PATH']}")
    assert code == 0 and f"about {size}" in out
    assert len(called) == 1 and "pip install" in called[0] and "cupy-cuda12x" in called[0]
    assert ("nvidia-nccl-cu12" in called[0]) == nccl


def test_clean_keeps_texts_and_models(folder):
    (folder / "out/small").mkdir(parents=True)
    (folder / "data").mkdir()
    for name in "tiny.txt python-3.11.txt train-00.bin tokenizer-512-00.json tiny.txt.part".split():
        (folder / "data" / name).touch()
    assert make(folder, "clean")[0] == 0
    assert not (folder / ".venv").exists() and (folder / "out/small").exists()
    assert sorted(os.listdir(folder / "data")) == ["python-3.11.txt", "tiny.txt"]
