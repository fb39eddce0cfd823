// Numbers of fewer bits than a float, and products with packed weights of them: the part of kernels.cpp that depends on
// the instruction set. Shape letters: T tokens, I inputs, N outputs of a layer.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include <omp.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

// ---- Numbers, and vectors of them ---------------------------------------------------------------

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

#ifdef __FLT16_MAX__  // the compiler has the type
#ifdef __aarch64__
typedef __fp16 half;
#else
typedef _Float16 half;
#endif
struct fp16 {
  half number;
};
static inline float load(fp16 x) { return x.number; }
template <>
inline fp16 narrow(float x) { return {half(x)}; }
#endif

template <class X>
static inline float rounded(float x) { return load(narrow<X>(x)); }

template <class X, class Y>
static void narrow_row(X* __restrict out, const Y* __restrict row, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = narrow<X>(load(row[i]));
}

template <class X>
static void widen_row(float* __restrict out, const X* __restrict row, int64_t n) {
  int64_t i = 0;
#if defined(__FLT16_MAX__) && defined(__F16C__)  // the compiler would convert one at a time
  if constexpr (std::is_same_v<X, fp16>)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(row + i))));
#endif
  for (; i < n; i++) out[i] = load(row[i]);
}

// A row as A: X, float or bf16.
template <class A, class X>
static void convert_row(A* __restrict out, const X* __restrict row, int64_t n) {
  if constexpr (std::is_same_v<A, X>) memcpy(out, row, n * sizeof(X));
  else if constexpr (std::is_same_v<A, float>) widen_row(out, row, n);
  else narrow_row(out, row, n);
}

// n numbers as A, which is X or float: where they are, or converted into `room`.
template <class A, class X>
static const A* as_inputs(std::vector<float>& room, const X* x, int64_t n) {
  if constexpr (std::is_same_v<A, X>) {
    return x;
  } else {
    if (int64_t(room.size()) < n) room.resize(n);
    widen_row(room.data(), x, n);
    return room.data();
  }
}

// ---- Products ------------------------------------------------------------------------------------

// A register in the vector extension that GCC and Clang share: one source for every instruction set. A tile's sums,
// ROWS x VECTORS registers, the weights of an input and a number of x are what there is room for. Weights that have to
// be converted are so once for more than MANY rows, PART inputs at a time; for fewer, each tile converts. With FETCH_FROM
// rows and more the next block is fetched while this one is in use: fewer wait for memory all the time.
#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4, ROWS = 6, MANY = 48, FETCH_FROM = 7;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2, ROWS = 5, MANY = 12, FETCH_FROM = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, VECTORS = 4, ROWS = 6, MANY = 48, FETCH_FROM = 7;
#else
constexpr int LANES = 4, VECTORS = 2, ROWS = 5, MANY = 12, FETCH_FROM = 2;
#endif
constexpr int64_t OUTPUTS = LANES * VECTORS;
constexpr int64_t PART = 512;
typedef float floats __attribute__((vector_size(LANES * 4)));
typedef float floats_anywhere __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int16_t shorts __attribute__((vector_size(LANES * 2)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));

template <class V>
static inline V load_as(const void* from) {
  V vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}

// A packed weight is (ceil(N / OUTPUTS), I / STEP, OUTPUTS, STEP): blocks of OUTPUTS outputs, whose weights of an input
// lie together. Of bf16 two inputs share a step, so that an output has 32 bits of it, as of its sum. int8 lies as bf16,
// and has a scale per output. x is Input<W>: what W is multiplied with here.
template <class W>
constexpr bool IS_INT8 = std::is_same_v<W, int8_t>;
template <class W>
constexpr int64_t STEP = std::is_same_v<W, bf16> || IS_INT8<W> ? 2 : 1;
#ifdef __AVX512BF16__
template <class W>
using Input = std::conditional_t<STEP<W> == 2, bf16, float>;
#else
template <class W>
using Input = float;
#endif

// Weights of LANES outputs and of input i of a step.
static inline floats widened(const float* weight, int) { return load_as<floats>(weight); }
static inline floats widened(const bf16* pairs, int i) {
  bits both = load_as<bits>(pairs);
  return (floats)(i ? both & 0xffff0000 : both << 16);
}
static inline floats widened(const int8_t* pairs, int i) {
  shorts both = load_as<shorts>(pairs);
  return __builtin_convertvector(i ? both >> 8 : both << 8 >> 8, floats);
}
#ifdef __FLT16_MAX__
static inline floats widened(const fp16* weight, int) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(load_as<__m256i>(weight));
#elif defined(__F16C__)
  return (floats)_mm256_cvtph_ps(load_as<__m128i>(weight));
#else
  floats wide;
  for (int i = 0; i < LANES; i++) wide[i] = load(weight[i]);
  return wide;
#endif
}
#endif

#ifdef __AVX512BF16__
// Weights of LANES outputs and of both inputs of a step. An int8 has a bf16 of its own.
static inline __m512bh both_of(const bf16* pairs) { return (__m512bh)_mm512_loadu_si512(pairs); }
static inline __m512bh both_of(const int8_t* pairs) {
  auto wide = [](const int8_t* x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x))); };
  return _mm512_cvtne2ps_pbh(wide(pairs + 16), wide(pairs));
}
#endif

// Add to R rows of sums, OUTPUTS wide and `row` apart, the product of R rows of x, `stride` apart, with `inputs` inputs of
// a block of weights. Meanwhile `lines` cache lines for every four steps are fetched from `next` on.
template <class W, int R>
static void multiply_tile(float* sums, int64_t row, const Input<W>* x, int64_t stride, const W* weight,
                          int64_t inputs, const char* next, int64_t lines) {
  floats sum[R][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int j = 0; j < VECTORS; j++) sum[r][j] = *(floats_anywhere*)(sums + r * row + j * LANES);
  auto take_step = [&sum, stride](const Input<W>* x, const W* weight) __attribute__((always_inline)) {
#ifdef __AVX512BF16__
    if constexpr (STEP<W> == 2) {
      __m512bh both[VECTORS];
      for (int j = 0; j < VECTORS; j++) both[j] = both_of(weight + j * LANES * 2);
      for (int r = 0; r < R; r++) {
        int32_t pair;
        memcpy(&pair, x + r * stride, 4);
        for (int j = 0; j < VECTORS; j++)
          sum[r][j] = _mm512_dpbf16_ps(sum[r][j], (__m512bh)_mm512_set1_epi32(pair), both[j]);
      }
      return;
    }
#endif
    for (int i = 0; i < STEP<W>; i++) {
      floats wide[VECTORS];
      for (int j = 0; j < VECTORS; j++) wide[j] = widened(weight + j * LANES * STEP<W>, i);
      for (int r = 0; r < R; r++)
        for (int j = 0; j < VECTORS; j++) sum[r][j] += load(x[r * stride + i]) * wide[j];
    }
  };
  constexpr int64_t IN_X = STEP<W>, IN_WEIGHT = OUTPUTS * STEP<W>;  // what a step takes of each
  int64_t steps = inputs / STEP<W>, p = 0;
  for (; p + 4 <= steps; p += 4, weight += 4 * IN_WEIGHT) {
    for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, x += IN_X) {
      asm("" : "+r"(x));  // or the compiler has an address for each row and step, more than there are registers
      take_step(x, weight + i * IN_WEIGHT);
    }
  }
  for (; p < steps; p++, x += IN_X, weight += IN_WEIGHT) take_step(x, weight);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int j = 0; j < VECTORS; j++) *(floats_anywhere*)(sums + r * row + j * LANES) = sum[r][j];
}

template <class W, int... R>
static constexpr auto tiles(std::integer_sequence<int, R...>) { return std::array{&multiply_tile<W, R + 1>...}; }
template <class W>
static constexpr auto TILES = tiles<W>(std::make_integer_sequence<int, ROWS>());

// Rows are divided into tiles of about one height.
static inline int64_t num_tiles_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
static inline std::pair<int64_t, int64_t> tile_of(int64_t rows, int64_t i) {
  return {rows * i / num_tiles_of(rows), rows * (i + 1) / num_tiles_of(rows)};
}

// sums (rows, OUTPUTS) += rows of x, `stride` apart, times a block of weights. `next` is what comes out of memory after
// this block: of several tiles the first would wait for it and leave memory idle in the others, so all share in fetching.
template <class W>
static void multiply(float* sums, const Input<W>* x, int64_t stride, const W* weight, int64_t inputs, int64_t rows,
                     const char* next, int64_t bytes) {
  int64_t num_tiles = num_tiles_of(rows), fetching = std::min<int64_t>(num_tiles, 4);
  int64_t groups = std::max<int64_t>(1, inputs / (4 * STEP<W>));
  int64_t lines = rows >= FETCH_FROM ? (bytes / 64 + groups * fetching - 1) / (groups * fetching) : 0;
  for (int64_t i = 0; i < num_tiles; i++, next += lines * groups * 64) {
    auto [begin, end] = tile_of(rows, i);
    TILES<W>[end - begin - 1](sums + begin * OUTPUTS, OUTPUTS, x + begin * stride, stride, weight, inputs, next,
                              i < fetching ? lines : 0);
  }
}

// A block of weights as what they are multiplied with, in the layout of that.
template <class A, class W>
static void widen_block(A* out, const W* weight, int64_t inputs) {
  for (int64_t first = 0; first < inputs; first += STEP<W>, weight += OUTPUTS * STEP<W>)
    if constexpr (std::is_same_v<A, float>) {
      for (int i = 0; i < STEP<W>; i++)
        for (int j = 0; j < VECTORS; j++, out += LANES) {
          floats wide = widened(weight + j * LANES * STEP<W>, i);
          memcpy(out, &wide, sizeof wide);
        }
    } else {
#ifdef __AVX512BF16__
      for (int j = 0; j < VECTORS; j++, out += LANES * 2) {
        __m512bh both = both_of(weight + j * LANES * 2);
        memcpy(out, &both, sizeof both);
      }
#endif
    }
}

// out (T, N) = x (T, I) times a packed weight, times scales (N,) of int8, + bias. A block comes out of memory once and is
// in the second cache for all rows. A row's sums are made in the order of inputs whatever the other rows, so its result
// does not depend on them.
template <class X, class W>
static void product(X* out, const X* x, const W* packed, const float* scales, const X* bias, int64_t T, int64_t I,
                    int64_t N) {
  using A = Input<W>;
  bool is_widened = !std::is_same_v<W, A> && T > (IS_INT8<W> ? ROWS : MANY);
  int64_t part = is_widened ? PART : I;
  static thread_local std::vector<A> kept;  // from call to call: fresh memory costs more than what is done here
  // Converted rows lie a line further apart, or of many widths a tile's would fall into one set of the first cache.
  constexpr bool IS_CONVERTED = !std::is_same_v<A, X>;
  int64_t stride = IS_CONVERTED ? I + 64 / sizeof(A) : I;
  if (IS_CONVERTED && int64_t(kept.size()) < T * stride) kept.resize(T * stride);
  A* converted = kept.data();
  const A* rows = IS_CONVERTED ? converted : (const A*)x;
#pragma omp parallel
  {
    if (IS_CONVERTED) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < T; t++) convert_row(converted + t * stride, x + t * I, I);
    }
    static thread_local std::vector<float> sums;
    static thread_local std::vector<A> wide;
    sums.resize(T * OUTPUTS);
    if (is_widened) wide.resize(part * OUTPUTS);
#pragma omp for schedule(static)
    for (int64_t first = 0; first < N; first += OUTPUTS) {
      int64_t width = std::min(OUTPUTS, N - first);
      float start[OUTPUTS] = {}, zero[OUTPUTS] = {};
      if (bias) widen_row(start, bias + first, width);
      for (int64_t t = 0; t < T; t++) memcpy(&sums[t * OUTPUTS], scales ? zero : start, sizeof start);
      for (int64_t input = 0; input < I; input += part) {
        int64_t inputs = std::min(part, I - input), bytes = inputs * OUTPUTS * sizeof(W);
        const W* weight = packed + first * I + input * OUTPUTS;
        const char* next = (const char*)weight + bytes;
        if (is_widened) {
          widen_block(wide.data(), weight, inputs);
          multiply<A>(sums.data(), rows + input, stride, wide.data(), inputs, T, next, bytes);
        } else {
          multiply<W>(sums.data(), rows + input, stride, weight, inputs, T, next, bytes);
        }
      }
      for (int64_t t = 0; t < T; t++) {
        float* sum = &sums[t * OUTPUTS];
        if (scales)
          for (int64_t i = 0; i < width; i++) sum[i] = sum[i] * scales[first + i] + start[i];
        if (width == OUTPUTS) narrow_row(out + t * N + first, sum, OUTPUTS);
        else narrow_row(out + t * N + first, sum, width);
      }
    }
  }
}

template <class X>
static void linear(X* out, const X* x, const void* packed, const float* scales, const X* bias, int64_t T, int64_t I,
                   int64_t N) {
  if (scales) product(out, x, (const int8_t*)packed, scales, bias, T, I, N);
  else product(out, x, (const X*)packed, scales, bias, T, I, N);
}
