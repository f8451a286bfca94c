// What the picture of memory shows: makes of what memory/view/page.py packs what can be drawn, and
// says it in words. Times are nanoseconds. It stands behind viewer.js.

const EVERY = 512; // changes between two moments whose sums are kept

// ---------------------------------------------------------------- data

// Each rank's blocks (places in the columns), and all changes in their order in time.
function prepared(memory) {
  const n = memory.size.length, { start, life, ranks } = memory;
  memory.end = new Float64Array(n);
  memory.rankOf = new Int32Array(n);
  ranks.forEach((rank, place) => {
    rank.first = memory.firsts[place];
    rank.stop = memory.firsts[place + 1];
    for (let i = rank.first; i < rank.stop; i++) {
      if (i > rank.first) start[i] += start[i - 1];
      memory.end[i] = life[i] ? start[i] + life[i] : Infinity;
      memory.rankOf[i] = place;
    }
    unfold(memory, "restTime", memory.restFirsts, place);
    unfold(memory, "heldTime", memory.heldFirsts, place);
    rank.isFolded = false;
    order(memory, rank, place);
    sum(memory, rank);
  });
  return memory;
}

function unfold(memory, name, firsts, place) {
  const column = memory[name];
  for (let i = firsts[place] + 1; i < firsts[place + 1]; i++) column[i] += column[i - 1];
}

// Releases and allocations and what changes of merged blocks: of one moment releases come first.
function order(memory, rank, place) {
  const { start, end, size, code, restTime, restCode, rest } = memory;
  const ends = [];
  for (let i = rank.first; i < rank.stop; i++) if (end[i] !== Infinity) ends.push(i);
  const sorted = Int32Array.from(ends).sort((a, b) => end[a] - end[b] || a - b);
  let at = 0, r = memory.restFirsts[place], e = 0, i = rank.first;
  const rests = memory.restFirsts[place + 1], n = sorted.length + rank.stop - rank.first + rests - r;
  Object.assign(rank, { time: new Float64Array(n), item: new Int32Array(n).fill(-1), code: new Uint8Array(n), delta: new Float64Array(n) });
  while (at < n) {
    const ends = e < sorted.length ? end[sorted[e]] : Infinity, begins = i < rank.stop ? start[i] : Infinity;
    const changes = r < rests ? restTime[r] : Infinity;
    if (ends <= begins && ends <= changes) put(rank, at++, ends, sorted[e], code[sorted[e]], -size[sorted[e++]]);
    else if (changes <= begins) put(rank, at++, changes, -1, restCode[r], (rest[r] % 2 ? -1 : 1) * Math.floor(rest[r++] / 2));
    else put(rank, at++, begins, i, code[i], size[i++]);
  }
}

function put(rank, at, time, item, code, delta) {
  rank.time[at] = time;
  rank.item[at] = item;
  rank.code[at] = code;
  rank.delta[at] = delta;
}

// The total after each moment (-1 where another change of the same moment follows), and now and
// then the sums of all classes before a change.
function sum(memory, rank) {
  const n = rank.time.length, classes = memory.layers.length, sums = new Float64Array(classes);
  rank.total = new Float64Array(n);
  rank.sums = new Float64Array((Math.floor(n / EVERY) + 1) * classes);
  let total = 0;
  for (let k = 0; k < n; k++) {
    if (k % EVERY === 0) rank.sums.set(sums, k / EVERY * classes);
    sums[rank.code[k]] += rank.delta[k];
    total += rank.delta[k];
    rank.total[k] = k + 1 < n && rank.time[k + 1] === rank.time[k] ? -1 : total;
  }
}

// How many changes there are up to and with a moment.
function changesUntil(rank, ns) {
  let low = 0, high = rank.time.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rank.time[middle] <= ns) low = middle + 1; else high = middle;
  }
  return low;
}

// The bytes of each class after so many changes.
function sumsAfter(rank, changes, classes) {
  const saved = Math.min(Math.floor(changes / EVERY), rank.sums.length / classes - 1);
  const sums = rank.sums.slice(saved * classes, (saved + 1) * classes);
  for (let k = saved * EVERY; k < changes; k++) sums[rank.code[k]] += rank.delta[k];
  return sums;
}

// ---------------------------------------------------------------- words

const categoryOf = code => memory.categories[code >> 1] + (code & 1 ? "" : " (guessed)");

// The name of the owner, or else the operator that allocated it.
function label(i) {
  const name = memory.name[i] || memory.operator[i];
  return name ? memory.names[name - 1] : memory.categories[memory.code[i] >> 1];
}

function phaseAt(rank, ns) {
  const phase = rank.phases.find(([, start, end]) => start <= ns && ns < end);
  const step = rank.steps.findIndex(end => ns < end);
  return (phase ? phase[0] : "forward") + (step >= 0 ? ` of step ${step}` : "");
}

// What the tooltip shows of a block, a line each.
function lines(i) {
  const rank = memory.ranks[memory.rankOf[i]], code = memory.code[i];
  const by = memory.operator[i] && memory.name[i] ? `, ${memory.names[memory.operator[i] - 1]}` : "";
  const [via, ...userLines] = memory.stack[i] ? memory.stacks[memory.stack[i] - 1] : [-1];
  return [`${label(i)}: ${bytes(memory.size[i])}`, categoryOf(code) + by,
          ...userLines.map((line, at) => (at ? "called at " : "at ") + memory.lines[line]),
          ...(via >= 0 ? [`via ${memory.lines[via]}`] : []),
          `rank ${rank.rank}${memory.moment ? "" : `, ${lifeOf(i, rank)}`}`];
}

function lifeOf(i, rank) {
  const begin = memory.start[i], end = memory.end[i], isBefore = i < rank.first + rank.before;
  const digits = finest();
  if (isBefore && end === Infinity) return "there all the time";
  if (isBefore) return `there before, freed at ${moment(end, digits)}`;
  const from = `from ${moment(begin, digits)} in ${phaseAt(rank, begin)}`;
  return end === Infinity ? `${from}, stays` : `${from}, for ${took(end - begin)}`;
}

// What the tooltip shows of a rank at a moment, after so many changes.
function breakdown(place, ns, changes = changesUntil(memory.ranks[place], ns)) {
  const rank = memory.ranks[place], sums = sumsAfter(rank, changes, memory.layers.length);
  const total = sums.reduce((sum, size) => sum + size, 0);
  const head = `rank ${rank.rank}: ${bytes(total)} in use at ${moment(ns, finest())}, ${phaseAt(rank, ns)}`;
  const reserved = heldAt(place, ns);
  const parts = memory.layers.filter(code => sums[code]).reverse().map(code => `${categoryOf(code)} ${bytes(sums[code])}`);
  return [head, ...(reserved ? [`held by the allocator ${bytes(reserved)}`] : []), ...parts];
}

function heldAt(place, ns) {
  let reserved = 0;
  for (let k = memory.heldFirsts[place]; k < memory.heldFirsts[place + 1] && memory.heldTime[k] <= ns; k++) reserved = memory.held[k];
  return reserved;
}
