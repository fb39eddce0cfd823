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
typedef uint16_t words __attribute__((vector_size(LANES * 2)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));
typedef int32_t integers __attribute__((vector_size(LANES * 4)));

template <class V>
static inline V load_as(const void* from) {
  V vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}

// A packed weight is (ceil(N / OUTPUTS), I / STEP, OUTPUTS, STEP): blocks of OUTPUTS outputs, whose weights of an input
// lie together. Of bf16 two inputs share a step, so that an output has 32 bits of it, as of its sum, and int8 lies alike.
// Of int4 eight integers of an output share 32 bits, those of a step's inputs for each of the tile's vectors: integer k is
// of input k / VECTORS and of vector k % VECTORS.
//
// Integers have, for each output and group of inputs, a scale and where asked a zero, float16: a weight is (integer - zero)
// times scale. These lie behind their group's integers. Sums are made of a group's integers, and scaled then.
struct int4x8 {
  uint32_t all;
};
template <class W>
constexpr int64_t STEP = std::is_same_v<W, bf16> || std::is_same_v<W, int8_t> ? 2 : 1;
template <>
constexpr int64_t STEP<int4x8> = 8 / VECTORS;
template <class W>  // W's of a step
constexpr int64_t IN_STEP = std::is_same_v<W, int4x8> ? LANES : OUTPUTS * STEP<W>;

// What X is multiplied as.
#ifdef __AVX512BF16__
template <class X>
using Input = std::conditional_t<std::is_same_v<X, bf16>, bf16, float>;
#else
template <class X>
using Input = float;
#endif

static inline int32_t integer_of(int4x8 eight, int k) { return int32_t(eight.all << (28 - 4 * k)) >> 28; }

// A step's weights for input i and vector j of outputs.
static inline floats weights_of(const float* step, int, int j) { return load_as<floats>(step + j * LANES); }
static inline floats weights_of(const bf16* step, int i, int j) {
  bits both = load_as<bits>(step + j * LANES * 2);
  return (floats)(i ? both & 0xffff0000 : both << 16);
}
static inline floats weights_of(const int8_t* step, int i, int j) {
  shorts both = load_as<shorts>(step + j * LANES * 2);
  return __builtin_convertvector(i ? both >> 8 : both << 8 >> 8, floats);
}
static inline floats weights_of(const int4x8* step, int i, int j) {
  bits high = load_as<bits>(step) << (28 - 4 * (i * VECTORS + j));
  return __builtin_convertvector((integers)high >> 28, floats);
}
#ifdef __FLT16_MAX__
static inline floats weights_of(const fp16* step, int, int j) {
  const fp16* weight = step + j * LANES;
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
// A step's weights for both inputs and vector j. Integers of 8 bits are bf16 too.
static inline __m512bh pairs_of(const bf16* step, int j) { return (__m512bh)_mm512_loadu_si512(step + j * LANES * 2); }
static inline __m512bh pairs_of(const int8_t* step, int j) {
  auto wide = [step, j](int half) {
    const int8_t* from = step + (j * 2 + half) * LANES;
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
  };
  return _mm512_cvtne2ps_pbh(wide(1), wide(0));
}
static inline __m512bh pairs_of(const int4x8* step, int j) {
  // By the lowest four bits of each 16: the fifth, which counts too, is the next integer's.
  alignas(64) static constexpr uint16_t BF16[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
      0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
  typedef uint16_t lanes __attribute__((vector_size(64)));
  return (__m512bh)_mm512_permutexvar_epi16((__m512i)(load_as<lanes>(step) >> 4 * j), _mm512_load_si512(BF16));
}
#endif

// LANES float16 as floats; any compiler's.
static inline floats halves(const uint16_t* from) {
  bits wide = __builtin_convertvector(load_as<words>(from), bits);
  floats size = (floats)((wide & 0x7fff) << 13) * 0x1p112f;
  return (floats)((bits)size | (wide & 0x8000) << 16);
}

// Where the groups of a part of a block lie. Of plain weights it is one, without scales.
struct Groups {
  int64_t count, inputs;  // of a group
  int64_t weight_bytes;   // from a group's weights to the next one's
  const char* scales;     // OUTPUTS, then as many zeros
  int64_t scale_bytes;
  const float* x_sums;  // (rows, sum_stride): of each row's inputs in a group; null: there are no zeros
  int64_t sum_stride;
};
static inline Groups plain(int64_t inputs) { return {1, inputs, 0, nullptr, 0, nullptr, 0}; }

// Add to R rows of sums, OUTPUTS wide and `row` apart, the product of R rows of x, `stride` apart, with a block's weights
// of some groups. Meanwhile `lines` cache lines for every four steps are fetched from `next` on.
template <class A, class W, bool IS_SCALED, int R>
static void multiply_tile(float* sums, int64_t row, const A* x, int64_t stride, const W* weights, const Groups& groups,
                          const char* next, int64_t lines) {
  auto take_step = [stride](auto& sum, const A* x, const W* step) __attribute__((always_inline)) {
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<A, bf16>) {
      __m512bh both[VECTORS];
      for (int j = 0; j < VECTORS; j++) both[j] = pairs_of(step, j);
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
      for (int j = 0; j < VECTORS; j++) wide[j] = weights_of(step, i, j);
      for (int r = 0; r < R; r++)
        for (int j = 0; j < VECTORS; j++) sum[r][j] += load(x[r * stride + i]) * wide[j];
    }
  };
  int64_t steps = groups.inputs / STEP<W>;
  for (int64_t group = 0; group < groups.count; group++) {
    floats sum[R][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int j = 0; j < VECTORS; j++)
        sum[r][j] = IS_SCALED ? floats{} : *(floats_anywhere*)(sums + r * row + j * LANES);
    const W* step = (const W*)((const char*)weights + group * groups.weight_bytes);
    int64_t p = 0;
    for (; p + 4 <= steps; p += 4, step += 4 * IN_STEP<W>) {
      for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++, x += STEP<W>) {
        asm("" : "+r"(x));  // or the compiler has an address for each row and step, more than there are registers
        take_step(sum, x, step + i * IN_STEP<W>);
      }
    }
    for (; p < steps; p++, x += STEP<W>, step += IN_STEP<W>) take_step(sum, x, step);
    const uint16_t* scales = (const uint16_t*)(groups.scales + group * groups.scale_bytes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int j = 0; j < VECTORS; j++) {
        floats_anywhere* total = (floats_anywhere*)(sums + r * row + j * LANES);
        if constexpr (IS_SCALED) {
          if (groups.x_sums) sum[r][j] -= halves(scales + OUTPUTS + j * LANES) * groups.x_sums[r * groups.sum_stride + group];
          *total += sum[r][j] * halves(scales + j * LANES);
        } else {
          *total = sum[r][j];
        }
      }
  }
}

template <class A, class W, bool IS_SCALED, int... R>
static constexpr auto tiles(std::integer_sequence<int, R...>) {
  return std::array{&multiply_tile<A, W, IS_SCALED, R + 1>...};
}
template <class A, class W, bool IS_SCALED>
static constexpr auto TILES = tiles<A, W, IS_SCALED>(std::make_integer_sequence<int, ROWS>());

// Rows are divided into tiles of about one height.
static inline int64_t num_tiles_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
static inline std::pair<int64_t, int64_t> tile_of(int64_t rows, int64_t i) {
  return {rows * i / num_tiles_of(rows), rows * (i + 1) / num_tiles_of(rows)};
}

// sums (rows, OUTPUTS) += rows of x, `stride` apart, times a block's weights. `next` is what comes out of memory after
// these: of several tiles the first would wait for it and leave memory idle in the others, so all share in fetching.
template <class A, class W, bool IS_SCALED = false>
static void multiply(float* sums, const A* x, int64_t stride, const W* weights, Groups groups, int64_t rows,
                     const char* next, int64_t bytes) {
  int64_t num_tiles = num_tiles_of(rows), fetching = std::min<int64_t>(num_tiles, 4);
  int64_t fours = std::max<int64_t>(1, groups.count * (groups.inputs / (4 * STEP<W>)));
  int64_t lines = IS_SCALED || rows >= FETCH_FROM ? (bytes / 64 + fours * fetching - 1) / (fours * fetching) : 0;
  const float* x_sums = groups.x_sums;
  for (int64_t i = 0; i < num_tiles; i++, next += lines * fours * 64) {
    auto [begin, end] = tile_of(rows, i);
    if (x_sums) groups.x_sums = x_sums + begin * groups.sum_stride;
    TILES<A, W, IS_SCALED>[end - begin - 1](sums + begin * OUTPUTS, OUTPUTS, x + begin * stride, stride, weights, groups,
                                            next, i < fetching ? lines : 0);
  }
}

// A block's weights of so many inputs as what they are multiplied as, in the layout of that.
template <class A, class W>
static void widen_block(A* out, const W* step, int64_t inputs) {
  for (int64_t first = 0; first < inputs; first += STEP<W>, step += IN_STEP<W>)
    if constexpr (std::is_same_v<A, float>) {
      for (int i = 0; i < STEP<W>; i++)
        for (int j = 0; j < VECTORS; j++, out += LANES) {
          floats wide = weights_of(step, i, j);
          memcpy(out, &wide, sizeof wide);
        }
    } else {
#ifdef __AVX512BF16__
      for (int j = 0; j < VECTORS; j++, out += LANES * 2) {
        __m512bh both = pairs_of(step, j);
        memcpy(out, &both, sizeof both);
      }
#endif
    }
}

// How a packed weight's numbers are written: as X (bits 0), or as integers of that many bits.
struct Form {
  int64_t bits, group, has_zeros;

  int64_t weight_bytes() const { return group * OUTPUTS * bits / 8; }
  int64_t group_bytes() const { return weight_bytes() + OUTPUTS * 2 * (1 + has_zeros); }
};

// out (T, N) = x (T, I) times a packed weight + bias. A block comes out of memory once and is in the second cache for all
// rows. A row's sums are made in the order of inputs whatever the other rows, so its result does not depend on them.
template <class X, class W>
static void product(X* out, const X* x, const W* packed, Form form, const X* bias, int64_t T, int64_t I, int64_t N) {
  using A = Input<X>;
  constexpr bool IS_SCALED = !std::is_same_v<W, X>;
  bool is_widened = !std::is_same_v<W, A> && T > (IS_SCALED ? ROWS : MANY);
  int64_t group = IS_SCALED ? form.group : I;
  int64_t part = is_widened ? PART : I, block_bytes = I * OUTPUTS * sizeof(W);
  if (IS_SCALED) block_bytes = I / group * form.group_bytes();
  static thread_local std::vector<A> kept;  // from call to call: fresh memory costs more than what is done here
  static thread_local std::vector<float> kept_sums;
  // Converted rows lie a line further apart, or of many widths a tile's would fall into one set of the first cache.
  constexpr bool IS_CONVERTED = !std::is_same_v<A, X>;
  int64_t stride = IS_CONVERTED ? I + 64 / sizeof(A) : I, sum_stride = I / group;
  if (IS_CONVERTED && int64_t(kept.size()) < T * stride) kept.resize(T * stride);
  if (form.has_zeros && int64_t(kept_sums.size()) < T * sum_stride) kept_sums.resize(T * sum_stride);
  A* converted = kept.data();
  float* x_sums = form.has_zeros ? kept_sums.data() : nullptr;
  const A* rows = IS_CONVERTED ? converted : (const A*)x;
#pragma omp parallel
  {
    if (IS_CONVERTED || x_sums) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < T; t++) {
        if (IS_CONVERTED) convert_row(converted + t * stride, x + t * I, I);
        for (int64_t g = 0; x_sums && g < sum_stride; g++) {
          float sum = 0;
          for (int64_t i = 0; i < group; i++) sum += load(x[t * I + g * group + i]);
          x_sums[t * sum_stride + g] = sum;
        }
      }
    }
    static thread_local std::vector<float> sums;
    static thread_local std::vector<A> wide;
    sums.resize(T * OUTPUTS);
    if (is_widened) wide.resize(part * OUTPUTS);
#pragma omp for schedule(static)
    for (int64_t first = 0; first < N; first += OUTPUTS) {
      int64_t width = std::min(OUTPUTS, N - first);
      float start[OUTPUTS] = {};
      if (bias) widen_row(start, bias + first, width);
      for (int64_t t = 0; t < T; t++) memcpy(&sums[t * OUTPUTS], start, sizeof start);
      const char* block = (const char*)packed + first / OUTPUTS * block_bytes;
      for (int64_t input = 0; input < I; input += part) {
        int64_t inputs = std::min(part, I - input), bytes = block_bytes * inputs / I;
        const W* weights = (const W*)block;
        Groups groups = plain(inputs);
        if (IS_SCALED)
          groups = {inputs / group, group, form.group_bytes(), block + form.weight_bytes(), form.group_bytes(),
                    x_sums ? x_sums + input / group : nullptr, sum_stride};
        block += bytes;
        if (is_widened) {
          for (int64_t g = 0; g < groups.count; g++)
            widen_block(wide.data() + g * group * OUTPUTS, (const W*)((const char*)weights + g * groups.weight_bytes),
                        groups.inputs);
          groups.weight_bytes = groups.inputs * OUTPUTS * sizeof(A);
          multiply<A, A, IS_SCALED>(sums.data(), rows + input, stride, wide.data(), groups, T, block, bytes);
        } else {
          multiply<A, W, IS_SCALED>(sums.data(), rows + input, stride, weights, groups, T, block, bytes);
        }
      }
      for (int64_t t = 0; t < T; t++) {
        if (width == OUTPUTS) narrow_row(out + t * N + first, &sums[t * OUTPUTS], OUTPUTS);
        else narrow_row(out + t * N + first, &sums[t * OUTPUTS], width);
      }
    }
  }
}

template <class X>
static void linear(X* out, const X* x, const void* packed, const X* bias, int64_t T, int64_t I, int64_t N, int64_t bits,
                   int64_t group, int64_t has_zeros) {
  Form form{bits, group, has_zeros};
  if (bits == 8) product(out, x, (const int8_t*)packed, form, bias, T, I, N);
  else if (bits == 4) product(out, x, (const int4x8*)packed, form, bias, T, I, N);
  else product(out, x, (const X*)packed, form, bias, T, I, N);
}

// ---- Weights of integers -------------------------------------------------------------------------

// Integers (N, I), and scales and zeros (N, I / group) of the bits of float16, as `product` reads them. `out` is zeros.
static void pack_integers(char* out, const int8_t* integers, const uint16_t* scales, const uint16_t* zeros, int64_t N,
                          int64_t I, int64_t bits, int64_t group) {
  Form form{bits, group, zeros != nullptr};
  int64_t num_groups = I / group;
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < (N + OUTPUTS - 1) / OUTPUTS; block++)
    for (int64_t n = block * OUTPUTS; n < std::min(N, (block + 1) * OUTPUTS); n++)
      for (int64_t g = 0; g < num_groups; g++) {
        char* weights = out + (block * num_groups + g) * form.group_bytes();
        const int8_t* row = integers + n * I + g * group;
        int64_t o = n % OUTPUTS, lane = o % LANES, j = o / LANES;
        for (int64_t i = 0; i < group; i++)
          if (bits == 8)
            weights[(i / STEP<int8_t> * OUTPUTS + o) * STEP<int8_t> + i % STEP<int8_t>] = row[i];
          else
            ((int4x8*)weights)[i / STEP<int4x8> * LANES + lane].all |= (uint32_t(row[i]) & 15)
                                                                       << 4 * (i % STEP<int4x8> * VECTORS + j);
        uint16_t* behind = (uint16_t*)(weights + form.weight_bytes());
        behind[o] = scales[n * num_groups + g];
        if (zeros) behind[OUTPUTS + o] = zeros[n * num_groups + g];
      }
}

// Rows of the weight that was packed so: out (n, I).
template <class X>
static void unpack_rows(X* out, const char* packed, const int64_t* rows, int64_t n, int64_t I, int64_t bits,
                        int64_t group, int64_t has_zeros) {
  Form form{bits, group, has_zeros};
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < n; t++) {
    int64_t o = rows[t] % OUTPUTS, lane = o % LANES, j = o / LANES;
    const char* weights = packed + rows[t] / OUTPUTS * (I / group) * form.group_bytes();
    for (int64_t first = 0; first < I; first += group, weights += form.group_bytes()) {
      const uint16_t* behind = (const uint16_t*)(weights + form.weight_bytes());
      float scale = halves(behind + o / LANES * LANES)[lane];
      float zero = has_zeros ? halves(behind + OUTPUTS + o / LANES * LANES)[lane] : 0;
      for (int64_t i = 0; i < group; i++) {
        float integer = bits == 8 ? ((const int8_t*)weights)[(i / STEP<int8_t> * OUTPUTS + o) * STEP<int8_t> + i % STEP<int8_t>]
                                  : integer_of(((const int4x8*)weights)[i / STEP<int4x8> * LANES + lane],
                                               i % STEP<int4x8> * VECTORS + j);
        out[t * I + first + i] = narrow<X>((integer - zero) * scale);
      }
    }
  }
}
