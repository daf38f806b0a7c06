// Pointer and keys of the timeline, and what lies under the pointer.

function watchKeys(canvas) {
  const acts = {
    ArrowLeft: (view) => panView(view, -0.2), ArrowRight: (view) => panView(view, 0.2), Home: (view) => showSeconds(view, 0, view.length),
    "+": (view) => zoomView(view, 0.5), "=": (view) => zoomView(view, 0.5), "-": (view) => zoomView(view, 2),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!acts[event.key] || !line.data || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    look(acts[event.key]);
  });
}

function watchPointer(canvas) {
  const down = new Map(); // pointers by id: where each is
  let began = null; // x at which a stretch is being drawn
  const at = (event) => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("wheel", (event) => {
    if (!line.data || (document.activeElement !== canvas && !event.ctrlKey)) return; // the page scrolls on otherwise
    event.preventDefault();
    look((view) => zoomView(view, Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), xToSeconds(view, line.layout, at(event))));
  }, { passive: false });
  canvas.addEventListener("dblclick", () => look((view) => showSeconds(view, 0, view.length)));
  canvas.addEventListener("pointerdown", (event) => {
    if (!line.data) return;
    down.set(event.pointerId, at(event));
    canvas.setPointerCapture(event.pointerId);
    began = event.pointerType !== "touch" && event.button === 0 ? at(event) : null;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!line.data) return;
    const before = down.get(event.pointerId), now = at(event);
    if (before === undefined) tellUnder(event, now);
    else if (event.pointerType === "touch") touchMoved(down, event.pointerId, before, now);
    else if (began !== null) paintStretch(canvas, began, now);
    if (before !== undefined) down.set(event.pointerId, now);
  });
  const up = (event) => {
    const stop = at(event);
    if (began !== null && Math.abs(stop - began) > 4) {
      const [from, to] = [began, stop].sort((a, b) => a - b).map((x) => xToSeconds(line.view, line.layout, x));
      look((view) => showSeconds(view, from, to));
    }
    began = null;
    down.delete(event.pointerId);
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", (event) => { began = null; down.delete(event.pointerId); });
  canvas.addEventListener("pointerleave", () => { line.parts.hint.hidden = true; });
}

// One finger moves, two zoom.
function touchMoved(down, id, before, now) {
  const width = line.layout.width - line.layout.gutter;
  const other = [...down].find(([each]) => each !== id);
  if (!other) {
    look((view) => panView(view, (before - now) / width));
    return;
  }
  const apart = Math.max(Math.abs(now - other[1]), 8), was = Math.max(Math.abs(before - other[1]), 8);
  look((view) => zoomView(view, was / apart, xToSeconds(view, line.layout, (now + other[1]) / 2)));
}

function paintStretch(canvas, from, to) {
  paintLine();
  const pen = canvas.getContext("2d");
  pen.fillStyle = variable("accent");
  pen.globalAlpha = 0.2;
  pen.fillRect(Math.min(from, to), 0, Math.abs(to - from), line.layout.height);
  pen.globalAlpha = 1;
}

function tellUnder(event, x) {
  const { canvas, hint } = line.parts, box = canvas.getBoundingClientRect(), y = event.clientY - box.top;
  const track = line.layout.tracks.findIndex((each) => y >= each.y && y < each.y + each.height);
  const words = track < 0 || x < line.layout.gutter ? null : wordsAt(track, y, xToSeconds(line.view, line.layout, x));
  hint.hidden = words === null;
  if (words === null) return;
  hint.textContent = words;
  const figure = hint.parentElement.getBoundingClientRect();
  hint.style.left = `${Math.max(Math.min(event.clientX - figure.left + 14, figure.width - 310), 4)}px`;
  hint.style.top = `${event.clientY - figure.top + 16}px`;
}

function wordsAt(at, y, time) {
  const track = line.layout.tracks[at], title = trackTitle(line.data, track);
  const closeups = closeupsInSight(line.data, line.view, line.layout).filter((each) => isInside(each.ranks[track.rank], time));
  for (const closeup of closeups) {
    const span = spanAt(closeup, at, Math.floor((y - track.y) / spanHeight(track)), time);
    if (span !== null) return spanWords(closeup, span, `rank ${track.rank}, ${track.thread}`);
  }
  if (closeups.length) return null;
  const shares = line.data.shares.find((each) => each.track === at && time >= each.start_s && time < each.stop_s);
  if (!shares) return null;
  const slot = (time - shares.start_s) / shares.slot_s;
  const told = shares.rows.map((row) => [line.data.names[row.name], meanShare(row.values, slot, slot)]).filter(([, share]) => share > 0);
  if (!told.length) return null;
  const amount = (share) => (track.is_flight ? `${digits(share * shares.most, 2)} at once` : percent(share, 0));
  return [`rank ${track.rank} · ${title}, at ${seconds(time)}`, ...told.sort((a, b) => b[1] - a[1]).map(([name, share]) => `${name} ${amount(share)}`)].join("\n");
}

function isInside(stretch, time) {
  return stretch !== undefined && time >= stretch[0] && time <= stretch[1];
}

function spanAt(closeup, track, row, time) {
  const slack = ((line.view.stop - line.view.start) / (line.layout.width - line.layout.gutter)) / closeup.unit_s; // a pixel
  const at = (time - closeup.start_s) / closeup.unit_s;
  let found = null, least = Infinity;
  for (let each = 0; each < closeup.num_spans; each += 1) {
    if (closeup.track[each] !== track || Math.min(closeup.depth[each], MOST_ROWS - 1) !== row || line.hidden.has(closeup.name[each])) continue;
    const away = Math.max(closeup.start[each] - at, at - closeup.start[each] - closeup.length[each], 0);
    if (away <= 2 * slack && away < least) [found, least] = [each, away];
  }
  return found;
}

function spanWords(closeup, at, where) {
  const facts = Object.entries(factsOf(closeup, at)).map(([name, value]) => `${name.replaceAll("_", " ")} ${name === "bytes" ? bytes(value) : option(value)}`);
  const step = closeup.step[at] >= 0 ? [`step ${closeup.step[at]}`] : [];
  const length = closeup.length[at] * closeup.unit_s;
  return [`${line.data.names[closeup.name[at]]}${length > 0 ? `, ${seconds(length)}` : ""}`, [`epoch ${closeup.epoch}`, ...step, ...facts].join(", "), where].join("\n");
}
