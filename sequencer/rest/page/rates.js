// Rates from successive polls. Pure: whoever polls says when.

const KEPT = 90;

/** A counter's growth per second. What goes back was begun anew, and counts from there. */
export class Rate {
  #last = null;
  /** The newest ones, oldest first. */
  values = [];

  /** The rate since the call before; null for the first. */
  add(value, atMs) {
    const last = this.#last;
    if (last && atMs <= last.atMs) {
      return this.now;
    }
    this.#last = { value, atMs };
    if (!last || value < last.value) {
      return null;
    }
    this.values.push(((value - last.value) * 1000) / (atMs - last.atMs));
    this.values = this.values.slice(-KEPT);
    return this.now;
  }

  get now() {
    return this.values.length ? this.values[this.values.length - 1] : null;
  }
}

/** What many counters grew by, of which some end and others begin: one counter that only grows. */
export class Sum {
  #seen = null;
  total = 0;

  /** `counters`: values by key. One that is new counts whole, but for those of the first call. */
  add(counters) {
    if (this.#seen) {
      for (const [key, value] of counters) {
        this.total += Math.max(value - (this.#seen.get(key) ?? 0), 0);
      }
    }
    this.#seen = counters;
    return this.total;
  }
}
