"""model_gpu.py: the model of model_cpu.py on one NVIDIA GPU, through CuPy.

Read model_cpu.py first, then open it beside this file: the same functions in the same order, with the same
names.  What a function computes and why its backward is right stands there; here stands how a GPU does it.
What has no twin by name: x_apply (what it would compute again is kept), cross_entropy_backward and
head_targets (in the forward's kernel), rotated_part (the kernel knows where), split_heads and rope_backward
(inside flash_attn.cu).  Top to bottom:

    1. pick                       which engine serves
    2. work_tables, memory_plan   what a step computes in; the bytes of a run, known before it starts
    3. Gpu                        compiled kernels, the stream of launches, matrix products
    4. x_forward / x_backward     every layer as a pair: a matrix product by cuBLAS, or a kernel of kernels.cu
    5. Model                      the face of model_cpu.Model
    6. main                       both engines side by side: python model_gpu.py

Three precisions.  fp32: everything in 32 bits, for checking.  tf32: the same storage, but the tensor cores
round the inputs of products to 10 bits of mantissa.  bf16: activations, and a copy of the weights that the
products read, have 8 bits of mantissa and half the size; the weights themselves ("master" weights), gradients
and moments stay fp32, because an update is often smaller than the spacing of bf16 numbers and would be lost.
Sums, norms, softmax and losses are fp32 in each.

How a step stays fast.  The host only launches work, in order, and runs ahead of the GPU: no function here
waits for a result, and what a step computes in was allocated before.  What crosses from one kernel to the
next is the traffic that costs time, so neighbouring functions are fused (kernels.cu); where one kernel covers
several functions of model_cpu, it says so there.

What this file does not do: no CUDA (kernels.cu, flash_attn.cu); no GPU but NVIDIA's; of several GPUs it only
says when which part of the gradient is ready, and makes its part of Muon's products (checkpoint.py: Ranks,
Nccl).  It can be imported, and says so in one sentence, where there is no CuPy or no GPU.
"""
import collections
import contextlib
import ctypes
import math
import pathlib
import re
import struct
import sys
import threading
import time
import weakref

import numpy as np

import model_cpu
from model_cpu import (CONFIGS, NEWTON_SCHULZ, as_batch, carve, check_batch, check_tokens, init_params,
                       largest_micro_batch, layer_views, matrix_table, moment_count, muon_part,
                       param_count, param_views, pieces, rope_table, table_bytes, update_table)
from script import GpuError, Parser, require, run_script

try:
    import cupy
except ImportError:
    cupy = None

PRECISIONS = ("bf16", "tf32", "fp32")
NORM_BLOCKS = 1056    # blocks, and so partial sums, of rmsnorm_backward: 8 for each multiprocessor of an H100
SUM_BLOCKS = 1024           # of sum_of_squares
MATRIX_BLOCKS = 64          # of muon_momentum and muon_input, for each matrix
RECORD_AT = 3               # the use of a batch's shape from which on its launches are a CUDA graph
BUCKET = 1 << 24            # numbers of the gradient that several GPUs add up in one call
MOST_LOGITS = 1 << 29       # that are computed at once; of large vocabularies they come in pieces
PROMPT_ROWS = 64            # by multiples of which a prompt is read, so that its launches repeat, too
FEW_ROWS = 8                # up to which decoding has kernels of its own
GROUP_ROWS = 4              # of them that share a reading of the weights: ROWS in kernels.cu
TOLD = 6                    # buffers of decode_table that the host has, too
CUBLAS_BYTES = 64 << 20     # cuBLAS's workspace, and what the kernels' code takes
CONTEXT_BYTES = 580 << 20   # CUDA itself, measured on an H200 with CUDA 13; on smaller cards it is less
NCCL_BYTES = 860 << 20      # of two H200s


# ------------------------------------------------------------------------------------------------------------
# 1. Which engine serves
# ------------------------------------------------------------------------------------------------------------
def why_no_gpu():
    """None if there is a GPU to use, else a sentence that says what is missing."""
    if cupy is None:
        return "The GPU needs CuPy: run `make gpu` (or `pip install cupy-cuda12x`)."
    if cupy.cuda.is_available():
        return None
    driver, needed = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
    if driver == 0:
        return "There is no NVIDIA driver on this machine."
    if driver // 1000 < needed // 1000:
        return (f"The NVIDIA driver is too old: it serves CUDA {driver // 1000}.{driver % 1000 // 10}, this "
                f"CuPy needs {needed // 1000}.0: update the driver, or install cupy-cuda{driver // 1000}x.")
    return "The NVIDIA driver finds no GPU."


def pick(device):
    """The engine's module for "cpu", "gpu" (ValueError if there is none) or "auto" (the GPU if there is
    one)."""
    require(device in ("auto", "cpu", "gpu"), f"the device must be auto, cpu or gpu, not {device!r}.")
    reason = why_no_gpu() if device != "cpu" else None
    require(device != "gpu" or not reason, reason)
    return model_cpu if device == "cpu" or reason else sys.modules[__name__]


def take_gpu(number):
    """From here on this process computes on the GPU of this number of its host, or on the only one."""
    count = cupy.cuda.runtime.getDeviceCount()
    require(count == 1 or number < count, f"this host has {count} GPUs, too few for process {number}.")
    cupy.cuda.Device(number if count > 1 else 0).use()


def gpu_name():
    """As its vendor calls it; train.py looks up its rate."""
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()


# Dense bf16 rates by datasheet, TFLOP/s; TF32 has half.
BF16_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "L40": 181, "L4": 121,
               "A10": 125, "RTX 4090": 165, "RTX 3090": 71}


def flops_per_token(config):
    """Of training, as usually counted: 6 for each parameter that is in a matmul (2 forward, 4 backward),
    which is all but gains and an embedding that is not the head, too, and 6 L C T for causal attention."""
    matrices = sum(math.prod(shape) for name, shape in model_cpu.param_table(config)
                   if len(shape) == 2 and (config.tied or name != "embed"))
    return 6 * matrices + 6 * config.layers * config.dim * config.context


def peak_throughput(config, precision):
    """Tokens a second at which this GPU would reach the rate of its datasheet; None where that is not known."""
    name = gpu_name()
    for part, rate in BF16_TFLOPS.items():
        if part in name and precision != "fp32":
            flops = rate * (1e12 if precision == "bf16" else 0.5e12)
            return flops / flops_per_token(config)
    return None


def default_precision():
    """The best that this GPU's tensor cores have; where there is no GPU, and a run is only planned, bf16."""
    return "bf16" if why_no_gpu() or int(cupy.cuda.Device().compute_capability) >= 80 else "fp32"


# ------------------------------------------------------------------------------------------------------------
# 2. What a step computes in, and what a run needs
# ------------------------------------------------------------------------------------------------------------
def free_memory(limit=None):
    """Bytes of GPU memory that can be had, at most `limit`; where there is no GPU, and a run is only planned,
    limit."""
    if why_no_gpu():
        return limit
    # what memory_plan counts and this process has already
    taken = cupy.get_default_memory_pool().total_bytes() + CONTEXT_BYTES
    free = cupy.cuda.runtime.memGetInfo()[0] + taken
    return min(free, limit or free)


def logit_windows(config, B, T):
    """The B windows of a batch in slices of at most MOST_LOGITS logits, or of one window; of shorter windows
    they never have more rows."""
    rows = max(1, MOST_LOGITS // (config.context * config.predict * config.vocab)) * config.context
    return pieces(B, max(1, rows // T))


def work_tables(config, B, T, precision):
    """The work buffers of a forward and backward at (B,T), as four tables, lists of (name, shape, dtype):
    what each layer keeps, what all share, and two that use the same memory in turn: the logits are there
    between the last layer's forward and its backward, the other large arrays in that of the layers.

    A layer keeps the norms' outputs and the SwiGLU product, too.  They could be computed again, which on a
    GPU means to write and to read them once more: big's step would need a quarter less memory, and 2% more
    time.

    No array grows if as many tokens come in other rows, none of them longer than T: so what (rows, context)
    takes is all that training with micro-batches of at most so many tokens ever needs."""
    c, N, C, F = config, B * T, config.dim, config.hidden
    single, real = np.float32, np.uint16 if precision == "bf16" else np.float32     # NumPy has no bf16
    # in tf32, room for the largest operand that is transposed: n, or a matrix of the weights (see transposed)
    rows = (precision == "tf32") * max(N, c.predict * c.vocab, c.qkv_width, 2 * F)
    layer = [("x_in", (N, C), real), ("rstd1", (N,), single), ("n1", (N, C), real),
             ("qkv", (N, c.qkv_width), real), ("y", (N, C), real), ("lse", (B, c.heads, T), single),
             ("x_mid", (N, C), real), ("rstd2", (N,), single), ("n2", (N, C), real),
             ("gate_up", (N, 2 * F), real), ("h", (N, F), real)]
    shared = [("x", (N, C), real), ("rstd", (N,), single), ("n", (N, C), real), ("increment", (N, C), real),
              ("nll", (N, c.predict), single), ("dgain", (NORM_BLOCKS, C), single),
              ("space", (rows, C), single)]
    scratch = [("dh", (N, F), real), ("dqkv", (N, c.qkv_width), real), ("delta", (B, c.heads, T), single)]
    logits = [("logits", (T * logit_windows(c, B, T)[0].stop, c.predict, c.vocab), real)]
    return layer, shared, logits, scratch


def input_table(config, B, T):
    """What a micro-batch brings to the GPU.  targets (B,T+K-1), with the room that they have in more and
    shorter rows, if only B*T stays the same; order, starts: see embedding_backward; weight, divisor: of each
    head."""
    N, V, K = B * T, config.vocab, config.predict
    return [("tokens", (N,), np.int32), ("targets", (N * K,), np.int32), ("order", (N,), np.int32),
            ("starts", (V + 1,), np.int32), ("weight", (K,), np.float32), ("divisor", (K,), np.float32)]


def muon_tables(config, precision):
    """{shape: table}: the work buffers of muon_update, which takes all matrices of one shape at once.  They
    lie where the activations are between an update and the next forward."""
    real, tables = np.uint16 if precision == "bf16" else np.float32, {}
    for shape, kinds in collections.Counter(shape for shape, _ in matrix_table(config)).items():
        n, side = kinds * config.layers, min(shape)
        tables[shape] = [("X", (n, *shape), real), ("Y", (n, *shape), real), ("A", (n, side, side), real),
                         ("B", (n, side, side), real), ("squares", (n, MATRIX_BLOCKS), np.float32)]
    return tables


def decode_table(config, precision):
    """The buffers of extend and draw: what a step is told and what it answers, which the host has, too (the
    first TOLD); the cache, a matrix qkv for each layer; and what else a layer computes in, of up to context
    tokens: reading a prompt takes most of it, decoding x, y and h."""
    c, n, rows = config, config.context, max(FEW_ROWS, config.predict)
    layer, shared, *_ = work_tables(c, 1, n, precision)
    qkv, = [(name, (c.layers, *shape), dtype) for name, shape, dtype in layer if name == "qkv"]
    prompt = [row for row in (*layer, *shared) if row[0] not in ("qkv", "space")]
    return [("tokens", (n,), np.int32), ("place", (4,), np.int32), ("drawing", (2,), np.float64),
            ("seed", (1,), np.uint64), ("ids", (rows, c.predict), np.int32), ("p", (rows,), np.float32),
            ("logits", (rows, c.predict * c.vocab), np.float32), qkv, *prompt]


def ceil_div(n, size):
    """Blocks of that size that n needs."""
    return -(-n // size)


def memory_plan(config, micro_batch, T, precision, threads=1, optimizer="adamw", gpus=1):
    """Bytes of memory of each GPU by kind (a dict) that training with micro-batches (micro_batch, T) and
    decoding take.  threads is for model_cpu's plan, which has the same face."""
    size = 4 * param_count(config)
    layer, shared, logits, scratch = map(table_bytes, work_tables(config, micro_batch, T, precision))
    activations = config.layers * layer
    work = shared + max(logits, scratch)
    if optimizer == "muon":                     # what it works in lies in the same memory, at another time
        work = max(work, max(map(table_bytes, muon_tables(config, precision).values())) - activations)
    return {"parameters": size, "gradients": size, "moments": 4 * moment_count(config, optimizer),
            **({"bf16 weights": size // 2} if precision == "bf16" else {}), "activations": activations,
            "logits and scratch": work, "inputs": table_bytes(input_table(config, micro_batch, T)),
            "decoding": table_bytes(decode_table(config, precision)), "cuBLAS and kernels": CUBLAS_BYTES,
            "CUDA's context": CONTEXT_BYTES, **({"NCCL": NCCL_BYTES} if gpus > 1 else {})}


# ------------------------------------------------------------------------------------------------------------
# 3. Compiled kernels and matrix products
# ------------------------------------------------------------------------------------------------------------
COMPUTE = {"fp32": 68, "tf32": 77, "bf16": 68}      # CUBLAS_COMPUTE_32F, or CUBLAS_COMPUTE_32F_FAST_TF32
CUDA_TYPE = {"f": 0, "H": 14}    # CUDA_R_32F, CUDA_R_16BF by NumPy's letter for float32, uint16
SCALARS = np.array([0.0, 1.0], np.float32)    # cuBLAS reads its factors from host memory, at these addresses
ZERO, ONE = SCALARS.ctypes.data, SCALARS.ctypes.data + 4

# a CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION (6) is 1
EARLY = np.array([6, 0, 1] + 15 * [0], np.int32)
# what reaches a kernel for an argument of a Python type
ARGUMENTS = {int: np.int32, bool: np.int32, float: np.float32, np.float64: np.float32,
             type(None): lambda _: np.uint64(0)}


def load_cublas():
    """-> (handle, library) of the cuBLAS that CuPy loads.  Called by ctypes: CuPy's own wrapper costs the
    host twice as much, and cannot be recorded in a graph."""
    from cupy.cuda import device                # here: loading cuBLAS takes a second, and it may be missing
    handle = ctypes.c_void_p(device.get_cublas_handle())
    library = ctypes.CDLL(f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
    i, p, q = ctypes.c_int, ctypes.c_void_p, ctypes.c_longlong
    library.cublasGemmEx.argtypes = [p, i, i, i, i, i, p, p, i, i, p, i, i, p, p, i, i, i, i]
    library.cublasGemmStridedBatchedEx.argtypes = [p, i, i, i, i, i, p, p, i, i, q, p, i, i, q, p, p, i, i, q,
                                                   i, i, i]
    library.cublasSgeam.argtypes = [p, i, i, i, i, p, p, i, p, p, i, p, i]
    library.cublasSetStream_v2.argtypes = [p, p]
    return handle, library


def arguments(values):
    """As a kernel takes them: see ARGUMENTS; arrays and NumPy's numbers as they are."""
    return tuple(ARGUMENTS[type(x)](x) if type(x) in ARGUMENTS else x for x in values)


class Gpu:
    """The kernels compiled for one model, and how its products are computed: every function below is given it
    first."""

    def __init__(self, config, precision, matmul):
        self.config, self.precision, self.kernels, self.eps = config, precision, {}, float(config.norm_eps)
        words = "Compiling the CUDA kernels for this GPU (kept for the next run)."
        notice = threading.Timer(0.5, lambda: print(words, file=sys.stderr, flush=True))
        notice.start()    # speaks only if this takes time: compiled kernels load at once
        capability = int(cupy.cuda.Device().compute_capability)
        hopper = capability == 90
        # of a GPU's architectures, sm_90a alone has Hopper's products
        options = f"-DHEAD_DIM={config.head_dim}", f"-DHOPPER={int(hopper)}", *["-arch=sm_90a"] * hopper
        try:
            self.compile("kernels.cu", [f"-DBF16={int(precision == 'bf16')}",
                                        f"-DROW_THREADS={row_threads(config.dim)}"])
            self.flash = flash_kernels(precision, config.head_dim)
            self.compile("flash_attn.cu", options, [name for name, *_ in self.flash])
            for name, _, _, shared in self.flash:
                self.kernels[name].max_dynamic_shared_size_bytes = shared
        finally:
            notice.cancel()
        # (context, 1, D), of which the second half of D says all -> (context, D/2)
        self.cos, self.sin = [cupy.asarray(np.ascontiguousarray(table[:, 0, config.head_dim // 2:]))
                              for table in rope_table(config, np.float32)]
        self.handle, self.cublas = load_cublas() if matmul == "cublas" else (None, None)
        self.transposes = precision == "tf32" and matmul == "cublas" and hopper
        early = capability >= 90 and cupy.cuda.runtime.driverGetVersion() >= 12030  # the first to record it
        self.launch_kernel = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx if early else None

    def compile(self, name, options, kernels=None):
        """kernels: the names of those to take from this file, else all that stand there."""
        code = pathlib.Path(__file__).with_name(name).read_text("utf-8")
        module = cupy.RawModule(code=code, options=tuple(options))
        for kernel in kernels or re.findall(r'"C" __global__ void (?:__launch_bounds__.*\s)?(\w+)\(', code):
            self.kernels[kernel] = module.get_function(kernel)

    def launch(self, name, grid, threads, *args, shared=0):
        """Queue a kernel.  An int reaches it as 32 bits, a float, too, None as a null pointer."""
        self.kernels[name](grid, (threads,), arguments(args), shared_mem=shared)

    def launch_early(self, name, grid, threads, *args):
        """launch, but from Hopper on the kernel starts beside the end of the one before, and itself waits for
        that before it reads what it wrote (await_last in kernels.cu).  CuPy has no word for it."""
        if not self.launch_kernel:
            return self.launch(name, grid, threads, *args)
        values = [np.array(x.data.ptr if isinstance(x, cupy.ndarray) else x) for x in arguments(args)]
        pointers = (ctypes.c_void_p * len(values))(*[value.ctypes.data for value in values])
        # CUlaunchConfig: grid, block, shared memory, stream, attributes, how many
        settings = struct.pack("7IPPI4x", *grid, *[1] * (3 - len(grid)), threads, 1, 1, 0,
                               cupy.cuda.get_current_stream().ptr, EARLY.ctypes.data, 1)
        status = self.launch_kernel(settings, ctypes.c_void_p(self.kernels[name].kernel.ptr), pointers, None)
        require(not status, f"CUDA refuses to launch {name}: status {status}.", GpuError)

    def record(self, function):
        """-> a CUDA graph of what function() launches, none of which runs now: graph.launch() queues it all
        in one call."""
        with cupy.cuda.Stream(non_blocking=True) as stream:
            self.set_stream(stream.ptr)
            stream.begin_capture()
            function()
            graph = stream.end_capture()
        self.set_stream(0)
        return graph

    def set_stream(self, stream):
        if self.cublas:
            self.cublas.cublasSetStream_v2(self.handle, stream)


def check_sizes(config):
    """ValueError, in one sentence, for a model whose sizes these kernels do not take; needs no GPU."""
    if config.head_dim not in (32, 64, 128):
        fits = [str(config.dim // width) for width in (128, 64, 32) if config.dim % width == 0]
        advice = f"take {' or '.join(fits)} heads" if fits else "dim must be a multiple of 32"
        raise ValueError(f"the GPU engine takes heads 32, 64 or 128 wide, not {config.head_dim}: {advice}.")
    require(config.dim <= 8192 and config.context <= 16384, "the GPU engine takes models up to 8192 wide and "
            f"contexts up to 16384, not {config.dim} and {config.context}.")


def check_choices(config, precision, matmul):
    """ValueError, in one sentence, for what this engine or this GPU cannot do."""
    require(precision in PRECISIONS, f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}.")
    require(matmul in ("cublas", "ours"), f"matmul must be one of cublas, ours, not {matmul!r}.")
    check_sizes(config)
    needed, name = (70, "Volta") if precision == "fp32" else (80, "Ampere")
    capability = int(cupy.cuda.Device().compute_capability)
    advice = ": use --precision fp32." if 70 <= capability < 80 else "."
    require(capability >= needed, f"{precision} needs a GPU of compute capability {needed / 10} ({name}) or "
                                  f"later, this one has {capability / 10}{advice}")


def row_threads(C):
    """Threads of a block that owns a row of C numbers, eight a thread, in whole warps."""
    return 32 * ceil_div(C, 256)


def product(gpu, out, a, b, transpose_a=False, transpose_b=False, add=False):
    """out (M,N) = a (M,I) @ b (I,N), or += with add; transposed operands lie as (I,M), (N,I).  Of stacks of
    matrices, (n,M,N) and so on without gaps, each with each.

    cuBLAS counts in columns: our row-major out is its out.T.  So we ask for out.T = b.T @ a.T: b comes first,
    and what lies row-major already is the transpose that it wants."""
    (M, N), I = out.shape[-2:], a.shape[-2 if transpose_a else -1]
    lda, ldb, ldo = [x.strides[-2] // x.itemsize for x in (a, b, out)]
    if gpu.cublas:
        stacks = out.ndim == 3                          # then each operand has a stride from matrix to matrix
        operands = [[x.data.ptr, CUDA_TYPE[x.dtype.char], ld, *[x.strides[0] // x.itemsize][:stacks]]
                    for x, ld in ((b, ldb), (a, lda), (out, ldo))]
        gemm = gpu.cublas.cublasGemmStridedBatchedEx if stacks else gpu.cublas.cublasGemmEx
        status = gemm(gpu.handle, transpose_b, transpose_a, N, M, I, ONE, *operands[0], *operands[1],
                      ONE if add else ZERO, *operands[2], *[len(out)][:stacks], COMPUTE[gpu.precision], -1)
        require(not status, f"cuBLAS refuses a product of {M} x {I} by {I} x {N}: status {status}.", GpuError)
        return
    steps_a, steps_b = (1, lda) if transpose_a else (lda, 1), (1, ldb) if transpose_b else (ldb, 1)
    for each in zip(out, a, b) if out.ndim == 3 else [(out, a, b)]:
        gpu.launch("matmul", (ceil_div(N, 64), ceil_div(M, 64)), 256, *(np.uint64(x.data.ptr) for x in each),
                   M, N, I, *steps_a, *steps_b, ldo, add, out.dtype == np.float32)


# ------------------------------------------------------------------------------------------------------------
# 4. The layers, each as a pair forward/backward
# ------------------------------------------------------------------------------------------------------------
# The contract of model_cpu: outputs first; gradients of activations are written, those of weights added to,
# or written where `add` says that nothing is there yet.
def embedding_forward(gpu, out, tokens, embed):
    """out (N,C) = rows `tokens` (N,) of embed (V,C)."""
    N, C = out.shape
    gpu.launch("embedding_forward", (N,), row_threads(C), out, tokens, embed, C)


def embedding_backward(gpu, dembed, dout, order, starts):
    """Adds to dembed (V,C).  order (N,): positions sorted by token; starts (V+1,): where each token's
    begin."""
    V, C = dembed.shape
    gpu.launch("embedding_backward", (V, ceil_div(C, 256)), 256, dembed, dout, order, starts, C)


def rmsnorm_forward(gpu, out, rstd, x, gain, before, increment=None):
    """x (N,C) = before + increment, out (N,C) its norm, rstd (N,).  Without an increment x is before."""
    N, C = x.shape
    gpu.launch("rmsnorm_forward", (N,), row_threads(C), out, rstd, x, before, increment, gain, C, gpu.eps)


def rmsnorm_backward(gpu, dx, dgain, dout, x, rstd, gain, partial, add):
    """Writes dx (N,C), or adds to it with add (the residual's gradient); adds to dgain (C,).  partial
    (NORM_BLOCKS,C): space for the first stage of dgain's sum."""
    N, C = x.shape
    blocks = min(N, NORM_BLOCKS)
    gpu.launch("rmsnorm_backward", (blocks,), row_threads(C), dx, dout, partial, x, rstd, gain, N, C, add)
    gpu.launch("column_sum", (ceil_div(C, 32),), 1024, dgain, partial, blocks, C)


def linear_forward(gpu, out, x, w):
    """out (N,O) = x (N,I) @ w.T, w (O,I)."""
    product(gpu, out, x, w, transpose_b=True)


# In tf32 Hopper's tensor cores take only operands whose numbers lie side by side along the sum, as those of
# linear_forward do.  In the backward w does not, and of a weight's gradient neither operand; with one of them
# transposed, the smaller, cuBLAS is 1.1 to 1.2 and 1.4 to 1.7 times as fast.
def transposed(gpu, x, space):
    """x (rows, columns) -> x.T, in `space`; in columns, as cuBLAS counts, out = 1 x.T + 0 out."""
    rows, columns = x.shape
    out = space.reshape(-1)[:x.size].reshape(columns, rows)
    status = gpu.cublas.cublasSgeam(gpu.handle, True, False, rows, columns, ONE, x.data.ptr, columns, ZERO,
                                    *(out.data.ptr, rows) * 2)
    require(not status, f"cuBLAS refuses to transpose {rows} x {columns}: status {status}.", GpuError)
    return out


def linear_backward(gpu, dx, dw, dout, x, w, space, add):
    """dw (O,I) (+)= dout.T @ x, summed in fp32 in every precision; then dx (N,I) = dout (N,O) @ w, which may
    lie where x did.  space: room for an operand that is transposed; add: dw may hold a sum already."""
    if not gpu.transposes:
        product(gpu, dw, dout, x, transpose_a=True, add=add)
    elif dout.size < x.size:
        product(gpu, dw, transposed(gpu, dout, space), x, add=add)
    else:
        product(gpu, dw, dout, transposed(gpu, x, space), transpose_a=True, transpose_b=True, add=add)
    product(gpu, dx, dout, transposed(gpu, w, space) if gpu.transposes else w, transpose_b=gpu.transposes)


def rope_forward(gpu, qkv, T, first):
    """Rotate, in place, the heads q and k of qkv (N, (H+2G)D), whose first row stands at position `first`.
    The backward is attention_backward's."""
    c, N = gpu.config, len(qkv)
    heads, D = c.heads + c.kv_heads, c.head_dim
    gpu.launch("rope", (ceil_div(N * heads * D // 16, 256),), 256, qkv, gpu.cos[first:], gpu.sin[first:],
               N, T, heads, D, c.qkv_width)


def flash_kernels(precision, D):
    """(name, rows of queries or keys a block takes, threads, bytes of shared memory) of the forward and of
    the two kernels of the backward in flash_attn.cu: the readable ones for fp32, those for tensor cores
    else."""
    names = "flash_forward", "flash_backward_dq", "flash_backward_dkdv"
    if precision == "fp32" or precision == "tf32" and D > 64:
        return [(name, 4096 // D, 128, 0) for name in names]
    rows = 128 if precision == "bf16" and D <= 64 else 64
    # bytes: the block's own tile, and two stages of two of the others'
    own, stages = [n * D * (2 if precision == "bf16" else 4) for n in (rows, 4 * 64)]
    shared = own + stages, 2 * own + stages, 2 * own + stages + 16 * 64
    return [(f"{name}_{precision}", rows, 128, size) for name, size in zip(names, shared)]


def attention_forward(gpu, out, lse, qkv, B, T, first=0):
    """Causal grouped-query attention.  qkv (N,(H+2G)D), already rotated; out (N,C); lse (B,H,T) keeps the log
    of each row's sum of exponentials, from which the backward computes the probabilities again.  first: the
    first of the T positions whose output is asked for; a few before it may be computed as well."""
    c = gpu.config
    name, rows, threads, shared = gpu.flash[0]
    gpu.launch(name, (c.heads, B, ceil_div(T, rows) - first // rows), threads, out, lse, qkv,
               T, c.heads, c.kv_heads, shared=shared)


def attention_backward(gpu, dqkv, dout, out, lse, qkv, delta):
    """attention_backward and rope_backward: writes dqkv (N,(H+2G)D), the gradient of v and of q and k before
    their rotation.  delta (B,H,T): scratch, what the first kernel leaves to the second."""
    c, (B, _, T) = gpu.config, lse.shape
    inputs = lse, qkv, gpu.cos, gpu.sin, T, c.heads, c.kv_heads
    name, rows, threads, shared = gpu.flash[1]
    gpu.launch(name, (c.heads, B, ceil_div(T, rows)), threads, dqkv, delta, dout, out, *inputs, shared=shared)
    name, rows, threads, shared = gpu.flash[2]
    gpu.launch(name, (c.kv_heads, B, ceil_div(T, rows)), threads, dqkv, delta, dout, *inputs, shared=shared)


def swiglu_forward(gpu, out, gate_up):
    """out (N,F) = silu(g) u, gate_up (N,2F) = [g | u]."""
    N, F = out.shape
    gpu.launch("swiglu_forward", (N, ceil_div(F, 2048)), 256, out, gate_up, F)


def swiglu_backward(gpu, gate_up, dout):
    """In place: gate_up (N,2F) becomes its gradient.  dout (N,F): that of the output."""
    N, F = dout.shape
    gpu.launch("swiglu_backward", (N, ceil_div(F, 2048)), 256, gate_up, dout, F)


def block_forward(gpu, w, saved, shared, before, increment):
    """One layer, two forward-Euler substeps:

        x = x + attention(rmsnorm(x)) @ out.T          x = x + down(silu(gate(n)) * up(n)),  n = rmsnorm(x)

    The sum at the end of a substep is left to the norm that reads it.  So the input comes as its two terms,
    before + increment (increment None: there is only one), and the output is returned as such.  w: this
    layer's weights by name; saved: this layer's arrays; shared: those that all layers share, "B" and "T", and
    "first": of the T positions of qkv and y so many stand there already, from earlier calls (extend; else
    none)."""
    B, T, first = shared["B"], shared["T"], shared["first"]
    rmsnorm_forward(gpu, saved["n1"], saved["rstd1"], saved["x_in"], w["norm1"], before, increment)
    linear_forward(gpu, saved["qkv"][first:], saved["n1"], w["qkv"])
    rope_forward(gpu, saved["qkv"][first:], T, first)
    attention_forward(gpu, saved["y"], saved["lse"], saved["qkv"], B, T, first)
    linear_forward(gpu, shared["increment"], saved["y"][first:], w["out"])

    # Euler substep 1
    rmsnorm_forward(gpu, saved["n2"], saved["rstd2"], saved["x_mid"], w["norm2"], saved["x_in"],
                    shared["increment"])
    linear_forward(gpu, saved["gate_up"], saved["n2"], w["gate_up"])
    swiglu_forward(gpu, saved["h"], saved["gate_up"])
    # (Taking these three in pieces of rows, so that gate_up is still in the cache when it is read, won
    # nothing at 32,768 tokens on an H200, and cost 1 to 2 ms a step with 8 or 16 pieces: small products lose
    # more than the cache wins.)
    linear_forward(gpu, shared["increment"], saved["h"], w["down"])
    return saved["x_mid"], shared["increment"]                                             # Euler substep 2


def block_backward(gpu, w, dw, saved, shared, dx, add):
    """In place on dx (N,C): on entry d loss / d (output), on exit d loss / d (input).  Uses the layer's
    gate_up up.  add: see linear_backward."""
    dn, dh, dqkv, dgain, space = (shared[name] for name in ("n", "dh", "dqkv", "dgain", "space"))
    # x = x + h @ down.T
    linear_backward(gpu, dh, dw["down"], dx, saved["h"], w["down"], space, add)
    # h = silu(gate) * up
    swiglu_backward(gpu, saved["gate_up"], dh)                             # gate_up holds its gradient
    # gate_up = n @ gate_up.T
    linear_backward(gpu, dn, dw["gate_up"], saved["gate_up"], saved["n2"], w["gate_up"], space, add)
    # n = rmsnorm(x_mid)
    rmsnorm_backward(gpu, dx, dw["norm2"], dn, saved["x_mid"], saved["rstd2"], w["norm2"], dgain, add=True)

    # x = x + y @ out.T
    dy = dn                                                                # the same memory
    linear_backward(gpu, dy, dw["out"], dx, saved["y"], w["out"], space, add)
    # q, k = rope(q, k);  y = attention(q, k, v)
    attention_backward(gpu, dqkv, dy, saved["y"], saved["lse"], saved["qkv"], shared["delta"])
    # qkv = n @ qkv.T
    linear_backward(gpu, dn, dw["qkv"], dqkv, saved["n1"], w["qkv"], space, add)
    # n = rmsnorm(x_in)
    rmsnorm_backward(gpu, dx, dw["norm1"], dn, saved["x_in"], saved["rstd1"], w["norm1"], dgain, add=True)


def decode_block(gpu, w, x, qkv, shared):
    """block_forward for a few new tokens, in place on x (n,C): no array but x and the layer's cache, qkv
    (context,(H+2G)D), is read again."""
    c, (n, C), groups = gpu.config, x.shape, ceil_div(len(x), GROUP_ROWS)
    H, G, D, F = c.heads, c.kv_heads, c.head_dim, c.hidden
    y, h, place = shared["y"], shared["h"], shared["place"]
    gpu.launch_early("decode_qkv", (ceil_div(c.qkv_width, 8), groups), 128, qkv, x, w["norm1"], w["qkv"],
                     gpu.cos, gpu.sin, place, n, C, H + 2 * G, H + G, D, gpu.eps)
    gpu.launch_early("decode_attention", (H, n), 512, y, qkv, place, H, G, D)
    gpu.launch_early("decode_residual", (C // 2, groups), 128, x, y, w["out"], n, C, C)
    gpu.launch_early("decode_swiglu", (ceil_div(F, 4), groups), 128, h, x, w["norm2"], w["gate_up"], n, C, F,
                     gpu.eps)
    gpu.launch_early("decode_residual", (C // 2, groups), 128, x, h, w["down"], n, F, C)


def cross_entropy_forward(gpu, logits, nll, targets, weight):
    """The losses nll (N,K) of logits (N,K,V), which become their own gradients: cross_entropy_forward and
    cross_entropy_backward of model_cpu in one pass.  targets (B,T+K-1); weight (K,): head_weight /
    divisor."""
    N, K, V = logits.shape
    T = targets.shape[1] - K + 1
    gpu.launch("cross_entropy", (N * K,), 128, logits, nll, targets, weight, T, K, V)


def cross_entropy_sum(gpu, losses, nll, divisor):
    """losses (K,) = the sums of nll (N,K) over rows, / divisor (K,)."""
    N, K = nll.shape
    gpu.launch("cross_entropy_sum", (K,), 1024, losses, nll, divisor, N, K)


def gradient_norm(gpu, state, partial, grad, hidden, clip):
    """state (3,): the norm of the flat gradient; the factor that clips the norm of all but its part `hidden`,
    a slice; and whether a norm was ever not finite (then nothing changes any more).  partial (3 SUM_BLOCKS,):
    scratch."""
    parts = [part for part in (grad[:hidden.start], grad[hidden.stop:], grad[hidden]) if part.size]
    for i, part in enumerate(parts):
        gpu.launch("sum_of_squares", (SUM_BLOCKS,), 256, partial[i * SUM_BLOCKS:], part, np.int64(part.size))
    clipped = len(parts) - (hidden.start < hidden.stop)
    gpu.launch("gradient_norm", (1,), 1024, state, partial, SUM_BLOCKS * clipped, SUM_BLOCKS * len(parts),
               float(clip))


def adamw_update(gpu, param, weights, grad, m, v, state, step, lr, beta1, beta2, eps, decay):
    """AdamW on flat arrays of one length, with the clipping of gradient_norm; grad = 0, and in bf16
    `weights`, the copy of param, follows."""
    numbers = lr, beta1, beta2, eps, decay, 1 / (1 - beta1 ** step), 1 / (1 - beta2 ** step)
    gpu.launch("adamw", (ceil_div(param.size, 2048),), 256, param, weights, grad, m, v, state,
               np.int64(param.size), *map(float, numbers))


def newton_schulz(gpu, X, Y, A, B):
    """Y = U V^T, nearly, of each X (n, rows, columns) of norm 1, which is spent.  A, B (n, side, side):
    scratch."""
    tall, side = X.shape[1] > X.shape[2], A.shape[1]
    for _ in range(5 if len(X) else 0):             # of more GPUs than matrices some have none
        product(gpu, A, X, X, transpose_a=tall, transpose_b=not tall)           # X X^T, or X^T X
        product(gpu, B, A, A)
        gpu.launch("muon_polynomial", (ceil_div(side * side, 2048), len(A)), 256, B, A, side,
                   *NEWTON_SCHULZ)                                              # a I + b A + c A^2
        product(gpu, Y, *((X, B) if tall else (B, X)))
        X, Y = Y, X                                                             # the last is in Y: 5 is odd


def muon_update(gpu, kinds, stride, work, state, lr, decay, momentum=0.95, sums=None):
    """Muon on all matrices of one shape.  kinds: [(param, weights, grad, m), ...], of each kind of matrix
    the flat arrays from that of the first layer on, weights the copy in bf16 if there is one; that of the
    next layer comes `stride` numbers later.  work: the arrays of muon_tables.  sums: an Nccl, where several
    GPUs share the products out, which are nearly all of the time: each makes those of some matrices."""
    n, rows, columns = work["X"].shape
    L, size = n // len(kinds), rows * columns
    place, blocks = (state, np.int64(stride), size), (MATRIX_BLOCKS, L)
    for i, (_, _, grad, m) in enumerate(kinds):
        X, squares = work["X"][i * L:], work["squares"][i * L:]
        gpu.launch("muon_momentum", blocks, 256, squares, m, grad, *place, momentum)
        gpu.launch("muon_input", blocks, 256, X, grad, m, squares, *place, momentum)
    part = sums.ranks.part(n, sums.ranks.rank) if sums else slice(n)
    newton_schulz(gpu, *(work[name][part] for name in ("X", "Y", "A", "B")))
    if sums:
        sums.all_gather(work["Y"])
    for i, (param, weights, _, _) in enumerate(kinds):
        gpu.launch("muon_apply", (ceil_div(size, 2048), L), 256, param, weights, work["Y"][i * L:], *place,
                   1.0 - lr * decay, 0.2 * lr * math.sqrt(max(rows, columns)))


# ------------------------------------------------------------------------------------------------------------
# 5. The model
# ------------------------------------------------------------------------------------------------------------
def pinned_bytes(size):
    """Host memory (size,) of bytes that the GPU reads and writes by itself, at the host's addresses."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)


class Inputs:
    """What a call sends to the GPU, in one copy.  From pinned host memory a copy runs beside the host, which
    must only not write there before it is done: with two pinned arrays that take turns, it waits for the last
    but one."""

    def __init__(self, device, table):
        """device: bytes on the GPU, of which the table's arrays take the front."""
        size = table_bytes(table)
        self.device, self.arrays, self.turn = device[:size], carve(device, table), 0
        self.pinned = [pinned_bytes(size) for _ in range(2)]
        self.events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self.views = [carve(array, table) for array in self.pinned]
        # this memory may have been given back by others whose copies are still queued: wait for these
        cupy.cuda.get_current_stream().synchronize()

    def send(self, values):
        """values: dict name -> array; a short one fills the front of its place."""
        self.turn ^= 1
        self.events[self.turn].synchronize()
        for name, value in values.items():
            self.views[self.turn][name].reshape(-1)[:value.size] = value.reshape(-1)
        self.device.set(self.pinned[self.turn])
        self.events[self.turn].record()


class Replay:
    """Launches that are the same each time, kernels and arguments.  Where they come often they are recorded:
    the host then queues them as one, and it is the host that a small batch waits for."""
    calls, graph = 0, None

    def __call__(self, gpu, launch):
        self.calls += 1
        if self.calls == RECORD_AT:
            self.graph = gpu.record(launch)
        (self.graph.launch if self.graph else launch)()


class Model:
    """The model on the GPU; the face of model_cpu.Model.

    precision: "bf16", "tf32", "fp32" or None for the best that the GPU has.  micro_batch: reserve the buffers
    for so many rows of config.context tokens now, which serve any rows of together as many; else they grow
    with the calls. memory_limit: bytes that this process may take while the model lives.  matmul: "cublas",
    or "ours".  training, seed: as on the CPU.  ValueError, in one sentence, where there is no GPU, it is too
    old or its memory is too small.

    params, grads: dict name -> view of the flat fp32 buffers.  After writing params by hand call
    refresh()."""
    drafts = 1      # heads whose drafts pay: two rows take 1.2 times as long as one, four 1.65 times

    def __init__(self, config, seed=0, precision=None, micro_batch=None, memory_limit=None, matmul="cublas",
                 training=True, optimizer="adamw"):
        pick("gpu")                                 # ValueError where there is none
        precision = precision or default_precision()
        check_choices(config, precision, matmul)
        self.config, self.precision, self.training, self.optimizer = config, precision, training, optimizer
        self.pool, self.memory_limit = cupy.get_default_memory_pool(), memory_limit
        if memory_limit is not None:
            self.pool.set_limit(size=max(1, int(memory_limit) - CUBLAS_BYTES - CONTEXT_BYTES))
            weakref.finalize(self, self.pool.set_limit, size=0)         # 0: none
        try:
            self.gpu = Gpu(config, precision, matmul)
        except (ImportError, RuntimeError) as error:
            raise ValueError("The GPU engine does not start; a CUDA library seems to be missing or does not "
                             f"fit the driver: run `make gpu` ({str(error).splitlines()[0]}).") from error
        self.rows, self.step, self.added = 0, 0, False          # added: grads may hold a sum already
        self.sums = None                                        # an Nccl; see train.connect
        self.position, self.cached = 0, []
        size, decoding = param_count(config), decode_table(config, precision)
        with self.room_for(micro_batch or 1, config.context):
            self.flat_params = cupy.zeros(size, np.float32)
            self.flat_grads, self.m, self.v = [cupy.zeros(n, np.float32) if training else None
                                               for n in (size, size, moment_count(config, optimizer) - size)]
            # what the products read: a bf16 copy, or the parameters themselves
            self.flat_weights = cupy.zeros(size, np.uint16) if precision == "bf16" else self.flat_params
            self.losses, self.state = cupy.zeros(config.predict, np.float32), cupy.zeros(3, np.float32)
            self.partial = cupy.empty(3 * SUM_BLOCKS, np.float32)
            memory = cupy.empty(table_bytes(decoding), np.uint8)
        self.decoder, self.replays = carve(memory, decoding), collections.defaultdict(Replay)
        self.pinned = pinned_bytes(table_bytes(decoding[:TOLD]))
        self.pinned[:] = 0                          # tokens that there are
        self.host, self.told = carve(self.pinned, decoding[:TOLD]), memory[:self.pinned.size]
        if micro_batch:
            self.buffers(micro_batch, config.context)
        self.params = param_views(self.flat_params, config)
        self.grads = param_views(self.flat_grads, config) if training else {}
        self.weights = param_views(self.flat_weights, config)       # but the gains are read in fp32:
        self.weights.update((name, gain) for name, gain in self.params.items() if gain.ndim == 1)
        self.layers = [layer_views(self.weights, i) for i in range(config.layers)]
        self.layer_grads = [layer_views(self.grads, i) for i in range(config.layers)] if training else None
        if seed is not None:
            flat = np.empty(size, np.float32)
            init_params(flat, config, seed)
            self.write(self.flat_params, flat)

    def refresh(self):
        """After writing params: the bf16 copy follows; what other weights left in the cache is forgotten."""
        self.cached = []
        if self.flat_weights is not self.flat_params:
            self.gpu.launch("copy_weights", (ceil_div(self.flat_params.size, 2048),), 256, self.flat_weights,
                            self.flat_params, np.int64(self.flat_params.size))

    def read(self, array):
        """An array of this model's, flat_params say, as a NumPy array on the host."""
        return cupy.asnumpy(array)

    def write(self, array, values):
        """Set an array of this model's, or rows of one, from a NumPy array of any float type."""
        array.set(np.ascontiguousarray(values, np.float32))
        self.refresh()

    def later(self, *arrays):
        """-> a function that waits until the GPU has these arrays, and for nothing else, and returns them as
        NumPy's: the copies, to pinned memory, are queued now, before whatever comes next."""
        pinned = [pinned_bytes(array.nbytes).view(array.dtype).reshape(array.shape) for array in arrays]
        for array, host in zip(arrays, pinned):
            array.get(out=host, blocking=False)
        event = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))

        def read():
            event.synchronize()
            return pinned
        return read

    @contextlib.contextmanager
    def room_for(self, B, T):
        """-> the memory_plan of micro-batches (B,T).  Where memory is too little inside, a ValueError says
        which would fit."""
        def plan(rows):
            return memory_plan(self.config, rows, T, self.precision, optimizer=self.optimizer)

        try:
            yield plan(B)
        except cupy.cuda.memory.OutOfMemoryError as error:
            free, need = free_memory(self.memory_limit), sum(plan(B).values())
            fits = largest_micro_batch(plan, free)
            advice = f"use --micro-batch {fits}" if fits else "use a smaller model or --device cpu"
            raise ValueError(f"A micro-batch of {B} x {T} tokens needs {need / 2**30:.2f} GiB of GPU memory, "
                             f"{free / 2**30:.2f} GiB can be had: {advice}.") from error

    def reserve(self, rows):
        """Make the work buffers anew, for so many rows of config.context tokens."""
        # give back first, then ask for more
        self.buffers_by_shape, self.saved, self.inputs, self.work, self.rows = {}, None, None, None, 0
        self.pool.free_all_blocks()
        table = input_table(self.config, rows, self.config.context)
        with self.room_for(rows, self.config.context) as plan:
            memory = cupy.empty(plan["activations"] + plan["logits and scratch"] + plan["inputs"], np.uint8)
        self.inputs, self.work, self.rows = Inputs(memory, table), memory[plan["inputs"]:], rows

    def buffers(self, B, T):
        """(layers, shared): for a micro-batch (B,T) the buffers by name, of each layer and of all.  They lie
        in the memory of reserve; where that is too small, it is made anew."""
        c, rows = self.config, ceil_div(B * T, self.config.context)
        if rows > self.rows:
            self.reserve(rows)
        if (B, T) not in self.buffers_by_shape:
            layer, common, *in_turn = work_tables(c, B, T, self.precision)
            each, width = table_bytes(layer), T + c.predict - 1
            replays = dict(forward=Replay(), backward=(Replay(), Replay()))         # the second adds
            shared = dict(B=B, T=T, first=0, **replays, **self.inputs.arrays)
            shared["targets"] = shared["targets"][:B * width].reshape(B, width)
            for table in in_turn:       # either lies behind what is common, and so in the same memory
                shared.update(carve(self.work, common + table, c.layers * each))
            layers = [carve(self.work, layer, i * each) for i in range(c.layers)]
            self.buffers_by_shape[B, T] = layers, shared
        return self.buffers_by_shape[B, T]

    def trunk(self, layers, shared):
        """tokens (B,T), already sent -> (N,C) rmsnorm(x) after the last layer, in shared["n"]."""
        terms = layers[0]["x_in"], None             # before, increment
        embedding_forward(self.gpu, terms[0], shared["tokens"], self.weights["embed"])
        for w, saved in zip(self.layers, layers):
            terms = block_forward(self.gpu, w, saved, shared, *terms)
        rmsnorm_forward(self.gpu, shared["n"], shared["rstd"], shared["x"], self.weights["norm"], *terms)
        return shared["n"]

    def logits(self, tokens):
        """(B,T) ints -> (B,T,K,V), a NumPy array of float32 on the host."""
        tokens, c = as_batch(self.config, tokens), self.config
        B, T = tokens.shape
        layers, shared = self.buffers(B, T)
        self.inputs.send({"tokens": tokens})
        with self.room_for(B, T):
            logits = cupy.empty((B * T, c.predict * c.vocab), np.float32)
        linear_forward(self.gpu, logits, self.trunk(layers, shared), self.weights["heads"])
        return cupy.asnumpy(logits).reshape(B, T, c.predict, c.vocab)

    def forward(self, tokens, targets, counted=None):
        """tokens (B,T), targets (B,T+K-1), -1 = not counted -> (K,) losses in nats, on the GPU; see
        model_cpu."""
        tokens, targets, divisor = check_batch(self.config, tokens, targets, counted)
        (B, T), c = tokens.shape, self.config
        layers, shared = self.buffers(B, T)
        # the order for embedding_backward: NumPy sorts 16-bit numbers five times as fast as 32-bit ones
        flat = tokens.reshape(-1).astype(np.uint16)
        self.inputs.send({"tokens": tokens, "targets": targets, "order": np.argsort(flat, kind="stable"),
                          "starts": np.cumsum(np.bincount(flat.astype(np.int64) + 1, minlength=c.vocab + 1)),
                          "weight": c.head_weights / divisor, "divisor": divisor})

        def launch():
            self.trunk(layers, shared)
            for windows in logit_windows(c, B, T):
                self.head_part(shared, windows)
            cross_entropy_sum(self.gpu, self.losses, shared["nll"], shared["divisor"])

        shared["forward"](self.gpu, launch)
        self.saved = layers, shared
        return self.losses.copy()

    def head_part(self, shared, windows, done=False):
        """The losses of these windows, a slice: -> (their rows of shared["n"], which is final; d loss / d
        logits), two matrices.  done: they were the last, and are there still."""
        rows = slice(windows.start * shared["T"], windows.stop * shared["T"])
        final, logits = shared["n"][rows], shared["logits"][:rows.stop - rows.start]
        flat = logits.reshape(len(final), -1)
        if not done:
            linear_forward(self.gpu, flat, final, self.weights["heads"])
            cross_entropy_forward(self.gpu, logits, shared["nll"][rows], shared["targets"][windows],
                                  shared["weight"])
        return final, flat

    def backward(self, last=True):
        """Add d(total loss)/d(param) of the last forward to grads; once a forward.  The first after an update
        finds zeros there, so its products write.  last: this is the step's last micro-batch, after which the
        gradients of several GPUs are added up: each part of the flat gradient, from its end on, as soon as it
        is done and BUCKET numbers have come together."""
        require(self.training, "this model was made with training=False: it has no gradients.")
        (layers, shared), c, sums = self.saved, self.config, self.sums
        add, self.added = self.added, True

        def launch(done=lambda i: None):
            n, dx = shared["n"], shared["increment"]    # dx in the memory of increment
            parts = logit_windows(c, shared["B"], shared["T"])
            for windows in parts:
                final, dlogits = self.head_part(shared, windows, done=len(parts) == 1)
                # logits = final @ heads.T, final in n
                linear_backward(self.gpu, final, self.grads["heads"], dlogits, final, self.weights["heads"],
                                shared["space"], add or windows.start > 0)
            # final = rmsnorm(x)
            rmsnorm_backward(self.gpu, dx, self.grads["norm"], n, shared["x"], shared["rstd"],
                             self.weights["norm"], shared["dgain"], add=False)
            for i in reversed(range(c.layers)):
                block_backward(self.gpu, self.layers[i], self.layer_grads[i], layers[i], shared, dx, add)
                done(i)
            # x = embed[tokens]
            embedding_backward(self.gpu, self.grads["embed"], dx, shared["order"], shared["starts"])

        if not (last and sums):
            return shared["backward"][add](self.gpu, launch)
        _, matrices, *_, gains = [part for _, part, *_ in update_table(c, self.optimizer)]
        asked = gains.start         # from here to the gains the sum is asked for

        def sum_from(start):
            nonlocal asked
            if asked - start >= BUCKET or start == 0:
                sums.all_reduce(self.flat_grads[start:asked])
                asked = start

        launch(lambda i: sum_from(matrices.start + i * matrix_table(c)[-1][1].stop))
        sum_from(0)
        sums.all_reduce(self.flat_grads[gains])

    def update(self, lr, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, clip=1.0):
        """One step of the optimizer by update_table, for which the norm of all gradients that AdamW takes is
        clipped to `clip`; zero the gradient.  Returns the norm of the whole before clipping, on the GPU.  A
        norm that is not finite changes nothing, now and in all later updates, and leaves the gradient to look
        at until the next backward: the host must stop."""
        self.step, self.cached, self.added = self.step + 1, [], False
        c, gpu = self.config, self.gpu
        if self.sums:
            self.sums.wait()
        gradient_norm(gpu, self.state, self.partial, self.flat_grads, muon_part(c, self.optimizer), clip)
        for rule, part, v, decayed in update_table(c, self.optimizer):
            flat = [array[part] for array in (self.flat_params, self.flat_weights, self.flat_grads, self.m)]
            if rule == "muon":
                if not self.rows:
                    self.reserve(1)                     # at the latest now there is memory to work in
                for shape, table in muon_tables(c, self.precision).items():
                    kinds = [[array[place.start:] for array in flat]
                             for each, place in matrix_table(c) if each == shape]
                    muon_update(gpu, kinds, matrix_table(c)[-1][1].stop, carve(self.work, table), self.state,
                                lr, decay, sums=self.sums)
            else:
                adamw_update(gpu, *flat, self.v[v], self.state, self.step, lr, beta1, beta2, eps,
                             decay if decayed else 0.0)
        return self.state[:1].reshape(()).copy()

    def extend(self, tokens):
        """Append n tokens at self.position and return their logits (n,K,V), a NumPy array, reading keys and
        values of all earlier tokens from the cache.  Setting position back to an earlier value forgets what
        came after it.

        For up to max(K, 8) tokens a row's arithmetic does not depend on n: verifying drafted tokens gives the
        bits of decoding them one by one.  A longer prompt goes through cuBLAS."""
        c, n = self.config, len(tokens)
        self.draw(tokens, 1, c.predict, 0, 0, 0.0, 0, 1.0, c.vocab)
        logits = self.decoder["logits"][:n]
        if n > len(logits):                         # there is only the last
            logits = cupy.empty((n, c.predict * c.vocab), np.float32)
            linear_forward(self.gpu, logits, self.decoder["n"][:n], self.weights["heads"])
        return cupy.asnumpy(logits).reshape(n, c.predict, c.vocab)

    def draw(self, tokens, rows, heads, t, seed, temperature, top_k, top_p, vocab):
        """Append tokens as extend does, and draw after each of the last `rows`, which is 1 after more than
        max(K, 8) tokens: see model_cpu.  The GPU draws, the host reads ids; the logits stay in the
        decoder's buffers."""
        tokens, c, first, n = np.asarray(tokens, np.int64), self.config, self.position, len(tokens)
        require(first + n <= c.context, f"{n} tokens at {first} do not fit the context of {c.context}.")
        check_tokens(c, tokens)
        if temperature == 0:
            temperature, top_k = 1.0, 1             # the largest alone
        host, few = self.host, n <= len(self.host["ids"])
        drawn = n if few else 1
        host["tokens"][:n] = tokens
        host["place"][:] = first, t + rows - drawn, min(top_k, c.vocab), vocab
        host["drawing"][:] = temperature, max(top_p, 1e-30)     # in fp32, too, it is above 0
        host["seed"][0] = seed

        def launch():
            cupy.cuda.runtime.memcpyAsync(self.told.data.ptr, self.pinned.ctypes.data, self.pinned.size, 1,
                                          cupy.cuda.get_current_stream().ptr)
            (self.read_few if few else self.read_many)(n, heads)
            d, answers = self.decoder, [np.uint64(host[name].ctypes.data) for name in ("ids", "p")]
            self.gpu.launch_early("draw", (drawn, heads), 1024, *answers, d["logits"], d["place"],
                                  d["drawing"], d["seed"], c.vocab)

        if few:
            self.replays[n, heads](self.gpu, launch)  # the same launches at every position
        else:
            launch()
        self.position, self.cached = first + n, []  # generate notes what it has read
        cupy.cuda.get_current_stream().synchronize()
        ids = host["ids"].reshape(-1)[:drawn * heads].reshape(drawn, heads)
        return ids[-rows:].copy(), host["p"][drawn - rows:drawn].copy()

    def read_few(self, n, heads):
        """The logits of n tokens and the first `heads` heads, by kernels made for few rows."""
        c, gpu, d, w, outputs = self.config, self.gpu, self.decoder, self.weights, heads * self.config.vocab
        x = d["x"][:n]
        embedding_forward(gpu, x, d["tokens"], w["embed"])
        for layer, qkv in zip(self.layers, d["qkv"]):
            decode_block(gpu, layer, x, qkv, d)
        gpu.launch_early("decode_logits", (ceil_div(outputs, 8), ceil_div(n, GROUP_ROWS)), 128, d["logits"],
                         x, w["norm"], w["heads"], n, c.dim, outputs, gpu.eps)

    def read_many(self, n, heads):
        """The logits of the last of n tokens, as in training, but that qkv goes to its place in the cache.
        The rows beyond n, up to a multiple of PROMPT_ROWS, are of tokens of before: nobody reads them."""
        d, first, outputs = self.decoder, self.position, heads * self.config.vocab
        rows = min(PROMPT_ROWS * ceil_div(n, PROMPT_ROWS), self.config.context - first)

        def launch():
            shared = {**{name: array[:rows] for name, array in d.items()}, "y": d["y"][:first + rows],
                      "B": 1, "T": first + rows, "first": first}
            self.trunk([{**shared, "qkv": qkv[:first + rows]} for qkv in d["qkv"]], shared)

        self.replays["prompt", rows, first](self.gpu, launch)
        linear_forward(self.gpu, d["logits"][:1, :outputs], d["n"][n - 1:n], self.weights["heads"][:outputs])


class Nccl:
    """Sums arrays over the GPUs of a run by NVIDIA's NCCL, while other kernels work on.  It has a stream of
    its own.  Events make it wait for our kernels' stream, and that for it."""
    def __init__(self, ranks):
        try:
            from cupy.cuda import nccl              # here, and not above: who has one GPU needs no NCCL
        except ImportError as error:
            raise ValueError(f"Several GPUs need NVIDIA's NCCL: run `make gpu` ({error}).") from None
        self.cuda = cupy.cuda
        self.part = ranks.part
        self.ranks = ranks
        address = ranks.all_gather(nccl.get_unique_id())[0]
        self.communicator = nccl.NcclCommunicator(ranks.size, address, ranks.rank)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.event = cupy.cuda.Event(disable_timing=True)

    def all_reduce(self, array):
        """Queue: array, of float32, becomes its sum over all GPUs, after all that is queued so far."""
        nccl = self.cuda.nccl
        self.event.record()
        self.stream.wait_event(self.event)
        self.communicator.allReduce(array.data.ptr, array.data.ptr, array.size, nccl.NCCL_FLOAT32,
                                    nccl.NCCL_SUM, self.stream.ptr)

    def wait(self):
        """Queue: whatever comes next waits for the sums."""
        self.event.record(self.stream)
        self.cuda.get_current_stream().wait_event(self.event)

    def all_gather(self, array):
        """Queue, among our kernels, which have to wait for it anyway: of array's first axis each GPU's part
        reaches all others."""
        nccl = self.cuda.nccl
        stream = self.cuda.get_current_stream().ptr
        nccl.groupStart()
        for rank in range(self.ranks.size):
            part = array[self.part(len(array), rank)]
            self.communicator.bcast(part.data.ptr, part.nbytes, nccl.NCCL_CHAR, rank, stream)
        nccl.groupEnd()


# ------------------------------------------------------------------------------------------------------------
# 6. Both engines side by side
# ------------------------------------------------------------------------------------------------------------
def main(argv):
    Parser(description="Two steps of the small model on the CPU and on the GPU.").parse_args(argv)
    pick("gpu")                                     # ValueError where there is none
    c, rng, reference = CONFIGS["small"], np.random.default_rng(0), None
    tokens, targets = (rng.integers(0, c.vocab, (16, c.context + more)) for more in (0, c.predict - 1))
    print(f"Small on random tokens, {gpu_name()}: loss of head 0 (ln V = {math.log(c.vocab):.4f}) before and "
          "after a step, its gradient's relative L2 from float64, the time of a second step.")
    precisions = ["fp32"] if default_precision() == "fp32" else reversed(PRECISIONS)
    for label, model in [("CPU float64", model_cpu.Model(c)),
                         *((f"GPU {precision}", Model(c, precision=precision)) for precision in precisions)]:
        loss = float(model.forward(tokens, targets)[0])
        model.backward()
        gradient = np.array(model.read(model.flat_grads), np.float64)           # a copy: the update spends it
        reference = gradient if reference is None else reference
        model.update(lr=1e-3)
        start = time.perf_counter()
        after = float(model.forward(tokens, targets)[0])
        model.backward()
        float(model.update(lr=1e-3))                # waits for the GPU
        milliseconds = 1e3 * (time.perf_counter() - start)
        off = np.linalg.norm(gradient - reference) / np.linalg.norm(reference)
        print(f"{label:12} {loss:9.5f} {after:9.5f} {off:9.1e} {milliseconds:9.2f} ms")


if __name__ == "__main__":
    run_script(main)
