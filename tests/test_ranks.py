"""Several processes, a run's ranks: the numbers of one, launchers, and what ends all when one of them fails.

CPU ranks stand in for GPUs.  Each process is a real one, of trap.py below, which plants what is to happen, in which rank
and at which call: no verdict here depends on how fast the machine is."""
import concurrent.futures
import json
import math
import multiprocessing.connection
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from multiprocessing.connection import Listener

import numpy as np
import pytest

import checkpoint
from checkpoint import Ranks

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIMIT = 45          # seconds in which a run of seconds must have ended: fewer than the 60 and 300 of what hangs
SIZES = ["--dim", "32", "--heads", "1", "--kv-heads", "1", "--layers", "1", "--context", "16", "--vocab", "264"]
# five windows a step: 2 and 3 of two ranks, 1, 2 and 2 of three
TINY = ["--data", "text.txt", *SIZES, "--batch-tokens", "80", "--micro-batch", "1", "--threads", "1", "--steps", "12",
        "--save-every", "4", "--eval-every", "6", "--device", "cpu"]
LAUNCHED = {name for names in checkpoint.LAUNCHERS for name in names} | {"MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST"}

# What the processes run.  The environment's TRAP is code, which sees at(), touch(), die() and the rank.
TRAP = '''
import os, resource, signal, sys, threading, time
sys.path.insert(0, os.environ["CODE"])
import checkpoint, model_cpu, train, sft, script, tokenizer
from checkpoint import Ranks
rank = int(os.environ.get("RANK", 0))

def at(where, name, number, action):
    """Before this call of where.name comes action."""
    function, calls = getattr(where, name), []
    def called(*arguments, **options):
        calls.append(None)
        if len(calls) == number:
            action()
        return function(*arguments, **options)
    setattr(where, name, called)

def send(number):
    return lambda: os.kill(os.getpid(), number)

def touch(name):
    open(name, "w").close()

die = send(signal.SIGKILL)

def die_upon(name):
    """When there is a file of this name, which another rank makes."""
    def wait():
        while not os.path.exists(name):
            time.sleep(0.01)
        die()
    threading.Thread(target=wait, daemon=True).start()
exec(os.environ.get("TRAP", ""))
script.run_script({"train": train, "sft": sft}[os.environ.get("SCRIPT", "train")].main, to_the_end=True)
'''


def start(folder, *arguments, trap="", **environment):
    """A process in a group of its own; what is not of this test, such as a launcher's variables, is kept from it."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    told = {"CODE": ROOT, "TRAP": trap, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.Popen([sys.executable, os.path.join(folder, "..", "trap.py"), *arguments], cwd=folder, text=True,
                            errors="replace", env={**clean, **{name: str(value) for name, value in told.items()}},
                            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(*processes):
    """-> (exit codes, stdouts, stderrs).  Output ends when nobody is left who could write, so no process is left over."""
    limit = time.monotonic() + LIMIT
    try:
        said = [process.communicate(timeout=max(0.1, limit - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            if process.returncode is None or process.stderr and not process.stderr.closed:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [process.returncode for process in processes], *map(list, zip(*said))


def run(folder, *arguments, **options):
    codes, out, err = finish(start(folder, *arguments, **options))
    return subprocess.CompletedProcess(arguments, codes[0], out[0], err[0])


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1] - 1


def by_torchrun(port, rank, size=2):
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def pair(folder, *arguments, others=None, trap="", **of_rank_1):
    """Two processes as torchrun would start them -> (exit codes, stdouts, stderrs).  others: rank 1's own arguments;
    of_rank_1: its own environment, and `where`, its folder."""
    port, where = free_port(), of_rank_1.pop("where", folder)
    return finish(start(folder, *arguments, trap=trap, **by_torchrun(port, 0)),
                  start(where, *(others or arguments), trap=trap, **{**by_torchrun(port, 1), **of_rank_1}))


def said_once(err, *words):
    """One sentence in all, with these words, and no traceback."""
    assert err.count("error:") == 1 and "Traceback" not in err and all(word in err for word in words), err


def log_of(folder, out):
    """The log without the seconds, which no run repeats."""
    with open(os.path.join(folder, out, "log.jsonl"), encoding="utf-8") as file:
        return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in file]


def weights_of(folder, out):
    """The weights of a whole checkpoint; its step and state are of one moment."""
    tensors, metadata = checkpoint.read_safetensors(os.path.join(folder, out, checkpoint.MODEL))
    path = os.path.join(folder, out, checkpoint.STATE)
    moments, of_state = checkpoint.read_safetensors(path + (".new" if os.path.exists(path + ".new") else ""))
    assert of_state["step"] == metadata["step"] and len(moments) == 2
    return int(metadata["step"]), np.concatenate([tensor.ravel() for tensor in tensors.values()])


def numbers(log):
    return [[record["step"], *record.get("losses", []), record.get("val_loss", 0.0)] for record in log]


def assert_close(folder, out, reference="one", bar=1e-5):
    ours, theirs = numbers(log_of(folder, out)), numbers(log_of(folder, reference))
    assert [len(record) for record in ours] == [len(record) for record in theirs] and len(ours) >= 12
    assert max(abs(x - y) for a, b in zip(ours, theirs) for x, y in zip(a, b)) < bar


def assert_same(folder, out, reference="two"):
    """Bit for bit: the log and the weights."""
    assert log_of(folder, out) == log_of(folder, reference)
    assert np.array_equal(weights_of(folder, out)[1], weights_of(folder, reference)[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a text, and the runs of one process, "one", and of two, "two", that nothing disturbed."""
    above = tmp_path_factory.mktemp("ranks")
    (above / "trap.py").write_text(TRAP)
    folder = above / "here"
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), rng.integers(1, 8))) for _ in range(60)]
    (folder / "text.txt").write_text(" ".join(rng.choice(words, 1500)))
    for out, gpus in ("one", "1"), ("two", "2"):
        done = run(folder, *TINY, "--out", out, "--gpus", gpus)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        (folder / f"{out}.txt").write_text(done.stdout)
    return folder


# -- the same numbers --------------------------------------------------------------------------------------------------
def test_two_ranks_give_the_losses_of_one(folder):
    """Also the held-out ones, and nearly the weights."""
    assert_close(folder, "two")
    for array in (weights_of(folder, "one"), weights_of(folder, "two")):
        assert array[0] == 12
    np.testing.assert_allclose(weights_of(folder, "two")[1], weights_of(folder, "one")[1], atol=1e-4)


def test_three_ranks_give_the_losses_of_one(folder):
    """Of whom each has other windows, and other micro-batches, than of two."""
    done = run(folder, *TINY, "--out", "three", "--gpus", "3")
    assert (done.returncode, done.stderr) == (0, "") and "3 x 1 threads" in done.stdout
    assert_close(folder, "three")


def test_more_ranks_than_windows(folder):
    """A rank without a window joins with zeros; two windows, three ranks, and the optimizer AdamW."""
    few = [*TINY, "--batch-tokens", "32", "--optimizer", "adamw"]
    for out, gpus in ("few-one", "1"), ("few-three", "3"):
        done = run(folder, *few, "--out", out, "--gpus", gpus)
        assert (done.returncode, done.stderr) == (0, "")
    assert_close(folder, "few-three", "few-one")


def test_two_runs_are_bit_identical_and_without_gpus_a_launcher_of_one_is_nothing_new(folder):
    assert run(folder, *TINY, "--out", "again", "--gpus", "2").returncode == 0
    assert_same(folder, "again")
    done = run(folder, *TINY, "--out", "alone", **by_torchrun(1, 0, 1))
    assert (done.returncode, done.stderr) == (0, "")
    assert_same(folder, "alone", "one")


def test_rank_0_alone_speaks_and_writes(folder):
    """Line for line what one process prints, up to the samples; each step once in the log."""
    one, two = ((folder / f"{out}.txt").read_text().split("\n---")[0].splitlines()[-6:] for out in ("one", "two"))
    assert [line.split()[:2] for line in one[1:]] == [line.split()[:2] for line in two[1:]] and len(two) == 6
    assert (folder / "two.txt").read_text().count("Trained two: 12 steps, 960 tokens") == 1
    assert [r["step"] for r in log_of(folder, "two") if "loss" in r] == list(range(1, 13))
    assert [r["step"] for r in log_of(folder, "two") if "val_loss" in r] == [6, 12]
    assert sorted(os.listdir(folder / "two")) == sorted(os.listdir(folder / "one"))


def test_a_run_goes_on_with_another_number_of_ranks(folder):
    """Said aloud, with the losses of one process; the note is of that moment only."""
    for out, first, then in ("up", 1, 2), ("down", 2, 1):
        stopped = run(folder, *TINY, "--out", out, "--gpus", str(first), trap="at(train, 'training_step', 5, send(15))")
        assert stopped.returncode == 128 + 15
        done = run(folder, "--resume", "--out", out, "--gpus", str(then))
        assert (done.returncode, done.stderr) == (0, "")
        assert f"was one of {first} processes and goes on with {then}: the same batches" in done.stdout
        assert_close(folder, out)
        assert checkpoint.load_state(folder / out)["ranks"] == then


def test_fine_tuning_with_two_ranks(folder):
    """The same losses and held-out losses as with one; rank 0 alone prints."""
    talk = [{"instruction": f"say {word}", "output": f"{word} {word}"} for word in "abcdefghijklmnopqrstuvwx"]
    (folder / "talk.json").write_text(json.dumps(talk))
    for out, gpus in ("sft-one", "1"), ("sft-two", "2"):
        done = run(folder, "--base", "one", "--data", "talk.json", "--out", out, "--gpus", gpus, "--epochs", "6", "--device",
                   "cpu", "--batch-tokens", "48", "--micro-batch", "1", "--threads", "1", "--eval-every", "8", SCRIPT="sft")
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("Held-out loss") == 1
    assert_close(folder, "sft-two", "sft-one")
    assert checkpoint.load_state(folder / "sft-two")["ranks"] == 2


def test_one_rank_makes_the_corpus_where_none_is_named(folder):
    """Two that wrote the same file would take it from under each other's hands."""
    empty = folder.parent / "empty"
    empty.mkdir()
    trap = """
def make(path):
    time.sleep(0.3 * (rank == 0))                       # long enough for the other to begin, too, did it not wait
    touch(f"by {rank}")
    os.makedirs("data", exist_ok=True)
    os.link("../here/text.txt", path)
train.write_python_corpus = make"""
    options = [*TINY[2:], "--steps", "2", "--out", "made", "--gpus", "2"]
    done = run(empty, *options, trap=trap)
    assert (done.returncode, done.stderr) == (0, "") and sorted(os.listdir(empty)) == [".made.lock", "by 0", "data", "made"]
    assert numbers(log_of(empty, "made"))[0] == numbers(log_of(folder, "two"))[0]


# -- launchers ---------------------------------------------------------------------------------------------------------
MEET = "train.run = lambda args, ranks: print([ranks.rank, ranks.size, ranks.local], ranks.all_gather(ranks.rank))"


def test_two_processes_as_torchrun_starts_them(folder):
    """The bits of --gpus 2.  Rank 1 comes first: rank 0 starts when it has called in vain."""
    port = free_port()
    trap = "import multiprocessing.connection as c; at(c, 'Client', 2, lambda: touch('called'))"
    second = start(folder, *TINY, "--out", "launched", trap=trap, **by_torchrun(port, 1))
    limit = time.monotonic() + LIMIT
    while not (folder / "called").exists() and time.monotonic() < limit:
        time.sleep(0.01)
    codes, out, err = finish(start(folder, *TINY, "--out", "launched", **by_torchrun(port, 0)), second)
    assert codes == [0, 0] and err == ["", ""] and out[1] == "" and "Trained launched" in out[0]
    assert_same(folder, "launched")


@pytest.mark.parametrize("names", [
    {"OMPI_COMM_WORLD_RANK": "r", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "7"},
    {"PMI_RANK": "r", "PMI_SIZE": "2", "MPI_LOCALRANKID": "7"},
    {"SLURM_PROCID": "r", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "7", "SLURM_STEP_NODELIST": "127.0.0.1"}])
def test_two_processes_as_others_start_them(folder, names):
    """Open MPI, MPICH, srun."""
    port = free_port()
    codes, out, err = finish(*(start(folder, trap=MEET, MASTER_PORT=port, **{
        name: str(rank) if value == "r" else value for name, value in names.items()}) for rank in (1, 0)))
    assert (codes, out, err) == ([0, 0], ["", "[0, 2, 7] [0, 1]\n"], ["", ""])


@pytest.fixture
def environment(monkeypatch):
    """-> function (variables of a launcher) that sets them, and no others."""
    def only(**variables):
        for name in LAUNCHED:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
    only()
    return only


def test_variables_that_make_no_sense(environment):
    known = "RANK, WORLD_SIZE, LOCAL_RANK in the environment do not say which rank this is"
    for variables, words in (({"RANK": "x", "WORLD_SIZE": 2}, known), ({"RANK": 2, "WORLD_SIZE": 2}, known + r" \(2 of 2\)\.$"),
                             ({"RANK": -1, "WORLD_SIZE": 2}, known), ({"RANK": 0, "WORLD_SIZE": 0}, known),
                             ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": ""}, known),
                             ({**by_torchrun("x", 0)}, "MASTER_PORT in the environment is no port"),
                             ({**by_torchrun(65535, 1)}, "MASTER_PORT in the environment is no port"),
                             ({**by_torchrun(-1, 1)}, r"MASTER_PORT in the environment is no port \(ours is one more, 0\)"),
                             ({**by_torchrun(-5, 1)}, "MASTER_PORT in the environment is no port")):
        environment(**variables)
        with pytest.raises(ValueError, match=words):
            checkpoint.find_ranks(None, 1)
    environment(RANK=0, WORLD_SIZE=2)
    with pytest.raises(ValueError, match="^--gpus 4 does not fit the 2 processes of the launcher.$"):
        checkpoint.find_ranks(4, 1)


@pytest.mark.parametrize("variables", [{}, by_torchrun(1, 0, 1), *(
    {name: value} for rank, size, _ in checkpoint.LAUNCHERS for name, value in ((rank, 0), (size, 2)))])
def test_a_run_of_one_opens_no_port_and_starts_no_thread(environment, monkeypatch, variables):
    """And one of a launcher's two variables, without the other, makes no launcher."""
    for where, name in (multiprocessing.connection, "Listener"), (Ranks, "call"), (threading, "Thread"):
        monkeypatch.setattr(where, name, None)
    environment(**variables)
    for gpus in (None, 1):
        ranks = checkpoint.find_ranks(gpus, 9)
        assert (ranks.rank, ranks.size, ranks.local) == (0, 1, 0)


def test_a_launcher_that_makes_no_sense_is_one_sentence(folder):
    done = run(folder, *TINY, "--out", "none", RANK=3, WORLD_SIZE=2)
    assert done.returncode == 2 and done.stdout == "" and not (folder / "none").exists()
    said_once(done.stderr, "do not say which rank this is (3 of 2).")


@pytest.mark.parametrize("nodes, host", [("node[03-06,11]", "node03"), ("a,b", "a"), ("node7", "node7"), ("g-[1,4]", "g-1")])
def test_the_first_of_sruns_hosts(environment, monkeypatch, nodes, host):
    """Where the others call; each of them is watched while it does."""
    called, watched = [], threading.Event()
    monkeypatch.setattr(Ranks, "call", lambda self, address: called.append(address) or watched.wait(LIMIT) or called.clear())
    monkeypatch.setattr(Ranks, "watch", lambda self: watched.set())
    monkeypatch.setattr(sys, "stdout", sys.stdout)          # which rank 1 closes
    for more, where in ({}, (host, 29501)), ({"MASTER_PORT": 7}, (host, 8)), ({"MASTER_ADDR": "c"}, ("c", 29501)):
        environment(SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2, SLURM_LOCALID=0, SLURM_STEP_NODELIST=nodes, **more)
        ranks = checkpoint.find_ranks(None, 9)
        assert called.pop() == where and (ranks.rank, ranks.size, ranks.local) == (1, 2, 0) and ranks.seen == math.inf


# -- a death -----------------------------------------------------------------------------------------------------------
def resume_exactly(folder, out):
    done = run(folder, "--resume", "--out", out, "--gpus", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert_same(folder, out)


# moments of a run's 12 steps with saves at 0, 4, 8, 12, the trap, which rank dies, the step that is on disk then, and whether
# to go on with it, too
DEATHS = {
    "a step of 1": ("if rank == 1: at(train, 'training_step', 6, die)", 1, 4, True),
    "a sum of 1": ("if rank == 1: at(Ranks, 'all_reduce', 11, die)", 1, 4, False),
    "a sum of 0": ("if rank == 0: at(Ranks, 'all_reduce', 11, die)", 0, 4, False),
    "rank 1 while 0 saves": ("""
if rank == 0: at(checkpoint, "write_safetensors", 6, lambda: (touch("saving"), time.sleep(99)))
else: die_upon("saving")""", 1, 4, True),
    "rank 0 between its two files": ("if rank == 0: at(os, 'replace', 14, die)", 0, 8, True),
    "rank 1, which is done": ("""
if rank == 0: at(checkpoint, "write_safetensors", 8, lambda: (touch("ending"), time.sleep(99)))
else: at(Ranks, "__exit__", 1, lambda: die_upon("ending"))""", 1, 8, False),
    "rank 0, for which 1 waits": ("if rank == 0: at(Ranks, '__exit__', 1, lambda: (time.sleep(0.5), die()))", 0, 12, False),
}


# at the start of a run: the trap, the exit code, and how many sentences there are
BIRTHS = {
    "before 1 has called": ("if rank == 1: at(checkpoint, 'find_ranks', 1, die)", 1, 1),
    "between the calls of 1": ("import multiprocessing.connection as c\nif rank == 1: at(c, 'Client', 2, die)", 1, 1),
    "0 before 1 has called": ("if rank == 0: at(Ranks, 'answer', 1, die)", -9, 0),      # nobody would know its number
    "1 while it prepares": ("if rank == 1: at(train, 'prepare', 1, die)", 1, 1),
    "0 while it prepares": ("if rank == 0: at(train, 'prepare', 1, die)", -9, 1)}
# a signal to a rank: the trap, and the signal
SIGNALS = {
    "1 alone": ("if rank == 1: at(train, 'training_step', 6, send(signal.SIGTERM))", signal.SIGTERM),
    "0 alone": ("if rank == 0: at(train, 'training_step', 6, send(signal.SIGINT))", signal.SIGINT),
    "all": ("if rank == 0: at(train, 'training_step', 6, lambda: os.killpg(0, signal.SIGINT))", signal.SIGINT)}


@pytest.fixture(scope="module")
def ended(folder):
    """{name: how a run went in which that happened}.  Some at a time, as most of their time they wait."""
    def one(name, trap, *options):
        try:
            return name, run(folder, *TINY, "--out", name, "--gpus", "2", *options, trap=trap)
        except subprocess.TimeoutExpired as error:              # of one, and not of all
            return name, subprocess.CompletedProcess([], "has not ended", "", str(error))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [(name, trap) for name, (trap, *_) in {**DEATHS, **BIRTHS}.items()]
        jobs += [(name, trap, "--save-every", "100") for name, (trap, _) in SIGNALS.items()]
        return dict(pool.map(lambda job: one(*job), jobs))


@pytest.mark.parametrize("moment", DEATHS)
def test_a_rank_that_is_killed_ends_all(folder, ended, moment):
    """One sentence by who is left, the last checkpoint whole; and the resumed run has the bits of one undisturbed."""
    _, dead, step, again = DEATHS[moment]
    assert ended[moment].returncode == (-signal.SIGKILL if dead == 0 else 1)
    said_once(ended[moment].stderr, f"error: rank {dead} has died; what was last saved stays.\n")
    assert weights_of(folder, moment)[0] == step
    if again:
        resume_exactly(folder, moment)


@pytest.mark.parametrize("moment", BIRTHS)
def test_a_rank_that_is_killed_at_the_start(folder, ended, moment):
    """Without rank 0, and before there is a rank 1, nobody is left to say it.  The first save is whole, or is none."""
    _, code, words = BIRTHS[moment]
    assert ended[moment].returncode == code and "Traceback" not in ended[moment].stderr
    assert ended[moment].stderr.count("has died") == ended[moment].stderr.count("error") == words
    assert not (folder / moment / checkpoint.MODEL).exists() or weights_of(folder, moment)[0] == 0


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_to_any_rank_ends_all_with_one_save(folder, ended, name):
    """After the step by which all know of it; and the run goes on with the same bits."""
    done, step = ended[name], weights_of(folder, name)[0]
    assert done.returncode == 128 + SIGNALS[name][1] and 6 <= step <= 8 and log_of(folder, name)[-1]["step"] == step
    assert done.stderr.count(f"Saved {name} at step {step}. Go on with: ") == 1 and "error" not in done.stderr
    assert done.stderr.count("Finishing the step") == (0 if name == "1 alone" else 1)
    resume_exactly(folder, name)


# -- ranks that do not belong together ---------------------------------------------------------------------------------
def refused(result, *words):
    codes, out, err = result
    assert 0 not in codes
    said_once("".join(err), *words)


def test_a_wrong_number_of_ranks_on_one_side(folder):
    for sizes in (2, 3), (3, 2):
        port = free_port()
        refused(finish(*(start(folder, trap=MEET, **by_torchrun(port, rank, sizes[rank])) for rank in (0, 1))),
                f"rank 1 of {sizes[1]} calls rank 0 of {sizes[0]}: they are of two runs")


def test_two_of_the_same_rank(monkeypatch):
    left = []
    monkeypatch.setattr(Ranks, "leave", lambda self, sentence: left.append(sentence) or sys.exit())
    rank0 = Ranks(0, 3)
    listener = Listener(("127.0.0.1", 0), backlog=6)
    callers = [threading.Thread(target=Ranks(1, 3).call, args=[listener.address], daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    with pytest.raises(SystemExit):
        rank0.answer(listener)
    listener.close()
    assert left == ["rank 1 of 3 calls rank 0 of 3: they are of two runs"]


@pytest.mark.parametrize("others, wrong", [(["--seed", "5"], "seed and weights"), (["--lr", "0.1"], "lr")])
def test_a_rank_with_other_settings(folder, others, wrong):
    refused(pair(folder, *TINY, "--out", "other", others=[*TINY, "--out", "other", *others]),
            f"rank 1 has other {wrong} than rank 0")


def test_a_rank_with_another_corpus_or_code(folder):
    """A file of the same name; a comment more."""
    elsewhere, code = folder.parent / "elsewhere", folder.parent / "code"
    elsewhere.mkdir()
    (elsewhere / "text.txt").write_text((folder / "text.txt").read_text() + " end")
    refused(pair(folder, *TINY, "--out", "other", where=elsewhere), "rank 1 has other tokens_key than rank 0")
    shutil.copytree(ROOT, code, ignore=lambda where, names: [name for name in names if not name.endswith((".py", ".cu"))
                                                             or name.startswith("test")])
    with open(code / "model_gpu.py", "a") as file:
        file.write("# altered\n")
    refused(pair(folder, *TINY, "--out", "other", CODE=code), "rank 1 has other code than rank 0")


def test_weights_that_part(folder):
    """Seen at the next save, which is not made."""
    trap = "if rank == 1: at(train, 'training_step', 6, lambda: here[0].__setitem__(0, 9.0))"
    trap = ("here = []\nmake = model_cpu.Model.__init__\n"
            "model_cpu.Model.__init__ = lambda self, *a, **o: (make(self, *a, **o), here.append(self.flat_params))[0]\n" + trap)
    done = run(folder, *TINY, "--out", "parted", "--gpus", "2", trap=trap)
    assert done.returncode in (1, 2) and weights_of(folder, "parted")[0] == 4
    said_once(done.stderr, "rank 1 has other weights than rank 0")


def test_an_error_of_one_rank_alone(folder):
    """Its data file is missing, and nowhere else: rank 0 says what rank 1 cannot."""
    bare = folder.parent / "bare"
    bare.mkdir()
    refused(pair(folder, *TINY, "--out", "other", where=bare),
            "error: rank 1: text.txt is not a file; --data takes text files; what was last saved stays.\n")
    trap = "if rank == 1: at(train, 'training_step', 3, lambda: 1 / 0)"
    done = run(folder, *TINY, "--out", "other", "--gpus", "2", trap=trap)
    assert done.returncode == 1
    said_once(done.stderr, "error: rank 1: division by zero; what was last saved stays.")


def test_an_error_of_all_ranks_is_said_once(folder):
    for options, words in ((["--data", "missing.txt", "--out", "other"], "missing.txt is not a file"),
                           (["--resume", "--out", "nowhere"], "there is nothing to resume in nowhere")):
        done = run(folder, *options, "--device", "cpu", "--gpus", "2")
        assert done.returncode in (1, 2) and done.stdout == ""
        said_once(done.stderr, words)


def test_an_error_of_rank_0_alone(folder):
    """A full disk, which a limit on the size of files stands in for, while it saves."""
    trap = ("if rank == 0: at(checkpoint, 'write_safetensors', 5, "
            "lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)))")
    done = run(folder, *TINY, "--out", "full", "--gpus", "2", trap=trap)
    assert done.returncode == 2 and weights_of(folder, "full")[0] == 4
    said_once(done.stderr, "error: Cannot use full: File too large.")
    resume_exactly(folder, "full")


def test_a_number_that_is_not_finite(folder):
    """In a checkpoint's weights: named at once; in a run: by all ranks, and said by one."""
    shutil.copytree(folder / "two", folder / "nan")
    path = folder / "nan" / checkpoint.MODEL
    tensors, metadata = checkpoint.read_safetensors(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {each: np.array(tensor) for each, tensor in tensors.items()}      # not of the file that is written anew
    tensors[name][3, 5] = np.nan
    checkpoint.write_safetensors(path, tensors, {name: value for name, value in metadata.items() if name != "crc32"})
    done = run(folder, "--resume", "--out", "nan", "--steps", "20", "--gpus", "2")
    assert done.returncode in (1, 2) and done.stdout == ""
    said_once(done.stderr, "the tensor model.layers.0.mlp.up_proj.weight holds numbers that are not finite")
    done = run(folder, *TINY, "--out", "wild", "--gpus", "2", "--lr", "1e38")
    assert done.returncode == 1 and weights_of(folder, "wild")[0] == 0
    said_once(done.stderr, "error: step 2 is not finite", "the first gradient that is not finite is embed", "wild keeps its")


def test_who_says_why_all_end(monkeypatch, capfd):
    """Rank 0 does; rank 1 does where rank 0 cannot; the others would only say it once more."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    for rank, sentence, said in ((0, "why", 1), (1, "why", 1), (2, "why", 0), (3, "why", 0), (0, "", 0)):
        with pytest.raises(SystemExit) as ended:
            Ranks(rank, 4).leave(sentence)
        assert ended.value.code == 1
        assert capfd.readouterr().err == said * "error: why; what was last saved stays.\n"


# -- no progress -------------------------------------------------------------------------------------------------------
def test_a_rank_that_stops(folder):
    """SIGSTOP in a step: the others give up, and --gpus leaves no process behind."""
    done = run(folder, *TINY, "--out", "still", "--gpus", "2", "--timeout", "2",
               trap="if rank == 1: at(train, 'training_step', 6, send(signal.SIGSTOP))")
    assert done.returncode == 1 and weights_of(folder, "still")[0] == 4
    said_once(done.stderr, "error: nothing went on for 2 seconds; what was last saved stays.")


def test_a_death_that_nobody_reads_of_ends_all(folder):
    """The terminal, say, is gone to which the sentence goes."""
    process = start(folder, *TINY, "--out", "unread", "--gpus", "2", trap="if rank == 1: at(train, 'training_step', 6, die)")
    process.stderr.close()
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and "step     1/12" in out


def test_a_rank_that_never_comes(folder):
    """Rank 0 and rank 1 wait in vain for rank 2.  Meanwhile, another run: a port in use."""
    port = free_port()
    waiting = [start(folder, "--timeout", "1", trap=MEET, **by_torchrun(port, rank, 3)) for rank in (0, 1)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        done = run(folder, trap=MEET, **by_torchrun(busy - 1, 0))
    assert done.returncode == 2
    said_once(done.stderr, f"error: Cannot use port {busy}, which is MASTER_PORT + 1: Address already in use.")
    refused(finish(*waiting), "error: nothing went on for 1 seconds: 1 of 3 ranks have not come")


def test_what_the_watch_says_of_time(monkeypatch):
    """Rank 0 first, the others later, should it be rank 0 that hangs; and nobody while nothing is waited for."""
    said = []

    def leave(ranks, sentence):
        said.append(sentence)
        ranks.ended = True
    monkeypatch.setattr(Ranks, "leave", leave)
    for rank, late, words in ((0, 9, "nothing went on for 7 seconds: 2 of 3 ranks have not come"), (0, -math.inf, None),
                              (1, 9, None), (1, 13, "nothing went on for 7 seconds"), (2, 19, "nothing went on for 7 seconds")):
        ranks = Ranks(rank, 3, 0, 7)
        ranks.seen = time.monotonic() - late
        ending = threading.Timer(0 if words else 0.2, lambda: setattr(ranks, "ended", ranks.ended or not words))
        ending.start()
        ranks.watch()
        ending.join()
        assert said == ([words] if words else []), (rank, late)
        said.clear()


@pytest.mark.parametrize("error", [ConnectionResetError, EOFError])
def test_whose_connection_breaks_has_died(monkeypatch, error):
    """However it breaks.  Who waits for that rank leaves the sentence to the watch."""
    def broken(*_):
        raise error
    ranks, slept = Ranks(0, 2), []
    ranks.lives[1] = ranks.lines[1] = types.SimpleNamespace(poll=lambda: True, recv_bytes=broken)
    monkeypatch.setattr(Ranks, "leave", lambda self, sentence: sys.exit(sentence))
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(SystemExit, match="^rank 1 has died$"):
        ranks.watch()
    slept.clear()
    with pytest.raises(error):
        ranks.all_gather(0)
    assert len(slept) == 1 and slept[0] > 10


def test_a_rank_that_fails_leaves_the_sentence_to_rank_0(monkeypatch, capfd):
    ranks, told = Ranks(1, 2), []
    ranks.lives[0] = types.SimpleNamespace(send_bytes=told.append)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as left, ranks:
        raise ValueError("data/x.txt is gone.")
    assert (left.value.code, told, capfd.readouterr()) == (2, [b"data/x.txt is gone"], ("", ""))


# -- Ranks by itself ---------------------------------------------------------------------------------------------------
def together(size, function, **options):
    """function(ranks) of connected ranks, each in a thread -> [what it returns, or the ValueError it raises]."""
    everybody = [Ranks(rank, size, rank, **options) for rank in range(size)]
    listener, results = Listener(("127.0.0.1", 0), backlog=2 * size), [None] * size

    def one(ranks):
        ranks.answer(listener) if ranks.rank == 0 else ranks.call(address)
        try:
            results[ranks.rank] = function(ranks)
        except ValueError as error:
            results[ranks.rank] = error
    address = listener.address
    threads = [threading.Thread(target=one, args=[ranks], daemon=True) for ranks in everybody]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_a_run_of_one_has_nobody_to_talk_to():
    inputs = np.zeros((3, 4))
    with Ranks() as ranks:
        assert ranks.all_gather({"a": 1.5}) == [{"a": 1.5}] and ranks.agree(x=1) is None
        ranks.all_reduce(array := np.array([1.0, 2.0]))
        assert array.tolist() == [1.0, 2.0]
        assert all(np.array_equal(part, inputs) for part in ranks.share(inputs, inputs)) and not ranks.ended
    assert ranks.ended                                      # what the watch sees from here on is no death


@pytest.mark.parametrize("error", [None, ValueError("so")])
def test_processes_that_were_started_are_waited_for_and_killed_where_something_failed(error):
    """Before it is waited for: one that hangs would never end."""
    done, ranks = [], Ranks()
    ranks.children = {rank: types.SimpleNamespace(kill=lambda rank=rank: done.append(("kill", rank)),
                                                  wait=lambda rank=rank: done.append(("wait", rank))) for rank in (1, 2)}
    ranks.__exit__(error and ValueError, error, None)
    assert done == [(what, rank) for rank in (1, 2) for what in (["kill", "wait"] if error else ["wait"])]


def test_everybody_hears_what_everybody_says():
    heard = together(3, lambda ranks: ranks.all_gather([ranks.rank, math.inf]))
    assert heard == 3 * [[[0, math.inf], [1, math.inf], [2, math.inf]]]


def test_who_does_not_agree_is_named_to_all():
    assert together(2, lambda ranks: ranks.agree(x=math.inf, data=["a"])) == [None, None]
    said = together(3, lambda ranks: ranks.agree(x=ranks.rank // 2, y=ranks.rank // 2, z=0))
    assert [str(error) for error in said] == 3 * ["rank 2 has other x and y than rank 0."]
    said = together(2, lambda ranks: ranks.agree(x=1, **({"y": 5} if ranks.rank else {"z": 5})))        # of other versions
    assert [str(error) for error in said] == 2 * ["rank 1 has other y than rank 0."]


@pytest.mark.parametrize("size, rows", [(1, 4), (2, 8), (2, 5), (3, 8), (4, 3), (5, 1)])
def test_each_window_is_of_one_rank(size, rows):
    """In their order, as even as can be; who has none learns nothing from one."""
    inputs, targets = np.arange(rows * 2).reshape(rows, 2), np.arange(rows * 3).reshape(rows, 3)
    shares = [Ranks(rank, size).share(inputs, targets) for rank in range(size)]
    own = [share for share in shares if (share[1] >= 0).any()]
    assert all(np.array_equal(np.concatenate(parts), whole) for parts, whole in zip(zip(*own), (inputs, targets)))
    assert {len(x) for x, _ in own} <= {rows // size, -(-rows // size)} and len(own) == min(rows, size)
    assert all(x.shape == (1, 2) and y.shape == (1, 3) and (y == -1).all() for x, y in shares if not (y >= 0).any())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_sum_has_one_order(dtype):
    """((a0 + a1) + a2), the same bits on all; arrays of any shape, larger than what a socket holds."""
    parts = [np.random.default_rng(rank).standard_normal((3, 300_001)).astype(dtype) for rank in range(3)]

    def add(ranks):
        array = parts[ranks.rank].copy()
        ranks.all_reduce(array)
        return array
    assert all(np.array_equal(array, parts[0] + parts[1] + parts[2]) for array in together(3, add))


def test_strangers_do_no_harm(monkeypatch):
    """Whatever they send, or if they say nothing for 5 seconds, here 0.1: all ranks still meet."""
    connection, asked = multiprocessing.connection.Connection, []
    poll = connection.poll
    monkeypatch.setattr(connection, "poll", lambda self, limit: asked.append(limit) or poll(self, limit / 50))
    rank0, rank1 = Ranks(0, 2), Ranks(1, 2)
    listener = Listener(("127.0.0.1", 0), backlog=6)
    strangers = [b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 40, b"\0\0\0\2[]", b"\0\0\0\3abc", b"\0\0\0\1\xff",
                 b'\0\0\0\x14["other","life",1,2]', b'\0\0\0\x0c"NanoEuler!"', None]
    address = listener.address
    answer = threading.Thread(target=rank0.answer, args=[listener], daemon=True)
    answer.start()
    for said in strangers:
        with socket.create_connection(address, LIMIT) as connection:
            if said is None:
                assert connection.recv(9) == b""                    # one that was only slow would call again
            else:
                connection.sendall(said)
    rank1.call(address)
    answer.join(LIMIT)
    assert [*rank0.lives] == [1] and len(rank0.lines) == len(rank1.lines) == len(rank1.lives) == 1
    assert set(asked) == {5} and len(asked) >= len(strangers) + 2


def test_one_rank_waits_for_another_and_not_for_itself():
    """The clock of --timeout runs while a rank waits, and not while it prepares or evaluates."""
    seen = []

    def wait(ranks):
        before, now = ranks.seen, time.monotonic()
        with ranks.waiting():
            seen.append(now <= ranks.seen <= time.monotonic())
        return before < math.inf and ranks.seen == math.inf
    assert wait(Ranks()) and seen == [True]


# -- the GPUs' side, without one ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("own, first", [((-3, 0, 127), (9, -9)), (b"\3\0", b"\t\xff")])
def test_nccl_is_asked_in_order(monkeypatch, own, first):
    """The id is rank 0's; a sum waits for our kernels by an event, they for it by another, and it is of float32."""
    done = []

    class Stream:
        ptr = 0

        def __init__(self, non_blocking=False, ptr=5):
            assert non_blocking
            self.ptr = ptr

        def wait_event(self, event):
            done.append(("waits", self.ptr, event.at))

    class Event:
        def __init__(self, disable_timing):
            assert disable_timing

        def record(self, stream=None):
            self.at = (stream or current).ptr
            done.append(("record", self.at))

    current = Stream(True, 1)
    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.NCCL_FLOAT32, nccl.NCCL_SUM, nccl.NCCL_CHAR, nccl.get_unique_id = 7, 0, 3, lambda: own
    nccl.groupStart, nccl.groupEnd = (lambda: done.append("start")), (lambda: done.append("end"))
    communicator = types.SimpleNamespace(allReduce=lambda *call: done.append(call), bcast=lambda *call: done.append(call))
    nccl.NcclCommunicator = lambda *arguments: done.append(arguments) or communicator
    cuda, cupy = types.ModuleType("cupy.cuda"), types.ModuleType("cupy")
    cuda.nccl, cuda.Stream, cuda.Event, cuda.get_current_stream, cupy.cuda = nccl, Stream, Event, lambda: current, cuda
    for name, module in ("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", nccl):
        monkeypatch.setitem(sys.modules, name, module)
    ranks = Ranks(1, 4)
    ranks.all_gather = lambda said: [list(first), said == list(own) or pytest.fail()]
    sums = checkpoint.Nccl(ranks)
    assert done == [(4, first, 1)] and ranks.seen == math.inf
    done.clear()
    sums.all_reduce(types.SimpleNamespace(data=types.SimpleNamespace(ptr=4096), size=33, dtype=np.float32))
    sums.wait()
    assert done == [("record", 1), ("waits", 5, 1), (4096, 4096, 33, 7, 0, 5), ("record", 5), ("waits", 1, 5)]
    done.clear()
    sums.all_gather(Rows(4096, 6))                              # 1, 2, 1, 2 rows of 10 bytes, in the kernels' own stream
    assert done == ["start", (4096, 10, 3, 0, 1), (4106, 20, 3, 1, 1), (4126, 10, 3, 2, 1), (4136, 20, 3, 3, 1), "end"]


class Rows:
    """An array on a GPU of rows of 10 bytes, for what a sum by NCCL asks of one."""
    def __init__(self, ptr, rows):
        self.data, self.nbytes = types.SimpleNamespace(ptr=ptr), 10 * rows

    def __len__(self):
        return self.nbytes // 10

    def __getitem__(self, part):
        return Rows(self.data.ptr + 10 * part.start, part.stop - part.start)


def test_several_gpus_without_nccl(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ValueError, match="^Several GPUs need NVIDIA's NCCL: run `make gpu` "):
        checkpoint.Nccl(Ranks())
