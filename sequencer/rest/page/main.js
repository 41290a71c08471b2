// The status page: polls the node every two seconds. If a request fails, its section says so; only /status is
// required.

import { byId, note, say } from "./dom.js";
import { History, drawTimeline, sayHistory } from "./history.js";
import { Polling, ask } from "./poll.js";
import { Rate, Sum } from "./rates.js";
import * as sections from "./sections.js";
import { clock, moment } from "./words.js";

const SESSIONS_MAX = 2000;
const CLIENTS_MAX = 2000;
const HISTORY_ROUNDS = 5;

let cluster = null;
let history = new History();
let rates = null;
let round = 0;
let answeredMs = null;

/** One round; whether the node answered. */
async function look() {
  const atMs = performance.now();
  const [status, clients, found, holds, everywhere] = await Promise.allSettled([
    ask("status"),
    ask(`rt-clients?limit=${CLIENTS_MAX}`),
    ask(`sessions?limit=${SESSIONS_MAX}`),
    ask("holds"),
    ask("cluster-clients"),
  ]);
  if (status.status === "rejected") {
    return sayNoAnswer(status.reason);
  }
  const told = status.value;
  if (cluster !== `${told.cluster} ${told.epoch}`) {
    cluster = `${told.cluster} ${told.epoch}`;
    history = new History();
    rates = { merge: new Rate(), messages: new Rate(), ingest: new Rate(), pushed: new Sum() };
    round = 0;
  }
  const historyProblem = await lookAtHistory();
  sayAnswered();
  show(told, value(clients, []), value(found, []), value(holds, null), value(everywhere, null), atMs);
  sayProblem("history-note", historyProblem);
  sayProblem("sessions-note", found.reason ?? clients.reason ?? everywhere.reason);
  sayProblem("subscribers-note", clients.reason ?? holds.reason ?? everywhere.reason);
  return true;
}

async function lookAtHistory() {
  if (round % HISTORY_ROUNDS === 0) {
    try {
      await history.refresh(ask);
    } catch (error) {
      return error;
    }
  }
  round += 1;
  return null;
}

function value(settled, otherwise) {
  return settled.status === "fulfilled" ? settled.value : otherwise;
}

function show(status, clients, found, holds, everywhere, atMs) {
  const { node, committed } = status;
  const nowMs = Math.max(...[status.sequencedTime, ...status.members.map((one) => one.clock)].map((text) => moment(text) ?? 0));
  const pushed = clients.filter((one) => one.session !== null);
  const counters = new Map(pushed.map((one) => [`${one.certificate} ${one.session} ${one.connectTime}`, one.bytes]));
  rates.merge.add(committed.bytes, atMs);
  rates.messages.add(committed.position, atMs);
  rates.ingest.add(rates.pushed.add(counters), atMs);
  const { entries } = history;
  sections.showTitle(status);
  sections.showAlarms(status);
  sections.showOverview(status, rates);
  sections.showMembers(status);
  sayHistory(byId("history-note"), entries);
  drawTimeline(byId("timeline"), entries, nowMs);
  sections.showSegments(entries);
  sections.showPolicy(status);
  sections.showSessions(found, clients, found.length === SESSIONS_MAX, node.name, sections.whereabouts(everywhere, node.name));
  sections.showSubscribers(clients, holds, node.name, nowMs, sections.whereabouts(everywhere, node.name));
}

function sayProblem(id, error) {
  if (error) {
    note(id, `Request failed: ${error.message}.`);
  }
}

function sayAnswered() {
  answeredMs = Date.now();
  note("connection", "");
  document.body.dataset.stale = "false";
  const asOf = byId("as-of");
  say(asOf, clock(answeredMs));
  asOf.setAttribute("datetime", new Date(answeredMs).toISOString());
}

function sayNoAnswer(error) {
  const since = answeredMs === null ? "" : ` The page shows data of ${clock(answeredMs)}.`;
  const who = error.isAnswer ? "The node rejects the request for its status" : "The node does not answer";
  note("connection", `${who}: ${error.message}.${since} Retrying.`);
  document.body.dataset.stale = "true";
  const pill = byId("health");
  pill.dataset.level = "critical";
  say(pill, error.isAnswer ? "refused" : "no answer");
  document.title = `${pill.textContent} · rt`;
  return false;
}

const polling = new Polling(look);
byId("pause").addEventListener("click", ({ currentTarget }) => {
  polling.isPaused = !polling.isPaused;
  say(currentTarget, polling.isPaused ? "Resume updates" : "Pause updates");
});
polling.start();
