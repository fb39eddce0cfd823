// Number types smaller than float, and products with packed weights: the part of kernels.cpp that depends on the
// instruction set. Shape letters: T tokens, I inputs, N outputs of a layer.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads() { return 1; }
#endif
#ifdef __x86_64__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define MAY_HAVE_AMX
#endif

// ---- Numbers and vectors ------------------------------------------------------------------------

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
inline bf16 narrow(float x) {  // rounds to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#ifdef __FLT16_MAX__  // the compiler supports the type
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
#if defined(__FLT16_MAX__) && defined(__F16C__)  // otherwise the compiler converts one number at a time
  if constexpr (std::is_same_v<X, fp16>)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(row + i))));
#endif
  for (; i < n; i++) out[i] = load(row[i]);
}

// Converts a row to A, which is X, float or bf16.
template <class A, class X>
static void convert_row(A* __restrict out, const X* __restrict row, int64_t n) {
  if constexpr (std::is_same_v<A, X>) memcpy(out, row, n * sizeof(X));
  else if constexpr (std::is_same_v<A, float>) widen_row(out, row, n);
  else narrow_row(out, row, n);
}

// A vector that begins at a cache line, as the rows of AMX's tiles should.
template <class X>
struct Lines {
  using value_type = X;
  X* allocate(size_t n) { return (X*)::operator new(n * sizeof(X), std::align_val_t(64)); }
  void deallocate(X* from, size_t) { ::operator delete(from, std::align_val_t(64)); }
};
template <class X>
using aligned = std::vector<X, Lines<X>>;

// Returns room for n numbers that is kept between calls: new memory takes longer than the work.
template <class Vector>
static auto* room_for(int64_t n, Vector& kept) {
  if (int64_t(kept.size()) < n) kept.resize(n);
  return kept.data();
}

// Returns n numbers as A, which is X or float: in place, or converted into `kept`.
template <class A, class X>
static const A* as_inputs(std::vector<float>& kept, const X* x, int64_t n) {
  if constexpr (std::is_same_v<A, X>) return x;
  float* wide = room_for(n, kept);
  widen_row(wide, x, n);
  return (const A*)wide;
}

// ---- Products ------------------------------------------------------------------------------------

// LANES is the width of a register in the vector extension of GCC and Clang, so one source serves every instruction set.
// The registers hold a tile's sums (ROWS x VECTORS registers), the weights of one input, and one number of x. With more
// than MANY rows, weights that need conversion are converted once, PART inputs at a time; with fewer, each tile converts
// them. With FETCH_FROM rows or more, the next block is prefetched while this one is in use. With fewer rows, prefetching
// does not help: the product waits for memory all the time.
#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4, ROWS = 6, MANY = 48, FETCH_FROM = 7;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2, ROWS = 6, MANY = 48, FETCH_FROM = 2;
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

// A packed weight is (ceil(N / OUTPUTS), I / STEP, OUTPUTS, STEP): blocks of OUTPUTS outputs, in which the weights of one
// input are adjacent. In bf16, two inputs share a step, so that each output has 32 bits per step, like its sum. int8 has
// the same layout. In int4, eight integers of an output share 32 bits: the step's inputs for each vector of the tile.
// Integer k belongs to input k / VECTORS and vector k % VECTORS.
//
// Quantized weights have a float16 scale, and optionally a float16 zero, for each output and group of inputs: a weight is
// (integer - zero) * scale. Scales and zeros are stored after their group's integers. The products of a group's integers
// are summed first and scaled afterwards.
struct int4x8 {
  uint32_t all;
};
template <class W>
constexpr int64_t STEP = std::is_same_v<W, bf16> || std::is_same_v<W, int8_t> || std::is_same_v<W, int16_t> ? 2 : 1;
template <>
constexpr int64_t STEP<int4x8> = 8 / VECTORS;
template <class W>  // number of W per step
constexpr int64_t IN_STEP = std::is_same_v<W, int4x8> ? LANES : OUTPUTS * STEP<W>;

// The type in which X is multiplied.
#ifdef __AVX512BF16__
template <class X>
using Input = std::conditional_t<std::is_same_v<X, bf16>, bf16, float>;
#else
template <class X>
using Input = float;
#endif

// Returns a step's weights for input i and vector j of outputs.
static inline floats weights_of(const float* step, int, int j) { return load_as<floats>(step + j * LANES); }
static inline floats weights_of(const bf16* step, int i, int j) {
  bits both = load_as<bits>(step + j * LANES * 2);
  return (floats)(i ? both & 0xffff0000 : both << 16);
}
static inline floats weights_of(const int8_t* step, int i, int j) {
  shorts both = load_as<shorts>(step + j * LANES * 2);
  return __builtin_convertvector(i ? both >> 8 : both << 8 >> 8, floats);
}
#ifdef __AVX512F__
static inline floats weights_of(const int4x8* step, int i, int j) {
  const floats numbers = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  bits low = load_as<bits>(step) >> 4 * (i * VECTORS + j);  // the lowest four bits are the integer
  return (floats)_mm512_permutexvar_ps((__m512i)low, (__m512)numbers);
}
#else
static inline floats weights_of(const int4x8* step, int i, int j) {
  bits high = load_as<bits>(step) << (28 - 4 * (i * VECTORS + j));
  return __builtin_convertvector((integers)high >> 28, floats);
}
#endif
// Converts LANES float16 to float.
static inline floats halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__F16C__)
  return (floats)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
  bits wide = __builtin_convertvector(load_as<words>(from), bits);
  floats size = (floats)((wide & 0x7fff) << 13) * 0x1p112f;
  return (floats)((bits)size | (wide & 0x8000) << 16);
#endif
}

#ifdef __FLT16_MAX__
static inline floats weights_of(const fp16* step, int, int j) {
#ifdef __F16C__
  return halves((const uint16_t*)(step + j * LANES));
#else
  floats wide;
  for (int i = 0; i < LANES; i++) wide[i] = load(step[j * LANES + i]);
  return wide;
#endif
}
#endif

#ifdef __AVX512BF16__
// Returns a step's weights for both inputs and vector j, as bf16: 8-bit integers are exact in bf16.
static inline __m512bh pairs_of(const bf16* step, int j) { return (__m512bh)_mm512_loadu_si512(step + j * LANES * 2); }
static inline __m512bh pairs_of(const int8_t* step, int j) {
  auto wide = [step, j](int half) {
    const int8_t* from = step + (j * 2 + half) * LANES;
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
  };
  return _mm512_cvtne2ps_pbh(wide(1), wide(0));
}
static inline __m512bh pairs_of(const int4x8* step, int j) {
  // A table of 32 entries: the lookup uses five bits, and the fifth belongs to the next integer.
  alignas(64) static constexpr uint16_t BF16[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
      0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
  typedef uint16_t lanes __attribute__((vector_size(64)));
  return (__m512bh)_mm512_permutexvar_epi16((__m512i)(load_as<lanes>(step) >> 4 * j), _mm512_load_si512(BF16));
}
#endif

// Describes where the groups of a part of a block are stored. Plain weights are one group without scales.
struct Groups {
  int64_t count, inputs;  // number of groups, inputs of a group
  int64_t weight_bytes;   // distance between the weights of consecutive groups
  const char* scales;     // OUTPUTS scales, then as many zeros
  int64_t scale_bytes;
  const float* x_sums;  // (rows, sum_stride): sums of each row's inputs per group; null: there are no zeros
  int64_t sum_stride;

  // Adds to row r's total for vector j of outputs the scaled `sum` of a group's inputs times integers.
  floats add_scaled(floats total, floats sum, int64_t group, int r, int j) const {
    const uint16_t* of_group = (const uint16_t*)(scales + group * scale_bytes) + j * LANES;
    if (x_sums) sum -= halves(of_group + OUTPUTS) * x_sums[r * sum_stride + group];
    return total + sum * halves(of_group);
  }
};
static inline Groups plain(int64_t inputs) { return {1, inputs, 0, nullptr, 0, nullptr, 0}; }

// Adds to R rows of sums, OUTPUTS wide and `row` apart, the product of R rows of x, `stride` apart, and a block's weights
// for some groups. Meanwhile, for every four steps, `lines` cache lines are prefetched from `next` on.
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
        asm("" : "+r"(x));  // otherwise the compiler keeps more addresses than there are registers
        take_step(sum, x, step + i * IN_STEP<W>);
      }
    }
    for (; p < steps; p++, x += STEP<W>, step += IN_STEP<W>) take_step(sum, x, step);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int j = 0; j < VECTORS; j++) {
        floats_anywhere* total = (floats_anywhere*)(sums + r * row + j * LANES);
        *total = IS_SCALED ? groups.add_scaled(*total, sum[r][j], group, r, j) : sum[r][j];
      }
  }
}

template <class A, class W, bool IS_SCALED, int... R>
static constexpr auto tiles(std::integer_sequence<int, R...>) {
  return std::array{&multiply_tile<A, W, IS_SCALED, R + 1>...};
}
template <class A, class W, bool IS_SCALED>
static constexpr auto TILES = tiles<A, W, IS_SCALED>(std::make_integer_sequence<int, ROWS>());

// Rows are divided into tiles of nearly equal height.
static inline int64_t num_tiles_of(int64_t rows, int64_t limit = ROWS) { return (rows + limit - 1) / limit; }
static inline std::pair<int64_t, int64_t> tile_of(int64_t rows, int64_t i, int64_t limit = ROWS) {
  return {rows * i / num_tiles_of(rows, limit), rows * (i + 1) / num_tiles_of(rows, limit)};
}

// Adds to sums (rows, OUTPUTS) the rows of x, `stride` apart, times a block's weights. `next` is the next block to come
// from memory. Its prefetching is spread over up to four tiles: if the first tile did all of it, the first tile would
// wait for memory, and memory would be idle during the others.
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

// Converts a block's weights for a number of inputs to the type A in which they are multiplied, and to A's layout.
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
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++, out += LANES * 2) {
        __m512bh both = pairs_of(step, j);
        memcpy(out, &both, sizeof both);
      }
#endif
    }
}

// ---- Products by AMX -----------------------------------------------------------------------------
//
// For bfloat16, on processors with AMX. Its registers are tiles of 16 rows of 64 bytes, and an instruction computes
// sums (rows, 16 outputs) += inputs (rows, DEPTH) times weights (DEPTH, 16 outputs). Weights have the layout of a packed
// weight. AMX has its own order of summation: for DEPTH inputs the even ones, the odd ones, and then both. Every number
// of rows uses this order, so that results do not depend on it.

constexpr int64_t HEIGHT = 16, DEPTH = 32;  // the largest number of rows and inputs in a tile
constexpr int64_t FEW = 2;                  // up to this many rows, quantized weights are faster without tiles

#ifdef MAY_HAVE_AMX
constexpr int64_t AMX_INPUTS = 512 << 10;  // inputs of all rows together that stay in the L2 cache
constexpr int64_t AMX_PART = 2048;         // inputs of a block that stay there too
constexpr int64_t MOST_TOTALS = 64 << 10;  // outputs whose sums may wait in memory

// Linux saves these registers only for processes that request it.
static const bool HAS_TILES = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
#ifdef EXACT
constexpr bool HAS_AMX = false;  // for floats: decodes do not reproduce its order of summation
#else
static const bool HAS_AMX = HAS_TILES;
#endif

// Configures a thread's tile registers during its lifetime. 0 to 3 hold sums, 4 inputs, and 5 weights. 6 and 7 are like 4
// and 5 for the `rest` of the inputs; for `pairs`, 5 holds inputs, 6 and 7 weights. Two inputs of 8 bits count as one.
class Amx {
 public:
  Amx(int64_t height, int64_t depth, int64_t rest, bool has_floats = true, bool pairs = false) : mode(_mm_getcsr()) {
    struct {
      uint8_t palette, start, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shapes = {1};
    auto set = [&](int tile, int64_t rows, int64_t bytes) { shapes.rows[tile] = rows, shapes.row_bytes[tile] = bytes; };
    for (int j = 0; j < VECTORS; j++) set(j, height, LANES * 4);
    set(4, height, depth * 2), set(5, depth / 2, LANES * 4);
    if (rest) set(6, height, rest * 2), set(7, rest / 2, LANES * 4);
    if (pairs) set(5, height, depth * 2), set(6, depth / 2, LANES * 4), set(7, depth / 2, LANES * 4);
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    if (has_floats) _mm_setcsr(mode | 0x8040);  // flush subnormal numbers to 0 outside AMX too, as AMX does
  }
  ~Amx() {
    asm volatile("tilerelease");
    _mm_setcsr(mode);
  }

 private:
  unsigned mode;
};

// Rows of a matrix, `stride` numbers apart.
template <class X>
struct Rows {
  X* first;
  int64_t stride;
  Rows operator+(int64_t column) const { return {first + column, stride}; }
  Rows from(int64_t row) const { return {first + row * stride, stride}; }
};
template <class X>
Rows(X*, int64_t) -> Rows<X>;

template <int TILE, class X>
static inline void load_tile(Rows<X> rows) {
  asm volatile("tileloadd (%0, %1, 1), %%tmm%c2" ::"r"(rows.first), "r"(rows.stride * sizeof(X)), "i"(TILE) : "memory");
}
template <int TILE, class X>
static inline void store_tile(Rows<X> rows) {
  asm volatile("tilestored %%tmm%c2, (%0, %1, 1)" ::"r"(rows.first), "r"(rows.stride * sizeof(X)), "i"(TILE) : "memory");
}
template <int TILE>
static inline void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
template <int SUMS, int X, int WEIGHTS>
static inline void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(WEIGHTS));
}

// Calls f with constants: a tile's number must be a constant of the instruction.
template <class F>
static inline void for_each_vector(F f) {
  f(std::integral_constant<int, 0>()), f(std::integral_constant<int, 1>());
  f(std::integral_constant<int, 2>()), f(std::integral_constant<int, 3>());
}

// Computes sums = old sums + x times a block's plain weights: sums stay in registers. Otherwise like `multiply_tile`.
static void multiply_plain_tile(Rows<float> sums, Rows<float> old, Rows<const bf16> x, const bf16* weights, int64_t inputs,
                                const char* next, int64_t lines) {
  for_each_vector([&](auto j) { load_tile<j>(old + j * LANES); });
  auto take = [&](auto x_tile, auto weights_tile) __attribute__((always_inline)) {
    load_tile<x_tile>(x);
    for_each_vector([&](auto j) __attribute__((always_inline)) {
      load_tile<weights_tile>(Rows{weights + j * LANES * 2, OUTPUTS * 2});
      add_product<j, x_tile, weights_tile>();
    });
  };
  for (; inputs >= DEPTH; inputs -= DEPTH, x = x + DEPTH, weights += DEPTH * OUTPUTS) {
    for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
    take(std::integral_constant<int, 4>(), std::integral_constant<int, 5>());
  }
  if (inputs) take(std::integral_constant<int, 6>(), std::integral_constant<int, 7>());
  for_each_vector([&](auto j) { store_tile<j>(sums + j * LANES); });
}

// Like `multiply_plain_tile`, for two tiles of rows, the second `apart` rows after the first, and a multiple of DEPTH
// inputs. Weights are loaded once for both tiles, half of the outputs at a time.
static void multiply_two_tiles(Rows<float> sums, Rows<float> old, Rows<const bf16> x, int64_t apart, const bf16* weights,
                               int64_t inputs, const char* next, int64_t lines) {
  for (int64_t first = 0; first < OUTPUTS; first += 2 * LANES) {
    for_each_vector([&](auto k) { load_tile<k>(old.from(k / 2 * apart) + (first + k % 2 * LANES)); });
    for (int64_t i = 0; i < inputs; i += DEPTH) {
      for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
      const Rows both{weights + i * OUTPUTS + first * 2, OUTPUTS * 2};
      load_tile<4>(x + i);
      load_tile<6>(both);
      add_product<0, 4, 6>();
      load_tile<7>(both + LANES * 2);
      add_product<1, 4, 7>();
      load_tile<5>(x.from(apart) + i);
      add_product<2, 5, 6>();
      add_product<3, 5, 7>();
    }
    for_each_vector([&](auto k) { store_tile<k>(sums.from(k / 2 * apart) + (first + k % 2 * LANES)); });
  }
}

// Like `multiply_plain_tile`, for integers converted to bf16: the sums of each group are stored and scaled.
template <int R>
static void multiply_scaled_tile(Rows<float> sums, Rows<float> old, Rows<const bf16> x, const bf16* weights,
                                 const Groups& groups, const char* next, int64_t lines) {
  alignas(64) float kept[2][R * LANES];
  int64_t depth = std::min(groups.inputs, DEPTH);
  for (int j = 0; j < VECTORS; j++, sums = sums + LANES, old = old + LANES, weights += LANES * 2) {
    floats total[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) total[r] = load_as<floats>(old.from(r).first);
    auto multiply = [&](int64_t group, auto tile) __attribute__((always_inline)) {
      if (group == groups.count) return;
      clear_tile<tile>();
      for (int64_t i = group * groups.inputs; i < (group + 1) * groups.inputs; i += depth) {
        load_tile<4>(x + i);
        load_tile<5>(Rows{weights + i * OUTPUTS, OUTPUTS * 2});
        add_product<tile, 4, 5>();
      }
      store_tile<tile>(Rows<float>{kept[tile], LANES});
      for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
    };
    auto scale = [&](int64_t group, int tile) __attribute__((always_inline)) {
      if (group == groups.count) return;
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
        total[r] = groups.add_scaled(total[r], load_as<floats>(kept[tile] + r * LANES), group, r, j);
    };
    constexpr std::integral_constant<int, 0> even;
    constexpr std::integral_constant<int, 1> odd;
    multiply(0, even);  // compute the next group's sums while the previous group's are scaled
    for (int64_t group = 0; group < groups.count; group += 2) {
      multiply(group + 1, odd), scale(group, even);
      if (group + 1 < groups.count) multiply(group + 2, even), scale(group + 1, odd);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) memcpy(sums.from(r).first, &total[r], sizeof total[r]);
  }
}

template <int... R>
static constexpr auto scaled_tiles(std::integer_sequence<int, R...>) {
  return std::array{&multiply_scaled_tile<R + 1>...};
}
static constexpr auto SCALED_TILES = scaled_tiles(std::make_integer_sequence<int, HEIGHT>());

#else
constexpr bool HAS_TILES = false, HAS_AMX = false;
#endif

// Computes bit for bit what AMX does, for few rows and quantized weights, in vectors: moving data into tiles takes longer.
template <class W, int R>
static void multiply_few(float* sums, const float* x, int64_t stride, const W* weights, const Groups& groups,
                         const char* next, int64_t bytes) {
  int64_t times = groups.count * groups.inputs / std::min(groups.inputs, DEPTH), lines = (bytes / 64 + times - 1) / times;
  for (int64_t group = 0; group < groups.count; group++) {
    floats sum[R][VECTORS] = {};
    const W* step = (const W*)((const char*)weights + group * groups.weight_bytes);
    for (int64_t left = groups.inputs; left > 0; left -= DEPTH) {
      for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
      floats of_pairs[2][R][VECTORS] = {};
#pragma GCC unroll 4
      for (int64_t p = 0; p < std::min(left, DEPTH); p += 2, x += 2, step += IN_STEP<W>)
        for (int i = 0; i < 2; i++)
          for (int j = 0; j < VECTORS; j++) {
            floats wide = weights_of(step, i, j);
            for (int r = 0; r < R; r++) of_pairs[i][r][j] += x[r * stride + i] * wide;
          }
      for (int r = 0; r < R; r++)
        for (int j = 0; j < VECTORS; j++) sum[r][j] += of_pairs[0][r][j] + of_pairs[1][r][j];
    }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < VECTORS; j++) {
        floats_anywhere* total = (floats_anywhere*)(sums + r * OUTPUTS + j * LANES);
        *total = groups.add_scaled(*total, sum[r][j], group, r, j);
      }
  }
}

// Describes how a packed weight is stored: as X (bits 0), or as integers of that many bits, which are multiplied by
// activations as floats (0), or rounded to 8 bits (integer_products.h).
struct Form {
  int64_t bits, group, has_zeros, activation_bits;

  int64_t weight_bytes() const { return group * OUTPUTS * bits / 8; }
  int64_t group_bytes() const { return weight_bytes() + OUTPUTS * 2 * (1 + has_zeros); }
  Groups groups_of(const char* block, int64_t inputs, const float* x_sums, int64_t sum_stride) const {
    return {inputs / group, group, group_bytes(), block + weight_bytes(), group_bytes(), x_sums, sum_stride};
  }
};

// Calls compute(block) for each block of outputs, in a parallel region. With TURNS_FROM rows or more, threads take some
// blocks at a time, so that a thread on a busy core gets fewer blocks, and the next block, which is prefetched, is mostly
// its own. With fewer rows, memory is the bottleneck, and each thread gets the same number of blocks.
constexpr int64_t TURNS_FROM = 64;
template <class Compute>
static void for_blocks(int64_t T, int64_t num_blocks, Compute compute) {
  if (T < TURNS_FROM) {
#pragma omp for schedule(static)
    for (int64_t block = 0; block < num_blocks; block++) compute(block);
  } else {
#pragma omp for schedule(dynamic, std::max<int64_t>(1, num_blocks / (4 * omp_get_max_threads())))
    for (int64_t block = 0; block < num_blocks; block++) compute(block);
  }
}

// Calls add(block, tile, begin, end) for each block's tiles [begin, end) of up to `height` of the T rows. `add` adds to
// the thread's sums (end - begin, OUTPUTS), which start as the bias, and are copied to out (T, N) afterwards.
template <class X, class Add>
static void for_each_block(X* out, const X* bias, float* sums, int64_t T, int64_t N, int64_t height, Add add) {
  for_blocks(T, (N + OUTPUTS - 1) / OUTPUTS, [&](int64_t block) {
    int64_t first = block * OUTPUTS, width = std::min(OUTPUTS, N - first);
    float start[OUTPUTS] = {};
    if (bias) widen_row(start, bias + first, width);
    for (int64_t tile = 0; tile < num_tiles_of(T, height); tile++) {
      auto [begin, end] = tile_of(T, tile, height);
      for (int64_t t = begin; t < end; t++) memcpy(&sums[(t - begin) * OUTPUTS], start, sizeof start);
      add(block, tile, begin, end);
      for (int64_t t = begin; t < end; t++) narrow_row(out + t * N + first, &sums[(t - begin) * OUTPUTS], width);
    }
  });
}

// Returns the sums (T, I / group) of each group's inputs, which weights with zeros need.
template <class X>
static const float* sum_groups(const X* x, int64_t T, int64_t I, int64_t group) {
  static thread_local std::vector<float> kept;
  float* sums = room_for(T * I / group, kept);
#pragma omp parallel for schedule(static)
  for (int64_t place = 0; place < T * I / group; place++) {
    float sum = 0;
    for (int64_t i = 0; i < group; i++) sum += load(x[place * group + i]);
    sums[place] = sum;
  }
  return sums;
}

// Converts the weights of a part of a block, and describes where their groups are then.
template <class A, class W>
static void widen_groups(A* wide, const W* weights, Groups& groups) {
  for (int64_t g = 0; g < groups.count; g++)
    widen_block(wide + g * groups.inputs * OUTPUTS, (const W*)((const char*)weights + g * groups.weight_bytes), groups.inputs);
  groups.weight_bytes = groups.inputs * OUTPUTS * sizeof(A);
}

// Computes out (T, N) = x (T, I) times a packed weight + bias, multiplied as A, in AMX's order if IS_FEW. Each block is
// read from memory once, and stays in the L2 cache for all rows. The order of a row's sums does not depend on the other
// rows, so neither does its result.
template <class A, bool IS_FEW, class X, class W>
static void product(X* out, const X* x, const W* packed, Form form, const X* bias, int64_t T, int64_t I, int64_t N) {
  constexpr bool IS_SCALED = !std::is_same_v<W, X>, IS_COPIED = !std::is_same_v<A, X>;
  bool is_widened = !std::is_same_v<W, A> && !IS_FEW && T > (IS_SCALED ? ROWS : MANY);
  int64_t group = IS_SCALED ? form.group : I, part = is_widened ? PART : I;
  int64_t block_bytes = IS_SCALED ? I / group * form.group_bytes() : I * OUTPUTS * sizeof(W);
  static thread_local std::vector<A> kept;
  // Copied rows are one cache line further apart. Otherwise, for many widths, a tile's rows would share one L1 cache set.
  int64_t stride = IS_COPIED ? I + 64 / sizeof(A) : I, sum_stride = I / group;
  A* copied = room_for(IS_COPIED ? T * stride : 0, kept);
  const float* x_sums = form.has_zeros ? sum_groups(x, T, I, group) : nullptr;
  const A* rows = IS_COPIED ? copied : (const A*)x;
#pragma omp parallel
  {
    if (IS_COPIED) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < T; t++) convert_row(copied + t * stride, x + t * I, I);
    }
    static thread_local std::vector<float> kept_sums;
    static thread_local std::vector<A> kept_wide;
    float* sums = room_for(T * OUTPUTS, kept_sums);
    A* wide = room_for(is_widened ? part * OUTPUTS : 0, kept_wide);
#ifdef MAY_HAVE_AMX
    std::optional<Amx> amx;  // for its mode
    if (IS_FEW) amx.emplace(1, DEPTH, 0);
#endif
    for_each_block(out, bias, sums, T, N, T, [&](int64_t index, auto...) {
      const char* block = (const char*)packed + index * block_bytes;
      for (int64_t input = 0; input < I; input += part) {
        int64_t inputs = std::min(part, I - input), bytes = block_bytes * inputs / I;
        const W* weights = (const W*)block;
        Groups groups = plain(inputs);
        if (IS_SCALED) groups = form.groups_of(block, inputs, x_sums ? x_sums + input / group : nullptr, sum_stride);
        block += bytes;
        if constexpr (IS_FEW) {
          auto multiply = T == 1 ? multiply_few<W, 1> : multiply_few<W, 2>;
          multiply(sums, rows, stride, weights, groups, block, bytes);
          continue;
        }
        if (is_widened) widen_groups(wide, weights, groups);
        if (is_widened) multiply<A, A, IS_SCALED>(sums, rows + input, stride, wide, groups, T, block, bytes);
        else multiply<A, W, IS_SCALED>(sums, rows + input, stride, weights, groups, T, block, bytes);
      }
    });
  }
}

#ifdef MAY_HAVE_AMX
// Computes the same with AMX, for bf16, in turns of as many rows as fit into the L2 cache. So that more rows fit, plain
// weights with many inputs are multiplied AMX_PART inputs at a time; between these parts, all sums wait in memory.
template <class W>
static void product_by_amx(bf16* out, const bf16* x, const W* packed, Form form, const bf16* bias, int64_t T, int64_t I,
                           int64_t N) {
  constexpr bool IS_SCALED = !std::is_same_v<W, bf16>;
  const int64_t group = IS_SCALED ? form.group : I, sum_stride = I / group, num_blocks = (N + OUTPUTS - 1) / OUTPUTS;
  const int64_t block_bytes = IS_SCALED ? sum_stride * form.group_bytes() : I * OUTPUTS * sizeof(W);
  const bool may_pair = !IS_SCALED && I % DEPTH == 0;
  const int64_t most = may_pair ? 2 * HEIGHT : HEIGHT;  // rows multiplied at once
  const int64_t part = may_pair && T * I > AMX_INPUTS && N <= MOST_TOTALS ? std::min(I, AMX_PART) : I;
  const int64_t num_turns = num_tiles_of(T, std::max(most, AMX_INPUTS / part)), width = num_blocks * OUTPUTS;
  const int64_t in_turn = num_tiles_of((T + num_turns - 1) / num_turns, most) * most;
  static thread_local aligned<float> kept_totals;
  float* totals = room_for(part < I ? in_turn * width : 0, kept_totals);
  const float* x_sums = form.has_zeros ? sum_groups(x, T, I, group) : nullptr;
  auto multiply_part = [&](int64_t turn, int64_t input) {
    const int64_t rows = std::min(in_turn, T - turn), inputs = std::min(part, I - input);
    const int64_t num_tiles = num_tiles_of(rows, most), highest = (rows + num_tiles - 1) / num_tiles;
    const bool in_pairs = highest > HEIGHT && may_pair, is_last = input + inputs == I;
    const int64_t height = in_pairs ? (highest + 1) / 2 : highest, bytes = block_bytes * inputs / I / num_tiles;
    const int64_t steps = IS_SCALED ? VECTORS * sum_stride : std::max<int64_t>(1, inputs / DEPTH * (1 + in_pairs));
    const int64_t lines = (bytes / 64 + steps - 1) / steps;
    alignas(64) float sums[2 * HEIGHT * OUTPUTS];
    static thread_local aligned<bf16> kept_wide;
    bf16* wide = room_for(IS_SCALED ? I * OUTPUTS : 0, kept_wide);
    Amx tiles(height, std::min(group, DEPTH), group % DEPTH, true, in_pairs);
    for_blocks(T, num_blocks, [&](int64_t index) {
      const int64_t first = index * OUTPUTS, num_outputs = std::min(OUTPUTS, N - first);
      const char* block = (const char*)packed + index * block_bytes + input * OUTPUTS * sizeof(bf16);
      const bf16* weights = IS_SCALED ? wide : (const bf16*)block;
      float start[OUTPUTS] = {};
      if (bias) widen_row(start, bias + first, num_outputs);
      Groups groups = plain(inputs);
      if constexpr (IS_SCALED) {
        groups = form.groups_of(block, I, nullptr, sum_stride);
        widen_groups(wide, (const W*)block, groups);
      }
      for (int64_t i = 0; i < num_tiles; i++) {
        auto [begin, end] = tile_of(rows, i, most);
        const Rows<const bf16> from{x + (turn + begin) * I + input, I};
        const Rows<float> total{totals + begin * width + first, width};
        const Rows<float> to = is_last ? Rows<float>{sums, OUTPUTS} : total, old = input ? total : Rows<float>{start, 0};
        const char* next = block + block_bytes + i * bytes;
        if (x_sums) groups.x_sums = x_sums + (turn + begin) * sum_stride;
        if (IS_SCALED) SCALED_TILES[height - 1](to, old, from, weights, groups, next, lines);
        else if (in_pairs) multiply_two_tiles(to, old, from, end - begin - height, weights, inputs, next, lines);
        else multiply_plain_tile(to, old, from, weights, inputs, next, lines);
        for (int64_t t = begin; t < end && is_last; t++)
          narrow_row(out + (turn + t) * N + first, sums + (t - begin) * OUTPUTS, num_outputs);
      }
    });
  };
#pragma omp parallel
  for (int64_t turn = 0; turn < T; turn += in_turn)
    for (int64_t input = 0; input < I; input += part) multiply_part(turn, input);
}
#endif
