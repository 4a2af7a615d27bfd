"""Other people's models: Llama folders that transformers writes, with random weights in the shapes of published ones,
give what transformers computes from them; the gradients are autograd's; what we save of them transformers reads again.

In bf16, fp16 and fp32, whole and in shards, tied and not, with config.json in today's spelling and in that of the
folders that were published some years ago.  tests/test_shelf.py has what is refused, and needs no PyTorch."""
import copy
import json
import os
import random

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"     # read by transformers when it is imported

import numpy as np
import pytest
import test_model_peers as peers
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from test_shelf import CHATML, GONE, NEW as NEW_CONFIG, OLD, SMOL_SPECIAL, SMOL_TEMPLATE, read_tensor_file, value, weights, write_folder
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.models.llama import modeling_llama

import checkpoint
import model_cpu
import model_gpu
import sft

PROMPT, NEW = [5, 17, 40], 50
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMOL = {"vocab_size": 49152, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
PUBLISHED = {                                       # F, L, H and G of SmolLM2-360M: 2560, 32, 15, 5
    "SmolLM-135M": {**SMOL, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                    "num_key_value_heads": 3, "max_position_embeddings": 2048, "theta": 1e4},
    "SmolLM2-135M": {**SMOL, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "max_position_embeddings": 8192, "theta": 1e5},
    "SmolLM2-360M": {**SMOL, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
                     "num_key_value_heads": 5, "max_position_embeddings": 8192, "theta": 1e5}}
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 200, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "theta": 3e5, "rms_norm_eps": 3e-6, "tie_word_embeddings": True}


def cut(name, layers):
    return {**PUBLISHED[name], "num_hidden_layers": layers}


# name: (sizes, dtype of the file, largest shard or None, spelling of config.json, context to load with, width of the weights:
# wide enough for a greedy text of many ids, and no wider, as the rounding errors of all layers grow with it)
CASES = {
    "SmolLM-135M, 3 layers": (cut("SmolLM-135M", 3), "bf16", "20MB", "new", 128, 0.9),
    "SmolLM2-135M, 4 layers": (cut("SmolLM2-135M", 4), "fp32", None, "old", None, 0.9),
    "SmolLM2-360M, 2 layers": (cut("SmolLM2-360M", 2), "bf16", "50MB", "old", 128, 0.9),
    "untied": ({**SMALL, "tie_word_embeddings": False}, "bf16", None, "new", None, 1.5),
    "untied, in shards": ({**SMALL, "tie_word_embeddings": False, "num_attention_heads": 2}, "fp32", "200KB", "old", 100, 1.5),
    "half": ({**SMALL, "num_key_value_heads": 4}, "fp16", "100KB", "new", 160, 1.5),
    "SmolLM2-135M, whole": (PUBLISHED["SmolLM2-135M"], "bf16", None, "old", 128, 0.85)}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """One thread, as in the other file: the cores are shared with others; and no progress bars."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------------------------
# Folders as others write them
# ---------------------------------------------------------------------------------------------------------------------
def write_llama(folder, sizes, dtype="fp32", shard=None, spelling="new", width=1.0, seed=0):
    """transformers writes a model with random weights: matrices of the standard deviation width / sqrt(C), so that each layer
    adds to the residual stream as much as there is and a greedy text does not repeat itself; gains near 1."""
    sizes = dict(sizes)
    rope = {"rope_type": "default", "rope_theta": sizes.pop("theta")}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):                      # no memory, and no initial values to wait for
        llama = transformers.LlamaForCausalLM(config)
    rng, weights = np.random.default_rng(seed), {}
    for name, parameter in llama.named_parameters():
        values = rng.random(tuple(parameter.shape), np.float32)     # uniform: drawn thrice as fast as normal
        values -= 0.5
        values *= 12 ** 0.5 * (0.1 if values.ndim == 1 else width * config.hidden_size ** -0.5)
        values += values.ndim == 1
        weights[name] = torch.from_numpy(values).to(DTYPES[dtype])
    llama.load_state_dict(weights, assign=True, strict=not config.tie_word_embeddings)
    llama.tie_weights()
    llama.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    if spelling == "old":
        edit_config(folder, respell)
    tokenizer = make_tokenizer()
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False, "eos_token": "<|im_end|>",
                   "chat_template": SMOL_TEMPLATE}, file)


def respell(config):
    """config.json as SmolLM2's, of version 4.40."""
    del config["head_dim"], config["mlp_bias"]
    config.update(rope_theta=config.pop("rope_parameters")["rope_theta"], rope_scaling=None, rope_interleaved=False,
                  torch_dtype=config.pop("dtype"), is_llama_config=True, transformers_version="4.40.1")


def edit_config(folder, change):
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    change(config)
    with open(path, "w") as file:
        json.dump(config, file, indent=2)


def make_tokenizer(alphabet=True):
    """Digits one by one, then GPT-2's words; the special tokens in front.  alphabet: with all the 256 bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SMOL_SPECIAL, initial_alphabet=letters, show_progress=False)
    texts = [" the cat's mat, we'll see 1234 of them; user system assistant\n" * 5, *peers.TEXTS.values(), SMOL_TEMPLATE] * 2
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture(scope="module", params=CASES)
def judged(request, tmp_path_factory):
    """-> (case, folder, tokens (B,T), transformers' logits of them, its greedy text after PROMPT), all in float32."""
    sizes, dtype, shard, spelling, _, width = CASES[request.param]
    folder = str(tmp_path_factory.mktemp("foreign"))
    write_llama(folder, sizes, dtype, shard, spelling, width)
    tokens = np.random.default_rng(1).integers(0, sizes["vocab_size"], (2, 48))
    llama = peers.load_llama(folder, torch.float32)
    llama.generation_config.eos_token_id = None
    with torch.no_grad():
        logits = llama(torch.from_numpy(tokens)).logits.numpy()
        text = llama.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False,
                              attention_mask=torch.ones((1, len(PROMPT)), dtype=torch.long))[0, len(PROMPT):].tolist()
    del llama
    yield request.param, folder, tokens, logits, text
    for name in os.listdir(folder):                 # hundreds of megabytes
        os.remove(os.path.join(folder, name))


def test_the_folders_are_what_they_should_be(judged):
    """Else the tests below would show nothing."""
    name, folder, _, logits, text = judged
    sizes, dtype, shard, spelling, _, _ = CASES[name]
    found = json.load(open(os.path.join(folder, "config.json")))
    old, new = {"torch_dtype", "rope_theta", "rope_scaling"}, {"dtype", "rope_parameters", "head_dim"}
    assert (old if spelling == "old" else new) <= set(found) and not (new if spelling == "old" else old) & set(found)
    names = [n for n in sorted(os.listdir(folder)) if n.endswith(".safetensors")]
    assert ("model.safetensors.index.json" in os.listdir(folder)) == bool(shard) == (len(names) > 1)
    assert bool(shard) or names == ["model.safetensors"]
    tensors = {}
    for file in names:
        header = read_tensor_file(os.path.join(folder, file))[0]
        assert header.pop("__metadata__") == {"format": "pt"}       # no checksum of ours
        assert not set(header) & set(tensors)
        tensors.update(header)
    assert {entry["dtype"] for entry in tensors.values()} == {{"bf16": "BF16", "fp16": "F16", "fp32": "F32"}[dtype]}
    tied = sizes["tie_word_embeddings"]
    assert len(tensors) == 9 * sizes["num_hidden_layers"] + 3 - tied and ("lm_head.weight" in tensors) != tied
    assert found["tie_word_embeddings"] == tied and found["max_position_embeddings"] == sizes["max_position_embeddings"]
    assert len(text) == NEW and len(set(text)) >= 20 and 0.6 < logits.std() < 3


# ---------------------------------------------------------------------------------------------------------------------
# What they compute
# ---------------------------------------------------------------------------------------------------------------------
ENGINES = {"cpu": (model_cpu, {"dtype": np.float32}), "gpu": (model_gpu, {"precision": "fp32"})}


@pytest.fixture(scope="module")
def loaded(judged):
    """-> load(name of an engine): (model, tokenizer) of the folder, in float32; the same one each time."""
    name, folder, *_ = judged
    found, context = {}, CASES[name][4]
    more = {} if context is None else {"context": context}

    def load(engine):
        if engine == "gpu" and (reason := model_gpu.why_no_gpu()):
            pytest.skip(reason)
        if engine not in found:
            module, options = ENGINES[engine]
            found[engine] = checkpoint.load(folder, module, {**options, "training": False}, **more)
        return found[engine]
    yield load
    found.clear()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_config_is_theirs(judged, loaded, engine):
    sizes, _, _, _, context, _ = CASES[judged[0]]
    model, tokenizer = loaded(engine)
    config, positions = model.config, sizes["max_position_embeddings"]
    expected = {"dim": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "hidden": "intermediate_size",
                "layers": "num_hidden_layers", "vocab": "vocab_size", "norm_eps": "rms_norm_eps", "rope_theta": "theta",
                "tied": "tie_word_embeddings"}
    assert {mine: getattr(config, mine) for mine in expected} == {mine: sizes[key] for mine, key in expected.items()}
    assert config.predict == 1 and config.context == (context or positions) and (config.positions or config.context) == positions
    assert (model.params["heads"] is model.params["embed"]) == sizes["tie_word_embeddings"]
    assert ("heads" in dict(model_cpu.param_table(config))) != sizes["tie_word_embeddings"]
    assert tokenizer.vocab_size < config.vocab      # fewer tokens than rows


@pytest.mark.parametrize("engine", ENGINES)
def test_logits_are_those_of_transformers(judged, loaded, engine):
    name, _, tokens, theirs, _ = judged
    found = loaded(engine)[0].logits(tokens)[:, :, 0]
    print(f"{name}: {peers.distance(found, theirs):.1e}")
    assert peers.distance(found, theirs) < 3e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_texts_are_those_of_transformers(judged, loaded, engine):
    """Token by token with the cache; and in one forward, in which each position's best is the next token: what is best at a
    position depends on what stands before it alone, so this is what growing forwards would give."""
    model, text = loaded(engine)[0], judged[-1]
    assert list(model_cpu.generate(model, PROMPT, temperature=0, most=NEW)) == text
    whole = np.array([PROMPT + text[:-1]])
    assert model.logits(whole)[0, len(PROMPT) - 1:, 0].argmax(axis=-1).tolist() == text
    if model.config.vocab <= 1024:                  # else slow: growing forwards indeed
        grown = list(PROMPT)
        for _ in range(NEW):
            grown.append(int(model.logits(np.array([grown]))[0, -1, 0].argmax()))
        assert grown[len(PROMPT):] == text


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "foreign")


@pytest.mark.parametrize("spelling", ["new", "old"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_config_does_not_say_is_what_transformers_takes(folder, spelling, tied):
    """Of config.json only the sizes are left."""
    write_llama(folder, {**SMALL, "num_key_value_heads": 4, "theta": 1e4, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
                         "tie_word_embeddings": tied}, "fp32", spelling=spelling)
    kept = {"architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
    kept |= {"tie_word_embeddings"} if tied else set()

    def change(config):
        for key in set(config) - kept:
            del config[key]
    edit_config(folder, change)
    tokens = np.random.default_rng(2).integers(0, SMALL["vocab_size"], (1, 60))
    with torch.no_grad():
        theirs = peers.load_llama(folder, torch.float32)(torch.from_numpy(tokens)).logits
    model, _ = checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False})
    assert peers.distance(model.logits(tokens)[:, :, 0], theirs) < 3e-6
    assert (model.config.positions or model.config.context) == 2048 and model.config.tied == tied


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------
def theirs_by_our_names(llama, layers):
    """-> {our name: PyTorch's gradient}: of q, k, v and of gate, up one below the other."""
    grads = {name: parameter.grad for name, parameter in llama.named_parameters()}
    found = {"embed": grads["model.embed_tokens.weight"], "norm": grads["model.norm.weight"]}
    for i in range(layers):
        layer = {name.removeprefix(f"model.layers.{i}."): grad for name, grad in grads.items()}
        for mine, parts in {"qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "out": ["self_attn.o_proj"],
                            "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"],
                            "norm1": ["input_layernorm"], "norm2": ["post_attention_layernorm"]}.items():
            found[f"layers.{i}.{mine}"] = torch.cat([layer[f"{part}.weight"] for part in parts])
    if "lm_head.weight" in grads:
        found["heads"] = grads["lm_head.weight"]
    return found


def autograd(llama, tokens, targets):
    """-> the loss; its gradients are then in llama."""
    logits = llama(torch.from_numpy(tokens)).logits
    loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), ignore_index=-1)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_every_gradient_is_autograds(folder, monkeypatch, tied, threads):
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", peers.Norm64)
    monkeypatch.setattr(modeling_llama, "LlamaRotaryEmbedding", peers.Rotary64)
    write_llama(folder, {**SMALL, "tie_word_embeddings": tied, "theta": 700.0, "rms_norm_eps": 1e-3}, "bf16", "100KB")
    model, _ = checkpoint.load(folder, model_cpu, {"dtype": np.float64, "threads": threads})
    llama = peers.load_llama(folder, torch.float64)
    rng = np.random.default_rng(3)
    tokens, targets = rng.integers(0, 512, (3, 70)), rng.integers(0, 512, (3, 70))
    targets[0, 5:20], targets[2, 60:] = -1, -1
    expected, losses = autograd(llama, tokens, targets), model.forward(tokens, targets)
    model.backward()
    assert losses.shape == (1,) and abs(losses[0] / expected - 1) < 1e-12
    theirs = theirs_by_our_names(llama, SMALL["num_hidden_layers"])
    assert set(theirs) == set(dict(model_cpu.param_table(model.config))) and ("heads" in theirs) != tied
    errors = {name: float(np.abs(model.grads[name] - grad.numpy()).max() / grad.abs().max()) for name, grad in theirs.items()}
    worst = max(errors, key=errors.get)
    print(f"loss {expected:.3f}, worst gradient {worst} {errors[worst]:.1e}")
    assert errors[worst] < 1e-10, errors
    if not tied:
        return
    apart = copy.deepcopy(llama)                    # the same weights, but the two uses of the matrix by themselves
    apart.zero_grad()
    apart.lm_head.weight = torch.nn.Parameter(llama.lm_head.weight.detach().clone())
    autograd(apart, tokens, targets)
    read, predicted = apart.model.embed_tokens.weight.grad.numpy(), apart.lm_head.weight.grad.numpy()
    size = np.abs(read + predicted).max()
    assert np.abs(model.grads["embed"] - (read + predicted)).max() < 1e-10 * size
    assert min(np.abs(read).max(), np.abs(predicted).max()) > 1e-3 * size       # neither is lost in the other


# ---------------------------------------------------------------------------------------------------------------------
# There and back
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tied, dtype, shard, spelling", [(True, "bf16", None, "new"), (True, "fp16", "100KB", "old"),
                                                          (False, "bf16", "100KB", "new"), (False, "fp32", None, "old")])
def test_transformers_loads_what_we_save(folder, tmp_path, tied, dtype, shard, spelling):
    """As it was loaded, and after a step of training on it."""
    write_llama(folder, {**SMALL, "tie_word_embeddings": tied}, dtype, shard, spelling)
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32}, context=64)
    rng, out = np.random.default_rng(4), str(tmp_path / "out")
    tokens = rng.integers(0, 512, (2, 60))
    with torch.no_grad():
        before = peers.load_llama(folder, torch.float32)(torch.from_numpy(tokens)).logits
    for step in range(2):
        checkpoint.save(out, model, tokenizer, {})
        found = json.load(open(os.path.join(out, "config.json")))
        header = read_tensor_file(os.path.join(out, "model.safetensors"))[0]
        assert found["tie_word_embeddings"] is tied and ("lm_head.weight" in header) != tied
        assert found["max_position_embeddings"] == SMALL["max_position_embeddings"] != model.config.context == 64
        llama = peers.load_llama(out, torch.float32)
        assert (llama.lm_head.weight.data_ptr() == llama.model.embed_tokens.weight.data_ptr()) == tied
        with torch.no_grad():
            theirs = llama(torch.from_numpy(tokens)).logits
        mine = model.logits(tokens)[:, :, 0]
        assert peers.distance(mine, theirs) < 3e-6
        assert (peers.distance(theirs, before) == 0) == (step == 0)     # every bit of the weights, until they are trained
        again, _ = checkpoint.load(out, model_cpu, {"dtype": np.float32})
        assert np.array_equal(again.params["embed"], model.params["embed"]) and again.config.tied == tied
        assert peers.distance(again.logits(tokens)[:, :, 0], mine) < 1e-6
        model.forward(tokens, rng.integers(0, 512, (2, 60)))
        model.backward()
        model.update(lr=1e-3)


def test_the_tokenizer_comes_along(folder, tmp_path):
    """The ids of its texts are those of AutoTokenizer in the folder that we loaded, and in the one that we saved."""
    write_llama(folder, SMALL)
    out = str(tmp_path / "out")
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32})
    checkpoint.save(out, model, tokenizer, {})
    for theirs in map(transformers.AutoTokenizer.from_pretrained, (folder, out)):
        assert tokenizer.special == {name: i for i, name in enumerate(SMOL_SPECIAL)} and len(theirs) == tokenizer.vocab_size
        for text in peers.TEXTS.values():
            assert list(tokenizer.encode(text)) == theirs(text, add_special_tokens=False)["input_ids"], text


def test_a_fine_tuned_one_keeps_its_chat_template(folder, tmp_path):
    """So that transformers asks it as sft.py did, and stops where it does."""
    write_llama(folder, SMALL)
    out = str(tmp_path / "out")
    model, tokenizer = checkpoint.load(folder, model_cpu, {"dtype": np.float32})
    checkpoint.save(out, model, tokenizer, {}, chat=True)
    again, theirs = checkpoint.read_tokenizer(out), transformers.AutoTokenizer.from_pretrained(out)
    asked = theirs.apply_chat_template([{"role": "user", "content": "What?"}], add_generation_prompt=True, return_dict=False)
    assert again.prompt("What?") == tokenizer.prompt("What?") == asked and again.template == tokenizer.template
    assert theirs.eos_token == "<|im_end|>" and peers.load_llama(out, torch.float32).config.eos_token_id == again.end_of_turn == 2


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("template, default", [(SMOL_TEMPLATE, True), (CHATML, False)])
def test_prompts_are_those_of_the_chat_template(folder, where, template, default):
    """Of both places where transformers keeps it: the second is where it writes it today."""
    write_llama(folder, SMALL)
    if where == "chat_template.jinja":
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), eos_token="<|im_end|>")
        theirs.chat_template = template
        theirs.save_pretrained(folder)
        make_tokenizer().save(os.path.join(folder, "tokenizer.json"))
        assert where in os.listdir(folder) and "chat_template" not in json.load(open(os.path.join(folder, "tokenizer_config.json")))
    else:
        with open(os.path.join(folder, where), "w") as file:
            json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}, file)
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), checkpoint.read_tokenizer(folder)
    assert theirs.chat_template == template and tokenizer.template and tokenizer.end_of_turn == SMOL_SPECIAL.index("<|im_end|>")

    def asked(*messages):
        return theirs.apply_chat_template([{"role": role, "content": text} for role, text in messages], add_generation_prompt=True,
                                          return_dict=False)
    for text in ["What is a cat?", *peers.TEXTS.values()]:
        first = asked(("user", text))
        assert tokenizer.prompt(text) == first
        assert default == (tokenizer.tokens[first[1]] != tokenizer.tokens[tokenizer.encode("user\n")[0]])
        assert tokenizer.prompt(text, system=b"Be brief.") == asked(("system", "Be brief."), ("user", text))
        answer = [*tokenizer.encode("An animal."), tokenizer.end_of_turn]
        both = asked(("user", "What?"), ("assistant", "An animal."), ("user", text))
        assert tokenizer.prompt("What?") + answer + tokenizer.prompt(text, first=False) == both
        for system in [], [("system", "Be brief.\n")]:
            said = [{"role": role, "content": content} for role, content in [
                *system, ("user", text), ("assistant", "An animal."), ("user", "Why?"), ("assistant", text + "!")]]
            ids, mask, cut = sft.make_example(tokenizer, sft.make_turns({"messages": said}), 1 << 20)
            whole = theirs.apply_chat_template(said, return_dict=False)
            assert ids.tolist() + tokenizer.encode("\n") == whole and not cut      # the line end is of the next turn
            assert ids[mask].tolist() == [*answer, *tokenizer.encode(text + "!"), tokenizer.end_of_turn]


def test_a_tokenizer_that_lacks_some_bytes(folder):
    """As the library trains it without an alphabet: of a byte that it never saw it makes no id."""
    write_llama(folder, SMALL)
    theirs = make_tokenizer(alphabet=False)
    theirs.save(os.path.join(folder, "tokenizer.json"))
    tokenizer = checkpoint.read_tokenizer(folder)
    assert len([token for token in range(256) if bytes([token]) not in tokenizer.tokens]) > 50
    for text in [*peers.TEXTS.values(), "\x00a\x01b ÿ", "q\u2fff the cat"]:
        assert list(tokenizer.encode(text)) == theirs.encode(text, add_special_tokens=False).ids, text


# ---------------------------------------------------------------------------------------------------------------------
# Folders by chance: RANDOM_FOLDERS=400 pytest -k chance
# ---------------------------------------------------------------------------------------------------------------------
ROPES = [GONE, None, {}, {"type": "default"}, {"rope_type": "default", "rope_theta": 77.0}, {"rope_theta": 300}, {"type": "linear", "factor": 2.0},
         {"full_attention": {"rope_type": "default", "rope_theta": 77.0}}, {"rope_type": "dynamic", "factor": 2.0},
         {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8},
         {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8}, {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}]
KEYS = {"rope_scaling": ROPES, "rope_parameters": ROPES, "rope_theta": [GONE, 50, 1e6], "rms_norm_eps": [GONE, 0.5, 0.0, "1e-5"],
        "hidden_act": [GONE, "swish", "gelu", "relu"], "head_dim": [GONE, None, 4, 8, 16], "num_key_value_heads": [GONE, None, 1, 8],
        "attention_bias": [GONE, True], "mlp_bias": [GONE, True], "tie_word_embeddings": [GONE, False, True],
        "max_position_embeddings": [GONE, 8, 24], "pretraining_tp": [2, None], "sliding_window": [None, 0, 4], "context": [8, 20],
        "partial_rotary_factor": [1.0, 0.5], "use_qk_norm": [False, True], "logits_scaling": [2.0], "embedding_multiplier": [3.0],
        "residual_multiplier": [0.5], "attention_multiplier": [0.1], "final_logit_softcapping": [1.0], "logit_scale": [0.1], "clip_qkv": [0.1],
        "qkv_bias": [True], "rope_interleaved": [True], "mtp_heads": [0, 2], "mtp_weight": [0.1, "x"], "model_type": ["mistral", "qwen2"],
        "architectures": [GONE, ["LlamaModel"]], "torch_dtype": ["float16"], "dtype": ["bfloat16"], "num_hidden_layers": [1, 4],
        "vocab_size": [280], "norm_eps": [0.3], "theta": [3.0], "is_causal": [True, False], "is_decoder": [False], "is_encoder_decoder": [True],
        "attn_implementation": ["eager"], "rope_type": ["linear"], "type": ["yarn"], "factor": [2.0], "attention_chunk_size": [4],
        "use_bidirectional_attention": [True], "num_experts": [4], "tie_encoder_decoder": [True], "add_cross_attention": [True]}


def random_folder(folder, rng):
    """Write one -> what was changed."""
    heads = rng.choice([1, 2, 4, 8])
    sizes = {"hidden_size": heads * rng.choice([4, 8, 16]), "intermediate_size": rng.choice([8, 40]), "num_hidden_layers": rng.choice([1, 2, 3]),
             "num_attention_heads": heads, "num_key_value_heads": rng.choice([n for n in (1, 2, 4, 8) if heads % n == 0]),
             "tie_word_embeddings": rng.random() < 0.5, "head_dim": GONE}
    sizes["hidden_size"] += -sizes["hidden_size"] % 8
    sizes["hidden_size"] *= 1 + (sizes["hidden_size"] % heads > 0)
    changes = {key: rng.choice(KEYS[key]) for key in rng.sample(list(KEYS), rng.choice([0, 1, 1, 2, 3]))}
    base = rng.choice([OLD, NEW_CONFIG])
    kind = rng.choice(["BF16", "F16", "F32"])
    tensors = weights({**base, **sizes}, kind, rng.randrange(1000))
    odd = rng.choice([None] * 8 + ["buffer", "head", "other head", "bias", "layer", "mixed", "transposed", "missing", "prefix", "stale index"])
    name = rng.choice([name for name in tensors if tensors[name][1].ndim == 2])
    if odd == "buffer":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = "F32", np.ones(4, np.float32)
    elif odd == "head":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    elif odd == "other head":
        tensors["lm_head.weight"] = weights({**base, **sizes}, kind, 7)["model.embed_tokens.weight"]
    elif odd == "bias":
        tensors["model.layers.0.self_attn.q_proj.bias"] = "F32", np.ones(sizes["hidden_size"], np.float32)
    elif odd == "layer":
        tensors["model.layers.7.input_layernorm.weight"] = "F32", np.ones(sizes["hidden_size"], np.float32)
    elif odd == "mixed":
        tensors[name] = "F32", value(tensors[name]).astype(np.float32)
    elif odd == "transposed":
        tensors[name] = tensors[name][0], tensors[name][1].T
    elif odd == "missing":
        del tensors[name]
    elif odd == "prefix":
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    elif odd == "stale index":
        write_folder(folder, base, weights({**base, **sizes}, kind, 99), 2, **sizes)
    shards = 1 if odd == "stale index" else rng.choice([1, 1, 2, 3])
    metadata = rng.choice([{"format": "pt"}, {"format": "pt"}, {"format": "pt", "config": "{}", "step": "x"}])
    write_folder(folder, base, tensors, shards, metadata=metadata, **{**sizes, **changes})
    return f"{sizes} {changes} {odd} {kind} {shards}"


CHANCE = range(int(os.environ.get("RANDOM_FOLDERS", 12)))


@pytest.mark.parametrize("seed", CHANCE)
def test_a_folder_by_chance_gives_the_same_or_is_refused(folder, seed):
    what = random_folder(folder, random.Random(seed))
    try:
        model, _ = checkpoint.load(folder, model_cpu, {"dtype": np.float32, "training": False})
    except ValueError as error:
        print(what, error)
        return
    tokens = np.random.default_rng(seed).integers(0, model.config.vocab, (2, min(model.config.context, 20)))
    with torch.no_grad():
        theirs = peers.load_llama(folder, torch.float32)(torch.from_numpy(tokens)).logits
    assert peers.distance(model.logits(tokens)[:, :, 0], theirs) < 1e-5, what


LEVEL, DIGITS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}, {"type": "Digits", "individual_digits": True}
FLAGS = {"pre_tokenizer": [None, LEVEL, {**LEVEL, "use_regex": False}, {**LEVEL, "trim_offsets": False}, {"type": "Whitespace"}, *[
             {"type": "Sequence", "pretokenizers": steps} for steps in (
                 [], [DIGITS], [DIGITS, LEVEL], [LEVEL, DIGITS], [LEVEL, LEVEL], [{**DIGITS, "individual_digits": False}, LEVEL],
                 [{"type": "Split", "pattern": {"Regex": "[0-9]{1,3}"}, "behavior": "Isolated", "invert": False}, {**LEVEL, "use_regex": False}])]],
         "normalizer": [None, {"type": "NFC"}, {"type": "Lowercase"}, {"type": "Sequence", "normalizers": []}],
         "post_processor": [None, {**LEVEL, "add_prefix_space": True}, {"type": "Sequence", "processors": []}],
         "dropout": [0.0, 0.9], "unk_token": ["a"], "continuing_subword_prefix": ["", "x"], "end_of_word_suffix": ["", "w"],
         "fuse_unk": [True], "byte_fallback": [True], "ignore_merges": [True], "type": [None, "WordPiece"],
         "special": [False], "normalized": [True], "id": [7, 500]}


@pytest.mark.parametrize("seed", CHANCE)
def test_a_tokenizer_by_chance_gives_the_same_ids_or_is_refused(tmp_path, seed):
    rng = random.Random(seed)
    found = json.loads(make_tokenizer(rng.random() < 0.8).to_str())
    found["added_tokens"].append({"id": len(found["model"]["vocab"]), "content": "<extra>", "single_word": False, "lstrip": False,
                                  "rstrip": False, "normalized": False, "special": True})
    for key in rng.sample(list(FLAGS), rng.choice([0, 1, 1, 2])):
        place = next((part for part in (found["model"], found["added_tokens"][-1]) if key in part), found)
        place[key] = rng.choice(FLAGS[key])
        print(key, place[key])
    if rng.random() < 0.5:
        found["model"]["merges"] = [" ".join(merge) for merge in found["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    try:
        tokenizer = checkpoint.read_tokenizer(str(tmp_path))
    except ValueError as error:
        print(error)
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in peers.TEXTS.values():
        assert list(tokenizer.encode(text)) == theirs(text)["input_ids"], text
