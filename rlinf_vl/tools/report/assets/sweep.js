// Curves of a sweep: for each setting the mean over its seeds, with a band of one standard deviation.

/** Mean and sample deviation of the values that are there; null where none is. */
function spreadOf(values) {
  const present = values.filter((value) => value !== null);
  if (!present.length) return { mean: null, low: null, high: null };
  const mean = present.reduce((sum, value) => sum + value, 0) / present.length;
  const squares = present.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  const deviation = present.length > 1 ? Math.sqrt(squares / (present.length - 1)) : 0;
  return { mean, low: mean - deviation, high: mean + deviation };
}

/** The columns of a chart for uPlot: steps, then per setting mean, lower and upper edge, then each seed. */
function columnsOf(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const columns = [steps];
  const seeds = [];
  for (const line of lines) {
    const at = new Map(line.steps.map((step, i) => [step, i]));
    const pick = (values) => steps.map((step) => (at.has(step) ? values[at.get(step)] : null));
    const spreads = line.steps.map((_, i) => spreadOf(line.seeds.map((seed) => seed[i])));
    columns.push(...["mean", "low", "high"].map((name) => pick(spreads.map((spread) => spread[name]))));
    seeds.push(...line.seeds.map((seed) => ({ setting: line.setting, values: pick(seed) })));
  }
  return { columns: [...columns, ...seeds.map((seed) => seed.values)], seeds };
}

const faint = (i, share) => `color-mix(in srgb, ${color(i)} ${share}%, transparent)`;
const isSpan = { spanGaps: true, points: { show: false } };

function sweepChart({ metric, title, lines }) {
  const { columns, seeds } = columnsOf(lines);
  const figure = Object.assign(document.createElement("figure"), { className: "card chart" });
  figure.dataset.metric = metric;
  const caption = figure.appendChild(document.createElement("figcaption"));
  caption.append(Object.assign(document.createElement("h3"), { textContent: title }), Object.assign(document.createElement("span"), { className: "value", textContent: metric }));
  const place = figure.appendChild(document.createElement("div"));
  const legend = figure.appendChild(Object.assign(document.createElement("ul"), { className: "legend" }));
  const single = columns[0].length === 1;
  const series = lines.flatMap((line) => [
    { label: line.label, stroke: () => color(line.setting), width: 2, spanGaps: true, points: { show: single } },
    { ...isSpan, label: `${line.label}, lower edge`, stroke: "transparent" },
    { ...isSpan, label: `${line.label}, upper edge`, stroke: "transparent" },
  ]);
  series.push(...seeds.map((seed) => ({ ...isSpan, label: "seed", show: false, stroke: () => faint(seed.setting, 55), width: 1 })));
  const bands = lines.map((line, i) => ({ series: [3 * i + 3, 3 * i + 2], fill: () => faint(line.setting, 18) }));
  const axis = { stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false } };
  const items = lines.map((line) => {
    const item = legend.appendChild(document.createElement("li"));
    item.dataset.setting = line.setting;
    return item;
  });
  /** Show each setting's figure at a step, the last one unless a step is pointed at. */
  const tell = (index) => items.forEach((item, i) => {
    const last = columns[3 * i + 1].findLastIndex((value) => value !== null);
    const at = index ?? last;
    const [mean, low] = [columns[3 * i + 1][at], columns[3 * i + 2][at]];
    const total = lines[i].seeds.length;
    const n = seeds.filter((seed) => seed.setting === lines[i].setting && (seed.values[at] ?? null) !== null).length;
    const deviation = n > 1 ? ` ± ${(mean - low).toPrecision(2)}` : "";
    const figureText = mean === null ? "–" : `${mean.toPrecision(4)}${deviation}`;
    item.textContent = `${lines[i].label} (seeds ${n === total ? n : `${n} of ${total}`}): ${figureText} at step ${columns[0][at]}`;
    item.style.color = color(lines[i].setting);
  });
  const width = () => Math.max(200, place.clientWidth || 320);
  const plot = new uPlot({
    width: width(), height: HEIGHT, legend: { show: false }, scales: { x: { time: false } }, bands,
    axes: [axis, { ...axis, size: 56 }], series: [{ label: "step" }, ...series],
    hooks: { setCursor: [(u) => tell(u.cursor.idx)] },
  }, columns, place);
  plots.push(plot);
  tell(null);
  new ResizeObserver(() => plot.setSize({ width: width(), height: HEIGHT })).observe(figure);
  const firstSeed = 1 + 3 * lines.length;
  figure.showSeeds = (shown) => seeds.forEach((_, i) => plot.setSeries(firstSeed + i, { show: shown }));
  return figure;
}

const charts = JSON.parse(document.getElementById("data").textContent);
const system = matchMedia("(prefers-color-scheme: dark)");
const theme = document.getElementById("theme");
const figures = () => [...document.querySelectorAll("figure.chart")];
const setTheme = (dark) => {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  theme.setAttribute("aria-pressed", dark);
  plots.forEach((plot) => plot.redraw(false));
};
theme.addEventListener("click", () => setTheme(theme.getAttribute("aria-pressed") !== "true"));
system.addEventListener("change", () => setTheme(system.matches));
setTheme(system.matches);
const place = document.querySelector("#curves .charts");
for (const chart of charts) place.append(sweepChart(chart));
if (!charts.length) place.append(Object.assign(document.createElement("p"), { className: "about", textContent: "No run has logged a metric yet." }));
document.getElementById("each-seed").addEventListener("change", ({ target }) => figures().forEach((figure) => figure.showSeeds(target.checked)));
await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds since the page was asked for
