"""Several processes, the ranks of a run, started by mpiexec: they compute what one does, and end together."""
import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from cases import parametrize
from runs import JOBS, LIMIT, prepare, read_log, result_of, run

HERE = os.path.dirname(__file__)
MPIEXEC = shutil.which("mpiexec", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
pytestmark = pytest.mark.skipif(not MPIEXEC or not importlib.util.find_spec("mpi4py"),
                                reason="several processes need MPI: pip install mpi4py mpich")
# What a rank runs.  A trap, which is code, plants what is to happen in it.
RANK = """
import os, sys
sys.path[:0] = {paths}
import train
from runs import at, send
rank = int(os.environ["PMI_RANK"])
{trap}
sys.argv = {command}
train.run_script(__import__(sys.argv[0][:-3]).main, to_the_end=True)
"""


def start_ranks(number, command, trap=""):
    """-> the CompletedProcess of so many ranks.  Its output ends when nobody is left who could write: so no process is
    left over."""
    program = RANK.format(paths=[os.path.dirname(HERE), HERE], trap=trap, command=command.split())
    return subprocess.run([MPIEXEC, "-n", str(number), sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=LIMIT)


@pytest.fixture(scope="module", autouse=True)
def folder(new_folder):
    prepare()


def command(job, out):
    return f"{JOBS[job]} --steps 4 --save-every 2 --threads 1 --micro-batch 1 --out {out}"


def untouched(number, job="train"):
    """-> the folder of a run of so many ranks."""
    out = f"{job}-{number}"
    if not os.path.exists(out):
        done = start_ranks(number, command(job, out))
        # rank 0 alone prints
        assert (done.returncode, done.stderr, done.stdout.count("Talk to it")) == (0, "", 1), done
    return out


@parametrize("job, number", [*[(job, 2) for job in JOBS], ("train", 5)])
def test_several_ranks_compute_what_one_does(job, number):
    """But for rounding; also where there are more ranks than the four rows of a step."""
    run(command(job, f"one-{job}-{number}"))
    for ours, one in zip(read_log(untouched(number, job)), read_log(f"one-{job}-{number}"), strict=True):
        assert ours.keys() == one.keys()
        for key in one.keys() - {"samples", "val"}:
            assert ours[key] == pytest.approx(one[key], abs=1e-6), key


@parametrize("ranks, number", [([0], 9), ([1], 9), ([1], 15), ([0, 1], 2)])
def test_a_signal_to_some_ranks_ends_all_and_the_run_goes_on_with_the_same_bits(ranks, number):
    """SIGKILL; SIGTERM, and Ctrl-C, which reaches all, with one save."""
    out = f"signal{number}-{len(ranks)}{ranks[0]}"
    done = start_ranks(2, command("train", out), f"if rank in {ranks}: at(train, 'learning_rate', 3, send({number}))()")
    assert done.returncode and "error:" not in done.stderr
    assert done.stderr.count(f"Saved {out} at step 3") == (number != 9)
    done = start_ranks(2, f"train.py --resume --out {out}")
    assert f"at step {2 + (number != 9)} of 4" in done.stdout
    assert result_of(out) == result_of(untouched(2))


def test_ranks_on_gpus_stop_together_when_they_read_numbers():
    """A signal that only one of them has got comes to all."""
    trap = ("from runs import as_on_a_gpu; as_on_a_gpu(); train.REPORT_EVERY = 3\n"
            "if rank: at(train, 'learning_rate', 2, send(15))()")
    done = start_ranks(2, f"{command('train', 'together')} --save-every 9", trap)
    assert done.stderr.count("Saved together at step 3") == 1


@parametrize("option, trap, words", [
    ("--seed 5", "", "rank 0: the run in train-2 has --seed 0, not 5"),
    ("", "if rank: at(train, 'open_run', 1, lambda: int('x'))()", "rank 1: invalid literal for int")])
def test_an_error_is_said_once_and_by_which_rank(option, trap, words):
    done = start_ranks(2, f"train.py --resume --out {untouched(2)} {option}", trap)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and f"error: {words}" in done.stderr, done.stderr


def test_what_is_printed_is_printed_once():
    base = untouched(2)
    done = start_ranks(2, f"train.py --evaluate {base} --data text")
    assert (done.returncode, done.stdout.count("bits/byte"), done.stderr) == (0, 1, "")
