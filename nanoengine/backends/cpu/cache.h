// What the KV cache holds: K and V as they are, or in an int8 cache, which a library is compiled for with TYPES & 8, each
// head's numbers rounded to 8 bits. A token's row, of K or of V, then has the integers of its K heads, followed by their
// scales in float: K * (D + SCALE) bytes. A number is integer * scale. Scores are multiplied by K's scale, and weights by
// V's, so integers are multiplied as they are: bf16 represents them exactly.
// backends/int8_cache.py has the definition in PyTorch.

#pragma once

#include "integer_products.h"

constexpr bool HAS_SCALES = TYPES & 8;
constexpr int64_t SCALE = HAS_SCALES ? sizeof(float) : 0;
template <class X>
using Cached = std::conditional_t<HAS_SCALES, int8_t, X>;

static inline int64_t row_size(int64_t K, int64_t D) { return K * (D + SCALE); }

// Returns the scale of a head in a token's row.
static inline float scale_of(const int8_t* row, int64_t head, int64_t K, int64_t D) {
  return load_as<float>(row + K * D + head * SCALE);
}

// Writes a token's K or V (K, D) to its row.
template <class X>
static void write_token(X* row, const X* token, int64_t K, int64_t D) { memcpy(row, token, K * D * sizeof(X)); }
template <class X>
static void write_token(int8_t* row, const X* token, int64_t K, int64_t D) {
  static thread_local std::vector<float> kept;
  for (int64_t head = 0; head < K; head++) {
    float scale;
    int32_t sum;
    round_floats<127>(row + head * D, scale, sum, as_inputs<float>(kept, token + head * D, D), D);
    memcpy(row + K * D + head * SCALE, &scale, SCALE);
  }
}
