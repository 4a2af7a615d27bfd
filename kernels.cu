// kernels.cu: every CUDA kernel of the GPU engine but attention (flash_attn.cu).
//
// Read model_cpu.py first: each kernel says which of its functions it covers and quotes their formulas; the
// derivations stand there. model_gpu.py launches these kernels; the launch geometry (grid; threads of a
// block) stands above each. What this file does not do: no large matrix products for training (cuBLAS does
// them; section 7 has a readable one).
//
// Letters as everywhere: B batch, T time, C model width, H query heads, G key/value heads, D head width, F
// feed-forward width, V vocabulary, K prediction heads, N = B*T tokens.
//
// What makes such kernels fast is not arithmetic but memory traffic. Reading or writing the activations of
// one layer costs more time than anything computed from them, so
//   * functions that follow each other are fused, so that a tensor moves once: the residual add with the norm
//     after it, the norm's backward with the add of its gradient to the residual's, softmax with its loss and
//     its gradient;
//   * the norms' outputs and the SwiGLU product are kept for the backward: they are cheap to compute again,
//     but not to write again;
//   * a thread moves 16 bytes at a time, eight bf16 numbers (C, F and V are multiples of 8), neighbours side
//     by side.
//
// Arithmetic is fp32 always, but for the noise of section 9. model_gpu.py compiles the file with -DBF16=0 or
// 1, which chooses how activations and the weights of products are stored (`real`), and with -DROW_THREADS,
// the threads of a block that owns a row of C numbers: the wider it is, the fewer registers has each. No
// atomics: every sum has one order, so two runs give the same bits.

// -----------------------------------------------------------------------------------------------------------
// 1. Eight numbers at a time, sums over a block
// -----------------------------------------------------------------------------------------------------------
struct Eight { float x[8]; };

__device__ Eight load8(const float* from) {
    float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

// Stores, and returns what a later load will see.
__device__ Eight store8(float* to, Eight v) {
    ((float4*)to)[0] = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    ((float4*)to)[1] = make_float4(v.x[4], v.x[5], v.x[6], v.x[7]);
    return v;
}

#if BF16
typedef unsigned short real;  // bf16: the upper half of a float
typedef uint4 Packed;         // eight numbers as they lie in memory

#ifndef CUDA_ON_CPU
// Two floats rounded to bf16 (to nearest, ties to even) in one word, `low` in its lower half.
__device__ unsigned pack_bf16(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
#endif

__device__ float low(unsigned word) { return __uint_as_float(word << 16); }
__device__ float high(unsigned word) { return __uint_as_float(word & 0xFFFF0000u); }

__device__ Eight unpack8(Packed w) {
    return {{low(w.x), high(w.x), low(w.y), high(w.y), low(w.z), high(w.z), low(w.w), high(w.w)}};
}

__device__ Packed load_packed(const real* from) { return *(const uint4*)from; }

__device__ Eight load8(const real* from) { return unpack8(load_packed(from)); }

__device__ float to_float(real x) { return low(x); }

__device__ void store(real* to, float x) { *to = (unsigned short)pack_bf16(x, 0.0f); }

__device__ Eight store8(real* to, Eight v) {
    uint4 w = make_uint4(pack_bf16(v.x[0], v.x[1]), pack_bf16(v.x[2], v.x[3]), pack_bf16(v.x[4], v.x[5]),
                         pack_bf16(v.x[6], v.x[7]));
    *(uint4*)to = w;
    return unpack8(w);
}
#else
typedef float real;
typedef Eight Packed;
__device__ Eight unpack8(Packed v) { return v; }
__device__ Packed load_packed(const real* from) { return load8(from); }
__device__ float to_float(real x) { return x; }
__device__ void store(real* to, float x) { *to = x; }
#endif

__device__ float dot8(Eight a, Eight b) {
    float sum = 0.0f;
    for (int i = 0; i < 8; i++) sum += a.x[i] * b.x[i];
    return sum;
}

__device__ float warp_sum(float x) {
    for (int bit = 16; bit > 0; bit /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, bit);
    return x;
}

template <class T> __device__ T warp_max(T x) {
    for (int bit = 16; bit > 0; bit /= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFF, x, bit));
    return x;
}

// Sum and maximum over the block, the same in every thread: within each warp, then over the warps through
// `slots`, 32 numbers of shared memory that no thread still reads. What was written to shared memory before
// is visible after.
__device__ float block_sum(float x, float* slots) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
    for (int w = 0; w < blockDim.x / 32; w++) x += slots[w];
    return x;
}

template <class T> __device__ T block_max(T x, T* slots) {
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < blockDim.x / 32; w++) x = max(x, slots[w]);
    return x;
}

// In bf16, whose numbers have 8 bits of mantissa, the hardware's quick exponential (22 bits) serves.
__device__ float exponential(float x) { return BF16 ? __expf(x) : expf(x); }

constexpr float MASKED = -1e30f;  // stands for minus infinity, and MASKED - MASKED is not NaN

// -----------------------------------------------------------------------------------------------------------
// 2. Embedding
// -----------------------------------------------------------------------------------------------------------
// Covers embedding_forward: out[n] = embed[tokens[n]].
// Grid (N); C/8 threads, rounded up to whole warps.
extern "C" __global__ void embedding_forward(real* out, const int* tokens, const real* embed, int C) {
    int column = 8 * threadIdx.x;
    const real* row = embed + (long long)tokens[blockIdx.x] * C;
    if (column < C) store8(out + (long long)blockIdx.x * C + column, load8(row + column));
}

// Covers embedding_backward: dembed[v] += sum of dout[n] over all n with tokens[n] == v.
//
// As on the CPU equal tokens were brought side by side by a sort (on the host: Model.forward): order lists
// the positions n by token, those of token v from starts[v] to starts[v+1]. One block owns 256 columns of one
// row of dembed, its eight warps take the positions in turn and their eight sums are added in order.
// Grid (V, ceil(C/256)); 256 threads.
extern "C" __global__ void embedding_backward(float* dembed, const real* dout, const int* order,
                                              const int* starts, int C) {
    __shared__ Eight parts[8][32];
    int lane = threadIdx.x % 32, part = threadIdx.x / 32, column = 256 * blockIdx.y + 8 * lane;
    int first = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    if (first == end) return;
    Eight sum = {};
    if (column < C)
        for (int j = first + part; j < end; j += 8) {
            Eight d = load8(dout + (long long)order[j] * C + column);
            for (int i = 0; i < 8; i++) sum.x[i] += d.x[i];
        }
    parts[part][lane] = sum;
    __syncthreads();
    if (part > 0 || column >= C) return;
    float* row = dembed + (long long)blockIdx.x * C + column;
    Eight total = load8(row);
    for (int p = 0; p < 8; p++)
        for (int i = 0; i < 8; i++) total.x[i] += parts[p][lane].x[i];
    store8(row, total);
}

// -----------------------------------------------------------------------------------------------------------
// 3. RMSNorm, with the residual stream
// -----------------------------------------------------------------------------------------------------------
// Covers `x += increment` of block_forward, then rmsnorm_forward:
//
//     x = before + increment   rstd_n = 1 / sqrt(mean_i x_ni^2 + eps)        out_ni = x_ni rstd_n gain_i
//
// A block owns a row and a thread eight of its columns, so x stays in registers between the sum of squares
// and its use. The norm reads x as stored (in bf16: rounded), because the backward will. Where there is
// no increment, x = before is left alone.
// Grid (N); C/8 threads, rounded up to whole warps.
extern "C" __global__ void rmsnorm_forward(real* out, float* rstd, real* x, const real* before,
                                           const real* increment, const float* gain, int C, float eps) {
    __shared__ float slots[32];
    int column = 8 * threadIdx.x;
    long long at = (long long)blockIdx.x * C + column;
    Eight v = {};
    if (column < C) {
        v = load8(before + at);
        if (increment) {
            Eight s = load8(increment + at);
            for (int i = 0; i < 8; i++) v.x[i] += s.x[i];
            v = store8(x + at, v);
        }
    }
    float r = rsqrtf(block_sum(dot8(v, v), slots) / C + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    if (column < C) {
        Eight g = load8(gain + column);
        for (int i = 0; i < 8; i++) v.x[i] *= r * g.x[i];
        store8(out + at, v);
    }
}

// Covers rmsnorm_backward and the `dx += back` after it, of out = xhat gain, xhat = x rstd:
//
//     dx_j (+)= rstd (dxhat_j - xhat_j mean_i(dxhat_i xhat_i)),   dxhat = dout gain
//     dgain_i += sum_n dout_ni xhat_ni
//
// dgain, a sum over rows, is taken in two stages: here each block sums its rows n = block, block + blocks,
// ...; column_sum adds the blocks. A row's sum takes a barrier, and memory would stand idle meanwhile: so the
// next row is loaded before. In every round block_sum uses the other half of `slots`, and one barrier a row
// is enough.
// Grid (at most N blocks: the rows of partial); C/8 threads, rounded up to whole warps.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
rmsnorm_backward(real* dx, const real* dout, float* partial, const real* x, const float* rstd,
                 const float* gain, int N, int C, int add) {
    __shared__ float slots[2][32];
    int column = 8 * threadIdx.x, half = 0;
    Eight g = column < C ? load8(gain + column) : Eight{}, dgain = {};
    Packed next_x = {}, next_dout = {}, next_dx = {};
    for (int next = blockIdx.x; next < N + int(gridDim.x); next += gridDim.x, half ^= 1) {
        Eight xhat = unpack8(next_x), dxhat = unpack8(next_dout), old = unpack8(next_dx);
        if (next < N && column < C) {
            long long at = (long long)next * C + column;
            next_x = load_packed(x + at);
            next_dout = load_packed(dout + at);
            if (add) next_dx = load_packed(dx + at);
        }
        int n = next - gridDim.x;  // the row of this round; there is none in the first
        if (n < 0) continue;
        float r = rstd[n];
        for (int i = 0; i < 8; i++) {
            xhat.x[i] *= r;
            dgain.x[i] += dxhat.x[i] * xhat.x[i];
            dxhat.x[i] *= g.x[i];
        }
        float mean = block_sum(dot8(dxhat, xhat), slots[half]) / C;
        if (column < C) {
            long long at = (long long)n * C + column;
            for (int i = 0; i < 8; i++) old.x[i] += r * (dxhat.x[i] - xhat.x[i] * mean);
            store8(dx + at, old);
        }
    }
    if (column < C) store8(partial + (long long)blockIdx.x * C + column, dgain);
}

// Second stage: out[c] += sum over rows of partial (rows, C).
// Grid (ceil(C/32)); 1024 threads: 32 columns x 32 parts of the rows.
extern "C" __global__ void column_sum(float* out, const float* partial, int rows, int C) {
    __shared__ float parts[32][33];
    int lane = threadIdx.x % 32, part = threadIdx.x / 32, column = 32 * blockIdx.x + lane;
    float sum = 0.0f;
    if (column < C)
#pragma unroll 8
        for (int row = part; row < rows; row += 32) sum += partial[(long long)row * C + column];
    parts[part][lane] = sum;
    __syncthreads();
    if (part > 0 || column >= C) return;
    sum = 0.0f;
    for (int p = 0; p < 32; p++) sum += parts[p][lane];
    out[column] += sum;
}

// -----------------------------------------------------------------------------------------------------------
// 4. Rotary embedding
// -----------------------------------------------------------------------------------------------------------
// Covers rope_forward, in place on the heads q and k of qkv (N, width); rope_backward is in flash_attn.cu:
//
//     y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin
//
// cos, sin (context, D/2); heads = H + G, the heads that turn. A thread turns eight pairs: D is a multiple of
// 16.
// Grid (ceil(N * heads * D/16 / 256)); 256 threads.
extern "C" __global__ void rope(real* qkv, const float* cos, const float* sin, int N, int T, int heads, int D,
                                int width) {
    int vectors = D / 16, index = 256 * blockIdx.x + threadIdx.x;
    int n = index / (heads * vectors), head = index / vectors % heads, pair = 8 * (index % vectors);
    if (n >= N) return;
    real* x = qkv + (long long)n * width + head * D + pair;
    int angle = n % T * (D / 2) + pair;
    Eight x1 = load8(x), x2 = load8(x + D / 2), c = load8(cos + angle), s = load8(sin + angle), y1, y2;
    for (int i = 0; i < 8; i++) {
        y1.x[i] = x1.x[i] * c.x[i] - x2.x[i] * s.x[i];
        y2.x[i] = x2.x[i] * c.x[i] + x1.x[i] * s.x[i];
    }
    store8(x, y1);
    store8(x + D / 2, y2);
}

// -----------------------------------------------------------------------------------------------------------
// 5. SwiGLU
// -----------------------------------------------------------------------------------------------------------
__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Covers swiglu_forward: out = g sigmoid(g) u, gate_up (N,2F) = [g | u].
// Grid (N, ceil(F/2048)); 256 threads.
extern "C" __global__ void swiglu_forward(real* out, const real* gate_up, int F) {
    int column = 8 * (256 * blockIdx.y + threadIdx.x);
    if (column >= F) return;
    const real* g_at = gate_up + (long long)blockIdx.x * 2 * F + column;
    Eight g = load8(g_at), u = load8(g_at + F);
    for (int i = 0; i < 8; i++) g.x[i] *= sigmoid(g.x[i]) * u.x[i];
    store8(out + (long long)blockIdx.x * F + column, g);
}

// Covers swiglu_backward, with s = sigmoid(g), silu = g s:
//
//     h = silu u    =>    du = dh silu        dg = dh u s (1 + g - silu)
//
// In place: gate_up becomes [dg | du].
// Grid (N, ceil(F/2048)); 256 threads.
extern "C" __global__ void swiglu_backward(real* gate_up, const real* dh, int F) {
    int column = 8 * (256 * blockIdx.y + threadIdx.x);
    if (column >= F) return;
    real* g_at = gate_up + (long long)blockIdx.x * 2 * F + column;
    Eight g = load8(g_at), u = load8(g_at + F), d = load8(dh + (long long)blockIdx.x * F + column);
    for (int i = 0; i < 8; i++) {
        float s = sigmoid(g.x[i]), silu = g.x[i] * s;
        g.x[i] = d.x[i] * u.x[i] * s * (1.0f + g.x[i] - silu);
        u.x[i] = d.x[i] * silu;
    }
    store8(g_at, g);
    store8(g_at + F, u);
}

// -----------------------------------------------------------------------------------------------------------
// 6. The loss and the optimizer
// -----------------------------------------------------------------------------------------------------------
// Covers cross_entropy_forward (but for its sum over rows) and cross_entropy_backward, one row (n,k) a block:
//
//     nll = log sum_v exp(z_v) - z_y        dz_v = weight_k (p_v - [v == y]),  p = softmax(z)
//
// logits (N,K,V) become their gradients in place; a masked row (target -1) gets nll 0 and gradient 0. weight
// (K) is head_weight_k / divisor_k. targets (B, T+K-1): head k at position t is to predict targets[b][t+k].
//
// The first pass keeps for each thread a running maximum m and the sum of exp(z - m), rescaled whenever m
// grows (the online softmax of flash_attn.cu); the second reads the row again, now from the cache.
// Grid (N*K); 128 threads.
extern "C" __global__ void cross_entropy(real* logits, float* nll, const int* targets, const float* weight,
                                         int T, int K, int V) {
    __shared__ float slots[2][32];
    int n = blockIdx.x / K, k = blockIdx.x % K, b = n / T, t = n % T;
    int target = targets[b * (T + K - 1) + t + k];
    real* z = logits + (long long)blockIdx.x * V;
    float m = MASKED, total = 0.0f, log_total = 0.0f, w = 0.0f;
    if (target >= 0) {
        for (int v = 8 * threadIdx.x; v < V; v += 8 * 128) {
            Eight e = load8(z + v);
            float larger = m;
            for (int i = 0; i < 8; i++) larger = fmaxf(larger, e.x[i]);
            total *= exponential(m - larger);
            m = larger;
            for (int i = 0; i < 8; i++) total += exponential(e.x[i] - m);
        }
        float block_m = block_max(m, slots[0]);
        log_total = block_m + logf(block_sum(total * exponential(m - block_m), slots[1]));
        w = weight[k];
    }
    if (threadIdx.x == 0) nll[blockIdx.x] = target < 0 ? 0.0f : log_total - to_float(z[target]);
    __syncthreads();  // the target's logit is read before its owner overwrites it
    for (int v = 8 * threadIdx.x; v < V; v += 8 * 128) {
        Eight e = target < 0 ? Eight{} : load8(z + v);
        for (int i = 0; i < 8; i++)
            e.x[i] = target < 0 ? 0.0f : w * (exponential(e.x[i] - log_total) - float(v + i == target));
        store8(z + v, e);
    }
}

// Covers the sum of cross_entropy_forward: losses[k] = sum_n nll[n][k] / divisor[k].
// Grid (K); 1024 threads.
extern "C" __global__ void cross_entropy_sum(float* losses, const float* nll, const float* divisor,
                                             int N, int K) {
    __shared__ float slots[32];
    float sum = 0.0f;
    for (int n = threadIdx.x; n < N; n += 1024) sum += nll[(long long)n * K + blockIdx.x];
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) losses[blockIdx.x] = sum / divisor[blockIdx.x];
}

// The gradient's norm, in two stages: partial[block] = sum of squares of the block's share of grad (n, a
// multiple of 4).
// Grid (any number of blocks); 256 threads.
extern "C" __global__ void sum_of_squares(float* partial, const float* grad, long long n) {
    __shared__ float slots[32];
    float sum = 0.0f;
    for (long long i = 4 * (256LL * blockIdx.x + threadIdx.x); i < n; i += 4 * 256LL * gridDim.x) {
        float4 g = *(const float4*)(grad + i);
        sum += g.x * g.x + g.y * g.y + g.z * g.z + g.w * g.w;
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// state: the norm of all; the factor min(1, clip / (norm + 1e-6)) for adamw, which so never passes through
// the host, by the norm of what the first `clipped` blocks summed; and whether a norm was ever not finite,
// which stops every later update too.
// Grid (1); 1024 threads.
extern "C" __global__ void gradient_norm(float* state, const float* partial, int clipped, int blocks,
                                         float clip) {
    __shared__ float slots[2][32];
    float sum = 0.0f, rest = 0.0f;
    for (int i = threadIdx.x; i < clipped; i += 1024) sum += partial[i];
    for (int i = clipped + threadIdx.x; i < blocks; i += 1024) rest += partial[i];
    sum = block_sum(sum, slots[0]);
    float norm = sqrtf(sum + block_sum(rest, slots[1]));
    if (threadIdx.x > 0) return;
    state[0] = norm;
    state[1] = fminf(1.0f, clip / (sqrtf(sum) + 1e-6f));
    if (!(norm <= 3.4e38f)) state[2] = 1.0f;
}

// Covers adamw_update, in one pass over a part of the flat buffers (n numbers, a multiple of 8):
//
//     m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2        g = factor * grad
//     param -= lr (decay param + mhat / (sqrt(vhat) + eps)),   mhat = m correction1,   vhat = v correction2
//
// then grad = 0, and in bf16 the copy of the weights that the products read. correction = 1 / (1 - beta^t).
// Grid (ceil(n/2048)); 256 threads.
extern "C" __global__ void adamw(float* param, real* copy, float* grad, float* m, float* v,
                                 const float* state, long long n, float lr, float beta1, float beta2,
                                 float eps, float decay, float correction1, float correction2) {
    long long i = 8 * (256LL * blockIdx.x + threadIdx.x);
    if (i >= n || state[2] != 0.0f) return;
    float keep = 1.0f - lr * decay;
    Eight p = load8(param + i), g = load8(grad + i), m8 = load8(m + i), v8 = load8(v + i);
    for (int j = 0; j < 8; j++) {
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

// The kernels of muon_update, of which muon_polynomial is newton_schulz's. Each takes one kind of matrix in
// all layers: blockIdx.y counts the layers, whose matrices of `size` numbers (a multiple of 8) lie `stride`
// numbers apart in param, copy, grad and m, and side by side in X. What goes into newton_schulz is u =
// momentum m + (1 - momentum) grad (Nesterov), where m is the new mean; divided by its norm, for which the
// first kernel leaves sums of squares.
__device__ Eight running_mean(Eight m, Eight g, float momentum) {
    for (int j = 0; j < 8; j++) m.x[j] = momentum * m.x[j] + (1.0f - momentum) * g.x[j];
    return m;
}

// m = momentum m + (1 - momentum) grad; squares (layers, blocks): sums of the squares of u.
// Grid (blocks, layers); 256 threads.
extern "C" __global__ void muon_momentum(float* squares, float* m, const float* grad, const float* state,
                                         long long stride, int size, float momentum) {
    __shared__ float slots[32];
    long long layer = blockIdx.y * stride;
    float sum = 0.0f;
    for (int i = 8 * (256 * blockIdx.x + threadIdx.x); i < size; i += 8 * 256 * gridDim.x) {
        Eight g = load8(grad + layer + i), mean = running_mean(load8(m + layer + i), g, momentum);
        Eight u = running_mean(mean, g, momentum);
        sum += dot8(u, u);
        if (state[2] == 0.0f) store8(m + layer + i, mean);
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) squares[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// X = u / (|u| + 1e-7), and grad = 0.
// Grid (blocks, layers), as many as of muon_momentum; 256 threads.
extern "C" __global__ void muon_input(real* X, float* grad, const float* m, const float* squares,
                                      const float* state, long long stride, int size, float momentum) {
    if (state[2] != 0.0f) return;
    X += (long long)blockIdx.y * size;
    long long layer = blockIdx.y * stride;
    float sum = 0.0f;
    for (int b = 0; b < gridDim.x; b++) sum += squares[blockIdx.y * gridDim.x + b];
    float norm = sqrtf(sum) + 1e-7f;
    for (int i = 8 * (256 * blockIdx.x + threadIdx.x); i < size; i += 8 * 256 * gridDim.x) {
        Eight u = running_mean(load8(m + layer + i), load8(grad + layer + i), momentum);
        for (int j = 0; j < 8; j++) u.x[j] /= norm;
        store8(X + i, u);
        store8(grad + layer + i, {});
    }
}

// Covers the polynomial of newton_schulz: B (side, side) holds A^2, and becomes a I + b A + c A^2.
// Grid (ceil(side^2 / 2048), matrices); 256 threads.
extern "C" __global__ void muon_polynomial(real* B, const real* A, int side, float a, float b, float c) {
    int i = 8 * (256 * blockIdx.x + threadIdx.x), row = i / side, column = i % side;
    if (row >= side) return;
    long long at = (long long)blockIdx.y * side * side + i;
    Eight x = load8(A + at), square = load8(B + at);
    for (int j = 0; j < 8; j++) x.x[j] = (row == column + j ? a : 0.0f) + b * x.x[j] + c * square.x[j];
    store8(B + at, x);
}

// param = keep param - rate X, and in bf16 the copy of the weights.
// Grid (ceil(size/2048), layers); 256 threads.
extern "C" __global__ void muon_apply(float* param, real* copy, const real* X, const float* state,
                                      long long stride, int size, float keep, float rate) {
    int i = 8 * (256 * blockIdx.x + threadIdx.x);
    if (i >= size || state[2] != 0.0f) return;
    param += blockIdx.y * stride;
    Eight p = load8(param + i), x = load8(X + (long long)blockIdx.y * size + i);
    for (int j = 0; j < 8; j++) p.x[j] = keep * p.x[j] - rate * x.x[j];
    store8(param + i, p);
    if (BF16) store8(copy + blockIdx.y * stride + i, p);
}

// Covers Model.refresh: copy = param, in bf16; n is a multiple of 8.
// Grid (ceil(n/2048)); 256 threads.
extern "C" __global__ void copy_weights(real* copy, const float* param, long long n) {
    long long i = 8 * (256LL * blockIdx.x + threadIdx.x);
    if (i < n) store8(copy + i, load8(param + i));
}

// -----------------------------------------------------------------------------------------------------------
// 7. A readable matrix product
// -----------------------------------------------------------------------------------------------------------
// out (M,N) = a (M,I) @ b (I,N), or += where add. Covers every product with --matmul ours. out is fp32
// where single is set (gradients of weights, and logits that are looked at), else real; only the fp32 one is
// added to. Either operand may lie transposed in memory: entry (m,k) of a is a[m * a_row + k * a_column], and
// one of the strides is 1; b likewise.
//
// Read naively, each entry of a would come from memory N times. Here a block computes a 64 x 64 tile of out:
// it brings 64 x 16 pieces of a and b to shared memory and uses every number 64 times; a thread keeps 4 x 4
// sums in registers, and so uses what it reads from shared memory four times. cuBLAS does the same with
// larger tiles on two more levels, tensor cores, and copies that overlap the arithmetic. On an H200, 8192 x
// 4096 x 768: this kernel 19 TFLOP/s, cuBLAS 50 in fp32 and 684 in bf16.
// Grid (ceil(N/64), ceil(M/64)); 256 threads.
constexpr int TILE = 64, DEPTH = 16;

extern "C" __global__ void __launch_bounds__(256)
matmul(void* out, const real* a, const real* b, int M, int N, int I, int a_row, int a_column, int b_row,
       int b_column, int out_row, int add, int single) {
    __shared__ float A[DEPTH][TILE + 1], B[DEPTH][TILE + 1];  // + 1: a column then lies in different banks
    int m0 = TILE * blockIdx.y, n0 = TILE * blockIdx.x, ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    float sum[4][4] = {};
    for (int k0 = 0; k0 < I; k0 += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += 256) {
            // neighbouring threads take neighbours in memory
            int m = a_column == 1 ? i / DEPTH : i % TILE, ka = a_column == 1 ? i % DEPTH : i / TILE;
            int n = b_row == 1 ? i / DEPTH : i % TILE, kb = b_row == 1 ? i % DEPTH : i / TILE;
            A[ka][m] = m0 + m < M && k0 + ka < I
                ? to_float(a[(long long)(m0 + m) * a_row + (long long)(k0 + ka) * a_column]) : 0.0f;
            B[kb][n] = n0 + n < N && k0 + kb < I
                ? to_float(b[(long long)(k0 + kb) * b_row + (long long)(n0 + n) * b_column]) : 0.0f;
        }
        __syncthreads();  // the pieces are complete
        for (int k = 0; k < DEPTH; k++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sum[i][j] += A[k][ty + 16 * i] * B[k][tx + 16 * j];
        __syncthreads();  // nobody reads them any more
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int m = m0 + ty + 16 * i, n = n0 + tx + 16 * j;
            if (m >= M || n >= N) continue;
            long long at = (long long)m * out_row + n;
            if (single) ((float*)out)[at] = sum[i][j] + (add ? ((float*)out)[at] : 0.0f);
            else store((real*)out + at, sum[i][j]);
        }
}

// -----------------------------------------------------------------------------------------------------------
// 8. Decoding: n new tokens, few, after `position` earlier ones whose q, k and v are kept
// -----------------------------------------------------------------------------------------------------------
// One new token passes through a whole model in the time that it takes to read the weights, if nothing else
// takes longer. So a layer is five kernels, each made for few rows, and a step is always the same launches:
// what differs from step to step, `place` for one, lies in device memory, and a CUDA graph replays the rest.
//
//     place (4): the position of the first new token in the cache; in the text, that of the first token to be
//     drawn; top_k; vocab (section 9)
//
// A row's arithmetic does not depend on n, so that verifying several drafted tokens at once gives the same
// bits as decoding them one by one. Rows come in groups of at most ROWS, blockIdx.y counts the groups.
constexpr int ROWS = 4;

// From Hopper on a kernel may start before the one ahead of it has ended (Gpu.launch_early): its blocks come
// to where that one's leave room, once each of those has called start_next, and read weights, which nobody
// writes; with await_last they wait for its end, before they touch what others write. `place` and the like
// may be read at once: the step's first kernel starts as usual, when they have been copied, and all others
// after it. A prefetch reads nothing. Earlier GPUs know no such thing: there each kernel starts at the end of
// the last.
#if __CUDA_ARCH__ >= 900
__device__ void start_next() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ void await_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ void prefetch(const real* from) { asm volatile("prefetch.global.L2 [%0];" :: "l"(from)); }
#else
__device__ void start_next() {}
__device__ void await_last() {}
__device__ void prefetch(const real* from) {}
#endif

// The product of each row of this group of x (n,I), N or fewer, with rows w_a and w_b of a matrix, to
// take(row, a, b), which one lane of the warp calls. Past the last row the last one is computed again, so
// that each row has the same arithmetic for every N.
template <int N, class Take>
__device__ void products_of_rows(const real* x, const float* gain, float eps, const real* w_a,
                                 const real* w_b, int n, int I, int warps, Take take) {
    constexpr int AHEAD = N == 1 ? 3 : 2;  // loads of each row of w that are under way at once
    float sum_a[N] = {}, sum_b[N] = {}, squares[N] = {};
    int first = ROWS * blockIdx.y, step = 256 * warps, i = 8 * (threadIdx.x % (32 * warps));
    do {
        Packed a[AHEAD], b[AHEAD];
        for (int c = 0; c < AHEAD; c++)
            if (i + c * step < I) {
                a[c] = load_packed(w_a + i + c * step);
                b[c] = load_packed(w_b + i + c * step);
            }
        await_last();
#pragma unroll
        for (int c = 0; c < AHEAD; c++) {
            int column = i + c * step;
            if (column >= I) break;
            Eight a8 = unpack8(a[c]), b8 = unpack8(b[c]), g = {};
            if (gain) g = load8(gain + column);
#pragma unroll
            for (int r = 0; r < N; r++) {
                Eight v = load8(x + (long long)min(first + r, n - 1) * I + column);
                if (gain) {
                    squares[r] += dot8(v, v);
                    for (int j = 0; j < 8; j++) v.x[j] *= g.x[j];
                }
                sum_a[r] += dot8(a8, v);
                sum_b[r] += dot8(b8, v);
            }
        }
        i += AHEAD * step;
    } while (i < I);
    for (int r = 0; r < N; r++) {
        float factor = gain ? rsqrtf(warp_sum(squares[r]) / I + eps) : 1.0f;
        float total_a = factor * warp_sum(sum_a[r]), total_b = factor * warp_sum(sum_b[r]);
        if (threadIdx.x % 32 == 0 && first + r < n) take(first + r, total_a, total_b);
    }
}

// Reading w is all the time it takes: a warp owns two outputs and reads their rows of w once, 16 bytes a
// lane, for the rows of its group of the n rows of x: take(row, a, b). Where there is a gain, x is normed
// (rmsnorm_forward): its factor rstd is common to all of a row's sum, so it need not be known before the end,
// and nothing waits for it. warps: so many share the columns, and what they hand to take is to be added up.
template <class Take> __device__ void two_products(const real* x, const float* gain, float eps, const real* w,
                                                   int row_a, int row_b, int n, int I, int warps, Take take) {
    const real *w_a = w + (long long)row_a * I, *w_b = w + (long long)row_b * I;
    int rows = n - ROWS * blockIdx.y;  // of this group, or more
    start_next();
    if (rows == 1) products_of_rows<1>(x, gain, eps, w_a, w_b, n, I, warps, take);
    else if (rows == 2) products_of_rows<2>(x, gain, eps, w_a, w_b, n, I, warps, take);
    else products_of_rows<ROWS>(x, gain, eps, w_a, w_b, n, I, warps, take);
}

// The pair of outputs that a warp owns, four warps a block.
__device__ int own_pair() { return 4 * blockIdx.x + threadIdx.x / 32; }

// qkv[position + r] = rope(rmsnorm(x_r) @ w.T): of a head that turns (the first `turned`, H + G, of heads) a
// warp owns a pair (i, i + D/2). qkv (context, heads * D): with it q, k and v stand in the cache.
// Grid (heads * D/2 / 4, ceil(n/4)); 128 threads.
extern "C" __global__ void __launch_bounds__(128)
decode_qkv(real* qkv, const real* x, const float* gain, const real* w, const float* cos, const float* sin,
           const int* place, int n, int C, int heads, int turned, int D, float eps) {
    int head = own_pair() / (D / 2), i = own_pair() % (D / 2), row = head * D + i;
    two_products(x, gain, eps, w, row, row + D / 2, n, C, 1, [&](int r, float a, float b) {
        int t = place[0] + r, angle = t * (D / 2) + i;
        float c = head < turned ? cos[angle] : 1.0f, s = head < turned ? sin[angle] : 0.0f;
        real* to = qkv + (long long)t * heads * D + row;
        store(to, a * c - b * s);
        store(to + D / 2, b * c + a * s);
    });
}

// x (n,O) += y (n,I) @ w (O,I).T: the end of each substep of block_forward. O is small, I may be large: so
// the four warps of a block share the columns of its two outputs.
// Grid (O/2, ceil(n/4)); 128 threads.
extern "C" __global__ void __launch_bounds__(128)
decode_residual(real* x, const real* y, const real* w, int n, int I, int O) {
    __shared__ float2 parts[ROWS][4];
    int o = 2 * blockIdx.x, row = ROWS * blockIdx.y + threadIdx.x;
    two_products(y, nullptr, 0.0f, w, o, o + 1, n, I, 4, [&](int r, float a, float b) {
        parts[r % ROWS][threadIdx.x / 32] = make_float2(a, b);
    });
    __syncthreads();
    if (threadIdx.x >= ROWS || row >= n) return;
    float2* p = parts[threadIdx.x];
    real* to = x + (long long)row * O + o;
    store(to, to_float(to[0]) + ((p[0].x + p[1].x) + (p[2].x + p[3].x)));
    store(to + 1, to_float(to[1]) + ((p[0].y + p[1].y) + (p[2].y + p[3].y)));
}

// h (n,F) = silu(rmsnorm(x) @ gate.T) * (rmsnorm(x) @ up.T), w (2F,C) = [gate | up]: a warp owns a column of
// h.
// Grid (ceil(F/4), ceil(n/4)); 128 threads.
extern "C" __global__ void __launch_bounds__(128)
decode_swiglu(real* h, const real* x, const float* gain, const real* w, int n, int C, int F, float eps) {
    int o = own_pair();
    if (o >= F) return;
    two_products(x, gain, eps, w, o, o + F, n, C, 1, [&](int r, float a, float b) {
        store(h + (long long)r * F + o, a * sigmoid(a) * b);
    });
}

// out (n,O), logits, = rmsnorm(x) @ w.T, of the first O rows of w, those of the heads that are asked.
// Grid (ceil(O/8), ceil(n/4)); 128 threads.
extern "C" __global__ void __launch_bounds__(128)
decode_logits(float* out, const real* x, const float* gain, const real* w, int n, int C, int O, float eps) {
    int o = 2 * own_pair();
    if (o >= O) return;
    two_products(x, gain, eps, w, o, o + 1, n, C, 1, [&](int r, float a, float b) {
        out[(long long)r * O + o] = a;
        out[(long long)r * O + o + 1] = b;
    });
}

// Covers the attention of Model.extend: y (n, H*D). A block takes one head of one token, each of its warps 32
// keys at a time, one a lane, and their values. No warp waits for another before all have their part of the
// softmax, relative to a maximum m_w of their own; these parts then add up, in order:
//
//     m = max_w m_w     l = sum_w exp(m_w - m) l_w     y = sum_w exp(m_w - m) y_w / l
//
// Grid (H, n); 512 threads.
constexpr int WARPS = 16, WIDEST = 128;  // of a block; the largest D

extern "C" __global__ void __launch_bounds__(32 * WARPS)
decode_attention(real* y, const real* qkv, const int* place, int H, int G, int D) {
    __shared__ float part_y[WARPS][WIDEST];
    __shared__ float2 part_ml[WARPS];
    int h = blockIdx.x, row = blockIdx.y, length = place[0] + row + 1;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = threadIdx.x;
    long long width = (H + 2 * G) * D;
    const real* q = qkv + (length - 1) * width + h * D;
    const real* keys = qkv + (H + h / (H / G)) * D;
    const real* values = keys + G * D;
    start_next();
    long long first = min(32 * warp + lane, length - 1) * width;
    for (int d = 0; d < D; d += 128 / sizeof(real)) {
        prefetch(keys + first + d);
        prefetch(values + first + d);
    }
    await_last();
    // Of a value's D/8 pieces of eight columns each lane takes one, the keys are dealt out to 32 / (D/8)
    // groups of lanes.
    int vectors = D / 8, groups = 32 / vectors, group = lane / vectors, piece = 8 * (lane % vectors);
    float m = MASKED, l = 0.0f;
    Eight sum = {};
    for (int from = 32 * warp; from < length; from += 32 * WARPS) {
        int count = min(32, length - from);
        const real* key = keys + (from + min(lane, count - 1)) * width;
        const real* value = values + from * width + piece;
        Packed v[4];  // four values a round, loaded a round before they are needed
        for (int i = 0; i < 4; i++) v[i] = load_packed(value + min(group + i * groups, count - 1) * width);
        float score = 0.0f;
#pragma unroll 4
        for (int d = 0; d < D; d += 8) score += dot8(load8(q + d), load8(key + d));
        score = lane < count ? score * rsqrtf(float(D)) : MASKED;
        float largest = fmaxf(m, warp_max(score)), factor = expf(m - largest);
        float weight = lane < count ? expf(score - largest) : 0.0f;
        m = largest;
        l = factor * l + warp_sum(weight);
        for (int c = 0; c < 8; c++) sum.x[c] *= factor;
        for (int j = 0; j < 32; j += 4 * groups)
            for (int i = 0; i < 4; i++) {
                int other = j + i * groups + group;
                float w = __shfl_sync(0xFFFFFFFF, weight, other);
                Eight x = unpack8(v[i]);
                for (int c = 0; c < 8; c++) sum.x[c] += w * x.x[c];
                v[i] = load_packed(value + min(other + 4 * groups, count - 1) * width);
            }
    }
    for (int bit = vectors; bit < 32; bit *= 2)
        for (int c = 0; c < 8; c++) sum.x[c] += __shfl_xor_sync(0xFFFFFFFF, sum.x[c], bit);
    if (group == 0) store8(part_y[warp] + piece, sum);
    if (lane == 0) part_ml[warp] = make_float2(m, l);
    __syncthreads();
    if (column >= D) return;
    float all_l = 0.0f, all_y = 0.0f;
    for (int w = 0; w < WARPS; w++) m = fmaxf(m, part_ml[w].x);
    for (int w = 0; w < WARPS; w++) {
        float factor = expf(part_ml[w].x - m);
        all_l += factor * part_ml[w].y;
        all_y += factor * part_y[w][column];
    }
    store(y + (long long)(row * H + h) * D + column, all_y / all_l);
}

// -----------------------------------------------------------------------------------------------------------
// 9. Drawing the next token
// -----------------------------------------------------------------------------------------------------------
typedef unsigned long long Key;

// Keys have the order of x (-0 before 0), and where two x are equal that of sample(): the smaller id, below
// 65,536, comes first.
__device__ Key order_key(float x, int id) {
    unsigned bits = __float_as_uint(x);
    return Key(bits >> 31 ? ~bits : bits | 1u << 31) << 16 | (0xFFFF - id);
}

__device__ int id_of(Key key) { return 0xFFFF - int(key & 0xFFFF); }

// What the ids whose keys are `least` or larger weigh together: each 1 where scale is 0, else exp(scale (z -
// top)).
__device__ float weight_from(Key least, float scale, float top, const float* z, int vocab, float* slots) {
    float sum = 0.0f;
    for (int id = threadIdx.x; id < vocab; id += 1024)
        if (order_key(z[id], id) >= least) sum += scale ? expf(scale * (z[id] - top)) : 1.0f;
    return block_sum(sum, slots);
}

// A key from which on the ids weigh `mass`, and not from any larger id's on: found bit by bit from the top.
__device__ Key key_where(float mass, float scale, float top, const float* z, int vocab, float (*slots)[32]) {
    Key found = 0;
    for (int bit = 47; bit >= 0; bit--) {
        Key tried = found | Key(1) << bit;
        float sum = weight_from(tried, scale, top, z, vocab, slots[bit % 2]);
        if (sum >= mass) found = tried;
        if (sum == mass) break;
    }
    __syncthreads();  // slots are free again
    return found;
}

// Covers gumbel, in its letters.
__device__ double gumbel(Key seed, int t, int id) {
    Key z = seed;
    for (int i = 0; i < 2; i++) {
        z += (Key(i ? id : t) + 1) * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
    }
    return -log(-log((double(z >> 12) + 0.5) / 4503599627370496.0));
}

// Covers sample: ids (n,heads), drawn by each head after each row of logits (n,heads,V); and p (n), the
// probability that head 0's logits give the id, at temperature 1 and among all. place: see section 8;
// drawing: the temperature, above 0, and top_p. Where only the largest is asked for (temperature 0 on the
// host), top_k is 1.
// Grid (n, heads); 1024 threads.
extern "C" __global__ void draw(int* ids, float* p, const float* logits, const int* place,
                                const double* drawing, const Key* seed, int V) {
    __shared__ Key keys[2][32];
    __shared__ float slots[2][32];
    int row = blockIdx.x, head = blockIdx.y, top_k = place[2], vocab = place[3];
    int index = row * gridDim.y + head, t = place[1] + row + head;
    const float* z = logits + (long long)index * V;
    Key largest = 0, best = 0, floor = 0;
    await_last();
    for (int id = threadIdx.x; id < vocab; id += 1024) largest = max(largest, order_key(z[id], id));
    largest = block_max(largest, keys[0]);
    float top = z[id_of(largest)], scale = float(1.0 / drawing[0]), sum = 0.0f;
    if (top_k == 1) floor = largest;
    else if (top_k > 0 && top_k < vocab) floor = key_where(top_k, 0.0f, top, z, vocab, slots);
    if (top_k != 1 && drawing[1] < 1.0) {
        float mass = float(drawing[1]) * weight_from(floor, scale, top, z, vocab, slots[0]);
        floor = max(floor, key_where(mass, scale, top, z, vocab, slots));  // which uses slots[1] first
    }
#pragma unroll 4
    for (int id = threadIdx.x; id < vocab; id += 1024) {
        sum += expf(z[id] - top);
        if (order_key(z[id], id) >= floor)
            best = max(best, order_key(float((z[id] - top) / drawing[0] + gumbel(*seed, t, id)), id));
    }
    best = block_max(best, keys[1]);
    sum = block_sum(sum, slots[0]);
    if (threadIdx.x > 0) return;
    ids[index] = id_of(best);
    if (head == 0) p[row] = expf(z[id_of(best)] - top) / sum;
}
