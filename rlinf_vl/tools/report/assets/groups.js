// A group as one card: the problem once, and its answers as the rows of a table.

const ANSWER_SHOWN = 160;

/** [[members of a group], …] of the trajectories found, in their order; a group is shown whole. */
function groupsOf(found, all) {
  const members = new Map();
  for (const item of all) members.get(item.key)?.push(item) ?? members.set(item.key, [item]);
  return [...new Set(found.map((item) => item.key))].map((key) => members.get(key).sort((a, b) => a.sample - b.sample));
}

function groupCard(members, view) {
  const [first] = members;
  const parts = members.map((item) => parsed(item.text("reward_parts")) ?? {});
  const names = [...new Set(parts.flatMap((part) => Object.keys(part)))].slice(0, 8);
  const right = members.filter((item) => item.outcome === "correct").length;
  const conversational = members.some((item) => item.layout.turns.length > 1);
  const columns = ["#", "Answer", "Reward", ...names, "Advantage", "Tokens", ...(conversational ? ["Turns"] : []), "End"];
  const rows = members.flatMap((item, k) => {
    const cells = [
      answerCell(item),
      ...[item.reward, ...names.map((name) => parts[k][name]), item.advantage, item.sampled, ...(conversational ? [item.layout.turns.length] : [])]
        .map((value) => h("td", { class: "number" }, number(value))),
      h("td", {}, item.error !== null ? h("span", { title: item.error }, "error") : item.truncated ? h("span", { class: "badge truncated" }, "truncated") : item.text("finish_reason") ?? "–"),
    ];
    const about = `Answer ${item.sample + 1}, token by token`;
    return unfoldingRow(String(item.sample + 1), about, cells, () => card(item, view));
  });
  return h("article", { class: "card group", "aria-label": `Step ${first.step}, group ${first.group}` },
    h("header", {}, h("h3", {}, `${first.split === "val" ? "Validation" : "Training"}, step ${first.step}`),
      h("span", { class: "about" }, `${right} of ${members.length} correct · reward ${number(first.groupMean)} ± ${number(Math.sqrt(first.disputed))}`),
      h("button", { type: "button", class: "link", title: "Show all of this problem", onclick: () => view.only(first.problem) }, `problem ${first.problem}`)),
    problemOf(first, view),
    answerTable("Answers of the group", columns, (k) => k > 1 && k < columns.length - 1, rows));
}

/** A problem of several runs: its question once, and a row for each run, which unfolds into the run's answers. */
function comparisonCard(entry, runs, view) {
  const [first] = entry.flat();
  const columns = ["Run", "Newest answer", "Correct", "Mean reward", "Mean tokens"];
  const mean = (items, value) => number(items.reduce((sum, item) => sum + value(item), 0) / items.length);
  const rows = entry.flatMap((items, r) => {
    const swatch = h("span", { class: "swatch", "data-color": r % 7 });
    const name = [swatch, " ", runs[r].name];
    if (!items.length) {
      return [h("tr", {}, h("th", { scope: "row" }, name), h("td", { colspan: columns.length - 1, class: "about" }, "no answer to this problem"))];
    }
    const newest = items.reduce((latest, item) => (item.step > latest.step ? item : latest));
    const graded = items.filter((item) => Number.isFinite(item.reward));
    const right = items.filter((item) => item.outcome === "correct").length;
    const figures = [`${right} of ${items.length}`, mean(graded, (item) => item.reward), mean(items, (item) => item.sampled)];
    const cells = [answerCell(newest), ...figures.map((figure) => h("td", { class: "number" }, figure))];
    return unfoldingRow(name, `Answers of ${runs[r].name}`, cells, () => sideOf(items, runs[r], r, view));
  });
  const title = `Problem ${first.problem}`;
  return h("article", { class: "card group compared", "aria-label": title },
    h("header", {}, h("h3", {}, title), h("span", { class: "about" }, first.split === "val" ? "validation" : "training")),
    problemOf(first, view), answerTable(`Answers of the runs to ${title}`, columns, (k) => k > 1, rows));
}

/** A problem's pictures, question, reference answer and labels. */
function problemOf(item, view) {
  const t = item.run.trajectories;
  const pictures = Array.from({ length: t.image_offsets[item.i + 1] - t.image_offsets[item.i] }, (_, index) => picture(item, index, view));
  const labels = Object.entries(parsed(item.text("labels")) ?? {});
  return h("div", { class: "body" }, pictures.length > 0 && h("div", { class: "images" }, pictures),
    h("div", { class: "texts" }, h("h4", {}, "Question"), h("div", { class: "rendered", tabindex: 0 }, ...withFormulas(questionOf(item))),
      h("h4", {}, "Reference answer"), h("div", { class: "rendered" }, ...withFormulas(item.text("answer") ?? "–", true)),
      labels.length > 0 && h("p", { class: "about" }, labels.map(([name, value]) => `${name}: ${value}`).join(" · "))));
}

function answerTable(label, columns, isNumber, rows) {
  const heads = columns.map((name, k) => h("th", { scope: "col", class: isNumber(k) && "number" }, name));
  return h("div", { class: "answers", tabindex: 0, role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows)));
}

function answerCell(item) {
  const badge = h("span", { class: `badge ${item.outcome.replace(" ", "-")}` }, item.outcome);
  return h("td", { class: "text" }, badge, " ", ...withFormulas(shortAnswer(item), true));
}

/** Two rows: a button and cells, and below them what the button unfolds, made when it is first asked for. */
function unfoldingRow(name, label, cells, makeDetail) {
  const detail = h("tr", { class: "detail", hidden: true });
  const button = h("button", { type: "button", class: "link", "aria-expanded": "false", "aria-label": label, onclick: () => {
    if (!detail.childElementCount) detail.append(h("td", { colspan: cells.length + 1 }, makeDetail()));
    detail.hidden = !detail.hidden;
    button.setAttribute("aria-expanded", String(!detail.hidden));
  } }, name);
  return [h("tr", {}, h("th", { scope: "row" }, button), cells), detail];
}

/** What the user asked, without the template's marks and images. */
function questionOf(item) {
  const asked = promptMessages(item).filter((m) => m.role !== "system").flatMap((m) => m.content);
  const question = asked.filter((part) => typeof part === "string").join("\n").trim();
  if (question) return question;
  return (item.text("prompt") ?? "").replace(/<\|im_start\|>(?:system|user)\n?|<\|im_end\|>\n?(?:<\|im_start\|>assistant\n?)?/g, "\n")
    .replace(/(?:<\|[\w-]{1,40}\|>|<image>|<video>)+/g, "").trim() || "–";
}

/** What an answer comes to: its last box, or its end. */
function shortAnswer(item) {
  const text = (item.text("response") ?? "").trim();
  const box = text.lastIndexOf("\\boxed");
  const end = box < 0 ? -1 : closing(text, text.indexOf("{", box) + 1);
  if (end > 0 && end - box <= ANSWER_SHOWN) return text.slice(box, end);
  return text.length > ANSWER_SHOWN ? `…${text.slice(1 - ANSWER_SHOWN)}` : text || "(empty)";
}
