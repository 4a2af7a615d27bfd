"""checkpoint.py: every bit comes back; killed at any moment a whole checkpoint is there; whatever was
altered, is missing, damaged or foreign is named in one sentence; the first version's folders; the printer."""
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
from cases import once_a_module, parametrize, put, read, write

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
    for array in model.flat_params, model.m, model.v:
        model.write(array, rng.standard_normal(array.size, np.float32))
    model.v[...] = np.abs(model.v)                  # a mean of squares
    return model


def trained(model):
    rng = np.random.default_rng(model.step)
    model.forward(rng.integers(0, 264, (2, 7)), rng.integers(0, 264, (2, 9)))
    model.backward()
    model.update(lr=1e-2)
    return model


@once_a_module
def saved(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("saved") / "run")
    save(path, make(), TOKENIZER, RECORD)
    return path


@pytest.fixture
def folder(tmp_path, saved):
    """A checkpoint of step 7."""
    shutil.copytree(saved, tmp_path / "run")
    signal.alarm(600)                               # a read from a pipe would never end
    yield f"{tmp_path}/run"
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
    assert f"{folder}/{name}".rstrip("/") in text and words in text
    assert "\n" not in text and text.endswith("."), text


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
    path = f"{folder}/{name}"
    header, data = attack.read_header(path)
    data = change(header, data) or data
    attack.sign(path, header, data)


def edit_metadata(folder, name, key, value):
    """value "missing": without that key."""
    def change(header, data):
        header["__metadata__"][key] = value
        if value == "missing":
            del header["__metadata__"][key]
    edit(folder, name, change)


def edit_config(folder, **changes):
    path = f"{folder}/config.json"
    config = {**json.load(open(path)), **changes}
    write(path, json.dumps(config, indent=2))
    return f"{zlib.crc32(open(path, 'rb').read()):08x}"


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
    assert same(buffers(trained(loaded)), buffers(trained(model)))
    assert sorted(os.listdir(folder)) == """config.json model.safetensors tokenizer.json
                                         tokenizer_config.json train_state.safetensors""".split()
    tensors, _ = read_tensors(f"{folder}/{WEIGHTS}")
    heads = make().params["heads"]                          # head 0 is Llama's
    assert np.array_equal(tensors["lm_head.weight"], heads[:264]) and len(tensors) == 22
    assert np.array_equal(tensors["mtp_heads.weight"], heads[264:])


@parametrize("change", [dict(predict=1, kv_heads=4), dict(layers=1, context=3, mtp_weight=0),
                                    dict(hidden=8, norm_eps=0.25, rope_theta=77.0)])
def test_float64_and_other_sizes_round_trip(tmp_path, change):
    model = make(config=dataclasses.replace(TINY, **change), dtype=np.float64)
    model.flat_params[...] += 1e-12
    save(str(tmp_path), model, TOKENIZER, {})
    loaded, _ = load(str(tmp_path), model_cpu)
    assert loaded.config == model.config and loaded.dtype == np.float64
    assert load_state(str(tmp_path), loaded) == {} and same(buffers(loaded), buffers(model))


@parametrize("chat, end", [(True, "<|end|>"), (False, "<|endoftext|>")])
def test_the_json_files(tmp_path, chat, end):
    save(str(tmp_path), make(), TOKENIZER, {}, chat=chat)
    template = {"chat_template": CHAT_TEMPLATE} if chat else {}
    assert json.load(open(tmp_path / "tokenizer_config.json")) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "model_max_length": 16, "eos_token": end, **template}
    assert json.load(open(tmp_path / "config.json")) == {
        **json.loads(FIRST_CONFIG), "eos_token_id": TOKENIZER.special[end]}
    assert checkpoint.read_tokenizer(str(tmp_path)).template == (CHAT_TEMPLATE if chat else "")


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
    for name in WEIGHTS, STATE:
        edit_metadata(folder, name, "config", "missing")
    path = f"{folder}/config.json"
    write(path, FIRST_CONFIG)
    model, state = reload(folder)
    assert state == RECORD and same(buffers(model), buffers(make())) and model.config == TINY
    save(folder, model, TOKENIZER, state)
    assert attack.read_header(f"{folder}/{WEIGHTS}")[0]["__metadata__"]["config"] == (
        f"{zlib.crc32(open(path, 'rb').read()):08x}")


def test_loading_draws_no_random_numbers(folder, monkeypatch):
    expected = make()
    monkeypatch.setattr(np.random, "default_rng", None)
    model, _ = load(folder, model_cpu, {"dtype": np.float32, "training": False})
    assert np.array_equal(model.flat_params, expected.flat_params) and model.flat_grads is model.m is None


def test_tensors_are_neither_read_nor_written_through_copies(tmp_path):
    path, rng = f"{tmp_path}/{WEIGHTS}", np.random.default_rng(0)
    tensors = {f"tensor {i}": rng.random((128, 2048), np.float32) for i in range(8)}
    tracemalloc.start()
    try:
        checkpoint.write_safetensors(path, tensors, {"step": "1"})
        read, _ = checkpoint.read_safetensors(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 19         # half a tensor
    finally:
        tracemalloc.stop()
    assert list(read) == list(tensors) and all(np.array_equal(read[name], tensors[name]) for name in tensors)


def test_a_file_of_tensors_by_hand(tmp_path):
    """Byte by byte, as the format has it."""
    path = f"{tmp_path}/x"
    a, b = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), np.array([5.0])
    checkpoint.write_safetensors(path, {"a": a.T.copy(), "b": b, "none": np.zeros((0, 3))}, {"step": "1"})
    raw = read(path)
    header, data = attack.read_header(path)
    assert data == a.T.tobytes() + b.tobytes() and raw[8:9] == b"{"
    crc = header["__metadata__"].pop("crc32")
    assert header == {"__metadata__": {"step": "1"},
                      "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
                      "b": {"dtype": "F64", "shape": [1], "data_offsets": [16, 24]},
                      "none": {"dtype": "F64", "shape": [0, 3], "data_offsets": [24, 24]}}
    assert crc == f"{zlib.crc32(raw.replace(crc.encode(), b'00000000')):08x}"
    tensors, _ = read_tensors(path)
    assert np.array_equal(tensors["a"], a.T) and tensors["b"].dtype == np.float64
    assert tensors["none"].shape == (0, 3)
    header = {"__metadata__": {}, "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}
    attack.sign(path, header, np.float32(2.5).tobytes())    # a number alone: the format has it
    assert read_tensors(path)[0] == {"a": 2.5}


def test_tensors_start_at_a_multiple_of_eight(tmp_path):
    """However long the header is; up to seven spaces see to it."""
    path, spaces = f"{tmp_path}/x", []
    for letters in range(1, 9):
        checkpoint.write_safetensors(path, {letters * "a": np.ones(1)}, {})
        raw = read(path)
        size = int.from_bytes(raw[:8], "little")
        spaces.append(raw.count(b" ", 8, 8 + size))
        assert size % 8 == 0
    assert sorted(spaces) == [*range(8)]


# -- killed, or no room --------------------------------------------------------------------------------------
class Killed(BaseException):
    """Stands for SIGKILL."""


@contextlib.contextmanager
def killed_at(stage):
    """Let the process "die" at its stage-th call that changes the disk; a file about to be synced is cut in
    half, as if it had not been written to its end.  After its death nothing changes the disk, whatever
    handlers still run."""
    calls = itertools.count()

    def dying(name, original):
        def call(*arguments, **options):
            number = next(calls)
            if number == stage and name == "fsync":
                os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
            if number >= stage:
                raise Killed
            return original(*arguments, **options)
        return call
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        for name in "replace", "remove", "fsync":
            patch.setattr(os, name, dying(name, getattr(os, name)))
        yield


def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(folder, tmp_path):
    old, _ = reload(folder)
    new = trained(reload(folder)[0])
    expected = {7: buffers(old), 8: buffers(new)}
    found = []
    finished = False
    while not finished:
        stage = len(found)
        copy = f"{tmp_path}/killed{stage}"
        shutil.copytree(folder, copy)
        with killed_at(stage):
            save(copy, new, TOKENIZER, {"after": 2})
            finished = True
        files = {name: os.path.getmtime(f"{copy}/{name}") for name in os.listdir(copy)}
        loaded, state = reload(copy)
        # a reader touches nothing: the files may be those of a run that is saving at this moment
        assert files == {name: os.path.getmtime(f"{copy}/{name}") for name in os.listdir(copy)}
        found.append(loaded.step)
        assert same(buffers(loaded), expected[loaded.step]), stage
        assert state == (RECORD if loaded.step == 7 else {"after": 2})
        save(copy, new, TOKENIZER, {"after": 2})            # nor may the next save trip over the remains
        assert same(buffers(reload(copy)[0]), expected[8])
        assert not [name for name in os.listdir(copy) if name.endswith(".new")]
    assert found == sorted(found) and found[0] == 7 and len(found) > 6
    assert found.count(8) >= 2                              # one of them between the two renames


def test_a_first_save_killed_at_any_moment_leaves_no_config_or_a_checkpoint(tmp_path):
    """By config.json the Makefile tells whether there is a run to go on with."""
    for stage in itertools.count():
        folder = f"{tmp_path}/killed{stage}"
        with killed_at(stage):
            save(folder, make(), TOKENIZER, RECORD)
            break
        if os.path.exists(f"{folder}/config.json"):
            reload(folder)
    assert stage > 6 and reload(folder)[1] == RECORD


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
    put(monkeypatch, os, fsync=noted_fsync, replace=noted_replace)
    # tied: its last tensor is so small that it waits in Python's buffer
    save(folder, make(config=dataclasses.replace(TINY, predict=1, tied=True)), TOKENIZER, RECORD)
    assert replaced == set(os.listdir(folder))


# What a killed save can leave: how much of the model's and of the state's .new file there is (None: no such
# file), and whether the new model has been renamed already.
@parametrize("new_model, new_state, renamed", [
    (0.5, None, False), (1, None, False), (1, 0.5, False), (1, 1, False), (None, 1, True)])
def test_the_repair_itself_may_be_killed(folder, tmp_path, new_model, new_state, renamed):
    after = f"{tmp_path}/after"
    new = trained(reload(folder)[0])
    save(after, new, TOKENIZER, {"after": 2})
    for name, part in (WEIGHTS, new_model), (STATE, new_state):
        if part is not None:
            raw = read(f"{after}/{name}")
            write(os.path.join(folder, name + ".new"), raw[:int(part * len(raw))])
    if renamed:
        shutil.copy(f"{after}/{WEIGHTS}", folder)
    for stage in range(4):
        copy = f"{tmp_path}/killed{stage}"
        shutil.copytree(folder, copy)
        with killed_at(stage):
            checkpoint.repair(copy)
        assert reload(copy)[0].step == (8 if renamed else 7), stage


def test_a_save_repairs_first(folder, monkeypatch):
    """What a killed save left: the new model is in place, its state waits as .new.  The next save, itself
    killed before it renames anything, must leave that pair."""
    after = make(seed=1)
    after.step = 8
    save(folder + "-after", after, TOKENIZER, {"tokens": 6})
    shutil.copy(os.path.join(folder + "-after", WEIGHTS), folder)
    shutil.copy(os.path.join(folder + "-after", STATE), os.path.join(folder, STATE + ".new"))
    real = os.replace

    def replace(source, target):
        if source.endswith(WEIGHTS + ".new"):
            raise Killed
        real(source, target)
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        save(folder, make(seed=2), TOKENIZER, {"tokens": 7})
    model, state = reload(folder)
    assert model.step == 8 and state == {"tokens": 6} and np.array_equal(model.m, after.m)


def test_a_full_disk_keeps_the_last_checkpoint(folder):
    """Writes fail at a limit on the size of a file: in tokenizer.json, in the model, in the state."""
    old, _ = reload(folder)
    new = trained(reload(folder)[0])
    sizes = [os.path.getsize(f"{folder}/{name}") - 1000 for name in (WEIGHTS, STATE)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in 100, *sizes:
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


# -- altered, damaged, missing -------------------------------------------------------------------------------
@parametrize("name", [WEIGHTS, STATE])
def test_a_file_cut_at_any_place_is_refused(folder, name):
    path = f"{folder}/{name}"
    raw = read(path)
    header = 8 + int.from_bytes(raw[:8], "little")
    for end in 0, 7, 8, header // 2, header, header + 1, len(raw) - 4:
        write(path, raw[:end])
        refused(folder, "is damaged (truncated or altered)", name)
    write(path, raw + b"\0")
    refused(folder, "is damaged", name)


@parametrize("name", [WEIGHTS, STATE])
def test_a_flipped_byte_is_refused(folder, name):
    path = f"{folder}/{name}"
    raw = read(path)
    size, rng = int.from_bytes(raw[:8], "little"), np.random.default_rng(0)
    # the length of the header: every other value
    places = [(i, x) for i in range(8) for x in range(1, 256)]
    places += [(8 + i, x) for i in range(size)
               for x in (1 << int(rng.integers(8)), int(rng.integers(1, 256)))]
    places += [(int(i), 1 << int(rng.integers(8))) for i in rng.integers(8 + size, len(raw), 100)]
    accepted = []
    with open(path, "r+b", buffering=0) as file:
        for i, x in places:
            os.pwrite(file.fileno(), bytes([raw[i] ^ x]), i)
            try:
                checkpoint.read_safetensors(path)
                accepted.append((i, x))
            except ValueError as error:
                assert path in str(error)
            os.pwrite(file.fileno(), raw[i:i + 1], i)
    assert accepted == []


def test_missing_extra_and_misshapen_tensors_are_refused(folder):
    path = f"{folder}/{WEIGHTS}"
    tensors, metadata = read_tensors(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    for change, words in [
            ({name: None}, f"the tensor {name} is missing, config.json asks for (8, 16)."),
            ({"mtp_heads.weight": None}, "the tensor mtp_heads.weight is missing"),
            ({"more": np.zeros(3, np.float32)}, "more is (3,), config.json asks for none of that name."),
            ({name: tensors[name].T.copy()}, f"the tensor {name} is (16, 8), config.json asks for (8, 16).")]:
        changed = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        checkpoint.write_safetensors(path, changed, metadata)
        refused(folder, words, WEIGHTS)


def test_foreign_training_states_are_refused(folder):
    path = f"{folder}/{STATE}"
    tensors, _ = read_tensors(path)
    m, v = tensors["m"], tensors["v"]
    for changed, words in [
            ({"m": m}, "v is missing"),
            ({"m": m[1:], "v": v}, f"m is ({m.size - 1},), config.json asks for ({m.size},)."),
            ({"m": m, "v": v[1:]}, f"v is ({m.size - 1},), config.json asks for ({m.size},).")]:
        checkpoint.write_safetensors(path, changed, {"step": "7", "state": "{}"})
        refused(folder, f"the tensor {words}", STATE)
    checkpoint.write_safetensors(path, tensors, {"step": "6", "state": "{}"})
    refused(folder, "is of step 6, model.safetensors of step 7", STATE)
    os.remove(path)
    refused(folder, "holds no training state", STATE)


@parametrize("name, tensor", [(WEIGHTS, "mtp_heads.weight"), (STATE, "m"), (STATE, "v")])
def test_numbers_that_are_not_finite_are_named(folder, name, tensor):
    def change(header, data):
        place = header[tensor]["data_offsets"][1] - 4
        return data[:place] + struct.pack("<f", np.inf) + data[place + 4:]
    edit(folder, name, change)
    refused(folder, f"{name}: the tensor {tensor} holds numbers that are not finite")


@parametrize("change, words", [
    (dict(mtp_weight=0.25), "config.json is not as it was saved"),
    (dict(max_position_embeddings=8), "config.json is not as it was saved"),
    (dict(mtp_heads=None), "config.json is not as it was saved"), (dict(mtp_heads="x"), "cannot be used"),
    (dict(rms_norm_eps=10 ** 400), "norm_eps must be a finite number of at least 0, not 1000000000000000000"),
    (dict(hidden_size=17), "dim (17) must be a multiple of 8"),
    (dict(tie_word_embeddings=True), "true needs predict 1: it is True, and predict 3.")])
def test_an_altered_config_is_refused(folder, change, words):
    edit_config(folder, **change)
    refused(folder, words, "config.json")


@parametrize("changes, words", [
    ({"num_hidden_layers": 3_000_000}, "layers must be a whole number"),
    ({"num_hidden_layers": 1_000_000}, "tensors are missing"),
    ({"num_hidden_layers": 3}, "the tensor model.layers.2.self_attn.q_proj.weight is missing"),
    ({"num_hidden_layers": 1}, "the tensor model.layers.1."),
    ({"hidden_size": 1 << 19, "head_dim": 1 << 17, "intermediate_size": 1 << 20},
     "model.embed_tokens.weight is (264, 16), config.json asks for (264, 524288)."),
    ({"max_position_embeddings": 1 << 21}, "context must be a whole number from 1 to 1,048,576, not 2097152"),
    ({"mtp_heads": 3}, "mtp_heads.weight is (528, 16), config.json asks for (792, 16).")])
def test_sizes_that_are_not_those_of_the_weights(folder, changes, words):
    """Under a right checksum: refused before anything of that size is made."""
    edit_metadata(folder, WEIGHTS, "config", edit_config(folder, **changes))
    refused(folder, words)


def test_another_tokenizer_is_refused(folder):
    path = f"{folder}/tokenizer.json"
    Tokenizer.train(["the cat sat on the mat and the dog sat on the cat"], 264).save(path)
    refused(folder, "tokenizer.json is not as it was saved")
    write(path, "{}")
    refused(folder, "is not a tokenizer that tokenizer.py reads", "tokenizer.json")


@parametrize("name, key, value, words", [
    *[(WEIGHTS, "step", step, "does not say of which step it is") for step in (None, "-1", "1.5", "missing")],
    *[(STATE, "state", state, "holds no record of a run") for state in ("missing", None, "x", "[]", "null", "[" * 100_000)]])
def test_a_checkpoint_of_no_step_and_a_state_that_is_none(folder, name, key, value, words):
    edit_metadata(folder, name, key, value)
    refused(folder, f"{name} {words}")


@parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS, STATE])
@parametrize("what", ["pipe", "zero", "folder"])
def test_something_else_in_place_of_a_file(folder, name, what):
    path = f"{folder}/{name}"
    os.remove(path)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "zero":
        os.symlink("/dev/zero", path)
    else:
        os.mkdir(path)
    refused(folder, f"{name} is not a plain file, so it is not read")


@parametrize("text", ["7", "[]", "{"])
def test_a_tokenizer_config_that_is_none(folder, text):
    write(f"{folder}/tokenizer_config.json", text)
    refused(folder, "tokenizer_config.json is damaged: it is no JSON" if text == "{" else "settings cannot be used")


# -- the printer ---------------------------------------------------------------------------------------------
def test_what_is_in_a_folder_is_printed(folder, out_text):
    checkpoint.main([folder])
    lines = out_text().splitlines()
    assert lines[0] == f"{folder}: step 7, {TINY}"
    for name, at, number in (WEIGHTS, 1, 22), (STATE, 24, 2):
        path = f"{folder}/{name}"
        crc = attack.read_header(path)[0]["__metadata__"]["crc32"]
        assert lines[at] == f"{path}: {number} tensors, CRC32 {crc}"
        for line, (tensor, array) in zip(lines[at + 1:], read_tensors(path)[0].items()):
            assert line == f"  {tensor:44} {str(array.shape):15} float32"
    assert len(lines) == 27


def test_the_printer_refuses_in_one_sentence(tmp_path):
    command = [sys.executable, checkpoint.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    path = tmp_path / "config.json"
    assert done.stderr == f"error: {tmp_path} holds no checkpoint: there is no {path}.\n"
