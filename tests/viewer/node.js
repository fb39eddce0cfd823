// Follows the code of the page: reads JSON from the standard input, and writes what an expression makes of it.
const {model: packed, data} = JSON.parse(require("fs").readFileSync(0));
(async () => {
  const model = packed && await unpackModel(packed);
  console.log(JSON.stringify(eval(process.argv[1])));
})();
function runAll({settings, arrivals, aborts}, model) {
  const engine = new Engine(model, settings), events = [];
  for (let step = 1; step <= arrivals.at(-1)[0] || engine.scheduler.isBusy; step++) {
    for (const [seq, [arrival, text, params]] of arrivals.entries()) if (arrival === step)
      engine.scheduler.add({seq, request: String(seq), token_ids: model.tokenizer.encode(text),
        stop_ids: packed.stop_ids, ...params, seed: seedOf(params.seed)});
    for (const [when, seq] of aborts) if (when === step) engine.scheduler.finish(seq, "abort");
    const event = engine.step();
    if (event) events.push({...event, inside: {inputs: event.inside.inputs}});
  }
  return events;
}
function logitsOf({settings, prompt}, model) {
  const engine = new Engine(model, settings), token_ids = model.tokenizer.encode(prompt), steps = [];
  engine.scheduler.add({seq: 0, priority: 0, token_ids, max_tokens: 20, temperature: 0});
  while (engine.scheduler.isBusy) steps.push(engine.step());
  return steps.slice(-20).map(step => [...step.inside.seqs[0].logits]);
}
