"""model_gpu.py without a GPU: whole steps and texts on the CPU, with NumPy's arrays for CuPy's and the kernels compiled by g++.

Card is as much of the module cupy as model_gpu.py uses.  Matrix products are those of --matmul ours, or of a cuBLAS in NumPy.
The judge is model_cpu.py or, to the bit, the engine itself where it computes in another way.  Each kernel by itself:
test_kernels.py and test_flash.py."""
import ctypes
import dataclasses
import functools
import inspect
import math
import types
import weakref
from unittest.mock import MagicMock

import numpy as np
import pytest
from cases import parametrize, put, value_error
from numpy.testing import assert_allclose

import model_cpu
import model_gpu
from cuda_helpers import Array, CpuModule, guarded, stored, to_bf16, value
from model_cpu import Config, Sampling


class Card:
    """A GPU with so many bytes of memory, the module cupy and CuPy's memory pool, all in one.  Launches and copies run at once
    but, while a graph is recorded, they are written down.  order: in which threads and blocks take turns."""
    def __init__(self, size=1 << 40, capability="80", order=0):
        self.order, self.made, self.recorded, self.graphs, self.limit = order, [], None, 0, 0
        self.asnumpy, self.get_default_memory_pool, self.free_all_blocks = np.array, lambda: self, lambda: None
        self.get_limit, self.set_limit = lambda: self.limit, lambda size: setattr(self, "limit", size)
        self.total_bytes = lambda: sum(size for memory, size in self.made if memory())
        self.cuda = MagicMock()
        self.cuda.get_current_stream().ptr = 9
        device = self.cuda.Device()
        device.compute_capability = capability
        device.attributes = {"MaxSharedMemoryPerMultiprocessor": 228 << 10}
        stream = self.cuda.Stream().__enter__()
        stream.begin_capture, stream.end_capture = self.begin_capture, self.end_capture
        self.cuda.runtime.memGetInfo = lambda: (size - self.total_bytes(), size)
        self.cuda.runtime.memcpyAsync = self.queued(lambda to, source, size, *_: ctypes.memmove(to, source, size))

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
        modules = CpuModule("kernels.cu", options[:1]), CpuModule("flash_attn.cu", options)
        for module in modules:
            module.order = self.order

        def get_function(name):
            return self.queued(modules[name.startswith("flash")].get_function(name))
        return types.SimpleNamespace(compile=lambda: None, get_function=get_function)

    def begin_capture(self):
        self.recorded = []

    def end_capture(self):
        launches, self.recorded = self.recorded, None
        self.graphs += 1
        return types.SimpleNamespace(launch=lambda: [launch() for launch in launches])


class Cublas:
    """cuBLAS's products as its documentation has them, by columns: C (m,n) = op(A) op(B) + beta C, for one or for `count`."""
    handle, workspace, status = 0, (), 0

    def __init__(self, card):
        self.calls = set()                                              # (stream, kind of arithmetic)
        self.cublasGemmEx = self.cublasGemmStridedBatchedEx = card.queued(self.gemm)

    def cublasSetStream_v2(self, handle, stream):
        self.stream = stream.value

    def cublasSetWorkspace_v2(self, handle):
        pass

    def gemm(self, handle, flip_a, flip_b, m, n, k, alpha, *rest):
        width = len(rest) // 4                                          # of what a stack of matrices is told by
        rest = [getattr(x, "value", x) for x in rest]
        beta = rest.pop(2 * width)._obj.value                           # 0 or 1; alpha is 1
        self.calls.add((self.stream, rest[-2]))
        count = rest[3 * width] if width == 4 else 1

        def stack(which, columns):
            """Matrices at a raw address, one behind the other without gaps, (count, rows, columns)."""
            address, kind, rows, *step = rest[which * width:][:width]
            assert step in ([], [rows * columns])
            raw = ({0: ctypes.c_float, 14: ctypes.c_uint16}[kind] * (count * columns * rows)).from_address(address)
            return np.ctypeslib.as_array(raw).reshape(count, columns, rows).swapaxes(1, 2)

        out = stack(2, n)
        a, b = value(stack(0, m if flip_a else k)), value(stack(1, k if flip_b else n))
        product = (a.swapaxes(1, 2) if flip_a else a) @ (b.swapaxes(1, 2) if flip_b else b)
        if beta:                                                        # if not, out may be NaN
            product += value(out)
        out[...] = stored(product, out.dtype == np.uint16)
        return self.status


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
    losses = model.later(model.forward(*batch(*shape, config=model.config), model.config.predict * [50], weights))()
    model.backward(last)
    return losses


def relative(x, reference):
    return np.linalg.norm(np.asarray(x, np.float64) - reference) / np.linalg.norm(reference)


def same(a, b):
    return all(map(np.array_equal, a, b))


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*encountered in")                     # of what is left where nothing is to change
@parametrize("precision, matmul, optimizer, bar, of_update, change", [
    ("fp32", "ours", "muon", 1e-5, 1e-4, {}), ("bf16", "ours", "adamw", 4e-2, 1e-4, {}), ("bf16", "cublas", "muon", 6e-2, 0.15, {}),
    ("tf32", "cublas", "muon", 3e-3, 1e-4, dict(hidden=72, norm_eps=0.25, rope_theta=20.0)),
    ("fp32", "cublas", "muon", 1e-5, 1e-4, dict(tied=True, predict=1))])
def test_training_equals_the_reference(card, precision, matmul, optimizer, bar, of_update, change):
    """Losses, logits, log-probabilities, every gradient, of two micro-batches and of rows with weights; then updates, from the
    same gradients, of each matrix by itself.  cuBLAS computes on CuPy's current stream.  A norm that is not finite changes
    nothing, then and later."""
    config = dataclasses.replace(TINY, **change)
    both = model, reference = models(config, precision=precision, matmul=matmul, optimizer=optimizer)
    example, hidden = batch(3, 21, config=config), model_cpu.muon_part(config, "muon")
    for shape, weights in ((2, 21), None), ((1, 18, 7), None), ((3, 9), [-9.0, 2.0, -40.0]):
        assert_allclose(*[np.ravel(learn(m, *shape, weights=weights)) for m in both], rtol=bar)
        for name, grad in model.grads.items():
            assert relative(grad, reference.grads[name]) < bar, name
        if shape == (2, 21):                                            # the next adds to these gradients
            continue
        model.write(model.flat_params, reference.flat_params)
        model.write(model.flat_grads, reference.flat_grads)
        before = reference.flat_params.copy()
        assert_allclose(*[m.update(0.1, decay=0.1, clip=0.7) for m in both], rtol=1e-6)
        moved = [m.flat_params - 0.99 * before for m in both]
        moved = [[x[:hidden.start], x[hidden.stop:], *model_cpu.layer_matrices(x[hidden], config)] for x in moved]
        assert np.max([*map(relative, *moved)]) < of_update and not model.flat_grads.any()
        assert relative(model.m, reference.m) < 1e-6 > relative(model.v, reference.v)
        assert precision != "bf16" or same(model.flat_weights, to_bf16(model.flat_params))
    model.write(model.flat_params, reference.flat_params)
    assert relative(model.log_probs(*example), reference.log_probs(*example)) < bar
    model.forward(*example)
    assert relative(model.logits(example[0]), reference.logits(example[0])) < bar
    with value_error("^backward needs a forward of its own, and between them neither logits nor update.$"):
        model.backward()
    assert card.cublas.calls == (set() if matmul == "ours" else {(9, 77 if precision == "tf32" else 68)})
    before = [np.array(array) for array in (model.flat_params, model.m, model.v)]
    for wrong in np.nan, 1.0:
        model.flat_grads[...] = 1.0
        model.flat_grads[9000 if optimizer == "muon" else 0] = wrong
        model.update(0.1)
        assert same(before, (model.flat_params, model.m, model.v)) and model.step == reference.step


def test_other_weights_empty_the_cache_and_end_what_a_forward_has_left(card):
    model, _ = models()
    for change in lambda: model.update(0.1), lambda: model.write(model.flat_params, np.array(model.flat_params)):
        learn(model, 2, 9)
        model.decoder.extend([1, 2])
        model.forward(*batch(2, 9))
        change()
        assert model.decoder.position == 0
        with value_error("backward needs a forward"):
            model.backward()


def test_a_graph_does_what_its_launches_do(insert, monkeypatch):
    """Recorded or not, in any order of threads, alone or on several GPUs: the same bits.  Graphs are kept of a few shapes.
    Gradients of several GPUs are added up once a step."""
    put(monkeypatch, model_gpu, SHAPES=1)
    runs = []
    for record_at, order in (2, 0), (99, 1):
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
    for prompt, few in (1, 9), (23, 3), (140, 5), (285, 5):
        decoder.draw(ids[decoder.position:prompt], 1, 1, 0, Sampling())
        found = decoder.extend(ids[prompt:prompt + few])
        assert relative(found, expected[prompt:prompt + few]) < bar
        decoder.truncate(prompt)
        assert same(found, [decoder.extend([token])[0] for token in ids[prompt:prompt + few]])
    decoder.truncate(70)
    assert relative(decoder.extend(ids[70:90]), expected[70:90]) < bar


@parametrize("precision, options", [("fp32", dict(temperature=0)), ("fp32", dict(temperature=1.2, top_p=0.9)),
                                    ("bf16", dict(temperature=0.8, top_k=6))])
def test_speculation_changes_nothing(card, precision, options):
    """Through a full window, over two calls, and from graphs.  Drafts are the default.  In fp32 the text is that of the CPU."""
    runs = []
    model, reference = models(dataclasses.replace(TINY, predict=2), precision=precision, matmul="ours")
    for one, how in (model, dict(speculate=False)), (model, {}), (reference, {}):
        text = [1, 2, 3] * 10
        one.decoder.forget()
        for most in 13, 2:
            text += [*model_cpu.generate(one, text, seed=2**64 - 5, most=most, vocab=45, **how, **options), 5]
        runs.append(text)
    assert runs[0] == runs[1] and (precision == "bf16" or runs[2] == runs[0])
    assert (1, 2) in model.decoder.replays and (2, 2) in model.decoder.replays      # with a draft, and without


@parametrize("precision, bar", [("fp32", 1e-5), ("bf16", 4e-2)])
def test_many_answers_at_once(card, precision, bar):
    """Prompts of several lengths, through full windows, from graphs: each answer is the reference's.  Where the memory is
    too small for all, they are drawn part by part."""
    model, reference = models(precision=precision, training=False)
    rng, before, decoder = np.random.default_rng(5), card.total_bytes(), model.new_decoder(3, 40)
    prompts = [rng.integers(0, 48, n).tolist() for n in (1, 8, 38, 3, 17, 2)]
    sampling = Sampling(1.1, 9, 0.95, rng.integers(0, 1 << 63, 6), 45)
    card.limit = 2 * card.total_bytes() - before
    found = model_cpu.generate_batch(model, prompts, sampling, {7}, 6)
    assert precision != "fp32" or found == model_cpu.generate_batch(reference, prompts, sampling, {7}, 6)
    for grown in False, True, True, True:           # read whole; then a token of each, at last from a graph
        decoder.draw_rows(prompts[3:], grown, np.zeros(3), Sampling())
        for i, prompt in enumerate(prompts[3:]):
            assert relative(decoder.buffers.logits.ravel()[48 * i:][:48], reference.logits([prompt])[0, -1, 0]) < bar
            prompt.append(i)


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
        return model_gpu.Model(TINY, micro_batch=rows, optimizer=optimizer), card
    (two, card), shapes = model(2), [(26, 3), (2, 40), (9, 8)]
    size = card.total_bytes()
    losses = [learn(two, *shape) for shape in shapes]
    two.decoder.extend([1] * 20)
    assert card.total_bytes() == size
    for more in dict(size=size + model_gpu.RESERVE + 3000), dict(limit=size):
        fits, card = model(9, **more)
        assert fits.rows == 2 and card.limit == more.get("limit", size + 3000)
        assert same(losses, [learn(fits, *shape) for shape in shapes]) and same(fits.flat_grads, two.flat_grads)
    with pytest.raises(MemoryError):
        fits.forward(*batch(9, 40))
    with pytest.raises(MemoryError):
        model(4, limit=size // 2)


def test_what_is_missing_is_said(insert, monkeypatch):
    """In one sentence."""
    put(monkeypatch, model_gpu, cupy=None)
    assert model_gpu.pick("auto") is model_cpu
    with value_error("needs CuPy"):
        model_gpu.Model(TINY)
    for change, capability, words in [
            (dict(dim=96, heads=1), "80", "heads 32, 64 or 128 wide, not 96: choose heads so that 96 / heads is"),
            ({}, "75", "tf32 needs a GPU of compute capability 8.0 or later, this one has 7.5;")]:
        card = insert(capability=capability)
        with value_error(words):
            model_gpu.Model(dataclasses.replace(TINY, **change), precision="tf32")
    card.cuda.is_available = lambda: False
    with value_error("no NVIDIA driver, or one that is too old"):
        model_gpu.pick("gpu")


def test_what_cublas_refuses_is_an_error(card):
    model = model_gpu.Model(TINY, training=False)
    card.cublas.status = 7
    with pytest.raises(model_gpu.GpuError, match="refuses a matmul of 9 x 64 by 64 x 128: status 7"):
        model.logits(batch(1, 9)[0])


def test_a_decoder_has_no_memory_for_training(card):
    """Beyond its cache and one row of logits a token, next to nothing, whatever the vocabulary and the loss take."""
    config = dataclasses.replace(TINY, vocab=40000, predict=1)
    gpu, before = model_gpu.Gpu(config, "fp32", "ours"), card.total_bytes()
    decoder = model_gpu.Decoder(gpu, {}, 1, 40)
    assert decoder.buffers.logits.nbytes < card.total_bytes() - before < decoder.buffers.logits.nbytes + 400_000


def test_both_engines_have_one_face():
    """The public methods, and their parameters; how an engine is made, by __init__, differs."""
    for name in "Model", "Decoder":
        for key, member in inspect.getmembers(getattr(model_cpu, name), inspect.isfunction):
            assert key[0] == "_" or inspect.signature(member) == inspect.signature(getattr(getattr(model_gpu, name), key))
