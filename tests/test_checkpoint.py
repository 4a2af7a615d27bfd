"""checkpoint.py: every bit comes back, in files that are a Llama's; a save that is killed leaves a whole checkpoint;
what is damaged, missing or foreign is refused in one sentence, and the log has each step once."""
import itertools
import json
import os
import shutil
import zlib
from dataclasses import replace

import numpy as np
import pytest
from cases import parametrize, read, value_error, write
from runs import kill_before

import checkpoint
import model_cpu
from checkpoint import STATE, WEIGHTS, Log, fill, load, mend, read_safetensors, read_state, save, write_safetensors
from model_cpu import Config, Model
from tokenizer import CHAT_TEMPLATE, Tokenizer

TINY = Config(dim=16, heads=4, kv_heads=2, layers=2, context=16, vocab=264, predict=3, mtp_weight=0.5)
TOKENIZER = Tokenizer.train(["the cat sat on the mat"], 262)
RECORD = {"tokens": 123, "crc32": "00000000", "settings": {"name": 'quote " and é'}}


def make(step, config=TINY):
    """A model of this step, in which all numbers differ."""
    model = Model(config, 0, np.float32)
    model.step = step
    for array in (model.flat_params, model.m, model.v):
        array[...] = np.random.default_rng(step + len(array)).standard_normal(array.size)
        step += 100
    return model


def numbers(model):
    return [model.step, *[array.tobytes() for array in (model.flat_params, model.m, model.v)]]


def open_run(folder):
    """-> (model with its moments, record), as train.py opens a run."""
    mend(folder)
    record, moments = read_state(folder)
    model, tokenizer = load(folder, model_cpu, {"dtype": np.float32})
    if model.step:
        fill(model, STATE, moments, {"m": model.m, "v": model.v})
    assert tokenizer.encode("the cat") == TOKENIZER.encode("the cat")
    return model, record


@pytest.fixture
def folder(tmp_path):
    """A run of step 7."""
    save(tmp_path / "run", make(7), TOKENIZER, RECORD)
    return tmp_path / "run"


# -- what is saved is loaded, and others can read it ---------------------------------------------------------
@parametrize("change", [{}, dict(predict=1, tied=True), dict(hidden=8, kv_heads=4, norm_eps=0.25, rope_theta=77.0),
                        dict(layers=1, context=4, positions=16, mtp_weight=0.0)])
def test_every_bit_comes_back(tmp_path, change):
    model = make(7, replace(TINY, **change))
    save(tmp_path, model, TOKENIZER, RECORD)
    loaded, record = open_run(tmp_path)
    assert numbers(loaded) == numbers(model)
    assert (loaded.config, record) == (model.config, RECORD)


@parametrize("chat, end, template", [(True, "<|end|>", CHAT_TEMPLATE), (False, "<|endoftext|>", "")])
def test_how_a_text_ends_for_others(tmp_path, chat, end, template):
    """A model that answers has a chat template, and ends at the end of a turn."""
    save(tmp_path, make(7), TOKENIZER, RECORD, chat)
    config = json.loads(read(tmp_path / "config.json"))
    assert (config["architectures"], config["eos_token_id"]) == (["LlamaForCausalLM"], TOKENIZER.special[end])
    settings = json.loads(read(tmp_path / "tokenizer_config.json"))
    assert (settings["eos_token"], settings.get("chat_template", "")) == (end, template)
    assert checkpoint.read_tokenizer(tmp_path).template == template


def test_a_file_of_tensors_by_hand(tmp_path):
    """Byte by byte, as the format has it; the tensors begin at a multiple of 8, however long the header is."""
    a = np.array([[1, 2], [3, 4]], np.float32)
    for name in itertools.accumulate("abcdefgh"):
        crc = write_safetensors(tmp_path / "x", {name: a, "z": np.array([5.0])}, {"step": "1"})
        raw = read(tmp_path / "x")
        size = int.from_bytes(raw[:8], "little")
        assert size % 8 == 0 and raw[8 + size:] == a.tobytes() + np.array([5.0]).tobytes()
        assert json.loads(raw[8:8 + size]) == {
            "__metadata__": {"step": "1", "crc32": crc},
            name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "z": {"dtype": "F64", "shape": [1], "data_offsets": [16, 24]}}
        assert zlib.crc32(raw.replace(crc.encode(), b"00000000")) == int(crc, 16)


# -- killed --------------------------------------------------------------------------------------------------
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(folder):
    """Of the step before, or of the new one."""
    expected = {7: (numbers(make(7)), RECORD), 8: (numbers(make(8)), {})}
    steps = []
    status = None
    while status != 0:
        copy = f"{folder}{len(steps)}"
        shutil.copytree(folder, copy)
        pid = os.fork()
        if pid == 0:
            kill_before(len(steps) + 1)()
            save(copy, make(8), TOKENIZER, {})
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        model, record = open_run(copy)
        assert (numbers(model), record) == expected[model.step]
        steps.append(model.step)
        save(copy, make(8), TOKENIZER, {})              # nor does the next save trip over what was left
        assert numbers(open_run(copy)[0]) == expected[8][0]
        # (what the killed process was writing goes when a run takes the folder: test_run.py)
        assert {name for name in os.listdir(copy) if not name.endswith(".new")} == {*os.listdir(folder)}
    assert steps == sorted(steps) and steps.count(7) > 9 and steps.count(8) > 2


def test_each_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """Or a machine that loses its power would keep the name of a file, and not its bytes."""
    synced = set()
    fsync, rename = os.fsync, os.replace

    def note(file):
        fsync(file)
        synced.add((os.fstat(file).st_ino, os.fstat(file).st_size))

    def check(source, target):
        assert (os.stat(source).st_ino, os.stat(source).st_size) in synced, source
        rename(source, target)
    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    save(tmp_path, make(7), TOKENIZER, RECORD)
    assert len(synced) == 5


# -- altered, damaged, missing -------------------------------------------------------------------------------
@parametrize("name", [WEIGHTS, STATE])
def test_every_altered_byte_and_every_cut_is_noticed(folder, name):
    path = folder / name
    raw = read(path)
    rng = np.random.default_rng(0)
    begin = 8 + int.from_bytes(raw[:8], "little")
    for place in [*range(8), raw.index(b"crc32"), *rng.integers(8, begin, 150), *rng.integers(begin, len(raw), 50)]:
        altered = bytearray(raw)
        altered[place] ^= 1 << rng.integers(8)
        for damaged in altered, raw[:place]:
            write(path, bytes(damaged))
            with value_error(f"{name} is damaged"):
                read_safetensors(path)


@parametrize("name, old, new", [("config.json", b": 0.5", b": 0.4"), ("tokenizer.json", b"\n", b"\n ")])
def test_another_config_or_tokenizer_is_refused(folder, name, old, new):
    write(folder / name, read(folder / name).replace(old, new))
    with value_error(f"{name} is not as it was saved"):
        load(folder, model_cpu)


def test_weights_of_another_run_are_refused(folder, tmp_path):
    save(tmp_path / "other", make(8), TOKENIZER, RECORD)
    os.replace(tmp_path / "other" / WEIGHTS, folder / WEIGHTS)
    with value_error("belongs to other weights"):
        mend(folder)


# -- the folder of a run -------------------------------------------------------------------------------------
@parametrize("name", [WEIGHTS, STATE, "log.jsonl", "my notes"])
def test_whatever_is_in_a_folder_is_kept(tmp_path, name):
    """Except what a save that was killed has left."""
    out = tmp_path / "out"
    out.mkdir()
    write(out / name, "kept")
    checkpoint.set_aside(out)
    assert read(f"{out}.1/{name}") == b"kept" and not out.exists()
    out.mkdir()
    write(out / "my.new", "kept")
    write(out / "log.jsonl.7.new", "left by a save that was killed")
    checkpoint.lock_folder(out)
    assert os.listdir(out) == ["my.new"]


def test_a_lock_keeps_others_out(tmp_path):
    """And is gone when its process ends."""
    out = tmp_path / "run"
    pid = os.fork()
    if pid == 0:
        checkpoint.lock_folder(out)
        os._exit(0)
    os.waitpid(pid, 0)
    checkpoint.lock_folder(out)
    with value_error(f"run is in use by another run, which holds {tmp_path}/.run.lock: choose another folder with --out"):
        checkpoint.lock_folder(out)


# -- the log -------------------------------------------------------------------------------------------------
def test_a_log_is_cut_back_to_the_step_of_the_save(tmp_path):
    """The evaluation of that step, which is made again, goes too; and a line that a killed run has not finished."""
    lines = [json.dumps({"step": step, key: 0.5}) for step, key in
             [(0, "val"), (1, "loss"), (2, "loss"), (2, "val"), (3, "loss"), (3, "val"), (4, "loss")]]
    for step, kept in (0, 0), (1, 2), (2, 3), (3, 5), (9, 6):
        write(tmp_path / "log.jsonl", "\n".join(lines))          # the last one has no line end
        Log(tmp_path, step, True).write(step=step, val=1)
        assert read(tmp_path / "log.jsonl").decode().splitlines() == [*lines[:kept], json.dumps({"step": step, "val": 1})]
    write(tmp_path / "log.jsonl", "[]\n".join(lines))
    with value_error("line 1, is no record"):
        Log(tmp_path, 1, True)
    os.remove(tmp_path / "log.jsonl")
    os.symlink("/dev/zero", tmp_path / "log.jsonl")
    with value_error("log.jsonl is not a plain file"):
        Log(tmp_path, 1, True)
