// Attention from one new token each of many sequences over their cache blocks. Blocks that several sequences share, as
// after prefix hits, are read once for several of them. Shape letters as in prompt_attention.h; n sequences are in a task.

#pragma once

#include "prompt_attention.h"

// Calls use(row, constant height) for tiles of `rows` rows: of VECTORS rows, whose sums fit in the registers, then of fewer.
template <int R = VECTORS, class Use>
static inline void for_each_tile(int64_t rows, Use use, int64_t row = 0) {
  for (; row + R <= rows; row += R) use(row, std::integral_constant<int, R>());
  if constexpr (R > 1) for_each_tile<R - 1>(rows, use, row);
}

// The slots of a span's tokens [low, high), and what surrounds these tokens in their sixteens: copies of the first or last.
struct Slots {
  int64_t low, high;
  std::array<int64_t, SPAN> of;

  Slots(const int32_t* table, int64_t begin, int64_t low, int64_t high, int64_t B) : low(low), high(high) {
    int64_t block = (begin + low) / B, place = (begin + low) % B;
    for (int64_t t = low; t < high; t++) {
      of[t] = table[block] * B + place;
      if (++place == B) block++, place = 0;
    }
    std::fill(&of[low / 16 * 16], &of[low], of[low]);
    for (int64_t t = high; t % 16; t++) of[t] = of[high - 1];
  }

  // Returns the addresses of K or V (K, D) of N tokens as R: in place, or copied, with heads `width` apart.
  template <int N, class R, class C>
  std::array<const R*, N> read(const C* cache, int64_t t, int64_t K, int64_t D, int64_t width) const {
    static thread_local std::vector<R> kept;
    const bool is_copied = !std::is_same_v<R, C> || width != D;
    R* copy = room_for(is_copied ? N * K * width : 0, kept);
    std::array<const R*, N> tokens;
    for (int64_t j = 0; j < N; j++) {
      const C* token = cache + of[t + j] * row_size(K, D);
      tokens[j] = is_copied ? copy : (const R*)token;
      for (int64_t k = 0; k < K && is_copied; k++, copy += width) {
        convert_row(copy, token + k * D, D);
        std::fill(copy + D, copy + width, R{});
      }
    }
    return tokens;
  }

  // Prefetches a head of n tokens from t on into the L2 cache: the L1 cache has no room for all heads of 16 tokens. GCC
  // drops calls of a function that does nothing else, so this one has to be inlined.
  template <class C>
  __attribute__((always_inline)) void prefetch(const C* cache, int64_t t, int64_t n, int64_t head, int64_t K,
                                               int64_t D) const {
    for (int64_t end = std::min(t + n, high); t < end; t++) {
      const C* token = cache + of[t] * row_size(K, D) + head * D;
      for (int64_t i = 0; i < D; i += 64 / sizeof(C)) __builtin_prefetch(token + i, 0, 2);
    }
  }

  // Copies the tokens' scales to their places in (K, SPAN).
  template <class C>
  void read_scales(float* scales, const C* cache, int64_t K, int64_t D) const {
    for (int64_t t = low; t < high; t++)
      for (int64_t head = 0; head < K; head++)
        scales[head * SPAN + t] = scale_of(cache + of[t] * row_size(K, D), head, K, D);
  }
};

// The type F of queries and weights is Factor<X>. In 16-bit dtypes with an int8 cache, a row of them is rounded to 16-bit
// integers, with a scale, because multiplying integers takes half the instructions of converting K and V. Otherwise these
// are converted to F: numbers of 16 bits to float in registers, others in memory. R is what the registers load.
template <class F>
constexpr bool IS_INTEGER = std::is_same_v<F, int16_t>;
template <class F, class C>
using Read = std::conditional_t<IS_INTEGER<F> || (std::is_same_v<F, float> && sizeof(C) == 2), C, F>;
template <class F>
using Sums = std::conditional_t<IS_INTEGER<F>, integers, floats>;
template <class F>
using Sum = std::conditional_t<IS_INTEGER<F>, int32_t, float>;
constexpr int QUERY_LIMIT = 16383, WEIGHT_LIMIT = 32767;  // so that sums of D < 1032 or SPAN products fit in 32 bits

// Converts a row, and returns its scale.
template <int LIMIT, class F, class X>
static float convert_factors(F* out, const X* row, int64_t n) {
  static thread_local std::vector<float> room;
  float scale = 1;
  int32_t sum;
  if constexpr (IS_INTEGER<F>) round_floats<LIMIT>(out, scale, sum, as_inputs<float>(room, row, n), n);
  else convert_row(out, row, n);
  return scale;
}

// These add two products to each lane, in pairs of neighbors.
typedef int8_t bytes __attribute__((vector_size(LANES * 2)));
typedef int16_t pairs __attribute__((vector_size(LANES * 4)));
static inline integers widened(bytes narrow) {
#if defined(__AVX512BW__)  // GCC converts each half by itself
  return (integers)_mm512_cvtepi8_epi16((__m256i)narrow);
#elif defined(__AVX2__)
  return (integers)_mm256_cvtepi8_epi16((__m128i)narrow);
#else
  return (integers)__builtin_convertvector(narrow, pairs);
#endif
}
static inline integers widened(pairs wide) { return (integers)wide; }
static inline integers add_two(integers sum, integers a, integers b) {
#if defined(__AVX512VNNI__)
  return (integers)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sum + (integers)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (integers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
#ifdef __AVX512BF16__
static inline floats add_two(floats sum, integers a, integers b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
#endif
// Returns 2 LANES numbers as two registers: of bf16, which are the halves of 32 bits, first the even ones.
template <class R>
static inline std::pair<floats, floats> two_floats(const R* from) {
  if constexpr (std::is_same_v<R, bf16>) return {weights_of(from, 0, 0), weights_of(from, 1, 0)};
  else return {weights_of(from, 0, 0), weights_of(from, 0, 1)};
}
template <class R>  // 2 LANES numbers that are read as R
using Numbers = std::conditional_t<sizeof(R) == 1, bytes, pairs>;

// Interleaves the first or the second halves of each 16 bytes of a and b, which is one instruction.
template <int HALF, class V, int... I>
static inline V interleave_lanes(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int N = sizeof...(I), M = sizeof(V) > 16 ? 16 * N / sizeof(V) : N;
  return pick_lanes<I / M * M + (I % M + HALF * M) / 2 + I % 2 * N...>(a, b);
}

// Interleaves 2 LANES elements of two rows in two registers. `put_in_order` has the order of the pairs.
template <class R>
static inline std::pair<integers, integers> interleaved(const R* a, const R* b) {
  auto first = load_as<Numbers<R>>(a), second = load_as<Numbers<R>>(b);
  std::make_integer_sequence<int, 2 * LANES> each;
  return {widened(interleave_lanes<0>(first, second, each)), widened(interleave_lanes<1>(first, second, each))};
}

// In two registers, numbers are in groups, which belong to the first and the second one in turns: pairs of interleaved rows
// to half a lane.
template <class F, class R>
constexpr int64_t GROUP = STEP<F> == 2 ? std::min<int64_t>(LANES, 8 / sizeof(R)) : std::is_same_v<R, bf16> ? 1 : LANES;

// Writes the n sums of `add_values`, times `scale`, in order. n is a multiple of 2 LANES.
template <int64_t GROUP, class S>
static void put_in_order(float* __restrict out, const S* __restrict sums, float scale, int64_t n) {
  for (int64_t i = 0; i < n; i += 2 * LANES)
    for (int64_t j = 0; j < LANES; j += GROUP)
      for (int64_t half = 0; half < 2; half++)
        for (int64_t k = 0; k < GROUP; k++)
          out[i + 2 * j + half * GROUP + k] = sums[i + half * LANES + j + k] * scale;
}

// Puts numbers in the order of `two_floats` for bf16.
static void split_pairs(float* numbers, int64_t n) {
  float kept[2 * LANES];
  for (int64_t i = 0; i < n; i += 2 * LANES) {
    memcpy(kept, numbers + i, sizeof kept);
    for (int64_t j = 0; j < 2 * LANES; j++) numbers[i + j % 2 * LANES + j / 2] = kept[j];
  }
}

#ifndef EXACT
template <class X>
using Factor = std::conditional_t<HAS_SCALES && sizeof(X) == 2, int16_t, Input<X>>;

template <class F, class R>
static inline Sums<F> add_products(Sums<F> sum, const F* a, const R* b) {
  if constexpr (STEP<F> == 2) {
    return add_two(sum, load_as<integers>(a), widened(load_as<Numbers<R>>(b)));
  } else {
    auto [first, second] = two_floats(b);
    return sum + load_as<floats>(a) * first + load_as<floats>(a + LANES) * second;
  }
}

// Computes scores[row] = q[row] . key for tokens of a span, `rows` rows of each K/V head: the first ones of `stride`. Rows
// of q are `width` apart, and those of scores ROW. Meanwhile, the scales of V, which are needed next, are prefetched.
constexpr int64_t SCORES = 16;  // computed at a time
template <class X, class F>
static void write_scores(float* scores, const F* q, const Cached<X>* cache, const Cached<X>* v_cache, const Slots& slots,
                         int64_t rows, int64_t stride, int64_t K, int64_t D, int64_t Dv, int64_t width) {
  static thread_local std::vector<Sums<F>> kept;
  Sums<F>* parts = room_for(K * stride * 4, kept);  // (K, stride, 4): of four tokens each
  for (int64_t t = slots.low / 16 * 16; t < slots.high; t += 16) {
    auto keys = slots.read<16, Read<F, Cached<X>>>(cache, t, K, D, width);
    for (int64_t j = 0; j < std::min<int64_t>(16, slots.high - t); j += 4) {
      for (int64_t i = t + j; HAS_SCALES && i < t + j + 4; i++)
        __builtin_prefetch(v_cache + slots.of[i] * row_size(K, Dv) + K * Dv, 0, 2);
      for (int64_t head = 0; head < K; head++) {
        slots.prefetch(cache, t + j + 16, 4, head, K, D);
        for_each_tile(rows, [&](int64_t row, auto height) {
          constexpr int R = decltype(height)::value;
          const F* of_tile = q + (head * stride + row) * width;
          Sums<F> sum[R][4] = {};
          for (int64_t d = 0; d < width; d += 2 * LANES)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
              for (int i = 0; i < 4; i++)
                sum[r][i] = add_products<F>(sum[r][i], of_tile + r * width + d, keys[j + i] + head * width + d);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) parts[(head * stride + row + r) * 4 + j / 4] = add_neighbors<4>(sum[r]);
        });
      }
    }
    for (int64_t head = 0; head < K; head++)
      for (int64_t row = head * stride; row < head * stride + rows; row++)
        for (int64_t j = 0; j < 16; j += LANES) {
          floats sums = __builtin_convertvector(add_neighbors<LANES / 4>(&parts[row * 4 + j / 4]), floats);
          memcpy(scores + row * ROW + t + j, &sums, sizeof sums);
        }
  }
}
#else
template <class X>
using Factor = Input<X>;

// Computes the same in the order of sums of prefill_attention (docs/guide/bits.md).
constexpr int64_t SCORES = OUTPUTS;
template <class X, class A>
static void write_scores(float* scores, const A* q, const Cached<X>* cache, const Cached<X>*, const Slots& slots,
                         int64_t rows, int64_t stride, int64_t K, int64_t D, int64_t, int64_t width) {
  static thread_local std::vector<A> kept;
  A* keys = room_for(OUTPUTS * width, kept);
  HeadRows<A, X> key_rows(D);
  for (int64_t block = slots.low / OUTPUTS * OUTPUTS; block < slots.high; block += OUTPUTS)
    for (int64_t head = 0; head < K; head++) {
      int64_t first = std::max<int64_t>(slots.low - block, 0), last = std::min(slots.high - block, OUTPUTS);
      auto slot = [&](int64_t t) { return slots.of[block + t]; };
      auto key = [&](int64_t t) { return key_rows.at(cache, slot, t, head, K); };
      slots.prefetch(cache, block + OUTPUTS, OUTPUTS, head, K, D);
      key_rows.read(cache, slot, first, last, head, K);
      pack_keys(keys, key, first, last, D);
      for (int64_t tile = 0; tile < num_tiles_of(rows); tile++) {
        auto [row, end] = tile_of(rows, tile);
        float* to = scores + (head * stride + row) * ROW + block;
        for (int64_t r = 0; r < end - row; r++) std::fill_n(to + r * ROW, OUTPUTS, 0.0f);
        TILES<A, A, false>[end - row - 1](to, ROW, q + (head * stride + row) * width, width, keys,
                                          plain((D + STEP<A> - 1) / STEP<A> * STEP<A>), nullptr, 0);
      }
    }
}
#endif

// Computes sums[row] += weights[row][t] * value for tokens of a span, token after token as a product adds its inputs.
// Rows of sums are `width` apart, which is a multiple of 2 LANES.
template <class F, class C>
static void add_values(Sum<F>* sums, const F* weights, const C* cache, const Slots& slots, int64_t rows, int64_t stride,
                       int64_t K, int64_t D, int64_t width) {
  constexpr int64_t TOKENS = 32 / sizeof(F);  // whose values stay in the L1 cache for all rows
  for (int64_t t = slots.low / TOKENS * TOKENS; t < slots.high; t += TOKENS) {
    auto values = slots.read<TOKENS, Read<F, C>>(cache, t, K, D, width);
    int64_t first = std::max(slots.low, t) / STEP<F> * STEP<F>, last = std::min(slots.high, t + TOKENS);
    for (int64_t head = 0; head < K; head++) {
      slots.prefetch(cache, t + 16, TOKENS, head, K, D);
      for (int64_t d = 0; d < width; d += 2 * LANES)
        for_each_tile(rows, [&](int64_t row, auto height) {
          constexpr int R = decltype(height)::value;
          const F* weight = weights + (head * stride + row) * ROW;
          Sum<F>* to = sums + (head * stride + row) * width + d;
          Sums<F> sum[R][2];
#pragma GCC unroll 4
          for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) sum[r][i] = load_as<Sums<F>>(to + r * width + i * LANES);
          for (int64_t j = first; j < last; j += STEP<F>) {
            const Read<F, C>* value = values[j - t] + head * width + d;
            if constexpr (STEP<F> == 2) {  // one instruction adds two tokens to a sum
              auto [a, b] = interleaved(value, values[j - t + 1] + head * width + d);
              for (int r = 0; r < R; r++) {
                integers pair = integers{} + load_as<int32_t>(weight + r * ROW + j);
                sum[r][0] = add_two(sum[r][0], pair, a);
                sum[r][1] = add_two(sum[r][1], pair, b);
              }
            } else {
              auto [a, b] = two_floats(value);
              for (int r = 0; r < R; r++) sum[r][0] += weight[r * ROW + j] * a, sum[r][1] += weight[r * ROW + j] * b;
            }
          }
#pragma GCC unroll 4
          for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) memcpy(to + r * width + i * LANES, &sum[r][i], sizeof sum[r][i]);
        });
    }
  }
}

// The work of several sequences, the members [from, to), in a span: attend to its tokens from `low` on. Up to `common`,
// the tokens are the same for all members.
struct Task {
  int64_t begin, low, common;
  size_t from, to;
};
struct Member {
  int64_t sequence, result, low, high;  // attends to [low, high) of the span
  const int32_t *blocks, *end;          // of these tokens
};

// Divides the attention of sequences, each to positions [starts, seq_lens), into tasks of up to `most` sequences. Members of
// a task are neighbors when the members of a span are sorted by their blocks.
static void plan(std::vector<Task>& tasks, std::vector<Member>& members, std::vector<int64_t>& first_result,
                 const int32_t* block_tables, const int32_t* seq_lens, int64_t S, int64_t blocks, int64_t B,
                 int64_t window, int64_t most) {
  auto start_of = [&](int64_t s) { return window ? std::max<int64_t>(0, seq_lens[s] - window) : 0; };
  int64_t longest = 0, threads = omp_get_max_threads(), num_results = 0;
  for (int64_t s = 0; s < S; s++) {
    longest = std::max<int64_t>(longest, seq_lens[s]);
    first_result.push_back(num_results);
    num_results += (seq_lens[s] + SPAN - 1) / SPAN - start_of(s) / SPAN;
  }
  first_result.push_back(num_results);
  most = std::clamp<int64_t>(num_results / (2 * threads), 1, most);  // there is work for all threads
  for (int64_t begin = 0; begin < longest; begin += SPAN) {
    size_t from = members.size();
    for (int64_t s = 0; s < S; s++) {
      int64_t start = start_of(s), first = std::max(begin, start), last = std::min<int64_t>(begin + SPAN, seq_lens[s]);
      if (first >= last) continue;
      const int32_t* table = block_tables + s * blocks;
      members.push_back({s, first_result[s] + begin / SPAN - start / SPAN, first - begin, last - begin,
                         table + first / B, table + (last - 1) / B + 1});
    }
    if (most > 1)
      std::sort(members.begin() + from, members.end(), [](const Member& a, const Member& b) {
        return a.low != b.low ? a.low < b.low : std::lexicographical_compare(a.blocks, a.end, b.blocks, b.end);
      });
    // Returns the end of what a member and the next one share, at a multiple of SCORES, or 0.
    auto shared = [&](size_t i) -> int64_t {
      if (most == 1 || i + 1 >= members.size()) return 0;
      const Member &a = members[i], &b = members[i + 1];
      if (a.low != b.low || *a.blocks != *b.blocks) return 0;
      int64_t same = std::mismatch(a.blocks, a.end, b.blocks, b.end).first - a.blocks;
      int64_t end = std::min({((begin + a.low) / B + same) * B - begin, a.high, b.high}) / SCORES * SCORES;
      return end > a.low ? end : 0;
    };
    while (from < members.size()) {
      size_t to = from + 1;
      int64_t common = shared(from);
      for (; int64_t(to - from) < most && common && shared(to - 1) == common && shared(to) <= common; to++) {}
      if (to - from == 1) common = 0;
      tasks.push_back({begin, members[from].low, std::max(common, members[from].low), from, to});
      from = to;
    }
  }
}

// The new token of sequence i, row rows[i] of q (T, H, D), attends to the last `window` (0: all) of the sequence's
// seq_lens[i] tokens. A long sequence is divided into spans of SPAN tokens, with weights of their own, and the results are
// merged at the end: flash-decoding (https://pytorch.org/blog/flash-decoding). Spans and the order of sums depend only on
// the positions, so a result does not depend on the batch or on shared blocks. With -DEXACT they are those of
// prefill_attention, so results are equal to the last bit, but with AMX, which has another order.
template <class X>
static void decode_attention(X* out, const X* q, const Cached<X>* k_cache, const Cached<X>* v_cache,
                             const int32_t* block_tables, const int32_t* seq_lens, const int64_t* rows, int64_t S,
                             int64_t blocks, int64_t H, int64_t K, int64_t D, int64_t Dv, int64_t B, float scale,
                             int64_t window, float softcap, const float* sinks, const float* slopes) {
  using F = Factor<X>;
  auto padded = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
  int64_t G = H / K, query_width = padded(D, 2 * LANES), width = padded(Dv, 2 * LANES);
  std::vector<Task> tasks;
  std::vector<Member> members;
  std::vector<int64_t> first_result;
  plan(tasks, members, first_result, block_tables, seq_lens, S, blocks, B, window, std::clamp<int64_t>(128 / H, 2, 8));
  size_t most = 1;
  for (const Task& task : tasks) most = std::max(most, task.to - task.from);
  // For each sequence and span: the sum of values per head, then the largest score and the sum of weights per head.
  int64_t size = H * (width + 2);
  static thread_local std::vector<float> kept;
  float* results = room_for(first_result[S] * size, kept);
#pragma omp parallel
  {
    // Their rows are (K, n, G).
    std::vector<float> scores(most * H * ROW), query_scales(most * H), weight_scales(most * H, 1);
    std::vector<Sum<F>> sums(most * H * width);
    std::vector<F> queries(most * H * query_width), weights(std::is_same_v<F, float> ? 0 : most * H * ROW);
    std::vector<float> scales(HAS_SCALES ? most * 2 * K * SPAN : 0);  // of each member: the keys', then the values'
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < tasks.size(); i++) {
      const Task& task = tasks[i];
      int64_t begin = task.begin, n = task.to - task.from;
      const Member* all = &members[task.from];
      auto each_row = [&](auto use) {  // calls use(m, head, row)
        for (int64_t m = 0; m < n; m++)
          for (int64_t head = 0; head < H; head++) use(m, head, (head / G * n + m) * G + head % G);
      };
      // Calls use(slots, first member, number of members) for what all share, then for the rest of each.
      auto each_part = [&](auto use) {
        auto call = [&](int64_t m, int64_t count, int64_t low, int64_t high) {
          const int32_t* table = block_tables + all[m].sequence * blocks;
          if (low < high) use(Slots(table, begin, low, high, B), m, count);
        };
        call(0, n, task.low, task.common);
        for (int64_t m = 0; m < n; m++) call(m, 1, task.common, all[m].high);
      };
      each_row([&](int64_t m, int64_t head, int64_t row) {
        const X* query = q + (rows[all[m].sequence] * H + head) * D;
        query_scales[row] = convert_factors<QUERY_LIMIT>(&queries[row * query_width], query, D);
#ifndef EXACT
        if constexpr (GROUP<F, Read<F, Cached<X>>> == 1) split_pairs(&queries[row * query_width], query_width);
#endif
      });
      each_part([&](const Slots& slots, int64_t m, int64_t count) {
        write_scores<X>(&scores[m * G * ROW], &queries[m * G * query_width], k_cache, v_cache, slots, count * G, n * G, K,
                        D, Dv, query_width);
        if constexpr (HAS_SCALES)
          for (float* to = &scales[m * 2 * K * SPAN]; count--; to += 2 * K * SPAN) {
            slots.read_scales(to, k_cache, K, D);
            slots.read_scales(to + K * SPAN, v_cache, K, Dv);
          }
      });
      each_row([&](int64_t m, int64_t head, int64_t row) {
        auto [sequence, result, low, high, _, __] = all[m];
        float *mine = &scores[row * ROW], *totals = results + result * size + H * width + 2 * head;
        const float* of_keys = HAS_SCALES ? &scales[(m * 2 * K + head / G) * SPAN + low] : nullptr;
        std::tie(totals[0], totals[1]) =
            exponentials(mine + low, high - low, scale * query_scales[row], softcap, slopes ? slopes + head : nullptr,
                         seq_lens[sequence] - 1 - begin - low, of_keys, HAS_SCALES ? of_keys + K * SPAN : nullptr);
        std::fill(mine, mine + low, 0.0f);
        mine[high] = 0;
        if constexpr (!std::is_same_v<F, float>)
          weight_scales[row] = convert_factors<WEIGHT_LIMIT>(&weights[row * ROW], mine, high + 1);
      });
      std::fill_n(sums.data(), n * H * width, Sum<F>(0));
      each_part([&](const Slots& slots, int64_t m, int64_t count) {
        const F* of_rows = std::is_same_v<F, float> ? (const F*)scores.data() : weights.data();
        add_values(&sums[m * G * width], of_rows + m * G * ROW, v_cache, slots, count * G, n * G, K, Dv, width);
      });
      each_row([&](int64_t m, int64_t head, int64_t row) {
        float* to = results + all[m].result * size + head * width;
        put_in_order<GROUP<F, Read<F, Cached<X>>>>(to, &sums[row * width], weight_scales[row], width);
      });
    }
    std::vector<float> row(Dv);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < S * H; i++) {
      int64_t s = i / H, head = i % H;
      float peak = sinks ? sinks[head] : -INFINITY, total = sinks ? 1 : 0;
      std::fill(row.begin(), row.end(), 0.0f);
      for (int64_t index = first_result[s]; index < first_result[s + 1]; index++) {
        const float *result = &results[index * size], *totals = result + H * width + 2 * head;
        merge(row.data(), peak, total, result + head * width, totals[0], totals[1], Dv);
      }
      write_mean(out + (rows[s] * H + head) * Dv, row.data(), total, Dv);
    }
  }
}
