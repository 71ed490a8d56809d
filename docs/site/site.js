// Copy buttons, wrapped lines of code, a version menu, and a search that needs no server: pages that are opened from the disk may load scripts, but no other files.
"use strict";

const COMMON = new Set("a an and are as at be by can do does for from how i if in is it its my of on or that the this to we what when where which with you your".split(" "));

// "resumes", "resuming" and "resumed" are one word.
function stem(word) {
  return word.length > 4 ? word.replace(/(ings?|ed|es|s|e)$/, "") : word.replace(/s$/, "");
}

function words(text) {
  return (text.toLowerCase().match(/[a-z0-9_]+/g) || []).map(stem);
}

// The best sections for a query, the best first. A section: title, title of its page, address, text.
function rank(index, query, most) {
  const all = (query.toLowerCase().match(/[a-z0-9_]+/g) || []);
  const asked = [...new Set(all.filter((word) => !COMMON.has(word)).map(stem))];
  if (!asked.length) return [];
  const matches = (word, term) => word === term || (term.length > 3 && word.startsWith(term));
  const counted = index.map((section) => {
    const [title, page, text] = [words(section[0]), words(section[1]), words(section[3])];
    return asked.map((term) => [title, page, text].map((own) => own.filter((word) => matches(word, term)).length));
  });
  const rarity = asked.map((_, i) => Math.log(1 + index.length / (1 + counted.filter((own) => own[i].some(Boolean)).length)));
  return index
    .map((section, k) => {
      const parts = counted[k].map(([title, page, text], i) =>
        rarity[i] * (8 * Math.min(1, title) + 2 * Math.min(1, page) + Math.min(3, text) / (1 + section[3].length / 3000)));
      const found = parts.filter(Boolean).length / asked.length;
      const phrase = all.length > 1 && words(section[0]).join(" ").includes(all.map(stem).join(" ")) ? 2 : 1;
      return [parts.reduce((a, b) => a + b, 0) * found * found * phrase, section];
    })
    .filter(([score]) => score > 0)
    .sort((a, b) => b[0] - a[0])
    .slice(0, most)
    .map(([, section]) => section);
}

// The text around the first word of a query, or its beginning if the title answers, as parts: [text, whether it was asked for].
function snippet(title, text, query) {
  const asked = (query.toLowerCase().match(/[a-z0-9_]+/g) || []).filter((word) => !COMMON.has(word)).map(stem);
  const parts = text.split(/([A-Za-z0-9_]+)/);
  const hit = (part) => asked.includes(stem(part.toLowerCase()));
  const answers = asked.every((word) => words(title).includes(word));
  const at = answers ? 0 : Math.max(0, parts.findIndex(hit));
  const from = Math.max(0, at - 16);
  const shown = parts.slice(from, from + 60).map((part) => [part, hit(part)]);
  return (from ? [["… ", false]] : []).concat(shown, from + 60 < parts.length ? [[" …", false]] : []);
}

function addCopyButtons() {
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const text = block.querySelector("pre").textContent;
      const commands = text.split("\n").filter((line) => line.startsWith("$ ")).map((line) => line.slice(2));
      await navigator.clipboard.writeText(commands.length ? commands.join("\n") : text);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
}

// The lines of a block, as lists of nodes: highlighted pieces may contain line ends, and none contains another piece.
function lines(pre) {
  const found = [[]];
  for (const node of pre.childNodes) {
    node.textContent.split(/(?<=\n)/).forEach((text, i, all) => {
      const piece = node.nodeType === Node.TEXT_NODE ? document.createTextNode(text) : node.cloneNode(false);
      if (node.nodeType !== Node.TEXT_NODE) piece.textContent = text;
      found.at(-1).push(piece);
      if (text.endsWith("\n")) found.push([]);
    });
  }
  return found.filter((pieces) => pieces.length);
}

// Each line of code is a block, so that a long one is wrapped with an indent instead of being cut off. Its text stays as it is.
function wrapCode() {
  for (const pre of document.querySelectorAll("div.highlight pre")) {
    const wrapped = lines(pre).map((pieces) => {
      const line = document.createElement("span");
      line.className = "line";
      line.append(...pieces);
      return line;
    });
    pre.replaceChildren(...wrapped);
  }
}

// The versions beside this one, if there is a list of them: docs/site/versions.py.
function addVersions() {
  const root = document.documentElement.dataset.content_root || "./";
  const brand = document.querySelector(".sidebar-brand");
  if (!brand) return;
  const script = document.createElement("script");
  script.src = `${root}../versions.js`;
  script.onload = () => {
    const here = new URL(root, location.href);
    const own = here.pathname.split("/").at(-2);
    const page = location.href.split("#")[0].slice(here.href.length) || "index.html";
    const menu = document.createElement("select");
    menu.className = "versions";
    menu.setAttribute("aria-label", "Version of the documentation");
    for (const version of Object.keys(window.SITE_VERSIONS)) {
      menu.add(new Option(version, version, version === own, version === own));
    }
    menu.addEventListener("change", () => {
      const pages = window.SITE_VERSIONS[menu.value];
      location.href = `${root}../${menu.value}/${pages.includes(page) ? page : "index.html"}`;
    });
    brand.after(menu);
  };
  document.head.append(script);
}

function addSearch() {
  const form = document.querySelector("form.sidebar-search-container");
  if (!form) return;
  const root = document.documentElement.dataset.content_root || "./";
  const input = form.querySelector("input[name=q]");
  const list = document.createElement("ol");
  list.className = "found";
  list.setAttribute("aria-live", "polite");
  form.after(list);
  let loading = null;
  const load = () =>
    (loading ||= new Promise((resolve) => {
      const script = document.createElement("script");
      script.src = `${root}_static/search_index.js`;
      script.onload = () => resolve(window.SEARCH_INDEX);
      document.head.append(script);
    }));
  const show = async () => {
    const query = input.value;
    const found = query.trim().length < 2 ? [] : rank(await load(), query, 8);
    if (query !== input.value) return;
    list.replaceChildren(
      ...found.map(([title, page, address, text]) => {
        const item = document.createElement("li");
        const link = document.createElement("a");
        link.href = root + address;
        link.textContent = title === page ? title : `${page}: ${title}`;
        const about = document.createElement("p");
        for (const [part, asked] of snippet(title, text, query)) {
          const piece = document.createElement(asked ? "mark" : "span");
          piece.textContent = part;
          about.append(piece);
        }
        item.append(link, about);
        return item;
      }),
    );
    if (!found.length && query.trim().length > 1) list.textContent = "Nothing found.";
  };
  input.addEventListener("input", show);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    await show();
    const first = list.querySelector("a");
    if (first) location.href = first.href;
  });
}

if (typeof document !== "undefined") {
  document.addEventListener("DOMContentLoaded", () => {
    wrapCode();
    addCopyButtons();
    addVersions();
    addSearch();
  });
} else {
  module.exports = { rank, snippet };
}
