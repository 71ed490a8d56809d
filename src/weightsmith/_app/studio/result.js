// What comes of the recipe: preview, try, sweep, runs, reports.
"use strict";
import { make, short } from "/assets/controls.js";

const $ = id => document.getElementById(id);
const TABS = ["preview", "try", "sweep", "tune", "runs", "report"];
const quoted = text => /^[\w./~@+-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;  // for a shell
const saved = (name, text) => {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
};

export class Result {
  constructor(link, actions) {
    Object.assign(this, { link, actions, ticked: [] });
    const list = document.querySelector("[role=tablist]");
    list.addEventListener("click", event => { const tab = event.target.closest("[role=tab]"); if (tab) this.open(tab.id.slice(4)); });
    list.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], at = TABS.findIndex(name => $(`tab-${name}`) === document.activeElement);
      if (step && at >= 0) { event.preventDefault(); const next = TABS[(at + step + TABS.length) % TABS.length]; this.open(next); $(`tab-${next}`).focus(); }
    });
    $("try-now").addEventListener("click", () => actions.try());
    $("sweep-now").addEventListener("click", () => actions.sweep());
    $("tune-now").addEventListener("click", () => actions.tune());
    for (const stop of document.querySelectorAll("button.stop")) stop.addEventListener("click", () => actions.do("stop"));
    $("save").addEventListener("click", async () => { await link.settled(); saved("recipe.yml", link.text); });
    $("save-python").addEventListener("click", async () => { await link.settled(); saved("merge.py", this.python(link.text)); });
    $("copy-command").addEventListener("click", () => navigator.clipboard?.writeText(`weightsmith merge recipe.yml ${quoted(`${link.state.studio.out}/${$("name").value}`)}`));
  }

  python(recipe) { return `import weightsmith\n\nrecipe = ${JSON.stringify(recipe)}\nweightsmith.merge(recipe, ${JSON.stringify(`${this.link.state.studio.out}/${$("name").value}`)})\n`; }

  open(name) {
    for (const each of TABS) {
      const own = each === name;
      $(`tab-${each}`).setAttribute("aria-selected", String(own));
      $(`tab-${each}`).tabIndex = own ? 0 : -1;
      $(each).hidden = !own;
    }
  }

  preview() {
    const { preview, document: now } = this.link.state;
    if (!preview) return;
    const behind = now && (preview.version !== now.version || this.link.pending.length);
    $("shown").classList.toggle("old", Boolean(behind));
    $("stale").textContent = !behind ? "" : preview.busy === now.version ? "Previewing the new recipe …" : "The recipe was changed …";
    if (!preview.html || this.drawn === preview.html) return;
    this.drawn = preview.html;
    $("shown").innerHTML = preview.html;
    for (const section of $("shown").querySelectorAll("section.curves[data-chart]"))
      weightsmithCharts.attachCurves(section, preview.charts[Number(section.dataset.chart)]);
    for (const figure of $("shown").querySelectorAll("figure[data-chart]"))
      weightsmithCharts.attach(figure, preview.charts[Number(figure.dataset.chart)], () => {});
  }

  // Parameters that can be swept: numbers.
  parameters(controls) {
    const own = controls.filter(each => ["float", "int"].includes(each.kind) && !each.held), now = $("swept").value;
    $("swept").replaceChildren(...own.map((each, i) => make("option", { value: JSON.stringify([each.path, each.model]) }, each.model ? `${each.name} of ${each.model}` : each.name)));
    const ticked = new Map([...$("ranges").querySelectorAll("div")].map(row => [row.dataset.key, [...row.querySelectorAll("input")].map(input => input.type === "checkbox" ? input.checked : input.value)]));
    const rows = own.map(each => {
      const name = each.model ? `${each.name} of ${each.model}` : each.name, key = JSON.stringify([each.path, each.model]);
      const [on, low, high] = ticked.get(key) ?? [each.name === "weight", each.low, each.high];
      const tick = make("input", { type: "checkbox", "aria-label": `tune ${name}` }), number = (value, end) => make("input", { type: "number", step: "any", value, "aria-label": `tune ${name}: ${end} value` });
      tick.checked = on;
      return make("div", { class: "row", "data-key": key }, make("label", { class: "check" }, tick, name), number(low, "least"), number(high, "largest"));
    });
    if (!$("ranges").contains(document.activeElement) || rows.length !== ticked.size) $("ranges").replaceChildren($("ranges").querySelector("legend"), ...rows);
    if ([...$("swept").options].some(option => option.value === now)) $("swept").value = now;
  }

  task() {
    const { task } = this.link.state;
    if (!task) return;
    for (const stop of document.querySelectorAll("button.stop")) stop.hidden = !task.running;
    for (const id of ["try-now", "sweep-now", "tune-now", "look", "try-first"]) $(id).disabled = task.running || (id.startsWith("try") && !this.link.state.studio.can_run);
    const where = { try: ["try", "tried"], sweep: ["sweep", "swept-cards"], tune: ["tune", "tuned"], look: ["report", "looked"] }[task.kind];
    if (!where) return;
    $(where[0]).querySelector(".doing").textContent = task.running ? `${task.doing} …` : "";
    if ($(where[1]).innerHTML !== task.html) $(where[1]).innerHTML = task.html;
    if (task.report && this.framed !== task.report) this.frame(task.report);
  }

  frame(number) {
    this.framed = number;
    $("frame").replaceChildren(make("a", { href: `/runs/${number}`, target: "_blank", rel: "noopener" }, "Open the report in its own tab"),
      make("iframe", { src: `/runs/${number}`, title: `report of run ${number}`, sandbox: "allow-scripts allow-downloads" }));
  }

  runs() {
    const { runs = [] } = this.link.state;
    this.ticked = this.ticked.filter(id => runs.some(run => run.id === id));
    $("rows").replaceChildren(...[...runs].reverse().map(run => {
      const numbers = Object.entries(run.numbers).filter(([name]) => name !== "bytes").slice(0, 4).map(([name, value]) => `${name} ${value}`).join(" · ");
      const tick = make("input", { type: "checkbox", "aria-label": `run ${run.id}: choose to compare`, onchange: () => this.tick(run.id, tick.checked) });
      tick.checked = this.ticked.includes(run.id);
      const time = new Date(run.when * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
      return make("li", { "data-run": run.id, "data-kind": run.kind }, make("div", { class: "row" }, tick, make("b", {}, `${run.id} · ${run.kind} · ${run.title}`), make("span", { class: "ws-soft" }, `${time}, ${run.seconds < 1 ? short(run.seconds) : Math.round(run.seconds)} s`)),
        make("p", { class: "ws-soft" }, numbers), make("div", { class: "row" },
          make("button", { type: "button", "aria-label": `run ${run.id}: load its recipe`, onclick: () => this.link.edit({ kind: "text", base: this.link.text, text: run.recipe }) }, "Load"),
          run.report ? make("button", { type: "button", "aria-label": `run ${run.id}: report`, onclick: () => { this.frame(run.id); $("looked").replaceChildren(); this.open("report"); } }, "Report") : null,
          make("button", { type: "button", "aria-label": `run ${run.id}: save its recipe`, onclick: () => saved(`run-${run.id}.yml`, run.recipe) }, "Recipe"),
          make("button", { type: "button", "aria-label": `run ${run.id}: save as Python`, onclick: () => saved(`run-${run.id}.py`, this.python(run.recipe)) }, "Python"),
          make("button", { type: "button", "aria-label": `run ${run.id}: copy its command`, onclick: () => navigator.clipboard?.writeText(run.command) }, "Command")));
    }));
  }

  async tick(id, on) {
    this.ticked = on ? [...this.ticked, id].slice(-2) : this.ticked.filter(each => each !== id);
    this.runs();
    $("two").replaceChildren();
    if (this.ticked.length === 2) {
      const [first, second] = [...this.ticked].sort((a, b) => a - b);
      try { $("two").innerHTML = (await this.link.post("two", { first, second })).html; } catch (error) { $("two").innerHTML = error.html ?? ""; }
    }
  }
}
