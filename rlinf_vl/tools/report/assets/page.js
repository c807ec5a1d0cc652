// Starts the page: light or dark, then the curves and the gallery.

const SCROLLING = ".bar nav, .scroll, .answers, .kinds, .filmstrip, .by-turns .table, .evaluation pre";
const overflowObserver = new ResizeObserver((entries) => entries.forEach(({ target }) => noteOverflow(target)));

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

/** Note on each element that scrolls where there is more of it ("left right below"); the style fades it out there. */
function markOverflow(root) {
  root.querySelectorAll(SCROLLING).forEach((element) => overflowObserver.observe(element));
}

function noteOverflow(element) {
  const more = [];
  if (element.scrollLeft > 1) more.push("left");
  if (element.scrollLeft + element.clientWidth < element.scrollWidth - 1) more.push("right");
  if (element.scrollTop + element.clientHeight < element.scrollHeight - 1) more.push("below");
  element.dataset.more = more.join(" ");
}

setUpTheme();
addEventListener("scroll", ({ target }) => target.matches?.(SCROLLING) && noteOverflow(target), { capture: true, passive: true });
try {
  const data = await unpack();
  drawCharts(data);
  setUpGallery(data);
  markOverflow(document);
  await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
  document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds since the page was asked for
} catch (error) {
  document.getElementById("found").textContent = `The report could not be shown: ${error.message}`;
  throw error;
}
