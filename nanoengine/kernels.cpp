// What PyTorch has no fast operator for on a CPU: attention over cache blocks, and the element-wise work
// between two matrix products, each in one pass over memory. cpu.py compiles this file where there is a
// compiler and calls it through ctypes; everything here also exists in plain PyTorch, in attention.py and
// model.py, which say what it means.
//
// Shape letters: T tokens, S sequences, H query heads, K key/value heads, G = H / K, D head_dim (Dv of the
// values), B block_size. X is float or bf16; arithmetic is in float, rounded to X where PyTorch rounds.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

struct bf16 {
  uint16_t bits;
};

static inline float load(float x) { return x; }
static inline float load(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

template <class X>
static inline X narrow(float x);
template <>
inline float narrow(float x) { return x; }
template <>
inline bf16 narrow(float x) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <class X>
static inline float rounded(float x) { return load(narrow<X>(x)); }

template <class X>
static inline float dot(const X* a, const X* b, int64_t n) {
  float sum = 0;
  int64_t i = 0;
#ifdef __AVX512BF16__  // an instruction the compiler does not find by itself
  if constexpr (sizeof(X) == 2) {
    __m512 sums = _mm512_setzero_ps();
    for (; i + 32 <= n; i += 32)
      sums = _mm512_dpbf16_ps(sums, (__m512bh)_mm512_loadu_si512(a + i), (__m512bh)_mm512_loadu_si512(b + i));
    sum = _mm512_reduce_add_ps(sums);
  }
#endif
  for (; i < n; i++) sum += load(a[i]) * load(b[i]);
  return sum;
}

// e^x to about one unit in the last place, in a form the compiler turns into vector instructions:
// x = n ln 2 + r, a polynomial for e^r, and n added to the exponent.
static inline float fast_exp(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  float n = std::nearbyint(x * 1.44269504f);
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t exponent = (int32_t(n) + 127) << 23;
  float power;
  memcpy(&power, &exponent, 4);
  return p * power;
}

// A row of scores to probabilities; a sink takes its share of the sum and is not stored.
static void softmax(float* row, int64_t n, float softcap, const float* sink) {
  if (softcap > 0)
    for (int64_t i = 0; i < n; i++) row[i] = softcap * std::tanh(row[i] / softcap);
  float most = sink ? *sink : row[0];
  for (int64_t i = 0; i < n; i++) most = std::max(most, row[i]);
  float sum = sink ? fast_exp(*sink - most) : 0;
  for (int64_t i = 0; i < n; i++) sum += row[i] = fast_exp(row[i] - most);
  float scale = 1 / sum;
  for (int64_t i = 0; i < n; i++) row[i] *= scale;
}

// Sequence i's one new token, row rows[i] of q (T, H, D), attends to the last `window` (0: all) of its
// seq_lens[i] tokens. K and V are read where they are, each once for all the heads that share it.
template <class X>
static void decode_attention(X* out, const X* q, const X* k_cache, const X* v_cache, const int32_t* block_tables,
                             const int32_t* seq_lens, const int64_t* rows, int64_t S, int64_t blocks, int64_t H,
                             int64_t K, int64_t D, int64_t Dv, int64_t B, float scale, int64_t window,
                             float softcap, const float* sinks) {
  if (S == 0) return;
  int64_t G = H / K;
  // A sequence is one task while there are enough for all threads; then neighbouring heads' keys, which
  // are neighbours in memory, are read in one sweep.
  int64_t parts = std::clamp<int64_t>((4 * omp_get_max_threads() + S - 1) / S, 1, K);
#pragma omp parallel
  {
    std::vector<float> scores, sum(H * Dv);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < S * parts; task++) {
      int64_t s = task / parts, part = task % parts;
      int64_t first = K * part / parts, last = K * (part + 1) / parts;  // KV heads
      int64_t length = seq_lens[s], start = window ? std::max<int64_t>(0, length - window) : 0;
      int64_t n = length - start;
      const int32_t* table = block_tables + s * blocks;
      auto slot = [&](int64_t position) { return int64_t(table[position / B]) * B + position % B; };
      if (int64_t(scores.size()) < H * n) scores.resize(H * n);
      const X* query = q + rows[s] * H * D;
      for (int64_t t = 0; t < n; t++) {
        const X* keys = k_cache + slot(start + t) * K * D;
        for (int64_t kv = first; kv < last; kv++)
          for (int64_t head = kv * G; head < (kv + 1) * G; head++)
            scores[head * n + t] = scale * dot(query + head * D, keys + kv * D, D);
      }
      for (int64_t head = first * G; head < last * G; head++)
        softmax(&scores[head * n], n, softcap, sinks ? sinks + head : nullptr);
      std::fill(sum.begin() + first * G * Dv, sum.begin() + last * G * Dv, 0.0f);
      for (int64_t t = 0; t < n; t++) {
        const X* values = v_cache + slot(start + t) * K * Dv;
        for (int64_t head = first * G; head < last * G; head++) {
          const X* value = values + head / G * Dv;
          float* mine = sum.data() + head * Dv;
          float weight = scores[head * n + t];
          for (int64_t d = 0; d < Dv; d++) mine[d] += weight * load(value[d]);
        }
      }
      for (int64_t i = first * G * Dv; i < last * G * Dv; i++) out[rows[s] * H * Dv + i] = narrow<X>(sum[i]);
    }
  }
}

// Scores (H, queries, keys) to probabilities, in place. Query i is at position first_query + i and key j at
// first_key + j; what a query may not see becomes 0.
template <class X>
static void causal_softmax(X* scores, int64_t H, int64_t queries, int64_t keys, int64_t first_query,
                           int64_t first_key, float scale, int64_t window, float softcap, const float* sinks) {
#pragma omp parallel
  {
    std::vector<float> row(keys);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < H * queries; i++) {
      int64_t position = first_query + i % queries, end = position + 1 - first_key;
      int64_t begin = window ? std::max<int64_t>(0, end - window) : 0;
      X* mine = scores + i * keys;
      for (int64_t j = begin; j < end; j++) row[j] = load(mine[j]) * scale;
      softmax(row.data() + begin, end - begin, softcap, sinks ? sinks + i / queries : nullptr);
      for (int64_t j = 0; j < begin; j++) mine[j] = narrow<X>(0);
      for (int64_t j = begin; j < end; j++) mine[j] = narrow<X>(row[j]);
      for (int64_t j = end; j < keys; j++) mine[j] = narrow<X>(0);
    }
  }
}

// Positions [first, last) of one sequence out of the cache, (last - first, K, D) in blocks, to (K, last - first, D).
template <class X>
static void gather(X* out, const X* cache, const int32_t* table, int64_t first, int64_t last, int64_t K, int64_t D,
                   int64_t B) {
#pragma omp parallel for schedule(static)
  for (int64_t position = first; position < last; position++) {
    const X* token = cache + (int64_t(table[position / B]) * B + position % B) * K * D;
    for (int64_t head = 0; head < K; head++)
      memcpy(out + (head * (last - first) + position - first) * D, token + head * D, D * sizeof(X));
  }
}

// Tokens' K and V, rows of k_width and v_width elements that lie k_stride and v_stride apart, to their slots.
template <class X>
static void write_kv(X* k_cache, X* v_cache, const X* k, const X* v, const int64_t* slots, int64_t T, int64_t k_width,
                     int64_t v_width, int64_t k_stride, int64_t v_stride) {
  for (int64_t t = 0; t < T; t++) {
    memcpy(k_cache + slots[t] * k_width, k + t * k_stride, k_width * sizeof(X));
    memcpy(v_cache + slots[t] * v_width, v + t * v_stride, v_width * sizeof(X));
  }
}

// total = x + residual (where there is one), out = total / rms(total) * weight, over rows of E.
template <class X>
static void rms_norm(X* out, X* total, const X* x, const X* residual, const X* weight, float eps, int64_t T, int64_t E) {
#pragma omp parallel
  {
    std::vector<float> row(E);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; t++) {
      float squares = 0;
      for (int64_t i = 0; i < E; i++) {
        float value = load(x[t * E + i]);
        if (residual) value = rounded<X>(value + load(residual[t * E + i]));
        row[i] = value;
        squares += value * value;
      }
      if (residual)
        for (int64_t i = 0; i < E; i++) total[t * E + i] = narrow<X>(row[i]);
      float inverse = 1 / std::sqrt(squares / E + eps);
      for (int64_t i = 0; i < E; i++) out[t * E + i] = narrow<X>(rounded<X>(row[i] * inverse) * load(weight[i]));
    }
  }
}

// Heads (T, heads, D), rows of them stride elements apart, normalised (where there is a weight) and rotated
// by cos and sin (T, D).
template <class X>
static void norm_rotate(X* out, const X* x, int64_t stride, const X* weight, float eps, const X* cos, const X* sin,
                        int64_t T, int64_t heads, int64_t D) {
#pragma omp parallel
  {
    std::vector<float> head(D);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < T * heads; i++) {
      int64_t t = i / heads;
      const X* from = x + t * stride + i % heads * D;
      float squares = 0;
      for (int64_t d = 0; d < D; d++) {
        head[d] = load(from[d]);
        squares += head[d] * head[d];
      }
      if (weight) {
        float inverse = 1 / std::sqrt(squares / D + eps);
        for (int64_t d = 0; d < D; d++) head[d] = rounded<X>(rounded<X>(head[d] * inverse) * load(weight[d]));
      }
      const X *c = cos + t * D, *s = sin + t * D;
      X* to = out + i * D;
      for (int64_t d = 0, e = D / 2; d < D / 2; d++, e++) {
        to[d] = narrow<X>(rounded<X>(head[d] * load(c[d])) + rounded<X>(-head[e] * load(s[d])));
        to[e] = narrow<X>(rounded<X>(head[e] * load(c[e])) + rounded<X>(head[d] * load(s[e])));
      }
    }
  }
}

// silu(gate) * up for rows of [gate, up], I each.
template <class X>
static void silu_and_mul(X* out, const X* gate_up, int64_t T, int64_t I) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < T; t++) {
    const X *gate = gate_up + t * 2 * I, *up = gate + I;
    for (int64_t i = 0; i < I; i++) {
      float x = load(gate[i]);
      out[t * I + i] = narrow<X>(rounded<X>(x / (1 + fast_exp(-x))) * load(up[i]));
    }
  }
}

// cpu.py finds each function by a variable that holds its address: a template has no C name.
#define EXPORT(name)                                   \
  extern "C" decltype(&name<float>) name##_float32;    \
  decltype(&name<float>) name##_float32 = &name<float>;  \
  extern "C" decltype(&name<bf16>) name##_bfloat16;    \
  decltype(&name<bf16>) name##_bfloat16 = &name<bf16>;
EXPORT(decode_attention)
EXPORT(causal_softmax)
EXPORT(gather)
EXPORT(write_kv)
EXPORT(rms_norm)
EXPORT(norm_rotate)
EXPORT(silu_and_mul)
