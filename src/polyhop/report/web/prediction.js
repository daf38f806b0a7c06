// What the plan had predicted, beside what was measured.

function predictionChart() {
  return {
    id: "prediction", title: "Measured over predicted", note: "1 would be as predicted; above it took more.",
    build() {
      const runs = shownRuns().filter((run) => run.prediction);
      const rows = runs.flatMap((run) => run.prediction.rows.map((row) => ({ run, ...row })));
      if (!rows.length) return null;
      const known = rows.filter((row) => isNumber(row.ratio));
      const labels = known.map((row) => ofRun(row.run, row.what));
      return {
        traces: [{
          type: "bar", orientation: "h", name: "ratio", y: known.map((row, at) => at), text: labels.map(plain), textposition: "none", x: known.map((row) => row.ratio),
          marker: { color: known.map((row) => (row.ratio > 1.25 || row.ratio < 0.8 ? nameColour("wait") : nameColour("compute"))) },
          hovertemplate: "%{text}: %{x:.2f} times<extra></extra>",
        }],
        headers: ["what", "#predicted", "#measured", "#measured / predicted"],
        rows: rows.map((row) => [ofRun(row.run, row.what), inUnit(row.predicted, row.unit), inUnit(row.measured, row.unit), digits(row.ratio)]),
        height: barHeight(labels), layout: { yaxis: barAxis(labels), xaxis: { title: "times", rangemode: "tozero" },
          shapes: [{ type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: { color: variable("soft"), dash: "dot", width: 1 } }] },
      };
    },
  };
}

function whyChosen(run) {
  const { why, ranked, assumed, name } = run.prediction;
  return el("div", {},
    el("h3", {}, ofRun(run, name)), why.map((line) => el("p", { class: "small" }, line)),
    ranked.length ? table(["way", "#epoch", "exact", "why not"], ranked.map((each) =>
      [each.name, seconds(each.epoch_s), each.is_exact === null ? NONE : each.is_exact ? "yes" : "no", each.why_not || ""]), "ways that were weighed") : null,
    assumed.length ? table(["assumed", ""], assumed.map((words) => [words[0] || "", words.slice(1).join(" ")]), "what the plan took for granted") : null);
}

function renderPrediction(parent) {
  const chart = addChart(parent, predictionChart());
  chart.numbers.open = true;
  const below = el("div");
  parent.append(below);
  return () => below.replaceChildren(...shownRuns().filter((run) => run.prediction)
    .map((run) => unfolding(ofRun(run, "Why this way was chosen"), () => whyChosen(run))));
}
