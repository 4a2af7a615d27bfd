"""checkpoint.py: other people's Llama folders, written here by hand.  Every bit of the weights arrives,
however the folder spells it; what is not ours to compute, and what is missing, damaged or does not fit, is
refused in one sentence.

tests/peers/test_shelf_peers.py has transformers write such folders and judge what they compute."""
import json
import os
import struct

import numpy as np
from numpy.random import default_rng
import pytest
from cases import parametrize, read, rows, value_error, write
from cuda_helpers import to_bf16
from test_tokenizer import SMOLLM, made

import checkpoint
import model_cpu
from tokenizer import CHATML, SPECIAL

# C, F, L, H, G, V
BOTH = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 288, "num_key_value_heads": 2, "max_position_embeddings": 48, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "eos_token_id": 261}
OLD = {**BOTH, "rope_scaling": None, "rope_theta": 100000}
NEW = {**BOTH, "head_dim": 4, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
UNTIED = {**NEW, "tie_word_embeddings": False}
NAME = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
# {ours: [Llama's, rows of ours]} of a layer
PARTS = {"qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "out": ["self_attn.o_proj"],
         "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"], "norm1": ["input_layernorm"],
         "norm2": ["post_attention_layernorm"]}


# -- folders, by hand ----------------------------------------------------------------------------------------
KINDS = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64", "int8": "I8", "int64": "I64", "bool": "BOOL"}


def write_tensor_file(path, tensors):
    """tensors: {name: array; bf16 as uint16}, whose header has another order than they have."""
    header, data = {}, b""
    for name, array in tensors.items():
        start = len(data)
        data += array.tobytes()
        entry = {"dtype": KINDS[array.dtype.name], "shape": array.shape, "data_offsets": [start, len(data)]}
        header = {name: entry, **header}
    text = json.dumps(header).encode()
    write(path, struct.pack("<Q", len(text)) + text + data)


def weights(config, kind="uint16", seed=0):
    """-> (random parameters of ours, the tensors of a Llama that are the same numbers)"""
    C, F, layers, heads, V, kv_heads = [config[key] for key in [*BOTH][1:7]]
    c = model_cpu.Config(C, heads, kv_heads, layers, 48, V, 1, hidden=F, tied=config["tie_word_embeddings"])
    rng = default_rng(seed)
    params = {name: (rng.integers(-99, 99, shape) / 64).astype("f4") for name, shape in model_cpu.param_table(c)}
    tensors = {"model.embed_tokens": params["embed"], "model.norm": params["norm"]}
    if not c.tied:
        tensors["lm_head"] = params["heads"]
    cuts = {"qkv": [C, C + C // heads * kv_heads], "gate_up": [F]}
    for i in range(layers):
        for ours, names in PARTS.items():
            rows = np.split(params[f"layers.{i}.{ours}"], cuts.get(ours, []))
            tensors.update(zip([f"model.layers.{i}.{name}" for name in names], rows))
    cast = to_bf16 if kind == "uint16" else np.dtype(kind).type
    return params, {f"{name}.weight": cast(values) for name, values in tensors.items()}


def write_json(folder, name, what):
    write(f"{folder}/{name}", json.dumps(what))


def write_folder(folder, base=NEW, tensors=None, **changes):
    """A folder with two shards.  base, changes: the keys of config.json.  -> the parameters."""
    config = {**base, **changes}
    params, own = weights(config)
    tensors = tensors or own
    os.makedirs(folder, exist_ok=True)
    write_json(folder, "config.json", config)
    special = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
    made([(116, 104), (256, 101), (32, 99)], special, digits=True).save(f"{folder}/tokenizer.json")     # th, the, " c"
    index = {name: f"shard{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in "shard0.safetensors", "shard1.safetensors":
        write_tensor_file(f"{folder}/{file}", {name: tensors[name] for name in tensors if index[name] == file})
    write_json(folder, INDEX, {"metadata": {}, "weight_map": index})
    return params


@pytest.fixture
def folder(tmp_path):
    return f"{tmp_path}/foreign"


def load(folder, context=None):
    return checkpoint.load(folder, model_cpu, {"dtype": np.float32}, context)


def arrived(model, params):
    """Every bit."""
    assert {name: values.tobytes() for name, values in params.items()} == {
        name: model.params[name].tobytes() for name, _ in model_cpu.param_table(model.config)}


def refused(folder, *words):
    """load refuses the folder in one sentence that has all these words."""
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load(folder)
    for word in words:
        assert word in str(error.value)


# -- what loads ----------------------------------------------------------------------------------------------
@parametrize("base, kind", [(OLD, "uint16"), (UNTIED, "float16"), (UNTIED, "float32")])
def test_every_bit_arrives_in_either_spelling(folder, base, kind):
    params, tensors = weights(base, kind)
    write_folder(folder, base, tensors)
    model, tokenizer = load(folder, context=20)
    arrived(model, params)
    assert model.config == model_cpu.Config(16, 4, 2, 2, 20, 288, 1, 0.0, 24, 1e-5, 1e5, base is OLD, 48)
    assert [tokenizer.tokens[i] for i in tokenizer.encode("the c 12")] == [b"the", b" c", b" ", b"1", b"2"]


# -- what is refused -----------------------------------------------------------------------------------------
@parametrize("key, bad", rows("""
    rope_scaling | {"type":"linear"}
    hidden_act | "gelu"
    sliding_window | 16
    model_type | "mistral"
    vocab_size | 65544
    num_hidden_layers | null"""))
def test_other_models_are_refused_by_name(folder, key, bad):
    write_folder(folder)
    write_json(folder, "config.json", {**NEW, key: json.loads(bad)})
    refused(folder, "config.json", key[:4])


@parametrize("name, tensor, words", [
    ("model.layers.1.self_attn.q_proj.bias", np.ones(16, "f4"), "none of that name"),
    (NAME, np.ones((24, 16), "f4"), "is (24, 16), config.json asks for (16, 16)"),
    (NAME, np.zeros((16, 16), "int8"), "I8; read are F64, F32, F16, BF16"),
    (NAME, np.full((16, 16), 1e300), "finite")])
def test_a_tensor_that_does_not_fit_is_named(folder, name, tensor, words):
    write_folder(folder, tensors={**weights(NEW)[1], name: tensor})
    refused(folder, name, words)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"


@parametrize("name", ["tokenizer.json", "shard1.safetensors"])
def test_what_git_lfs_leaves_of_a_large_file_is_called_by_its_name(folder, name):
    write_folder(folder)
    write(f"{folder}/{name}", LFS)
    refused(folder, f"{name} is a pointer of Git LFS, and not the file: run `git lfs pull`")


def test_no_shard_stays_open(folder):
    """A process may open 256 files on macOS, and a model has more tensors."""
    write_folder(folder)
    opened = len(os.listdir("/dev/fd"))
    tensors, _ = checkpoint.read_weights(folder)
    assert NAME in tensors and len(os.listdir("/dev/fd")) <= opened


def test_headers_that_contradict_the_file(folder):
    """A file without a checksum has its header alone to be believed: here its data are longer."""
    write_folder(folder)
    path = f"{folder}/model.safetensors"
    write_tensor_file(path, weights(NEW)[1])
    write(path, read(path) + b"0")
    refused(folder, "model.safetensors is damaged", "(it holds")


def test_files_that_do_not_belong_together(folder):
    """A head beside the embedding that is the head, or one that is missing; more tokens than the model has; JSON that is none; a file that
    is not there; an index that names the wrong shard."""
    for config, tensors in (NEW, UNTIED), (UNTIED, NEW):
        write_folder(folder, config, weights(tensors)[1])
        refused(folder, "lm_head.weight")
    write_folder(folder, vocab_size=256)
    refused(folder, "tokenizer.json")
    for name in "tokenizer.json", "config.json", "shard0.safetensors":
        write_folder(folder)
        write(f"{folder}/{name}", read(f"{folder}/{name}")[:-1])
        refused(folder, name)
        os.remove(f"{folder}/{name}")
        refused(folder, name)
    write_folder(folder)
    index = json.loads(read(f"{folder}/{INDEX}"))["weight_map"]
    for file in "shard0.safetensors", "../foreign/shard1.safetensors":
        write_json(folder, INDEX, {"weight_map": {**index, "model.norm.weight": file}})
        refused(folder, INDEX)


# -- tokenizers ----------------------------------------------------------------------------------------------
ADDED = {"content": "<im_end>", **SPECIAL}


@parametrize("name, content, words", [
    ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space"),
    ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}, "Qwen2Tokenizer"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"276": ADDED}}, "<im_end>"),
    ("tokenizer_config.json", {"pad_token": "[PAD]"}, "PAD"), ("added_tokens.json", {"<im_end>": 276}, "<im_end>"),
    ("tokenizer_config.json", {"extra_special_tokens": {"x": "y"}}, "y"),
    ("special_tokens_map.json", {"additional_special_tokens": [{"content": "th"}]}, "no special token .*th"),
    ("tokenizer.json", {"dropout": 1}, "dropout"),
    ("tokenizer.json", {"post_processor": {"type": "Template", "special_tokens": {"<s>": {}}}}, "Template"),
    ("tokenizer.json", {"added_tokens": [{**SPECIAL, "content": "<|im_end|>", "id": 261, "rstrip": True}]}, "rstrip"),
    ("tokenizer.json", {"added_tokens": [{**ADDED, "id": 7}]}, "<im_end>")])
def test_settings_that_would_give_other_ids(folder, name, content, words):
    write_folder(folder)
    write_json(folder, name, {**checkpoint.read_settings(f"{folder}/{name}"), **content})
    with value_error(f"cannot be used .*{words}"):
        checkpoint.read_tokenizer(folder)


@parametrize("name, content, known", [
    ("tokenizer_config.json", "", CHATML), ("chat_template.jinja", SMOLLM.replace("\n", "\\n"), SMOLLM)])
def test_templates(folder, name, content, known):
    """As in transformers the file of its own counts.  (One that is unknown: test_chat.py.)"""
    write_folder(folder)
    write(f"{folder}/{name}", content)
    write_json(folder, "tokenizer_config.json", {"add_bos_token": True, "tokenizer_class": "GPT2Tokenizer", "chat_template": CHATML})
    assert checkpoint.read_tokenizer(folder).template == known
