"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.cells[column];
        const text = cell.hasAttribute("data-sort") ? cell.dataset.sort : cell.textContent.trim();
        return text === "" ? null : cell.hasAttribute("data-sort") ? Number(text) : text.toLowerCase();
      };
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    });
  });
}
for (const box of document.querySelectorAll("[data-filters]")) {
  const table = document.getElementById(box.dataset.filters);
  const selects = [...box.querySelectorAll("select")];
  const count = box.querySelector(".count");
  const apply = () => {
    let shown = 0;
    const rows = [...table.tBodies[0].rows];
    for (const row of rows) {
      const keep = selects.every((s) => s.value === "" || row.getAttribute("data-" + s.dataset.column) === s.value);
      row.hidden = !keep;
      shown += keep;
    }
    count.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`;
  };
  selects.forEach((select) => select.addEventListener("change", apply));
  apply();
}
