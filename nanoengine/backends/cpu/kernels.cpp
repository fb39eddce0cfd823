// CPU kernels for operations that PyTorch lacks or computes slowly: products that read each weight from memory once
// for all rows (linear.h, of floats in products.h and of integers in integer_products.h), attention over cache blocks
// (prompt_attention.h and decode_attention.h), and layers with recurrent state (recurrent_layers.h). This file has the
// element-wise work between two products, each in one pass over memory, a whole layer in one call, and sampling.
// build.py compiles this file if there is a compiler, and kernels.py calls it through ctypes. Everything here also
// exists in plain PyTorch, in backends/torch_attention.py, models/decoder.py and sampling/sampler.py, or in transformers.
//
// Shape letters: T tokens, S sequences, H query heads, K key/value heads, D head_dim, B block_size, E hidden size, R rows
// of logits, V vocabulary. X is float, bf16 or fp16; arithmetic is in float, rounded to X where PyTorch rounds.

#include <cfloat>

#include "decode_attention.h"
#include "linear.h"
#include "recurrent_layers.h"

// ---- Between attention and products --------------------------------------------------------------

// Writes k (T, K, D) and v (T, K, Dv), whose tokens are k_stride and v_stride apart, to their slots.
template <class X>
static void write_kv(const X* k, const X* v, Cached<X>* k_cache, Cached<X>* v_cache, const int64_t* slots, int64_t T,
                     int64_t K, int64_t D, int64_t Dv, int64_t k_stride, int64_t v_stride) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < T; t++) {
    write_token(k_cache + slots[t] * row_size(K, D), k + t * k_stride, K, D);
    write_token(v_cache + slots[t] * row_size(K, Dv), v + t * v_stride, K, Dv);
  }
}

// Writes x + residual (if there is one) to a row of n, and returns 1 / rms of the row.
template <class X>
static inline float add_rows(float* __restrict row, const X* x, const X* residual, float eps, int64_t n) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; i++) {
    float value = load(x[i]);
    if (residual) value = rounded<X>(value + load(residual[i]));
    row[i] = value;
    squares += value * value;
  }
  return 1 / std::sqrt(squares / n + eps);
}

// Computes total = x + residual (if there is one) and out = total / rms(total) * weight, for rows of E.
template <class X>
static void rms_norm(X* out, X* total, const X* x, const X* residual, const X* weight, float eps, int64_t T, int64_t E) {
#pragma omp parallel
  {
    std::vector<float> row(E);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; t++) {
      float inverse = add_rows(row.data(), x + t * E, residual ? residual + t * E : nullptr, eps, E);
      if (residual) narrow_row(total + t * E, row.data(), E);
      for (int64_t i = 0; i < E; i++) out[t * E + i] = narrow<X>(rounded<X>(row[i] * inverse) * load(weight[i]));
    }
  }
}

// Normalizes (if there is a weight) heads (T, heads, D), whose tokens are `stride` elements apart, and rotates them by
// cos and sin (T, D).
template <class X>
static void norm_rotate(X* out, const X* x, int64_t stride, const X* weight, float eps, const X* cos, const X* sin,
                        int64_t T, int64_t heads, int64_t D) {
#pragma omp parallel
  {
    std::vector<float> head(D);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < T * heads; i++) {
      int64_t t = i / heads;
      float inverse = add_rows<X>(head.data(), x + t * stride + i % heads * D, nullptr, eps, D);
      if (weight)
        for (int64_t d = 0; d < D; d++) head[d] = rounded<X>(rounded<X>(head[d] * inverse) * load(weight[d]));
      const X *c = cos + t * D, *s = sin + t * D;
      X* to = out + i * D;
      for (int64_t d = 0, e = D / 2; d < D / 2; d++, e++) {
        to[d] = narrow<X>(rounded<X>(head[d] * load(c[d])) + rounded<X>(-head[e] * load(s[d])));
        to[e] = narrow<X>(rounded<X>(head[e] * load(c[e])) + rounded<X>(head[d] * load(s[e])));
      }
    }
  }
}

// Computes silu(gate) * up for rows of [gate, up], I each.
template <class X>
static void silu_and_mul(X* out, const X* gate_up, int64_t T, int64_t I) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < T; t++) {
    const X *gate = gate_up + t * 2 * I, *up = gate + I;
    for (int64_t i = 0; i < I; i++) {
      float x = std::max(float(load(gate[i])), -88.0f);  // fast_exp grows no further, so x may not either
      out[t * I + i] = narrow<X>(rounded<X>(x / (1 + fast_exp(-x))) * load(up[i]));
    }
  }
}

// ---- Sampling ------------------------------------------------------------------------------------

constexpr int64_t CHUNK = 64;  // tokens of the vocabulary whose weights are summed first

// Keeps the most probable of some tokens, given in ascending order: each token before which the sizes of more probable
// tokens add up to less than `limit`. Of equally probable tokens, the lower id comes first. Sizes are first summed in
// buckets, by the leading bits of the distance from the largest logit, so that only one bucket has to be sorted.
template <class Size>
static void keep_likeliest(std::vector<int32_t>& tokens, const float* distance, double limit, Size size) {
  static thread_local std::array<double, 1 << 11> sums;
  sums.fill(0);
  auto bucket = [&](int32_t token) {  // exponent and three bits of the fraction; distances are not negative
    uint32_t bits;
    memcpy(&bits, distance + token, 4);
    return bits >> 20;
  };
  for (int32_t token : tokens) sums[bucket(token)] += size(token);
  double before = 0;
  size_t last = 0;
  while (last < sums.size() && before + sums[last] < limit) before += sums[last++];
  if (last == sums.size()) return;
  std::vector<int32_t> edge;
  for (int32_t token : tokens)
    if (bucket(token) == last) edge.push_back(token);
  auto is_likelier = [&](int32_t a, int32_t b) { return std::tie(distance[a], a) < std::tie(distance[b], b); };
  std::sort(edge.begin(), edge.end(), is_likelier);
  auto end = edge.begin();  // of those to keep: one or more, because the sizes before them are below the limit
  while (end < edge.end() && before < limit) before += size(*end++);
  auto is_beyond = [&](int32_t token) { return is_likelier(end[-1], token); };
  tokens.erase(std::remove_if(tokens.begin(), tokens.end(), is_beyond), tokens.end());
}

// Returns the first i < n at which weight(0) + ... + weight(i) exceeds `target`, and subtracts the weights before i from
// `target`. If rounding leaves no such i, returns the last i with a weight.
template <class Weight>
static int64_t pick(int64_t n, double& target, Weight weight) {
  int64_t last = 0;
  for (int64_t i = 0; i < n; i++) {
    if (!(weight(i) > 0)) continue;
    last = i;
    if (weight(i) > target) return i;
    target -= weight(i);
  }
  return last;
}

// Samples one of the tokens that min_p, top_k and top_p keep, with the random number u, given the distance and weight
// of each of the V tokens.
static int64_t draw_filtered(std::vector<int32_t>& kept, std::vector<float>& nearest, const float* distance,
                             const float* weight, int64_t top_k, float top_p, float min_p, double u, int64_t V) {
  float furthest = INFINITY;  // bound for the top k: k chunks have a token at most that far
  int64_t num_chunks = nearest.size();
  if (0 < top_k && top_k <= num_chunks) {
    for (int64_t i = 0; i < num_chunks; i++)
      nearest[i] = *std::min_element(distance + i * CHUNK, distance + std::min((i + 1) * CHUNK, V));
    std::nth_element(nearest.begin(), nearest.begin() + top_k - 1, nearest.end());
    furthest = nearest[top_k - 1];
  }
  kept.clear();
  for (int64_t i = 0; i < V; i++)
    if (distance[i] <= furthest && weight[i] > 0 && weight[i] >= min_p) kept.push_back(i);
  auto total = [&] {
    double sum = 0;
    for (int32_t token : kept) sum += weight[token];
    return sum;
  };
  if (top_k > 0) keep_likeliest(kept, distance, top_k, [](int32_t) { return 1.0; });
  if (top_p < 1)  // the most probable token is kept even if top_p is 0 in float32
    keep_likeliest(kept, distance, std::max<double>(top_p * total(), DBL_MIN), [&](int32_t i) { return weight[i]; });
  double target = u * total();
  return kept[pick(kept.size(), target, [&](int64_t i) { return weight[kept[i]]; })];
}

// Samples one of all V tokens with the random number u, given the weight of each token. First chooses a chunk, then a
// token in it.
static int64_t draw_from_all(std::vector<float>& sums, const float* weight, double u, int64_t V) {
  double total = 0;
  for (int64_t begin = 0; begin < V; begin += CHUNK) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < std::min(begin + CHUNK, V); i++) sum += weight[i];
    total += sums[begin / CHUNK] = sum;
  }
  double target = u * total;
  int64_t begin = pick(sums.size(), target, [&](int64_t i) { return sums[i]; }) * CHUNK;
  return begin + pick(std::min(CHUNK, V - begin), target, [&](int64_t i) { return weight[begin + i]; });
}

// Implements draw_rows of sampler.py: a token per row of logits (R, V), and the row's largest logit, or NaN if the row
// has a NaN.
template <class X>
static void sample(const X* logits, int64_t* tokens, float* largest, const float* temperature, const int64_t* top_k,
                   const float* top_p, const float* min_p, const double* u, int64_t R, int64_t V) {
#pragma omp parallel
  {
    std::vector<float> distance(V), weight(V), of_chunks((V + CHUNK - 1) / CHUNK);
    std::vector<int32_t> kept;
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < R; r++) {
      float *row = distance.data(), top = -INFINITY;
      widen_row(row, logits + r * V, V);
      int32_t num_nan = 0;
#pragma omp simd reduction(max : top) reduction(+ : num_nan)
      for (int64_t i = 0; i < V; i++) {
        top = row[i] > top ? row[i] : top;
        num_nan += row[i] != row[i];
      }
      largest[r] = num_nan ? NAN : top;
      if (num_nan || temperature[r] == 0 || std::isinf(top)) {
        tokens[r] = std::find(row, row + V, top) - row;
        continue;
      }
      for (int64_t i = 0; i < V; i++) {
        row[i] = (top - row[i]) / temperature[r];
        weight[i] = row[i] < 87 ? fast_exp(-row[i]) : 0;
      }
      bool is_filtered = min_p[r] > 0 || top_k[r] > 0 || top_p[r] < 1;
      tokens[r] = is_filtered
                      ? draw_filtered(kept, of_chunks, row, weight.data(), top_k[r], top_p[r], min_p[r], u[r], V)
                      : draw_from_all(of_chunks, weight.data(), u[r], V);
    }
  }
}

// ---- A layer -------------------------------------------------------------------------------------

// packed.py and compiled_attention.py pass both structs as arrays of 64-bit integers.
static_assert(sizeof(void*) == 8);
template <class X>
struct Layer {  // addresses, null if there is none, and sizes: E hidden, M of the MLP
  struct Linear {
    const void* packed;
    const X* bias;
    Form form;
  };
  Linear qkv, o, gate_up, down;
  const X *input_norm, *q_norm, *k_norm, *post_norm;
  int64_t E, H, K, D, M, window;
};
struct Batch {  // built by CompiledAttention
  const int64_t* slots;
  const int32_t *tables, *seq_lens;  // for the sequences with one new token
  const int64_t* rows;
  int64_t S, blocks, B, num_chunks;
  struct Chunk {
    int64_t start, end, seq_len;
    const int32_t* table;
  };
  const Chunk* chunks;
  const int64_t* needed;  // rows whose hidden states are used, ascending; null: all T
  int64_t num_needed;
};

// Computes DecoderLayer of models/decoder.py in one call: with separate calls, Python would take as long as a small
// batch's layer. All T rows write their K and V. out and total contain only the needed rows.
template <class X>
static void decoder_layer(X* out, X* total, const X* x, const X* residual, const X* cos, const X* sin,
                          Cached<X>* k_cache, Cached<X>* v_cache, const Layer<X>* layer, const Batch* batch, int64_t T,
                          float eps, float scale) {
  auto [qkv_proj, o_proj, gate_up_proj, down_proj, input_norm, q_norm, k_norm, post_norm, E, H, K, D, M, window] =
      *layer;
  auto [slots, tables, seq_lens, rows, S, blocks, B, num_chunks, chunks, needed, num_needed] = *batch;
  auto multiply = [&T](X* out, const X* x, auto weight, int64_t I, int64_t N) {
    auto [bits, group, has_zeros, activation_bits] = weight.form;
    linear(out, x, weight.packed, weight.bias, T, I, N, bits, group, has_zeros, activation_bits);
  };
  static thread_local std::vector<X> kept;
  int64_t width = (H + 2 * K) * D, size = T * (2 * E + width + (2 * H + K) * D + 3 * M);
  X *normed = room_for(size, kept), *sum = normed + T * E, *qkv = sum + T * E, *q = qkv + T * width, *k = q + T * H * D;
  X *attended = k + T * K * D, *gate_up = attended + T * H * D, *hidden = gate_up + T * 2 * M;

  rms_norm(normed, sum, x, residual, input_norm, eps, T, E);
  multiply(qkv, normed, qkv_proj, E, width);
  norm_rotate(q, qkv, width, q_norm, eps, cos, sin, T, H, D);
  norm_rotate(k, qkv + H * D, width, k_norm, eps, cos, sin, T, K, D);
  write_kv(k, qkv + (H + K) * D, k_cache, v_cache, slots, T, K, D, D, K * D, width);
  decode_attention(attended, q, k_cache, v_cache, tables, seq_lens, rows, S, blocks, H, K, D, D, B, scale, window, 0,
                   nullptr, nullptr);
  for (int64_t i = 0; i < num_chunks; i++) {
    auto [start, end, seq_len, table] = chunks[i];
    prefill_attention(attended + start * H * D, q + start * H * D, k_cache, v_cache, table, end - start, seq_len, H, K,
                      D, D, B, scale, window, 0, nullptr, nullptr);
  }
  const X* before = residual ? sum : x;
  if (num_needed < T) {
    for (int64_t i = 0; i < num_needed; i++) {
      memmove(attended + i * H * D, attended + needed[i] * H * D, H * D * sizeof(X));
      memmove(sum + i * E, before + needed[i] * E, E * sizeof(X));
    }
    before = sum, T = num_needed;
  }
  multiply(out, attended, o_proj, H * D, E);
  rms_norm(normed, total, out, before, post_norm, eps, T, E);
  multiply(gate_up, normed, gate_up_proj, E, 2 * M);
  silu_and_mul(hidden, gate_up, T, M);
  multiply(out, hidden, down_proj, M, E);
}

// kernels.py finds each function through a variable with its address, because a template has no C name. build.py compiles
// for one type at a time (TYPES is 1, 2 or 4; 8 more for an int8 cache): compiling for all takes over twice as long.
#define EXPORT_AS(name, X, suffix) extern "C" { decltype(&name<X>) name##_##suffix = &name<X>; }
#if TYPES & 1
#define EXPORT_FLOAT32(name) EXPORT_AS(name, float, float32)
#else
#define EXPORT_FLOAT32(name)
#endif
#if TYPES & 2
#define EXPORT_BFLOAT16(name) EXPORT_AS(name, bf16, bfloat16)
#else
#define EXPORT_BFLOAT16(name)
#endif
#if TYPES & 4 && defined(__FLT16_MAX__)
#define EXPORT_FLOAT16(name) EXPORT_AS(name, fp16, float16)
#else
#define EXPORT_FLOAT16(name)
#endif
#define EXPORT(name) EXPORT_FLOAT32(name) EXPORT_BFLOAT16(name) EXPORT_FLOAT16(name)
EXPORT(linear)
EXPORT(unpack_rows)
EXPORT(decoder_layer)
EXPORT(decode_attention)
EXPORT(prefill_attention)
EXPORT(write_kv)
EXPORT(rms_norm)
EXPORT(norm_rotate)
EXPORT(silu_and_mul)
EXPORT(sample)
EXPORT(conv_step)
EXPORT(delta_rule)
EXPORT(mamba2)
EXPORT(mamba)
extern "C" {
decltype(&pack_integers) pack_integers_int8 = &pack_integers;
int64_t outputs = OUTPUTS;         // in a block of a packed weight
bool integers_are_fast = HAS_DOT;  // whether rounded activations make products with quantized weights faster
bool amx = HAS_AMX;                // whether bfloat16 products use AMX
#ifdef _OPENMP
bool one_thread = false;
#else
bool one_thread = true;  // the compiler does not support OpenMP
#endif
}
