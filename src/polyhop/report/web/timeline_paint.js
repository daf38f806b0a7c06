// A timeline on its canvas: shares of time as stacked colours, close-ups as one bar per span, below an axis of seconds.

function paintTimeline(canvas, timeline, view, layout, hiddenNames) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(layout.width * scale);
  canvas.height = Math.round(layout.height * scale);
  canvas.style.height = `${layout.height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const job = { pen, timeline, view, layout, hidden: hiddenNames, colours: timeline.names.map(nameColour) };
  pen.save();
  pen.beginPath();
  pen.rect(layout.gutter, 0, layout.width - layout.gutter, layout.height);
  pen.clip();
  for (const track of layout.tracks) {
    pen.fillStyle = variable("wash");
    pen.fillRect(layout.gutter, track.y, layout.width - layout.gutter, track.height);
  }
  for (const shares of timeline.shares) paintShares(job, shares);
  const closeups = closeupsInSight(timeline, view, layout);
  for (const closeup of closeups) clearCloseup(job, closeup);
  for (const closeup of closeups) paintCloseup(job, closeup);
  paintAxis(job);
  pen.restore();
  paintLabels(job);
}

function paintShares(job, shares) {
  const { pen, view, layout } = job, track = layout.tracks[shares.track];
  const rows = shares.rows.filter((row) => !job.hidden.has(row.name));
  const from = Math.max(view.start, shares.start_s), to = Math.min(view.stop, shares.stop_s);
  if (from >= to || !rows.length) return;
  const slotPx = secondsToX(view, layout, view.start + shares.slot_s) - layout.gutter;
  const stepPx = Math.max(slotPx, 1), stepSlots = stepPx / slotPx;
  let slot = Math.floor((from - shares.start_s) / shares.slot_s);
  const last = (to - shares.start_s) / shares.slot_s;
  for (; slot < last; slot += stepSlots) {
    const x = secondsToX(view, layout, shares.start_s + slot * shares.slot_s);
    let y = track.y + track.height;
    for (const row of rows) {
      const height = meanShare(row.values, slot, slot + stepSlots) * track.height;
      if (height < 0.15) continue;
      y -= height;
      pen.fillStyle = job.colours[row.name];
      pen.fillRect(x, y, stepPx + 0.3, height);
    }
  }
}

function meanShare(values, from, to) {
  const first = Math.floor(from), last = Math.min(Math.max(Math.ceil(to), first + 1), values.length);
  let sum = 0;
  for (let at = first; at < last; at += 1) sum += values[at];
  return last > first ? sum / (255 * (last - first)) : 0;
}

function clearCloseup(job, closeup) {
  const { pen, view, layout } = job;
  pen.fillStyle = variable("card");
  for (const track of layout.tracks) {
    const [from, to] = (closeup.ranks[track.rank] || [0, 0]).map((at) => secondsToX(view, layout, at));
    pen.fillRect(from, track.y, to - from, track.height);
  }
}

function paintCloseup(job, closeup) {
  const { pen, view, layout } = job, left = secondsToX(view, layout, closeup.start_s);
  const pxPerUnit = ((layout.width - layout.gutter) / (view.stop - view.start)) * closeup.unit_s;
  const drawnTo = new Float64Array(layout.tracks.length * MOST_ROWS).fill(-1);
  for (let at = 0; at < closeup.num_spans; at += 1) {
    const x = left + closeup.start[at] * pxPerUnit, width = closeup.length[at] * pxPerUnit;
    if (x > layout.width || x + width < layout.gutter || job.hidden.has(closeup.name[at])) continue;
    const track = layout.tracks[closeup.track[at]], row = Math.min(closeup.depth[at], track.rows - 1);
    const place = closeup.track[at] * MOST_ROWS + row;
    if (x + width < drawnTo[place]) continue; // under what is there
    drawnTo[place] = Math.max(x + width, Math.floor(x) + 0.7);
    pen.fillStyle = job.colours[closeup.name[at]];
    pen.fillRect(x, spanY(track, row), Math.max(width - (width > 3 ? 0.6 : 0), 0.7), spanHeight(track) - 1);
    if (width > 46) paintSpanText(job, closeup, at, x, width, spanY(track, row) + spanHeight(track) / 2);
  }
}

function spanHeight(track) {
  return track.height / track.rows;
}

function spanY(track, row) {
  return track.y + row * spanHeight(track);
}

function paintSpanText(job, closeup, at, x, width, y) {
  const { pen, layout } = job, start = Math.max(x, layout.gutter) + 4, room = x + width - start - 4;
  const facts = factsOf(closeup, at), short = facts.chunk !== undefined ? ` ${facts.chunk}` : facts.layer !== undefined ? ` · layer ${facts.layer}` : "";
  const text = job.timeline.names[closeup.name[at]] + short;
  if (room < 20) return;
  pen.save();
  pen.beginPath();
  pen.rect(start, y - 9, room, 18);
  pen.clip();
  pen.fillStyle = "#fff";
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(text, start, y);
  pen.restore();
}

function factsOf(closeup, at) {
  const text = closeup.facts[closeup.fact[at]];
  return text ? JSON.parse(text) : {};
}

function paintAxis(job) {
  const { pen, view, layout, timeline } = job;
  const step = tickStep(view.stop - view.start, Math.max((layout.width - layout.gutter) / 110, 2));
  pen.fillStyle = variable("paper");
  pen.fillRect(layout.gutter, 0, layout.width - layout.gutter, AXIS_PX - 4);
  pen.textAlign = "left";
  for (let at = Math.ceil(view.start / step) * step; at <= view.stop; at += step) {
    const x = secondsToX(view, layout, at);
    pen.fillStyle = variable("line");
    pen.fillRect(x, 0, 1, AXIS_PX - 4);
    pen.fillStyle = variable("soft");
    pen.fillText(momentText(at, step), x + 4, 8);
  }
  let free = layout.gutter + 36;
  for (const [epoch, at] of timeline.epochs) {
    const x = secondsToX(view, layout, at);
    if (x < Math.max(layout.gutter, free) || x > layout.width) continue;
    pen.fillStyle = variable("soft");
    pen.globalAlpha = 0.35;
    pen.fillRect(x, AXIS_PX - 10, 1, layout.height);
    pen.globalAlpha = 1;
    if (x - free > 30) pen.fillText(`epoch ${epoch}`, x - 4 - pen.measureText(`epoch ${epoch}`).width, 21);
    free = x + 36;
  }
}

function trackTitle(timeline, track) {
  const ranks = new Set(timeline.tracks.map((each) => each.rank)).size;
  if (track.thread !== "MainThread") return track.thread;
  return ranks > 1 ? `rank ${track.rank}` : "main";
}

function paintLabels(job) {
  const { pen, layout, timeline } = job;
  pen.textAlign = "right";
  for (const track of layout.tracks) {
    const isMain = track.thread === "MainThread";
    pen.fillStyle = variable(isMain ? "ink" : "soft");
    pen.font = `${isMain ? "600 12px" : "11px"} system-ui, sans-serif`;
    pen.fillText(shortened(pen, trackTitle(timeline, track), layout.gutter - 12), layout.gutter - 8, track.y + track.height / 2);
  }
}

function shortened(pen, text, room) {
  while (text.length > 3 && pen.measureText(text).width > room) text = `${text.slice(0, -2)}…`;
  return text;
}
