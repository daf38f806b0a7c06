// Runs side by side, and every option of each.

function renderComparison(parent) {
  return () => {
    const { comparison } = state.document, runs = shownRuns();
    if (!comparison || runs.length < 1) {
      parent.replaceChildren(el("p", { class: "soft" }, "No run is shown: choose one above."));
      return;
    }
    const names = runs.map((run) => run.name), at = runs.map((run) => run.at);
    const results = comparison.results.map((row) => [row.name, ...at.map((run) => inUnit(row.values[run], row.unit))]);
    const options = comparison.options.map((row) => [row.name.replaceAll("_", " "), ...at.map((run) => option(row.values[run]))]);
    parent.replaceChildren(...[
      ...comparison.notes.map((note) => el("p", { class: "note small" }, note)),
      table(["result", ...names.map((name) => `#${name}`)], results, "results"),
      options.length ? table(["option that differs", ...names], options, "options that differ") : el("p", { class: "soft" }, "All options are the same."),
    ]);
  };
}

function renderOptions(parent) {
  return () => parent.replaceChildren(...shownRuns().map((run) => unfolding(ofRun(run, "All options"), () =>
    table(["option", "value"], Object.entries(run.options).map(([name, value]) => [name.replaceAll("_", " "), option(value)])))));
}
