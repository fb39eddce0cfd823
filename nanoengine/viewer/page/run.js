// ---- a run: snapshots, charts' series, steps to jump to ------------------------------------------

const EVERY = 64;
let snapshots, last, series, marks, happens, head;
/** Add a step to the end of the run. */
function note(step) {
  const i = last++, what = new Set();
  learn(step);
  if (i % EVERY === 0) snapshots.push(head.copy());
  head.apply(step);
  series.use.push((start.num_blocks - step.num_free_blocks) / start.num_blocks);
  series.rate.push(head.queryTokens ? head.hitTokens / head.queryTokens : 0);
  series.flow.push(head.batch?.num_tokens ?? 0);
  let mark = 0;  // 1: a sequence ends, 2: a hit, 3: a preemption or failure, 0: only decoding
  for (const change of step.changes) {
    const isHit = change.change === "admit" && change.hits[0].length > 0, isPreemption = change.why === "preempted";
    if (["admit", "skip", "append", "free", "fail", "clear", "add"].includes(change.change)) what.add("event");
    if (isHit) what.add("hit");
    if (change.evicted?.length) what.add("eviction");
    if (isPreemption) what.add("preemption");
    mark = Math.max(mark, change.change === "fail" || isPreemption ? 3 : isHit ? 2 : change.change === "free" ? 1 : 0);
  }
  marks.push(mark);
  for (const name of what) happens[name].push(i);
}
/** The state before a step, by its index. */
function stateBefore(index) {
  const nearest = Math.floor(index / EVERY), state = snapshots[nearest].copy();
  for (let i = nearest * EVERY; i < index; i++) state.apply(steps[i]);
  return state;
}

// ---- moving along -------------------------------------------------------------------------------

let now = -1, state = new State(), playing = false, pointed = null, pinned = null, hashTimer = 0;
function show(index) {
  index = Math.max(0, Math.min(last - 1, index));
  if (index === now || !last) return;
  unspeak();
  if (index !== now + 1) state = stateBefore(index);
  now = index;
  const step = steps[now], story = new Story();
  state.apply(step, story);
  const order = story.sentences.map((one, i) => [one.weight, -i, one]).sort((a, b) => b[0] - a[0] || b[1] - a[1]);
  const first = order[0]?.[2] ?? {tone: "", parts: ["Nothing was scheduled."]}, seen = new Set();
  $("headline").replaceChildren(...nodes(first.parts, seen));
  $("story").className = `card story ${first.tone}`;
  $("code").replaceChildren(...(first.code ? [`engine.py, ${CODE[first.code][0]}: `, make("code", {}, CODE[first.code][1])] : []));
  const rest = story.sentences.filter(one => one !== first), limit = 24;
  $("rest").replaceChildren(...rest.slice(0, limit).map(one => make("li", {}, ...nodes(one.parts, seen))), ...(rest.length > limit ? [make("li", {}, `and ${rest.length - limit} more.`)] : []));
  write({number: step.step});
  $("slider").value = String(now + 1);
  $("slider").setAttribute("aria-valuetext", `step ${now + 1} of ${last}`);
  drawPool(story); drawDetail(pointed ?? pinned); drawBatch(step); drawQueue("running", "running", runningNote);
  drawQueue("waiting", "waiting", waitingNote); drawCharts();
  if (isLive) showLive(step, story, first);
  enableButtons();
  if (!playing && !isLive) { clearTimeout(hashTimer); hashTimer = setTimeout(() => history.replaceState(null, "", `#${now + 1}`), 400); }
}
function enableButtons() {
  $("first").disabled = $("back").disabled = now <= 0;
  $("forward").disabled = $("last").disabled = now === last - 1 && !hasMore();
  for (const [name, indices] of Object.entries(happens)) $(name).disabled = !(indices.at(-1) > now) && !hasMore();
}
/** Whether the live engine has work to do. */
const hasMore = () => isLive && isPending();
/** Show the next step. At the end of the run, the live engine computes it first. Return whether there was one. */
async function goOn() { if (now === last - 1 && !(hasMore() && await compute())) return false; show(now + 1); return true; }
/** Go to the next step with this kind of event. If there is none, stay, or show the last step that the live engine had to compute. */
async function jump(kind) {
  if (playing) setPlaying(false);
  const found = () => happens[kind].find(i => i > now);
  while (found() === undefined && hasMore() && await compute());
  show(found() ?? (isLive ? last - 1 : now));
}
/** Show the last step, of the live engine after up to this many more. */
async function goToEnd(most = Infinity) { if (playing) setPlaying(false); while (most-- > 0 && hasMore() && await compute()); show(last - 1); }
const icons = {play: "M2 1v12l11-6z", pause: "M2 1h4v12H2zM8 1h4v12H8z"};
function setPlaying(value) {
  const ours = playing = value && {};  // an object, so that an earlier loop ends
  $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  $("play").querySelector("path").setAttribute("d", playing ? icons.pause : icons.play);
  $("headline").setAttribute("aria-live", playing ? "off" : "polite");
  if (playing && now === last - 1 && !hasMore()) show(0);
  let due = performance.now();
  const tick = async time => {
    if (playing !== ours) return;
    if (time >= due) {
      due = Math.max(time, due) + 1000 / Number($("speed").value);
      const isOver = !await goOn();
      if (playing === ours && (isOver || isLive && isWatched())) return setPlaying(false);
    }
    requestAnimationFrame(tick);
  };
  if (playing) requestAnimationFrame(tick);
}
function go(index) { if (playing) setPlaying(false); show(index); }
function forward() { if (playing) setPlaying(false); return goOn(); }

onClick({first: () => go(0), back: () => go(now - 1), forward, last: () => goToEnd(), play: () => setPlaying(!playing)});
for (const kind of ["event", "hit", "eviction", "preemption"]) $(kind).onclick = () => jump(kind);
$("slider").oninput = () => go(Number($("slider").value) - 1);
for (const name in CHARTS) {
  const seek = event => { const {left, width} = $(name).getBoundingClientRect(); go(Math.round((event.clientX - left) / width * (last - 1))); };
  $(name).onpointerdown = event => { $(name).setPointerCapture(event.pointerId); seek(event); };
  $(name).onpointermove = event => { if (event.buttons) seek(event); };
}
const blockOf = event => { const cell = event.target.closest?.("[data-block]"); return cell ? Number(cell.dataset.block) : null; };
function point(id) { if (id !== pointed) { pointed = id; drawDetail(pointed ?? pinned); } }
$("pool").addEventListener("mouseover", event => point(blockOf(event)));
$("pool").addEventListener("mouseleave", () => point(null));
$("pool").addEventListener("focusin", event => { pinned = blockOf(event); for (const one of cells) one?.cell.setAttribute("tabindex", -1); event.target.setAttribute("tabindex", 0); drawDetail(pinned); });
$("pool").addEventListener("click", event => { pinned = blockOf(event) ?? pinned; drawDetail(pointed ?? pinned); });
$("pool").addEventListener("keydown", event => {
  const columns = getComputedStyle($("pool")).gridTemplateColumns.split(" ").length;
  const move = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns}[event.key], id = blockOf(event);
  if (move === undefined || id === null) return;
  event.preventDefault(); event.stopPropagation(); cells[Math.max(1, Math.min(numCells, id + move))].cell.focus();
});
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.altKey || event.metaKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  const act = {ArrowLeft: () => go(now - 1), ArrowRight: forward, Home: () => go(0), End: () => goToEnd(),
    n: () => jump("event"), h: () => jump("hit"), e: () => jump("eviction"), p: () => jump("preemption")}[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (act) { event.preventDefault(); act(); }
  else if (event.key === " " && !["BUTTON", "SUMMARY"].includes(event.target.tagName)) { event.preventDefault(); setPlaying(!playing); }
});

// ---- the tour: the first time that each thing happens in this run ----------------------------------------

let stops = [], place = -1;  // -1: not in the tour
/** Find a run's stops: {title, lesson, index of the step, blocks it is about, parts of its text}. */
function findStops() {
  const found = new Map(), state = new State();
  const stop = (title, index, blocks, parts, seq) => found.set(title, {title, lesson: words.tour[title][0], index, blocks, seq, parts: [...parts, " ", words.tour[title][1]]});
  steps.forEach((step, i) => {
    const story = new Story();
    state.apply(step, story);
    for (const {topic, parts, blocks} of story.sentences) {
      const old = found.get(topic), seq = parts.find(part => part.seq !== undefined)?.seq;
      // A preemption that frees several blocks shows more than one that frees a single block.
      const isRicher = topic === "Preemption" && old?.blocks.length === 1 && blocks.length > 1;
      if (topic && (!old || isRicher || topic === "Recomputation" && old.index < found.get("Preemption")?.index)) stop(topic, i, blocks, parts, seq);
    }
  });
  const {preemptions, hitTokens, queryTokens} = state;
  stop("The end", steps.length - 1, [], [`The last answer is complete, and all ${start.num_blocks} blocks are free. `, `${state.evictable.size} of them are still cached: a request that begins like one of these prompts can skip that part. In ${steps.length} steps, the engine generated ${count(state.outputTokens, "token")}, found ${Math.round(100 * hitTokens / Math.max(queryTokens, 1))}% of the prompts' tokens in its cache, and preempted a sequence ${preemptions === 1 ? "once" : `${preemptions} times`}.`]);
  return [...found.values()].sort((a, b) => a.index - b.index);
}
function unspeak() {
  $("pool").classList.remove("touring");
  for (const cell of $("pool").querySelectorAll(".spoken")) cell.classList.remove("spoken");
}
function lessonLink(number) {
  const [file, name] = words.lessons[number], text = `Lesson ${number}: ${name}`;
  return lessons ? make("a", {href: file + lessons}, text) : text;
}
function visit(index) {
  if (playing) setPlaying(false);
  place = Math.max(0, Math.min(stops.length - 1, index));
  const {title, lesson, index: step, blocks, parts} = stops[place];
  [$("intro").hidden, $("tour").hidden] = [true, false];
  write({"tour-title": title, "tour-place": `stop ${place + 1} of ${stops.length}`, "tour-next": place === stops.length - 1 ? "Done" : "Next"});
  $("tour-text").replaceChildren(...nodes(parts));
  $("tour-lesson").replaceChildren(lessonLink(lesson));
  $("tour-back").disabled = place === 0;
  show(step); unspeak();
  $("pool").classList.toggle("touring", blocks.length > 0);
  for (const id of blocks) cells[id]?.cell.classList.add("spoken");
  pinned = blocks[0] ?? null; drawDetail(pinned);
  cells[blocks[0]]?.cell.scrollIntoView({block: "nearest"});  // if the pool scrolls
  scrollTo(0, 0);
}
function endTour() { place = -1; $("tour").hidden = true; unspeak(); }
onClick({"begin": () => visit(0), "tour-back": () => visit(place - 1), "tour-next": () => place === stops.length - 1 ? endTour() : visit(place + 1),
  "tour-end": endTour, "help": () => { endTour(); $("intro").hidden = false; scrollTo(0, 0); }, "close-intro": () => { $("intro").hidden = true; }});
const paragraph = (...parts) => make("p", {}, ...nodes(parts));

// ---- what if: the recorded requests with another pool and budget ----------------------------------------

/** Whether `replay` schedules this run as the engine would: one group without a window, no failures, no draft tokens. */
function canReplay() {
  const changes = recorded.slice(1).flatMap(step => step.changes.map(change => [step, change]));
  const added = changes.filter(([, change]) => change.change === "add").length;
  const ended = changes.filter(([, change]) => change.change === "free" && ["stop", "length"].includes(change.why)).length;
  return added > 0 && added === ended && recorded.length < 1000 && windows.length === 1 && windows[0] === null
    && !changes.some(([step, change]) => ["fail", "clear", "skip"].includes(change.change)
      || change.change === "tokens" && (change.of_step !== step.step || change.discarded.length)
      || change.chunks?.some(chunk => chunk.draft !== null));
}
/** Schedule the recorded requests with other limits. The tokens are the recorded ones. */
function replay(num_blocks, budget) {
  const before = recorded[0], hasLimit = before.max_chunk_tokens !== before.max_num_batched_tokens;
  const settings = {...before, num_blocks, max_num_batched_tokens: budget, max_chunk_tokens: hasLimit ? before.max_chunk_tokens : budget};
  const scheduler = new Scheduler(settings), arrivals = [], answers = new Map(), reasons = new Map(), events = [settings];
  for (const {step, changes} of recorded.slice(1)) for (const change of changes) {
    if (change.change === "add") { arrivals.push([step, change]); answers.set(change.seq, []); }
    if (change.change === "tokens") for (const one of change.tokens) answers.get(one.seq).push(...one.token_ids);
    if (change.change === "free" && change.why !== "preempted") reasons.set(change.seq, change.why);
  }
  for (let clock = 1, i = 0; i < arrivals.length || scheduler.isBusy; clock++) {
    if (!scheduler.isBusy) clock = Math.max(clock, arrivals[i][0]);
    for (; i < arrivals.length && arrivals[i][0] <= clock; i++) {
      const change = arrivals[i][1];
      scheduler.add({...change, max_tokens: answers.get(change.seq).length, reason: reasons.get(change.seq)});
      scheduler.changes.splice(-1, 1, change);  // with the recorded limit, not the answer's length
    }
    const chunks = scheduler.schedule();
    scheduler.update(chunks, chunks.filter(chunk => chunk.samples).map(({seq}) => answers.get(seq.seq)[seq.tokens.length - seq.prompt]));
    events.push(scheduler.endStep());
  }
  return events;
}
/** Count what happened in a run. */
function summary(events) {
  const all = events.slice(1).flatMap(step => step.changes), of = kind => all.filter(change => change.change === kind);
  return {
    "steps": events.length - 1,
    "tokens computed": of("schedule").reduce((sum, change) => sum + change.num_tokens, 0),
    "tokens found in the prefix cache": of("admit").reduce((sum, change) => sum + change.num_computed_tokens, 0),
    "preemptions": of("free").filter(change => change.why === "preempted").length,
    "blocks evicted": all.reduce((sum, change) => sum + (change.evicted?.length ?? 0), 0),
  };
}
function whatIf() {
  const numBlocks = Number($("blocks").value), budget = Number($("budget").value);
  const same = numBlocks === recorded[0].num_blocks && budget === recorded[0].max_num_batched_tokens, index = now;
  open(same ? recorded : replay(numBlocks, budget)); show(Math.min(index, last - 1));
  drawWhatIf(same);
}
function drawWhatIf(same) {
  write({"blocks-now": start.num_blocks, "budget-now": start.max_num_batched_tokens});
  $("recorded").disabled = same;
  const was = summary(recorded), is = summary([start, ...steps]);
  $("compared").replaceChildren(make("tr", {}, make("th"), make("th", {}, "recorded"), make("th", {}, "replayed")), ...Object.keys(was).map(name =>
    make("tr", {}, make("th", {}, name), make("td", {}, String(was[name])), make("td", {class: is[name] === was[name] ? "" : "changed"}, String(is[name])))));
}

// ---- showing a run ----------------------------------------------------------------------------------

/** Show a run from its first step: the recording, a result of `replay`, or the beginning of a live run. */
function open(events) {
  if (playing) setPlaying(false);
  endTour(); [start = nothing, ...steps] = events; ({block_size: size, windows} = start);
  [now, state, head, pointed, pinned, last, snapshots, marks] = [-1, new State(), new State(), null, null, 0, [], []];
  series = {use: [], rate: [], flow: []};
  happens = {event: [], hit: [], eviction: [], preemption: []};  // indices of steps
  tokensOf.clear(); steps.forEach(note); makeCells();
  describe(isLive ? "live" : events === recorded ? start.model && `model ${start.model}` : "replayed, not recorded");
  drawDetail(null);
}
/** Say what is shown, once its length is known. */
function describe(origin) {
  const about = [origin, `${start.num_blocks} blocks of ${size} tokens`, `token budget ${start.max_num_batched_tokens}`, `${count(tokensOf.size, "sequence")}, ${count(last, "step")}`].filter(Boolean).join("  ·  ");
  write({about, of: `of ${last}`});
  $("slider").max = String(Math.max(last, 1));
  if (last) drawBackgrounds();
  if (last && !isLive) stops = findStops();
}
function showRecording() {
  if (windows.length > 1 || windows[0] !== null) {
    $("groups").hidden = false;
    $("groups").append(...windows.map((window, group) => make("li", {}, `${groupName(group)} ${window === null ? "sees all tokens" : `sees the last ${count(window, "token")}`}`)), make("li", {}, make("span", {class: "gone"}), "in a block table: outside the window"));
  }
  $("dotted").hidden = !steps.some(step => step.changes.some(change => change.chunks?.some(chunk => chunk.draft !== null)));
  open(recorded);
  if (!last) { $("headline").textContent = "Nothing happened in this trace."; return; }
  $("intro-texts").replaceChildren(
    paragraph(`A language model generates its answer one token at a time. A token is a word or a piece of a word. The model stores a key and a value for every token so far, so that it does not compute them again. This memory, the KV cache, limits how many requests can run at once. It is divided into blocks of ${count(size, "token")}.`),
    paragraph(`This page shows a recorded run: ${count(tokensOf.size, "request")}, called `, ...list([...tokensOf.keys()].map(S), 8), `, ${count(start.num_blocks, "block")} and ${count(last, "step")}. A step is one forward pass of the model. Each box is a block, in the color of the request that holds it.`),
    paragraph("The page says what happened in each step, and why. Click a word with a dotted underline to see its explanation, and a box to see its content. The buttons at the top go from step to step."));
  $("begin").textContent = `Take the tour: ${count(stops.length, "stop")}`;
  $("intro").hidden = location.hash !== "";
  if (canReplay()) {
    const longest = Math.max(...[...tokensOf.values()].map(ids => ids.length));
    const limits = {blocks: [Math.ceil(longest / size), start.num_blocks * 2, start.num_blocks], budget: [1, start.max_num_batched_tokens * 2, start.max_num_batched_tokens]};
    for (const [name, [min, max, value]] of Object.entries(limits)) Object.assign($(name), {min, max, value});
    for (const name of ["blocks", "budget"]) $(name).oninput = whatIf;
    $("recorded").onclick = () => { for (const [name, [, , value]] of Object.entries(limits)) $(name).value = String(value); whatIf(); };
    $("whatif").hidden = false;
    drawWhatIf(true);
  }
  show(Math.max(1, Number(location.hash.slice(1)) || 1) - 1);
}
if (!isLive) showRecording();
