// The link to the server. What the page shows is the server's state with the edits that are not there yet laid over it: edits go in
// order, one request at a time, and the last one for a value wins, however slow the link is.
"use strict";
export const RETRY_MS = 500;
const DEAD_MS = 3000;  // a busy machine may be late with several beats
export const LOST_MS = 10000;  // an answer that takes longer is lost: the request is sent again
const stored = (name, none) => { try { return JSON.parse(sessionStorage.getItem(name)) ?? none; } catch { return none; } };
const keep = (name, value) => { try { sessionStorage.setItem(name, JSON.stringify(value)); } catch { /* a browser without storage */ } };

export class Link {
  // shown(changed): called with the names of values that changed; said(state): "saved", "saving" or "dead"; refused(html).
  constructor({ shown, said, refused }) {
    Object.assign(this, { shown, said, refused, state: {}, waiting: [] });
    this.tab = crypto.randomUUID?.() ?? String(Math.random());  // of this load: a tab that is duplicated is another one
    this.number = 0;
    ({ changes: this.sent, as: this.as } = stored("ws-sent", { changes: [] }));  // without an answer: sent again as the same
    this.queue = stored("ws-queue", []);
    this.sending = false;
    this.refusals = 0;
    this.heard = performance.now();
    this.dead = false;
    this.life = new AbortController();  // of the server: what it was asked ends with it
    this.listen();
    // A browser has six connections to a server for all its tabs: one that nobody sees gives its own back.
    document.addEventListener("visibilitychange", () => {
      this.events.close();
      if (!document.hidden) { this.heard = performance.now(); this.listen(); }
    });
    setInterval(() => this.check(), 250);
    this.send();
  }

  get pending() { return [...this.sent, ...this.queue]; }

  listen() {
    this.listened = performance.now();
    this.events = new EventSource("/events");
    this.events.onmessage = event => {
      this.heard = performance.now();
      const changed = JSON.parse(event.data);
      const again = changed.studio && this.state.studio && changed.studio.id !== this.state.studio.id;
      const { document: old, unsaved } = this.state;
      if (again) {
        this.life.abort();
        this.life = new AbortController();
        delete this.state.document;
        delete this.state.work;
        delete this.state.notes;  // its versions are not those of the one before
        if (this.state.preview) this.state.preview.version = -1;
      }
      this.take(changed);
      // The disk refused the recipe until the server ended: this page alone has it.
      if (again && unsaved && old && changed.document && old.text !== changed.document.text) this.restore(old.text, changed.document.text);
      this.check();
    };
    this.events.onerror = () => { if (this.events.readyState === EventSource.CLOSED && !document.hidden) setTimeout(() => this.listen(), RETRY_MS); };
  }

  check() {
    const now = performance.now();
    this.dead = !document.hidden && now - this.heard > DEAD_MS;
    // A connection that was lost in between is never told so.
    if (this.dead && now - Math.max(this.listened, this.heard) > LOST_MS) { this.events.close(); this.listen(); }
    this.said(this.dead ? "dead" : this.pending.length ? "saving" : "saved");
  }

  take(changed) {
    const { document: now, work } = this.state;
    if (changed.document && now && changed.document.version < now.version) delete changed.document;
    if (changed.work && work && changed.work.number < work.number) delete changed.work;
    Object.assign(this.state, changed);
    if (Object.keys(changed).length) this.shown(Object.keys(changed));
  }

  // Send a text that the server lost, before the edits that were made to it.
  restore(text, base) {
    this.queue.unshift({ kind: "text", base, text });
    keep("ws-queue", this.queue);
    this.check();
    this.send();
  }

  edit(change) {
    const last = this.queue.at(-1);
    if (change.kind === "set") {
      // An older value for the same control goes, unless an edit of another kind came in between.
      const from = this.queue.findLastIndex(each => each.kind !== "set") + 1;
      this.queue = this.queue.filter((each, i) => i < from || JSON.stringify(each.path) !== JSON.stringify(change.path) || each.model !== change.model);
      this.queue.push(change);
    } else if (change.kind === "text" && last?.kind === "text") last.text = change.text;
    else {
      const typed = change.kind === "text" && this.pending.findLast(each => each.kind === "text");
      if (typed) change.base = typed.text;  // what it was typed into
      this.queue.push(change);
    }
    keep("ws-queue", this.queue);
    this.check();
    this.send();
  }

  async send() {
    if (this.sending) return;
    this.sending = true;
    let patience = LOST_MS;  // doubled, as the link may be slow
    while (this.pending.length) {
      if (!this.sent.length) {
        this.sent = this.queue;
        this.queue = [];
        this.as = { tab: this.tab, number: ++this.number };
        keep("ws-sent", { changes: this.sent, as: this.as });
        keep("ws-queue", this.queue);
      }
      let answer;
      try {
        answer = await this.post("edit", { ...this.as, changes: this.sent }, AbortSignal.timeout(patience));
        patience = LOST_MS;
      } catch (error) {
        if (error.name === "TimeoutError") patience *= 2;
        if (!error.html) { await new Promise(done => setTimeout(done, RETRY_MS)); continue; }
        this.refusals += 1;
        this.refused(error.html);
      }
      this.sent = [];
      keep("ws-sent", { changes: [] });
      if (answer) this.take({ document: answer.document });
      this.shown(["document"]);  // even if the events brought a newer one before the answer
    }
    this.sending = false;
    this.check();
    for (const done of this.waiting.splice(0)) done();
  }

  // Resolves when the server has every edit; with the version of the recipe, or null if it refused one, which is said.
  async settled() {
    const before = this.refusals;
    if (this.pending.length) await new Promise(done => this.waiting.push(done));
    return this.refusals === before ? this.state.document.version : null;
  }

  // Throws an error with `html` for what the server refuses, without it if it does not answer.
  async post(action, given, signal = this.life.signal) {
    const answer = await fetch(`/do/${action}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(given), signal });
    const found = await answer.json().catch(error => { if (error.name === "TimeoutError") throw error; return null; });
    if (answer.ok && found) return found;  // half an answer is none
    // Only the studio refuses; a proxy in between, or a studio that was started again with another token, may answer later.
    const refusal = answer.status === 413 ? "<p>This is too long for the studio.</p>" : [400, 409].includes(answer.status) ? found?.problem : "";
    throw Object.assign(new Error(action), { html: refusal ?? "" });
  }

  // The value of a control: the newest edit of it, else the recipe's.
  value(control) {
    const key = JSON.stringify(control.path);
    return this.pending.findLast(each => each.kind === "set" && each.model === control.model && JSON.stringify(each.path) === key)?.value;
  }

  // What the server says of the recipe that is shown; null while it checks the newest edits.
  get checked() {
    const { notes, document: now } = this.state;
    return notes && notes.version === now?.version && !this.pending.length ? notes : null;
  }

  // The recipe's text: what is being typed, else the server's.
  get text() { return this.pending.findLast(each => each.kind === "text")?.text ?? this.state.document?.text ?? ""; }
}
