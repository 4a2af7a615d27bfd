"""checkpoint.py: other people's Llama folders, written here by hand.  Every bit of the weights arrives, however the folder
spells it; what is not ours to compute, and what is missing, damaged or does not fit, is refused in one sentence.

tests/peers/test_shelf_peers.py has transformers write such folders and judge what they compute."""
import json
import math
import os
import struct

import numpy as np
import pytest
from cuda_helpers import to_bf16

import checkpoint
import model_cpu
from model_cpu import Config, Model
from tokenizer import CHAT_TEMPLATE, Tokenizer, byte_chars

SMOL_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>",
                "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>",
                "<jupyter_output>", "<jupyter_script>", "<empty_output>"]

# ChatML as SmolLM's folders have it, with line ends for what other folders write as \n; and with SmolLM2's default.
DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SMOL_TEMPLATE = CHATML.replace("%}", "%}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
                                     + DEFAULT + "<|im_end|>\n' }}{% endif %}", 1)

# C, F, L, H, G, D, V: D = C/H
C, F, L, H, G, D, V = 16, 24, 2, 4, 2, 4, 288
SIZES = {"hidden_size": C, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H, "vocab_size": V}
OLD = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
       "eos_token_id": 2, "hidden_act": "silu", **SIZES, "initializer_range": 0.25, "is_llama_config": True,
       "max_position_embeddings": 48, "model_type": "llama", "num_key_value_heads": G, "pad_token_id": 2, "pretraining_tp": 1,
       "rms_norm_eps": 1e-5, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
       "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True}
NEW = {**{key: value for key, value in OLD.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype", "is_llama_config",
                                                                  "rope_interleaved")},
       "dtype": "bfloat16", "head_dim": D, "mlp_bias": False, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
       "transformers_version": "5.23.0"}
PT = {"format": "pt"}
GONE = object()                                     # as the value of a key: the key is left out
KINDS = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16, "I64": np.int64, "I32": np.int32, "U8": np.uint8,
         "F8_E4M3": np.uint8, "BOOL": np.uint8}


# -- folders, by hand --------------------------------------------------------------------------------------------------
def pack(values, kind):
    """values as an array of the bits that a file has for this dtype."""
    return to_bf16(values) if kind == "BF16" else np.asarray(values).astype(KINDS[kind])


def write_tensor_file(path, tensors, metadata=None, shuffled=False):
    """tensors: {name: (dtype, array as pack gives it)}.  No checksum; metadata None: no __metadata__ at all.  shuffled: the
    header lists them in another order than the one in which they lie."""
    header, end, data = {}, 0, []
    for name, (kind, array) in tensors.items():
        data.append(np.ascontiguousarray(array).tobytes())
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + len(data[-1])]}
        end += len(data[-1])
    if shuffled:
        header = {name: header[name] for name in sorted(header, key=lambda name: name[::-1])}
    if metadata is not None:
        header = {"__metadata__": metadata, **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data))


def read_tensor_file(path):
    """-> (header, data)"""
    with open(path, "rb") as file:
        raw = file.read()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + size]), raw[8 + size:]


def shapes(config):
    """-> {name: shape} of a Llama's tensors, as its documentation has them."""
    c, heads, width, hidden = config, config["num_attention_heads"], config["hidden_size"], config["intermediate_size"]
    kv = width // heads * (c.get("num_key_value_heads") or heads)
    found = {"model.embed_tokens.weight": (c["vocab_size"], width)}
    for i in range(c["num_hidden_layers"]):
        for name, shape in {"input_layernorm": (width,), "mlp.down_proj": (width, hidden), "mlp.gate_proj": (hidden, width),
                            "mlp.up_proj": (hidden, width), "post_attention_layernorm": (width,), "self_attn.k_proj": (kv, width),
                            "self_attn.o_proj": (width, width), "self_attn.q_proj": (width, width),
                            "self_attn.v_proj": (kv, width)}.items():
            found[f"model.layers.{i}.{name}.weight"] = shape
    found["model.norm.weight"] = (width,)
    if not c.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (c["vocab_size"], width)
    return found


def weights(config, kind="BF16", seed=0):
    """-> tensors with random values, for write_tensor_file."""
    rng = np.random.default_rng(seed)
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
    merges = [("t", "h"), ("th", "e"), (chars[32], "c"), *((f"{chars[1 + i]}", "z") for i in range(extra))]
    added = [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for i, name in enumerate(SMOL_SPECIAL)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    names = [*SMOL_SPECIAL, *sorted(chars), *map("".join, merges)]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]},
            "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "vocab": {name: i for i, name in enumerate(names)},
                      "merges": [" ".join(merge) for merge in merges]}}


def write_json(folder, name, what):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(what, file, indent=2)


def write_folder(folder, base=NEW, tensors=None, shards=1, tokenizer=None, metadata=PT, **changes):
    """base, changes: the keys of config.json.  -> the tensors."""
    config = {key: found for key, found in {**base, **changes}.items() if found is not GONE}
    tensors = weights(config) if tensors is None else tensors
    os.makedirs(folder, exist_ok=True)
    write_json(folder, "config.json", config)
    write_json(folder, "tokenizer.json", tokenizer or tokenizer_json())
    write_json(folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"})
    if shards == 1:
        write_tensor_file(os.path.join(folder, "model.safetensors"), tensors, metadata)
        return tensors
    index, names = {}, list(tensors)
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_tensor_file(os.path.join(folder, file), {name: tensors[name] for name in names[i::shards]}, metadata)
        index.update(dict.fromkeys(names[i::shards], file))
    total = sum(array.nbytes for _, array in tensors.values())
    write_json(folder, "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})
    return tensors


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "foreign")


def load(folder, **more):
    return checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False}, **more)[0]


def by_our_names(tensors, layers=L):
    """-> {our name: values}"""
    found = {"embed": value(tensors["model.embed_tokens.weight"]), "norm": value(tensors["model.norm.weight"])}
    for i in range(layers):
        for mine, parts in {"qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "out": ["self_attn.o_proj"],
                            "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"], "norm1": ["input_layernorm"],
                            "norm2": ["post_attention_layernorm"]}.items():
            found[f"layers.{i}.{mine}"] = np.concatenate([value(tensors[f"model.layers.{i}.{part}.weight"]) for part in parts])
    if "lm_head.weight" in tensors:
        found["heads"] = value(tensors["lm_head.weight"])
    return found


def arrived(model, tensors, layers=L):
    """Every bit, the sign of a zero too."""
    expected = by_our_names(tensors, layers)
    for name, _ in model_cpu.param_table(model.config):
        found = model.params[name]
        assert found.dtype == np.float32 and found.tobytes() == expected[name].astype(np.float32).tobytes(), name
    assert model.config.tied or "heads" in expected


def refused(folder, *words, **more):
    """load refuses the folder in one sentence that has all these words, whatever their commas."""
    with pytest.raises(ValueError) as error:
        load(folder, **more)
    text = str(error.value)
    print(text)
    assert "\n" not in text and text.endswith("."), text
    for word in words:
        assert str(word).replace(",", "") in text.replace(",", ""), (word, text)
    return text


# -- what loads --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("base", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_every_bit_arrives_in_either_spelling(folder, base, tied, kind):
    dtype = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[kind]
    changes = {"tie_word_embeddings": tied, "torch_dtype" if base is OLD else "dtype": dtype}
    tensors = weights({**base, **changes}, kind)
    write_folder(folder, base, tensors, **changes)
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False})
    arrived(model, tensors)
    c = model.config
    assert (c.dim, c.hidden, c.layers, c.heads, c.kv_heads, c.vocab, c.predict) == (C, F, L, H, G, V, 1)
    assert (c.norm_eps, c.rope_theta, c.context, c.tied) == (1e-5, 1e5, 48, tied) and c.positions in (None, 48)
    assert (model.params["heads"] is model.params["embed"]) == tied and model.step == 0
    assert tokenizer.vocab_size == 276 < V and tokenizer.special == {name: i for i, name in enumerate(SMOL_SPECIAL)}
    assert [tokenizer.tokens[token] for token in tokenizer.encode("the c 12")] == [b"the", b" c", b" ", b"1", b"2"]


@pytest.mark.parametrize("spelled", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_parameters": None},
                                     {"rope_scaling": None}])
def test_what_config_does_not_say(folder, spelled):
    """The defaults of LlamaConfig: as many key/value heads as heads, 1e-6, 10000, 2048, an own head, silu."""
    config = {"model_type": "llama", **SIZES, **spelled}
    tensors = write_folder(folder, config)
    assert "lm_head.weight" in tensors
    model = load(folder)
    arrived(model, tensors)
    c = model.config
    assert (c.kv_heads, c.norm_eps, c.rope_theta, c.tied) == (H, 1e-6, 1e4, False) and (c.positions or c.context) == 2048
    assert load(folder, context=2048).config.context == 2048
    refused(folder, "context", 2049, 2048, context=2049)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("left_out", [GONE, None])
def test_a_size_that_is_not_said_is_named(folder, key, left_out):
    """Every config.json of a Llama says these, so there is nothing to guess."""
    write_folder(folder, tensors=weights(NEW), **{key: left_out})
    refused(folder, "config.json cannot be used", key)


@pytest.mark.parametrize("scaling", [GONE, None, {"rope_type": "default"}, {"type": "default"}])
def test_rope_scaling_that_scales_nothing(folder, scaling):
    write_folder(folder, OLD, rope_scaling=scaling)
    assert load(folder).config.rope_theta == 1e5


@pytest.mark.parametrize("base, changes, theta", [
    (OLD, {"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}}, 500),
    (NEW, {"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}}, 500), (NEW, {"rope_scaling": {"type": "default"}}, 1e4),
    (NEW, {"rope_scaling": {"type": "default"}, "rope_theta": 300.0}, 300), (NEW, {"rope_scaling": {}, "rope_theta": 300.0}, 1e5)])
def test_of_several_thetas_that_of_transformers_counts(folder, base, changes, theta):
    """rope_parameters are asked only where rope_scaling is empty, and config.json itself where the one asked has none."""
    write_folder(folder, base, **changes)
    assert load(folder).config.rope_theta == theta


@pytest.mark.parametrize("changes", [
    {"rope_scaling": None}, {"sliding_window": None}, {"sliding_window": 0, "use_qk_norm": False, "partial_rotary_factor": 1.0},
    {"head_dim": GONE}, {"head_dim": None}, {"num_key_value_heads": None}, {"mlp_bias": GONE, "attention_bias": GONE},
    {"hidden_act": GONE}, {"eos_token_id": 0}, {"eos_token_id": [2, 0]}, {"eos_token_id": None}, {"eos_token_id": GONE},
    {"bos_token_id": GONE, "pad_token_id": None}, {"use_cache": False, "quite_unknown": [1]}, {"_name_or_path": "/somewhere"},
    {"dtype": GONE}, {"architectures": GONE}, {"rope_parameters": {"rope_theta": 500, "rope_type": "default"}}])
def test_what_changes_nothing_loads(folder, changes):
    tensors, model = write_folder(folder, **changes), load(folder)
    arrived(model, tensors)
    assert model.config.rope_theta == (500 if "rope_parameters" in changes else 1e5)


@pytest.mark.parametrize("kind, name", [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")])
def test_what_is_in_a_folder_is_printed(folder, capsys, kind, name):
    tensors = write_folder(folder, tensors=weights(NEW, kind), shards=2)
    checkpoint.main([folder])
    lines = capsys.readouterr().out.splitlines()
    assert sum(f" {name}  root mean square " in line for line in lines) == len(tensors)
    assert sum(line.endswith(" bytes, CRC32 none") for line in lines) == 2 and len(lines) == 3 + 2 + len(tensors)


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_every_finite_number_of_sixteen_bits_arrives(folder, kind):
    """Zeros of both signs, numbers too small to be normal, the largest."""
    config = {**NEW, "vocab_size": 4096}
    tensors = weights(config, kind)
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = ((bits >> 7 & 0xFF) if kind == "BF16" else (bits >> 10 & 0x1F)) < (0xFF if kind == "BF16" else 0x1F)
    bits = np.where(finite, bits, 0).astype(np.uint16).reshape(4096, 16)
    tensors["model.embed_tokens.weight"] = kind, bits if kind == "BF16" else bits.view(np.float16)
    write_folder(folder, tensors=tensors, vocab_size=4096)
    embed = load(folder).params["embed"]
    expected = value(tensors["model.embed_tokens.weight"])
    assert len(np.unique(expected)) == finite.sum() - 1 and math.isfinite(np.abs(expected).max())       # -0 is 0
    assert embed.astype(np.float64).tobytes() == expected.tobytes()


def test_matrices_in_bf16_and_gains_in_float32(folder):
    """Sorted by their alignment, as such a file is written; the gains have bits that bf16 has not."""
    narrow, wide = weights(NEW, "BF16"), weights(NEW, "F32")
    tensors = {name: wide[name] for name in wide if "norm" in name} | {name: narrow[name] for name in narrow if "norm" not in name}
    write_folder(folder, tensors=tensors)
    arrived(load(folder), tensors)
    write_folder(folder, tensors={**narrow, "model.norm.weight": ("F32", wide["model.norm.weight"][1])})
    arrived(load(folder), {**narrow, "model.norm.weight": wide["model.norm.weight"]})


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_are_as_good_as_the_whole(folder, tmp_path, shards):
    tensors, apart = write_folder(folder), str(tmp_path / "apart")
    write_folder(apart, tensors=tensors, shards=shards)
    assert "model.safetensors" not in os.listdir(apart)
    whole, found = load(folder), load(apart)
    assert np.array_equal(whole.flat_params, found.flat_params) and whole.config == found.config
    arrived(found, tensors)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "step": "7"}])
@pytest.mark.parametrize("shuffled", [False, True])
def test_headers_that_differ_load(folder, metadata, shuffled):
    """With any metadata or none, and in any order: the format asks for neither."""
    tensors = write_folder(folder)
    write_tensor_file(os.path.join(folder, "model.safetensors"), tensors, metadata, shuffled)
    arrived(load(folder), tensors)


def test_buffers_are_ignored(folder):
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": ("F32", np.ones(D // 2, np.float32)) for i in range(L)}
    tensors = weights(NEW)
    for shards in 1, 3:
        write_folder(folder, tensors={**tensors, **buffers, "model.rotary_emb.inv_freq": ("BF16", to_bf16(np.ones(D // 2)))},
                     shards=shards)
        arrived(load(folder), tensors)
        os.remove(os.path.join(folder, "model.safetensors")) if shards == 1 else None


def test_a_tied_file_may_hold_the_head_too(folder):
    tensors = weights(NEW)
    write_folder(folder, tensors={"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors})
    model = load(folder)
    arrived(model, tensors)
    assert model.config.tied and model.params["heads"] is model.params["embed"]
    assert "heads" not in dict(model_cpu.param_table(model.config))
    kind, embed = tensors["model.embed_tokens.weight"]      # in another kind of numbers, too, or alone
    wide = "F32", (embed.astype(np.uint32) << 16).view(np.float32)
    assert kind == "BF16"
    write_folder(folder, tensors={**tensors, "lm_head.weight": wide})
    arrived(load(folder), tensors)
    write_folder(folder, tensors={name.replace("model.embed_tokens", "lm_head"): tensors[name] for name in tensors})
    arrived(load(folder), tensors)


def test_a_head_of_its_own_in_a_tied_file_is_not_dropped(folder):
    """transformers computes with it.  So the folder is refused for it, or loads untied."""
    tensors = weights({**NEW, "tie_word_embeddings": False})
    write_folder(folder, tensors=tensors)
    try:
        model = load(folder)
    except ValueError as error:
        assert "lm_head.weight" in str(error) and "\n" not in str(error) and str(error).endswith(".")
    else:
        assert not model.config.tied
        arrived(model, tensors)


def test_a_shorter_context(folder):
    write_folder(folder)
    model = load(folder)
    assert model.config.context == 48
    tokens = np.random.default_rng(0).integers(0, V, (2, 20))
    for context in 20, 33, 48:
        short = load(folder, context=context)
        assert short.config.context == context and (short.config.positions or context) == 48
        assert np.array_equal(short.logits(tokens), model.logits(tokens))
    with pytest.raises(ValueError, match="do not fit the context of 20"):
        load(folder, context=20).logits(np.zeros((1, 21), int))
    for context in 49, 1000:
        refused(folder, "context", context, 48, context=context)
    refused(folder, "context", 0, context=0)


def test_a_folder_that_was_read_is_not_changed(folder):
    write_folder(folder, shards=2)
    before = {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}
    load(folder)
    assert before == {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}
    with pytest.raises(ValueError, match="holds no training state"):
        checkpoint.load_state(folder)


def test_our_own_folders_load_as_before(tmp_path):
    """With several heads, and their context."""
    config = Config(dim=16, heads=4, kv_heads=2, layers=2, context=16, vocab=264, predict=3)
    model, tokenizer = Model(config, dtype=np.float32), Tokenizer.train(["the cat"], 262)
    checkpoint.save(str(tmp_path), model, tokenizer, {})
    found = load(str(tmp_path))
    assert np.array_equal(found.flat_params, model.flat_params) and not found.config.tied and found.config.predict == 3
    assert found.config.context == 16 and load(str(tmp_path), context=8).config.context == 8
    refused(str(tmp_path), "context", 17, 16, context=17)


def test_saved_and_loaded_again(folder, tmp_path):
    """What a fine-tuned foreign model is: a folder of ours, tied as before, with all its positions."""
    tensors, out = write_folder(folder), str(tmp_path / "out")
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32}, context=32)
    model.step = 3
    checkpoint.save(out, model, tokenizer, {"a": 1})
    written = json.load(open(os.path.join(out, "config.json")))
    assert written["tie_word_embeddings"] is True and written["max_position_embeddings"] == 48
    header = read_tensor_file(os.path.join(out, "model.safetensors"))[0]
    assert set(header) == {*shapes(NEW), "__metadata__"}
    again, same = checkpoint.load(out, model_cpu, {"dtype": np.float32})
    arrived(again, tensors)
    assert again.step == 3 and checkpoint.load_state(out, again) == {"a": 1} and again.config.tied
    assert (again.config.positions or again.config.context) == 48
    assert same.tokens == tokenizer.tokens and same.special == tokenizer.special and same.merges == tokenizer.merges
    with open(os.path.join(out, "model.safetensors"), "r+b") as file:   # ours has a checksum, and it counts
        file.seek(-1, os.SEEK_END)
        file.write(b"\x3e")
    refused(out, "model.safetensors", "checksum")


# -- models that are not ours to compute -------------------------------------------------------------------------------
@pytest.mark.parametrize("base", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize("changes, words", [
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_", "linear"]),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_", "dynamic"]),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 32}}, ["rope_type", "llama3"]),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, ["rope_type", "yarn"]),
    ({"attention_bias": True}, ["attention_bias", "True"]),
    ({"mlp_bias": True}, ["mlp_bias", "True"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ({"hidden_act": "relu"}, ["hidden_act", "relu"]),
    ({"sliding_window": 16}, ["sliding_window", "16"]),
    ({"use_qk_norm": True}, ["use_qk_norm", "True"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ({"model_type": "mistral"}, ["model_type", "mistral"]),
    ({"model_type": "qwen3"}, ["model_type", "qwen3"]),
    ({"head_dim": 8}, ["head_dim", "8"]),
    ({"head_dim": 2}, ["head_dim", "2"]),
    ({"rope_theta": 0.25, "rope_parameters": GONE}, ["rope_theta", "0.25"]),
    ({"rms_norm_eps": -1}, ["eps", "-1"]),
    ({"num_key_value_heads": 3}, ["heads", "3"])])
def test_other_models_are_refused_by_name(folder, base, changes, words):
    tensors = weights({**base, **changes}) if changes.get("num_key_value_heads", G) == G else weights(base)
    write_folder(folder, base, tensors, **changes)
    refused(folder, *words)


@pytest.mark.parametrize("name, shape", [
    ("self_attn.q_norm.weight", (D,)), ("self_attn.k_norm.weight", (D,)), ("self_attn.q_proj.bias", (C,)), ("mlp.up_proj.bias", (F,)),
    ("pre_feedforward_layernorm.weight", (C,)), ("mlp.experts.0.w1.weight", (F, C))])
@pytest.mark.parametrize("shards", [1, 2])
def test_tensors_that_a_llama_has_not_are_refused_by_name(folder, name, shape, shards):
    extra = f"model.layers.1.{name}"
    write_folder(folder, tensors={**weights(NEW), extra: ("BF16", to_bf16(np.ones(shape)))}, shards=shards)
    refused(folder, extra)


def test_a_layer_too_many_is_refused(folder):
    write_folder(folder, tensors=weights({**NEW, "num_hidden_layers": L + 1}))
    refused(folder, f"model.layers.{L}.")


@pytest.mark.parametrize("size, good", [(65_536, True), (65_544, False), (128_256, False)])
def test_ids_have_sixteen_bits(folder, size, good):
    config = {**NEW, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": size}
    write_folder(folder, config)
    if good:
        assert load(folder).config.vocab == size
    else:
        refused(folder, "vocab_size", size, 65_536)


# -- folders that are damaged ------------------------------------------------------------------------------------------
def shard(folder, i=2, of=3):
    return os.path.join(folder, f"model-{i:05}-of-{of:05}.safetensors")


def test_a_missing_shard(folder):
    write_folder(folder, shards=3)
    os.remove(shard(folder))
    with pytest.raises(FileNotFoundError) as error:
        load(folder)
    assert error.value.filename == shard(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/ABSOLUTE/other.safetensors", "sub/../../other.safetensors", "..", "", ".",
                                  7, None, ["model.safetensors"]])
def test_an_index_that_leaves_the_folder(folder, tmp_path, name):
    """Though there is such a file, with all that it should have."""
    tensors = write_folder(folder, shards=3)
    os.mkdir(os.path.join(folder, "sub"))
    write_tensor_file(str(tmp_path / "other.safetensors"), tensors)
    path = os.path.join(folder, "model.safetensors.index.json")
    index = json.load(open(path))
    name = name.replace("/ABSOLUTE", str(tmp_path)) if isinstance(name, str) else name
    index["weight_map"]["model.norm.weight"] = name
    write_json(folder, "model.safetensors.index.json", index)
    refused(folder, *["model.safetensors.index.json", name] if isinstance(name, str) and name.endswith("other.safetensors") else [])
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    write_json(folder, "model.safetensors.index.json", index)
    refused(folder)


def test_an_index_of_a_tensor_that_its_shard_has_not(folder):
    write_folder(folder, shards=3)
    path = os.path.join(folder, "model.safetensors.index.json")
    index, name = json.load(open(path)), "model.layers.1.mlp.up_proj.weight"
    right = index["weight_map"][name]
    index["weight_map"][name] = wrong = next(file for file in index["weight_map"].values() if file != right)
    write_json(folder, "model.safetensors.index.json", index)
    refused(folder, name, wrong)
    del index["weight_map"][name]
    write_json(folder, "model.safetensors.index.json", index)
    refused(folder, name)


@pytest.mark.parametrize("index", [[], 7, None, {}, {"weight_map": []}, {"weight_map": None}, {"weight_map": {}}])
def test_an_index_that_is_none(folder, index):
    write_folder(folder, shards=2)
    write_json(folder, "model.safetensors.index.json", index)
    refused(folder)


@pytest.mark.parametrize("shards", [1, 3])
def test_files_that_are_cut(folder, shards):
    write_folder(folder, shards=shards)
    path = os.path.join(folder, "model.safetensors") if shards == 1 else shard(folder)
    raw = open(path, "rb").read()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    for end in 0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, (header + len(raw)) // 2, len(raw) - 1:
        with open(path, "wb") as file:
            file.write(raw[:end])
        refused(folder, path)
    with open(path, "wb") as file:
        file.write(raw + b"\0")
    refused(folder, path)


NAME = "model.layers.0.self_attn.q_proj.weight"     # (C,C) of bf16: 512 bytes


@pytest.mark.parametrize("change", [
    {"data_offsets": [0, 512]}, {"data_offsets": [-512, 0]}, {"data_offsets": [1 << 40, (1 << 40) + 512]}, {"data_offsets": [0, 1 << 62]},
    {"data_offsets": None}, {"data_offsets": [0]}, {"data_offsets": ["a", "b"]}, {"shape": [C, C + 1]}, {"shape": [-C, -C]}, {"shape": None},
    {"shape": [1 << 40, 1 << 40]}, {"shape": "xx"}, {"dtype": "F32"}, {"dtype": None}, {"dtype": 7}])
def test_headers_that_contradict_the_file(folder, change):
    """A file without a checksum has its header alone to be believed."""
    write_folder(folder)
    path = os.path.join(folder, "model.safetensors")
    header, data = read_tensor_file(path)
    assert header[NAME]["shape"] == [C, C] and header[NAME]["data_offsets"][0] > 512
    header[NAME].update(change)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    refused(folder, path)


@pytest.mark.parametrize("more", [1, 1000, 1 << 40])
def test_a_header_that_is_longer_than_the_file(folder, more):
    write_folder(folder)
    path = os.path.join(folder, "model.safetensors")
    for text in (b"{}", b'{"__metadata__":{}}'):
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text) + more) + text)
        refused(folder, "model.safetensors is damaged (truncated or altered)")


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":1}', b'{"__metadata__":7}'])
def test_headers_that_are_none(folder, text):
    write_folder(folder)
    path = os.path.join(folder, "model.safetensors")
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
    refused(folder, "model.safetensors")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_tensor_that_is_missing(folder, name, shards):
    tensors = weights({**NEW, "tie_word_embeddings": False})
    del tensors[name]
    write_folder(folder, tensors=tensors, shards=shards, tie_word_embeddings=False)
    refused(folder, name, "missing")


@pytest.mark.parametrize("name, shape", [(NAME, (C, C + 8)), ("model.layers.1.mlp.down_proj.weight", (F, C)), ("model.norm.weight", (C, 1)),
                                         ("model.layers.1.self_attn.v_proj.weight", (C, C)), ("model.embed_tokens.weight", (V - 8, C)),
                                         ("model.layers.0.input_layernorm.weight", (1,))])
def test_a_tensor_of_another_shape(folder, name, shape):
    write_folder(folder, tensors={**weights(NEW), name: ("BF16", to_bf16(np.ones(shape)))})
    refused(folder, name, str(shape))


@pytest.mark.parametrize("kind", ["I64", "I32", "U8", "F8_E4M3", "BOOL"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_tensor_of_another_kind_of_numbers(folder, kind, shards):
    write_folder(folder, tensors={**weights(NEW), NAME: (kind, pack(np.ones((C, C)), kind))}, shards=shards)
    refused(folder, NAME, kind)


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_number_that_is_none(folder, kind, bad, shards):
    tensors = weights(NEW, kind)
    bits = {"nan": 0x7FC0, "inf": 0x7F80, "-inf": 0xFF80}[str(bad)] if kind == "BF16" else bad
    tensors[NAME][1][3, 5] = bits
    write_folder(folder, tensors=tensors, shards=shards)
    refused(folder, NAME, "finite")


ADDED = {"content": "<im_end>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}


@pytest.mark.parametrize("name, content, words", [
    ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space"),
    ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}, "Qwen2Tokenizer"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"276": ADDED}}, "<im_end>"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"1": {**ADDED, "content": SMOL_SPECIAL[2]}}}, "lacks"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"2": {**ADDED, "content": SMOL_SPECIAL[2], "rstrip": True}}}, "rstrip"),
    ("tokenizer_config.json", {"added_tokens_decoder": [3]}, "list"),
    ("added_tokens.json", {"<im_end>": 276}, "<im_end>"), ("added_tokens.json", [3], "list")])
def test_settings_that_would_give_other_ids(folder, name, content, words):
    write_folder(folder)
    write_json(folder, name, content)
    with pytest.raises(ValueError, match=f"the tokenizer's settings cannot be used .*{words}"):
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
    assert load(folder).config.vocab == V           # as many are right
    write_folder(folder, tokenizer=tokenizer_json(extra=V - 276 + 1))
    refused(folder, "tokenizer.json", V + 1, V)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file(folder, name):
    write_folder(folder)
    os.remove(os.path.join(folder, name))
    refused(folder, folder, name)
    with open(os.path.join(folder, "pytorch_model.bin"), "wb") as file:     # a pickle: never read
        file.write(b"\x80\x02.")
    refused(folder, folder, name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json_object(folder, name, text):
    write_folder(folder, shards=2)
    with open(os.path.join(folder, name), "wb") as file:
        file.write(text)
    refused(folder, name)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("bad", ["16", 0, -8, 1.5, [16], True, None, 1 << 70])
def test_a_size_that_is_none(folder, key, bad):
    write_folder(folder, tensors=weights(NEW), **{key: bad})
    refused(folder)


# -- chat templates ----------------------------------------------------------------------------------------------------
def put_template(folder, where, template):
    if where == "chat_template.jinja":
        with open(os.path.join(folder, where), "w", encoding="utf-8", newline="") as file:
            file.write(template)
    else:
        write_json(folder, where, {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "chat_template": template})


def turn(tokenizer, *parts):
    """ids: of texts, and those of special tokens by their names."""
    return [token for part in parts for token in ([tokenizer.special[part]] if part in tokenizer.special else tokenizer.encode(part))]


def escaped(template):
    r"""With \n in the place of each line end, which is the same to Jinja."""
    return template.replace("\n", "\\n")


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("template, default", [(CHATML, ""), (SMOL_TEMPLATE, DEFAULT), (SMOL_TEMPLATE.replace(DEFAULT, "Be kind."), "Be kind."),
                                               (escaped(CHATML), ""), (escaped(SMOL_TEMPLATE), DEFAULT)])
def test_known_templates(folder, where, template, default):
    write_folder(folder)
    put_template(folder, where, template)
    for tokenizer in checkpoint.read_tokenizer(folder), checkpoint.load(folder, model_cpu, {"training": False})[1]:
        start, end = "<|im_start|>", "<|im_end|>"
        asked = [start, "user\nhello", end, "\n", start, "assistant\n"]
        system = [start, f"system\n{default}", end, "\n"] if default else []
        assert tokenizer.template and tokenizer.end_of_turn == 2
        assert tokenizer.prompt("hello") == tokenizer.prompt(b"hello") == turn(tokenizer, *system, *asked)
        assert tokenizer.prompt("hello", system=b"Be brief.") == turn(tokenizer, start, "system\nBe brief.", end, "\n", *asked)
        assert tokenizer.prompt("hello", first=False) == turn(tokenizer, "\n", *asked)


def test_of_two_templates_the_file_of_its_own_counts(folder):
    """As in transformers."""
    write_folder(folder)
    put_template(folder, "tokenizer_config.json", SMOL_TEMPLATE)
    put_template(folder, "chat_template.jinja", CHATML)
    tokenizer = checkpoint.read_tokenizer(folder)
    assert tokenizer.prompt("hello")[:4] == turn(tokenizer, "<|im_start|>", "user\nhello")[:4]


def test_without_a_template(folder):
    write_folder(folder)
    assert checkpoint.read_tokenizer(folder).template == ""
    for settings in {}, {"chat_template": None}, {"chat_template": ""}:
        write_json(folder, "tokenizer_config.json", settings)
        assert checkpoint.read_tokenizer(folder).template == ""
    os.remove(os.path.join(folder, "tokenizer_config.json"))
    assert checkpoint.read_tokenizer(folder).template == ""
    load(folder)


def test_our_own_template(tmp_path):
    config = Config(dim=16, heads=4, kv_heads=2, layers=1, context=16, vocab=264, predict=2)
    for chat in False, True:
        checkpoint.save(str(tmp_path), Model(config, dtype=np.float32), Tokenizer.train(["the cat"], 262), {}, chat=chat)
        tokenizer = checkpoint.read_tokenizer(str(tmp_path))
        assert bool(tokenizer.template) == chat
        assert tokenizer.prompt("hello") == turn(tokenizer, "<|user|>", "hello", "<|end|>", "<|assistant|>")
    assert tokenizer.end_of_turn == tokenizer.special["<|end|>"] and "<|end|>" in CHAT_TEMPLATE


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("template", [
    "{{ messages[0].content }}", CHATML.replace("user", "human").replace("assistant", "bot"), CHATML.replace("<|im_end|>", "</s>"),
    "{% for message in messages %}[INST] {{ message.content }} [/INST]{% endfor %}", CHATML + "{{ 'Sure,' }}", "{{ date }}" + CHATML])
def test_an_unknown_template_is_taken_for_no_other(folder, where, template):
    """Either the folder is refused for it, in one sentence, or it is read as one without a template."""
    write_folder(folder)
    put_template(folder, where, template)
    try:
        tokenizer = checkpoint.read_tokenizer(folder)
    except ValueError as error:
        assert "chat_template" in str(error) and "\n" not in str(error) and str(error).endswith(".")
    else:
        assert tokenizer.template == ""
