// Constants that a GPU's clock decides. A build for a comparison sets others by -D (benchmarks/gpu_run/prepare.sh).
#pragma once

#if !defined(PAGEDTREE_LEAST_BOX)  // slots of the smallest box of TMA; smaller pages come by cp.async
#define PAGEDTREE_LEAST_BOX 8
#endif
#if !defined(PAGEDTREE_STARTERS)  // producing warps that start boxes
#define PAGEDTREE_STARTERS 4
#endif
#if !defined(PAGEDTREE_L2_BYTES)  // that L2 reads for a box at once: 128 or 256
#define PAGEDTREE_L2_BYTES 128
#endif
#if !defined(PAGEDTREE_WEIGHTS_FIRST)  // 1: a stage's weights before the wait for the values of the one before
#define PAGEDTREE_WEIGHTS_FIRST 0
#endif
#if !defined(PAGEDTREE_MIN_PIECE_TILES)  // KV tiles of the smallest piece
#define PAGEDTREE_MIN_PIECE_TILES 2
#endif
#if !defined(PAGEDTREE_MIN_RANGE_COST)  // of a range, in KV tiles and pieces
#define PAGEDTREE_MIN_RANGE_COST 3
#endif
#if !defined(PAGEDTREE_ROOM_ROWS)  // rows of the largest tile of which each KV tile gets a CTA where there is room
#define PAGEDTREE_ROOM_ROWS 32
#endif
#if !defined(PAGEDTREE_HELD_TILES)  // KV tiles a row tile and SM, up to which nobody shares row tiles
#define PAGEDTREE_HELD_TILES 8
#endif
