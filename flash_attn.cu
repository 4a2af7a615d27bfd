// FlashAttention, forward and backward: causal, grouped-query, exact, and the T x T scores never reach memory.
//
// Read attention_forward and attention_backward of model_cpu.py first: they are the specification, and this file
// computes the same in tiles. Below are the mathematics, then a readable version (fp32, any GPU from compute
// capability 7.0 on), then a fast version (tensor cores, bf16 or tf32, from 8.0 on) of the same three kernels.
// model_gpu.py compiles the file with -DHEAD_DIM=32, 64 or 128 and launches the kernels; what grid and shared memory
// each one wants stands with it. Method and letters: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023).
// Not here: RoPE (kernels.cu; q and k arrive rotated, and the gradients left here are with respect to those), dropout,
// masks other than the causal one, decoding with a KV cache.
//
// Letters   B batch, T time, H query heads, G key/value heads, D head width. Query head h reads key head h / (H/G).
//           i counts queries and tiles of Br queries (Tr of them), j keys and tiles of Bc keys (Tc); here Br = Bc.
// Arrays    qkv, dqkv (B,T,(H+2G)D): a row holds H queries, then G keys, then G values. out, dout (B,T,H*D).
//           lse, delta (B,H,T), always fp32. Nothing is transposed or copied before a kernel reads it.
//
// Forward.  S_ij = scale q_i . k_j for j <= i,   P_ij = exp(S_ij) / sum_j' exp(S_ij'),   O_i = sum_j P_ij v_j
//
//   Online softmax. Keys come tile by tile. Of each row we keep the maximum m of its scores so far (subtracted so that
//   exp does not overflow), l = sum exp(S_ij - m), and the unnormalised O = sum exp(S_ij - m) v_j. A tile that raises
//   the maximum to m' changes all earlier terms by one factor, alpha = exp(m - m'), as exp(S - m') = exp(S - m) alpha:
//       l = alpha l + sum over the tile of exp(S_ij - m')      O = alpha O + sum over the tile of exp(S_ij - m') v_j
//   and at the end O / l is the output, whatever the m's were. L_i = m + log l (lse) is all that the backward needs.
//
// Backward. From dO, the gradient of out, and with P recomputed as P_ij = exp(S_ij - L_i):
//       O_i = sum_j P_ij v_j           dV_j = sum_i P_ij dO_i           dP_ij = dO_i . v_j
//       P_i = softmax(S_i)             dS_ij = sum_k dP_ik P_ik ([j = k] - P_ij) = P_ij (dP_ij - delta_i), with
//                                      delta_i = sum_k P_ik dP_ik = dO_i . sum_k P_ik v_k = dO_i . O_i
//       S_ij = scale q_i . k_j         dQ_i = scale sum_j dS_ij k_j     dK_j = scale sum_i dS_ij q_i
//   dK and dV also sum over the H/G query heads of their group. dQ is a sum over keys, dK and dV are sums over
//   queries: one kernel that does all three must add up one of them across blocks, with atomics, in an order that
//   differs from run to run. So there are two kernels, each the owner of its sums: 7 tile products instead of 5, and
//   bit-identical results.
//
// The ladder. H200, bf16, D 64, 12/4 heads, 32768 tokens: ms of forward + dQ + dK/dV at T 512 | 1024 | 4096.
//   4.43 | 8.34 | 31.5   the readable version. (tf32 on tensor cores, from the same fp32 arrays: 1.11 | 2.12 | 7.40)
//   0.58 | 0.93 | 3.07   tensor cores: 32 rows a warp, P and dS stay in registers from product to product, two stages
//   0.51 | 0.81 | 2.69   copies in a fixed number of passes, swizzled addresses by one XOR: in the forward 6.2
//                        instructions per mma and not 7.2, in dQ 4.4 and not 5.2
//   0.48 | 0.77 | 2.62   dQ asks for out before it waits; the forward lets m lag behind by up to 8 (see there); dK/dV
//                        reloads V instead of keeping it (its registers had spilled)
//   0.45 | 0.73 | 2.52   pointers stepped, not multiplied; branch-free loops in the backward; 128 rows a stage, not 64
//   No help: 16 rows a warp and twice the warps (forward 0.12 | 0.20 | 0.72, not 0.12 | 0.19 | 0.61: what is read from
//   shared memory then serves one product, not two); S of the next keys computed ahead of the softmax of these (3%
//   faster to 6% slower, in tf32 11 to 16% slower); blocks of two warps (3% faster at T 512, 7% slower at 4096). The
//   tensor cores are busy about half of the time. Peers, 12/4 heads too, in the run of the last line: PyTorch 2.11's
//   flash 0.89 | 1.19 | 3.14, its cuDNN 0.52 | 0.72 | 1.90.

constexpr int D = HEAD_DIM;

// ===================================================================================================================
// 1. The readable version: fp32, plain arithmetic
// ===================================================================================================================

// The backward keeps four Br x D tiles in shared memory, and 48 KB is what every GPU gives without being asked: hence
// smaller tiles for D = 128.
constexpr int Br = D <= 64 ? 32 : 16;
constexpr int Bc = Br;

// 64 threads per block, seen as an 8 x 8 grid (ty, tx). Of a Br x Bc tile thread (ty, tx) owns the R x R entries
// (ty + 8r, tx + 8c); of a Br x D tile the rows ty + 8r and the columns 4tx + 32c + (0..3), so that it can move four
// floats at a time. The eight threads of one ty, which share rows, are neighbours in one warp.
constexpr int THREADS = 64;
constexpr int R = Br / 8;
constexpr int DC = D / 32;

// Rows are padded by 16 bytes, so that eight threads reading one column of eight successive rows hit different banks.
typedef float Rows[Br][D + 4];
typedef float Scores[Br][Bc + 4];

// tile = rows first .. first + Br - 1 of a matrix with T rows of `stride` floats; zeros past the end.
__device__ void load_rows(Rows tile, const float* from, int first, int T, int stride) {
    for (int n = threadIdx.x; n < Br * D / 4; n += THREADS) {
        int row = n / (D / 4), column = 4 * (n % (D / 4));
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + row < T) x = *(const float4*)(from + (long long)(first + row) * stride + column);
        *(float4*)&tile[row][column] = x;
    }
}

// acc (Br x Bc) = A (Br x D) @ B (Bc x D)^T
__device__ void product_abt(float acc[R][R], const Rows A, const Rows B) {
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    for (int r = 0; r < R; r++)
        for (int c = 0; c < R; c++) acc[r][c] = 0.0f;
    #pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        float4 a[R], b[R];
        for (int r = 0; r < R; r++) a[r] = *(const float4*)&A[ty + 8 * r][d];
        for (int c = 0; c < R; c++) b[c] = *(const float4*)&B[tx + 8 * c][d];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < R; c++)
                acc[r][c] += a[r].x * b[c].x + a[r].y * b[c].y + a[r].z * b[c].z + a[r].w * b[c].w;
    }
}

// x += p * y
__device__ void add_product(float4& x, float p, float4 y) {
    x = make_float4(x.x + p * y.x, x.y + p * y.y, x.z + p * y.z, x.w + p * y.w);
}

__device__ float4 scaled(float f, float4 x) { return make_float4(f * x.x, f * x.y, f * x.z, f * x.w); }

// acc (Br x D) += P (Br x Bc) @ B (Bc x D)
__device__ void product_ab(float4 acc[R][DC], const Scores P, const Rows B) {
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    #pragma unroll 4
    for (int j = 0; j < Bc; j++)
        for (int c = 0; c < DC; c++)
            for (int r = 0; r < R; r++)
                add_product(acc[r][c], P[ty + 8 * r][j], *(const float4*)&B[j][4 * tx + 32 * c]);
}

// Rows first .. of a matrix with T rows of `stride` floats = factor * acc, for the rows that exist.
__device__ void store_rows(float* to, const float4 acc[R][DC], float factor, int first, int T, int stride) {
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    for (int r = 0; r < R; r++)
        for (int c = 0; c < DC; c++) {
            int row = first + ty + 8 * r;
            if (row < T) *(float4*)(to + (long long)row * stride + 4 * tx + 32 * c) = scaled(factor, acc[r][c]);
        }
}

// The sum over the eight threads that share a row.
__device__ float row_sum(float x) {
    for (int bit = 1; bit < 8; bit *= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, bit);
    return x;
}

constexpr float MASKED = -1e30f;  // stands for minus infinity: exp(MASKED - m) is 0, and MASKED - MASKED is not NaN

__device__ void clear(float4 acc[R][DC]) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < DC; c++) acc[r][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Grid (H, B, Tr), Tr = ceil(T / Br); 64 threads; no dynamic shared memory. Writes out and lse.
extern "C" __global__ void __launch_bounds__(THREADS)
flash_forward(float* out, float* lse, const float* qkv, int T, int H, int G) {
    __shared__ Rows Q, K, V;
    __shared__ Scores P;
    int h = blockIdx.x, b = blockIdx.y, g = h / (H / G);
    int i = gridDim.z - 1 - blockIdx.z;  // the last queries see the most keys: start the longest work first
    int stride = (H + 2 * G) * D;
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    const float scale = rsqrtf(float(D));
    qkv += (long long)b * T * stride;
    out += (long long)b * T * H * D + h * D;
    lse += ((long long)b * H + h) * T;

    float4 O[R][DC];
    float m[R], l[R];
    clear(O);
    for (int r = 0; r < R; r++) {
        m[r] = MASKED;
        l[r] = 0.0f;
    }
    load_rows(Q, qkv + h * D, i * Br, T, stride);
    for (int j = 0; j <= i; j++) {
        load_rows(K, qkv + (H + g) * D, j * Bc, T, stride);
        load_rows(V, qkv + (H + G + g) * D, j * Bc, T, stride);
        __syncthreads();  // the tiles are complete
        float S[R][R];
        product_abt(S, Q, K);
        for (int r = 0; r < R; r++) {  // online softmax of row ty + 8r, with the seven threads beside this one
            float m_new = m[r];
            for (int c = 0; c < R; c++) {
                bool seen = j * Bc + tx + 8 * c <= i * Br + ty + 8 * r;
                S[r][c] = seen ? S[r][c] * scale : MASKED;
                m_new = fmaxf(m_new, S[r][c]);
            }
            for (int bit = 1; bit < 8; bit *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(0xFFFFFFFF, m_new, bit));
            float alpha = expf(m[r] - m_new), sum = 0.0f;
            for (int c = 0; c < R; c++) {
                S[r][c] = expf(S[r][c] - m_new);
                sum += S[r][c];
            }
            l[r] = alpha * l[r] + row_sum(sum);
            m[r] = m_new;
            for (int c = 0; c < DC; c++) O[r][c] = scaled(alpha, O[r][c]);
            for (int c = 0; c < R; c++) P[ty + 8 * r][tx + 8 * c] = S[r][c];
        }
        __syncwarp();  // a row of P is written and read by the eight threads of one ty
        product_ab(O, P, V);
        __syncthreads();  // nobody reads these tiles any more
    }
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < DC; c++) O[r][c] = scaled(1.0f / l[r], O[r][c]);
        int row = i * Br + ty + 8 * r;
        if (tx == 0 && row < T) lse[row] = m[r] + logf(l[r]);
    }
    store_rows(out, O, 1.0f, i * Br, T, H * D);
}

// Grid (H, B, Tr); 64 threads; no dynamic shared memory. Writes the first H*D columns of dqkv, and delta.
extern "C" __global__ void __launch_bounds__(THREADS)
flash_backward_dq(float* dqkv, float* delta, const float* dout, const float* out, const float* lse, const float* qkv,
                  int T, int H, int G) {
    __shared__ Rows Q, K, V, dO;
    __shared__ Scores dS;
    int h = blockIdx.x, b = blockIdx.y, g = h / (H / G);
    int i = gridDim.z - 1 - blockIdx.z;
    int stride = (H + 2 * G) * D;
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    const float scale = rsqrtf(float(D));
    qkv += (long long)b * T * stride;
    dqkv += (long long)b * T * stride;
    dout += (long long)b * T * H * D + h * D;
    out += (long long)b * T * H * D + h * D;
    lse += ((long long)b * H + h) * T;
    delta += ((long long)b * H + h) * T;

    load_rows(Q, qkv + h * D, i * Br, T, stride);
    load_rows(dO, dout, i * Br, T, H * D);
    load_rows(K, out, i * Br, T, H * D);  // O, for a moment in K's place
    __syncthreads();
    float L[R], Delta[R];
    for (int r = 0; r < R; r++) {
        int row = ty + 8 * r, t = i * Br + row;
        float sum = 0.0f;
        for (int d = tx; d < D; d += 8) sum += dO[row][d] * K[row][d];
        Delta[r] = row_sum(sum);
        L[r] = t < T ? lse[t] : 0.0f;
        if (tx == 0 && t < T) delta[t] = Delta[r];
    }
    __syncthreads();  // O has been read: K may take its place
    float4 dQ[R][DC];
    clear(dQ);
    for (int j = 0; j <= i; j++) {
        load_rows(K, qkv + (H + g) * D, j * Bc, T, stride);
        load_rows(V, qkv + (H + G + g) * D, j * Bc, T, stride);
        __syncthreads();
        float S[R][R], dP[R][R];
        product_abt(S, Q, K);
        product_abt(dP, dO, V);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < R; c++) {
                bool seen = j * Bc + tx + 8 * c <= i * Br + ty + 8 * r;
                float p = seen ? expf(S[r][c] * scale - L[r]) : 0.0f;
                dS[ty + 8 * r][tx + 8 * c] = p * (dP[r][c] - Delta[r]);
            }
        __syncwarp();
        product_ab(dQ, dS, K);
        __syncthreads();
    }
    store_rows(dqkv + h * D, dQ, scale, i * Br, T, stride);
}

// Grid (G, B, Tc), Tc = Tr; 64 threads; no dynamic shared memory. Runs after flash_backward_dq, whose delta it
// reads; writes the last 2G*D columns of dqkv. Its tiles are transposed, keys as rows, so that a thread's rows are
// rows of dK and dV.
extern "C" __global__ void __launch_bounds__(THREADS)
flash_backward_dkdv(float* dqkv, const float* delta, const float* dout, const float* lse, const float* qkv,
                    int T, int H, int G) {
    __shared__ Rows Q, K, V, dO;
    __shared__ Scores Pt, dSt;
    int g = blockIdx.x, b = blockIdx.y, j = blockIdx.z;
    int stride = (H + 2 * G) * D;
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    const float scale = rsqrtf(float(D));
    qkv += (long long)b * T * stride;
    dqkv += (long long)b * T * stride;
    dout += (long long)b * T * H * D;
    lse += (long long)b * H * T;
    delta += (long long)b * H * T;

    load_rows(K, qkv + (H + g) * D, j * Bc, T, stride);
    load_rows(V, qkv + (H + G + g) * D, j * Bc, T, stride);
    float4 dK[R][DC], dV[R][DC];
    clear(dK);
    clear(dV);
    // Queries past T come as zeros: then S, dP, L and delta are 0 and P is 1, and nothing is added to dK or dV.
    for (int h = g * (H / G); h < (g + 1) * (H / G); h++)
        for (int i = j; i * Br < T; i++) {
            load_rows(Q, qkv + h * D, i * Br, T, stride);
            load_rows(dO, dout + h * D, i * Br, T, H * D);
            __syncthreads();
            float St[R][R], dPt[R][R];
            product_abt(St, K, Q);
            product_abt(dPt, V, dO);
            for (int c = 0; c < R; c++) {
                int query = i * Br + tx + 8 * c;
                float L = query < T ? lse[h * T + query] : 0.0f;
                float Delta = query < T ? delta[h * T + query] : 0.0f;
                for (int r = 0; r < R; r++) {
                    bool seen = j * Bc + ty + 8 * r <= query;
                    float p = seen ? expf(St[r][c] * scale - L) : 0.0f;
                    Pt[ty + 8 * r][tx + 8 * c] = p;
                    dSt[ty + 8 * r][tx + 8 * c] = p * (dPt[r][c] - Delta);
                }
            }
            __syncwarp();
            product_ab(dV, Pt, dO);
            product_ab(dK, dSt, Q);
            __syncthreads();
        }
    store_rows(dqkv + (H + g) * D, dK, scale, j * Bc, T, stride);
    store_rows(dqkv + (H + G + g) * D, dV, 1.0f, j * Bc, T, stride);
}

// ===================================================================================================================
// 2. The fast version: tensor cores, bf16 or tf32, compute capability 8.0 and later
// ===================================================================================================================
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// --- Instructions that C++ has no words for. On the CPU, tests/cuda_on_cpu.h has functions of these names. ---------
#ifndef CUDA_ON_CPU

// Two floats rounded to bf16 in one word, `low` in its lower half.
__device__ unsigned pack_bf16(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// The bits of a float rounded to tf32, which has 10 bits of mantissa; left alone, the rest would be cut off.
__device__ unsigned round_tf32(unsigned bits) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "r"(bits));
    return rounded;
}

__device__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ unsigned shared_address(const void* pointer) { return unsigned(__cvta_generic_to_shared(pointer)); }

// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8m + r gives the address of row r (16
// bytes) of matrix m; lane l receives in r[m] elements 2 (l % 4) and the next of row l / 4 of matrix m. It moves
// bits: a row may as well be four 32-bit elements, of which lane l then receives number l % 4.
__device__ void ldmatrix_x4(unsigned* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// The same with each matrix transposed.
__device__ void ldmatrix_x4_transposed(unsigned* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// C (16 x 8, fp32) += A (16 x 16) B (16 x 8) in bf16, by the 32 lanes of a warp together.
__device__ void mma_bf16(float* c, const unsigned* a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// C (16 x 8, fp32) += A (16 x 8) B (8 x 8) in tf32.
__device__ void mma_tf32(float* c, const unsigned* a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Starts a copy of 16 (or 4) bytes from global to shared memory that passes through no register. Where not `valid`,
// it writes zeros and does not touch `from`.
__device__ void cp_async16(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ void cp_async4(void* to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// Makes one group of the copies that this thread has started since the last commit.
__device__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are still under way. Other threads need a barrier as well.
template <int PENDING>
__device__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

#endif

// --- Two element types ---------------------------------------------------------------------------------------------
// 16 bytes of a row, a chunk, hold CHUNK elements, and one tensor-core instruction multiplies along two chunks: 16
// bf16 or 8 tf32. So the two differ only in what these structs say and in product_ab. A block has four warps, and
// each owns 16 M rows of its tile: M = 2 makes two uses of every operand loaded from shared memory, M = 1 is what
// the registers allow for wide rows. The steps are how many keys or queries one turn of a kernel's inner loop
// takes; measured, and limited by the registers.

constexpr int FAST_THREADS = 128;

struct Bf16 {
    typedef unsigned short Storage;
    static constexpr int CHUNK = 8, M = D <= 64 ? 2 : 1, FORWARD_STEP = 64, DQ_STEP = 16, DKDV_STEP = 16;
    static __device__ unsigned operand(unsigned word) { return word; }
    static __device__ void mma(float* c, const unsigned* a, unsigned b0, unsigned b1) { mma_bf16(c, a, b0, b1); }

    // The sum of the products of two chunks' elements. A bf16 is the upper half of a float.
    static __device__ float dot(uint4 p, uint4 q) {
        return dot2(p.x, q.x) + dot2(p.y, q.y) + dot2(p.z, q.z) + dot2(p.w, q.w);
    }
    static __device__ float dot2(unsigned p, unsigned q) {
        return __uint_as_float(p << 16) * __uint_as_float(q << 16) +
               __uint_as_float(p & 0xFFFF0000u) * __uint_as_float(q & 0xFFFF0000u);
    }
};

struct Tf32 {
    typedef float Storage;
    static constexpr int CHUNK = 4, M = 1, FORWARD_STEP = 64, DQ_STEP = 64, DKDV_STEP = 32;
    static __device__ unsigned operand(unsigned word) { return round_tf32(word); }
    static __device__ void mma(float* c, const unsigned* a, unsigned b0, unsigned b1) { mma_tf32(c, a, b0, b1); }
    static __device__ float dot(uint4 p, uint4 q) {
        return __uint_as_float(p.x) * __uint_as_float(q.x) + __uint_as_float(p.y) * __uint_as_float(q.y) +
               __uint_as_float(p.z) * __uint_as_float(q.z) + __uint_as_float(p.w) * __uint_as_float(q.w);
    }
};

// --- Loops over what a lane holds ----------------------------------------------------------------------------------
// The result of a product stays in registers, as an array [M][N][4]: M x N pieces of 16 x 8, of each of which lane
// l holds
//     [0], [1]: row l / 4,      columns 2 (l % 4) and the next
//     [2], [3]: row l / 4 + 8,  the same columns.
// So a lane has two of every 16 rows, half = 0 and 1. These call f for all entries, and for all rows; fully
// unrolled, since an array stays in registers only if every index is a constant.

template <int M, int N, class F>
__device__ __forceinline__ void each_entry(F f) {
    #pragma unroll
    for (int n = 0; n < M * N * 4; n++) f(n / (4 * N), n / 4 % N, n % 4);
}

template <int M, class F>
__device__ __forceinline__ void each_row(F f) {
    #pragma unroll
    for (int n = 0; n < 2 * M; n++) f(n / 2, n % 2);
}

// --- Tiles in shared memory ----------------------------------------------------------------------------------------

template <class E>
struct Tile {
    static constexpr int ROWS = 64 * E::M;       // Br and Bc
    static constexpr int CHUNKS = D / E::CHUNK;  // in a row
    static constexpr int STEPS = CHUNKS / 2;     // tensor-core instructions along a row
    static constexpr int ROW = 16 * CHUNKS;      // bytes
    static constexpr int BYTES = ROWS * ROW;

    // Where a chunk lies, in bytes from the start of the tile. Swizzled: its number is XORed with its row's, so
    // that one chunk of eight successive rows, which ldmatrix reads at a time, lies in eight different sets of
    // banks. The pattern repeats every eight rows: 8 rows down is + 8 ROW, and two chunks to the right is ^ 32.
    static __device__ int offset(int row, int chunk) {
        int twist = CHUNKS >= 8 ? row & 7 : row >> 1 & 3;  // a row of four chunks fills half of the banks
        return row * ROW + 16 * (chunk ^ twist);
    }

    // Starts copying rows first .. first + ROWS - 1 of a matrix with T rows of `stride` elements; zeros past the end.
    static __device__ void load(char* tile, const typename E::Storage* from, int first, int T, int stride) {
        constexpr int PASS = FAST_THREADS / CHUNKS;  // rows per pass
        static_assert(ROWS % PASS == 0 && PASS % 8 == 0, "every pass must see the same swizzle");
        int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        tile += offset(row, chunk);
        from += (long long)(first + row) * stride + chunk * E::CHUNK;
        #pragma unroll
        for (int n = 0; n < ROWS; n += PASS) {
            cp_async16(tile + n * ROW, from, first + row + n < T);
            from += PASS * stride;
        }
    }

    // The left operands of a product, all of 16 M rows from `row` on: A[m][step] is 16 rows x 2 chunks.
    template <int M>
    static __device__ void load_a(unsigned (&A)[M][STEPS][4], const char* tile, int row) {
        int lane = threadIdx.x % 32;
        #pragma unroll
        for (int m = 0; m < M; m++)
            #pragma unroll
            for (int step = 0; step < STEPS; step++) {
                ldmatrix_x4(A[m][step], tile + (row + 16 * m) * ROW + (offset(lane % 16, lane / 16) ^ 32 * step));
                for (int i = 0; i < 4; i++) A[m][step][i] = E::operand(A[m][step][i]);
            }
    }

    // Two right operands of A B^T: b[0], b[1] are 2 chunks of rows `row` .. row + 7, b[2], b[3] of the eight after
    // them.
    static __device__ void load_bt(unsigned (&b)[4], const char* tile, int row, int step) {
        int lane = threadIdx.x % 32;
        ldmatrix_x4(b, tile + row * ROW + (offset(lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ 32 * step));
        for (int i = 0; i < 4; i++) b[i] = E::operand(b[i]);
    }
};

// --- Products of tiles ---------------------------------------------------------------------------------------------

// S (16M x 8N) = A (16M x D) @ B^T, B being rows `row` .. row + 8N - 1 of a tile.
template <class E, int M, int N>
__device__ void product_abt(float (&S)[M][N][4], const unsigned (&A)[M][Tile<E>::STEPS][4], const char* B, int row) {
    each_entry<M, N>([&](int m, int n, int e) { S[m][n][e] = 0.0f; });
    #pragma unroll
    for (int step = 0; step < Tile<E>::STEPS; step++)
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned b[4];
            Tile<E>::load_bt(b, B, row + 8 * n, step);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                E::mma(S[m][n], A[m][step], b[0], b[1]);
                E::mma(S[m][n + 1], A[m][step], b[2], b[3]);
            }
        }
}

// O (16M x D) += P (16M x 8N) @ B, B being rows `row` .. row + 8N - 1 of a tile. Rounded to bf16, two neighbouring
// pieces of P already lie as the left operand must: P goes from one product into the next without leaving its
// registers.
template <int M, int N>
__device__ void product_ab(Bf16, float (&O)[M][D / 8][4], const float (&P)[M][N][4], const char* B, int row) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int n = 0; n < N; n += 2) {
        unsigned a[M][4];
        #pragma unroll
        for (int m = 0; m < M; m++)
            #pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][i] = pack_bf16(P[m][n + i / 2][i % 2 * 2], P[m][n + i / 2][i % 2 * 2 + 1]);
        #pragma unroll
        for (int d = 0; d < D / 8; d += 2) {
            unsigned b[4];
            int at = Tile<Bf16>::offset(lane % 16, lane / 16) ^ 16 * d;
            ldmatrix_x4_transposed(b, B + (row + 8 * n) * Tile<Bf16>::ROW + at);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                mma_bf16(O[m][d], a[m], b[0], b[1]);
                mma_bf16(O[m][d + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// tf32: ldmatrix cannot transpose 32-bit elements, so B comes by plain loads, and may then come in any order of its
// rows: what the instruction calls k = l % 4 and l % 4 + 4 are made rows 2 (l % 4) and the next, whose columns of P
// lane l holds.
template <int M, int N>
__device__ void product_ab(Tf32, float (&O)[M][D / 8][4], const float (&P)[M][N][4], const char* B, int row) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int n = 0; n < N; n++) {
        unsigned a[M][4];
        #pragma unroll
        for (int m = 0; m < M; m++)
            #pragma unroll
            for (int i = 0; i < 4; i++) a[m][i] = round_tf32(__float_as_uint(P[m][n][i % 2 * 2 + i / 2]));
        #pragma unroll
        for (int d = 0; d < D / 8; d++) {
            unsigned b[2];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                int k = row + 8 * n + 2 * (lane % 4) + i, column = 8 * d + lane / 4;
                b[i] = round_tf32(*(const unsigned*)(B + Tile<Tf32>::offset(k, column / 4) + column % 4 * 4));
            }
            #pragma unroll
            for (int m = 0; m < M; m++) mma_tf32(O[m][d], a[m], b[0], b[1]);
        }
    }
}

// Masks the scores whose key lies in their query's future. S has queries from `query` on as rows, keys from `key`
// on as columns; or, TRANSPOSED, the other way round.
template <bool TRANSPOSED, int M, int N>
__device__ void mask_future(float (&S)[M][N][4], int query, int key) {
    int lane = threadIdx.x % 32;
    each_entry<M, N>([&](int m, int n, int e) {
        int row = 16 * m + lane / 4 + e / 2 * 8, column = 8 * n + lane % 4 * 2 + e % 2;
        if (TRANSPOSED ? key + row > query + column : key + column > query + row) S[m][n][e] = MASKED;
    });
}

// Rows first .. first + 16M - 1 of a matrix with T rows of `stride` elements = factor * O. It goes through the
// warp's own rows, from `row` on, of a tile that is no longer needed, so that whole chunks are written.
template <class E, int M>
__device__ void store(typename E::Storage* to, const float (&O)[M][D / 8][4], float factor, char* tile,
                      int row, int first, int T, int stride) {
    int lane = threadIdx.x % 32;
    tile += row * Tile<E>::ROW;
    each_row<M>([&](int m, int half) {
        #pragma unroll
        for (int n = 0; n < D / 8; n++) {
            float x = factor * O[m][n][2 * half], y = factor * O[m][n][2 * half + 1];
            int column = 8 * n + lane % 4 * 2;
            char* at = tile + Tile<E>::offset(16 * m + 8 * half + lane / 4, column / E::CHUNK);
            if (E::CHUNK == 8) *(unsigned*)(at + column % 8 * 2) = pack_bf16(x, y);
            else *(float2*)(at + column % 4 * 4) = make_float2(x, y);
        }
    });
    __syncwarp();  // the rows are complete
    #pragma unroll
    for (int n = lane; n < 16 * M * Tile<E>::CHUNKS; n += 32) {
        int r = n / Tile<E>::CHUNKS, chunk = n % Tile<E>::CHUNKS;
        if (first + r < T)
            *(uint4*)(to + (long long)(first + r) * stride + chunk * E::CHUNK) =
                *(const uint4*)(tile + Tile<E>::offset(r, chunk));
    }
}

constexpr float LOG2_E = 1.4426950408889634f;  // exp(x) = exp2(LOG2_E x), and exp2 is one instruction

// The number of this thread's warp, from lane 0, which tells the compiler that all lanes agree on it.
__device__ int warp_number() { return __shfl_sync(0xFFFFFFFF, int(threadIdx.x / 32), 0); }

// --- Forward -------------------------------------------------------------------------------------------------------
// All three kernels have one shape. The block's own tile is loaded once. The other side streams past in tiles of
// its own through two stages of shared memory: while one is computed with, the copy into the other is under way.
// A warp owns 16M rows of the block's tile and needs nothing of the other warps.

template <class E>
__device__ void forward(typename E::Storage* out, float* lse, const typename E::Storage* qkv, int T, int H, int G) {
    extern __shared__ uint4 shared_memory[];
    constexpr int M = E::M, N = E::FORWARD_STEP / 8, ROWS = Tile<E>::ROWS, BYTES = Tile<E>::BYTES;
    char* Q_tile = (char*)shared_memory;
    char* stages = Q_tile + BYTES;  // two of K and V
    int h = blockIdx.x, b = blockIdx.y, g = h / (H / G);
    int i = gridDim.z - 1 - blockIdx.z;  // the last queries see the most keys: the longest work starts first
    int stride = (H + 2 * G) * D;
    int lane = threadIdx.x % 32;
    int row = 16 * M * warp_number(), first = i * ROWS + row;  // the warp's first row: in the tile, and as a query
    const float scale = rsqrtf(float(D)), scale2 = scale * LOG2_E;
    qkv += (long long)b * T * stride;
    lse += ((long long)b * H + h) * T;

    auto load_stage = [&](int j) {
        char* stage = stages + j % 2 * 2 * BYTES;
        Tile<E>::load(stage, qkv + (H + g) * D, j * ROWS, T, stride);
        Tile<E>::load(stage + BYTES, qkv + (H + G + g) * D, j * ROWS, T, stride);
        cp_async_commit();
    };
    Tile<E>::load(Q_tile, qkv + h * D, i * ROWS, T, stride);
    load_stage(0);
    cp_async_wait<0>();
    __syncthreads();
    unsigned Q[M][Tile<E>::STEPS][4];
    Tile<E>::load_a(Q, Q_tile, row);

    float O[M][D / 8][4], m_[M][2], l[M][2];  // m of the header is m_ here
    each_entry<M, D / 8>([&](int m, int n, int e) { O[m][n][e] = 0.0f; });
    each_row<M>([&](int m, int half) {
        m_[m][half] = MASKED;
        l[m][half] = 0.0f;
    });
    for (int j = 0; j <= i; j++) {
        const char* K_tile = stages + j % 2 * 2 * BYTES;
        const char* V_tile = K_tile + BYTES;
        if (j < i) load_stage(j + 1);
        #pragma unroll 1
        for (int key = 0; key < ROWS && j * ROWS + key < first + 16 * M; key += 8 * N) {  // later: this warp's future
            float S[M][N][4], m_new[M][2];
            product_abt<E>(S, Q, K_tile, key);
            if (j * ROWS + key + 8 * N - 1 > first) mask_future<false>(S, first, j * ROWS + key);
            each_row<M>([&](int m, int half) {
                float x = MASKED;
                #pragma unroll
                for (int n = 0; n < N; n++) x = fmaxf(x, fmaxf(S[m][n][2 * half], S[m][n][2 * half + 1]));
                m_new[m][half] = x;
            });
            #pragma unroll
            for (int bit = 1; bit < 4; bit *= 2)  // over the four lanes that share a row
                each_row<M>([&](int m, int half) {
                    m_new[m][half] = fmaxf(m_new[m][half], __shfl_xor_sync(0xFFFFFFFF, m_new[m][half], bit));
                });
            // Any m gives the same result as long as exp2 neither overflows nor loses the row. So m stays, and
            // nothing is rescaled, until a score exceeds it by 8 in the exponent of 2, which is rare after the
            // first keys.
            bool grown = false;
            each_row<M>([&](int m, int half) { grown |= (m_new[m][half] - m_[m][half]) * scale2 > 8.0f; });
            if (__any_sync(0xFFFFFFFF, grown))
                each_row<M>([&](int m, int half) {
                    float x = fmaxf(m_[m][half], m_new[m][half]), alpha = exp2_approx((m_[m][half] - x) * scale2);
                    m_[m][half] = x;
                    l[m][half] *= alpha;
                    #pragma unroll
                    for (int n = 0; n < D / 8; n++) {
                        O[m][n][2 * half] *= alpha;
                        O[m][n][2 * half + 1] *= alpha;
                    }
                });
            each_entry<M, N>([&](int m, int n, int e) {
                S[m][n][e] = exp2_approx(S[m][n][e] * scale2 - m_[m][e / 2] * scale2);  // P
                l[m][e / 2] += S[m][n][e];  // this lane's part of the row's sum
            });
            product_ab(E(), O, S, V_tile, key);
        }
        cp_async_wait<0>();
        __syncthreads();  // the next stage is there for all, and nobody reads this one any more
    }
    each_row<M>([&](int m, int half) {
        l[m][half] += __shfl_xor_sync(0xFFFFFFFF, l[m][half], 1);
        l[m][half] += __shfl_xor_sync(0xFFFFFFFF, l[m][half], 2);
        int query = first + 16 * m + 8 * half + lane / 4;
        if (lane % 4 == 0 && query < T) lse[query] = m_[m][half] * scale + logf(l[m][half]);
        l[m][half] = 1.0f / l[m][half];
    });
    each_entry<M, D / 8>([&](int m, int n, int e) { O[m][n][e] *= l[m][e / 2]; });
    store<E>(out + (long long)b * T * H * D + h * D, O, 1.0f, Q_tile, row, first, T, H * D);
}

// --- Backward: dQ, and delta for dK and dV -------------------------------------------------------------------------

template <class E>
__device__ void backward_dq(typename E::Storage* dqkv, float* delta, const typename E::Storage* dout,
                            const typename E::Storage* out, const float* lse, const typename E::Storage* qkv,
                            int T, int H, int G) {
    extern __shared__ uint4 shared_memory[];
    constexpr int M = E::M, N = E::DQ_STEP / 8, ROWS = Tile<E>::ROWS, BYTES = Tile<E>::BYTES;
    char* Q_tile = (char*)shared_memory;
    char* dO_tile = Q_tile + BYTES;
    char* stages = dO_tile + BYTES;  // two of K and V
    int h = blockIdx.x, b = blockIdx.y, g = h / (H / G);
    int i = gridDim.z - 1 - blockIdx.z;
    int stride = (H + 2 * G) * D;
    int lane = threadIdx.x % 32, row = 16 * M * warp_number(), first = i * ROWS + row;
    const float scale = rsqrtf(float(D)), scale2 = scale * LOG2_E;
    qkv += (long long)b * T * stride;
    dout += (long long)b * T * H * D + h * D;
    out += (long long)b * T * H * D + h * D;
    lse += ((long long)b * H + h) * T;
    delta += ((long long)b * H + h) * T;

    auto load_stage = [&](int j) {
        char* stage = stages + j % 2 * 2 * BYTES;
        Tile<E>::load(stage, qkv + (H + g) * D, j * ROWS, T, stride);
        Tile<E>::load(stage + BYTES, qkv + (H + G + g) * D, j * ROWS, T, stride);
        cp_async_commit();
    };
    Tile<E>::load(Q_tile, qkv + h * D, i * ROWS, T, stride);
    Tile<E>::load(dO_tile, dout, i * ROWS, T, H * D);
    load_stage(0);
    float lse2[M][2], Delta[M][2];
    uint4 O[M][2][Tile<E>::CHUNKS / 4];  // asked for before the wait, so that all of it is under way at once
    each_row<M>([&](int m, int half) {
        int query = min(first + 16 * m + 8 * half + lane / 4, T - 1);
        lse2[m][half] = lse[query] * LOG2_E;
        #pragma unroll
        for (int n = 0; n < Tile<E>::CHUNKS / 4; n++)
            O[m][half][n] = *(const uint4*)(out + (long long)query * H * D + (4 * n + lane % 4) * E::CHUNK);
    });
    cp_async_wait<0>();
    __syncthreads();
    unsigned Q[M][Tile<E>::STEPS][4], dO[M][Tile<E>::STEPS][4];
    Tile<E>::load_a(Q, Q_tile, row);
    Tile<E>::load_a(dO, dO_tile, row);
    each_row<M>([&](int m, int half) {  // delta_i = dO_i . O_i, by the four lanes that share the row
        int r = 16 * m + 8 * half + lane / 4;
        float sum = 0.0f;
        #pragma unroll
        for (int n = 0; n < Tile<E>::CHUNKS / 4; n++)
            sum += E::dot(*(const uint4*)(dO_tile + Tile<E>::offset(row + r, 4 * n + lane % 4)), O[m][half][n]);
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
        Delta[m][half] = sum;
        if (lane % 4 == 0 && first + r < T) delta[first + r] = sum;
    });

    float dQ[M][D / 8][4];
    each_entry<M, D / 8>([&](int m, int n, int e) { dQ[m][n][e] = 0.0f; });
    for (int j = 0; j <= i; j++) {
        const char* K_tile = stages + j % 2 * 2 * BYTES;
        const char* V_tile = K_tile + BYTES;
        if (j < i) load_stage(j + 1);
        auto step = [&](int key, bool masked) {
            float S[M][N][4], dP[M][N][4];
            product_abt<E>(S, Q, K_tile, key);
            if (masked) mask_future<false>(S, first, j * ROWS + key);
            product_abt<E>(dP, dO, V_tile, key);
            each_entry<M, N>([&](int m, int n, int e) {
                float p = exp2_approx(S[m][n][e] * scale2 - lse2[m][e / 2]);
                S[m][n][e] = p * (dP[m][n][e] - Delta[m][e / 2]);  // dS
            });
            product_ab(E(), dQ, S, K_tile, key);
        };
        // Two loops, so that the one for keys that all this warp's queries see holds no branch.
        if ((j + 1) * ROWS - 1 <= first)
            #pragma unroll 1
            for (int key = 0; key < ROWS; key += 8 * N) step(key, false);
        else
            #pragma unroll 1
            for (int key = 0; key < ROWS && j * ROWS + key < first + 16 * M; key += 8 * N) step(key, true);
        cp_async_wait<0>();
        __syncthreads();
    }
    store<E>(dqkv + (long long)b * T * stride + h * D, dQ, scale, Q_tile, row, first, T, stride);
}

// --- Backward: dK and dV -------------------------------------------------------------------------------------------
// Computes the tiles transposed, keys as rows: then P^T and dS^T are left operands as they come, and a warp sums
// the dK and dV of its keys alone, over all queries of all the heads of the group.

template <class E>
__device__ void backward_dkdv(typename E::Storage* dqkv, const float* delta, const typename E::Storage* dout,
                              const float* lse, const typename E::Storage* qkv, int T, int H, int G) {
    extern __shared__ uint4 shared_memory[];
    constexpr int M = E::M, N = E::DKDV_STEP / 8, ROWS = Tile<E>::ROWS, BYTES = Tile<E>::BYTES;
    constexpr int STAGE = 2 * BYTES + 2 * ROWS * 4;  // Q, dO, lse, delta
    char* K_tile = (char*)shared_memory;
    char* V_tile = K_tile + BYTES;
    char* stages = V_tile + BYTES;
    int g = blockIdx.x, b = blockIdx.y, j = blockIdx.z;
    int stride = (H + 2 * G) * D;
    int lane = threadIdx.x % 32, row = 16 * M * warp_number(), first = j * ROWS + row;
    const float scale = rsqrtf(float(D)), scale2 = scale * LOG2_E;
    qkv += (long long)b * T * stride;
    dout += (long long)b * T * H * D;
    lse += (long long)b * H * T;
    delta += (long long)b * H * T;

    // Stages come in this order: for each head h of the group, the tiles of queries from the first that sees a key
    // of this block.
    int h = g * (H / G), end = h + H / G, query = j * ROWS;
    auto load_stage = [&](char* stage) {
        Tile<E>::load(stage, qkv + h * D, query, T, stride);
        Tile<E>::load(stage + BYTES, dout + h * D, query, T, H * D);
        float* numbers = (float*)(stage + 2 * BYTES);
        #pragma unroll
        for (int pass = 0; pass < 2 * ROWS; pass += FAST_THREADS) {
            int n = pass + threadIdx.x, t = query + n % ROWS;
            cp_async4(numbers + n, (n < ROWS ? lse : delta) + (long long)h * T + t, t < T);
        }
        cp_async_commit();
    };
    Tile<E>::load(K_tile, qkv + (H + g) * D, j * ROWS, T, stride);
    Tile<E>::load(V_tile, qkv + (H + G + g) * D, j * ROWS, T, stride);
    load_stage(stages);
    cp_async_wait<0>();
    __syncthreads();
    unsigned K[M][Tile<E>::STEPS][4];
    Tile<E>::load_a(K, K_tile, row);

    float dK[M][D / 8][4], dV[M][D / 8][4];
    each_entry<M, D / 8>([&](int m, int n, int e) { dK[m][n][e] = dV[m][n][e] = 0.0f; });
    // Queries past T come as zeros, lse and delta too, and add nothing to dK or dV, as in the readable version.
    for (int n = 0; h < end; n++) {
        const char* Q_tile = stages + n % 2 * STAGE;
        const char* dO_tile = Q_tile + BYTES;
        const float* lse_tile = (const float*)(dO_tile + BYTES);
        int now = query;  // the first query of this stage
        query += ROWS;
        if (query >= T) {
            query = j * ROWS;
            h++;
        }
        if (h < end) load_stage(stages + (n + 1) % 2 * STAGE);
        auto step = [&](int q, bool masked) {
            float St[M][N][4], dPt[M][N][4];
            product_abt<E>(St, K, Q_tile, q);
            if (masked) mask_future<true>(St, now + q, first);
            unsigned V[M][Tile<E>::STEPS][4];  // loaded every time: with dK, dV and K there is no room to keep it
            Tile<E>::load_a(V, V_tile, row);
            product_abt<E>(dPt, V, dO_tile, q);
            float2 L[N], Delta[N];  // of the two queries that are this lane's columns
            #pragma unroll
            for (int n = 0; n < N; n++) {
                L[n] = *(const float2*)(lse_tile + q + 8 * n + lane % 4 * 2);
                Delta[n] = *(const float2*)(lse_tile + ROWS + q + 8 * n + lane % 4 * 2);
            }
            each_entry<M, N>([&](int m, int n, int e) {
                St[m][n][e] = exp2_approx(St[m][n][e] * scale2 - (e % 2 ? L[n].y : L[n].x) * LOG2_E);  // P^T
                dPt[m][n][e] = St[m][n][e] * (dPt[m][n][e] - (e % 2 ? Delta[n].y : Delta[n].x));        // dS^T
            });
            product_ab(E(), dV, St, dO_tile, q);
            product_ab(E(), dK, dPt, Q_tile, q);
        };
        if (now >= first + 16 * M - 1)
            #pragma unroll 1
            for (int q = 0; q < ROWS; q += 8 * N) step(q, false);
        else
            #pragma unroll 1
            for (int q = 0; q < ROWS; q += 8 * N)
                if (now + q + 8 * N > first) step(q, true);  // else these queries come before all of this warp's keys
        cp_async_wait<0>();
        __syncthreads();
    }
    dqkv += (long long)b * T * stride;
    store<E>(dqkv + (H + g) * D, dK, scale, K_tile, row, first, T, stride);
    store<E>(dqkv + (H + G + g) * D, dV, 1.0f, V_tile, row, first, T, stride);
}

// --- The kernels ---------------------------------------------------------------------------------------------------
// rows = 128 for bf16 with D <= 64, else 64; tile = rows * D * sizeof(element) bytes; 128 threads; dynamic shared
// memory:
//     flash_forward_*         grid (H, B, ceil(T / rows))    5 tile
//     flash_backward_dq_*     grid (H, B, ceil(T / rows))    6 tile
//     flash_backward_dkdv_*   grid (G, B, ceil(T / rows))    6 tile + 16 rows
// at most 98 KB, which every GPU from 8.0 on gives a block that asks for it (max_dynamic_shared_size_bytes in CuPy).
// The 2 in the launch bounds: two blocks at once on a multiprocessor, so at most 255 registers a thread.

extern "C" __global__ void __launch_bounds__(FAST_THREADS, 2)
flash_forward_bf16(unsigned short* out, float* lse, const unsigned short* qkv, int T, int H, int G) {
    forward<Bf16>(out, lse, qkv, T, H, G);
}

extern "C" __global__ void __launch_bounds__(FAST_THREADS, 2)
flash_backward_dq_bf16(unsigned short* dqkv, float* delta, const unsigned short* dout, const unsigned short* out,
                       const float* lse, const unsigned short* qkv, int T, int H, int G) {
    backward_dq<Bf16>(dqkv, delta, dout, out, lse, qkv, T, H, G);
}

extern "C" __global__ void __launch_bounds__(FAST_THREADS, 2)
flash_backward_dkdv_bf16(unsigned short* dqkv, const float* delta, const unsigned short* dout, const float* lse,
                         const unsigned short* qkv, int T, int H, int G) {
    backward_dkdv<Bf16>(dqkv, delta, dout, lse, qkv, T, H, G);
}

#if HEAD_DIM <= 64  // rows of 128 floats need more registers than there are
extern "C" __global__ void __launch_bounds__(FAST_THREADS, 2)
flash_forward_tf32(float* out, float* lse, const float* qkv, int T, int H, int G) {
    forward<Tf32>(out, lse, qkv, T, H, G);
}

extern "C" __global__ void __launch_bounds__(FAST_THREADS, 2)
flash_backward_dq_tf32(float* dqkv, float* delta, const float* dout, const float* out, const float* lse,
                       const float* qkv, int T, int H, int G) {
    backward_dq<Tf32>(dqkv, delta, dout, out, lse, qkv, T, H, G);
}

extern "C" __global__ void __launch_bounds__(FAST_THREADS, 2)
flash_backward_dkdv_tf32(float* dqkv, const float* delta, const float* dout, const float* lse, const float* qkv,
                         int T, int H, int G) {
    backward_dkdv<Tf32>(dqkv, delta, dout, lse, qkv, T, H, G);
}
#endif

#endif
