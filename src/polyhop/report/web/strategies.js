// What only some strategies have: bubbles of a pipeline, widths of quantised rows, functions and what they cost.

function bubbleChart() {
  return {
    id: "bubbles", title: "Share of a step in which a rank computes no chunk", note: "0 would be a pipeline without bubbles; what is left waits for a neighbour, or sums and updates weights.",
    build() {
      const runs = shownRuns().filter((run) => run.bubbles);
      if (!runs.length) return null;
      const ranks = runs.flatMap((run) => run.bubbles.ranks.map((rank, at) => ({ run, at, ...rank })));
      return {
        traces: ranks.map((rank) => ({
          x: rank.run.bubbles.epochs, y: rank.over_epochs, name: plain(ofRun(rank.run, `rank ${rank.rank}`)), mode: "lines+markers",
          line: { color: paletteColour(rank.at), dash: rank.run.at % 2 ? "dot" : "solid" }, hovertemplate: "%{y:.1%}<extra>epoch %{x}</extra>",
        })),
        headers: ["rank", "#idle on average"], rows: ranks.map((rank) => [ofRun(rank.run, `rank ${rank.rank}`), percent(rank.idle)]),
        layout: { xaxis: { title: "epoch" }, yaxis: { title: "idle", tickformat: ".0%", range: [0, 1] } },
      };
    },
  };
}

function widthChart() {
  return {
    id: "bits", title: "Bits of a value that crosses", note: "Mean over the rows of a layer and direction, from each choice of widths on.",
    build() {
      const lines = new Map();
      for (const run of shownRuns().filter((each) => each.bits)) {
        for (const choice of run.bits.choices) {
          const name = ofRun(run, `layer ${choice.layer} ${choice.direction}`);
          if (!lines.has(name)) lines.set(name, { x: [], y: [], text: [] });
          lines.get(name).x.push(choice.epoch);
          lines.get(name).y.push(choice.mean);
          lines.get(name).text.push(Object.entries(choice.rows).map(([width, count]) => `${width} bits: ${digits(count, 6)} rows`).join(", "));
        }
      }
      if (!lines.size) return null;
      return {
        traces: [...lines].map(([name, line], at) => ({
          ...line, name: plain(name), mode: "lines+markers", line: { shape: "hv", color: paletteColour(at), width: 2 },
          hovertemplate: "%{y:.2f} bits<br>%{text}<extra>epoch %{x}</extra>",
        })),
        headers: ["layer", "from epoch", "#mean bits", "rows"],
        rows: [...lines].flatMap(([name, line]) => line.x.map((epoch, at) => [name, String(epoch), digits(line.y[at]), line.text[at]])),
        layout: { xaxis: { title: "epoch" }, yaxis: { title: "bits", rangemode: "tozero" } },
      };
    },
  };
}

function functionChart(id, title, values, yTitle) {
  return {
    id, title, build() {
      const ranks = shownRuns().filter((run) => run.functions).flatMap((run) => run.functions.ranks.map((rank, at) => ({ run, at, ...rank })));
      if (!ranks.length) return null;
      const dashes = ["solid", "dot", "dash"];
      return {
        traces: ranks.flatMap((rank) => values.map((value, at) => ({
          x: rank.at_s, y: rank[value], name: plain(ofRun(rank.run, `rank ${rank.rank}${values.length > 1 ? ` ${value.replace("_", " ")}` : ""}`)),
          mode: "lines", line: { shape: "hv", color: paletteColour(rank.at), dash: dashes[at] },
        }))),
        headers: ["rank", "#seconds", ...values.map((value) => `#${value.replace("_", " ")}`)],
        rows: ranks.flatMap((rank) => rank.at_s.map((at_s, at) => [ofRun(rank.run, `rank ${rank.rank}`), digits(at_s), ...values.map((value) => digits(rank[value][at], 6))])),
        layout: { xaxis: { title: "seconds" }, yaxis: { title: yTitle, rangemode: "tozero" } },
      };
    },
  };
}

function billTable(run) {
  const bill = run.functions.bill, rows = Object.entries(bill)
    .filter(([, value]) => typeof value !== "object").map(([name, value]) => [name.replaceAll("_", " "), option(value)]);
  return table(["bill", "value"], rows, ofRun(run, bill.is_local ? "what it would have cost" : "what it cost"));
}

function renderFunctions(parent) {
  const pair = el("div", { class: "pair" });
  parent.append(pair);
  addChart(pair, functionChart("functions-alive", "Functions alive", ["functions"], "functions"));
  addChart(pair, functionChart("functions-tasks", "Tasks", ["in_flight", "waiting", "again"], "tasks"));
  addChart(pair, functionChart("functions-dollars", "Dollars so far", ["dollars"], "$"));
  const below = el("div");
  parent.append(below);
  return () => {
    const runs = shownRuns().filter((run) => run.functions);
    const decided = runs.flatMap((run) => run.functions.decided.map((each) => [ofRun(run, `rank ${each.rank}`), seconds(each.at_s), option(each.wanted), each.why]));
    below.replaceChildren(...[
      ...runs.filter((run) => run.functions.bill).map((run) => unfolding(ofRun(run, "The bill"), () => billTable(run))),
      decided.length ? unfolding("How many functions, and why", () => table(["rank", "#at", "#functions", "why"], decided)) : null,
    ].filter(Boolean));
  };
}
