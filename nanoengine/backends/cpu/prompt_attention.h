// Attention over cache blocks, for many new tokens of one sequence. decode_attention.h has it for one new token of each
// of many sequences. backends/torch_attention.py does the same in PyTorch.
// Shape letters: T tokens, S sequences, H query heads, K key/value heads, G = H / K, D head_dim (Dv for the values),
// B block_size.

#pragma once

#include <cmath>
#include <tuple>

#include "cache.h"

// Returns e^x to about one unit in the last place: x = n ln 2 + r, a polynomial for e^r, and n added to the exponent.
static inline float fast_exp(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  float n = std::nearbyint(x * 1.44269504f), power;
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t exponent = (int32_t(n) + 127) << 23;
  memcpy(&power, &exponent, sizeof power);
  return p * power;
}

// Returns e^x for x <= 0 in half the instructions, with an error of up to 4e-7 + |x| / 2^24: x / ln 2 = n + f, and a
// polynomial for 2^f. ROUND is so large that the last bit is a one, and leaves n + 127 in the last bits.
static inline floats exp_below_0(floats x) {
  constexpr float PER_LN2 = 1.44269504f, ROUND = 12582912 + 127;
  x = x < -87 ? floats{} - 87 : x;
  floats n = x * PER_LN2 + ROUND, power = (floats)((bits)n << 23);
  floats f = x * PER_LN2 - (n - ROUND);
  floats p = f * 1.326472731e-3f + 9.671512991e-3f;
  p = p * f + 5.550733581e-2f;
  p = p * f + 2.402224243e-1f;
  p = p * f + 6.931470037e-1f;
  return (p * f + 1) * power;
}

// SPAN: how many tokens of a sequence are attended to at a time. ROW: the distance between rows of scores, which leaves
// room for the 16 scores that are written at a time.
constexpr int64_t SPAN = 256, ROW = SPAN + 16;

template <int... I, class V>
static inline V pick_lanes(V a, V b) {  // b's lanes are numbered after a's
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, decltype(a < b){I...});
#endif
}
using EachLane = std::make_integer_sequence<int, LANES>;

// Adds neighboring lanes: returns the sums of a's pairs, then of b's.
template <class V, int... I>
static inline V add_pairs(V a, V b, std::integer_sequence<int, I...>) {
  return pick_lanes<2 * I...>(a, b) + pick_lanes<2 * I + 1 ...>(a, b);
}

// Interleaves the first or the second halves of a and b: a0 b0 a1 b1 ...
template <int HALF, class V, int... I>
static inline V interleave(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int N = sizeof...(I);
  return pick_lanes<(I + HALF * N) / 2 + I % 2 * N...>(a, b);
}

// Transposes a matrix of LANES registers. Each pass rotates the bits of (row, lane) by one place.
static inline void transpose(floats* rows) {
  for (int n = 1; n < LANES; n *= 2) {
    floats moved[LANES];
    for (int i = 0; i < LANES / 2; i++) {
      moved[2 * i] = interleave<0>(rows[i], rows[i + LANES / 2], EachLane());
      moved[2 * i + 1] = interleave<1>(rows[i], rows[i + LANES / 2], EachLane());
    }
    memcpy(rows, moved, sizeof moved);
  }
}

// Adds neighboring lanes of N registers until one register is left, which it returns.
template <int N, class V>
static inline V add_neighbors(const V* parts) {
  if constexpr (N == 1) return parts[0];
  else return add_pairs(add_neighbors<N / 2>(parts), add_neighbors<N / 2>(parts + N / 2), EachLane());
}

static inline float add_up(floats lanes) {
  for (int n = 1; n < LANES; n *= 2) lanes = add_pairs(lanes, lanes, EachLane());
  return lanes[0];
}

// Decodes and prompts call the same compiled code: inlined twice, the compiler might round a*b + c*d in two ways.
#define ONE_COPY __attribute__((noinline)) static

// Turns a row of products q . k into weights e^(scale * product - peak), in place. Returns `peak`, which is the largest of
// these scores, and the sum of the weights. The first key is `distance` positions before the query, and ALiBi subtracts
// *slope per position. The row is overwritten up to a multiple of LANES.
// With an int8 cache, products are multiplied by the keys' scales, and weights, after they are summed, by the values'.
ONE_COPY std::pair<float, float> exponentials(float* row, int64_t n, float scale, float softcap, const float* slope,
                                              int64_t distance, const float* key_scales, const float* value_scales) {
  if (key_scales)
    for (int64_t i = 0; i < n; i++) row[i] *= key_scales[i];
  if (softcap > 0 || slope) {
    for (int64_t i = 0; i < n; i++) row[i] *= scale;
    if (softcap > 0)
      for (int64_t i = 0; i < n; i++) row[i] = softcap * std::tanh(row[i] / softcap);
    if (slope)
      for (int64_t i = 0; i < n; i++) row[i] -= *slope * float(distance - i);
    scale = 1;
  }
  int64_t end = n;
  for (; end % LANES; end++) row[end] = -INFINITY;
  float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < end; i++) largest = row[i] > largest ? row[i] : largest;
  float peak = largest * scale;
  floats sum{};
  for (int64_t i = 0; i < end; i += LANES) {
    floats weights = exp_below_0(load_as<floats>(row + i) * scale - peak);
    memcpy(row + i, &weights, sizeof weights);
    sum += weights;
  }
  if (value_scales)
    for (int64_t i = 0; i < n; i++) row[i] *= value_scales[i];
  return {peak, add_up(sum)};
}

// These pack K and V like the weights of a product: K as a weight with tokens as outputs, V with tokens as inputs.
template <class A, class X>
static void pack_column(A* __restrict to, const X* __restrict token, int64_t D) {
  int64_t d = 0;
  for (; d + STEP<A> <= D; d += STEP<A>)
    if constexpr (STEP<A> == 2) memcpy(to + d * OUTPUTS, token + d, 4);
    else to[d * OUTPUTS] = load(token[d]);
  if (d < D) to[d * OUTPUTS] = narrow<A>(load(token[d]));
}

// Packs LANES columns at once if D is a multiple of LANES steps. token(i) is the start of the i-th token.
template <class A, class Token>
static void pack_columns(A* to, Token token, int64_t D) {
  for (int64_t d = 0; d < D; d += LANES * STEP<A>) {
    floats rows[LANES];
    for (int i = 0; i < LANES; i++)
      if constexpr (STEP<A> == 2) rows[i] = load_as<floats>(token(i) + d);
      else widen_row((float*)&rows[i], token(i) + d, LANES);
    transpose(rows);
    for (int i = 0; i < LANES; i++) memcpy(to + (d + i * STEP<A>) * OUTPUTS, &rows[i], sizeof rows[i]);
  }
}

template <class A, class X>
static void pack_row(A* __restrict to, const X* __restrict token, const X* __restrict next, int64_t n) {
  if constexpr (STEP<A> == 2)
    for (int64_t d = 0; d < n; d++) {
      uint32_t pair = token[d].bits | uint32_t(next[d].bits) << 16;  // as one value, so that the compiler vectorizes it
      memcpy(to + 2 * d, &pair, 4);
    }
  else
    widen_row(to, token, n);
}

// Packs the keys of a span's tokens [first, end) like a weight, in blocks of OUTPUTS tokens.
template <class A, class Token>
static void pack_keys(A* keys, Token token, int64_t first, int64_t end, int64_t D) {
  constexpr int64_t PAIR = STEP<A>;
  int64_t width = (D + PAIR - 1) / PAIR * PAIR, together = D % (LANES * PAIR) ? 1 : LANES;
  for (int64_t i = first / together * together; i < end; i += together) {
    A* to = &keys[i / OUTPUTS * OUTPUTS * width + i % OUTPUTS * PAIR];
    if (together == 1) pack_column(to, token(i), D);
    else pack_columns(to, [&](int64_t j) { return token(std::clamp(i + j, first, end - 1)); }, D);
  }
}

// K or V of one head, for tokens [first, end) of a span, as packing reads them: in place, or converted from integers to A.
template <class A, class X>
struct HeadRows {
  using Row = std::conditional_t<HAS_SCALES, A, X>;
  int64_t D;
  std::vector<A> rows;  // (SPAN, D)
  std::vector<float> scales;

  explicit HeadRows(int64_t D) : D(D), rows(HAS_SCALES ? SPAN * D : 0), scales(HAS_SCALES ? SPAN : 0) {}

  template <class Slot>
  void read(const Cached<X>* cache, Slot slot, int64_t first, int64_t end, int64_t head, int64_t K) {
    if constexpr (HAS_SCALES)
      for (int64_t i = first; i < end; i++) {
        const int8_t* row = cache + slot(i) * row_size(K, D);
        convert_row(&rows[i * D], row + head * D, D);
        scales[i] = scale_of(row, head, K, D);
      }
  }

  template <class Slot>
  const Row* at(const Cached<X>* cache, Slot slot, int64_t i, int64_t head, int64_t K) const {
    if constexpr (HAS_SCALES) return &rows[i * D];
    else return cache + slot(i) * row_size(K, D) + head * D;
  }

  const float* scales_from(int64_t i) const { return HAS_SCALES ? &scales[i] : nullptr; }
};

// Adds the values of a span, weighted relative to the span's own peak, to the sums of earlier spans. The one with the
// smaller peak is scaled down first: flash-attention (https://arxiv.org/abs/2205.14135).
ONE_COPY void merge(float* __restrict sums, float& peak, float& total, const float* __restrict of_span,
                    float span_peak, float span_total, int64_t n) {
  float before = peak;
  peak = std::max(peak, span_peak);
  float kept = fast_exp(before - peak), added = fast_exp(span_peak - peak);
  total = total * kept + span_total * added;
  for (int64_t i = 0; i < n; i++) sums[i] = sums[i] * kept + of_span[i] * added;
}

template <class X>
static void write_mean(X* out, const float* sums, float total, int64_t n) {
  float inverse = 1 / total;
  for (int64_t i = 0; i < n; i++) out[i] = narrow<X>(sums[i] * inverse);
}

// The last T tokens of a sequence, q and out (T, H, ..), attend to the sequence's `length` tokens. Keys are processed in
// spans, packed like the weights of a product. Spans begin at the same positions for every chunk, and keys that a query does
// not see add 0, so the result does not depend on how the prompt was divided.
template <class X>
static void prefill_attention(X* out, const X* q, const Cached<X>* k_cache, const Cached<X>* v_cache,
                              const int32_t* table, int64_t T, int64_t length, int64_t H, int64_t K, int64_t D,
                              int64_t Dv, int64_t B, float scale, int64_t window, float softcap, const float* sinks,
                              const float* slopes) {
  using A = Input<X>;  // type of q, K, weights and V in the products
  constexpr int64_t PAIR = STEP<A>, MOST_ROWS = 2 * HEIGHT;
  const bool by_amx = HAS_AMX && std::is_same_v<A, bf16>, in_pairs = by_amx && D % DEPTH == 0;
  const int64_t height = by_amx ? HEIGHT * (1 + in_pairs) : ROWS;
  const int64_t in_part = T < 1024 ? 128 : 256;  // tokens; K and V are packed again for each part
  const int64_t together = by_amx ? DEPTH : PAIR;  // number of tokens whose values are added at once
  auto padded = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
  int64_t G = H / K, query_width = padded(D, PAIR), value_width = padded(Dv, OUTPUTS);
  int64_t num_parts = (T + in_part - 1) / in_part;
#pragma omp parallel
  {
    aligned<A> queries(G * in_part * query_width), keys(padded(SPAN, OUTPUTS) * query_width);
    aligned<A> values(SPAN * value_width), weights(MOST_ROWS * ROW);
    aligned<float> scores(MOST_ROWS * ROW), sums(G * in_part * value_width);
    aligned<float> peak(G * in_part), total(G * in_part), of_span(MOST_ROWS * value_width);
    std::array<std::pair<float, float>, MOST_ROWS> span_totals;  // each row's peak and sum of weights
    std::array<bool, MOST_ROWS> sees;                            // whether a row sees any of the span's tokens
    HeadRows<A, X> key_rows(D), value_rows(Dv);
    std::vector<typename HeadRows<A, X>::Row> zeros(Dv);
#ifdef MAY_HAVE_AMX
    std::optional<Amx> amx;
    if (by_amx) amx.emplace(HEIGHT, DEPTH, query_width % DEPTH, true, in_pairs);
#endif
    auto multiply = [&](int64_t R, float* to, int64_t row, const A* x, int64_t stride, const A* block, int64_t inputs) {
#ifdef MAY_HAVE_AMX
      if constexpr (std::is_same_v<A, bf16>)
        if (by_amx) {
          alignas(64) static float start[OUTPUTS];  // zeros, for each row
          if (R > HEIGHT) return multiply_two_tiles({to, row}, {start, 0}, {x, stride}, HEIGHT, block, inputs, nullptr, 0);
          return multiply_plain_tile({to, row}, {start, 0}, {x, stride}, block, inputs, nullptr, 0);
        }
#endif
      TILES<A, A, false>[R - 1](to, row, x, stride, block, plain(inputs), nullptr, 0);
    };
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < K * num_parts; task++) {
      int64_t kv_head = task % K, part = num_parts - 1 - task / K;  // the longest first
      int64_t rows = std::min(in_part, T - part * in_part), first = length - T + part * in_part, last = first + rows;
      const X* part_q = q + (part * in_part * H + kv_head * G) * D;
      // Calls use(g, first row of a tile, its rows, their place in the part) for tiles of one head's queries. AMX tiles
      // always have full height; there is room after the last one.
      auto each_tile = [&](auto use) {
        for (int64_t g = 0; g < G; g++)
          for (int64_t i = 0; i < num_tiles_of(rows, height); i++) {
            auto [begin, end] = by_amx ? std::pair(i * height, std::min(rows, (i + 1) * height)) : tile_of(rows, i);
            use(g, begin, end - begin, g * in_part + begin);
          }
      };
      each_tile([&](int64_t g, int64_t row, int64_t R, int64_t place) {
        for (int64_t r = 0; r < R; r++)
          convert_row(&queries[(place + r) * query_width], part_q + ((row + r) * H + g) * D, D);
        std::fill_n(&peak[place], R, sinks ? sinks[kv_head * G + g] : -INFINITY);
        std::fill_n(&total[place], R, sinks ? 1 : 0);
        std::fill_n(&sums[place * value_width], R * value_width, 0.0f);
      });
      int64_t lowest = window ? std::max<int64_t>(0, first + 1 - window) : 0;
      for (int64_t begin = lowest / SPAN * SPAN; begin < last; begin += SPAN) {
        int64_t end = std::min(begin + SPAN, last), start = std::max(begin, lowest);
        auto slot = [&](int64_t i) { return int64_t(table[(begin + i) / B]) * B + (begin + i) % B; };
        key_rows.read(k_cache, slot, start - begin, end - begin, kv_head, K);
        value_rows.read(v_cache, slot, start - begin, end - begin, kv_head, K);
        auto value = [&](int64_t i) { return value_rows.at(v_cache, slot, i, kv_head, K); };
        pack_keys(keys.data(), [&](int64_t i) { return key_rows.at(k_cache, slot, i, kv_head, K); }, start - begin,
                  end - begin, D);
        if (start > begin) std::fill(values.begin(), values.end(), narrow<A>(0));  // their weight is 0
        for (int64_t i = (start - begin) / PAIR * PAIR; i < padded(end - begin, together); i += PAIR) {
          bool is_there = start <= begin + i && begin + i < end;
          const auto* one = is_there ? value(i) : zeros.data();
          const auto* other = begin + i + 1 < end ? value(i + 1) : zeros.data();
          for (int64_t d = 0; d < Dv; d += OUTPUTS)
            pack_row(&values[d * SPAN + i * OUTPUTS], one + d, other + d, std::min(OUTPUTS, Dv - d));
        }
        each_tile([&](int64_t g, int64_t row, int64_t R, int64_t place) {
          int64_t position = first + row, seen = std::min(end, position + R) - begin;  // by the tile's last row
          int64_t unseen = window ? std::max<int64_t>(0, position + 1 - window - begin) / OUTPUTS * OUTPUTS : 0;
          if (seen <= unseen) return;
          if (!by_amx) std::fill_n(scores.data(), R * ROW, 0.0f);
          for (int64_t block = unseen; block < seen; block += OUTPUTS)
            multiply(R, &scores[block], ROW, &queries[place * query_width], query_width, &keys[block * query_width],
                     query_width);
          for (int64_t r = 0; r < R; r++) {
            int64_t low = std::max(window ? position + r + 1 - window : 0, begin) - begin;
            int64_t high = std::min(position + r + 1, end) - begin;
            float* weight = &scores[r * ROW];
            sees[r] = low < high;
            if (!sees[r]) {
              std::fill_n(weight, SPAN, 0.0f);
              continue;
            }
            span_totals[r] = exponentials(weight + low, high - low, scale, softcap,
                                          slopes ? slopes + kv_head * G + g : nullptr, position + r - begin - low,
                                          key_rows.scales_from(low), value_rows.scales_from(low));
            std::fill(weight, weight + low, 0.0f);
            std::fill(weight + high, weight + SPAN, 0.0f);
          }
          if (!by_amx) std::fill_n(of_span.data(), R * value_width, 0.0f);
          int64_t inputs = padded(seen, together) - unseen;
          const A* weight_rows;
          if constexpr (std::is_same_v<A, float>) {
            weight_rows = &scores[unseen];
          } else {
            weight_rows = weights.data();
            for (int64_t r = 0; r < R; r++) narrow_row(&weights[r * ROW], &scores[r * ROW + unseen], inputs);
          }
          for (int64_t block = 0; block < value_width; block += OUTPUTS)
            multiply(R, &of_span[block], value_width, weight_rows, ROW, &values[block * SPAN + unseen * OUTPUTS],
                     inputs);
          for (int64_t r = 0; r < R; r++)
            if (sees[r])
              merge(&sums[(place + r) * value_width], peak[place + r], total[place + r], &of_span[r * value_width],
                    span_totals[r].first, span_totals[r].second, Dv);
        });
      }
      for (int64_t g = 0; g < G; g++)
        for (int64_t t = 0; t < rows; t++) {
          int64_t r = g * in_part + t;
          write_mean(out + ((part * in_part + t) * H + kv_head * G + g) * Dv, &sums[r * value_width], total[r], Dv);
        }
    }
  }
}
