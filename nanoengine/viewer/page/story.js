// ---- explained words ----------------------------------------------------------------------------

const {code: CODE, terms: TERMS} = words;
const ANY_TERM = new RegExp(`\\b(${Object.keys(TERMS).join("|")})\\b`);
/** A word that shows its meaning when it is clicked. */
function term(word) {
  const button = make("button", {class: "term", type: "button", title: TERMS[word]}, word);
  button.onclick = () => {
    if (button.nextSibling?.className === "meaning") button.nextSibling.remove();
    else button.after(make("span", {class: "meaning"}, ` (${TERMS[word]})`));
  };
  return button;
}
/** Text in which the first occurrence of each term can be explained. */
function explained(text, seen) {
  const found = ANY_TERM.exec(text);
  if (!found) return [text];
  const [word] = found, end = found.index + word.length, isNew = !seen.has(word);
  seen.add(word);
  return [text.slice(0, found.index), isNew ? term(word) : word, ...explained(text.slice(end), seen)];
}

// ---- a step in sentences ------------------------------------------------------------------------

const quote = text => ({quote: text});
const S = seq => ({seq});
const B = id => ({block: id});
/** "a", "a and b", "a, b and c"; a long list is cut to its first parts and the number of others. */
function list(parts, limit = 12) {
  if (parts.length > limit) parts = [...parts.slice(0, limit - 1), `${parts.length - limit + 1} more`];
  return parts.flatMap((part, i) => i === 0 ? [part] : [i === parts.length - 1 ? " and " : ", ", part]);
}
const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
/** Block numbers; runs of three or more as "21–30". */
function blockList(ids) {
  const runs = [];
  for (const id of ids) {
    const run = runs.at(-1), step = run && id - run.last;
    if (run && Math.abs(step) === 1 && (run.first === run.last || step === run.step)) Object.assign(run, {last: id, step});
    else runs.push({first: id, last: id});
  }
  const parts = runs.flatMap(({first, last}) => first === last ? [B(first)] : Math.abs(last - first) === 1 ? [B(first), B(last)] : [B(`${first}–${last}`)]);
  return [ids.length === 1 ? "block " : "blocks ", ...list(parts, 9)];
}

class Story {
  constructor() { Object.assign(this, {sentences: [], did: new Map(), added: [], registered: [], drafts: new Map(), isPreempting: false}); }
  /** The sentence with the largest weight becomes the step's headline. `topic` is its title in words.json, if it shows an idea. */
  say(weight, tone, parts, code, topic = null, blocks = []) { this.sentences.push({weight, tone, parts, code, topic, blocks}); }
  mark(ids, what) { for (const id of ids) this.did.set(id, what); }
  add(change) { this.added.push(change); }
  arrivals() {
    if (!this.added.length) return;
    const names = list(this.added.map(one => S(one.seq))), many = this.added.length > 1;
    const lengths = list(this.added.map(one => String(one.token_ids.length)));
    this.say(4.2, "", [...names, many ? " arrive with prompts of " : " arrives with a prompt of ", ...lengths, " tokens and ", many ? "wait." : "waits."], "add");
    this.added = [];
  }
  refuse(state, change) {
    this.arrivals();
    const needed = change.num_needed, free = change.num_free; const isNews = state.seqs.get(change.seq).why !== "refused";
    this.say(isNews ? 4 : 0.9, "", [S(change.seq), ` cannot be admitted: it needs ${count(needed, "block")}, and ${free === 0 ? "none is" : free === 1 ? "only 1 is" : `only ${free} are`} free. A waiting sequence never takes blocks from a running one.`], "refuse");
  }
  evictions(state, change) {
    if (!change.evicted.length) return [];
    const owners = [...new Set(change.evicted.map(id => state.blocks[id].key?.by))].filter(one => one !== undefined);
    const isOne = change.evicted.length === 1;
    return ["No empty block is left for ", S(change.seq), ", so the content of ", ...blockList(change.evicted), ...(owners.length ? [" (computed by ", ...list(owners.map(S)), ")"] : []), " is evicted: ", isOne ? "it is the least recently used free block." : "they are the least recently used free blocks."];
  }
  admit(state, change, before) {
    this.arrivals();
    const {revived} = change, hits = held(change.hits), taken = change.taken.flat(), again = before.wasAdmitted;
    this.mark(hits, "hit"); this.mark(taken, "new"); this.mark(change.evicted, "lost");
    const numHit = change.hits[0].length * size, isFull = numHit > 0 && numHit === before.known;
    const parts = [];
    if (hits.length) {
      const everyone = [...new Set(hits.map(id => state.blocks[id].key?.by))].filter(one => one !== undefined);
      const authors = everyone.filter(one => one !== change.seq), areDone = everyone.every(one => state.seqs.get(one).status === "ended");
      if (again && !authors.length) parts.push(S(change.seq), ", which was preempted, is admitted again and hits its own ", ...blockList(hits), ": ");
      else parts.push(S(change.seq), again ? ", which was preempted, is admitted again. It hits " : "'s prompt hits ", ...blockList(hits),
        ...(authors.length ? [", which ", ...list(everyone.map(S)), areDone ? " computed before finishing: " : " computed: "] : [": "]));
      parts.push(`${change.num_computed_tokens} of its ${before.known} tokens need not be computed.`);
      if (isFull) parts.push(" All of it is cached, but the last token is computed anyway: its logits choose the next token.");
      if (revived.length) parts.push(" ", ...capital(blockList(revived)), revived.length === 1 ? " was free, and is in use again with its content." : " were free, and are in use again with their content.");
      const shared = hits.filter(id => state.blocks[id].refs.length);
      if (shared.length) parts.push(" ", ...capital(blockList(shared)), shared.length === 1 ? " is" : " are", ` now shared${shared.length === 1 ? `, with ref count ${state.blocks[shared[0]].refs.length + 1}` : ""}.`);
      if (taken.length) parts.push(" It gets ", ...blockList(taken), " for the rest.");
    } else {
      parts.push(S(change.seq), again ? ", which was preempted, is admitted again. None of its tokens are cached any more: it gets " : start.enable_prefix_caching ? " is admitted. Nothing of its prompt is cached: it gets " : " is admitted: it gets ", ...blockList(taken), windows.every(one => one === null) ? ` for all its ${before.known} tokens at once.` : `: room for its ${before.known} tokens, and in a group with a window for as many as a step computes.`);
    }
    this.say(isFull ? 7 : revived.length ? 6 : hits.length ? 5 : 4.4, hits.length ? "good" : "", parts, isFull ? "full" : hits.length ? "hit" : "admit",
      again ? "Recomputation" : hits.length ? "A prefix cache hit" : "The first blocks", hits.length ? hits : taken);
    const lost = this.evictions(state, change);
    if (lost.length) this.say(2.5, "", lost, "evict", "Eviction", change.evicted);
  }
  skip(state, change) {
    this.arrivals(); this.mark(change.freed, "free");
    const gone = new Set(change.freed.concat(change.shared)), {tables} = state.seqs.get(change.seq);
    tables.forEach((table, group) => {
      const ids = table.filter(id => gone.has(id)), freed = ids.filter(id => change.freed.includes(id));
      if (!ids.length) return;
      const where = groupName(group) && ` (group ${groupName(group)})`, many = ids.length > 1;
      this.say(3.2, "", [...capital(blockList(ids)), many ? " are" : " is", " outside the sliding window of ", S(change.seq), `: a token attends to at most ${windows[group]} tokens${where}. `,
        freed.length === ids.length ? (many ? "They are freed." : "It is freed.") : freed.length ? "Those that no other sequence holds are freed." : many ? "Other sequences still hold them." : "Another sequence still holds it."]);
    });
  }
  append(state, change) {
    const taken = change.taken.flat();
    this.mark(taken, "new"); this.mark(change.evicted, "lost");
    const {tables, computed} = state.seqs.get(change.seq), held = tables[0].length;
    const parts = computed < held * size && windows.length === 1 && windows[0] === null
      ? ["To have room for its draft tokens, ", S(change.seq), " gets ", ...blockList(taken)]
      : windows.length > 1 || windows[0] !== null
      ? [S(change.seq), " needs room for its next tokens: it gets ", ...list(change.taken.flatMap((ids, group) => ids.length ? [{group, ids}] : [])).flatMap(one => typeof one === "string" ? [one] : [...blockList(one.ids), groupName(one.group) && ` for group ${groupName(one.group)}`])]
      : ["The ", held === 1 ? "block" : `${held} blocks`, " of ", S(change.seq), held === 1 ? " is" : " are", ` full (${held * size} tokens), so it gets `, ...blockList(taken), " for its next token"];
    const isLost = change.evicted.length > 0, isFull = computed >= held * size;
    this.say(isLost ? 3.6 : 3, "", [...parts, isLost ? ". " : ".", ...this.evictions(state, change)], isLost ? "evict" : "append",
      isLost ? "Eviction" : isFull ? "A block fills" : null, isLost ? change.evicted : [tables[0].at(-1), ...taken]);
  }
  register(state, change) { this.registered.push(...held(change.blocks)); }
  schedule(state, change) {
    this.arrivals();
    const prompts = [], decodes = [], again = []; const drafts = this.drafts;
    for (const chunk of change.chunks) {
      const one = state.seqs.get(chunk.seq);
      if (chunk.draft !== null) drafts.set(chunk.seq, [...drafts.get(chunk.seq) ?? [], chunk.draft]);
      else if (chunk.end - chunk.start === 1 && chunk.start >= one.prompt && chunk.samples) decodes.push(chunk);
      else if (chunk.start < one.prompt) prompts.push(chunk);
      else again.push(chunk);
    }
    const parts = [], isFull = change.num_tokens === start.max_num_batched_tokens;
    for (const {seq, start: from, end, samples} of prompts.concat(again).slice(0, 6)) {
      const length = state.seqs.get(seq).known;
      const range = from === 0 && samples ? `all ${end} tokens` : end - from === 1 ? `token ${from}` : `tokens ${from} to ${end - 1}`;
      parts.push([`${range} of `, S(seq), ...(samples ? [] : [` (of ${length}; the rest in later steps)`])]);
    }
    if (prompts.length + again.length > 6) parts.push([`prompt tokens of ${prompts.length + again.length - 6} more`]);
    if (decodes.length) parts.push(["one token each of ", ...list(decodes.map(one => S(one.seq)), 9)]);
    if (decodes.length === 1) parts[parts.length - 1][0] = "one token of ";
    if (drafts.size) parts.push(["draft tokens: ", ...list([...drafts].map(([seq, ids]) => ({seq, ids})), 9).flatMap(one => typeof one === "string" ? [one] : [`${one.ids.length} for `, S(one.seq)])]);
    const joined = parts.flatMap((part, i) => i === 0 ? part : [i === parts.length - 1 ? " and " : ", ", ...part]);
    const hasPart = change.chunks.some(chunk => !chunk.samples);
    const cut = change.chunks.find(chunk => !chunk.samples) ?? change.chunks.at(-1), {tables} = state.seqs.get(cut.seq);
    const spoken = held(tables.map(table => table.slice(Math.floor(cut.start / size), Math.ceil(cut.end / size))));
    this.say(hasPart ? 3.9 : 1, "", ["Computed: ", ...joined, ".", ...(isFull ? [` This uses the whole budget of ${change.num_tokens} tokens.`] : [])], "schedule",
      hasPart ? "A prompt in chunks" : new Set(change.chunks.map(chunk => chunk.seq)).size > 1 ? "Two sequences in one batch" : null, spoken);
    if (this.registered.length) this.say(0.5, "", [...capital(blockList(this.registered)), this.registered.length === 1 ? " becomes full and is" : " become full and are", " cached, even for sequences that are admitted in this step."], "register");
    this.registered = [];
  }
  tokens(state, change, step) {
    const late = change.of_step !== step.step;
    if (change.tokens.length) {
      const said = change.tokens.map(one => [S(one.seq), " ", quote(visible(one.token_ids.map(textOf).join("")))]);
      const shown = said.length > 9 ? [...said.slice(0, 8), [`${said.length - 8} more`]] : said;
      this.say(1.1, "", [late ? `The tokens of step ${change.of_step} arrive: ` : "Sampled: ", ...shown.flatMap((part, i) => i ? [", ", ...part] : part), "."], "tokens");
    }
    for (const {seq, token_ids, num_accepted} of change.tokens) {
      const drafts = this.drafts.get(seq);
      if (!drafts) continue;
      const one = drafts.length === 1, all = num_accepted === drafts.length;
      this.say(num_accepted ? 3.3 : 1.05, num_accepted ? "good" : "", [
        ...(one ? ["The draft token"] : num_accepted === 0 ? [`None of the ${drafts.length} draft tokens`] : all ? [`All ${drafts.length} draft tokens`] : [`${num_accepted} of ${drafts.length} draft tokens`]),
        " of ", S(seq), " (", quote(visible(drafts.map(textOf).join(""))), one && !num_accepted ? ") is rejected" : num_accepted < 2 ? ") is accepted" : ") are accepted",
        `: it gets ${count(token_ids.length, "token")} from this step${num_accepted ? "" : ", as without a draft"}.`,
        ...(all ? [] : [" What was computed for rejected draft tokens is overwritten later."])]);
    }
    if (change.discarded.length) this.say(1, "", ["The results of step ", String(change.of_step), " for ", ...list(change.discarded.map(S)), " are discarded: the sequence had finished, or no token could be sampled."]);
  }
  free(state, change) {
    this.arrivals(); this.mark(change.freed, "free");
    const one = state.seqs.get(change.seq), kept = change.freed.filter(id => state.blocks[id].key);
    const stay = change.shared.length ? [" ", ...capital(blockList(change.shared)), change.shared.length === 1 ? " stays" : " stay", " in use by ", ...list([...new Set(change.shared.flatMap(id => state.blocks[id].refs))].map(S)), "."] : [];
    if (change.why === "preempted") {
      this.isPreempting = true;
      const because = change.for_seq === change.seq
        ? ["No block is free for ", S(change.seq), ". It is itself the last in scheduling order, so it is preempted"]
        : ["No block is free for ", S(change.for_seq), ", so ", S(change.seq), ", the last in scheduling order, is preempted"];
      this.say(8, "alarm", [...because, `. It keeps its ${count(one.known, "token")}, frees `, ...blockList(change.freed), ", and is recomputed later.",
        ...(kept.length ? [" ", ...capital(blockList(kept)), kept.length === 1 ? " stays cached until it is reused." : " stay cached until they are reused."] : []), ...stay], "preempt", "Preemption", change.freed);
      return;
    }
    const why = {stop: "is finished: it generated an end token or a stop string", length: "has reached its length limit", abort: "is aborted", error: "ends with an error"}[change.why] ?? `ends (${change.why})`;
    const parts = [S(change.seq), ` ${why}.`];
    if (change.freed.length) {
      const many = change.freed.length > 1;
      parts.push(" Its ", ...blockList(change.freed), many ? " are freed, the last block first: a hit needs the blocks before it, not those after it." : " is freed.");
      if (kept.length) parts.push(kept.length < change.freed.length ? ` ${kept.length} of them ${kept.length === 1 ? "stays cached until it is reused" : "stay cached until they are reused"}.` : many ? " All stay cached until they are reused." : " It stays cached until it is reused.");
    }
    this.say(change.why === "error" ? 8 : 3.5, change.why === "error" ? "alarm" : "", [...parts, ...stay], "free",
      change.shared.length ? "Shared blocks" : null, change.shared);
  }
  end(state, step) {
    this.arrivals();
    if (this.registered.length) this.say(0.5, "", [...capital(blockList(this.registered)), this.registered.length === 1 ? " is" : " are", " full, because draft tokens were accepted. ", this.registered.length === 1 ? "It is" : "They are", " cached from now on."]);
    const waiting = state.queue("waiting");
    const refused = step.changes.some(change => change.change === "refuse");
    if (waiting.length && !refused && state.batch) {
      const running = state.queue("running").length;
      const why = this.isPreempting ? "no sequence is admitted in the step of a preemption, because blocks are scarce"
        : state.batch.num_tokens >= start.max_num_batched_tokens ? "the budget is used up"
        : running >= start.max_num_seqs ? `${count(running, "sequence")} are running, which is the limit` : "";
      if (why) this.say(0.8, "", [...list(waiting.map(one => S(one.seq)), 8), waiting.length === 1 ? " waits: " : " wait: ", why, "."]);
    }
  }
}
function capital(parts) { return [parts[0][0].toUpperCase() + parts[0].slice(1), ...parts.slice(1)]; }
