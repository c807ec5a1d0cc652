// A trajectory of several turns: a filmstrip, then turn by turn what was said, answered, called and paid.

const TURNS_SHOWN = 8;
const TEXT_SHOWN = 4000;
const MOST_ROWS = 12; // of success by turns
const ANSWERERS = ["assistant", "model"];
const CHATML = /<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)/gs;
const IMAGE_MARKS = /((?:<\|vision_start\|>)(?:<\|image_pad\|>|<image>)+(?:<\|vision_end\|>)|(?:<\|image_pad\|>)+|<image>|<video>)/;

/** [{number, start, end, reward, …, said, before, sequence}] of a trajectory. `said`: messages new in the turn; `before`: those that a rewritten history
 *  repeats; `prefix`: what the template began the answer with. */
function turnsOf(item) {
  const { turns } = item.layout;
  const found = [];
  list(parsed(item.text("messages"))).forEach((messages, sequence) => {
    let said = [];
    let first = true;
    for (const message of list(messages).filter((m) => Array.isArray(m?.content))) {
      if (turns[message.turn] === undefined) {
        said.push(message);
        continue;
      }
      const again = first && sequence ? said.findLastIndex((m) => ANSWERERS.includes(m.role)) + 1 : 0;
      found.push({ ...turns[message.turn], number: message.turn + 1, role: message.role, prefix: message.content,
        said: said.slice(again), before: said.slice(0, again), sequence });
      [said, first] = [[], false];
    }
    if (said.length) found.push({ number: null, said, before: [], sequence });
  });
  return found;
}

function parsed(text) {
  try {
    return JSON.parse(text ?? "null");
  } catch {
    return null;
  }
}

const list = (value) => (Array.isArray(value) ? value : []);

function conversation(item, view) {
  const turns = turnsOf(item);
  const places = new Map(); // turn → its element
  const holder = h("div", { class: "turns" });
  const showTurns = (count) => {
    const rows = turns.slice(0, count).map((turn, k) => {
      places.set(turn, turnRow(item, turn, view, turns[k - 1]));
      return places.get(turn);
    });
    const more = h("button", { type: "button", onclick: () => showTurns(turns.length) }, `Show all ${turns.length} turns`);
    holder.replaceChildren(...rows, ...(count < turns.length ? [more] : []));
  };
  showTurns(turns.length <= TURNS_SHOWN + 2 ? turns.length : TURNS_SHOWN);
  const go = (turn) => {
    if (!places.has(turn)) showTurns(turns.length);
    places.get(turn).scrollIntoView({ block: "nearest" });
    places.get(turn).focus({ preventScroll: true });
  };
  return h("div", { class: "conversation" }, branchTree(item, turns, go), filmstrip(item, turns, view, go), holder);
}

/** The branches of a trajectory, each with its turns, below the turn that it goes on from; null where there is one. */
function branchTree(item, turns, go) {
  const { branches } = item.layout;
  if (branches.length < 2) return null;
  const children = branches.map(() => []);
  const roots = [];
  // A parent comes before its children; anything else is a broken file, and stands by itself.
  branches.forEach((branch, k) => (Number.isInteger(branch.parent) && branch.parent >= 0 && branch.parent < k ? children[branch.parent] : roots).push(k));
  const chip = (turn) => h("button", { type: "button", onclick: () => go(turn), title: `Turn ${turn.number}: ${actionOf(item, turn)}, reward ${number(turn.reward)}`,
    "aria-label": `Turn ${turn.number} of branch ${turn.sequence + 1}` }, h("b", {}, String(turn.number)), " ", actionOf(item, turn), " ", reward(turn));
  const node = (k) => h("li", {}, h("p", {}, h("b", {}, `Branch ${k + 1}`), h("small", {}, ` ${origin(branches[k])}`)),
    h("div", { class: "chips" }, turns.filter((turn) => turn.sequence === k && turn.number !== null).map(chip)),
    children[k].length > 0 && h("ul", {}, children[k].map(node)));
  return h("details", { class: "branches", open: "" }, h("summary", {}, `${branches.length} branches`), h("ul", {}, roots.map(node)));
}

/** Where a branch begins, in words. */
function origin({ turn, shared }) {
  const tokens = shared > 0 ? `, ${number(shared)} tokens shared` : "";
  return Number.isInteger(turn) ? `goes on from turn ${turn + 1}${tokens}` : `begins anew${tokens}`;
}

/** Pictures in order, under each what was done; null where fewer than two turns show one. */
function filmstrip(item, turns, view, go) {
  const frames = turns.map((turn) => [turn, turn.said.flatMap((m) => m.content).filter((part) => typeof part === "number")]);
  if (frames.filter(([, shown]) => shown.length).length < 2) return null;
  const cells = frames.map(([turn, shown]) => {
    const done = turn.number === null ? "" : actionOf(item, turn);
    const label = turn.number === null ? "After the last turn" : `Turn ${turn.number}: ${done}, reward ${number(turn.reward)}`;
    return h("li", {}, h("button", { type: "button", title: label, "aria-label": label, onclick: () => go(turn) },
      h("span", { class: "pictures" }, shown.length ? shown.map((index) => picture(item, index, view, false)) : h("small", {}, "no picture")),
      h("span", { class: "done" }, turn.number !== null && h("b", {}, String(turn.number)), ` ${done} `, reward(turn))));
  });
  return h("ol", { class: "filmstrip", "aria-label": "Filmstrip: what each turn saw and did" }, cells);
}

/** What a turn did, in a few words: what it boxed, the tools it called, or how its answer ends. */
function actionOf(item, turn) {
  const text = tokensText(item, turn.thought ?? turn.start, turn.end).replace(/<\|[\w-]{1,40}\|>/g, "").trim();
  const boxed = [...text.matchAll(/\\boxed\s*\{([^{}]*)\}/g)].at(-1)?.[1].trim();
  const words = boxed || toolCalls(turn).map((call) => String(call.name || "malformed call")).join(", ") || text.replace(/\s+/g, " ") || "nothing";
  return words.length > 24 ? `…${words.slice(-23)}` : words;
}

function tokensText(item, start, end) {
  let text = "";
  for (let n = start; n < Math.min(end, item.to - item.from); n++) text += tokenText(item.run.trajectories, item.from + n);
  return text;
}

function turnRow(item, turn, view, last) {
  const rewritten = last && last.sequence !== turn.sequence;
  const repeated = h("details", { class: "repeated" }, h("summary", {}, item.layout.branches.length ? `${turn.before.length} messages before this one` : `The history was rewritten: ${turn.before.length} messages before this one`));
  repeated.addEventListener("toggle", () => repeated.append(...turn.before.map((m) => message(item, m, view))), { once: true });
  const said = turn.said.map((m) => message(item, m, view));
  if (turn.number === null) return h("section", { class: "turn", "aria-label": "After the last turn", tabindex: -1 }, h("div", { class: "rail" }), h("div", { class: "said" }, said));
  const notes = [
    turn.thought && `thought ${turn.thought - turn.start} tokens, then said ${turn.end - turn.thought}`,
    turn.finish_reason && turn.finish_reason !== "stop" && `finish: ${turn.finish_reason}`,
    item.layout.turns.some((other) => other.advantage !== turn.advantage) && `advantage ${number(turn.advantage)}`,
    typeof turn.state === "string" && `state ${turn.state.length > 60 ? `${turn.state.slice(0, 60)}…` : turn.state}`,
  ].filter(Boolean).join(" · ");
  return h("section", { class: "turn", "aria-label": `Turn ${turn.number}`, tabindex: -1 },
    h("div", { class: "rail" }, h("b", { title: `Turn ${turn.number}` }, String(turn.number)), reward(turn)),
    h("div", { class: "exchange" },
      rewritten && item.layout.branches[turn.sequence] && h("p", { class: "about branch" }, h("b", {}, `Branch ${turn.sequence + 1}`), ` ${origin(item.layout.branches[turn.sequence])}`),
      rewritten && (turn.before.length ? repeated : !item.layout.branches.length && h("p", { class: "about" }, "The history was rewritten: a new sequence.")),
      said.length > 0 && h("div", { class: "said" }, said),
      h("div", { class: "answer" }, h("h4", {}, turn.role || "answer", notes && h("small", {}, ` · ${notes}`)),
        turn.prefix.length > 0 && h("pre", { class: "prefix" }, turn.prefix.filter((part) => typeof part === "string")),
        tokenList(item, view, turn.start, turn.end, `Turn ${turn.number}'s answer`),
        toolCalls(turn).map((call) => toolCard(call)))));
}

function reward({ reward: paid }) {
  return typeof paid === "number" && paid !== 0 && h("span", { class: `paid ${paid > 0 ? "good" : "bad"}`, title: `reward ${number(paid)}` }, `${paid > 0 ? "+" : ""}${number(paid)}`);
}

/** Return the messages of a trajectory's first prompt, [{role, content}]. Files without the column `messages` have them in the prompt's
 *  text, between the marks of ChatML. Empty if neither tells. */
function promptMessages(item) {
  const recorded = list(list(parsed(item.text("messages")))[0]).filter((m) => Array.isArray(m?.content));
  const answered = recorded.findIndex((m) => m.turn !== undefined);
  if (recorded.length) return answered < 0 ? recorded : recorded.slice(0, answered);
  let images = 0;
  const content = (text) => text.split(IMAGE_MARKS).map((part, k) => (k % 2 ? images++ : part)).filter((part) => part !== "");
  const messages = [...(item.text("prompt") ?? "").matchAll(CHATML)].map(([, role, text]) => ({ role, content: content(text.trim()) }));
  return messages.filter((m) => m.content.length > 0); // the last one has only begun: the model writes it
}

/** Messages without their images, each of which is named where it stood. */
function bubbles(item, messages, view) {
  const mark = (index) => h("span", { class: "image-mark" }, `${imageAt(item, index, view)?.clip ? "video" : "image"} ${index + 1}`);
  return h("div", { class: "said bubbles" }, messages.map((m) => message(item, m, view, mark)));
}

/** A message: its texts, and between them what `show` makes of its images. */
function message(item, { role, content }, view, show = (index) => picture(item, index, view)) {
  const parts = content.map((part) => (typeof part === "number" ? show(part) : foldedText(String(part))));
  const long = content.reduce((sum, part) => sum + (typeof part === "string" ? part.length : 0), 0) > 700;
  return h("div", { class: `message ${role === "system" ? role : ""}` }, h("h4", {}, role || "text"), h("div", { class: "content", tabindex: long && 0 }, parts));
}

function foldedText(text) {
  if (text.length <= TEXT_SHOWN) return h("span", {}, ...withFormulas(text));
  const all = h("button", { type: "button", onclick: (event) => event.currentTarget.parentElement.replaceChildren(text) }, `Show all ${text.length.toLocaleString("en")} characters`);
  return h("span", {}, `${text.slice(0, TEXT_SHOWN)}… `, all);
}

/** A trajectory's image or clip by its number; undefined if it was left out. */
function imageAt(item, index, view) {
  const t = item.run.trajectories;
  const at = t.image_offsets[item.i] + index;
  return view.images[at < t.image_offsets[item.i + 1] ? t.images[at] : -1];
}

function picture(item, index, view, zooms = true) {
  const image = imageAt(item, index, view);
  if (!image) return h("span", { class: "no-image" }, "[image left out]");
  if (image.clip) return clip(image.clip.map(([at, seconds]) => [view.images[at], seconds]), `Video ${index + 1} of problem ${item.problem}`, zooms);
  const shown = imageElement(image, `Image ${index + 1} of problem ${item.problem}`, zooms);
  const map = zooms && heatMapsOf(item).find((entry) => entry.image === index);
  return map ? withHeatMap(shown, map) : shown;
}

/** [{image, values: nats by rows and columns of patches}] that the verb look has made of a trajectory. */
function heatMapsOf(item) {
  const maps = item.run.trajectories.heat_maps ? list(parsed(item.text("heat_maps"))) : [];
  return maps.filter((map) => list(map?.values).length && map.values.every((row) => list(row).length === map.values[0].length && row.length));
}

/** A picture, and a button that lays over it which patches the answer depends on. */
function withHeatMap(shown, { values }) {
  const [rows, columns] = [values.length, values[0].length];
  const overlay = h("canvas", { width: columns, height: rows, hidden: true, "aria-hidden": "true" });
  const most = Math.max(...values.flat(), 1e-9);
  const pixels = new ImageData(columns, rows);
  values.flat().forEach((value, k) => pixels.data.set([214, 20, 90, Math.round(225 * Math.max(0, value) / most)], 4 * k));
  overlay.getContext("2d").putImageData(pixels, 0, 0);
  const total = values.flat().reduce((sum, value) => sum + value, 0);
  const button = h("button", { type: "button", "aria-pressed": "false", title: "Patches whose hiding makes the answer less likely", onclick: () => {
    overlay.hidden = !overlay.hidden;
    button.setAttribute("aria-pressed", String(!overlay.hidden));
  } }, "Heat map");
  return h("figure", { class: "heat" }, h("div", {}, shown, overlay),
    h("figcaption", {}, button, h("small", {}, ` ${number(total)} nats, ${number(most)} in one patch`)));
}

function imageElement(image, name, zooms) {
  const [width, height] = image.size;
  return h("img", { src: image.url, width, height, decoding: "async", tabindex: zooms && 0,
    class: `${Math.max(width, height) <= 128 ? "small" : ""} ${zooms ? "zoomable" : ""}`.trim(), title: zooms && "Click to see it at full size",
    alt: `${name}, ${width} × ${height} pixels` });
}

/** The frames of a video that the model saw, each with its time, and a button that plays them in the first one's place. Where there is
 *  no room to look at it (`zooms` is false), the first frame. */
function clip(frames, name, zooms) {
  const first = imageElement(frames[0][0], zooms ? `Frame 1 of ${name}` : name, false);
  if (!zooms) return first;
  const time = (seconds) => `${seconds.toFixed(seconds < 100 ? 2 : 0)} s`;
  const now = h("small", {}, time(frames[0][1]));
  let timer = null;
  const show = (k) => {
    first.src = frames[k][0].url;
    now.textContent = time(frames[k][1]);
    const pause = k + 1 < frames.length ? 1000 * (frames[k + 1][1] - frames[k][1]) : 1000;
    timer = setTimeout(next, Math.min(2000, Math.max(40, pause)), k + 1);
  };
  const next = (k) => (k < frames.length ? show(k) : stop());
  const stop = () => {
    clearTimeout(timer);
    timer = null;
    play.textContent = "▶ Play";
    first.src = frames[0][0].url;
    now.textContent = time(frames[0][1]);
  };
  const play = h("button", { type: "button", "aria-label": `Play ${name}`, onclick: () => {
    if (timer !== null) return stop();
    play.textContent = "■ Stop";
    show(0);
  } }, "▶ Play");
  const strip = frames.map(([image, seconds], k) => h("li", {}, imageElement(image, `Frame ${k + 1} of ${name}`, true), h("small", {}, time(seconds))));
  return h("figure", { class: "clip" }, h("div", { class: "player" }, first, h("div", {}, play, now)),
    h("ol", { tabindex: 0, "aria-label": `Frames of ${name}` }, strip));
}

function toolCalls({ tool_calls: calls }) {
  return list(calls).filter((call) => call !== null && typeof call === "object");
}

function toolCard({ name, arguments: given, error }) {
  const values = given !== null && typeof given === "object" && !Array.isArray(given) ? Object.entries(given) : given === undefined || given === null ? [] : [["", given]];
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  return h("div", { class: `tool ${error ? "failed" : ""}`, role: "group", "aria-label": `Tool call ${String(name ?? "")}` },
    h("code", {}, String(name || "malformed")),
    values.length > 0 && h("dl", {}, values.map(([key, value]) => h("div", {}, key && h("dt", {}, key), h("dd", {}, foldedText(shown(value)))))),
    error !== undefined && error !== null && h("p", { class: "why" }, foldedText(shown(error))));
}

/** How often episodes of so many turns succeed: in a run's first and last validation, or in the last one of several runs; of
 *  training steps where none was recorded, null without any. */
function successByTurns(runs, all) {
  const columns = runs.flatMap((run, r) => {
    const validated = all.filter((item) => item.run === run && item.split === "val");
    const items = (validated.length ? validated : all.filter((item) => item.run === run)).filter((item) => item.error === null && item.layout.turns.length);
    if (!items.length || !run.conversational) return [];
    const steps = items.reduce((known, item) => known.add(item.step), new Set());
    const ends = [...new Set(runs.length > 1 ? [Math.max(...steps)] : [Math.min(...steps), Math.max(...steps)])];
    return ends.map((step) => ({ r, split: items[0].split, step, run, items: items.filter((item) => item.step === step) }));
  });
  if (!columns.length) return null;
  const length = (item) => Math.min(item.layout.turns.length, MOST_ROWS);
  const rows = [...new Set(columns.flatMap(({ items }) => items.map(length)))].sort((a, b) => a - b);
  const cell = ({ items, r }, n, c) => {
    const these = items.filter((item) => n === null || length(item) === n);
    if (!these.length) return h("td", { class: "number" }, "–");
    const share = these.filter((item) => item.outcome === "correct").length / these.length;
    const bar = h("span", { class: "share", "data-color": (runs.length > 1 ? r : c) % 7 });
    bar.style.width = `${100 * share}%`;
    return h("td", { class: "number" }, `${Math.round(100 * share)} % `, h("small", {}, `of ${these.length}`), h("span", { class: "track" }, bar));
  };
  const name = ({ run, step, split }) => `${runs.length > 1 ? `${run.name}, ` : ""}${split === "val" ? "validation" : "step"} ${split === "val" ? `at ${step}` : step}`;
  const line = (label, n) => h("tr", {}, h("th", { scope: "row" }, label), columns.map((column, c) => cell(column, n, c)));
  return h("figure", { class: "card chart by-turns" },
    h("figcaption", {}, h("h3", {}, "Success by number of turns"), h("p", { class: "about" }, "Share graded correct of the recorded episodes that took so many turns.")),
    h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Success by number of turns" },
      h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Turns"), columns.map((column) => h("th", { scope: "col", class: "number" }, name(column))))),
        h("tbody", {}, rows.map((n) => line(n === MOST_ROWS ? `${n} or more` : String(n), n)), line("all", null)))));
}
