// What the trajectories found have in common: histograms of reward and length, and accuracy by what tells problems apart.

const BINS = 20;
const MOST_KINDS = 40;
const MOST_COUNTS = 6; // bars that have their counts written above them; with more there is the axis
const SVG = "http://www.w3.org/2000/svg";

function showDistributions(holder, found, runs) {
  const of = runs.map((run) => found.filter((item) => item.run === run));
  holder.replaceChildren(...[
    histogram("Reward", "Of the trajectories found below.", of, (item) => item.reward, runs),
    histogram("Response length", "Sampled tokens of the trajectories found below.", of, (item) => item.sampled, runs),
    ...kindsOf(found).map((name) => byKind(name, of, runs)),
  ].filter(Boolean));
}

/** Bars over equal bins: of each distinct value, should there be few. */
function histogram(title, about, of, value, runs) {
  const values = of.map((items) => items.map(value).filter(Number.isFinite));
  const sorted = [...new Set(values.flat())].sort((a, b) => a - b);
  if (!sorted.length) return null;
  const [low, high] = [sorted[0], sorted.at(-1)];
  const whole = sorted.every(Number.isInteger);
  const few = sorted.length <= BINS;
  const bins = few ? sorted.length : Math.min(BINS, whole ? high - low + 1 : BINS);
  const width = (high - low) / bins || 1;
  const binOf = (v) => (few ? sorted.indexOf(v) : Math.min(bins - 1, Math.floor((v - low) / width)));
  const label = (k) => (few ? number(sorted[k]) : `${number(low + k * width)} to ${number(low + (k + 1) * width)}`);
  const shares = values.map((list) => {
    const counts = new Array(bins).fill(0);
    for (const v of list) counts[binOf(v)]++;
    return counts.map((count) => [count, count / (list.length || 1)]);
  });
  const top = Math.max(...shares.flat().map(([, share]) => share)) || 1;
  const svg = document.createElementNS(SVG, "svg");
  const set = (element, attributes) => Object.entries(attributes).forEach(([name, v]) => element.setAttribute(name, v));
  set(svg, { viewBox: `0 0 ${bins} 1`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${title}: ${shares.map((run, r) => `${runs.length > 1 ? `${runs[r].name}: ` : ""}${run.map(([n], k) => `${label(k)}: ${n}`).join(", ")}`).join("; ")}` });
  shares.forEach((run, r) => run.forEach(([count, share], k) => {
    const bar = document.createElementNS(SVG, "rect");
    set(bar, { x: k + 0.06 + (r * 0.88) / shares.length, y: 1 - share / top, width: 0.88 / shares.length, height: share / top, "data-color": r % 7 });
    const tip = document.createElementNS(SVG, "title");
    tip.textContent = `${runs.length > 1 ? `${runs[r].name}, ` : ""}${label(k)}: ${count} (${Math.round(100 * share)} %)`;
    bar.append(tip);
    svg.append(bar);
  }));
  const mean = values.map((list) => number(list.reduce((a, b) => a + b, 0) / list.length));
  const size = runs.length === 1 ? values[0].length : null;
  const largest = size === null ? `${Math.round(100 * top)} %` : Math.max(...shares[0].map(([count]) => count)).toLocaleString("en");
  const axis = h("div", { class: "axis" }, h("span", {}, largest), h("span", {}, "0"));
  const counts = size !== null && bins <= MOST_COUNTS && h("div", { class: "counts" },
    shares[0].map(([count]) => h("span", {}, `${count.toLocaleString("en")} (${Math.round((100 * count) / size)} %)`)));
  const caption = h("figcaption", {}, h("h3", {}, title), h("span", { class: "value" }, size === null ? "share of each run" : `${size.toLocaleString("en")} in all`),
    h("p", { class: "about" }, about));
  return h("figure", { class: "card chart histogram" }, caption, counts, h("div", { class: "bars" }, axis, svg),
    h("div", { class: "ends" }, h("span", {}, few ? label(0) : number(low)), h("span", {}, `mean ${mean.join(", ")}`), h("span", {}, bins > 1 ? (few ? label(bins - 1) : number(high)) : "")),
    runs.length > 1 && h("ul", { class: "legend" }, runs.map((run, r) => h("li", {}, h("span", { class: "swatch", "data-color": r % 7 }), run.name))));
}

/** The source of a problem (its data file), and labels of its row. */
function labelsOf(item) {
  if (item.labels) return item.labels;
  const labels = parsed(item.text("labels"));
  const source = item.problem?.includes(":") ? { source: item.problem.slice(0, item.problem.lastIndexOf(":")) } : {};
  return (item.labels = { ...source, ...(labels !== null && typeof labels === "object" && !Array.isArray(labels) ? labels : {}) });
}

/** Names of labels that tell problems apart into a few kinds. */
function kindsOf(found) {
  const values = new Map();
  for (const item of found) {
    for (const [name, value] of Object.entries(labelsOf(item))) {
      if (!values.has(name)) values.set(name, new Set());
      if (values.get(name).size <= MOST_KINDS) values.get(name).add(String(value));
    }
  }
  return [...values].filter(([, kinds]) => kinds.size > 1 && kinds.size <= MOST_KINDS).map(([name]) => name);
}

function byKind(name, of, runs) {
  const kinds = new Map();
  of.forEach((items, r) => items.forEach((item) => {
    if (item.outcome !== "correct" && item.outcome !== "wrong") return;
    const kind = String(labelsOf(item)[name] ?? "–");
    if (!kinds.has(kind)) kinds.set(kind, runs.map(() => [0, 0, 0]));
    const cell = kinds.get(kind)[r];
    cell[0] += item.outcome === "correct";
    cell[1] += 1;
    cell[2] += Number.isFinite(item.reward) ? item.reward : 0;
  }));
  if (!kinds.size) return null;
  const cells = ([right, count, reward], r) => {
    if (!count) return h("td", { class: "number" }, "–");
    const bar = h("span", { class: "share", "data-color": r % 7 });
    bar.style.width = `${(100 * right) / count}%`;
    const error = Math.sqrt((right / count) * (1 - right / count) / count);
    return h("td", { class: "number", title: `mean reward ${number(reward / count)}` }, `${Math.round((100 * right) / count)} % `,
      h("small", {}, `± ${Math.round(100 * error)} of ${count}`), h("span", { class: "track" }, bar));
  };
  const rows = [...kinds].sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true }));
  return h("figure", { class: "card chart by-turns" },
    h("figcaption", {}, h("h3", {}, `Accuracy by ${name}`), h("p", { class: "about" }, "Share graded correct of the trajectories found below, ± one standard error.")),
    h("div", { class: "kinds", tabindex: 0, role: "region", "aria-label": `Accuracy by ${name}` },
      h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, name), runs.map((run) => h("th", { scope: "col", class: "number" }, runs.length > 1 ? run.name : "correct")))),
      h("tbody", {}, rows.map(([kind, row]) => h("tr", {}, h("th", { scope: "row" }, kind), row.map(cells)))))));
}
