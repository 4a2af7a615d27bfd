"""A few of each of tests/attack.py's attacks: altered files, signals, readers that leave, two runs at once, full disks."""
import os
import signal

from cases import once_a_module, parametrize

import attack


@once_a_module
def place(tmp_path_factory):
    """(folder, what the run that nobody touches left)."""
    folder = str(tmp_path_factory.mktemp("attack"))
    return folder, attack.prepare(folder)


@parametrize("seed", range(24))
def test_an_altered_file_is_refused_in_one_sentence_or_without_effect(place, seed):
    did, complaint = attack.attack_checkpoint(*place, seed)
    assert complaint is None, f"{did}\n{complaint}"


def test_the_attack_notices_another_result(place, monkeypatch):
    folder, (log, tensors) = place
    monkeypatch.setattr(attack, "ALTERATIONS", {"config.json": (lambda path, rng: "nothing",)})
    assert attack.attack_checkpoint(folder, (log, tensors), 0)[1] is None
    for expected in (log, tensors[::-1]), ([{**record, "loss": 0} for record in log], tensors):
        assert attack.attack_checkpoint(folder, expected, 0)[1] == "another result, and not a word"


def test_kills(place):
    assert not attack.kills(*place, count=3, seed=0)


@parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_costs_no_step(place, number):
    assert not attack.ask_to_stop(*place, number)


def test_a_reader_that_leaves_costs_no_step(place):
    assert not attack.leave(*place)


def test_ctrl_c_through_tee_costs_no_step(place):
    assert not attack.interrupt_both(*place)


def test_two_runs_at_once_in_one_folder(place):
    assert not any(attack.pair(*place, i) for i in range(2))


@parametrize("size", [1, 20_000])
def test_a_full_disk(place, size):
    log = os.path.getsize(f"{place[0]}/out/half/log.jsonl")
    assert not attack.disk(*place, size if size > log else log + size)
