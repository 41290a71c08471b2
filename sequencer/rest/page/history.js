// The log history: kept up to date by what may still change, and drawn as a timeline.

import { draw, make, say } from "./dom.js";
import { bytes, count, moment, several, tick } from "./words.js";

const PAGE = 2000;
const REMEMBERED = 20000;
const BARS_MAX = 240;
const WIDTH = 1000;
const HEIGHT = 100;
const BAR_WIDTH_MIN = 5;

/** Every segment, oldest first. Only a prefix is ever trimmed, so what lies before the kept ones is final. */
export class History {
  entries = [];

  /** Ask for what may have changed. */
  async refresh(ask) {
    const first = this.entries.findIndex((one) => one.state !== "trimmed");
    const final = first < 0 ? [] : this.entries.slice(0, first);
    const from = first < 0 ? "" : `from=${this.entries[first].logPos}&`;
    const found = [];
    for (;;) {
      const page = await ask(`log-history?${from}limit=${PAGE}&offset=${found.length}`);
      found.push(...page);
      if (page.length < PAGE) {
        break;
      }
    }
    this.entries = [...final, ...found].slice(-REMEMBERED);
  }
}

/** Draw `entries` into `place`; `nowMs` is the node's time. */
export function drawTimeline(place, entries, nowMs) {
  if (!entries.length) {
    place.replaceChildren();
    return;
  }
  const shown = inWindow(entries, nowMs);
  const startMs = moment(shown[0].logTime);
  const spanMs = Math.max(nowMs - startMs, 1000);
  const svg = draw("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": summary(entries),
  });
  const bars = merged(shown);
  const most = Math.max(...bars.map((one) => one.size / one.count));
  for (const one of bars) {
    const left = (WIDTH * (one.startMs - startMs)) / spanMs;
    const right = (WIDTH * (Math.min(one.endMs ?? nowMs, nowMs) - startMs)) / spanMs;
    const height = Math.max((HEIGHT * one.size) / one.count / (most || 1), 8);
    const rect = draw("rect", {
      x: Math.min(left, WIDTH - BAR_WIDTH_MIN).toFixed(2),
      width: Math.max(right - left, BAR_WIDTH_MIN).toFixed(2),
      y: (HEIGHT - height).toFixed(2),
      height: height.toFixed(2),
      "data-state": one.state,
    });
    const title = draw("title");
    title.textContent = described(one);
    rect.append(title);
    svg.append(rect);
  }
  const axis = make("p", { class: "axis muted", "aria-hidden": "true" });
  for (const share of [0, 0.5, 1]) {
    axis.append(make("span", {}, tick(startMs + share * spanMs, spanMs)));
  }
  place.replaceChildren(svg, axis);
}

/** What is drawn: all that is kept, and of what was trimmed as long a time before it. */
function inWindow(entries, nowMs) {
  const kept = entries.find((one) => one.state !== "trimmed");
  if (!kept) {
    return entries;
  }
  const keptMs = moment(kept.logTime);
  const fromMs = keptMs - Math.max(nowMs - keptMs, 60e3);
  return entries.filter((one) => one.state !== "trimmed" || moment(one.logTime) >= fromMs);
}

/** Neighbours of one state as one bar, as many as it takes to have few bars. */
function merged(entries) {
  const run = Math.ceil(entries.length / BARS_MAX);
  const bars = [];
  for (const one of entries) {
    const last = bars[bars.length - 1];
    if (last && last.state === one.state && last.count < run) {
      Object.assign(last, { endMs: moment(one.sealTime), end: one.logEnd, size: last.size + one.logSize });
      last.count += 1;
    } else {
      bars.push({
        state: one.state,
        startMs: moment(one.logTime),
        endMs: moment(one.sealTime),
        first: one.logPos,
        end: one.logEnd,
        size: one.logSize,
        count: 1,
        reason: one.truncationReason,
      });
    }
  }
  return bars;
}

function described(one) {
  const state = { trimmed: `trimmed (${one.reason})`, sealed: "kept", active: "active" }[one.state];
  const many = one.count > 1 ? `${several(one.count, "segment")}, ` : "";
  return `${many}positions ${count(one.first)} to ${count(one.end)}, ${bytes(one.size)}, ${state}`;
}

/** All of it in one sentence. */
export function summary(entries) {
  const by = (state) => entries.filter((one) => one.state === state);
  const size = (found) => bytes(found.reduce((sum, one) => sum + one.logSize, 0));
  const [trimmed, sealed, active] = ["trimmed", "sealed", "active"].map(by);
  const reasons = new Map();
  for (const { truncationReason: reason } of trimmed) {
    reasons.set(reason, (reasons.get(reason) ?? 0) + 1);
  }
  const why = [...reasons].map(([reason, times]) => `${count(times)} by ${reason}`).join(", ");
  const parts = [`${several(sealed.length, "sealed segment")} kept (${size(sealed)})`];
  if (active.length) {
    parts.push(`1 active (${size(active)})`);
  }
  parts.push(trimmed.length ? `${count(trimmed.length)} trimmed (${size(trimmed)}: ${why})` : "none trimmed");
  return `${parts.join(", ")}.`;
}

/** Tell what the timeline shows, for who cannot see it. */
export function sayHistory(element, entries, hasMore) {
  say(element, entries.length ? summary(entries) + (hasMore ? " The oldest are not shown." : "") : "No message was merged yet.");
}
