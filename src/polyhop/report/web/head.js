// The head of the page: what was trained, on what, and the few numbers that sum it up.

function describe(run) {
  const about = run.about;
  const size = isNumber(about.nodes) ? ` (${digits(about.nodes, 6)} nodes, ${digits(about.edges, 6)} edges)` : "";
  const layers = isNumber(about.model_options.num_layers) ? `, ${about.model_options.num_layers} layers` : "";
  const hidden = isNumber(about.model_options.hidden_channels) ? ` of ${about.model_options.hidden_channels}` : "";
  const ranks = about.num_ranks > 1 ? `${about.num_ranks} ranks` : "one process";
  const hosts = about.hosts.length > 1 ? ` on ${about.hosts.length} hosts` : "";
  return [
    `${about.model || "model"}${layers}${hidden}`,
    `strategy ${about.strategy || "?"} on ${ranks}${hosts}`,
    `graph ${about.graph || "without a name"}${size}`,
    isNumber(about.began) ? `began ${new Date(1000 * about.began).toISOString().slice(0, 16).replace("T", " ")} UTC` : null,
  ].filter(Boolean).map((text, at, all) => el("span", { class: "piece" }, at + 1 < all.length ? `${text} · ` : text));
}

function badge(run) {
  const kind = { running: "running", "ended early": "early" }[run.state] || "";
  return el("span", { class: `badge ${kind}` }, run.state);
}

function card(name, value, more = null) {
  return el("div", { class: "card" }, el("span", {}, name), el("b", { class: "number" }, value), el("span", {}, more || "\u00a0"));
}

function cards(run) {
  const numbers = run.numbers, metric = run.about.metric;
  const asked = run.about.max_epochs ? `of ${run.about.max_epochs} asked` : null;
  const made = [
    isNumber(numbers.test) ? card(`test ${metric}`, percent(numbers.test, 2)) : null,
    isNumber(numbers.best_val) ? card(`best validation ${metric}`, percent(numbers.best_val, 2),
      numbers.best_epoch ? `at epoch ${numbers.best_epoch}` : null) : null,
    isNumber(numbers.epochs) ? card("epochs", digits(numbers.epochs, 6), asked) : null,
    isNumber(numbers.epoch_s) ? card("median epoch", seconds(numbers.epoch_s), "training alone") : null,
    isNumber(numbers.wait_share) ? card("waiting", percent(numbers.wait_share), "of training") : null,
    isNumber(numbers.sent_bytes) ? card("sent in an epoch", bytes(numbers.sent_bytes), "by all ranks, training") : null,
    isNumber(numbers.peak_bytes) ? card("memory at most", bytes(numbers.peak_bytes), "of a rank") : null,
    isNumber(numbers.dollars) ? card("cost", dollars(numbers.dollars), "see functions") : null,
    isNumber(numbers.seconds) ? card("trained for", seconds(numbers.seconds)) : null,
  ];
  return el("div", { class: "cards" }, made);
}

function renderHead() {
  const runs = allRuns();
  const title = runs.length === 1 ? runs[0].name : `${runs.length} runs compared`;
  const lines = runs.map((run) => el("p", { class: "soft" },
    runs.length > 1 ? el("b", {}, `${run.name}: `) : null, describe(run), " ", badge(run)));
  const notes = [...state.document.notes, ...runs.flatMap((run) => run.notes.map((note) => ofRun(run, note)))];
  document.getElementById("head").replaceChildren(...[
    el("div", { class: "headline" }, el("h1", {}, title), themeButton()),
    ...lines,
    runs.length === 1 ? cards(runs[0]) : null,
    runChoice(),
    ...notes.map((note) => el("p", { class: "note small" }, note)),
  ].filter(Boolean));
}
