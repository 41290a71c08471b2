// The sections of the page; each function shows one response of the node.

import { Table, bar, byId, fill, make, note, say, sparkline } from "./dom.js";
import { bytes, clock, count, day, moment, percent, several, span } from "./words.js";

const ROWS_MAX = 100;
const STALE_S = 5;
const LEVELS = ["critical", "warning"];

const behind = (messages) => (messages > 0 ? several(messages, "message") : "none");
const late = ({ lag, lagSeconds }) => ({ text: behind(lag), below: lagSeconds >= 1 ? `for ${span(lagSeconds)}` : "" });
const perSecond = (rate, words) => (rate === null ? "…" : `${words(rate)}/s`);

/** The level of an alarm's severity, or "info". */
function levelOf(severity) {
  return LEVELS.includes(severity) ? severity : "info";
}

// Cluster

export function showTitle(status) {
  say(byId("stream"), status.stream);
  const { node } = status;
  const cluster = status.cluster ? `cluster ${status.cluster.slice(0, 8)}, epoch ${status.epoch}` : "no cluster yet";
  say(byId("about"), `Reported by node ${node.name} (rt ${node.version}), ${cluster}.`);
}

/** Alarms, and why this node is not ready. */
export function showAlarms(status) {
  const { alarms, node } = status;
  const list = byId("alarms");
  const known = new Map([...list.children].map((item) => [item.dataset.key, item]));
  alarms.forEach(({ name, severity, text }, index) => {
    const key = JSON.stringify([name, severity, text]);
    const item = known.get(key) ?? alarmItem(key, severity, name, text);
    known.delete(key);
    if (list.children[index] !== item) {
      list.insertBefore(item, list.children[index] ?? null);
    }
  });
  for (const item of known.values()) {
    item.remove();
  }
  const waits = node.obstacles.length ? ` ${node.name} is not ready: ${node.obstacles.join("; ")}.` : "";
  say(byId("alarms-note"), ((alarms.length ? "" : "No alarms.") + waits).trim());
  showHealth(alarms, node.obstacles);
}

function alarmItem(key, severity, name, text) {
  const item = make("li", { "data-level": levelOf(severity) });
  item.dataset.key = key;
  item.append(make("strong", { class: "severity" }, severity), make("span", { class: "name" }, name), make("span", {}, text));
  return item;
}

function showHealth(alarms, obstacles) {
  const pill = byId("health");
  const level = LEVELS.find((one) => alarms.some(({ severity }) => severity === one));
  const words = alarms.length ? several(alarms.length, "alarm") : obstacles.length ? "not ready" : "healthy";
  pill.dataset.level = level ?? (alarms.length || obstacles.length ? "warning" : "ok");
  say(pill, words);
  document.title = `${alarms.length ? `(${alarms.length}) ` : ""}${byId("stream").textContent}: ${words} · rt`;
}

const tiles = new Map();

function tile(name, text, below, values = null) {
  if (!tiles.has(name)) {
    const place = make("div", { class: "tile" });
    place.append(make("dt", {}, name), make("dd", {}));
    byId("overview").append(place);
    tiles.set(name, place);
  }
  const place = tiles.get(name);
  fill(place.querySelector("dd"), { text, below });
  if (values) {
    place.querySelector(".spark")?.remove();
    place.append(sparkline(values));
  }
}

export function showOverview(status, { merge, messages, ingest }) {
  const { retention, committed, leader, term, node } = status;
  tile("Leader", leader || "none known", `term ${term}`);
  tile("Next position", count(committed.position), `instruction ${count(committed.instruction)}`);
  tile("Merged", perSecond(merge.now, bytes), perSecond(messages.now, (rate) => several(rate, "message")), merge.values);
  tile(`Ingest at ${node.name}`, perSecond(ingest.now, bytes), "from publishers", ingest.values);
  tile("Kept", bytes(retention.bytes), `${several(retention.segments, "segment")} from position ${count(retention.logStart)}`);
  const waits = node.waitsFor ? `waits for ${node.waitsFor}` : node.lagMessages ? bytes(node.lagBytes) : "all merged here";
  tile(`Lag of ${node.name}`, behind(node.lagMessages), waits);
}

// Nodes

let members = null;

export function showMembers(status) {
  const policy = status.configuration.retentionDiskPercent / 100;
  members ??= new Table(byId("members"), "members-title", [
    { label: "Node", cell: ({ one }) => ({ text: one.name, below: one.address }) },
    { label: "Role", cell: ({ one }) => role(one) },
    { label: "Phase", cell: ({ one }) => step(one) },
    { label: "Merged to", isNumber: true, cell: ({ one }) => count(one.merged.position) },
    { label: "Lag", isNumber: true, cell: ({ one, committed }) => lagOf(one, committed) },
    { label: "Disk used", cell: ({ one, mark }) => disk(one, mark) },
  ], ({ one }) => one.name, "No member is known yet.");
  members.show(status.members.map((one) => ({ one, committed: status.committed, mark: policy || null })));
  const away = status.members.filter((one) => !one.isConnected).length;
  note("members-note", away ? `${away} of ${status.members.length} are not connected to ${status.node.name}.` : "");
}

function role(one) {
  const text = one.isLeader ? "leader" : one.isConnected ? "follower" : "unreachable";
  return { text, below: one.isCounted ? "" : "its disk is not admitted yet" };
}

function step(one) {
  const found = phase(one);
  if (one.reportAgeSeconds < STALE_S) {
    return found;
  }
  return { text: found.text, below: `as reported ${span(one.reportAgeSeconds)} ago` };
}

function phase(one) {
  if (one.stopped) {
    return { text: "stopped", below: one.stopped };
  }
  if (!one.phaseTotal) {
    return { text: one.phase, below: one.phaseDone ? count(one.phaseDone) : "" };
  }
  const share = one.phaseDone / one.phaseTotal;
  const below = bar(share, `${one.name}: ${one.phase}`, { level: "info" });
  return { text: `${one.phase} ${percent(Math.min(share, 1))}`, below };
}

function lagOf(one, committed) {
  const messages = Math.max(committed.position - one.merged.position, 0);
  return { text: behind(messages), below: messages ? bytes(Math.max(committed.bytes - one.merged.bytes, 0)) : "" };
}

function disk(one, mark) {
  if (!one.diskBytes) {
    return "not reported";
  }
  const share = 1 - one.diskFreeBytes / one.diskBytes;
  const level = mark !== null && share >= mark ? "critical" : mark !== null && share >= 0.9 * mark ? "warning" : "ok";
  const retentionBytes = mark === null ? "" : `, policy ${percent(mark + 1e-9)}`;
  const text = `${percent(share)} of ${bytes(one.diskBytes)}${retentionBytes}`;
  return { text, below: bar(share, `Disk of ${one.name}: ${text}`, { mark, level }) };
}

// Merged log

let segments = null;

export function showSegments(entries) {
  segments ??= new Table(byId("segments"), "history-title", [
    { label: "Segment", cell: (one) => one.logPath },
    { label: "Positions", isNumber: true, cell: (one) => `${count(one.logPos)} – ${count(one.logEnd)}` },
    { label: "Size", isNumber: true, cell: (one) => bytes(one.logSize) },
    { label: "Sealed", cell: (one) => (one.logAge < 0 ? "not yet" : `${span(one.logAge * 60)} ago`) },
    { label: "State", cell: segmentState },
  ], (one) => one.logPath, "No message has been merged yet.");
  segments.show(entries.slice(-20).reverse());
}

function segmentState(one) {
  const words = { trimmed: `trimmed by ${one.truncationReason}`, sealed: "kept", active: "active" };
  return words[one.state] ?? one.state;
}

/** Policy against use. */
export function showPolicy(status) {
  const { retention, configuration, members: nodes } = status;
  const { retentionMinutes, retentionBytes, retentionDiskPercent, holdBytesMax, rollBytes, rollMinutes } = configuration;
  const { oldestMinutes, holdBytes } = retention;
  const used = nodes.filter((one) => one.diskBytes).map((one) => 1 - one.diskFreeBytes / one.diskBytes);
  const fullest = Math.max(0, ...used);
  const oldest = oldestMinutes < 0 ? "nothing is sealed" : `the oldest was sealed ${span(oldestMinutes * 60)} ago`;
  const tight = (share) => (share > 1 ? "critical" : share >= 0.9 ? "warning" : "ok");
  const rows = [
    retentionMinutes
      ? ["By time", `after ${span(retentionMinutes * 60)}; ${oldest}`, Math.max(oldestMinutes, 0) / retentionMinutes]
      : ["By time", `never; ${oldest}`],
    retentionBytes
      ? ["By size", `${bytes(retention.bytes)} of ${bytes(retentionBytes)}`, retention.bytes / retentionBytes]
      : ["By size", `never; ${bytes(retention.bytes)} are kept`],
    retentionDiskPercent
      ? ["By disk", `above ${retentionDiskPercent} %; the fullest disk is at ${percent(fullest)}`, (100 * fullest) / retentionDiskPercent, tight]
      : ["By disk", `never; the fullest disk is at ${percent(fullest)}`],
    holdBytesMax
      ? ["Holds", `${several(retention.holds, "hold")}, the furthest ${bytes(holdBytes)} behind; ${bytes(holdBytesMax)} may be kept for holds alone`]
      : ["Holds", "ignored"],
    ["Segments end", `at ${bytes(rollBytes)}${rollMinutes ? `, or after ${span(rollMinutes * 60)}` : ""}`],
    ["Last trim", retention.lastTrimTime ? `by ${retention.lastTrimReason}, ${day(moment(retention.lastTrimTime))}` : "none"],
  ];
  byId("policy").replaceChildren(...rows.flatMap(policyRow));
}

/** Full use of age and size is normal; a full disk is not (`levelOfShare`). */
function policyRow([name, text, share, levelOfShare]) {
  const told = make("dd", {}, text);
  if (share !== undefined) {
    told.append(bar(share, `${name}: ${text}`, { level: levelOfShare?.(share) ?? "info" }));
  }
  return [make("dt", {}, name), told];
}

// Clients

/** Nodes other than `node` by session and by subscriber, and what is not known of them. Pure. */
export function whereabouts(everywhere, node) {
  const found = { sessions: new Map(), subscribers: new Map(), gaps: "" };
  for (const one of everywhere?.clients ?? []) {
    if (one.node !== node && (one.session !== null || one.kind === "subscriber")) {
      const [map, key] = one.session === null ? [found.subscribers, one.name] : [found.sessions, one.session];
      map.set(key, new Set(map.get(key)).add(one.node));
    }
  }
  if (everywhere?.unknown.length) {
    found.gaps += ` Not known now: the clients of ${everywhere.unknown.join(", ")}.`;
  }
  if (everywhere?.leftOut) {
    found.gaps += ` ${several(everywhere.leftOut, "client")} of nodes with more than 200 are not known to the others.`;
  }
  return found;
}

/** "connected to n2, n3"; `otherwise` if no node reports it. */
function connectedTo(nodes, otherwise) {
  return nodes ? `connected to ${[...nodes].join(", ")}` : otherwise;
}

let sessions = null;

export function showSessions(found, clients, hasMore, node, where) {
  const pushing = new Map(clients.filter((one) => one.session !== null && one.active).map((one) => [one.session, one]));
  const rows = found.map((one) => ({ one, client: one.isConnected ? pushing.get(one.name) : undefined }));
  const lag = ({ client }) => client?.lag ?? -1;
  rows.sort((a, b) => lag(b) - lag(a) || (a.one.name < b.one.name ? -1 : a.one.name > b.one.name ? 1 : a.one.id - b.one.id));
  sessions ??= new Table(byId("sessions"), "sessions-title", [
    { label: "Session", cell: ({ one }) => ({ text: one.name, below: one.dedupId === null ? `id ${one.id}` : `id ${one.id}, dedup ${one.dedupId}` }) },
    { label: "State", cell: ({ one }) => sessionState(one) },
    { label: "Publisher", cell: ({ one, client }) => publisherOf(one, client, where) },
    { label: "Merged to", isNumber: true, cell: ({ one }) => mergedTo(one) },
    { label: "Lag", isNumber: true, cell: ({ client }) => (client ? late(client) : "–") },
    { label: "Rate", isNumber: true, cell: ({ client }) => (client ? perSecond(client.bytesPerSecond, bytes) : "–") },
  ], ({ one }) => one.id, "No publisher has connected yet.");
  sessions.show(rows.slice(0, ROWS_MAX));
  const more = rows.length > ROWS_MAX || hasMore ? ` The ${Math.min(ROWS_MAX, rows.length)} with the largest lag are shown.` : "";
  const total = `${hasMore ? "More than " : ""}${several(found.length, "session")}, ${count(pushing.size)} connected to ${node}.`;
  note("sessions-note", `${total} Lag: messages received by ${node} and not merged yet.${more}${where.gaps}`);
}

function publisherOf(session, client, where) {
  const others = session.isSuperseded ? undefined : where.sessions.get(session.name);
  if (!client) {
    return connectedTo(others, "not connected");
  }
  return { text: others ? `connected, also to ${[...others].join(", ")}` : "connected", below: client.address };
}

function sessionState(one) {
  const [run] = one.runs;
  if (!run) {
    return one.isSuperseded ? "superseded" : "completely merged";
  }
  const words = run.end ? "closed" : run.isFenced ? "fenced" : "open";
  const waits = one.waitsFor === null ? "" : `, waits for id ${one.waitsFor}`;
  return { text: words + waits, below: one.isSuperseded ? "superseded" : "" };
}

function mergedTo(one) {
  const [run] = one.runs;
  if (one.consumed) {
    return { text: count(one.consumed.number), below: run ? `run ${run.runNumber}` : "" };
  }
  return one.lastMergedRun < 0 ? "nothing" : { text: "all", below: `run ${one.lastMergedRun}` };
}

let subscribers = null;

/** Pull clients except nodes, and holds of subscribers that are not connected here. */
export function showSubscribers(clients, holds, node, nowMs, where) {
  const held = new Map((holds ?? []).map((one) => [one.name, one]));
  const pulling = clients.filter((one) => one.session === null && one.kind !== "node");
  const rows = pulling.map((one) => ({ key: `${one.certificate} ${one.address} ${one.connectTime}`, name: one.name, client: one, hold: one.kind === "subscriber" ? held.get(one.name) : undefined }));
  const seen = new Set(rows.filter(({ client }) => client.active).map(({ name }) => name));
  for (const [name, hold] of held) {
    if (!rows.some((row) => row.hold === hold)) {
      rows.push({ key: `hold ${name}`, name, client: null, hold });
    }
  }
  for (const name of where.subscribers.keys()) {
    if (!rows.some((row) => row.name === name)) {
      rows.push({ key: `elsewhere ${name}`, name, client: null, hold: undefined });
    }
  }
  const lag = ({ client, hold }) => (client?.active ? client.lag : (hold?.lag ?? -1));
  rows.sort((a, b) => (b.client?.active ?? false) - (a.client?.active ?? false) || lag(b) - lag(a));
  subscribers ??= new Table(byId("subscribers"), "subscribers-title", [
    { label: "Subscriber", cell: ({ name, client }) => ({ text: name, below: client?.address ?? "" }) },
    { label: "Connection", cell: ({ name, client }) => connection(client, nowMs, where.subscribers.get(name)) },
    { label: "Position", isNumber: true, cell: ({ client, hold }) => position(client ?? hold) },
    { label: "Lag", isNumber: true, cell: ({ client, hold }) => (client ? late(client) : hold ? behind(hold.lag) : "–") },
    { label: "Rate", isNumber: true, cell: ({ client }) => (client?.active ? perSecond(client.bytesPerSecond, bytes) : "–") },
    { label: "Held", isNumber: true, cell: ({ hold }) => heldBack(hold) },
  ], ({ key }) => key, "No client pulls from this node, and there are no holds.");
  subscribers.show(rows.slice(0, ROWS_MAX));
  const more = rows.length > ROWS_MAX ? ` ${count(rows.length - ROWS_MAX)} more are not shown.` : "";
  note("subscribers-note", `${count(seen.size)} connected to ${node}. Lag and rate are those at ${node}.${more}${where.gaps}`);
}

function position(told) {
  return told ? count(told.position) : "–";
}

function heldBack(hold) {
  if (!hold) {
    return "–";
  }
  const below = hold.isOverridden ? "partly trimmed" : `from ${count(hold.position)}`;
  return { text: bytes(hold.bytes), below };
}

function connection(client, nowMs, others) {
  if (!client) {
    return connectedTo(others, "not connected");
  }
  if (client.active) {
    return { text: "connected", below: `since ${clock(moment(client.connectTime))}` };
  }
  return { text: connectedTo(others, "not connected"), below: `left this node ${span((nowMs - moment(client.disconnectTime)) / 1000)} ago` };
}
