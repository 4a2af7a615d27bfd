"""A run is a folder: killed at any moment, stopped, on a full disk or resumed, it goes on with the same bits; what was
altered is refused; and no run overwrites another.

    KILLS=20 pytest tests/test_run.py       so many kills of each script
"""
import json
import os
import random
import resource
import shutil
import signal
import time

import numpy as np
import pytest
from cases import parametrize, read, write
from runs import JOBS, TEXT, as_on_a_gpu, at, finish, kill_before, prepare, read_log, refused, result_of, run, send, start

import checkpoint
import rl           # noqa: F401 (with the other scripts: so each fork has them)
import train

KILLS = int(os.environ.get("KILLS", 2))
SEED = os.environ.get("SEED", time.time_ns())


def command(out, job="train"):
    return f"{JOBS[job]} --steps 8 --save-every 3 --threads 1 --out {out}"


def resume(out, job="train"):
    return f"{JOBS[job].split()[0]} --resume --out {out}"


@pytest.fixture(scope="module", autouse=True)
def folder(new_folder):
    """What the runs learn from, and the run half, stopped at step 4 of 8."""
    prepare()
    write("other", TEXT[1:])
    run(command("half"), code=143, trap=at(train, "learning_rate", 4, send(signal.SIGTERM)))


def untouched(job="train"):
    """-> the result of a run that nobody has touched."""
    out = f"whole-{job}"
    if not os.path.exists(out):
        run(command(out, job))
    return result_of(out)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def half(tmp_path):
    """A copy of the run that was stopped at step 4."""
    return shutil.copytree("half", tmp_path / "run")


def goes_on(out, place=""):
    """Resumed at this place, it has the bits of a run never touched."""
    assert place in run(resume(out)).stdout
    assert result_of(out) == untouched()


# -- killed, stopped, no room --------------------------------------------------------------------------------
@parametrize("job", JOBS)
def test_a_run_killed_at_any_moment_goes_on_with_the_same_bits(out, job):
    """Killed after some time, or before one of the calls that change the disk."""
    expected = untouched(job)
    rng = random.Random(f"{SEED}{job}")
    kills = 0
    code = None
    while code != 0 or kills < KILLS:
        if code == 0:
            shutil.rmtree(out)                      # again from the beginning
        begun = out.exists() or (out.parent / ".out.begun/config.json").exists()
        begin = resume if begun else command
        moment = rng.choice([0, rng.randint(1, rng.choice([16, 60]))])              # 0: none of these calls
        process = start(begin(out, job), trap=kill_before(moment))
        if not moment and kills < KILLS:
            time.sleep(rng.uniform(0, 0.4))
            os.kill(process.pid, signal.SIGKILL)
        code = finish(process).returncode
        assert code in (0, -signal.SIGKILL), (SEED, process.stderr)
        kills += code != 0
    assert result_of(out) == expected, SEED
    assert sorted(os.listdir(out.parent)) == [".out.lock", "out"] and not list(out.glob("*.new"))


@parametrize("job, number", [("train", signal.SIGINT), ("reinforce", signal.SIGTERM), ("dpo", signal.SIGHUP)])
def test_a_signal_finishes_the_step_and_saves_and_a_second_one_leaves_at_once(out, job, number):
    """The command that is printed goes on; it names a reward of the reader's own."""
    write("mine.py", "from rl import short")
    begin = command(out, job).replace("short", "mine.py:short")
    stopped = run(begin, code=128 + number, trap=at(train, "learning_rate", 5, send(number)))
    assert f"Saved {out} at step 5." in stopped.stderr
    _, go_on = stopped.stderr.split("Go on with: python ")
    run(go_on, code=128 + number, trap=at(train, "learning_rate", 2, send(number, number)))
    assert [record["step"] for record in read_log(out) if "loss" in record] == [1, 2, 3, 4, 5, 6]
    run(go_on)
    assert result_of(out) == untouched(job)


def test_a_signal_in_the_last_step_changes_nothing(out):
    run(command(out), trap=at(train, "learning_rate", 8, send(signal.SIGTERM)))
    assert result_of(out) == untouched()


def test_a_signal_that_is_ignored_stays_ignored(out):
    """As SIGHUP is under nohup."""
    def trap():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        at(train, "learning_rate", 5, send(signal.SIGHUP))()
    run(command(out), trap=trap)
    assert result_of(out) == untouched()


def test_a_save_that_was_killed_between_its_files_is_finished(out):
    run(command(out), code=-signal.SIGKILL, trap=at(checkpoint, "mend", 3, send(signal.SIGKILL)))
    goes_on(out, "at step 3 of 8")


def test_the_loop_of_a_gpu_saves_and_evaluates_at_the_same_steps(out):
    run(command(out), trap=as_on_a_gpu)
    (log, weights), (expected, expected_weights) = result_of(out), untouched()
    assert weights == expected_weights and log == expected


def test_a_signal_stops_a_gpus_run_after_the_step(out):
    def trap():
        as_on_a_gpu()
        at(train, "learning_rate", 2, send(signal.SIGTERM))()
    assert f"Saved {out} at step 2." in run(command(out), code=143, trap=trap).stderr


def test_a_resumed_run_counts_its_seconds_on(half):
    run(resume(half), trap=lambda: setattr(train.time, "monotonic", lambda: 7.0))
    lines = (half / "log.jsonl").read_text().splitlines()
    seconds = [record["seconds"] for record in map(json.loads, lines) if "seconds" in record]
    assert seconds == sorted(seconds) and seconds[-1] > 0


@parametrize("size", [200, 4000, 50_000, 150_000])
def test_a_full_disk_keeps_the_last_save(half, size):
    """No file grows beyond so many bytes: the log, tokenizer.json, the weights, the moments do not fit."""
    limits = size, resource.RLIM_INFINITY
    done = run(resume(half), code=2, trap=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    assert done.stderr == "error: Input or output failed: File too large.\n"
    assert sorted(os.listdir(half)) == sorted(os.listdir("half"))               # what did not fit is removed
    goes_on(half)


@parametrize("first, named, place, signals", [
    (2, 3, "", []), (4, 4, "at step 3 of 8", []), (5, 5, "at step 4 of 8", [signal.SIGTERM]), (6, 6, "at step 4 of 8", [])])
def test_a_number_that_is_not_finite_ends_the_run_and_keeps_the_last_save(out, first, named, place, signals):
    """The update of step `first` breaks the weights.  Where that step is saved or evaluated, or a signal comes, they are
    looked at; else the next loss tells."""
    def trap():
        usual = train.learning_rate
        train.learning_rate = lambda step, settings: np.nan if step + 1 == first else usual(step, settings)
        at(train, "learning_rate", first, send(*signals))()
    assert f"step {named} is not finite" in run(command(out), code=1, trap=trap).stderr
    goes_on(out, place)


# -- altered, or of another kind -----------------------------------------------------------------------------
def is_taken(half):
    """Whether a run in which something was altered goes on; if not, it is refused in one sentence."""
    done = finish(start(resume(half)))
    taken = done.returncode == 0
    assert taken or (done.returncode, done.stderr.count("\n"), done.stderr[:7]) == (2, 1, "error: "), (SEED, done.stderr)
    return taken


@parametrize("number", range(5 * KILLS))
def test_an_altered_file_is_refused_or_changes_nothing(half, number):
    rng = random.Random(f"{SEED}{number}")
    path = rng.choice(sorted(half.iterdir()))
    raw = bytearray(read(path))
    place = rng.randrange(len(raw))
    raw[place] ^= 1 << rng.randrange(8)
    write(path, bytes(raw[:rng.choice([place, len(raw)])]))
    if is_taken(half):
        log, weights = result_of(half)
        expected = untouched()
        assert weights == expected[1] and log[-3:] == expected[0][-3:], (SEED, path, place)


def test_a_forged_record_is_refused_or_goes_on(half):
    """Each value of the record is of each other type of JSON, or removed, or there is one more, as in the run of another
    version, which is refused; a checksum is right."""
    tensors, metadata = checkpoint.read_safetensors(half / checkpoint.STATE)
    tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
    state = json.loads(metadata["state"])

    def forged_is_taken():
        shutil.copytree("half", half, dirs_exist_ok=True)
        checkpoint.write_safetensors(half / checkpoint.STATE, tensors, {**metadata, "state": json.dumps(state)})
        return is_taken(half)
    for record in state, state["settings"]:
        for name in [*record]:
            value = record.pop(name)
            assert not forged_is_taken(), name
            for record[name] in None, True, -7, 0.5, "x", [3], {}:
                if record[name] != value:
                    forged_is_taken()
            record[name] = value
    state["settings"]["growth"] = 0.25
    assert not forged_is_taken()


def test_another_script_and_another_text_are_refused(half, tmp_path):
    assert "is one of train.py" in refused(resume(half, "sft"))
    write(tmp_path / "text", TEXT[1:])
    assert "text: changed since" in refused(resume(half), tmp_path)


# -- options beside --resume ---------------------------------------------------------------------------------
def test_the_same_options_may_be_repeated(half):
    run(f"{command(half)} --resume")
    assert result_of(half) == untouched()


@parametrize("option, words", [
    ("--seed 7", "--seed 0, not 7"), ("--data other", "--data ['text'], not ['other']"), ("--steps 7", "--steps 8, not 7"),
    ("--base base", "--base None, not base"), ("medium", "--preset small, not medium")])
def test_other_options_are_refused_by_name(option, words):
    assert f"has {words}: a run keeps its settings" in refused(f"{resume('half')} {option}")


@parametrize("option", ["--threads 2", "--micro-batch 1"])
def test_what_belongs_to_the_machine_may_change(half, option):
    note = f"note: {option.split()[0]} was "
    assert note in run(f"{resume(half)} {option}").stdout
    assert note not in run(f"{resume(half)} {option}").stdout           # it is a setting of the run from now on
    for ours, theirs in zip(read_log(half), untouched()[0], strict=True):
        assert ours.get("losses") == pytest.approx(theirs.get("losses"), abs=1e-5)


@parametrize("job", ["train", "sft"])
def test_a_finished_run_is_given_more_steps(out, job):
    """Its log goes on, and its learning rate by the longer schedule: to a tenth of the peak."""
    run(f"{JOBS[job]} --lr 1e-3 --warmup 1 --steps 3 --out {out}")
    before = read_log(out)                              # with the last evaluation, which is not made again
    run(f"{resume(out, job)} --steps 6")
    log = read_log(out)
    assert log[:len(before)] == before
    steps = [record["step"] for record in log if "loss" in record]
    assert steps == [*range(1, 2 * before[-1]["step"] + 1)] and log[-2]["lr"] == pytest.approx(1e-4)


# -- new runs ------------------------------------------------------------------------------------------------
def test_a_new_run_gives_the_older_one_another_name(out):
    run(command(out))
    os.remove(out / "log.jsonl")                        # by it alone nobody may tell that there is nothing
    run(command(out))
    run(f"{command(out)} --save-every 100", code=-9, trap=at(train, "learning_rate", 3, send(signal.SIGKILL)))
    assert f"is now {out}.3" in run(command(out)).stdout
    assert result_of(f"{out}.2") == result_of(out) == untouched()
    assert read(f"{out}.1/model.safetensors") == untouched()[1] and len(read_log(f"{out}.3")) == 3


def fail():
    raise MemoryError("no room")


@parametrize("call", ["measure", "forward_backward"])
def test_a_run_that_fails_before_it_has_made_a_step_leaves_the_older_one_where_it_is(out, call):
    run(command(out, "sft"))
    before = result_of(out)
    run(command(out), code=2, trap=at(train, call, 1, fail))
    assert result_of(out) == before and not os.path.exists(f"{out}.1")
    assert run(command(out)).stdout.count(f"is now {out}.1") == 1
    assert result_of(out) == untouched() and sorted(os.listdir(out.parent)) == [".out.lock", "out", "out.1"]


@parametrize("again, options", [(resume, "--seed 3"), (command, "")])
def test_a_run_killed_in_its_first_step_is_resumed_or_replaced(out, again, options):
    """The older run of its name loses the name only then."""
    run(command(out))
    before = result_of(out)
    trap = at(train, "forward_backward", 1, send(signal.SIGKILL))
    run(f"{command(out)} --seed 3", code=-signal.SIGKILL, trap=trap)
    assert result_of(out) == before
    run(again(out))
    assert result_of(f"{out}.1") == before
    run(f"{command('fresh')} {options}")
    assert result_of(out) == result_of("fresh") and sorted(os.listdir(out.parent)) == [".out.lock", "out", "out.1"]
    shutil.rmtree("fresh")


def test_an_evaluation_that_fails_loses_no_step(out):
    run(f"{command(out)} --save-every 100", code=2, trap=at(train, "measure", 2, fail))
    goes_on(out, "at step 4 of 8")


@parametrize("what", ["--base base --data text", "--data base/own"])
def test_what_a_run_reads_is_not_written_over(tmp_path, what):
    """A base, or a text in that folder, which a link may name."""
    before = read("base/model.safetensors")
    write("base/own", TEXT)
    os.symlink(os.path.abspath("base"), tmp_path / "link")
    for out in "base", tmp_path / "link":
        assert "holds what the run reads, base" in refused(f"train.py {what} --device cpu --out {out}")
    assert read("base/own") == TEXT.encode() and read("base/model.safetensors") == before


def test_two_runs_at_once_in_one_folder(out):
    process = start(command(out), trap=at(train, "learning_rate", 3, send(signal.SIGSTOP)))
    os.waitpid(process.pid, os.WUNTRACED)
    try:
        for other in command(out), resume(out):
            assert "in use by another run" in refused(other)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert finish(process).returncode == 0 and result_of(out) == untouched()
