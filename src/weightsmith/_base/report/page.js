"use strict";
(() => {
  const { attach, attachCurves, written, said } = weightsmithCharts;
  const page = JSON.parse(document.getElementById("content").textContent);
  const make = (tag, properties = {}, ...children) => { const found = Object.assign(document.createElement(tag), properties); found.append(...children); return found; };

  // ---- Tables: columns as `html._column` packs them. Of a long one only the rows in sight are in the document.
  function unpacked(column, rows) {
    if (Array.isArray(column)) return column;
    if ("same" in column) return Array(rows).fill(column.same);
    if ("of" in column) return column.at.map(i => column.of[i]);
    let last = "";
    return column.ends.map((end, i) => (last = last.slice(0, column.kept[i]) + end));
  }
  class Rows {
    constructor(found) {
      this.found = found;
      this.columns = found.columns.map(([name, unit]) => ({ name, unit }));
      this.data = found.data.map(column => unpacked(column, found.rows));
      this.places = found.places ? unpacked(found.places, found.rows) : [];
      this.order = [...Array(found.rows).keys()];
      this.shown = this.order;
    }
    text(row, i) { return written(this.data[i][row], this.columns[i].unit); }
    get words() {
      const texts = this.data.filter((_, i) => this.columns[i].unit === "text");
      return this.lower ??= this.data[0].map((_, row) => texts.map(column => column[row] ?? "").join(" ").toLowerCase());
    }
  }
  const ROW = 28, EXTRA = 10;
  const tables = new Map();
  page.tables.forEach(found => {
    const section = document.getElementById(found.id), own = new Rows(found), body = section.querySelector("tbody");
    const box = section.querySelector(".rows"), heads = [...section.querySelectorAll("thead th")], input = section.querySelector("input");
    const status = section.querySelector(".status"), all = [...own.order];
    const line = row => make("tr", {}, ...own.columns.map(({ unit }, i) => make("td", { className: unit === "text" ? "" : "n", textContent: own.text(row, i) })));
    const gap = rows => { const found = make("tr", { className: "gap" }, make("td", { colSpan: heads.length })); found.firstChild.style.height = `${rows * ROW}px`; found.setAttribute("aria-hidden", "true"); return found; };
    let from = -1, until = -1;
    const draw = (every = false) => {
      const count = own.shown.length, window = count > 150 && !every;
      const first = window ? Math.max(0, Math.floor(box.scrollTop / ROW) - EXTRA) : 0;
      const last = window ? Math.min(count, first + Math.ceil((box.clientHeight || 544) / ROW) + 2 * EXTRA) : count;
      if (first === from && last === until) return;
      from = first, until = last;
      body.replaceChildren(...(first ? [gap(first)] : []), ...own.shown.slice(first, last).map(line), ...(last < count ? [gap(count - last)] : []));
    };
    const redraw = note => { from = -1; box.scrollTop = 0; draw(); status.textContent = note ?? (own.shown.length < own.order.length ? `${own.shown.length.toLocaleString("en-US")} of ${own.order.length.toLocaleString("en-US")} rows` : ""); };
    own.show = (wanted, note) => { own.shown = own.order.filter(wanted); section.querySelector("details").open = true; redraw(note); };
    own.print = () => { if (own.order.length <= 60) draw(true); };
    box.addEventListener("scroll", () => draw(), { passive: true });
    section.querySelector("details").addEventListener("toggle", () => { from = -1; draw(); });
    input?.addEventListener("input", () => { const text = input.value.toLowerCase(); own.shown = own.order.filter(row => own.words[row].includes(text)); redraw(); });
    heads.forEach((head, i) => head.querySelector("button").addEventListener("click", () => {
      const number = own.columns[i].unit !== "text", down = head.getAttribute("aria-sort") === (number ? "descending" : "ascending");
      const sign = number !== down ? -1 : 1, data = own.data[i];
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const last = row => data[row] === null || (number && typeof data[row] === "string"), places = new Map(all.map((row, k) => [row, k]));
      const compare = number ? (a, b) => data[a] - data[b] : (a, b) => data[a].localeCompare(data[b], "en", { numeric: true });
      const order = (a, b) => last(a) || last(b) ? last(a) - last(b) : sign * compare(a, b);  // marks follow the numbers
      own.order.sort((a, b) => order(a, b) || places.get(a) - places.get(b));
      const kept = new Set(own.shown);
      own.shown = own.order.filter(row => kept.has(row));
      redraw();
    }));
    section.querySelector("button.csv").addEventListener("click", () => {
      const cell = value => { const text = value === null ? "" : String(value); return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
      const lines = [own.columns.map(({ name }) => name), ...own.shown.map(row => own.data.map(column => column[row]))];
      save(lines.map(each => each.map(cell).join(",")).join("\n") + "\n", "text/csv", `${section.id}.csv`);
    });
    draw();
    if (found.name) tables.set(found.name, own);
  });

  function save(text, type, name) {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  document.querySelector("button.json").addEventListener("click", () => {
    const plain = page.tables.map(({ title, columns, data, rows }) => {
      const values = data.map(column => unpacked(column, rows));
      return { title, columns: columns.map(([name, unit]) => ({ name, unit })), rows: [...Array(rows).keys()].map(row => values.map(column => column[row])) };
    });
    save(JSON.stringify({ ...page, tables: plain }), "application/json", "report.json");
  });

  // ---- The drawer: what a cell of a map is made of.
  const drawer = make("aside", { className: "drawer", hidden: true, tabIndex: -1 });
  drawer.setAttribute("role", "dialog");
  document.body.append(drawer);
  let opener = null;
  const close = () => { drawer.hidden = true; opener?.focus(); };
  document.addEventListener("keydown", event => { if (event.key === "Escape" && !drawer.hidden) close(); });
  const svg = (tag, attributes, ...children) => {
    const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
    found.append(...children);
    return found;
  };
  const label = (x, y, text, anchor = "start") => svg("text", { x, y, "text-anchor": anchor, "font-size": 11, fill: "currentColor" }, text);

  // Packed by `html._pictures`: three characters for the logarithm of a singular value over the first; one for the height of a bar.
  const decode = (text, i) => [0, 1, 2].reduce((n, k) => n * 90 + text.charCodeAt(3 * i + k) - 35, 0);
  function spectrum(first, text) {
    const values = [first, ...Array.from({ length: text.length / 3 }, (_, i) => first * Math.exp(-decode(text, i) / 728999 * Math.log(1e8)))];
    const low = Math.log(values.at(-1)), high = Math.log(first), x = i => 56 + i * (330 / Math.max(1, values.length - 1)), y = v => 12 + 80 * (high > low ? (high - Math.log(v)) / (high - low) : .5);
    const points = values.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`);
    return svg("svg", { viewBox: "0 0 400 116", role: "img", "aria-label": `${values.length} singular values, from ${written(first, "number")} to ${written(values.at(-1), "number")}` },
      svg("polyline", { points: points.join(" "), fill: "none", stroke: "var(--link)", "stroke-width": 1.6 }),
      ...values.map((v, i) => svg("circle", { cx: x(i), cy: y(v), r: 2.6, fill: "var(--link)" }, svg("title", {}, `${i + 1}: ${written(v, "number")}`))),
      label(52, 16, written(first, "number"), "end"), label(52, 96, written(values.at(-1), "number"), "end"), label(56, 112, "1"), label(386, 112, `${values.length}`, "end"));
  }
  function histogram(lowest, text) {
    const bars = [...text].map(c => c.charCodeAt(0) - 35), width = 340 / bars.length;
    const power = k => `2${[...String(k)].map(c => c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]).join("")}`;
    return svg("svg", { viewBox: "0 0 400 106", role: "img", "aria-label": `elements by magnitude, from ${power(lowest)} to ${power(lowest + bars.length)}` },
      ...bars.map((bar, i) => svg("rect", { x: 30 + i * width, y: 86 - bar * .85, width: Math.max(1, width - 1.5), height: Math.max(bar ? 1 : 0, bar * .85), fill: "var(--link)" })),
      svg("path", { d: "M30 86.5H370", stroke: "var(--soft)" }), label(30, 101, power(lowest)), label(370, 101, power(lowest + bars.length), "end"));
  }

  const SHOWN = 200;
  function open(chart, row, column, inner, cell) {
    const place = `${chart.prefix}${chart.columns[column]}`, part = chart.rows[row], own = tables.get(chart.detail);
    const values = make("dl");
    for (const other of page.charts) {
      if (other.kind !== "heat" || other.prefix !== chart.prefix) continue;
      const fold = inner && other.folds.find(one => one.row === part), i = inner ? fold ? fold.rows.indexOf(inner) : -1 : other.rows.indexOf(part);
      const value = i < 0 ? null : (fold ? fold.values : other.values)[i][other.columns.indexOf(chart.columns[column])] ?? null;
      if (value !== null) values.append(make("dt", { textContent: other.title }), make("dd", { textContent: said(value, other) }));
    }
    const title = `${chart.axis} ${chart.columns[column]}, ${inner ? `${inner} of ` : ""}${part}`, key = `${place}\n${part}`;
    const numbers = name => `expert ${(name.slice(place.length + 1).match(/\d+/g) ?? []).join(".")}`;
    const found = own ? [...Array(own.found.rows).keys()].filter(i => own.places[i] === key && (!inner || numbers(own.data[0][i]) === inner)) : [];
    const inside = i => {
      const list = make("dl"), parts = [list], pictures = own.found.pictures;
      own.columns.slice(1).forEach(({ name }, k) => { if (own.data[k + 1][i] !== null) list.append(make("dt", { textContent: name }), make("dd", { textContent: own.text(i, k + 1) })); });
      if (pictures?.histograms[i]) parts.push(make("small", { textContent: `${pictures.what} by magnitude, from a sample` }), histogram(pictures.lowest[i], pictures.histograms[i]));
      if (pictures?.first[i]) parts.push(make("small", { textContent: "leading singular values" }), spectrum(pictures.first[i], pictures.values[i]));
      return parts;
    };
    const items = found.slice(0, SHOWN).map((i, k) => {
      const item = make("details", {}, make("summary", { textContent: own.data[0][i] }));
      item.addEventListener("toggle", () => { if (item.open && item.children.length === 1) item.append(...inside(i)); });
      item.open = k === 0;
      return item;
    });
    const head = make("header", {}, make("h2", { textContent: title }), make("button", { type: "button", textContent: "Close", onclick: close }));
    const table = make("button", { type: "button", textContent: "Show in the table", onclick: () => {
      const wanted = new Set(found);
      close();
      own.show(i => wanted.has(i), `${title}; search to see others`);
      document.getElementById(own.found.id).scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    } });
    const more = found.length > SHOWN ? [make("p", { className: "about", textContent: `and ${(found.length - SHOWN).toLocaleString("en-US")} more in the table` })] : [];
    drawer.replaceChildren(head, values, ...items, ...more, ...(found.length ? [table] : []));
    drawer.setAttribute("aria-label", title);
    opener = cell;
    drawer.hidden = false;
    drawer.scrollTop = 0;
    drawer.focus();
  }
  for (const figure of document.querySelectorAll("figure.heat")) attach(figure, page.charts[figure.dataset.chart], open);
  for (const section of document.querySelectorAll("section.curves[data-chart]")) attachCurves(section, page.charts[section.dataset.chart]);
  addEventListener("beforeprint", () => {
    for (const own of document.querySelectorAll("section > details")) if (own.querySelectorAll("tr").length <= 61) own.open = true;
  });
})();
