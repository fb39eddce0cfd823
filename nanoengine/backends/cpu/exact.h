// Attention for decodes that adds in the same order as prefill_attention: for kernels compiled with -DEXACT
// (docs/guide/bits.md).
// Shape letters as in attention.h.

#pragma once

#include "attention.h"

// Computes sums[head] += weights[head][t] * values[t][head / G] for four tokens, in the order in which a matrix product
// adds its inputs. sums is (H, width), and values has four arrays (K, width).
template <class A>
static void add_in_order(float* sums, const A* weights, const A* const* values, int64_t H, int64_t K, int64_t width) {
  for (int64_t head = 0; head < H; head++, sums += width, weights += ROW) {
    const A* value[4];
    for (int j = 0; j < 4; j++) value[j] = values[j] + head / (H / K) * width;
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<A, bf16>) {  // one instruction adds two tokens to a sum
      __m512bh first = (__m512bh)_mm512_set1_epi32(weights[0].bits | uint32_t(weights[1].bits) << 16);
      __m512bh second = (__m512bh)_mm512_set1_epi32(weights[2].bits | uint32_t(weights[3].bits) << 16);
      for (int64_t i = 0; i < width; i += 32) {
        auto [a, b] = interleaved(value[0] + i, value[1] + i);
        auto [c, d] = interleaved(value[2] + i, value[3] + i);
        __m512 low = _mm512_dpbf16_ps(_mm512_loadu_ps(sums + i), first, a);
        __m512 high = _mm512_dpbf16_ps(_mm512_loadu_ps(sums + i + 16), first, b);
        _mm512_storeu_ps(sums + i, _mm512_dpbf16_ps(low, second, c));
        _mm512_storeu_ps(sums + i + 16, _mm512_dpbf16_ps(high, second, d));
      }
      continue;
    }
#endif
    float weight[4];
    widen_row(weight, weights, 4);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
      float sum = sums[i] + weight[0] * load(value[0][i]);
      sum += weight[1] * load(value[1][i]);
      sum += weight[2] * load(value[2][i]);
      sums[i] = sum + weight[3] * load(value[3][i]);
    }
  }
}

// The new token of sequence i, row rows[i] of q (T, H, D), attends to the last `window` (0: all) of the sequence's
// seq_lens[i] tokens. A long sequence is divided into tasks of SPAN tokens each, with weights of their own, and the
// results are merged at the end: flash-decoding (https://pytorch.org/blog/flash-decoding). Spans and the order of sums
// are those of prefill_attention, so results are equal to the last bit, except with AMX.
template <class X>
static void decode_attention(X* out, const X* q, const X* k_cache, const X* v_cache, const int32_t* block_tables,
                             const int32_t* seq_lens, const int64_t* rows, int64_t S, int64_t blocks, int64_t H,
                             int64_t K, int64_t D, int64_t Dv, int64_t B, float scale, int64_t window,
                             float softcap, const float* sinks, const float* slopes) {
  using A = Input<X>;
  constexpr bool IN_PAIRS = STEP<A> == 2;
  struct Task {
    int64_t sequence, begin, first, end;  // attends to [first, end) of the span from `begin` on
  };
  std::vector<Task> tasks;
  std::vector<int64_t> first_task{0};
  for (int64_t s = 0; s < S; s++) {
    int64_t length = seq_lens[s], start = window ? std::max<int64_t>(0, length - window) : 0;
    for (int64_t begin = start / SPAN * SPAN; begin < length; begin += SPAN)
      tasks.push_back({s, begin, std::max(begin, start), std::min(begin + SPAN, length)});
    first_task.push_back(tasks.size());
  }
  // For each task: the sum of values per head, then the largest score and the sum of weights per head.
  int64_t G = H / K, query_width = IN_PAIRS ? (D + 1) / 2 * 2 : D, width = IN_PAIRS ? (Dv + 31) / 32 * 32 : Dv;
  int64_t size = H * (width + 2);
  static thread_local std::vector<float> kept;  // kept between calls: new memory takes longer than the work
  if (kept.size() < tasks.size() * size) kept.resize(tasks.size() * size);
  float* results = kept.data();
#pragma omp parallel
  {
    std::vector<float> scores(H * ROW);
    std::vector<A> weights(H * ROW), queries(H * query_width), keys(OUTPUTS * query_width);
    bool is_copied = !std::is_same_v<A, X> || width != Dv;
    std::vector<A> room(is_copied ? 4 * K * width : 0);
    std::array<int64_t, SPAN> slots;
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < tasks.size(); i++) {
      auto [s, begin, first, end] = tasks[i];
      int64_t low = first - begin, high = end - begin;
      for (int64_t t = low; t < high; t++) slots[t] = block_tables[s * blocks + (begin + t) / B] * B + (begin + t) % B;
      for (int64_t head = 0; head < H; head++)
        convert_row(&queries[head * query_width], q + (rows[s] * H + head) * D, D);
      for (int64_t block = low / OUTPUTS * OUTPUTS; block < high; block += OUTPUTS)
        for (int64_t kv_head = 0; kv_head < K; kv_head++) {
          auto key = [&](int64_t t) { return k_cache + (slots[block + t] * K + kv_head) * D; };
          int64_t last = std::min(high - block, OUTPUTS);
          for (int64_t t = OUTPUTS; t < std::min(high - block, 2 * OUTPUTS); t++) fetch(key(t), D);
          pack_keys(keys.data(), key, std::max<int64_t>(low - block, 0), last, D);
          for (int64_t tile = 0; tile < num_tiles_of(G); tile++) {
            auto [row, end_row] = tile_of(G, tile);
            float* to = &scores[(kv_head * G + row) * ROW + block];
            for (int64_t r = 0; r < end_row - row; r++) std::fill_n(to + r * ROW, OUTPUTS, 0.0f);
            TILES<A, A, false>[end_row - row - 1](to, ROW, &queries[(kv_head * G + row) * query_width], query_width,
                                                  keys.data(), plain(query_width), nullptr, 0);
          }
        }
      float *sums = &results[i * size], *totals = sums + H * width;
      std::fill(sums, totals, 0.0f);
      for (int64_t head = 0; head < H; head++) {
        float* mine = &scores[head * ROW];
        std::tie(totals[2 * head], totals[2 * head + 1]) = exponentials(
            mine + low, high - low, scale, softcap, slopes ? slopes + head : nullptr, seq_lens[s] - 1 - first);
        std::fill(mine, mine + low, 0.0f);
        std::fill(mine + high, mine + ROW, 0.0f);
        narrow_row(&weights[head * ROW], mine, high);
        std::fill(&weights[head * ROW] + high, &weights[head * ROW] + high + 4, narrow<A>(0));
      }
      for (int64_t t = low / 4 * 4; t < high; t += 4) {
        const A* four[4];
        for (int64_t j = 0; j < 4; j++) {
          const X* value = v_cache + slots[std::clamp(t + j, low, high - 1)] * K * Dv;
          fetch(v_cache + slots[std::min(t + j + 8, high - 1)] * K * Dv, K * Dv);
          if (is_copied) {
            A* copy = &room[j * K * width];
            for (int64_t k = 0; k < K; k++) convert_row(copy + k * width, value + k * Dv, Dv);
            four[j] = copy;
          } else if constexpr (std::is_same_v<A, X>) {
            four[j] = value;
          }
        }
        add_in_order(sums, &weights[t], four, H, K, width);
      }
    }
    std::vector<float> sums(Dv);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < S * H; i++) {
      int64_t s = i / H, head = i % H;
      float peak = sinks ? sinks[head] : -INFINITY, total = sinks ? 1 : 0;
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t task = first_task[s]; task < first_task[s + 1]; task++) {
        const float *result = &results[task * size], *totals = result + H * width + 2 * head;
        merge(sums.data(), peak, total, result + head * width, totals[0], totals[1], Dv);
      }
      write_mean(out + (rows[s] * H + head) * Dv, sums.data(), total, Dv);
    }
  }
}
