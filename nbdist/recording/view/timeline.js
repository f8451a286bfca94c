// The timeline of a trace in a sandboxed frame: moves it by mouse and keys. It stands behind
// frame.js, timeline_data.js and timeline_draw.js, reads the element #trace, and asks nothing of the network.

const NARROWEST_NS = 20; // the smallest stretch of time that fills the picture

// ---------------------------------------------------------------- moving

function show(begin, length) {
  const whole = trace.to - trace.from;
  length = Math.min(whole, Math.max(NARROWEST_NS, length));
  from = Math.min(Math.max(begin, trace.from), trace.to - length);
  to = from + length;
  redraw();
}

function zoom(factor, x = (LEFT + width) / 2) {
  const fixed = timeOf(Math.max(LEFT, x)), length = Math.max(NARROWEST_NS, span() * factor);
  show(fixed - (fixed - from) * (length / span()), length);
}

const pan = share => show(from + share * span(), span());
const reset = () => { focused = -1; spot = null; element("spots").selectedIndex = 0; hideTip(); frame.scrollTop = 0; show(trace.from, trace.to - trace.from); };

// Bring an item into sight, show its tooltip, and say it.
function focusOn(i) {
  if (i < 0) return;
  focused = i;
  if (trace.end[i] < from || trace.start[i] > to)
    show(trace.start[i] - (span() - (trace.end[i] - trace.start[i])) / 2, span());
  const y = rowTops[trace.rowOf[i]];
  if (y < frame.scrollTop + AXIS || y + ROW > frame.scrollTop + height) frame.scrollTop = y - height / 2;
  const x = Math.min(width - 40, Math.max(LEFT, xOf(trace.start[i])));
  showTip(lines(i), x, y - frame.scrollTop);
  element("said").textContent = lines(i).join(", ");
  redraw();
}

// The first item of a row that is seen, or that is there when the focused one starts.
function itemIn(row) {
  const i = firstAfter(row, focused < 0 ? from : Math.max(from, trace.start[focused]));
  return i < trace.firsts[row + 1] ? i : trace.firsts[row + 1] - 1;
}

function nextItem(by) {
  if (focused < 0) return focusOn(trace.rows.length ? itemIn(0) : -1);
  const row = trace.rowOf[focused], i = focused + by;
  if (i >= trace.firsts[row] && i < trace.firsts[row + 1]) focusOn(i);
}

function nextRow(by) {
  if (focused < 0) return nextItem(0);
  const row = trace.rowOf[focused] + by;
  if (row >= 0 && row < trace.rows.length) focusOn(itemIn(row));
}

// What a finding points at, with as much again on both sides.
function lookAt(number) {
  spot = trace.spots[number] || null;
  if (!spot) return redraw();
  const [, place, begin, end] = spot, length = Math.max(NARROWEST_NS, end - begin);
  frame.scrollTop = headers[place] - AXIS;
  show(begin - length, 3 * length);
}

function listSpots() {
  const list = element("spots");
  list.hidden = !trace.spots.length;
  for (const [rule, place, begin] of trace.spots) {
    const option = document.createElement("option");
    option.textContent = `${rule}: rank ${trace.ranks[place].rank}, ${moment(begin, 1e4)}`;
    list.append(option);
  }
  list.onchange = () => lookAt(list.selectedIndex - 1);
}

// ---------------------------------------------------------------- tooltip, mouse and keys

function showTip(texts, x, y) {
  tip.textContent = texts.join("\n");
  tip.hidden = false;
  const room = document.documentElement;
  const under = canvas.getBoundingClientRect().top + y + 18;
  tip.style.left = `${Math.max(0, Math.min(x + 12, room.clientWidth - tip.offsetWidth - 4))}px`;
  const above = under - tip.offsetHeight - 24;
  tip.style.top = `${under + tip.offsetHeight > room.clientHeight && above > 0 ? above : under}px`;
}

function hideTip() {
  tip.hidden = true;
}

function onMove(event) {
  if (drag) {
    show(drag.from + (drag.x - event.offsetX) * pixel(), span());
    frame.scrollTop = drag.top + drag.y - event.clientY;
    return;
  }
  hovered = itemAt(event.offsetX, event.offsetY);
  const texts = hovered >= 0 ? lines(hovered) : stepAt(event.offsetX, event.offsetY);
  if (texts) showTip(texts, event.offsetX, event.offsetY); else hideTip();
  redraw();
}

// Without focus the wheel scrolls the page, as everywhere; with Ctrl it zooms in any case.
function onWheel(event) {
  if (!event.ctrlKey && !event.metaKey && document.activeElement !== frame) return;
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 20 : 1;
  if (event.deltaX) pan(event.deltaX * unit / width);
  if (event.deltaY) zoom(Math.exp(Math.max(-0.7, Math.min(0.7, event.deltaY * unit * 0.002))), event.offsetX);
}

const KEYS = {
  "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), Home: reset,
  ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
  ArrowUp: () => { frame.scrollTop -= 3 * ROW; }, ArrowDown: () => { frame.scrollTop += 3 * ROW; },
  PageUp: () => { frame.scrollTop -= height - 3 * ROW; }, PageDown: () => { frame.scrollTop += height - 3 * ROW; },
  "Shift ArrowLeft": () => nextItem(-1), "Shift ArrowRight": () => nextItem(1),
  "Shift ArrowUp": () => nextRow(-1), "Shift ArrowDown": () => nextRow(1),
  Enter: () => focused >= 0 && show(trace.start[focused] - 0.25 * lengthOf(focused), 1.5 * lengthOf(focused)),
  Escape: () => { focused = -1; hideTip(); redraw(); },
};
const lengthOf = i => Math.max(NARROWEST_NS, trace.end[i] - trace.start[i]);

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isArrow = event.key.startsWith("Arrow");
  const action = KEYS[(event.shiftKey && isArrow ? "Shift " : "") + event.key];
  if (!action) return;
  event.preventDefault();
  event.stopPropagation(); // a notebook's own keys are not meant
  action();
}

function listen() {
  canvas.addEventListener("pointerdown", event => {
    isPressed = true; // who comes by mouse wants no event in a ring
    frame.focus({ preventScroll: true });
    isPressed = false;
    if (event.button) return;
    drag = { x: event.offsetX, y: event.clientY, from, top: frame.scrollTop };
    canvas.setPointerCapture(event.pointerId);
    hideTip();
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { drag = null; });
  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerleave", () => { hovered = -1; hideTip(); redraw(); });
  canvas.addEventListener("wheel", onWheel, { passive: false });
  frame.addEventListener("keydown", onKey);
  // Who comes by keyboard hears the first event at once.
  frame.addEventListener("focus", () => { if (!isPressed && focused < 0) nextItem(0); });
  frame.addEventListener("blur", () => { focused = -1; hideTip(); redraw(); });
  frame.addEventListener("scroll", redraw);
  element("in").onclick = () => zoom(0.5);
  element("out").onclick = () => zoom(2);
  element("all").onclick = reset;
  element("full").hidden = trace.full[0] === trace.full[1];
  element("full").onclick = () => show(trace.full[0], trace.full[1] - trace.full[0]);
  new ResizeObserver(fit).observe(frame);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  isDark = dark.matches;
  dark.addEventListener("change", () => { isDark = dark.matches; takeTheme(); redraw(); });
}

function drawLegend() {
  const present = trace.kindsOf.reduce((all, kinds) => all | kinds, 0);
  trace.kinds.forEach((kind, i) => {
    if (!(present >> i & 1)) return;
    const entry = document.createElement("span"), square = document.createElement("i");
    square.style.background = trace.colours[i];
    entry.append(square, kind);
    element("legend").append(entry);
  });
}

async function main() {
  trace = prepared(await unpacked(element("trace").textContent.trim()));
  from = trace.from;
  to = trace.to;
  placeRows();
  listen();
  takeTheme();
  drawLegend();
  listSpots();
  fit();
  requestAnimationFrame(() => requestAnimationFrame(() => { frame.dataset.paintedMs = Date.now(); }));
}

main();
