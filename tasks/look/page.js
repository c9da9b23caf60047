"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const state = { sample: 0, tab: "" };
const FONT = "11px system-ui, sans-serif";
const LINE_COLOURS = ["#2456c4", "#d1495b", "#2e8b57", "#e09f3e", "#7b4fa3", "#3a9bb5", "#8a5a44", "#555"];

// Small helpers --------------------------------------------------------------------------------

function make(tag, parent, properties = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  if (parent) parent.append(element);
  return element;
}

function canvas(parent, width, height) {
  const element = make("canvas", parent);
  const ratio = window.devicePixelRatio || 1;
  element.width = Math.ceil(width * ratio);
  element.height = Math.ceil(height * ratio);
  element.style.width = width + "px";
  element.style.height = height + "px";
  const context = element.getContext("2d");
  context.scale(ratio, ratio);
  context.font = FONT;
  context.textBaseline = "middle";
  return [element, context];
}

const tip = make("div", document.body, { id: "tip" });
function showTip(event, text) {
  tip.style.display = text ? "block" : "none";
  tip.textContent = text || "";
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

function pointer(element, move) {
  element.addEventListener("mousemove", (event) => {
    const box = element.getBoundingClientRect();
    move(event.clientX - box.left, event.clientY - box.top, event);
  });
  element.addEventListener("mouseleave", (event) => { showTip(event, ""); move(-1, -1, event); });
}

const mix = (a, b, t) => a.map((value, i) => Math.round(value + (b[i] - value) * t));
const STOPS = [[255, 255, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 40, 95]];
const RED = [192, 48, 62];
function colour(t) { // 0 to 1: white to dark blue
  const place = Math.max(0, Math.min(1, t)) * (STOPS.length - 1);
  const index = Math.min(STOPS.length - 2, Math.floor(place));
  return mix(STOPS[index], STOPS[index + 1], place - index);
}
const signed = (t) => (t < 0 ? mix([255, 255, 255], RED, Math.min(1, -t)) : colour(t * 0.8));
const css = (rgb) => `rgb(${rgb.join(",")})`;
const format = (x) => (x === null ? "" : Math.abs(x) >= 1e4 || (x && Math.abs(x) < 1e-3) ? x.toExponential(2) : String(+x.toPrecision(3)));
const formatWeight = (x) => (data.rounded ? "≈" : "") + format(x);
const formatBrief = (x) => (x === null ? "" : x && Math.abs(x) < 0.01 ? x.toExponential(0) : String(+x.toPrecision(3)));
const TABLE = Uint32Array.from({ length: 256 }, (_, i) => { // little-endian RGBA of each byte
  const [red, green, blue] = colour(i / 255);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
});

function cut(text, size, context) { // to at most `size` pixels
  if (context.measureText(text).width <= size) return text;
  let length = text.length;
  while (length > 1 && context.measureText(text.slice(0, length) + "…").width > size) length -= 1;
  return text.slice(0, length) + "…";
}

async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Attention ------------------------------------------------------------------------------------

function Heads(view, parent, bytes) {
  const [steps, layers, heads, N, M] = view.shape;
  const at = { step: steps - 1, layer: 0, head: 0, query: -1, mode: view.image ? "picture" : "matrix" };
  const offset = (layer, head) => (((at.step * layers + layer) * heads + head) * N) * M;
  const weight = (query, key) => (bytes[offset(at.layer, at.head) + query * M + key] / 255) ** 2;
  const images = new Map(); // one small canvas for each step, layer and head
  function pixels(layer, head) {
    const name = `${at.step}.${layer}.${head}`;
    if (!images.has(name)) {
      const small = make("canvas", null, { width: M, height: N });
      const image = new ImageData(M, N);
      const start = offset(layer, head);
      const target = new Uint32Array(image.data.buffer);
      for (let i = 0; i < N * M; i++) target[i] = TABLE[bytes[start + i]];
      small.getContext("2d").putImageData(image, 0, 0);
      images.set(name, small);
    }
    return images.get(name);
  }

  const box = make("div", parent, { className: "heads" });
  if (steps > 1) {
    const bar = make("div", parent, { className: "bar" });
    parent.insertBefore(bar, box);
    const play = make("button", bar, { textContent: "play" });
    const slider = make("input", bar, { type: "range", min: 0, max: steps - 1, value: at.step });
    const label = make("span", bar, { textContent: view.steps[at.step] });
    let timer = null;
    const go = (step) => { at.step = step; slider.value = step; label.textContent = view.steps[step]; draw(); };
    slider.oninput = () => go(+slider.value);
    play.onclick = () => {
      play.textContent = timer ? "play" : "stop";
      if (timer) { clearInterval(timer); timer = null; return; }
      timer = setInterval(() => {
        if (!parent.isConnected) return clearInterval(timer);
        go((at.step + 1) % steps);
      }, 400);
    };
  }
  const single = layers * heads === 1;
  const size = Math.max(26, Math.min(84, Math.floor(560 / heads)));
  const left = make("div", single ? null : box);
  make("div", left, { className: "note", textContent: "rows: layers, columns: heads, from 0; click on one" });
  const [grid, gridContext] = canvas(left, 30 + heads * (size + 4), 20 + layers * (size + 4));
  grid.className = "grid";
  const right = make("div", box);
  const bar = make("div", right, { className: "bar" });
  const name = make("strong", bar, { className: "chosen" });
  const modes = [...(view.image ? ["picture"] : []), "matrix", ...(view.image ? [] : ["lines"])];
  for (const mode of modes) {
    const button = make("button", bar, { textContent: mode });
    button.onclick = () => { at.mode = mode; at.query = -1; large(); };
  }
  const read = make("div", right, { className: "read" });
  const stage = make("div", right, { className: "large" });

  function drawGrid() {
    gridContext.clearRect(0, 0, grid.width, grid.height);
    gridContext.imageSmoothingEnabled = M > size;
    gridContext.fillStyle = "#667085";
    for (let head = 0; head < heads; head++) gridContext.fillText(head, 30 + head * (size + 4) + size / 2 - 4, 9);
    for (let layer = 0; layer < layers; layer++) {
      gridContext.fillStyle = "#667085";
      gridContext.fillText(layer, 8, 20 + layer * (size + 4) + size / 2);
      for (let head = 0; head < heads; head++) {
        const x = 30 + head * (size + 4), y = 20 + layer * (size + 4);
        gridContext.drawImage(pixels(layer, head), x, y, size, size);
        const chosen = layer === at.layer && head === at.head;
        gridContext.strokeStyle = chosen ? "#d1495b" : "#d9dee8";
        gridContext.lineWidth = chosen ? 3 : 1;
        gridContext.strokeRect(x, y, size, size);
      }
    }
  }
  const cell = (x, y) => [Math.floor((y - 20) / (size + 4)), Math.floor((x - 30) / (size + 4))];
  const inside = (layer, head) => layer >= 0 && head >= 0 && layer < layers && head < heads;
  pointer(grid, (x, y, event) => {
    const [layer, head] = cell(x, y);
    showTip(event, inside(layer, head) ? `layer ${layer}, head ${head}` : "");
  });
  grid.addEventListener("click", (event) => {
    const area = grid.getBoundingClientRect();
    const [layer, head] = cell(event.clientX - area.left, event.clientY - area.top);
    if (inside(layer, head)) { Object.assign(at, { layer, head }); draw(); }
  });

  function say(query, key) {
    if (query < 0) {
      const axes = at.mode === "matrix" ? "rows are queries, columns are keys; " : "";
      read.textContent = axes + "move over it to see the weights";
      return;
    }
    const best = [...Array(M).keys()].sort((a, b) => weight(query, b) - weight(query, a)).slice(0, 3);
    const main = key >= 0 ? `${view.queries[query]} → ${view.keys[key]}: ${formatWeight(weight(query, key))}; ` : `${view.queries[query]} `;
    read.textContent = main + "most to " + best.map((one) => `${view.keys[one]} ${formatWeight(weight(query, one))}`).join(", ");
  }

  const drawers = {
    matrix() {
      const side = Math.max(1, Math.min(24, Math.floor(620 / Math.max(N, M))));
      const margin = 84;
      const every = Math.ceil(11 / side); // labels of small cells: every n-th, and the chosen one
      const named = (i, chosen) =>
        i === chosen || (i % every === 0 && (chosen < 0 || Math.abs(i - chosen) >= every));
      const [big, context] = canvas(stage, margin + M * side + 4, margin + N * side + 4);
      context.imageSmoothingEnabled = false;
      const paint = (query, key) => {
        context.clearRect(0, 0, big.width, big.height);
        context.drawImage(pixels(at.layer, at.head), margin, margin, M * side, N * side);
        context.strokeStyle = "#d9dee8";
        context.strokeRect(margin, margin, M * side, N * side);
        for (let i = 0; i < N; i++) {
          if (!named(i, query)) continue;
          context.fillStyle = i === query ? "#d1495b" : "#1d2433";
          context.textAlign = "right";
          context.fillText(cut(view.queries[i], margin - 8, context), margin - 5, margin + (i + 0.5) * side);
        }
        for (let j = 0; j < M; j++) {
          if (!named(j, key)) continue;
          context.save();
          context.translate(margin + (j + 0.5) * side, margin - 5);
          context.rotate(-Math.PI / 2);
          context.textAlign = "left";
          context.fillStyle = j === key ? "#d1495b" : "#1d2433";
          context.fillText(cut(view.keys[j], margin - 8, context), 0, 0);
          context.restore();
        }
        if (query >= 0) {
          context.strokeStyle = "#d1495b";
          context.strokeRect(margin, margin + query * side, M * side, side);
          context.strokeRect(margin + key * side, margin, side, N * side);
        }
      };
      paint(-1, -1);
      pointer(big, (x, y, event) => {
        const query = Math.floor((y - margin) / side), key = Math.floor((x - margin) / side);
        const valid = query >= 0 && key >= 0 && query < N && key < M;
        paint(valid ? query : -1, key);
        say(valid ? query : -1, key);
        showTip(event, valid ? `${view.queries[query]} → ${view.keys[key]}: ${formatWeight(weight(query, key))}` : "");
      });
    },
    lines() {
      const step = 19, width = 460;
      const [big, context] = canvas(stage, width, Math.max(N, M) * step + 24);
      const paint = (query, key) => {
        context.clearRect(0, 0, big.width, big.height);
        context.fillStyle = "#667085";
        context.textAlign = "left";
        context.fillText("query", 8, 9);
        context.fillText("key", width - 120, 9);
        const line = (i, j) => {
          const w = weight(i, j);
          if (w < 0.01) return;
          context.strokeStyle = `rgba(36,86,196,${Math.min(1, 0.1 + w)})`;
          context.lineWidth = 0.5 + 3 * w;
          context.beginPath();
          context.moveTo(134, 20 + (i + 0.5) * step);
          context.lineTo(width - 134, 20 + (j + 0.5) * step);
          context.stroke();
        };
        if (query >= 0) for (let j = 0; j < M; j++) line(query, j);
        else if (key >= 0) for (let i = 0; i < N; i++) line(i, key);
        else for (let i = 0; i < N; i++) for (let j = 0; j < M; j++) if (weight(i, j) >= 0.05) line(i, j);
        const words = (labels, x, align, chosen, shade) => labels.forEach((label, i) => {
          const strength = shade(i);
          if (strength > 0) {
            context.fillStyle = `rgba(36,86,196,${0.6 * strength})`;
            context.fillRect(x === 128 ? 0 : x - 4, 20 + i * step, 132, step);
          }
          context.textAlign = align;
          context.fillStyle = i === chosen ? "#d1495b" : "#1d2433";
          context.fillText(cut(label, 124, context), x, 20 + (i + 0.5) * step);
        });
        words(view.queries, 128, "right", query, (i) => (key >= 0 && query < 0 ? weight(i, key) : 0));
        words(view.keys, width - 128, "left", key, (j) => (query >= 0 ? weight(query, j) : 0));
      };
      paint(-1, -1);
      pointer(big, (x, y) => {
        const row = y < 20 ? -1 : Math.floor((y - 20) / step);
        const query = x < width / 2 && row < N ? row : -1;
        const key = x >= width / 2 && row < M ? row : -1;
        paint(query, key);
        say(query, key);
      });
    },
    picture() {
      const [rows, columns] = view.grid, first = N - rows * columns, firstKey = M - rows * columns;
      const side = 340, w = side / columns, h = side / rows;
      const [big, context] = canvas(stage, 2 * side + 24, side + 24);
      const picture = new Image();
      const paint = (query) => {
        context.clearRect(0, 0, big.width, big.height);
        context.imageSmoothingEnabled = false;
        context.fillStyle = "#667085";
        context.textAlign = "left";
        context.fillText("move over a patch: it is the query", 0, 9);
        const what = query < 0 ? (first ? `from ${view.queries[0]}` : "mean over all queries") : `from ${view.queries[query]}`;
        context.fillText(`attention ${what}`, side + 24, 9);
        for (const x of [0, side + 24]) context.drawImage(picture, x, 22, side, side);
        const values = [];
        for (let patch = 0; patch < rows * columns; patch++) {
          let value = 0;
          if (query >= 0) value = weight(query, firstKey + patch);
          else if (first) value = weight(0, firstKey + patch);
          else for (let i = 0; i < N; i++) value += weight(i, firstKey + patch) / N;
          values.push(value);
        }
        const largest = Math.max(...values, 1e-9);
        context.fillStyle = "rgba(10,14,30,0.55)";
        context.fillRect(side + 24, 22, side, side);
        values.forEach((value, patch) => {
          const t = value / largest;
          context.fillStyle = `rgba(255,${Math.round(90 + 150 * t)},${Math.round(40 + 60 * t)},${0.85 * t})`;
          context.fillRect(side + 24 + (patch % columns) * w, 22 + Math.floor(patch / columns) * h, w, h);
        });
        if (query >= first) {
          const patch = query - first;
          context.strokeStyle = "#2456c4";
          context.lineWidth = 2;
          for (const x of [0, side + 24]) context.strokeRect(x + (patch % columns) * w, 22 + Math.floor(patch / columns) * h, w, h);
        }
      };
      picture.onload = () => paint(-1);
      picture.src = view.image;
      pointer(big, (x, y) => {
        const place = x > side + 24 ? x - side - 24 : x;
        const column = Math.floor(place / w), row = Math.floor((y - 22) / h);
        const valid = x >= 0 && column >= 0 && row >= 0 && column < columns && row < rows;
        const query = valid ? first + row * columns + column : -1;
        if (picture.complete) paint(query);
        say(query, -1);
      });
    },
  };
  function large() {
    stage.textContent = "";
    name.textContent = single ? "" : `layer ${at.layer}, head ${at.head}`;
    name.dataset.layer = at.layer;
    name.dataset.head = at.head;
    for (const button of bar.querySelectorAll("button")) button.classList.toggle("on", button.textContent === at.mode);
    say(-1, -1);
    drawers[at.mode]();
  }
  function draw() { if (!single) drawGrid(); large(); }
  draw();
}

// The other views ------------------------------------------------------------------------------

function extremes(values) {  // spreading a long array over arguments overflows the stack
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
}

function Matrix(view, parent) {
  const R = view.values.length, C = view.values[0].length;
  const flat = view.values.flat().filter((value) => value !== null);
  const [low, high] = view.limits || extremes(flat), largest = Math.max(-low, high, 1e-12);
  const texts = view.cells.length > 0;
  const wide = texts ? 66 : Math.max(1, Math.min(44, Math.floor(640 / C)));
  const tall = texts ? 24 : Math.max(1, Math.min(44, Math.floor(480 / R)));
  const rowNames = tall >= 9, columnNames = wide >= 9, flatNames = wide >= 40;
  const left = rowNames ? 96 : 22, top = columnNames ? (flatNames ? 36 : 84) : 22;
  const [element, context] = canvas(parent, left + C * wide + 2, top + R * tall + 2);
  context.fillStyle = "#667085";
  context.fillText(`${view.row_name} ↓   ${view.column_name} →`, 0, 8);
  view.values.forEach((row, i) => row.forEach((value, j) => {
    const t = view.diverging ? (value || 0) / largest : (value - low) / (high - low || 1);
    context.fillStyle = value === null ? "#eee" : css(view.diverging ? signed(t) : colour(t * 0.85));
    context.fillRect(left + j * wide, top + i * tall, wide - (wide > 6 ? 1 : 0), tall - (tall > 6 ? 1 : 0));
    const text = texts ? view.cells[i][j] : wide >= 34 && tall >= 16 ? formatBrief(value) : "";
    if (text) {
      context.fillStyle = Math.abs(t) > 0.55 ? "#fff" : "#1d2433";
      context.textAlign = "center";
      context.fillText(cut(text, wide - 4, context), left + (j + 0.5) * wide, top + (i + 0.5) * tall);
    }
  }));
  context.fillStyle = "#1d2433";
  if (rowNames) view.rows.forEach((label, i) => {
    context.textAlign = "right";
    context.fillText(cut(label, left - 8, context), left - 5, top + (i + 0.5) * tall);
  });
  if (columnNames) view.columns.forEach((label, j) => {
    context.save();
    context.translate(left + (j + 0.5) * wide, top - 5);
    if (!flatNames) context.rotate(-Math.PI / 2);
    context.textAlign = flatNames ? "center" : "left";
    context.fillText(cut(label, flatNames ? wide - 2 : 66, context), 0, flatNames ? -4 : 0);
    context.restore();
  });
  pointer(element, (x, y, event) => {
    const i = Math.floor((y - top) / tall), j = Math.floor((x - left) / wide);
    const valid = i >= 0 && j >= 0 && i < R && j < C;
    const cell = valid && texts ? ` “${view.cells[i][j]}”` : "";
    showTip(event, valid ? `${view.row_name} ${view.rows[i]}, ${view.column_name} ${view.columns[j]}:${cell} ${format(view.values[i][j])} ${view.value_name}` : "");
  });
}

function Curves(view, parent) {
  const width = 560, height = 300, left = 54, bottom = 40;
  const [element, context] = canvas(parent, width, height);
  const all = Object.values(view.lines).flat().filter((value) => value !== null);
  const [low, high] = extremes(all);
  const [first, last] = extremes(view.x);
  const X = (x) => left + ((x - first) / (last - first || 1)) * (width - left - 12);
  const Y = (y) => height - bottom - ((y - low) / (high - low || 1)) * (height - bottom - 14);
  context.strokeStyle = "#d9dee8";
  for (const t of [0, 0.25, 0.5, 0.75, 1]) {
    const y = low + t * (high - low), x = first + t * (last - first);
    context.beginPath();
    context.moveTo(left, Y(y));
    context.lineTo(width - 12, Y(y));
    context.stroke();
    context.fillStyle = "#667085";
    context.textAlign = "right";
    context.fillText(format(y), left - 6, Y(y));
    context.textAlign = "center";
    context.fillText(format(x), X(x), height - bottom + 12);
  }
  context.textAlign = "left";
  context.fillText(`${view.y_name} over ${view.x_name}`, left, height - 10);
  const legend = make("div", parent, { className: "bar" });
  Object.entries(view.lines).forEach(([name, values], index) => {
    const shade = LINE_COLOURS[index % LINE_COLOURS.length];
    context.strokeStyle = shade;
    context.lineWidth = 1.6;
    context.beginPath();
    values.forEach((y, i) => { if (y !== null) context.lineTo(X(view.x[i]), Y(y)); });
    context.stroke();
    make("span", legend, { textContent: name }).style.color = shade;
  });
  pointer(element, (x, y, event) => {
    const near = view.x.reduce((best, value, i) => (Math.abs(X(value) - x) < Math.abs(X(view.x[best]) - x) ? i : best), 0);
    const lines = Object.entries(view.lines).map(([name, values]) => `${name}: ${format(values[near])}`);
    showTip(event, x < 0 ? "" : `${view.x_name} ${view.x[near]}\n${lines.join("\n")}`);
  });
}

function Tokens(view, parent) {
  const largest = Math.max(...view.values.filter((value) => value !== null), 1e-9);
  const box = make("div", parent, { className: "tokens" });
  view.tokens.forEach((token, i) => {
    const value = view.values[i];
    const span = make("span", box, { textContent: token });
    if (value === null) return;
    span.style.background = `rgba(209,73,91,${(0.75 * value) / largest})`;
    span.onmousemove = (event) => showTip(event, `${token}: ${format(value)} ${view.unit}`);
    span.onmouseleave = (event) => showTip(event, "");
    if (!token.includes("␣")) box.append("​");
  });
}

function Table(view, parent) {
  const table = make("table", parent);
  const head = make("tr", table);
  for (const column of view.columns) make("th", head, { textContent: column });
  for (const row of view.rows) {
    const line = make("tr", table);
    for (const value of row) make("td", line, { textContent: typeof value === "number" ? format(value) : value });
  }
}

// The page -------------------------------------------------------------------------------------

const DRAW = { Heads, Matrix, Curves, Tokens, Table };
const header = make("header", document.body);
make("h1", header, { textContent: data.title });
if (data.samples.length > 1) {
  const choice = make("select", header, { id: "sample" });
  data.samples.forEach((sample, i) => make("option", choice, { value: i, textContent: sample.name }));
  choice.onchange = () => { state.sample = +choice.value; show(); };
}
make("p", header, { textContent: data.note });
for (const remark of data.remarks) make("p", header, { className: "remark", textContent: remark });
const nav = make("nav", header);
const main = make("main", document.body);

let shows = 0;
async function show() {
  const turn = ++shows; // a later click ends this one, which may still unpack weights
  const tabs = [...data.samples[state.sample].tabs, ...data.shared];
  const tab = tabs.find((one) => one.name === state.tab) || tabs[0];
  nav.textContent = main.textContent = "";
  for (const one of tabs) {
    const button = make("button", nav, { textContent: one.name, className: one === tab ? "on" : "" });
    button.onclick = () => { state.tab = one.name; show(); };
  }
  for (const view of tab.views) {
    const bytes = view.weights && await (view.bytes ||= unpacked(view.weights));
    if (turn !== shows) return;
    const section = make("section", main);
    make("h2", section, { textContent: view.title });
    if (view.note) make("p", section, { className: "note", textContent: view.note });
    DRAW[view.kind](view, section, bytes);
  }
  document.body.dataset.ready = tab.name;
}
show();
