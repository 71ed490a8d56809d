// The page: what follows from which change of the server's state, and what the buttons do.
"use strict";
import { button } from "/assets/controls.js";
import { Link, LOST_MS, RETRY_MS } from "/assets/link.js";
import { Mix } from "/assets/mix.js";
import { Result } from "/assets/result.js";

const $ = id => document.getElementById(id);
const refused = html => { $("refused").innerHTML = html ?? ""; if (html) $("refused").append(button("close", "Close", { onclick: () => refused("") })); };
// The request may have arrived, and only the answer be lost.
const SILENT = "<p class='silent'>The server did not answer. Once it is back, work that had started is shown as interrupted. Otherwise, press the button again.</p>";
const AGAIN = "<p>The studio was restarted. Work that had started is shown as interrupted. Otherwise, press the button again.</p>";
const NAME_MS = 150;  // a pause in typing
const CHECKING = "Checking the recipe …", NAMING = "Checking the name …";
const SAID = { saved: "Saved", saving: "Saving …", dead: "Not connected" };
let link, mix, result, nameTimer = 0, naming = 0, state = "saving", about = null;

// "Saved" is what the server has, and its disk: it says so in `unsaved` if the disk refused.
const said = () => {
  const unsaved = state !== "dead" && link.state.unsaved, words = unsaved ? `Not saved: ${unsaved.replace(/ \([^(]*\)$/, "")}` : SAID[state];
  if ($("saved").textContent !== words) $("saved").textContent = words;
  $("saved").className = unsaved ? "ws-bad" : state;
  $("dead").hidden = state !== "dead";
  $("unsaved").hidden = !unsaved;
  const more = unsaved ? `Not saved: ${unsaved}. The recipe is kept in this page. The studio tries to save it every second.` : "";
  if ($("unsaved").textContent !== more) $("unsaved").textContent = more;
};

link = new Link({
  refused,
  said: now => {
    if (now === state) return;
    state = now;
    if (result) { said(); work(); result.task(); actions.gate(); }
  },
  shown: names => mix && result && draw(new Set(names)),
});

// What a button of an error message does: `Mend` in words.py names them.
const MENDS = {
  tokens: value => { $("row-tokens").value = value; show("tune"); $("row-tokens").focus(); result.fit(); },
  overwrite: () => { $("overwrite").checked = true; $("merge").focus(); },
  again: () => { $("again").checked = true; named(); },
  models: () => { step("models"); $("search").focus(); },
  text: () => { show("tune"); $("tune-text").focus(); },
  prompt: () => { show("try"); $("prompt").focus(); },
  find: () => { show("find"); $("find-texts").open = true; },
  report: () => show("report"),
  why: () => refused(link.state.work.problem),
};

const actions = {
  // Why each button cannot be used now; said before it is pressed. "": it can.
  gate() {
    const { studio, task, work: merging } = link.state, { checked } = link;
    if (!studio || !merging) return;
    const running = merging.state === "running", { max_characters: most } = studio;
    const server = state === "dead" ? "The studio's server does not answer." : "", recipe = server || (!link.text.trim() ? "Choose a base and models." : !checked ? CHECKING : checked.good ? "" : checked.reason || "The recipe cannot be merged.");
    const long = [$("prompt"), $("judged")].find(each => each.value.length > most), limit = long ? `Shorten the text: it has ${long.value.length.toLocaleString("en")} characters, and the limit is ${most.toLocaleString("en")}.` : "";
    const asked = $("prompt").value.trim() || $("judged").value.trim() ? "" : "Enter a prompt or some text.";
    const tokens = Number($("tokens").value), count = tokens >= 1 && tokens <= studio.max_new_tokens ? "" : `New tokens: 1 to ${studio.max_new_tokens}.`;
    const packages = studio.missing.try;
    const here = about?.name === $("name").value ? about : null, taken = here?.exists && !$("overwrite").checked;
    const name = !here ? NAMING : !here.valid ? "A name can have up to 100 letters, digits, - _ and ." : !taken ? "" : studio.alone ? `${$("name").value} exists: rename, or tick “replace it”.` : `${$("name").value} exists: choose another name.`;
    const values = $("values").value.split(/[\s,;]+/).filter(Boolean);
    const sweep = !$("swept").value ? "This recipe has no number to sweep." : !values.length || values.length > studio.max_sweep || values.some(each => !Number.isFinite(Number(each))) ? `Enter up to ${studio.max_sweep} numbers, separated by commas.` : "";
    const why = recipe || name, trying = recipe || packages || asked || count || limit;
    set("try-now", trying, "try-limit");
    set("try-first", trying);
    set("sweep-now", recipe || sweep || ($("sweep-asks").checked ? packages || asked || limit : ""), "sweep-limit");
    set("tune-now", recipe || this.tuning(), "tune-limit");
    set("find-now", server || this.finding() || name, "find-limit");
    for (const id of ["find-first", "find-open"]) $(id).disabled = Boolean(server);
    $("look").disabled = Boolean(server) || task?.running || !mix.chosen.length;
    for (const id of ["example", "example-here"]) $(id).disabled = Boolean(server);
    $("merge").disabled = running || Boolean(why);
    $("why").textContent = running ? "" : why || `Ready: ${checked.costs?.[0]?.[1] ?? ""}`;
    $("why").classList.toggle("waits", [CHECKING, NAMING].includes(why));
    $("why").classList.toggle("ready", !why);
    $("why").classList.toggle("minor", !recipe && taken && merging.state === "done" && merging.name === $("name").value.trim());  // the bar says that it is done
    for (const [each, done] of [["models", mix.chosen.length > 1], ["mix", Boolean(link.state.notes?.good)], ["result", merging.state === "done"]])
      for (const badge of document.querySelectorAll(`button[data-step=${each}] .badge, .badge[data-step=${each}]`)) badge.classList.toggle("done", done);
  },
  tuning() {
    const { studio } = link.state, rows = [...$("ranges").querySelectorAll(".range[data-key]")].map(row => row.querySelectorAll("input")).filter(([tick]) => tick.checked);
    if (studio.missing.tune) return studio.missing.tune;
    if (!rows.length) return "Tick at least one parameter.";
    if (rows.some(([, low, high]) => low.value === "" || high.value === "" || Number(low.value) >= Number(high.value))) return "Each range must go from a smaller number to a larger one.";
    const text = $("tune-text").value, budget = Number($("budget").value), tokens = Number($("row-tokens").value || 512);
    if (!text.trim()) return "Enter some text.";
    if (text.length > studio.max_characters) return `Shorten the text: the limit is ${studio.max_characters.toLocaleString("en")} characters.`;
    if (!(budget >= 2 && budget <= studio.max_budget)) return `Candidates: 2 to ${studio.max_budget.toLocaleString("en")}.`;
    if (!(tokens >= 2)) return "A row needs at least 2 tokens.";
    return result.fitted && result.fitted.rows < result.fitted.needed ? "The text is too short." : "";
  },
  finding() {
    const { studio } = link.state, { base } = mix.draft, models = mix.fineTunes, written = [...$("find-fields").querySelectorAll("textarea")].map(each => each.value);
    if (studio.missing.find) return studio.missing.find;
    if (!base) return "Press Base on the model that the others were tuned from.";
    if (models.length < studio.fewest) return models.length ? "Press Add on one more fine-tune." : "Press Add on two or more fine-tunes.";
    if (models.length > studio.most) return `Choose up to ${studio.most} fine-tunes.`;
    if (written.some(text => text.length > studio.max_characters)) return `Shorten the texts: the limit is ${studio.max_characters.toLocaleString("en")} characters each.`;
    const texts = written.filter(text => text.trim()).length;
    return texts && texts < models.length ? "Give every fine-tune a text, or none." : "";
  },
  // The version of the recipe once the server has every edit; null if it refused one, or was started again meanwhile.
  async version() {
    const { id } = link.state.studio, version = await link.settled();
    if (version === null || link.state.studio.id === id) return version;
    refused("<p>The studio was restarted before your work started. Press the button again.</p>");
    return null;
  },
  async find() {
    const version = await actions.version();
    if (version === null) return;
    const texts = Object.fromEntries([...$("find-fields").querySelectorAll("textarea")].map(each => [each.dataset.model, each.value]));
    if (await actions.do("find", { version, name: $("name").value, texts, overwrite: $("overwrite").checked })) $("overwrite").checked = false;
  },
  async do(action, given = {}) {
    refused("");
    const { id } = link.state.studio;
    try { return await link.post(action, given); } catch (error) { refused(error.html || (id === link.state.studio.id ? SILENT : AGAIN)); return null; }
  },
  async look(models) {
    const shown = [...$("frame").childNodes];
    $("frame").replaceChildren();  // now: on a slow link, the report may be there before the answer
    if (await actions.do("look", { models })) show("report");
    else if (!$("frame").childElementCount) $("frame").replaceChildren(...shown);
  },
  async try() {
    const version = await actions.version();
    if (version === null) return;
    const models = mix.chosen.slice(0, 11);
    show("try");
    await actions.do("try", { version, models, prompt: $("prompt").value, text: $("judged").value, new_tokens: Number($("tokens").value) });
  },
  async sweep() {
    const version = await actions.version(), [path, model] = JSON.parse($("swept").value || "[[],\"\"]");
    if (version === null) return;
    const values = $("values").value.split(/[\s,;]+/).filter(Boolean).map(Number);
    const asks = $("sweep-asks").checked;
    await actions.do("sweep", { version, path, model, values, prompt: asks ? $("prompt").value : "", text: asks ? $("judged").value : "" });
  },
  async tune() {
    const version = await actions.version();
    if (version === null) return;
    const ranges = [...$("ranges").querySelectorAll(".range[data-key]")].filter(row => row.querySelector("input").checked).map(row => {
      const [, low, high] = row.querySelectorAll("input");
      return [...JSON.parse(row.dataset.key), Number(low.value), Number(high.value)];
    });
    await actions.do("tune", { version, ranges, text: $("tune-text").value, budget: Number($("budget").value), tokens: $("row-tokens").value ? Number($("row-tokens").value) : null });
  },
  async merge() {
    const version = await actions.version();
    if (version === null) return;
    before = lastMerge()?.id ?? 0;
    const answer = await actions.do("merge", { version, name: $("name").value, overwrite: $("overwrite").checked, again: $("again").checked });
    if (!answer) return;
    $("overwrite").checked = $("again").checked = false;
    // A fast merge may be over before the events tell that it began.
    if (answer.work.number > link.state.work.number) link.take({ work: answer.work });
  },
};

const set = (id, why, said) => {
  $(id).disabled = Boolean(why) || Boolean(link.state.task?.running);
  if (said) $(said).textContent = link.state.task?.running ? "" : why;
  else $(id).title = why;
};

const step = name => {
  document.body.dataset.step = name;
  for (const each of $("steps").children) { if (each.dataset.step === name) each.setAttribute("aria-current", "step"); else each.removeAttribute("aria-current"); }
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
  if (notes && notes.version === now?.version) tell("notes", notes.good ? "The recipe is correct." : now.text.trim() ? notes.reason : "");
  if (work) tell("work", work.state === "running" ? `Merging ${work.name}: ${25 * Math.floor(4 * work.share)} percent.` : { done: `${work.name} is merged.`, published: `${work.name} is merged.`, failed: `Merging ${work.name} failed.`, cancelled: `Merging ${work.name} was cancelled.`, interrupted: `Merging ${work.name} was interrupted.` }[work.state] ?? "");
  if (task) tell("task", task.running ? (task.kind === "auto" ? `${task.doing}.` : `${task.kind} runs.`) : task.kind ? `${task.kind === "auto" ? "The search" : task.kind} is done.` : "");
  if (preview && !link.pending.length && preview.version === now?.version) tell("preview", $("shown").querySelector(".ws-verdict")?.textContent ?? "");
};

const draw = changed => {
  if (changed.has("studio")) {
    const { studio } = link.state;
    if ($("refused").querySelector(".silent")) refused(AGAIN);
    $("hub").hidden = !studio.hub;
    $("where").textContent = `in ${studio.out}`;
    $("tokens").max = studio.max_new_tokens;
    $("budget").max = studio.max_budget;
  }
  if (changed.has("unsaved")) said();
  if (changed.has("document")) {
    const now = link.state.document;
    $("undo").disabled = !now.undo;
    $("redo").disabled = !now.redo;
    mix.write();
    result.parameters(now.draft.controls);
    $("start").hidden = Boolean(now.text.trim());
    $("find-open").hidden = !now.text.trim();
    result.finds(mix.draft.base, mix.fineTunes);
    $("restore").hidden = !remembered;
    if (!$("tune").hidden) result.fit();
  }
  if (changed.has("preview")) {
    // What survives of each model, for its card.
    const { preview } = link.state;
    preview.total = Object.fromEntries(Object.entries(preview.survives ?? {}).map(([name, layers]) => {
      const known = layers.filter(share => share !== null);
      return [name, known.length ? `${(100 * known.reduce((a, b) => a + b, 0) / known.length).toFixed(0)}% survives on average` : ""];
    }));
  }
  if (["document", "models", "preview", "verdicts"].some(name => changed.has(name))) mix.cards();
  if (["document", "preview"].some(name => changed.has(name))) { mix.strips(); result.preview(); }
  if (["document", "notes"].some(name => changed.has(name))) mix.notes();
  if (changed.has("task")) { result.task(); if (link.state.task?.kind === "auto" && !link.state.task.running) named(); }
  if (changed.has("runs")) { result.runs(); merged(); }
  if (changed.has("work")) work();
  actions.gate();
  announce();
};

let failed = null;  // the last merge whose error was shown, or that failed before the page was opened
const work = () => {
  const { work } = link.state;
  if (!work) return;
  const running = work.state === "running";
  // How far it was, and how long it will take, is not known while the server is silent.
  if (running && state === "dead") $("progress").textContent = `No news of ${work.name}.`;
  else if ($("progress").innerHTML !== work.html) $("progress").innerHTML = work.html;
  $("cancel").hidden = !running;
  if (work.state === "failed" && failed !== null && work.number !== failed) refused(work.problem);
  failed = work.number - running;
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

// Check whether the name is free. Repeat until the server has answered for the current name.
const named = (ms = NAME_MS) => {
  clearTimeout(nameTimer);
  nameTimer = setTimeout(async () => {
    const name = $("name").value, asked = ++naming;
    let answer;
    try {
      answer = await link.post("name", { name }, AbortSignal.timeout(LOST_MS));
    } catch (error) {
      if (!error.html) { if (asked === naming) named(RETRY_MS); return; }
      answer = { valid: false, exists: false, unfinished: false };
    }
    if (asked !== naming || name !== $("name").value) return;  // a newer question is under way
    about = { ...answer, name };
    const { alone } = link.state.studio ?? {};
    $("merge").querySelector("span").textContent = about.unfinished && !$("again").checked ? "Resume" : "Merge";
    $("overwrite-field").hidden = !alone || !about.exists;
    $("again-field").hidden = !alone || !about.unfinished;
    if (!about.exists) $("overwrite").checked = false;
    actions.gate();
  }, ms);
};

let remembered = "";
try { remembered = localStorage.getItem("ws-recipe") ?? ""; } catch { /* a browser without storage */ }

mix = new Mix(link, actions);
result = new Result(link, actions);
said();
for (const each of $("steps").children) each.addEventListener("click", () => step(each.dataset.step));
for (const each of $("skip").children) each.addEventListener("click", () => { if (each.dataset.step) step(each.dataset.step); });
document.addEventListener("click", event => {
  const mend = event.target.closest("button[data-mend]");
  if (mend && Object.hasOwn(MENDS, mend.dataset.mend)) { refused(""); MENDS[mend.dataset.mend](mend.dataset.value); actions.gate(); }
  if (event.target.closest("button[data-line]")) { refused(""); step("mix"); }
}, { capture: true });
for (const id of ["prompt", "judged", "name"]) {
  try { const kept = localStorage.getItem(`ws-${id}`); if (kept !== null) $(id).value = kept; } catch { /* a browser without storage */ }
  $(id).addEventListener("change", () => { try { localStorage.setItem(`ws-${id}`, $(id).value); } catch { /* a browser without storage */ } });
}
$("tune-text").value = $("judged").value;
$("tune-text").addEventListener("change", () => { try { localStorage.setItem("ws-judged", $("tune-text").value); } catch { /* a browser without storage */ } });
$("name").addEventListener("input", () => { named(); actions.gate(); });
$("overwrite").addEventListener("change", () => actions.gate());
$("again").addEventListener("change", () => named());
for (const id of ["find-first", "find-open"]) $(id).addEventListener("click", () => show("find"));
$("find-now").addEventListener("click", () => actions.find());
$("merge").addEventListener("click", () => actions.merge());
$("cancel").addEventListener("click", () => actions.do("cancel"));
$("try-first").addEventListener("click", () => actions.try());
$("restore").addEventListener("click", () => link.edit({ kind: "text", base: link.text, text: remembered }));
// Goals and methods; asked again if the server ends before it has answered.
const learn = async () => {
  try {
    const answer = await fetch("/about");
    if (answer.ok) return mix.known(await answer.json());
  } catch { /* no server */ }
  setTimeout(learn, 500);
};
learn();
if (Object.keys(link.state).length) draw(new Set(Object.keys(link.state)));
