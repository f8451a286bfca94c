// The painter of memory over time; it stands behind viewer.js and memory_data.js. The areas are drawn
// pixel by pixel of the device. Each column shows the moment of the most in use of its stretch.

const LEFT = 84; // width of the column with bytes
const HEADER = 20, GAP = 10, STRIP = 6; // heights
const STRIPES = 6, STRIPE = 2; // of what is guessed: as far apart, as wide
const EDGED = 4, LABEL_HIGH = 13, LABEL_WIDE = 46, MOST_LABELS = 120;
const SHADES = 3; // neighbours differ a little
const MOST_WALKED = 500; // blocks of a peak that keys lead to
const FAILED = "#d00000";

// ---------------------------------------------------------------- where things are

let memory;
let low = 0, high = 1; // the bytes that fill a panel
let tops = []; // where each rank's header begins

const stripOf = rank => memory.moment || !rank.phases.length ? 0 : STRIP;
const areaOf = rank => memory.panel - stripOf(rank);
// From the top of the area of a rank.
const yOf = (size, rank) => areaOf(rank) * (1 - (size - low) / (high - low));

function placeRanks() {
  let y = AXIS;
  tops = memory.ranks.map(rank => {
    const top = y;
    y += HEADER + (rank.isFolded ? 0 : memory.panel) + GAP;
    return top;
  });
  return y;
}

// Which rank is at y (of the frame), and how far below its header's top.
function rankAt(y) {
  y += frame.scrollTop;
  const at = tops.findIndex((top, i) => y >= top && y < (i + 1 < tops.length ? tops[i + 1] : total));
  return at < 0 ? null : { place: at, below: y - tops[at] };
}

// ---------------------------------------------------------------- colours

let lanePixel, strong, pale, edges, rings;

function takeColours() {
  const lane = channels(theme.lane), ink = channels(theme.ring), colours = memory.colours.map(channels);
  lanePixel = packed(lane);
  const shaded = colours.map(colour => Array.from({ length: SHADES }, (_, i) => between(colour, lane, 0.11 * i)));
  strong = shaded.map(each => Uint32Array.from(each, packed));
  pale = shaded.map(each => Uint32Array.from(each, colour => packed(between(colour, lane, memory.paler))));
  edges = colours.map(colour => packed(between(colour, isDark ? lane : [0, 0, 0], 0.35)));
  rings = colours.map(colour => packed(between(colour, ink, 0.6)));
}

const phaseColour = kind => kind === "backward" ? theme.text : theme.faint;

// ---------------------------------------------------------------- areas

// What of a rank was drawn last: for each pixel the block (its place + 1), or -1 - class of the rest.
function buffersOf(rank, columns, rows) {
  const raster = rank.drawn;
  if (raster && raster.columns === columns && raster.rows === rows) return raster;
  const surface = document.createElement("canvas");
  surface.width = columns;
  surface.height = rows;
  const image = new ImageData(columns, rows);
  return rank.drawn = { columns, rows, step: 0, surface, image, pixels: new Uint32Array(image.data.buffer), ids: new Int32Array(columns * rows) };
}

// For each column how many changes there are up to the moment that it shows.
function momentsOf(rank, columns) {
  const shown = new Int32Array(columns), step = span() / columns, { time, total } = rank;
  let k = changesUntil(rank, from);
  for (let column = 0; column < columns; column++) {
    const end = from + (column + 1) * step;
    let best = k, most = k ? total[k - 1] : 0;
    for (; k < time.length && time[k] < end; k++)
      if (total[k] > most) { most = total[k]; best = k + 1; }
    shown[column] = best;
  }
  return shown;
}

// Blocks large enough to be seen that are in use after so many changes, by class, in order.
function seenAfter(rank, changes, least) {
  const ns = changes ? rank.time[changes - 1] : -1, live = memory.layers.map(() => []);
  const { start, end, size, code } = memory;
  for (let i = rank.first; i < rank.stop && start[i] <= ns; i++)
    if (size[i] >= least && end[i] > ns) live[code[i]].push(i);
  return live;
}

function drawArea(place, rank) {
  const columns = Math.max(1, Math.round((width - LEFT) * ratio)), rows = Math.max(1, Math.round(areaOf(rank) * ratio));
  const raster = buffersOf(rank, columns, rows), least = 0.8 * (high - low) / rows;
  raster.step = span() / columns;
  const shown = raster.shown = momentsOf(rank, columns), classes = memory.layers.length;
  let k = shown[0];
  const sums = sumsAfter(rank, k, classes), live = seenAfter(rank, k, least);
  raster.pixels.fill(lanePixel);
  raster.ids.fill(0);
  for (let column = 0; column < columns; column++) {
    for (; k < shown[column]; k++) change(rank, k, sums, live, least);
    drawColumn(raster, column, sums, live);
  }
  const ink = raster.surface.getContext("2d");
  ink.putImageData(raster.image, 0, 0);
  const y = tops[place] + HEADER - frame.scrollTop;
  context.imageSmoothingEnabled = false;
  context.drawImage(raster.surface, LEFT, y, width - LEFT, areaOf(rank));
}

function change(rank, k, sums, live, least) {
  const i = rank.item[k], code = rank.code[k];
  sums[code] += rank.delta[k];
  if (i < 0 || memory.size[i] < least) return;
  if (rank.delta[k] > 0) live[code].push(i);
  else live[code].splice(live[code].indexOf(i), 1);
}

function drawColumn(raster, column, sums, live) {
  const scale = raster.rows / (high - low);
  let base = -low;
  for (const code of memory.layers) {
    const top = base + sums[code];
    let at = base;
    for (const i of live[code]) {
      fill(raster, column, at * scale, (at + memory.size[i]) * scale, code, i + 1);
      at += memory.size[i];
    }
    if (top > at) fill(raster, column, at * scale, top * scale, code, -1 - code);
    base = top;
    if (base * scale > raster.rows) return;
  }
}

// One column of a block from a height to another; a darker pixel on top and where it begins, where
// it is large enough for that: many edges side by side would be noise.
function fill(raster, column, bottom, top, code, id) {
  const { rows, columns, pixels, ids } = raster;
  const last = rows - 1 - Math.max(0, Math.round(bottom)), first = Math.max(0, rows - Math.round(top));
  if (last < first) return;
  const category = code >> 1, shade = id > 0 ? id % SHADES : 0;
  const isEdged = id > 0 && last - first >= EDGED && memory.end[id - 1] - memory.start[id - 1] > EDGED * raster.step;
  const full = strong[category][shade], stripe = code & 1 ? full : pale[category][shade];
  const isRinged = id > 0 && (id - 1 === hovered || id - 1 === focused);
  const middle = ((first + last) >> 1) * columns + column;
  const isEdge = isEdged && column > 0 && ids[middle - 1] !== id;
  for (let row = first, at = first * columns + column; row <= last; row++, at += columns) {
    ids[at] = id;
    pixels[at] = isRinged ? rings[category] : isEdge ? edges[category] : (column + row) % STRIPES < STRIPE ? stripe : full;
  }
  if (isEdged && top <= rows) pixels[first * columns + column] = edges[category];
}

// One moment: the bytes of a rank from left to right.
function drawBar(place, rank) {
  const columns = Math.max(1, Math.round((width - LEFT) * ratio)), rows = Math.max(1, Math.round(memory.panel * ratio));
  const raster = buffersOf(rank, columns, rows), scale = columns / span(), changes = rank.time.length;
  const sums = sumsAfter(rank, changes, memory.layers.length), live = seenAfter(rank, changes, 0.8 / scale);
  raster.pixels.fill(lanePixel);
  raster.ids.fill(0);
  let base = -from;
  for (const code of memory.layers) {
    let at = base;
    base += sums[code];
    for (const i of live[code]) at = fillAcross(raster, at * scale, (at + memory.size[i]) * scale, code, i + 1) / scale;
    if (base > at) fillAcross(raster, at * scale, base * scale, code, -1 - code);
  }
  raster.surface.getContext("2d").putImageData(raster.image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(raster.surface, LEFT, tops[place] + HEADER - frame.scrollTop, width - LEFT, memory.panel);
  drawLabels(place, rank);
}

function fillAcross(raster, left, right, code, id) {
  const { rows, columns, pixels, ids } = raster, category = code >> 1, shade = id > 0 ? id % SHADES : 0;
  const first = Math.max(0, Math.round(left)), last = Math.min(columns, Math.round(right));
  const full = strong[category][shade], stripe = code & 1 ? full : pale[category][shade];
  const isRinged = id > 0 && (id - 1 === hovered || id - 1 === focused), isWide = id > 0 && last - first >= EDGED;
  for (let row = 0; row < rows; row++)
    for (let column = first, at = row * columns + first; column < last; column++, at++) {
      ids[at] = id;
      pixels[at] = isRinged ? rings[category] : isWide && column === first ? edges[category] : (column + row) % STRIPES < STRIPE ? stripe : full;
    }
  return right;
}

// Names on blocks that are high enough, at the beginning of what is seen of them.
function drawLabels(place, rank) {
  const { ids, columns, rows } = rank.drawn, y = tops[place] + HEADER - frame.scrollTop;
  const least = memory.moment ? 0 : LABEL_HIGH * (high - low) / areaOf(rank), labelled = new Set();
  context.font = "11px system-ui, sans-serif";
  for (let column = 0, labels = 0; column < columns && labels < MOST_LABELS; column += 12) {
    for (let row = 0; row < rows; row += Math.max(1, Math.floor(LABEL_HIGH * ratio / 2))) {
      const id = ids[row * columns + column];
      if (id <= 0 || memory.size[id - 1] < least || labelled.has(id)) continue;
      let end = column, above = row, below = row;
      while (end < columns && ids[row * columns + end] === id) end++;
      while (above > 0 && ids[(above - 1) * columns + column] === id) above--;
      while (below + 1 < rows && ids[(below + 1) * columns + column] === id) below++;
      const wide = (end - column) / ratio, middle = (above + below + 1) / 2 / ratio;
      if (wide < LABEL_WIDE || (below - above + 1) / ratio < LABEL_HIGH - 1) continue;
      labelled.add(id);
      labels++;
      const colour = channels(memory.colours[memory.code[id - 1] >> 1]);
      context.fillStyle = id - 1 === hovered || id - 1 === focused ? theme.back : inkOn(colour);
      context.fillText(fitted(context, `${label(id - 1)} ${bytes(memory.size[id - 1])}`, wide - 8), LEFT + column / ratio + 4, y + middle + 4);
    }
  }
}

// ---------------------------------------------------------------- around the areas

function headerText(rank) {
  if (!rank.peak) return rank.problem || "nothing was allocated";
  const [ns, size, when] = rank.peak, parts = [memory.moment ? `${bytes(size)} in use` : `peak ${bytes(size)} at ${moment(ns, memory.to / 1e4)} in ${when}`];
  const reserved = memory.held.slice(...memory.heldFirsts.slice(memory.ranks.indexOf(rank), memory.ranks.indexOf(rank) + 2));
  if (reserved.length) parts.push(`held by the allocator ${bytes(reserved.reduce((a, b) => Math.max(a, b)))} (line)`);
  if (rank.limit) parts.push(`limit ${bytes(rank.limit)}`);
  if (rank.failures.length) parts.push("out of memory (red)");
  if (rank.problem) parts.push(rank.problem);
  return parts.join(", ");
}

function drawBytes(place, rank) {
  const y = tops[place] + HEADER - frame.scrollTop, step = axisStep(Math.max(1, 22 * (high - low) / areaOf(rank)));
  context.fillStyle = theme.faint;
  context.font = "10px system-ui, sans-serif";
  context.textAlign = "right";
  for (let size = Math.ceil(low / step) * step; size <= high; size += step) {
    const at = y + yOf(size, rank);
    context.fillRect(LEFT - 4, Math.round(at), 4, 1);
    if (at - y > 4) context.fillText(bytes(size).replace(".0 ", " "), LEFT - 7, at + 3);
  }
  context.textAlign = "left";
}

// Steps' ends, phases, the peak, the limit, what the allocator held, and what failed.
function drawMarks(place, rank) {
  const y = tops[place] + HEADER - frame.scrollTop, area = areaOf(rank);
  context.fillStyle = theme.faint;
  const wide = (to - from) / Math.max(1, rank.steps.length) / pixel();
  rank.steps.forEach((ns, number) => {
    if (ns < from || ns > to || (wide < 8 && number % Math.ceil(8 / wide))) return;
    context.globalAlpha = wide < 30 ? 0.2 : 0.45;
    context.fillRect(Math.round(xOf(ns)), y, 1, area);
    context.globalAlpha = 1;
  });
  for (const [kind, begin, end] of rank.phases) {
    if (end < from || begin > to) continue;
    const left = Math.max(LEFT, xOf(begin)), right = Math.min(width, xOf(end));
    context.fillStyle = phaseColour(kind);
    context.fillRect(left, y + area + 2, Math.max(1, right - left), STRIP - 2);
  }
  drawHeld(place, rank, y);
  if (rank.limit && rank.limit >= low && rank.limit <= high) {
    context.strokeStyle = FAILED;
    line([[LEFT, y + yOf(rank.limit, rank)], [width, y + yOf(rank.limit, rank)]], [7, 4]);
  }
  context.fillStyle = FAILED;
  for (const [ns] of rank.failures) if (ns >= from && ns <= to) context.fillRect(xOf(ns) - 1, y, 3, area);
  drawPeak(rank, y);
}

function drawPeak(rank, y) {
  if (!rank.peak || rank.peak[0] < from || rank.peak[0] > to) return;
  const x = xOf(rank.peak[0]), tip = Math.max(y + 8, y + Math.min(areaOf(rank), Math.max(0, yOf(rank.peak[1], rank))) - 2);
  context.fillStyle = theme.ring;
  context.beginPath();
  context.moveTo(x, tip);
  context.lineTo(x - 5, tip - 8);
  context.lineTo(x + 5, tip - 8);
  context.fill();
}

function drawHeld(place, rank, y) {
  const points = [], first = memory.heldFirsts[place], stop = memory.heldFirsts[place + 1];
  for (let k = first; k < stop; k++) {
    const end = k + 1 < stop ? memory.heldTime[k + 1] : Math.max(rank.end, memory.heldTime[k]);
    if (end < from || memory.heldTime[k] > to) continue;
    const at = y + Math.min(areaOf(rank), Math.max(-2, yOf(memory.held[k], rank)));
    points.push([Math.max(LEFT, xOf(memory.heldTime[k])), at], [Math.min(width, xOf(end)), at]);
  }
  context.strokeStyle = theme.ring;
  if (points.length) line(points, []);
}

function line(points, dashes) {
  context.lineWidth = 1.5;
  context.setLineDash(dashes);
  context.beginPath();
  points.forEach(([x, y]) => context.lineTo(x, y));
  context.stroke();
  context.setLineDash([]);
}

function paint(top, bottom) {
  memory.ranks.forEach((rank, place) => {
    const end = place + 1 < tops.length ? tops[place + 1] : total;
    if (end < top || tops[place] > bottom) return;
    drawHeader(tops[place] - top, `${rank.isFolded ? "\u25b8" : "\u25be"} rank ${rank.rank}`, headerText(rank));
    if (rank.isFolded) return;
    if (memory.moment) return drawBar(place, rank);
    drawArea(place, rank);
    drawMarks(place, rank);
    drawLabels(place, rank);
    drawBytes(place, rank);
  });
  drawAxis(memory.moment ? bytes : undefined);
}

// ---------------------------------------------------------------- moving

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

function fold(place) {
  memory.ranks[place].isFolded = !memory.ranks[place].isFolded;
  hideTip();
  layOut();
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
  say(breakdown(place, ns), xOf(ns), tops[place] + HEADER - frame.scrollTop);
}

function scrollTo(place) {
  const top = tops[place], bottom = top + HEADER + memory.panel;
  if (top - AXIS < frame.scrollTop || bottom > frame.scrollTop + height) frame.scrollTop = top - AXIS;
}

// ---------------------------------------------------------------- from block to block

// Blocks in use at a rank's peak, the largest first.
function walked(rank) {
  if (!rank.walked) {
    const ns = memory.moment || !rank.peak ? 0 : rank.peak[0], present = [];
    for (let i = rank.first; i < rank.stop && memory.start[i] <= ns; i++) if (memory.end[i] > ns) present.push(i);
    rank.walked = present.sort((a, b) => memory.size[b] - memory.size[a] || a - b).slice(0, MOST_WALKED);
  }
  return rank.walked;
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

// What is drawn at a point: the block's place + 1, -1 - class of merged ones, or 0.
function idAt(x, y) {
  const at = rankAt(y);
  if (!at || y < AXIS || x < LEFT || memory.ranks[at.place].isFolded) return 0;
  const raster = memory.ranks[at.place].drawn, row = Math.floor((at.below - HEADER) * ratio);
  const column = Math.min(Math.floor((x - LEFT) * ratio), raster ? raster.columns - 1 : 0);
  return raster && row >= 0 && row < raster.rows ? raster.ids[row * raster.columns + column] : 0;
}

// What there is to say of a point, a line each.
function textsAt(x, y) {
  const id = idAt(x, y), at = rankAt(y);
  if (id > 0) return lines(id - 1);
  if (!at || y < AXIS || x < LEFT || memory.ranks[at.place].isFolded || at.below > HEADER + memory.panel) return null;
  const rank = memory.ranks[at.place];
  if (memory.moment || !rank.peak) return null;
  const column = Math.min(rank.drawn.columns - 1, Math.floor((x - LEFT) * ratio)), near = 3 * pixel();
  const failed = rank.failures.find(failure => Math.abs(failure[0] - timeOf(x)) < near);
  if (failed) return [`out of memory: ${bytes(failed[1])} requested`, ...breakdown(at.place, failed[0])];
  if (at.below < HEADER) return null;
  // What is told is what is drawn: the moment of the most in use of the column's stretch.
  const changes = rank.drawn.shown[column], begins = from + column * span() / rank.drawn.columns;
  const texts = breakdown(at.place, Math.max(begins, changes ? rank.time[changes - 1] : 0), changes);
  return id < 0 ? [`${categoryOf(-1 - id)}, blocks too small to be seen alone`, ...texts] : texts;
}

// The categories that are there, stripes where something is guessed, and the bars below the areas.
function legend() {
  const present = new Set([...memory.code, ...memory.restCode]);
  const stripes = colour => `repeating-linear-gradient(135deg, ${colour} 0 3px, ${theme.lane} 3px 5px)`;
  const entries = memory.layers.filter(code => code & 1).map(code => code >> 1)
    .filter(category => present.has(2 * category) || present.has(2 * category + 1))
    .map(category => [memory.categories[category], memory.colours[category]]);
  if ([...present].some(code => !(code & 1))) entries.push(["striped: guessed", stripes(theme.faint)]);
  const kinds = new Set(memory.ranks.flatMap(rank => rank.phases.map(phase => phase[0])));
  for (const kind of kinds) entries.push([kind, phaseColour(kind), "bar"]);
  return entries;
}

start({
  label: "memory of each rank over time, blocks stacked by what they are for",
  hint: "click, then wheel or w s zoom, with Shift in bytes; drag or a d move; Shift+arrows go through the blocks of the peak; Enter shows one, p the peak, Home all",
  prepare(data) {
    memory = data;
    prepared(memory);
    high = memory.most;
    return [0, memory.to];
  },
  takeTheme: takeColours, place: placeRanks, paint, legend,
  itemAt: (x, y) => idAt(x, y) - 1, textsAt, lines,
  spanOf: i => memory.moment ? null : [memory.start[i], Math.min(memory.end[i], memory.to)],
  reveal(i) {
    const place = memory.rankOf[i];
    if (memory.ranks[place].isFolded) fold(place);
    scrollTo(place);
    return tops[place] + HEADER - frame.scrollTop + memory.panel / 3;
  },
  nextItem: nextBlock, nextRow: nextRank,
  buttons: () => ({ peak: showPeak }),
  keys: { W: () => zoomBytes(0.7), S: () => zoomBytes(1 / 0.7), p: showPeak },
  reset: () => showBytes(0, memory.most),
  headerAt(y) {
    const at = rankAt(y);
    return at && at.below < HEADER ? at.place : -1;
  },
  fold,
  pull(down) {
    if (memory.moment || high - low >= memory.most) return false;
    drag.low ??= low;
    showBytes(drag.low + down * (high - low) / memory.panel, high - low);
    return true;
  },
  zoomHeight(factor, y) {
    const at = rankAt(y), below = at ? at.below - HEADER : memory.panel;
    zoomBytes(factor, Math.max(0, Math.min(1, 1 - below / memory.panel)));
  },
});
