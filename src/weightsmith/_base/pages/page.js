"use strict";
const exact = cell => cell.dataset.v ?? cell.textContent;
const status = (element, text) => { const line = element.closest("section").querySelector(".status"); if (line) line.textContent = text; };

// Tables: sort by a column, show the rows that contain a text or belong to a place, download.
for (const section of document.querySelectorAll("section.table")) {
  const body = section.querySelector("tbody"), rows = [...body.rows], heads = [...section.querySelectorAll("thead th")];
  const input = section.querySelector("input");
  section.show = (wanted, note) => {
    let shown = 0;
    for (const row of rows) { row.hidden = !wanted(row); shown += !row.hidden; }
    status(body, note || (shown < rows.length ? `${shown} of ${rows.length} rows` : ""));
  };
  input.addEventListener("input", () => {
    const text = input.value.toLowerCase();
    section.show(row => row.textContent.toLowerCase().includes(text));
  });
  heads.forEach((head, i) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === (head.classList.contains("n") ? "descending" : "ascending");
    const sign = head.classList.contains("n") !== down ? -1 : 1;
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const key = row => exact(row.cells[i]), last = row => key(row) === "" || (head.classList.contains("n") && !row.cells[i].dataset.v);
    rows.sort((a, b) => {
      const x = key(a), y = key(b);
      if (last(a) || last(b)) return last(a) - last(b) || x.localeCompare(y, "en");  // marks follow the numbers
      return sign * (head.classList.contains("n") ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true }));
    });
    body.append(...rows);
  }));
  section.querySelector("button.csv").addEventListener("click", () => {
    const cell = text => /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    const lines = [heads.map(head => head.dataset.name), ...rows.filter(row => !row.hidden).map(row => [...row.cells].map(exact))];
    save(lines.map(line => line.map(cell).join(",")).join("\n") + "\n", "text/csv", `${section.id}.csv`);
  });
}

function save(text, type, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
const data = document.getElementById("data");
document.querySelector("button.json")?.addEventListener("click", () => save(data.textContent, "application/json", "report.json"));

// Heat maps: arrow keys move between cells, and a cell shows its tensors in the table.
for (const map of document.querySelectorAll("section.heat svg")) {
  const cells = [...map.querySelectorAll("a")], label = cell => cell.querySelector("title").textContent;
  cells.forEach((cell, i) => {
    cell.setAttribute("tabindex", i ? "-1" : "0");
    cell.addEventListener("focus", () => status(map, label(cell)));
    cell.addEventListener("mouseenter", () => status(map, label(cell)));
    cell.addEventListener("click", event => {
      const table = document.getElementById(cell.getAttribute("href").slice(1));
      if (!table) return;
      event.preventDefault();
      const place = label(cell).slice(0, label(cell).lastIndexOf(":"));
      table.querySelector("input").value = "";
      table.show(row => row.dataset.p === cell.dataset.p, `${place}; type into the search field to see others`);
      table.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
      table.querySelector("input").focus({ preventScroll: true });
    });
  });
  map.addEventListener("keydown", event => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const from = event.target.closest("a");
    if (!step || !from) return;
    event.preventDefault();
    const box = one => one.querySelector("rect"), at = one => [box(one).y.baseVal.value, box(one).x.baseVal.value], [y, x] = at(from);
    const ahead = cells.filter(one => { const [b, a] = at(one); return step[0] ? a === x && Math.sign(b - y) === step[0] : b === y && Math.sign(a - x) === step[1]; });
    const next = ahead.sort((p, q) => Math.abs(at(p)[0] - y) + Math.abs(at(p)[1] - x) - Math.abs(at(q)[0] - y) - Math.abs(at(q)[1] - x))[0];
    if (next) { from.setAttribute("tabindex", "-1"); next.setAttribute("tabindex", "0"); next.focus(); }
  });
}
