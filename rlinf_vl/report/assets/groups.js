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
  const t = first.run.trajectories;
  const parts = members.map((item) => parsed(item.text("reward_parts")) ?? {});
  const names = [...new Set(parts.flatMap((part) => Object.keys(part)))].slice(0, 8);
  const right = members.filter((item) => item.outcome === "correct").length;
  const pictures = Array.from({ length: t.image_offsets[first.i + 1] - t.image_offsets[first.i] }, (_, index) => picture(first, index, view));
  const conversational = members.some((item) => item.layout.turns.length > 1);
  const columns = ["#", "Answer", "Reward", ...names, "Advantage", "Tokens", ...(conversational ? ["Turns"] : []), "End"];
  const rows = members.flatMap((item, k) => {
    const detail = h("tr", { class: "detail", hidden: true });
    const button = h("button", { type: "button", class: "link", "aria-expanded": "false", onclick: () => {
      if (!detail.childElementCount) detail.append(h("td", { colspan: columns.length }, card(item, view)));
      detail.hidden = !detail.hidden;
      button.setAttribute("aria-expanded", String(!detail.hidden));
    } }, String(item.sample + 1));
    button.setAttribute("aria-label", `Answer ${item.sample + 1}, token by token`);
    const cells = [
      h("th", { scope: "row" }, button),
      h("td", { class: "text" }, h("span", { class: `badge ${item.outcome.replace(" ", "-")}` }, item.outcome), " ", ...withFormulas(shortAnswer(item), true)),
      ...[item.reward, ...names.map((name) => parts[k][name]), item.advantage, item.sampled, ...(conversational ? [item.layout.turns.length] : [])]
        .map((value) => h("td", { class: "number" }, number(value))),
      h("td", {}, item.error !== null ? h("span", { title: item.error }, "error") : item.truncated ? h("span", { class: "badge truncated" }, "truncated") : item.text("finish_reason") ?? "–"),
    ];
    return [h("tr", {}, cells), detail];
  });
  const labels = Object.entries(parsed(first.text("labels")) ?? {});
  return h("article", { class: "card group", "aria-label": `Step ${first.step}, group ${first.group}` },
    h("header", {}, h("h3", {}, `${first.split === "val" ? "Validation" : "Training"}, step ${first.step}`),
      h("span", { class: "about" }, `${right} of ${members.length} correct · reward ${number(first.groupMean)} ± ${number(Math.sqrt(first.disputed))}`),
      h("button", { type: "button", class: "link", title: "Show all of this problem", onclick: () => view.only(first.problem) }, `problem ${first.problem}`)),
    h("div", { class: "body" }, pictures.length > 0 && h("div", { class: "images" }, pictures),
      h("div", { class: "texts" }, h("h4", {}, "Question"), h("div", { class: "rendered", tabindex: 0 }, ...withFormulas(questionOf(first))),
        h("h4", {}, "Reference answer"), h("div", { class: "rendered" }, ...withFormulas(first.text("answer") ?? "–", true)),
        labels.length > 0 && h("p", { class: "about" }, labels.map(([name, value]) => `${name}: ${value}`).join(" · ")))),
    h("div", { class: "answers", tabindex: 0, role: "region", "aria-label": "Answers of the group" }, h("table", {},
      h("thead", {}, h("tr", {}, columns.map((name, k) => h("th", { scope: "col", class: k > 1 && k < columns.length - 1 && "number" }, name)))), h("tbody", {}, rows))));
}

/** What the user asked, without the template's marks and images. */
function questionOf(item) {
  return (item.text("prompt") ?? "").replace(/<\|im_start\|>(?:system|user)\n?|<\|im_end\|>\n?(?:<\|im_start\|>assistant\n?)?/g, "\n")
    .replace(/(?:<\|[\w-]{1,40}\|>|<image>)+/g, "").trim() || "–";
}

/** What an answer comes to: its last box, or its end. */
function shortAnswer(item) {
  const text = (item.text("response") ?? "").trim();
  const box = text.lastIndexOf("\\boxed");
  const end = box < 0 ? -1 : closing(text, text.indexOf("{", box) + 1);
  if (end > 0 && end - box <= ANSWER_SHOWN) return text.slice(box, end);
  return text.length > ANSWER_SHOWN ? `…${text.slice(1 - ANSWER_SHOWN)}` : text || "(empty)";
}
