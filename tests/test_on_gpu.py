"""The GPU engine on a GPU, but for its gradients, which `python gradcheck.py --gpu` compares: attention at every length
and shape, our products, cached decoding, Muon, generation, memory that is short.

    python -m pytest -s tests/test_on_gpu.py          # -s prints each error beside its bar; without a GPU all is skipped
    HOPPER=0 python -m pytest -s tests/test_on_gpu.py # on a Hopper: what a GeForce RTX 30 or 40 runs

The judge is model_cpu in float64 or, to the bit, the engine itself when it computes in another way. What runs on the CPU
instead: the kernels in test_kernels.py, test_flash.py and test_model_gpu.py."""
import math
import os
import unittest.mock

import numpy as np
import pytest

import model_cpu
import model_gpu
from cuda_helpers import stored, value
from gradcheck import GPU_BARS, GPU_CONFIG, distance, make_problem, whole_step

NO_GPU = model_gpu.why_no_gpu()
pytestmark = [pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU)), pytest.mark.slow]

PRECISIONS = ("fp32", "tf32", "bf16") if NO_GPU or model_gpu.default_precision() == "bf16" else ("fp32",)
LENGTHS = (1, 2, 63, 64, 65, 127, 137, 512, 1000, 2048)
ATTENTION_BARS = {"fp32": 2e-6, "tf32": 2e-3, "bf16": 1e-2}     # of the output, and of the gradient
MUON_BARS = {"fp32": 1e-4, "tf32": 8e-2, "bf16": 8e-2}          # of what a step moves a matrix by


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setattr(model_gpu, "HOPPER", os.environ.get("HOPPER") != "0")


def within(error, bar, what):
    """Print the error beside its bar, and fail if it is above, or not a number."""
    print(f"  {what:36} {error:.2e}   bar {bar:.0e}", flush=True)
    assert error <= bar, what


def on_gpu(reference, **options):
    """The GPU's model with the weights of the reference."""
    model = model_gpu.Model(reference.config, **options)
    model.write(model.flat_params, reference.flat_params)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention(precision, D, group):
    """flash = attention as it is defined, at every length, head width and group (H/G) that the kernels claim, both
    ways."""
    config = model_cpu.Config(2 * group * D, 2 * group, kv_heads=2, layers=1, context=2048, vocab=8)
    gpu = model_gpu.Gpu(config, precision, "cublas")
    errors = [attention_errors(gpu, B=2 if T < 1000 else 1, T=T) for T in LENGTHS]
    for name, error in zip(("output", "gradient"), np.max(errors, axis=0)):                # NaN, if one is
        within(error, ATTENTION_BARS[precision], f"{precision} D {D} H/G {group} {name}, the worst T")


def attention_errors(gpu, B, T):
    """-> (error of the output, error of dqkv, which is that of q and k before RoPE) of the GPU's attention at (B,T)."""
    cupy, c, rng = model_gpu.cupy, gpu.config, np.random.default_rng(T)

    gpu_qkv, gpu_dout = [cupy.asarray(stored(rng.standard_normal((B * T, width)), gpu.precision == "bf16"))
                         for width in (c.qkv_width, c.dim)]
    qkv, dout = [value(array.get()).reshape(B, T, -1) for array in (gpu_qkv, gpu_dout)]
    out, dqkv = np.empty_like(dout), np.empty_like(qkv)
    P = np.empty((B, c.kv_heads, c.heads // c.kv_heads, T, T))
    model_cpu.attention_forward(out, P, qkv, c)
    model_cpu.attention_backward(dqkv, dout, out, P, qkv, c, np.empty_like(P))
    model_cpu.rope_backward(model_cpu.rotated_part(dqkv, c), *(x[:T] for x in model_cpu.rope_table(c, float)))
    gpu_out, gpu_dqkv = [cupy.empty(array.shape, array.dtype) for array in (gpu_dout, gpu_qkv)]
    lse, delta = [cupy.empty((B, c.heads, T), np.float32) for _ in range(2)]
    model_gpu.attention_forward(gpu, gpu_out, lse, gpu_qkv, B, T)
    model_gpu.attention_backward(gpu, gpu_dqkv, gpu_dout, gpu_out, lse, gpu_qkv, delta)
    return distance(value(gpu_out.get()).reshape(out.shape), out), distance(value(gpu_dqkv.get()).reshape(dqkv.shape), dqkv)


# ---------------------------------------------------------------------------------------------------------------------
# The fp32 model in other ways: by our products, and from the cache
# ---------------------------------------------------------------------------------------------------------------------
def read_in_pieces(model, ids, prompt, sizes):
    """The logits after the tokens of these ids behind a prompt, of which each call of extend reads as many as sizes says."""
    model.decoder.forget()
    if prompt:
        model.decoder.draw(ids[:prompt].tolist(), 1, 1, 0, model_cpu.Sampling())
    return np.concatenate([model.decoder.extend(piece) for piece in np.split(ids[prompt:], np.cumsum(sizes)[:-1])])


def test_our_products():
    """Ours adds K numbers one after the other, cuBLAS in blocks: two or three times the rounding."""
    reference, tokens, targets = make_problem(GPU_CONFIG, 256)
    exact = whole_step(reference, tokens, targets)
    step = whole_step(on_gpu(reference, precision="fp32", matmul="ours"), tokens, targets)
    bar, loss_bar = GPU_BARS["fp32"]
    within(distance(step["losses"], exact["losses"]), loss_bar, "our products, losses")
    within(distance(step["whole gradient"], exact["whole gradient"]), 3 * bar, "our products, gradient")


@pytest.mark.parametrize("prompt, sizes", [(0, [256]), (0, [1] * 256), (200, [1, 7, 48])])
def test_cached_logits(prompt, sizes):
    """Read few by few, or after a prompt that is read as in training."""
    reference, tokens, _ = make_problem(GPU_CONFIG, 256)
    found = read_in_pieces(on_gpu(reference, precision="fp32"), tokens[0], prompt, sizes)
    within(distance(found, reference.logits(tokens[:1])[0, prompt:]), 2e-6, f"cache, {len(sizes):3d} calls")


# ---------------------------------------------------------------------------------------------------------------------
# Muon
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", PRECISIONS)
def test_muon(precision):
    """A step of Muon on both engines, from the same gradients, whose entries differ widely in size; the worst tensor."""
    rng, size = np.random.default_rng(0), model_cpu.param_count(GPU_CONFIG)
    gradient = (rng.standard_normal(size) * np.exp(rng.standard_normal(size))).astype(np.float32)

    def moved(model):
        model.write(model.flat_params, np.zeros(size))
        model.write(model.flat_grads, gradient)
        model.update(lr=1.0)
        return model_cpu.param_views(model.read(model.flat_params), GPU_CONFIG)

    expected = moved(model_cpu.Model(GPU_CONFIG, optimizer="muon"))
    found = moved(model_gpu.Model(GPU_CONFIG, precision=precision, optimizer="muon"))
    error = np.max([distance(found[name], expected[name]) for name in found])
    within(error, MUON_BARS[precision], f"Muon, {precision}, the worst tensor")


# ---------------------------------------------------------------------------------------------------------------------
# Generation, to the bit
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.8, "top_k": 50}, {"top_p": 0.9}], ids=[
    "greedy", "top_k", "top_p"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_generation(precision, how):
    """One text, however many heads draft, launched one by one and from CUDA graphs, through
    full windows."""
    reference, tokens, _ = make_problem(GPU_CONFIG, 256, 0.06)
    model = on_gpu(reference, precision=precision, training=False)
    start, most, runs = tokens[0, :5].tolist(), GPU_CONFIG.context + GPU_CONFIG.context // 3, []
    for drafts, record_at in ((0, 10), (1, 10), (GPU_CONFIG.predict, 10), (GPU_CONFIG.predict, math.inf)):
        model.draft_heads = drafts
        model.decoder.forget()
        model.decoder.replays.clear()
        with unittest.mock.patch.object(model_gpu, "RECORD_AT", record_at):
            ids = list(model_cpu.generate(model, start, seed=1, most=most, **how))
        runs.append(ids)
        assert runs[-1] == runs[0], f"{drafts} drafts, launches recorded from use {record_at} on"
    assert len(ids) == most


@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_answers_at_once(precision, count=70, most=64):
    """The logits of each are those of its own text, up to rounding; in fp32 the ids are those of its own single run."""
    reference, tokens, _ = make_problem(GPU_CONFIG, 256, 0.06)
    model = on_gpu(reference, precision=precision, training=False)
    texts = [tokens[i % 2, i:2 * i % 7 + i + 1 + i % 3 * 40].tolist() for i in range(count)]
    sampling = model_cpu.Sampling(0.9, seed=np.arange(count) + 1)
    decoder = model.new_decoder(count, 200)
    for grown in False, True, True, True, True:         # the last from a CUDA graph
        drawn = decoder.draw_rows(texts, grown, np.array(list(map(len, texts))), sampling)
        got = decoder.buffers.logits.get().ravel()[:9 * GPU_CONFIG.vocab].reshape(9, -1)
        expected = np.array([model.logits([text])[0, -1, 0] for text in texts[:9]])
        within(distance(got, expected), 3 * ATTENTION_BARS[precision], f"logits of many answers, {precision}")
        texts = [[*text, token] for text, token in zip(texts, drawn.tolist())]
    answers = model_cpu.generate_batch(model, texts, sampling, most=most)
    for text, seed, answer in zip(texts, sampling.seed.tolist(), answers):
        assert precision != "fp32" or answer == list(model_cpu.generate(model, text, 0.9, seed=seed, most=most))


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------
def test_a_card_that_is_nearly_full(monkeypatch):
    """Most of its memory is another's: fewer rows than were asked for learn, and many answers are drawn part by part."""
    runtime, big = model_gpu.cupy.cuda.runtime, model_cpu.CONFIGS["big"]
    pool = model_gpu.cupy.cuda.MemoryPool()
    monkeypatch.setattr(model_gpu.cupy, "get_default_memory_pool", lambda: pool)
    model_gpu.cupy.cuda.set_allocator(pool.malloc)
    taken = runtime.malloc(runtime.memGetInfo()[0] - (6 << 30))
    try:
        model = model_gpu.Model(big, micro_batch=64, optimizer="muon")
        print(f"  {model.rows} of 64 rows")
        tokens = np.random.default_rng(0).integers(0, big.vocab, (model.rows, big.context + big.predict))
        for _ in range(4):                                  # the last from CUDA graphs
            model.forward(tokens[:, :big.context], tokens[:, 1:])
            model.backward()
            assert np.isfinite(model.update(1e-3).item()) and model.rows < 64
        answers = model_cpu.generate_batch(model, 1000 * [[1, 2, 3]], model_cpu.Sampling(seed=np.arange(1000)), most=300)
        assert len(answers) == 1000
    finally:
        runtime.free(taken)
        monkeypatch.undo()
        model_gpu.cupy.cuda.set_allocator(model_gpu.cupy.get_default_memory_pool().malloc)
