"""Several processes, a run's ranks, started by mpiexec: the numbers of one process, and what ends them all.

CPU ranks stand in for GPUs.  Each process is a real one, of trap.py below, which plants what is to happen, in which rank
and at which call: no verdict here depends on how fast the machine is."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from cases import once_a_module, parametrize, value_error, write
from runs import read_log, shell_words, succeeded

import checkpoint
import train
from train import Nccl, Ranks

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BESIDE = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
MPIEXEC = shutil.which("mpiexec", path=BESIDE)
LIMIT = 100         # seconds in which a run of seconds must have ended
SIZES = "--dim 32 --heads 1 --kv-heads 1 --layers 1 --context 16 --vocab 264".split()
# in the end five windows a step: 2 and 3 of two ranks; at first one or two
TINY = ["small", *SIZES, *("--data text.txt --batch-tokens 80 --micro-batch 1 --threads 1 --growth 0.25 --steps 20 --save-every 4 --eval-every 6 "
                           "--device cpu").split()]

# What the processes run.  The environment's TRAP is code, which sees at(), die and the rank.
TRAP = '''
import os, signal, sys
sys.path.insert(0, os.environ["CODE"])
import checkpoint, train, sft, script
rank = int(os.environ.get("PMI_RANK", 0))

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

def fail():
    raise ValueError("planted here")

die = send(signal.SIGKILL)
exec(os.environ.get("TRAP", ""))
script.run_script({"train": train, "sft": sft}[os.environ.get("SCRIPT", "train")].main, to_the_end=True)
'''


def has_mpi():
    if not MPIEXEC:
        return False
    try:
        import mpi4py       # noqa: F401
    except ImportError:
        return False
    return True


needs_mpi = pytest.mark.skipif(not has_mpi(), reason="several processes need MPI: pip install mpi4py mpich")


def start(folder, *command, trap="", **environment):
    """A process in a group of its own."""
    return subprocess.Popen(list(map(str, command)), cwd=folder, text=True, errors="replace", start_new_session=True,
                            env={**os.environ, "CODE": ROOT, "TRAP": trap, **environment},
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def script_of(folder):
    return [sys.executable, f"{folder}/../trap.py"]


def finish(process):
    """-> the CompletedProcess.  Output ends when nobody is left who could write, so no process is left over."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(folder, *arguments, ranks=2, **options):
    command = script_of(folder) if ranks == 1 else [MPIEXEC, "-n", ranks, *script_of(folder)]
    return finish(start(folder, *command, *shell_words(arguments), **options))


def said_once(err, *words):
    """One sentence of ours, with these words, and no traceback."""
    assert err.count("error:") == 1 and "Traceback" not in err and all(word in err for word in words), err


def weights_of(folder, out):
    """(step, weights) of a whole checkpoint; its step and state are of one moment."""
    weights, state = checkpoint.paths_of(f"{folder}/{out}")
    tensors, metadata = checkpoint.read_safetensors(weights)
    between = os.path.exists(state + ".new") and not os.path.exists(weights + ".new")       # killed between the two renames
    moments, of_state = checkpoint.read_safetensors(state + ".new" if between else state)
    assert of_state["step"] == metadata["step"] and len(moments) == 2
    return int(metadata["step"]), np.concatenate([tensor.ravel() for tensor in tensors.values()])


def assert_same(folder, out, reference="two"):
    """Bit for bit: the log and the weights."""
    assert read_log(folder, out) == read_log(folder, reference)
    assert np.array_equal(weights_of(folder, out)[1], weights_of(folder, reference)[1])


def assert_close(folder, out, reference="one", bar=1e-6):
    ours, theirs = read_log(folder, out), read_log(folder, reference)
    assert [record["step"] for record in ours] == [record["step"] for record in theirs] and len(ours) > 20
    for a, b in zip(ours, theirs):
        both = [[*record.get("losses", []), record.get("val_loss", 0.0)] for record in (a, b)]
        assert np.abs(np.subtract(*both)).max() < bar


@once_a_module
def folder(tmp_path_factory):
    """With a text, and the runs of one process, "one", and of two, "two", that nothing disturbed."""
    above = tmp_path_factory.mktemp("ranks")
    write(above / "trap.py", TRAP)
    folder = above / "here"
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), rng.integers(1, 8))) for _ in range(60)]
    write(folder / "text.txt", " ".join(rng.choice(words, 1500)))
    for out, ranks in ("one", 1), ("two", 2):
        done = run(folder, *TINY, "--out", out, ranks=ranks)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        write(folder / f"{out}.txt", done.stdout)
    return folder


# -- the same numbers --------------------------------------------------------------------------------------------------
@needs_mpi
def test_two_ranks_give_the_losses_of_one_and_rank_0_alone_speaks(folder):
    assert_close(folder, "two")
    said = (folder / "two.txt").read_text()
    assert said.count("Talk to it") == 1 and said.count("step    10/20") == 1 and "2 x 1 threads" in said
    assert sorted(os.listdir(folder / "two")) == sorted(os.listdir(folder / "one"))


@needs_mpi
def test_more_ranks_than_cores_and_than_windows(folder):
    """Six ranks have five windows: one learns nothing, and gives nothing."""
    succeeded(run(folder, *TINY, "--out of6", ranks=6))
    assert_close(folder, "of6")


@needs_mpi
def test_gpus_starts_the_script_under_mpiexec_with_the_same_bits(folder):
    for out, gpus, reference in ("again", 2, "two"), ("alone", 1, "one"):
        succeeded(run(folder, *TINY, f"--out {out} --gpus {gpus}", ranks=1))
        assert_same(folder, out, reference)


@needs_mpi
def test_a_run_goes_on_with_as_many_ranks_bit_for_bit_and_with_others_but_for_rounding(folder):
    for out, ranks in ("same", 2), ("other", 1):
        stopped = run(folder, *TINY, "--out", out, trap="at(train, 'learning_rate', 7, send(signal.SIGTERM))")
        assert stopped.returncode not in (0, 2) and f"Saved {out} at step" in stopped.stderr
        succeeded(run(folder, "--resume --out", out, ranks=ranks))
    assert_same(folder, "same")
    assert_close(folder, "other")


@needs_mpi
def test_fine_tuning_with_two_ranks(folder):
    with open(folder / "pairs.jsonl", "w") as file:
        for i in range(30):
            file.write(json.dumps({"instruction": f"abc {i}", "output": "fed" * (1 + i % 5)}) + "\n")
    for out, ranks in ("sft-1", 1), ("sft-2", 2):
        succeeded(run(folder, "--base one --data pairs.jsonl --epochs 3 --out", out, "--threads 1 --batch-tokens 48 --micro-batch 1", ranks=ranks, SCRIPT="sft"))
    assert_close(folder, "sft-2", "sft-1")


@needs_mpi
def test_rank_0_makes_the_corpus_and_the_tokens_and_the_others_find_them(folder):
    fresh = folder.parent / "fresh"
    fresh.mkdir()
    trap = "script.write_python_corpus = lambda path, separator: open(path, 'w').write(open('../here/text.txt').read())"
    done = run(fresh, "small", *SIZES, "--steps 1 --batch-tokens 80 --out x", trap="os.makedirs('data', exist_ok=True); " + trap)
    assert done.returncode == 0 and done.stdout.count("taking the English of Python") == 1, done.stderr
    assert done.stdout.count("Training a tokenizer") == 1


# -- what ends them all ------------------------------------------------------------------------------------------------
@needs_mpi
@parametrize("dead, where", [(0, "train, 'learning_rate', 3"), (0, "checkpoint, 'write_safetensors', 4"),
                                         (1, "train.Ranks, 'all_reduce', 9"), (1, "train, 'prepare', 1")])
def test_a_rank_that_is_killed_ends_all(folder, where, dead):
    """Nothing is left running, what is on disk is whole, and resumed it has the bits of a run never touched."""
    out = f"dead{dead}{abs(hash(where))}"
    ended = finish(start(folder, MPIEXEC, "-n", 2, *script_of(folder), *TINY, "--out", out,
                         trap=f"if rank == {dead}: at({where}, die)"))          # its output ended: nobody is left
    assert ended.returncode and "Traceback" not in ended.stderr
    if os.path.exists(folder / out / "config.json"):
        weights_of(folder, out)
        succeeded(run(folder, "--resume --out", out))
        assert_same(folder, out)


@needs_mpi
@parametrize("asked, number", [("rank == 0", signal.SIGTERM), ("rank == 1", signal.SIGINT), ("True", signal.SIGINT)])
def test_a_signal_to_any_rank_ends_all_with_one_save(folder, number, asked):
    out = f"signal{int(number)}{asked[-1]}"
    done = run(folder, *TINY, "--out", out, trap=f"if {asked}: at(train, 'learning_rate', 9, send({int(number)}))")
    assert done.returncode not in (0, 2) and "error" not in done.stderr
    assert done.stderr.count("Saved ") == 1
    step, _ = weights_of(folder, out)
    assert step in (9, 10, 11) and [record["step"] for record in read_log(folder, out) if "losses" in record] == [*range(1, step + 1)]
    succeeded(run(folder, "--resume --out", out))
    assert_same(folder, out)


@needs_mpi
def test_a_signal_to_mpiexec_reaches_all_ranks_once(folder):
    process = start(folder, MPIEXEC, "-n", 2, *script_of(folder), *TINY, "--out", "ctrl-c", "--steps", 2000,
                    trap="at(train, 'learning_rate', 9, lambda: open(f'nine{rank}', 'w').close())")
    limit = time.monotonic() + LIMIT
    while not all(os.path.exists(folder / f"nine{rank}") for rank in range(2)) and time.monotonic() < limit:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode != 0 and done.stderr.count("Saved ctrl-c") == 1, done.stderr
    assert weights_of(folder, "ctrl-c")[0] >= 9


@needs_mpi
@parametrize("others, trap, words", [
    (["--seed", 5], "", "seed and weights"), (["--lr", "0.1"], "", "lr"),
    ([], "if rank: train.checkpoint.checksum = lambda path: 'x'", "code"), ([], "if rank: train.np.__version__ = '0'", "versions"),
    (["--data", "other.txt"], "", "data")])
def test_ranks_that_differ_are_named_before_the_first_step(folder, others, trap, words):
    write(folder / "other.txt", (folder / "text.txt").read_text().upper())
    common = [*script_of(folder), *TINY, "--out", "differ"]
    done = finish(start(folder, MPIEXEC, "-n", 1, *common, ":", "-n", 1, *common, *others, trap=trap))
    assert done.returncode != 0
    said_once(done.stderr, "rank 1 has other ", words, " than rank 0.")


@needs_mpi
def test_an_error_of_all_ranks_is_said_once(folder):
    done = run(folder, *TINY[:1], "--data missing.txt --out nothing")
    assert done.returncode == 2
    said_once(done.stderr, "rank 0: Cannot use missing.txt")


@needs_mpi
def test_ctrl_c_before_the_loop_is_one_word(folder):
    done = run(folder, *TINY, "--out early", trap="at(train, 'prepare', 1, send(signal.SIGINT))")
    assert done.returncode == 130 and done.stderr.count("Stopped.") == 1 and "Traceback" not in done.stderr


@needs_mpi
def test_a_mistake_of_ours_shows_where_it_was_made(folder):
    done = run(folder, *TINY, "--out mistake", trap="if rank: at(train, 'learning_rate', 6, lambda: 1 / 0)")
    assert done.returncode == 2 and done.stderr.count("ZeroDivisionError") == 1


@needs_mpi
@parametrize("out, options, trap, code, words, step", [
    ("error", "", "if rank: at(train, 'learning_rate', 6, fail)", 2, "error: rank 1: planted here", 4),
    ("nan", "--lr 1e30 --optimizer adamw", "", 1, "nan keeps its last save", 0),
    ("part", "", "if rank: at(train, 'evaluation_is_due', 3, lambda: setattr(train, 'weights_checksum', lambda model: 5))", 2,
     "rank 1 has other weights than rank 0.", 0)])
def test_what_goes_wrong_in_one_rank_is_one_sentence_and_ends_all(folder, out, options, trap, code, words, step):
    """An error, a number that is not finite, and weights that part, which are not saved."""
    done = run(folder, *TINY, "--out", out, options, trap=trap)
    assert done.returncode == code
    said_once(done.stderr, words)
    assert weights_of(folder, out)[0] == step


def test_what_a_launcher_says_and_what_is_missing(folder_without_mpi, monkeypatch):
    for names, gpus, words in (({"PMI_SIZE": "3"}, 2, "--gpus 2 does not fit the 3 processes"),
                               ({"SLURM_STEP_NUM_TASKS": "2"}, None, "pip install mpi4py mpich"),
                               ({}, 2, "pip install mpi4py mpich .there is no mpiexec.")):
        with monkeypatch.context() as patch:
            for name in train.LAUNCHERS:
                patch.delenv(name, raising=False)
            for name, value in names.items():
                patch.setenv(name, value)
            patch.setenv("PATH", "")
            patch.setattr(sys, "executable", "/nowhere/python")
            patch.setitem(sys.modules, "mpi4py", None)
            with value_error(words):
                train.find_ranks(gpus)


@pytest.fixture
def folder_without_mpi(monkeypatch):
    for name in train.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def test_a_run_of_one_needs_no_mpi(folder_without_mpi, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for value in None, 1:
        ranks = train.find_ranks(value)
        assert (ranks.rank, ranks.size, ranks.world) == (0, 1, None)
    monkeypatch.setenv("PMI_SIZE", "1")
    ranks = train.find_ranks(None)
    array = np.ones(3)
    ranks.all_reduce(array)
    ranks.meet()
    ranks.agree(x=1)
    assert ranks.all_gather("x") == ["x"] and ranks.in_turn(lambda: 5) == 5 and array.tolist() == [1, 1, 1]


@parametrize("size, rows", [(1, 4), (2, 8), (2, 5), (3, 8), (4, 3), (5, 1)])
def test_each_window_is_of_one_rank(size, rows):
    """In their order, as even as can be; who has none learns nothing from one."""
    whole = np.arange(rows * 2).reshape(rows, 2), np.arange(rows * 3).reshape(rows, 3), np.arange(rows)
    everyone = [Ranks(SimpleNamespace(rank=rank, size=size)) for rank in range(size)]
    shares = [ranks.share(*whole) for ranks in everyone]
    own = [share for share in shares if (share[1] >= 0).any()]
    assert all(np.array_equal(np.concatenate(parts), array) for parts, array in zip(zip(*own), whole))
    assert {len(x) for x, *_ in own} <= {rows // size, -(-rows // size)} and len(own) == min(rows, size)
    assert all(x.shape == (1, 2) and y.shape == (1, 3) and (y == -1).all() and w.shape == (1,)
               for x, y, w in shares if not (y >= 0).any())
    assert everyone[0].share(*whole[:2], None)[2] is None


# -- the GPUs' side, without one ---------------------------------------------------------------------------------------
def test_nccl_is_asked_in_order(monkeypatch):
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

    def note(*call):
        done.append(call)
    communicator = SimpleNamespace(allReduce=note, bcast=note)
    nccl = SimpleNamespace(NCCL_FLOAT32=7, NCCL_SUM=0, NCCL_CHAR=3, get_unique_id=lambda: (-3, 0), groupStart=partial(note, "start"),
                           groupEnd=partial(note, "end"), NcclCommunicator=lambda *call: note(*call) or communicator)
    cuda = SimpleNamespace(nccl=nccl, Stream=Stream, Event=Event, get_current_stream=lambda: current)
    cupy = SimpleNamespace(cuda=cuda)
    for name, module in ("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", nccl):
        monkeypatch.setitem(sys.modules, name, module)
    ranks = Ranks(SimpleNamespace(rank=1, size=4))
    ranks.all_gather = lambda said: [(9, -9), said == (-3, 0) or pytest.fail()]
    sums = Nccl(ranks)
    assert done == [(4, (9, -9), 1)]
    done.clear()
    sums.all_reduce(SimpleNamespace(data=SimpleNamespace(ptr=4096), size=33, dtype=np.float32))
    sums.wait()
    assert done == [("record", 1), ("waits", 5, 1), (4096, 4096, 33, 7, 0, 5), ("record", 5), ("waits", 1, 5)]
    done.clear()
    sums.all_gather(Rows(4096, 6))                              # 1, 2, 1, 2 rows of 10 bytes
    assert done == [("record", 1), ("waits", 5, 1), ("start",),
                    (4096, 10, 3, 0, 5), (4106, 20, 3, 1, 5), (4126, 10, 3, 2, 5), (4136, 20, 3, 3, 5), ("end",)]
    assert sums.part(6) == slice(1, 3)


class Rows:
    """An array on a GPU of rows of 10 bytes, for what a sum by NCCL asks of one."""
    def __init__(self, ptr, rows):
        self.data, self.nbytes = SimpleNamespace(ptr=ptr), 10 * rows

    def __len__(self):
        return self.nbytes // 10

    def __getitem__(self, part):
        return Rows(self.data.ptr + 10 * part.start, part.stop - part.start)


def test_several_gpus_without_nccl(monkeypatch):
    for name in "cupy", "cupy.cuda", "cupy.cuda.nccl":
        monkeypatch.setitem(sys.modules, name, None)
    with value_error("^Several GPUs need NVIDIA's NCCL: run `make gpu` "):
        Nccl(Ranks())


def test_two_processes_on_one_gpu_are_refused_in_a_sentence(monkeypatch):
    class NcclError(RuntimeError):
        pass

    def refuse(*_):
        raise NcclError("NCCL_ERROR_INVALID_USAGE")
    nccl = SimpleNamespace(get_unique_id=lambda: 0, NcclError=NcclError, NcclCommunicator=refuse)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=nccl))
    with pytest.raises(ValueError, match="each needs a GPU of its own .NCCL_ERROR_INVALID_USAGE"):
        Nccl(Ranks())
