"use strict";
const byId = (id) => document.getElementById(id);
const unpack = async (id) => {
  const bytes = Uint8Array.from(atob(byId(id).textContent.trim()), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};
const save = (name, type, text) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

// Tables: rows of trials have a row of details after them, which moves and hides with them.
const detailOf = (row) => (row.nextElementSibling?.classList.contains("detail") ? row.nextElementSibling : null);
const rowsOf = (table) => [...table.tBodies[0].rows].filter((row) => !row.classList.contains("detail"));
const keyOf = (cell) => {
  const text = cell.hasAttribute("data-sort") ? cell.dataset.sort : cell.textContent.trim();
  return text === "" ? null : cell.hasAttribute("data-sort") ? Number(text) : text.toLowerCase();
};
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = rowsOf(table).map((row) => [keyOf(row.cells[column]), row, detailOf(row)]);
      keyed.sort(([x], [y]) => {
        if (x === null || y === null) return (x === null) - (y === null);
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
      });
      table.tBodies[0].append(...keyed.flatMap(([, row, detail]) => (detail ? [row, detail] : [row])));
    });
  });
}
const open = (row, isOpen) => {
  const detail = detailOf(row);
  if (!detail) return;
  detail.hidden = !isOpen || row.hidden;
  row.querySelector("button.open").setAttribute("aria-expanded", String(isOpen));
};
for (const button of document.querySelectorAll("button.open"))
  button.addEventListener("click", () => open(button.closest("tr"), button.getAttribute("aria-expanded") !== "true"));
for (const box of document.querySelectorAll("[data-filters]")) {
  const table = byId(box.dataset.filters);
  const selects = [...box.querySelectorAll("select")];
  const search = box.querySelector("input[type=search]");
  const count = box.querySelector(".count");
  const texts = new WeakMap();
  const textOf = (row) => {
    if (!texts.has(row)) texts.set(row, (row.textContent + " " + (detailOf(row)?.textContent ?? "")).toLowerCase());
    return texts.get(row);
  };
  const apply = () => {
    const words = (search?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const rows = rowsOf(table);
    let shown = 0;
    for (const row of rows) {
      const keep = selects.every((s) => s.value === "" || row.getAttribute("data-" + s.dataset.column) === s.value)
        && (!words.length || words.every((word) => textOf(row).includes(word)));
      row.hidden = !keep;
      shown += keep;
      const detail = detailOf(row);
      if (detail) detail.hidden = !keep || row.querySelector("button.open").getAttribute("aria-expanded") !== "true";
    }
    count.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`;
  };
  selects.forEach((select) => select.addEventListener("change", apply));
  search?.addEventListener("input", apply);
  apply();
  const style = document.head.appendChild(document.createElement("style"));
  const columns = [...box.querySelectorAll("input[data-hides]")];
  const choose = () => {
    const rule = (box) => `#${table.id}>*>tr:not(.detail)>:nth-child(${box.dataset.hides})`;
    const off = columns.filter((box) => !box.checked).map(rule);
    style.textContent = off.length ? `${off.join(",")}{display:none}` : "";
  };
  columns.forEach((input) => input.addEventListener("change", choose));
  choose();
  box.querySelector("button.csv")?.addEventListener("click", () => {
    const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const safe = (text) => quote(/^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text);
    const lines = [[...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim())];
    for (const row of rowsOf(table).filter((row) => !row.hidden))
      lines.push([...row.cells].map((cell) => cell.dataset.sort || cell.textContent.trim()));
    save(`${box.dataset.name}.csv`, "text/csv", lines.map((line) => line.map(safe).join(",")).join("\n") + "\n");
  });
}
for (const button of document.querySelectorAll("button.copy"))
  button.addEventListener("click", async () => {
    const text = byId(button.dataset.copies).textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(byId(button.dataset.copies));
      button.textContent = "Selected: press Ctrl+C";
    }
  });
for (const button of document.querySelectorAll("button.perfetto"))
  button.addEventListener("click", () => save(`${button.dataset.name}.json`, "application/json", byId(button.dataset.saves).textContent));

// Light and dark: the reader's preference until the switch is used.
const themeButton = byId("theme");
const isDark = () => (document.documentElement.dataset.theme
  ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
const nameTheme = () => { themeButton.textContent = isDark() ? "Light theme" : "Dark theme"; };
themeButton.hidden = false;
themeButton.addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  window.cclCharts?.setTheme(theme);
  nameTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
nameTheme();

// A click on a trial in a chart opens it in the table of its run.
document.addEventListener("trial", (event) => {
  const section = event.target.closest("section.run");
  const row = section?.querySelector(`tr[data-trial="${CSS.escape(event.detail)}"]`);
  if (!row || row.hidden) return;
  open(row, true);
  row.querySelector("button.open").focus({ preventScroll: true });
  row.scrollIntoView({ block: "center" });
});
if (byId("packed-script"))
  (async () => {
    const [charts, text] = await Promise.all([unpack("packed-charts"), unpack("packed-script")]);
    const script = document.createElement("script");
    script.textContent = text;
    document.head.append(script);
    window.cclCharts.show(JSON.parse(charts));
  })().catch((error) => {
    for (const place of document.querySelectorAll("[data-chart]")) place.textContent = `No charts: ${error.message}`;
  });
