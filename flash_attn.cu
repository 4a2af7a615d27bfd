// FlashAttention, forward and backward: causal, grouped-query, exact; the T x T scores never reach memory.
//
// Read before   attention_forward and attention_backward of model_cpu.py: they are the specification, and this
//               file computes the same in tiles. And of kernels.cu the primer at its head (grid, block, warp,
//               lane, shared memory, shuffle) and section 1, whose names this file uses.
// How long      Somebody who knows NumPy and no CUDA needs half an hour for the mathematics below, ten minutes
//               for section 0 (one thread a query) and an hour for section 1 (tiles; fp32, any GPU from compute
//               capability 7.0 on). That is all of FlashAttention. Section 2 is optional: the same three
//               kernels on tensor cores (bf16 or tf32, from 8.0 on), in bf16 on an H200 13 to 15 times as
//               fast as section 1. It takes a hundred minutes, with NVIDIA's manual "PTX ISA" at hand: its parts
//               "Matrix fragments for mma.m16n8k16" (and m16n8k8), "ldmatrix", and for Hopper's products (wgmma;
//               9.0, bf16, D = 64) "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", which
//               can be left out.
// Not here      RoPE's forward (kernels.cu): q and k arrive rotated. RoPE's backward is here: the gradients
//               that these kernels write are those of q and k before the rotation. No dropout, no mask but
//               the causal one, no decoding of a few tokens (kernels.cu).
//
// model_gpu.py puts this file behind kernels.cu and compiles both as one text, for one model. From section 1 of
// kernels.cu come
//     real, Reals, Floats, Index      the type of activations; arrays that are only read; a place in an array
//     KERNEL                          extern "C" __global__ void
//     FOR, FOR_STRIDED, EACH          the three loops
//     LANE, WARP                      the number of this thread in its warp, of this warp in its block
//     MASKED                          minus infinity
//     pack_bf16, to_float             two floats as bf16; a bf16 as a float
//     lanes_sum, lanes_max            a sum over some lanes; their largest number
// How the kernels are launched stands before section 0. The macros:
//     -DHEAD_DIM=32, 64 or 128
//     -DBF16=0 or 1     see kernels.cu
//     -DPARTS=0         sections 0 and 1 are compiled, the readable versions. They need BF16=0. They serve fp32, and
//                       tf32 with D = 128: in section 2 its tiles would need 192 KB of shared memory, more than
//                       most GPUs have
//     -DPARTS=1 or 2    section 2 is compiled, the fast version; for the number, see there
//     -DHOPPER=0 or 1   whether bf16 with D = 64 takes Hopper's own products
// Method and letters: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023).
//
// Letters   B batch, T time, H query heads, G key/value heads, D head width. Query head h reads key head
//           h / (H/G). i counts queries and tiles of Br queries, j keys and tiles of Bc keys.
// Arrays    qkv, dqkv (B,T,(H+2G)D): a row holds H queries, then G keys, then G values. out, dout (B,T,H*D).
//           Always fp32: lse, delta (B,H,T) and angles (T or more rows of D/2 cosines and D/2 sines). Nothing is
//           transposed or copied before a kernel reads it.
//
// Forward.  S_ij = scale q_i . k_j for j <= i,   P_ij = exp(S_ij) / sum_j' exp(S_ij'),   O_i = sum_j P_ij v_j
//
//   Online softmax. Keys come tile by tile. Of each row we keep the maximum m of its scores so far
//   (subtracted so that exp does not overflow), l = sum exp(S_ij - m), and the unnormalised
//   O = sum exp(S_ij - m) v_j. A tile that raises the maximum to m' changes all earlier terms by one factor,
//   alpha = exp(m - m'), as exp(S - m') = exp(S - m) alpha:
//       l = alpha l + sum over the tile of exp(S_ij - m')
//       O = alpha O + sum over the tile of exp(S_ij - m') v_j
//   At the end O / l is the output, whatever the m's were. L_i = m + log l (lse) is all that the backward
//   needs of m and l.
//
//   An example: the scores of a row are 1, 3, 2, 5, its values 10, 20, 30, 40, and they come in tiles of two.
//       tile     m'   alpha           l                                   O
//       1, 3     3    -               e^-2 + e^0            = 1.135       10 e^-2 + 20 e^0               = 21.35
//       2, 5     5    e^-2 = 0.135    0.135 * 1.135 + e^-3 + e^0 = 1.203  0.135 * 21.35 + 30 e^-3 + 40 e^0 = 44.38
//       O / l = 36.88. The whole row at once: (10 e^1 + 20 e^3 + 30 e^2 + 40 e^5) / (e^1 + e^3 + e^2 + e^5) = 36.88.
//
// Backward. From dO, the gradient of out, and with P recomputed as P_ij = exp(S_ij - L_i):
//       O_i = sum_j P_ij v_j           dV_j = sum_i P_ij dO_i           dP_ij = dO_i . v_j
//       P_i = softmax(S_i)             dS_ij = sum_k dP_ik P_ik ([j = k] - P_ij) = P_ij (dP_ij - delta_i),
//                                      delta_i = sum_k P_ik dP_ik = dO_i . sum_k P_ik v_k = dO_i . O_i
//       S_ij = scale q_i . k_j         dQ_i = scale sum_j dS_ij k_j     dK_j = scale sum_i dS_ij q_i
//   dK and dV also sum over the H/G query heads of their group. dQ is a sum over keys, dK and dV are sums
//   over queries. One kernel for all three would have to add up one of them across blocks, with atomics, in
//   an order that differs from run to run. So there are two kernels, each the owner of its sums: 7 GEMMs of
//   tiles instead of 5, and the same bits in every run.
//
//   RoPE. Columns n and n + D/2 of q_i, and of k_j, are a pair (x1, x2) that was turned. The angle depends on n
//   and on the position. The transpose of a turn is the turn back; it makes the gradient that of the x's:
//       q1 = x1 cos - x2 sin          dx1 = dq1 cos + dq2 sin
//       q2 = x2 cos + x1 sin          dx2 = dq2 cos - dq1 sin
//   The thread that sums up dq1 also sums up dq2. So it turns both in its registers, rounds them to their
//   storage type once, and writes them once.
//
// The ladder. H200, bf16, D 64, 12/4 heads, 32768 tokens: ms of forward + dQ + dK/dV.
//
//     T 512   T 1024   T 4096
//      4.88     9.03        -    section 1, fp32
//      0.58     0.93     3.07    tensor cores. P and dS stay in registers from one product to the next. Tiles
//                                come through two stages: one is copied while the other is computed with
//      0.45     0.73     2.52    fewer instructions beside the products: swizzled addresses by one XOR, a maximum
//                                that may lag behind, pointers that step, loops with few branches
//      0.37     0.59     1.94    Hopper's own products, which read shared memory by themselves
//
// Before the first of these stands section 0. Its forward alone takes 5.6, 10.0 and 33 ms in fp32 on an H100, and
// that of section 1 takes 1.1, 2.0 and 7.6 ms there. docs/notes.md has the steps between these rungs, and what did
// not help.

constexpr int D = HEAD_DIM;
constexpr int THREADS = 128;  // of a block

__device__ void copy_16_bytes(void* to, const void* from) { *(uint4*)to = *(uint4*)from; }

// One head of one sequence: T rows of D numbers, `stride` apart. Only heads of out and dqkv are written.
struct Matrix {
    real* rows;
    int T, stride;

    __device__ real* row(int t) { return rows + 1LL * t * stride; }
};

// Head n of sequence b in an array (B,T,heads*D).
__device__ Matrix head_of(Reals array, int b, int n, int T, int heads) {
    return {(real*)array + 1LL * b * T * heads * D + n * D, T, heads * D};
}

// Query head h of sequence b, and the key head g that it reads.
struct Place {
    int b, h, g, T, H, G;
};

// The place of a block. Where the grid is (H, B, ...) it has a query head; where it is (G, B, ...) it has a key
// head, and h is the first of the query heads that read it.
__device__ Place own_place(int T, int H, int G) {
    int R = H / G;
    int h = blockIdx.x * (gridDim.x == G ? R : 1);
    return {int(blockIdx.y), h, h / R, T, H, G};
}

// The query head in out or dout.
__device__ Matrix head_of(Reals array, Place at) { return head_of(array, at.b, at.h, at.T, at.H); }

// The query head, the key head and its values in qkv or dqkv.
struct Heads {
    Matrix q, k, v;
};

__device__ Heads heads_of(Reals qkv, Place at) {
    int all = at.H + 2 * at.G;
    return {head_of(qkv, at.b, at.h, at.T, all),
            head_of(qkv, at.b, at.H + at.g, at.T, all),
            head_of(qkv, at.b, at.H + at.G + at.g, at.T, all)};
}

// Where the T numbers of the query head begin in lse and delta.
__device__ Index numbers_at(Place at) { return (1LL * at.b * at.H + at.h) * at.T; }

// Covers rope_backward, of two pairs side by side: x1 are two columns of a row of a gradient, x2 those D/2
// further right. angle: where their cosines are; their sines are D/2 further right.
__device__ void turn_back(float2& x1, float2& x2, Floats angle) {
    float2 cos = *(float2*)angle;
    float2 sin = *(float2*)(angle + D / 2);
    float2 d1 = x1;
    x1 = {d1.x * cos.x + x2.x * sin.x, d1.y * cos.y + x2.y * sin.y};
    x2 = {x2.x * cos.x - d1.x * sin.x, x2.y * cos.y - d1.y * sin.y};
}

// How the kernels are launched. `rows` is how many queries, or keys in dkdv, a block owns:
//     readable      rows = 4096 / D                          128 threads
//     fast          rows = 64 * PARTS                        128 threads
//     flash_forward          grid (H, B, ceil(T / rows))    writes out and lse
//     flash_backward_dq      grid (H, B, ceil(T / rows))    writes the first H*D columns of dqkv, and delta
//     flash_backward_dkdv    grid (G, B, ceil(T / rows))    writes the other columns; reads delta, so it comes
//                                                           after dq; does not read out
// The readable ones need no dynamic shared memory (the part whose size the launch says). The fast ones need it for
// `rows` rows of D numbers in the forward, for twice as many in the backward, and for 4 x 64 rows of the other side.
// dkdv needs 1 KB more: lse and delta, 4 bytes each, of 64 queries in two stages. That is at most 97 KB,
// which every GPU from 8.0 on gives a block that asks for it (max_dynamic_shared_size_bytes in CuPy).
//
// What they cover of model_cpu.py, each for one tile of rows at a time:
//     flash_forward          attention_forward
//     flash_backward_dq      attention_backward: delta, and dq; rope_backward of dq
//     flash_backward_dkdv    attention_backward: dk and dv, and their sum over the group; rope_backward of dk
//
// The second number of __launch_bounds__ says for how many blocks a multiprocessor is to have registers. (Its shared
// memory may allow fewer.)

#if PARTS == 0

// ===========================================================================================================
// 0. The first rung: one thread a query
// ===========================================================================================================
// The forward as the formulas above have it, key by key. Each thread owns one query: its O, m and l are
// registers. For each multiplication it loads a number of a key and one of the query, or one of a value, and that is
// what makes it slow: in the kernels below a number that was loaded serves several multiplications of a thread.
// Grid (H, B, ceil(T / 128)); 128 threads. No model calls it: a test compares it with model_cpu.py.
KERNEL __launch_bounds__(THREADS)
flash_forward_plain(float* out, float* lse, Floats qkv, int T, int H, int G) {
    Place at = own_place(T, H, G);
    Heads in = heads_of(qkv, at);
    int i = THREADS * blockIdx.z + threadIdx.x;  // the query
    if (i >= T) return;
    Floats q = in.q.row(i);
    float m = MASKED, l = 0.0f;
    float O[D] = {};
    FOR(j, i + 1) {                              // causal: no key behind the query
        Floats k = in.k.row(j);
        Floats v = in.v.row(j);
        float S = 0.0f;
        FOR(n, D) S += q[n] * k[n];
        S *= rsqrtf(D);                          // scale q_i . k_j
        float m_new = fmaxf(m, S);
        float alpha = expf(m - m_new);           // 1, unless the maximum has grown
        float P = expf(S - m_new);
        l = alpha * l + P;
        EACH(n, D) O[n] = alpha * O[n] + P * v[n];
        m = m_new;
    }
    float* row = head_of(out, at).row(i);
    EACH(n, D) row[n] = O[n] / l;
    lse[numbers_at(at) + i] = m + logf(l);
}

// ===========================================================================================================
// 1. The readable version: fp32, plain arithmetic
// ===========================================================================================================
// A block owns ROWS rows: queries in the forward and in dQ, keys in dK/dV. They stay in registers, beside the
// sums that belong to them. The rows of the other side stream past in tiles through shared memory.

// Two rows belong to a group of GROUP_LANES lanes of one warp. Each lane has 16 columns of both, so that what it
// reads from shared memory serves twice. For D = 64 four lanes hold two rows; a warp has eight such groups, 16
// rows. Of warp 0:
//
//     lane              0         1         ...    7           8         ...    15          16 ...   24 ...
//     rows              0, 1      2, 3      ...    14, 15      0, 1      ...    14, 15      0, 1     0, 1
//     columns           0-3       0-3       ...    0-3         4-7       ...    4-7         8-11     12-15
//                       16-19     16-19     ...    16-19       20-23     ...    20-23       24-27    28-31
//                       32-35     32-35     ...    32-35       36-39     ...    36-39       40-43    44-47
//                       48-51     48-51     ...    48-51       52-55     ...    52-55       56-59    60-63
//
// So a row lies in lanes 8 apart: rows 0 and 1 in lanes 0, 8, 16 and 24.
constexpr int GROUP_LANES = D / 16,
              GROUPS = 32 / GROUP_LANES,             // of a warp
              WARP_ROWS = 2 * GROUPS,
              ROWS = THREADS / 32 * WARP_ROWS,       // of a block: Br, in dK/dV Bc
              TILE = 32;                             // rows of a tile: one for each lane of a warp

struct alignas(16) Tile {
    float rows[TILE][D];
};

struct alignas(16) Row {
    float x[16];  // the columns of a row that a lane has
};

// The first of this lane's two rows (the table's second line), counted from the block's first.
__device__ int own_row() { return WARP * WARP_ROWS + threadIdx.x % GROUPS * 2; }

// Which column of a row is this lane's n-th (the table's other lines). They come in fours, 16 bytes. Lanes side by
// side belong to different groups and have the same columns. When all lanes read one row of a tile, lanes 0 to 7 (D =
// 64) read one address, lanes 8 to 15 the next 16 bytes, and so on. These lie in different banks of shared memory: so
// no lane waits for another (a bank conflict).
__device__ int own_column(int n) { return 4 * (n / 4 * GROUP_LANES + LANE / GROUPS) + n % 4; }

// A row of a head or of a tile.
__device__ Row load(Floats from) {
    Row row;
    FOR_STRIDED(n, 0, 16, 4) copy_16_bytes(row.x + n, from + own_column(n));
    return row;
}

// Row t of a head. Past the end it is the last row once more: then nothing is stored, or the same delta once more.
__device__ Row load(Matrix from, int t) { return load(from.row(min(t, from.T - 1))); }

// Row t of a head, if there is one, = factor * row, turned back if there are angles.
__device__ void store(Matrix to, int t, float factor, Row row, Floats angles = nullptr) {
    if (t >= to.T) return;
    for (float& x : row.x) x *= factor;
    for (int n = 0; n < 8 && angles; n += 2)  // x[n] and x[n + 8] are a pair, D/2 columns apart
        turn_back((float2&)row.x[n], (float2&)row.x[n + 8], angles + t * D + own_column(n));
    FOR_STRIDED(n, 0, 16, 4) copy_16_bytes(to.row(t) + own_column(n), row.x + n);
}

// x . y, over all D columns: every lane sums its 16, then the lanes of the group add theirs
__device__ float dot(const Row& x, const Row& y) {
    float sum = 0.0f;
    EACH(n, 16) sum += x.x[n] * y.x[n];
    return lanes_sum(sum, GROUPS, 32);
}

// sum += p y
__device__ void add_product(Row& sum, float p, const Row& y) { EACH(n, 16) sum.x[n] += p * y.x[n]; }

// Tiles x and y = rows first .. first + TILE - 1 of two heads; past the end they are the last row.
__device__ void load_tiles(Tile& x, Matrix from_x, Tile& y, Matrix from_y, int first) {
    __syncthreads();  // nobody reads what was there any more
    #pragma unroll 2  // more at once would take registers from the sums
    FOR_STRIDED(n, 4 * threadIdx.x, TILE * D, 4 * THREADS) {
        int row = n / D;
        int column = n % D;
        int t = min(first + row, from_x.T - 1);
        copy_16_bytes(x.rows[row] + column, from_x.row(t) + column);
        copy_16_bytes(y.rows[row] + column, from_y.row(t) + column);
    }
    __syncthreads();  // the tiles are complete
}

KERNEL __launch_bounds__(THREADS, 2)
flash_forward(real* out, float* lse, Reals qkv, int T, int H, int G) {
    Place at = own_place(T, H, G);
    constexpr int STEP = 8;  // keys after which m, l and O are brought up to date: O is scaled once for eight keys
    __shared__ Tile K, V;
    int i = (T - 1) / ROWS - blockIdx.z;  // the last queries see the most keys: the longest work first
    int query = i * ROWS + own_row();
    int last = query | (WARP_ROWS - 1);   // of this warp's queries
    float scale = rsqrtf(D);
    Heads in = heads_of(qkv, at);

    Row q[2] = {load(in.q, query), load(in.q, query + 1)};
    Row O[2] = {};
    float m[2] = {MASKED, MASKED};
    float l[2] = {};
    FOR_STRIDED(first, 0, min((i + 1) * ROWS, T), TILE) {
        load_tiles(K, in.k, V, in.v, first);
        for (int j = 0; j < TILE && first + j <= last; j += STEP) {
            float S[STEP][2];
            EACH(n, STEP) {
                Row k = load(K.rows[j + n]);
                EACH(r, 2) S[n][r] = dot(q[r], k);
            }
            EACH(r, 2) {  // online softmax
                float m_new = m[r];
                EACH(n, STEP) {
                    S[n][r] = first + j + n <= query + r ? scale * S[n][r] : MASKED;
                    m_new = fmaxf(m_new, S[n][r]);
                }
                float alpha = expf(m[r] - m_new);
                m[r] = m_new;
                l[r] *= alpha;
                for (float& x : O[r].x) x *= alpha;
                EACH(n, STEP) {
                    S[n][r] = expf(S[n][r] - m[r]);  // P
                    l[r] += S[n][r];
                }
            }
            EACH(n, STEP) {
                Row v = load(V.rows[j + n]);
                EACH(r, 2) add_product(O[r], S[n][r], v);
            }
        }
    }
    EACH(r, 2) {
        store(head_of(out, at), query + r, 1.0f / l[r], O[r]);
        if (query + r < T) lse[numbers_at(at) + query + r] = m[r] + logf(l[r]);
    }
}

KERNEL __launch_bounds__(THREADS, 2)
flash_backward_dq(real* dqkv, Reals dout, Reals out, Floats lse,
                  Reals qkv, float* delta, Floats angles, int T, int H, int G) {
    Place at = own_place(T, H, G);
    __shared__ Tile K, V;
    int i = gridDim.z - 1 - blockIdx.z;
    int query = i * ROWS + own_row();
    int last = query | (WARP_ROWS - 1);
    float scale = rsqrtf(D);
    Heads in = heads_of(qkv, at);

    Row q[2], dO[2];
    Row dQ[2] = {};
    float L[2], Delta[2];
    EACH(r, 2) {
        int t = min(query + r, T - 1);
        q[r] = load(in.q, t);
        dO[r] = load(head_of(dout, at), t);
        L[r] = lse[numbers_at(at) + t];
        Delta[r] = dot(dO[r], load(head_of(out, at), t));  // delta_i = dO_i . O_i
        delta[numbers_at(at) + t] = Delta[r];
    }
    FOR_STRIDED(first, 0, min((i + 1) * ROWS, T), TILE) {
        load_tiles(K, in.k, V, in.v, first);
        for (int j = 0; j < TILE && first + j <= last; j++) {
            Row k = load(K.rows[j]);
            Row v = load(V.rows[j]);
            EACH(r, 2) {
                float S = dot(q[r], k);    // S_ij = scale q_i . k_j
                float dP = dot(dO[r], v);  // O_i = sum_j P_ij v_j
                float P = expf((first + j <= query + r ? scale * S : MASKED) - L[r]);
                add_product(dQ[r], P * (dP - Delta[r]), k);
            }
        }
    }
    EACH(r, 2) store(heads_of(dqkv, at).q, query + r, scale, dQ[r], angles);
}

KERNEL __launch_bounds__(THREADS, 2)
flash_backward_dkdv(real* dqkv, Reals dout, Reals out, Floats lse,
                    Reals qkv, Floats delta, Floats angles, int T, int H, int G) {
    Place at = own_place(T, H, G);
    __shared__ Tile Q, dO;
    int j = blockIdx.z;
    int key = j * ROWS + own_row();
    float scale = rsqrtf(D);
    int end = at.h + H / G;  // of the heads of the group
    Heads in = heads_of(qkv, at);

    Row k[2] = {load(in.k, key), load(in.k, key + 1)};
    Row dK[2] = {};
    Row v[2] = {load(in.v, key), load(in.v, key + 1)};
    Row dV[2] = {};
    for (; at.h < end; at.h++)
        FOR_STRIDED(first, j * ROWS, T, TILE) {
            load_tiles(Q, heads_of(qkv, at).q, dO, head_of(dout, at), first);
            int t = min(first + LANE, T - 1);  // each lane fetches the numbers of one query
            float lane_L = lse[numbers_at(at) + t];
            float lane_Delta = delta[numbers_at(at) + t];
            // from the first query that sees a key of this warp
            for (int i = max(0, (key & -WARP_ROWS) - first); i < TILE && first + i < T; i++) {
                float L = __shfl_sync(0xFFFFFFFF, lane_L, i);
                float Delta = __shfl_sync(0xFFFFFFFF, lane_Delta, i);
                Row q = load(Q.rows[i]);
                Row d = load(dO.rows[i]);
                EACH(r, 2) {
                    float S = dot(k[r], q);
                    float dP = dot(v[r], d);
                    float P = expf((key + r <= first + i ? scale * S : MASKED) - L);
                    add_product(dV[r], P, d);
                    add_product(dK[r], P * (dP - Delta), q);
                }
            }
        }
    Heads to = heads_of(dqkv, at);
    EACH(r, 2) {
        store(to.k, key + r, scale, dK[r], angles);
        store(to.v, key + r, 1.0f, dV[r]);
    }
}

#else

// ===========================================================================================================
// 2. The fast version: tensor cores, bf16 or tf32, compute capability 8.0 and later
// ===========================================================================================================
// The same method, with tiles of 64 rows, and an online softmax that rescales only when it must. What is new: a product
// (GEMM) of small matrices is one instruction of a whole warp, and each lane holds some entries of its operands.
// Most of this section is about which.

// --- Instructions that C++ has no words for ------------------------------------------------------------------
// On a CPU tests/cuda_on_cpu.h has functions of the same names.
#ifndef CUDA_ON_CPU

// The bits of a float rounded to tf32, which has 10 bits of mantissa. The tensor cores would cut off the rest.
__device__ unsigned round_tf32(unsigned bits) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "r"(bits));
    return rounded;
}

__device__ unsigned shared_address(const void* p) { return __cvta_generic_to_shared(p); }

// asm wants each register by itself. FOUR: x[i] and the three that follow. kind: "r" integer, "f" float; = written,
// + also read.
#define FOUR(kind, x, i) kind(x[i]), kind(x[i + 1]), kind(x[i + 2]), kind(x[i + 3])

// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8m + n gives the address of row n (16
// bytes) of matrix m; lane l receives in r[m] elements 2 (l % 4) and the next of row l / 4 of matrix m. It
// moves bits: a row may as well be four 32-bit elements, of which lane l then receives number l % 4.
#define LDMATRIX(kind)                                                         \
    asm volatile("ldmatrix.sync.aligned.m8n8." kind " {%0, %1, %2, %3}, [%4];" \
                 : FOUR("=r", r, 0)                                            \
                 : "r"(shared_address(row)) : "memory")
__device__ void ldmatrix_x4(unsigned* r, const void* row) { LDMATRIX("x4.shared.b16"); }

// The same with each matrix transposed.
__device__ void ldmatrix_x4_transposed(unsigned* r, const void* row) { LDMATRIX("x4.trans.shared.b16"); }

// C (16 x 8, fp32) += A (16 x K) B (K x 8), by the 32 lanes of a warp together; K is 16 in bf16, and 8 in
// tf32.
#define MMA(shape, types)                                       \
    asm("mma.sync.aligned." shape ".row.col.f32." types ".f32 " \
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : FOUR("+f", c, 0)                                      \
        : FOUR("r", a, 0), "r"(b[0]), "r"(b[1]))
__device__ void mma(float* c, const unsigned* a, const unsigned* b) {
    if (BF16) MMA("m16n8k16", "bf16.bf16");
    else MMA("m16n8k8", "tf32.tf32");
}

// Starts a copy of 16 or 4 bytes from global to shared memory that passes through no register. Where not
// `valid`, it writes zeros and does not touch `from`. (cg: 16 bytes do not go through the multiprocessor's own
// cache, L1, either.)
template <int BYTES>
__device__ void cp_async(void* to, const void* from, bool valid) {
    unsigned a = shared_address(to);
    unsigned n = valid ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(a), "l"(from), "r"(n) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(a), "l"(from), "r"(n) : "memory");
}

// Waits until all copies that this thread has started have arrived. Other threads need a barrier as well.
__device__ void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Hopper's own product (wgmma): C (64 x 64, fp32) += A (64 x 16) B (16 x 64). The four warps of a block begin it
// together, and go on meanwhile. Each warp has 16 rows of C; eight columns of them are a piece as in mma.
//   * B is read from shared memory, where its rows of 128 bytes are swizzled as `offset` says. In wgmma_ab these
//     are 16 rows of 64 numbers. In wgmma_abt they are 16 numbers of 64 rows, which are B's columns.
//   * A: in wgmma_abt it lies in shared memory, too; in wgmma_ab each warp has its rows of A in registers.
//   * Where `add` is 0, wgmma_abt writes C = A B. If we wrote zeros to C ourselves while another product is under
//     way, ptxas would put a wait for that one before them (its remark C7517).
//
// A wgmma descriptor names an operand in shared memory. Its 64 bits, with lengths and addresses in units of 16
// bytes:
//
//      63 62 61    52 51   49 48    46 45        32 31 30 29        16 15 14 13         0
//     +-----+--------+-------+--------+------------+-----+------------+-----+------------+
//     |  1  |   0    |   0   |   0    |  1024 / 16 |  0  |     0      |  0  |  address   |
//     +-----+--------+-------+--------+------------+-----+------------+-----+------------+
//     swizzle       base offset        stride             leading            start
//
//     swizzle   1: rows of 128 bytes, whose chunks are XORed as in `offset` (2: of 64, 3: of 32, 0: none)
//     base      where in the swizzle's pattern of 1024 bytes the tile begins: at its start, since tiles lie at
//     offset    multiples of 1024 bytes. (The XOR is one of address bits, so `start` may be + 2 all the same.)
//     stride    from eight rows to the next eight: 8 * 128 bytes
//     leading   from the rows' first 128 bytes to their next 128. Not used: a row of 64 bf16 has no more
//     start     where the operand begins. + 2 is two chunks to the right, the next 16 numbers of the sum
typedef unsigned long long Descriptor;
__device__ Descriptor wgmma_tile(const char* rows) {
    return shared_address(rows) / 16 | 1024ull / 16 << 32 | 1ull << 62;
}

// The numbers behind the operands, by their names in the manual:
//     scale-d                        whether the product is added to C: p in wgmma_abt, 1 in wgmma_ab
//     imm-scale-a, imm-scale-b       the signs of A and of B: 1 leaves them as they are
//     imm-trans-a, imm-trans-b       which of them lie transposed in shared memory: in wgmma_abt neither (0, 0), in
//                                    wgmma_ab B does (1); A is in registers there and has no such number
#define EIGHT_OF_C(i) FOUR("+f", c, i), FOUR("+f", c, i + 4)
#define ALL_OF_C EIGHT_OF_C(0), EIGHT_OF_C(8), EIGHT_OF_C(16), EIGHT_OF_C(24)
#define WGMMA "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "                          \
              "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21," \
              "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
__device__ void wgmma_abt(float* c, Descriptor a, Descriptor b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; " WGMMA "%32, %33, p, 1, 1, 0, 0;}"
                 : ALL_OF_C
                 : "l"(a), "l"(b), "r"(add));
}
__device__ void wgmma_ab(float* c, const unsigned* a, Descriptor b) {
    asm volatile(WGMMA "{%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : ALL_OF_C
                 : FOUR("r", a, 0), "l"(b));
}

// wgmma_begin comes after the registers of a product were last written, and before the product begins. wgmma_wait waits
// for all of them. It names c as an operand, so that the compiler does not move a use of c before the wait. So each
// result needs a call of its own; after the first call the others return at once.
__device__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_wait(float* c) {
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" : ALL_OF_C :: "memory");
}

// Makes what this thread has copied to shared memory visible to Hopper's products. A barrier must follow.
__device__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif

// --- What the kernels share --------------------------------------------------------------------------------
// Numbers are stored as bf16, the upper half of a float, or as floats, which are rounded to tf32 when they
// are multiplied. 16 bytes of a row, a chunk, hold CHUNK of them, and one tensor-core instruction multiplies
// along two chunks: 16 bf16 or 8 tf32.
//
// The result of a product, 16 rows of it, stays in a warp's registers, as an array [N][4]: N pieces of 16 x
// 8, of each of which lane l holds
//     [0], [1]: row l / 4,      columns 2 (l % 4) and the next
//     [2], [3]: row l / 4 + 8,  the same columns.
// So a lane has two of every 16 rows, half = 0 and 1. Scores and Rows are typedefs because an array parameter would
// forget its size; a reference to a typedef, Scores&, keeps it.

typedef float Scores[8][4];    // of 64 keys, or of 64 queries, for a warp's 16 rows of a part; P, dP, dS as well
typedef float Rows[D / 8][4];  // 16 rows of O, dQ, dK or dV
typedef const char* TileStart;  // where a tile begins in shared memory, or a part of it, that a function only reads

// What a lane has: of each part two rows, number OWN_ROW counted from the warp's first; and of Scores S the numbers
// S[n][e].
#define EACH_ROW EACH(part, PARTS) EACH(half, 2)
#define OWN_ROW (64 * part + 8 * half + LANE / 4)
#define EACH_SCORE EACH(n, 8) EACH(e, 4)

// exp(x) = exp2(LOG2_E x), and exp2f is one instruction, because CuPy compiles with -ftz=true.
constexpr float LOG2_E = 1.4426950408889634f;
#define SCALE rsqrtf(D)  // of the scores
#define SCALE2 (SCALE * LOG2_E)

// The number of this thread's warp, from lane 0, which tells the compiler that all lanes agree on it.
__device__ int warp_number() { return __shfl_sync(0xFFFFFFFF, WARP, 0); }

// Masks the scores whose key lies in their query's future. S has queries from `query` on as rows, keys from
// `key` on as columns; or, transposed, the other way round.
__device__ void mask_future(Scores& S, int query, int key, bool transposed) {
    EACH_SCORE {
        int row = LANE / 4 + e / 2 * 8;
        int column = 8 * n + LANE % 4 * 2 + e % 2;
        if (transposed ? key + row > query + column : key + column > query + row) S[n][e] = MASKED;
    }
}

constexpr bool USE_WGMMA = HOPPER && BF16 && D == 64;  // the products are Hopper's

// A block's own tile has PARTS parts of 64 rows. A warp has 16 rows of each part. The other side comes in tiles of 64
// rows. With two parts each of these tiles is used twice. Two things allow one part only:
//   * wide rows: with D = 128 two parts would not fit into the registers; in tf32 with D = 64 a block of the backward
//     would take 129 KB of shared memory, and two of them would not fit a multiprocessor (with D = 32 they would, but
//     tf32 has one rule);
//   * a multiprocessor with 100 KB of shared memory (8.6, 8.9, 12.0). There two blocks of the backward fit with one
//     part (bf16, D = 64), but only one block with two parts. (dK/dV with one part takes 49 KB, and CUDA adds 1 KB: two
//     blocks are exactly 100 KB.) The same rule is taken there for D = 32.

// --- Tiles in shared memory ----------------------------------------------------------------------------
constexpr int CHUNK = 16 / sizeof(real),    // numbers of a chunk
              CHUNKS = D / CHUNK,           // of a row
              STEPS = CHUNKS / 2,           // tensor-core instructions along a row
              ROWS = 64 * PARTS,            // of the block's own tile: Br, in dK/dV Bc
              ROW_BYTES = 16 * CHUNKS,
              TILE_BYTES = 64 * ROW_BYTES;  // of a tile of 64 rows

// Where a chunk lies, in bytes from the start of the tile. It is swizzled: the number of the chunk is XORed
// with that of its row. ldmatrix reads one chunk of eight successive rows at a time; swizzled, these lie in
// eight different sets of banks. The pattern repeats every eight rows: offset(row + 8, c) is offset(row, c) + 8
// ROW_BYTES. For c = 0 and 1, offset(row, c + 2s) is offset(row, c) ^ 32s (gemm_abt and load_b use that).
__device__ int offset(int row, int chunk) {
    int twist = CHUNKS >= 8 ? row & 7 : row >> 1 & 3;  // a row of four chunks fills half of the banks
    return row * ROW_BYTES + 16 * (chunk ^ twist);
}

// Starts copying rows first .. first + count - 1 of a head; zeros past the end. Each call gives a count that the
// compiler knows.
__device__ void start_load(char* tile, Matrix from, int first, int count) {
    constexpr int PASS = THREADS / CHUNKS;  // rows per pass: a multiple of 8, so every pass sees the same swizzle
    int row = threadIdx.x / CHUNKS;
    int chunk = threadIdx.x % CHUNKS;
    int left = from.T - first - row;
    Reals at = from.row(first + row) + chunk * CHUNK;
    tile += offset(row, chunk);
    EACH(n, count / PASS) {
        cp_async<16>(tile + n * PASS * ROW_BYTES, at, n * PASS < left);
        at += PASS * from.stride;
    }
}

// Starts copying 64 rows of two heads into stage n % 2 of two.
__device__ void start_stage(char* stages, int n, Matrix x, Matrix y, int first) {
    char* stage = stages + n % 2 * 2 * TILE_BYTES;
    start_load(stage, x, first, 64);
    start_load(stage + TILE_BYTES, y, first, 64);
}

// Waits until what was loaded has arrived for all threads, and all are done with the stage that they used last: the
// next copy may go there.
__device__ void wait_for_stage() {
    cp_async_wait();
    if (USE_WGMMA) fence_for_wgmma();
    __syncthreads();
}

// The warp's rows of a head, from `first` on, = factor * O; if there are angles, turned back first. They go
// through the warp's own rows, from `row` on, of a tile that is no longer needed, so that whole chunks
// are written.
__device__ void store(Matrix to, Rows (&O)[PARTS], float factor,
                      char* tile, int row, int first, Floats angles = nullptr) {
    if (angles) EACH_ROW EACH(n, D / 16) {
        int t = min(first + OWN_ROW, to.T - 1);
        turn_back((float2&)O[part][n][2 * half], (float2&)O[part][n + D / 16][2 * half],
                  angles + t * D + 8 * n + LANE % 4 * 2);
    }
    tile += row * ROW_BYTES;
    EACH_ROW EACH(n, D / 8) {
        float2 pair = (float2&)O[part][n][2 * half];  // of columns
        int column = 8 * n + LANE % 4 * 2;
        char* at = tile + offset(OWN_ROW, column / CHUNK) + column % CHUNK * sizeof(real);
        if (BF16) *(unsigned*)at = pack_bf16(factor * pair.x, factor * pair.y);
        else *(float2*)at = {factor * pair.x, factor * pair.y};
    }
    __syncwarp();  // the rows are complete
    #pragma unroll
    FOR_STRIDED(n, LANE, 16 * PARTS * CHUNKS, 32) {
        int r = n / CHUNKS / 16 * 64 + n / CHUNKS % 16;
        int chunk = n % CHUNKS;
        real* at = to.row(first + r) + chunk * CHUNK;
        if (first + r < to.T) copy_16_bytes(at, tile + offset(r, chunk));
    }
}

// --- Operands ------------------------------------------------------------------------------------------

// ldmatrix_x4; then numbers that are floats are rounded to tf32.
__device__ void load_matrices(unsigned* words, const char* row) {
    ldmatrix_x4(words, row);
    if (BF16) return;
    EACH(i, 4) words[i] = round_tf32(words[i]);
}

// Word i of a left operand, which is made of pieces n and n + 1 of P in bf16, and of piece n in tf32. In bf16 each lane
// has as result of one product the very numbers that it must hand in as left operand of the next: P does not leave
// its registers.
//
// In tf32 (mma m16n8k8) it has others: the instruction wants k = l % 4 and l % 4 + 4 from lane l, which has
// columns 2 (l % 4) and the next. But a sum over k may take its terms in any order. So the lane hands in
// the columns that it has, and load_b takes B's rows in the same order:
//
//     in                             a[0], a[1], b[0]   a[2], a[3], b[1]
//     k, as the instruction counts   | 0   1   2   3  |  4   5   6   7 |
//     l % 4 of the lane that has k   | 0   1   2   3  |  0   1   2   3 |
//     the column of P that it is     | 0   2   4   6  |  1   3   5   7 |
//     the row of B that it is        | 0   2   4   6  |  1   3   5   7 |
//
// a[0] and a[2] are of row l / 4 of P, a[1] and a[3] of row l / 4 + 8; b[0] and b[1] of column l / 4 of B.
__device__ unsigned left_operand(const Scores& P, int n, int i) {
    Floats pair = P[n + i / 2] + i % 2 * 2;
    if (BF16) return pack_bf16(pair[0], pair[1]);
    return round_tf32(__float_as_uint(P[n][i % 2 * 2 + i / 2]));
}

// The right operands of A B, from row `row` and column 8d on: in bf16 two operands, of 16 rows and 8 columns each; in
// tf32 one of 8 rows and 8 columns, by plain loads, since ldmatrix cannot transpose 32-bit elements.
__device__ void load_b(unsigned* b, TileStart tile, int row, int d) {
    int column = 8 * d + LANE / 4;
    tile += row * ROW_BYTES;
    if (BF16) ldmatrix_x4_transposed(b, tile + (offset(LANE % 16, LANE / 16) ^ 16 * d));
    else EACH(i, 2) {
        int at = offset(2 * (LANE % 4) + i, column / CHUNK) + column % CHUNK * 4;
        b[i] = round_tf32(*(unsigned*)(tile + at));
    }
}

// --- GEMMs of tiles ------------------------------------------------------------------------------------

// S = A @ B^T, A being this warp's rows of a part, B a tile. Hopper's product is only begun here:
// `finish` comes before S is used.
__device__ void gemm_abt(Scores& S, TileStart A, TileStart B) {
    if (USE_WGMMA) {
        wgmma_begin();  // step is `add` as well: the first writes S, the others add to it
        EACH(step, STEPS) wgmma_abt(S[0], wgmma_tile(A) + 2 * step, wgmma_tile(B) + 2 * step, step);
    } else {
        EACH_SCORE S[n][e] = 0.0f;
        EACH(step, STEPS) {
            unsigned a[4], b[4];
            // the left operand: 2 chunks of this warp's 16 rows of A
            load_matrices(a, A + (offset(16 * warp_number() + LANE % 16, LANE / 16) ^ 32 * step));
            EACH(n, 4) {
                // two right operands: b[0], b[1] are 2 chunks of rows 16n .. 16n + 7 of B, b[2], b[3] of the
                // eight after them
                load_matrices(b, B + 16 * n * ROW_BYTES +
                                 (offset(LANE % 8 + LANE / 16 * 8, LANE / 8 % 2) ^ 32 * step));
                EACH(i, 2) mma(S[2 * n + i], a, b + 2 * i);
            }
        }
    }
}

// O += P @ B, B being a tile; then `finish` as well.
__device__ void gemm_ab(Rows& O, const Scores& P, TileStart B) {
    constexpr int PIECES = CHUNK / 4;   // of P in a left operand, and of O for a load of B
    constexpr int LEFT = 8 / PIECES;    // left operands
    unsigned a[LEFT][4];
    EACH(n, LEFT) EACH(i, 4) a[n][i] = left_operand(P, PIECES * n, i);
    if (USE_WGMMA) {
        wgmma_begin();
        EACH(n, LEFT) wgmma_ab(O[0], a[n], wgmma_tile(B + 16 * n * ROW_BYTES));
    } else EACH(n, LEFT) EACH(d, D / 8 / PIECES) {
        unsigned b[4];
        load_b(b, B, 8 * PIECES * n, PIECES * d);
        EACH(i, PIECES) mma(O[PIECES * d + i], a[n], b + 2 * i);
    }
}

// Waits for what was begun, C among it.
__device__ void finish(float (*C)[4]) {
    if (USE_WGMMA) wgmma_wait(C[0]);
}

// The product of two words; in bf16 the product of their lower halves + that of their upper halves.
__device__ float dot(unsigned p, unsigned q) {
    if (!BF16) return __uint_as_float(p) * __uint_as_float(q);
    return to_float(p) * to_float(q) + to_float(p >> 16) * to_float(q >> 16);
}

// --- Forward -------------------------------------------------------------------------------------------
// All three kernels have one shape. The block's own tile (in the backward: two) is loaded once. The other side
// streams past in tiles of its own through two stages of shared memory: while one is computed with, the copy into the
// other is under way. A warp owns its rows of the block's tile. All warps load the tiles together; beyond that only
// a product of Hopper's is begun by all four together. Tiles lie at multiples of 1024 bytes, as such a product wants.

// Calls step(K_tile, key, part) for each tile of keys, and each part of the block's queries that sees some of
// them. key is the first key of the tile; the tile of V lies behind K_tile. The caller has loaded the first tile,
// and has waited for it (wait_for_stage).
template <class Step>
__device__ void over_keys(char* stages, Heads in, int i, Step step) {
    int tiles = (min((i + 1) * ROWS, in.k.T) + 63) / 64;
    FOR(j, tiles) {
        if (j + 1 < tiles) start_stage(stages, j + 1, in.k, in.v, 64 * (j + 1));
        EACH(part, PARTS)
            if (j <= PARTS * i + part) step(stages + j % 2 * 2 * TILE_BYTES, 64 * j, part);
        wait_for_stage();
    }
}

KERNEL __launch_bounds__(THREADS, 2)
flash_forward(real* out, float* lse, Reals qkv, int T, int H, int G) {
    Place at = own_place(T, H, G);
    extern __shared__ __align__(1024) char Q_tile[];
    char* stages = Q_tile + PARTS * TILE_BYTES;  // two of K and V
    int i = (T - 1) / ROWS - blockIdx.z;         // the longest work first, as above
    int row = 16 * warp_number();                // the warp's first row of the tile
    int first = i * ROWS + row;                  // the query in that row
    Heads in = heads_of(qkv, at);

    start_load(Q_tile, in.q, i * ROWS, ROWS);
    start_stage(stages, 0, in.k, in.v, 0);
    wait_for_stage();
    Rows O[PARTS] = {};
    float maximum[PARTS][2];
    float sum[PARTS][2] = {};
    EACH_ROW maximum[part][half] = MASKED;
    over_keys(stages, in, i, [&](TileStart K_tile, int key, int part) {
        auto& m = maximum[part];
        auto& l = sum[part];
        float m_new[2];
        Scores S;
        gemm_abt(S, Q_tile + part * TILE_BYTES, K_tile);
        finish(S);
        if (key + 63 > first + 64 * part) mask_future(S, first + 64 * part, key, false);
        // Any m gives the same result as long as exp2 neither overflows nor loses the row. So m stays, and
        // nothing is rescaled, until a P would exceed 2^8. That is rare after the first keys. And 256 is harmless: P
        // and l stay far from the ends of fp32 and bf16.
        bool grown = false;
        EACH(half, 2) {
            float x = MASKED;
            EACH(n, 8) x = fmaxf(x, fmaxf(S[n][2 * half], S[n][2 * half + 1]));
            m_new[half] = lanes_max(x, 1, 4);  // over the four lanes that share a row
            grown |= (m_new[half] - m[half]) * SCALE2 > 8.0f;
        }
        if (__any_sync(0xFFFFFFFF, grown))
            EACH(half, 2) {
                float x = fmaxf(m[half], m_new[half]);
                float alpha = exp2f((m[half] - x) * SCALE2);
                m[half] = x;
                l[half] *= alpha;
                EACH(n, D / 8) EACH(e, 2) O[part][n][2 * half + e] *= alpha;
            }
        EACH_SCORE {
            S[n][e] = exp2f(S[n][e] * SCALE2 - m[e / 2] * SCALE2);  // P
            l[e / 2] += S[n][e];  // this lane's part of the row's sum
        }
        gemm_ab(O[part], S, K_tile + TILE_BYTES);
        finish(O[part]);
    });
    EACH_ROW {
        float& l = sum[part][half];
        l = lanes_sum(l, 1, 4);
        int query = first + OWN_ROW;
        if (LANE % 4 == 0 && query < T)
            lse[numbers_at(at) + query] = maximum[part][half] * SCALE + logf(l);
        EACH(n, D / 8) EACH(e, 2) O[part][n][2 * half + e] *= 1.0f / l;
    }
    store(head_of(out, at), O, 1.0f, Q_tile, row, first);
}

// --- Backward: dQ, and delta for dK and dV -------------------------------------------------------------

KERNEL __launch_bounds__(THREADS, USE_WGMMA ? 3 : 2)  // with wgmma few enough registers are needed for three blocks
flash_backward_dq(real* dqkv, Reals dout, Reals out, Floats lse,
                  Reals qkv, float* delta, Floats angles, int T, int H, int G) {
    Place at = own_place(T, H, G);
    extern __shared__ __align__(1024) char Q_tile[];
    char* dO_tile = Q_tile + PARTS * TILE_BYTES;
    char* stages = dO_tile + PARTS * TILE_BYTES;  // two of K and V
    int i = gridDim.z - 1 - blockIdx.z;
    int row = 16 * warp_number();
    int first = i * ROWS + row;
    Heads in = heads_of(qkv, at);

    start_load(Q_tile, in.q, i * ROWS, ROWS);
    start_load(dO_tile, head_of(dout, at), i * ROWS, ROWS);
    start_stage(stages, 0, in.k, in.v, 0);
    float lse2[PARTS][2], Delta[PARTS][2];
    // This lane's chunks of O, asked for before the wait, so that all copies are under way at once.
    uint4 O[PARTS][2][CHUNKS / 4];
    EACH_ROW {
        int query = min(first + OWN_ROW, T - 1);
        lse2[part][half] = lse[numbers_at(at) + query] * LOG2_E;
        Reals from = head_of(out, at).rows + 1LL * query * H * D + LANE % 4 * CHUNK;
        EACH(n, CHUNKS / 4) copy_16_bytes(&O[part][half][n], from + 4 * n * CHUNK);
    }
    wait_for_stage();
    EACH_ROW {  // delta_i = dO_i . O_i, by the four lanes that share the row
        int r = OWN_ROW;
        float sum = 0.0f;
        EACH(n, CHUNKS / 4) EACH(e, 4) {
            auto chunk = (unsigned*)(dO_tile + offset(row + r, 4 * n + LANE % 4));
            sum += dot(chunk[e], (&O[part][half][n].x)[e]);
        }
        sum = lanes_sum(sum, 1, 4);
        Delta[part][half] = sum;
        if (LANE % 4 == 0 && first + r < T) delta[numbers_at(at) + first + r] = sum;
    }

    Rows dQ[PARTS] = {};
    over_keys(stages, in, i, [&](TileStart K_tile, int key, int part) {
        Scores S, dP;
        gemm_abt(S, Q_tile + part * TILE_BYTES, K_tile);
        gemm_abt(dP, dO_tile + part * TILE_BYTES, K_tile + TILE_BYTES);
        finish(S);
        finish(dP);
        if (key + 63 > first + 64 * part) mask_future(S, first + 64 * part, key, false);
        EACH_SCORE {
            float p = exp2f(S[n][e] * SCALE2 - lse2[part][e / 2]);
            S[n][e] = p * (dP[n][e] - Delta[part][e / 2]);  // dS
        }
        gemm_ab(dQ[part], S, K_tile);
        finish(dQ[part]);
    });
    store(heads_of(dqkv, at).q, dQ, SCALE, Q_tile, row, first, angles);
}

// --- Backward: dK and dV -------------------------------------------------------------------------------
// Computes the tiles transposed, keys as rows: then P^T and dS^T are left operands as they come, and a
// warp sums the dK and dV of its keys alone, over all queries of all the heads of the group.
//
// A stage holds 64 queries: their tiles of Q and dO, and their lse and delta. For each head of the group
// come the queries from the block's first key on; those before see none of its keys. While one stage is
// computed with, the other is loaded. For example, two heads a group, T = 320, PARTS = 2, and the
// block of keys 128 to 255 (j = 1), where 128, 192 and 256 are the first queries of the three tiles:
//
//     n       stage 0            stage 1            part 0, keys 128 ..   part 1, keys 192 ..
//     before  load head 0, 128
//     0       use  head 0, 128   load head 0, 192   diagonal: masked      all keys in the future: skipped
//     1       load head 0, 256   use  head 0, 192   all seen              diagonal: masked
//     2       use  head 0, 256   load head 1, 128   all seen              all seen
//     3       load head 1, 192   use  head 1, 128   diagonal: masked      all keys in the future: skipped
//     4       use  head 1, 192   load head 1, 256   all seen              diagonal: masked
//     5                          use  head 1, 256   all seen              all seen

KERNEL __launch_bounds__(THREADS, 2)
flash_backward_dkdv(real* dqkv, Reals dout, Reals out, Floats lse,
                    Reals qkv, Floats delta, Floats angles, int T, int H, int G) {
    Place at = own_place(T, H, G);
    extern __shared__ __align__(1024) char K_tile[];
    char* V_tile = K_tile + PARTS * TILE_BYTES;
    char* stages = V_tile + PARTS * TILE_BYTES;          // two of Q and dO
    float* numbers = (float*)(stages + 4 * TILE_BYTES);  // two of lse and delta
    int j = blockIdx.z;
    int row = 16 * warp_number();
    int first = j * ROWS + row;

    int end = at.h + H / G;  // of the heads of the group
    int next = j * ROWS;     // the first query of the stage that is being loaded; at.h is its head
    auto start_queries = [&](int n, int query) {
        start_stage(stages, n, heads_of(qkv, at).q, head_of(dout, at), query);
        int t = query + threadIdx.x % 64;
        Floats from = (threadIdx.x < 64 ? lse : delta) + numbers_at(at);
        cp_async<4>(numbers + n % 2 * THREADS + threadIdx.x, from + t, t < T);
    };
    Heads in = heads_of(qkv, at);
    start_load(K_tile, in.k, j * ROWS, ROWS);
    start_load(V_tile, in.v, j * ROWS, ROWS);
    start_queries(0, next);
    wait_for_stage();

    Rows dK[PARTS] = {}, dV[PARTS] = {};
    // Queries past T come as zeros, lse and delta too. Their P is 1, but dO and dP - delta are 0: so they add nothing
    // to dK or dV.
    for (int n = 0; at.h < end; n++) {
        TileStart Q_tile = stages + n % 2 * 2 * TILE_BYTES;  // the tile of dO lies behind it
        Floats lse_tile = numbers + n % 2 * THREADS;
        int query = next;  // the first one of the stage that is used now
        next += 64;
        if (next >= T) {   // the next head, from the block's first key on
            next = j * ROWS;
            at.h++;
        }
        if (at.h < end) start_queries(n + 1, next);
        EACH(part, PARTS) {
            if (query < j * ROWS + 64 * part) continue;  // all come before these keys
            Scores St, dPt;
            gemm_abt(St, K_tile + part * TILE_BYTES, Q_tile);
            gemm_abt(dPt, V_tile + part * TILE_BYTES, Q_tile + TILE_BYTES);
            finish(St);
            finish(dPt);
            int key = first + 64 * part;
            if (query < key + 15) mask_future(St, query, key, true);
            EACH(i, 8) {
                Floats from = lse_tile + 8 * i + LANE % 4 * 2;  // this lane's columns: two queries
                float2 L = *(float2*)from;
                float2 Delta = *(float2*)(from + 64);
                EACH(e, 4) {  // P^T and dS^T
                    St[i][e] = exp2f(St[i][e] * SCALE2 - (e % 2 ? L.y : L.x) * LOG2_E);
                    dPt[i][e] = St[i][e] * (dPt[i][e] - (e % 2 ? Delta.y : Delta.x));
                }
            }
            gemm_ab(dV[part], St, Q_tile + TILE_BYTES);
            gemm_ab(dK[part], dPt, Q_tile);
            finish(dV[part]);
            finish(dK[part]);
        }
        wait_for_stage();
    }
    Heads to = heads_of(dqkv, at);
    store(to.k, dK, SCALE, K_tile, row, first, angles);
    store(to.v, dV, 1.0f, V_tile, row, first);
}

#endif
