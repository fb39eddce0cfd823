// What PyTorch has no fast operator for on a CPU: attention over cache blocks, products with weights that come out
// of memory once for all rows, and the element-wise work between two products, each in one pass over memory.
// cpu.py compiles this file where there is a compiler and calls it through ctypes; everything here also exists in
// plain PyTorch, in attention.py and models/decoder.py, which say what it means.
//
// Shape letters: T tokens, S sequences, H query heads, K key/value heads, G = H / K, D head_dim (Dv of the
// values), B block_size. X is float or bf16; arithmetic is in float, rounded to X where PyTorch rounds.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// Tokens of a sequence that one task of decode_attention attends to, and how far apart its heads' scores are: there
// is room for the 16 that are written at a time.
constexpr int64_t SPAN = 256, ROW = SPAN + 16;

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

#ifdef __AVX512BF16__
// Have n elements brought into the second cache.
template <class X>
static inline void fetch(const X* from, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / sizeof(X)) __builtin_prefetch(from + i, 0, 2);
}

// A dot product of a multiple of 32 elements, but for the sum over the register.
static inline __m512 dot_parts(const bf16* a, const bf16* b, int64_t n) {
  __m512 sums = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 32)
    sums = _mm512_dpbf16_ps(sums, (__m512bh)_mm512_loadu_si512(a + i), (__m512bh)_mm512_loadu_si512(b + i));
  return sums;
}

// The sums of 16 rows of 16 numbers, in one register: at each step two registers become one, which holds half as
// many parts of each sum.
static inline __m512 sum_each(const float* rows) {
  __m512 two[8], four[4], eight[2];
  for (int i = 0; i < 8; i++) {
    __m512 a = _mm512_loadu_ps(rows + 32 * i), b = _mm512_loadu_ps(rows + 32 * i + 16);
    two[i] = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  }
  for (int i = 0; i < 4; i++) {
    __m512d a = (__m512d)two[2 * i], b = (__m512d)two[2 * i + 1];
    four[i] = (__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b);
  }
  auto halves = [](__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd); };
  for (int i = 0; i < 2; i++) eight[i] = halves(four[2 * i], four[2 * i + 1]);
  return halves(eight[0], eight[1]);
}

// 32 elements each of two rows in turns, a0 b0 a1 b1 ..., in two registers.
static inline std::pair<__m512bh, __m512bh> interleaved(const bf16* a, const bf16* b) {
  alignas(64) static constexpr auto ORDER = [] {
    std::array<uint16_t, 64> order{};
    for (int i = 0; i < 64; i++) order[i] = i / 2 + i % 2 * 32;
    return order;
  }();
  __m512i low = _mm512_load_si512(ORDER.data()), high = _mm512_load_si512(ORDER.data() + 32);
  __m512i first = _mm512_loadu_si512(a), second = _mm512_loadu_si512(b);
  return {(__m512bh)_mm512_permutex2var_epi16(first, low, second),
          (__m512bh)_mm512_permutex2var_epi16(first, high, second)};
}
#endif

template <class X>
static inline float dot(const X* a, const X* b, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; i++) sum += load(a[i]) * load(b[i]);
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

template <class X>
static void narrow_row(X* __restrict out, const float* __restrict row, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = narrow<X>(row[i]);
}

static void add_scaled(float* __restrict sum, const float* __restrict row, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) sum[i] += factor * row[i];
}

// A row of scores to weights e^(score - most), in place; most, the largest of them and the sink, and their sum. The
// first key is `distance` positions before the query; each position costs *slope (ALiBi).
static std::pair<float, float> exponentials(float* row, int64_t n, float softcap, const float* sink,
                                            const float* slope, int64_t distance) {
  if (softcap > 0)
    for (int64_t i = 0; i < n; i++) row[i] = softcap * std::tanh(row[i] / softcap);
  if (slope)
    for (int64_t i = 0; i < n; i++) row[i] -= *slope * float(distance - i);
  float most = row[0];
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; i++) most = std::max(most, row[i]);
  if (sink) most = std::max(most, *sink);
  float sum = 0;
  for (int64_t i = 0; i < n; i++) sum += row[i] = fast_exp(row[i] - most);
  return {most, sink ? sum + fast_exp(*sink - most) : sum};
}

// A row of scores up to the query's own to probabilities; a sink takes its share of the sum and is not stored.
static void softmax(float* row, int64_t n, float softcap, const float* sink, const float* slope) {
  float scale = 1 / exponentials(row, n, softcap, sink, slope, n - 1).second;
  for (int64_t i = 0; i < n; i++) row[i] *= scale;
}

// scores[head][t] = q[head] . keys[t][head / G] for q (H, D) and up to 16 tokens' keys (count, K, D); a head's
// scores are ROW apart from the next one's. Keys are read in the order in which they lie in memory, and those of
// the `next` tokens fetched meanwhile.
template <class X>
static void write_scores(float* scores, const X* q, const X* keys, const X* next, int64_t count, int64_t H, int64_t K,
                         int64_t D) {
  int64_t G = H / K;
#ifdef __AVX512BF16__
  if constexpr (sizeof(X) == 2)
  if (D % 32 == 0) {
    static thread_local std::vector<float> parts;  // (H, 16 tokens, 16)
    parts.resize(H * 16 * 16);
    for (int64_t t = 0; t < count; t++) {
      fetch(next + t * K * D, K * D);
      for (int64_t head = 0; head < H; head++)
        _mm512_storeu_ps(&parts[(head * 16 + t) * 16], dot_parts(q + head * D, keys + (t * K + head / G) * D, D));
    }
    for (int64_t head = 0; head < H; head++)
      _mm512_storeu_ps(scores + head * ROW, sum_each(&parts[head * 16 * 16]));
    return;
  }
#endif
  for (int64_t t = 0; t < count; t++)
    for (int64_t head = 0; head < H; head++)
      scores[head * ROW + t] = dot(q + head * D, keys + (t * K + head / G) * D, D);
}

// sums[head] += weights[head][t] * values[t][head / G] for sums (H, D) and values (count, K, D); `next` as above.
template <class X>
static void add_values(float* sums, const X* weights, const X* values, const X* next, int64_t count, int64_t H,
                       int64_t K, int64_t D) {
  int64_t G = H / K;
#ifdef __AVX512BF16__
  if constexpr (sizeof(X) == 2)
  if (D % 32 == 0) {  // tokens by fours: an instruction adds two of them to a sum
    for (int64_t t = 0; t < count; t += 4)
      for (int64_t head = 0; head < H; head++) {
        fetch(next + (t * H + head * 4) * K * D / H, 4 * K * D / H);
        uint32_t weight[4];
        const X* value[4];
        for (int64_t j = 0; j < 4; j++) {
          bool is_there = t + j < count;
          weight[j] = is_there ? weights[head * ROW + t + j].bits : 0;
          value[j] = values + ((is_there ? t + j : t) * K + head / G) * D;
        }
        __m512bh first = (__m512bh)_mm512_set1_epi32(weight[0] | weight[1] << 16);
        __m512bh second = (__m512bh)_mm512_set1_epi32(weight[2] | weight[3] << 16);
        float* sum = sums + head * D;
        for (int64_t i = 0; i < D; i += 32) {
          auto [a, b] = interleaved(value[0] + i, value[1] + i);
          auto [c, d] = interleaved(value[2] + i, value[3] + i);
          __m512 low = _mm512_dpbf16_ps(_mm512_loadu_ps(sum + i), first, a);
          __m512 high = _mm512_dpbf16_ps(_mm512_loadu_ps(sum + i + 16), first, b);
          _mm512_storeu_ps(sum + i, _mm512_dpbf16_ps(low, second, c));
          _mm512_storeu_ps(sum + i + 16, _mm512_dpbf16_ps(high, second, d));
        }
      }
    return;
  }
#endif
  for (int64_t t = 0; t < count; t++)
    for (int64_t head = 0; head < H; head++)
      for (int64_t i = 0; i < D; i++)
        sums[head * D + i] += load(weights[head * ROW + t]) * load(values[(t * K + head / G) * D + i]);
}

// Sequence i's one new token, row rows[i] of q (T, H, D), attends to the last `window` (0: all) of its
// seq_lens[i] tokens. K and V are read where they are. A long sequence is several tasks, each over SPAN tokens with
// weights of its own, put together at the end: flash-decoding (https://pytorch.org/blog/flash-decoding). Where
// spans begin depends on the sequence alone, so its result does not depend on the batch.
template <class X>
static void decode_attention(X* out, const X* q, const X* k_cache, const X* v_cache, const int32_t* block_tables,
                             const int32_t* seq_lens, const int64_t* rows, int64_t S, int64_t blocks, int64_t H,
                             int64_t K, int64_t D, int64_t Dv, int64_t B, float scale, int64_t window,
                             float softcap, const float* sinks, const float* slopes) {
  struct Task {
    int64_t sequence, begin, end;
  };
  std::vector<Task> tasks;
  std::vector<int64_t> first_task{0};
  for (int64_t s = 0; s < S; s++) {
    int64_t length = seq_lens[s], start = window ? std::max<int64_t>(0, length - window) : 0;
    for (; start < length; start += SPAN) tasks.push_back({s, start, std::min(start + SPAN, length)});
    first_task.push_back(tasks.size());
  }
  // Of each task: per head the sum of values, then per head the largest score and the sum of weights.
  int64_t size = H * (Dv + 2);
  static thread_local std::vector<float> kept;  // from call to call: fresh memory costs more than what is done here
  if (kept.size() < tasks.size() * size) kept.resize(tasks.size() * size);
  float* results = kept.data();
#pragma omp parallel
  {
    std::vector<float> scores(H * ROW);
    std::vector<X> weights(H * ROW);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < tasks.size(); i++) {
      int64_t s = tasks[i].sequence, begin = tasks[i].begin, end = tasks[i].end;
      // Calls use(offset in the span, slot, slot of the tokens after these, count) for up to 16 tokens that lie
      // together in a block.
      auto each_run = [&](auto use) {
        const int32_t* table = block_tables + s * blocks;
        auto slot = [&](int64_t position) { return table[position / B] * B + position % B; };
        for (int64_t position = begin, next; position < end; position = next) {
          next = std::min({(position / B + 1) * B, position + 16, end});
          use(position - begin, slot(position), slot(std::min(next, end - 1)), next - position);
        }
      };
      each_run([&](int64_t offset, int64_t slot, int64_t next, int64_t count) {
        const X *keys = k_cache + slot * K * D, *next_keys = k_cache + next * K * D;
        write_scores(&scores[offset], q + rows[s] * H * D, keys, next_keys, count, H, K, D);
      });
      float *sums = &results[i * size], *totals = sums + H * Dv;
      std::fill(sums, totals, 0.0f);
      for (int64_t head = 0; head < H; head++) {
        float* mine = &scores[head * ROW];
        for (int64_t t = 0; t < end - begin; t++) mine[t] *= scale;
        std::tie(totals[2 * head], totals[2 * head + 1]) = exponentials(
            mine, end - begin, softcap, nullptr, slopes ? slopes + head : nullptr, seq_lens[s] - 1 - begin);
        narrow_row(&weights[head * ROW], mine, end - begin);
      }
      each_run([&](int64_t offset, int64_t slot, int64_t next, int64_t count) {
        const X *values = v_cache + slot * K * Dv, *next_values = v_cache + next * K * Dv;
        add_values(sums, &weights[offset], values, next_values, count, H, K, Dv);
      });
    }
    std::vector<float> row(Dv);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < S * H; i++) {
      int64_t s = i / H, head = i % H, first = first_task[s], last = first_task[s + 1];
      auto totals = [&](int64_t task) { return &results[task * size + H * Dv + 2 * head]; };
      float most = sinks ? sinks[head] : totals(first)[0];
      for (int64_t task = first; task < last; task++) most = std::max(most, totals(task)[0]);
      float sum = sinks ? fast_exp(sinks[head] - most) : 0;
      for (int64_t task = first; task < last; task++) sum += fast_exp(totals(task)[0] - most) * totals(task)[1];
      std::fill(row.begin(), row.end(), 0.0f);
      for (int64_t task = first; task < last; task++)
        add_scaled(row.data(), &results[task * size + head * Dv], fast_exp(totals(task)[0] - most) / sum, Dv);
      narrow_row(out + (rows[s] * H + head) * Dv, row.data(), Dv);
    }
  }
}

// Scores (H, queries, keys) to probabilities, in place. Query i is at position first_query + i and key j at
// first_key + j; what a query may not see becomes 0.
template <class X>
static void causal_softmax(X* scores, int64_t H, int64_t queries, int64_t keys, int64_t first_query,
                           int64_t first_key, float scale, int64_t window, float softcap, const float* sinks,
                           const float* slopes) {
#pragma omp parallel
  {
    std::vector<float> row(keys);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < H * queries; i++) {
      int64_t position = first_query + i % queries, end = position + 1 - first_key;
      int64_t begin = window ? std::max<int64_t>(0, end - window) : 0;
      X* mine = scores + i * keys;
      for (int64_t j = begin; j < end; j++) row[j] = load(mine[j]) * scale;
      int64_t head = i / queries;
      softmax(row.data() + begin, end - begin, softcap, sinks ? sinks + head : nullptr, slopes ? slopes + head : nullptr);
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
#pragma omp parallel for schedule(static)
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

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)  // with AMX oneDNN's products are faster than these
constexpr int64_t OUTPUTS = 64, ROWS = 6;  // of a tile: its sums, ROWS x 4 registers, and a weight's 4 fill them all

// R rows of x times one block of a packed weight, (pairs, 64, 2): of the 64 outputs `width` are stored. Meanwhile
// `lines` cache lines per pair are fetched from `next` on.
template <int R>
static void multiply_tile(bf16* out, const bf16* x, const bf16* weight, const bf16* bias, int64_t pairs, int64_t stride,
                          int64_t width, const char* next, int64_t lines) {
  __m512 sums[R][4];
  __mmask16 stored[4];
  for (int j = 0; j < 4; j++) {
    stored[j] = __mmask16((1 << std::clamp<int64_t>(width - 16 * j, 0, 16)) - 1);
    __m512 start = bias ? _mm512_cvtpbh_ps((__m256bh)_mm256_maskz_loadu_epi16(stored[j], bias + 16 * j)) : __m512{};
    for (int r = 0; r < R; r++) sums[r][j] = start;
  }
  for (int64_t p = 0; p < pairs; p++) {
    for (int64_t line = p * lines; line < (p + 1) * lines; line++) _mm_prefetch(next + line * 64, _MM_HINT_T1);
    __m512bh weights[4];
    for (int j = 0; j < 4; j++) weights[j] = (__m512bh)_mm512_loadu_si512(weight + (p * 4 + j) * 32);
    for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, x + (r * pairs + p) * 2, 4);
      for (int j = 0; j < 4; j++)
        sums[r][j] = _mm512_dpbf16_ps(sums[r][j], (__m512bh)_mm512_set1_epi32(pair), weights[j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++)
      _mm256_mask_storeu_epi16(out + r * stride + 16 * j, stored[j], (__m256i)_mm512_cvtneps_pbh(sums[r][j]));
}

template <int... R>
static constexpr auto tiles(std::integer_sequence<int, R...>) { return std::array{&multiply_tile<R + 1>...}; }

// out (T, N) = x (T, I) times a weight, + bias. The weight is packed as (ceil(N / 64), I / 2, 64, 2), blocks of 64
// outputs: a block comes out of memory once and is in the second cache for all tiles of rows. Of several tiles the
// first would wait for memory and leave it idle in the others, so all of them share in fetching the next block.
static void linear(bf16* out, const bf16* x, const bf16* packed, const bf16* bias, int64_t T, int64_t I, int64_t N) {
  static constexpr auto TILES = tiles(std::make_integer_sequence<int, ROWS>());
  int64_t num_tiles = (T + ROWS - 1) / ROWS, fetching = num_tiles == 1 ? 0 : std::min<int64_t>(num_tiles, 4);
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < N; first += OUTPUTS) {
    const bf16* weight = packed + first * I;
    const char* next = (const char*)(weight + OUTPUTS * I);
    for (int64_t i = 0; i < num_tiles; i++) {
      int64_t begin = T * i / num_tiles, end = T * (i + 1) / num_tiles;  // tiles of about one height
      int64_t lines = i < fetching ? 4 * (i + 1) / fetching - 4 * i / fetching : 0;
      TILES[end - begin - 1](out + begin * N + first, x + begin * I, weight, bias ? bias + first : nullptr, I / 2, N,
                             N - first, next, lines);
      next += lines * I / 2 * 64;
    }
  }
}
extern "C" decltype(&linear) linear_bfloat16;
decltype(&linear) linear_bfloat16 = &linear;
#endif

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
