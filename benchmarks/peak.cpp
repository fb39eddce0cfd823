// The machine's peak rates, measured with the kernels' own instructions: multiply-adds between registers in each number
// type, and reads of memory. All threads take part. Each function returns how many operations (two for each multiply-add)
// or bytes it took.

#include "integer_products.h"

constexpr int CHAINS = 12;  // sums that do not wait for each other: they hide an instruction's latency

// Makes a register's value unknown to the compiler, which otherwise computes most of a loop in advance.
template <class V>
static inline void hide(V& vector) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(vector));
#elif defined(__SSE2__)
  asm volatile("" : "+x"(vector));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(vector));
#endif
}

// Returns the operations of `rounds` rounds in every thread. An instruction adds LANES * products products.
template <class V, class Add>
static int64_t repeat(int64_t rounds, int64_t products, Add add) {
  int64_t threads = 0;
#pragma omp parallel reduction(+ : threads)
  {
    V sums[CHAINS] = {}, weights{}, x{};
    hide(weights);
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 12
      for (int chain = 0; chain < CHAINS; chain++) {
        hide(x);
        sums[chain] = add(sums[chain], weights, x);
      }
    for (V& sum : sums) hide(sum);
    threads++;
  }
  return threads * rounds * CHAINS * LANES * products * 2;
}

#ifdef MAY_HAVE_AMX
// Returns the same for an instruction that adds tiles of products.
template <class Add>
static int64_t repeat_tiles(int64_t rounds, int64_t inputs, Add add) {
  int64_t threads = 0;
#pragma omp parallel reduction(+ : threads)
  {
    Amx amx(HEIGHT, DEPTH, 0);
    for (int64_t round = 0; round < rounds; round++) for_each_vector(add);
    threads++;
  }
  return threads * rounds * VECTORS * HEIGHT * LANES * inputs * 2;
}
#endif

extern "C" int64_t peak_float32(int64_t rounds) {
  return repeat<floats>(rounds, 1, [](floats sum, floats weights, floats x) { return sum + weights * x; });
}

extern "C" int64_t peak_integers(int64_t rounds) {
#ifdef MAY_HAVE_AMX
  if (HAS_TILES) return repeat_tiles(rounds, DEEPEST, [](auto j) { add_integer_product<j, 4, 5>(); });
#endif
  auto add = [](integers sum, integers weights, integers x) { return add_dot<int4x8>(sum, weights, x); };
  return HAS_DOT ? repeat<integers>(rounds, INPUTS, add) : 0;
}

extern "C" int64_t peak_bfloat16(int64_t rounds) {
#ifdef MAY_HAVE_AMX
  if (HAS_AMX) return repeat_tiles(rounds, DEPTH, [](auto j) { add_product<j, 4, 5>(); });
#endif
#ifdef __AVX512BF16__
  return repeat<floats>(rounds, 2, [](floats sum, floats weights, floats x) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)x);
  });
#endif
  return 0;  // there are no such instructions: the kernels multiply floats
}

extern "C" int64_t read_memory(const char* memory, int64_t bytes) {
  constexpr int64_t PAGE = 4096;
#pragma omp parallel for schedule(static)
  for (int64_t page = 0; page < bytes / PAGE; page++) {
    integers sums[4] = {};
    for (int64_t i = 0; i < PAGE; i += 4 * sizeof(integers))
      for (int64_t j = 0; j < 4; j++) sums[j] ^= load_as<integers>(memory + page * PAGE + i + j * sizeof(integers));
    for (integers& sum : sums) hide(sum);
  }
  return bytes / PAGE * PAGE;
}
