// The painter of a trace's timeline; it stands behind viewer.js. Only the strips of the rows are drawn
// pixel by pixel of the device.

const LEFT = 116; // width of the column with the lanes' names
const HEADER = 19, ROW = 15, GAP = 5; // heights
const SHADES = 16; // steps between the background and a colour
const LABEL_MIN = 44, MOST_LABELS = 400;
const HIDDEN_STEP = 4; // steps narrower than this are not marked

// ---------------------------------------------------------------- data

// Starts from their distances, ends, and for each item the latest end so far in its row.
function prepared(trace) {
  const n = trace.start.length;
  trace.end = new Float64Array(n);
  trace.latest = new Float64Array(n);
  trace.rowOf = new Int32Array(n);
  trace.kindsOf = trace.rows.map(() => 0);
  for (let row = 0, i = 0, block = 0; row < trace.rows.length; row++) {
    const first = i, stop = trace.firsts[row + 1];
    for (; i < stop; i++) {
      trace.start[i] += i > first ? trace.start[i - 1] : trace.from;
      trace.end[i] = trace.start[i] + (trace.count[i] > 1 ? trace.extent[block++] : trace.busy[i]);
      trace.latest[i] = i > first ? Math.max(trace.latest[i - 1], trace.end[i]) : trace.end[i];
      trace.rowOf[i] = row;
      trace.kindsOf[row] |= 1 << trace.kind[i];
    }
  }
  return trace;
}

// ---------------------------------------------------------------- words

const kindName = i => trace.kinds[trace.kind[i]];
const sizeOf = i => trace.size[i] ? ` ${bytes(trace.size[i])}` : "";
const label = i => trace.count[i] > 1
  ? `${trace.count[i]} x ${kindName(i)}${sizeOf(i)}` : trace.names[trace.name[i]] + sizeOf(i);

// What the tooltip shows of an item, a line each.
function lines(i) {
  const [place, lane] = trace.rows[trace.rowOf[i]], rank = trace.ranks[place];
  const where = `rank ${rank.rank}, ${lane}`, starts = moment(trace.start[i], finest());
  const group = trace.group[i] ? [`group ${trace.groups[trace.group[i] - 1]}`] : [];
  if (trace.count[i] === 1)
    return [label(i), `${kindName(i)}, takes ${took(trace.busy[i])}`, ...group,
            `${where}, starts at ${starts}`];
  return [`${trace.count[i]} ${kindName(i)} events shorter than ${took(trace.width)}, merged`,
          `together ${took(trace.busy[i])} within ${took(trace.end[i] - trace.start[i])}` +
            (sizeOf(i) && `,${sizeOf(i)}`),
          `the longest: ${trace.names[trace.name[i]]}`, ...group, `${where}, starts at ${starts}`];
}

// ---------------------------------------------------------------- where things are

let trace;
let rowTops = [], headers = []; // where rows and ranks' headers begin
let spot = null; // [rule, place of its rank, begin, end]

function placeRows() {
  let y = AXIS;
  headers = trace.ranks.map(() => 0);
  const ranked = trace.ranks.map((_, place) => trace.rows.flatMap((row, i) => row[0] === place ? [i] : []));
  ranked.forEach((rows, place) => {
    headers[place] = y;
    y += HEADER;
    for (const row of rows) { rowTops[row] = y; y += ROW; }
    y += GAP;
  });
  return y;
}

// The first item of a row that ends at `ns` or later; those before it cannot be seen after `ns`.
function firstAfter(row, ns) {
  let low = trace.firsts[row], high = trace.firsts[row + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (trace.latest[middle] < ns) low = middle + 1; else high = middle;
  }
  return low;
}

// The item below the pointer, or the nearest within 2 pixels; of several the longest.
function itemAt(x, y) {
  const row = rowTops.findIndex(top => y + frame.scrollTop >= top && y + frame.scrollTop < top + ROW);
  if (row < 0 || x < LEFT || y < AXIS) return -1;
  const ns = timeOf(x), near = 2 * pixel();
  let nearest = -1, best = Infinity;
  for (let i = firstAfter(row, ns - near); i < trace.firsts[row + 1] && trace.start[i] <= ns + near; i++) {
    const distance = Math.max(0, trace.start[i] - ns, ns - trace.end[i]);
    if (distance > near || distance > best) continue;
    if (distance < best || trace.busy[i] > trace.busy[nearest]) { nearest = i; best = distance; }
  }
  return nearest;
}

function stepAt(x, y) {
  const place = headers.findIndex(top => y + frame.scrollTop >= top && y + frame.scrollTop < top + HEADER);
  if (place < 0 || x < LEFT || y < AXIS) return null;
  const ns = timeOf(x), rank = trace.ranks[place];
  const step = rank.steps.find(step => step[1] <= ns && ns < step[2]);
  return step ? [`step ${step[0]} of rank ${rank.rank}`, `takes ${took(step[2] - step[1])}`,
                 `starts at ${moment(step[1], finest())}`] : null;
}

// ---------------------------------------------------------------- colours

let shades, edges, inks, lanePixel;

function takeColours() {
  const lane = channels(theme.lane), colours = trace.colours.map(channels);
  lanePixel = packed(lane);
  inks = colours.map(inkOn);
  edges = Uint32Array.from(colours, colour => packed(between(colour, lane, 0.55)));
  shades = new Uint32Array(colours.length * (SHADES + 1));
  colours.forEach((colour, kind) => {
    for (let shade = 0; shade <= SHADES; shade++)
      shades[kind * (SHADES + 1) + shade] = packed(between(lane, colour, shade / SHADES));
  });
}

// Full colour where something goes on all the time; the least that goes on can still be seen.
const shadeOf = (kind, share) =>
  shades[kind * (SHADES + 1) + Math.min(SHADES, Math.round(SHADES * (0.25 + 0.75 * Math.min(1, share))))];

// ---------------------------------------------------------------- drawing

const strip = { canvas: document.createElement("canvas"), image: null, pixels: null, share: null };

function fitStrip(columns, rows) {
  if (strip.image && strip.image.width === columns && strip.image.height === rows) return;
  strip.canvas.width = columns;
  strip.canvas.height = rows;
  strip.image = new ImageData(columns, rows);
  strip.pixels = new Uint32Array(strip.image.data.buffer);
  strip.share = new Float32Array(columns * trace.kinds.length);
}

// One row as a line of pixels: wide items one by one, of narrow ones the share of each pixel.
function drawStrip(row, at, columns, labels) {
  const line = strip.pixels.subarray(at * columns, (at + 1) * columns).fill(lanePixel);
  const share = strip.share.fill(0), kinds = trace.kinds.length, scale = columns / span();
  const { start, end, busy, kind, firsts } = trace;
  for (let i = firstAfter(row, from); i < firsts[row + 1] && start[i] < to; i++) {
    const x = (start[i] - from) * scale, stop = (end[i] - from) * scale;
    if (stop < 0) continue;
    if (stop - x < 2) {
      const column = Math.max(0, x | 0);
      if (column < columns) share[column * kinds + kind[i]] += Math.max(busy[i] * scale, 0.01);
      continue;
    }
    const left = Math.max(0, Math.round(x)), right = Math.min(columns, Math.round(stop));
    line.fill(shadeOf(kind[i], busy[i] / (end[i] - start[i])), left, right);
    if (right - left > 3 && x >= 0) line[left] = edges[kind[i]];
    if (right - left > LABEL_MIN * ratio && labels.length < MOST_LABELS)
      labels.push([i, left / ratio + LEFT, right / ratio + LEFT, rowTops[row]]);
  }
  drawShares(row, line, share, columns);
}

function drawShares(row, line, share, columns) {
  const kinds = trace.kinds.length, present = trace.kindsOf[row];
  for (let column = 0, at = 0; column < columns; column++, at += kinds) {
    let sum = 0, most = 0, dominant = 0;
    for (let kind = 0; kind < kinds; kind++) {
      if (!(present >> kind & 1)) continue;
      const part = share[at + kind];
      sum += part;
      if (part > most) { most = part; dominant = kind; }
    }
    if (sum > 0 && (line[column] === lanePixel || sum > 0.5)) line[column] = shadeOf(dominant, sum);
  }
}

function drawRows(top, bottom) {
  const visible = trace.rows.flatMap((_, row) => rowTops[row] + ROW > top && rowTops[row] < bottom ? [row] : []);
  const columns = Math.max(1, Math.round((width - LEFT) * ratio)), labels = [];
  if (!visible.length) return;
  fitStrip(columns, visible.length);
  visible.forEach((row, at) => drawStrip(row, at, columns, labels));
  const ink = strip.canvas.getContext("2d");
  ink.putImageData(strip.image, 0, 0);
  context.imageSmoothingEnabled = false;
  visible.forEach((row, at) =>
    context.drawImage(strip.canvas, 0, at, columns, 1, LEFT, rowTops[row] - top, width - LEFT, ROW - 1));
  context.font = "11px system-ui, sans-serif";
  for (const [i, left, right, y] of labels) {
    const room = Math.floor((right - left - 6) / 6.2), text = label(i);
    const isPale = trace.count[i] > 1 && trace.busy[i] < 0.5 * (trace.end[i] - trace.start[i]);
    context.fillStyle = isPale ? theme.text : inks[trace.kind[i]];
    context.fillText(text.length > room ? text.slice(0, room - 1) + "\u2026" : text, left + 4, y - top + 11);
  }
  context.fillStyle = theme.faint;
  for (const row of visible) {
    const [, lane, depth] = trace.rows[row];
    if (depth === 0) context.fillText(fitted(context, lane, LEFT - 14), 10, rowTops[row] - top + 11);
  }
}

function drawHeaders(top, bottom) {
  trace.ranks.forEach((rank, place) => {
    const y = headers[place] - top, end = place + 1 < headers.length ? headers[place + 1] : total;
    if (y > bottom - top || end < top) return;
    drawHeader(y, `rank ${rank.rank}`, rank.problem);
    drawSteps(rank, y, end - top - GAP);
  });
}

function drawSteps(rank, y, bottom) {
  context.font = "11px system-ui, sans-serif";
  for (const [number, begin, end] of rank.steps) {
    if (end < from || begin > to) continue;
    const left = Math.max(LEFT, xOf(begin)), right = Math.min(width, xOf(end));
    if (xOf(end) - xOf(begin) < HIDDEN_STEP) continue;
    context.fillStyle = theme.line;
    if (begin >= from) context.fillRect(Math.round(left), y, 1, bottom - y);
    if (end <= to) context.fillRect(Math.round(right), y, 1, bottom - y);
    context.fillStyle = theme.faint;
    const text = `step ${number}`;
    if (right - left > 6.4 * text.length + 8 && !rank.problem) context.fillText(text, left + 4, y + 12);
  }
}

// A frame around what a finding points at.
function drawSpot(top) {
  if (!spot) return;
  const [, place, begin, end] = spot;
  const left = Math.max(LEFT, xOf(begin)), right = Math.min(width, xOf(end));
  if (right < LEFT || left > width) return;
  const low = (place + 1 < headers.length ? headers[place + 1] : total) - GAP;
  context.strokeStyle = theme.ring;
  context.lineWidth = 2;
  context.setLineDash([5, 3]);
  context.strokeRect(left, headers[place] + HEADER - 2 - top, Math.max(2, right - left), low - headers[place] - HEADER + 2);
  context.setLineDash([]);
}

// Below the axis: where every event is shown, however short.
function drawFull() {
  const [begin, end] = trace.full, left = Math.max(LEFT, xOf(begin)), right = Math.min(width, xOf(end));
  if (right <= left) return;
  context.fillStyle = theme.text;
  context.fillRect(left, AXIS - 2, Math.max(2, right - left), 2);
}

function drawRing(i, top) {
  if (i < 0) return;
  const left = Math.max(LEFT, xOf(trace.start[i])), right = Math.min(width, xOf(trace.end[i]));
  if (right < LEFT || left > width) return;
  context.strokeStyle = theme.ring;
  context.lineWidth = 2;
  context.strokeRect(left - 1, rowTops[trace.rowOf[i]] - top, Math.max(3, right - left + 2), ROW - 1);
}

function paint(top, bottom) {
  drawRows(top, bottom);
  drawHeaders(top, bottom);
  drawSpot(top);
  drawRing(focused, top);
  if (hovered !== focused) drawRing(hovered, top);
  drawAxis();
  drawFull();
}

// ---------------------------------------------------------------- moving

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
  const [, place, begin, end] = spot, length = Math.max(NARROWEST, end - begin);
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

// The kinds that are there.
function legend() {
  const present = trace.kindsOf.reduce((all, kinds) => all | kinds, 0);
  return trace.kinds.map((kind, i) => [kind, trace.colours[i]]).filter((_, i) => present >> i & 1);
}

start({
  label: "timeline of the trace, a row for each lane of each rank",
  hint: "click, then wheel or + \u2212 zoom; drag or arrows move; Shift+arrows go from event to event, Enter shows one, Home all",
  prepare(data) {
    trace = prepared(data);
    listSpots();
    return [trace.from, trace.to];
  },
  takeTheme: takeColours, place: placeRows, paint, legend,
  itemAt, lines, textsAt: (x, y, i) => i >= 0 ? lines(i) : stepAt(x, y),
  spanOf: i => [trace.start[i], trace.end[i]],
  reveal(i) {
    const y = rowTops[trace.rowOf[i]];
    if (y < frame.scrollTop + AXIS || y + ROW > frame.scrollTop + height) frame.scrollTop = y - height / 2;
    return y - frame.scrollTop;
  },
  nextItem, nextRow,
  buttons: () => trace.full[0] === trace.full[1] ? {} : { full: () => show(trace.full[0], trace.full[1] - trace.full[0]) },
  keys: {},
  reset() {
    spot = null;
    element("spots").selectedIndex = 0;
  },
});
