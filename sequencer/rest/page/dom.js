// Making and changing elements. The law: what anybody sent becomes text, by `textContent`; never markup.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  return document.getElementById(id);
}

/** An element with attributes; `text` is its text. */
export function make(name, attributes = {}, text = null) {
  const made = document.createElement(name);
  set(made, attributes);
  if (text !== null) {
    made.textContent = text;
  }
  return made;
}

/** The same, of SVG. */
export function draw(name, attributes = {}) {
  const made = document.createElementNS(SVG, name);
  set(made, attributes);
  return made;
}

function set(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, value);
  }
}

/** Change the text only if it differs, so that selections and screen readers are left alone. */
export function say(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** A note that is there only while it says something. */
export function note(id, text) {
  const element = byId(id);
  say(element, text);
  element.hidden = !text;
}

/**
 * A bar of `share` (0 to 1), with a mark at `mark` if that is not null; what it says stands in `label`.
 * `level`: ok, warning or critical.
 */
export function bar(share, label, { mark = null, level = "ok" } = {}) {
  const within = Math.min(Math.max(share, 0), 1);
  const made = make("div", {
    class: "bar",
    "data-level": level,
    role: "meter",
    "aria-label": label,
    "aria-valuemin": 0,
    "aria-valuemax": 100,
    "aria-valuenow": Math.round(within * 100),
  });
  const filled = make("span", { class: "fill" });
  filled.style.inlineSize = `${within * 100}%`;
  made.append(filled);
  if (mark !== null) {
    const line = make("span", { class: "mark" });
    line.style.insetInlineStart = `${Math.min(mark, 1) * 100}%`;
    made.append(line);
  }
  return made;
}

/** A line of values, oldest first, scaled to the greatest; empty for fewer than two. */
export function sparkline(values) {
  const svg = draw("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length > 1) {
    const most = Math.max(...values, 1e-9);
    const step = 100 / (values.length - 1);
    const points = values.map((value, index) => `${(index * step).toFixed(1)},${(23 - (22 * value) / most).toFixed(1)}`);
    svg.append(draw("polygon", { points: `0,24 ${points.join(" ")} 100,24` }));
    svg.append(draw("polyline", { points: points.join(" ") }));
  }
  return svg;
}

/**
 * A table that is changed in place. `columns`: {label, isNumber?, cell(row)}; a cell is text, an element, or
 * {text, below}. `key(row)` tells rows apart, and the first column names them. Roles are said outright, for
 * on a narrow screen the rows are laid out as cards.
 */
export class Table {
  #columns;
  #key;
  #body;
  #rows = new Map();
  #empty;

  constructor(place, titleId, columns, key, empty) {
    this.#columns = columns;
    this.#key = key;
    this.#empty = make("p", { class: "muted" }, empty);
    const table = make("table", { role: "table", "aria-labelledby": titleId });
    const head = make("thead", { role: "rowgroup" });
    const row = make("tr", { role: "row" });
    for (const { label, isNumber } of columns) {
      row.append(make("th", { role: "columnheader", scope: "col", ...(isNumber && { class: "number" }) }, label));
    }
    head.append(row);
    this.#body = make("tbody", { role: "rowgroup" });
    table.append(head, this.#body);
    place.append(table, this.#empty);
    table.hidden = true;
    this.table = table;
  }

  show(rows) {
    const before = this.#rows;
    this.#rows = new Map();
    rows.forEach((row, index) => {
      const key = this.#key(row);
      const line = before.get(key) ?? this.#line();
      before.delete(key);
      this.#rows.set(key, line);
      this.#columns.forEach((column, at) => fill(line.children[at], column.cell(row)));
      if (this.#body.children[index] !== line) {
        this.#body.insertBefore(line, this.#body.children[index] ?? null);
      }
    });
    for (const line of before.values()) {
      line.remove();
    }
    this.table.hidden = rows.length === 0;
    this.#empty.hidden = rows.length > 0;
  }

  #line() {
    const line = make("tr", { role: "row" });
    this.#columns.forEach(({ label, isNumber }, at) => {
      const attributes = { "data-label": label, ...(isNumber && { class: "number" }) };
      line.append(
        at === 0
          ? make("th", { ...attributes, role: "rowheader", scope: "row" })
          : make("td", { ...attributes, role: "cell" }),
      );
    });
    return line;
  }
}

/** Put text, an element, or {text, below} into a cell. */
export function fill(cell, content) {
  if (content instanceof Element) {
    cell.replaceChildren(content);
  } else if (typeof content === "object") {
    if (cell.children.length !== 2 || cell.firstElementChild.className !== "main") {
      cell.replaceChildren(make("span", { class: "main" }), make("span", { class: "below" }));
    }
    say(cell.firstElementChild, content.text);
    const below = cell.lastElementChild;
    if (content.below instanceof Element) {
      below.replaceChildren(content.below);
    } else {
      say(below, content.below ?? "");
    }
    below.hidden = !content.below;
  } else {
    say(cell, content);
  }
}
