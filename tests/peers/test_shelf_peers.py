"""Other people's models: Llama folders that transformers writes, with random weights in the shapes of published
ones, give what transformers computes from them; the gradients are autograd's; what we save of them transformers
reads again.  And folders and tokenizers by chance: they give the same as there, or are refused.

    RANDOM_FOLDERS=400 python -m pytest tests/peers/test_shelf_peers.py -k chance

tests/test_shelf.py has what is refused, and needs no PyTorch."""
import json
import os
import random

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"     # transformers reads them on import

import numpy as np
from numpy.random import default_rng
import pytest
from cases import parametrize, put
import test_model_peers as peers
import test_shelf as shelf
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from test_shelf import CHATML, GONE, SMOL_SPECIAL, SMOL_TEMPLATE
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.models.llama import modeling_llama

import checkpoint
import model_cpu
import model_gpu
import sft
import train
from tokenizer import Tokenizer

PROMPT, NEW = [5, 17, 40], 50
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMOL_135M = {"vocab_size": 49152, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 8192,
             "theta": 1e5, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3}
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 200, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "theta": 3e5,
         "rms_norm_eps": 3e-6, "tie_word_embeddings": True}
UNTIED = {**SMALL, "tie_word_embeddings": False}

# name: (sizes, dtype of the file, largest shard, width of the weights: wide enough for a greedy text of many ids,
# and no wider, as the rounding errors of all layers grow with it)
CASES = {"SmolLM2-135M": (SMOL_135M, "bf16", "100MB", 0.85),
         "untied": (UNTIED, "fp32", "200KB", 1.5), "half": ({**SMALL, "num_key_value_heads": 4}, "fp16", "1GB", 1.5)}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """One thread, as in the other file: the cores are shared with others; and no progress bars."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------------------
# Folders as others write them
# ------------------------------------------------------------------------------------------------------------
def write_llama(folder, sizes, dtype="fp32", shard="1GB", width=1.0):
    """transformers writes a model with random weights: matrices of the standard deviation width / sqrt(C), so
    that each layer adds to the residual stream as much as there is and a greedy text does not repeat itself;
    gains near 1."""
    sizes = dict(sizes)
    rope = {"rope_type": "default", "rope_theta": sizes.pop("theta")}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):                      # no memory, and no initial values to wait for
        llama = transformers.LlamaForCausalLM(config)
    rng, weights = default_rng(0), {}
    for name, parameter in llama.named_parameters():
        values = rng.random(tuple(parameter.shape), np.float32)     # uniform: drawn thrice as fast as normal
        values -= 0.5
        values *= 12 ** 0.5 * (0.1 if values.ndim == 1 else width * config.hidden_size ** -0.5)
        values += values.ndim == 1
        weights[name] = torch.from_numpy(values).to(DTYPES[dtype])
    llama.load_state_dict(weights, assign=True, strict=not config.tie_word_embeddings)
    llama.tie_weights()
    llama.save_pretrained(folder, max_shard_size=shard)
    make_tokenizer().save(f"{folder}/tokenizer.json")
    shelf.write_json(folder, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": SMOL_TEMPLATE})


def make_tokenizer(alphabet=True):
    """Digits one by one, then GPT-2's words; the special tokens in front.  alphabet: with all the 256 bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SMOL_SPECIAL, initial_alphabet=letters,
                                  show_progress=False)
    tokenizer.train_from_iterator([*peers.TEXTS.values(), SMOL_TEMPLATE] * 2, trainer)
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    return f"{tmp_path}/foreign"


def both_logits(folder, model, tokens):
    with torch.no_grad():
        theirs = peers.load_llama(folder, torch.float32)(torch.from_numpy(tokens)).logits
    return model.logits(tokens)[:, :, 0], theirs


# ------------------------------------------------------------------------------------------------------------
# What they compute
# ------------------------------------------------------------------------------------------------------------
@parametrize("case", CASES)
def test_logits_and_greedy_texts_are_those_of_transformers(folder, case):
    """The text token by token with the cache; and in one forward, in which each position's best is the next."""
    sizes, dtype, shard, width = CASES[case]
    write_llama(folder, sizes, dtype, shard, width)
    tokens = default_rng(1).integers(0, sizes["vocab_size"], (2, 48))
    llama = peers.load_llama(folder, torch.float32)
    llama.generation_config.eos_token_id = None
    text = llama.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False,
                          attention_mask=torch.ones((1, 3), dtype=torch.long))[0, 3:].tolist()
    assert len(set(text)) >= 20                     # else it would show nothing
    for engine, options in (model_cpu, {"dtype": np.float32}), (model_gpu, {"precision": "fp32"}):
        if engine is model_gpu and model_gpu.why_no_gpu():
            continue
        model, _ = checkpoint.load(folder, engine, {**options, "training": False}, 128)
        assert (model.config.context, model.config.positions) == (128, sizes["max_position_embeddings"])
        assert peers.distance(*both_logits(folder, model, tokens)) < 3e-6
        assert list(model_cpu.generate(model, PROMPT, temperature=0, most=NEW)) == text
        assert model.logits(np.array([PROMPT + text[:-1]]))[0, 2:, 0].argmax(axis=-1).tolist() == text
    for name in os.listdir(folder):                 # hundreds of megabytes
        os.remove(f"{folder}/{name}")


@parametrize("ours", [False, True])
def test_the_scores_of_sentences(folder, tmp_path, monkeypatch, ours):
    """Those of transformers, which has one sentence at a time."""
    if ours:
        model = model_cpu.Model(model_cpu.CONFIGS["small"], 1, np.float32)
        model.flat_params *= 2
        checkpoint.save(folder, model, Tokenizer.train(peers.TEXTS.values(), 400), {}, chat=True)
    else:
        write_llama(folder, SMALL, width=1.5)
    texts = [text[:n] for text in peers.TEXTS.values() for n in (3, 12, 25) if text]
    pairs = [json.dumps({"good": good, "bad": bad, "name": "x"}) for good, bad in zip(texts, texts[1:])]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs))
    scored, score = {}, train.sentence_scores
    monkeypatch.setattr(train, "sentence_scores", lambda *both: scored.update(score(*both)) or scored)
    train.main(["--evaluate", folder, "--data", f"{tmp_path}/pairs.jsonl", "--device", "cpu", "--context", "128"])
    llama, theirs = peers.load_llama(folder, torch.float32), transformers.AutoTokenizer.from_pretrained(folder)
    start = theirs.convert_tokens_to_ids("<|endoftext|>") if ours else llama.config.bos_token_id
    assert set(scored) == set(texts)
    for text in texts:
        ids = torch.tensor([start, *theirs(text, add_special_tokens=False).input_ids])
        with torch.no_grad():
            log_p = llama(ids[None]).logits[0, :-1].log_softmax(-1)
        assert abs(scored[text] - log_p.gather(1, ids[1:, None]).sum().item()) < 1e-4


@parametrize("sizes", [SMALL, UNTIED], ids=["tied", "untied"])
def test_every_gradient_is_autograds(folder, monkeypatch, sizes):
    put(monkeypatch, modeling_llama, LlamaRMSNorm=peers.Norm64, LlamaRotaryEmbedding=peers.Rotary64)
    write_llama(folder, {**sizes, "theta": 700.0, "rms_norm_eps": 1e-3}, "bf16", "100KB")
    model, _ = checkpoint.load(folder, model_cpu, {"dtype": np.float64, "threads": 2})
    llama = peers.load_llama(folder, torch.float64)
    rng = default_rng(3)
    tokens, targets = rng.integers(0, 512, (3, 70)), rng.integers(0, 512, (3, 70))
    targets[0, 5:20], targets[2, 60:] = -1, -1
    logits = llama(torch.from_numpy(tokens)).logits
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), ignore_index=-1)
    expected.backward()
    loss, = model.forward(tokens, targets)
    model.backward()
    assert abs(loss / expected.item() - 1) < 1e-12
    theirs = {name.removesuffix(".weight"): parameter.grad for name, parameter in llama.named_parameters()}
    found = {"embed": theirs["model.embed_tokens"], "norm": theirs["model.norm"]}
    if sizes is UNTIED:
        found["heads"] = theirs["lm_head"]
    for i in range(3):
        for ours, parts in shelf.PARTS.items():
            found[f"layers.{i}.{ours}"] = torch.cat([theirs[f"model.layers.{i}.{part}"] for part in parts])
    assert set(found) == set(dict(model_cpu.param_table(model.config)))
    for name, grad in found.items():
        assert np.abs(model.grads[name] - grad.numpy()).max() < 1e-10 * grad.abs().max(), name


@parametrize("sizes, dtype, chat", [(SMALL, "fp16", False), (UNTIED, "bf16", True)])
def test_transformers_loads_what_we_save(folder, tmp_path, sizes, dtype, chat):
    """As it was loaded, and after a step of training on it; with the ids of its texts, and if it was fine-tuned
    with its chat template, so that transformers asks it as sft.py did, and stops where it does."""
    write_llama(folder, sizes, dtype, "100KB")
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32}, context=64)
    rng, out = default_rng(4), f"{tmp_path}/out"
    tokens = rng.integers(0, 512, (2, 60))
    _, before = both_logits(folder, model, tokens)
    for step in range(2):
        checkpoint.save(out, model, tokenizer, {}, chat=chat)
        llama = peers.load_llama(out, torch.float32)
        assert llama.config.max_position_embeddings == sizes["max_position_embeddings"] != model.config.context
        assert (llama.lm_head.weight is llama.model.embed_tokens.weight) == (sizes is SMALL)
        mine, theirs = both_logits(out, model, tokens)
        assert peers.distance(mine, theirs) < 3e-6
        assert (peers.distance(theirs, before) == 0) == (step == 0)     # every bit, until they are trained
        model.forward(tokens, rng.integers(0, 512, (2, 60)))
        model.backward()
        model.update(lr=1e-3)
    again, theirs = checkpoint.read_tokenizer(out), transformers.AutoTokenizer.from_pretrained(out)
    assert len(theirs) == tokenizer.vocab_size
    assert again.template == (tokenizer.template if chat else "")
    if chat:
        asked = theirs.apply_chat_template([{"role": "user", "content": "What?"}], add_generation_prompt=True,
                                           return_dict=False)
        assert again.prompt("What?") == asked and theirs.eos_token == "<|im_end|>"
        assert llama.config.eos_token_id == again.end_of_turn == 2


@parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
@parametrize("template, default", [(SMOL_TEMPLATE, True), (CHATML, False)])
def test_prompts_are_those_of_the_chat_template(tmp_path, where, template, default):
    """Of both places where transformers keeps it: the second is where it writes it today."""
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), eos_token="<|im_end|>")
    if where == "chat_template.jinja":
        theirs.chat_template = template
        theirs.save_pretrained(tmp_path)
    else:
        shelf.put_template(tmp_path, where, template)
    make_tokenizer().save(f"{tmp_path}/tokenizer.json")
    shelf.write_json(tmp_path, "config.json", {"model_type": "llama"})
    assert (tmp_path / where).exists()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = checkpoint.read_tokenizer(str(tmp_path))
    assert theirs.chat_template == template and tokenizer.end_of_turn == SMOL_SPECIAL.index("<|im_end|>")

    def asked(*messages):
        said = [{"role": role, "content": text} for role, text in messages]
        return said, theirs.apply_chat_template(said, add_generation_prompt=messages[-1][0] == "user",
                                                return_dict=False)
    answer = [*tokenizer.encode("An animal."), tokenizer.end_of_turn]
    for text in peers.TEXTS.values():
        user = "user", text
        _, first = asked(user)
        assert tokenizer.prompt(text) == first                  # tests/peers/test_tokenizer_peers.py has more of them
        assert default == (tokenizer.tokens[first[1]] != tokenizer.tokens[tokenizer.encode("user\n")[0]])
        for system in [], [("system", "Be brief.\n")]:
            said, whole = asked(*system, user, ("assistant", "An animal."), ("user", "Why?"),
                                ("assistant", text + "!"))
            ids, mask, cut = sft.make_example(tokenizer, sft.make_turns({"messages": said}), 1 << 20)
            assert ids.tolist() + tokenizer.encode("\n") == whole and not cut      # the line end is of the next turn
            assert ids[mask].tolist() == [*answer, *tokenizer.encode(text + "!"), tokenizer.end_of_turn]


# ------------------------------------------------------------------------------------------------------------
# By chance
# ------------------------------------------------------------------------------------------------------------
CHANCE = range(int(os.environ.get("RANDOM_FOLDERS", 12)))
# What tests/test_shelf.py has refused by name is not among these.
ROPES = [GONE, None, {}, {"type": "default"}, {"rope_type": "default", "rope_theta": 77.0}, {"rope_theta": 300},
         {"full_attention": {"rope_type": "default", "rope_theta": 77.0}},
         {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}]
KEYS = {"rope_scaling": ROPES, "rope_parameters": ROPES, "rope_theta": [GONE, 50, 1e6], "rms_norm_eps": [GONE, 0.5, "1e-5"],
        "hidden_act": [GONE, "swish", "gelu"], "head_dim": [GONE, None, 4, 8, 16], "num_key_value_heads": [GONE, None, 1, 8],
        "tie_word_embeddings": [GONE, False, True],
        "max_position_embeddings": [GONE, 8, 24], "pretraining_tp": [2, None], "sliding_window": [None, 0],
        "context": [8, 20], "mtp_heads": [0, 2],
        "mtp_weight": [0.1, "x"], "architectures": [GONE, ["LlamaModel"]],
        "dtype": ["float16"], "num_hidden_layers": [1, 4], "vocab_size": [280],
        "is_decoder": [False], "attention_chunk_size": [4],
        **{name: [0.5] for name in """logits_scaling embedding_multiplier residual_multiplier clip_qkv theta
            attention_multiplier final_logit_softcapping logit_scale norm_eps factor""".split()},
        **{name: [True] for name in """qkv_bias rope_interleaved is_encoder_decoder
            use_bidirectional_attention tie_encoder_decoder add_cross_attention""".split()}}


def random_folder(folder, rng):
    """Write one -> what it is."""
    heads = rng.choice([1, 2, 4, 8])
    sizes = {"hidden_size": max(8, heads * rng.choice([4, 8, 16])), "num_attention_heads": heads, "head_dim": GONE,
             "num_key_value_heads": rng.choice([n for n in (1, 2, 4, 8) if heads % n == 0]),
             "num_hidden_layers": rng.choice([1, 3]), "tie_word_embeddings": rng.random() < 0.5}
    base, kind = rng.choice([shelf.OLD, shelf.NEW]), rng.choice(["BF16", "F16", "F32"])
    tensors = shelf.weights({**base, **sizes}, kind, rng.randrange(1000))
    extra = "F32", np.ones(sizes["hidden_size"], np.float32)
    odd = rng.choice([*8 * [None], "head", "prefix", "stale index",
                      "layers.0.self_attn.rotary_emb.inv_freq", "layers.0.self_attn.q_proj.bias", "layers.7.norm.weight"])
    if odd == "head":
        tensors["lm_head.weight"] = rng.choice([tensors["model.embed_tokens.weight"], shelf.weights(
            {**base, **sizes}, kind, 7)["model.embed_tokens.weight"]])
    elif odd == "prefix":
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    elif odd == "stale index":                      # of other weights, beside the whole
        shelf.write_folder(folder, base, shelf.weights({**base, **sizes}, kind, 99), 2, **sizes)
    elif odd:
        tensors[f"model.{odd}"] = extra
    shards = 1 if odd == "stale index" else rng.choice([1, 2, 3])
    metadata = rng.choice([{"format": "pt"}, {"format": "pt", "config": "{}", "step": "x"}])
    changes = {key: rng.choice(KEYS[key]) for key in rng.sample(list(KEYS), rng.choice([0, 1, 1, 2, 3]))}
    shelf.write_folder(folder, base, tensors, shards, metadata=metadata, **{**sizes, **changes})
    return sizes, changes, odd, kind, shards


@parametrize("seed", CHANCE)
def test_a_folder_by_chance_gives_the_same_or_is_refused(folder, seed):
    print(random_folder(folder, random.Random(seed)))
    try:
        model, _ = checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False})
    except ValueError as error:
        print(error)
        return
    tokens = default_rng(seed).integers(0, model.config.vocab, (2, min(model.config.context, 20)))
    assert peers.distance(*both_logits(folder, model, tokens)) < 1e-5


# What tests/test_tokenizer.py has refused by name is not among these.
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLIT = {"type": "Split", "pattern": {"Regex": "[0-9]{1,3}"}, "behavior": "Isolated", "invert": False}
FLAGS = {"pre_tokenizer": [None, LEVEL, {**LEVEL, "use_regex": False}, {**LEVEL, "trim_offsets": False}, *[
             {"type": "Sequence", "pretokenizers": steps} for steps in (
                 [], [DIGITS], [DIGITS, LEVEL], [LEVEL, DIGITS], [LEVEL, LEVEL],
                 [{**DIGITS, "individual_digits": False}, LEVEL], [SPLIT, {**LEVEL, "use_regex": False}])]],
         "normalizer": [None, {"type": "Sequence", "normalizers": []}],
         "post_processor": [None, {**LEVEL, "add_prefix_space": True}, {"type": "Sequence", "processors": []}],
         "dropout": [0.0], "continuing_subword_prefix": [""], "end_of_word_suffix": [""], "fuse_unk": [True], "type": [None],
         "normalized": [True], "id": [7, 500]}


@parametrize("seed", CHANCE)
def test_a_tokenizer_by_chance_gives_the_same_ids_or_is_refused(tmp_path, seed):
    rng = random.Random(seed)
    found = json.loads(make_tokenizer(rng.random() < 0.8).to_str())
    extra = {**found["added_tokens"][0], "id": len(found["model"]["vocab"]), "content": "<extra>"}
    found["added_tokens"].append(extra)
    for key in rng.sample(list(FLAGS), rng.choice([0, 1, 1, 2])):
        place = next((part for part in (found["model"], extra) if key in part), found)
        place[key] = rng.choice(FLAGS[key])
        print(key, place[key])
    if rng.random() < 0.5:
        found["model"]["merges"] = [" ".join(merge) for merge in found["model"]["merges"]]
    shelf.write_json(tmp_path, "tokenizer.json", found)
    shelf.write_json(tmp_path, "config.json", {"model_type": "llama"})
    shelf.write_json(tmp_path, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    try:
        tokenizer = checkpoint.read_tokenizer(str(tmp_path))
    except ValueError as error:
        print(error)
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in peers.TEXTS.values():
        assert list(tokenizer.encode(text)) == theirs(text)["input_ids"], text
