// Packed columns of the timeline: base64 of deflated little-endian numbers.

async function unpacked(text) {
  const raw = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function unpackCloseup(closeup) {
  const data = await unpacked(closeup.data);
  const count = closeup.num_spans;
  return {
    ...closeup,
    start: new Int32Array(data, 0, count),
    length: new Uint32Array(data, 4 * count, count),
    step: new Int32Array(data, 8 * count, count),
    fact: new Uint32Array(data, 12 * count, count),
    name: new Uint16Array(data, 16 * count, count),
    track: new Uint16Array(data, 18 * count, count),
    depth: new Uint8Array(data, 20 * count, count),
  };
}

async function unpackShares(shares) {
  const data = new Uint8Array(await unpacked(shares.data));
  const rows = shares.names.map((name, at) => ({ name, values: data.subarray(at * shares.num_slots, (at + 1) * shares.num_slots) }));
  return { ...shares, rows, stop_s: shares.start_s + shares.slot_s * shares.num_slots };
}

async function unpackTimeline(timeline) {
  const [closeups, shares] = await Promise.all([
    Promise.all(timeline.closeups.map(unpackCloseup)),
    Promise.all(timeline.shares.map(unpackShares)),
  ]);
  return { ...timeline, closeups, shares };
}
