/* The CPU kernels: linear layers, ragged paged attention, norms, rotary embedding with KV writes, SwiGLU, token choice.
 *
 * Plain C with the compiler's vector types (gcc, clang): one source serves NEON, AVX2, AVX-512 and CPUs without any of
 * them, compiled with the flags of the machine. Every function computes what kernels/ref.py defines.
 *
 * Two rules hold throughout:
 * - No result depends on other rows. Every sum runs in an order fixed by its own row, whatever the tile size, the
 *   number of rows or the number of threads. So a request gets the same tokens whatever else is in its pass.
 * - Nothing outside a sequence's own tokens is read, so garbage in the rest of a KV block cannot leak into a result.
 *
 * Activations are float32. Weights and KV are float32, bfloat16 or (if the compiler has it) float16.
 *
 * This is the only translation unit: it includes the other files, each after those that it uses. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#include "vectors.c"
#include "arm.c"
#include "dots.c"
#include "pool.c"
#include "threads.c"
#include "quantize.c"
#include "pairs.c"
#include "tiles.c"
#include "lanes.c"
#include "linear.c"
#include "linear8.c"
#include "linear_blocks.c"
#include "attention.c"
#include "attention_lanes.c"
#include "attention_tiles.c"
#include "attention_pass.c"
#include "rows.c"
#include "layers.c"
#include "choose.c"

/* ---- what this library is, for the caller */

API int shoal_lanes(void) { return LANES; }
API int shoal_has_float16(void) { return HAS_FLOAT16; }
API int shoal_has_tiles(void) { return HAS_TILES; }
API int shoal_has_pairs(void) { return HAS_PAIRS; }
/* whether weights of a type are multiplied fastest in tiles */
API int shoal_reads_tiles(int type) { return has_lanes(type) || (HAS_TILES && (type == BFLOAT16 || type == INT8)); }

/* whether tiled weights of a type are widened exactly: their results have the same bits as those of float32 weights */
API int shoal_widens(int type) { return type == BFLOAT16 && has_lanes(type) && !HAS_PAIRS; }

/* Tiles a matrix of such a type in place; every later call that reads it must pass tiled = 1. Returns 0, or 1 if memory
 * ran out. */
API int shoal_tile(void *weight, long rows, long row_bytes, int threads) {
  return tile_in_place(weight, rows, row_bytes, threads);
}

/* Returns 0 if the process may use every instruction of this library, else the errno of the refusal. */
API int shoal_permitted(void) { return tiles_permitted(); }

/* Sizes of the structs that structs.py mirrors, in its order, then 0. The caller compares them after loading. */
API long shoal_struct_size(long which) {
  static const size_t sizes[] = {sizeof(Matrix), sizeof(Layer), sizeof(Pass), sizeof(Sampling), sizeof(Choice)};
  return which < (long)(sizeof sizes / sizeof sizes[0]) ? (long)sizes[which] : 0;
}
