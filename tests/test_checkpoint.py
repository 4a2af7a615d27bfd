"""checkpoint.py: every bit comes back; killed at any moment a whole checkpoint is there; whatever was altered,
is missing, damaged or foreign is named in one sentence; the first version's folders; the printer."""
import contextlib
import dataclasses
import itertools
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pytest

import attack
import checkpoint
import model_cpu
from checkpoint import STATE, WEIGHTS, load, load_state, save
from model_cpu import Config, Model
from tokenizer import CHAT_TEMPLATE, Tokenizer

TINY = Config(dim=16, heads=4, kv_heads=2, layers=2, context=16, vocab=264, predict=3, mtp_weight=0.5)
TOKENIZER = Tokenizer.train(["the cat sat on the mat"], 262)
RECORD = {"tokens": 123, "settings": {"tokens_key": "none", "name": 'quote " and é'}, "crc32": "00000000"}


def make(seed=0, config=TINY, dtype=np.float32):
    """A model of step 7 with other numbers in everything that is saved."""
    model, rng = Model(config, seed, dtype), np.random.default_rng(seed)
    model.step = 7
    for array in (model.flat_params, model.m, model.v):
        model.write(array, rng.standard_normal(array.size, np.float32))
    model.v[...] = np.abs(model.v)                  # a mean of squares
    return model


def trained(model, steps=1):
    rng = np.random.default_rng(model.step)
    for _ in range(steps):
        model.forward(rng.integers(0, 264, (2, 7)), rng.integers(0, 264, (2, 9)))
        model.backward()
        model.update(lr=1e-2)
    return model


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of step 7."""
    save(str(tmp_path / "run"), make(), TOKENIZER, RECORD)
    signal.alarm(600)                               # a read from a pipe would never end
    yield str(tmp_path / "run")
    signal.alarm(0)


def reload(folder):
    """-> (model with its moments, state)"""
    model, tokenizer = load(folder, model_cpu, {"dtype": np.float32})
    assert tokenizer.encode("the cat") == TOKENIZER.encode("the cat")
    return model, load_state(folder, model)


def refused(folder, words, name=""):
    """load or load_state refuses the folder in one sentence, which names the file."""
    with pytest.raises(ValueError) as error:
        reload(folder)
    text = str(error.value)
    assert os.path.join(folder, name).rstrip("/") in text and words in text
    assert "\n" not in text and text.endswith("."), text
    return text


def read_tensors(path):
    """-> (dict of the tensors, metadata); copies, so that the file may be written anew."""
    tensors, metadata = checkpoint.read_safetensors(path)
    return {name: tensor.copy() for name, tensor in tensors.items()}, metadata


def buffers(model):
    return [array.copy() for array in (model.flat_params, model.m, model.v)]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def edit(folder, name, change):
    """Change a file's header under a right checksum: change(header, data) -> None or new data."""
    path = os.path.join(folder, name)
    header, data = attack.read_header(path)
    data = change(header, data) or data
    attack.sign(path, header, data)


def test_the_edits_of_these_tests_are_right(folder):
    edit(folder, WEIGHTS, lambda header, data: None)
    edit(folder, STATE, lambda header, data: None)
    assert reload(folder)[1] == RECORD


# -- saved and loaded ----------------------------------------------------------------------------------------
def test_save_and_load_give_back_every_bit(folder):
    model = make()
    loaded, state = reload(folder)
    assert loaded.config == model.config and loaded.step == 7 and state == RECORD == load_state(folder)
    assert same(buffers(loaded), buffers(model)) and np.any(loaded.m) and np.any(loaded.v)
    assert same(buffers(trained(loaded, 2)), buffers(trained(model, 2)))
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json",
                                          "tokenizer_config.json", "train_state.safetensors"]


@pytest.mark.parametrize("change", [
    dict(), dict(predict=1), dict(kv_heads=4), dict(layers=1, context=3, mtp_weight=0), dict(hidden=24),
    dict(norm_eps=1e-3), dict(rope_theta=500), dict(hidden=8, norm_eps=0, rope_theta=1)])
def test_float64_and_other_sizes_round_trip(tmp_path, change):
    model = make(config=dataclasses.replace(TINY, **change), dtype=np.float64)
    model.flat_params[...] += 1e-12
    save(str(tmp_path), model, TOKENIZER, {})
    loaded, _ = load(str(tmp_path), model_cpu)
    assert loaded.config == model.config and loaded.dtype == np.float64
    assert load_state(str(tmp_path), loaded) == {} and same(buffers(loaded), buffers(model))


@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_a_file_cut_at_any_place_is_refused(folder, name):
    path = os.path.join(folder, name)
    raw = open(path, "rb").read()
    header = 8 + int.from_bytes(raw[:8], "little")
    for end in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, (header + len(raw)) // 2,
                len(raw) - 4,
                len(raw) - 1):
        with open(path, "wb") as file:
            file.write(raw[:end])
        refused(folder, "is damaged (truncated or altered)", name)
    with open(path, "wb") as file:
        file.write(raw + b"\0")
    refused(folder, "is damaged", name)


@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_a_flipped_byte_is_refused(folder, name):
    path = os.path.join(folder, name)
    raw = open(path, "rb").read()
    size, rng = int.from_bytes(raw[:8], "little"), np.random.default_rng(0)
    # the length of the header: every other value
    places = [(i, x) for i in range(8) for x in range(1, 256)]
    places += [(8 + i, x) for i in range(size) for x in (1 << int(rng.integers(8)),
                                                         int(rng.integers(1, 256)))]
    places += [(int(i), 1 << int(rng.integers(8))) for i in rng.integers(8 + size, len(raw), 100)]
    accepted = []
    with open(path, "r+b", buffering=0) as file:
        for i, x in places:
            os.pwrite(file.fileno(), bytes([raw[i] ^ x]), i)
            try:
                read_tensors(path)
                accepted.append((i, x))
            except ValueError as error:
                assert path in str(error)
            os.pwrite(file.fileno(), raw[i:i + 1], i)
        assert accepted == []
        os.pwrite(file.fileno(), b"!", 20)
    refused(folder, "is damaged", name)


def test_missing_extra_and_misshapen_tensors_are_refused(folder):
    path = os.path.join(folder, "model.safetensors")
    tensors, metadata = read_tensors(path)
    metadata.pop("crc32")
    name = "model.layers.1.self_attn.k_proj.weight"
    for change, words in [({name: None}, f"the tensor {name} is missing, config.json asks for (8, 16)."),
                          ({"mtp_heads.weight": None}, "the tensor mtp_heads.weight is missing"),
                          ({"surplus": np.zeros(3, np.float32)},
                           "the tensor surplus is (3,), config.json asks for none of that name."),
                          ({name: tensors[name].T.copy()},
                           f"the tensor {name} is (16, 8), config.json asks for (8, 16)."),
                          ({name: tensors[name].ravel()}, f"the tensor {name} is (128,), config.json asks")]:
        changed = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        checkpoint.write_safetensors(path, changed, metadata)
        refused(folder, words, WEIGHTS)
    checkpoint.write_safetensors(path, {}, metadata)
    refused(folder, "missing", WEIGHTS)
    checkpoint.write_safetensors(path, tensors, metadata)
    reload(folder)


def test_foreign_training_states_are_refused(folder):
    path = os.path.join(folder, "train_state.safetensors")
    tensors, metadata = read_tensors(path)
    size = tensors["m"].size
    for changed, words in (({"m": tensors["m"]}, f"v is missing, config.json asks for ({size},)."),
                           ({**tensors, "w": tensors["m"]}, f"w is ({size},), config.json asks for none of that name."),
                           ({"m": tensors["m"], "v": tensors["v"][1:]}, f"v is ({size - 1},), config.json asks for ({size},).")):
        checkpoint.write_safetensors(path, changed, {"step": "7", "state": "{}"})
        refused(folder, f"the tensor {words}", STATE)
    for step in "2", "8", "70":
        checkpoint.write_safetensors(path, tensors, {"step": step, "state": "{}"})
        refused(folder, f"is of step {step}, model.safetensors of step 7", STATE)
    os.remove(path)
    refused(folder, "holds no training state", STATE)


@pytest.mark.parametrize("change, words", [
    (dict(hidden_act="gelu"), "hidden_act is 'gelu', and only 'silu' is computed here."),
    (dict(rms_norm_eps=1e-6), "config.json is not as it was saved"),
    (dict(rms_norm_eps="x"), "norm_eps must be"),
    (dict(rope_theta=500000.0), "config.json is not as it was saved"),
    (dict(rope_theta=0.5), "rope_theta must be"),
    (dict(tie_word_embeddings=True), "tied must be true or false, and true needs predict 1: it is True, and predict 3."),
    (dict(tie_word_embeddings="false"), "true needs predict 1: it is 'false', and predict 3."),
    (dict(rms_norm_eps=10 ** 400), "norm_eps must be a finite number of at least 0, not 10000000000000000000."),
    (dict(head_dim=8), "head_dim is 8, and only 4 is computed here."),
    (dict(model_type="mistral"), "model_type"),
    (dict(intermediate_size=41), "hidden (41) must be a multiple of 8"),
    (dict(num_attention_heads="4"), "heads must be a whole number"), (dict(num_key_value_heads=3),
                                                                      "kv_heads"),
    (dict(mtp_heads=None), "is not as it was saved"), (dict(mtp_heads="x"), "cannot be used"),
    (dict(hidden_size=17), "dim (17) must be a multiple of 8")])
def test_foreign_configs_are_refused(folder, change, words):
    path = os.path.join(folder, "config.json")
    config = json.load(open(path))
    json.dump({**config, **change}, open(path, "w"))
    refused(folder, words, "config.json")


def test_configs_that_are_no_config_are_refused(folder):
    path = os.path.join(folder, "config.json")
    whole = open(path, "rb").read()
    config = json.loads(whole)
    texts = [whole[:n] for n in (0, 1, len(whole) // 2, len(whole) - 1)] + [b"[]", b"1", b"null", b"\xff\xfe",
                                                                            b'"x"']
    texts += [json.dumps({k: v for k, v in config.items() if k != key}).encode()
              for key in config if config[key] is not None]
    for text in texts:
        with open(path, "wb") as file:
            file.write(text)
        refused(folder, "", "config.json")


def test_another_tokenizer_is_refused(folder):
    path = os.path.join(folder, "tokenizer.json")
    Tokenizer.train(["the cat sat on the mat and the dog sat on the cat"], 266).save(path)
    with pytest.raises(ValueError,
                       match="tokenizer.json is not this model's: it has 266 tokens, config.json says 264"):
        load(folder, model_cpu)
    open(path, "w").write("{}")
    refused(folder, "is not a tokenizer that tokenizer.py reads", "tokenizer.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name):
    os.remove(os.path.join(folder, name))
    refused(folder, "holds no checkpoint: there is no ", name)


def test_no_folder_at_all(tmp_path):
    refused(str(tmp_path / "nothing"), "holds no checkpoint", "config.json")


class Killed(BaseException):
    """Stands for SIGKILL."""


def kill_at(monkeypatch, stage):
    """Let the process "die" at its stage-th call that changes the disk; a file about to be synced is cut in
    half,
    as if it had not been written to its end.  After its death nothing changes the disk, whatever handlers
    still
    run."""
    calls = itertools.count()

    def wrap(name, original):
        def call(*arguments, **options):
            number = next(calls)
            if number == stage and name == "fsync":
                os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
            if number >= stage:
                raise Killed
            return original(*arguments, **options)
        monkeypatch.setattr(os, name, call)
    for name in ("replace", "remove", "fsync"):
        wrap(name, getattr(os, name))


def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(folder, tmp_path, monkeypatch):
    old, _ = reload(folder)
    new, _ = reload(folder)
    trained(new)
    expected = {7: buffers(old), 8: buffers(new)}
    found = []
    for stage in itertools.count():
        copy = str(tmp_path / f"killed{stage}")
        shutil.copytree(folder, copy)
        with monkeypatch.context() as patch:
            kill_at(patch, stage)
            try:
                save(copy, new, TOKENIZER, {"after": 2})
                finished = True
            except Killed:
                finished = False
        if stage % 2:
            # nor may the next save trip over the remains
            save_twice = str(tmp_path / f"again{stage}")
            shutil.copytree(copy, save_twice)
            save(save_twice, new, TOKENIZER, {"after": 2})
            assert same(buffers(reload(save_twice)[0]), expected[8])
            assert not [name for name in os.listdir(save_twice) if name.endswith(".new")]
        files = {name: os.path.getmtime(os.path.join(copy, name)) for name in os.listdir(copy)}
        loaded, state = reload(copy)
        # a reader touches nothing: the files may be those of a run that is saving at this moment
        assert files == {name: os.path.getmtime(os.path.join(copy, name)) for name in os.listdir(copy)}
        found.append(loaded.step)
        assert same(buffers(loaded), expected[loaded.step]), stage
        assert state == (RECORD if loaded.step == 7 else {"after": 2})
        if finished:
            break
    assert found == sorted(found) and found[0] == 7 and found[-1] == 8 and len(found) > 6
    assert found.count(8) >= 2                                      # one of them between the two renames


def test_a_first_save_killed_at_any_moment_leaves_no_config_or_a_checkpoint(tmp_path, monkeypatch):
    """By config.json the Makefile tells whether there is a run to go on with."""
    found = []
    for stage in itertools.count():
        folder = str(tmp_path / f"killed{stage}")
        with monkeypatch.context() as patch:
            kill_at(patch, stage)
            with contextlib.suppress(Killed):
                save(folder, make(), TOKENIZER, RECORD)
                break
        found.append(os.path.exists(os.path.join(folder, "config.json")))
        if found[-1]:
            reload(folder)
    assert len(found) > 6 and reload(folder)[1] == RECORD


def test_each_file_is_on_the_disk_before_it_takes_its_name(folder, monkeypatch):
    """Else a machine that loses its power may keep the name of a file and not its bytes."""
    synced, replaced = set(), set()
    fsync, replace = os.fsync, os.replace

    def noted_fsync(file):
        fsync(file)
        status = os.fstat(file)
        synced.add((status.st_ino, status.st_size))

    def noted_replace(source, target):
        status = os.stat(source)
        assert (status.st_ino, status.st_size) in synced, source
        replace(source, target)
        replaced.add(os.path.basename(target))
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    # tied: its last tensor is so small that it waits in Python's buffer
    save(folder, make(config=dataclasses.replace(TINY, predict=1, tied=True)), TOKENIZER, RECORD)
    assert replaced == set(os.listdir(folder))


# What a killed save can leave: how much of the model's and of the state's .new file there is (None: no such
# file), and whether the new model has been renamed already.
@pytest.mark.parametrize("new_model, new_state, renamed", [
    (0, None, False), (0.5, None, False), (1, None, False), (1, 0, False), (1, 0.5, False), (1, 1, False),
    (None, 1, True)])
def test_the_repair_itself_may_be_killed(folder, tmp_path, monkeypatch, new_model, new_state, renamed):
    after = str(tmp_path / "after")
    new, _ = reload(folder)
    trained(new)
    save(after, new, TOKENIZER, {"after": 2})
    for stage in range(4):
        copy = str(tmp_path / f"killed{stage}")
        shutil.copytree(folder, copy)
        for name, part in zip((WEIGHTS, STATE), (new_model, new_state)):
            if part is not None:
                raw = open(os.path.join(after, name), "rb").read()
                with open(os.path.join(copy, name + ".new"), "wb") as file:
                    file.write(raw[:int(part * len(raw))])
        if renamed:
            shutil.copy(os.path.join(after, WEIGHTS), copy)
        with monkeypatch.context() as patch:
            kill_at(patch, stage)
            with contextlib.suppress(Killed):
                checkpoint.repair(copy)
        assert reload(copy)[0].step == (8 if renamed else 7), stage


def test_a_full_disk_keeps_the_last_checkpoint(folder):
    """Writes fail at a limit on the size of a file: in tokenizer.json, in the model, in the training
    state."""
    old, _ = reload(folder)
    new, _ = reload(folder)
    trained(new)
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (100, 5000, sizes["model.safetensors"] - 1000, sizes["train_state.safetensors"] - 1000):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(OSError):
                save(folder, new, TOKENIZER, {"after": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        loaded, state = reload(folder)
        assert loaded.step == 7 and state == RECORD and same(buffers(loaded), buffers(old))
        # space is given back
        assert not [name for name in os.listdir(folder) if name.endswith(".safetensors.new")]
    save(folder, new, TOKENIZER, {"after": 2})
    assert reload(folder)[0].step == 8


def test_chat_template_and_end_token(tmp_path):
    model = make()
    for chat, end in ((True, "<|end|>"), (False, "<|endoftext|>")):
        save(str(tmp_path), model, TOKENIZER, {}, chat=chat)
        written = json.load(open(tmp_path / "tokenizer_config.json"))
        template = {"chat_template": CHAT_TEMPLATE} if chat else {}
        assert written == {"tokenizer_class": "PreTrainedTokenizerFast",
                           "clean_up_tokenization_spaces": False,
                           "model_max_length": 16, "eos_token": end, **template}
        assert json.load(open(tmp_path / "config.json"))["eos_token_id"] == TOKENIZER.special[end]
        assert checkpoint.read_tokenizer(str(tmp_path)).template == (CHAT_TEMPLATE if chat else "")
        assert reload(str(tmp_path))[0].step == 7


def test_config_json_carries_every_size(tmp_path):
    config = dataclasses.replace(TINY, hidden=24, norm_eps=0.25, rope_theta=77.0, predict=1)
    save(str(tmp_path), make(config=config), TOKENIZER, {})
    found = json.load(open(tmp_path / "config.json"))
    assert {key: found[key] for key in ("intermediate_size", "rms_norm_eps", "rope_theta", "mtp_heads",
                                        "mtp_weight",
                                        "hidden_size", "head_dim", "max_position_embeddings")} == {
        "intermediate_size": 24, "rms_norm_eps": 0.25, "rope_theta": 77.0, "mtp_heads": 0, "mtp_weight": 0.5,
        "hidden_size": 16, "head_dim": 4, "max_position_embeddings": 16}
    assert checkpoint.read_config(str(tmp_path)) == config


def test_a_single_head_has_no_further_tensor(tmp_path):
    save(str(tmp_path), make(config=dataclasses.replace(TINY, predict=1)), TOKENIZER, {})
    tensors, _ = read_tensors(str(tmp_path / WEIGHTS))
    assert "mtp_heads.weight" not in tensors and tensors["lm_head.weight"].shape == (264, 16)
    assert len(tensors) == 21


def test_loading_draws_no_random_numbers(folder, monkeypatch):
    expected = make()
    monkeypatch.setattr(np.random, "default_rng", None)
    assert same(buffers(reload(folder)[0]), buffers(expected))
    model, _ = load(folder, model_cpu, {"dtype": np.float32, "training": False})
    assert np.array_equal(model.flat_params, expected.flat_params) and model.flat_grads is model.m is None


def test_reading_takes_no_memory(tmp_path):
    """Of sixteen megabytes never more than which numbers of one tensor are finite."""
    path, rng = str(tmp_path / WEIGHTS), np.random.default_rng(0)
    tensors = {f"tensor {i}": rng.random((128, 2048), np.float32) for i in range(16)}
    checkpoint.write_safetensors(path, tensors, {"step": "1"})
    tracemalloc.start()
    try:
        read, metadata = checkpoint.read_safetensors(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20 and metadata["step"] == "1"
    assert list(read) == list(tensors) and all(np.array_equal(read[name], tensors[name]) for name in tensors)


def test_writing_copies_no_tensor(tmp_path):
    tensors = {f"tensor {i}": np.ones((128, 2048), np.float32) for i in range(8)}
    tracemalloc.start()
    try:
        checkpoint.write_safetensors(str(tmp_path / WEIGHTS), tensors, {})
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()


def test_a_file_of_tensors_by_hand(tmp_path):
    """Byte by byte, as the format has it."""
    path = str(tmp_path / "x")
    a, b = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), np.array([5.0])
    checkpoint.write_safetensors(path, {"a": a.T.copy(), "b": b, "none": np.zeros((0, 3))}, {"step": "1"})
    raw = open(path, "rb").read()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])
    assert size % 8 == 0 and raw[8 + size:] == a.T.tobytes() + b.tobytes() and raw[8:9] == b"{"
    crc = header["__metadata__"].pop("crc32")
    assert header == {"__metadata__": {"step": "1"}, "a": {"dtype": "F32", "shape": [2, 2],
                                                           "data_offsets": [0, 16]},
                      "b": {"dtype": "F64", "shape": [1], "data_offsets": [16, 24]},
                      "none": {"dtype": "F64", "shape": [0, 3], "data_offsets": [24, 24]}}
    assert crc == f"{zlib.crc32(raw.replace(crc.encode(), b'00000000')):08x}"
    tensors, _ = read_tensors(path)
    assert np.array_equal(tensors["a"], a.T) and tensors["b"].dtype == np.float64
    assert tensors["none"].shape == (0, 3)


def test_tensors_start_at_a_multiple_of_eight(tmp_path):
    """However long the header is; up to seven spaces see to it."""
    path, spaces = str(tmp_path / "x"), []
    for letters in range(1, 9):
        checkpoint.write_safetensors(path, {letters * "a": np.ones(1)}, {})
        raw = open(path, "rb").read()
        spaces.append(raw.count(b" ", 8, 8 + int.from_bytes(raw[:8], "little")))
        assert int.from_bytes(raw[:8], "little") % 8 == 0
    assert sorted(spaces) == [*range(8)]


def test_a_number_alone_is_a_tensor_too(tmp_path):
    """We write none, but the format has them: the shape []."""
    path = str(tmp_path / "x")
    header = {"__metadata__": {}, "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}
    attack.sign(path, header, np.float32(2.5).tobytes())
    assert read_tensors(path)[0] == {"a": 2.5}


# -- the printer ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chat", [False, True])
def test_what_is_in_a_folder_is_printed(folder, capsys, chat):
    save(folder, make(), TOKENIZER, RECORD, chat=chat)
    assert checkpoint.main([folder]) is None
    out = capsys.readouterr().out
    lines = out.splitlines()
    count = make().flat_params.size
    assert lines[:3] == [
        f"{folder}: step 7, {count:,} parameters, " + ("answers" if chat else "continues texts"),
        ("config    dim 16, heads 4, kv_heads 2, layers 2, context 16, vocab 264, predict 3, mtp_weight 0.5, hidden 48, "
        "norm_eps 1e-05, rope_theta 10000.0, tied False, positions None"),
        "tokenizer 262 tokens, 4 of them special"]
    tensors = read_tensors(os.path.join(folder, WEIGHTS))[0]
    at = 3
    for name, number in ((WEIGHTS, 22), (STATE, 2)):
        path = os.path.join(folder, name)
        crc = attack.read_header(path)[0]["__metadata__"]["crc32"]
        assert lines[at] == f"{path}: {number} tensors, {os.path.getsize(path):,} bytes, CRC32 {crc}"
        for line, (tensor, array) in zip(lines[at + 1:at + 1 + number], read_tensors(path)[0].items(),
                                         strict=True):
            size = np.linalg.norm(array.astype(np.float64)) / np.sqrt(array.size)
            assert line == f"  {tensor:44} {str(array.shape):15} float32  root mean square {size:.3g}"
        at += 1 + number
    assert len(lines) == at and len(tensors) == 22
    os.remove(os.path.join(folder, STATE))
    checkpoint.main([folder])
    assert capsys.readouterr().out.splitlines() == lines[:26]


def test_the_printer_refuses_in_one_sentence(folder, tmp_path):
    def called(*arguments):
        done = subprocess.run([sys.executable, checkpoint.__file__, *arguments], capture_output=True,
                              text=True)
        return done.returncode, done.stdout, done.stderr
    code, out, error = called(folder)
    assert (code, error) == (0, "") and out.startswith(f"{folder}: step 7, ")
    for place, words in [(str(tmp_path), "holds no checkpoint: there is no "),
                         (str(tmp_path / "none"), "holds no checkpoint"),
                         (os.path.join(folder, WEIGHTS), "holds no checkpoint")]:
        code, out, error = called(place)
        assert code == 2 and out == "" and error.startswith("error: ") and words in error
        assert error.count("\n") == 1
    assert called()[0] == called(folder, folder)[0] == 2
    for name in (WEIGHTS, STATE):
        with open(os.path.join(folder, name), "r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"!")
        code, out, error = called(folder)
        assert code == 2 and f"{name} is damaged" in error and error.count("\n") == 1
        save(folder, make(), TOKENIZER, RECORD)


# -- config.json -------------------------------------------------------------------------------------------------------
def test_config_is_covered_by_a_checksum(folder):
    path = os.path.join(folder, "config.json")
    text = open(path).read()
    for old, new in ('"mtp_weight": 0.5', '"mtp_weight": 0.25'), ('"max_position_embeddings": 16', '"max_position_embeddings": 8'), ("{", "{ "):
        assert text.count(old) >= 1
        open(path, "w").write(text.replace(old, new, 1))
        refused(folder, "config.json is not as it was saved")
    open(path, "w").write(text)
    reload(folder)


FIRST_CONFIG = """{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 48,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
  "vocab_size": 264,
  "max_position_embeddings": 16, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "hidden_act": "silu",
  "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": false, "torch_dtype": "float32",
  "bos_token_id": null, "eos_token_id": 258, "mtp_heads": 2, "mtp_weight": 0.5
}"""


def test_a_folder_of_the_first_version_loads(folder):
    """It has no checksum of config.json."""
    edit(folder, WEIGHTS, lambda header, data: header["__metadata__"].pop("config") and None)
    edit(folder, STATE, lambda header, data: header["__metadata__"].pop("config") and None)
    path = os.path.join(folder, "config.json")
    assert json.loads(FIRST_CONFIG) == json.load(open(path))
    open(path, "w").write(FIRST_CONFIG)
    model, state = reload(folder)
    assert model.step == 7 and state == RECORD and same(buffers(model), buffers(make()))
    assert model.config == TINY
    save(folder, model, TOKENIZER, state)
    assert attack.read_header(os.path.join(folder, WEIGHTS))[0]["__metadata__"]["config"] == (
        f"{zlib.crc32(open(path, 'rb').read()):08x}")


@pytest.mark.parametrize("changes, words", [
    ({"num_hidden_layers": 3_000_000}, "num_hidden_layers"), ({"num_hidden_layers": 1_000_000}, "tensors are missing"),
    ({"num_hidden_layers": 3}, "the tensor model.layers.2.self_attn.q_proj.weight is missing"),
    ({"num_hidden_layers": 1}, "the tensor model.layers.1."),
    ({"hidden_size": 1 << 19, "head_dim": 1 << 17, "intermediate_size": 1 << 20},
                                                               "model.embed_tokens.weight is (264, 16), config.json asks for (264, 524288)."),
    ({"max_position_embeddings": 1 << 21}, "context must be a whole number from 1 to 1,048,576, not 2097152"),
    ({"vocab_size": 1 << 70}, "vocab must be a whole number"), ({"mtp_heads": 3}, "mtp_heads.weight is (528, 16), config.json asks for (792, 16).")])
def test_sizes_that_are_not_those_of_the_weights(folder, changes, words):
    """Under a right checksum: refused before anything of that size is made."""
    path = os.path.join(folder, "config.json")
    config = {**json.load(open(path)), **changes}
    json.dump(config, open(path, "w"), indent=2)
    crc = f"{zlib.crc32(open(path, 'rb').read()):08x}"
    edit(folder, WEIGHTS, lambda header, data: header["__metadata__"].update(config=crc))
    with pytest.raises(ValueError) as error:
        reload(folder)
    assert words in str(error.value) or "layers must be a whole number" in str(error.value) and changes.get("num_hidden_layers") == 3_000_000


# -- the tensors -------------------------------------------------------------------------------------------------------
FIRST = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("change", [
    {"data_offsets": [-1024, 0]}, {"data_offsets": [0, 1024]}, {"data_offsets": [16896, 17916]}, {"data_offsets": [16900, 17924]},
    {"data_offsets": [17920, 16896]}, {"data_offsets": [16896]}, {"data_offsets": None}, {"data_offsets": [16896, 1 << 62]},
    {"data_offsets": [16896.0, "x"]}, {"shape": [-16, -16]}, {"shape": [-1, -1, 256]}, {"shape": [8, 16]}, {"shape": [256, 0]}, {"shape": None}, {"shape": [1 << 40, 1 << 40]},
    {"dtype": "F64"}, {"dtype": "I8"}, {"dtype": None}])
def test_entries_that_do_not_lie_one_after_the_other(folder, change):
    header, _ = attack.read_header(os.path.join(folder, WEIGHTS))
    assert header[FIRST] == {"dtype": "F32", "shape": [16, 16], "data_offsets": [16896, 17920]}
    edit(folder, WEIGHTS, lambda header, data: header[FIRST].update(change))
    refused(folder, "model.safetensors is damaged (truncated or altered)")


def test_bytes_after_the_last_tensor_are_refused(folder):
    edit(folder, WEIGHTS, lambda header, data: data + b"\0\0\0\0")
    refused(folder, "model.safetensors is damaged")


@pytest.mark.parametrize("name, tensor", [(WEIGHTS, FIRST), (WEIGHTS, "mtp_heads.weight"), (STATE, "m"), (STATE, "v")])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_named(folder, name, tensor, value):
    def change(header, data):
        place = header[tensor]["data_offsets"][1] - 4
        return data[:place] + struct.pack("<f", value) + data[place + 4:]
    edit(folder, name, change)
    refused(folder, f"{name}: the tensor {tensor} holds numbers that are not finite")


def test_names_are_llamas(folder):
    """q, k, v and gate, up are rows of our fused matrices in this order, head 0 is the first of the heads."""
    tensors, _ = read_tensors(os.path.join(folder, WEIGHTS))
    w = make().params
    for i in range(2):
        layer = f"model.layers.{i}"
        for rows, name in ((slice(0, 16), "self_attn.q_proj"), (slice(16, 24), "self_attn.k_proj"), (slice(24, 32), "self_attn.v_proj")):
            assert np.array_equal(tensors[f"{layer}.{name}.weight"], w[f"layers.{i}.qkv"][rows])
        for rows, name in ((slice(0, TINY.hidden), "gate_proj"), (slice(TINY.hidden, None), "up_proj")):
            assert np.array_equal(tensors[f"{layer}.mlp.{name}.weight"], w[f"layers.{i}.gate_up"][rows])
        for ours, name in (("out", "self_attn.o_proj"), ("down", "mlp.down_proj"), ("norm1", "input_layernorm"),
                           ("norm2", "post_attention_layernorm")):
            assert np.array_equal(tensors[f"{layer}.{name}.weight"], w[f"layers.{i}.{ours}"])
    assert np.array_equal(tensors["lm_head.weight"], w["heads"][:264]) and np.array_equal(tensors["mtp_heads.weight"], w["heads"][264:])
    assert np.array_equal(tensors["model.embed_tokens.weight"], w["embed"]) and np.array_equal(tensors["model.norm.weight"], w["norm"])
    assert len(tensors) == 2 * 9 + 4


# -- metadata ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", [None, "", "-1", "x", "1.5", "missing"])
def test_a_checkpoint_of_no_step(folder, step):
    def change(header, data):
        header["__metadata__"].update(step=step)
        if step == "missing":
            del header["__metadata__"]["step"]
    edit(folder, WEIGHTS, change)
    refused(folder, "model.safetensors does not say of which step it is")


@pytest.mark.parametrize("state", ["missing", None, "", "x", "[]", "5", "null", "[" * 100_000, '"' + "\\ud800" * 3 + '"'])
def test_a_state_that_is_none(folder, state):
    def change(header, data):
        header["__metadata__"].update(state=state)
        if state == "missing":
            del header["__metadata__"]["state"]
    edit(folder, STATE, change)
    refused(folder, "train_state.safetensors holds no record of a run")


@pytest.mark.parametrize("header", [
    "[" * 100_000, '{"__metadata__":' + '{"a":' * 50_000, "[]", "7", '{"a":1}', '{"__metadata__":[]}',
    '{"__metadata__":{}}', '{"__metadata__":{"crc32":7}}', '{"__metadata__":{"crc32":null}}', "1" * 5000,
    "\xff"])
@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_headers_that_are_none(folder, name, header):
    path = os.path.join(folder, name)
    attack.sign(path, header, b"")
    refused(folder, "", name)
    if not header.endswith("}}"):                   # which somebody else's may be
        with pytest.raises(ValueError, match="is damaged"):
            read_tensors(path)


# -- files that are none -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS, STATE])
@pytest.mark.parametrize("what", ["pipe", "zero", "folder"])
def test_something_else_in_place_of_a_file(folder, name, what):
    path = os.path.join(folder, name)
    os.remove(path)
    os.mkfifo(path) if what == "pipe" else os.symlink("/dev/zero", path) if what == "zero" else os.mkdir(path)
    refused(folder, f"{name} is not a plain file, so it is not read")


@pytest.mark.parametrize("text", ["[" * 100_000, "7", "[]", "", "{", "1" * 5000])
def test_tokenizer_config(folder, text):
    path = os.path.join(folder, "tokenizer_config.json")
    assert checkpoint.read_tokenizer(folder).template == ""
    open(path, "w").write(text)
    refused(folder, "tokenizer_config.json is damaged: it ", "tokenizer_config.json")
    os.remove(path)
    os.mkfifo(path)
    refused(folder, "tokenizer_config.json is not a plain file", "tokenizer_config.json")


def test_a_save_repairs_first(folder):
    """What a killed save left: the new model is in place, its state waits as .new.  The next save, itself killed before it
    renames anything, must leave that pair."""
    after = make(seed=1)
    after.step = 8
    save(folder + "-after", after, TOKENIZER, {"tokens": 6})
    shutil.copy(os.path.join(folder + "-after", WEIGHTS), folder)
    shutil.copy(os.path.join(folder + "-after", STATE), os.path.join(folder, STATE + ".new"))
    real = os.replace

    def killed(source, target):
        if source.endswith("model.safetensors.new"):
            raise KeyboardInterrupt
        real(source, target)
    os.replace = killed
    try:
        with pytest.raises(KeyboardInterrupt):
            save(folder, make(seed=2), TOKENIZER, {"tokens": 7})
    finally:
        os.replace = real
    model, state = reload(folder)
    assert model.step == 8 and state == {"tokens": 6} and np.array_equal(model.m, after.m)
