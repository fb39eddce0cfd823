// What tests ask the page in a browser: `probe` in test_viewer.py.

// Texts that are larger than their box, and so cut off. The receipt may scroll.
function clippedTexts() {
  return [...document.querySelectorAll("body *")].filter(one =>
    one.clientWidth && one.textContent.trim()
    && !["SELECT", "OPTION", "SCRIPT", "PRE"].includes(one.tagName)
    && (one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1)
  ).map(one => `${one.tagName} ${one.id} ${one.className}: ${one.textContent.slice(0, 80)}`);
}

// Those of some elements that are not wholly on the screen.
function offScreen(selectors) {
  return [...document.querySelectorAll(selectors)].filter(one => {
    const {top, bottom, left, right, height} = one.getBoundingClientRect();
    const header = document.querySelector("header").getBoundingClientRect().bottom;
    return !height || top < header - 1 || left < 0 || right > innerWidth || bottom > innerHeight;
  }).map(one => one.id || one.className + one.textContent);
}

function visibleControls() {
  const all = [...document.querySelectorAll("button, input, select, [role=img]")];
  return all.filter(one => one.checkVisibility());
}

// The engine's state after each of these steps, as the page replays it.
function statesAfter(indices) {
  return indices.map(index => {
    show(index);
    const running = state.queue("running");
    return [
      state.blocks.map(one => one.refs.length),
      running.map(one => [one.seq, one.tables]),
      running.map(one => one.computed),
      state.queue("waiting").map(one => one.seq),
      [...state.empty],
      [...state.evictable],
      [state.preemptions, state.hitTokens, state.queryTokens],
    ];
  });
}

// Milliseconds of a step forward and of a jump in 5000 steps, medians.
function timesOfSteps() {
  const median = all => all.sort((a, b) => a - b)[Math.floor(all.length / 2)];
  const time = indices => median(indices.map(i => {
    const began = performance.now();
    show(i);
    document.body.offsetHeight;  // layout too
    return performance.now() - began;
  }));
  const forward = time(Array.from({length: 100}, (_, i) => 2000 + i));
  return [forward, time(Array.from({length: 60}, (_, i) => (i * 1867) % 5000))];
}
