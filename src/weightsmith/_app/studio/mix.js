// Models, their strips, the method picker, the recipe's text.
"use strict";
import { button, control, facts, icon, make, named, shape } from "/assets/controls.js";

const $ = id => document.getElementById(id);
const MAX_CARDS = 60, MANY = 12;  // cards; models that are searched rather than read
const PICTURES = {  // of a family of methods, 48 × 32
  average: "M6 26L42 6M24 16m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0", sphere: "M6 28A22 22 0 0 1 42 28M24 7m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0",
  delta: "M6 28L20 18L18 23M20 18L15 18M20 18L42 6L38 11M42 6L36 6", sparse: "M4 26h4v-8h4v8h6v-16h4v16h8v-4h4v4h6M4 30h40",
  spectral: "M24 16m-20 0a20 9 0 1 0 40 0a20 9 0 1 0 -40 0M24 16L44 16M24 16L24 7", data: "M4 6h18M4 12h14M4 18h18M4 24h10M28 26l6 -10l4 6l6 -14",
  copy: "M6 6h14v20h-14zM28 6h14v20h-14zM20 16h8",
};

export class Mix {
  constructor(link, actions) {
    Object.assign(this, { link, actions, controls: new Map(), about: null, base: "" });
    $("search").addEventListener("input", () => this.cards());
    $("goal").addEventListener("change", () => { link.edit({ kind: "goal", name: $("goal").value }); $("goal").value = ""; });
    $("undo").addEventListener("click", () => link.edit({ kind: "undo" }));
    $("redo").addEventListener("click", () => link.edit({ kind: "redo" }));
    $("method").addEventListener("click", () => this.pick());
    $("methods-close").addEventListener("click", () => $("methods").close());
    $("methods-search").addEventListener("input", () => this.pick());
    $("look").addEventListener("click", () => actions.look(this.chosen));
    for (const id of ["example", "example-here"]) $(id).addEventListener("click", () => actions.do("example"));
    $("recipe").addEventListener("toggle", () => this.lines());
    $("hub").addEventListener("submit", event => { event.preventDefault(); this.check($("hub-name").value.trim()); });
    this.recipe();
  }

  get draft() { return this.link.state.document?.draft ?? { models: [], controls: [], blocks: [] }; }
  get chosen() { return [...new Set([this.draft.base, ...this.draft.models].filter(Boolean))]; }

  get fineTunes() { return this.chosen.filter(name => name !== this.draft.base); }

  // ---- models

  cards() {
    const { models = [] } = this.link.state, words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = models.filter(each => words.every(word => each.ref.toLowerCase().includes(word)));
    if (models.length > MANY && !this.looked && document.activeElement === document.body && !this.link.text.trim()) $("search").focus({ preventScroll: true });
    this.looked ||= models.length > 0;
    // Without models, the demo's are the way on.
    $("example-here").hidden = models.length > 0 || Boolean(this.link.text.trim());
    $("example").classList.toggle("act", !models.length);
    for (const id of ["find-first", "start-how"]) $(id).hidden = !models.length;
    $("start-empty").hidden = models.length > 0;
    $("found").textContent = models.length ? `${found.length} of ${models.length} models${found.length > MAX_CARDS ? `, the first ${MAX_CARDS} are shown` : ""}` : "No models were found. Start the studio with the folders of your models: weightsmith studio FOLDER. Links to other folders are not followed.";
    const { base, models: used } = this.draft, focused = document.activeElement?.closest?.("#cards li")?.dataset.ref, button = document.activeElement?.dataset?.act;
    $("cards").replaceChildren(...found.slice(0, MAX_CARDS).map(each => this.card(each, base, used)));
    if (focused && button) $("cards").querySelector(`li[data-ref="${CSS.escape(focused)}"] [data-act="${button}"]`)?.focus();
  }

  card(each, base, used) {
    const own = each.adapter ? `${base}+${each.ref}` : each.ref;
    const is = used.find(name => name === own || name === each.ref || name.endsWith(`+${each.ref}`));
    const about = each.problem ? make("p", { class: "ws-error" }, each.problem) : each.kind ? facts([each.kind, `${each.parameters} params`, each.layers && `${each.layers} layers`, each.dtype, each.bytes, each.quantised, each.licence]) : make("p", { class: "ws-soft" }, "reading …");
    const verdict = this.link.state.verdicts?.[base]?.[each.ref];
    const survived = is && this.link.state.preview?.total?.[is];
    const isBase = base === each.ref, act = (name, picture, words, on, label, onclick) => button(picture, words, { title: label, "data-act": name, "aria-pressed": String(on), "aria-label": label, onclick });
    const asBase = each.adapter || (each.problem && !isBase) ? null : act("base", isBase ? "check" : "base", "Base", isBase, `${each.ref}: use as base`, () => this.link.edit({ kind: "base", name: each.ref }));
    const add = each.problem && !is ? null : act("add", is ? "check" : "plus", is ? "Added" : "Add", Boolean(is), `${each.ref}: ${is ? "remove from" : "add to"} the merge`, () => this.link.edit(is ? { kind: "remove", name: is } : { kind: "add", name: each.ref }));
    const differ = base && !isBase && !each.adapter && !each.problem ? act("diff", "compare", "Compare", false, `${each.ref}: compare with the base`, () => this.actions.look([base, each.ref])) : null;
    return make("li", { "data-ref": each.ref, class: each.problem ? "broken" : is || isBase ? "on" : "" },
      make("b", {}, named(each.ref), each.adapter && !each.kind ? make("i", {}, " adapter") : ""), about,
      survived ? make("p", { class: "ws-soft" }, survived) : null, verdict ? make("p", {}, verdict) : null, make("div", { class: "row" }, asBase, add, differ));
  }

  async check(name) {
    if (!name) return;
    $("hub-found").replaceChildren(make("p", {}, "Asking the Hub …"));
    try {
      const found = await this.link.post("hub", { name });
      $("hub-found").replaceChildren(facts([found.kind, `${found.parameters} params`, `${found.layers} layers`, found.dtype, found.licence]), make("div", { class: "row" },
        button("base", "Base", { onclick: () => this.link.edit({ kind: "base", name }) }),
        button("plus", "Add", { onclick: () => this.link.edit({ kind: "add", name }) })));
    } catch (error) { $("hub-found").innerHTML = error.html || "<p class='ws-error'>The server does not answer. Press the button again when it is back.</p>"; }
  }

  // ---- strips

  set(given, value) { this.link.edit({ kind: "set", path: given.path, model: given.model, value }); this.strips(); }

  strips() {
    const { draft } = this;
    $("held").textContent = draft.held && this.link.text.trim() ? draft.held : "";
    const method = this.about?.methods.find(each => each.name === draft.method);
    $("method").replaceChildren(icon("method"), draft.method ? ` ${draft.method}` : " Choose a method");
    $("method").title = method ? `${method.title}. ${method.use}` : "";
    $("base").replaceChildren(...(draft.base ? ["Base ", make("b", {}, named(draft.base))] : []));
    if (draft.held && this.link.text.trim() && !this.opened) { this.opened = true; $("recipe").open = true; }  // text is the only way to edit it
    const names = [...new Set([...draft.controls.filter(each => each.model).map(each => each.model), ...draft.models])];
    const fresh = JSON.stringify([names, draft.base, draft.method, draft.blocks, draft.controls.map(each => [shape(each, this.link.value(each)), each.main])]);
    if (fresh === this.drawn) {
      for (const each of draft.controls) this.controls.get(JSON.stringify([each.path, each.model]))?.update(each);
      return;
    }
    this.drawn = fresh;
    const focus = this.focused();
    this.controls = new Map();
    const row = given => {
      const made = control(given, () => this.link.value(given), value => this.set(given, value), () => this.link.state.preview?.survives?.[given.model]);
      this.controls.set(JSON.stringify([given.path, given.model]), made);
      return made.node;
    };
    $("strips").replaceChildren(...names.map((name, i) => this.strip(name, i, names, draft, row)), ...draft.blocks.map(block => this.block(block, draft.blocks.length)));
    const shared = draft.controls.filter(each => !each.model), more = shared.filter(each => !each.main);
    const opened = $("shared").querySelector("details")?.open;
    $("shared").replaceChildren(...shared.filter(each => each.main).map(row));
    if (more.length) $("shared").append(make("details", { open: opened }, make("summary", {}, `${more.length} more settings`), ...more.map(row)));
    this.refocus(focus);
  }

  focused() {
    const at = document.activeElement;
    if (!at?.closest?.("#strips, #shared")) return null;
    return [at.tagName, at.getAttribute("aria-label"), at.type === "number" ? at.value : null];
  }

  refocus(focus) {
    if (!focus) return;
    for (const each of document.querySelectorAll(`#strips ${focus[0]}, #shared ${focus[0]}`)) if (each.getAttribute("aria-label") === focus[1]) {
      each.focus();
      if (focus[2] !== null) each.value = focus[2];  // what is being typed
      return;
    }
  }

  strip(name, i, names, draft, row) {
    const own = draft.controls.filter(each => each.model === name), isBase = name === draft.base;
    const up = button("up", "", { disabled: i === 0, "aria-label": `${name}: move up`, onclick: () => this.link.edit({ kind: "move", name, before: names[i - 1] }) });
    const down = button("down", "", { disabled: i === names.length - 1, "aria-label": `${name}: move down`, onclick: () => this.link.edit({ kind: "move", name, after: names[i + 1] }) });
    const gone = button("close", "", { "aria-label": `${name}: remove`, onclick: () => this.link.edit({ kind: "remove", name }) });
    const head = make("div", { class: "row ws-head", draggable: "true" }, make("h3", {}, named(name), isBase ? make("i", {}, " base") : ""), up, down, gone);
    const strip = make("section", { class: "ws-strip-box", "aria-label": name, "data-model": name }, head, ...own.filter(each => each.main).map(row));
    head.addEventListener("dragstart", event => { event.dataTransfer.setData("text/x-ws", name); event.dataTransfer.effectAllowed = "move"; });
    strip.addEventListener("dragover", event => { if (event.dataTransfer.types.includes("text/x-ws")) event.preventDefault(); });
    strip.addEventListener("drop", event => {
      event.preventDefault();
      const from = event.dataTransfer.getData("text/x-ws");
      if (from) this.link.edit({ kind: "move", name: from, [names.indexOf(from) < i ? "after" : "before"]: name });
    });
    return strip;
  }

  block({ place, words }, count) {
    const edit = (kind, end) => () => this.link.edit({ kind, place, words, count, end });
    return make("div", { class: "row ws-block" }, make("span", {}, `${place + 1}. ${words}`),
      button("up", "", { disabled: place === 0, "aria-label": `slice ${place + 1}: move up`, onclick: edit("move", place - 1) }),
      button("down", "", { disabled: place === count - 1, "aria-label": `slice ${place + 1}: move down`, onclick: edit("move", place + 1) }),
      button("close", "", { "aria-label": `slice ${place + 1}: remove`, onclick: edit("drop") }));
  }

  // ---- methods

  known(about) {
    this.about = about;
    $("goal").replaceChildren(make("option", { value: "" }, "choose a goal …"), ...about.goals.map(goal => make("option", { value: goal.name }, goal.words)));
    this.strips();
  }

  pick() {
    if (!this.about) return;
    const words = $("methods-search").value.toLowerCase(), { families, methods } = this.about;
    const sections = Object.entries(families).map(([family, title]) => {
      const own = methods.filter(each => each.family === family && `${each.name} ${each.title} ${each.use}`.toLowerCase().includes(words));
      if (!own.length) return null;
      const picture = make("svg", { viewBox: "0 0 48 32", class: "ws-picture", "aria-hidden": "true" }, make("path", { d: PICTURES[family] }));
      return make("section", {}, make("h3", {}, picture, title), ...own.map(each => {
        const more = make("div", {});
        const details = make("details", { ontoggle: () => { if (details.open) more.innerHTML = each.html; } }, make("summary", {}, "details"), more);
        return make("div", { class: "ws-method" }, make("button", { type: "button", "aria-pressed": String(each.name === this.draft.method), onclick: () => {
          this.link.edit({ kind: "method", name: each.name });
          $("methods").close();
        } }, each.name), make("span", {}, each.title), details);
      }));
    });
    $("methods-list").replaceChildren(...sections.filter(Boolean));
    if (!$("methods").open) $("methods").showModal();
  }

  // ---- the recipe's text

  recipe() {
    const text = $("text"), { link } = this;
    this.base = "";  // what the typed text was made from
    text.addEventListener("input", () => {
      link.edit({ kind: "text", base: this.base, text: text.value });
      this.lines();
    });
    text.addEventListener("scroll", () => { $("gutter").scrollTop = text.scrollTop; });
    document.addEventListener("click", event => {
      const line = Number(event.target.closest("button[data-line]")?.dataset.line);
      if (!line) return;
      $("recipe").open = true;
      const start = text.value.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
      text.focus();
      text.setSelectionRange(start, start + (text.value.split("\n")[line - 1] ?? "").length);
      text.scrollTop = (line - 4) * 19;
    });
  }

  // The server's text, unless something is being typed that it does not have.
  write() {
    const text = $("text"), { link } = this;
    if (link.pending.some(each => each.kind === "text")) return;
    const now = link.state.document?.text ?? "";
    this.base = now;
    if (text.value !== now) {
      const { selectionStart, selectionEnd, scrollTop } = text, before = text.value;
      text.value = now;
      // The cursor stays at its characters if only something behind it, or before it, was changed.
      const tail = before.length - selectionStart;
      const at = now.startsWith(before.slice(0, selectionStart)) ? selectionStart : now.endsWith(before.slice(selectionStart)) ? now.length - tail : Math.min(selectionStart, now.length);
      if (document.activeElement === text) text.setSelectionRange(at, at + Math.max(0, selectionEnd - selectionStart));
      text.scrollTop = scrollTop;
    }
    this.lines();
    try { if (now) localStorage.setItem("ws-recipe", now); } catch { /* a browser without storage */ }
  }

  lines() {
    const marks = new Map();
    const { notes } = this.link.state;
    for (const [line, level] of notes?.marks ?? []) if (level === "error" || !marks.has(line)) marks.set(line, level);
    const rows = $("text").value.split("\n").slice(0, 5000).map((_, i) => make("span", { class: marks.get(i + 1) ?? "" }, `${i + 1}\n`));
    $("gutter").replaceChildren(...rows);
    $("gutter").scrollTop = $("text").scrollTop;
  }

  notes() {
    const { notes } = this.link.state;
    $("notes").classList.toggle("old", !this.link.checked);
    if (notes && this.noted !== notes) {
      $("notes").innerHTML = notes.html;
      this.noted = notes;
    }
    this.lines();
    $("costs").replaceChildren(...(notes?.costs ?? []).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }
}
