"""model_cpu.py against judges that others wrote: PyTorch's autograd and AdamW, Hugging Face's Llama and tokenizer."""
import os
import shutil

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"     # read by transformers when it is imported

import numpy as np
import pytest
import torch
import torch_twin
import transformers
from transformers.models.llama import modeling_llama

import checkpoint
import model_cpu
from tokenizer import Tokenizer

CONFIG = model_cpu.Config(dim=64, heads=8, kv_heads=2, layers=3, context=80, vocab=96, predict=4, mtp_weight=0.3)
T = 70                                              # more than one block of attention's loop, no power of two


torch.set_num_threads(1)                            # on shared cores, threads of such small products only wait


def distance(a, b):
    """Relative L2."""
    a, b = [np.asarray(torch.as_tensor(x).detach(), np.float64) for x in (a, b)]
    assert a.shape == b.shape
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def make_model(std, threads=1):
    """Weights wide enough for every part to matter, gains near 1, all of them float32's, as PyTorch's twin takes them."""
    model = model_cpu.Model(CONFIG, threads=threads)
    rng = np.random.default_rng(0)
    for weight in model.params.values():
        weight[...] = (std * rng.standard_normal(weight.shape) + (weight.ndim == 1)).astype(np.float32)
    return model


def make_batch(seed):
    rng = np.random.default_rng(seed)
    tokens, targets = [rng.integers(0, CONFIG.vocab, (3, width)) for width in (T, T + CONFIG.predict - 1)]
    targets[0, 5:20] = -1
    targets[1, T - 10:] = -1                        # the end of a document: the later heads have fewer targets
    return tokens, targets


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch: autograd and AdamW, of the model in its terms and in float64
# ---------------------------------------------------------------------------------------------------------------------
def rope_frequencies(D):
    return 10000.0 ** -(torch.arange(0, D, 2).double() / D)


def twin_losses(twin, tokens, targets):
    """-> losses of the heads; leaves the gradient of the total loss in the twin.  RoPE's angles in float64."""
    angle = torch.cat([torch.arange(T)[:, None] * rope_frequencies(CONFIG.head_dim)] * 2, -1)
    tokens, targets = torch.from_numpy(tokens), torch.from_numpy(targets).unfold(1, T, 1).mT            # (B,T,K)
    losses = twin(tokens, targets, angle.cos(), angle.sin())
    (losses[0] + CONFIG.mtp_weight * losses[1:].mean()).backward()
    return losses.detach()


def worst_of(arrays, twin, part):
    return max(distance(array, part(twin.weights[name.replace(".", "_")])) for name, array in arrays.items())


@pytest.mark.parametrize("threads", [1, 2])
def test_loss_and_every_gradient_equal_autograd(threads):
    model, (tokens, targets) = make_model(0.15, threads), make_batch(seed=0)
    twin = torch_twin.Twin(CONFIG, model.params).double()
    assert distance(model.forward(tokens, targets), twin_losses(twin, tokens, targets)) < 1e-13
    model.backward()
    assert worst_of(model.grads, twin, lambda weight: weight.grad) < 1e-10


@pytest.mark.parametrize("precision, low, high", [("fp32", 1e-8, 1e-5), ("bf16", 1e-3, 5e-2)])
def test_the_gradient_that_bench_asks_for(precision, low, high):
    model, (tokens, targets) = make_model(0.05), make_batch(seed=0)
    model.forward(tokens, targets)
    model.backward()
    assert low < distance(torch_twin.gradient(model, tokens, targets, precision, "cpu"), model.flat_grads) < high


def test_twenty_steps_track_adamw():
    """With and without clipping."""
    model, clip, norms = make_model(0.05), 2.0, []
    twin = torch_twin.Twin(CONFIG, model.params).double()
    groups = [{"params": [w for w in twin.parameters() if w.ndim == ndim], "weight_decay": decay}
              for ndim, decay in ((2, 0.1), (1, 0.0))]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(20):
        lr, batch = 1e-2 * (step + 1) / 20, make_batch(seed=step % 4)
        losses = model.forward(*batch)
        model.backward()
        norms.append(model.update(lr, clip=clip))
        optimizer.zero_grad()
        assert distance(losses, twin_losses(twin, *batch)) < 1e-9
        assert norms[-1] == pytest.approx(float(torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)), rel=1e-9)
        for group in groups:
            group["lr"] = lr
        optimizer.step()
    assert worst_of(model.params, twin, lambda weight: weight) < 1e-9
    assert min(norms) < clip < max(norms) and losses[0] < 4.0           # it moved: ln 96 = 4.56


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face: our checkpoint folder as it is
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of the small model with random float32 weights: matrices thrice as wide as at the start, gains 0.8 to 1.2."""
    path = str(tmp_path_factory.mktemp("checkpoint"))
    model = model_cpu.Model(model_cpu.CONFIGS["small"], dtype=np.float32)
    rng = np.random.default_rng(0)
    for weight in model.params.values():
        weight *= 3 if weight.ndim == 2 else rng.uniform(0.8, 1.2, weight.shape)
    text = " the cat's mat, we'll see; déjà vu! Grüße\n\tan alle, 猫 and dog. " * 20 + str(list(range(300)))
    checkpoint.save(path, model, Tokenizer.train([text], 400), {})
    return path


def load_llama(folder, dtype):
    llama, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) <= {"mtp_heads.weight"}     # the heads that Llama does not have
    assert isinstance(llama, transformers.LlamaForCausalLM)
    return llama.eval()


def test_what_llama_saves_of_ours_loads_with_one_head(folder, tmp_path, capfd):
    """from_pretrained drops mtp_heads.weight, which config.json still counts."""
    load_llama(folder, torch.float32).save_pretrained(tmp_path)
    shutil.copy(f"{folder}/tokenizer.json", tmp_path)
    (model, _), (ours, _) = [checkpoint.load(str(path), model_cpu) for path in (tmp_path, folder)]
    tokens = np.arange(20)[None]
    assert model.config.predict == 1 and distance(model.logits(tokens), ours.logits(tokens)[:, :, :1]) < 1e-12
    assert f"{tmp_path} has no mtp_heads.weight" in capfd.readouterr().err


class Rotary64(modeling_llama.LlamaRotaryEmbedding):
    """Its cosines and sines of angles in float64."""
    def forward(self, x, position_ids):
        D = self.config.head_dim
        frequency = self.config.rope_parameters["rope_theta"] ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
        angle = torch.cat([position_ids[..., None] * frequency] * 2, -1)
        return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype, most", [("float32", 1e-6), ("float64", 1e-10)])
def test_llama_computes_the_logits_of_head_0(folder, monkeypatch, dtype, most):
    """In float64 throughout to ten digits; its own norms and RoPE are in float32."""
    if dtype == "float64":
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", torch.nn.RMSNorm)
        monkeypatch.setattr(modeling_llama, "LlamaRotaryEmbedding", Rotary64)
    tokens = np.random.default_rng(1).integers(0, 512, (3, 128))
    model, _ = checkpoint.load(folder, model_cpu, {"dtype": dtype})
    theirs = load_llama(folder, getattr(torch, dtype))(torch.from_numpy(tokens)).logits
    assert distance(model.logits(tokens)[:, :, 0], theirs) < most


# ---------------------------------------------------------------------------------------------------------------------
# The twin of tests/bench.py
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_of_the_twin_track_ours(optimizer):
    """In float64.  What compiles before leaves no trace."""
    model = model_cpu.Model(CONFIG, optimizer=optimizer)
    model.write(model.flat_params, make_model(0.05).flat_params)
    twin = torch_twin.Twin(CONFIG, model.params).double()
    step = torch_twin.Step(twin, compiled=False, optimizer=optimizer)
    batches = [[make_batch(seed), [torch.from_numpy(part) for part in make_batch(seed)]] for seed in range(4)]
    step.warm_up(*batches[3][1])
    for i, (ours, theirs) in enumerate(batches):
        losses = model.forward(*ours)
        model.backward()
        model.update(1e-2 * (i + 1))
        assert distance(losses, step(*theirs, 1e-2 * (i + 1))) < 1e-6
    assert worst_of(model.params, twin, lambda weight: weight) < 1e-5       # RoPE's tables are float32


def test_the_hardest_twin_computes_the_same_in_bf16():
    """Its whole residual stream is bf16, so its gradient is further off than that of the plain one."""
    model = make_model(0.05)
    tokens, targets = make_batch(seed=0)
    model.forward(tokens, targets)
    model.backward()
    hardest, plain = [distance(torch_twin.gradient(model, tokens, targets, "bf16", "cpu", hardest), model.flat_grads)
                      for hardest in (True, False)]
    assert plain < hardest < 5e-2


@pytest.mark.parametrize("whole", [False, True])
def test_the_twin_decodes_what_it_computes_at_once(whole):
    """Token by token with a KV cache.  whole: attention reads all of the cache, masked, as in a CUDA graph."""
    model, (tokens, _) = make_model(0.15), make_batch(seed=0)
    twin = torch_twin.Twin(CONFIG, model.params).double()
    tables = torch_twin.tables(CONFIG, CONFIG.context)
    cache, rows = twin.empty_cache(), []
    for positions in torch.arange(T).split([30, *[1] * (T - 32), 2]):
        seen = None if whole else positions[-1] + 1
        rows.append(twin.decode(torch.from_numpy(tokens[:1])[:, positions], positions, *tables, cache, seen))
    assert distance(torch.cat(rows, 1), model.logits(tokens[:1])[:, :, 0]) < 1e-6       # its tables are float32
