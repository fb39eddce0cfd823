// ---- drawing ------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    name.startsWith("--") ? element.style.setProperty(name, value) : name === "class" ? element.className = value : element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const chip = seq => make("span", {class: "seq", "--h": hueOf(seq)}, nameOf(seq));
const nodes = (parts, seen = null) => parts.flatMap(part =>
  typeof part === "string" ? seen ? explained(part, seen) : part
  : part.seq !== undefined ? chip(part.seq)
  : part.block !== undefined ? make("span", {class: "blk"}, String(part.block))
  : make("q", {}, part.quote));

let numCells, cells;
/** Make a box for each block that the run uses, and for at least 64 blocks. */
function makeCells() {
  let highest = 1;
  for (const step of steps) for (const change of step.changes)
    for (const id of (change.taken ?? []).flat()) highest = Math.max(highest, id);
  numCells = isLive ? start.num_blocks : Math.min(start.num_blocks, Math.max(highest, Math.min(start.num_blocks, 64)));
  cells = [null];
  $("pool").replaceChildren();
  for (let id = 1; id <= numCells; id++) {
    const number = document.createTextNode(String(id)), dot = make("i"), refs = make("u"), group = make("b");
    dot.hidden = true;
    const cell = make("button", {class: "cell", type: "button", "data-block": id, tabindex: id === 1 ? 0 : -1}, number, dot, refs, group);
    cells.push({cell, dot, refs, group, shown: null});
    $("pool").append(cell);
  }
  $("pool").classList.toggle("dense", numCells > 160);
  $("more").textContent = numCells < start.num_blocks ? `and ${start.num_blocks - numCells} more blocks that this run never used` : "";
}

function drawPool(story) {
  for (let id = 1; id <= numCells; id++) {
    const one = cells[id], block = state.blocks[id], did = story.did.get(id);
    if (one.cell.dataset.did !== did) did ? one.cell.dataset.did = did : delete one.cell.dataset.did;
    if (one.shown === block) continue;
    one.shown = block;
    const holders = block.refs, owner = holders[0] ?? block.key?.by; const isPart = holders.length === 1 && block.fill < size;
    one.cell.className = holders.length ? (isPart ? "cell held part" : "cell held") : block.key ? "cell kept" : "cell";
    if (owner !== undefined) one.cell.style.setProperty("--h", hueOf(owner));
    one.dot.hidden = !block.key;
    const inGroup = holders.length || block.key ? groupName(block.group) : "";
    if (one.group.textContent !== inGroup) one.group.textContent = inGroup;
    const times = holders.length > 1 ? `×${holders.length}` : "";
    if (one.refs.textContent !== times) one.refs.textContent = times;
    if (holders.length) {
      const shown = holders.slice(0, 4), share = 100 / shown.length, filled = (block.fill / size) * 100;
      const paint = isPart ? `linear-gradient(to right, ${colorOf(owner)} ${filled}%, var(--card) ${filled}%) bottom / 100% 34% no-repeat var(--card)`
        : shown.length === 1 ? colorOf(owner)
        : `linear-gradient(135deg, ${shown.map((seq, i) => `${colorOf(seq)} ${i * share}% ${(i + 1) * share}%`).join(", ")})`;
      one.cell.style.setProperty("--paint", paint);
    }
    const label = holders.length
      ? `Block ${id}, held by ${holders.map(nameOf).join(", ")}, ref count ${holders.length}, ${block.fill} of ${size} tokens${block.key ? ", cached" : ""}`
      : block.key ? `Block ${id}, free, still cached, computed by ${nameOf(block.key.by)}` : `Block ${id}, free, empty`;
    one.cell.setAttribute("aria-label", inGroup ? `${label}, group ${inGroup}` : label);
  }
  const free = state.empty.length, kept = state.evictable.size;
  $("pool-count").textContent = `${start.num_blocks - free - kept} in use, ${kept} free but cached, ${free} empty`;
  const line = [...state.empty, ...state.evictable], limit = 12;
  $("order").replaceChildren(...nodes(line.length
    ? ["Next to be allocated: ", ...line.slice(0, limit).flatMap((id, i) => i ? [" ", B(id)] : [B(id)]), line.length > limit ? ` and ${line.length - limit} more. ` : ". ",
      kept ? free ? "Empty blocks come first, then the least recently used." : "The least recently used block comes first, and its content is evicted." : ""]
    : ["No block is free. If a running sequence needs one, the last in scheduling order is preempted."], new Set()));
}

/** Whether a key's block still holds the same content. */
const isIntact = ({block, group, prefix}) => { const now = state.blocks[block].key; return now?.prefix === prefix && now.group === group; };
function drawDetail(id) {
  if (id === null) {
    $("detail").replaceChildren(make("p", {class: "what"}, "Point at a block, or move to one with the arrow keys, to see what is in it."));
    return;
  }
  const block = state.blocks[id], holders = block.refs, key = block.key, out = [];
  const head = make("p", {}, make("b", {}, `Block ${id}`), " ");
  if (holders.length) head.append(...nodes([" is held by ", ...list(holders.map(S)), ` (ref count ${holders.length}).`]));
  else if (key) {
    const place = state.empty.length + [...state.evictable].indexOf(id) + 1;
    head.append(`is free: number ${place} of ${state.empty.length + state.evictable.size} in the order of eviction. Until then a hit can reuse it.`);
  } else head.append(`is free and empty: number ${state.empty.indexOf(id) + 1} in the order of allocation.`);
  if (groupName(block.group) && (key || holders.length)) head.append(` It is in group ${groupName(block.group)}.`);
  out.push(head);
  const seq = key?.by ?? holders[0];
  if (seq !== undefined) {
    const index = key ? key.index : state.seqs.get(seq).tables[block.group].indexOf(id);
    const known = key ? Infinity : state.seqs.get(seq).known, row = make("p", {class: "tokens"});
    const slot = make("p", {class: "what", id: "slot"}), isHeld = holders.includes(seq);
    const tell = (token, position) => {
      row.querySelector(".now")?.classList.remove("now"); token.classList.add("now");
      slot.replaceChildren(...nodes([`Position ${position} of `, S(seq), ": "]), make("code", {},
        isHeld ? `block_table[${position} // ${size}] = block_table[${index}] = ${id}, slot = ${id} * ${size} + ${position} % ${size} = ${id * size + position % size}`
        : `slot = ${id} * ${size} + ${position} % ${size} = ${id * size + position % size}`));
    };
    tokensOf.get(seq).slice(index * size, (index + 1) * size).forEach((token, i) => {
      const position = index * size + i;
      if (position >= known) return;
      const shown = make("span", {class: i < block.fill ? "" : "todo", "data-position": position, tabindex: 0}, visible(textOf(token)).replaceAll(" ", "·"));
      for (const name of ["mouseenter", "focus", "click"]) shown.addEventListener(name, () => tell(shown, position));
      row.append(shown);
      if (i === 0) tell(shown, position);
    });
    out.push(make("p", {class: "what"}, ...nodes([`Tokens ${index * size} to ${(index + 1) * size - 1} of `, S(seq), key ? ", cached: " : block.fill < size ? `, ${block.fill} of ${size} computed: ` : ": "])), row, slot);
    if (key) {
      const chain = [];
      for (let one = key; one; one = one.parent) chain.unshift(one);
      const parts = (chain.length > 14 ? [...chain.slice(0, 6), null, ...chain.slice(-6)] : chain)
        .flatMap((one, i) => [i ? " → " : "", one === null ? "…" : isIntact(one) ? B(one.block) : one.block ? `${one.block} (evicted)` : "outside the window"]);
      const twins = state.blocks.flatMap((other, twin) => twin !== id && other.key?.prefix === key.prefix && other.key.group === key.group ? [twin] : []);
      out.push(make("p", {class: "what"}, ...nodes([
        index ? "Hit only after the blocks before it: " : "Hit only at the beginning of a sequence: ", ...parts, ".",
        ...(twins.length ? [" The same tokens after the same prefix: ", ...blockList(twins), "."] : []),
      ])));
    }
  }
  $("detail").replaceChildren(...out, ...(isLive ? heatMap(id) : []));
}

const answer = one => {
  const ids = tokensOf.get(one.seq);
  return one.known > one.prompt
    ? visible(ids.slice(Math.max(one.prompt, one.known - 40), one.known).map(textOf).join(""))
    : visible(ids.slice(0, Math.min(one.prompt, 40)).map(textOf).join(""));
};
function drawQueue(id, status, note) {
  const queue = state.queue(status), limit = 40;
  const rows = queue.slice(0, limit).map(one => {
    const done = Math.min(100, (one.computed / Math.max(one.known, 1)) * 100);
    const drawTable = (table, group) => {
      const shown = table.length > 20 ? [...table.slice(0, 10), "…", ...table.slice(-8)] : table;
      const boxes = shown.flatMap(id => [" ", id === 0 ? make("span", {class: "gone", role: "img", "aria-label": "outside the window", title: "outside the window"}) : String(id)]);
      return make("div", {class: "table"}, groupName(group) ? `${groupName(group)} blocks` : "blocks", ...boxes);
    };
    const row = make("li", {"data-seq": one.seq, "--h": hueOf(one.seq)}, chip(one.seq), make("div", {},
      make("div", {class: "line"}, make("span", {class: "text"}, answer(one)), make("span", {}, note(one))),
      ...(status === "running" ? [
        make("div", {class: "progress"}, make("div", {"--w": `${done}%`})),
        ...one.tables.map(drawTable)] : [])));
    row.addEventListener("mouseenter", () => cells.slice(1).forEach((one_, i) => one_.cell.classList.toggle("dim", !one.tables.some(table => table.includes(i + 1)))));
    row.addEventListener("mouseleave", () => cells.slice(1).forEach(one_ => one_.cell.classList.remove("dim")));
    return row;
  });
  if (queue.length > limit) rows.push(make("li", {class: "none"}, "", `and ${queue.length - limit} more`));
  $(id).replaceChildren(...(rows.length ? rows : [make("li", {class: "none", style: "display: block"}, "none")]));
  $(`${id}-count`).textContent = queue.length ? String(queue.length) : "";
}
const runningNote = one => one.computed < one.prompt
  ? `prompt ${one.computed} of ${one.prompt}` : `${one.prompt} + ${count(one.known - one.prompt, "token")}`;
const waitingNote = one => `${count(one.known, "token")}, ${
  one.why === "preempted" ? "preempted" : one.why === "refused" ? (one.preemptions ? "preempted, too few free blocks" : "too few free blocks") : one.why === "failed" ? "after a failed step" : "new"}`;

function drawBatch(step) {
  const chunks = state.batch?.chunks ?? []; let numPrompt = 0, numDrafts = 0;
  const parts = chunks.map(chunk => {
    const one = state.seqs.get(chunk.seq), n = chunk.end - chunk.start, isPrompt = n > 1 || chunk.start < one.prompt, share = n / start.max_num_batched_tokens;
    const isDraft = chunk.draft !== null, title = isDraft ? `draft token: ${visible(textOf(chunk.draft))}` : count(n, "token");
    if (isPrompt) numPrompt += n;
    if (isDraft) numDrafts++;
    return make("div", {class: isPrompt ? "prompt" : isDraft ? "draft" : "decode", "--h": hueOf(chunk.seq), "--w": `${share * 100}%`, title: `${nameOf(chunk.seq)}: ${title}`}, share > 0.045 ? `${nameOf(chunk.seq)} ${n}` : share > 0.02 ? nameOf(chunk.seq) : "");
  });
  const total = state.batch?.num_tokens ?? 0;
  const label = `${numPrompt} prefill + ${total - numPrompt - numDrafts} decode${numDrafts ? ` + ${count(numDrafts, "draft")}` : ""} of ${start.max_num_batched_tokens} tokens`;
  $("batch").replaceChildren(...parts);
  $("batch").setAttribute("aria-label", label);
  $("batch-count").textContent = label;
  const phases = Object.entries(step.seconds), sum = phases.reduce((all, [, seconds]) => all + seconds, 0) || 1;
  const percent = share => share > 0 && share < 0.01 ? "<1%" : `${Math.round(share * 100)}%`;
  $("phases").hidden = $("seconds").hidden = !phases.length;
  $("phases").replaceChildren(...phases.map(([name, seconds], i) => make("div", {"--w": `${seconds / sum * 100}%`, "--share": `${90 - i * 16}%`, title: name}, seconds / sum > 0.2 ? name : "")));
  $("phases").setAttribute("aria-label", "Shares of the step's time, by phase");
  $("seconds").replaceChildren(make("span", {}, "share of the step's time:"), ...phases.map(([name, seconds]) => make("span", {}, `${name} ${percent(seconds / sum)}`)));
}

const CHARTS = {use: ["KV blocks in use", "use-now"], rate: ["Prefix cache hit rate so far", "rate-now"], flow: ["Tokens computed per step", "speed-now"]};
const format = (name, value) => name === "flow" ? String(value) : `${Math.round(value * 100)}%`;
const xOf = i => last > 1 ? i / (last - 1) * 1000 : 500;  // in drawings that are 1000 wide and 100 high
/** Draw what does not depend on the step that is shown: each chart's line, and the marks above the slider. */
function drawBackgrounds() {
  for (const name in CHARTS) {
    const values = series[name], top = name === "flow" ? values.reduce((a, b) => Math.max(a, b), 1) : 1;
    const line = values.map((value, i) => `${xOf(i).toFixed(1)} ${(97 - value / top * 90).toFixed(1)}`).join("L");
    const alarms = marks.map((mark, i) => name === "use" && mark === 3 ? `M${xOf(i)} 0v10` : "").join("");
    for (const [kind, path] of Object.entries({area: `M0 97L${line}L1000 97`, line: `M${line}`, alarm: alarms || "M0 0"})) $(name).querySelector(`.${kind}`).setAttribute("d", path);
  }
  for (const kind of [1, 2, 3]) $("marks").children[kind - 1].setAttribute("d", marks.map((mark, i) => mark === kind ? `M${xOf(i)} ${kind === 1 ? 50 : 10}V90` : "").join("") || "M0 0");
}
function drawCharts() {
  for (const [name, [title, id]] of Object.entries(CHARTS)) {
    $(name).querySelector(".now").setAttribute("d", `M${xOf(now)} 0v100`);
    $(id).textContent = name === "use" ? `${start.num_blocks - steps[now].num_free_blocks} of ${start.num_blocks}` : format(name, series[name][now]);
    $(name).setAttribute("aria-label", `${title}: ${format(name, series[name][now])} at step ${now + 1} of ${last}`);
  }
}
