"""model_gpu.py without a GPU: whole steps and texts on the CPU, with NumPy's arrays for CuPy's and the kernels compiled by g++.

Card is as much of the module cupy as model_gpu.py uses.  Matrix products are those of --matmul ours, or of a cuBLAS in NumPy.
The judge is model_cpu.py or, to the bit, the engine itself where it computes in another way.  Each kernel by itself:
test_kernels.py and test_flash.py."""
import contextlib
import ctypes
import dataclasses
import functools
import inspect
import math
import types
import weakref

import numpy as np
import pytest
from cases import parametrize, put, value_error
from numpy.testing import assert_allclose

import model_cpu
import model_gpu
from cuda_helpers import Array, CpuModule, from_bf16, guarded, to_bf16
from model_cpu import Config, Sampling


class Card:
    """A GPU with so many bytes of memory, the module cupy and CuPy's memory pool, all in one.  Launches and copies run at once
    but, while a graph is recorded, they are written down.  order: in which threads and blocks take turns."""
    def __init__(self, size=1 << 40, capability="90", order="forward"):
        self.order, self.made, self.recorded, self.graphs, self.limit = order, [], None, 0, 0
        self.asnumpy, self.get_default_memory_pool, self.free_all_blocks = np.array, lambda: self, lambda: None
        self.get_limit, self.set_limit = lambda: self.limit, lambda size: setattr(self, "limit", size)
        self.total_bytes = lambda: sum(size for memory, size in self.made if memory())
        event = types.SimpleNamespace(synchronize=lambda: None, record=lambda *_: event, ptr=0)
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True, Event=lambda disable_timing: event, Stream=self.record, get_current_stream=lambda: event,
            Device=lambda: types.SimpleNamespace(compute_capability=capability, attributes={"MaxSharedMemoryPerMultiprocessor": 228 << 10}),
            runtime=types.SimpleNamespace(memGetInfo=lambda: (size - self.total_bytes(), size), driverGetVersion=lambda: 12020,
                                          memcpyAsync=self.queued(lambda to, source, size, *_: ctypes.memmove(to, source, size))))

    def empty(self, shape, dtype):
        size = math.prod(np.atleast_1d(shape)) * np.dtype(dtype).itemsize
        if self.limit and self.total_bytes() + size > self.limit:
            raise MemoryError
        array = memory = guarded(np.full(size, 0xFF, np.uint8))         # NaN
        while isinstance(memory, np.ndarray):
            memory = memory.base
        self.made.append((weakref.ref(memory), size))
        return array.view(dtype).reshape(shape).view(Array)

    def asarray(self, host):
        array = self.empty(host.shape, host.dtype)
        array.set(host)
        return array

    def zeros(self, *shape):
        return self.asarray(np.zeros(*shape))

    def queued(self, function):
        def call(*arguments, **options):
            if self.recorded is None:
                return function(*arguments, **options)
            self.recorded.append(functools.partial(function, *arguments, **options))
        return call

    def RawModule(self, code, options):
        name = "kernels.cu" if "rmsnorm_forward" in code else "flash_attn.cu"
        module = CpuModule(name, [option for option in options if not option.startswith("-arch")])
        module.order = self.order, 0
        return types.SimpleNamespace(get_function=lambda name: self.queued(module.get_function(name)))

    @contextlib.contextmanager
    def record(self, non_blocking):
        def end():
            launches, self.recorded = self.recorded, None
            self.graphs += 1
            return types.SimpleNamespace(launch=lambda: [launch() for launch in launches])
        yield types.SimpleNamespace(ptr=77, begin_capture=lambda: setattr(self, "recorded", []), end_capture=end)


class Cublas:
    """cuBLAS's products as its documentation has them, by columns: C (m,n) = op(A) op(B) + beta C, for one or for `count`."""
    handle, workspace = 0, ()

    def __init__(self, card):
        self.kinds = set()
        self.cublasGemmEx = card.queued(functools.partial(self.gemm, 3))
        self.cublasGemmStridedBatchedEx = card.queued(functools.partial(self.gemm, 4))
        self.cublasSetStream_v2 = self.cublasSetWorkspace_v2 = lambda *_: None

    def gemm(self, width, handle, flip_a, flip_b, m, n, k, alpha, *rest):
        rest = [getattr(x, "value", x) for x in rest]
        beta = rest.pop(2 * width)._obj.value
        self.kinds.add(rest[-2])
        count = rest[3 * width] if width == 4 else 1

        def stack(which, columns):
            """Matrices at a raw address, one behind the other without gaps, (count, rows, columns)."""
            address, kind, rows, *step = rest[which * width:][:width]
            assert step in ([], [rows * columns])
            raw = ({0: ctypes.c_float, 14: ctypes.c_uint16}[kind] * (count * columns * rows)).from_address(address)
            return np.ctypeslib.as_array(raw).reshape(count, columns, rows).swapaxes(1, 2)

        def numbers(x, flip):
            x = x if x.dtype == np.float32 else from_bf16(x)
            return x.swapaxes(1, 2) if flip else x
        out = stack(2, n)
        product = alpha._obj.value * numbers(stack(0, m if flip_a else k), flip_a) @ numbers(stack(1, k if flip_b else n), flip_b)
        if beta:                                                        # if not, out may be NaN
            product += beta * numbers(out, False)
        out[...] = product if out.dtype == np.float32 else to_bf16(product)


@pytest.fixture
def insert(monkeypatch):
    """-> function that puts a Card in the place of CuPy."""
    pinned = types.SimpleNamespace(empty_pinned=np.zeros, zeros_pinned=np.zeros)
    # fewer of the blocks of threads that a GPU needs to be busy and a CPU takes one by one
    put(monkeypatch, model_gpu, SUM_BLOCKS=8, MATRIX_BLOCKS=3, RESERVE=1 << 20)
    monkeypatch.setattr(model_gpu, "cupyx", pinned, raising=False)

    def insert(*size, **options):
        card = Card(*size, **options)
        card.cublas = Cublas(card)
        put(monkeypatch, model_gpu, cupy=card, load_cublas=lambda: card.cublas)
        return card
    return insert


@pytest.fixture
def card(insert):
    return insert()


TINY = Config(dim=64, heads=2, kv_heads=1, layers=2, context=40, vocab=48, predict=3, mtp_weight=0.3)


def batch(B, T, seed=0, config=TINY):
    rng = np.random.default_rng(seed)
    tokens, targets = [rng.integers(0, config.vocab, (B, width)) for width in (T, T + config.predict - 1)]
    tokens[0, :3], targets[0, 2:5] = 5, -1                              # a repeated token
    return tokens, targets


def models(config=TINY, optimizer="adamw", **options):
    """-> (of this engine, of the reference), with the same weights, drawn wide, as a trained model's."""
    both = model_gpu.Model(config, optimizer=optimizer, **options), model_cpu.Model(config, seed=3, optimizer=optimizer)
    flat = both[1].flat_params
    flat[:model_cpu.update_table(config, "adamw")[-1][1].start] *= 5
    for model in both:
        model.write(model.flat_params, np.float32(flat))
    return both


def learn(model, *shape, weights=None, last=True):
    losses = model.later(model.forward(*batch(*shape, config=model.config), weights=weights))()
    model.backward(last)
    return losses


def relative(x, reference):
    return np.linalg.norm(np.asarray(x, np.float64) - reference) / np.linalg.norm(reference)


def same(a, b):
    return all(map(np.array_equal, a, b))


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("precision, matmul, bar, change", [
    ("fp32", "ours", 1e-5, {}), ("bf16", "ours", 4e-2, {}), ("bf16", "cublas", 4e-2, {}), ("tf32", "cublas", 3e-3, {}),
    ("fp32", "cublas", 1e-5, dict(hidden=72, norm_eps=0.25, rope_theta=20.0)), ("fp32", "cublas", 1e-5, dict(tied=True, predict=1))])
def test_a_step_equals_the_reference(card, precision, matmul, bar, change):
    """Losses and every gradient, of two micro-batches and of rows with weights; logits and log-probabilities."""
    config = dataclasses.replace(TINY, **change)
    both = model, reference = models(config, precision=precision, matmul=matmul)
    example = batch(3, 21, config=config)
    for shape, weights in ((2, 21), None), ((1, 18, 7), None), ((3, 9), [-9.0, 2.0, -40.0]):
        assert_allclose(*[np.ravel(learn(m, *shape, weights=weights)) for m in both], rtol=bar)
        for name, grad in model.grads.items():
            assert relative(grad, reference.grads[name]) < bar, name
    assert relative(model.logits(example[0]), reference.logits(example[0])) < bar
    assert relative(model.log_probs(*example), reference.log_probs(*example)) < bar
    assert card.cublas.kinds == (set() if matmul == "ours" else {77 if precision == "tf32" else 68})


@pytest.mark.filterwarnings("ignore:.*encountered in matmul")           # of what is left where nothing is to change
@parametrize("precision, matmul, optimizer, bar", [
    ("bf16", "cublas", "adamw", 1e-4), ("fp32", "ours", "muon", 1e-4), ("bf16", "cublas", "muon", 8e-2)])
def test_updates_equal_the_reference(card, precision, matmul, optimizer, bar):
    """From the same gradients, clipped; each matrix by itself; in bf16 the copy follows.  A norm that is not finite changes
    nothing, then and later."""
    both = model, reference = models(precision=precision, matmul=matmul, optimizer=optimizer)
    rng, hidden = np.random.default_rng(5), model_cpu.muon_part(TINY, "muon")
    for step in range(3):
        flat = np.float32(0.01 * rng.standard_normal(reference.m.size) * np.exp(rng.standard_normal(reference.m.size)))
        moved = []
        for m in both:
            before = m.flat_params.astype(float)
            m.write(m.flat_grads, flat)
            assert_allclose(m.update(0.1, decay=0.1, clip=0.7), np.linalg.norm(flat.astype(float)), rtol=1e-6)
            after = m.flat_params - 0.99 * before
            moved.append([m.m, m.v, after[:hidden.start], after[hidden.stop:], *model_cpu.layer_matrices(after[hidden], TINY)])
        assert max(map(relative, *moved)) < bar and not model.flat_grads.any()
        assert precision == "fp32" or same(model.flat_weights, to_bf16(model.flat_params))
    before = [np.array(array) for array in (model.flat_params, model.m, model.v)]
    for wrong in np.nan, 1.0:
        model.flat_grads[...] = 1.0
        model.flat_grads[9000 if optimizer == "muon" else 0] = wrong
        model.update(0.1)
        assert same(before, (model.flat_params, model.m, model.v))


def test_a_graph_does_what_its_launches_do(insert, monkeypatch):
    """Recorded or not, in any order of threads, alone or on several GPUs: the same bits.  Graphs are kept of a few shapes.
    Gradients of several GPUs are added up once a step."""
    put(monkeypatch, model_gpu, SHAPES=1)
    runs = []
    for record_at, order in (2, "forward"), (99, "reverse"):
        put(monkeypatch, model_gpu, RECORD_AT=record_at)
        card = insert(order=order)
        model, kept, sums = model_gpu.Model(TINY, optimizer="muon"), [], []
        if record_at == 99:
            model.communicator = types.SimpleNamespace(all_reduce=lambda array: sums.append(np.array(array)))
        for step, (B, T) in enumerate([(2, 9), (2, 9), (1, 18), (2, 9), (3, 20), (2, 9), (2, 9)]):
            kept += [*learn(model, B, T, step, last=False), *learn(model, B, T, step + 9)]
            assert not sums or len(sums) == step + 1 and np.array_equal(sums[-1], model.flat_grads)
            kept += [*model.later(model.update(0.01))(), np.array(model.flat_params)]
            assert len(model.buffers_by_shape) <= 2
        assert bool(sums) == (not card.graphs)
        runs.append(kept)
    assert same(*runs)


def test_backward_needs_a_forward_of_its_own(card):
    for model in models():
        for between in model.backward, lambda: model.logits([[1]]), lambda: model.log_probs(*batch(1, 3)), lambda: model.update(0.0):
            model.forward(*batch(2, 9))
            between()
            with value_error("^backward needs a forward of its own, and between them neither logits nor update.$"):
                model.backward()


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("precision, matmul, bar, change", [
    ("fp32", "ours", 1e-5, dict(predict=9)), ("bf16", "ours", 4e-2, dict(dim=96, heads=3, hidden=2056, layers=1)),
    ("tf32", "cublas", 3e-3, {})])
def test_the_cache_equals_the_reference(card, precision, matmul, bar, change):
    """A prompt, then more tokens of it, many and few.  Few rows have the same bits, read together or one by one."""
    config = dataclasses.replace(TINY, context=290, **change)
    model, reference = models(config, precision=precision, matmul=matmul)
    tokens, decoder = batch(1, 290, config=config)[0], model.decoder
    expected, ids = reference.logits(tokens)[0], tokens[0].tolist()
    greedy = Sampling(temperature=0)
    for prompt, few in (1, 9), (23, 3), (140, 5), (285, 5):
        decoder.draw(ids[decoder.position:prompt], 1, 1, prompt, greedy)
        found = decoder.extend(ids[prompt:prompt + few])
        assert relative(found, expected[prompt:prompt + few]) < bar and decoder.tokens == ids[:prompt + few]
        decoder.position = prompt
        assert same(found, [decoder.extend([token])[0] for token in ids[prompt:prompt + few]])
    decoder.position = 70
    for bad, words in (221 * [1], "221 tokens at 70 do not fit the context of 290"), ([5, 48], "token id 48 is out of range"):
        with value_error(words):
            decoder.extend(bad)
    assert relative(decoder.extend(ids[70:90], 3), expected[87:90]) < bar


@parametrize("precision, options", [("fp32", dict(temperature=0)), ("fp32", dict(temperature=1.2, top_p=0.9)), ("fp32", dict(top_k=1 << 40, top_p=1e-60)),
                                    ("bf16", dict(temperature=0.8, top_k=6))])
def test_speculation_changes_nothing(card, precision, options):
    """Through a full window, over two calls, and from graphs.  Drafts are the default.  In fp32 the text and its probabilities
    are those of the CPU."""
    texts, traces = [], []
    model, reference = models(dataclasses.replace(TINY, predict=2), precision=precision, matmul="ours")
    for one, how in (model, dict(speculate=False)), (model, {}), (reference, {}):
        text, trace = [1, 2, 3] * 10, []
        one.decoder.forget()
        for most in 13, 2:
            text += [*model_cpu.generate(one, text, seed=2**64 - 5, most=most, vocab=45, trace=trace, **how, **options), 5]
        texts.append((text, [float(p) for *_, p in trace]))
        traces.append(trace)
    assert texts[0] == texts[1] and sum(drafts for _, drafts, _ in traces[1]) > 10 and card.graphs
    if precision == "fp32":
        assert texts[2][0] == texts[0][0]
        assert_allclose(texts[2][1], texts[0][1], rtol=1e-3)


@parametrize("precision, bar", [("fp32", 1e-5), ("bf16", 4e-2)])
def test_many_answers_at_once(card, precision, bar):
    """Prompts of several lengths, through full windows, from graphs: each answer is that of its prompt alone.  Where the memory
    is too small for all, they are drawn part by part; where it is too small for one, that is an error."""
    model, reference = models(precision=precision, matmul="ours", training=False)
    rng, before, decoder = np.random.default_rng(5), card.total_bytes(), model.new_decoder(3, 40)
    prompts = [rng.integers(0, 48, n).tolist() for n in (1, 8, 38, 3, 17, 2)]
    sampling = Sampling(1.1, 9, 0.95, rng.integers(0, 1 << 63, 6), 45)
    card.limit = 2 * card.total_bytes() - before
    found = model_cpu.generate_batch(model, prompts, sampling, {7}, 6)
    assert precision != "fp32" or found == model_cpu.generate_batch(reference, prompts, sampling, {7}, 6)
    for _ in range(4):                                                  # read whole; then a token of each, at last from a graph
        decoder.draw_rows(prompts[3:], np.zeros(3), Sampling())
        for i, prompt in enumerate(prompts[3:]):
            assert relative(decoder.buffers.logits.ravel()[48 * i:][:48], reference.logits([prompt])[0, -1, 0]) < bar
            prompt.append(i)
    card.limit = card.total_bytes()
    with pytest.raises(MemoryError):
        model_cpu.generate_batch(model, prompts, sampling, most=6)


# ---------------------------------------------------------------------------------------------------------------------
# Memory, and what is refused
# ---------------------------------------------------------------------------------------------------------------------
@parametrize("optimizer", ["adamw", "muon"])
def test_rows_are_halved_until_a_step_fits(insert, optimizer):
    """Before the first step: then it needs no further memory, whatever the shape of as many tokens; and never within a step.
    CuPy leaves the reserve free; a limit that it has already stays."""
    def model(rows, limit=0, **options):
        card = insert(**options)
        card.limit = limit
        return model_gpu.Model(TINY, precision="bf16", micro_batch=rows, optimizer=optimizer), card
    two, card = model(2)
    size = card.total_bytes()
    shapes = (26, 3), (2, 40), (9, 8)
    losses = [learn(two, *shape) for shape in shapes]
    two.decoder.extend([1] * 20)
    assert card.total_bytes() == size
    for more in dict(size=size + model_gpu.RESERVE + 3000), dict(limit=size):
        fits, card = model(9, **more)
        assert fits.rows == 2 and card.limit == more.get("limit", size + 3000)
        assert same(losses, [learn(fits, *shape) for shape in shapes]) and same(fits.flat_grads, two.flat_grads)
    for fail in lambda: fits.forward(*batch(9, 40)), lambda: model(4, limit=size // 2):
        with pytest.raises(MemoryError):
            fail()
    grown, card = model(1)
    grown.forward(*batch(9, 40))                                        # gives the old memory back first
    assert grown.rows == 9 and card.total_bytes() == (nine := model(9))[1].total_bytes() and nine


def test_what_is_missing_is_said(insert, monkeypatch):
    """In one sentence; the precision is the best that there is."""
    put(monkeypatch, model_gpu, cupy=None)
    assert model_gpu.pick("auto") is model_gpu.pick("cpu") is model_cpu
    with value_error("needs CuPy"):
        model_gpu.Model(TINY)
    for change, capability, words in [
            (dict(dim=8320, heads=65), "90", "models up to 8192 wide and contexts up to 16384, not 8320 and 40"),
            (dict(dim=96, heads=1), "90", "heads 32, 64 or 128 wide, not 96: choose heads so that 96 / heads is"),
            ({}, "75", "tf32 needs a GPU of compute capability 8.0 or later, this one has 7.5;")]:
        card = insert(capability=capability)
        assert model_gpu.pick("auto") is model_gpu and model_gpu.default_precision() == ("bf16" if capability == "90" else "fp32")
        with value_error(words):
            model_gpu.Model(dataclasses.replace(TINY, **change), precision="tf32")
    card.cuda.is_available, card.cuda.runtime.runtimeGetVersion = lambda: False, lambda: 12090
    for driver, words in (0, "no NVIDIA driver"), (12000, "finds no GPU"), (11990, "serves CUDA 11[.]99, .* needs 12.0: .*cuda11x"):
        card.cuda.runtime.driverGetVersion = lambda: driver
        with value_error(words):
            model_gpu.pick("gpu")


@parametrize("name", ["Model", "Decoder"])
def test_both_engines_have_one_face(name):
    """The public methods, and their parameters; how an engine is made, by __init__, differs."""
    def face(engine):
        return {key: inspect.signature(member) if callable(member) else type(member)
                for key, member in inspect.getmembers(getattr(engine, name)) if not key.startswith("_")}
    assert face(model_gpu) == face(model_cpu)
