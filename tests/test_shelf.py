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

import checkpoint
import model_cpu
from tokenizer import BYTE_LEVEL, CHATML, CHATML_SYSTEMS, SPECIAL, Tokenizer

SMOL_SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <repo_name> <reponame> <file_sep> <filename> <gh_stars>
    <issue_start> <issue_comment> <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code>
    <jupyter_output> <jupyter_script> <empty_output>""".split()
SMOL_TEMPLATE = [*CHATML_SYSTEMS][1]

# C, F, L, H, G, V
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 288}
BOTH = {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 48, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "hidden_act": "silu", "eos_token_id": 2}
OLD = {**BOTH, "rope_scaling": None, "rope_theta": 100000, "torch_dtype": "bfloat16"}
NEW = {**BOTH, "dtype": "bfloat16", "head_dim": 4, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
UNTIED = {"tie_word_embeddings": False}
GONE = object()                                     # as the value of a key: the key is left out
NAME = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
# {ours: {theirs, rows of ours: its shape}} of a layer, as Llama's documentation has it; K: the width of the keys
PARTS = {"qkv": {"self_attn.q_proj": "CC", "self_attn.k_proj": "KC", "self_attn.v_proj": "KC"},
         "out": {"self_attn.o_proj": "CC"}, "gate_up": {"mlp.gate_proj": "FC", "mlp.up_proj": "FC"},
         "down": {"mlp.down_proj": "CF"}, "norm1": {"input_layernorm": "C"}, "norm2": {"post_attention_layernorm": "C"}}


# -- folders, by hand ----------------------------------------------------------------------------------------
def pack(values, kind):
    """values as an array of the bits that a file has for this dtype."""
    return to_bf16(values) if kind == "BF16" else np.asarray(values, {"F32": "f4", "F16": "f2", "I64": "i8"}[kind])


def write_tensor_file(path, tensors, **changes):
    """tensors: {name: (dtype, array as pack gives it)}, whose header has another order than they have; changes: of the
    entry of NAME."""
    header, data = {}, b""
    for name, (kind, array) in tensors.items():
        start = len(data)
        data += array.tobytes()
        header = {name: {"dtype": kind, "shape": array.shape, "data_offsets": [start, len(data)]}, **header}
    if changes:
        header[NAME].update(changes)
    text = json.dumps(header).encode()
    write(path, struct.pack("<Q", len(text)) + text + data)


def weights(config, kind="BF16", seed=0):
    """-> random tensors of a Llama."""
    C, heads = config["hidden_size"], config["num_attention_heads"]
    sizes = {"C": C, "F": config["intermediate_size"], "V": config["vocab_size"],
             "K": C // heads * (config.get("num_key_value_heads") or heads)}
    shapes = {"model.embed_tokens": "VC", "model.norm": "C"}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head"] = "VC"
    for i in range(config["num_hidden_layers"]):
        for parts in PARTS.values():
            shapes.update({f"model.layers.{i}.{name}": shape for name, shape in parts.items()})
    rng = default_rng(seed)
    return {f"{name}.weight": (kind, pack(rng.standard_normal([sizes[letter] for letter in shape], np.float32), kind))
            for name, shape in shapes.items()}


def smol_tokenizer():
    """SmolLM's special tokens, the 256 bytes, "th", "the", " c"; digits one by one."""
    tokens = [*map(str.encode, SMOL_SPECIAL), *(bytes([byte]) for byte in range(256)), b"th", b"the", b" c"]
    merges = {(133, 121): 273, (273, 118): 274, (49, 116): 275}
    return Tokenizer(tokens, merges, {name: i for i, name in enumerate(SMOL_SPECIAL)}, digits=True)


def write_json(folder, name, what):
    write(f"{folder}/{name}", json.dumps(what))


def write_folder(folder, base=NEW, tensors=None, shards=1, **changes):
    """base, changes: the keys of config.json.  -> the tensors."""
    config = {key: found for key, found in {**base, **changes}.items() if found is not GONE}
    tensors = weights(config) if tensors is None else tensors
    os.makedirs(folder, exist_ok=True)
    write_json(folder, "config.json", config)
    smol_tokenizer().save(f"{folder}/tokenizer.json")
    index, names = {}, list(tensors)
    for i in range(shards):
        file = f"shard{i}.safetensors" if shards > 1 else "model.safetensors"
        index.update(dict.fromkeys(names[i::shards], file))
        write_tensor_file(f"{folder}/{file}", {name: tensors[name] for name in names[i::shards]})
    if shards > 1:
        write_json(folder, INDEX, {"metadata": {}, "weight_map": index})
    return tensors


@pytest.fixture
def folder(tmp_path):
    return f"{tmp_path}/foreign"


def load(folder, **more):
    return checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False}, **more)[0]


def arrived(model, tensors):
    """Every bit, the sign of a zero too."""
    def theirs(name):
        kind, array = tensors[name + ".weight"]
        return (array.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else array.astype(np.float32)
    expected = {"embed": theirs("model.embed_tokens"), "norm": theirs("model.norm")}
    for i in range(model.config.layers):
        for mine, parts in PARTS.items():
            expected[f"layers.{i}.{mine}"] = np.concatenate([theirs(f"model.layers.{i}.{part}") for part in parts])
    if not model.config.tied:
        expected["heads"] = theirs("lm_head")
    for name, _ in model_cpu.param_table(model.config):
        assert model.params[name].tobytes() == expected.pop(name).tobytes(), name
    assert not expected


def refused(folder, *words):
    """load refuses the folder in one sentence that has all these words."""
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load(folder)
    for word in words:
        assert str(word) in str(error.value) and "\n" not in str(error.value), (word, error.value)


# -- what loads ----------------------------------------------------------------------------------------------
@parametrize("base, tied, kind", [(OLD, True, "BF16"), (NEW, False, "F16"), (OLD, False, "F32"), (NEW, True, "BF16")])
def test_every_bit_arrives_in_either_spelling(folder, base, tied, kind):
    """A tied file may hold the head, and frequencies of RoPE.  What we save of it is read again."""
    changes = {"tie_word_embeddings": tied}
    tensors = weights({**base, **changes}, kind)
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"], "model.rotary_emb.inv_freq": tensors["model.norm.weight"]}
    write_folder(folder, base, {**more, **tensors} if tied else tensors, 2, **changes)
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32}, context=20)
    checkpoint.save(f"{folder}/again", model, tokenizer, {})
    for name in folder, f"{folder}/again":
        model, tokenizer = checkpoint.load(name, model_cpu, {"dtype": np.float32}, context=20)
        arrived(model, tensors)
        assert model.config == model_cpu.Config(16, 4, 2, 2, 20, 288, 1, 0.0, 24, 1e-5, 1e5, tied, 48)
        assert [tokenizer.tokens[i] for i in tokenizer.encode("the c 12")] == [b"the", b" c", b" ", b"1", b"2"]


# The defaults are LlamaConfig's.  As in transformers rope_parameters are asked only where rope_scaling is empty, and
# config.json itself where the one asked has none.
@parametrize("base, changes, expected", [
    (SIZES, {"model_type": "llama"}, (4, 1e-6, 1e4, False, 2048)),
    (OLD, {"rope_scaling": {"rope_theta": 500.0}}, (2, 1e-5, 500, True, 48)),
    (NEW, {"rope_scaling": {"type": "default"}, "head_dim": None}, (2, 1e-5, 1e4, True, 48)),
    (NEW, {"rope_scaling": {}, "rope_theta": 300.0, "quite_unknown": [1]}, (2, 1e-5, 1e5, True, 48))])
def test_what_config_says_and_does_not_say(folder, base, changes, expected):
    write_folder(folder, base, **changes)
    c = load(folder).config
    assert (c.kv_heads, c.norm_eps, c.rope_theta, c.tied, c.context) == expected


def test_a_model_of_ours_that_transformers_saved_has_one_head(folder, err_text):
    """It writes our mtp_heads on into config.json, but not their weights."""
    tensors = write_folder(folder, **UNTIED, mtp_heads=3)
    arrived(load(folder), tensors)
    assert err_text() == f"note: {folder} has no mtp_heads.weight, so its model has one head.\n"


# -- what is refused -----------------------------------------------------------------------------------------
@parametrize("key, bad", [tuple(map(json.loads, row)) for row in rows("""
    "rope_scaling" | {"type": "linear"}
    "rope_scaling" | {"rope_type": "llama3"}
    "attention_bias" | true
    "mlp_bias" | true
    "hidden_act" | "gelu"
    "sliding_window" | 16
    "use_qk_norm" | true
    "is_causal" | false
    "partial_rotary_factor" | 0.5
    "model_type" | "mistral"
    "head_dim" | 8
    "rms_norm_eps" | -1
    "vocab_size" | 65544
    "hidden_size" | "16"
    "num_hidden_layers" | null""")])
def test_other_models_are_refused_by_name(folder, key, bad):
    write_folder(folder, tensors={}, **{key: bad})
    refused(folder, "config.json")


@parametrize("name, tensor, words", [
    ("model.layers.1.self_attn.q_proj.bias", ("F32", np.ones(16, "f4")), "none of that name"),
    (NAME, ("F32", np.ones((24, 16), "f4")), "is (24, 16), config.json asks for (16, 16)"), ("lm_head.weight", None, "missing"),
    (NAME, ("I64", np.ones(1)), "I64"), (NAME, ("BF16", np.full((16, 16), 0x7FC0, np.uint16)), "finite")])
def test_a_tensor_that_does_not_fit_is_named(folder, name, tensor, words):
    tensors = {**weights({**NEW, **UNTIED}), name: tensor}
    write_folder(folder, tensors={name: tensor for name, tensor in tensors.items() if tensor}, shards=3, **UNTIED)
    refused(folder, name, words)


@parametrize("change", [{"data_offsets": [0, 512]}, {"data_offsets": None}, {"shape": [16, 17]}, {"dtype": "F32"}])
def test_headers_that_contradict_the_file(folder, change):
    """A file without a checksum has its header alone to be believed."""
    path, tensors = f"{folder}/model.safetensors", write_folder(folder)
    write_tensor_file(path, tensors, **change)
    refused(folder, "model.safetensors is damaged (truncated or altered)")
    write_tensor_file(path, tensors)
    for wrong in read(path)[:-1], read(path) + b"\0":
        write(path, wrong)
        refused(folder, "model.safetensors is damaged (truncated or altered)")


def test_files_that_do_not_belong_together(folder):
    """A head that is not the embedding; an index that leaves the folder or names the wrong shard; more tokens than the
    model has; JSON that is none; a file that is not there."""
    write_folder(folder, tensors=weights({**NEW, **UNTIED}))
    refused(folder, "lm_head.weight")
    write_folder(folder, vocab_size=272)
    refused(folder, "tokenizer.json", 276, 272)
    for name in "tokenizer.json", "config.json":
        write_folder(folder)
        write(f"{folder}/{name}", "{")
        refused(folder, name)
        os.remove(f"{folder}/{name}")
        refused(folder, name)
    os.remove(f"{folder}/model.safetensors")
    write_folder(folder, shards=3)
    index = json.loads(read(f"{folder}/{INDEX}"))["weight_map"]
    for name in "shard0.safetensors", "../foreign/shard1.safetensors", 7:
        write_json(folder, INDEX, {"weight_map": {**index, "model.norm.weight": name}})
        refused(folder, INDEX)


# -- tokenizers ----------------------------------------------------------------------------------------------
ADDED = {"content": "<im_end>", **SPECIAL}


@parametrize("name, content, words", [
    ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space"),
    ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}, "Qwen2Tokenizer"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"276": ADDED}}, "<im_end>"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"2": {**ADDED, "content": "<|im_end|>", "rstrip": True}}}, "rstrip"),
    ("tokenizer_config.json", {"pad_token": "[PAD]"}, r"no special token '\[PAD\]'"),
    ("special_tokens_map.json", {"additional_special_tokens": ["th"]}, "no special token 'th'"),
    ("added_tokens.json", {"<im_end>": 276}, "<im_end>"),
    *[("tokenizer.json", {key: value}, words) for key, value, words in (
        ("normalizer", {"type": "NFC"}, "other words"), ("ignore_merges", True, "ignore_merges"),
        ("post_processor", {"type": "TemplateProcessing", "special_tokens": {"<s>": {}}}, "TemplateProcessing"),
        ("added_tokens", [{**ADDED, "id": 2, "special": False}], "special"), ("added_tokens", [{**ADDED, "id": 7}], "<im_end>"))]])
def test_settings_that_would_give_other_ids(folder, name, content, words):
    write_folder(folder)
    change_json(folder, name, content)
    with value_error(f"cannot be used .*{words}|tokenizer.py reads .*{words}"):
        checkpoint.read_tokenizer(folder)


def change_json(folder, name, content):
    write_json(folder, name, {**checkpoint.read_settings(f"{folder}/{name}"), **content})


def test_settings_that_say_what_tokenizer_json_says(folder):
    write_folder(folder)
    change_json(folder, "tokenizer.json", {"unk_token": "<|endoftext|>", "post_processor": BYTE_LEVEL, "fuse_unk": True})
    write_json(folder, "tokenizer_config.json", {"added_tokens_decoder": {"2": {**ADDED, "content": "<|im_end|>", "normalized": True}}})
    assert list(checkpoint.read_tokenizer(folder).special) == SMOL_SPECIAL


# -- chat templates ------------------------------------------------------------------------------------------
def put_template(folder, where, template):
    if where == "chat_template.jinja":
        write(f"{folder}/{where}", template)
    else:
        write_json(folder, where, {"tokenizer_class": "GPT2Tokenizer", "chat_template": template})


@parametrize("where, template, known", [
    ("tokenizer_config.json", CHATML, CHATML), ("chat_template.jinja", SMOL_TEMPLATE.replace("\n", "\\n"), SMOL_TEMPLATE),
    ("tokenizer_config.json", None, ""), ("chat_template.jinja", "{{ messages[0].content }}", None),
    ("tokenizer_config.json", [CHATML], None)])
def test_templates(folder, err_text, where, template, known):
    """As in transformers the file of its own counts.  An unknown one is said, and not used."""
    write_folder(folder)
    put_template(folder, "tokenizer_config.json", SMOL_TEMPLATE)
    put_template(folder, where, template)
    tokenizer = checkpoint.read_tokenizer(folder)
    assert tokenizer.template == (known or "") and tokenizer.special_id("<|im_end|>") == 2
    assert err_text() == ("" if known is not None else f"note: {folder} has an unknown chat template, which is not used.\n")
    assert checkpoint.text_start(folder, tokenizer) == 2
