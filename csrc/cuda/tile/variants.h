// Constants chosen by measurement. A build for a comparison sets others by -D (benchmarks/gpu_run/prepare.sh).
#pragma once

#if !defined(PAGEDTREE_LEAST_BOX)  // slots of TMA's smallest box; smaller pages use cp.async
#define PAGEDTREE_LEAST_BOX 8
#endif
#if !defined(PAGEDTREE_STARTERS)  // producer warps that issue boxes
#define PAGEDTREE_STARTERS 4
#endif
#if !defined(PAGEDTREE_L2_BYTES)  // L2 promotion of a box: 128 or 256 bytes
#define PAGEDTREE_L2_BYTES 128
#endif
#if !defined(PAGEDTREE_WEIGHTS_FIRST)  // 1: softmax precedes the wait for the previous P V
#define PAGEDTREE_WEIGHTS_FIRST 0
#endif
#if !defined(PAGEDTREE_MIN_PIECE_TILES)  // least KV tiles of a split
#define PAGEDTREE_MIN_PIECE_TILES 2
#endif
#if !defined(PAGEDTREE_MIN_RANGE_COST)  // least KV tiles and splits of a kv range
#define PAGEDTREE_MIN_RANGE_COST 3
#endif
#if !defined(PAGEDTREE_ROOM_ROWS)  // largest rows of a tile that gets a CTA per KV tile if SMs are free
#define PAGEDTREE_ROOM_ROWS 32
#endif
#if !defined(PAGEDTREE_HELD_TILES)  // KV tiles per row tile and SM, up to which no row tile is shared
#define PAGEDTREE_HELD_TILES 8
#endif
