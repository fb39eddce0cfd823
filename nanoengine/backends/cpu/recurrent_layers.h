// Layers with recurrent state (models/recurrent.py): T tokens each of N sequences. States are read from the slots `sources`
// and written to the slots `targets`. Tokens are processed one by one, so the result does not depend on how a prompt was
// divided into chunks. States are float, except those of convolutions.

// One step of a causal convolution, optionally followed by silu. x and out (N, C), weight (C, W), bias (C,) or null,
// states (slots, C, W): the last W inputs.
template <class X>
static void conv_step(X* out, const X* x, const X* weight, const X* bias, X* states, const int64_t* sources,
                      const int64_t* targets, int64_t N, int64_t C, int64_t W, int64_t silu) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < N * C; i++) {
    int64_t n = i / C, c = i % C;
    const X *from = states + (sources[n] * C + c) * W, *w = weight + c * W;
    X* to = states + (targets[n] * C + c) * W;
    float sum = 0;
    for (int64_t j = 0; j + 1 < W; j++) {
      to[j] = from[j + 1];
      sum += load(to[j]) * load(w[j]);
    }
    to[W - 1] = x[i];
    sum = rounded<X>(sum + load(x[i]) * load(w[W - 1]) + (bias ? load(bias[c]) : 0));
    if (silu) sum = std::max(sum, -88.0f) / (1 + fast_exp(-sum));  // see silu_and_mul
    out[i] = narrow<X>(sum);
  }
}

// The gated delta rule. q and k (N, T, K, D) are normalized here. v and out (N, T, H, V). decay (N, T, H, E): the
// logarithm of the kept fraction, for a head (E = 1) or for each of its rows (E = D). beta (N, T, H), states
// (slots, H, D, V).
template <class X>
static void delta_rule(X* out, const X* q, const X* k, const X* v, const float* decay, const float* beta, float* states,
                       const int64_t* sources, const int64_t* targets, int64_t N, int64_t T, int64_t H, int64_t K,
                       int64_t D, int64_t V, int64_t E) {
#pragma omp parallel
  {
    std::vector<float> query(D), key(D), kept(D), change(V), sum(V);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < N * H; task++) {
      int64_t n = task / H, h = task % H;
      const float* from = states + (sources[n] * H + h) * D * V;
      float* to = states + (targets[n] * H + h) * D * V;
      for (int64_t t = n * T; t < (n + 1) * T; t++, from = to) {
        int64_t i = t * H + h, head = (t * K + h / (H / K)) * D;
        float q_squares = 0, k_squares = 0;
#pragma omp simd reduction(+ : q_squares, k_squares)
        for (int64_t d = 0; d < D; d++) {
          query[d] = load(q[head + d]), key[d] = load(k[head + d]);
          q_squares += query[d] * query[d], k_squares += key[d] * key[d];
        }
        float q_scale = 1 / std::sqrt((q_squares + 1e-6f) * D), k_scale = 1 / std::sqrt(k_squares + 1e-6f);
        for (int64_t d = 0; d < D; d++) {
          query[d] *= q_scale, key[d] *= k_scale;
          kept[d] = d && E == 1 ? kept[0] : std::exp(decay[i * E + d]);
        }
        std::fill(change.begin(), change.end(), 0.0f);
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t d = 0; d < D; d++) {
          float weight = kept[d] * key[d];
#pragma omp simd
          for (int64_t e = 0; e < V; e++) change[e] += weight * from[d * V + e];
        }
        for (int64_t e = 0; e < V; e++) change[e] = (load(v[i * V + e]) - change[e]) * beta[i];
        for (int64_t d = 0; d < D; d++) {  // this row was just read and is still in a near cache
#pragma omp simd
          for (int64_t e = 0; e < V; e++) {
            float x = kept[d] * from[d * V + e] + key[d] * change[e];
            to[d * V + e] = x;
            sum[e] += query[d] * x;
          }
        }
        for (int64_t e = 0; e < V; e++) out[i * V + e] = narrow<X>(sum[e]);
      }
    }
  }
}

// Mamba2. x and out (N, T, H, P), dt (N, T, H), a and d (H,), b and c (N, T, G, S), states (slots, H, P, S).
template <class X>
static void mamba2(X* out, const X* x, const float* dt, const float* a, const X* b, const X* c, const float* d,
                   float* states, const int64_t* sources, const int64_t* targets, int64_t N, int64_t T, int64_t H,
                   int64_t P, int64_t G, int64_t S) {
#pragma omp parallel
  {
    std::vector<float> input(S), output(S);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < N * H; task++) {
      int64_t n = task / H, h = task % H;
      const float* from = states + (sources[n] * H + h) * P * S;
      float* to = states + (targets[n] * H + h) * P * S;
      for (int64_t t = n * T; t < (n + 1) * T; t++, from = to) {
        int64_t i = t * H + h, group = (t * G + h / (H / G)) * S;
        float kept = std::exp(dt[i] * a[h]);
        for (int64_t s = 0; s < S; s++) input[s] = load(b[group + s]) * dt[i], output[s] = load(c[group + s]);
        for (int64_t p = 0; p < P; p++) {
          float value = load(x[i * P + p]), sum = 0;
#pragma omp simd reduction(+ : sum)
          for (int64_t s = 0; s < S; s++) {
            float y = from[p * S + s] * kept + input[s] * value;
            to[p * S + s] = y;
            sum += y * output[s];
          }
          out[i * P + p] = narrow<X>(sum + value * d[h]);
        }
      }
    }
  }
}

// Mamba. x, dt and out (N, T, I), a (I, S), b and c (N, T, S), states (slots, I, S).
template <class X>
static void mamba(X* out, const X* x, const float* dt, const float* a, const X* b, const X* c, float* states,
                  const int64_t* sources, const int64_t* targets, int64_t N, int64_t T, int64_t I, int64_t S) {
#pragma omp parallel
  {
    std::vector<float> state(S);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < N * I; task++) {
      int64_t n = task / I, i = task % I;
      memcpy(state.data(), states + (sources[n] * I + i) * S, S * sizeof(float));
      for (int64_t t = n * T; t < (n + 1) * T; t++) {
        float step = dt[t * I + i], value = step * load(x[t * I + i]), sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t s = 0; s < S; s++) {
          state[s] = fast_exp(step * a[i * S + s]) * state[s] + value * load(b[t * S + s]);
          sum += state[s] * load(c[t * S + s]);
        }
        out[t * I + i] = narrow<X>(sum);
      }
      memcpy(states + (targets[n] * I + i) * S, state.data(), S * sizeof(float));
    }
  }
}
