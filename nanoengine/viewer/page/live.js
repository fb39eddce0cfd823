// ---- the live engine: in a worker, one message for each step ---------------------------------------------

const WORKER = `
let engine, model;
onmessage = async ({data: {packed, settings, adds, aborts}}) => {
  if (packed) model = await unpackModel(packed);
  if (settings) engine = new Engine(model, settings);
  const problems = [];
  for (const {text, ...request} of adds) {
    const token_ids = model.tokenizer.encode(text), most = engine.scheduler.maxTokens - 1;
    if (token_ids.length <= most) engine.scheduler.add({...request, token_ids, stop_ids: packed_stop_ids});
    else problems.push([request.seq, token_ids.length + " tokens, but the pool has room for " + most + ": enlarge the pool or shorten the prompt"]);
  }
  for (const seq of aborts) engine.scheduler.finish(seq, "abort");
  const event = engine.step();
  postMessage({event, problems, isBusy: engine.scheduler.isBusy});
};`;
const source = `${$("engine").textContent}\nconst packed_stop_ids = ${JSON.stringify(packed.stop_ids)};${WORKER}`;
const worker = new Worker(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
worker.onerror = ({message}) => write({headline: `The worker that runs the model failed: ${message}`});
let scene = null, requests = [], aborts = [], isBusy = false, run = 0, isNew = true, isLoaded = false, isPaused = false, topics = new Set(), turn = Promise.resolve();

const isEnded = request => request.problem || head.seqs.get(request.seq)?.status === "ended";
const isUnsent = request => request.seq === undefined;
const isPending = () => isBusy || requests.some(isUnsent) || aborts.some(one => one.step > last && !isEnded(one.request));
/** Compute one more step at the end of the run, after the calls before. Return whether something happened in it. */
function compute() { return turn = turn.then(computeNow); }
async function computeNow() {
  const ours = run, isReady = one => isUnsent(one) && (one.after === undefined || isEnded(requests[one.after]));
  let due = requests.filter(one => isReady(one) && one.step <= last + 1);
  if (!due.length && !isBusy) due = requests.filter(isReady).slice(0, 1);  // nothing to do until it arrives
  const adds = due.map(one => {
    one.seq = requests.filter(other => !isUnsent(other)).length;
    const past = (tokensOf.get(requests[one.after]?.seq) ?? []).map(textOf).join(""), end = "<|im_end|>";
    const {max_tokens, temperature, top_p, seed} = one, priority = $("policy").value === "fcfs" ? 0 : one.priority;
    return {seq: one.seq, request: nameOf(one.seq), priority, max_tokens, temperature, top_p, seed: seedOf(seed),
      text: `${past}${past && (past.endsWith(end) ? "\n" : `${end}\n`)}<|im_start|>user\n${one.text}<|im_end|>\n<|im_start|>assistant\n`};
  });
  const message = {adds, aborts: aborts.filter(one => one.step === last + 1).map(one => one.request.seq)};
  if (isNew) message.settings = start;
  if (!isLoaded) message.packed = packed;
  [isNew, isLoaded, isBusy] = [false, true, true];  // busy until the worker answers
  const answered = new Promise(resolve => { worker.onmessage = resolve; });
  worker.postMessage(message);
  const {data} = await answered;
  if (ours !== run) return false;  // settings or the scene changed
  isBusy = data.isBusy;
  for (const [seq, problem] of data.problems) requests.find(one => one.seq === seq).problem = problem;
  if (!data.event) { drawAsked(); return isPending(); }
  steps.push(data.event); note(data.event); describe("live");
  return true;
}
/** Run the requests again from the first step, with the settings that the page shows, up to a step. */
async function restart(upTo) {
  run++;
  const number = id => Number($(id).value), budget = number("budget"), limit = number("chunk");
  [isBusy, isNew] = [false, true];
  for (const one of requests) { delete one.seq; delete one.problem; }
  open([{event: "start", model: "demo", windows: [null], num_blocks: number("blocks"), block_size: number("size"), max_num_seqs: number("seqs"),
    max_num_batched_tokens: budget, max_chunk_tokens: Math.min(limit || budget, budget), enable_prefix_caching: $("caching").checked}]);
  write({"blocks-now": $("blocks").value, "budget-now": $("budget").value});
  const ours = run;
  for (let i = 0; i < upTo && ours === run && isPending(); i++) if (!await compute()) break;
  if (ours !== run || last) return ours === run && show(Math.min(upTo, last) - 1);
  drawPool(new Story()); drawBatch({seconds: {}}); drawQueue("running", "running", runningNote); drawQueue("waiting", "waiting", waitingNote); drawAsked();
  write({headline: "No prompt fits into the pool, so no step ran.", number: 0, why: "", rest: "", code: ""});
}
async function openScene(name) {
  scene = words.scenes[name];
  const {num_blocks, block_size, max_num_batched_tokens} = scene.settings, prompts = scene.prompts;
  for (const [id, value] of Object.entries({blocks: num_blocks, size: block_size, budget: max_num_batched_tokens, seqs: 8, chunk: 0})) $(id).value = String(value);
  $("caching").checked = true;
  requests = prompts.map(([step, text, more]) => ({step, text, priority: 0, max_tokens: 60, temperature: 0, top_p: 1, seed: 1, ...more}));
  [aborts, isPaused] = [[], false];
  for (const button of $("scenes").children) button.setAttribute("aria-pressed", String(button.dataset.scene === name));
  $("scene-text").replaceChildren(scene.text.join(" "), " ", lessonLink(scene.lesson), ".");
  history.replaceState(null, "", `#scene=${name}`); await restart(1);
}
/** Whether the step that is shown is the first with what the scene is about. If so, say why play stops. */
function isWatched() {
  if (isPaused || !topics.has(scene?.watch)) return false;
  $("why").append(" Paused here: this is what the scene is about. Press play to go on."); return isPaused = true;
}
const isStill = matchMedia("(prefers-reduced-motion: reduce)");

// ---- drawing: prompts and answers, and what is inside the model -----------------------------------------

function showLive(step, story, first) {
  topics = new Set(story.sentences.map(one => one.topic));
  const topic = topics.has(scene?.watch) ? scene.watch : first.topic;
  $("why").replaceChildren(...(topic ? [make("b", {}, `${topic}. `), words.tour[topic][1], " ", lessonLink(words.tour[topic][0])] : []));
  drawAsked(); drawInside();
}
const shorten = text => text.length > 120 ? `${text.slice(0, 22)} … ${text.slice(-88)}` : text;
function drawAsked() {
  $("asked").replaceChildren(...requests.map((request, i) => {
    const one = state.seqs.get(request.seq), ids = tokensOf.get(request.seq);
    const about = request.problem ?? (!one ? `arrives before step ${request.step}` : one.status === "ended" ? {stop: "finished", length: "length limit reached", abort: "aborted"}[one.why]
      : one.status === "running" ? "running" : one.preemptions ? "preempted, waits" : "waits");
    const more = [request.temperature && `temperature ${request.temperature}, seed ${request.seed}`, request.after !== undefined && `continues ${nameOf(requests[request.after].seq ?? request.after)}`].filter(Boolean);
    const abort = make("button", {type: "button", "aria-label": `Abort ${nameOf(request.seq ?? i)}`}, "Abort");
    abort.onclick = () => { aborts.push({step: last + 1, request}); if (!playing) goToEnd(1); };
    const isOver = isUnsent(request) || isEnded(request) || aborts.some(one => one.request === request);
    return make("li", {}, one ? chip(request.seq) : make("span", {class: "none"}, "–"), make("div", {},
      make("div", {class: "line"}, make("span", {title: request.text}, [shorten(request.text), ...more].join("  ·  ")), make("span", {}, about, ...(isOver ? [] : [" ", abort]))),
      make("div", {class: "text"}, one ? visible(ids.slice(one.prompt, one.known).filter(id => !packed.stop_ids.includes(id)).map(textOf).join("")) : "")));
  }));
  const chosen = $("after").value;
  $("after").replaceChildren(make("option", {value: ""}, "nothing: a new conversation"), ...requests.map((one, i) => make("option", {value: i}, `${nameOf(one.seq ?? i)}'s conversation`)));
  $("after").value = requests[chosen] ? chosen : "";
}
/** The arrays of the step that is shown, beside the lines of engine.py that make them. */
function drawInside() {
  const {inputs, seqs = []} = steps[now]?.inside ?? {}, chosen = $("inspected").value;
  $("inspected").replaceChildren(...seqs.map(({seq}) => make("option", {value: seq}, nameOf(seq))));
  $("inspected").value = seqs.some(({seq}) => String(seq) === chosen) ? chosen : String(seqs[0]?.seq ?? "");
  if (!inputs) { for (const id of ["arrays", "top", "heads"]) $(id).replaceChildren(); $("drawn").textContent = "This step computes nothing."; return; }
  const cu = inputs.cu_seqlens_q, cut = (all, n) => all.length > n ? [...all.slice(0, n - 3), "…", ...all.slice(-2)] : all;
  const groupsOf = {block_tables: i => cut(inputs.block_tables[i], 16), seq_lens: i => [inputs.seq_lens[i]], cu_seqlens_q: i => i ? [cu[i + 1]] : [0, cu[1]]};
  $("arrays").replaceChildren(...Object.entries(words.inputs).map(([name, [, line, meaning]]) => make("div", {class: "array"},
    make("p", {}, make("b", {}, name), ` ${meaning}`), make("code", {}, line),
    make("p", {class: "values"}, ...seqs.map(({seq}, i) => make("span", {"--h": hueOf(seq), title: nameOf(seq)}, (groupsOf[name]?.(i) ?? cut(inputs[name].slice(cu[i], cu[i + 1]), 14)).join(" ")))))));
  openSequence();
}
function openSequence() {
  const one = steps[now].inside.seqs.find(({seq}) => String(seq) === $("inspected").value);
  [$("heat").value, $("nucleus").value] = [one.params.temperature, one.params.top_p].map(String);
  drawTop(); drawHeads();
}
/** The ten most probable next tokens of the chosen sequence, with the sliders' temperature and top-p. */
function drawTop() {
  const {seq, position, logits, params} = steps[now].inside.seqs.find(({seq}) => String(seq) === $("inspected").value);
  const temperature = Number($("heat").value), top_p = Number($("nucleus").value);
  write({"heat-now": temperature ? temperature.toFixed(2) : "0: always the most probable", "nucleus-now": top_p.toFixed(2)});
  const weights = weigh(logits, {temperature, top_p}), all = weigh(logits, {temperature, top_p: 1}), sum = weights.reduce((a, b) => a + b), total = all.reduce((a, b) => a + b);
  const token = draw(logits, {temperature, top_p}, params.seed, position), real = tokensOf.get(seq)[position], knows = state.seqs.get(seq).known > position;
  const best = [...all.keys()].sort((a, b) => all[b] - all[a] || a - b).slice(0, 10);
  const share = id => temperature ? weights[id] / sum : all[id] / total;
  $("top").replaceChildren(...best.map(id => make("li", {class: share(id) ? "" : "out", "--w": `${share(id) * 100}%`}, make("q", {}, visible(runnerText(id)).replaceAll(" ", "·")),
    make("span", {}, `${(share(id) * 100).toFixed(1)}%${share(id) ? "" : ` (${(all[id] / total * 100).toFixed(1)}% before)`}${id === token ? "  ← drawn" : ""}`))));
  const isSame = temperature === params.temperature && top_p === params.top_p;
  $("drawn").textContent = `${temperature ? `The random number of this seed and position ${position} is ${uniform(params.seed, position).toFixed(4)}. It picks` : "The most probable token is"} “${visible(runnerText(token))}”. `
    + (isSame ? knows ? "The engine drew the same." : "The prompt is not complete yet, so the engine draws nothing." : knows ? `The engine drew “${visible(textOf(real))}” with temperature ${params.temperature} and top-p ${params.top_p}.` : "");
}
const tokenizer = new Tokenizer(packed.tokenizer), runnerText = id => tokenizer.decode([id]);
/** How much each head of the chosen layer attends to each block: the shades are the tokens in it. */
function drawHeads() {
  const {inputs, seqs} = steps[now].inside, i = seqs.findIndex(({seq}) => String(seq) === $("inspected").value), {seq, attention} = seqs[i];
  const length = inputs.seq_lens[i], heads = packed.config.num_attention_heads, layer = Number($("layer").value), table = inputs.block_tables[i].filter(id => id);
  $("heads").replaceChildren(...Array.from({length: heads}, (_, h) => {
    const row = attention.subarray((layer * heads + h) * length, (layer * heads + h + 1) * length), largest = Math.max(...row);
    const boxes = table.slice(0, Math.ceil(length / size)).map((id, b) => {
      const weights = [...row.subarray(b * size, (b + 1) * size)], sum = weights.reduce((a, b) => a + b), n = weights.length;
      const stops = weights.map((weight, j) => `color-mix(in oklab, ${colorOf(seq)} ${Math.round(weight / largest * 100)}%, var(--card)) ${j / n * 100}% ${(j + 1) / n * 100}%`);
      return make("span", {class: "attended", "--paint": `linear-gradient(to right, ${stops.join(", ")})`, title: `block ${id}: ${(sum * 100).toFixed(1)}%`}, make("b", {}, String(id)), sum >= 0.095 ? `${Math.round(sum * 100)}%` : "");
    });
    const most = [...boxes].sort((a, b) => parseFloat(b.title.split(": ")[1]) - parseFloat(a.title.split(": ")[1]))[0];
    return make("div", {class: "head", role: "img", "aria-label": `Head ${h + 1}: most attention to ${most.title}`}, make("span", {class: "none"}, `head ${h + 1}`), make("div", {}, ...boxes));
  }));
}
/** K and V of a block in the chosen layer: a row for each token, a column for each number. */
function heatMap(id) {
  const layer = Number($("layer").value), n = packed.config.num_key_value_heads * packed.config.head_dim, stride = packed.config.num_hidden_layers * 2 * n;
  const rows = Array.from({length: size}, (_, j) => {
    for (let s = now; s >= 0; s--) {
      const t = steps[s].inside.inputs?.slot_mapping.lastIndexOf(id * size + j) ?? -1;
      if (t >= 0) return steps[s].inside.kv.subarray(t * stride + layer * 2 * n, t * stride + (layer + 1) * 2 * n);
    }
    return null;
  });
  if (!rows.some(Boolean)) return [];
  return ["K", "V"].map((name, i) => {
    const canvas = make("canvas", {class: "numbers", role: "img", width: n, height: size, "aria-label": `${name} of block ${id} in layer ${layer + 1}`, "--rows": size});
    const context = canvas.getContext("2d"), image = context.createImageData(n, size), values = rows.map(row => row?.subarray(i * n, (i + 1) * n));
    const largest = Math.max(...values.flatMap(row => row ? [...row].map(Math.abs) : []));
    values.forEach((row, j) => row?.forEach((value, x) => image.data.set([...(value < 0 ? [66, 108, 245] : [228, 87, 46]), Math.abs(value) / largest * 255], (j * n + x) * 4)));
    context.putImageData(image, 0, 0);
    return make("p", {class: "what"}, `${name} in layer ${layer + 1}: a row per token, ${packed.config.num_key_value_heads} heads of ${packed.config.head_dim} numbers (blue: negative)`, canvas);
  });
}

// ---- what the reader does --------------------------------------------------------------------------------

for (const [name, {title}] of Object.entries(words.scenes)) {
  const button = make("button", {type: "button", "data-scene": name, "aria-pressed": "false"}, title);
  button.onclick = async () => { await openScene(name); if (!isStill.matches) setPlaying(true); };
  $("scenes").append(button);
}
$("ask").onsubmit = event => {
  event.preventDefault();
  const of = id => Number($(id).value), after = $("after").value;
  requests.push({step: last + 1, text: $("prompt").value, priority: of("priority"), max_tokens: of("tokens"), temperature: of("temperature"), top_p: of("top-p"), seed: of("seed"), ...(after && {after: Number(after)})});
  isPaused = true;  // do not stop at what the scene is about
  isStill.matches ? goToEnd(1) : goToEnd(0).then(() => setPlaying(true));
};
for (const id of ["blocks", "budget", "size", "seqs", "chunk", "caching", "policy"]) $(id).onchange = () => restart(now + 1);
for (const id of ["blocks", "budget"]) $(id).oninput = () => { $(`${id}-now`).textContent = $(id).value; };
$("inspected").onchange = openSequence;
$("layer").onchange = () => { drawHeads(); drawDetail(pointed ?? pinned); };
for (const id of ["heat", "nucleus"]) $(id).oninput = drawTop;
for (const [id, min] of [["blocks", 4], ["budget", 1]]) Object.assign($(id), {min, max: 128});
for (let i = 1; i <= packed.config.num_hidden_layers; i++) $("layer").append(make("option", {value: i - 1}, String(i)));
document.body.classList.add("is-live");
write({"title": document.title = "nanoengine, live", "begin": "Play the first scene", "whatif-title": "Settings: the same prompts run again"});
$("intro-texts").replaceChildren(
  paragraph("A language model generates its answer one token at a time. A token is a word or a piece of a word. The model stores a key and a value for every token so far, so that it does not compute them again. This memory, the KV cache, is divided into blocks, and limits how many requests can run at once."),
  paragraph("This page runs nanoengine itself: its scheduler, its block manager and its bundled model, in your browser. Nothing is installed or sent anywhere. The model knows sums, counting, spelling backwards and repeating a passage."),
  paragraph("Choose a scene, press play, and read what happened in each step. Or write a prompt of your own, change the pool, and see what the engine does."));
onClick({begin: () => { $("intro").hidden = true; setPlaying(true); }});
$("whatif").hidden = false;
addEventListener("hashchange", () => { if (words.scenes[location.hash.slice(7)]) openScene(location.hash.slice(7)); });
$("intro").hidden = location.hash !== "";
openScene(words.scenes[location.hash.slice(7)] ? location.hash.slice(7) : "paging");
