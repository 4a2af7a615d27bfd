// kernels.cu: every CUDA kernel of the GPU engine but those of attention over whole texts (with RoPE's backward), which
// are in flash_attn.cu.
//
// Read model_cpu.py first. Nearly every kernel names the functions of model_cpu.py that it covers and quotes their
// formulas; their derivations stand there. model_gpu.py launches the kernels. The shape of a launch, "Grid
// (blocks); threads of a block", stands above each kernel. What this file does not do: the large matrix
// products, which cuBLAS computes (section 7 has a readable one), and sums across GPUs.
//
// How long it takes, for a reader who knows NumPy and no CUDA: about three hours. The primer below and
// sections 1 to 3 take one hour. Sections 4 to 6, the rest of training, take forty-five minutes. The other
// three sections are optional: 7 (a GEMM, 15 minutes), 8 (decoding, the hardest: 45 minutes) and 9 (drawing a
// token, 15 minutes).
//
// A primer. RMSNorm of one row x of C numbers, in NumPy:
//
//     rstd = 1 / np.sqrt(np.sum(x * x) / C + eps)
//     out = x * rstd * gain
//
// The same in CUDA, for all N rows at once: N blocks of C threads (C a multiple of 32, at most 1024).
//
//     __global__ void rmsnorm(float* out, const float* x, const float* gain, int C, float eps) {
//         __shared__ float sums[32];
//         int at = blockIdx.x * C + threadIdx.x;       // this thread's own entry: its row and its column
//         float sum = x[at] * x[at];
//         for (int bit = 16; bit > 0; bit /= 2)        // five rounds; then each lane has the sum of its warp
//             sum += __shfl_xor_sync(0xFFFFFFFF, sum, bit);
//         if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
//         __syncthreads();                             // now the sums of all warps of the block stand there
//         sum = 0.0f;
//         for (int w = 0; w < C / 32; w++) sum += sums[w];
//         out[at] = x[at] * rsqrtf(sum / C + eps) * gain[threadIdx.x];        // rsqrtf(y) is 1 / sqrt(y)
//     }
//
// From Python, for N = 3 rows of C = 64 numbers, CuPy launches it with the grid, the threads of a block and the
// arguments; model_gpu.py does the same in Gpu.launch:
//
//     kernel((3,), (64,), (out, x, gain, np.int32(64), np.float32(1e-5)))
//
//     grid        block 0: row 0              block 1: row 1              block 2: row 2
//     block 1     warp 0: columns 0 to 31     warp 1: columns 32 to 63
//     warp 1      lane 0: column 32           lane 1: column 33           ...     lane 31: column 63
//
// So the thread with blockIdx.x = 1 and threadIdx.x = 33 is lane 1 of warp 1 of block 1. It owns column 33 of
// row 1.
//
//   * A kernel (`__global__`; below, KERNEL) is a function that many threads run at once. Each asks who it is
//     (threadIdx.x in its block, blockIdx.x in the grid) and computes its own share. The loop over the columns is
//     gone: each column has its thread.
//   * The grid is all blocks of a launch. Blocks run in any order and do not wait for each other.
//   * The threads of a block can wait for each other (`__syncthreads`, a barrier) and have some fast memory
//     in common, the shared memory (`__shared__`). A thread's own variables are registers.
//   * A warp is 32 threads that run together; a lane is the place of a thread in its warp. In a shuffle
//     (`__shfl_xor_sync`) lane i receives the number that lane i ^ bit holds in a register.
//   * `__device__` marks a helper that kernels call. The arrays that a kernel is given lie in the GPU's main
//     memory, which is large, and slow beside registers and shared memory. (Only draw, in section 9, writes its
//     answers to the host's memory.)
//
// Letters as everywhere: B batch, T time, C model width, H query heads, G key/value heads, D head width, F
// feed-forward width, V vocabulary, K prediction heads, N = B*T tokens.
//
// Memory traffic makes such kernels slow, not arithmetic. An H200 copies 4.3 TB/s and computes bf16 products at 700
// TFLOP/s (measured): 160 operations in the time of a byte. A norm has about one for each byte. So reading and
// writing the activations takes more time than anything computed from them. Therefore
//   * functions that follow each other are fused into one kernel, so that a tensor is read and written once:
//     the residual add with the norm after it, the norm's backward with the add of its gradient to the
//     residual's, softmax with its loss and its gradient;
//   * the norms' outputs and the SwiGLU product are kept for the backward: to compute them again would mean to
//     write them again;
//   * nearly everywhere a thread moves eight numbers at a time, in bf16 16 bytes (C, F and V are multiples of 8), and
//     neighbouring threads move neighbouring bytes.
//
// All arithmetic is fp32, except in drawing a token (section 9). CuPy compiles with -ftz=true: a result below
// 1.2e-38 becomes 0. No kernel uses atomics, by which blocks add to one number in the order in which they happen to
// be ready. So every sum has one order, and two runs give the same bits.
//
// model_gpu.py puts flash_attn.cu behind this file, and compiles both as one text. Two macros matter here:
//     -DBF16=0 or 1     for both files: chooses `real`, the type in which activations and the matrices that
//                       kernels read are stored
//     -DROW_THREADS=n   the threads of a block that owns a row of C numbers. Only rmsnorm_backward must know it,
//                       because it uses many registers: the more threads a block has, the fewer each may use

// -----------------------------------------------------------------------------------------------------------
// 1. Loops, eight numbers at a time, sums over a block
// -----------------------------------------------------------------------------------------------------------
// Python's `for i in range(first, end, stride)` and `for i in range(count)`. FOR leaves it to the compiler whether a
// loop is written out in full (unrolled). EACH is a FOR that demands it, because an array can stay in registers only
// if the compiler knows all indices into it.
#define FOR_STRIDED(i, first, end, stride) for (int i = first; i < end; i += stride)
#define FOR(i, count) FOR_STRIDED(i, 0, count, 1)
#define EACH(i, count) _Pragma("unroll") FOR(i, count)

// extern "C": the compiled kernel has the name that stands here, and model_gpu.py finds it by that name. (C++
// would add the types of the arguments to it.)
#define KERNEL extern "C" __global__ void

// The number of this thread in its warp, of this warp in its block, and of this block in the grid's first direction.
#define LANE int(threadIdx.x % 32)
#define WARP int(threadIdx.x / 32)
#define BLOCK Index(blockIdx.x)

typedef long long Index;      // a place in an array that may have more than 2^31 entries
typedef const float* Floats;  // arrays that a function only reads; float* and real* are written
typedef const int* Ints;

// alignas(16): variables of this type begin at a multiple of 16 bytes. `*(Eight*)from` promises that `from` does,
// too, which is true, because C, F and V are multiples of 8. Then 16 bytes are moved at once. A GPU refuses that
// at any other address.
struct alignas(16) Eight { float x[8]; };

__device__ Eight load8(Floats from) { return *(Eight*)from; }

// Stores, and returns what a later load will see: in bf16 the rounded numbers.
__device__ Eight store8(float* to, Eight v) {
    *(Eight*)to = v;
    return v;
}

// tests/cuda_on_cpu.h, with which the tests run the kernels on a CPU, has a pack_bf16 of its own.
#ifndef CUDA_ON_CPU
// Two floats rounded to bf16 (to nearest, ties to even) in one word, `low` in its lower half. The instruction
// takes the upper half first.
__device__ unsigned pack_bf16(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
#endif

#if BF16
typedef unsigned short real;  // bf16, the upper half of a float; to_float and load8 read it, store and store8 write it
typedef uint4 Packed;         // eight numbers as they lie in memory

// A bf16 number as a float; of a word of two, the lower one.
__device__ float to_float(unsigned word) { return __uint_as_float(word << 16); }

__device__ Eight unpack8(Packed w) {
    return {{to_float(w.x), to_float(w.x >> 16), to_float(w.y), to_float(w.y >> 16),
             to_float(w.z), to_float(w.z >> 16), to_float(w.w), to_float(w.w >> 16)}};
}

__device__ Eight load8(const real* from) { return unpack8(*(Packed*)from); }

__device__ void store(real* to, float x) { *to = pack_bf16(x, 0.0f); }

__device__ Eight store8(real* to, Eight v) {
    Packed w = {pack_bf16(v.x[0], v.x[1]), pack_bf16(v.x[2], v.x[3]),
                pack_bf16(v.x[4], v.x[5]), pack_bf16(v.x[6], v.x[7])};
    *(Packed*)to = w;
    return unpack8(w);
}
#else
typedef float real;
typedef Eight Packed;

__device__ Eight unpack8(Packed v) { return v; }

__device__ float to_float(real x) { return x; }

__device__ void store(real* to, float x) { *to = x; }
#endif

typedef const real* Reals;

__device__ Packed load_packed(Reals from) { return *(Packed*)from; }

// Where the eight numbers of this thread begin, if block number `block` of 256 threads takes the 2048 from
// 2048 * block on.
__device__ Index own_eight(Index block) { return 8 * (256 * block + threadIdx.x); }

__device__ void operator+=(Eight& sum, const Eight& v) {
    FOR(i, 8) sum.x[i] += v.x[i];
}

__device__ float dot8(Eight a, Eight b) {
    float sum = 0.0f;
    FOR(i, 8) sum += a.x[i] * b.x[i];
    return sum;
}

__device__ float warp_sum(float x) {
    for (int bit = 16; bit > 0; bit /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, bit);
    return x;
}

// The sum over some lanes of the warp, for each of these lanes. first and end are powers of 2. Lane l sums over the
// lanes whose numbers differ from l only in the bits first, 2 first, 4 first, ... below end. Two examples:
//     lanes_sum(x, 1, 4)     four neighbours: lanes 0, 1, 2, 3; lanes 4, 5, 6, 7; ...
//     lanes_sum(x, 8, 32)    four lanes, 8 apart: lanes 0, 8, 16, 24; lanes 1, 9, 17, 25; ...
__device__ float lanes_sum(float x, int first, int end) {
    for (int bit = first; bit < end; bit *= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, bit);
    return x;
}

// The largest number of the same lanes.
template <class T>
__device__ T lanes_max(T x, int first, int end) {
    for (int bit = first; bit < end; bit *= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFF, x, bit));
    return x;
}

// Sum and maximum over the block. Every thread receives the same number. First each warp sums its own, then all
// threads sum over the warps. `slots` are 32 numbers of shared memory for that. No barrier stands at the end: so the
// next call takes other slots, or comes after a barrier.
__device__ float block_sum(float x, float* slots) {
    x = warp_sum(x);
    if (LANE == 0) slots[WARP] = x;
    __syncthreads();
    x = 0.0f;
    FOR(w, blockDim.x / 32) x += slots[w];
    return x;
}

template <class T>
__device__ T block_max(T x, T* slots) {
    x = lanes_max(x, 1, 32);
    if (LANE == 0) slots[WARP] = x;
    __syncthreads();
    FOR(w, blockDim.x / 32) x = max(x, slots[w]);
    return x;
}

// bf16 has 8 significant bits, so the hardware's quick exponential, with about 20, is exact enough for it.
__device__ float exponential(float x) { return BF16 ? __expf(x) : expf(x); }

constexpr float MASKED = -1e30f;  // stands for minus infinity, and MASKED - MASKED is not NaN

// -----------------------------------------------------------------------------------------------------------
// 2. Embedding
// -----------------------------------------------------------------------------------------------------------
// Covers embedding_forward: out[n] = embed[tokens[n]].
// Grid (N); C/8 threads, rounded up to whole warps.
KERNEL embedding_forward(real* out, Ints tokens, Reals embed, int C) {
    int column = 8 * threadIdx.x;
    Reals row = embed + Index(tokens[blockIdx.x]) * C;
    if (column < C) store8(out + BLOCK * C + column, load8(row + column));
}

// Covers embedding_backward: dembed[v] += sum of dout[n] over all n with tokens[n] == v.
//
// As on the CPU, a sort has brought equal tokens side by side (on the host, in Model.forward). order lists the
// positions n by token: those of token v stand in order from starts[v] to starts[v+1] - 1. One block owns 256
// columns of one row of dembed. Its eight warps share the positions: warp 0 takes the first, the ninth and so
// on. At the end their eight sums are added in order.
// Grid (V, ceil(C/256)); 256 threads.
KERNEL embedding_backward(float* dembed, Reals dout, Ints order, Ints starts, int C) {
    __shared__ Eight parts[8][32];
    int column = 256 * blockIdx.y + 8 * LANE;
    int first = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    if (first == end) return;
    Eight sum = {};
    if (column < C)
        FOR_STRIDED(j, first + WARP, end, 8) sum += load8(dout + Index(order[j]) * C + column);
    parts[WARP][LANE] = sum;
    __syncthreads();
    if (WARP > 0 || column >= C) return;
    float* row = dembed + BLOCK * C + column;
    Eight total = load8(row);
    FOR(p, 8) total += parts[p][LANE];
    store8(row, total);
}

// -----------------------------------------------------------------------------------------------------------
// 3. RMSNorm, with the residual stream
// -----------------------------------------------------------------------------------------------------------
// Covers `x += increment` of block_forward, then rmsnorm_forward:
//
//     x = before + increment   rstd_n = 1 / sqrt(mean_i x_ni^2 + eps)        out_ni = x_ni rstd_n gain_i
//
// This is the primer's kernel with eight columns a thread. x stays in registers between the sum of squares
// and its use. The norm reads x as it is stored (in bf16: rounded), because the backward will read that.
// Where there is no increment, the kernel norms `before` and does not touch x.
// Grid (N); C/8 threads, rounded up to whole warps.
KERNEL rmsnorm_forward(real* out, float* rstd, real* x,
                       Floats gain, Reals before, Reals increment,
                       int C, float eps) {
    __shared__ float slots[32];
    int column = 8 * threadIdx.x;
    Index at = BLOCK * C + column;
    Eight v = {};
    if (column < C) {
        v = load8(before + at);
        if (increment) {
            v += load8(increment + at);
            v = store8(x + at, v);
        }
    }
    float r = rsqrtf(block_sum(dot8(v, v), slots) / C + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    if (column < C) {
        Eight g = load8(gain + column);
        FOR(i, 8) v.x[i] *= r * g.x[i];
        store8(out + at, v);
    }
}

// Covers rmsnorm_backward and the `dx += back` after it in block_backward, of out = xhat gain, xhat = x rstd:
//
//     dx_j (+)= rstd (dxhat_j - xhat_j mean_i(dxhat_i xhat_i)),   dxhat = dout gain
//     dgain_i += sum_n dout_ni xhat_ni
//
// dgain is a sum over rows, taken in two stages. Here each block sums its rows n = block, block + blocks, ...
// and writes a row of partial. Then column_sum adds the rows of partial.
//
// The sum within a row takes a barrier. Memory would stand idle at it. So the loop is a pipeline: a round unpacks the
// row that the round before has loaded, starts to load row `next`, and then computes with what it has unpacked. The
// first round only loads; the last one, of a `next` past N, only computes. Each round gives block_sum the other half
// of `slots`; so one barrier a row is enough.
// Grid (at most N blocks: the rows of partial); C/8 threads, rounded up to whole warps.
KERNEL __launch_bounds__(ROW_THREADS)
rmsnorm_backward(real* dx, float* partial, Reals dout,
                 Reals x, Floats rstd, Floats gain,
                 int N, int C, int add) {
    __shared__ float slots[2][32];
    int column = 8 * threadIdx.x;
    int half = 0;
    Eight g = column < C ? load8(gain + column) : Eight{};
    Eight dgain = {};
    Packed next_x = {}, next_dout = {}, next_dx = {};
    for (int next = blockIdx.x; next < N + int(gridDim.x); next += gridDim.x, half ^= 1) {
        Eight xhat = unpack8(next_x);
        Eight dxhat = unpack8(next_dout);
        Eight old = unpack8(next_dx);
        if (next < N && column < C) {
            Index at = Index(next) * C + column;
            next_x = load_packed(x + at);
            next_dout = load_packed(dout + at);
            if (add) next_dx = load_packed(dx + at);
        }
        int n = next - gridDim.x;  // the row of this round; there is none in the first
        if (n < 0) continue;
        float r = rstd[n];
        FOR(i, 8) {
            xhat.x[i] *= r;
            dgain.x[i] += dxhat.x[i] * xhat.x[i];
            dxhat.x[i] *= g.x[i];
        }
        float mean = block_sum(dot8(dxhat, xhat), slots[half]) / C;
        if (column < C) {
            Index at = Index(n) * C + column;
            FOR(i, 8) old.x[i] += r * (dxhat.x[i] - xhat.x[i] * mean);
            store8(dx + at, old);
        }
    }
    if (column < C) store8(partial + BLOCK * C + column, dgain);
}

// The second stage of dgain: out[c] += sum over rows of partial (rows, C).
// Grid (C/32), C being a multiple of 32; 1024 threads: 32 columns x 32 parts of the rows.
KERNEL column_sum(float* out, Floats partial, int rows, int C) {
    __shared__ float parts[32][32];
    int column = 32 * blockIdx.x + LANE;
    float sum = 0.0f;
#pragma unroll 8
    FOR_STRIDED(row, WARP, rows, 32) sum += partial[Index(row) * C + column];
    parts[WARP][LANE] = sum;
    __syncthreads();
    if (WARP > 0) return;
    sum = 0.0f;
    FOR(p, 32) sum += parts[p][LANE];
    out[column] += sum;
}

// -----------------------------------------------------------------------------------------------------------
// 4. Rotary embedding
// -----------------------------------------------------------------------------------------------------------
// Covers rope_forward, in place on the heads q and k of qkv (N, (H+2G)D). rope_backward is in flash_attn.cu.
//
//     y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin
//
// angles (context, D): of each position the D/2 cosines, then the D/2 sines. A thread turns eight pairs: D is a
// multiple of 16. If there is a cache (texts, stride, 2GD), k and v are copied there as well. lengths: see
// section 8. If it is null, row n is token n % T of text n / T.
// Grid (ceil(N * heads * D/16 / 256)), heads = H + G or, with a cache, H + 2G; 256 threads.
KERNEL rope(real* qkv, real* cache, Floats angles, Ints lengths,
            int N, int T, int stride, int H, int G, int D) {
    int heads = cache ? H + 2 * G : H + G;
    int vectors = D / 16;  // of eight pairs, in a head
    int index = 256 * blockIdx.x + threadIdx.x;
    int n = index / (heads * vectors);
    int head = index / vectors % heads;
    int pair = 8 * (index % vectors);
    if (n >= N) return;
    real* x = qkv + (Index(n) * (H + 2 * G) + head) * D + pair;
    int t = lengths ? lengths[n] : n % T;
    Floats angle = angles + t * D + pair;
    Eight x1 = load8(x), x2 = load8(x + D / 2);
    Eight c = load8(angle), s = load8(angle + D / 2);
    FOR(i, 8) {
        float y1 = x1.x[i] * c.x[i] - x2.x[i] * s.x[i];
        float y2 = x2.x[i] * c.x[i] + x1.x[i] * s.x[i];
        if (head < H + G) {  // v is not turned
            x1.x[i] = y1;
            x2.x[i] = y2;
        }
    }
    store8(x, x1);
    store8(x + D / 2, x2);
    if (!cache || head < H) return;
    real* to = cache + ((Index(n / T) * stride + t) * 2 * G + head - H) * D + pair;
    store8(to, x1);
    store8(to + D / 2, x2);
}

// -----------------------------------------------------------------------------------------------------------
// 5. SwiGLU
// -----------------------------------------------------------------------------------------------------------
// Memory limits these kernels, so the exact expf costs nothing.
__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Covers swiglu_forward: out = g sigmoid(g) u, gate_up (N,2F) = [g | u].
// Grid (N, ceil(F/2048)); 256 threads.
KERNEL swiglu_forward(real* out, Reals gate_up, int F) {
    int column = own_eight(blockIdx.y);
    if (column >= F) return;
    Reals g_at = gate_up + BLOCK * 2 * F + column;
    Eight g = load8(g_at), u = load8(g_at + F);
    FOR(i, 8) g.x[i] *= sigmoid(g.x[i]) * u.x[i];
    store8(out + BLOCK * F + column, g);
}

// Covers swiglu_backward, with s = sigmoid(g), silu = g s:
//
//     h = silu u    =>    du = dh silu        dg = dh u s (1 + g - silu)
//
// In place: gate_up becomes [dg | du].
// Grid (N, ceil(F/2048)); 256 threads.
KERNEL swiglu_backward(real* gate_up, Reals dh, int F) {
    int column = own_eight(blockIdx.y);
    if (column >= F) return;
    real* g_at = gate_up + BLOCK * 2 * F + column;
    Eight g = load8(g_at), u = load8(g_at + F);
    Eight d = load8(dh + BLOCK * F + column);
    FOR(i, 8) {
        float s = sigmoid(g.x[i]);
        float silu = g.x[i] * s;
        g.x[i] = d.x[i] * u.x[i] * s * (1.0f + g.x[i] - silu);
        u.x[i] = d.x[i] * silu;
    }
    store8(g_at, g);
    store8(g_at + F, u);
}

// -----------------------------------------------------------------------------------------------------------
// 6. The loss and the optimizer
// -----------------------------------------------------------------------------------------------------------
// Covers cross_entropy_forward (all but its sum over rows) and cross_entropy_backward. A block owns one row
// (n,k) of logits:
//
//     nll = log sum_v exp(z_v) - z_y        dz_v = w (p_v - [v == y]),  p = softmax(z),  w = scales[k] weights[b]
//
// logits (N,K,V) become their gradients in place. A masked row (target -1) gets nll 0 and gradient 0. scales (K):
// of each head its weight in the loss, divided by the number of its targets. weights (B): of each row of the
// batch. targets (B, T+K-1): head k at position t is to predict targets[b][t+k].
//
// In the first pass each thread reads its part of the row once. It keeps the largest number so far, m, and total,
// the sum of exp(z - m). When m grows to m', total becomes total exp(m - m') + the new terms exp(z - m') (an
// online softmax). The second pass reads the row again, now from the cache.
// Grid (N*K); 128 threads.
KERNEL cross_entropy(float* nll, real* logits,
                     Ints targets, Floats scales, Floats weights,
                     int T, int K, int V) {
    __shared__ float slots[2][32];
    int n = blockIdx.x / K, k = blockIdx.x % K;
    int b = n / T, t = n % T;
    int target = targets[b * (T + K - 1) + t + k];
    real* z = logits + BLOCK * V;
    if (target < 0) {
        FOR_STRIDED(v, 8 * threadIdx.x, V, 1024) store8(z + v, {});  // 128 threads with eight numbers each
        nll[blockIdx.x] = 0.0f;
        return;
    }
    float m = MASKED, total = 0.0f;
    FOR_STRIDED(v, 8 * threadIdx.x, V, 1024) {
        Eight e = load8(z + v);
        float larger = m;
        FOR(i, 8) larger = fmaxf(larger, e.x[i]);
        total *= exponential(m - larger);
        m = larger;
        FOR(i, 8) total += exponential(e.x[i] - m);
    }
    float block_m = block_max(m, slots[0]);
    float log_total = block_m + logf(block_sum(total * exponential(m - block_m), slots[1]));
    float w = scales[k] * weights[b];
    if (threadIdx.x == 0) nll[blockIdx.x] = log_total - to_float(z[target]);
    __syncthreads();  // the target's logit is read before its owner overwrites it
    FOR_STRIDED(v, 8 * threadIdx.x, V, 1024) {
        Eight e = load8(z + v);
        FOR(i, 8) e.x[i] = w * (exponential(e.x[i] - log_total) - float(v + i == target));
        store8(z + v, e);
    }
}

// Covers the sum of cross_entropy_forward: losses[k] = sum_n weights[b] nll[n][k] / divisor[k], n = b T + t.
// Grid (K); 1024 threads.
KERNEL cross_entropy_sum(float* losses, Floats nll, Floats divisor, Floats weights, int T, int N, int K) {
    __shared__ float slots[32];
    float sum = 0.0f;
    FOR_STRIDED(n, threadIdx.x, N, 1024) sum += weights[n / T] * nll[Index(n) * K + blockIdx.x];
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) losses[blockIdx.x] = sum / divisor[blockIdx.x];
}

// sum_of_squares and gradient_norm cover the norm and the clipping of Model.update, in two stages. The first:
// partial[block] = sum of squares of the block's share of grad (n numbers, a multiple of 4).
// Grid (any number of blocks); 256 threads.
KERNEL sum_of_squares(float* partial, Floats grad, Index n) {
    __shared__ float slots[32];
    float sum = 0.0f;
    for (Index i = 4 * (256LL * blockIdx.x + threadIdx.x); i < n; i += 1024LL * gridDim.x) {
        float4 g = *(float4*)(grad + i);
        sum += g.x * g.x + g.y * g.y + g.z * g.z + g.w * g.w;
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The second stage fills state (3), which stays on the GPU:
//     state[0]    the norm of all gradients
//     state[1]    min(1, clip / (norm + 1e-6)), the factor for adamw. This norm is that of AdamW's part of the
//                 gradient alone, whose squares are summed in the first adamw_blocks entries of partial
//     state[2]    how many updates were skipped: after one norm that is not finite all later ones are
// Grid (1); 1024 threads.
KERNEL gradient_norm(float* state, Floats partial, int adamw_blocks, int blocks, float clip) {
    __shared__ float slots[2][32];
    float sum = 0.0f, rest = 0.0f;
    FOR_STRIDED(i, threadIdx.x, adamw_blocks, 1024) sum += partial[i];
    FOR_STRIDED(i, adamw_blocks + threadIdx.x, blocks, 1024) rest += partial[i];
    sum = block_sum(sum, slots[0]);
    float norm = sqrtf(sum + block_sum(rest, slots[1]));
    if (threadIdx.x > 0) return;
    state[0] = norm;
    state[1] = fminf(1.0f, clip / (sqrtf(sum) + 1e-6f));
    if (state[2] || !(norm <= 3.4e38f)) state[2]++;  // infinite, or NaN, of which the comparison is false
}

// Covers adamw_update, in one pass over a part of the flat buffers (n numbers, a multiple of 8):
//
//     m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2        g = factor * grad
//     param -= lr (decay param + mhat / (sqrt(vhat) + eps)),   mhat = m correction1,   vhat = v correction2
//
// Then grad = 0, and in bf16 also copy = param, the weights that the products read. correction = 1 / (1 -
// beta^t).
// Grid (ceil(n/2048)); 256 threads.
KERNEL adamw(float* param, real* copy, float* grad, float* m, float* v,
             Floats state, Index n,
             float lr, float beta1, float beta2, float eps, float decay,
             float correction1, float correction2) {
    Index i = own_eight(blockIdx.x);
    if (i >= n || state[2]) return;
    float keep = 1.0f - lr * decay;
    Eight p = load8(param + i), g = load8(grad + i);
    Eight m8 = load8(m + i), v8 = load8(v + i);
    FOR(j, 8) {
        float clipped = g.x[j] * state[1];
        m8.x[j] = beta1 * m8.x[j] + (1.0f - beta1) * clipped;
        v8.x[j] = beta2 * v8.x[j] + (1.0f - beta2) * clipped * clipped;
        p.x[j] = keep * p.x[j] - lr * (m8.x[j] * correction1) / (sqrtf(v8.x[j] * correction2) + eps);
    }
    store8(param + i, p);
    store8(grad + i, {});
    store8(m + i, m8);
    store8(v + i, v8);
    if (BF16) store8(copy + i, p);
}

// The next four kernels cover muon_update and newton_schulz, all but their matrix products. A launch of
// muon_polynomial takes all matrices of one shape: blockIdx.y counts them. A launch of the other three takes one
// kind of matrix (k, say) in all layers: blockIdx.y counts the layers. Such a matrix has `size` numbers, a multiple
// of 8. From layer to layer the matrices lie `stride` numbers apart in param, copy, grad and m, and side by side
// in X.
//
// running_mean makes the new m of the old one, and then u = momentum m + (1 - momentum) grad of the new one (Nesterov).
// newton_schulz takes u, and divides u by its norm, for which muon_momentum leaves sums of squares.
__device__ Eight running_mean(Eight m, Eight g, float momentum) {
    FOR(j, 8) m.x[j] = momentum * m.x[j] + (1.0f - momentum) * g.x[j];
    return m;
}

// m = momentum m + (1 - momentum) grad; squares (layers, blocks): sums of the squares of u. After a norm that is not
// finite this kernel and the next one leave everything as it is: the matmuls then compute with what lay in X, and
// muon_apply throws the result away.
// Grid (blocks, layers); 256 threads.
KERNEL muon_momentum(float* squares, float* m,
                     Floats grad, Floats state,
                     Index stride, int size, float momentum) {
    __shared__ float slots[32];
    if (state[2]) return;
    m += blockIdx.y * stride;
    grad += blockIdx.y * stride;
    float sum = 0.0f;
    FOR_STRIDED(i, own_eight(blockIdx.x), size, 2048 * gridDim.x) {
        Eight g = load8(grad + i);
        Eight mean = store8(m + i, running_mean(load8(m + i), g, momentum));
        Eight u = running_mean(mean, g, momentum);
        sum += dot8(u, u);
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) squares[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// X = u / (|u| + 1e-7), and grad = 0. u is computed again: that is faster than to write and to read it.
// Grid (blocks, layers), the same as of muon_momentum; 256 threads.
KERNEL muon_input(real* X, float* grad,
                  Floats m, Floats squares, Floats state,
                  Index stride, int size, float momentum) {
    if (state[2]) return;
    X += Index(blockIdx.y) * size;
    m += blockIdx.y * stride;
    grad += blockIdx.y * stride;
    float sum = 0.0f;
    FOR(b, gridDim.x) sum += squares[blockIdx.y * gridDim.x + b];
    float norm = sqrtf(sum) + 1e-7f;
    FOR_STRIDED(i, own_eight(blockIdx.x), size, 2048 * gridDim.x) {
        Eight u = running_mean(load8(m + i), load8(grad + i), momentum);
        FOR(j, 8) u.x[j] /= norm;
        store8(X + i, u);
        store8(grad + i, {});
    }
}

// Covers the polynomial of newton_schulz, with A = X X^T (X^T X if X is tall): B (side, side) holds A^2, and becomes a
// I + b A + c A^2.
// Grid (ceil(side^2 / 2048), matrices); 256 threads.
KERNEL muon_polynomial(real* B, Reals A, int side, float a, float b, float c) {
    int i = own_eight(blockIdx.x);
    int row = i / side, column = i % side;
    if (row >= side) return;
    Index at = Index(blockIdx.y) * side * side + i;
    Eight x = load8(A + at);
    Eight square = load8(B + at);
    FOR(j, 8) x.x[j] = (row == column + j ? a : 0.0f) + b * x.x[j] + c * square.x[j];
    store8(B + at, x);
}

// param = keep param - rate X, and in bf16 also copy = param.
// Grid (ceil(size/2048), layers); 256 threads.
KERNEL muon_apply(float* param, real* copy,
                  Reals X, Floats state,
                  Index stride, int size, float keep, float rate) {
    int i = own_eight(blockIdx.x);
    if (i >= size || state[2]) return;
    Index at = blockIdx.y * stride + i;
    Eight p = load8(param + at);
    Eight x = load8(X + Index(blockIdx.y) * size + i);
    FOR(j, 8) p.x[j] = keep * p.x[j] - rate * x.x[j];
    store8(param + at, p);
    if (BF16) store8(copy + at, p);
}

// Covers Model.refresh of model_gpu.py: copy = param, as real; n is a multiple of 8.
// Grid (ceil(n/2048)); 256 threads.
KERNEL copy_weights(real* copy, Floats param, Index n) {
    Index i = own_eight(blockIdx.x);
    if (i < n) store8(copy + i, load8(param + i));
}

// -----------------------------------------------------------------------------------------------------------
// 7. A readable GEMM
// -----------------------------------------------------------------------------------------------------------
// GEMM is the field's word for a matrix product. With --matmul ours this one does the work of cuBLAS: it covers
// linear_forward, linear_backward and Muon's products. out (M,N) = a (M,I) @ b (I,N), or += where add. out is fp32
// where single is set (gradients of weights, and logits that are looked at), else real; only an fp32 out is added
// to. Either operand may lie transposed in memory, as (I,M) or (N,I).
//
// One thread for each entry of out would read each entry of a from memory N times. Here a block computes a 64 x 64 tile
// of out. It brings pieces of a (64 x 16) and b (16 x 64) to shared memory and uses every number 64 times. A thread
// keeps 4 x 4 sums in registers, and so uses each number that it reads from shared memory four times. cuBLAS does the
// same with larger tiles, which warps share out among them, with tensor cores, and with copies that overlap the
// arithmetic. On an H200, 8192 x 4096 x 768: this kernel 19 TFLOP/s, cuBLAS 50 in fp32 and 684 in bf16.
// Grid (ceil(N/64), ceil(M/64), matrices); 256 threads.
KERNEL __launch_bounds__(256)
matmul(void* out, Reals a, Reals b,
       int M, int N, int I,
       int transpose_a, int transpose_b, int add, int single) {
    constexpr int TILE = 64, DEPTH = 16;
    __shared__ float A[DEPTH][TILE + 1], B[DEPTH][TILE + 1];  // + 1: fewer threads then write to one bank
    int m0 = TILE * blockIdx.y, n0 = TILE * blockIdx.x;
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    float sum[4][4] = {};
    // Loads a piece of x: the terms of the sum from k0 on, of the rows of a (or the columns of b) from `first` on.
    // along: whether neighbours in memory are neighbours in the sum; neighbouring threads take these.
    auto load_piece = [=](float (*piece)[TILE + 1], Reals x, int first, int size, int k0, bool along) {
        x += Index(blockIdx.z) * size * I;  // in stacks: matrix i of a with matrix i of b
        FOR_STRIDED(i, threadIdx.x, TILE * DEPTH, 256) {
            int k = along ? i % DEPTH : i / TILE;
            int n = along ? i / DEPTH : i % TILE;
            Index at = along ? Index(first + n) * I + k0 + k : Index(k0 + k) * size + first + n;
            piece[k][n] = first + n < size && k0 + k < I ? to_float(x[at]) : 0.0f;
        }
    };
    FOR_STRIDED(k0, 0, I, DEPTH) {
        load_piece(A, a, m0, M, k0, !transpose_a);
        load_piece(B, b, n0, N, k0, transpose_b);
        __syncthreads();  // the pieces are complete
        FOR(k, DEPTH)
            FOR(i, 4)
                FOR(j, 4) sum[i][j] += A[k][ty + 16 * i] * B[k][tx + 16 * j];
        __syncthreads();  // nobody reads them any more
    }
    FOR(i, 4)
        FOR(j, 4) {
            int m = m0 + ty + 16 * i;
            int n = n0 + tx + 16 * j;
            if (m >= M || n >= N) continue;
            Index at = (Index(blockIdx.z) * M + m) * N + n;
            float* exact = (float*)out + at;
            if (single) *exact = sum[i][j] + (add ? *exact : 0.0f);
            else store((real*)out + at, sum[i][j]);
        }
}

// -----------------------------------------------------------------------------------------------------------
// 8. Decoding: a few new tokens, after earlier ones whose k and v are in the KV cache
// -----------------------------------------------------------------------------------------------------------
// One new token must read nearly all weights of the model. That limits how fast it can be: for a large model it is
// most of the time; for big it is a fifth, and the rest is waiting at the beginning and end of each kernel. So a
// layer is only five kernels, each made for few rows:
//
//     decode_qkv          x  ->  q, k, v           reads norm1, qkv;  k and v go to the cache
//     decode_attention    q  ->  y                 reads the cache
//     decode_residual     y  ->  x                 reads out
//     decode_swiglu       x  ->  h                 reads norm2, gate, up
//     decode_residual     h  ->  x                 reads down
//
// n is the number of new tokens, one row of x each. Rows come in groups of at most GROUP_ROWS, which share one reading
// of the weights; blockIdx.y counts the groups (in decode_attention, which reads no weights, the rows). The arithmetic
// of a row does not depend on n. So verifying several drafted tokens at once gives the same bits as decoding them one
// by one.
//
// For one n (and one number of heads) every step makes the same launches, so a CUDA graph can replay them. What differs
// is copied to the GPU's memory before: the tokens, what `draw` needs (section 9), and
//
//     lengths (n)     how many tokens of its text are in the cache before each new token
//     times (n)       the position in its text of what is drawn after each row
//
// Where several texts are drawn at once, each row is of another text. Then of sections 8 and 9 only decode_attention
// and draw serve, because with many rows cuBLAS is faster. stride is the number of tokens from the cache of one
// text to that of the next; 0 says that all rows are of one text and follow each other.
constexpr int GROUP_ROWS = 4;

// Programmatic dependent launch, as NVIDIA calls it: from Hopper on a kernel may start before the one ahead of it
// has ended (Gpu.launch_early).
//   * When each block of the kernel ahead has called start_next or has ended, blocks of this one enter where there
//     is room.
//   * They may read weights at once, because no kernel of decoding writes these. They may read `lengths`, `times`
//     and draw's `drawing` at once: these were copied before the first kernel of the step began. (That one is
//     launched in the ordinary way, so it waits for the copies.)
//   * Before they touch anything else they call await_last, which waits for the end of the kernel ahead.
//   * A prefetch brings memory to the L2 cache and returns no value, so it need not wait.
// On earlier GPUs start_next, await_last and prefetch do nothing: each kernel starts at the end of the one ahead.
#if __CUDA_ARCH__ >= 900
#define FROM_HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define FROM_HOPPER(...)
#endif
__device__ void start_next() { FROM_HOPPER("griddepcontrol.launch_dependents;"); }

__device__ void await_last() { FROM_HOPPER("griddepcontrol.wait;" ::: "memory"); }

__device__ void prefetch(Reals from) { FROM_HOPPER("prefetch.global.L2 [%0];" :: "l"(from)); }

// x (n,I) @ w.T. Where there is a gain, x is normed (rmsnorm_forward).
struct Product {
    Reals x;
    Floats gain;
    float eps;
    Reals w;
    int n, I;
    int warps = 1;  // that share the columns of x and w
};

// For each row of x in this block's group (GROUP_ROWS of them): its products a with row w_a of w, and b with row w_b.
// One lane of the warp hands them to take(row, a, b). two_products, below, is what the kernels call.
//
// Reading w takes the time. So a warp reads the two rows of w once, eight numbers a lane at a time, for all rows of the
// group. of.warps warps share the columns: then what each hands to take is only its part of the sums. (A gain needs
// one warp, because the squares of the norm are not added over warps.) The factor rstd of the norm is common to all
// terms of a row's sum. So it comes at the end, and nothing waits for it.
//
// N is a number that the compiler knows, so that the sums can be registers: at least the rows that are left in the
// group. If they are fewer, the last one is computed again, and that result is dropped: so no branch is needed. For
// every N the terms of a row's sum are added in the same order, so a row gets the same bits.
template <int N, class Take>
__device__ void products_of_rows(Product of, Reals w_a, Reals w_b, Take take) {
    constexpr int AHEAD = N == 1 ? 3 : 2;  // loads of each row of w that are under way at once
    float sum_a[N] = {}, sum_b[N] = {}, squares[N] = {};
    int first = GROUP_ROWS * blockIdx.y;
    int step = 256 * of.warps;
    int i = 8 * (threadIdx.x % (32 * of.warps));
    do {  // not while: every lane must come to await_last, because what follows may read what the kernel ahead wrote
        Packed a[AHEAD], b[AHEAD];
        FOR(c, AHEAD)
            if (i + c * step < of.I) {
                a[c] = load_packed(w_a + i + c * step);
                b[c] = load_packed(w_b + i + c * step);
            }
        await_last();
        EACH(c, AHEAD) {
            int column = i + c * step;
            if (column >= of.I) break;
            Eight a8 = unpack8(a[c]);
            Eight b8 = unpack8(b[c]);
            Eight g = of.gain ? load8(of.gain + column) : Eight{};
            EACH(r, N) {
                Eight v = load8(of.x + Index(min(first + r, of.n - 1)) * of.I + column);
                if (of.gain) {
                    squares[r] += dot8(v, v);
                    FOR(j, 8) v.x[j] *= g.x[j];
                }
                sum_a[r] += dot8(a8, v);
                sum_b[r] += dot8(b8, v);
            }
        }
        i += AHEAD * step;
    } while (i < of.I);
    FOR(r, N) {
        float factor = of.gain ? rsqrtf(warp_sum(squares[r]) / of.I + of.eps) : 1.0f;
        float total_a = factor * warp_sum(sum_a[r]);
        float total_b = factor * warp_sum(sum_b[r]);
        if (LANE == 0 && first + r < of.n) take(first + r, total_a, total_b);
    }
}

// products_of_rows with the smallest N that does. row_a, row_b: the numbers of the two rows of w.
template <class Take>
__device__ void two_products(Product of, int row_a, int row_b, Take take) {
    Reals w_a = of.w + Index(row_a) * of.I;
    Reals w_b = of.w + Index(row_b) * of.I;
    int left = of.n - GROUP_ROWS * blockIdx.y;  // rows from the group's first one on
    start_next();
    if (left == 1) products_of_rows<1>(of, w_a, w_b, take);
    else if (left == 2) products_of_rows<2>(of, w_a, w_b, take);
    else products_of_rows<GROUP_ROWS>(of, w_a, w_b, take);
}

// The number of the pair of outputs that this warp owns; a block has four warps.
__device__ int own_pair() { return 4 * blockIdx.x + WARP; }

// Covers rmsnorm_forward, linear_forward and rope_forward, the first three calls of block_forward:
//
//     q_r, k_r, v_r = rmsnorm(x_r) @ w.T,    then    q_r, k_r = rope(q_r), rope(k_r)
//
// A warp owns a pair (i, i + D/2) of a head. q goes to its place in qkv (n, (H+2G)D), k and v to that of token
// lengths[r] in the KV cache of this layer.
// Grid ((H+2G) * D/2 / 4, ceil(n/4)); 128 threads.
KERNEL __launch_bounds__(128)
decode_qkv(real* qkv, real* cache, Reals x, Floats gain, Reals w,
           Floats angles, Ints lengths,
           int n, int C, int H, int G, int D, float eps) {
    int head = own_pair() / (D / 2);
    int i = own_pair() % (D / 2);
    int row = head * D + i;
    two_products({x, gain, eps, w, n, C}, row, row + D / 2, [&](int r, float a, float b) {
        Index t = lengths[r];
        Floats angle = angles + t * D + i;
        bool turned = head < H + G;
        float c = turned ? angle[0] : 1.0f;
        float s = turned ? angle[D / 2] : 0.0f;
        real* to = head < H ? qkv + Index(r) * (H + 2 * G) * D : cache + (t * 2 * G - H) * D;
        store(to + row, a * c - b * s);
        store(to + row + D / 2, b * c + a * s);
    });
}

// Covers linear_forward and `x += increment`, the end of each substep of block_forward:
//
//     x (n,O) += y (n,I) @ w (O,I).T
//
// O is small, and I may be large. So the four warps of a block share the columns of two outputs.
// Grid (O/2, ceil(n/4)); 128 threads.
KERNEL __launch_bounds__(128)
decode_residual(real* x, Reals y, Reals w, int n, int I, int O) {
    __shared__ float parts[2 * GROUP_ROWS][4];  // row 2r + c: column o + c of row r of the group
    int o = 2 * blockIdx.x;
    int row = GROUP_ROWS * blockIdx.y + threadIdx.x / 2;
    two_products({y, nullptr, 0.0f, w, n, I, 4}, o, o + 1, [&](int r, float a, float b) {
        parts[2 * (r % GROUP_ROWS)][WARP] = a;
        parts[2 * (r % GROUP_ROWS) + 1][WARP] = b;
    });
    __syncthreads();
    if (threadIdx.x >= 2 * GROUP_ROWS || row >= n) return;
    float* p = parts[threadIdx.x];
    real* to = x + Index(row) * O + o + threadIdx.x % 2;
    store(to, to_float(*to) + ((p[0] + p[1]) + (p[2] + p[3])));
}

// Covers rmsnorm_forward, linear_forward and swiglu_forward:
//
//     h (n,F) = silu(rmsnorm(x) @ gate.T) * (rmsnorm(x) @ up.T),    w (2F,C) = [gate | up]
//
// A warp owns a column of h.
// Grid (F/4, ceil(n/4)); 128 threads.
KERNEL __launch_bounds__(128)
decode_swiglu(real* h, Reals x, Floats gain, Reals w, int n, int C, int F, float eps) {
    int o = own_pair();
    two_products({x, gain, eps, w, n, C}, o, o + F, [&](int r, float a, float b) {
        store(h + Index(r) * F + o, a * sigmoid(a) * b);
    });
}

// Covers the last rmsnorm_forward and the heads' linear_forward: the logits out (n,O) = rmsnorm(x) @ w.T, for
// the first O rows of w, those of the heads that draw.
// Grid (O/8, ceil(n/4)); 128 threads.
KERNEL __launch_bounds__(128)
decode_logits(float* out, Reals x, Floats gain, Reals w, int n, int C, int O, float eps) {
    int o = 2 * own_pair();
    two_products({x, gain, eps, w, n, C}, o, o + 1, [&](int r, float a, float b) {
        out[Index(r) * O + o] = a;
        out[Index(r) * O + o + 1] = b;
    });
}

// Covers attention_forward for n new tokens, over the KV cache, which has their k and v already: y (n, H*D) of
// the q in qkv (n, (H+2G)D).
//
// A block takes one head of one token. D/8 lanes are a group: they share a key and its value, and a lane has eight
// columns of both. For D = 64 a warp has four groups of eight lanes:
//
//     lane                 0      1      ...   7        8      9      ...   15       16 ... 31
//     key                  0      0      ...   0        1      1      ...   1        2, 3
//     columns              0-7    8-15   ...   56-63    0-7    8-15   ...   56-63    likewise
//
// A group takes four keys in a round, so that their loads and their sums do not wait for each other. Each group
// g has a softmax of its own, relative to a maximum m_g, as if its keys were all that there are. At the end these
// parts add up, first those of a warp, then those of all warps, in order:
//
//     m = max_g m_g     l = sum_g exp(m_g - m) l_g     y = sum_g exp(m_g - m) y_g / l
//
// There is no mask: each row reads the `length` tokens that it may see. Grid (H, n); 512 threads.
constexpr int WARPS = 16, WIDEST = 128;  // the warps of a block, and the largest D

KERNEL __launch_bounds__(32 * WARPS)
decode_attention(real* y, Reals qkv, Reals cache, Ints lengths, int stride, int H, int G, int D) {
    __shared__ Eight part_y[WARPS][WIDEST / 8];
    __shared__ float2 part_ml[WARPS];
    int h = blockIdx.x, row = blockIdx.y;
    int length = lengths[row] + 1;
    int group_lanes = D / 8;         // lanes of a group, eight columns each
    int groups = 32 / group_lanes;   // of a warp
    int own = LANE % group_lanes;   // this lane's number in its group
    int thread = threadIdx.x;
    int step = WARPS * groups;  // of the block's groups each takes a key
    Index width = 2 * G * D;
    Reals q = qkv + Index(row * (H + 2 * G) + h) * D;
    Reals keys = cache + row * stride * width + h / (H / G) * D;
    start_next();
    // While the kernel ahead still runs, thread i asks for key i of the text and its value, 128 bytes at a time.
    Reals early = keys + min(thread, length - 1) * width;
    FOR_STRIDED(d, 0, D, 128 / sizeof(real)) {
        prefetch(early + d);
        prefetch(early + G * D + d);
    }
    await_last();
    Eight q8 = load8(q + 8 * own);
    float m = MASKED, l = 0.0f;
    Eight sum = {};
    auto rescale = [&](float larger) {  // l and sum become relative to a larger maximum
        float factor = expf(m - larger);
        m = larger;
        l *= factor;
        FOR(c, 8) sum.x[c] *= factor;
    };
    FOR_STRIDED(from, WARP * groups, length, 4 * step) {
        int first = from + LANE / group_lanes;
        float score[4], largest = m;
        Packed v[4];
        FOR(i, 4) {
            int j = first + i * step;
            Reals key = keys + min(j, length - 1) * width + 8 * own;
            v[i] = load_packed(key + G * D);
            float dot = lanes_sum(dot8(q8, load8(key)), 1, group_lanes);
            score[i] = j < length ? dot * rsqrtf(float(D)) : MASKED;
            largest = fmaxf(largest, score[i]);
        }
        rescale(largest);
        FOR(i, 4) {
            float weight = first + i * step < length ? expf(score[i] - m) : 0.0f;
            Eight x = unpack8(v[i]);
            l += weight;
            FOR(c, 8) sum.x[c] += weight * x.x[c];
        }
    }
    rescale(lanes_max(m, 1, 32));
    l = warp_sum(l) / group_lanes;  // each of a group's lanes has its l
    for (int bit = group_lanes; bit < 32; bit *= 2)  // not lanes_sum: so the eight sums do not wait for each other
        FOR(c, 8) sum.x[c] += __shfl_xor_sync(0xFFFFFFFF, sum.x[c], bit);
    if (LANE < group_lanes) part_y[WARP][LANE] = sum;
    if (LANE == 0) part_ml[WARP] = {m, l};
    __syncthreads();
    if (thread >= D) return;         // now a thread owns a column of y
    float all_l = 0.0f, all_y = 0.0f;
    FOR(w, WARPS) m = fmaxf(m, part_ml[w].x);
    FOR(w, WARPS) {
        float factor = expf(part_ml[w].x - m);
        all_l += factor * part_ml[w].y;
        all_y += factor * part_y[w][thread / 8].x[thread % 8];
    }
    store(y + Index(row * H + h) * D + thread, all_y / all_l);
}

// -----------------------------------------------------------------------------------------------------------
// 9. Drawing the next token
// -----------------------------------------------------------------------------------------------------------
typedef unsigned long long Bits;  // 64 of them: the key of an id, a seed, or a hash

// A key for each id. No two are equal. A larger x has the larger key (-0 has a smaller one than 0); of two equal x
// the smaller id has the larger key, as in sample. Ids are below 65,536.
__device__ Bits order_key(float x, int id) {
    unsigned bits = __float_as_uint(x);
    return Bits(bits >> 31 ? ~bits : bits | 1u << 31) << 16 | 0xFFFF - id;
}

__device__ int id_of(Bits key) { return ~key & 0xFFFF; }

// Covers gumbel, with the same names.
__device__ double gumbel(Bits seed, int t, int id) {
    Bits z = seed;
    FOR(i, 2) {
        z += (Bits(i ? id : t) + 1) * 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        z ^= z >> 31;
    }
    return -log(-log((double(z >> 12) + 0.5) / 4503599627370496.0));  // 2^52
}

// Covers sample of model_cpu.py.
//     ids (n,heads)        what each head draws after each row of logits (n,heads,V); in the host's memory
//     times, seeds (n)     the position that head 0 draws for, and the seed of the noise, of each row
//     drawing (4)          temperature (above 0), top_p, top_k and vocab. For temperature 0 the host asks for
//                          top_k = 1: the largest logit
// Grid (n, heads); 1024 threads.
KERNEL draw(int* ids, Floats logits,
            Ints times, const double* drawing, const Bits* seeds, int V) {
    __shared__ Bits keys[2][32];
    __shared__ float slots[2][32];
    int row = blockIdx.x, head = blockIdx.y;
    double top_k = drawing[2];
    int vocab = drawing[3];
    int index = row * gridDim.y + head;
    int t = times[row] + head;
    Floats z = logits + Index(index) * V;
    Bits largest = 0, best = 0, floor = 0;
    await_last();
    FOR_STRIDED(id, threadIdx.x, vocab, 1024) largest = max(largest, order_key(z[id], id));
    largest = block_max(largest, keys[0]);
    float top = z[id_of(largest)];
    float scale = float(1.0 / drawing[0]);

    // The sum of the weights of all ids whose keys are at least `least`. An id weighs exp(scale (z - top)). With
    // scale 0 each weighs 1, and the sum counts them.
    auto weight_from = [&](Bits least, float scale, int slot) {
        float sum = 0.0f;
        FOR_STRIDED(id, threadIdx.x, vocab, 1024)
            if (order_key(z[id], id) >= least) sum += scale ? expf(scale * (z[id] - top)) : 1.0f;
        return block_sum(sum, slots[slot]);
    };
    // The largest key such that the ids with this key or a larger one weigh at least `mass`: of the ids in falling
    // order of their keys, the one with which the sum of the weights reaches `mass`. It grows bit by bit, from the
    // highest bit down: a bit is kept if the ids that are left then still weigh enough.
    auto key_where = [&](float mass, float scale) {
        Bits key = 0;
        for (int bit = 47; bit >= 0; bit--) {
            Bits larger = key | 1ull << bit;
            float sum = weight_from(larger, scale, bit % 2);
            if (sum >= mass) key = larger;
            if (sum == mass) break;  // exactly enough: with a still larger key the same ids stay, or too few
        }
        __syncthreads();  // slots are free again
        return key;
    };
    if (top_k == 1) floor = largest;
    else if (top_k > 0 && top_k < vocab) floor = key_where(top_k, 0.0f);
    if (drawing[1] < 1.0) {
        float mass = float(drawing[1]) * weight_from(floor, scale, 0);
        floor = max(floor, key_where(mass, scale));  // begins with slots[1]: slots[0] may still be read
    }
#pragma unroll 4
    FOR_STRIDED(id, threadIdx.x, vocab, 1024)
        if (order_key(z[id], id) >= floor)
            best = max(best, order_key(float((z[id] - top) / drawing[0] + gumbel(seeds[row], t, id)), id));
    best = block_max(best, keys[1]);
    if (threadIdx.x == 0) ids[index] = id_of(best);
}
