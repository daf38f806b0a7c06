// Charts: Plotly's, drawn when they come into sight, drawn again when runs or colours change, each with its numbers as a table.
//
// A chart is {id, title, note, build}; build() gives {traces, layout, headers, rows}, or null where there is nothing to show.

const charts = [];
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) drawPlot(entry.target.chart);
}, { rootMargin: "400px" });

// Plotly reads some markup in texts: what comes from files must not look like it.
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function unescaped(text) {
  return text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
}

function addChart(parent, chart) {
  const place = el("div", { class: "plot", id: chart.id, role: "img", "aria-label": `${chart.title}; the numbers are in the table below` });
  const numbers = unfolding("Numbers", () => {
    const built = chart.build();
    return built ? table(built.headers, built.rows, chart.title) : el("p", {}, "nothing to show");
  });
  const legend = el("div", { class: "legend" });
  const figure = el("figure", {}, el("h3", {}, chart.title), chart.note ? el("p", { class: "soft small" }, chart.note) : null, place, legend, numbers);
  const made = { ...chart, place, figure, legend, numbers, isDrawn: false, hidden: new Set() };
  place.chart = made;
  charts.push(made);
  parent.append(figure);
  watcher.observe(place);
  return made;
}

// All but the picture itself: nothing moves when that is drawn.
function placePlot(chart) {
  const built = chart.build();
  chart.figure.hidden = built === null;
  if (built === null) return null;
  if (built.height) chart.place.style.height = `${built.height}px`;
  chart.legend.replaceChildren(...(built.traces.length > 1 ? built.traces.map((trace) => legendButton(chart, trace)) : []));
  return built;
}

function drawPlot(chart) {
  const built = placePlot(chart);
  if (built === null) return;
  chart.isDrawn = true;
  const isCoarse = window.matchMedia("(pointer: coarse)").matches;
  const traces = built.traces.map((trace) => ({ ...trace, showlegend: false, visible: chart.hidden.has(trace.name) ? "legendonly" : true }));
  window.Plotly.react(chart.place, traces, plotLayout(built.layout || {}, isCoarse), {
    responsive: true, displaylogo: false, displayModeBar: isCoarse ? false : "hover", doubleClick: "reset",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
  });
}

// Below the chart, as buttons: it wraps on a narrow screen and is reached by keys.
function legendButton(chart, trace) {
  const isShown = !chart.hidden.has(trace.name), colour = trace.marker ? trace.marker.color : trace.line.color;
  const styles = { dot: "dotted", dash: "dashed", dashdot: "double" };
  const mark = el("span", { class: trace.marker || trace.stackgroup ? "swatch" : "stroke", "aria-hidden": "true" });
  mark.style.background = trace.marker || trace.stackgroup ? colour : "none";
  mark.style.borderTop = trace.marker || trace.stackgroup ? "none" : `3px ${styles[trace.line.dash] || "solid"} ${colour}`;
  return button([mark, unescaped(trace.name)], () => {
    if (isShown) chart.hidden.add(trace.name);
    else chart.hidden.delete(trace.name);
    drawPlot(chart);
  }, { "aria-pressed": String(isShown), "data-name": unescaped(trace.name) });
}

function isNarrow() {
  return window.innerWidth < 600;
}

// An axis of bars that lie on top of each other; their names break before the rank where there is little room.
function barAxis(labels) {
  return {
    autorange: "reversed", tickvals: labels.map((label, at) => at), showgrid: false, zeroline: false,
    ticktext: labels.map((label) => (isNarrow() ? plain(label).replace(" · ", "<br>") : plain(label))), tickfont: { size: isNarrow() ? 10 : 12 },
  };
}

function barHeight(labels, each = 26) {
  return Math.max(150, 60 + (isNarrow() ? Math.max(each, 34) : each) * labels.length);
}

function plotLayout(layout, isCoarse) {
  const ink = variable("ink"), grid = variable("grid"), soft = variable("soft");
  const axis = (given = {}) => ({
    gridcolor: grid, zerolinecolor: grid, linecolor: variable("line"), automargin: true, ...given,
    title: { text: given.title || "", font: { size: 12, color: soft }, standoff: 8 },
  });
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "kept", dragmode: isCoarse ? false : "zoom",
    margin: { l: 44, r: 14, t: 10, b: 36 }, hovermode: "closest", bargap: 0.3,
    hoverlabel: { bgcolor: variable("card"), bordercolor: variable("line"), font: { color: ink } },
    ...layout,
    font: { color: ink, size: 12, family: "system-ui, sans-serif" },
    xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
  };
}

function refreshPlots() {
  for (const chart of charts) {
    if (chart.isDrawn) drawPlot(chart);
    else placePlot(chart);
    if (chart.numbers.open) chart.numbers.dispatchEvent(new Event("toggle"));
  }
}

function drawEveryPlot() {
  for (const chart of charts) if (!chart.isDrawn) drawPlot(chart);
}
