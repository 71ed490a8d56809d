// What comes of the recipe: preview, try, sweep, runs, reports.
"use strict";
import { button, make, named, short } from "/assets/controls.js";
import { RETRY_MS } from "/assets/link.js";

const $ = id => document.getElementById(id);
const FIT_MS = 400;
const NAMES = { look: "compare", auto: "find" };
const TABS = ["preview", "find", "try", "sweep", "tune", "runs", "report"];
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
    for (const [one, other] of [["judged", "tune-text"], ["tune-text", "judged"]]) $(one).addEventListener("input", () => { $(other).value = $(one).value; });  // one text
    $("tune").addEventListener("input", event => { if (["tune-text", "row-tokens"].includes(event.target.id)) this.fit(); });
    $("judged").addEventListener("input", () => this.fit());
    $("result").addEventListener("input", () => actions.gate());
    $("try-now").addEventListener("click", () => actions.try());
    $("sweep-now").addEventListener("click", () => actions.sweep());
    $("tune-now").addEventListener("click", () => actions.tune());
    for (const stop of document.querySelectorAll("button.stop")) stop.addEventListener("click", () => actions.do("stop"));
    $("save").addEventListener("click", async () => { await link.settled(); saved("recipe.yml", link.text); });
    $("save-python").addEventListener("click", async () => { await link.settled(); saved("merge.py", this.python(link.text)); });
    $("copy-command").addEventListener("click", () => navigator.clipboard?.writeText(`weightsmith merge recipe.yml ${quoted(`${link.state.studio.out}/${$("name").value}`)}`));
  }

  // The models of a search, and a field for a text of each fine-tune: those that were written are kept.
  finds(base, models) {
    const drawn = JSON.stringify([base, models]);
    if (drawn === this.chosen) return;
    this.chosen = drawn;
    const row = (term, names) => make("div", {}, make("dt", {}, term), ...(names.length ? names.map(name => make("dd", {}, named(name))) : [make("dd", { class: "ws-soft" }, "not chosen yet")]));
    $("find-models").replaceChildren(row("Base", base ? [base] : []), row("Fine-tunes", models));
    const written = new Map([...$("find-fields").querySelectorAll("textarea")].map(each => [each.dataset.model, each.value]));
    $("find-fields").replaceChildren(...models.map(name => make("label", { class: "field" }, make("span", {}, "Text for ", named(name)), make("textarea", { rows: 3, "data-model": name }, written.get(name) ?? ""))));
    $("find-texts").hidden = !models.length;
  }

  python(recipe) { return `import weightsmith\n\nrecipe = ${JSON.stringify(recipe)}\nweightsmith.merge(recipe, ${JSON.stringify(`${this.link.state.studio.out}/${$("name").value}`)})\n`; }

  open(name) {
    for (const each of TABS) {
      const own = each === name;
      $(`tab-${each}`).setAttribute("aria-selected", String(own));
      $(`tab-${each}`).tabIndex = own ? 0 : -1;
      $(each).hidden = !own;
    }
    if (name === "tune") this.fit();
  }

  // What the server says about the length of the text for a search; asked when the typing pauses.
  fit(ms = FIT_MS) {
    clearTimeout(this.fitting);
    this.fitted = null;
    const asked = this.asked = (this.asked ?? 0) + 1;
    const text = $("tune-text").value;
    if ($("tune").hidden) return;
    if (!text.trim()) { $("tune-fit").textContent = "Tuning needs at least 4 rows of text: about a page and a half, at 512 tokens per row."; return; }
    $("tune-fit").textContent = "Counting …";
    this.fitting = setTimeout(async () => {
      try {
        await this.link.settled();
        const fit = await this.link.post("fit", { text, tokens: $("row-tokens").value ? Number($("row-tokens").value) : null });
        if (asked !== this.asked) return;
        this.fitted = fit;
        $("row-tokens").placeholder = fit.tokens;
        const rows = `${fit.rows} row${fit.rows === 1 ? "" : "s"} of ${fit.tokens} tokens`, report = Math.max(2, Math.floor(fit.rows / 3));
        if (fit.rows >= fit.needed) $("tune-fit").textContent = `${rows}: ${fit.rows - report} to tune on, ${report} for the report.`;
        else $("tune-fit").replaceChildren(`The text makes ${rows.replace(" of ", " of up to ")}, and ${fit.needed} are needed. ${fit.shorter ? "Add text, or " : "Add text."}`,
          fit.shorter ? make("button", { type: "button", "data-mend": "tokens", "data-value": fit.shorter }, `use rows of ${fit.shorter} tokens`) : "");
      } catch (error) {
        if (asked !== this.asked) return;
        if (this.link.checked && !this.link.checked.good) { $("tune-fit").textContent = "The text is counted when the recipe is correct."; return; }
        $("tune-fit").innerHTML = error.html || "The server does not answer. The text is counted when it is back.";
        if (!error.html) this.fitting = setTimeout(() => this.fit(0), RETRY_MS);
      }
      this.actions.gate();
    }, ms);
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
    if ([...$("swept").options].some(option => option.value === now)) $("swept").value = now;
    const ticked = new Map([...$("ranges").querySelectorAll(".range[data-key]")].map(row => [row.dataset.key, [...row.querySelectorAll("input")].map(input => input.type === "checkbox" ? input.checked : input.value)]));
    const range = each => {
      const name = each.model ? `${each.name} of ${each.model}` : each.name, key = JSON.stringify([each.path, each.model]);
      const [on, low, high] = ticked.get(key) ?? [each.name === "weight", each.low, each.high];
      const tick = make("input", { type: "checkbox", "aria-label": `tune ${name}` }), number = (value, end) => make("input", { type: "number", step: "any", value, "aria-label": `tune ${name}: ${end} value` });
      tick.checked = on;
      return make("div", { class: "range", "data-key": key }, make("label", { class: "check" }, tick, make("span", {}, each.name, each.model ? " of " : "", each.model ? named(each.model) : "")), number(low, "least"), number(high, "largest"));
    };
    const rows = own.filter(each => each.main).map(range), more = own.filter(each => !each.main).map(range), opened = $("ranges").querySelector("details")?.open;
    if ($("ranges").contains(document.activeElement) && rows.length + more.length === ticked.size) return;
    $("ranges").replaceChildren($("ranges").querySelector("legend"), make("div", { class: "range ws-soft", "aria-hidden": "true" }, make("span", {}, "parameter"), make("span", {}, "from"), make("span", {}, "to")), ...rows,
      ...(more.length ? [make("details", { open: opened }, make("summary", {}, `${more.length} more settings`), ...more)] : []));
  }

  task() {
    const { task } = this.link.state;
    if (!task) return;
    for (const stop of document.querySelectorAll("button.stop")) stop.hidden = !task.running;
    for (const doing of document.querySelectorAll(".doing")) doing.textContent = "";  // one task at a time; none after a restart
    this.actions.gate();
    const where = { auto: ["find", "find-result"], try: ["try", "tried"], sweep: ["sweep", "swept-cards"], tune: ["tune", "tuned"], look: ["report", "looked"] }[task.kind];
    if (!where) return;
    const silent = this.link.dead;  // how far it is, or whether it runs at all, is not known
    if (silent && task.running) for (const stop of document.querySelectorAll("button.stop")) stop.hidden = true;
    $(where[0]).querySelector(".doing").textContent = !task.running ? "" : silent ? "No news: the server does not answer." : `${task.doing} …`;
    if ($(where[1]).innerHTML !== task.html) $(where[1]).innerHTML = task.html;
    if (task.report && this.framed !== task.report) this.frame(task.report);
  }

  frame(number) {
    this.framed = this.link.dead ? null : number;
    if (this.link.dead) { $("frame").replaceChildren(make("p", { class: "ws-error" }, "The server does not answer. Press Report again when it is back.")); return; }
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
      const time = new Date(run.when * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
      return make("li", { "data-run": run.id, "data-kind": run.kind }, make("div", { class: "row" }, tick, make("b", {}, `${run.id} · ${NAMES[run.kind] ?? run.kind} · `, named(run.title)), make("span", { class: "ws-soft" }, `${time}, ${run.seconds < 1 ? short(run.seconds) : Math.round(run.seconds)} s`)),
        make("p", { class: "ws-soft" }, numbers), make("div", { class: "row" },
          button("undo", "Load", { "aria-label": `run ${run.id}: load its recipe`, onclick: () => this.link.edit({ kind: "text", base: this.link.text, text: run.recipe }) }),
          run.report ? button("report", "Report", { "aria-label": `run ${run.id}: report`, onclick: () => { this.frame(run.id); $("looked").replaceChildren(); this.open("report"); } }) : null,
          button("save", "Recipe", { "aria-label": `run ${run.id}: save its recipe`, onclick: () => saved(`run-${run.id}.yml`, run.recipe) }),
          button("code", "Python", { "aria-label": `run ${run.id}: save as Python`, onclick: () => saved(`run-${run.id}.py`, this.python(run.recipe)) }),
          button("copy", "Command", { "aria-label": `run ${run.id}: copy its command`, onclick: () => navigator.clipboard?.writeText(run.command) })));
    }));
  }

  async tick(id, on) {
    this.ticked = on ? [...this.ticked, id].slice(-2) : this.ticked.filter(each => each !== id);
    this.runs();
    $("two").replaceChildren();
    if (this.ticked.length === 2) {
      const [first, second] = [...this.ticked].sort((a, b) => a - b);
      try { $("two").innerHTML = (await this.link.post("two", { first, second })).html; } catch (error) { $("two").innerHTML = error.html || "<p class='ws-error'>The server does not answer. Tick the runs again when it is back.</p>"; }
    }
  }
}
