// Starts the page: light or dark, then the curves and the gallery.

/** As the system has it, until the button is used. */
function setUpTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const set = (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.setAttribute("aria-pressed", dark);
    plots.forEach((plot) => plot.redraw(false));
  };
  button.addEventListener("click", () => set(button.getAttribute("aria-pressed") !== "true"));
  system.addEventListener("change", () => set(system.matches));
  set(system.matches);
}

setUpTheme();
try {
  const data = await unpack();
  drawCharts(data);
  setUpGallery(data);
  await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
  document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds since the page was asked for
} catch (error) {
  document.getElementById("found").textContent = `The report could not be shown: ${error.message}`;
  throw error;
}
