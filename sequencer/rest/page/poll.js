// Asking the node, again and again: how often, and what an answer is that does not come.

export const POLL_MS = 2000;
export const HIDDEN_MS = 30000;
export const FAILING_MS_MAX = 30000;
const ANSWER_MS_MAX = 8000;
const REST = 4;

/**
 * How long to wait before the next round. Pure. A node that does not answer is asked less and less, a hidden
 * page asks seldom, and one whose answers take long gives the node four times as long to rest.
 */
export function pauseMs({ failures, isHidden, tookMs }) {
  const due = failures
    ? Math.min(POLL_MS * 2 ** failures, FAILING_MS_MAX)
    : Math.max(POLL_MS, REST * tookMs);
  return isHidden ? Math.max(due, HIDDEN_MS) : due;
}

/** What a path answers. An `Error` says what is wrong: `isAnswer` if the node said so, and its `status`. */
export async function ask(path) {
  let answer;
  let body;
  try {
    answer = await fetch(path, { signal: AbortSignal.timeout(ANSWER_MS_MAX), cache: "no-store" });
    body = await answer.json();
  } catch (error) {
    throw Object.assign(new Error(silence(error, answer)), { isAnswer: false });
  }
  if (!answer.ok) {
    const told = [body.what ?? "no reason is told", body.hint].filter(Boolean).join(". ");
    throw Object.assign(new Error(`${told} (${answer.status})`), { isAnswer: true, status: answer.status });
  }
  return body;
}

function silence(error, answer) {
  if (error.name === "TimeoutError") {
    return `nothing came within ${ANSWER_MS_MAX / 1000} s`;
  }
  return answer ? `the answer broke off (${answer.status})` : "it cannot be reached";
}

/** Runs `round` for ever, each a promise of whether the node answered; `isPaused` only until `resume`. */
export class Polling {
  #round;
  #failures = 0;
  #timer = null;
  #isRunning = false;
  #isPaused = false;

  constructor(round) {
    this.#round = round;
    document.addEventListener("visibilitychange", () => document.hidden || this.#soon());
    window.addEventListener("online", () => this.#soon());
  }

  get isPaused() {
    return this.#isPaused;
  }

  set isPaused(value) {
    this.#isPaused = value;
    clearTimeout(this.#timer);
    if (!value) {
      this.#soon();
    }
  }

  start() {
    this.#soon();
  }

  #soon() {
    if (this.#isRunning || this.#isPaused) {
      return;
    }
    clearTimeout(this.#timer);
    this.#run();
  }

  async #run() {
    this.#isRunning = true;
    const begunMs = performance.now();
    let isGood = false;
    try {
      isGood = await this.#round();
    } catch (error) {
      console.error(error);
    }
    this.#isRunning = false;
    this.#failures = isGood ? 0 : this.#failures + 1;
    const tookMs = performance.now() - begunMs;
    if (!this.#isPaused) {
      const dueMs = pauseMs({ failures: this.#failures, isHidden: document.hidden, tookMs });
      this.#timer = setTimeout(() => this.#run(), dueMs);
    }
  }
}
