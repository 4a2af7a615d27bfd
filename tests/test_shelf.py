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
from cases import parametrize, value_error, write
from attack import read_header as read_tensor_file
from cuda_helpers import to_bf16

from test_tokenizer import DEFAULT as CHATML_WITH_DEFAULT
from test_tokenizer import PLAIN, pieces
from test_tokenizer import SYSTEM as DEFAULT

import checkpoint
import model_cpu
from tokenizer import byte_chars

SMOL_SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <repo_name> <reponame> <file_sep> <filename> <gh_stars>
    <issue_start> <issue_comment> <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code>
    <jupyter_output> <jupyter_script> <empty_output>""".split()

# ChatML as SmolLM's folders have it, with line ends for what other folders write as \n; and with SmolLM2's
# default.
CHATML = PLAIN.replace("\\n", "\n")
SMOL_TEMPLATE = CHATML_WITH_DEFAULT.replace("\\n", "\n")

# C, F, L, H, G, D, V: D = C/H
C, F, L, H, G, D, V = 16, 24, 2, 4, 2, 4, 288
SIZES = {"hidden_size": C, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H,
         "vocab_size": V}
BOTH = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, "num_key_value_heads": G,
        "max_position_embeddings": 48, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "hidden_act": "silu", "attention_bias": False, "eos_token_id": 2}
OLD = {**BOTH, "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
       "torch_dtype": "bfloat16", "transformers_version": "4.40.1"}
NEW = {**BOTH, "dtype": "bfloat16", "head_dim": D, "mlp_bias": False, "transformers_version": "5.23.0",
       "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
UNTIED = {"tie_word_embeddings": False}
PT = {"format": "pt"}
GONE = object()                                     # as the value of a key: the key is left out
KINDS = {"F32": np.float32, "F16": np.float16, "I64": np.int64}
NAME = "model.layers.0.self_attn.q_proj.weight"     # (C,C) of bf16: 512 bytes


# -- folders, by hand ----------------------------------------------------------------------------------------
def pack(values, kind):
    """values as an array of the bits that a file has for this dtype."""
    return to_bf16(values) if kind == "BF16" else np.asarray(values).astype(KINDS[kind])


def write_raw(path, text, data=b"", more=0):
    """A header of any text; more: by how much its length is wrong."""
    write(path, struct.pack("<Q", len(text) + more) + text + data)


def write_tensor_file(path, tensors, metadata=None):
    """tensors: {name: (dtype, array as pack gives it)}.  No checksum; metadata None: no __metadata__ at all.
    The header lists them in another order than the one in which they lie, which the format allows."""
    header, end, data = {}, 0, []
    for name, (kind, array) in tensors.items():
        data.append(np.ascontiguousarray(array).tobytes())
        entry = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + len(data[-1])]}
        header = {name: entry, **header}
        end += len(data[-1])
    if metadata is not None:
        header["__metadata__"] = metadata
    write_raw(path, json.dumps(header).encode(), b"".join(data))


def shapes(config):
    """-> {name: shape} of a Llama's tensors, as its documentation has them."""
    heads, width, hidden = config["num_attention_heads"], config["hidden_size"], config["intermediate_size"]
    kv = width // heads * (config.get("num_key_value_heads") or heads)
    layer = {"input_layernorm": (width,), "mlp.down_proj": (width, hidden), "mlp.gate_proj": (hidden, width),
             "mlp.up_proj": (hidden, width), "post_attention_layernorm": (width,),
             "self_attn.k_proj": (kv, width), "self_attn.o_proj": (width, width),
             "self_attn.q_proj": (width, width), "self_attn.v_proj": (kv, width)}
    found = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for i in range(config["num_hidden_layers"]):
        found.update({f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()})
    found["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings", False):
        found["lm_head.weight"] = config["vocab_size"], width
    return found


def weights(config, kind="BF16", seed=0):
    """-> tensors with random values, for write_tensor_file."""
    rng = default_rng(seed)
    return {name: (kind, pack(0.3 * rng.standard_normal(shape, np.float32) + (len(shape) == 1), kind))
            for name, shape in shapes(config).items()}


def value(tensor):
    """The numbers of a tensor in float64, by the definition of its dtype."""
    kind, array = tensor
    if kind != "BF16":
        return array.astype(np.float64)
    bits = array.astype(np.int64)
    sign, exponent, fraction = 1.0 - 2.0 * (bits >> 15), bits >> 7 & 0xFF, (bits & 0x7F) / 128
    return sign * np.where(exponent, (1 + fraction) * 2.0 ** (exponent - 127), fraction * 2.0 ** -126)


def tokenizer_json(extra=0):
    """SmolLM's special tokens, the 256 bytes, a few merges (and `extra` more); digits one by one."""
    chars = byte_chars()
    merges = [("t", "h"), ("th", "e"), (chars[32], "c"), *((chars[1 + i], "z") for i in range(extra))]
    added = [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, name in enumerate(SMOL_SPECIAL)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    names = [*SMOL_SPECIAL, *sorted(chars), *map("".join, merges)]
    return {"added_tokens": added, "decoder": level,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, level]},
            "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)},
                      "merges": [" ".join(merge) for merge in merges]}}


def write_json(folder, name, what):
    with open(f"{folder}/{name}", "w") as file:
        json.dump(what, file, indent=2)


def write_folder(folder, base=NEW, tensors=None, shards=1, tokenizer=None, metadata=PT, **changes):
    """base, changes: the keys of config.json.  -> the tensors."""
    config = {key: found for key, found in {**base, **changes}.items() if found is not GONE}
    tensors = weights(config) if tensors is None else tensors
    os.makedirs(folder, exist_ok=True)
    write_json(folder, "config.json", config)
    write_json(folder, "tokenizer.json", tokenizer or tokenizer_json())
    write_json(folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    if shards == 1:
        write_tensor_file(f"{folder}/model.safetensors", tensors, metadata)
        return tensors
    index, names = {}, list(tensors)
    for i in range(shards):
        path = shard(folder, i + 1, shards)
        write_tensor_file(path, {name: tensors[name] for name in names[i::shards]}, metadata)
        index.update(dict.fromkeys(names[i::shards], os.path.basename(path)))
    write_json(folder, INDEX, {"metadata": {}, "weight_map": dict(sorted(index.items()))})
    return tensors


INDEX = "model.safetensors.index.json"


def shard(folder, i=2, of=3):
    return f"{folder}/model-{i:05}-of-{of:05}.safetensors"


@pytest.fixture
def folder(tmp_path):
    return f"{tmp_path}/foreign"


def load(folder, **more):
    return checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False}, **more)[0]


# what of each layer lies in which matrix of ours
PARTS = {"qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "out": ["self_attn.o_proj"],
         "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"], "norm1": ["input_layernorm"],
         "norm2": ["post_attention_layernorm"]}


def arrived(model, tensors):
    """Every bit, the sign of a zero too."""
    def theirs(name):
        return value(tensors[name + ".weight"])
    expected = {"embed": theirs("model.embed_tokens"), "norm": theirs("model.norm")}
    for i in range(L):
        for mine, parts in PARTS.items():
            rows = [theirs(f"model.layers.{i}.{part}") for part in parts]
            expected[f"layers.{i}.{mine}"] = np.concatenate(rows)
    if not model.config.tied:
        expected["heads"] = theirs("lm_head")
    for name, _ in model_cpu.param_table(model.config):
        found = model.params[name]
        assert found.dtype == np.float32
        assert found.tobytes() == expected.pop(name).astype(np.float32).tobytes(), name
    assert not expected


def refused(folder, *words, **more):
    """load refuses the folder in one sentence that has all these words, whatever their commas."""
    with pytest.raises(ValueError) as error:
        load(folder, **more)
    text = str(error.value)
    assert "\n" not in text and text.endswith("."), text
    for word in words:
        assert str(word).replace(",", "") in text.replace(",", ""), (word, text)


# -- what loads ----------------------------------------------------------------------------------------------
@parametrize("base, tied, kind", [(OLD, True, "BF16"), (NEW, False, "F16"), (OLD, False, "F32"),
                                              (NEW, True, "BF16")])
def test_every_bit_arrives_in_either_spelling(folder, out_text, base, tied, kind):
    changes = {"tie_word_embeddings": tied}
    tensors = write_folder(folder, base, weights({**base, **changes}, kind), shards=2, **changes)
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False})
    arrived(model, tensors)
    assert model.config == model_cpu.Config(C, H, G, L, 48, V, 1, 0.0, F, 1e-5, 1e5, tied) and model.step == 0
    assert (model.params["heads"] is model.params["embed"]) == tied
    tokens = [tokenizer.tokens[token] for token in tokenizer.encode("the c 12")]
    assert tokens == [b"the", b" c", b" ", b"1", b"2"]
    checkpoint.main([folder])
    lines = out_text().splitlines()
    name = {"BF16": "uint16", "F16": "float16", "F32": "float32"}[kind]
    assert sum(line.endswith(f" {name}") for line in lines) == len(tensors) == len(lines) - 3
    assert sum(line.endswith(" tensors, CRC32 none") for line in lines) == 2


@parametrize("spelled", [{}, {"rope_parameters": {"rope_type": "default"}},
                                     {"rope_scaling": None}])
def test_what_config_does_not_say(folder, spelled):
    """The defaults of LlamaConfig: as many key/value heads as heads, 1e-6, 10000, 2048, an own head, silu."""
    tensors = write_folder(folder, {"model_type": "llama", **SIZES, **spelled})
    os.remove(f"{folder}/tokenizer_config.json")
    model = load(folder)
    arrived(model, tensors)
    c = model.config
    assert (c.kv_heads, c.norm_eps, c.rope_theta, c.tied, c.context) == (H, 1e-6, 1e4, False, 2048)


# as in transformers: rope_parameters are asked only where rope_scaling is empty, and config.json itself where
# the one asked has none
@parametrize("base, changes, theta", [
    (OLD, {"rope_scaling": GONE}, 1e5), (OLD, {"rope_scaling": {"rope_theta": 500.0}}, 500),
    (NEW, {"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}}, 500),
    (NEW, {"rope_scaling": {"type": "default"}}, 1e4),
    (NEW, {"rope_scaling": {"type": "default"}, "rope_theta": 300.0}, 300),
    (NEW, {"rope_scaling": {}, "rope_theta": 300.0}, 1e5)])
def test_of_several_thetas_that_of_transformers_counts(folder, base, changes, theta):
    write_folder(folder, base, **changes)
    assert load(folder).config.rope_theta == theta


@parametrize("changes", [
    {"sliding_window": None, "head_dim": GONE, "mlp_bias": GONE, "attention_bias": GONE, "hidden_act": GONE},
    {"sliding_window": 0, "use_qk_norm": False, "partial_rotary_factor": 1.0, "is_causal": True},
    {"head_dim": None, "eos_token_id": [2, 0], "quite_unknown": [1], "dtype": GONE, "architectures": GONE}])
def test_what_changes_nothing_loads(folder, changes):
    tensors = write_folder(folder, **changes)
    arrived(load(folder), tensors)


@parametrize("kind, exponent", [("BF16", 0x7F80), ("F16", 0x7C00)])
def test_every_finite_number_of_sixteen_bits_arrives(folder, kind, exponent):
    """Zeros of both signs, numbers too small to be normal, the largest."""
    tensors = weights({**NEW, "vocab_size": 4096}, kind)
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(4096, 16)
    bits[bits & exponent == exponent] = 0
    tensors["model.embed_tokens.weight"] = kind, bits.view(tensors[NAME][1].dtype)
    write_folder(folder, tensors=tensors, vocab_size=4096)
    arrived(load(folder), tensors)


@parametrize("metadata", [
    None, {}, {"step": "x", "config": "{}", "tokenizer": "gpt2", "state": "[]", "crc32": "own"}])
def test_headers_that_differ_load(folder, metadata):
    """With any metadata or none, ours by name too: the format asks for none.  And beside shards of others."""
    write_folder(folder, tensors=weights(NEW, seed=1), shards=2)
    tensors = write_folder(folder, metadata=metadata)
    arrived(load(folder), tensors)


def test_buffers_are_ignored_and_kinds_may_be_mixed(folder):
    """Matrices in bf16 and a gain in float32, which has bits that bf16 has not."""
    tensors = weights(NEW)
    tensors["model.norm.weight"] = weights(NEW, "F32")["model.norm.weight"]
    buffers = {f"model.{place}rotary_emb.inv_freq": ("F32", np.ones(D // 2, np.float32))
               for place in ("", "layers.0.self_attn.", "layers.1.self_attn.")}
    write_folder(folder, tensors={**tensors, **buffers}, shards=3)
    arrived(load(folder), tensors)


def test_a_tied_file_may_hold_the_head_too(folder):
    """In another kind of numbers, too, or alone; but not another head: transformers would compute with it."""
    tensors = weights(NEW)
    _, embed = tensors["model.embed_tokens.weight"]
    wide = "F32", (embed.astype(np.uint32) << 16).view(np.float32)
    alone = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in tensors.items()}
    for found in {**tensors, "lm_head.weight": wide}, alone:
        write_folder(folder, tensors=found)
        model = load(folder)
        arrived(model, tensors)
        assert model.config.tied and model.params["heads"] is model.params["embed"]
    write_folder(folder, tensors=weights({**NEW, **UNTIED}))
    refused(folder, "lm_head.weight")


def test_a_shorter_context(folder):
    write_folder(folder)
    model = load(folder)
    tokens = default_rng(0).integers(0, V, (2, 20))
    short = load(folder, context=20)
    assert (short.config.context, short.config.positions) == (20, 48)
    assert np.array_equal(short.logits(tokens), model.logits(tokens))
    refused(folder, "context", 49, 48, context=49)


def test_a_model_of_ours_that_transformers_saved_has_one_head(folder, capsys):
    """It writes our mtp_heads on into config.json, but not their weights."""
    said = {**UNTIED, "mtp_heads": 3, "mtp_weight": 0.3}
    tensors = write_folder(folder, **said)
    arrived(load(folder), tensors)
    assert checkpoint.read_config(folder).predict == 1
    note = f"note: {folder} has no mtp_heads.weight, so its model has one head.\n"
    assert capsys.readouterr() == ("", 2 * note)
    further = "F32", np.ones((3 * V, C), np.float32)
    write_folder(folder, tensors={**tensors, "mtp_heads.weight": further}, **said)
    assert load(folder).config.predict == 4 and capsys.readouterr() == ("", "")


def test_saved_and_loaded_again(folder, tmp_path):
    """What a fine-tuned foreign model is: a folder of ours, tied as before, with all its positions."""
    tensors, out = write_folder(folder, shards=2), f"{tmp_path}/out"
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32}, context=32)
    checkpoint.save(out, model, tokenizer, {"a": 1})
    written = json.load(open(f"{out}/config.json"))
    assert written["tie_word_embeddings"] is True and written["max_position_embeddings"] == 48
    assert set(read_tensor_file(f"{out}/model.safetensors")[0]) == {*shapes(NEW), "__metadata__"}
    again, same = checkpoint.load(out, model_cpu, {"dtype": np.float32})
    arrived(again, tensors)
    assert checkpoint.load_state(out, again) == {"a": 1} and again.config == model.config
    assert (same.tokens, same.special, same.merges) == (tokenizer.tokens, tokenizer.special, tokenizer.merges)


# -- models that are not ours to compute ---------------------------------------------------------------------
@parametrize("key, bad", [
    ("rope_type", "linear"), ("rope_type", "llama3"), ("rope_type", "yarn"), ("attention_bias", True), ("mlp_bias", True),
    ("hidden_act", "gelu"), ("sliding_window", 16), ("use_qk_norm", True), ("is_causal", False),
    ("partial_rotary_factor", 0.5), ("model_type", "mistral"), ("head_dim", 8), ("rms_norm_eps", -1),
    ("vocab_size", 65_544)])
def test_other_models_are_refused_by_name(folder, key, bad):
    changes = {"rope_scaling": {"type": bad}} if key == "rope_type" else {key: bad}
    write_folder(folder, tensors=weights(NEW), **changes)
    refused(folder, "config.json", key.removeprefix("rms_"), bad)


@parametrize("key", SIZES)
def test_a_size_that_is_missing_or_none(folder, key):
    """Every config.json of a Llama says these, so there is nothing to guess."""
    write_folder(folder, tensors={}, **{key: GONE})
    refused(folder, "config.json cannot be used", key)
    for bad in None, "16", 0, -8, 1.5, [16], True, 1 << 70:
        write_folder(folder, tensors={}, **{key: bad})
        refused(folder, "config.json")


def test_ids_have_sixteen_bits(folder):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 65_536}
    write_folder(folder, **sizes)
    assert load(folder).config.vocab == 65_536


# -- tensors and files that do not fit -----------------------------------------------------------------------
def ones(shape, kind="BF16"):
    return kind, pack(np.ones(shape), kind)


LACK = object()


@parametrize("shards", [1, 3])
@parametrize("name, tensor, words", [
    ("model.layers.1.self_attn.q_norm.weight", ones(D), "none of that name"),
    ("model.layers.1.self_attn.q_proj.bias", ones(C), "none of that name"),
    (f"model.layers.{L}.input_layernorm.weight", ones(C), "none of that name"),
    ("model.embed_tokens.weight", LACK, "missing"), ("lm_head.weight", LACK, "missing"),
    ("model.layers.1.mlp.down_proj.weight", ones((F, C)), f"is {F, C}, config.json asks for {C, F}"),
    ("model.norm.weight", ones((C, 1)), (C, 1)),
    (NAME, ones((C, C), "I64"), "I64"),
    (NAME, ("BF16", np.full((C, C), 0x7FC0, np.uint16)), "finite"),
    (NAME, ("F16", np.full((C, C), np.inf, np.float16)), "finite")])
def test_a_tensor_that_does_not_fit_is_named(folder, name, tensor, words, shards):
    tensors = {**weights({**NEW, **UNTIED}), name: tensor}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not LACK}
    write_folder(folder, tensors=tensors, shards=shards, **UNTIED)
    refused(folder, name, words)


@parametrize("name", ["../other.safetensors", "..", "", 7, None, [INDEX]])
def test_an_index_that_leaves_the_folder(folder, tmp_path, name):
    """Though there is such a file, with all that it should have."""
    tensors = write_folder(folder, shards=3)
    write_tensor_file(f"{tmp_path}/other.safetensors", tensors)
    index = json.load(open(f"{folder}/{INDEX}"))
    for wrong in ["model.norm.weight"], index["weight_map"]:
        index["weight_map"].update(dict.fromkeys(wrong, name))
        write_json(folder, INDEX, index)
        refused(folder)


def test_an_index_of_a_tensor_that_its_shard_has_not(folder):
    write_folder(folder, shards=3)
    index, name = json.load(open(f"{folder}/{INDEX}")), "model.layers.1.mlp.up_proj.weight"
    right = index["weight_map"][name]
    wrong = next(file for file in index["weight_map"].values() if file != right)
    index["weight_map"][name] = wrong
    write_json(folder, INDEX, index)
    refused(folder, name, wrong)
    del index["weight_map"][name]
    write_json(folder, INDEX, index)
    refused(folder, name)


@parametrize("name", ["config.json", INDEX, "tokenizer.json"])
@parametrize("text", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 100_000, b'{"weight_map": []}'])
def test_a_json_file_that_is_none(folder, name, text):
    write_folder(folder, shards=2)
    write(f"{folder}/{name}", text)
    refused(folder, name)


def test_files_that_are_cut(folder):
    write_folder(folder, shards=3)
    raw = open(shard(folder), "rb").read()
    for wrong in b"", raw[:8], raw[:40], raw[:-1], raw + b"\0":
        write(shard(folder), wrong)
        refused(folder, f"{shard(folder)} is damaged (truncated or altered)")


@parametrize("change", [
    {"data_offsets": [0, 512]}, {"data_offsets": [-512, 0]}, {"data_offsets": [0, 1 << 62]},
    {"data_offsets": None}, {"shape": [C, C + 1]}, {"shape": [-C, -C]}, {"shape": [1 << 40, 1 << 40]},
    {"dtype": "F32"}, {"dtype": None}])
def test_headers_that_contradict_the_file(folder, change):
    """A file without a checksum has its header alone to be believed."""
    write_folder(folder)
    path = f"{folder}/model.safetensors"
    header, data = read_tensor_file(path)
    assert header[NAME]["data_offsets"][0] > 512
    header[NAME].update(change)
    write_raw(path, json.dumps(header).encode(), data)
    refused(folder, "model.safetensors is damaged (truncated or altered)")


@parametrize("text, more", [
    (b"{}", 1), (b"{}", 1 << 40), (b"", 0), (b"[]", 0), (b"{", 0), (b"\xff\xfe", 0), (b"1" * 5000, 0),
    (b"[" * 100_000, 0), (b'{"a":' * 50_000, 0), (b'{"a":1}', 0), (b'{"__metadata__":7}', 0)])
def test_headers_that_are_none(folder, text, more):
    write_folder(folder)
    write_raw(f"{folder}/model.safetensors", text, more=more)
    refused(folder, "model.safetensors is damaged (truncated or altered)")


ADDED = {"content": "<im_end>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}


@parametrize("name, content, words", [
    ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space"),
    ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}, "Qwen2Tokenizer"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"276": ADDED}}, "<im_end>"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"1": {**ADDED, "content": SMOL_SPECIAL[2]}}}, "lacks"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"2": {**ADDED, "content": SMOL_SPECIAL[2], "rstrip": True}}}, "rstrip"),
    ("tokenizer_config.json", {"added_tokens_decoder": [3]}, "list"),
    ("tokenizer_config.json", {"pad_token": "[PAD]"}, r"no special token '\[PAD\]'"),
    ("tokenizer_config.json", {"additional_special_tokens": ["low"]}, "no special token 'low'"),
    ("special_tokens_map.json", {"unk_token": {"content": "low"}}, "no special token 'low'"),
    ("added_tokens.json", {"<im_end>": 276}, "<im_end>"), ("added_tokens.json", [3], "list")])
def test_settings_that_would_give_other_ids(folder, name, content, words):
    write_folder(folder)
    write_json(folder, name, content)
    with value_error(f"the tokenizer's settings cannot be used .*{words}"):
        checkpoint.read_tokenizer(folder)


def test_settings_that_say_what_tokenizer_json_says(folder):
    write_folder(folder)
    listed = {str(i): {**ADDED, "content": name} for i, name in enumerate(SMOL_SPECIAL)}
    write_json(folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False,
                                                 "added_tokens_decoder": listed})
    write_json(folder, "added_tokens.json", {SMOL_SPECIAL[2]: 2})
    assert list(checkpoint.read_tokenizer(folder).special) == SMOL_SPECIAL


def test_a_tokenizer_with_more_tokens_than_the_model(folder):
    write_folder(folder, tokenizer=tokenizer_json(extra=V - 276))
    load(folder)                                    # as many are right
    write_folder(folder, tokenizer=tokenizer_json(extra=V - 276 + 1))
    refused(folder, "tokenizer.json", V + 1, V)


@parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file(folder, name):
    write_folder(folder)
    os.remove(f"{folder}/{name}")
    with open(f"{folder}/pytorch_model.bin", "wb") as file:     # a pickle: never read
        file.write(b"\x80\x02.")
    if name == "config.json":
        refused(folder, f"{folder} holds no checkpoint: there is no {os.path.join(folder, name)}")
    else:
        with pytest.raises(FileNotFoundError, match=f"{folder}/{name}"):
            load(folder)


# -- chat templates ------------------------------------------------------------------------------------------
def put_template(folder, where, template):
    if where == "chat_template.jinja":
        write(f"{folder}/{where}", template)
    else:
        write_json(folder, where, {"tokenizer_class": "GPT2Tokenizer", "chat_template": template})


@parametrize("where, template, default", [
    ("tokenizer_config.json", CHATML, ""), ("chat_template.jinja", SMOL_TEMPLATE, DEFAULT),
    ("tokenizer_config.json", SMOL_TEMPLATE.replace(DEFAULT, "Be kind."), "Be kind."),
    ("chat_template.jinja", CHATML.replace("\n", "\\n"), "")])       # the same to Jinja
def test_known_templates(folder, where, template, default):
    write_folder(folder)
    put_template(folder, where, template)
    tokenizer = checkpoint.load(folder, model_cpu, {"training": False})[1]
    start, end = "<|im_start|>", "<|im_end|>"
    asked = [start, "user\nhello", end, "\n", start, "assistant\n"]
    system = [start, f"system\n{default}", end, "\n"] if default else []
    assert tokenizer.template and tokenizer.end_of_turn == 2
    assert tokenizer.prompt("hello") == pieces(tokenizer, *system, *asked)
    assert tokenizer.prompt("hello", system=b"Be brief.") == pieces(
        tokenizer, start, "system\nBe brief.", end, "\n", *asked)
    assert tokenizer.prompt("hello", first=False) == pieces(tokenizer, "\n", *asked)


def test_of_two_templates_the_file_of_its_own_counts(folder):
    """As in transformers."""
    write_folder(folder)
    put_template(folder, "tokenizer_config.json", SMOL_TEMPLATE)
    put_template(folder, "chat_template.jinja", CHATML)
    tokenizer = checkpoint.read_tokenizer(folder)
    assert tokenizer.prompt("hello")[:4] == pieces(tokenizer, "<|im_start|>", "user\nhello")[:4]


@parametrize("where, template, known", [
    ("chat_template.jinja", "", True), ("tokenizer_config.json", None, True),
    ("chat_template.jinja", "{{ messages[0].content }}", False),
    ("chat_template.jinja", CHATML + "{{ 'Sure,' }}", False), ("tokenizer_config.json", ["x"], False),
    ("tokenizer_config.json", CHATML.replace("<|im_end|>", "</s>"), False)])
def test_no_template_and_an_unknown_one(folder, err_text, where, template, known):
    write_folder(folder)
    put_template(folder, where, template)
    assert checkpoint.read_tokenizer(folder).template == ""
    note = f"note: {folder} has an unknown chat template, which is not used.\n"
    assert err_text() == ("" if known else note)
