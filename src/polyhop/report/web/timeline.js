// The timeline of one run: zoomed by wheel, drag, pinch, keys and buttons; what lies under the pointer is told in words.

const line = { run: null, source: null, data: null, view: null, layout: null, hidden: new Set(), parts: null };

function renderTimeline(parent) {
  const canvas = el("canvas", { tabindex: 0, role: "application", id: "timeline-canvas",
    "aria-label": "Timeline. Arrow keys move, plus and minus zoom, Home shows the whole run; what is in sight is told in the table below." });
  line.parts = {
    canvas, hint: el("div", { class: "hint", hidden: true }), chosen: el("div", { class: "bar" }), legend: el("div", { class: "legend" }),
    told: el("p", { class: "soft small", id: "timeline-told", "aria-live": "polite" }), about: el("p", { class: "soft small" }),
    sums: unfolding("What is in sight, in numbers", sumsInSight),
  };
  const { hint, chosen, legend, told, about, sums } = line.parts;
  parent.append(el("figure", { class: "timeline" }, about, chosen, el("div", { class: "field" }, canvas), hint, told, legend, sums));
  watchPointer(canvas);
  watchKeys(canvas);
  new ResizeObserver(() => paintLine()).observe(canvas);
  return refreshTimeline;
}

async function refreshTimeline() {
  const runs = shownRuns().filter((run) => run.timeline);
  line.parts.canvas.closest("section").hidden = runs.length === 0;
  if (!runs.length) return;
  const run = runs.find((each) => each.at === state.timeline) || runs[0];
  if (line.source !== run.timeline) {
    const isOther = line.run !== run.at;
    [line.run, line.source] = [run.at, run.timeline];
    const data = await unpackTimeline(run.timeline);
    if (line.source !== run.timeline) return; // a newer one was asked for meanwhile
    line.data = data;
    if (isOther || !line.view) line.view = makeView(data.length_s);
    else growView(line.view, data.length_s);
  }
  renderChoices(runs, run);
  renderLegend();
  paintLine();
}

function paintLine() {
  const { canvas } = line.parts, width = canvas.clientWidth;
  if (!line.data || !width) return;
  const length = line.view.stop - line.view.start;
  line.layout = layoutTracks(line.data, width);
  paintTimeline(canvas, line.data, line.view, line.layout, line.hidden);
  canvas.dataset.start = line.view.start;
  canvas.dataset.stop = line.view.stop;
  canvas.dataset.closeups = closeupsInSight(line.data, line.view, line.layout).length;
  line.parts.told.textContent = `In sight: ${seconds(length)} from ${momentText(line.view.start, length / 10)} on, of ${seconds(line.data.length_s)}.`;
  if (line.parts.sums.open) line.parts.sums.dispatchEvent(new Event("toggle"));
}

function look(change) {
  change(line.view);
  paintLine();
}

function renderChoices(runs, run) {
  const { chosen, about } = line.parts, data = line.data;
  const select = el("select", { "aria-label": "run" }, runs.map((each) => el("option", { value: each.at, selected: each.at === run.at }, each.name)));
  select.addEventListener("change", () => {
    state.timeline = Number(select.value);
    refreshTimeline();
  });
  const closeups = data.closeups.map((closeup) => button(`Epoch ${closeup.epoch} (${closeup.why})`,
    () => look((view) => showSeconds(view, closeup.start_s, closeup.stop_s)), { class: "closeup" }));
  chosen.replaceChildren(...[
    runs.length > 1 ? select : null, button("Whole run", () => look((view) => showSeconds(view, 0, view.length)), { id: "timeline-whole" }), ...closeups,
    button("+", () => look((view) => zoomView(view, 0.5)), { "aria-label": "zoom in", id: "timeline-in" }),
    button("−", () => look((view) => zoomView(view, 2)), { "aria-label": "zoom out", id: "timeline-out" }),
    button("←", () => look((view) => panView(view, -0.3)), { "aria-label": "earlier" }), button("→", () => look((view) => panView(view, 0.3)), { "aria-label": "later" }),
  ].filter(Boolean));
  about.textContent = whatIsShown(data);
}

function whatIsShown(data) {
  const slot = Math.max(...data.shares.map((shares) => shares.slot_s), 0);
  const full = data.closeups.map((closeup) => closeup.epoch).join(", ");
  const left = data.closeups.reduce((sum, closeup) => sum + closeup.num_left_out, 0);
  const merged = `Everywhere: which share of every ${seconds(slot)} each name had, of ${digits(data.num_records, 9)} records.`;
  const inFull = full ? ` Every span of epochs ${full}: zoom in, or use the buttons.` : "";
  const out = left ? ` ${digits(left, 9)} spans of these epochs are left out, at their ends; the Chrome trace has all (--trace).` : "";
  const gaps = data.stretches.length > 1 ? ` The run was continued ${data.stretches.length - 1} times; the time between is cut out.` : "";
  return merged + inFull + out + gaps + " Drag to zoom into a stretch, double-click for the whole run; click, then the wheel zooms and arrow keys move.";
}

function renderLegend() {
  const { names } = line.data;
  line.parts.legend.replaceChildren(...names.map((name, at) => button([swatch(nameColour(name)), name], () => {
    if (line.hidden.has(at)) line.hidden.delete(at);
    else line.hidden.add(at);
    renderLegend();
    paintLine();
  }, { "aria-pressed": String(!line.hidden.has(at)), "data-name": name })));
}

// Seconds of every name and track in sight, from the shares of time.
function sumsInSight() {
  const rows = new Map();
  for (const shares of line.data.shares) {
    const from = Math.max(line.view.start, shares.start_s), to = Math.min(line.view.stop, shares.stop_s);
    if (from >= to) continue;
    const first = (from - shares.start_s) / shares.slot_s, last = (to - shares.start_s) / shares.slot_s;
    for (const row of shares.rows) {
      const sum = meanShare(row.values, first, last) * shares.most * (to - from), key = `${shares.track} ${row.name}`;
      const known = rows.get(key) || { track: shares.track, name: row.name, sum: 0 };
      rows.set(key, { ...known, sum: known.sum + sum });
    }
  }
  const told = [...rows.values()].filter((row) => row.sum > 0).map((row) => {
    const track = line.data.tracks[row.track];
    return [`rank ${track.rank}`, track.thread, line.data.names[row.name], seconds(row.sum), percent(row.sum / (line.view.stop - line.view.start))];
  });
  return table(["rank", "track", "name", "#seconds", "#share"], told, "what is in sight");
}
