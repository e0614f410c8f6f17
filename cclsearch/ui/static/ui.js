"use strict";
const stored = (key) => { try { return localStorage.getItem(key); } catch { return null; } };
const keep = (key, value) => { try { localStorage.setItem(key, value); } catch { /* storage is off */ } };
const say = (text, isError) => {
  const box = document.getElementById("message");
  box.textContent = text;
  box.className = isError ? "message error" : "message";
};

// Light, dark, or what the system prefers.
document.getElementById("theme").addEventListener("click", () => {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const theme = isDark ? "light" : "dark";
  keep("ccl-theme", theme);
  document.documentElement.dataset.theme = theme;
  window.cclCharts?.setTheme(theme);
});

// Tooltips have their style in ui.css: the content policy refuses the one that Vega would add to the page.
if (window.vegaEmbed) {
  const embed = window.vegaEmbed;
  window.vegaEmbed = (place, spec, options) =>
    embed(place, spec, { ...options, tooltip: { ...options.tooltip, disableDefaultStyle: true } });
}

// Charts: their specifications come as JSON, and again when the run has changed.
let charts = null;
const loadCharts = async () => {
  const place = document.querySelector("[data-charts]");
  if (!place || !window.cclCharts) return;
  const answer = await fetch(place.dataset.charts);
  if (!answer.ok) return;
  const text = await answer.text();
  if (text === charts) return;
  charts = text;
  const data = JSON.parse(text);
  const names = Object.keys(data.described);
  const known = [...place.querySelectorAll("[data-chart]")].map((each) => each.dataset.chart);
  if (names.join() !== known.join()) {
    place.replaceChildren(...names.map((name) => {
      const figure = document.createElement("figure"), title = document.createElement("figcaption");
      const picture = document.createElement("div"), chart = document.createElement("div");
      const summary = document.createElement("p");
      title.textContent = data.described[name].title;
      chart.dataset.chart = name;
      summary.className = "note summary";
      picture.append(chart);
      figure.append(title, picture, summary);
      return figure;
    }));
  }
  for (const chart of place.querySelectorAll("[data-chart]")) {
    chart.closest("figure").querySelector(".summary").textContent = data.described[chart.dataset.chart].summary;
  }
  const note = document.getElementById("chart-note");
  if (note) note.textContent = data.note;
  window.cclCharts.show(data);
};

// Parts of the page that change: fetched as the same page, and only what is marked is replaced.
let pending = null, again = false;
const refresh = async () => {
  if (pending) { again = true; return; }
  const wanted = location.pathname + location.search;
  pending = fetch(wanted, { headers: { "x-part": "1" } });
  try {
    const answer = await pending;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (wanted !== location.pathname + location.search) again = true;
    else if (!answer.ok) say(page.getElementById("message")?.textContent || `error ${answer.status}`, true);
    else for (const part of document.querySelectorAll("[data-part]")) replace(part, page.getElementById(part.id));
  } catch { say("The server does not answer: it was ended. The searches are not touched.", true); }
  pending = null;
  if (again) { again = false; await refresh(); return; }
  const more = document.querySelector("[data-more]");
  if (more) setTimeout(refresh, 60);
};
const replace = (part, fresh) => {
  if (!fresh || fresh.innerHTML === part.innerHTML) return;
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const checked = [...part.querySelectorAll("input[type=checkbox]:checked")].map((box) => box.value);
  const id = focused?.id, address = focused?.getAttribute("href"), scrolled = part.querySelector(".scroll")?.scrollLeft;
  part.replaceChildren(...document.adoptNode(fresh).childNodes);
  for (const box of part.querySelectorAll("input[type=checkbox]")) if (checked.includes(box.value)) box.checked = true;
  if (scrolled) part.querySelector(".scroll").scrollLeft = scrolled;
  if (!focused) return;
  const next = (id && document.getElementById(id)) ||
    [...part.querySelectorAll("a[href]")].find((link) => link.getAttribute("href") === address);
  next?.focus({ preventScroll: true });
};

// Filters change the address, so that back, reload and a copied link show the same.
let typed = 0;
for (const form of document.querySelectorAll("form[data-filter]")) {
  const apply = () => {
    const fields = new URLSearchParams(location.search);
    fields.delete("page");
    for (const [name, value] of new FormData(form)) value ? fields.set(name, value) : fields.delete(name);
    history.replaceState(null, "", `?${fields}`);
    refresh();
  };
  form.addEventListener("input", () => { clearTimeout(typed); typed = setTimeout(apply, 60); });
  form.addEventListener("submit", (event) => { event.preventDefault(); apply(); });
}
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-swap]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  if (!link.id && link.closest("th")) link.id = "sorted";
  history.replaceState(null, "", link.getAttribute("href"));
  refresh();
});

// Changes carry the token that only the terminal printed.
document.addEventListener("submit", async (event) => {
  const form = event.target.closest("form[data-change]");
  if (!form) return;
  event.preventDefault();
  if (form.dataset.confirm && form.dataset.asked !== "yes") {
    form.dataset.asked = "yes";
    form.querySelector("button").textContent = form.dataset.confirm;
    return;
  }
  const answer = await fetch(`/change/${form.dataset.change}`, {
    method: "POST", headers: { "content-type": "application/json", "x-ccl-token": stored("ccl-token") || "" },
    body: JSON.stringify(Object.fromEntries(new FormData(form))),
  }).catch(() => null);
  const data = answer ? await answer.json() : { error: "The server does not answer." };
  say(data.error || data.message, Boolean(data.error));
  if (!data.error) form.reset();
  refresh();
});
document.addEventListener("trial", (event) => {
  const run = document.querySelector("[data-run]")?.dataset.run;
  if (run) location.href = `/runs/${encodeURIComponent(run)}/trials/${event.detail}`;
});

// Server-sent events, only while the page is seen: a browser opens few connections to one server.
const live = document.querySelector("[data-live]");
let stream = null;
const listen = () => {
  if (!live || stream) return;
  stream = new EventSource(live.dataset.live);
  stream.onmessage = () => { refresh(); loadCharts(); };
  stream.addEventListener("gone", () => { stream.close(); say("The run was deleted. What you see is its last state.", true); });
  stream.onerror = () => { document.body.dataset.stream = "lost"; };
  stream.onopen = () => { document.body.dataset.stream = "open"; };
};
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { stream?.close(); stream = null; } else listen();
});
listen();
loadCharts();
if (document.querySelector("[data-more]")) refresh().then(loadCharts);
