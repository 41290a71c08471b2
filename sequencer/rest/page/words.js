// Formats numbers and times. Pure.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const AGES = [["d", 86400], ["h", 3600], ["min", 60]];

/** Bytes, to three digits: "1.25 GiB". */
export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? value.toPrecision(3 + (value >= 1000)) : Math.round(value)} ${UNITS[unit]}`;
}

/** A count, its digits in groups of three. */
export function count(value) {
  return Math.round(value).toLocaleString("en");
}

/** "1 segment", "2 segments". */
export function several(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

/** A share of 1 as percent, rounded down: 100 % only if complete. */
export function percent(share) {
  return `${Math.floor(share * 100)} %`;
}

/** Seconds in one unit: "3 min". */
export function span(seconds) {
  for (const [unit, size] of AGES) {
    if (seconds >= size) {
      return `${Math.floor(seconds / size)} ${unit}`;
    }
  }
  return `${Math.max(Math.floor(seconds), 0)} s`;
}

/** Milliseconds of an RFC 3339 time; null for "". */
export function moment(text) {
  return text ? Date.parse(text) : null;
}

/** The time of day here, of milliseconds since the epoch. */
export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

/** Day and time here, as short as `spanMs` allows. */
export function tick(ms, spanMs) {
  const date = new Date(ms);
  if (spanMs < 36 * 3600e3) {
    return date.toLocaleTimeString("en-GB", spanMs < 600e3 ? {} : { hour: "2-digit", minute: "2-digit" });
  }
  const day = { month: "short", day: "numeric" };
  const hour = spanMs < 5 * 86400e3 ? { hour: "2-digit", minute: "2-digit" } : {};
  return date.toLocaleString("en-GB", { ...day, ...hour });
}

/** Day and time here, of milliseconds since the epoch. */
export function day(ms) {
  return new Date(ms).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}
