// Accuracy and loss, by epoch or by time, all shown runs in one picture.

function curveX(run) {
  return state.axis === "epoch" ? run.course.epoch : run.course.seconds || run.course.epoch;
}

function curveTraces(names) {
  const dashes = ["solid", "dot", "dash", "dashdot"];
  const has = (run, name) => run.course[name] && run.course[name].some(isNumber);
  return shownRuns().flatMap((run) => names.filter((name) => has(run, name)).map((name) => ({
    x: curveX(run), y: run.course[name], name: plain(ofRun(run, name.replace("_", " "))), mode: run.course.epoch.length > 1 ? "lines" : "markers",
    connectgaps: true, line: { width: 2, dash: dashes[names.indexOf(name)], color: state.document.runs.length > 1 ? run.colour : paletteColour(names.indexOf(name)) },
  })));
}

function curveChart(id, title, names, yTitle, scale) {
  return {
    id, title, build() {
      const traces = curveTraces(names);
      if (!traces.length) return null;
      const rows = shownRuns().flatMap((run) => run.course.epoch.map((epoch, at) => [
        ofRun(run, String(epoch)), ...names.map((name) => scale((run.course[name] || [])[at])),
      ]));
      return {
        traces, headers: ["epoch", ...names.map((name) => `#${name.replace("_", " ")}`)], rows,
        layout: { xaxis: { title: state.axis === "epoch" ? "epoch" : "seconds of training" }, yaxis: yTitle },
      };
    },
  };
}

function renderCurves(parent) {
  const choose = (axis) => button(axis === "epoch" ? "By epoch" : "By time", () => {
    state.axis = axis;
    for (const each of bar.children) each.setAttribute("aria-pressed", String(each.dataset.axis === axis));
    refreshPlots();
  }, { "aria-pressed": String(state.axis === axis), "data-axis": axis });
  const bar = el("div", { class: "bar", id: "axis" }, choose("epoch"), choose("seconds"));
  const pair = el("div", { class: "pair" });
  parent.append(bar, pair);
  const metric = allRuns()[0].about.metric;
  addChart(pair, curveChart("curve-score", metric, ["val", "test"], { title: metric, tickformat: ".0%" }, (v) => percent(v, 2)));
  addChart(pair, curveChart("curve-loss", "loss", ["loss", "val_loss", "test_loss"], { title: "loss" }, (v) => digits(v, 4)));
}
