"""Other people's models: Llama folders that transformers writes, with random weights, give what transformers computes
from them; what we save of them transformers reads again.  And folders and tokenizers by
chance: they give the same as there, or are refused.

    RANDOM_FOLDERS=400 python -m pytest tests/peers/test_shelf_peers.py -k chance

tests/test_shelf.py has what is refused, and needs no PyTorch."""
import json
import os
import random

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"     # transformers reads them on import

import numpy as np
from numpy.random import default_rng
import pytest
from cases import parametrize
import test_model_peers as peers
import test_shelf as shelf
from test_tokenizer_peers import SMOL_SPECIAL, TEXTS, foreign
import torch
import transformers

import checkpoint
import model_cpu
from tokenizer import BYTE_LEVEL, DIGITS

PROMPT = [5, 17, 40]
SMALL = {"vocab_size": 1504, "hidden_size": 128, "intermediate_size": 200, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
         "rms_norm_eps": 3e-6, "tie_word_embeddings": True}
UNTIED = {**SMALL, "tie_word_embeddings": False}


# ------------------------------------------------------------------------------------------------------------
# Folders as others write them
# ------------------------------------------------------------------------------------------------------------
def write_llama(folder, sizes, dtype="float32", shard="1GB"):
    """transformers writes a model with random weights: matrices of the standard deviation 1.5 / sqrt(C), so that
    each layer adds to the residual stream as much as there is and a greedy text does not repeat itself; gains near
    1."""
    config = transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 3e5},
                                      bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):                      # no memory, and no initial values to wait for
        llama = transformers.LlamaForCausalLM(config)
    rng, weights = default_rng(0), {}
    for name, parameter in llama.named_parameters():
        values = rng.random(tuple(parameter.shape), np.float32) - 0.5       # uniform: drawn thrice as fast as normal
        values *= 12 ** 0.5 * (0.1 if values.ndim == 1 else 1.5 * config.hidden_size ** -0.5)
        weights[name] = torch.from_numpy(values + (values.ndim == 1)).to(getattr(torch, dtype))
    llama.load_state_dict(weights, assign=True, strict=not config.tie_word_embeddings)
    llama.tie_weights()
    llama.save_pretrained(folder, max_shard_size=shard)
    foreign(True, True, SMOL_SPECIAL, TEXTS).save(f"{folder}/tokenizer.json")
    shelf.write_json(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": shelf.SMOLLM})


@pytest.fixture
def folder(tmp_path):
    return f"{tmp_path}/foreign"


# ------------------------------------------------------------------------------------------------------------
# What they compute
# ------------------------------------------------------------------------------------------------------------
@parametrize("sizes, dtype, shard", [(UNTIED, "bfloat16", "200KB"), ({**SMALL, "num_key_value_heads": 4}, "float16", "1GB")])
def test_logits_and_greedy_texts_are_those_of_transformers(folder, sizes, dtype, shard):
    """The text token by token with the cache."""
    write_llama(folder, sizes, dtype, shard)
    tokens = default_rng(1).integers(0, sizes["vocab_size"], (2, 48))
    text = peers.greedy_text(folder, PROMPT, 50)
    assert len(set(text)) >= 20                     # else it would show nothing
    model, _ = checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False}, 128)
    assert peers.distance(*peers.both_logits(folder, model, tokens)) < 3e-6
    assert list(model_cpu.generate(model, PROMPT, temperature=0, most=50)) == text


@parametrize("sizes, dtype, chat", [(SMALL, "float16", False), (UNTIED, "bfloat16", True)])
def test_transformers_loads_what_we_save(folder, tmp_path, sizes, dtype, chat):
    """If it was fine-tuned, with its chat template, so that transformers asks it as sft.py did, and stops where it does."""
    write_llama(folder, sizes, dtype, "100KB")
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32}, context=64)
    out = f"{tmp_path}/out"
    tokens = default_rng(4).integers(0, 512, (2, 60))
    checkpoint.save(out, model, tokenizer, {}, chat=chat)
    llama = peers.load_llama(out, torch.float32)
    assert llama.config.max_position_embeddings == 512 != model.config.context
    assert (llama.lm_head.weight is llama.model.embed_tokens.weight) == (sizes is SMALL)
    assert peers.distance(*peers.both_logits(out, model, tokens)) < 3e-6
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert len(theirs) == tokenizer.vocab_size and bool(theirs.chat_template) == chat
    if chat:
        asked = theirs.apply_chat_template([{"role": "user", "content": "What?"}], add_generation_prompt=True, return_dict=False)
        assert checkpoint.read_tokenizer(out).prompt("What?") == asked
        assert theirs.eos_token_id == llama.config.eos_token_id == tokenizer.end_of_turn


# ------------------------------------------------------------------------------------------------------------
# By chance
# ------------------------------------------------------------------------------------------------------------
CHANCE = range(int(os.environ.get("RANDOM_FOLDERS", 48)))
# What tests/test_shelf.py has refused by name is not among these.
ROPES = [None, {}, {"type": "default"}, {"rope_type": "default", "rope_theta": 77.0}, {"rope_theta": 300},
         {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}]
KEYS = {"rope_scaling": ROPES, "rope_parameters": ROPES, "rope_theta": [50, 1e6], "rms_norm_eps": [0.5, "1e-5"],
        "hidden_act": ["swish", "gelu"], "head_dim": [None, 4, 16], "num_key_value_heads": [None, 1, 8],
        "tie_word_embeddings": [False, True], "max_position_embeddings": [8, 24], "mtp_heads": [0, 2],
        "vocab_size": [280],
        **{name: [0.5, True] for name in """logits_scaling residual_multiplier clip_qkv qkv_bias rope_interleaved use_bidirectional_attention""".split()}}


def random_folder(folder, rng):
    heads = rng.choice([2, 4, 8])
    base = {**rng.choice([shelf.OLD, shelf.NEW]), "hidden_size": heads * rng.choice([4, 8, 16]), "num_attention_heads": heads,
            "num_key_value_heads": rng.choice([1, heads]), "tie_word_embeddings": rng.random() < 0.5}
    base.pop("head_dim", None)
    kind = rng.choice([*shelf.KINDS])
    tensors = shelf.weights(base, kind, rng.randrange(1000))[1]
    odd = rng.choice([*tensors, "lm_head.weight", "model.layers.0.self_attn.q_proj.bias"])
    tensors[odd] = tensors.get(odd, tensors["model.embed_tokens.weight"])
    changes = {key: rng.choice(KEYS[key]) for key in rng.sample([*KEYS], rng.choice([0, 1, 1, 2, 3]))}
    shelf.write_folder(folder, base, tensors)
    base.pop(rng.choice([*base][1:]) if rng.random() < 0.4 else None, None)
    shelf.write_json(folder, "config.json", {**base, **changes})


@parametrize("seed", CHANCE)
def test_a_folder_by_chance_gives_the_same_or_is_refused(folder, seed):
    random_folder(folder, random.Random(seed))
    try:
        model, _ = checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False})
    except ValueError:
        return
    tokens = default_rng(seed).integers(0, model.config.vocab, (2, min(model.config.context, 20)))
    assert peers.distance(*peers.both_logits(folder, model, tokens)) < 1e-5


# What tests/test_tokenizer.py has refused by name is not among these.
FLAGS = {"pre_tokenizer": [None, {**BYTE_LEVEL, "use_regex": False}, {**BYTE_LEVEL, "trim_offsets": False}, *[
             {"type": "Sequence", "pretokenizers": steps} for steps in (
                 [], [DIGITS], [BYTE_LEVEL, DIGITS], [{**DIGITS, "individual_digits": False}, BYTE_LEVEL])]],
         "normalizer": [{"type": "Sequence", "normalizers": []}], "dropout": [0.0], "end_of_word_suffix": [""], "fuse_unk": [True],
         "post_processor": [{**BYTE_LEVEL, "add_prefix_space": True}, {"type": "Sequence", "processors": []}],
         "normalized": [True], "id": [7]}


@parametrize("seed", CHANCE)
def test_a_tokenizer_by_chance_gives_the_same_ids_or_is_refused(tmp_path, seed):
    rng = random.Random(seed)
    found = json.loads(foreign(True, rng.random() < 0.8, SMOL_SPECIAL, TEXTS[-3:]).to_str())
    extra = {**found["added_tokens"][0], "id": len(found["model"]["vocab"]), "content": "<extra>"}
    found["added_tokens"].append(extra)
    for key in rng.sample(list(FLAGS), rng.choice([0, 1, 1, 2])):
        place = next((part for part in (found["model"], extra) if key in part), found)
        place[key] = rng.choice(FLAGS[key])
    shelf.write_json(tmp_path, "tokenizer.json", found)
    shelf.write_json(tmp_path, "config.json", {"model_type": "llama"})
    shelf.write_json(tmp_path, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    try:
        tokenizer = checkpoint.read_tokenizer(str(tmp_path))
    except ValueError:
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert list(tokenizer.encode(text)) == theirs(text)["input_ids"], text
