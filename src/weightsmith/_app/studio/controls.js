// Sliders and curves for the parameters of a recipe. Gradio gives: element, props, trigger, watch.
const root = element.querySelector(".ws-controls");
const POINTS = 5;
let controls = [], touched = new Map(), timer = 0;

const make = (tag, attributes = {}, ...inside) => {
  const svg = ["svg", "polyline", "circle", "line", "text"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false) made.setAttribute(name, value);
  }
  made.append(...inside);  // as text, never as HTML
  return made;
};
const short = (number) => String(Number(Number(number).toPrecision(4)));

// Everything that was touched since the recipe was last read goes along, so that none is lost if events are dropped.
const send = () => {
  clearTimeout(timer);
  timer = setTimeout(() => trigger("input", { values: [...touched.values()] }), 120);
};
const set = (control, value) => {
  control.value = value;
  touched.set(JSON.stringify(control.path), [control.path, value]);
  send();
};

const slider = (control, label) => {
  const step = control.kind === "int" ? 1 : (control.high - control.low) / 200;
  const value = control.value ?? "";
  const range = make("input", { type: "range", min: control.low, max: control.high, step, "aria-label": label });
  const number = make("input", { type: "number", step: "any", placeholder: "none", "aria-label": label + ", exactly" });
  range.value = value === "" ? control.low : value;
  number.value = value === "" ? "" : short(value);
  range.addEventListener("input", () => { number.value = short(range.value); set(control, Number(short(range.value))); });
  number.addEventListener("change", () => {
    if (number.value === "" || !Number.isFinite(Number(number.value))) return;
    range.value = number.value;
    set(control, Number(number.value));
  });
  return control.kind === "int" ? [number] : [range, number];
};

const WIDTH = 300, HEIGHT = 84, EDGE = 12;
const curve = (control, label) => {
  const n = control.value.length;
  const x = (i) => EDGE + (i * (WIDTH - 2 * EDGE)) / (n - 1);
  const span = control.high - control.low || 1;
  const y = (v) => EDGE + (1 - (v - control.low) / span) * (HEIGHT - 2 * EDGE);
  const line = make("polyline", { class: "ws-line" });
  const dots = control.value.map((_, i) => make("circle", { r: 7, tabindex: 0, role: "slider", cx: x(i),
    "aria-label": `${label}, point ${i + 1} of ${n}`, "aria-valuemin": control.low, "aria-valuemax": control.high }));
  const said = make("text", { class: "ws-said", x: WIDTH / 2, y: HEIGHT + 12, "text-anchor": "middle" });
  const draw = () => {
    line.setAttribute("points", control.value.map((v, i) => `${x(i)},${y(v)}`).join(" "));
    dots.forEach((dot, i) => { dot.setAttribute("cy", y(control.value[i])); dot.setAttribute("aria-valuenow", control.value[i]); });
    said.textContent = control.value.map(short).join("   ");
  };
  const move = (i, v) => {
    const bounded = Math.min(control.high, Math.max(control.low, v));
    set(control, control.value.map((old, k) => (k === i ? Number(bounded.toFixed(3)) : old)));
    draw();
  };
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 16}`, class: "ws-curve", role: "group", "aria-label": label + ", by layer" },
    make("line", { class: "ws-axis", x1: EDGE, x2: WIDTH - EDGE, y1: HEIGHT - EDGE, y2: HEIGHT - EDGE }),
    make("text", { class: "ws-end", x: EDGE, y: HEIGHT + 12 }, "first layer"),
    make("text", { class: "ws-end", x: WIDTH - EDGE, y: HEIGHT + 12, "text-anchor": "end" }, "last"), said, line, ...dots);
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    const from = ((event.clientY - box.top) / box.height) * (HEIGHT + 16);
    return control.low + (1 - (from - EDGE) / (HEIGHT - 2 * EDGE)) * span;
  };
  dots.forEach((dot, i) => {
    dot.addEventListener("pointerdown", (event) => { dot.setPointerCapture(event.pointerId); event.preventDefault(); dot.focus(); });
    dot.addEventListener("pointermove", (event) => { if (dot.hasPointerCapture(event.pointerId)) move(i, at(event)); });
    dot.addEventListener("keydown", (event) => {
      const step = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 5, PageDown: -5 }[event.key];
      if (step) { event.preventDefault(); move(i, control.value[i] + (step * span) / 50); }
    });
  });
  draw();
  return svg;
};

const row = (control) => {
  const label = control.model ? `${control.name} of ${control.model}` : control.name;
  const line = make("div", { class: "ws-control" + (Array.isArray(control.value) ? " ws-wide" : ""), "data-path": JSON.stringify(control.path) });
  const again = () => { const fresh = row(control); line.replaceWith(fresh); };
  line.append(make("label", { title: control.doc }, control.name));
  if (control.held) {
    line.append(make("em", {}, control.held));
  } else if (control.kind === "bool") {
    const box = make("input", { type: "checkbox", "aria-label": label, onchange: () => set(control, box.checked) });
    box.checked = control.value === true;
    line.append(box);
  } else if (control.kind === "str") {
    const options = [...new Set([...control.choices, ...(control.value === null ? [] : [String(control.value)])])];
    const list = make("select", { "aria-label": label, onchange: () => set(control, list.value) },
      ...options.map((name) => make("option", { value: name }, name)));
    list.value = String(control.value);
    line.append(list);
  } else {
    const many = Array.isArray(control.value);
    line.append(...(many ? [curve(control, label)] : slider(control, label)));
    if (control.kind === "float" && (many || control.value !== null)) {
      line.append(make("button", { type: "button", class: "ws-by-layer", "aria-pressed": String(many), title: "one value for all layers, or a curve over them",
        onclick: () => {
          set(control, many ? control.value[Math.floor(control.value.length / 2)] : Array(POINTS).fill(control.value));
          again();
        } }, many ? "one value" : "by layer"));
    }
  }
  return line;
};

const draw = () => {
  const shown = props.value || {};
  controls = shown.controls || [];
  touched = new Map();
  root.replaceChildren();
  if (shown.held) root.append(make("p", { class: "ws-hint" }, shown.held));
  for (const model of [...new Set(controls.filter((c) => c.main).map((c) => c.model))]) {
    const own = controls.filter((c) => c.main && c.model === model);
    root.append(make("section", {}, make("h4", {}, model || "All models"), ...own.map(row)));
  }
  const more = controls.filter((c) => !c.main);
  if (more.length) root.append(make("details", {}, make("summary", {}, "More settings"), ...more.map(row)));
};
watch("value", draw);
draw();
