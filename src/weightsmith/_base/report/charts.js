// Heat maps of a page: the value at the pointer, at a tap and by keyboard; experts that unfold. `weightsmithCharts.attach` takes the
// figures of `grid()` and their JSON (`HeatMap.to_json()`); it loads nothing and needs nothing else.
"use strict";
const weightsmithCharts = (() => {
  const MARKS = { unchanged: "no element differs", none: "not applicable", full: "full rank", high: "rank above 64, or not told from the rounding",
    nan: "contains NaN", inf: "contains infinities", "nan-inf": "contains NaN and infinities", new: "zero before, and not after", undefined: "undefined" };
  const WORDS = { unchanged: "same", none: "-", full: "full", high: "high", nan: "NaN", inf: "inf", "nan-inf": "NaN+inf", new: "new", undefined: "?" };
  const STEPS = 25;

  // Numbers as `values.written` writes them.
  const exponent = (value, digits) => value.toExponential(digits).replace(/e([+-])(\d)$/, "e$10$2");
  function digits(value, n) {
    const size = Math.abs(value);
    if (!value) return "0";
    if (size >= 1e5 || size < 1e-4 && Number(size.toPrecision(n)) < 1e-4) return exponent(value, n - 1);
    return size >= 10 ** (n - 1) ? value.toFixed(0) : value.toPrecision(n);
  }
  function bytes(value) {
    if (value < 1000) return `${value.toFixed(0)} bytes`;
    for (const unit of ["kB", "MB", "GB"]) {
      value /= 1000;
      if (value < 999.5) return `${value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${unit}`;
    }
    return `${(value / 1000).toFixed(2)} TB`;
  }
  function written(value, unit) {
    if (value === null || value === undefined) return "-";
    if (typeof value === "string") return unit === "text" ? value : WORDS[value] ?? value;
    if (unit === "count") return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
    if (unit === "bytes") return bytes(value);
    if (unit === "share") return `${digits(100 * value, 3)}%`;
    if (unit === "cosine") {
      const size = Math.abs(value);
      if (size > 1 - 5e-6) return size > 1 - 1e-12 ? (value > 0 ? "1" : "-1") : value > 0 ? "> 0.99999" : "< -0.99999";
      return value.toFixed(5);
    }
    return digits(value, 4);
  }
  const said = (value, chart) => typeof value === "string" ? MARKS[value] : written(value, chart.unit);

  function step(value, { kind, low, high }) {
    const of = kind === "log" ? Math.log : Number;
    if (kind === "log" && value <= 0 || high <= low) return 0;
    return Math.round(Math.min(1, Math.max(0, (of(value) - of(low)) / (of(high) - of(low)))) * (STEPS - 1));
  }
  function cell(value, chart) {
    const found = document.createElement("td");
    if (value !== null) found.className = typeof value === "string" ? `m-${value}` : `${chart.scale.kind === "diverging" ? "d" : "s"}${step(value, chart.scale)}`;
    return found;
  }

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;

  // figure: of `grid()`; chart: its JSON; open(chart, row, column, inner, cell): what a click or Enter does.
  function attach(figure, chart, open) {
    if (!tip.isConnected) document.body.append(tip);
    const table = figure.querySelector("table"), line = figure.querySelector(".said");
    const rows = chart.rows.map((name, i) => ({ name, values: chart.values[i], row: i, inner: "" }));
    [...table.tBodies[0].rows].forEach((row, i) => { row.own = rows[i]; });
    const at = found => ({ ...found.parentElement.own, column: found.cellIndex - 1 });
    const text = found => {
      const { name, values, column, inner } = at(found);
      return values[column] === null ? "" : `${chart.axis} ${chart.columns[column]}, ${inner ? `${inner} of ` : ""}${name}: ${said(values[column], chart)}`;
    };
    let active = null, touched = null;
    const activate = (found, focus) => {
      if (active) active.tabIndex = -1, active.classList.remove("here");
      active = found;
      found.tabIndex = 0;
      if (focus) found.focus();
    };
    const say = found => { const words = text(found); found.setAttribute("aria-label", words || "nothing here"); line.textContent = words; };
    const hint = (found, event) => {
      const words = text(found);
      tip.hidden = !words;
      tip.textContent = words;
      const box = tip.getBoundingClientRect();
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
      tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
    };
    const body = table.tBodies[0];
    body.addEventListener("pointermove", event => {
      const found = event.target.closest("td");
      if (found && event.pointerType !== "touch") hint(found, event);
    });
    body.addEventListener("pointerleave", () => { tip.hidden = true; });
    body.addEventListener("focusin", event => { if (event.target.matches("td")) say(event.target); });
    body.addEventListener("click", event => {
      const found = event.target.closest("td"), again = touched === found;
      if (!found) return;
      activate(found, true);
      found.classList.add("here");
      touched = found;
      // A first tap says the value; a second one, like a click, opens the tensors.
      if (text(found) && (event.pointerType !== "touch" || again)) { tip.hidden = true; const { row, column, inner } = at(found); open(chart, row, column, inner, found); }
      else if (event.pointerType === "touch") hint(found, event);
    });
    body.addEventListener("keydown", event => {
      const found = event.target.closest("td");
      if (!found) return;
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        const { row, column, inner } = at(found);
        if (text(found)) open(chart, row, column, inner, found);
        return;
      }
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e9], End: [0, 1e9] }[event.key];
      if (!move) return;
      event.preventDefault();
      const shown = [...body.rows], y = shown.indexOf(found.parentElement) + move[0];
      const x = Math.min(chart.columns.length, Math.max(1, found.cellIndex + move[1]));
      if (shown[y]) activate(shown[y].cells[x], true);
    });
    for (const button of body.querySelectorAll("button.fold")) {
      const head = button.closest("tr"), fold = chart.folds.find(one => one.row === head.own.name);
      button.addEventListener("click", () => {
        const opened = button.getAttribute("aria-expanded") === "true";
        button.setAttribute("aria-expanded", String(!opened));
        if (opened) { while (head.nextElementSibling?.classList.contains("inner")) head.nextElementSibling.remove(); return; }
        head.after(...fold.rows.map((inner, i) => {
          const row = document.createElement("tr"), name = document.createElement("th");
          row.className = "inner";
          row.own = { name: fold.row, values: fold.values[i], row: head.own.row, inner };
          name.scope = "row";
          name.textContent = inner;
          row.append(name, ...fold.values[i].map(value => cell(value, chart)));
          for (const each of row.cells) if (each.matches("td")) each.tabIndex = -1;
          return row;
        }));
      });
    }
    for (const found of body.querySelectorAll("td")) found.tabIndex = -1;
    const first = body.querySelector("td[class]") ?? body.querySelector("td");
    if (first) activate(first, false);
  }

  // The values of all lines at one x, of the section around `curves()`: at the pointer, at a tap, and by arrow keys.
  function attachCurves(section, chart) {
    const svg = section.querySelector("svg[data-plot]"), line = section.querySelector(".said");
    const count = Math.max(0, ...chart.series.map(one => one.values.length));
    if (!svg || !count) return;
    const [left, right, top, bottom] = svg.dataset.plot.split(" ").map(Number);
    const rule = document.createElementNS("http://www.w3.org/2000/svg", "path");
    rule.setAttribute("class", "rule");
    svg.append(rule);
    const text = i => `${chart.x} ${i + chart.first}: ${chart.series.map(one => `${one.name} ${written(one.values[i] ?? null, chart.unit)}`).join(", ")}`;
    const show = i => {
      const x = left + (right - left) * (count > 1 ? i / (count - 1) : 0.5);
      rule.setAttribute("d", `M${x} ${top}V${bottom}`);
      svg.setAttribute("aria-valuenow", i + chart.first);
      svg.setAttribute("aria-valuetext", text(i));
      line.textContent = text(i);
    };
    const at = event => {
      const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      return Math.min(count - 1, Math.max(0, Math.round(((x - left) / (right - left)) * (count - 1))));
    };
    let now = 0;
    for (const [name, value] of Object.entries({ role: "slider", tabindex: 0, "aria-valuemin": chart.first, "aria-valuemax": chart.first + count - 1, "aria-valuenow": chart.first, "aria-valuetext": text(0) })) svg.setAttribute(name, value);
    for (const title of svg.querySelectorAll("circle title")) title.remove();  // the browser's own, which comes late
    svg.addEventListener("pointermove", event => show(now = at(event)));
    svg.addEventListener("pointerdown", event => show(now = at(event)));
    svg.addEventListener("focus", () => show(now));
    svg.addEventListener("keydown", event => {
      const move = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, Home: -count, End: count }[event.key];
      if (!move) return;
      event.preventDefault();
      show(now = Math.min(count - 1, Math.max(0, now + move)));
    });
  }
  return { attach, attachCurves, written, said };
})();
