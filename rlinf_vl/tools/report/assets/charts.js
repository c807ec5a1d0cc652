// Curves over steps, drawn by uPlot. Every chart is also told in words, and its values are read with the arrow keys.

const DASHES = [[], [6, 4], [2, 3]];
const HEIGHT = 190;
const plots = [];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (i) => css(`--c${i % 7}`);

function drawCharts({ runs, charts, phases, own_rewards: ownRewards }) {
  const section = document.getElementById("curves");
  const measured = new Set(runs.flatMap((run) => Object.keys(run.metrics)).map((name) => name.match(/^(?:val\/)?env\/(.+)/s)?.[1]).filter(Boolean));
  const about = "What the environment measures: mean over the episodes that gave it.";
  charts = [...charts, ...partCharts(runs, ownRewards), ...loggedCharts(runs), ...setCharts(runs), ...[...measured].sort().map((name) => ({ title: `Environment: ${name}`, about, lines: { [`env/${name}`]: "training", [`val/env/${name}`]: "validation" } }))];
  const lines = charts.flatMap((spec) => Object.keys(spec.lines));
  const shown = ["val/accuracy_error", "val/problems", ...lines, ...lines.map((name) => `${name}_stderr`)];
  const drawn = charts.map((spec) => [spec, linesOf(spec, runs)]).filter(([, lines]) => lines.length);
  const isFolded = ([spec, lines]) => !spec.always && isConstant(lines);
  const figures = drawn.filter((entry) => !isFolded(entry)).map(([spec, lines]) => chart(spec, lines));
  const constant = drawn.filter(isFolded);
  if (runs.length > 2) {
    const spec = { title: "Time of a step", about: "Seconds. All other metrics have each phase.", lines: { "time/step": "step" }, zero: true };
    figures.push(chart(spec, linesOf(spec, runs)));
  }
  for (const run of runs.length > 2 ? [] : runs) {
    const names = [...phases, "other"].filter((name) => run.metrics[`time/${name}`]?.[1].some((v) => v > 0));
    const title = runs.length > 1 ? `Time by phase: ${run.name}` : "Time by phase";
    const lines = names.map((name, i) => ({ label: name, color: name === "other" ? 6 : i, dash: 0, at: points(run, `time/${name}`) }));
    figures.push(chart({ title, about: "Seconds of each step.", zero: true, stacked: true }, lines));
  }
  section.querySelector(".charts").append(...figures.filter(Boolean));
  foldConstant(constant);
  setUpSmoothing();
  if (!figures.some(Boolean) && !constant.length) section.querySelector(".about").textContent = "There are no metrics.";
  const others = new Set(runs.flatMap((run) => Object.keys(run.metrics)).filter((name) => !shown.includes(name)).sort());
  const more = document.getElementById("more-curves");
  more.hidden = !others.size;
  more.addEventListener("toggle", () => {
    const specs = [...others].map((name) => ({ title: name, about: "", lines: { [name]: name.split("/").at(-1) } }));
    more.lastElementChild.append(...specs.map((spec) => chart(spec, linesOf(spec, runs))).filter(Boolean));
  }, { once: true });
}

/** Charts of the reward's parts: in one run all of them together, of several runs one each. */
function partCharts(runs, own) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.metrics)).filter((name) => name.startsWith("reward/") && !own.includes(name)));
  const label = (name) => name.slice("reward/".length);
  const about = "Mean of each reward function's score, unweighted, and of what else it gave.";
  const parts = [...names].sort().map(label);
  if (runs.length === 1 && parts.length <= 7) {
    const lines = (prefix) => Object.fromEntries(parts.map((part) => [`${prefix}reward/${part}`, part]));
    return [{ title: "Parts of the reward", about, lines: lines("") }, { title: "Parts of the reward, in validation", about, lines: lines("val/") }];
  }
  return parts.map((part) => ({ title: `Reward: ${part}`, about, lines: { [`reward/${part}`]: "training", [`val/reward/${part}`]: "validation" } }));
}

/** Charts of what losses and advantages of one's own have logged. */
function loggedCharts(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.metrics)).filter((name) => /^(loss|advantage)\//.test(name)));
  return [...names].sort().map((name) => ({ title: `Logged: ${name}`, about: "Mean over the step of what the loss or the advantage has logged.", lines: { [name]: name.slice(name.indexOf("/") + 1) } }));
}

/** A chart for each set of rows, in validation and in training. */
function setCharts(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.metrics)).map((name) => name.match(/^(?:val|train)\/([^/]+)\/accuracy$/)?.[1]).filter(Boolean));
  const about = "Share graded correct of the rows of this set. The band is ± one standard error.";
  const mean = { title: "Accuracy by set", about: "Mean over the sets, and over all rows.", lines: { "val/accuracy_by_set": "mean of sets", "val/accuracy": "mean of rows" } };
  const sets = [...names].sort().map((name) => ({ title: `Set: ${name}`, about, lines: { [`val/${name}/accuracy`]: "validation", [`train/${name}/accuracy`]: "training", [`train/${name}/reward`]: "training reward" } }));
  return sets.length ? [mean, ...sets] : [];
}

/** Whether several values, all finite, are the same in each line, or differ in their last digits. */
function isConstant(lines) {
  return lines.every((line) => {
    const values = [...line.at.values()];
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return values.length > 1 && !values.includes(null) && high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high));
  });
}

/** Charts without news, as a list that unfolds into charts. */
function foldConstant(drawn) {
  const fold = document.getElementById("constant-curves");
  fold.hidden = !drawn.length;
  fold.firstElementChild.textContent = `${drawn.length} that stay constant`;
  const said = drawn.map(([spec, lines]) => `${spec.title}: ${[...new Set(lines.map((line) => number(line.at.values().next().value)))].join(", ")}`);
  fold.querySelector(".about").textContent = said.join(" · ");
  fold.addEventListener("toggle", () => fold.lastElementChild.append(...drawn.map(([spec, lines]) => chart(spec, lines))), { once: true });
}

let smoothing = 0;

/** An exponential moving average, as TensorBoard's: without a bias to the first value. Gaps stay gaps. */
function smooth(values, weight) {
  let [mean, total] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean * weight + value * (1 - weight);
    total = total * weight + 1 - weight;
    return mean / total;
  });
}

function setUpSmoothing() {
  const slider = document.getElementById("smoothing");
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    slider.nextElementSibling.textContent = smoothing ? smoothing.toFixed(2) : "off";
    plots.forEach((plot) => plot.resmooth?.());
  });
}

function points(run, metric) {
  const [steps, values] = run.metrics[metric] ?? [[], []];
  return new Map(steps.map((step, i) => [step, values[i]]));
}

/** {label, color, dash, at: step → value, null where it isn't finite; errors} of every run and metric of a chart. */
function linesOf(spec, runs) {
  const several = runs.length > 1;
  const label = (run, text) => (several ? `${run.name}: ${text}` : text);
  const lines = runs.flatMap((run, r) =>
    Object.entries(spec.lines).map(([metric, text], m) => ({
      label: label(run, text), color: several ? r : m, dash: several ? m : 0,
      at: points(run, metric), errors: points(run, run.metrics[`${metric}_stderr`] ? `${metric}_stderr` : `${metric}_error`),
    })));
  const drawn = lines.filter((line) => [...line.at.values()].some((value) => value !== null));
  if (spec.above !== undefined && !drawn.some((line) => [...line.at.values()].some((value) => value > spec.above))) return [];
  if (!spec.baselines || !drawn.length) return drawn;
  const steps = drawn.flatMap((line) => [...line.at.keys()]);
  const ends = [Math.min(...steps), Math.max(...steps)];
  const baselines = runs.flatMap((run, r) => Object.entries(run.baselines).map(([name, value], b) => {
    const shared = several && runs.every((other) => other.baselines[name] === value);
    return {
      label: shared ? name : label(run, name), color: shared ? 6 : several ? r : b + 1, dash: 1 + (b % 2), flat: true,
      at: new Map(ends.map((step) => [step, value])), repeated: shared && r > 0,
    };
  }));
  return [...drawn, ...baselines.filter((line) => !line.repeated)];
}

/** The figure, or null if there is nothing to draw. */
function chart(spec, lines) {
  if (!lines.length) return null;
  const steps = [...new Set(lines.flatMap((line) => [...line.at.keys()]))].sort((a, b) => a - b);
  const values = lines.map((line) => steps.map((step) => (line.flat ? line.at.values().next().value : line.at.get(step))));
  const known = values.map((column) => column.filter((value) => typeof value === "number"));
  const words = lines.map(({ label }, i) => `${label}: first ${number(known[i][0])}, last ${number(known[i].at(-1))}, ` +
    `lowest ${number(Math.min(...known[i]))}, highest ${number(Math.max(...known[i]))}`);
  const holder = h("div", { class: "plot", tabindex: 0, role: "img",
    "aria-label": `${spec.title}, steps ${steps[0]} to ${steps.at(-1)}. ${words.join("; ")}. Arrow keys move from step to step.` });
  const outputs = lines.map(() => h("span", { class: "value" }));
  const stepOutput = h("span", { class: "value" });
  const show = (k) => {
    stepOutput.textContent = k === null ? "last values" : `step ${steps[k]}`;
    lines.forEach((_, i) => (outputs[i].textContent = number(k === null ? known[i].at(-1) : values[i][k])));
  };
  show(null);
  let plot = null;
  new ResizeObserver(() => {
    if (plot) plot.setSize({ width: holder.clientWidth, height: HEIGHT });
    else plots.push((plot = drawPlot(holder, spec, lines, steps, values, show)));
  }).observe(holder);
  holder.addEventListener("blur", () => show(null));
  holder.addEventListener("keydown", (event) => {
    const at = plot.cursor.idx ?? steps.length;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const k = Math.min(Math.max(to, 0), steps.length - 1);
    plot.setCursor({ left: plot.valToPos(steps[k], "x"), top: 10 });
    document.getElementById("announce").textContent =
      `step ${steps[k]}: ${lines.map((line, i) => `${line.label} ${number(values[i][k])}`).join(", ")}`;
  });
  const legend = lines.map((line, i) => h("li", {},
    h("span", { class: "swatch", "data-color": line.color % 7, "data-dash": line.dash }), line.label, outputs[i]));
  return h("figure", { class: "card chart" },
    h("figcaption", {}, h("h3", {}, spec.title), stepOutput, h("p", { class: "about" }, spec.about)),
    holder, h("ul", { class: "legend" }, legend));
}

/** Return the cursor's position [left, top], moved sideways onto the nearest step of the plot. */
function snapToStep(plot, left, top) {
  return left < 0 ? [left, top] : [plot.valToPos(plot.data[0][plot.posToIdx(left)], "x"), top];
}

function drawPlot(holder, spec, lines, steps, values, show) {
  const columns = [];
  const series = [];
  const bands = [];
  const sums = steps.map(() => 0);
  lines.forEach((line, i) => {
    columns.push(spec.stacked ? values[i].map((value, k) => (sums[k] += value ?? 0)) : values[i]);
    series.push({
      label: line.label, width: spec.stacked ? 0 : 2, dash: DASHES[line.dash], stroke: () => color(line.color),
      fill: spec.stacked && i === 0 ? () => `${color(0)}aa` : undefined,
      points: { show: !spec.stacked && !line.flat && line.at.size <= 40, size: 5 },
      paths: spec.stacked ? uPlot.paths.stepped({ align: -1 }) : undefined,
    });
    if (spec.stacked && i > 0) bands.push({ series: [i + 1, i], fill: () => `${color(line.color)}aa` });
  });
  lines.forEach((line, i) => {
    if (!line.errors?.size) return;
    for (const sign of [1, -1]) {
      columns.push(steps.map((step, k) => (line.errors.get(step) >= 0 ? values[i][k] + sign * line.errors.get(step) : undefined)));
      series.push({ label: "", stroke: "transparent", width: 0, points: { show: false } });
    }
    bands.push({ series: [series.length - 1, series.length], fill: () => `${color(line.color)}33` });
  });
  const smoothed = spec.stacked ? [] : lines.map((line, i) => ({ i, line })).filter(({ line }) => !line.flat && line.at.size > 2);
  const [shown, below] = [columns.length, smoothed.length];
  for (const { i, line } of smoothed) { // the values themselves, faint below what is smoothed
    columns.push(values[i]);
    series.push({ label: "", width: 1, stroke: () => `${color(line.color)}55`, points: { show: false }, show: smoothing > 0 });
  }
  const log = spec.log && columns.flat().every((value) => value === undefined || value === null || value > 0);
  const axis = { stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const end = { pad: 0.06, soft: 0, mode: spec.zero ? 1 : 3 }; // from zero, or wherever the values are
  const widen = (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);
  const flat = (low, high) => high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high)); // too narrow for ticks of its own
  const range = (_, low, high) => flat(low, high) ? [Math.min(1.1 * low, 0), Math.max(1.1 * high, 0) || (low ? 0 : 1)]
    : uPlot.rangeNum(low, high, { min: end, max: end });
  const data = () => [steps, ...columns.map((column, c) => {
    const own = c < lines.length && smoothed.find(({ i }) => i === c);
    return own && smoothing ? smooth(column, smoothing) : column;
  })];
  const plot = new uPlot({
    width: holder.clientWidth, height: HEIGHT, padding: [10, 12, 0, 0], legend: { show: false },
    series: [{}, ...series], bands,
    // The line stands on the step whose values are shown, and a series without a value there has no dot beside it.
    cursor: { sync: { key: "steps" }, y: false, points: { size: 6 }, dataIdx: (plot, series, at) => at, move: snapToStep },
    scales: { x: { time: false, range: widen }, y: log ? { distr: 3 } : { range } },
    axes: [
      { ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] },
      { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) },
    ],
    hooks: { setCursor: [(u) => show(u.cursor.idx)] },
  }, data(), holder);
  plot.resmooth = () => {
    plot.setData(data(), false);
    for (let k = 0; k < below; k++) plot.setSeries(shown + k + 1, { show: smoothing > 0 });
  };
  return plot;
}
