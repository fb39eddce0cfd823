// The block manager, the scheduler and build_inputs of engine.py, with its names and its choices. Each change of a queue
// or a block is noted as extensions/trace.py notes it, so a run in the page is the same kind of data as a recorded run.
const byOrder = (a, b) => a.priority - b.priority || a.seq - b.seq;

/** Allocates blocks, shares those with the same prefix, and evicts the least recently used. */
class BlockManager {
  constructor({num_blocks, block_size, enable_prefix_caching}, note) {
    Object.assign(this, {size: block_size, caches: enable_prefix_caching, note});
    this.blocks = Array.from({length: num_blocks + 1}, (_, id) => ({id, refCount: 0, key: null, prefix: 0}));
    this.empty = this.blocks.slice(1);  // free, without registered content
    this.evictable = new Set();  // free and registered, least recently used first
    this.registered = new Map();  // "prefix_id of the block before: tokens" -> its blocks, which are twins
    this.nextPrefix = 1; this.evicted = [];
  }
  get numFree() { return this.empty.length + this.evictable.size; }
  blocksFor(numTokens) { return Math.ceil(numTokens / this.size); }
  keyOf(seq, i, parent) { return `${parent}:${seq.tokens.slice(i * this.size, (i + 1) * this.size)}`; }
  find(key) { return this.registered.get(key)?.values().next().value; }

  allocate(seq) {
    const hits = this.findPrefix(seq), revived = hits.filter(block => block.refCount === 0);
    const needed = this.blocksFor(seq.tokens.length) - hits.length + revived.length;
    if (needed > this.numFree) { this.note({change: "refuse", seq: seq.seq, num_needed: needed, num_free: this.numFree}); return false; }
    for (const block of hits) { this.evictable.delete(block); block.refCount++; }
    const ids = hits.map(block => block.id);
    seq.table = [...ids];
    const taken = this.grow(seq, seq.tokens.length), hitTokens = hits.length * this.size;
    // Compute at least one token, even if all are hits: its logits choose the next token.
    const computed = Math.min(hitTokens, seq.tokens.length - 1);
    Object.assign(seq, {numRegistered: hits.length, prefix: hits.at(-1)?.prefix ?? 0, hitTokens, computed});
    this.note({change: "admit", seq: seq.seq, hits: [ids], revived: revived.map(block => block.id), taken: [taken],
      evicted: this.evicted, num_computed_tokens: computed}, seq);
    return true;
  }
  /** The longest chain of registered blocks that holds the start of the sequence. */
  findPrefix(seq) {
    const hits = [], numFull = this.caches ? Math.floor(seq.tokens.length / this.size) : 0;
    for (let i = 0, block; i < numFull && (block = this.find(this.keyOf(seq, i, hits.at(-1)?.prefix ?? 0))); i++) hits.push(block);
    return hits;
  }
  mayAppend(seq, numTokens) {
    if (this.blocksFor(numTokens) - seq.table.length > this.numFree) return false;
    const taken = this.grow(seq, numTokens);
    if (taken.length) this.note({change: "append", seq: seq.seq, taken: [taken], evicted: this.evicted}, seq);
    return true;
  }
  grow(seq, numTokens) {
    const taken = [];
    this.evicted = [];
    while (seq.table.length < this.blocksFor(numTokens)) { taken.push(this.takeFreeBlock()); seq.table.push(taken.at(-1)); }
    return taken;
  }
  takeFreeBlock() {
    const block = this.empty.shift() ?? this.evictable.values().next().value;
    if (block.key !== null) {
      this.evictable.delete(block); this.evicted.push(block.id);
      const twins = this.registered.get(block.key);
      twins.delete(block);
      if (!twins.size) this.registered.delete(block.key);
      block.key = null;
    }
    block.refCount = 1;
    return block.id;
  }
  /** Register the blocks that the first numTokens tokens fill, once the step that fills them is scheduled. */
  registerFullBlocks(seq, numTokens) {
    const first = seq.numRegistered, ids = [], prefix_ids = [], end = this.caches ? Math.floor(numTokens / this.size) : 0;
    for (let i = first; i < end; i++) {
      const key = this.keyOf(seq, i, seq.prefix), block = this.blocks[seq.table[i]];
      seq.prefix = this.find(key)?.prefix ?? this.nextPrefix++; Object.assign(block, {key, prefix: seq.prefix});
      this.registered.set(key, (this.registered.get(key) ?? new Set()).add(block));
      ids.push(block.id); prefix_ids.push(seq.prefix); seq.numRegistered = i + 1;
    }
    if (ids.length) this.note({change: "register", seq: seq.seq, first, blocks: [ids], prefix_ids});
  }
  /** Release all blocks of a sequence, the last block first, so that tails are evicted before prefixes. */
  free(seq, why, forSeq = null) {
    const freed = [], shared = [];
    for (const id of seq.table.toReversed()) {
      const block = this.blocks[id];
      (--block.refCount ? shared : freed).push(id);
      if (!block.refCount) block.key === null ? this.empty.unshift(block) : this.evictable.add(block);
    }
    Object.assign(seq, {table: [], computed: 0, hitTokens: 0, numRegistered: 0, prefix: 0});
    this.note({change: "free", seq: seq.seq, why, for_seq: forSeq, freed, shared}, seq);
  }
}

/** Decides in each step how many tokens of which sequences to compute. Its settings are a trace's start event. */
class Scheduler {
  constructor(settings) {
    this.settings = settings;
    this.blocks = new BlockManager(settings, (change, touched) => { this.changes.push(change); if (touched) this.touched.add(touched); });
    [this.waiting, this.running, this.changes, this.touched, this.numSteps] = [[], [], [], new Set(), 0];
    this.maxTokens = Math.min(settings.max_model_len ?? Infinity, settings.num_blocks * settings.block_size + 1);
  }
  get isBusy() { return this.waiting.length + this.running.length > 0; }

  /** Queue a request {seq, request, priority, token_ids, max_tokens, stop_ids}, which must leave room for one output token. */
  add({seq, request, priority, token_ids, max_tokens, stop_ids = [], ...params}) {
    const max = Math.min(this.maxTokens, token_ids.length + max_tokens);
    const one = {seq, priority, prompt: token_ids.length, tokens: [...token_ids], max, stop_ids, params, table: [], computed: 0, hitTokens: 0};
    this.changes.push({change: "add", seq, request, priority, token_ids, max_num_tokens: max});
    this.waiting = [...this.waiting, one].sort(byOrder);
  }
  schedule() {
    const {max_num_batched_tokens, max_num_seqs} = this.settings, chunks = [];
    let budget = max_num_batched_tokens, mayAdmit = true;
    const compute = seq => { const chunk = this.scheduleChunk(seq, budget); chunks.push(chunk); budget -= chunk.end - chunk.start; };
    for (let i = 0; i < this.running.length && budget > 0; i++) {
      const seq = this.running[i], before = this.running.length;
      const hasRoom = seq.tokens.length <= seq.table.length * this.settings.block_size || this.makeRoom(seq);
      mayAdmit &&= this.running.length === before;  // after a preemption blocks are scarce
      if (!hasRoom) break;
      compute(seq);
    }
    while (mayAdmit && this.waiting.length && budget > 0 && this.running.length < max_num_seqs && this.blocks.allocate(this.waiting[0])) {
      const seq = this.waiting.shift();
      this.running = [...this.running, seq].sort(byOrder); compute(seq);
    }
    if (chunks.length) this.changes.push({change: "schedule", num_tokens: max_num_batched_tokens - budget,
      chunks: chunks.map(({seq, start, end, samples}) => ({seq: seq.seq, start, end, samples, draft: null}))});
    return chunks;
  }
  /** Grow a running sequence's block table, preempting from the tail while too few blocks are free. */
  makeRoom(seq) {
    while (!this.blocks.mayAppend(seq, seq.tokens.length)) {
      const last = this.running.pop();
      this.blocks.free(last, "preempted", seq.seq); this.waiting = [...this.waiting, last].sort(byOrder);
      if (last === seq) return false;
    }
    return true;
  }
  scheduleChunk(seq, budget) {
    const start = seq.computed, end = Math.min(seq.tokens.length, start + budget, start + this.settings.max_chunk_tokens);
    seq.computed = end; this.blocks.registerFullBlocks(seq, end);
    return {seq, start, end, samples: end === seq.tokens.length, table: [...seq.table], hitTokens: seq.hitTokens};
  }
  /** Append the tokens that a step sampled, one for each chunk that samples. */
  update(chunks, tokenIds) {
    const seqs = chunks.filter(chunk => chunk.samples).map(chunk => chunk.seq);
    const tokens = seqs.map((seq, i) => ({seq: seq.seq, token_ids: [tokenIds[i]], num_accepted: 0}));
    if (seqs.length) this.changes.push({change: "tokens", of_step: this.numSteps + 1, tokens, discarded: []});
    seqs.forEach((seq, i) => {
      seq.tokens.push(tokenIds[i]);
      if (seq.stop_ids.includes(tokenIds[i])) this.finish(seq.seq, "stop");
      else if (seq.tokens.length >= seq.max) this.finish(seq.seq, seq.params.reason ?? "length");  // a replay knows the reason
    });
  }
  finish(id, why) {
    const seq = [...this.running, ...this.waiting].find(one => one.seq === id);
    if (!seq) return;
    [this.running, this.waiting] = [this.running, this.waiting].map(queue => queue.filter(one => one !== seq));
    this.blocks.free(seq, why);
  }
  /** Return the step that ends as an event of a trace, or null if nothing changed. */
  endStep() {
    if (!this.changes.length) return null;
    const event = {event: "step", step: ++this.numSteps, seconds: {}, changes: this.changes,
      block_tables: [...this.touched].map(one => ({seq: one.seq, tables: one.table.length ? [[...one.table]] : []})),
      num_free_blocks: this.blocks.numFree, num_running: this.running.length, num_waiting: this.waiting.length, texts: {}};
    [this.changes, this.touched] = [[], new Set()];
    return event;
  }
}

/** Lay a step's chunks out as arrays, as build_inputs in engine.py does. */
function buildInputs(chunks, size) {
  const input_ids = [], positions = [], slot_mapping = [], cu_seqlens_q = [0];
  for (const {seq, start, end, table, hitTokens} of chunks) {
    for (let position = start; position < end; position++) {
      const slot = table[Math.floor(position / size)] * size + position % size;
      input_ids.push(seq.tokens[position]); positions.push(position);
      slot_mapping.push(position < hitTokens ? slot % size : slot);  // K and V are there already: the null block gets them
    }
    cu_seqlens_q.push(input_ids.length);
  }
  const longest = Math.max(...chunks.map(chunk => chunk.table.length));
  const block_tables = chunks.map(({table}) => [...table, ...Array(longest - table.length).fill(0)]);
  return {input_ids, positions, slot_mapping, cu_seqlens_q, seq_lens: chunks.map(chunk => chunk.end), block_tables};
}
