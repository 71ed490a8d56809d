// Sliders, curves over layers, and numbers by part, for the parameters of a recipe.
"use strict";
const SVG = ["svg", "polyline", "circle", "line", "text", "rect", "path", "g", "use"];
export const make = (tag, attributes = {}, ...inside) => {
  const made = SVG.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inside.filter(each => each !== null && each !== undefined));  // texts, never HTML
  return made;
};
export const icon = name => make("svg", { class: "i", "aria-hidden": "true" }, make("use", { href: `#i-${name}` }));
export const button = (name, words, attributes) => make("button", { type: "button", ...attributes }, icon(name), words ? ` ${words}` : "");
const END = 12;  // characters at the end of a name that are always shown
// A model's name. Where there is no room, its folder is cut first, then its middle.
export const named = text => {
  const folder = text.lastIndexOf("/", text.length - 2) + 1, end = Math.max(folder, text.length - END);
  return make("span", { class: "ws-mid", title: text }, make("span", { class: "ws-dir" }, text.slice(0, folder)),
    make("span", {}, text.slice(folder, end)), make("span", {}, text.slice(end)));
};
// What is known of a model.
export const facts = words => make("p", { class: "ws-facts" }, ...words.filter(Boolean).flatMap(each => [make("span", {}, each), " "]));
export const short = number => String(Number(Number(number).toPrecision(4)));
const POINTS = 5;
const PRESETS = {
  flat: () => 0.5, rising: s => s, falling: s => 1 - s, middle: s => 1 - Math.abs(2 * s - 1), ends: s => Math.abs(2 * s - 1),
};
const PARTS = ["self_attn", "mlp", ""];
const part = name => name || "all others";

export const kind = value => Array.isArray(value) ? (typeof value[0] === "object" ? "part" : "layer") : "one";

// What a control shows: its newest value, as it would be written.
const current = (control, pending) => pending !== undefined ? pending
  : control.parts.length ? control.parts.map(([filter, value]) => filter ? { filter, value } : { value }) : control.value;

// A change of this text makes a control anew; other changes only move it.
export const shape = (control, pending) => {
  const value = current(control, pending), of = kind(value);
  return JSON.stringify([control.path, control.model, control.kind, control.held, control.choices, of,
    of === "one" ? value === null : of === "layer" ? value.length : value.map(each => each.filter ?? "")]);
};

const slider = (control, label, read, write) => {
  const step = control.kind === "int" ? 1 : (control.high - control.low) / 200;
  const range = make("input", { type: "range", min: control.low, max: control.high, step, "aria-label": label });
  const number = make("input", { type: "number", step: "any", placeholder: "none", "aria-label": `${label}, exactly` });
  range.addEventListener("input", () => { number.value = short(range.value); write(Number(short(range.value))); });
  number.addEventListener("change", () => {
    const value = Number(number.value);
    if (number.value === "" || !Number.isFinite(value)) return;
    if (value > Number(range.max)) range.max = value;
    range.value = value;
    write(control.kind === "int" ? Math.round(value) : value);
  });
  const update = () => {
    const value = read();
    if (document.activeElement !== number) number.value = value === null || value === undefined ? "" : short(value);
    if (value > Number(range.max)) range.max = value;
    range.value = value ?? control.low;
  };
  update();
  return { nodes: control.kind === "int" ? [number] : [range, number], update };
};

const WIDTH = 360, HEIGHT = 92, EDGE = 14;
const curve = (control, label, read, write, strip) => {  // strip(): shares by layer
  const span = control.high - control.low || 1;
  const n = read().length;
  const x = i => EDGE + (i * (WIDTH - 2 * EDGE)) / (n - 1);
  const y = v => EDGE + (1 - (v - control.low) / span) * (HEIGHT - 2 * EDGE);
  const heat = make("g");
  let drawn = null;
  const warm = shares => {
    if (shares === drawn) return;
    drawn = shares;
    heat.replaceChildren(...(shares ?? []).map((share, i, all) => make("rect", { x: EDGE + (i * (WIDTH - 2 * EDGE)) / all.length, y: EDGE - 6,
      width: (WIDTH - 2 * EDGE) / all.length, height: HEIGHT - 2 * EDGE + 12, class: "ws-strip", "fill-opacity": share === null ? 0 : 0.06 + 0.5 * share })));
  };
  const line = make("polyline", { class: "ws-line" });
  const hits = read().map((_, i) => make("circle", { r: 14, cx: x(i), class: "ws-hit", tabindex: 0, role: "slider",
    "aria-label": `${label}, point ${i + 1} of ${n}`, "aria-valuemin": control.low, "aria-valuemax": control.high }));
  const dots = hits.map((_, i) => make("circle", { r: 6, cx: x(i), class: "ws-dot" }));
  const said = make("text", { class: "ws-said", x: WIDTH / 2, y: HEIGHT + 13, "text-anchor": "middle" });
  const update = () => {
    const values = read();
    line.setAttribute("points", values.map((v, i) => `${x(i)},${y(v)}`).join(" "));
    hits.forEach((hit, i) => { hit.setAttribute("cy", y(values[i])); dots[i].setAttribute("cy", y(values[i])); hit.setAttribute("aria-valuenow", values[i]); });
    said.textContent = values.map(short).join("  ");
    warm(strip());
  };
  const move = (i, v) => {
    const bounded = Number(Math.min(control.high, Math.max(control.low, v)).toFixed(3));
    write(read().map((old, k) => (k === i ? bounded : old)));
    update();
  };
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 18}`, class: "ws-curve", role: "group", "aria-label": `${label}, by layer` },
    heat, make("line", { class: "ws-axis", x1: EDGE, x2: WIDTH - EDGE, y1: HEIGHT - EDGE, y2: HEIGHT - EDGE }),
    make("text", { class: "ws-end", x: EDGE, y: HEIGHT + 13 }, "first"),
    make("text", { class: "ws-end", x: WIDTH - EDGE, y: HEIGHT + 13, "text-anchor": "end" }, "last"), said, line, ...dots, ...hits);
  const at = event => {
    const box = svg.getBoundingClientRect();
    const from = ((event.clientY - box.top) / box.height) * (HEIGHT + 18);
    return control.low + (1 - (from - EDGE) / (HEIGHT - 2 * EDGE)) * span;
  };
  hits.forEach((hit, i) => {
    hit.addEventListener("pointerdown", event => { hit.setPointerCapture(event.pointerId); event.preventDefault(); hit.focus(); });
    hit.addEventListener("pointermove", event => { if (hit.hasPointerCapture(event.pointerId)) move(i, at(event)); });
    hit.addEventListener("keydown", event => {
      const step = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 5, PageDown: -5 }[event.key];
      if (step) { event.preventDefault(); move(i, read()[i] + (step * span) / 50); }
      if (event.key === "Home" || event.key === "End") { event.preventDefault(); move(i, event.key === "Home" ? control.low : control.high); }
    });
  });
  const resized = count => Array.from({ length: count }, (_, i) => {
    const values = read(), place = (i * (values.length - 1)) / (count - 1), low = Math.floor(place), high = Math.min(values.length - 1, low + 1);
    return Number((values[low] + (values[high] - values[low]) * (place - low)).toFixed(3));
  });
  const preset = make("select", { "aria-label": `${label}: shape`, onchange: () => {
    const top = Math.max(...read()), shaped = read().map((_, i) => Number((control.low + (top - control.low) * PRESETS[preset.value](i / (n - 1))).toFixed(3)));
    write(preset.value === "flat" ? read().map(() => top) : shaped);
    preset.value = "";
    update();
  } }, make("option", { value: "" }, "shape"), ...Object.keys(PRESETS).map(name => make("option", { value: name }, name)));
  const tools = make("div", { class: "ws-tools" }, preset,
    button("plus", "", { disabled: n >= 16, "aria-label": `${label}: one point more`, onclick: () => write(resized(n + 1)) }),
    button("minus", "", { disabled: n <= 2, "aria-label": `${label}: one point less`, onclick: () => write(resized(n - 1)) }));
  update();
  return { nodes: [svg, tools], update };
};

// One control. pending(): its value in an edit that the server does not have; set(value); strip(): shares by layer, drawn behind a curve.
export const control = (given, pending, set, strip) => {
  const found = { given, shape: shape(given, pending()) };
  const value = () => current(found.given, pending());
  const label = given.model ? `${given.name} of ${given.model}` : given.name;
  const of = kind(value());
  const box = make("div", { class: `ws-control ws-${of}`, "data-name": given.name, "data-model": given.model });
  box.append(make("span", { class: "ws-name", title: given.doc }, given.name));
  const updates = [];
  const add = ({ nodes, update }, owner = box) => { owner.append(...nodes); updates.push(update); };
  if (given.held) box.append(make("em", {}, given.held));
  else if (given.kind === "bool") {
    const tick = make("input", { type: "checkbox", "aria-label": label, onchange: () => set(tick.checked) });
    add({ nodes: [tick], update: () => { tick.checked = value() === true; } });
  } else if (given.kind === "str") {
    const now = value(), options = [...new Set([...given.choices, ...(now === null ? [] : [String(now)])])];
    const list = make("select", { "aria-label": label, onchange: () => set(list.value) }, ...options.map(name => make("option", { value: name }, name)));
    add({ nodes: [list], update: () => { list.value = String(value()); } });
  } else if (of === "layer") add(curve(given, label, value, set, strip));
  else if (of === "part") {
    for (const [i, each] of value().entries()) {
      const row = make("div", { class: "ws-part-row" }, make("span", {}, part(each.filter)));
      add(slider(given, `${label}, ${part(each.filter)}`, () => value()[i]?.value, number => set(value().map((old, k) => k === i ? { ...old, value: number } : old))), row);
      box.append(row);
    }
  } else add(slider(given, label, value, set));
  if (given.kind === "float" && !given.held && (of !== "one" || value() !== null)) {
    const scalar = () => { const now = value(); return of === "one" ? now : of === "layer" ? now[now.length >> 1] : now.at(-1).value; };
    const mode = make("select", { class: "ws-mode", "aria-label": `${label}: one value, by layer or by part`, onchange: () => {
      const now = scalar();
      set(mode.value === "one" ? now : mode.value === "layer" ? Array(POINTS).fill(now) : PARTS.map(filter => filter ? { filter, value: now } : { value: now }));
    } }, make("option", { value: "one" }, "one value"), make("option", { value: "layer" }, "by layer"), make("option", { value: "part" }, "by part"));
    mode.value = of;
    box.append(mode);
  }
  found.node = box;
  found.update = fresh => { found.given = fresh; for (const update of updates) update(); };
  found.update(given);
  return found;
};
