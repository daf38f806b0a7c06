// Which runs are shown. A page of one run has no choice to make.

const state = { document: null, hidden: new Set(), axis: "epoch", timeline: 0 };

function allRuns() {
  return state.document.runs.map((run, at) => ({ ...run, at, colour: paletteColour(at) }));
}

function shownRuns() {
  return allRuns().filter((run) => !state.hidden.has(run.at));
}

// A name in front of what is said of a run, where there are several.
function ofRun(run, text) {
  return state.document.runs.length > 1 ? `${run.name} · ${text}` : text;
}

function runChoice() {
  if (state.document.runs.length < 2) return null;
  const labels = allRuns().map((run) => {
    const box = el("input", { type: "checkbox", "data-run": run.at, checked: !state.hidden.has(run.at) });
    box.addEventListener("change", () => {
      if (box.checked) state.hidden.delete(run.at);
      else state.hidden.add(run.at);
      refreshAll();
    });
    return el("label", {}, box, swatch(run.colour), run.name);
  });
  return el("fieldset", { class: "runs", id: "runs" }, el("legend", {}, "Runs shown"), labels);
}
