// Which seconds of a timeline are in sight, and where its tracks lie on the canvas.

const CLOSEUP_PX = 200, AXIS_PX = 30, ROW_PX = 14, GAP_PX = 5, LEAST_VIEW_S = 2e-6, MOST_ROWS = 8;

function makeView(length) {
  return { start: 0, stop: length, length, isWhole: true };
}

function showSeconds(view, start, stop) {
  const width = Math.min(Math.max(stop - start, LEAST_VIEW_S), view.length);
  view.start = Math.min(Math.max(start, 0), view.length - width);
  view.stop = view.start + width;
  view.isWhole = width >= view.length;
}

// Around a moment: factor 0.5 shows half as much.
function zoomView(view, factor, at = (view.start + view.stop) / 2) {
  showSeconds(view, at - (at - view.start) * factor, at - (at - view.start) * factor + (view.stop - view.start) * factor);
}

// By a part of what is in sight.
function panView(view, part) {
  const by = (view.stop - view.start) * part;
  showSeconds(view, view.start + by, view.stop + by);
}

// A timeline that has grown: who looks at all of it goes on doing so.
function growView(view, length) {
  const wasWhole = view.isWhole;
  view.length = length;
  if (wasWhole) showSeconds(view, 0, length);
  else showSeconds(view, view.start, view.stop);
}

function layoutTracks(timeline, width) {
  const rows = timeline.tracks.map(() => 1);
  for (const closeup of timeline.closeups) {
    for (let at = 0; at < closeup.num_spans; at += 1) {
      const track = closeup.track[at];
      if (closeup.depth[at] >= rows[track]) rows[track] = Math.min(closeup.depth[at] + 1, MOST_ROWS);
    }
  }
  let y = AXIS_PX;
  const tracks = timeline.tracks.map((track, at) => {
    const isFirst = at === 0 || timeline.tracks[at - 1].rank !== track.rank;
    y += isFirst && at > 0 ? GAP_PX : 0;
    const height = Math.max(rows[at], 1.4) * ROW_PX;
    const placed = { ...track, y, height, rows: rows[at] };
    y += height + GAP_PX;
    return placed;
  });
  return { tracks, gutter: width < 600 ? 78 : 150, width, height: y + 4 };
}

function secondsToX(view, layout, at) {
  return layout.gutter + ((at - view.start) / (view.stop - view.start)) * (layout.width - layout.gutter);
}

function xToSeconds(view, layout, x) {
  return view.start + ((x - layout.gutter) / (layout.width - layout.gutter)) * (view.stop - view.start);
}

// A close-up is drawn in full once it is wide enough to see anything in it.
function closeupsInSight(timeline, view, layout) {
  return timeline.closeups.filter((closeup) => closeup.num_spans > 0 && closeup.stop_s > view.start && closeup.start_s < view.stop
    && secondsToX(view, layout, closeup.stop_s) - secondsToX(view, layout, closeup.start_s) >= CLOSEUP_PX);
}

const LONG_STEPS = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

// Round steps, in seconds, for about so many ticks.
function tickStep(range, count) {
  const rough = range / count, power = 10 ** Math.floor(Math.log10(rough));
  if (rough > 30) return LONG_STEPS.find((step) => step >= rough) || Math.ceil(rough / 86400) * 86400;
  return power * [1, 2, 5, 10].find((step) => power * step >= rough);
}

// A moment of the run, exact enough to tell ticks of a step apart.
function momentText(at, step) {
  const hours = Math.floor(at / 3600), minutes = Math.floor((at % 3600) / 60);
  const clock = `${hours}:${String(minutes).padStart(2, "0")}`;
  if (step >= 60) return hours || step >= 1800 ? `${clock} h` : `${minutes} min`;
  const places = Math.min(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), 7), rest = at % 60;
  if (at >= 60) return `${hours ? clock : minutes}:${rest.toFixed(places).padStart(places ? places + 3 : 2, "0")}`;
  if (at < 1 && step < 1e-3) return `${(at * 1e3).toFixed(Math.max(places - 3, 0))} ms`;
  return `${at.toFixed(places)} s`;
}
