// A tree of at most 64 nodes of one value head, by a CTA whose warps have 32 columns of the state each. The state goes
// through a ring in shared memory; it is read again for every 16 tokens.
#pragma once

#include "cuda/recurrent/walks.cuh"

namespace pagedtree::cuda {

constexpr int kTreeNodes = 64, kTreeChannels = kPassChannels;  // at most
constexpr int kTreeWarps = 4;                                  // at most
constexpr int kTreeColumns = 32;                // of a warp; a lane has 8 neighbours of them, for each of its tokens
constexpr int kSmallTiles = 2;                  // of trees of up to 16 nodes
constexpr int kTile = 8;                        // tokens whose keys and queries are a tile of a product
constexpr int kStages = 4;                      // steps of the state that the ring holds
constexpr int kRowStride = kTreeChannels + 16;  // of keys and queries, and of decays; lanes read without bank conflicts

struct TreeShared {
  uint64_t masks[kTreeNodes];  // the tokens of a token's path, itself included; none where it cannot be reached
  int64_t sums[kTreeNodes];    // of g from the root on, see fixed_point()
  float betas[kTreeNodes];     // 1 without
  float norms[2][kTreeNodes];  // [key or query]: what they are multiplied by
  int32_t jumps[kTreeNodes];   // scratch of link_tree()
};

// The rest of shared memory, whose sizes depend on the call. `tiles`: that are read and solved together.
struct TreeSizes {
  int32_t rows{};                                     // tokens that there is room for: a multiple of 16
  int32_t earlier{};                                  // of them, those before the last tiles
  int32_t weight_stride{};                            // lanes read four weights of 8 tokens without bank conflicts
  int32_t data{}, weights{}, u{}, state{}, decays{};  // where they begin
  int32_t bytes{};

  __host__ __device__ constexpr TreeSizes(int32_t capacity, int32_t tiles, int32_t warps, bool channel_decay) {
    const int32_t together = tiles * kTile;
    rows = (capacity + 2 * kTile - 1) / (2 * kTile) * 2 * kTile;
    earlier = (capacity - 1) / together * together;
    weight_stride = rows + 4;
    data = static_cast<int32_t>(sizeof(TreeShared));
    weights = data + 2 * rows * kRowStride * 2;
    u = weights + 2 * together * weight_stride * 4;
    state = u + warps * earlier * kTreeColumns * 4;
    decays = state + warps * kStages * kStep * kTreeColumns * 4;
    bytes = decays + (channel_decay && tiles == kSmallTiles ? rows * kRowStride * 4 : 0);
  }
};

static_assert(sizeof(TreeShared) % 16 == 0);
static_assert(TreeSizes(kTreeNodes, 4, 1, true).bytes <= 99 << 10, "what every GPU has");

// 8 outputs.
__device__ __forceinline__ uint4* outputs(const DeltaRuleParams& p, int64_t row, int32_t head, int32_t column) {
  return reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + (row * p.num_heads + head) * p.value_dim + column);
}

struct Tree {
  const DeltaRuleParams& p;
  TreeShared& shared;
  int32_t first_row, count;  // of its tokens
  int32_t rows, weight_stride;
  int32_t head, key_head;
  int32_t first_column, column;  // of the CTA, of the warp
  int32_t steps;                 // of 16 channels
  uint16_t* data;                // [key or query, rows, kRowStride]
  int32_t together;
  float* weights;  // [key or query, together, weight_stride]: of the tokens above a token, 0 for others; no keys
                   // without beta
  float* u;        // [earlier, 32]: the warp's columns
  float* decays;   // [rows, kRowStride]: products of decays of channels, in small trees
  float4* state;   // [kStages, 4, 32]: the warp's part of the ring, of which a lane touches its own elements only

  __device__ Tree(const DeltaRuleParams& params, NodeRange of_rows, int32_t of_head, int32_t of_columns, int32_t tiles)
      : p(params), shared(ptx::shared<TreeShared>()), head(of_head), first_column(of_columns) {
    const int32_t warps = static_cast<int32_t>(blockDim.x) / 32, warp = static_cast<int32_t>(threadIdx.x) / 32;
    const TreeSizes sizes(p.tokens.max_nodes, tiles, warps, p.channel_decay);
    char* const begin = reinterpret_cast<char*>(&shared);
    first_row = static_cast<int32_t>(of_rows.begin);
    count = static_cast<int32_t>(min_of<int64_t>(of_rows.size(), p.tokens.max_nodes));
    rows = sizes.rows;
    together = tiles * kTile;
    weight_stride = sizes.weight_stride;
    key_head = head / p.group_size;
    column = first_column + warp * kTreeColumns;
    steps = ceil_div(p.key_dim, kStep);
    data = reinterpret_cast<uint16_t*>(begin + sizes.data);
    weights = reinterpret_cast<float*>(begin + sizes.weights);
    decays = reinterpret_cast<float*>(begin + sizes.decays);
    u = reinterpret_cast<float*>(begin + sizes.u) + warp * sizes.earlier * kTreeColumns;
    state = reinterpret_cast<float4*>(begin + sizes.state) + warp * kStages * 4 * 32;
  }
  __device__ uint16_t* row_of(int which, int32_t i) const { return data + (which * rows + i) * kRowStride; }
  __device__ float* weights_of(int which, int32_t row) const {
    return weights + (which * together + row) * weight_stride;
  }
  // kSmall: from shared memory, where small trees have them.
  template <bool kSmall>
  __device__ PathDecays path_decays(int32_t i) const {
    const int32_t token = min_of(i, count - 1);
    return kSmall ? PathDecays{decays + token * kRowStride, p.key_dim} : path_decays_of(p, first_row + token, head);
  }
};

// Zeros in the CTA's columns of the outputs of rows begin .. end - 1.
__device__ __forceinline__ void clear_rows(const DeltaRuleParams& p, int32_t head, int32_t first_column,
                                           int32_t columns, int64_t begin, int64_t end) {
  const int32_t threads = columns / 8, column = first_column + threadIdx.x % threads * 8;  // of a row
  if (column >= p.value_dim) return;
#pragma unroll 1
  for (int64_t row = begin + threadIdx.x / threads; row < end; row += blockDim.x / threads) {
    *outputs(p, row, head, column) = make_uint4(0, 0, 0, 0);
  }
}

// The same in rows of no tree, by its first and last sequence, and in rows begin .. end - 1, which are left of tree b.
__device__ __forceinline__ void clear_others(const DeltaRuleParams& p, int32_t b, int32_t head, int32_t first_column,
                                             int32_t columns, int64_t begin, int64_t end) {
  if (b == 0 || b + 1 == p.tokens.batch) {
    const NodeRange used = used_rows(p.tokens.cu_nodes, p.tokens.batch, p.tokens.num_rows);
    if (b == 0) clear_rows(p, head, first_column, columns, 0, used.begin);
    if (b + 1 == p.tokens.batch) clear_rows(p, head, first_column, columns, used.end, p.tokens.num_rows);
  }
  clear_rows(p, head, first_column, columns, begin, end);
}

// By one warp: the paths, and the sums of g along them. In each round a token takes over what is known at the end of
// its own stretch of the path.
__device__ __forceinline__ void link_tree(const Tree& t) {
  constexpr int kOfLane = kTreeNodes / 32;
  const int32_t lane = threadIdx.x % 32;
  const DeltaRuleParams& p = t.p;
  int32_t above[kOfLane];
  int64_t sums[kOfLane];
  uint64_t masks[kOfLane];
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    const int32_t i = j * 32 + lane;
    const int64_t row = t.first_row + i;
    above[j] = -2;
    if (i >= t.count) continue;
    above[j] = linked_parent(p.tokens, t.first_row, i);
    masks[j] = uint64_t{1} << i;
    sums[j] = p.channel_decay ? 0 : fixed_point(p.g[row * p.g_token_stride + t.head * p.g_head_stride]);
    t.shared.betas[i] = p.beta != nullptr ? p.beta[row * p.beta_token_stride + t.head * p.beta_head_stride] : 1.0f;
  }
  for (int32_t reach = 1;; reach *= 2) {
    const bool is_last = reach >= t.count;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const int32_t i = j * 32 + lane;
      if (i >= t.count) continue;
      t.shared.masks[i] = is_last && above[j] != -1 ? 0 : masks[j];
      t.shared.sums[i] = sums[j];
      t.shared.jumps[i] = above[j];
    }
    if (is_last) break;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      if (above[j] < 0) continue;
      masks[j] |= t.shared.masks[above[j]];
      sums[j] += t.shared.sums[above[j]];
      above[j] = t.shared.jumps[above[j]];
    }
    __syncwarp();
  }
}

// Starts the copies of products of decays, which copy_rows() completes.
__device__ __forceinline__ void copy_decays(const Tree& t) {
  const int32_t lane = threadIdx.x % 32;
  if (lane * 4 >= t.p.key_dim) return;
  for (int32_t i = threadIdx.x / 32; i < t.count; i += blockDim.x / 32) {
    const float* const from = t.path_decays<false>(i).products + lane * 4;
    ptx::cp_async_16(ptx::smem_addr(t.decays + i * kRowStride + lane * 4), from, true);
  }
}

// Starts the copies of keys and queries; zeros behind the last token and the last channel.
__device__ __forceinline__ void copy_rows(const Tree& t) {
  constexpr int32_t kWords = kTreeChannels / 8;  // of a row
  const DeltaRuleParams& p = t.p;
  const int32_t word = threadIdx.x % kWords, rows = ceil_div(t.count, 2 * kTile) * 2 * kTile;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const int64_t stride = which == 0 ? p.k_token_stride : p.q_token_stride;
    const int64_t head = t.key_head * (which == 0 ? p.k_head_stride : p.q_head_stride);
    const uint16_t* const first = static_cast<const uint16_t*>(which == 0 ? p.k : p.q) + t.first_row * stride + head;
    const bool aligned = reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride % 8 == 0;
    for (int32_t i = threadIdx.x / kWords; i < rows; i += blockDim.x / kWords) {
      const bool valid = i < t.count && word * 8 < p.key_dim;
      const uint16_t* const from = first + (valid ? i * stride + word * 8 : 0);
      uint16_t* const to = t.row_of(which, i) + word * 8;
      if (aligned) {
        ptx::cp_async_16(ptx::smem_addr(to), from, valid);
      } else {
#pragma unroll 1
        for (int e = 0; e < 8; ++e) to[e] = valid ? from[e] : uint16_t{0};
      }
    }
  }
  ptx::cp_async_commit();
  for (int32_t at = threadIdx.x; at < 2 * kTreeNodes; at += blockDim.x)
    t.shared.norms[at / kTreeNodes][at % kTreeNodes] = 1.0f;
}

// For l2norm; a warp for each row.
__device__ __forceinline__ void find_norms(const Tree& t) {
  const int32_t lane = threadIdx.x % 32, rows = ceil_div(t.count, 2 * kTile) * 2 * kTile;
  for (int32_t at = threadIdx.x / 32; at < 2 * rows; at += blockDim.x / 32) {
    const int32_t which = at >= rows, i = at - which * rows;
    const Four x = unpack(*reinterpret_cast<const uint2*>(t.row_of(which, i) + lane * 4), t.p.dtype);
    const float norm = norm_of(t.p, warp_sum(dot(x, x, 0.0f)));
    if (lane == 0) t.shared.norms[which][i] = norm;
  }
}

__device__ __forceinline__ TokenPairs pairs_of(const Tree& t, int32_t i, int32_t step) {
  const int32_t channel = step * kStep + static_cast<int32_t>(threadIdx.x % 4) * 4;
  return {*reinterpret_cast<const uint2*>(t.row_of(0, i) + channel),
          *reinterpret_cast<const uint2*>(t.row_of(1, i) + channel)};
}

// Writes the weights of some blocks for token `row` of those that are together. `sums`: products of keys and of queries
// with the keys of these blocks; decay(m): between token m and this one. `above`: which are ancestors.
template <int kBlocks, typename Decay>
__device__ __forceinline__ void put_weights(const Tree& t, int32_t i, int32_t row, int32_t block, uint32_t above,
                                            const float (&sums)[kBlocks][4], Decay decay) {
  const int32_t pair = threadIdx.x % 4;
  const float key_norm = t.shared.norms[0][i], query_norm = t.shared.norms[1][i];
  float keys[kBlocks * 2], queries[kBlocks * 2];
#pragma unroll
  for (int j = 0; j < kBlocks * 2; ++j) {
    const int32_t place = j / 2 * kTile + pair * 2 + j % 2, m = block * kTile + place;
    const float between = decay(m), norm = t.shared.norms[0][m];
    const bool is_above = (above >> place & 1) != 0;
    keys[j] = is_above && t.p.beta != nullptr ? decayed(sums[j / 2][j % 2], key_norm * norm, between) : 0.0f;
    queries[j] = is_above ? decayed(sums[j / 2][2 + j % 2], query_norm * norm, between) : 0.0f;
  }
#pragma unroll
  for (int half = 0; half < kBlocks; ++half) {
    const int32_t m = (block + half) * kTile + pair * 2;
    *reinterpret_cast<float2*>(t.weights_of(0, row) + m) = make_float2(keys[half * 2], keys[half * 2 + 1]);
    *reinterpret_cast<float2*>(t.weights_of(1, row) + m) = make_float2(queries[half * 2], queries[half * 2 + 1]);
  }
}

// Which of the 16 tokens from `block` on are on the path of token i.
__device__ __forceinline__ uint32_t ancestors(const Tree& t, int32_t i, int32_t block) {
  return i < t.count ? static_cast<uint32_t>(t.shared.masks[i] >> block * kTile) & 0xffffu : 0;
}

// Weights of the tokens of `tiles` tiles from `begin` on, with one decay for each head: products of a tile with the
// keys of two blocks of 8 tokens are a warp's job.
template <typename T>
__device__ __forceinline__ void weigh_tree(const Tree& t, int32_t begin, int32_t tiles) {
  const int32_t quad = threadIdx.x % 32 / 4;
  for (int32_t job = threadIdx.x / 32;; job += blockDim.x / 32) {
    int32_t tile = 0, of_tile = job;
    for (; tile < tiles && of_tile > (begin / kTile + tile) / 2; ++tile) of_tile -= (begin / kTile + tile) / 2 + 1;
    if (tile == tiles) break;
    const int32_t block = of_tile * 2, row = tile * kTile + quad, i = begin + row;
    const uint32_t above = ancestors(t, i, block);
    float sums[2][4] = {};
    if (__any_sync(~0u, above != 0)) {
#pragma unroll 4
      for (int32_t step = 0; step < t.steps; ++step) {
        const TokenPairs own = pairs_of(t, i, step);
        add_key_product<T>(sums[0], own, pairs_of(t, block * kTile + quad, step).key);
        add_key_product<T>(sums[1], own, pairs_of(t, block * kTile + kTile + quad, step).key);
      }
    }
    const int64_t path = t.shared.sums[i];
    put_weights(t, i, row, block, above, sums, [&](int32_t m) { return decay_between(path, t.shared.sums[m]); });
  }
}

// The lane's channels of a step.
__device__ __forceinline__ Four decays_of(const PathDecays& decays, int32_t step) {
  return decays.four(step * kStep + static_cast<int32_t>(threadIdx.x % 4) * 4);
}

// The same with decays of channels, but for tokens that walk: products of kSide tiles with as many blocks are a job.
// Keys are costly to prepare, but small trees have no more than three jobs of one tile.
template <typename T, int kSide>
__device__ __forceinline__ void weigh_decayed(const Tree& t, int32_t begin, int32_t tiles) {
  constexpr DType kDType = kTypeOf<T>;
  const int32_t quad = threadIdx.x % 32 / 4, before = begin / (kSide * kTile);
  for (int32_t job = threadIdx.x / 32;; job += blockDim.x / 32) {
    int32_t of_tiles = job, place = 0;
    for (; of_tiles > before + place; ++place) of_tiles -= before + place + 1;
    if (place * kSide >= tiles) break;
    const int32_t block = of_tiles * kSide, row = place * kSide * kTile + quad;
    Four decays[2 * kSide];  // of tokens of the tiles and of the blocks, a step ahead
    const auto token = [&](int of) {
      return of < kSide ? begin + row + of * kTile : (block + of - kSide) * kTile + quad;
    };
    uint32_t any = 0;
#pragma unroll
    for (int tile = 0; tile < kSide; ++tile) any |= ancestors(t, token(tile), block) & ((1u << kSide * kTile) - 1);
    const int32_t steps = __any_sync(~0u, any != 0) ? t.steps : 0;
    float sums[kSide][kSide][4] = {}, low[kSide][kSide][4] = {};  // [tile, block]
    const auto load_decays = [&](int of, int32_t step) {
      decays[of] = decays_of(t.path_decays<kSide == 1>(token(of)), step);
    };
#pragma unroll
    for (int of = 0; of < 2 * kSide; ++of) load_decays(of, 0);
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      Four keys[kSide];
#pragma unroll
      for (int half = 0; half < kSide; ++half) {
        keys[half] = undecayed(unpack(pairs_of(t, token(kSide + half), step).key, kDType), decays[kSide + half]);
        load_decays(kSide + half, step + 1);
      }
#pragma unroll
      for (int tile = 0; tile < kSide; ++tile) {
        const StepRows rows = decayed_rows(rows_of(pairs_of(t, token(tile), step), kDType), decays[tile]);
        load_decays(tile, step + 1);
#pragma unroll
        for (int part = 0; part < 2 * kSide; ++part) {
          const int half = part % kSide, e = part / kSide;
          const Four& key = keys[half];
          add_exact_product(sums[tile][half], low[tile][half], rows.a[e], key.x[e * 2], key.x[e * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kSide; ++tile) {
      const int32_t i = token(tile);
#pragma unroll
      for (int j = 0; j < 4 * kSide; ++j) {
        sums[tile][j / 4][j % 4] = joined(sums[tile][j / 4][j % 4], low[tile][j / 4][j % 4]);
      }
      if (t.path_decays<kSide == 1>(i).walks()) continue;
      put_weights(t, i, row + tile * kTile, block, ancestors(t, i, block), sums[tile], [](int32_t) { return 1.0f; });
    }
  }
}

// The weights of one token, `row` of those that are together.
struct TreePath {
  const Tree& t;
  int32_t of_group;

  __device__ int64_t row(int32_t i) const { return t.first_row + i; }
  __device__ float key_norm(int32_t i) const { return t.shared.norms[0][i]; }
  __device__ int32_t above(int32_t i) const { return linked_parent(t.p.tokens, t.first_row, i); }
  __device__ void put(int32_t m, float key, float query) const {
    t.weights_of(0, of_group)[m] = t.p.beta != nullptr ? key : 0.0f;
    t.weights_of(1, of_group)[m] = query;
  }
};

// Those of the tokens from `begin` on that walk; a warp for each.
__device__ __forceinline__ void weigh_by_walks(const Tree& t, int32_t begin) {
  const int32_t lane = threadIdx.x % 32, i = begin + lane;
  const bool walks = lane < t.together && i < t.count && t.shared.masks[i] != 0 && t.path_decays<false>(i).walks();
  for (uint32_t left = __ballot_sync(~0u, walks); left != 0; left &= left - 1) {
    const int32_t row = __ffs(static_cast<int>(left)) - 1;
    if (row % (blockDim.x / 32) != threadIdx.x / 32) continue;
    for (int32_t m = lane; m < t.rows; m += 32) t.weights_of(0, row)[m] = t.weights_of(1, row)[m] = 0.0f;
    __syncwarp();
    walk(t.p, t.head, TreePath{t, row}, begin + row, t.shared.norms[1][begin + row]);
  }
}

// ---- the state

// Four neighbours in memory, at multiples of 16 bytes: columns of a channel, or channels of a column.
enum class StateWords { kOfColumns, kOfChannels };

// A lane's elements of the state in memory: 4 x 4 of each step, channels 4 pair .. 4 pair + 3 and columns 4 quad ..
// 4 quad + 3. In the ring they are 4 words, each of neighbours in memory.
template <StateWords kWords>
struct StateCopies {
  static constexpr bool kByChannel = kWords == StateWords::kOfChannels;
  const float *first, *next;  // of the first step, of the next one
  float4* ring;               // the lane's words
  int64_t step_stride, word_stride;
  int32_t left, step = 0, steps;
  bool inside, ends_inside;  // the last step, too

  __device__ StateCopies(const Tree& t, int64_t state_index) {
    const int32_t lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
    const int64_t* const strides = t.p.state_strides;
    first = t.p.state + max_of<int64_t>(state_index, 0) * strides[0] + t.head * strides[1] + pair * 4 * strides[2] +
            (t.column + quad * 4) * strides[3];
    next = first;
    ring = t.state + lane;
    step_stride = kStep * strides[2];
    word_stride = strides[kByChannel ? 3 : 2];
    steps = t.steps;
    left = ceil_div(t.count, t.together) * steps;
    inside = state_index >= 0 && t.column + quad * 4 < t.p.value_dim;
    ends_inside = inside && (steps - 1) * kStep + pair * 4 < t.p.key_dim;
  }
  // Starts the copies of the next step, if any, into place `stage`. Zeros where there is no state.
  __device__ __forceinline__ void start(int32_t stage) {
    if (left > 0) {
      const bool valid = step + 1 < steps ? inside : ends_inside;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::cp_async_16(ptx::smem_addr(ring + (stage * 4 + j) * 32), next + j * word_stride, valid);
      }
      const bool wraps = ++step == steps;
      next = wraps ? first : next + step_stride;
      if (wraps) step = 0;
      --left;
    }
    ptx::cp_async_commit();
  }
};

// A lane's 8 values of each tile's token, 16-bit.
template <int kTiles>
struct Values {
  uint4 x[kTiles];

  __device__ __forceinline__ Values(const Tree& t, int32_t begin) {
    const DeltaRuleParams& p = t.p;
    const int32_t lane = threadIdx.x % 32, column = t.column + lane % 4 * 8;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int32_t i = begin + tile * kTile + lane / 4;
      x[tile] = make_uint4(0, 0, 0, 0);
      if (i >= t.count || column >= p.value_dim) continue;
      const uint16_t* const from =
          static_cast<const uint16_t*>(p.v) + (t.first_row + i) * p.v_token_stride + t.head * p.v_head_stride + column;
      if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
        x[tile] = *reinterpret_cast<const uint4*>(from);
      } else {
        const uint2 low = load_pairs(from, false), high = load_pairs(from + 4, false);
        x[tile] = make_uint4(low.x, low.y, high.x, high.y);
      }
    }
  }
  __device__ __forceinline__ Four four(int tile, int half, DType dtype) const {
    return unpack(half == 0 ? make_uint2(x[tile].x, x[tile].y) : make_uint2(x[tile].z, x[tile].w), dtype);
  }
};

// Of a lane's 8 columns, for each tile's token: what is left of its value, which is u once it has been multiplied by
// beta, and its output without the scale.
template <int kTiles>
struct Sums {
  float left[kTiles][8], out[kTiles][8];
};

// By one warp: what the tokens of kTiles tiles from `begin` on read of the first state. `stage`: of the ring. Sums has
// room for kRoom tiles.
template <typename T, int kTiles, bool kChannelDecay, int kRoom, typename Copies>
__device__ __forceinline__ void read_state(const Tree& t, Copies& copies, int32_t& stage, int32_t begin,
                                           Sums<kRoom>& sums) {
  float high[kTiles][4][4] = {}, low[kTiles][4][4] = {};  // columns 4 n + i of the product's columns n
  int32_t tokens[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    tokens[tile] = min_of<int32_t>(begin + tile * kTile + threadIdx.x % 32 / 4, t.rows - 1);
  }
  Four decays[kTiles];  // of channels, a step ahead
#pragma unroll
  for (int tile = 0; kChannelDecay && tile < kTiles; ++tile)
    decays[tile] = decays_of(t.path_decays<kRoom == kSmallTiles>(tokens[tile]), 0);
  for (int32_t step = 0; step < t.steps; ++step) {
    ptx::cp_async_wait<kStages - 2>();
    float state[4][4];  // [word, element]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 word = copies.ring[(stage * 4 + j) * 32];
      state[j][0] = word.x, state[j][1] = word.y, state[j][2] = word.z, state[j][3] = word.w;
    }
    copies.start((stage + kStages - 1) % kStages);
    stage = (stage + 1) % kStages;
    TokenPairs pairs[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) pairs[tile] = pairs_of(t, tokens[tile], step);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      StepRows rows = rows_of(pairs[tile], kTypeOf<T>);
      if constexpr (kChannelDecay) {
        rows = decayed_rows(rows, decays[tile]);
        decays[tile] = decays_of(t.path_decays<kRoom == kSmallTiles>(tokens[tile]), step + 1);
      }
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        const int half = part / 4, n = part % 4;
        const float first = Copies::kByChannel ? state[n][half * 2] : state[half * 2][n];
        const float second = Copies::kByChannel ? state[n][half * 2 + 1] : state[half * 2 + 1][n];
        if constexpr (kChannelDecay) {
          add_exact_product(high[tile][n], low[tile][n], rows.a[half], first, second);
        } else {
          add_split_product(high[tile][n], low[tile][n], rows.a[half], first, second);
        }
      }
    }
  }
  const Values<kTiles> values(t, begin);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int32_t i = tokens[tile];
    const float decay = kChannelDecay ? 1.0f : decay_between(t.shared.sums[i], 0);
    const float key_norm = t.shared.norms[0][i], query_norm = t.shared.norms[1][i];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float value = values.four(tile, e / 4, kTypeOf<T>).x[e % 4];
      const float key = joined(high[tile][e % 4][e / 4], low[tile][e % 4][e / 4]);
      const float query = joined(high[tile][e % 4][2 + e / 4], low[tile][e % 4][2 + e / 4]);
      sums.left[tile][e] = left_of(t.p, value, decayed(key, key_norm, decay));
      sums.out[tile][e] = decayed(query, query_norm, decay);
    }
  }
}

}  // namespace pagedtree::cuda
