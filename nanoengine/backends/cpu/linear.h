// Linear layers: products with packed weights, plain or quantized, and how quantized weights are packed.
// Shape letters: T tokens, I inputs, N outputs of a layer.

#pragma once

#include "integer_products.h"

template <class X>
static void linear(X* out, const X* x, const void* packed, const X* bias, int64_t T, int64_t I, int64_t N, int64_t bits,
                   int64_t group, int64_t has_zeros, int64_t activation_bits) {
  if (!T) return;
  Form form{bits, group, has_zeros, activation_bits};
  auto multiply = [=](const auto* weights) {
    if constexpr (!std::is_same_v<decltype(weights), const X*>)
      if (activation_bits) return integer_product(out, x, weights, form, bias, T, I, N);
#ifdef MAY_HAVE_AMX
    if constexpr (std::is_same_v<X, bf16>) {
      if (HAS_AMX && bits && T <= FEW) return product<float, true>(out, x, weights, form, bias, T, I, N);
      if (HAS_AMX) return product_by_amx(out, x, weights, form, bias, T, I, N);
    }
#endif
    product<Input<X>, false>(out, x, weights, form, bias, T, I, N);
  };
  if (bits == 6) integer_product(out, x, (const int6*)packed, form, bias, T, I, N);  // not by floats
  else if (bits == 8) multiply((const int8_t*)packed);
  else if (bits == 4) multiply((const int4x8*)packed);
  else multiply((const X*)packed);
}

// ---- Quantized weights ---------------------------------------------------------------------------

// Where a block keeps the integer of input i of a group and output o (of six bits the lower four, or the upper two), plus
// an offset.
struct Place {
  int64_t byte, shift;
  int32_t offset;
};
static inline Place place_of(const Form& form, int64_t i, int64_t o, bool is_upper = false) {
  int64_t lane = o % LANES, j = o / LANES, step = form.activation_bits ? INPUTS : STEP<int8_t>;
  if (form.bits == 8)
    return {(i / step * OUTPUTS + o) * step + i % step, 0, form.activation_bits ? OFFSET<int8_t> : 0};
  if (form.activation_bits) {
    int64_t v = i / INPUTS * VECTORS + j, word = form.bits == 4 ? v / 2 : v / 4 * 3 + (is_upper ? 2 : v / 2 % 2);
    return {(word * LANES + lane) * INPUTS + i % INPUTS, is_upper ? v % 4 * 2 : v % 2 * 4, 1 << (form.bits - 1)};
  }
  int64_t k = i % STEP<int4x8> * VECTORS + j;  // as in int4x8
  return {(i / STEP<int4x8> * LANES + lane) * 4 + k / 2, k % 2 * 4, 0};
}

// Packs integers (N, I), and scales and zeros (N, I / group) as float16 bits, the way the products read them. `out` must
// be zeros.
static void pack_integers(char* out, const int8_t* integers, const uint16_t* scales, const uint16_t* zeros, int64_t N,
                          int64_t I, int64_t bits, int64_t group, int64_t activation_bits) {
  Form form{bits, group, zeros != nullptr, activation_bits};
  int64_t num_groups = I / group;
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < (N + OUTPUTS - 1) / OUTPUTS; block++)
    for (int64_t n = block * OUTPUTS; n < std::min(N, (block + 1) * OUTPUTS); n++)
      for (int64_t g = 0; g < num_groups; g++) {
        char* weights = out + (block * num_groups + g) * form.group_bytes();
        int64_t o = n % OUTPUTS;
        for (int64_t i = 0; i < group; i++) {
          auto [byte, shift, offset] = place_of(form, i, o);
          int32_t integer = integers[n * I + g * group + i] + offset;
          weights[byte] |= integer << shift & (bits == 8 ? 255 : 15 << shift);
          if (Place upper = place_of(form, i, o, true); bits == 6) weights[upper.byte] |= integer >> 4 << upper.shift;
        }
        uint16_t* params = (uint16_t*)(weights + form.weight_bytes());
        params[o] = scales[n * num_groups + g];
        if (zeros) params[OUTPUTS + o] = zeros[n * num_groups + g];
      }
}

// Unpacks rows of such a weight into out (n, I).
template <class X>
static void unpack_rows(X* out, const char* packed, const int64_t* rows, int64_t n, int64_t I, int64_t bits,
                        int64_t group, int64_t has_zeros, int64_t activation_bits) {
  Form form{bits, group, has_zeros, activation_bits};
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < n; t++) {
    int64_t o = rows[t] % OUTPUTS, lane = o % LANES;
    const char* weights = packed + rows[t] / OUTPUTS * (I / group) * form.group_bytes();
    for (int64_t first = 0; first < I; first += group, weights += form.group_bytes()) {
      const uint16_t* params = (const uint16_t*)(weights + form.weight_bytes());
      float scale = halves(params + o / LANES * LANES)[lane];
      float zero = has_zeros ? halves(params + OUTPUTS + o / LANES * LANES)[lane] : 0;
      for (int64_t i = 0; i < group; i++) {
        auto [byte, shift, offset] = place_of(form, i, o);
        uint32_t integer = uint8_t(weights[byte]) >> shift;
        if (Place upper = place_of(form, i, o, true); bits == 6)
          integer = (integer & 15) | uint8_t(weights[upper.byte]) >> upper.shift << 4;
        float number = int32_t((integer - offset) << (32 - bits)) >> (32 - bits);  // drops what else the byte holds
        out[t * I + first + i] = narrow<X>((number - zero) * scale);
      }
    }
  }
}
