// Formulas in texts: temml makes MathML of LaTeX, of which a copy with known elements and attributes goes into the page.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const FORMULA_SHOWN = 1000; // characters of the longest one
// What stands in $…$, $$…$$, \(…\), \[…\], and a box outside them.
const FORMULA = /\$\$([^$]+)\$\$|\\\[([^]+?)\\\]|\\\(([^]+?)\\\)|\$(?![\s\d]*\d[\d.,]*(?:\s|$))(\S(?:[^$\n]*[^\s$\\])?)\$(?!\d)|(\\boxed\s*\{)/g;
const ELEMENTS = new Set(("math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mtable mtr mtd mstyle mpadded mphantom menclose mmultiscripts mprescripts none").split(" "));
const ATTRIBUTES = new Set(("display displaystyle scriptlevel stretchy fence separator form accent accentunder lspace rspace width height depth voffset linethickness mathvariant columnalign columnspacing rowspacing notation movablelimits symmetric largeop minsize maxsize linebreak").split(" "));

/** A text's nodes, its formulas as MathML; what isn't LaTeX stays text, as do boxes outside formulas unless it is an answer. */
function withFormulas(text, isAnswer = false) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(FORMULA)) {
    if (match.index < from) continue;
    let [source, end] = [match[1] ?? match[2] ?? match[3] ?? match[4], match.index + match[0].length];
    if (match[5]) {
      const begin = end;
      end = isAnswer ? closing(text, begin) : -1;
      const inside = text.slice(begin, end - 1);
      source = end < 0 ? null : /^[A-Za-z][A-Za-z ]+$/.test(inside) ? `\\boxed{\\text{${inside}}}` : text.slice(match.index, end);
    }
    const node = source && formula(source, match[1] !== undefined || match[2] !== undefined);
    if (!node) continue;
    nodes.push(text.slice(from, match.index), node);
    from = end;
  }
  return [...nodes, text.slice(from)].filter((node) => node !== "");
}

/** The place behind the brace that closes the one before `at`; -1 without one. */
function closing(text, at) {
  for (let depth = 1; at < text.length; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === "{") depth++;
    else if (text[at] === "}" && --depth === 0) return at + 1;
  }
  return -1;
}

function formula(source, block) {
  if (source.length > FORMULA_SHOWN) return null;
  try {
    const markup = temml.renderToString(source, { displayMode: block, throwOnError: true, trust: false, maxExpand: 100, xml: true });
    const plain = markup.replace(/ style="([^"]*)"/g, (_, style) => (style.includes("border:") ? ' class="boxed"' : "")); // the page's policy refuses styles
    const made = new DOMParser().parseFromString(plain, "application/xml").documentElement;
    const node = copied(made);
    node?.setAttribute("aria-label", source);
    return node && h("span", { class: block ? "formula block" : "formula", title: source }, node);
  } catch {
    return null;
  }
}

function copied(node) {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.data);
  if (node.nodeType !== Node.ELEMENT_NODE || !ELEMENTS.has(node.localName)) return null;
  const copy = document.createElementNS(MATHML, node.localName);
  for (const { name, value } of node.attributes) if (ATTRIBUTES.has(name)) copy.setAttribute(name, value);
  if (node.getAttribute("class") === "boxed") copy.classList.add("boxed");
  copy.append(...[...node.childNodes].map(copied).filter(Boolean));
  return copy;
}
