"use strict";
// Draws each figure.chart from the numbers that it contains (charts.py), and shows the values under the pointer.
const WIDTH = 360, HEIGHT = 210, RIGHT = 12, TOP = 10, BOTTOM = 34, DASHES = 7;

function svg(name, attributes, parent, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

function number(value, digits = {}) { // 0.0513, 12.3, 1,234, 9.8e-5
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e9) return Number(value.toPrecision(3)).toExponential();
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 100 ? 4 : 3, ...digits });
}

function samples(value) { // 900, 12.8 k, 1.5 M
  const [unit, name] = [[1e9, " B"], [1e6, " M"], [1e3, " k"]].find(([unit]) => value >= unit) || [1, ""];
  return Number((value / unit).toPrecision(3)) + name;
}

function ticks(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= 0.9 * rough);
  const count = Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
  return Array.from({ length: count }, (_, place) => (Math.ceil(low / step - 1e-9) + place) * step);
}

function logTicks(low, high) {
  const powers = Array.from({ length: 220 }, (_, place) => 10 ** (place - 110));
  const all = powers.flatMap((power) => (high / low > 300 ? [1] : [1, 2, 5]).map((factor) => factor * power));
  const inside = all.filter((tick) => tick >= low && tick <= high);
  return inside.filter((_, place) => place % Math.ceil(inside.length / 6) === 0);
}

// The range of the vertical axis. A few outliers are left outside: one early spike must not flatten the rest.
function frame(chart, values) {
  const sorted = [...values].sort((a, b) => a - b), positive = sorted.filter((value) => value > 0);
  if (chart.log && positive.length && positive.at(-1) / positive[0] > 10) {
    return { low: positive[0] / 1.2, high: positive.at(-1) * 1.2, log: true };
  }
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const margin = 0.5 * (at(0.98) - at(0.02));
  const fixed = [chart.reference, chart.percent && chart.from_zero ? 0 : null].filter((value) => value !== null);
  const low = Math.min(Math.max(sorted[0], at(0.02) - margin), ...fixed);
  const high = Math.max(Math.min(sorted.at(-1), at(0.98) + margin), ...fixed);
  const room = 0.06 * (high - low) || 0.1 * Math.abs(high) || 1;
  return { low: low >= 0 && low < room ? 0 : low - room, high: high + room, log: false };
}

// Functions from values to positions in the drawing, and back.
function scales(chart) {
  const points = chart.lines.flatMap((line) => [line.points, ...line.behind]).flat();
  const { low, high, log } = frame(chart, points.map(([, y]) => y)), last = Math.max(...points.map(([x]) => x)) || 1;
  const marks = log ? logTicks(low, high) : ticks(low, high);
  const write = (value, digits) => chart.percent ? number(100 * value, digits) + " %" : number(value, digits);
  const left = 14 + 6.5 * Math.max(2, ...marks.map((tick) => write(tick).length));
  const place = log ? (value) => Math.log(Math.max(value, low)) : (value) => value;
  const share = (value) => Math.min(1, Math.max(0, (place(value) - place(low)) / (place(high) - place(low))));
  return {
    log, last, left, marks, write,
    writeAcross: chart.across === "samples seen" ? samples : number,
    x: (value) => left + (WIDTH - RIGHT - left) * value / last,
    y: (value) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share(value),
    at: (pixel) => Math.min(last, Math.max(0, (pixel - left) / (WIDTH - RIGHT - left) * last)),
  };
}

const look = (line) => ({ class: `line dash-${line.dash % DASHES}`, style: `--colour: var(--series-${line.colour})` });

function draw(figure) {
  const chart = JSON.parse(figure.querySelector("script").textContent), scale = scales(chart), { x, y, left } = scale;
  const unit = chart.unit + (scale.log ? ", log" : "");
  const canvas = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${chart.title}, ${unit}` }, figure);
  for (const tick of scale.marks) {
    svg("path", { class: "grid", d: `M${left} ${y(tick)}H${WIDTH - RIGHT}` }, canvas);
    svg("text", { x: left - 5, y: y(tick) + 3.5, "text-anchor": "end" }, canvas, scale.write(tick));
  }
  for (const tick of ticks(0, scale.last)) {
    svg("text", { x: x(tick), y: HEIGHT - BOTTOM + 14, "text-anchor": "middle" }, canvas, scale.writeAcross(tick));
  }
  svg("text", { x: left, y: HEIGHT - 5 }, canvas, unit);
  svg("text", { x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, canvas, chart.across);
  if (chart.reference !== null) svg("path", { class: "reference", d: `M${left} ${y(chart.reference)}H${WIDTH - RIGHT}` }, canvas);
  const path = (points) => "M" + points.map(([a, b]) => x(a).toFixed(1) + " " + y(b).toFixed(1)).join("L");
  for (const line of chart.lines) {
    const { style } = look(line);
    line.behind.forEach((points) => svg("path", { class: "thin", style, d: path(points) }, canvas));
    if (line.points.length) svg("path", { ...look(line), d: path(line.points) }, canvas);
    const dots = chart.dots || line.points.length === 1 ? line.points : [];
    dots.forEach(([a, b]) => svg("circle", { style, cx: x(a), cy: y(b), r: 2.6 }, canvas));
  }
  listen(figure, canvas, chart, scale);
}

// The legend shows the values under the pointer, or the last values.
function listen(figure, canvas, chart, scale) {
  const rule = svg("path", { class: "rule" }, canvas), values = figure.querySelector(".values");
  const lines = chart.lines.filter((line) => line.points.length), alone = lines.length === 1;
  function entry(line, at) {
    const near = line.points.reduce((best, one) => Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best);
    const value = scale.write(near[1], { minimumSignificantDigits: 3 }), element = document.createElement("span");
    svg("path", { ...look(line), d: "M0 5H22" }, svg("svg", { viewBox: "0 0 22 10", class: "key" }, element));
    element.append(alone ? `${value} at ${scale.writeAcross(near[0])}` : `${line.name}: ${value}`);
    return element;
  }
  function show(at) {
    values.replaceChildren(...lines.flatMap((line) => [entry(line, at), " "]));
    if (!alone) values.append(Object.assign(document.createElement("span"), { textContent: `at ${scale.writeAcross(at)}` }));
  }
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), at = scale.at((event.clientX - box.left) * WIDTH / box.width);
    rule.setAttribute("d", `M${scale.x(at)} ${TOP}V${HEIGHT - BOTTOM}`);
    show(at);
  });
  canvas.addEventListener("pointerleave", () => { rule.removeAttribute("d"); show(scale.last); });
  show(scale.last);
}

document.querySelectorAll("figure.chart").forEach(draw);
