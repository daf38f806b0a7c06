// The page, top to bottom. Sections that have nothing to show are hidden.

const SECTIONS = [
  { id: "compared", title: "Compared", render: renderComparison, isShown: (document) => document.runs.length > 1 },
  { id: "curves", title: "Curves", intro: "How well the model does, and the loss it was trained by.", render: renderCurves },
  { id: "time", title: "Time", intro: "Where the seconds of an epoch went.", render: renderTime },
  { id: "timeline", title: "Timeline", intro: "What every thread of every rank did, moment by moment.", render: renderTimeline },
  { id: "traffic", title: "Bytes", intro: "What ranks sent to each other.", render: renderTraffic },
  { id: "pipeline", title: "Bubbles", intro: "Where the pipeline stands idle.", render: (parent) => { addChart(parent, bubbleChart()); } },
  { id: "widths", title: "Bit widths", intro: "In how many bits rows cross, as it was chosen.", render: (parent) => { addChart(parent, widthChart()); } },
  { id: "functions", title: "Functions", intro: "Functions alive, their tasks, and what they cost.", render: renderFunctions, isShown: (document) => document.runs.some((run) => run.functions) },
  { id: "plan", title: "Predicted", intro: "What the plan had predicted, and what was measured.", render: renderPrediction },
  { id: "memory-section", title: "Memory", intro: "What ranks held.", render: (parent) => { addChart(parent, memoryChart()); } },
  { id: "partition", title: "Parts", intro: "How good the parts are that ranks hold.", render: renderParts },
  { id: "options", title: "Options", intro: "Everything that was asked.", render: renderOptions },
];
const refreshers = [];

function refreshAll() {
  for (const refresh of refreshers) refresh();
  refreshPlots();
  refreshSections();
}

function refreshSections() {
  for (const section of SECTIONS) {
    const place = document.getElementById(section.id), figures = [...place.querySelectorAll("figure")];
    const isAsked = !section.isShown || section.isShown(state.document);
    const isEmpty = figures.length > 0 && figures.every((figure) => figure.hidden) && section.id !== "functions";
    if (section.id !== "timeline") place.hidden = !isAsked || isEmpty;
    document.querySelector(`nav a[href="#${section.id}"]`).parentElement.hidden = place.hidden;
  }
}

function renderSections() {
  const main = document.getElementById("main");
  for (const section of SECTIONS) {
    const place = el("section", { id: section.id, "aria-label": section.title }, el("h2", {}, section.title),
      section.intro ? el("p", { class: "soft" }, section.intro) : null);
    const body = el("div");
    place.append(body);
    main.append(place);
    const refresh = section.render(body);
    if (refresh) refreshers.push(refresh);
  }
  const links = SECTIONS.map((section) => el("li", {}, el("a", { href: `#${section.id}` }, section.title)));
  document.getElementById("nav").append(el("ul", {}, links));
}

function show() {
  state.document = JSON.parse(document.getElementById("data").textContent);
  applyTheme();
  renderHead();
  document.getElementById("foot").append(`made by ${state.document.made_by}`);
}

function start() {
  watchTheme();
  renderSections();
  refreshAll();
  document.documentElement.dataset.ready = "yes";
  if (state.document.live) follow(state.document.live);
}

show();
window.polyhop = { start };
