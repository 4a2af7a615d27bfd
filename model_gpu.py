"""model_gpu.py: the model of model_cpu.py on one NVIDIA GPU, through CuPy.

Read model_cpu.py first, then open it beside this file: the layers and the optimizers are functions of the same names
there, and come in the same order.  What a function computes, and why its backward is right, stands there.  Here stands
how a GPU does it.  From top to bottom:

    1. pick                             which engine serves
    2. Gpu, gemm                        compiled kernels, how they are launched, matmuls
    3. NAME_forward / NAME_backward     every layer as a pair: a matmul by cuBLAS, or a kernel; loss, optimizers
    4. Model, Decoder, Nccl             the same methods as in model_cpu; sums over several GPUs
    5. trunk_table, work_table          what a step computes in (section 2 of model_cpu)

Read kernels.cu section by section, beside the functions that launch its kernels:

    function here                      kernels, and where
    embedding_forward, _backward       kernels.cu, section 2
    rmsnorm_forward, _backward         section 3
    rope_forward                       section 4
    attention_forward, _backward       flash_attn.cu; it has rope_backward, too
    swiglu_forward, _backward          section 5
    cross_entropy_forward              section 6; its gradient is written by the same kernel
    gradient_norm, *_update            section 6
    newton_schulz, Model.refresh       section 6
    gemm, with --matmul ours           section 7
    decode_block, decode_attention     section 8
    Decoder._read_few                  section 8
    Decoder._draw                      section 9: sample and gumbel

What reads differently from model_cpu, and why:

    rmsnorm_forward     reads two terms, before + increment: it makes the residual's sum on its way
    block_forward       so x comes as two terms, and is returned as two
    swiglu_backward     writes its gradient where its input was
    block_backward      reuses memory: dy lies where dn was
    Model.forward       also computes the gradient of the logits, since both need the softmax

What has no function here:

    rope_backward                                in the kernels of attention_backward
    cross_entropy_backward, head_targets         in the kernel of cross_entropy_forward
    attend, causal_mask                          in the kernels of attention
    rotated_part, split_heads, by_group          the kernels know where heads lie
    layer_matrices                               muon_tables says where matrices lie

model_cpu's Model._trunk is the function trunk here, which the Decoder calls, too.  Its Workspace is the memory that
Model._reserve allocates.  What both engines share, such as generate, stands in model_cpu alone.

Three precisions.  A number in 32, 19 or 16 bits, each letter a bit: s sign, e exponent, m mantissa.

    fp32    s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm     everything in 32 bits: to check, and on old GPUs
    tf32    s eeeeeeee mmmmmmmmmm                  stored as fp32; matmuls use only these bits of their inputs
    bf16    s eeeeeeee mmmmmmm                     activations, and a copy of the weights that the matmuls read

A leading 1 of the mantissa is not stored, so numbers have 24, 11 or 8 significant bits.
The weights themselves ("master" weights), their gradients and moments are always fp32, because an update is often
smaller than the spacing of bf16 numbers and would be lost.  Sums, norms, softmax and losses are computed in fp32 in
each.  (But in bf16 the residual stream x is stored rounded to bf16 after each substep.)

How a step stays fast.  The host only launches work, in order, and runs ahead of the GPU: no part of a step waits for
a result, and the work memory was allocated before.  What one kernel writes and the next one reads is the traffic that
costs time, so neighbouring functions are fused (kernels.cu).

What is not here: the CUDA itself (kernels.cu, flash_attn.cu), and any GPU that is not NVIDIA's.  The file can be
imported where there is no CuPy or no GPU; pick and Model then say what is missing.
"""
import collections
import dataclasses
import functools
import math
import pathlib
import struct
import sys
import threading
from ctypes import CDLL, byref, c_float, c_longlong, c_size_t, c_void_p

import model_cpu            # first: it says what to do where NumPy is missing
import numpy as np
from numpy import float32, int32, int64, uint8, uint16, uint64
from model_cpu import (NEWTON_SCHULZ, Arrays, Sampling, as_batch, check_batch, check_tokens,
                       init_params, layer_views, matrix_table, moment_count, muon_part,
                       param_count, param_views, rope_table, slices_of, update_table)
from script import GpuError, require

try:
    import cupy
    import cupyx
except ImportError:
    cupy = None

PRECISIONS = ("bf16", "tf32", "fp32")
# How many blocks the kernels have whose blocks leave partial sums.  The numbers are fixed, so every GPU adds the same
# parts in the same order.
NORM_BLOCKS = 1056          # of rmsnorm_backward: 8 for each multiprocessor of an H100
SUM_BLOCKS = 1024           # of sum_of_squares
MATRIX_BLOCKS = 64          # of muon_momentum, for each matrix; and of muon_input, which adds up what that leaves
RECORD_AT = 3               # the third call with the same shape, (B, T) or in decoding (tokens, heads), is recorded as
                            # a CUDA graph, which is replayed from then on
SHAPES = 32                 # when a Model has seen more shapes than these, it throws its arrays and graphs away
FEW_ROWS = 8                # up to 8 tokens (or K, if that is more) are read by the kernels of decoding
GROUP_ROWS = 4              # 4 of them share one reading of the weights; kernels.cu has the same constant
RESERVE = 1 << 30           # bytes that CuPy leaves free: for NCCL, CUDA graphs and other programs
HOPPER = True               # False: every GPU runs what a GeForce RTX 30 or 40 runs, to test and to time that: no
                            # wgmma, no early launches, attention's tiles for 100 KB of shared memory


# ------------------------------------------------------------------------------------------------------------
# 1. Which engine serves
# ------------------------------------------------------------------------------------------------------------
def why_no_gpu():
    """None if there is a GPU to use, else a sentence that says what is missing."""
    if cupy is None:
        return "The GPU needs CuPy: run `make gpu` (or `pip install cupy-cuda12x`)."
    if cupy.cuda.is_available():
        return None
    return ("CuPy finds no GPU: there is none, or no NVIDIA driver, or one that is too old for this CuPy "
            "(nvidia-smi shows which CUDA the driver serves).")


def pick(device):
    """The engine's module for "cpu", "gpu" (ValueError if there is none) or "auto" (the GPU if there is
    one)."""
    if device == "cpu":
        return model_cpu
    reason = why_no_gpu()
    if reason and device == "gpu":
        raise ValueError(f"{reason}  On a CPU (--device cpu) small takes minutes, and larger models hours or days.")
    return model_cpu if reason else sys.modules[__name__]


def take_gpu(number):
    """From here on this process computes on the GPU with this number on its host, counted round and round: of two GPUs
    number 2 is the first again.  (In training two processes that take the same one are refused by Nccl.)"""
    cupy.cuda.Device(number % cupy.cuda.runtime.getDeviceCount()).use()


def capability():
    """The compute capability of this process's GPU, times ten: 90 is a Hopper."""
    return int(cupy.cuda.Device().compute_capability)


def current_stream():
    """Where kernels are queued now."""
    return cupy.cuda.get_current_stream()


def default_precision():
    """bf16 where this GPU's tensor cores have that, else fp32."""
    return "bf16" if capability() >= 80 else "fp32"


# ------------------------------------------------------------------------------------------------------------
# 2. Compiled kernels and matmuls
# ------------------------------------------------------------------------------------------------------------
# A CUlaunchAttribute has 72 bytes: 4 of the id, 6 = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION; 4 of
# padding; 64 of the value, which begins with the number 1
EARLY = np.array([6, 0, 1] + 15 * [0], int32)


@functools.cache                                # the models of a process share it
def load_cublas():
    """The cuBLAS that CuPy loads, with two attributes more: `handle`, and `workspace`, its address and bytes.
    We call it by ctypes, because CuPy's own wrapper costs the host twice as much, and cannot be recorded in a CUDA
    graph.  The workspace has the size that cuBLAS recommends for a Hopper.  Without it cuBLAS would allocate one,
    and another for each graph."""
    from cupy.cuda import device                # here: loading cuBLAS takes a second, and it may be missing
    library = CDLL(f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
    library.handle = c_void_p(device.get_cublas_handle())
    size = 32 << 20
    library.workspace = c_void_p(cupy.cuda.runtime.malloc(size)), c_size_t(size)
    return library


def as_argument(x):
    """x as a kernel takes it: Python's numbers (and float64) in 32 bits, None as a null pointer.  Arrays and NumPy's
    other numbers are passed as they are."""
    if x is None:
        return uint64(0)
    if isinstance(x, int):
        return int32(x)
    return float32(x) if isinstance(x, float) else x


class Gpu:
    """The kernels compiled for one model, and how they and cuBLAS are called.  It is the first argument of
    every function below that launches something."""

    def __init__(self, config, precision, matmul):
        self.config = config
        self.precision = precision
        self.real = uint16 if precision == "bf16" else float32      # NumPy has no bf16
        self.eps = float(config.norm_eps)
        notice = threading.Timer(0.5, print, ["Compiling the CUDA kernels for this GPU (kept for the next run)."],
                                 {"file": sys.stderr})
        notice.start()    # it prints after half a second; kernels that were compiled before load sooner
        hopper = HOPPER and capability() == 90
        room = cupy.cuda.Device().attributes["MaxSharedMemoryPerMultiprocessor"]
        large = HOPPER and room >= 132 << 10      # two blocks of 65 KB, and 1 KB for each
        parts, self.flash_rows, self.shared_bytes = flash_sizes(precision, config.head_dim, large)
        options = [f"-DBF16={int(precision == 'bf16')}", f"-DROW_THREADS={row_threads(config.dim)}",
                   f"-DHEAD_DIM={config.head_dim}", f"-DHOPPER={int(hopper)}", f"-DPARTS={parts}"]
        if hopper:                              # sm_90a alone has Hopper's own matmul instructions (wgmma)
            options.append("-arch=sm_90a")      # CuPy adds an -arch of its own; the compiler takes both
        # one text, in this order: flash_attn.cu uses the types and helpers of kernels.cu
        folder = pathlib.Path(__file__).parent
        code = "".join((folder / name).read_text("utf-8") for name in ("kernels.cu", "flash_attn.cu"))
        try:
            module = cupy.RawModule(code=code, options=tuple(options))
            module.compile()
        finally:
            notice.cancel()
        self.kernel = functools.cache(module.get_function)          # by name
        for name, size in self.shared_bytes.items():
            self.kernel(name).max_dynamic_shared_size_bytes = size
        # rope_table gives (2,context,1,D).  The first half of D repeats the second with -sin.  The kernels want only
        # the second: cos and sin -> (context,2,D/2)
        tables = rope_table(config, float32)[:, :, 0, config.head_dim // 2:]
        self.angles = cupy.asarray(np.stack(tables, axis=1))
        self.cublas = load_cublas() if matmul == "cublas" else None
        self.launch_kernel = None
        # for launch_early; only drivers from CUDA 12.3 on can record such a launch in a CUDA graph
        if HOPPER and capability() >= 90 and cupy.cuda.runtime.driverGetVersion() >= 12030:
            self.launch_kernel = CDLL("libcuda.so.1").cuLaunchKernelEx

    def launch(self, name, grid, threads, *args):
        """Queue a kernel.  grid: the number of its blocks, or two or three of them; args: see as_argument."""
        blocks = grid if isinstance(grid, tuple) else (grid,)
        self.kernel(name)(blocks, (threads,), tuple(map(as_argument, args)),
                           shared_mem=self.shared_bytes.get(name, 0))

    def launch_early(self, name, grid, threads, *args):
        """launch, with a grid of two numbers.  From Hopper on the kernel starts beside the end of the one before it
        (programmatic dependent launch).  It waits for that one itself, before it reads what that one wrote
        (await_last in kernels.cu).  CuPy cannot launch so."""
        if not self.launch_kernel:
            return self.launch(name, grid, threads, *args)
        values = [np.array(x.data.ptr if isinstance(x, cupy.ndarray) else x)
                  for x in map(as_argument, args)]
        pointers = (c_void_p * len(values))(*[value.ctypes.data for value in values])
        # a CUlaunchConfig: 7 integers (grid, block, bytes of shared memory), which struct pads to 32 bytes; two
        # pointers (the stream, the attributes); how many attributes; 4 bytes of padding
        settings = struct.pack("7IPPI4x", *grid, 1, threads, 1, 1, 0, current_stream().ptr, EARLY.ctypes.data,
                               1)
        check_status(self.launch_kernel(settings, c_void_p(self.kernel(name).kernel.ptr), pointers, None),
                     f"a launch of {name}")


def check_status(status, what):
    """GpuError where a library of NVIDIA's has refused a call."""
    if status:
        raise GpuError(f"the driver or cuBLAS refuses {what}: status {status}.")


def check_sizes(config):
    """ValueError, in one sentence, for a model whose sizes these kernels do not take; needs no GPU."""
    require(config.head_dim in (32, 64, 128), "the GPU engine takes heads 32, 64 or 128 wide, not "
            f"{config.head_dim}: choose heads so that {config.dim} / heads is one of these.")
    require(config.dim <= 6144 and config.context <= 16384, "the GPU engine takes models up to 6144 wide and "
            f"contexts up to 16384, not {config.dim} and {config.context}.")


def ceil_div(n, size):
    """Blocks of that size that n needs."""
    return -(-n // size)


def row_threads(C):
    """Threads of a block that owns a row of C numbers, eight a thread, in whole warps."""
    return 32 * ceil_div(C, 256)


def gemm(gpu, out, a, b, transpose_a=False, transpose_b=False, add=False):
    """The matmul out (M,N) = a (M,inner) @ b (inner,N), or += with add.  A transposed operand lies as (inner,M) or
    (N,inner).  In stacks of n matrices, (n,M,N) and so on, matrix i of a is multiplied with matrix i of b.  No array
    has gaps.

    To cuBLAS, which stores column by column, a matrix of ours looks like its transpose.  So we ask it for out.T = b.T @
    a.T: b comes first, and nothing is moved."""
    M, N = out.shape[-2:]
    inner = a.shape[-2 if transpose_a else -1]
    library = gpu.cublas
    if not library:
        grid = ceil_div(N, 64), ceil_div(M, 64), out.size // (M * N)
        gpu.launch("matmul", grid, 256, out, a, b, M, N, inner, transpose_a, transpose_b, add, out.dtype == float32)
        return
    # the stream of the kernels around it; setting it resets the workspace, so that is set again
    check_status(library.cublasSetStream_v2(library.handle, c_void_p(current_stream().ptr)), "a stream")
    check_status(library.cublasSetWorkspace_v2(library.handle, *library.workspace), "a workspace")
    operands = []
    for x in (b, a, out):       # ctypes passes Python's ints in 32 bits; wider numbers are wrapped
        kind = 14 if x.dtype == uint16 else 0                       # CUDA_R_16BF, or CUDA_R_32F
        operands.append([c_void_p(x.data.ptr), kind, x.shape[-1]])
        if x.ndim == 3:         # and how many numbers lie from matrix to matrix
            operands[-1].append(c_longlong(x[0].size))
    function = library.cublasGemmEx if out.ndim == 2 else library.cublasGemmStridedBatchedEx
    compute = 77 if gpu.precision == "tf32" else 68     # CUBLAS_COMPUTE_32F_FAST_TF32, or CUBLAS_COMPUTE_32F
    # out = 1 * product + add * out; 1 and add are passed by their addresses.  Of stacks also the number of matrices
    status = function(library.handle, transpose_b, transpose_a, N, M, inner, byref(c_float(1)), *operands[0],
                      *operands[1], byref(c_float(add)), *operands[2], *out.shape[:-2], compute, -1)
    check_status(status, f"a matmul of {M} x {inner} by {inner} x {N}")


# ------------------------------------------------------------------------------------------------------------
# 3. The layers, each as a pair forward/backward
# ------------------------------------------------------------------------------------------------------------
# The contract of model_cpu: outputs first (but a whole block's functions begin with the weights, and newton_schulz with
# its input); gradients of activations are written, those of weights added to.  rmsnorm_backward with `add` adds to dx,
# too.
def embedding_forward(gpu, out, tokens, embed):
    """out (N,C) = rows `tokens` (N,) of embed (V,C)."""
    N, C = out.shape
    gpu.launch("embedding_forward", N, row_threads(C), out, tokens, embed, C)


def embedding_backward(gpu, dembed, dout, order, starts):
    """Adds to dembed (V,C).  order (N,): positions sorted by token; starts (V+1,): where in order each
    token's positions begin."""
    V, C = dembed.shape
    gpu.launch("embedding_backward", (V, ceil_div(C, 256)), 256, dembed, dout, order, starts, C)


def rmsnorm_forward(gpu, out, rstd, x, gain, before, increment):
    """x (N,C) = before + increment, out (N,C) its norm, rstd (N,).  increment None: x is before."""
    N, C = x.shape
    gpu.launch("rmsnorm_forward", N, row_threads(C), out, rstd, x, gain, before, increment, C, gpu.eps)


def rmsnorm_backward(gpu, dx, dgain, dout, x, rstd, gain, partial, add):
    """Writes dx (N,C), or adds to it with add (the residual's gradient); adds to dgain (C,).  partial
    (NORM_BLOCKS,C): space for the first stage of dgain's sum."""
    N, C = x.shape
    blocks = min(N, NORM_BLOCKS)
    gpu.launch("rmsnorm_backward", blocks, row_threads(C), dx, partial, dout, x, rstd, gain, N, C, add)
    gpu.launch("column_sum", C // 32, 1024, dgain, partial, blocks, C)


def linear_forward(gpu, out, x, w):
    """out (N,O) = x (N,I) @ w.T, w (O,I), or the first O rows of it."""
    gemm(gpu, out, x, w, transpose_b=True)


def linear_backward(gpu, dx, dw, dout, x, w, add=True):
    """dw (O,I) += dout.T @ x, summed in fp32 in every precision; then dx (N,I) = dout (N,O) @ w.  dx may lie where x
    lies.  add False: dw holds zeros, and is not read."""
    gemm(gpu, dw, dout, x, transpose_a=True, add=add)
    gemm(gpu, dx, dout, w)


def rope_forward(gpu, qkv, T, cache=None, lengths=None):
    """Rotate, in place, the heads q and k of qkv (N, (H+2G)D): T tokens of each text.  attention_backward has the
    backward.

    cache (texts,stride,2GD), or None: the KV caches of the texts, to which k, rotated, and v are copied.
    lengths: None, if the T tokens are the first of their text; or (N,), with T 1: how many tokens come before each."""
    c = gpu.config
    N = len(qkv)
    heads = c.heads + c.kv_heads
    stride = 0
    if cache is not None:
        heads += c.kv_heads
        stride = cache.shape[1]
    gpu.launch("rope", ceil_div(N * heads * c.head_dim // 16, 256), 256, qkv, cache, gpu.angles, lengths,
               N, T, stride, c.heads, c.kv_heads, c.head_dim)


def flash_sizes(precision, D, large):
    """-> (the macro PARTS of flash_attn.cu; the rows of queries or keys that a block takes; of each kernel its bytes of
    shared memory).  The readable kernels serve for fp32, and for tf32 with D = 128, where a block of the others would
    need 192 KB of it; else those for tensor cores.  large: whether a multiprocessor has room for two blocks of two
    parts."""
    if precision == "fp32" or precision == "tf32" and D > 64:
        return 0, 4096 // D, {}
    parts = 2 if large and precision == "bf16" and D <= 64 else 1
    row = D * (2 if precision == "bf16" else 4)     # bytes
    own = 64 * parts * row                          # the block's own tile
    stages = 4 * 64 * row                           # two stages of 64 rows of two arrays: K and V, or Q and dO
    return parts, 64 * parts, {"flash_forward": own + stages,
                               "flash_backward_dq": 2 * own + stages,
                               # and lse and delta of 64 queries in two stages, 4 bytes each
                               "flash_backward_dkdv": 2 * own + stages + 16 * 64}


def attention_forward(gpu, out, lse, qkv, B, T):
    """Causal grouped-query attention.  qkv (N,(H+2G)D), already rotated; out (N,C); lse (B,H,T) keeps the log
    of each row's sum of exponentials, from which the backward computes the probabilities again."""
    H = gpu.config.heads
    gpu.launch("flash_forward", (H, B, ceil_div(T, gpu.flash_rows)), 128, out, lse, qkv, T, H, gpu.config.kv_heads)


def attention_backward(gpu, dqkv, dout, out, lse, qkv, delta):
    """attention_backward and rope_backward: writes dqkv (N,(H+2G)D), the gradient of v, and of q and k before their
    rotation.  delta (B,H,T): scratch, which the first kernel writes and the second reads."""
    B, H, T = lse.shape
    G = gpu.config.kv_heads
    for name, heads in ("flash_backward_dq", H), ("flash_backward_dkdv", G):
        gpu.launch(name, (heads, B, ceil_div(T, gpu.flash_rows)), 128, dqkv, dout, out, lse, qkv, delta, gpu.angles,
                   T, H, G)


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

    The norm that reads x makes the sum at the end of a substep:

        x_in = before + increment                    the first rmsnorm_forward below (increment None: x_in is before)
        x_mid = x_in + increment of substep 1        the second one
        x = x_mid + increment of substep 2           returned as these two terms, for the next layer's norm

    w: this layer's weights by name; saved: this layer's arrays; shared: those of all layers, with B and T.
    saved.cache, shared.lengths: see rope_forward."""
    qkv = saved.qkv
    lengths = shared.lengths
    rmsnorm_forward(gpu, saved.n1, saved.rstd1, saved.x_in, w.norm1, before, increment)              # (N,C)
    linear_forward(gpu, qkv, saved.n1, w.qkv)                                       # (N,C) -> (N,(H+2G)D)
    rope_forward(gpu, qkv, shared.T, saved.cache, lengths)
    if lengths is None:
        attention_forward(gpu, saved.y, saved.lse, qkv, shared.B, shared.T)         # (N,(H+2G)D) -> (N,C)
    else:
        decode_attention(gpu, saved.y, qkv, saved.cache, lengths, saved.cache.shape[1])
    increment = shared.increment
    linear_forward(gpu, increment, saved.y, w.out)                                  # (N,C)

    # Euler substep 1
    rmsnorm_forward(gpu, saved.n2, saved.rstd2, saved.x_mid, w.norm2, saved.x_in, increment)
    linear_forward(gpu, saved.gate_up, saved.n2, w.gate_up)                         # (N,C) -> (N,2F)
    swiglu_forward(gpu, saved.h, saved.gate_up)                                     # (N,2F) -> (N,F)
    linear_forward(gpu, increment, saved.h, w.down)                                 # (N,F) -> (N,C)
    return saved.x_mid, increment                                                   # Euler substep 2


def block_backward(gpu, w, dw, saved, shared, dx, add):
    """In place on dx (N,C): on entry d loss / d (output), on exit d loss / d (input).  The layer's gate_up is
    overwritten.  add: see linear_backward."""
    dn = shared.n
    dh = shared.dh
    dqkv = shared.dqkv
    dgain = shared.dgain

    def linear(dx, name, dout, x):
        linear_backward(gpu, dx, getattr(dw, name), dout, x, getattr(w, name), add)

    # x = x + h @ down.T
    linear(dh, "down", dx, saved.h)                                                 # (N,C) -> (N,F)
    # h = silu(gate) * up
    dgate_up = saved.gate_up                                                        # the same memory
    swiglu_backward(gpu, dgate_up, dh)                                              # (N,F) -> (N,2F)
    # gate_up = n @ gate_up.T
    linear(dn, "gate_up", dgate_up, saved.n2)                                       # (N,2F) -> (N,C)
    # n = rmsnorm(x_mid)
    rmsnorm_backward(gpu, dx, dw.norm2, dn, saved.x_mid, saved.rstd2, w.norm2, dgain, add=True)

    # x = x + y @ out.T
    dy = dn                                                                         # the same memory
    linear(dy, "out", dx, saved.y)                                                  # (N,C)
    # q, k = rope(q, k);  y = attention(q, k, v)
    attention_backward(gpu, dqkv, dy, saved.y, saved.lse, saved.qkv,
                       shared.delta)                                                # (N,C) -> (N,(H+2G)D)
    # qkv = n @ qkv.T
    linear(dn, "qkv", dqkv, saved.n1)                                               # (N,(H+2G)D) -> (N,C)
    # n = rmsnorm(x_in)
    rmsnorm_backward(gpu, dx, dw.norm1, dn, saved.x_in, saved.rstd1, w.norm1, dgain, add=True)


def decode_attention(gpu, y, qkv, cache, lengths, stride):
    """attention_forward of n new tokens, whose k and v are in the KV cache already: y (n,C) of the q in qkv
    (n,(H+2G)D).  stride: tokens from the cache of a row to that of the next; 0 where all are of one text."""
    c = gpu.config
    gpu.launch_early("decode_attention", (c.heads, len(y)), 512, y, qkv, cache, lengths, stride, c.heads,
                     c.kv_heads, c.head_dim)


def decode_block(gpu, w, cache, shared, n):
    """block_forward for a few new tokens of one text, in place on the first n rows of shared.x (n,C).  The
    layer's KV cache is the only other array that is read again."""
    c = gpu.config
    C = c.dim
    x = shared.x
    groups = ceil_div(n, GROUP_ROWS)
    gpu.launch_early("decode_qkv", (c.qkv_width // 8, groups), 128, shared.qkv, cache, x, w.norm1, w.qkv,
                     gpu.angles, shared.lengths, n, C, c.heads, c.kv_heads, c.head_dim, gpu.eps)
    decode_attention(gpu, shared.y[:n], shared.qkv, cache, shared.lengths, 0)
    gpu.launch_early("decode_residual", (C // 2, groups), 128, x, shared.y, w.out, n, C, C)
    gpu.launch_early("decode_swiglu", (c.hidden // 4, groups), 128, shared.h, x, w.norm2, w.gate_up,
                     n, C, c.hidden, gpu.eps)
    gpu.launch_early("decode_residual", (C // 2, groups), 128, x, shared.h, w.down, n, c.hidden, C)


def cross_entropy_forward(gpu, losses, nll, logits, inputs, T):
    """losses (K,): of each head the weighted sum of nll over the rows, divided by divisor (K,).  nll (N,K): the loss of
    each target.  logits (N,K*V) become their own gradients: cross_entropy_forward and cross_entropy_backward of
    model_cpu in one pass.  inputs: the arrays of Model.inputs."""
    N, K = nll.shape
    gpu.launch("cross_entropy", N * K, 128, nll, logits, inputs.targets, inputs.scales, inputs.weights,
               T, K, gpu.config.vocab)
    gpu.launch("cross_entropy_sum", K, 1024, losses, nll, inputs.divisor, inputs.weights, T, N, K)


def gradient_norm(gpu, state, partial, grad, muon, clip):
    """Fills state (3,): the norm of the flat gradient; the factor that clips the norm of AdamW's part of it; and the
    number of updates that were skipped: after one norm that is not finite all later ones are.  muon: the
    slice that is Muon's part.  partial (3 SUM_BLOCKS,): scratch."""
    parts = grad[:muon.start], grad[muon.stop:], grad[muon]
    for i, part in enumerate(parts):                # the sum of an empty part is 0
        gpu.launch("sum_of_squares", SUM_BLOCKS, 256, partial[i * SUM_BLOCKS:], part, int64(part.size))
    gpu.launch("gradient_norm", 1, 1024, state, partial, 2 * SUM_BLOCKS, 3 * SUM_BLOCKS, float(clip))


def adamw_update(gpu, param, weights, grad, m, v, state, step, lr, beta1, beta2, eps, decay):
    """AdamW on flat arrays of one length, with the clipping of gradient_norm; grad = 0, and in bf16
    `weights`, the copy of param, follows."""
    numbers = lr, beta1, beta2, eps, decay, 1 / (1 - beta1 ** step), 1 / (1 - beta2 ** step)
    gpu.launch("adamw", ceil_div(param.size, 2048), 256, param, weights, grad, m, v, state,
               int64(param.size), *map(float, numbers))


def newton_schulz(gpu, X, Y, A, B):
    """Y = U V^T, nearly, of each X (n, rows, columns) of norm 1.  X is overwritten.  A, B (n, side, side): scratch."""
    side = A.shape[1]
    tall = X.shape[1] > X.shape[2]
    for source, target in 2 * [(X, Y), (Y, X)] + [(X, Y)]:                      # five rounds, the last into Y
        gemm(gpu, A, source, source, transpose_a=tall, transpose_b=not tall)              # X X^T, or X^T X
        gemm(gpu, B, A, A)
        gpu.launch("muon_polynomial", (ceil_div(side * side, 2048), len(A)), 256, B, A, side,
                   *NEWTON_SCHULZ)                                              # a I + b A + c A^2
        if tall:
            gemm(gpu, target, source, B)
        else:
            gemm(gpu, target, B, source)


def muon_update(gpu, flats, starts, work, state, lr, decay, momentum):
    """Muon on all matrices of one shape.  flats: params, weights (in bf16 their copy), gradients and m of the
    layers' matrices, flat; starts: where in a layer each matrix of this shape begins.  work: the arrays of
    muon_tables."""
    params, weights, grads, m = flats
    X, Y, A, B, squares = work.values()             # in the order of muon_tables
    n, rows, columns = X.shape
    L = n // len(starts)
    size = rows * columns
    blocks = MATRIX_BLOCKS, L
    place = state, int64(params.size // L), size            # from layer to layer, and of a matrix
    for i, start in enumerate(starts):
        gpu.launch("muon_momentum", blocks, 256, squares[i * L:], m[start:], grads[start:], *place, momentum)
        gpu.launch("muon_input", blocks, 256, X[i * L:], grads[start:], m[start:], squares[i * L:], *place, momentum)
    newton_schulz(gpu, X, Y, A, B)
    for i, start in enumerate(starts):
        gpu.launch("muon_apply", (ceil_div(size, 2048), L), 256, params[start:], weights[start:], Y[i * L:],
                   *place, 1.0 - lr * decay, 0.2 * lr * math.sqrt(max(rows, columns)))


# ------------------------------------------------------------------------------------------------------------
# 4. The model
# ------------------------------------------------------------------------------------------------------------
def trunk(gpu, w, layers, shared):
    """tokens (B,T), already sent -> (N,C) rmsnorm(x) after the last layer, in shared.n.  w: all weights by
    name; layers: of each layer its arrays."""
    terms = layers[0].x_in, None                    # whose sum is x: before, increment
    embedding_forward(gpu, terms[0], shared.tokens, w["embed"])
    for i, saved in enumerate(layers):
        terms = block_forward(gpu, layer_views(w, i), saved, shared, *terms)
    rmsnorm_forward(gpu, shared.n, shared.rstd, shared.x, w["norm"], *terms)
    return shared.n


def allocate(empty, table):
    """-> (memory, dict of the arrays that lie in it) for a table.  empty: makes it, on the GPU or pinned."""
    memory = empty(table_bytes(table), uint8)
    return memory, carve(memory, table)


class Inputs:
    """What a call sends to the GPU, in one copy.  From pinned host memory a copy runs while the host goes on.  Before
    the host writes there what step n needs, `send` waits until the copy of step n - 1 is done.  The GPU has then just
    begun step n - 1.  So it has work while the host prepares step n."""

    def __init__(self, table):
        self.device, self.arrays = allocate(cupy.empty, table)
        self.pinned, self.views = allocate(cupyx.empty_pinned, table)
        self.copied = cupy.cuda.Event(disable_timing=True)
        # this pinned memory may have had another owner, whose copies are still queued: wait for these
        current_stream().synchronize()

    def send(self, **values):
        """values: arrays by name; a short one fills the front of its place."""
        self.copied.synchronize()
        for name, value in values.items():
            self.views[name][:value.size] = value.ravel()
        self.device.set(self.pinned)
        self.copied.record()


class Replay:
    """Launches that are the same each time, kernels and arguments.  At their third use they are recorded as a CUDA
    graph (stream capture).  The host then queues all of them in one call.  With a small batch the GPU would wait for
    the host without that.  What is recorded must not allocate memory, must not wait, and must copy only from
    pinned memory."""
    calls = 0
    graph = None

    def __call__(self, launch):
        self.calls += 1
        if self.calls == RECORD_AT:                 # launch() is only recorded here, it does not run
            with cupy.cuda.Stream(non_blocking=True) as stream:
                stream.begin_capture()
                launch()
                self.graph = stream.end_capture()
        if self.graph:
            self.graph.launch()
        else:
            launch()


class Model:
    """The model on the GPU, with the methods of model_cpu.Model.

    precision: "bf16", "tf32", "fp32" or None for the best that the GPU has.  micro_batch: the rows of config.context
    tokens for which work memory is reserved now.  Where they do not fit, half of them are tried, and so on; `rows`
    says how many it became.  The memory serves more and shorter rows, too.  Without micro_batch it grows with the
    calls.
    matmul: "cublas", or "ours".  training: False leaves out gradients and moments.  seed, optimizer: as on the CPU.
    ValueError where there is no GPU or it is
    too old; CuPy's OutOfMemoryError where one row does not fit.

    params, grads: dict name -> view of the flat fp32 buffers.  Call refresh() after writing params by
    hand."""
    # On an H200 two rows took 1.2 times as long as one, four 1.65 times.  So a text came 1.1 to 1.3 times as fast with
    # one draft, and 0.9 to 1.2 times with three (at ca2fdb9)
    draft_heads = 1
    added = True            # whether grads may hold more than zeros: False after an update, until the next backward

    def __init__(self, config, seed=0, precision=None, micro_batch=None, matmul="cublas", training=True,
                 optimizer="adamw"):
        pick("gpu")                                 # ValueError where there is none
        precision = precision or default_precision()
        needed = 70 if precision == "fp32" else 80
        require(capability() >= needed, f"{precision} needs a GPU of compute capability {needed / 10} or "
                f"later, this one has {capability() / 10}; --precision fp32 needs 7.0.")
        check_sizes(config)
        self.config = config
        self.optimizer = optimizer
        try:
            self.gpu = Gpu(config, precision, matmul)
        except (ImportError, RuntimeError) as error:
            raise ValueError("The GPU engine does not start; a CUDA library seems to be missing or does not "
                             f"fit the driver: run `make gpu` ({str(error).splitlines()[0]}).") from error
        pool = cupy.get_default_memory_pool()
        # Under WSL a GPU may borrow the host's memory, and an allocation would never fail.  So there is a limit.  One
        # that is set already stays: by CUPY_GPU_MEMORY_LIMIT, or by an earlier model
        if not pool.get_limit():
            free, _ = cupy.cuda.runtime.memGetInfo()
            pool.set_limit(size=pool.total_bytes() + max(1, free - RESERVE))
        self.updates = 0                            # calls of update
        self.communicator = None                    # sums gradients over several GPUs: train.py
        self.rows = 0                               # of config.context tokens, for which there is work memory
        size = param_count(config)
        self.flat_params = cupy.zeros(size, float32)
        self.flat_grads = self.m = self.v = None
        self.grads = {}
        if training:
            self.flat_grads = cupy.zeros(size, float32)
            self.grads = param_views(self.flat_grads, config)
            self.m = cupy.zeros(size, float32)
            self.v = cupy.zeros(moment_count(config, optimizer) - size, float32)
        # the matrices that kernels and matmuls read: a bf16 copy, or the parameters themselves
        self.flat_weights = cupy.zeros(size, uint16) if precision == "bf16" else self.flat_params
        self.losses = cupy.zeros(config.predict, float32)
        self.state = cupy.zeros(3, float32)         # see gradient_norm
        self.partial = cupy.empty(3 * SUM_BLOCKS, float32)
        self.params = param_views(self.flat_params, config)
        self.weights = {name: view if view.ndim == 2 else self.params[name]     # gains are read in fp32
                        for name, view in param_views(self.flat_weights, config).items()}
        self.decoder = self.new_decoder(1, config.context)
        rows = micro_batch or int(training)         # Muon works in this memory, too: it must be there for update
        while rows > self.rows:
            try:
                self._reserve(rows)
            except MemoryError:                     # CuPy's OutOfMemoryError is one
                if rows == 1:
                    raise
                rows //= 2
        if seed is not None:
            flat = np.empty(size, float32)
            init_params(flat, config, seed)
            self.write(self.flat_params, flat)

    @property
    def step(self):
        """Updates that have changed the weights.  Waits for the GPU."""
        return self.updates - int(self.state[2])

    @step.setter
    def step(self, step):
        self.updates = step

    def refresh(self):
        """Call this after writing params: the bf16 copy follows.  What other weights have left, in the KV cache and for
        backward, is forgotten."""
        self.decoder.forget()
        self.saved = None
        size = self.flat_params.size
        self.gpu.launch("copy_weights", ceil_div(size, 2048), 256, self.flat_weights, self.flat_params, int64(size))

    def read(self, array):
        """An array of this model's, flat_params say, as a NumPy array on the host."""
        return cupy.asnumpy(array)

    def write(self, array, values):
        """Set an array of this model's, or rows of one, from a NumPy array of any float type."""
        array.set(np.ascontiguousarray(values, float32))
        self.refresh()

    def later(self, *arrays):
        """-> a function that returns these arrays as NumPy's.  It waits until the GPU has computed them, and for
        nothing else: their copies to pinned memory are queued now, before the work of the next step."""
        pinned = [array.get(out=cupyx.empty_pinned(array.shape, array.dtype), blocking=False)
                  for array in arrays]
        event = current_stream().record(cupy.cuda.Event(disable_timing=True))

        def read():
            event.synchronize()
            return pinned
        return read

    def _reserve(self, rows):
        """Make the work memory anew, for this many rows of config.context tokens."""
        c = self.config
        self.buffers_by_shape = {}
        self.saved = self.inputs = self.work = None     # give back first, then ask for more
        self.rows = 0
        cupy.get_default_memory_pool().free_all_blocks()
        size = table_bytes(work_table(c, rows, c.context, self.gpu.real))
        if self.optimizer == "muon":                # in update the same memory is Muon's
            size = max(size, *[table_bytes(table) for _, table in muon_tables(c, self.gpu.real)])
        self.work = cupy.empty(size, uint8)
        N = rows * c.context
        K = c.predict
        self.inputs = Inputs(typed(int32,
                                   tokens=N,
                                   targets=N * K,           # (B,T+K-1), and room for more and shorter rows
                                   order=N,                 # see embedding_backward
                                   starts=c.vocab + 1)      # likewise
                             + typed(float32,
                                     scales=K,              # of each head its weight in the loss / its divisor
                                     divisor=K,             # counted targets of each head
                                     weights=N))            # (B,) of each row
        self.rows = rows

    def _buffers(self, B, T):
        """-> (for each layer its Arrays, the Arrays that all share) for a micro-batch (B,T).  They lie in the work
        memory.  Where that is too small, it is made anew."""
        c = self.config
        rows = ceil_div(B * T, c.context)
        if rows > self.rows:
            self._reserve(rows)
        if len(self.buffers_by_shape) > SHAPES:
            self.buffers_by_shape = {}              # and with them their graphs
        shape = B, T
        if shape not in self.buffers_by_shape:
            arrays = carve(self.work, work_table(c, B, T, self.gpu.real))
            layers = [Arrays(**vars(layer_views(arrays, i)), cache=None) for i in range(c.layers)]
            shared = {"B": B, "T": T, "lengths": None, "replays": collections.defaultdict(Replay)}
            self.buffers_by_shape[shape] = layers, Arrays(**arrays | self.inputs.arrays | shared)
        return self.buffers_by_shape[shape]

    def new_decoder(self, rows, length):
        """A Decoder of so many texts at once, each of at most `length` tokens."""
        return Decoder(self.gpu, self.weights, rows, length)

    def logits(self, tokens):
        """(B,T) ints -> (B,T,K,V), a NumPy array of float32 on the host."""
        c = self.config
        tokens = as_batch(c, tokens)
        layers, shared = self._buffers(*tokens.shape)
        self.saved = None                               # overwritten now
        self.inputs.send(tokens=tokens)
        final = trunk(self.gpu, self.weights, layers, shared)
        logits = cupy.empty((tokens.size, c.predict * c.vocab), float32)
        linear_forward(self.gpu, logits, final, self.weights["heads"])
        return cupy.asnumpy(logits).reshape(*tokens.shape, c.predict, c.vocab)

    def forward(self, tokens, targets, counted=None, weights=None):
        """tokens (B,T), targets (B,T+K-1), -1 = not counted -> (K,) losses in nats, on the GPU; see
        model_cpu."""
        c = self.config
        tokens, targets, divisor, weights = check_batch(c, tokens, targets, counted, weights)
        layers, shared = self._buffers(*tokens.shape)
        flat = tokens.astype(uint16).ravel()        # NumPy sorts these several times as fast: by a radix sort
        order = np.argsort(flat, kind="stable")
        starts = np.searchsorted(flat[order], np.arange(c.vocab + 1))
        self.inputs.send(tokens=tokens, targets=targets, order=order, starts=starts,
                         scales=c.head_weights / divisor, divisor=divisor, weights=weights)

        def launch():
            final = trunk(self.gpu, self.weights, layers, shared)                           # (N,C)
            linear_forward(self.gpu, shared.logits, final, self.weights["heads"])    # -> (N,K*V)
            cross_entropy_forward(self.gpu, self.losses, shared.nll, shared.logits, shared, shared.T)

        shared.replays["forward"](launch)
        self.saved = layers, shared
        self.nll = shared.nll
        return self.losses.copy()

    log_probs = model_cpu.Model.log_probs

    def backward(self, last=True):
        """Add d(total loss)/d(param) of the last forward to grads; once a forward.  After an update the gradients are
        zero, so the first backward need not read those of the matrices.  last: this is the step's last micro-batch,
        after which the gradients of several GPUs are added up."""
        require(self.saved, "backward needs a forward of its own, and between them neither logits nor update.")
        layers, shared = self.saved
        self.saved = None
        add = self.added
        self.added = True
        gpu = self.gpu
        w = self.weights
        grads = self.grads
        dx = shared.increment                       # the same memory
        final = shared.n                            # and its gradient

        def launch():
            # logits = final @ heads.T
            linear_backward(gpu, final, grads["heads"], shared.logits, final, w["heads"], add)  # (N,K*V) -> (N,C)
            # final = rmsnorm(x)
            rmsnorm_backward(gpu, dx, grads["norm"], final, shared.x, shared.rstd, w["norm"],
                             shared.dgain, add=False)                           # (N,C)
            for i in reversed(range(len(layers))):
                block_backward(gpu, layer_views(w, i), layer_views(grads, i), layers[i], shared, dx, add)
            # x = embed[tokens]
            embedding_backward(gpu, grads["embed"], dx, shared.order, shared.starts)

        shared.replays["backward", add](launch)
        if last and self.communicator:
            self.communicator.all_reduce(self.flat_grads)

    def update(self, lr, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, clip=1.0, momentum=0.95):
        """One step of the optimizer by update_table; then the gradient is zero.  The norm of all gradients that AdamW
        takes is clipped to `clip` before.  Returns the norm of the whole gradient before clipping, on the GPU.  A norm
        that is not finite changes nothing, now and in all later updates, and leaves the gradient to look at until the
        next backward: the host must stop."""
        c = self.config
        self.updates += 1
        self.added = False
        self.saved = None
        self.decoder.forget()
        gradient_norm(self.gpu, self.state, self.partial, self.flat_grads, muon_part(c, self.optimizer), clip)
        for rule, part, part_of_v, decayed in update_table(c, self.optimizer):
            flats = [flat[part] for flat in (self.flat_params, self.flat_weights, self.flat_grads, self.m)]
            if rule == "muon":
                for starts, table in muon_tables(c, self.gpu.real):
                    muon_update(self.gpu, flats, starts, carve(self.work, table), self.state, lr, decay,
                                momentum)
            elif rule == "adamw":
                adamw_update(self.gpu, *flats, self.v[part_of_v], self.state, self.updates, lr, beta1, beta2,
                             eps, decay if decayed else 0.0)
            else:
                raise ValueError(f"Model.update does not know the rule {rule}.")
        return self.state[0, ...].copy()


class Decoder(model_cpu.Decoder):
    """Continues a text with a KV cache, as model_cpu's Decoder, from which it has position, truncate, forget and
    checked.  The logits stay on the GPU: it draws, and the host reads ids.  What is read, and by whom:

        up to max(K, FEW_ROWS) tokens of one text       draw, extend, draw_rows:    _draw -> _read_few
        a whole window, from its first token on         draw, draw_rows:            _read_windows -> _read_many
        one token of each of several texts              draw_rows:                  _draw -> _read_many

    _read_few has kernels of its own, section 8 of kernels.cu.  Their arithmetic for a row does not depend on the
    number of rows.  So reading drafted tokens together gives the bits of decoding them one by one.  _read_many is
    the forward of training; for one token of each text its attention is decode_attention.

    texts, length: the number of texts, each with a cache of its own for `length` tokens.  Several texts are drawn by
    draw_rows alone.  MemoryError where the caches do not fit."""

    def __init__(self, gpu, weights, texts, length):
        c = self.config = gpu.config
        self.gpu = gpu
        self.weights = weights
        self.texts = texts
        self.tokens = []
        rows = self.most_rows = max(FEW_ROWS, c.predict, texts)     # at most so many rows are drawn at once
        most = max(c.context, 16 * texts)           # at most so many tokens are read at once
        both = typed(int32,                         # the host has these arrays as well
                     tokens=most,
                     lengths=rows,                  # see kernels.cu, section 8
                     times=rows,
                     ids=rows * c.predict)          # an answer: what was drawn
        both += typed(np.float64, drawing=4)        # temperature, top_p, top_k, vocab
        both += typed(uint64, seeds=rows)           # of the noise
        # without a backward all layers compute in the arrays of one layer
        table = both + trunk_table(dataclasses.replace(c, layers=1), 1, most, gpu.real)
        table += typed(float32, logits=(rows, c.predict * c.vocab))
        # of each token its keys and values, 2GD numbers
        table += typed(gpu.real, cache=(c.layers, texts, length, c.qkv_width - c.dim))
        _, arrays = allocate(cupy.empty, table)
        self.buffers = Arrays(**arrays | vars(layer_views(arrays, 0)))
        self.pinned, host = allocate(cupyx.zeros_pinned, both)          # zeros: what is not written yet is a valid id
        self.host = Arrays(**host)
        self.replays = collections.defaultdict(Replay)

    def extend(self, tokens):
        """Append n tokens; return the logits (n,K,V) after each of them, a NumPy array."""
        c = self.config
        [tokens] = self.checked([tokens]).tolist()
        logits = []
        for part in slices_of(len(tokens), self.most_rows):
            few = tokens[part]
            self.draw(few, 1, c.predict, 0, Sampling(temperature=0))        # for its logits; the ids are not used
            logits.append(cupy.asnumpy(self.buffers.logits[:len(few)]))
        return np.concatenate(logits).reshape(-1, c.predict, c.vocab)

    def draw(self, tokens, last, heads, t, sampling):
        """Append tokens, a list, and draw after each of the last ones: see model_cpu.  More than max(K, FEW_ROWS)
        tokens are a prompt, and last is 1: the whole window is read by _read_many, and its last token once
        more by _draw.  Only prompts are checked, because the GPU would wait for that at each token."""
        n = len(tokens)
        end = self.position + n
        if n > self.most_rows:
            self._read_windows([self.tokens + tokens])
            n = 1
        # times: t + last - 1 for the last of the n tokens, one less for the token before it, and so on
        lengths = np.arange(end - n, end)
        ids = self._draw(tokens[-n:], lengths, lengths + t + last - end, heads, sampling)
        self.tokens += tokens
        return ids[-last:]

    def draw_rows(self, windows, grown, t, sampling):
        """Draw the next token of each of B texts -> ids (B,): see model_cpu."""
        if not grown:
            self._read_windows(windows)
        last = [window[-1] for window in windows]
        lengths = [len(window) - 1 for window in windows]
        return self._draw(last, lengths, t, 1, sampling)[:, 0]

    def _read_windows(self, windows):
        """Read each window into the cache of its text, from the first token on, as many windows at a time as the memory
        holds.  Behind a shorter window come zeros, which nobody reads."""
        T = max(map(len, windows))
        tokens = np.array([window + [0] * (T - len(window)) for window in windows], int32)          # (B,T)
        check_tokens(self.config, tokens)
        for texts in slices_of(len(tokens), len(self.buffers.x) // T):
            part = tokens[texts]
            self.buffers.tokens[:part.size].set(part.ravel())
            self._read_many(*part.shape, texts.start)

    def _draw(self, tokens, lengths, times, heads, sampling):
        """Read tokens (n,), and draw after each of them -> ids (n,heads).  lengths (n,): how many tokens of its text
        come before each; times (n,): the position that head 0 draws for."""
        V = self.config.vocab
        d = self.buffers
        host = self.host
        n = len(tokens)
        top_k = sampling.top_k if sampling.temperature else 1       # temperature 0: the largest logit alone
        host.tokens[:n] = tokens
        host.lengths[:n] = lengths
        host.times[:n] = times
        host.drawing[:] = (sampling.temperature or 1.0, max(sampling.top_p, 1e-30),     # above 0 in fp32, too
                           top_k, sampling.vocab or V)
        host.seeds[:n] = sampling.seed

        def launch():
            # all arrays of `both`, of which tokens is the first.  CuPy's own copies cannot be recorded in a graph
            cupy.cuda.runtime.memcpyAsync(d.tokens.data.ptr, self.pinned.ctypes.data, self.pinned.size, 1,
                                          current_stream().ptr)
            logits = d.logits.ravel()[:n * heads * V].reshape(n, -1)
            if self.texts == 1:
                self._read_few(logits)
            else:
                self._read_many(n, 1, 0, d.lengths)
                linear_forward(self.gpu, logits, d.n[:n], self.weights["heads"])
            # the kernel writes its answers to the host's memory
            self.gpu.launch_early("draw", (n, heads), 1024, uint64(host.ids.ctypes.data), d.logits, d.times,
                                  d.drawing, d.seeds, V)

        self.replays[n, heads](launch)                   # the same launches at every position
        current_stream().synchronize()
        return host.ids[:n * heads].reshape(n, heads).copy()

    def _read_few(self, logits):
        """logits (n,O): the first O logits after each of n tokens, by the kernels for few rows."""
        gpu = self.gpu
        w = self.weights
        d = self.buffers
        n, outputs = logits.shape
        embedding_forward(gpu, d.x[:n], d.tokens, w["embed"])
        for i, cache in enumerate(d.cache):
            decode_block(gpu, layer_views(w, i), cache, d, n)
        gpu.launch_early("decode_logits", (outputs // 8, ceil_div(n, GROUP_ROWS)), 128, logits, d.x,
                         w["norm"], w["heads"], n, gpu.config.dim, outputs, gpu.eps)

    def _read_many(self, B, T, text, lengths=None):
        """Read T tokens of each of B texts, from number `text` on; then buffers.n (N,C) has rmsnorm(x) after the last
        layer.  They are the first T tokens of their texts; or, with T 1, the tokens behind `lengths` (B,) others."""
        arrays = {name: array[:B * T] for name, array in vars(self.buffers).items()}
        arrays |= {"B": B, "T": T, "lengths": lengths}
        layers = [Arrays(**arrays | {"cache": cache[text:]}) for cache in self.buffers.cache]
        trunk(self.gpu, self.weights, layers, Arrays(**arrays))


class Nccl:
    """Sums arrays over the GPUs of a run by NVIDIA's NCCL."""
    def __init__(self, ranks):
        try:
            from cupy.cuda import nccl              # here, and not above: who has one GPU needs no NCCL
        except ImportError as error:
            raise ValueError(f"Several GPUs need NVIDIA's NCCL: run `make gpu` ({error}).") from None
        self.nccl = nccl
        address = ranks.all_gather(nccl.get_unique_id())[0]
        try:
            self.communicator = nccl.NcclCommunicator(ranks.size, address, ranks.rank)
        except nccl.NcclError as error:             # "invalid usage", where two processes have one GPU
            raise ValueError(f"NCCL cannot connect the processes: each needs a GPU of its own ({error}).") from None

    def all_reduce(self, array):
        """Queue: array, of float32, becomes its sum over all GPUs."""
        self.communicator.allReduce(array.data.ptr, array.data.ptr, array.size, self.nccl.NCCL_FLOAT32,
                                    self.nccl.NCCL_SUM, current_stream().ptr)


# ------------------------------------------------------------------------------------------------------------
# 5. What a step computes in
# ------------------------------------------------------------------------------------------------------------
ALIGN = 256                 # arrays start at multiples of this many bytes


def typed(dtype, **shapes):
    """A table, [(name, shape, dtype, bytes), ...], of arrays of one type.  The shape of an array of one axis may be
    its length.  The bytes are rounded up to a multiple of ALIGN."""
    table = []
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        table.append((name, shape, dtype, ALIGN * ceil_div(size, ALIGN)))
    return table


def table_bytes(table):
    """Bytes of a table's arrays."""
    return sum(size for *_, size in table)


def carve(memory, table):
    """dict of the arrays of a table, cut out of an array of bytes."""
    arrays = {}
    for name, shape, dtype, size in table:
        arrays[name] = memory.view(dtype)[:np.prod(shape)].reshape(shape)
        memory = memory[size:]
    return arrays


def rows_table(real, N, **widths):
    """A table of arrays of N rows of these widths."""
    return typed(real, **{name: (N, width) for name, width in widths.items()})


def trunk_table(config, B, T, real):
    """The arrays of trunk for rows (B,T): what is saved of each layer for its backward, and what all layers share.
    real: the type of activations.

    The norms' outputs and the SwiGLU product are saved, too.  They could be computed again.  On a GPU that means to
    write and to read them once more: big's step would need a quarter less memory, and 2% more time.

    No array grows if as many tokens come in more and shorter rows.  So the memory for (rows, context) is enough for
    every micro-batch of at most as many tokens."""
    N = B * T
    C = config.dim
    F = config.hidden
    saved = rows_table(real, N,
                       x_in=C,              # x before the layer
                       n1=C,                # rmsnorm(x_in)
                       qkv=config.qkv_width,        # n1 @ qkv.T, with q and k rotated
                       y=C,                 # attention(q, k, v)
                       x_mid=C,             # x after Euler substep 1
                       n2=C,                # rmsnorm(x_mid)
                       gate_up=2 * F,       # n2 @ gate_up.T; in the backward its gradient
                       h=F)                 # silu(gate) * up
    saved += typed(float32,
                   rstd1=N,                 # 1 / root mean square of each row of x_in
                   lse=(B, config.heads, T),    # log of the sum of exponentials of each row of scores
                   rstd2=N)                 # 1 / root mean square of each row of x_mid
    shared = rows_table(real, N,
                        x=C,                # x after the last layer
                        n=C,                # rmsnorm(x), which the heads read; in the backward dn and dy
                        increment=C)        # what a substep adds to x; in the backward dx
    shared += typed(float32, rstd=N)        # 1 / root mean square of each row of x
    layers = [(f"layers.{i}.{name}", *rest) for i in range(config.layers) for name, *rest in saved]
    return layers + shared


def work_table(config, B, T, real):
    """The arrays of a forward and a backward of rows (B,T): those of trunk, and those of the loss and the backward."""
    N = B * T
    rest = rows_table(real, N,
                      logits=config.predict * config.vocab,         # then d loss / d logits
                      dh=config.hidden,     # gradient of h
                      dqkv=config.qkv_width)        # gradient of qkv before the rotation
    rest += typed(float32,
                  nll=(N, config.predict),  # the loss of each target
                  dgain=(NORM_BLOCKS, config.dim),  # partial sums of a gain's gradient
                  delta=(B, config.heads, T))       # from attention_backward's first kernel
    return trunk_table(config, B, T, real) + rest


def muon_tables(config, real):
    """Yields (starts, table) for each shape of matrices, because muon_update takes all of one shape together.
    starts: where in a layer's part of a flat buffer each begins; table: the arrays in which the n matrices of all
    layers are computed.  They lie in the work memory, because update needs no activations.  Then those of the
    next shape take their place."""
    matrices = matrix_table(config)
    for shape in dict(matrices):
        starts = [place.start for other, place in matrices if other == shape]
        n = len(starts) * config.layers
        square = n, min(shape), min(shape)
        table = typed(real,
                      X=(n, *shape),                # u / |u|, which Newton-Schulz makes orthogonal
                      Y=(n, *shape),                # alternates with X, and has the result
                      A=square,                     # X X^T, or X^T X where X is tall
                      B=square)                     # a polynomial of A
        # partial sums of the squared length of u, which X has before its division by |u|
        table += typed(float32, squares=(n, MATRIX_BLOCKS))
        yield starts, table
