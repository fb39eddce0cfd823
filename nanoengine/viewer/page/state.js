"use strict";
// The data of a run: the names of its sequences, the texts of its tokens, and its state after any step, replayed from events.
const words = JSON.parse(document.getElementById("words").textContent), recorded = JSON.parse(document.getElementById("trace").textContent);
const packed = JSON.parse(document.getElementById("model").textContent), isLive = packed !== null;  // the live page has a model, and no trace
const lessons = "/* lessons */";  // the suffix of the lessons beside this page: ".md" or ".html"; "" if there are none
const nothing = {model: "", block_size: 1, num_blocks: 0, windows: [null], max_num_batched_tokens: 0};
let [start = nothing, ...steps] = recorded;  // what is shown: the recording, a run made by `replay`, or the live engine's
let {block_size: size, windows} = start;
const $ = id => document.getElementById(id);
const write = texts => { for (const id in texts) $(id).textContent = texts[id]; };  // id of an element -> its text
const onClick = acts => { for (const id in acts) $(id).onclick = acts[id]; };  // id of a button -> what it does
const tokensOf = new Map();  // seq -> all its tokens; a state says how many of them are known
const texts = {};  // token id -> text
/** Keep the tokens and texts of a step. */
function learn(step) {
  Object.assign(texts, step.texts);
  for (const change of step.changes) {
    if (change.change === "add") tokensOf.set(change.seq, [...change.token_ids]);
    if (change.change === "tokens") for (const one of change.tokens) tokensOf.get(one.seq).push(...one.token_ids);
  }
}
const nameOf = seq => "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[seq % 26] + (seq < 26 ? "" : Math.floor(seq / 26));
const HUES = [262, 25, 160, 310, 75, 205, 350, 125];  // neighbours in order of arrival get distant hues
const hueOf = seq => (HUES[seq % 8] + 22 * Math.floor(seq / 8)) % 360;
const colorOf = seq => `oklch(var(--owner-l) var(--owner-c) ${hueOf(seq)})`;
const textOf = id => texts[id] ?? `#${id}`;
/** A KV cache group's name; "" if there is only one group. */
const groupName = group => windows.length > 1 ? `g${group + 1}` : "";
const visible = text => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");

// Records of sequences and blocks are replaced, never changed. So a snapshot is a shallow copy, and only what
// has a new record is redrawn.

/** The blocks of all groups' tables together, without the null block. */
const held = tables => tables.flat().filter(id => id);
class State {
  constructor() {
    this.seqs = new Map();  // seq -> {seq, request, priority, prompt, known, computed, max, tables, hits, lastKey, status, why, preemptions}
    this.hitTokens = this.queryTokens = this.outputTokens = this.preemptions = 0;
    this.forget();
  }
  forget() {
    this.blocks = Array.from({length: start.num_blocks + 1}, () => ({refs: [], key: null, fill: 0, group: 0}));
    this.empty = this.blocks.map((_, id) => id).slice(1);
    this.evictable = new Set();  // in the order of eviction
  }
  copy() {
    const state = Object.assign(Object.create(State.prototype), this);
    state.seqs = new Map(this.seqs); state.blocks = this.blocks.slice(); state.empty = this.empty.slice();
    state.evictable = new Set(this.evictable);
    return state;
  }
  set(seq, changes) { this.seqs.set(seq, {...this.seqs.get(seq), ...changes}); }
  setBlock(id, changes) { this.blocks[id] = {...this.blocks[id], ...changes}; }
  take(seq, tables) {
    tables.forEach((ids, group) => {
      for (const id of ids) {
        if (this.empty.length) this.empty.shift(); else this.evictable.delete(id);
        this.blocks[id] = {refs: [seq], key: null, fill: 0, group};
      }
    });
  }
  /** Take blocks from a sequence. `tell` is called before the freed ones join a list. */
  release(change, tell) {
    for (const id of change.shared.concat(change.freed))
      this.setBlock(id, {refs: this.blocks[id].refs.filter(one => one !== change.seq)});
    tell();
    for (const id of change.freed) { if (this.blocks[id].key) this.evictable.add(id); else { this.empty.unshift(id); this.setBlock(id, {fill: 0}); } }
  }
  /** Tokens [from, end) of a sequence are in its blocks. */
  fill(one, from, end) {
    for (let i = Math.floor(from / size); i * size < end; i++)
      for (const table of one.tables) if (table[i]) this.setBlock(table[i], {fill: Math.min(size, end - i * size)});
  }
  queue(status) {
    const found = [...this.seqs.values()].filter(one => one.status === status);
    return found.sort((a, b) => a.priority - b.priority || a.seq - b.seq);
  }

  /** Apply a step's changes. A `story` describes each change from the state at that moment. */
  apply(step, story) { this.batch = null; for (const change of step.changes) this[change.change](change, story, step); story?.end(this, step); }
  add(change, story) {
    this.seqs.set(change.seq, {
      seq: change.seq, request: change.request, priority: change.priority, prompt: change.token_ids.length,
      known: change.token_ids.length, computed: 0, max: change.max_num_tokens, tables: [], hits: 0, lastKey: null,
      status: "waiting", why: "new", preemptions: 0, wasAdmitted: false,
    });
    story?.add(change);
  }
  refuse(change, story) { this.set(change.seq, {why: "refused"}); story?.refuse(this, change); }
  admit(change, story) {
    const before = this.seqs.get(change.seq);
    story?.admit(this, change, before);
    for (const id of held(change.hits)) { this.evictable.delete(id); this.setBlock(id, {refs: [...this.blocks[id].refs, change.seq]}); }
    this.take(change.seq, change.taken);
    const hits = change.hits[0];
    this.set(change.seq, {
      tables: change.hits.map((ids, group) => [...ids, ...change.taken[group]]), hits: hits.length * size, status: "running",
      lastKey: hits.length ? this.blocks[hits.at(-1)].key : null, computed: change.num_computed_tokens, why: "", wasAdmitted: true,
    });
    if (!before.wasAdmitted) { this.hitTokens += change.num_computed_tokens; this.queryTokens += before.known; }
  }
  skip(change, story) {
    const {tables} = this.seqs.get(change.seq);
    this.release(change, () => story?.skip(this, change));
    const gone = new Set(change.freed.concat(change.shared));
    this.set(change.seq, {tables: tables.map(table => table.map(id => gone.has(id) ? 0 : id))});
  }
  append(change, story) {
    story?.append(this, change); this.take(change.seq, change.taken);
    this.set(change.seq, {tables: this.seqs.get(change.seq).tables.map((table, group) => [...table, ...change.taken[group]])});
  }
  register(change, story) {
    let parent = this.seqs.get(change.seq).lastKey;
    change.prefix_ids.forEach((prefix, i) => {
      const keys = change.blocks.map((ids, group) => ({block: ids[i], group, by: change.seq, index: change.first + i, prefix, parent}));
      for (const key of keys) if (key.block) this.setBlock(key.block, {key});
      parent = keys[0];
    });
    this.set(change.seq, {lastKey: parent}); story?.register(this, change);
  }
  schedule(change, story) {
    story?.schedule(this, change); this.batch = change;
    for (const {seq, start, end, draft} of change.chunks) {
      if (draft !== null) continue;
      const one = this.seqs.get(seq);
      this.fill(one, Math.max(start, one.hits), end); this.set(seq, {computed: end});
    }
  }
  tokens(change, story, step) {
    story?.tokens(this, change, step);
    for (const {seq, token_ids, num_accepted} of change.tokens) {
      const one = this.seqs.get(seq), computed = one.computed + num_accepted;
      if (num_accepted) this.fill(one, one.computed, computed);
      this.set(seq, {known: one.known + token_ids.length, computed}); this.outputTokens += token_ids.length;
    }
  }
  free(change, story) {
    const isPreempted = change.why === "preempted";
    this.release(change, () => story?.free(this, change));
    const before = this.seqs.get(change.seq);
    this.preemptions += isPreempted;
    this.set(change.seq, {
      tables: [], computed: 0, hits: 0, lastKey: null, status: isPreempted ? "waiting" : "ended", why: change.why,
      preemptions: before.preemptions + isPreempted,
    });
  }
  fail(change, story) { story?.say(9, "alarm", ["The step failed with ", quote(change.error), ". Its results are discarded: every sequence keeps its tokens and waits again, and the prefix cache is cleared."]); }
  clear(change, story) {
    story?.say(2, "", ["The prefix cache is cleared: no block can be hit any more."]);
    this.forget();
    for (const one of this.seqs.values())
      if (one.status === "running") this.set(one.seq, {tables: [], computed: 0, hits: 0, lastKey: null, status: "waiting", why: "failed"});
  }
}
