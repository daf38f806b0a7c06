// Where the seconds went: by name of span, rank and thread; and from epoch to epoch.

function threadRows() {
  return shownRuns().flatMap((run) => (run.phases ? run.phases.threads : []).map((thread) => ({ run, ...thread })));
}

function threadName(row) {
  const isAlone = row.run.about.num_ranks === 1 || row.run.about.num_ranks === null;
  const rank = isAlone ? "" : `rank ${row.rank}`;
  const thread = row.is_main ? "" : row.thread;
  return ofRun(row.run, [rank, thread].filter(Boolean).join(" ") || "main thread");
}

function allNames(rows) {
  const wanted = shownRuns().flatMap((run) => (run.phases ? run.phases.names : []));
  return [...new Set(wanted)].filter((name) => rows.some((row) => row.seconds[name] > 0));
}

function phaseChart() {
  return {
    id: "phases", title: "Seconds of a mean epoch", note: "Own time of every span, without that of spans inside it. Threads beside the main one work at the same time.",
    build() {
      const rows = threadRows();
      if (!rows.length) return null;
      const names = allNames(rows), labels = rows.map(threadName);
      const traces = names.map((name) => ({
        type: "bar", orientation: "h", name: plain(name), y: labels.map((label, at) => at), x: rows.map((row) => row.seconds[name] || 0),
        marker: { color: nameColour(name) }, text: labels.map(plain), textposition: "none", hovertemplate: "%{text}<br>%{fullData.name}: %{x:.3~s}s<extra></extra>",
      }));
      return {
        traces, height: barHeight(labels), headers: ["thread", ...names.map((name) => `#${name}`)],
        rows: rows.map((row, at) => [labels[at], ...names.map((name) => seconds(row.seconds[name] || 0))]),
        layout: { barmode: "stack", xaxis: { title: "seconds" }, yaxis: barAxis(labels) },
      };
    },
  };
}

function phaseCourse() {
  return {
    id: "phase-course", title: "Epoch by epoch", note: "Mean of the ranks' main threads.",
    build() {
      const run = shownRuns().find((each) => each.phases && each.phases.epochs.length > 1);
      if (!run) return null;
      const names = Object.keys(run.phases.over_epochs);
      const traces = names.map((name) => ({
        x: run.phases.epochs, y: run.phases.over_epochs[name], name: plain(name), stackgroup: "all", mode: "lines",
        line: { width: 0.5, color: nameColour(name) }, hovertemplate: "%{fullData.name}: %{y:.3~s}s<extra>epoch %{x}</extra>",
      }));
      return {
        traces, headers: ["epoch", ...names.map((name) => `#${name}`)],
        rows: run.phases.epochs.map((epoch, at) => [String(epoch), ...names.map((name) => seconds(run.phases.over_epochs[name][at]))]),
        layout: { xaxis: { title: ofRun(run, "epoch") }, yaxis: { title: "seconds" } },
      };
    },
  };
}

function lengthChart() {
  return {
    id: "epoch-length", title: "Length of an epoch", note: "Training alone: without evaluation and checkpoints.",
    build() {
      const runs = shownRuns().filter((run) => run.phases && run.phases.epochs.length > 1);
      if (!runs.length) return null;
      return {
        traces: runs.map((run) => ({
          x: run.phases.epochs, y: run.phases.train_s, name: plain(run.name), mode: "lines", line: { color: run.colour, width: 1.5 },
          hovertemplate: "%{y:.3~s}s<extra>epoch %{x}</extra>",
        })),
        headers: ["epoch", ...runs.map((run) => `#${run.name}`)],
        rows: runs[0].phases.epochs.map((epoch, at) => [String(epoch), ...runs.map((run) => seconds(run.phases.train_s[at]))]),
        layout: { xaxis: { title: "epoch" }, yaxis: { title: "seconds", rangemode: "tozero" } },
      };
    },
  };
}

function flightRows() {
  return threadRows().filter((row) => row.flight_s).map((row) => [
    threadName(row), Object.entries(row.flight_s).map(([name, value]) => `${name} ${seconds(value)}`).join(", "), seconds(row.seconds.wait || 0),
  ]);
}

function renderTime(parent) {
  addChart(parent, phaseChart());
  const flights = el("div");
  parent.append(flights);
  const pair = el("div", { class: "pair" });
  pair.style.marginTop = "12px";
  parent.append(pair);
  addChart(pair, phaseCourse());
  addChart(pair, lengthChart());
  return () => {
    const rows = flightRows();
    flights.replaceChildren(...(rows.length ? [unfolding("In flight beside the threads, and what of it was waited for",
      () => table(["rank", "in flight in an epoch", "#waited for"], rows))] : []));
  };
}
