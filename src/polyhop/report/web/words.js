// Numbers as people read them. "–" stands for what is not known.

const NONE = "–";

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function digits(value, count = 3) {
  if (!isNumber(value)) return NONE;
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e15)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(count, Math.ceil(Math.log10(Math.abs(value) + 1))) });
}

function seconds(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 3600) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  if (size >= 120) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (size >= 1 || size === 0) return `${digits(value)} s`;
  if (size >= 1e-3) return `${digits(value * 1e3)} ms`;
  return `${digits(value * 1e6)} µs`;
}

function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (Math.abs(value) >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${digits(value)} ${units[at]}`;
}

function percent(value, places = 1) {
  return isNumber(value) ? `${(100 * value).toFixed(places)} %` : NONE;
}

function dollars(value) {
  return isNumber(value) ? `$${value < 0.01 ? value.toFixed(6) : value.toFixed(4)}` : NONE;
}

// A value by the name of its unit, as the document gives it.
function inUnit(value, unit) {
  if (unit === "s") return seconds(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "share") return percent(value, 2);
  if (unit === "$") return dollars(value);
  return digits(value, 6);
}

// An option as it was given.
function option(value) {
  if (value === null || value === undefined) return NONE;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
