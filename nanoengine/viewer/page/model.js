// The bundled model in typed arrays: its weights, tokenizer, forward pass and sampler. Sums run in double precision and
// are stored in single precision, so logits differ from PyTorch's by the rounding of PyTorch's sums and no more.

/** Unpack the weights: base64 of gzip of all float16 numbers, first their low bytes, then their high bytes. */
async function unpackModel({config, shapes, tokenizer, weights}) {
  const text = atob(weights), packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const powers = Array.from({length: 32}, (_, exponent) => 2 ** (exponent - 25));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer()), count = bytes.length / 2, all = new Float32Array(count);
  for (let i = 0; i < count; i++) {
    const high = bytes[count + i], exponent = (high >> 2) & 31, fraction = (high & 3) * 256 + bytes[i];
    all[i] = (high >> 7 ? -1 : 1) * (exponent ? powers[exponent] * (1024 + fraction) : powers[1] * fraction);
  }
  let offset = 0; const w = {};
  for (const [name, shape] of Object.entries(shapes))
    w[name] = all.subarray(offset, offset += shape.reduce((a, b) => a * b));
  return {config, w, tokenizer: new Tokenizer(tokenizer)};
}

// ---- text and tokens ----------------------------------------------------------------------------

/** A byte-level BPE tokenizer that splits off each digit. */
class Tokenizer {
  constructor({model, added_tokens}) {
    this.ids = new Map(Object.entries(model.vocab));
    this.ranks = new Map(model.merges.map((pair, i) => [[pair].flat().join(" "), i]));
    this.special = new Map(added_tokens.map(({content, id}) => [content, id]));
    const shown = byte => byte > 32 && byte < 127 || byte > 160 && byte !== 173;
    let others = 256;  // bytes that are not printable are written as characters from 256 on
    this.chars = Array.from({length: 256}, (_, byte) => String.fromCharCode(shown(byte) ? byte : others++));
    this.bytes = new Map(this.chars.map((char, byte) => [char, byte]));
    this.pieces = new Map([...this.ids, ...this.special].map(([piece, id]) => [id, piece]));
  }
  encode(text) {
    const marks = [...this.special.keys()].map(mark => mark.replaceAll("|", "\\|")).join("|");
    return text.split(new RegExp(`(${marks})`)).flatMap(part => this.special.has(part) ? [this.special.get(part)]
      : part.split(/(\p{N})/u).flatMap(piece => piece.match(/'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu) ?? [])
        .flatMap(word => this.encodeWord([...new TextEncoder().encode(word)].map(byte => this.chars[byte]))));
  }
  /** Merge the pair with the lowest rank until no pair has a rank, unless the whole word is a token. */
  encodeWord(parts) {
    const whole = this.ids.get(parts.join(""));
    if (whole !== undefined) return [whole];
    for (;;) {
      const ranks = parts.slice(1).map((part, i) => this.ranks.get(`${parts[i]} ${part}`) ?? Infinity);
      const best = Math.min(...ranks), i = ranks.indexOf(best);
      if (best === Infinity) return parts.map(part => this.ids.get(part));
      parts.splice(i, 2, parts[i] + parts[i + 1]);
    }
  }
  decode(ids) {
    const bytes = ids.flatMap(id => this.special.has(this.pieces.get(id)) ? [...new TextEncoder().encode(this.pieces.get(id))]
      : [...this.pieces.get(id) ?? ""].map(char => this.bytes.get(char)));
    return new TextDecoder().decode(new Uint8Array(bytes));
  }
}

// ---- the forward pass ---------------------------------------------------------------------------

/** x (T, n) times the transpose of w (m, n): (T, m). */
function linear(x, w, n) {
  const m = w.length / n, rows = x.length / n, out = new Float32Array(rows * m);
  for (let j = 0; j < m; j++) for (let t = 0; t < rows; t++) {
    let a = 0, b = 0, c = 0, d = 0, u = t * n, v = j * n;
    for (const end = u + n; u < end; u += 4, v += 4) { a += x[u] * w[v]; b += x[u + 1] * w[v + 1]; c += x[u + 2] * w[v + 2]; d += x[u + 3] * w[v + 3]; }
    out[t * m + j] = a + b + c + d;
  }
  return out;
}
/** Each row of `weight.length` numbers divided by its root mean square, times weight. */
function rmsNorm(x, weight, eps) {
  const n = weight.length, out = new Float32Array(x.length);
  for (let i = 0; i < x.length; i += n) {
    let sum = 0;
    for (let j = 0; j < n; j++) sum += x[i + j] ** 2;
    const scale = Math.fround(1 / Math.sqrt(sum / n + eps));
    for (let j = 0; j < n; j++) out[i + j] = weight[j] * Math.fround(x[i + j] * scale);
  }
  return out;
}

/** The model and its paged KV cache. */
class Runner {
  constructor({config, w, tokenizer}, numBlocks, size) {
    Object.assign(this, {config, w, tokenizer, size, D: config.head_dim, K: config.num_key_value_heads});
    this.kvSize = this.K * this.D;
    const make = () => new Float32Array((numBlocks + 1) * size * this.kvSize);  // (num_blocks, block_size, K, D)
    this.caches = Array.from({length: config.num_hidden_layers}, () => ({k: make(), v: make()}));
    const theta = config.rope_parameters.rope_theta;
    this.frequencies = Float32Array.from({length: this.D / 2}, (_, i) => 1 / Math.fround(theta ** (2 * i / this.D)));
  }
  /** Rotate each head of x by the angles of its token's position, in place. */
  rotate(x, heads, positions) {
    const half = this.D / 2;
    positions.forEach((position, t) => {
      for (let i = 0; i < half; i++) {
        const angle = Math.fround(position * this.frequencies[i]), cos = Math.fround(Math.cos(angle)), sin = Math.fround(Math.sin(angle));
        for (let at = t * heads * this.D + i, h = 0; h < heads; h++, at += this.D) {
          const [a, b] = [x[at], x[at + half]];
          x[at] = a * cos - b * sin; x[at + half] = b * cos + a * sin;
        }
      }
    });
    return x;
  }
  /** Compute a step: the logits after each sequence's last token, its attention, and the K and V of all tokens. */
  forward(inputs) {
    const {config, w, caches} = this, {input_ids, positions, slot_mapping} = inputs, E = config.hidden_size, eps = config.rms_norm_eps;
    const num = caches.length, H = config.num_attention_heads, T = input_ids.length, kv = new Float32Array(T * num * 2 * this.kvSize);
    const attention = inputs.seq_lens.map(length => new Float32Array(num * H * length));
    let x = new Float32Array(T * E);
    input_ids.forEach((id, t) => x.set(w["embed_tokens"].subarray(id * E, (id + 1) * E), t * E));
    const add = y => { for (let i = 0; i < x.length; i++) x[i] += y[i]; };
    caches.forEach(({k: kCache, v: vCache}, layer) => {
      const of = name => w[`layers.${layer}.${name}`], h = rmsNorm(x, of("input_layernorm"), eps);
      const q = this.rotate(rmsNorm(linear(h, of("self_attn.q_proj"), E), of("self_attn.q_norm"), eps), H, positions);
      const k = this.rotate(rmsNorm(linear(h, of("self_attn.k_proj"), E), of("self_attn.k_norm"), eps), this.K, positions);
      const v = linear(h, of("self_attn.v_proj"), E), n = this.kvSize;
      slot_mapping.forEach((slot, t) => [[k, kCache], [v, vCache]].forEach(([rows, cache], i) => {
        const row = rows.subarray(t * n, (t + 1) * n);
        cache.set(row, slot * n); kv.set(row, ((t * num + layer) * 2 + i) * n);
      }));
      add(linear(this.attend(q, kCache, vCache, inputs, attention, layer), of("self_attn.o_proj"), H * this.D));
      const z = rmsNorm(x, of("post_attention_layernorm"), eps);
      const gate = linear(z, of("mlp.gate_proj"), E), up = linear(z, of("mlp.up_proj"), E);
      for (let i = 0; i < gate.length; i++) gate[i] = Math.fround(gate[i] / (1 + Math.exp(-gate[i]))) * up[i];
      add(linear(gate, of("mlp.down_proj"), config.intermediate_size));
    });
    const last = inputs.cu_seqlens_q.slice(1).map(end => rmsNorm(x.subarray((end - 1) * E, end * E), w["norm"], eps));
    return {logits: last.map(row => linear(row, w["embed_tokens"], E)), attention, kv};
  }
  /** Causal attention of each token over its sequence's slots, found through the block table. */
  attend(q, kCache, vCache, {positions, cu_seqlens_q, seq_lens, block_tables}, attention, layer) {
    const {D, K, size} = this, H = this.config.num_attention_heads, out = new Float32Array(q.length), scale = D ** -0.5;
    block_tables.forEach((table, s) => {
      for (let t = cu_seqlens_q[s]; t < cu_seqlens_q[s + 1]; t++) for (let h = 0; h < H; h++) {
        const length = positions[t] + 1, weights = new Float32Array(length), at = (t * H + h) * D, head = Math.floor(h * K / H) * D;
        const rowOf = i => (table[Math.floor(i / size)] * size + i % size) * K * D + head;
        for (let i = 0; i < length; i++) {
          let sum = 0;
          for (let j = 0, row = rowOf(i); j < D; j++) sum += q[at + j] * kCache[row + j];
          weights[i] = sum * scale;
        }
        const largest = weights.reduce((a, b) => Math.max(a, b)), total = weights.reduce((sum, one) => sum + Math.exp(one - largest), 0);
        for (let i = 0; i < length; i++) weights[i] = Math.exp(weights[i] - largest) / total;
        for (let j = 0; j < D; j++) { let sum = 0; for (let i = 0; i < length; i++) sum += weights[i] * vCache[rowOf(i) + j]; out[at + j] = sum; }
        if (length === seq_lens[s]) attention[s].set(weights, (layer * H + h) * length);
      }
    });
    return out;
  }
}

// ---- the sampler --------------------------------------------------------------------------------

const MASK = (1n << 64n) - 1n, times = (a, b) => (a * b) & MASK, shift = (z, n) => z ^ (z >> n);
/** The engine's seed of a request with this seed: xxh3_64 of a text of 9 to 16 characters. */
function hash(text) {
  const bytes = new TextEncoder().encode(text), view = new DataView(bytes.buffer), size = bytes.length;
  if (size < 9 || size > 16) throw new RangeError(`a seed has 1 to 7 digits, got ${text}`);
  const low = view.getBigUint64(0, true) ^ 0x6782737bea4239b9n, high = view.getBigUint64(size - 8, true) ^ 0xaf56bc3b0996523an, product = low * high;
  view.setBigUint64(0, low, true);
  const z = (BigInt(size) + view.getBigUint64(0) + high + ((product & MASK) ^ (product >> 64n))) & MASK;
  return shift(times(shift(z, 37n), 0x165667919E3779F9n), 32n);
}
const seedOf = seed => hash(`${seed} sample 0`);
/** The random number in [0, 1) of a seed and a position: splitmix64, indexed. */
function uniform(seed, position) {
  let z = (seed + times(BigInt(position) + 1n, 0x9E3779B97F4A7C15n)) & MASK;
  z = times(shift(z, 30n), 0xBF58476D1CE4E5B9n); z = times(shift(z, 27n), 0x94D049BB133111EBn);
  return Number(shift(z, 31n) >> 11n) * 2 ** -53;
}
/** Each token's weight before the draw: exp of the logits over the temperature, and 0 if min_p, top_k or top_p filter it out. */
function weigh(logits, {temperature, top_k = 0, top_p = 1, min_p = 0}) {
  const largest = Math.max(...logits), divisor = Math.fround(temperature || 1);
  const weights = Float32Array.from(logits, one => Math.exp(Math.fround(Math.fround(one - largest) / divisor)));
  weights.forEach((one, id) => { if (one < Math.fround(min_p)) weights[id] = 0; });
  const order = [...weights.keys()].sort((a, b) => weights[b] - weights[a] || logits[b] - logits[a] || a - b);
  for (const id of order.slice(top_k > 0 ? top_k : order.length)) weights[id] = 0;
  const total = weights.reduce((a, b) => a + b, 0); let before = 0;
  if (top_p < 1) for (const id of order) {
    const share = Math.fround(weights[id] / total);
    if (before >= Math.fround(top_p) && id !== order[0]) weights[id] = 0;
    before += share;
  }
  return weights;
}
/** Draw a token by inverse CDF. A temperature of 0 takes the most probable one. */
function draw(logits, params, seed, position) {
  if (!params.temperature) return logits.indexOf(Math.max(...logits));
  const weights = weigh(logits, params), total = Math.fround(weights.reduce((a, b) => a + b, 0));
  let rest = uniform(seed, position) * total, last = 0;
  for (const [id, weight] of weights.entries()) { if (weight > 0) last = id; if ((rest -= weight) < 0) return id; }
  return last;
}

// ---- the engine ---------------------------------------------------------------------------------

/** EngineCore: the scheduler and the runner, step by step. */
class Engine {
  constructor(model, settings) {
    this.scheduler = new Scheduler({max_model_len: model.config.max_position_embeddings, ...settings});
    this.runner = new Runner(model, settings.num_blocks, settings.block_size);
    this.known = new Set();
  }
  /** Run one step, and return it as an event of a trace (null: nothing changed), with the arrays in and out of the model. */
  step() {
    const {scheduler, runner} = this, chunks = scheduler.schedule(), inside = {};
    if (chunks.length) {
      inside.inputs = buildInputs(chunks, runner.size);
      const {logits, attention, kv} = runner.forward(inside.inputs), rows = [...chunks.keys()].filter(i => chunks[i].samples);
      inside.kv = kv;
      inside.seqs = chunks.map(({seq, end}, i) => ({seq: seq.seq, params: seq.params, position: end, logits: logits[i], attention: attention[i]}));
      scheduler.update(chunks, rows.map(i => draw(logits[i], chunks[i].seq.params, chunks[i].seq.params.seed, chunks[i].end)));
    }
    const event = scheduler.endStep();
    if (!event) return null;
    event.inside = inside;
    for (const change of event.changes) for (const id of change.token_ids ?? change.tokens?.flatMap(one => one.token_ids) ?? [])
      if (!this.known.has(id)) { this.known.add(id); event.texts[id] = runner.tokenizer.decode([id]); }
    return event;
  }
}
