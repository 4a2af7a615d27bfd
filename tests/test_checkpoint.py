"""Checkpoints that were altered, each named in one sentence; what tests/test_model_cpu.py has not: checksums over
config.json, nonsense under a right checksum, files that are none, and the first version's folders."""
import json
import os
import shutil
import signal
import struct
import zlib

import numpy as np
import pytest

import attack
import chat
import model_cpu
from model_cpu import Config, Model, load, load_state, save
from tokenizer import Tokenizer

TINY = Config(dim=16, heads=4, kv_heads=2, layers=2, context=16, vocab=264, predict=3, mtp_weight=0.5)
TOKENIZER = Tokenizer.train(["the cat sat on the mat"], 262)
MODEL, STATE = model_cpu.CHECKPOINT


def make(seed=0):
    model = Model(TINY, seed, np.float32)
    model.step = 7
    rng = np.random.default_rng(seed)
    for what in ("params", "m", "v"):
        model.write(what, rng.standard_normal(model.flat_params.size, np.float32))
    return model


@pytest.fixture
def folder(tmp_path):
    save(str(tmp_path / "run"), make(), TOKENIZER, {"tokens": 5})
    signal.alarm(600)                               # a read from a pipe would never end
    yield str(tmp_path / "run")
    signal.alarm(0)


def reload(folder):
    model, _ = load(folder, model_cpu, {"dtype": np.float32})
    return model, load_state(folder, model)


def refused(folder, words):
    with pytest.raises(ValueError) as error:
        reload(folder)
    assert words in str(error.value) and "\n" not in str(error.value) and str(error.value).endswith("."), str(error.value)


def edit(folder, name, change):
    """Change a file's header under a right checksum: change(header, data) -> None or new data."""
    path = os.path.join(folder, name)
    header, data = attack.read_header(path)
    data = change(header, data) or data
    attack.sign(path, header, data)


def test_the_edits_of_these_tests_are_right(folder):
    edit(folder, MODEL, lambda header, data: None)
    edit(folder, STATE, lambda header, data: None)
    assert reload(folder)[1] == {"tokens": 5}


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


def test_a_folder_of_the_first_version_loads(folder):
    """It has no checksum of config.json."""
    edit(folder, MODEL, lambda header, data: header["__metadata__"].pop("config") and None)
    edit(folder, STATE, lambda header, data: header["__metadata__"].pop("config") and None)
    model, state = reload(folder)
    assert model.step == 7 and state == {"tokens": 5} and np.array_equal(model.flat_params, make().flat_params)
    save(folder, model, TOKENIZER, state)
    assert attack.read_header(os.path.join(folder, MODEL))[0]["__metadata__"]["config"] == (
        f"{zlib.crc32(open(os.path.join(folder, 'config.json'), 'rb').read()):08x}")


@pytest.mark.parametrize("changes, words", [
    ({"num_hidden_layers": 3_000_000}, "num_hidden_layers"), ({"num_hidden_layers": 1_000_000}, "tensors are missing"),
    ({"num_hidden_layers": 3}, "the tensor model.layers.2.self_attn.q_proj.weight is missing"),
    ({"num_hidden_layers": 1}, "the tensor model.layers.1."), ({"hidden_size": 1 << 19, "head_dim": 1 << 17, "intermediate_size": 1398104},
                                                               "has the shape (264, 16)"),
    ({"max_position_embeddings": 1 << 21}, "context must be at most 1,048,576, not 2097152"),
    ({"vocab_size": 1 << 70}, "vocab must be at most"), ({"mtp_heads": 3}, "mtp_heads.weight has the shape"),
    ({"eos_token_id": 3}, "end of a text at 3"), ({"eos_token_id": [1]}, "end of a text at [1]")])
def test_sizes_that_are_not_those_of_the_weights(folder, changes, words):
    """Under a right checksum: refused before anything of that size is made."""
    path = os.path.join(folder, "config.json")
    config = {**json.load(open(path)), **changes}
    json.dump(config, open(path, "w"), indent=2)
    crc = f"{zlib.crc32(open(path, 'rb').read()):08x}"
    edit(folder, MODEL, lambda header, data: header["__metadata__"].update(config=crc))
    with pytest.raises(ValueError) as error:
        reload(folder)
    assert words in str(error.value) or "layers must be at most" in str(error.value) and changes.get("num_hidden_layers") == 3_000_000


# -- the tensors -------------------------------------------------------------------------------------------------------
FIRST = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("change", [
    {"data_offsets": [-1024, 0]}, {"data_offsets": [0, 1024]}, {"data_offsets": [16896, 17916]}, {"data_offsets": [16900, 17924]},
    {"data_offsets": [17920, 16896]}, {"data_offsets": [16896]}, {"data_offsets": None}, {"data_offsets": [16896, 1 << 62]},
    {"data_offsets": [16896.0, "x"]}, {"shape": [-16, -16]}, {"shape": [8, 16]}, {"shape": [256, 0]}, {"shape": None}, {"shape": [1 << 40, 1 << 40]},
    {"dtype": "F64"}, {"dtype": "I8"}, {"dtype": None}])
def test_entries_that_do_not_lie_one_after_the_other(folder, change):
    header, _ = attack.read_header(os.path.join(folder, MODEL))
    assert header[FIRST] == {"dtype": "F32", "shape": [16, 16], "data_offsets": [16896, 17920]}
    edit(folder, MODEL, lambda header, data: header[FIRST].update(change))
    refused(folder, "model.safetensors is damaged (truncated or altered)")


def test_bytes_after_the_last_tensor_are_refused(folder):
    edit(folder, MODEL, lambda header, data: data + b"\0\0\0\0")
    refused(folder, "model.safetensors is damaged")


@pytest.mark.parametrize("name, tensor", [(MODEL, FIRST), (MODEL, "mtp_heads.weight"), (STATE, "m"), (STATE, "v")])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_named(folder, name, tensor, value):
    def change(header, data):
        place = header[tensor]["data_offsets"][1] - 4
        return data[:place] + struct.pack("<f", value) + data[place + 4:]
    edit(folder, name, change)
    refused(folder, f"{name}: the tensor {tensor} holds numbers that are not finite")


def test_names_are_llamas(folder):
    """q, k, v and gate, up are rows of our fused matrices in this order, head 0 is the first of the heads."""
    tensors, _ = model_cpu.read_safetensors(os.path.join(folder, MODEL))
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
    edit(folder, MODEL, change)
    refused(folder, "model.safetensors does not say of which step it is")


@pytest.mark.parametrize("state", ["missing", None, "", "x", "[]", "5", "null", "[" * 100_000, '"' + "\\ud800" * 3 + '"'])
def test_a_state_that_is_none(folder, state):
    def change(header, data):
        header["__metadata__"].update(state=state)
        if state == "missing":
            del header["__metadata__"]["state"]
    edit(folder, STATE, change)
    refused(folder, "train_state.safetensors holds no record of a run")


@pytest.mark.parametrize("header", ["[" * 100_000, '{"__metadata__":' + '{"a":' * 50_000, "[]", "7", '{"a":1}', '{"__metadata__":[]}',
                                    '{"__metadata__":{}}', '{"__metadata__":{"crc32":7}}', '{"__metadata__":{"crc32":null}}', "1" * 5000])
@pytest.mark.parametrize("name", [MODEL, STATE])
def test_headers_that_are_none(folder, name, header):
    attack.sign(os.path.join(folder, name), header, b"")
    refused(folder, f"{name} is damaged")


# -- files that are none -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", MODEL, STATE])
@pytest.mark.parametrize("what", ["pipe", "zero", "folder"])
def test_something_else_in_place_of_a_file(folder, name, what):
    path = os.path.join(folder, name)
    os.remove(path)
    os.mkfifo(path) if what == "pipe" else os.symlink("/dev/zero", path) if what == "zero" else os.mkdir(path)
    refused(folder, f"{name} is not a plain file, so it is not read")


@pytest.mark.parametrize("text", ["[" * 100_000, "7", "[]", "", "{", "1" * 5000])
def test_tokenizer_config(folder, text):
    """Only chat.py reads it."""
    path = os.path.join(folder, "tokenizer_config.json")
    assert checkpoint.is_chat_model(folder, TOKENIZER) is False
    open(path, "w").write(text)
    reload(folder)
    with pytest.raises(ValueError, match="tokenizer_config.json is damaged: it "):
        checkpoint.is_chat_model(folder, TOKENIZER)
    os.remove(path)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="tokenizer_config.json is not a plain file"):
        checkpoint.is_chat_model(folder, TOKENIZER)


def test_a_save_repairs_first(folder):
    """What a killed save left: the new model is in place, its state waits as .new.  The next save, itself killed before it
    renames anything, must leave that pair."""
    after = make(seed=1)
    after.step = 8
    save(folder + "-after", after, TOKENIZER, {"tokens": 6})
    shutil.copy(os.path.join(folder + "-after", MODEL), folder)
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
