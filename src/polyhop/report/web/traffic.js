// What ranks sent: by kind and rank, by layer and direction, from epoch to epoch.

function runsThatSent() {
  return shownRuns().filter((run) => run.traffic);
}

function kindChart() {
  return {
    id: "traffic-kinds", title: "Bytes a rank sends in an epoch, by kind", note: "Payload, training and evaluation apart.",
    build() {
      const rows = runsThatSent().flatMap((run) => run.traffic.ranks.flatMap((rank) => ["training", "evaluation"]
        .filter((part) => Object.keys(rank[part]).length)
        .map((part) => ({ label: ofRun(run, `rank ${rank.rank} ${part}`), values: rank[part] }))));
      if (!rows.length) return null;
      const kinds = [...new Set(rows.flatMap((row) => Object.keys(row.values)))].sort();
      const labels = rows.map((row) => row.label);
      return {
        traces: kinds.map((kind) => ({
          type: "bar", orientation: "h", name: plain(kind), y: rows.map((row, at) => at), x: rows.map((row) => row.values[kind] || 0),
          marker: { color: nameColour(kind) }, text: labels.map(plain), textposition: "none", hovertemplate: "%{text}<br>%{fullData.name}: %{x:.3~s}B<extra></extra>",
        })),
        headers: ["rank", ...kinds.map((kind) => `#${kind}`)], rows: rows.map((row) => [row.label, ...kinds.map((kind) => bytes(row.values[kind] || 0))]),
        height: barHeight(labels), layout: { barmode: "stack", xaxis: { title: "bytes", tickformat: ".2~s" }, yaxis: barAxis(labels) },
      };
    },
  };
}

function layerChart() {
  return {
    id: "traffic-layers", title: "Bytes between layers in an epoch", note: "Of all ranks together: rows before a layer, forward; their gradients, backward.",
    build() {
      const runs = runsThatSent().filter((run) => run.traffic.layers.length);
      if (!runs.length) return null;
      const traces = runs.flatMap((run) => ["forward", "backward"].map((direction) => {
        const mine = run.traffic.layers.filter((layer) => layer.direction === direction);
        return {
          type: "bar", name: plain(ofRun(run, direction)), x: mine.map((layer) => `layer ${layer.layer}`), y: mine.map((layer) => layer.bytes),
          marker: { color: runs.length > 1 ? run.colour : nameColour(direction), opacity: direction === "forward" ? 1 : 0.6 },
          hovertemplate: "%{x} %{fullData.name}: %{y:.3~s}B<extra></extra>",
        };
      }));
      const rows = runs.flatMap((run) => run.traffic.layers.map((layer) => [ofRun(run, `layer ${layer.layer}`), layer.direction, bytes(layer.bytes)]));
      return { traces, headers: ["layer", "direction", "#bytes"], rows, layout: { barmode: "group", bargap: 0.5, yaxis: { title: "bytes", tickformat: ".2~s" } } };
    },
  };
}

function trafficCourse() {
  return {
    id: "traffic-course", title: "Bytes sent, epoch by epoch", note: "By all ranks, evaluation included.",
    build() {
      const runs = runsThatSent().filter((run) => run.traffic.epochs.length > 1);
      if (!runs.length) return null;
      const kinds = (run) => Object.entries(run.traffic.over_epochs);
      const line = (run, name, values, colour) => ({
        x: run.traffic.epochs, y: values, name: plain(name), mode: "lines", line: { color: colour, width: 1.5 },
        hovertemplate: "%{fullData.name}: %{y:.3~s}B<extra>epoch %{x}</extra>",
      });
      const all = (run) => run.traffic.epochs.map((epoch, at) => kinds(run).reduce((sum, [, values]) => sum + (values[at] || 0), 0));
      const traces = runs.length > 1 ? runs.map((run) => line(run, run.name, all(run), run.colour))
        : kinds(runs[0]).map(([kind, values]) => line(runs[0], kind, values, nameColour(kind)));
      const rows = runs.flatMap((run) => run.traffic.epochs.map((epoch, at) => [
        ofRun(run, String(epoch)), kinds(run).map(([kind, values]) => `${kind} ${bytes(values[at])}`).join(", "),
      ]));
      return { traces, headers: ["epoch", "sent"], rows, layout: { xaxis: { title: "epoch" }, yaxis: { title: "bytes", tickformat: ".2~s", rangemode: "tozero" } } };
    },
  };
}

function renderTraffic(parent) {
  addChart(parent, kindChart());
  const pair = el("div", { class: "pair" });
  pair.style.marginTop = "12px";
  parent.append(pair);
  addChart(pair, layerChart());
  addChart(pair, trafficCourse());
  const setup = el("div");
  parent.append(setup);
  return () => {
    const rows = runsThatSent().flatMap((run) => run.traffic.ranks.filter((rank) => Object.keys(rank.setup).length)
      .map((rank) => [ofRun(run, `rank ${rank.rank}`), Object.entries(rank.setup).map(([kind, value]) => `${kind} ${bytes(value)}`).join(", ")]));
    setup.replaceChildren(...(rows.length ? [unfolding("Sent once, before the first epoch", () => table(["rank", "sent"], rows))] : []));
  };
}
