"""The Makefile in a folder of its own, with stand-ins for Python and for what is called: what it runs, what it says."""
import os
import pathlib
import shutil
import subprocess

import pytest
from cases import parametrize


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """-> function(arguments of make) -> (exit code, standard output, standard error, what was called, sorted).  All runs in
    a folder with an environment that is already there; its Python writes down what it is called with, and fails where a
    file of the name of its script stands in fails/."""
    monkeypatch.chdir(tmp_path)
    for name in "tests", ".venv/bin", "out/small", "data", "fails":
        os.makedirs(name)
    shutil.copy(f"{os.path.dirname(__file__)}/../Makefile", ".")
    for name in "", "tests/":
        pathlib.Path(f"{name}requirements.txt").touch()
    for name in "", "-tests":
        pathlib.Path(f".venv/packages{name}").touch()
    script(tmp_path / ".venv/bin/python", '[ "$1" = -c ] && exec echo runs; echo "$@" >>called; ! [ -e "fails/$1" ]')
    script(tmp_path / "fetch_data.sh", 'echo "fetch $@ in $FETCH_TIMEOUT s" >>called; echo error: offline >&2; exit 2')
    monkeypatch.delenv("MAKEFLAGS", raising=False)      # of the make that runs the tests

    def run(*arguments):
        done = subprocess.run(["make", *arguments], capture_output=True, text=True)
        called = sorted(open("called").read().splitlines()) if os.path.exists("called") else []
        return done.returncode, done.stdout, done.stderr, called
    return run


def test_it_trains_offline_too_and_goes_on_with_a_run(make):
    _, out, err, called = make()
    assert called == ["fetch tiny in 10 s", "train.py small"]
    assert err == "error: offline\n" and "the English that ships inside Python" in out
    pathlib.Path("out/small/config.json").touch()
    assert make()[3] == [*called, "train.py small --resume"]


@parametrize("which", ["gradcheck.py", "-m"])
def test_either_proof_that_fails_fails_the_check(make, which):
    """They run side by side."""
    pathlib.Path("fails", which).touch()
    code, _, _, called = make("check")
    assert code == 2 and len(called) == 2


def test_a_missing_python_is_said_in_one_sentence(make):
    shutil.rmtree(".venv")
    code, _, err, called = make("PYTHON=/nonexistent")
    assert code == 2 and not called and err.startswith("error: no Python of 3.10 or later was found (/nonexistent); install one")


def test_gpu_without_a_gpu_installs_nothing(make, tmp_path):
    script(tmp_path / "nvidia-smi", "exit 9")
    code, _, err, called = make("gpu", f"PATH={tmp_path}:{os.environ['PATH']}")
    assert code == 2 and not called and err.startswith("error: no NVIDIA GPU with its driver was found")


def test_clean_keeps_texts_and_models(make):
    for name in "tiny.txt train-00.bin tiny.txt.part".split():
        pathlib.Path("data", name).touch()
    make("clean")
    assert not os.path.exists(".venv") and os.path.exists("out/small") and os.listdir("data") == ["tiny.txt"]
