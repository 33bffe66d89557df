// Hopper: the ring of stages and its producer warps. A stage has K or V of 64 or 128 keys, in order of use: K0 K1 V0 K2
// V1 and so on. A latent stage is both and arrives in parts: its first columns are used while the others are in flight.
#pragma once

#include "cuda/attention/cache_maps.cuh"
#include "cuda/attention/stage.cuh"
#include "cuda/attention/trace.cuh"

namespace pagedtree::cuda {

template <typename T, typename Kv, int kHeadDim, int kMTile, int kHeadDimV = kHeadDim>
struct Sm90Instance : InstanceOf<T, Kv, tile_shape(MatrixEngine::kWgmma, kHeadDim, kHeadDimV, kMTile)> {
  using Base = InstanceOf<T, Kv, tile_shape(MatrixEngine::kWgmma, kHeadDim, kHeadDimV, kMTile)>;
  static constexpr int kConsumers = Base::kShape.warps() * 32;           // threads
  static constexpr int kProducers = Base::kShape.producer_warps() * 32;  // threads
  static constexpr int kGroupRows = 64;                                  // rows of a warpgroup
  // Softmax overlaps P V, unless registers do not suffice for both; then two groups alternate instead.
  static constexpr bool kOverlapsSoftmax = kHeadDim < 256 || kMTile == kGroupRows;
  static constexpr bool kDecodes = kIsFloat8<Kv>;
  static constexpr bool kLatent = Base::kShape.is_latent(), kTwoGroups = Base::kShape.warps() > 4;
  static constexpr int kConsumerRegisters = kTwoGroups                    ? (!kLatent ? 216 : 224)
                                            : Base::kShape.max_ctas() > 1 ? 200
                                                                          : 240;
  static constexpr int kProducerRegisters = kTwoGroups                    ? 504 - 2 * kConsumerRegisters
                                            : Base::kShape.max_ctas() > 1 ? 56
                                                                          : 168;
  // Parts of a stage with separate barriers: a latent row's V columns in halves, and its other columns.
  static constexpr int kParts = kLatent ? 3 : 1;
  static constexpr int kPartPanels = kLatent ? 4 : kHeadDim / 64;  // the last part has the rest
  static constexpr int kTiles = Base::kShape.keys / kKvTile;       // KV tiles per stage
  static constexpr uint32_t kQs = Base::kShape.num_qs();
  // Stage layout: eight keys' rows of kTogether panels of 64 columns, then the next eight keys', so that one box has
  // all panels. Latent stages arrive in parts, one panel after another.
  static constexpr uint32_t kTogether = kLatent ? 1 : kHeadDim / 64;
  static constexpr uint32_t kEightKeys = kTogether * 1024;  // bytes between groups of eight keys
  static constexpr uint32_t kPanelStep = kLatent ? Base::kShape.keys * 128 : 1024;  // bytes between panels
  static constexpr uint32_t kPanelBytes = Base::kShape.keys * 128;                  // per stage
  using QRows = Panels<kHeadDim * 2, kGroupRows>;
  static_assert(kHeadDim % 64 == 0 && (!kLatent || kHeadDim / 64 == 2 * kPartPanels + 1));
  static_assert(kMTile <= kProducers && kMTile % kGroupRows == 0 && Base::kAtoms == 1);
  // setmaxnreg waits forever if consumers ask for more registers than the CTA was launched with.
  static constexpr int kFirstRegisters = min_of(255, 65536 / (Base::kThreads * Base::kShape.max_ctas())) / 8 * 8;
  static_assert(kConsumers * kConsumerRegisters + kProducers * kProducerRegisters <= Base::kThreads * kFirstRegisters);
};

// Named barriers; 0 is __syncthreads().
enum Sm90Barrier : unsigned {
  kProducersMeet = 1,
  kJoinersMeet,
  kAllMeet,
  kTurns,
  kGroupsMeet = 6,
  kMaximaReady = 8,
  kWeightsReady,
};

// A work tile for the consumers, in shared memory, because accumulators fill their registers.
struct WorkTile : RowPiece {
  KeyBounds bounds;
  RowSpan counted;  // rows to store: all, or a query's

  template <typename I>
  __device__ __forceinline__ StageRange stages() const {
    return StageRange::of<I>(bounds, at.kv_tile, kv_end);
  }
};

__device__ __forceinline__ uint4 load_chunk(const uint16_t* from) {
  uint4 words{};
#pragma unroll 1
  for (int i = 0; i < 8; i += 2) {
    words = make_uint4(words.y, words.z, words.w, uint32_t{from[i]} | uint32_t{from[i + 1]} << 16);
  }
  return words;
}

// Q and the stages follow in memory.
template <typename I>
struct alignas(1024) Sm90Shared {
  RangeIterator walks[I::kShape.producer_warps()];  // per warp; the first has the cuts
  WorkTile given[2 * I::kQs];                       // includes one in the epilogue
  TreeWindow row_windows[I::kQs][I::kMTile];
  KeyReader readers[I::kShape.producer_warps()];
  uint64_t full[I::kShape.max_stages()][I::kParts], empty[I::kShape.max_stages()][I::kParts];
  uint64_t is_published[I::kQs], is_used[I::kQs];  // a Q with row_windows
  unsigned is_poisoned;                            // true if a row tile is: see join()
  RowSpan counted[I::kShape.producer_warps()];     // per warp; WorkTile::counted of single queries
  uint32_t seen[2][I::kShape.producer_warps()][I::kWords];
  KeyRow rows[I::kLatent ? 1 : 2][I::kShape.keys];  // two stages: V comes after the next K
#if defined(PAGEDTREE_TRACE)
  uint32_t traced[3];
#endif
  // Exchanged between groups with the same rows; first used for score factors.
  float of_rows[I::kShape.column_warps][I::kLatent || I::kScalesRows ? I::kMTile : 1];

  __device__ __forceinline__ unsigned char* q(uint32_t group, uint32_t given = 0) {
    return reinterpret_cast<unsigned char*>(this) + I::kShape.header_bytes() + given % I::kQs * I::kShape.q_bytes() +
           group * I::QRows::kBytes;
  }
  __device__ __forceinline__ uint4* weights() { return reinterpret_cast<uint4*>(q(0) + I::kQs * I::kShape.q_bytes()); }
  __device__ __forceinline__ unsigned char* stage(int i) {
    return q(0) + I::kQs * I::kShape.q_bytes() + I::kShape.weight_bytes() + i * I::kShape.stage_bytes(2);
  }
  __device__ __forceinline__ KeyRow (&rows_of(int32_t stage))
      [I::kShape.keys] { return rows[I::kLatent ? 0 : stage / I::kTiles & 1]; }
  // Called by one thread. Producer threads arrive at `full`, consumer warps at `empty`. A latent part is released by
  // two groups: as keys and as values.
  __device__ __forceinline__ void init_barriers(int stages) {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
#pragma unroll
      for (int part = 0; part < I::kParts; ++part) {
        ptx::mbar_init(&full[i][part], I::kProducers);
        ptx::mbar_init(&empty[i][part], part < 2 ? I::kShape.warps() : I::kShape.warps() / 2);
      }
    }
    for (uint32_t i = 0; i < I::kQs; ++i) {
      ptx::mbar_init(&is_published[i], 2 * I::kProducers);  // per thread: its writes, and its copies
      ptx::mbar_init(&is_used[i], I::kShape.warps());
    }
    ptx::fence_mbar_init();
    is_poisoned = 0;
#if defined(PAGEDTREE_TRACE)
    traced[0] = traced[1] = traced[2] = 0;
#endif
  }
};

// A role's position in the ring. `parity` is of the phase of `full` and, inverted, of `empty`.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    ++stage;
    if (stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Bounds of tree windows, for the tile's rows and the thread's row. Each producer warp computes them.
struct TreeWindows {
  int32_t lowest = 0, plain_begin = 0;  // as in KeyBounds; 0 without windows
  TreeWindow row{0, 0};

  __device__ __forceinline__ void find(const AttentionParams& p, const RowTile& tile, uint32_t thread) {
    *this = {INT32_MAX};
#pragma unroll 1
    for (uint32_t block = 0; block < tile.rows; block += 32) {
      Visibility seen = tile.visibility(p, block + thread % 32, {});
      seen.narrow(tree_window(seen.words, p.mask_words, seen.num_bits, seen.tree_start, p.keys_in_window));
      lowest = min_of(lowest, seen.lowest());
      plain_begin = max_of(plain_begin, seen.begin);
      if (block == thread / 32 * 32) row = {seen.begin, seen.first_bit};
    }
    lowest = __reduce_min_sync(kWholeWarp, lowest);
    plain_begin = __reduce_max_sync(kWholeWarp, plain_begin);
  }
  // Returns the tile's bounds. Causal ranges begin and end later for later rows.
  __device__ __forceinline__ KeyBounds bounds(const AttentionParams& p, const RowTile& tile, int32_t kv_end) const {
    const Visibility early = tile.visibility(p, 0, {lowest, 0}), late = tile.visibility(p, tile.rows, {plain_begin, 0});
    // A stage may extend past the last KV tile; those keys are masked.
    const auto end = static_cast<int32_t>(min_of<uint32_t>(INT32_MAX, kv_end * uint32_t{kKvTile}));
    return {early.begin, min_of(late.highest(), end), late.begin, min_of(early.end, end)};
  }
};

// Producer: publishes row tiles and fills the ring. Unmasked stages use TMA where maps exist, others cp.async per row.
template <typename I>
class Producer {
 public:
  __device__ __forceinline__ Producer(const AttentionParams& params, const CallShape& call, const CacheMaps& maps,
                                      Sm90Shared<I>& of_cta)
      : p_(params), call_(call), maps_(maps), shared_(of_cta) {}
  bool by_query = false;  // true in the pass by query: see join()

  // A tile without rows ends the range.
  __device__ __forceinline__ void produce(RangeIterator& own, const TreeWindows& windows) {
    const RowTile& tile = own.tile;
    const KeyBounds bounds = windows.bounds(p_, tile, own.kv_end);
    StageRange stages = StageRange::of<I>(bounds, own.at.kv_tile, own.kv_end);
    stages.first = min_of(stages.first, stages.end);
    KeyReader& reader = shared_.readers[thread() / 32];    // in memory: producers have few registers
    __syncwarp();                                          // after all reads of the previous reader
    reader.open(p_, tile, bounds.highest, thread() % 32);  // later keys are zero
    __syncwarp();
    KeyBounds boxes = bounds;
    if (maps_.box == 0) boxes.plain_end = 0;
    const auto has_boxes = [&](int32_t stage) { return !I::kDecodes && boxes.is_unmasked(stage * kKvTile, kKeys); };
    const auto find_page = [&](int32_t stage) {
      return reader.page(p_, stage * kKvTile + (has_boxes(stage) ? key_of_box() : own_key()));
    };
    // Masked V rows may hold NaN and are not read. Masked K rows may be: their scores are unused.
    const auto write_rows = [&](int32_t stage, int32_t page) {
      if (has_boxes(stage)) return;
      const int32_t first_key = stage * kKvTile, key = own_key();
      const bool is_attended =
          bounds.is_unmasked(first_key, kKeys) || any_row_attends(tile, bounds, windows.row, first_key, key);
      __syncwarp();  // after all reads of the previous rows
      if (thread() % 32 < kOwnKeys) {
        KeyRow row = reader.template row<typename I::Kv>(p_, first_key + key, page);
        if (!is_attended) (I::kLatent ? row.k : row.v) = nullptr;
        shared_.rows_of(stage)[key] = row;
      }
      __syncwarp();
    };
    // With a single Q, the next tile's Q waits for its release, so its second K is issued first.
    const bool waits = I::kQs == 1 && !I::kLatent && published_ > 0 && stages.first + kTiles < stages.end;
    const int32_t publishes_at = stages.first + (waits ? kTiles : 0);
    int32_t page_before = -1, page = -1;
    for (int32_t stage = stages.first - kTiles; stage < stages.end + kTiles; stage += kTiles) {
      const int32_t last = stage - kTiles, next = stage + kTiles;
      const int32_t next_page = next < stages.end ? find_page(next) : -1;
      if (stages.first <= stage && stage < stages.end) {
        // A pair's first latent stage is decoded while the second one is in flight.
        const bool has_second = (stage - stages.first) % 2 == 0 && next < stages.end;
        has_boxes(stage) ? fill_boxes(maps_.k, tile, stage, page)
                         : fill_rows(shared_.rows_of(stage), &KeyRow::k, I::kLatent && has_second);
      }
      if (stage == publishes_at) publish(own, bounds, windows.row, stage < stages.end);
      if (!I::kLatent && last >= stages.first) {
        has_boxes(last) ? fill_boxes(maps_.v, tile, last, page_before) : fill_rows(shared_.rows_of(last), &KeyRow::v);
      }
      if (next < stages.end) write_rows(next, next_page);
      page_before = page;
      page = next_page;
    }
    if constexpr (I::kDecodes) decode_parts(0);
  }

  // Releases the end marker, the last tile published.
  __device__ __forceinline__ void use_up_end() {
    if (thread() % 32 < I::kConsumers / I::kProducers) ptx::mbar_arrive(&shared_.is_used[(published_ - 1) % I::kQs]);
  }
  // Drains the copies before the thread exits.
  __device__ __forceinline__ void finish() { ptx::cp_async_wait<0>(); }

 private:
  // Publishes the work tile once its Q buffer has been released.
  __device__ __forceinline__ void publish(RangeIterator& own, const KeyBounds& bounds, const TreeWindow& row,
                                          bool with_q) {
    if (thread() == 0 && own.tile.rows > 0 && !own.is_whole() && !by_query) record_cut(own, pieces_of<I>(call_));
    const uint32_t place = published_ % I::kQs;
    trace<I>(shared_, kReleaseWaits);
    ptx::mbar_wait(&shared_.is_used[place], published_ / I::kQs % 2 ^ 1);
    trace<I>(shared_, kUsed);
    if (thread() == 0) shared_.given[published_ % (2 * I::kQs)] = {own, bounds, counted(own.tile)};
    if (thread() < I::kMTile) shared_.row_windows[place][thread()] = row;
    if (with_q) copy_q(own.tile);
    trace<I>(shared_, kQueriesStarted);
    ptx::mbar_arrive(&shared_.is_published[place]);
    ptx::cp_async_mbar_arrive(&shared_.is_published[place]);
    ++published_;
  }
  // Copies Q for wgmma; zeros past the last row of whole groups and past the last column.
  __device__ __forceinline__ void copy_q(TileRows tile) {  // by value: copies may change memory
    constexpr uint32_t kChunks = I::kHeadDim / 8, kLanes = min_of<uint32_t>(kChunks, 32),
                       kRows = I::kProducers / kLanes;
    const uint32_t chunks = static_cast<uint32_t>(p_.head_dim) / 8, rows = ceil_div(tile.rows, kGroup) * kGroup;
#pragma unroll 1
    for (uint32_t row = thread() / kLanes; row < rows; row += kRows) {
      const bool has_row = row < tile.rows;
      const uint32_t own = has_row ? row : 0;
      const uint16_t* from = static_cast<const uint16_t*>(p_.q) + tile.token(p_, own) * p_.q_token_stride +
                             tile.head(p_, own) * p_.q_head_stride;
#pragma unroll
      for (uint32_t chunk = thread() % kLanes; chunk < kChunks; chunk += kLanes) {
        unsigned char* const to = shared_.q(row / kGroup, published_) + I::QRows::offset(row % kGroup, chunk);
        const bool has = has_row && chunk < chunks;
        if (call_.q_aligned) {
          ptx::cp_async_16(ptx::smem_addr(to), from + chunk * 8, has);
        } else {
          *reinterpret_cast<uint4*>(to) = has ? load_chunk(from + chunk * 8) : uint4{};
        }
      }
    }
  }

  static constexpr int kKeys = I::kShape.keys, kTiles = I::kTiles;
  static constexpr uint32_t kPanelBytes = I::kPanelBytes, kGroup = I::kGroupRows;
  static constexpr int32_t kPanels = I::kPartPanels;
  using PanelRows = Panels<128, kKeys>;
  // Recomputed to save a register. Producer threads follow the consumers.
  __device__ __forceinline__ static uint32_t thread() { return ptx::thread_index() - I::kConsumers; }

  // The keys whose addresses a warp finds: it copies kRowsAtOnce neighbours per step.
  static constexpr uint32_t kOwnKeys = kKeys / I::kShape.producer_warps();
  static constexpr uint32_t kRowsAtOnce = I::kDecodes ? 8 : 4;

  __device__ __forceinline__ int32_t own_key() const {
    const uint32_t warp = thread() / 32, lane = thread() % kOwnKeys;
    return static_cast<int32_t>((lane / kRowsAtOnce * I::kShape.producer_warps() + warp) * kRowsAtOnce +
                                lane % kRowsAtOnce);
  }

  __device__ __forceinline__ RowSpan counted(const RowTile& tile) const {
    return by_query ? shared_.counted[thread() / 32] : RowSpan{0, tile.rows};
  }
  // True if a stored row attends to the key. Each thread computes its row's mask. Synchronizes the producers.
  __device__ __forceinline__ bool any_row_attends(const RowTile& tile, const KeyBounds& bounds, const TreeWindow& row,
                                                  int32_t first_key, int32_t key) {
    if (tile.tree_len < 0 && !by_query) return first_key + key >= bounds.lowest;
    const Visibility mine = tile.visibility(p_, thread(), row);
    auto& seen = shared_.seen[calls_++ & 1];  // double-buffered
#pragma unroll 1
    for (int w = 0; w < I::kWords; ++w) {
      const uint32_t word = counted(tile).has(thread()) ? mine.visible32(first_key + w * kMaskWordBits) : 0;
      const uint32_t of_warp = __reduce_or_sync(kWholeWarp, word);
      if (thread() % 32 == 0) seen[thread() / 32][w] = of_warp;
    }
    ptx::barrier_sync(kProducersMeet, I::kProducers);
    uint32_t any = 0;
#pragma unroll
    for (int warp = 0; warp < I::kShape.producer_warps(); ++warp) any |= seen[warp][key / kMaskWordBits];
    return (any >> key % kMaskWordBits & 1u) != 0;
  }

  // One box per thread, neighbours in different warps: a warp issues its boxes serially, about 100 cycles each.
  __device__ __forceinline__ static uint32_t own_box() {
    constexpr uint32_t kStarters = PAGEDTREE_STARTERS, kNone = 1u << 16;
    const bool starts = kStarters == I::kShape.producer_warps() || thread() / 32 < kStarters;
    return starts ? thread() % 32 * kStarters + thread() / 32 : kNone;
  }
  __device__ __forceinline__ int32_t key_of_box() const {
    return static_cast<int32_t>(own_box() * static_cast<uint32_t>(maps_.box) % kKeys);
  }
  __device__ __forceinline__ void fill_boxes(const ptx::TensorMap& map, const RowTile& tile, int32_t stage,
                                             int32_t page) {
    constexpr int32_t kTogether = I::kTogether;  // panels per box
    const auto panel = static_cast<int32_t>(own_box() * static_cast<uint32_t>(maps_.box) / kKeys) * kTogether;
    const int32_t key = key_of_box();
    const auto offset = static_cast<int32_t>(p_.by_page_size.remainder(static_cast<uint32_t>(stage * kKvTile + key)));
    // An invalid page is past the map's end and reads as zeros.
    const auto inside = static_cast<int32_t>(min_of(static_cast<uint32_t>(page), p_.pages_end));
    const int32_t map_page = inside * maps_.page_heads + tile.kv_head * maps_.head_pages;
#pragma unroll 1  // producers have few registers
    for (int32_t part = 0; part < I::kParts; ++part) {
      const int32_t first = part * kPanels, panels = panels_of(part);
      wait_until_empty(part);
      uint64_t* const full = &shared_.full[place_.stage][part];
      if (thread() == 0) {
        ptx::mbar_arrive_expect(full, static_cast<uint32_t>(panels) * kPanelBytes);
      } else {
        ptx::mbar_arrive(full);
      }
      if (panel < panels) {
        ptx::tma_load_5d(shared_.stage(place_.stage) + (first + panel) * I::kPanelStep + key / 8 * I::kEightKeys, &map,
                         0, 0, tile.kv_head * maps_.head_panels + first + panel, offset / 8, map_page, full);
      }
    }
    trace<I>(shared_, kSlotStarted);
    place_.advance(call_.stages);
  }

  // A thread's chunks per panel: every kRowsAtOnce * producer_warps()th key.
  static constexpr uint32_t kWidth = 32 / kRowsAtOnce, kStep = I::kProducers / kWidth, kSteps = kKeys / kStep;
  // Offset of the first chunk. Codes go where the first half of their fp16 values will be, to be decoded in place.
  __device__ __forceinline__ static uint32_t first_chunk() {
    const uint32_t row = thread() / kWidth;
    return row / 8 * I::kEightKeys + PanelRows::offset(row % 8, thread() % kWidth * (8 / kWidth));
  }
  static constexpr uint32_t kStepBytes = kStep / 8 * I::kEightKeys;

  __device__ __forceinline__ void fill_rows(const KeyRow (&rows)[kKeys], const char* KeyRow::* which,
                                            bool decodes_later = false) {
    const uint32_t to = ptx::smem_addr(shared_.stage(place_.stage)) + first_chunk();
    constexpr uint32_t kAtOnce = min_of<uint32_t>(kSteps, 4);  // producers have few registers
#pragma unroll 1
    for (int32_t part = 0; part < I::kParts; ++part) {
      const int32_t panels = panels_of(part);
      wait_until_empty(part);
#pragma unroll 1
      for (uint32_t first = 0; first < kSteps; first += kAtOnce) {
        const char* from[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) from[i] = rows[thread() / kWidth + (first + i) * kStep].*which;
#pragma unroll
        for (int32_t panel = 0; panel < kPanels; ++panel) {
          if (I::kLatent && panel >= panels) break;
          const int32_t column = part * kPanels + panel;  // in panels
#pragma unroll
          for (uint32_t i = 0; i < kAtOnce; ++i) {
            ptx::cp_async_16(to + column * I::kPanelStep + (first + i) * kStepBytes,
                             from[i] + column * 64 * sizeof(typename I::Kv) + thread() % kWidth * 16,
                             from[i] != nullptr);
          }
        }
      }
      if constexpr (I::kDecodes) {
        ptx::cp_async_commit();
      } else {
        ptx::cp_async_mbar_arrive(&shared_.full[place_.stage][part]);
      }
    }
    trace<I>(shared_, kSlotStarted);
    place_.advance(call_.stages);
    if constexpr (I::kDecodes) {
      copied_ += I::kParts;
      decode_parts(I::kLatent ? (decodes_later ? I::kParts : 0) : 2);  // overlaps the new copies
    }
  }

  // Decodes the oldest copied parts until `left` remain.
  __device__ __forceinline__ void decode_parts(int left) {
#pragma unroll 1
    for (; copied_ > left; --copied_) {
      copied_ > I::kParts&& I::kLatent ? ptx::cp_async_wait<I::kParts>() : wait_for_stage(copied_ + 1);
      const int back = place_.stage - ceil_div(copied_, I::kParts), stage = back < 0 ? back + call_.stages : back;
      const int part = I::kLatent ? (2 * I::kParts - copied_) % I::kParts : 0;
      unsigned char* at = shared_.stage(stage) + part * kPanels * I::kPanelStep;
      const uint32_t first = first_chunk();
#pragma unroll 1
      for (int panels = panels_of(part); panels > 0; --panels, at += I::kPanelStep) {
        uint4 codes[kSteps];
#pragma unroll
        for (uint32_t i = 0; i < kSteps; ++i) codes[i] = *reinterpret_cast<const uint4*>(at + first + i * kStepBytes);
#pragma unroll
        for (uint32_t i = 0; i < kSteps; ++i) {
          const auto put = [&](uint32_t to, uint32_t low, uint32_t high) {
            const uint2 left = decode_neighbours(low), right = decode_neighbours(high);
            *reinterpret_cast<uint4*>(at + to + i * kStepBytes) = make_uint4(left.x, left.y, right.x, right.y);
          };
          put(first, codes[i].x, codes[i].y);
          put(first ^ 16, codes[i].z, codes[i].w);
        }
      }
      ptx::fence_proxy_async();
      ptx::mbar_arrive(&shared_.full[stage][part]);
    }
  }
  // Returns a part's panels of 64 columns; latent rows may not fill the stage.
  __device__ __forceinline__ int32_t panels_of(int32_t part) const {
    return I::kLatent ? min_of(kPanels, p_.head_dim / 64 - part * kPanels) : kPanels;
  }
  __device__ __forceinline__ void wait_until_empty(int32_t part) {
    trace<I>(shared_, kSlotWaits);
    ptx::mbar_wait(&shared_.empty[place_.stage][part], place_.parity ^ 1);
    trace<I>(shared_, kSlotEmpty);
  }

  const AttentionParams& p_;
  const CallShape& call_;
  const CacheMaps& maps_;
  Sm90Shared<I>& shared_;
  RingPlace place_;
  uint32_t published_ = 0;  // row tiles published
  uint32_t calls_ = 0;      // of any_row_attends()
  int copied_ = 0;          // parts not yet decoded
};

}  // namespace pagedtree::cuda
