// Unpacks the report's data, and makes elements and texts of it. Text from a run becomes text nodes, never markup.

/** An element with attributes (`onclick` and the like are listeners) and children (nodes, texts; null is left out). */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** {runs, images, charts, phases}: columns become typed arrays; build.py and trajectories.py have the layout. */
async function unpack() {
  const block = document.getElementById("data");
  const binary = atob(block.textContent);
  block.remove();
  const packed = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) packed[i] = binary.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const kinds = { u1: Uint8Array, i4: Int32Array, f4: Float32Array };
  const view = (ref) => new kinds[ref.type](buffer, 4 + size + ref.at, ref.count);
  for (const { trajectories } of data.runs) {
    for (const [name, column] of Object.entries(trajectories)) {
      if (column.table) column.index = view(column.index);
      else if (column.type) trajectories[name] = view(column);
    }
    trajectories.token_columns = trajectories.token_columns.map(([name, ref]) => [name, view(ref)]);
  }
  for (const image of data.images.filter((image) => image.data)) {
    let url = null; // made when the image is first shown
    Object.defineProperty(image, "url", {
      get: () => (url ??= URL.createObjectURL(new Blob([view(image.data)], { type: image.type }))),
    });
  }
  return data;
}

/** Four digits, for people; a dash for what isn't there. */
function number(value) {
  if (typeof value !== "number" || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const text = size && (size < 1e-3 || size >= 1e7) ? value.toExponential(1).replace(".0e", "e")
    : size >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  return text.replaceAll("-", "−").replace("e+", "e");
}
