// The page: what follows from which change of the server's state, and what the buttons do.
"use strict";
import { make } from "/assets/controls.js";
import { Desk } from "/assets/desk.js";
import { Link } from "/assets/link.js";
import { Result } from "/assets/result.js";

const $ = id => document.getElementById(id);
const refused = html => { $("refused").innerHTML = html ?? ""; if (html) $("refused").append(make("button", { type: "button", onclick: () => refused("") }, "Close")); };
const SAID = { saved: "Saved", saving: "Saving …", dead: "" };
let desk, result, nameTimer = 0;

const link = new Link({
  refused,
  said: state => {
    if ($("saved").textContent !== SAID[state]) $("saved").textContent = SAID[state];
    $("dead").hidden = state !== "dead";
  },
  shown: names => desk && result && draw(new Set(names)),
});

const actions = {
  async do(action, given = {}) {
    refused("");
    try { return await link.post(action, given); } catch (error) { refused(error.html ?? "<p>The server does not answer. Nothing was started.</p>"); return null; }
  },
  async look(models) { if (await actions.do("look", { models })) { $("frame").replaceChildren(); show("report"); } },
  async try() {
    const version = await link.settled();
    if (version === null) return;
    const models = desk.chosen.slice(0, 11);
    show("try");
    await actions.do("try", { version, models, prompt: $("prompt").value, text: $("judged").value, new_tokens: Number($("tokens").value) });
  },
  async sweep() {
    const version = await link.settled(), [path, model] = JSON.parse($("swept").value || "[[],\"\"]");
    if (version === null) return;
    const values = $("values").value.split(/[\s,;]+/).filter(Boolean).map(Number);
    if (!values.length || values.some(value => !Number.isFinite(value))) { refused("<p>Write numbers, with commas between them.</p>"); return; }
    const asks = $("sweep-asks").checked;
    await actions.do("sweep", { version, path, model, values, prompt: asks ? $("prompt").value : "", text: asks ? $("judged").value : "" });
  },
  async tune() {
    const version = await link.settled();
    if (version === null) return;
    const ranges = [...$("ranges").querySelectorAll("div")].filter(row => row.querySelector("input").checked).map(row => {
      const [, low, high] = row.querySelectorAll("input");
      return [...JSON.parse(row.dataset.key), Number(low.value), Number(high.value)];
    });
    await actions.do("tune", { version, ranges, text: $("judged").value, budget: Number($("budget").value) });
  },
  async merge() {
    const version = await link.settled();
    if (version === null) return;
    before = lastMerge()?.id ?? 0;
    const answer = await actions.do("merge", { version, name: $("name").value, overwrite: $("overwrite").checked, again: $("again").checked });
    if (!answer) return;
    $("overwrite").checked = $("again").checked = false;
    // A fast merge may be over before the events tell that it began.
    if (answer.work.number > link.state.work.number) link.take({ work: answer.work });
  },
};

const step = name => {
  document.body.dataset.step = name;
  for (const button of $("steps").children) button.toggleAttribute("aria-current", button.dataset.step === name);
};
const show = tab => { result.open(tab); step("result"); };

// For screen readers: what changed, once, and not every step of a slider or of a merge.
const told = {};
const tell = (what, words) => {
  if (told[what] !== undefined && told[what] !== words) $("said").textContent = words;
  told[what] = words;
};
const announce = () => {
  const { notes, work, task, preview, document: now } = link.state;
  if (notes && notes.version === now?.version) tell("notes", notes.good ? "The recipe is correct." : now.text.trim() ? `The recipe has ${notes.errors} problem${notes.errors === 1 ? "" : "s"}.` : "");
  if (work) tell("work", work.state === "running" ? `Merging ${work.name}: ${25 * Math.floor(4 * work.share)} percent.` : { done: `${work.name} is merged.`, failed: `Merging ${work.name} failed.`, cancelled: `Merging ${work.name} was cancelled.` }[work.state] ?? "");
  if (task) tell("task", task.running ? `${task.kind} runs.` : task.kind ? `${task.kind} is done.` : "");
  if (preview && !link.pending.length && preview.version === now?.version) tell("preview", $("shown").querySelector(".ws-verdict")?.textContent ?? "");
};

const draw = changed => {
  if (changed.has("studio")) {
    const { studio } = link.state;
    $("hub").hidden = !studio.hub;
    $("where").textContent = `in ${studio.out}`;
    $("tokens").max = studio.max_new_tokens;
    if (!studio.can_run) $("tried").innerHTML = "<p class='ws-hint'>Trying needs torch and transformers: <code>pip install 'weightsmith[moe]'</code></p>";
  }
  if (changed.has("unsaved")) refused(link.state.unsaved);
  if (changed.has("document")) {
    const now = link.state.document;
    $("undo").disabled = !now.undo;
    $("redo").disabled = !now.redo;
    desk.write();
    result.parameters(now.draft.controls);
    $("restore").hidden = Boolean(now.text.trim()) || !remembered;
  }
  if (changed.has("preview")) {
    // What survives of each model, for its card.
    const { preview } = link.state;
    preview.total = Object.fromEntries(Object.entries(preview.survives ?? {}).map(([name, layers]) => {
      const known = layers.filter(share => share !== null);
      return [name, known.length ? `${(100 * known.reduce((a, b) => a + b, 0) / known.length).toFixed(0)} % survives, on average over layers` : ""];
    }));
  }
  if (["document", "models", "preview", "verdicts"].some(name => changed.has(name))) desk.cards();
  if (["document", "preview"].some(name => changed.has(name))) { desk.strips(); result.preview(); }
  if (["document", "notes"].some(name => changed.has(name))) desk.notes();
  if (changed.has("task")) result.task();
  if (changed.has("runs")) { result.runs(); merged(); }
  if (changed.has("work")) work();
  announce();
};

const work = () => {
  const { work } = link.state, running = work.state === "running";
  $("progress").innerHTML = work.html;
  $("merge").disabled = running;
  $("cancel").hidden = !running;
  if (!running) named();
};

// The report of the merge that was started here opens when it is there.
let before = null;
const lastMerge = () => (link.state.runs ?? []).findLast(each => each.kind === "merge");
const merged = () => {
  const run = lastMerge();
  if (before === null || !run || run.id <= before) return;
  before = null;
  if (run.report) { result.frame(run.id); $("looked").replaceChildren(); result.open("report"); }
};

const named = () => {
  clearTimeout(nameTimer);
  nameTimer = setTimeout(async () => {
    const about = await link.post("name", { name: $("name").value }).catch(() => null);
    if (!about) return;
    const { alone } = link.state.studio ?? {};
    $("merge").textContent = about.unfinished && !$("again").checked ? "Resume" : "Merge";
    $("overwrite-field").hidden = !alone || !about.exists;
    $("again-field").hidden = !alone || !about.unfinished;
  }, 150);
};

let remembered = "";
try { remembered = localStorage.getItem("ws-recipe") ?? ""; } catch { /* a browser without storage */ }

desk = new Desk(link, actions);
result = new Result(link, actions);
for (const button of $("steps").children) button.addEventListener("click", () => step(button.dataset.step));
for (const id of ["prompt", "judged", "name"]) {
  try { const kept = localStorage.getItem(`ws-${id}`); if (kept !== null) $(id).value = kept; } catch { /* a browser without storage */ }
  $(id).addEventListener("change", () => { try { localStorage.setItem(`ws-${id}`, $(id).value); } catch { /* a browser without storage */ } });
}
$("name").addEventListener("input", named);
$("again").addEventListener("change", named);
$("merge").addEventListener("click", () => actions.merge());
$("cancel").addEventListener("click", () => actions.do("cancel"));
$("try-first").addEventListener("click", () => actions.try());
$("restore").addEventListener("click", () => link.edit({ kind: "text", base: link.text, text: remembered }));
fetch("/about").then(answer => answer.json()).then(about => desk.known(about));
if (Object.keys(link.state).length) draw(new Set(Object.keys(link.state)));
