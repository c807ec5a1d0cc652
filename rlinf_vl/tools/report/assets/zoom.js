// Any picture of the gallery at full size: in a dialog, to be zoomed and moved.

function setUpZoom(holder) {
  const picture = h("img", { alt: "", draggable: "false" });
  const stage = h("div", { class: "stage", tabindex: 0, role: "img" }, picture);
  const about = h("span", { class: "about" });
  let [scale, x, y, fitted, drag] = [1, 0, 0, 1, null];
  const place = () => {
    picture.style.transform = `translate(${x}px, ${y}px) scale(${scale})`;
    picture.style.imageRendering = scale >= 2 ? "pixelated" : "auto";
    about.textContent = `${picture.alt} · ${Math.round(100 * scale)} %`;
  };
  const fit = () => {
    fitted = Math.min(stage.clientWidth / picture.naturalWidth, stage.clientHeight / picture.naturalHeight) || 1;
    fitted = picture.naturalWidth <= 256 ? Math.min(fitted, 8) : Math.min(fitted, 1);
    set(fitted, true);
  };
  const center = () => [x, y] = [(stage.clientWidth - picture.naturalWidth * scale) / 2, (stage.clientHeight - picture.naturalHeight * scale) / 2];
  /** A new scale, about a point of the stage or its center. */
  const set = (to, centered, at = [stage.clientWidth / 2, stage.clientHeight / 2]) => {
    const before = scale;
    scale = Math.min(Math.max(to, 0.05), 32);
    [x, y] = [at[0] - ((at[0] - x) * scale) / before, at[1] - ((at[1] - y) * scale) / before];
    if (centered) center();
    place();
  };
  const button = (text, label, act) => h("button", { type: "button", "aria-label": label, onclick: act }, text);
  const dialog = h("dialog", { id: "zoom", "aria-label": "Picture at full size" },
    h("div", { class: "tools" }, button("−", "Smaller", () => set(scale / 1.5)), button("+", "Larger", () => set(scale * 1.5)),
      button("1:1", "One pixel each", () => set(1, true)), button("Fit", "As large as fits", fit), about, button("Close", "Close", () => dialog.close())), stage);
  document.body.append(dialog);
  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = stage.getBoundingClientRect();
    set(scale * Math.exp(-event.deltaY / 400), false, [event.clientX - box.x, event.clientY - box.y]);
  }, { passive: false });
  stage.addEventListener("pointerdown", (event) => {
    drag = [event.clientX - x, event.clientY - y];
    stage.setPointerCapture(event.pointerId);
  });
  stage.addEventListener("pointermove", (event) => {
    if (!drag) return;
    [x, y] = [event.clientX - drag[0], event.clientY - drag[1]];
    place();
  });
  for (const end of ["pointerup", "pointercancel"]) stage.addEventListener(end, () => (drag = null));
  stage.addEventListener("dblclick", () => (scale === fitted ? set(1, true) : fit()));
  dialog.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    if (event.key === "+" || event.key === "=") set(scale * 1.5);
    else if (event.key === "-") set(scale / 1.5);
    else if (event.key === "0") fit();
    else if (moves) [x, y] = [x + moves[0], y + moves[1]], place();
    else return;
    event.preventDefault();
  });
  const open = async (image) => {
    picture.src = image.src;
    picture.alt = image.alt;
    stage.setAttribute("aria-label", `${image.alt}. Plus and minus zoom, arrow keys move, 0 fits.`);
    await picture.decode().catch(() => null);
    dialog.showModal();
    fit();
    stage.focus();
  };
  const zoomable = (event) => (event.target.matches?.("img.zoomable") ? event.target : null);
  holder.addEventListener("click", (event) => zoomable(event) && open(event.target));
  holder.addEventListener("keydown", (event) => {
    if (!zoomable(event) || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    open(event.target);
  });
}
