// Products of integers: quantized weights times activations that are rounded to 8 bits, in groups of inputs. The sum of
// a group's products is an exact integer, with any instructions. Groups are added in order, in float, and
// multiplications and additions are rounded separately, so every processor computes the same bits.
// tests/backends/test_integers.py has the definition in NumPy.

#pragma once

#include <cmath>

#include "products.h"
#ifdef __ARM_FEATURE_DOTPROD
#include <arm_neon.h>
#endif

// A register of 32-bit lanes holds an output's weights for INPUTS consecutive inputs, 8 bits each. Packed int8 has this
// layout: (ceil(N / OUTPUTS), I / INPUTS, OUTPUTS, INPUTS). In packed int4, two vectors share a register: the first one's
// weights are the low halves of the bytes. In int6, a third register has the upper two bits of four vectors. Each weight
// is stored as integer + OFFSET: VNNI takes unsigned weights. The sum of a group's activations, times -OFFSET, is added.
constexpr int64_t INPUTS = 4;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool HAS_DOT = true, IS_UNSIGNED = true;
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool HAS_DOT = true, IS_UNSIGNED = false;
#else
constexpr bool HAS_DOT = false, IS_UNSIGNED = false;  // computes the same, slowly
#endif
struct int6 { uint32_t word; };
template <class W>
constexpr int32_t OFFSET = std::is_same_v<W, int6> ? 32 : !std::is_same_v<W, int8_t> ? 8 : IS_UNSIGNED ? 128 : 0;
template <class W>  // of four steps: INPUTS inputs each
constexpr int64_t STEPS_BYTES = OUTPUTS * INPUTS * (std::is_same_v<W, int4x8> ? 2 : std::is_same_v<W, int6> ? 3 : 4);

// int4 with a byte for each weight, as int8 is packed. A block is converted once for many rows.
struct wide_int4 { uint8_t all; };

// Returns the weights of vector j of four steps.
template <class W>
static inline integers bytes_of(const W* steps, int j) { return load_as<integers>(steps + j * LANES * INPUTS); }
static inline integers bytes_of(const int4x8* steps, int j) {
  bits both = load_as<bits>(steps + j / 2 * LANES);
  return (integers)((j % 2 ? both >> 4 : both) & 0x0f0f0f0f);
}
static inline integers bytes_of(const int6* steps, int j) {
  const int6* four = steps + j / 4 * 3 * LANES;
  bits words = load_as<bits>(four + 2 * LANES), upper = j % 4 == 3 ? words >> 2 : words << (4 - j % 4 * 2);
  return bytes_of((const int4x8*)four, j % 4) | (integers)(upper & 0x30303030);
}

// With AVX2 alone, products of 4-bit weights are added in 16 bits first, two to a sum, for four steps: up to 8 * 15 * 128.
#if defined(__AVX2__) && !defined(__AVX512BW__) && !defined(__AVXVNNI__)
template <class W>
constexpr bool IN_SHORTS = OFFSET<W> == 8;  // int4 and wide_int4
static inline integers add_shorts(integers sum, integers shorts) {
  return sum + (integers)_mm256_madd_epi16((__m256i)shorts, _mm256_set1_epi16(1));
}
// Without this, the compiler computes products of all rows first, and keeps them on the stack.
static inline void keep_order(integers& vector) { asm volatile("" : "+x"(vector)); }
#else
template <class W>
constexpr bool IN_SHORTS = false;
static inline integers add_shorts(integers sum, integers) { return sum; }
static inline void keep_order(integers&) {}
#endif

// Adds to each lane the sum of products of INPUTS weights and activations.
template <class W>
static inline integers add_dot(integers sum, integers weights, integers x) {
#if defined(__AVX512VNNI__)
  return (integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)x);
#elif defined(__AVX512BW__)  // pairs of products are added in 16 bits: at most 2 * 128 * 127
  __m512i w = (__m512i)weights, signed_x = (__m512i)x;
  if constexpr (!OFFSET<W>) {
    signed_x = _mm512_mask_sub_epi8(signed_x, _mm512_movepi8_mask(w), __m512i{}, signed_x);
    w = _mm512_abs_epi8(w);
  }
  __m512i pairs = _mm512_maddubs_epi16(w, signed_x);
  return sum + (integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  __m256i w = (__m256i)weights, signed_x = (__m256i)x;
  if constexpr (!OFFSET<W>) signed_x = _mm256_sign_epi8(signed_x, w), w = _mm256_abs_epi8(w);
  __m256i pairs = _mm256_maddubs_epi16(w, signed_x);
  return IN_SHORTS<W> ? (integers)_mm256_add_epi16((__m256i)sum, pairs) : add_shorts(sum, (integers)pairs);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (integers)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)x);
#else
  for (int shift = 24; shift >= 0; shift -= 8) sum += (weights << shift >> 24) * (x << shift >> 24);
  return sum;
#endif
}

// Returns a product, rounded to float. Without this function, the compiler may fuse the product with an addition.
static inline floats rounded_product(floats a, floats b) {
  floats product = a * b;
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__AVX__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

// Adds to `total` a group's sum of products, times scales. x_sum is the sum of the group's activations.
template <bool HAS_ZEROS>
static inline void add_scaled(float* total, integers sum, floats scale, floats zero, int32_t x_sum) {
  floats exact = __builtin_convertvector(sum, floats);
  if (HAS_ZEROS) exact -= rounded_product(zero, floats{} + float(x_sum));
  *(floats_anywhere*)total += rounded_product(exact, scale);
}

// Activations, rounded. An activation is integer * scale of its group.
struct Rounded {
  int64_t stride, groups, height;  // bytes from row to row; groups in a row; rows, with room for a whole AMX tile
  aligned<int8_t> integers;        // integers (T, stride)
  std::vector<float> scales;       // (T, groups); for AMX (groups, height)
  std::vector<int32_t> sums;       // like scales: sums of a group's integers
  void reserve_rows(int64_t T, int64_t I, int64_t group) {
    // Rows are one cache line further apart. Otherwise, for many widths, a tile's rows would share one L1 cache set.
    stride = (I + 127) / 64 * 64, groups = I / group, height = T;
    room_for(T * stride, integers), room_for(T * groups, scales), room_for(T * groups, sums);
  }
  int8_t* row(int64_t t) { return integers.data() + t * stride; }
};

// Rounds a group to multiples of its largest absolute value / LIMIT, which is 127 for 8 bits. A group whose values are
// not all finite gets the scale NaN. One whose values are all below TINY is 0: the reciprocal of its scale could be
// infinite.
constexpr float TINY = 0x1p-100f;
template <int LIMIT, class I>
static inline __attribute__((always_inline)) void round_floats(I* __restrict out, float& scale, int32_t& sum,
                                                               const float* __restrict x, int64_t n) {
  int32_t largest = 0;  // compared as bits: absolute values have the same order as their bits, and NaN is the largest
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    largest = std::max(largest, bits & 0x7fffffff);
  }
  float size;
  memcpy(&size, &largest, 4);
  bool is_finite = largest < 0x7f800000, is_zero = !is_finite || size < TINY;
  scale = is_finite ? is_zero ? 0 : size / LIMIT : NAN;
  float inverse = is_zero ? 0 : LIMIT / size;
  sum = 0;
  if (is_zero) {
    memset(out, 0, n * sizeof(I));
    return;
  }
  // Two loops: in one, the compiler would only vectorize for as many numbers as a register has room for I.
  for (int64_t i = 0; i < n; i++) out[i] = int32_t(std::nearbyint(x[i] * inverse));
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += int32_t(std::nearbyint(x[i] * inverse));
}
template <class X>
static void round_group(int8_t* __restrict out, float& scale, int32_t& sum, const X* __restrict x, int64_t n) {
  auto round = [&](int64_t n) __attribute__((always_inline)) {
    float room[128];
    const float* numbers = room;
    if constexpr (std::is_same_v<X, float>) numbers = x;
    else widen_row(room, x, n);
    round_floats<127>(out, scale, sum, numbers, n);
  };
  if (n == 32) round(32);  // of constant numbers the compiler makes faster code
  else if (n == 128) round(128);
  else round(n);
}

// Adds to R rows of sums, OUTPUTS wide, the product of rows of x from `first` on and a block's weights. Meanwhile, for
// every four steps, `lines` cache lines are prefetched from `next` on. A group has up to 130 lines. If they were requested
// all at once, one row would wait for them, and memory would be idle while the group is multiplied.
template <class W, bool HAS_ZEROS, int R>
static void multiply_integers(float* sums, Rounded& x, int64_t first, const char* block, const Form& form,
                              const char* next, int64_t lines) {
  const int64_t stride = x.stride, groups = x.groups, group = form.group;
  const int8_t* from = x.row(first);
  const float* scales = x.scales.data() + first * groups;
  const int32_t* x_sums = x.sums.data() + first * groups;
  for (int64_t g = 0; g < groups; g++, scales++, x_sums++) {
    asm("" ::: "memory");  // otherwise the compiler keeps totals in registers, and the integers' sums on the stack
    integers sum[R][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) sum[r][j] = integers{} - OFFSET<W> * x_sums[r * groups];
    const char* steps = block;
    for (int64_t i = 0; i < group; i += 4 * INPUTS, steps += STEPS_BYTES<W>) {
      for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
      integers part[R][VECTORS];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) part[r][j] = IN_SHORTS<W> ? integers{} : sum[r][j];
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++, from += INPUTS) {
        integers weights[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) weights[j] = bytes_of((const W*)steps, k * VECTORS + j);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          int32_t four;
          memcpy(&four, from + r * stride, 4);
          integers inputs = integers{} + four;
          keep_order(inputs);
#pragma GCC unroll 4
          for (int j = 0; j < VECTORS; j++) part[r][j] = add_dot<W>(part[r][j], weights[j], inputs);
#pragma GCC unroll 4
          for (int j = 0; j < VECTORS; j++) keep_order(part[r][j]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) sum[r][j] = IN_SHORTS<W> ? add_shorts(sum[r][j], part[r][j]) : part[r][j];
    }
    const uint16_t* params = (const uint16_t*)(block + form.weight_bytes());
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      floats scale = halves(params + j * LANES), zero{};
      if (HAS_ZEROS) zero = halves(params + OUTPUTS + j * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        add_scaled<HAS_ZEROS>(sums + r * OUTPUTS + j * LANES, sum[r][j], scale * scales[r * groups], zero,
                              x_sums[r * groups]);
    }
    block += form.group_bytes();
  }
}

template <class W, bool HAS_ZEROS, int... R>
static constexpr auto integer_tiles(std::integer_sequence<int, R...>) {
  return std::array{&multiply_integers<W, HAS_ZEROS, R + 1>...};
}
template <class W, bool HAS_ZEROS>
static constexpr auto INTEGER_TILES = integer_tiles<W, HAS_ZEROS>(std::make_integer_sequence<int, ROWS>());

// Converts a block to a byte for each integer, less `offset`: int4 to wide_int4, or any to signed bytes.
template <class W>
static void widen_integers(char* out, const char* block, const Form& form, int64_t groups, int8_t offset) {
  typedef int8_t bytes __attribute__((vector_size(LANES * INPUTS)));
  int64_t params = form.group_bytes() - form.weight_bytes();
  for (int64_t g = 0; g < groups; g++, block += params, out += params) {
    for (const char* end = block + form.weight_bytes(); block < end; block += STEPS_BYTES<W>)
      for (int j = 0; j < 4 * VECTORS; j++, out += LANES * INPUTS) {
        bytes integers = (bytes)bytes_of((const W*)block, j) - offset;
        memcpy(out, &integers, sizeof integers);
      }
    memcpy(out, block, params);
  }
}

// ---- Products of integers by AMX -----------------------------------------------------------------
//
// Sums of integers are exact in any order, so AMX computes the same bits for many rows as VNNI does for few. A tile has up
// to DEEPEST inputs: at most two tiles make a group. With fewer than TILES_FROM rows, it takes as long as VNNI.
constexpr int64_t DEEPEST = 64, TILES_FROM = 32;

#ifdef MAY_HAVE_AMX
template <int SUMS, int X, int WEIGHTS>
static inline void add_integer_product() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(WEIGHTS));
}

// Like `multiply_integers`, for HEIGHT rows and signed bytes. Prefetches after each product of tiles.
template <bool HAS_ZEROS>
static void multiply_signed_tile(float* sums, Rounded& x, int64_t first, const char* block, const Form& form,
                                 const char* next, int64_t lines) {
  alignas(64) int32_t kept[2][VECTORS][HEIGHT * LANES];
  const int64_t height = x.height, group = form.group;
  const Rows<int8_t> from{x.row(first), x.stride};
  const float* scales = x.scales.data() + first;
  const int32_t* x_sums = x.sums.data() + first;
  auto multiply = [&](int64_t g, auto j) __attribute__((always_inline)) {
    if (g == x.groups) return;
    const Rows column{block + g * form.group_bytes() + j * LANES * INPUTS, OUTPUTS * INPUTS};
    if (!j) load_tile<4>(from + g * group);
    clear_tile<j>();
    load_tile<5>(column);
    add_integer_product<j, 4, 5>();
    if (group > DEEPEST) {
      if (!j) load_tile<6>(from + g * group + DEEPEST);
      load_tile<7>(column + DEEPEST * OUTPUTS);
      add_integer_product<j, 6, 7>();
    }
    store_tile<j>(Rows<int32_t>{kept[g % 2][j], LANES});
    for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
  };
  for_each_vector([&](auto j) { multiply(0, j); });
  for (int64_t g = 0; g < x.groups; g++, scales += height, x_sums += height)
    for_each_vector([&](auto j) __attribute__((always_inline)) {
      multiply(g + 1, j);  // compute the next group's sums while this group's are scaled
      const uint16_t* params = (const uint16_t*)(block + g * form.group_bytes() + form.weight_bytes()) + j * LANES;
      floats scale = halves(params), zero{};
      if (HAS_ZEROS) zero = halves(params + OUTPUTS);
#pragma GCC unroll 16
      for (int r = 0; r < HEIGHT; r++)
        add_scaled<HAS_ZEROS>(sums + r * OUTPUTS + j * LANES, load_as<integers>(kept[g % 2][j] + r * LANES),
                              scale * scales[r], zero, x_sums[r]);
    });
}
#endif

// Computes out (T, N) = x (T, I), rounded, times packed integers + bias. Blocks are read as in `product`.
template <class W, class X>
static void integer_product(X* out, const X* x, const W* packed, const Form& form, const X* bias, int64_t T, int64_t I,
                            int64_t N) {
  const bool by_amx = HAS_TILES && T >= TILES_FROM;
  static thread_local Rounded kept;  // kept between calls: new memory takes longer than the work
  kept.reserve_rows(by_amx ? T + HEIGHT : T, I, form.group);
  Rounded& rows = kept;
  const int64_t height = by_amx ? HEIGHT : ROWS, num_tiles = num_tiles_of(T, height);
  const int64_t block_bytes = rows.groups * form.group_bytes(), steps = by_amx ? VECTORS * rows.groups : I / (4 * INPUTS);
  const int64_t fetching = std::min<int64_t>(num_tiles, 4), times = steps * fetching;
  const int64_t lines = (block_bytes / 64 + times - 1) / times;
  const bool is_widened = by_amx || (std::is_same_v<W, int4x8> && T > 2 * MANY);
  const Form used{is_widened ? 8 : form.bits, form.group, form.has_zeros, form.activation_bits};
  auto multiply = form.has_zeros ? INTEGER_TILES<W, true>.data() : INTEGER_TILES<W, false>.data();
  if (is_widened)
    multiply = form.has_zeros ? INTEGER_TILES<wide_int4, true>.data() : INTEGER_TILES<wide_int4, false>.data();
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t place = 0; place < T * rows.groups; place++) {
      int64_t t = place / rows.groups, g = place % rows.groups, i = g * form.group;
      int64_t at = by_amx ? g * rows.height + t : place;
      round_group(rows.row(t) + i, rows.scales[at], rows.sums[at], x + t * I + i, form.group);
    }
    alignas(64) float sums[HEIGHT * OUTPUTS];
    static thread_local aligned<char> kept_wide;
    char* wide = room_for(is_widened ? rows.groups * used.group_bytes() : 0, kept_wide);
#ifdef MAY_HAVE_AMX
    std::optional<Amx> tiles;
    if (by_amx) tiles.emplace(HEIGHT, std::min(form.group, DEEPEST) / 2, std::min(form.group, DEEPEST) / 2, false);
#endif
    for_each_block(out, bias, sums, T, N, height, [&](int64_t block, int64_t i, int64_t begin, int64_t end) {
      const char* from = (const char*)packed + block * block_bytes;
      const char* next = from + block_bytes + i * lines * steps * 64;
      if (is_widened) {
        if (!i) widen_integers<W>(wide, from, form, rows.groups, by_amx ? OFFSET<W> : 0);
        from = wide;
      }
      auto tile = multiply[std::min<int64_t>(ROWS, end - begin) - 1];
#ifdef MAY_HAVE_AMX
      if (by_amx) tile = form.has_zeros ? multiply_signed_tile<true> : multiply_signed_tile<false>;
#endif
      tile(sums, rows, begin, from, used, next, i < fetching ? lines : 0);
    });
  }
}
