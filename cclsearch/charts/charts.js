"use strict";
// Draws every [data-chart] element from the specifications of `page_data` (charts/chart.py), when it comes into sight.
const cclCharts = (() => {
  const OUTSIDE = new Set(["values", "datasets", "domain", "sort", "options", "labels", "title"]);
  const views = new Map();
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  let data = { charts: {}, config: {}, palette: {} };
  const isDark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : prefersDark.matches;
  };
  const paint = (node, known) => {
    if (Array.isArray(node)) return node.map((value) => paint(value, known));
    if (node && typeof node === "object")
      return Object.fromEntries(Object.entries(node).map(([k, v]) => [k, OUTSIDE.has(k) ? v : paint(v, known)]));
    return typeof node === "string" && known.has(node) ? known.get(node) : node;
  };
  const draw = async (place) => {
    const spec = data.charts[place.dataset.chart];
    const width = Math.floor(place.clientWidth);
    if (!spec || width < 40) return;
    const known = new Map(Object.entries(data.palette).map(([role, pair]) => [role, pair[isDark() ? 1 : 0]]));
    known.set("$width", width);
    known.set("$columns", Math.max(1, Math.floor(width / 170)));
    const painted = paint({ ...spec, config: data.config }, known);
    const kept = views.get(place)?.signals;
    views.get(place)?.result?.finalize();
    const loader = { load: () => Promise.reject(new Error("charts load nothing")) };
    const result = await vegaEmbed(place, painted, {
      mode: "vega-lite", ast: true, actions: false, renderer: "svg", loader, logLevel: 1, defaultStyle: false,
      tooltip: { theme: isDark() ? "dark" : "light" },
    });
    place.querySelector("svg")?.setAttribute("aria-hidden", "true"); // the caption and the summary say it in words
    const inputs = Object.keys(kept ?? {}).filter((name) => kept[name] !== undefined);
    for (const name of inputs) result.view.signal(name, kept[name]);
    if (inputs.length) await result.view.runAsync();
    const bound = (painted.params ?? []).filter((param) => param.bind && param.bind.input).map((param) => param.name);
    const entry = { result, width, signals: {} };
    for (const name of bound) result.view.addSignalListener(name, (_, value) => { entry.signals[name] = value; });
    result.view.addEventListener("click", (_, item) => {
      const trial = item?.datum?.trial;
      if (trial !== undefined) tell(place, trial);
    });
    views.set(place, entry);
    if (trialsOf(place).length && !place.dataset.keys) {
      place.dataset.keys = "yes";
      place.tabIndex = 0;
      place.setAttribute("role", "group");
      place.setAttribute("aria-roledescription", "chart");
      const title = place.closest("figure")?.querySelector("figcaption")?.textContent ?? "chart";
      place.setAttribute("aria-label", `${title}: arrow keys go from trial to trial, Enter opens one`);
      place.addEventListener("keydown", (event) => step(place, event));
    }
    place.dataset.drawn = "yes";
  };
  // By keyboard: arrow keys go from trial to trial in the order of the chart's rows, Enter opens the trial.
  const readout = (place) => {
    const next = place.nextElementSibling;
    if (next?.classList.contains("chart-point")) return next;
    const made = Object.assign(document.createElement("p"), { className: "chart-point note" });
    made.setAttribute("aria-live", "polite");
    place.after(made);
    return made;
  };
  const trialsOf = (place) => {
    const rows = data.charts[place.dataset.chart]?.data?.values ?? [];
    return [...new Map(rows.filter((row) => row.trial !== undefined).map((row) => [row.trial, row])).values()];
  };
  const step = (place, event) => {
    const trials = trialsOf(place);
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -trials.length, End: trials.length };
    const at = Number(place.dataset.at ?? -1);
    if (event.target !== place || !trials.length) return;
    const opens = event.key === "Enter" && trials[at];
    if (!opens && !(event.key in moves)) return;
    event.preventDefault(); // else Enter would also press the button that gets the focus
    if (opens) return tell(place, trials[at].trial);
    const now = Math.max(0, Math.min(trials.length - 1, at + moves[event.key]));
    place.dataset.at = String(now);
    const { trial, shown, config } = trials[now];
    const words = [`trial ${trial}`, shown, config].filter((word) => word !== undefined && word !== "");
    readout(place).textContent = `${words.join(" · ")} (${now + 1} of ${trials.length}; Enter opens it)`;
  };
  const tell = (place, trial) =>
    place.dispatchEvent(new CustomEvent("trial", { bubbles: true, detail: String(trial) }));
  const redraw = (place) => draw(place).catch((error) => {
    place.dataset.drawn = "failed";
    place.textContent = `This chart cannot be drawn: ${error.message}`;
  });
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !views.has(entry.target)) redraw(entry.target);
  }, { rootMargin: "300px" });
  const sized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const drawn = views.get(target);
      if (drawn && Math.abs(drawn.width - Math.floor(target.clientWidth)) > 1) redraw(target);
    }
  });
  const all = () => [...document.querySelectorAll("[data-chart]")];
  const repaint = () => all().filter((place) => views.has(place)).forEach(redraw);
  prefersDark.addEventListener("change", repaint);
  return {
    isDark,
    repaint,
    // `charts`, `config` and `palette` as page_data returns them; call it again when specifications change.
    show(newData) {
      data = newData;
      for (const place of all()) {
        if (views.has(place)) redraw(place);
        seen.observe(place);
        sized.observe(place);
      }
    },
    // Draws at once what is not in sight, before printing or a screenshot.
    drawAll: () => Promise.all(all().filter((place) => !views.has(place)).map(redraw)),
    // Light, dark, or what the reader's system prefers.
    setTheme(theme) {
      if (theme) document.documentElement.dataset.theme = theme;
      else delete document.documentElement.dataset.theme;
      repaint();
    },
  };
})();
window.cclCharts = cclCharts;
