// Memory over time in a sandboxed frame: moves it by mouse and keys. It stands behind frame.js,
// memory_data.js and memory_draw.js, reads the element #memory, and asks nothing of the network.

const NARROWEST = 20; // the smallest stretch of time (of bytes, for one moment) that fills the picture
const MOST_WALKED = 500; // blocks of a peak that keys lead to

// ---------------------------------------------------------------- moving

function show(begin, length) {
  length = Math.min(memory.to, Math.max(Math.min(NARROWEST, memory.to), length));
  from = Math.min(Math.max(begin, 0), memory.to - length);
  to = from + length;
  redraw();
}

function zoom(factor, x = (LEFT + width) / 2) {
  const fixed = timeOf(Math.max(LEFT, x)), before = span();
  const length = Math.min(memory.to, Math.max(Math.min(NARROWEST, memory.to), before * factor));
  show(fixed - (fixed - from) * (length / before), length);
}

function showBytes(bottom, length) {
  if (memory.moment) return;
  length = Math.min(memory.most, Math.max(Math.min(100, memory.most), length));
  low = Math.min(Math.max(bottom, 0), memory.most - length);
  high = low + length;
  redraw();
}

function zoomBytes(factor, share = 0) {
  const fixed = low + share * (high - low), length = (high - low) * factor;
  showBytes(fixed - share * length, length);
}

const pan = share => show(from + share * span(), span());

function reset() {
  focused = -1;
  hideTip();
  frame.scrollTop = 0;
  showBytes(0, memory.most);
  show(0, memory.to);
}

function fold(place) {
  memory.ranks[place].isFolded = !memory.ranks[place].isFolded;
  hideTip();
  placeRanks();
  redraw();
}

// The moment of the most in use of all ranks, with a tenth of the time on both sides.
function showPeak() {
  const peaks = memory.ranks.map(rank => rank.peak ? rank.peak[1] : -1), place = peaks.indexOf(Math.max(...peaks));
  if (place < 0 || !memory.ranks[place].peak) return;
  focused = -1;
  if (memory.ranks[place].isFolded) fold(place);
  scrollTo(place);
  if (memory.moment) return redraw();
  const ns = memory.ranks[place].peak[0], length = Math.min(span(), memory.to / 5);
  show(ns - length / 2, length);
  const texts = breakdown(place, ns);
  showTip(texts, xOf(ns), tops[place] + HEADER - frame.scrollTop);
  element("said").textContent = texts.join(", ");
}

function scrollTo(place) {
  const top = tops[place], bottom = top + HEADER + memory.panel;
  if (top - AXIS < frame.scrollTop || bottom > frame.scrollTop + height) frame.scrollTop = top - AXIS;
}

// ---------------------------------------------------------------- from block to block

// Blocks in use at a rank's peak, the largest first.
function walked(rank) {
  if (!rank.walked) {
    const ns = memory.moment || !rank.peak ? 0 : rank.peak[0], found = [];
    for (let i = rank.first; i < rank.stop && memory.start[i] <= ns; i++) if (memory.end[i] > ns) found.push(i);
    rank.walked = found.sort((a, b) => memory.size[b] - memory.size[a] || a - b).slice(0, MOST_WALKED);
  }
  return rank.walked;
}

// Bring a block into sight, show its tooltip, and say it.
function focusOn(i) {
  if (i === undefined || i < 0) return;
  focused = i;
  const place = memory.rankOf[i], rank = memory.ranks[place], end = Math.min(memory.end[i], memory.to);
  if (rank.isFolded) fold(place);
  if (!memory.moment && (end < from || memory.start[i] > to)) show((memory.start[i] + end - span()) / 2, span());
  scrollTo(place);
  const x = memory.moment ? LEFT : Math.min(width - 40, Math.max(LEFT, xOf(memory.start[i])));
  showTip(lines(i), x, tops[place] + HEADER - frame.scrollTop + memory.panel / 3);
  element("said").textContent = lines(i).join(", ");
  redraw();
}

function nextBlock(by) {
  const rank = memory.ranks[focused < 0 ? 0 : memory.rankOf[focused]];
  if (!rank) return;
  const blocks = walked(rank), at = blocks.indexOf(focused);
  focusOn(blocks[at < 0 ? 0 : Math.min(blocks.length - 1, Math.max(0, at + by))]);
}

function nextRank(by) {
  if (focused < 0) return nextBlock(0);
  let place = memory.rankOf[focused] + by;
  while (memory.ranks[place] && !walked(memory.ranks[place]).length) place += by;
  if (memory.ranks[place]) focusOn(walked(memory.ranks[place])[0]);
}

function showFocused() {
  if (focused < 0 || memory.moment) return;
  const end = Math.min(memory.end[focused], memory.to), length = end - memory.start[focused];
  show(memory.start[focused] - 0.25 * length, 1.5 * length);
}

// ---------------------------------------------------------------- tooltip, mouse and keys

function showTip(texts, x, y) {
  tip.textContent = texts.join("\n");
  tip.hidden = false;
  const room = document.documentElement;
  const under = canvas.getBoundingClientRect().top + y + 18;
  tip.style.left = `${Math.max(0, Math.min(x + 12, room.clientWidth - tip.offsetWidth - 4))}px`;
  const above = under - tip.offsetHeight - 24;
  tip.style.top = `${Math.max(0, under + tip.offsetHeight > room.clientHeight && above > 0 ? above : Math.min(under, room.clientHeight - tip.offsetHeight))}px`;
}

function hideTip() {
  tip.hidden = true;
}

// What is drawn at a point: the block's place + 1, -1 - class of merged ones, or 0.
function idAt(x, y) {
  const at = rankAt(y);
  if (!at || y < AXIS || x < LEFT || memory.ranks[at.place].isFolded) return 0;
  const own = memory.ranks[at.place].drawn, row = Math.floor((at.below - HEADER) * ratio);
  const column = Math.min(Math.floor((x - LEFT) * ratio), own ? own.columns - 1 : 0);
  return own && row >= 0 && row < own.rows ? own.ids[row * own.columns + column] : 0;
}

// What there is to say of a point, a line each.
function textsAt(x, y) {
  const id = idAt(x, y), at = rankAt(y);
  if (id > 0) return lines(id - 1);
  if (!at || y < AXIS || x < LEFT || memory.ranks[at.place].isFolded || at.below > HEADER + memory.panel) return null;
  const rank = memory.ranks[at.place];
  if (memory.moment || !rank.peak) return null;
  const column = Math.min(rank.drawn.columns - 1, Math.floor((x - LEFT) * ratio)), near = 3 * pixel();
  const failed = rank.failures.find(one => Math.abs(one[0] - timeOf(x)) < near);
  if (failed) return [`out of memory: ${bytes(failed[1])} asked for`, ...breakdown(at.place, failed[0])];
  if (at.below < HEADER) return null;
  // What is told is what is drawn: the moment of the most in use of the column's stretch.
  const changes = rank.drawn.shown[column], begins = from + column * span() / rank.drawn.columns;
  const texts = breakdown(at.place, Math.max(begins, changes ? rank.time[changes - 1] : 0), changes);
  return id < 0 ? [`${categoryOf(-1 - id)}, blocks too small to be seen alone`, ...texts] : texts;
}

function onMove(event) {
  if (drag) {
    drag.moved = drag.moved || Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 3;
    show(drag.from - (event.clientX - drag.x) * pixel(), span());
    const isZoomed = high - low < memory.most && !memory.moment;
    if (isZoomed) showBytes(drag.low + (event.clientY - drag.y) * (high - low) / memory.panel, high - low);
    else frame.scrollTop = drag.top + drag.y - event.clientY;
    return;
  }
  hovered = idAt(event.offsetX, event.offsetY) - 1;
  const texts = textsAt(event.offsetX, event.offsetY), at = rankAt(event.offsetY);
  canvas.style.cursor = at && at.below < HEADER && event.offsetY > AXIS ? "pointer" : "default";
  if (texts) showTip(texts, event.offsetX, event.offsetY); else hideTip();
  redraw();
}

// Without focus the wheel scrolls the page, as everywhere; with Ctrl it zooms in any case.
function onWheel(event) {
  if (!event.ctrlKey && !event.metaKey && document.activeElement !== frame) return;
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 20 : 1;
  const factor = by => Math.exp(Math.max(-0.7, Math.min(0.7, by * unit * 0.002)));
  if (event.shiftKey) {
    const at = rankAt(event.offsetY), below = at ? at.below - HEADER : memory.panel;
    return zoomBytes(factor(event.deltaY || event.deltaX), Math.max(0, Math.min(1, 1 - below / memory.panel)));
  }
  if (event.deltaX) pan(event.deltaX * unit / width);
  if (event.deltaY) zoom(factor(event.deltaY), event.offsetX);
}

const KEYS = {
  "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), w: () => zoom(0.7), s: () => zoom(1 / 0.7),
  a: () => pan(-0.15), d: () => pan(0.15), ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
  W: () => zoomBytes(0.7), S: () => zoomBytes(1 / 0.7), p: showPeak, Home: reset,
  ArrowUp: () => { frame.scrollTop -= 40; }, ArrowDown: () => { frame.scrollTop += 40; },
  PageUp: () => { frame.scrollTop -= height - 40; }, PageDown: () => { frame.scrollTop += height - 40; },
  "Shift ArrowLeft": () => nextBlock(-1), "Shift ArrowRight": () => nextBlock(1),
  "Shift ArrowUp": () => nextRank(-1), "Shift ArrowDown": () => nextRank(1),
  Enter: showFocused,
  Escape: () => { focused = -1; hideTip(); redraw(); },
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isArrow = event.key.startsWith("Arrow");
  const action = KEYS[(event.shiftKey && isArrow ? "Shift " : "") + event.key];
  if (!action) return;
  event.preventDefault();
  event.stopPropagation(); // a notebook's own keys are not meant
  action();
}

function onPress(event) {
  isPressed = true; // who comes by mouse wants no block in a ring
  frame.focus({ preventScroll: true });
  isPressed = false;
  if (event.button) return;
  drag = { x: event.clientX, y: event.clientY, from, low, top: frame.scrollTop, moved: false };
  canvas.setPointerCapture(event.pointerId);
  hideTip();
}

function onRelease(event) {
  const at = rankAt(event.offsetY);
  if (drag && !drag.moved && at && at.below < HEADER && event.offsetY > AXIS) fold(at.place);
  drag = null;
}

function listen() {
  canvas.addEventListener("pointerdown", onPress);
  canvas.addEventListener("pointerup", onRelease);
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerleave", () => { hovered = -1; hideTip(); redraw(); });
  canvas.addEventListener("wheel", onWheel, { passive: false });
  frame.addEventListener("keydown", onKey);
  // Who comes by keyboard hears the largest block of the first peak at once.
  frame.addEventListener("focus", () => { if (!isPressed && focused < 0) nextBlock(0); });
  frame.addEventListener("blur", () => { focused = -1; hideTip(); redraw(); });
  frame.addEventListener("scroll", redraw);
  element("in").onclick = () => zoom(0.5);
  element("out").onclick = () => zoom(2);
  element("peak").onclick = showPeak;
  element("all").onclick = reset;
  new ResizeObserver(fit).observe(frame);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  isDark = dark.matches;
  dark.addEventListener("change", () => { isDark = dark.matches; takeTheme(); drawLegend(); redraw(); });
}

// The categories that are there, stripes where something is guessed, and the bars below the areas.
function drawLegend() {
  const present = new Set([...memory.code, ...memory.restCode]), legend = element("legend");
  const stripes = colour => `repeating-linear-gradient(135deg, ${colour} 0 3px, ${theme.lane} 3px 5px)`;
  const entries = memory.layers.filter(code => code & 1).map(code => code >> 1)
    .filter(category => present.has(2 * category) || present.has(2 * category + 1))
    .map(category => [memory.categories[category], memory.colours[category]]);
  if ([...present].some(code => !(code & 1))) entries.push(["striped: guessed", stripes(theme.faint)]);
  const kinds = new Set(memory.ranks.flatMap(rank => rank.phases.map(phase => phase[0])));
  for (const kind of kinds) entries.push([kind, phaseColour(kind), "bar"]);
  legend.replaceChildren(...entries.map(([name, background, shape = ""]) => {
    const entry = document.createElement("span"), square = document.createElement("i");
    square.style.background = background;
    square.className = shape;
    entry.append(square, name);
    return entry;
  }));
}

async function main() {
  memory = await unpacked(element("memory").textContent.trim());
  prepared(memory);
  from = 0;
  to = memory.to;
  high = memory.most;
  listen();
  takeTheme();
  drawLegend();
  fit();
  requestAnimationFrame(() => requestAnimationFrame(() => { frame.dataset.paintedMs = Date.now(); }));
}

main();
