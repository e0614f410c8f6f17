"use strict";
// Runs before the page is drawn: the theme that the reader chose, and the token from the address that the terminal printed.
try {
  const chosen = localStorage.getItem("ccl-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
  if (location.hash.startsWith("#token=")) {
    localStorage.setItem("ccl-token", location.hash.slice(7));
    history.replaceState(null, "", location.pathname + location.search);
  }
} catch { /* storage is off: the system's theme, and no changes */ }
