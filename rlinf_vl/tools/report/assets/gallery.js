// The gallery: trajectories filtered, sorted and paged; for several runs a problem's trajectories side by side.

const TOKENS_SHOWN = 600;
const MOST_SIDES = 2; // runs whose trajectories of a problem stand side by side; more are the rows of a table
const LEVELS = 4; // shades of a token's color on either side of zero
const WITH_IMAGES = "logprob with images"; // columns that the verb look adds
const WITH_BLANKS = "logprob with blank images";
const tokenText = (t, k) => t.tokens.table[t.tokens.index[k]] ?? "";

function setUpGallery({ runs, images }) {
  const form = document.getElementById("filters");
  const holder = document.getElementById("gallery");
  const pages = document.getElementById("pages");
  const all = runs.flatMap((run) => indexRun(run));
  const advantages = all.flatMap((item) => item.layout.turns.map((turn) => turn.advantage ?? item.advantage).concat(item.advantage));
  const scales = { difference: scaleOf(all.map((item) => item.mismatch_max)), advantage: scaleOf(advantages), seeing: scaleOf(runs.flatMap(seeingOf)) };
  if (!scales.seeing) form.elements.color.querySelector("[value=seeing]").remove();
  if (runs.some((run) => run.conversational)) form.elements.sort.append(h("option", { value: "turns" }, "most turns"));
  document.querySelector("#curves .charts").append(...[successByTurns(runs, all)].filter(Boolean));
  const pageSize = runs.length > 1 ? 10 : 20;
  let entries = [];
  let page = 0;

  function apply(focus = false) {
    const wanted = Object.fromEntries(new FormData(form));
    const found = all.filter(filterBy(wanted, runs)).sort(comparison(wanted.sort));
    const grouped = runs.length === 1 && wanted.view === "groups";
    entries = runs.length > 1 ? alignByProblem(found, runs) : grouped ? groupsOf(found, all) : found.map((item) => [item]);
    let text = `${found.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} trajectories`;
    if (grouped) text += `, in ${entries.length.toLocaleString("en")} groups`;
    if (runs.length > 1) {
      const both = entries.filter((entry) => entry.every((side) => side.length)).length;
      text += `, ${entries.length} problems; first the ${both} that all runs have`;
    }
    document.getElementById("found").textContent = all.length ? text : "The run has stored no trajectories.";
    form.hidden = !all.length;
    showDistributions(document.getElementById("distributions"), found, runs);
    markOverflow(document.getElementById("distributions"));
    show(0, focus);
  }

  function show(to, focus = false) {
    const last = Math.max(0, Math.ceil(entries.length / pageSize) - 1);
    page = Math.min(Math.max(to, 0), last);
    const view = { mode: form.elements.color.value, scales, images, only: (text) => {
      form.elements.problem.value = text;
      apply(true);
    } };
    showScale(view);
    const shown = entries.slice(page * pageSize, (page + 1) * pageSize);
    const element = (entry) => {
      if (runs.length > MOST_SIDES) return comparisonCard(entry, runs, view);
      if (runs.length > 1) return aligned(entry, runs, view);
      return entry.length > 1 ? groupCard(entry, view) : card(entry[0], view);
    };
    holder.replaceChildren(...shown.map(element));
    markOverflow(holder);
    pages.hidden = last === 0;
    pages.querySelector("span").textContent = `page ${page + 1} of ${last + 1}`;
    for (const button of pages.querySelectorAll("button")) button.disabled = button.value < 0 ? page === 0 : page === last;
    if (focus) document.getElementById("found").focus();
  }

  let timer = null;
  form.addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => (event.target.name === "color" ? show(page) : apply()), event.target.tagName === "SELECT" ? 0 : 150);
  });
  form.addEventListener("reset", () => setTimeout(() => apply()));
  form.addEventListener("submit", (event) => event.preventDefault());
  pages.addEventListener("click", (event) => {
    if (event.target.tagName === "BUTTON") show(page + Number(event.target.value), true);
  });
  form.elements.view.closest("label").hidden = runs.length > 1;
  setUpTooltip(holder);
  setUpZoom(holder);
  apply();
}

/** A run's trajectories with what they are filtered and sorted by. Nothing here is as large as the run's text. */
function indexRun(run) {
  const t = run.trajectories;
  const groups = new Map();
  const items = Array.from({ length: t.count }, (_, i) => {
    const text = (name) => t[name].table[t[name].index[i]] ?? null;
    const item = {
      run, i, text, step: t.step[i], sample: t.sample[i], reward: t.reward[i], advantage: t.advantage[i],
      split: text("split"), problem: text("problem_id"), group: text("group_id"), error: text("error"),
      truncated: text("finish_reason") === "length" ? 1 : 0, from: t.offsets[i], to: t.offsets[i + 1], layout: layoutOf(text("turns")),
    };
    run.conversational ||= item.layout.turns.length > 1;
    item.outcome = item.error !== null ? "error" : t.correct[i] === 1 ? "correct" : t.correct[i] === 0 ? "wrong" : "not graded";
    let [sum, count] = [0, 0];
    item.sampled = 0;
    for (let k = item.from; k < item.to; k++) {
      item.sampled += t.response_mask[k];
      const size = t.response_mask[k] ? Math.abs(t.rollout_logprobs[k] - t.train_logprobs[k]) : NaN;
      if (Number.isNaN(size)) continue;
      item.mismatch_max = Math.max(item.mismatch_max ?? 0, size);
      sum += size;
      count += 1;
    }
    if (count) item.mismatch_mean = sum / count;
    const key = `${item.step} ${item.split} ${item.group}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(item);
    return item;
  });
  for (const [key, members] of groups) {
    const rewards = members.map((item) => item.reward).filter((reward) => !Number.isNaN(reward));
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    const disputed = rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length;
    for (const item of members) Object.assign(item, { key, disputed, groupMean: mean, groupSize: members.length });
  }
  return items;
}

/** What is colored strongest: nine of ten values that aren't zero are at most as large. */
function scaleOf(values) {
  const sizes = values.map(Math.abs).filter((value) => value > 0 && value < Infinity).sort((a, b) => a - b);
  return sizes[Math.floor(0.9 * (sizes.length - 1))] ?? 0;
}

const tokenColumn = (t, name) => t.token_columns.find(([column]) => column === name)?.[1];

/** What its images add to a sampled token's log-probability; NaN where it was not scored. */
function seeingAt(t, k) {
  return t.response_mask[k] ? (tokenColumn(t, WITH_IMAGES)?.[k] ?? NaN) - (tokenColumn(t, WITH_BLANKS)?.[k] ?? NaN) : NaN;
}

function seeingOf({ trajectories: t }) {
  return tokenColumn(t, WITH_IMAGES) ? Array.from(t.response_mask, (_, k) => seeingAt(t, k)).filter((value) => !Number.isNaN(value)) : [];
}

function comparison(sort) {
  const key = {
    newest: (x) => x.step, best: (x) => x.reward, worst: (x) => -x.reward, disputed: (x) => x.disputed,
    mismatch_max: (x) => x.mismatch_max, mismatch_mean: (x) => x.mismatch_mean, truncated: (x) => x.truncated, turns: (x) => x.layout.turns.length,
  }[sort];
  const value = (item) => (Number.isFinite(key(item)) ? key(item) : -Infinity);
  const order = (a, b) => (a === b ? 0 : a < b ? -1 : 1);
  return (a, b) => order(value(b), value(a)) || b.step - a.step || order(a.key, b.key) || a.sample - b.sample;
}

function filterBy(wanted, runs) {
  const text = wanted.text.trim().toLowerCase();
  const problem = wanted.problem.trim();
  const pattern = new RegExp(problem.replace(/[^\w]/g, "\\$&") + (/\d$/.test(problem) ? "(?!\\d)" : "")); // not 12 for 1
  const named = (id) => pattern.test(id);
  const [from, to] = [wanted.from === "" ? -Infinity : Number(wanted.from), wanted.to === "" ? Infinity : Number(wanted.to)];
  // Each distinct text is searched once.
  const matches = text && new Map(runs.map((run) => [run, ["prompt", "response", "answer"].map((name) => {
    const column = run.trajectories[name];
    const hits = column.table.map((value) => value.toLowerCase().includes(text));
    return (i) => hits[column.index[i]];
  })]));
  return (item) =>
    (!wanted.split || item.split === wanted.split) && item.step >= from && item.step <= to &&
    (!wanted.outcome || item.outcome === wanted.outcome || (wanted.outcome === "truncated" && item.truncated)) &&
    (!problem || named(item.problem) || named(item.group)) &&
    (!text || matches.get(item.run).some((hit) => hit(item.i)));
}

/** [[trajectories of run 0], [of run 1], …] of every problem, in the order of its first; problems of all runs come first. */
function alignByProblem(found, runs) {
  const problems = new Map();
  for (const item of found) {
    const key = `${item.split} ${item.problem}`;
    if (!problems.has(key)) problems.set(key, runs.map(() => []));
    problems.get(key)[runs.indexOf(item.run)].push(item);
  }
  const missing = (entry) => entry.filter((side) => !side.length).length;
  return [...problems.values()].sort((a, b) => missing(a) - missing(b));
}

function aligned(entry, runs, view) {
  const problem = entry.flat()[0].problem;
  const sides = entry.map((items, r) => sideOf(items, runs[r], r, view));
  return h("section", { class: "aligned", "aria-label": `Problem ${problem}` }, h("h3", {}, `Problem ${problem}`), h("div", { class: "sides" }, sides));
}

/** One run's trajectories of a problem: a card, and buttons to the next one. */
function sideOf(items, run, r, view) {
  const place = h("div", {}, h("p", { class: "about" }, "None of this problem."));
  const count = h("span", {});
  let at = 0;
  const go = (by) => {
    at = (at + by + items.length) % items.length;
    count.textContent = `${at + 1} of ${items.length}`;
    place.replaceChildren(card(items[at], view));
  };
  const button = (by, text, label) => h("button", { type: "button", "aria-label": label, onclick: () => go(by) }, text);
  if (items.length) go(0);
  return h("div", { class: "side", "data-run": r % 7 }, h("div", { class: "side-head" }, h("strong", {}, run.name),
    items.length > 1 && [button(-1, "←", "Previous of this run"), count, button(1, "→", "Next of this run")]), place);
}

function card(item, view) {
  const t = item.run.trajectories;
  const head = h("header", {},
    h("h3", {}, `${item.split === "val" ? "Validation" : "Training"}, step ${item.step}`),
    h("span", { class: `badge ${item.outcome.replace(" ", "-")}` }, item.outcome),
    item.truncated ? h("span", { class: "badge truncated" }, "truncated") : null,
    h("button", { type: "button", class: "link", title: "Show all of this problem", onclick: () => view.only(item.problem) }, `problem ${item.problem}`),
    item.groupSize > 1 && h("button", { type: "button", class: "link", title: "Show the whole group", onclick: () => view.only(item.group) }, `sample ${item.sample + 1} of ${item.groupSize}`));
  const versions = [...new Set(t.weight_versions.slice(item.from, item.to))].filter((version) => version >= 0);
  const thought = item.layout.turns.reduce((total, turn) => total + (turn.thought ?? turn.start) - turn.start, 0);
  const facts = [
    ["Reward", number(item.reward), rewardParts(item.text("reward_parts"))],
    ["Advantage", number(item.advantage)],
    item.groupSize > 1 && ["Group's reward", number(item.groupMean), `± ${number(Math.sqrt(item.disputed))}`],
    ["Tokens", String(item.sampled), item.text("finish_reason") && `finish: ${item.text("finish_reason")}`],
    thought > 0 && ["In thoughts", `${thought} tokens`],
    item.layout.turns.length > 1 && ["Turns", String(item.layout.turns.length)],
    ...Object.entries(parsed(item.text("metrics")) ?? {}).slice(0, 20).map(([name, value]) => [name, number(Number(value))]),
    item.mismatch_max !== undefined && ["|rollout − train|", number(item.mismatch_mean), `largest ${number(item.mismatch_max)}`],
    versions.length > 0 && ["Weights of step", versions.length > 1 ? `${Math.min(...versions)}–${Math.max(...versions)}` : String(versions[0])],
  ].filter(Boolean);
  return h("article", { class: "card trajectory", "aria-label": `Step ${item.step}, problem ${item.problem}, sample ${item.sample + 1}` }, head,
    h("div", { class: "body" }, item.run.conversational && item.text("messages") ? asConversation(item, view) : asOneText(item, view)),
    h("dl", { class: "facts" }, facts.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, ` ${more}`))))));
}

/** What the model was shown, and what it answered. */
function asOneText(item, view) {
  const t = item.run.trajectories;
  const pictures = Array.from({ length: t.image_offsets[item.i + 1] - t.image_offsets[item.i] }, (_, index) => picture(item, index, view));
  const messages = promptMessages(item);
  const prompt = messages.length ? bubbles(item, messages, view) : [h("h4", {}, "Prompt"), longText(item.text("prompt") ?? "–")];
  return [pictures.length > 0 && h("div", { class: "images" }, pictures),
    h("div", { class: "texts" }, prompt, h("h4", {}, "Response"), response(item, view), ...verdict(item), messages.length > 0 && promptFold(item))];
}

/** The prompt's text with the template's marks, folded away. */
function promptFold(item) {
  const fold = h("details", {}, h("summary", {}, "The prompt as the model reads it"));
  fold.addEventListener("toggle", () => fold.append(longText(item.text("prompt") ?? "–")), { once: true });
  return fold;
}

/** Turn by turn; folded below it, the tokens as the model reads them. */
function asConversation(item, view) {
  const raw = h("details", {}, h("summary", {}, "As the model reads it"));
  raw.addEventListener("toggle", () => raw.append(h("h4", {}, "Prompt"), longText(item.text("prompt") ?? "–"), h("h4", {}, "What follows"), response(item, view)), { once: true });
  return h("div", { class: "texts" }, conversation(item, view), ...verdict(item), raw);
}

function verdict(item) {
  return [item.error !== null && [h("h4", {}, "Error"), h("pre", { class: "error" }, item.error)], h("h4", {}, "Reference answer"), h("pre", {}, ...withFormulas(item.text("answer") ?? "–", true))].flat();
}

function rewardParts(text) {
  try {
    const parts = Object.entries(JSON.parse(text ?? "{}"));
    return parts.map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : JSON.stringify(value)}`).join(", ");
  } catch {
    return text;
  }
}

/** A prompt; its placeholders of an image, hundreds of the same, as one with their number. */
function longText(text) {
  const shorter = text.replace(/(<\|[\w-]{1,40}\|>)\1{2,}/g, (all, one) => `${one}×${all.length / one.length} `);
  return h("pre", { class: "long", tabindex: shorter.length > 700 && 0 }, ...withFormulas(shorter));
}

/** A trajectory's sequences (positions of their first tokens) and turns; none in older files. */
function layoutOf(text) {
  const layout = parsed(text);
  const objects = (value) => list(value).filter((entry) => entry !== null && typeof entry === "object");
  return { sequences: list(layout?.sequences), turns: objects(layout?.turns), branches: objects(layout?.branches) };
}

/** Where a trajectory has several: position of the first token → "sequence 2", "turn 3, reward 0.5". */
function boundaries({ layout: { sequences, turns } }) {
  const labels = new Map();
  const add = (at, text) => labels.set(at, labels.has(at) ? `${labels.get(at)}, ${text}` : text);
  if (sequences.length > 1) sequences.forEach((at, n) => add(at, `sequence ${n + 1}`));
  if (turns.length > 1) turns.forEach((turn, n) => add(turn.start, `turn ${n + 1}, reward ${number(turn.reward)}`));
  turns.forEach((turn) => turn.thought && add(turn.thought, "behind its thoughts"));
  return labels;
}

/** The whole response, token by token. */
function response(item, view) {
  if (item.to === item.from) return h("pre", {}, item.text("response") || "(empty)");
  return tokenList(item, view, 0, item.to - item.from, "Response", boundaries(item));
}

/** What a token's turn is paid for. */
function advantageAt(item, n) {
  return item.layout.turns.find((turn) => turn.start <= n && n < turn.end)?.advantage ?? item.advantage;
}

/** Tokens number `start` … `end` of a response, each colored by its value; of many the first, with a button for all. */
function tokenList(item, view, start, end, name, labels = new Map(), limit = TOKENS_SHOWN) {
  const t = item.run.trajectories;
  const [first, count] = [Math.max(0, start), Math.min(end, item.to - item.from) - Math.max(0, start)];
  if (!(count > 0)) return h("pre", {}, "(empty)");
  if (view.mode === "text") return h("div", { class: "rendered", tabindex: 0 }, ...withFormulas(tokensText(item, start, end).replace(/<\|[\w-]{1,40}\|>/g, ""), true));
  const spans = Array.from({ length: Math.min(count, limit) }, (_, i) => {
    const n = first + i;
    const k = item.from + n;
    const value = { difference: t.rollout_logprobs[k] - t.train_logprobs[k], advantage: view.mode === "advantage" ? advantageAt(item, n) : 0,
      seeing: view.mode === "seeing" ? seeingAt(t, k) : 0 }[view.mode];
    const level = Math.min(LEVELS, Math.ceil((LEVELS * Math.abs(value)) / view.scales[view.mode]));
    const shade = level > 0 && t.response_mask[k] ? (value > 0 ? "p" : "n") + level : null;
    const span = h("span", { role: "option", "aria-selected": "false", "aria-describedby": "tooltip", tabindex: i ? -1 : 0, "data-n": n,
      "data-shade": shade, class: t.response_mask[k] ? null : "untrained" }, tokenText(t, k).replaceAll("\n", "↵\n") || "∅");
    return labels.has(n) ? [h("small", { class: "boundary", role: "presentation" }, labels.get(n)), span] : span;
  });
  const tokens = h("div", { class: "tokens", role: "listbox", "aria-label": `${name} token by token; arrow keys move from one to the next` }, spans.flat());
  tokens.item = item;
  if (count <= limit) return tokens;
  const showAll = (event) => event.currentTarget.parentElement.replaceWith(tokenList(item, view, start, end, name, labels, count));
  return h("div", {}, tokens, h("button", { type: "button", onclick: showAll }, `Show all ${count.toLocaleString("en")} tokens`));
}

/** A token's numbers, when pointed at or focused; arrow keys move the focus, Escape hides it. */
function setUpTooltip(holder) {
  const tip = document.getElementById("tooltip");
  const tokenOf = (event) => event.target.closest?.("[data-n]");
  const hide = () => (tip.hidden = true);
  const show = (event) => {
    const span = tokenOf(event);
    if (!span) return;
    const { item } = span.parentElement;
    const t = item.run.trajectories;
    const k = item.from + Number(span.dataset.n);
    const rows = [
      ["rollout − train", number(t.rollout_logprobs[k] - t.train_logprobs[k])],
      ["rollout logprob", number(t.rollout_logprobs[k])], ["train logprob", number(t.train_logprobs[k])],
      ["advantage", number(advantageAt(item, Number(span.dataset.n)))], ["token id", t.response_ids[k] < 0 ? "–" : String(t.response_ids[k])],
      ["weights of step", t.weight_versions[k] < 0 ? "–" : String(t.weight_versions[k])],
      ...t.token_columns.map(([name, values]) => [name, number(values[k])]),
      ["place", `${Number(span.dataset.n) + 1} of ${item.to - item.from}`],
      ...(t.response_mask[k] ? [] : [["trained on", "no"]]),
    ];
    tip.replaceChildren(h("code", {}, JSON.stringify(tokenText(t, k))), h("dl", {}, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
    tip.hidden = false;
    const at = span.getClientRects()[0];
    const below = at.bottom + 8 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - tip.offsetHeight - 8)}px`;
  };
  holder.addEventListener("mouseover", (event) => (tokenOf(event) ? show(event) : hide()));
  holder.addEventListener("mouseleave", hide);
  holder.addEventListener("focusin", show);
  holder.addEventListener("focusout", hide);
  addEventListener("scroll", () => {
    const focused = holder.querySelector("[data-n]:focus-visible");
    focused ? show({ target: focused }) : hide();
  }, { passive: true });
  holder.addEventListener("keydown", (event) => {
    const span = tokenOf(event);
    if (event.key === "Escape") hide();
    const tokens = [...(span?.parentElement.querySelectorAll("[data-n]") ?? [])];
    const at = tokens.indexOf(span);
    const to = { ArrowRight: tokens[at + 1], ArrowLeft: tokens[at - 1], Home: tokens[0], End: tokens.at(-1) }[event.key];
    if (!to) return;
    event.preventDefault();
    span.tabIndex = -1;
    to.tabIndex = 0;
    to.focus({ preventScroll: true });
    to.scrollIntoView({ block: "nearest" });
  });
}

function showScale({ mode, scales }) {
  const legend = document.getElementById("scale");
  const scale = scales[mode];
  legend.hidden = !scale;
  if (!scale) return;
  const ends = { advantage: ["worse than its group", "better"], difference: ["rollout less sure than train", "more sure"],
    seeing: ["less likely with its images than with blank ones", "more likely"] };
  const [low, high] = ends[mode];
  const swatches = ["n4", "n3", "n2", "n1", "p1", "p2", "p3", "p4"].map((shade) => h("span", { "data-shade": shade }));
  legend.replaceChildren(h("small", {}, `${low} ${number(-scale)}`), h("div", {}, swatches), h("small", {}, `${number(scale)} ${high}`));
}
