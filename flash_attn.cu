constexpr int D = HEAD_DIM;

// =====================================================================================================================
// 1. The readable version: fp32, plain arithmetic
// =====================================================================================================================

// Tiles of Br queries and Bc keys. Backward keeps four Br x D tiles in shared memory, and 48 KB is what every GPU gives
// without being asked, hence smaller tiles for D = 128.
constexpr int Br = D <= 64 ? 32 : 16;
constexpr int Bc = Br;

// 64 threads per block, seen as an 8 x 8 grid (ty, tx). Of a Br x Bc tile thread (ty, tx) owns the R x R entries
// (ty + 8r, tx + 8c); of a Br x D tile the rows ty + 8r and the columns 4tx + 32c + (0..3), so that it can move four
// floats at a time. The eight threads of one ty, which share rows, are neighbours in one warp.
constexpr int THREADS = 64;
constexpr int R = Br / 8;
constexpr int DC = D / 32;

// Rows are padded by 16 bytes: eight threads that read the same column of eight successive rows then hit different banks.
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

// acc (Br x D) += P (Br x Bc) @ B (Bc x D)
__device__ void product_ab(float4 acc[R][DC], const Scores P, const Rows B) {
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    #pragma unroll 4
    for (int j = 0; j < Bc; j++)
        for (int c = 0; c < DC; c++) {
            float4 b = *(const float4*)&B[j][4 * tx + 32 * c];
            for (int r = 0; r < R; r++) {
                float p = P[ty + 8 * r][j];
                acc[r][c].x += p * b.x;
                acc[r][c].y += p * b.y;
                acc[r][c].z += p * b.z;
                acc[r][c].w += p * b.w;
            }
        }
}

// Rows first .. of a matrix with T rows of `stride` floats = factor * acc, for the rows that exist.
__device__ void store_rows(float* to, const float4 acc[R][DC], const float factor[R], int first, int T, int stride) {
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    for (int r = 0; r < R; r++)
        for (int c = 0; c < DC; c++) {
            int row = first + ty + 8 * r;
            float4 x = acc[r][c];
            float f = factor[r];
            if (row < T)
                *(float4*)(to + (long long)row * stride + 4 * tx + 32 * c) = make_float4(f * x.x, f * x.y, f * x.z, f * x.w);
        }
}

// Sum and maximum over the eight threads that share a row.
__device__ float row_sum(float x) {
    for (int bit = 1; bit < 8; bit *= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, bit);
    return x;
}

__device__ float row_max(float x) {
    for (int bit = 1; bit < 8; bit *= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, bit));
    return x;
}

constexpr float MASKED = -1e30f;  // stands for minus infinity: exp(MASKED - m) is 0, and MASKED - MASKED is not NaN

__device__ void clear(float4 acc[R][DC]) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < DC; c++) acc[r][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Grid (H, B, Tr), Tr = ceil(T / Br); 64 threads; no dynamic shared memory.
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
        for (int r = 0; r < R; r++) {
            float m_new = m[r];
            for (int c = 0; c < R; c++) {
                bool seen = j * Bc + tx + 8 * c <= i * Br + ty + 8 * r;
                S[r][c] = seen ? S[r][c] * scale : MASKED;
                m_new = fmaxf(m_new, S[r][c]);
            }
            m_new = row_max(m_new);
            float alpha = expf(m[r] - m_new), sum = 0.0f;
            for (int c = 0; c < R; c++) {
                float p = expf(S[r][c] - m_new);
                P[ty + 8 * r][tx + 8 * c] = p;
                sum += p;
            }
            l[r] = alpha * l[r] + row_sum(sum);
            m[r] = m_new;
            for (int c = 0; c < DC; c++) {
                O[r][c].x *= alpha;
                O[r][c].y *= alpha;
                O[r][c].z *= alpha;
                O[r][c].w *= alpha;
            }
        }
        __syncwarp();  // a row of P is written and read by the eight threads of one ty
        product_ab(O, P, V);
        __syncthreads();  // nobody reads these tiles any more
    }
    float factor[R];
    for (int r = 0; r < R; r++) {
        factor[r] = 1.0f / l[r];
        int row = i * Br + ty + 8 * r;
        if (tx == 0 && row < T) lse[row] = m[r] + logf(l[r]);
    }
    store_rows(out, O, factor, i * Br, T, H * D);
}

// Grid (H, B, Tr); 64 threads; no dynamic shared memory. Also writes delta (B,H,T), which flash_backward_dkdv reads.
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
    __syncthreads();
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
    float factor[R];
    for (int r = 0; r < R; r++) factor[r] = scale;
    store_rows(dqkv + h * D, dQ, factor, i * Br, T, stride);
}

// Grid (G, B, Tc); 64 threads; no dynamic shared memory. Runs after flash_backward_dq, which writes delta.
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
    float one[R], factor[R];
    for (int r = 0; r < R; r++) {
        one[r] = 1.0f;
        factor[r] = scale;
    }
    store_rows(dqkv + (H + g) * D, dK, factor, j * Bc, T, stride);
    store_rows(dqkv + (H + G + g) * D, dV, one, j * Bc, T, stride);
}

// =====================================================================================================================
// 2. The fast version: tensor cores; bf16 or tf32; compute capability 8.0 and later
// =====================================================================================================================
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#ifndef QU
#define QU 1
#endif
#ifndef KVS
#define KVS 1
#endif
#ifndef KU
#define KU 1
#endif
constexpr int KUN = KU, QUN = QU;

// --- The instructions that C++ has no words for (cuda_on_cpu.h has these functions for the CPU) -----------------------
#ifndef CUDA_ON_CPU

// Two floats rounded to bf16 in one word, `low` in the lower half.
__device__ unsigned pack_bf16(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// The bits of a float rounded to tf32, which keeps 10 bits of the mantissa.
__device__ unsigned round_tf32(unsigned bits) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}

__device__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ unsigned shared_address(const void* pointer) { return unsigned(__cvta_generic_to_shared(pointer)); }

// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8m + r gives the address of row r (16 bytes) of
// matrix m; lane l receives, as r[m], the two elements (l / 4, 2 (l % 4)) and the next of matrix m.
__device__ void ldmatrix_x4(unsigned* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// The same with each matrix transposed.
__device__ void ldmatrix_x4_transposed(unsigned* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// C (16 x 8, fp32) += A (16 x 16) B (16 x 8) in bf16, or A (16 x 8) B (8 x 8) in tf32, by the 32 lanes of a warp.
__device__ void mma_bf16(float* c, const unsigned* a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ void mma_tf32(float* c, const unsigned* a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Starts a copy of 16 (or 4) bytes from global to shared memory that needs no registers; zeros where not `valid`.
__device__ void cp_async16(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ void cp_async4(void* to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// Makes one group of the copies that this thread has started since the last commit.
__device__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are still under way.
template <int PENDING>
__device__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

#endif

// --- Two element types -------------------------------------------------------------------------------------------------
// 16 bytes of a row (a chunk) hold E::CHUNK elements, and one tensor-core instruction multiplies two chunks: 16 bf16 or
// 8 tf32. So everything below is the same for both, except what these two structs say.

struct Bf16 {
    typedef unsigned short Storage;
    static constexpr int CHUNK = 8;
    static __device__ unsigned operand(unsigned word) { return word; }
    static __device__ void mma(float* c, const unsigned* a, unsigned b0, unsigned b1) { mma_bf16(c, a, b0, b1); }

    // The scalar product of two chunks.
    static __device__ float dot(uint4 p, uint4 q) {
        return dot2(p.x, q.x) + dot2(p.y, q.y) + dot2(p.z, q.z) + dot2(p.w, q.w);
    }
    static __device__ float dot2(unsigned x, unsigned y) {  // a bf16 is the upper half of a float
        return __uint_as_float(x << 16) * __uint_as_float(y << 16) +
               __uint_as_float(x & 0xFFFF0000u) * __uint_as_float(y & 0xFFFF0000u);
    }
};

struct Tf32 {
    typedef float Storage;
    static constexpr int CHUNK = 4;
    static __device__ unsigned operand(unsigned word) { return round_tf32(word); }
    static __device__ void mma(float* c, const unsigned* a, unsigned b0, unsigned b1) { mma_tf32(c, a, b0, b1); }
    static __device__ float dot(uint4 p, uint4 q) {
        return __uint_as_float(p.x) * __uint_as_float(q.x) + __uint_as_float(p.y) * __uint_as_float(q.y) +
               __uint_as_float(p.z) * __uint_as_float(q.z) + __uint_as_float(p.w) * __uint_as_float(q.w);
    }
};

// --- Tiles in shared memory ----------------------------------------------------------------------------------------

template <class E>
struct Tile {
    static constexpr int CHUNKS = D / E::CHUNK;   // of a row
    static constexpr int STEPS = CHUNKS / 2;      // tensor-core instructions along D
    static constexpr int ROW_BYTES = 16 * CHUNKS;

    // Byte offset of a chunk. Swizzled: the same chunk of eight successive rows lies in eight different sets of banks,
    // because its place in the row is XORed with the row's number; that is what ldmatrix reads at a time.
    static __device__ int offset(int row, int chunk) {
        int twist = CHUNKS >= 8 ? row & 7 : row >> 1 & 3;  // a row of four chunks fills half of the banks
        return row * ROW_BYTES + 16 * (chunk ^ twist);
    }

    // Starts copying rows first .. first + ROWS - 1 of a matrix with T rows of `stride` elements; zeros past the end.
    template <int ROWS, int COUNT>
    static __device__ void load(char* tile, const typename E::Storage* from, int first, int T, int stride) {
        constexpr int PASS = COUNT / CHUNKS;  // rows per pass, a multiple of 8, so that every pass has the same twist
        static_assert(ROWS % PASS == 0 && PASS % 8 == 0, "");
        int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        tile += offset(row, chunk);
        from += (long long)(first + row) * stride + chunk * E::CHUNK;
        #pragma unroll
        for (int n = 0; n < ROWS; n += PASS) {
            bool valid = first + row + n < T;
            cp_async16(tile + n * ROW_BYTES, from + (long long)(valid ? n : -first - row) * stride, valid);
        }
    }

    // The 16 x (2 chunks) operand A of step `step` from rows `row` .. row + 15.
    static __device__ void operand_a(unsigned* a, const char* tile, int row, int step) {
        int lane = threadIdx.x % 32;
        ldmatrix_x4(a, tile + row * ROW_BYTES + (offset(lane % 16, lane / 16) ^ 32 * step));
        for (int i = 0; i < 4; i++) a[i] = E::operand(a[i]);
    }

    // Two operands B = rows^T of step `step`: b[0], b[1] from rows `row` .. row + 7, b[2], b[3] from the next eight.
    static __device__ void operand_bt(unsigned* b, const char* tile, int row, int step) {
        int lane = threadIdx.x % 32;
        ldmatrix_x4(b, tile + row * ROW_BYTES + (offset(lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ 32 * step));
        for (int i = 0; i < 4; i++) b[i] = E::operand(b[i]);
    }
};

// --- Products of tiles -------------------------------------------------------------------------------------------------
// An accumulator tile of 16 x 8 is spread over a warp so that lane l holds of it
//     c[0], c[1]: row l / 4,      columns 2 (l % 4) and the next
//     c[2], c[3]: row l / 4 + 8,  the same columns.

// S (16M x 8N) = A (16M x D, in registers) @ B^T, where B is rows `row` .. row + 8N - 1 of a tile.
template <class E, int M, int N>
__device__ void product_abt(float (&S)[M][N][4], const unsigned (&A)[M][Tile<E>::STEPS][4], const char* B, int row) {
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int n = 0; n < N; n++)
            #pragma unroll
            for (int e = 0; e < 4; e++) S[m][n][e] = 0.0f;
    #pragma unroll
    for (int step = 0; step < Tile<E>::STEPS; step++)
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned b[4];
            Tile<E>::operand_bt(b, B, row + 8 * n, step);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                E::mma(S[m][n], A[m][step], b[0], b[1]);
                E::mma(S[m][n + 1], A[m][step], b[2], b[3]);
            }
        }
}

template <class E, int M, int N>
__device__ void product_abt_s(float (&S)[M][N][4], const char* A, int arow, const char* B, int row) {
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int n = 0; n < N; n++)
            #pragma unroll
            for (int e = 0; e < 4; e++) S[m][n][e] = 0.0f;
    #pragma unroll
    for (int step = 0; step < Tile<E>::STEPS; step++) {
        unsigned a[M][4];
        #pragma unroll
        for (int m = 0; m < M; m++) Tile<E>::operand_a(a[m], A, arow + 16 * m, step);
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned b[4];
            Tile<E>::operand_bt(b, B, row + 8 * n, step);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                E::mma(S[m][n], a[m], b[0], b[1]);
                E::mma(S[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// O (16M x D) += P (16M x 8N, accumulators) @ B, where B is rows `row` .. row + 8N - 1 of a tile. The accumulators of P are
// where the next product needs its operand A, once rounded: no trip through shared memory.
template <int M, int N>
__device__ void product_ab(Bf16, float (&O)[M][D / 8][4], const float (&P)[M][N][4], const char* B, int row) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int n = 0; n < N; n += 2) {  // 16 columns of P
        unsigned a[M][4];
        #pragma unroll
        for (int m = 0; m < M; m++)
            #pragma unroll
            for (int i = 0; i < 4; i++) a[m][i] = pack_bf16(P[m][n + i / 2][i % 2 * 2], P[m][n + i / 2][i % 2 * 2 + 1]);
        #pragma unroll
        for (int d = 0; d < D / 8; d += 2) {
            unsigned b[4];
            ldmatrix_x4_transposed(b, B + (row + 8 * n) * Tile<Bf16>::ROW_BYTES + (Tile<Bf16>::offset(lane % 16, lane / 16) ^ 16 * d));
            #pragma unroll
            for (int m = 0; m < M; m++) {
                mma_bf16(O[m][d], a[m], b[0], b[1]);
                mma_bf16(O[m][d + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// tf32: ldmatrix cannot transpose 32-bit elements, so B comes by plain loads, and then its rows may come in any order. The
// instruction's k = l % 4 and l % 4 + 4 are taken to be rows 2 (l % 4) and 2 (l % 4) + 1: those columns of P this lane has.
template <int M, int N>
__device__ void product_ab(Tf32, float (&O)[M][D / 8][4], const float (&P)[M][N][4], const char* B, int row) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int n = 0; n < N; n++) {  // 8 columns of P
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

// Rows first + row .. first + row + 16M - 1 of a matrix in global memory = factor * O, for the rows below T. Goes through rows row ..
// of a tile that only this warp uses any more, so that whole chunks are written.
template <class E, int M>
__device__ void store(typename E::Storage* to, const float (&O)[M][D / 8][4], const float (&factor)[M][2], char* tile,
                      int row, int first, int T, int stride) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int half = 0; half < 2; half++)
            #pragma unroll
            for (int n = 0; n < D / 8; n++) {
                float x = O[m][n][2 * half] * factor[m][half], y = O[m][n][2 * half + 1] * factor[m][half];
                int column = 8 * n + lane % 4 * 2;
                char* at = tile + Tile<E>::offset(row + 16 * m + 8 * half + lane / 4, column / E::CHUNK);
                if (E::CHUNK == 8) *(unsigned*)(at + column % 8 * 2) = pack_bf16(x, y);
                else *(float2*)(at + column % 4 * 4) = make_float2(x, y);
            }
    __syncwarp();
    #pragma unroll
    for (int n = lane; n < 16 * M * Tile<E>::CHUNKS; n += 32) {
        int r = row + n / Tile<E>::CHUNKS, chunk = n % Tile<E>::CHUNKS;
        if (first + r < T)
            *(uint4*)(to + (long long)(first + r) * stride + chunk * E::CHUNK) = *(const uint4*)(tile + Tile<E>::offset(r, chunk));
    }
}

template <int M>
__device__ void clear(float (&O)[M][D / 8][4]) {
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int n = 0; n < D / 8; n++)
            #pragma unroll
            for (int e = 0; e < 4; e++) O[m][n][e] = 0.0f;
}

// Masks the scores of keys that lie in the future of their query. S: queries x keys from (query, key) on.
template <int M, int N>
__device__ void mask_future(float (&S)[M][N][4], int key, int query) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int n = 0; n < N; n++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                if (key + 8 * n + lane % 4 * 2 + e % 2 > query + 16 * m + lane / 4 + e / 2 * 8) S[m][n][e] = MASKED;
}

template <int M, int N>
__device__ void mask_past(float (&S)[M][N][4], int query, int key) {
    int lane = threadIdx.x % 32;
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int n = 0; n < N; n++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                if (key + 16 * m + lane / 4 + e / 2 * 8 > query + 8 * n + lane % 4 * 2 + e % 2) S[m][n][e] = MASKED;
}

constexpr float LOG2_E = 1.4426950408889634f;

// --- Forward -----------------------------------------------------------------------------------------------------------

template <class E, int M, int WARPS, int BC>
__device__ void forward(typename E::Storage* out, float* lse, const typename E::Storage* qkv, int T, int H, int G) {
    extern __shared__ uint4 shared_memory[];
    constexpr int BR = 16 * M * WARPS;
    constexpr int STAGE = 2 * BC * Tile<E>::ROW_BYTES;  // K, then V
    char* Q_tile = (char*)shared_memory;
    char* stages = Q_tile + BR * Tile<E>::ROW_BYTES;
    int h = blockIdx.x, b = blockIdx.y, g = h / (H / G);
    int i = gridDim.z - 1 - blockIdx.z;  // the last queries see the most keys: start the longest work first
    int stride = (H + 2 * G) * D;
    int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const float scale2 = rsqrtf(float(D)) * LOG2_E;  // exp(scale * s) = exp2(scale2 * s)
    const float slack = 8.0f / scale2;
    qkv += (long long)b * T * stride;
    out += (long long)b * T * H * D + h * D;
    lse += ((long long)b * H + h) * T;
    const typename E::Storage* K = qkv + (H + g) * D;
    const typename E::Storage* V = K + G * D;

    Tile<E>::template load<BR, 32 * WARPS>(Q_tile, qkv + h * D, i * BR, T, stride);
    Tile<E>::template load<BC, 32 * WARPS>(stages, K, 0, T, stride);
    Tile<E>::template load<BC, 32 * WARPS>(stages + STAGE / 2, V, 0, T, stride);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    int row = warp * 16 * M, first = i * BR + row;  // of this warp: in the tile, and as a query
    unsigned Q[M][Tile<E>::STEPS][4];
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int step = 0; step < Tile<E>::STEPS; step++) Tile<E>::operand_a(Q[m][step], Q_tile, row + 16 * m, step);

    float O[M][D / 8][4], m_[M][2], l[M][2];
    clear(O);
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            m_[m][half] = MASKED;
            l[m][half] = 0.0f;
        }

    int end = min((i + 1) * BR, T);  // keys 0 .. end - 1 are seen by some query here
    for (int j = 0; j * BC < end; j++) {
        char* K_tile = stages + j % 2 * STAGE;
        char* V_tile = K_tile + STAGE / 2;
        if ((j + 1) * BC < end) {
            char* next = stages + (j + 1) % 2 * STAGE;
            Tile<E>::template load<BC, 32 * WARPS>(next, K, (j + 1) * BC, T, stride);
            Tile<E>::template load<BC, 32 * WARPS>(next + STAGE / 2, V, (j + 1) * BC, T, stride);
        }
        cp_async_commit();
        if (j * BC < first + 16 * M) {  // else all of it is in this warp's future
            float S[M][BC / 8][4];
            product_abt<E>(S, Q, K_tile, 0);
            if ((j + 1) * BC - 1 > first) mask_future(S, j * BC, first);  // some of it is
            float m_new[M][2];
            bool grown = false;
            #pragma unroll
            for (int m = 0; m < M; m++)
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    float x = fmaxf(S[m][0][2 * half], S[m][0][2 * half + 1]);
                    #pragma unroll
                    for (int n = 1; n < BC / 8; n++) x = fmaxf(x, fmaxf(S[m][n][2 * half], S[m][n][2 * half + 1]));
                    m_new[m][half] = x;
                }
            #pragma unroll
            for (int bit = 1; bit < 4; bit *= 2)
                #pragma unroll
                for (int m = 0; m < M; m++)
                    #pragma unroll
                    for (int half = 0; half < 2; half++)
                        m_new[m][half] = fmaxf(m_new[m][half], __shfl_xor_sync(0xFFFFFFFF, m_new[m][half], bit));
            #pragma unroll
            for (int m = 0; m < M; m++)
                #pragma unroll
                for (int half = 0; half < 2; half++) grown |= m_new[m][half] > m_[m][half] + slack;
            if (__any_sync(0xFFFFFFFF, grown))
                #pragma unroll
                for (int m = 0; m < M; m++)
                    #pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float m_next = fmaxf(m_[m][half], m_new[m][half]);
                        float alpha = exp2_approx((m_[m][half] - m_next) * scale2);
                        m_[m][half] = m_next;
                        l[m][half] *= alpha;
                        #pragma unroll
                        for (int n = 0; n < D / 8; n++) {
                            O[m][n][2 * half] *= alpha;
                            O[m][n][2 * half + 1] *= alpha;
                        }
                    }
            #pragma unroll
            for (int n = 0; n < BC / 8; n += 2) {
                float P[M][2][4];
                #pragma unroll
                for (int m = 0; m < M; m++)
                    #pragma unroll
                    for (int k = 0; k < 2; k++)
                        #pragma unroll
                        for (int e = 0; e < 4; e++) {
                            P[m][k][e] = exp2_approx(S[m][n + k][e] * scale2 - m_[m][e / 2] * scale2);
                            l[m][e / 2] += P[m][k][e];
                        }
                product_ab(E(), O, P, V_tile, 8 * n);
            }
        }
        cp_async_wait<0>();
        __syncthreads();  // the next tiles are there, and nobody reads these any more
    }
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            l[m][half] += __shfl_xor_sync(0xFFFFFFFF, l[m][half], 1);
            l[m][half] += __shfl_xor_sync(0xFFFFFFFF, l[m][half], 2);
            int query = first + 16 * m + 8 * half + lane / 4;
            if (lane % 4 == 0 && query < T) lse[query] = m_[m][half] * rsqrtf(float(D)) + logf(l[m][half]);
            l[m][half] = 1.0f / l[m][half];
        }
    store<E>(out, O, l, Q_tile, row, i * BR, T, H * D);
}

// --- Backward: dQ --------------------------------------------------------------------------------------------------

template <class E, int M, int WARPS, int BC, int N>
__device__ void backward_dq(typename E::Storage* dqkv, float* delta, const typename E::Storage* dout,
                            const typename E::Storage* out, const float* lse, const typename E::Storage* qkv,
                            int T, int H, int G) {
    extern __shared__ uint4 shared_memory[];
    constexpr int BR = 16 * M * WARPS;
    constexpr int STAGE = 2 * BC * Tile<E>::ROW_BYTES;
    char* Q_tile = (char*)shared_memory;
    char* dO_tile = Q_tile + BR * Tile<E>::ROW_BYTES;
    char* stages = dO_tile + BR * Tile<E>::ROW_BYTES;
    int h = blockIdx.x, b = blockIdx.y, g = h / (H / G);
    int i = gridDim.z - 1 - blockIdx.z;
    int stride = (H + 2 * G) * D;
    int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const float scale = rsqrtf(float(D)), scale2 = scale * LOG2_E;
    qkv += (long long)b * T * stride;
    dqkv += (long long)b * T * stride;
    dout += (long long)b * T * H * D + h * D;
    out += (long long)b * T * H * D + h * D;
    lse += ((long long)b * H + h) * T;
    delta += ((long long)b * H + h) * T;
    const typename E::Storage* K = qkv + (H + g) * D;
    const typename E::Storage* V = K + G * D;
    int row = warp * 16 * M, first = i * BR + row;

    Tile<E>::template load<BR, 32 * WARPS>(Q_tile, qkv + h * D, i * BR, T, stride);
    Tile<E>::template load<BR, 32 * WARPS>(dO_tile, dout, i * BR, T, H * D);
    Tile<E>::template load<BC, 32 * WARPS>(stages, K, 0, T, stride);
    Tile<E>::template load<BC, 32 * WARPS>(stages + STAGE / 2, V, 0, T, stride);
    cp_async_commit();
    uint4 O[M][2][Tile<E>::CHUNKS / 4];
    float lse2[M][2], Delta[M][2];
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = min(first + 16 * m + 8 * half + lane / 4, T - 1);
            lse2[m][half] = lse[query] * LOG2_E;
            #pragma unroll
            for (int n = 0; n < Tile<E>::CHUNKS / 4; n++)
                O[m][half][n] = *(const uint4*)(out + (long long)query * H * D + (4 * n + lane % 4) * E::CHUNK);
        }
    cp_async_wait<0>();
    __syncthreads();

    unsigned Q[M][Tile<E>::STEPS][4], dO[M][Tile<E>::STEPS][4];
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int step = 0; step < Tile<E>::STEPS; step++) {
            Tile<E>::operand_a(Q[m][step], Q_tile, row + 16 * m, step);
            Tile<E>::operand_a(dO[m][step], dO_tile, row + 16 * m, step);
        }
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            // Delta_i = sum over D of dO_i O_i, by the four lanes that share the row
            int r = 16 * m + 8 * half + lane / 4;
            float sum = 0.0f;
            #pragma unroll
            for (int n = 0; n < Tile<E>::CHUNKS / 4; n++)
                sum += E::dot(*(const uint4*)(dO_tile + Tile<E>::offset(row + r, 4 * n + lane % 4)), O[m][half][n]);
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
            Delta[m][half] = sum;
            if (lane % 4 == 0 && first + r < T) delta[first + r] = sum;
        }

    float dQ[M][D / 8][4];
    clear(dQ);
    int end = min((i + 1) * BR, T);
    for (int j = 0; j * BC < end; j++) {
        char* K_tile = stages + j % 2 * STAGE;
        char* V_tile = K_tile + STAGE / 2;
        if ((j + 1) * BC < end) {
            char* next = stages + (j + 1) % 2 * STAGE;
            Tile<E>::template load<BC, 32 * WARPS>(next, K, (j + 1) * BC, T, stride);
            Tile<E>::template load<BC, 32 * WARPS>(next + STAGE / 2, V, (j + 1) * BC, T, stride);
        }
        cp_async_commit();
        #pragma unroll QUN
        for (int key = 0; key < BC; key += 8 * N)
            if (j * BC + key < first + 16 * M) {
                float S[M][N][4];
                product_abt<E>(S, Q, K_tile, key);
                if (j * BC + key + 8 * N - 1 > first) mask_future(S, j * BC + key, first);
                #pragma unroll
                for (int n = 0; n < N; n += 2) {
                    float dP[M][2][4];
                    product_abt<E>(dP, dO, V_tile, key + 8 * n);
                    #pragma unroll
                    for (int m = 0; m < M; m++)
                        #pragma unroll
                        for (int k = 0; k < 2; k++)
                            #pragma unroll
                            for (int e = 0; e < 4; e++) {
                                float p = exp2_approx(S[m][n + k][e] * scale2 - lse2[m][e / 2]);
                                dP[m][k][e] = p * (dP[m][k][e] - Delta[m][e / 2]);  // dS
                            }
                    product_ab(E(), dQ, dP, K_tile, key + 8 * n);
                }
            }
        cp_async_wait<0>();
        __syncthreads();
    }
    float factor[M][2];
    #pragma unroll
    for (int m = 0; m < M; m++) factor[m][0] = factor[m][1] = scale;
    store<E>(dqkv + h * D, dQ, factor, Q_tile, row, i * BR, T, stride);
}

// --- Backward: dK and dV ------------------------------------------------------------------------------------------------

template <class E, int M, int WARPS, int BR, int N>
__device__ void backward_dkdv(typename E::Storage* dqkv, const float* delta, const typename E::Storage* dout,
                              const float* lse, const typename E::Storage* qkv, int T, int H, int G) {
    extern __shared__ uint4 shared_memory[];
    constexpr int BC = 16 * M * WARPS;
    constexpr int STAGE = 2 * BR * Tile<E>::ROW_BYTES + 2 * BR * 4;  // Q, dO, lse, delta
    char* K_tile = (char*)shared_memory;
    char* V_tile = K_tile + BC * Tile<E>::ROW_BYTES;
    char* stages = V_tile + BC * Tile<E>::ROW_BYTES;
    int g = blockIdx.x, b = blockIdx.y, j = blockIdx.z;
    int stride = (H + 2 * G) * D;
    int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const float scale = rsqrtf(float(D)), scale2 = scale * LOG2_E;
    qkv += (long long)b * T * stride;
    dqkv += (long long)b * T * stride;
    dout += (long long)b * T * H * D;
    lse += (long long)b * H * T;
    delta += (long long)b * H * T;
    int row = warp * 16 * M, first = j * BC + row;  // of this warp: in the tile, and as a key

    // The stages are filled in this order: for each head of the group the tiles of queries from the first that sees a key here.
    int start = j * BC / BR * BR, h = g * (H / G), query = start;
    auto load_stage = [&](char* stage, int h, int query) {
        Tile<E>::template load<BR, 32 * WARPS>(stage, qkv + h * D, query, T, stride);
        Tile<E>::template load<BR, 32 * WARPS>(stage + BR * Tile<E>::ROW_BYTES, dout + h * D, query, T, H * D);
        float* numbers = (float*)(stage + 2 * BR * Tile<E>::ROW_BYTES);
        int n = threadIdx.x % BR, t = query + n;
        if (threadIdx.x < BR) cp_async4(numbers + n, lse + (long long)h * T + (t < T ? t : 0), t < T);
        if (threadIdx.x >= 32 * WARPS - BR) cp_async4(numbers + BR + n, delta + (long long)h * T + (t < T ? t : 0), t < T);
    };
    Tile<E>::template load<BC, 32 * WARPS>(K_tile, qkv + (H + g) * D, j * BC, T, stride);
    Tile<E>::template load<BC, 32 * WARPS>(V_tile, qkv + (H + G + g) * D, j * BC, T, stride);
    load_stage(stages, h, query);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    unsigned K[M][Tile<E>::STEPS][4], V[M][Tile<E>::STEPS][4];
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int step = 0; step < Tile<E>::STEPS; step++) {
            Tile<E>::operand_a(K[m][step], K_tile, row + 16 * m, step);
            Tile<E>::operand_a(V[m][step], V_tile, row + 16 * m, step);
        }
    float dK[M][D / 8][4], dV[M][D / 8][4];
    clear(dK);
    clear(dV);
    int heads_end = (g + 1) * (H / G);
    for (int n_stage = 0; h < heads_end; n_stage++) {
        const char* Q_tile = stages + n_stage % 2 * STAGE;
        const char* dO_tile = Q_tile + BR * Tile<E>::ROW_BYTES;
        const float* lse_tile = (const float*)(dO_tile + BR * Tile<E>::ROW_BYTES);
        const float* delta_tile = lse_tile + BR;
        int now = query;
        query += BR;
        if (query >= T) {
            query = start;
            h++;
        }
        if (h < heads_end) load_stage(stages + (n_stage + 1) % 2 * STAGE, h, query);
        cp_async_commit();
        #pragma unroll KUN
        for (int q = 0; q < BR; q += 8 * N)
            if (now + q + 8 * N > first) {  // else all these queries come before this warp's keys
                float St[M][N][4];  // keys x queries
                product_abt<E>(St, K, Q_tile, q);
                if (now + q < first + 16 * M - 1) mask_past(St, now + q, first);
                #pragma unroll
                for (int n = 0; n < N; n += 2) {
                    float Pt[M][2][4], dSt[M][2][4];
                    if (KVS) product_abt_s<E>(dSt, V_tile, row, dO_tile, q + 8 * n);
                    else product_abt<E>(dSt, V, dO_tile, q + 8 * n);  // dP
                    #pragma unroll
                    for (int k = 0; k < 2; k++) {
                        int column = q + 8 * (n + k) + lane % 4 * 2;
                        float2 L = *(const float2*)(lse_tile + column), Delta = *(const float2*)(delta_tile + column);
                        #pragma unroll
                        for (int m = 0; m < M; m++)
                            #pragma unroll
                            for (int e = 0; e < 4; e++) {
                                Pt[m][k][e] = exp2_approx(St[m][n + k][e] * scale2 - (e % 2 ? L.y : L.x) * LOG2_E);
                                dSt[m][k][e] = Pt[m][k][e] * (dSt[m][k][e] - (e % 2 ? Delta.y : Delta.x));
                            }
                    }
                    product_ab(E(), dV, Pt, dO_tile, q + 8 * n);
                    product_ab(E(), dK, dSt, Q_tile, q + 8 * n);
                }
            }
        cp_async_wait<0>();
        __syncthreads();
    }
    float one[M][2], factor[M][2];
    #pragma unroll
    for (int m = 0; m < M; m++) {
        one[m][0] = one[m][1] = 1.0f;
        factor[m][0] = factor[m][1] = scale;
    }
    store<E>(dqkv + (H + g) * D, dK, factor, K_tile, row, j * BC, T, stride);
    store<E>(dqkv + (H + G + g) * D, dV, one, V_tile, row, j * BC, T, stride);
}

#ifndef FM
#define FM (HEAD_DIM <= 64 ? 2 : 1)
#endif
#ifndef QM
#define QM (HEAD_DIM <= 64 ? 2 : 1)
#endif
#ifndef KM
#define KM (HEAD_DIM <= 64 ? 2 : 1)
#endif
#ifndef FN
#define FN 64
#endif
#ifndef QN
#define QN 4
#endif
#ifndef KN
#define KN (HEAD_DIM <= 64 ? 2 : 2)
#endif
#ifndef FW
#define FW 4
#endif
#ifndef QW
#define QW 4
#endif
#ifndef KW
#define KW 4
#endif
#ifndef FB
#define FB 2
#endif
#ifndef QB
#define QB 2
#endif
#ifndef KB
#define KB 2
#endif
#ifndef QC
#define QC 64
#endif
#ifndef KC
#define KC 64
#endif
extern "C" __global__ void __launch_bounds__(32 * FW, FB)
flash_forward_bf16(unsigned short* out, float* lse, const unsigned short* qkv, int T, int H, int G) {
    forward<Bf16, FM, FW, FN>(out, lse, qkv, T, H, G);
}
extern "C" __global__ void __launch_bounds__(32 * QW, QB)
flash_backward_dq_bf16(unsigned short* dqkv, float* delta, const unsigned short* dout, const unsigned short* out,
                       const float* lse, const unsigned short* qkv, int T, int H, int G) {
    backward_dq<Bf16, QM, QW, QC, QN>(dqkv, delta, dout, out, lse, qkv, T, H, G);
}
extern "C" __global__ void __launch_bounds__(32 * KW, KB)
flash_backward_dkdv_bf16(unsigned short* dqkv, const float* delta, const unsigned short* dout, const float* lse,
                         const unsigned short* qkv, int T, int H, int G) {
    backward_dkdv<Bf16, KM, KW, KC, KN>(dqkv, delta, dout, lse, qkv, T, H, G);
}
#if HEAD_DIM <= 64
extern "C" __global__ void __launch_bounds__(128, 2)
flash_forward_tf32(float* out, float* lse, const float* qkv, int T, int H, int G) {
    forward<Tf32, 1, 4, 64>(out, lse, qkv, T, H, G);
}
extern "C" __global__ void __launch_bounds__(128, 2)
flash_backward_dq_tf32(float* dqkv, float* delta, const float* dout, const float* out, const float* lse, const float* qkv,
                       int T, int H, int G) {
    backward_dq<Tf32, 1, 4, 64, 4>(dqkv, delta, dout, out, lse, qkv, T, H, G);
}
extern "C" __global__ void __launch_bounds__(128, 2)
flash_backward_dkdv_tf32(float* dqkv, const float* delta, const float* dout, const float* lse, const float* qkv,
                         int T, int H, int G) {
    backward_dkdv<Tf32, 1, 4, 64, 2>(dqkv, delta, dout, lse, qkv, T, H, G);
}
#endif
#endif
