// Memory of ranks, and how good the parts are that they hold.

function memoryChart() {
  return {
    id: "memory", title: "Memory of a rank", note: "Resident in the system's count; of the device where there is one.",
    build() {
      const ranks = shownRuns().filter((run) => run.memory).flatMap((run) => run.memory.ranks.map((rank, at) => ({ run, at, ...rank })));
      if (!ranks.length) return null;
      const kinds = ["resident", "peak", "device_peak"].filter((kind) => ranks.some((rank) => rank[kind]));
      const dashes = { resident: "solid", peak: "dot", device_peak: "dash" };
      return {
        traces: ranks.flatMap((rank) => kinds.filter((kind) => rank[kind]).map((kind) => ({
          x: rank.run.memory.epochs, y: rank[kind], name: plain(ofRun(rank.run, `rank ${rank.rank} ${kind.replace("_", " ")}`)), mode: "lines",
          line: { color: rank.run.at ? rank.run.colour : paletteColour(rank.at), dash: dashes[kind], width: 1.5 }, hovertemplate: "%{y:.3~s}B<extra>epoch %{x}</extra>",
        }))),
        headers: ["rank", ...kinds.map((kind) => `#${kind.replace("_", " ")}, at most`)],
        rows: ranks.map((rank) => [ofRun(rank.run, `rank ${rank.rank}`), ...kinds.map((kind) => bytes(Math.max(...(rank[kind] || [NaN]))))]),
        layout: { xaxis: { title: "epoch" }, yaxis: { title: "bytes", tickformat: ".3~s", rangemode: "tozero" } },
      };
    },
  };
}

function partsChart() {
  return {
    id: "parts", title: "Parts against their mean", note: "1 would be even. Edges follow the nodes they point to; halo: rows of other parts that a part reads.",
    build() {
      const runs = shownRuns().filter((run) => run.partition && Array.isArray(run.partition.parts));
      if (!runs.length) return null;
      const kinds = ["nodes", "edges", "train", "halo"];
      const rows = runs.flatMap((run) => run.partition.parts.map((part, at) => ({ label: ofRun(run, `part ${at}`), part, run })));
      const labels = rows.map((row) => row.label);
      const mean = (run, kind) => run.partition.parts.reduce((sum, part) => sum + (part[kind] || 0), 0) / run.partition.parts.length || 1;
      return {
        traces: kinds.map((kind, at) => ({
          type: "bar", orientation: "h", name: kind === "train" ? "train nodes" : kind, y: rows.map((row, place) => place),
          x: rows.map((row) => (row.part[kind] || 0) / mean(row.run, kind)), text: labels.map(plain), textposition: "none",
          marker: { color: paletteColour(at) }, hovertemplate: "%{text}: %{x:.2f} of the mean<extra>%{fullData.name}</extra>",
        })),
        headers: ["part", "#nodes", "#edges", "#train nodes", "#edges cut", "#halo"],
        rows: rows.map((row) => [row.label, ...["nodes", "edges", "train", "cut_edges", "halo"].map((kind) => digits(row.part[kind], 9))]),
        height: barHeight(labels, 52), layout: { barmode: "group", xaxis: { title: "of the mean" }, yaxis: barAxis(labels) },
      };
    },
  };
}

function qualityRows(run) {
  const q = run.partition;
  return [
    ["cut", `${percent(q.cut)} of edges (at random: ${percent(q.chance_cut)})`],
    ["balance", `nodes ${digits(q.node_balance)}, edges ${digits(q.edge_balance)}, train nodes ${digits(q.train_balance)} (largest part over the mean)`],
    ["halo", `${digits(q.halo)} rows read from other parts for each node, in one full layer; replication ${digits(q.replication)}`],
  ].map(([name, text]) => [ofRun(run, name), text]);
}

function renderParts(parent) {
  const quality = el("div");
  parent.append(quality);
  addChart(parent, partsChart());
  return () => {
    const runs = shownRuns().filter((run) => run.partition);
    quality.replaceChildren(...(runs.length ? [table(["", "quality"], runs.flatMap(qualityRows), "quality of the parts")] : []));
  };
}
