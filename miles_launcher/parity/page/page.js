"use strict";

// A sentence for what is pointed at, below each picture.
function say(section, text) {
  const line = section.querySelector(".readout");
  line.dataset.hint ??= line.textContent;
  line.textContent = text || line.dataset.hint;
  line.classList.toggle("live", Boolean(text));
}

function strip(section) {
  const rows = [...section.querySelectorAll("tbody tr")].map((r) => [...r.querySelectorAll(".cell")]);
  let at = section.querySelector(".cell.first") || rows[0][0];
  at.tabIndex = 0;
  section.addEventListener("pointerover", (e) => say(section, e.target.closest(".cell")?.title));
  section.addEventListener("pointerleave", () => say(section, ""));
  section.addEventListener("focusin", (e) => e.target.title && say(section, e.target.title));
  section.addEventListener("keydown", (e) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[e.key];
    const row = rows.findIndex((cells) => cells.includes(document.activeElement));
    if (!step || row < 0) return;
    e.preventDefault();
    const column = rows[row].indexOf(document.activeElement) + step[1];
    const cells = rows[row + step[0]] || rows[row];
    at.tabIndex = -1;
    at = cells[Math.max(0, Math.min(column, cells.length - 1))];
    at.tabIndex = 0;
    at.focus();
  });
}

const GUTTER = 76; // for the layers' names
const BAND = 26; // for sequences, prompts and responses

function heat(section) {
  const data = JSON.parse(document.getElementById("heat-data").textContent);
  const canvas = section.querySelector("canvas");
  const frame = section.querySelector(".cursor");
  const { sequence: pick, measure } = section.querySelector("form").elements;
  const context = canvas.getContext("2d");
  const layers = data.layers.length;
  // Runs of one sequence, in the order of the tokens.
  const runs = [];
  data.tokens.forEach(([sequence], n) => {
    if (!runs.length || runs.at(-1).sequence !== sequence) runs.push({ sequence, from: n });
    runs.at(-1).to = n + 1;
  });
  if (runs.length > 1) {
    runs.forEach((run, n) => pick.append(new Option(`sequence ${run.sequence}`, n)));
  }
  pick.form.hidden = false;
  pick.parentElement.hidden = runs.length < 2;
  let view = null; // what is drawn: tokens from, to; bins; the size of a cell
  let cursor = null; // [bin, layer]

  const isPrompt = (n) => data.tokens[n][1] < (data.prompts[data.tokens[n][0]] ?? 0);
  // One number to compare tokens by: those whose elements were counted before the others.
  const counted = (n) => (measure.value === "elements" ? data.elements[n] : null);
  const weight = (n, layer) => (counted(n) ? 1e9 + counted(n)[layer] : data.tensors[n][layer]);

  function worst(bin, layer) {
    const { from, to, bins } = view;
    const first = from + Math.floor((bin * (to - from)) / bins);
    const end = Math.max(first + 1, from + Math.floor(((bin + 1) * (to - from)) / bins));
    let best = first;
    for (let n = first + 1; n < end; n++) {
      // A token that differs is never hidden by an equal one whose elements were counted.
      const differs = data.tensors[n][layer] > 0, kept = data.tensors[best][layer] > 0;
      if (differs !== kept ? differs : weight(n, layer) > weight(best, layer)) best = n;
    }
    return { n: best, first, end };
  }

  function ramps() {
    const style = getComputedStyle(document.documentElement);
    const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const read = (name) => style.getPropertyValue(name).trim().split(/\s+/);
    const ramp = (name) => {
      const stops = read(name).map(rgb);
      return (part) => {
        const x = Math.max(0, Math.min(1, part)) * (stops.length - 1);
        const i = Math.min(Math.floor(x), stops.length - 2);
        return stops[i].map((v, c) => Math.round(v + (x - i) * (stops[i + 1][c] - v)));
      };
    };
    return {
      elements: ramp("--elements"), tensors: ramp("--tensors"), none: rgb(read("--heat-none")[0]),
      ink: read("--ink")[0], soft: read("--soft")[0], faint: read("--faint")[0],
      card: read("--card")[0], first: read("--first")[0], mono: style.getPropertyValue("--mono"),
    };
  }

  function colour(n, layer, colours) {
    const elements = counted(n)?.[layer];
    if (elements) {
      const most = Math.log(data.most.elements);
      return colours.elements(most ? Math.log(elements) / most : 1);
    }
    if (!data.tensors[n][layer]) return colours.none;
    const most = data.most.tensors - 1;
    return colours.tensors(most ? (data.tensors[n][layer] - 1) / most : 1);
  }

  function draw() {
    const run = pick.value === "" ? { from: 0, to: data.tokens.length } : runs[pick.value];
    const ratio = window.devicePixelRatio || 1;
    const count = run.to - run.from;
    const room = Math.max(50, canvas.clientWidth - GUTTER - 10);
    const high = Math.max(6, Math.min(24, Math.round(330 / layers)));
    const width = Math.min(room, count * 28);
    view = { ...run, bins: Math.min(count, Math.floor(width)), width, high };
    const height = BAND + layers * high + 4;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const colours = ramps();

    const picture = new OffscreenCanvas(view.bins, layers);
    const image = new ImageData(view.bins, layers);
    for (let layer = 0; layer < layers; layer++) {
      for (let bin = 0; bin < view.bins; bin++) {
        const at = 4 * (layer * view.bins + bin);
        image.data.set([...colour(worst(bin, layer).n, layer, colours), 255], at);
      }
    }
    picture.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, GUTTER, BAND, width, layers * high);
    frames(colours);
    names(colours);
    mark(colours);
    move(null);
    document.documentElement.dataset.heat = `${view.bins} by ${layers}`;
  }

  const x = (n) => GUTTER + ((n - view.from) / (view.to - view.from)) * view.width;

  // Lines between sequences and at the end of each prompt, where there is room between them.
  function frames(colours) {
    const shown = runs.filter((run) => run.to > view.from && run.from < view.to);
    const each = view.width / shown.length;
    let labelled = -Infinity;
    for (const run of shown) {
      let response = run.from;
      while (response < run.to && isPrompt(response)) response++;
      const [left, split, right] = [run.from, response, run.to].map(x);
      context.globalAlpha = 0.45;
      context.fillStyle = colours.faint;
      context.fillRect(left, BAND - 8, split - left, 5);
      context.globalAlpha = 1;
      context.fillStyle = colours.soft;
      context.fillRect(split, BAND - 8, right - split, 5);
      context.fillStyle = colours.card;
      if (run.from > view.from) context.fillRect(left - (each > 12 ? 1 : 0.5), BAND - 10, each > 12 ? 2 : 1, each > 6 ? 2e3 : 9);
      if (each > 24 && split > left && split < right) {
        context.fillStyle = colours.faint;
        for (let y = BAND; y < BAND + layers * view.high; y += 6) context.fillRect(split - 0.5, y, 1, 3);
      }
      if (left > labelled) {
        const text = String(run.sequence);
        context.font = `11px ${colours.mono}`;
        context.fillStyle = colours.soft;
        context.fillText(text, left, BAND - 13);
        labelled = left + context.measureText(text).width + 8;
      }
    }
  }

  function names(colours) {
    const every = Math.ceil(13 / view.high);
    context.font = `11px ${colours.mono}`;
    context.textAlign = "right";
    context.fillStyle = colours.soft;
    context.fillText("sequence", GUTTER - 9, BAND - 13);
    context.textBaseline = "middle";
    data.layers.forEach((name, layer) => {
      const here = data.first && data.first[1] === layer;
      const near = data.first && Math.abs(data.first[1] - layer) < every;
      const end = layer === 0 || layer === layers - 1;
      const beside = !end && (layer < every || layer > layers - 1 - every);
      if (!here && (near || beside || (!end && name % (every === 1 ? 1 : 4)))) return;
      context.fillStyle = here ? colours.first : colours.soft;
      context.fillText(name, GUTTER - 9, BAND + (layer + 0.5) * view.high);
    });
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
  }

  // The first divergence: a ring that stays visible around a cell of one pixel.
  function mark(colours) {
    if (!data.first) return;
    const [n, layer] = data.first;
    if (n < view.from || n >= view.to) return;
    const cell = view.width / (view.to - view.from);
    const middle = x(n) + cell / 2, centre = BAND + (layer + 0.5) * view.high;
    const w = Math.max(cell, 7) + 4, h = Math.max(view.high, 7) + 4;
    for (const [style, line] of [[colours.card, 4.5], [colours.ink, 2]]) {
      context.strokeStyle = style;
      context.lineWidth = line;
      context.strokeRect(middle - w / 2, centre - h / 2, w, h);
    }
    context.fillStyle = colours.first;
    context.beginPath();
    context.moveTo(middle - 5, BAND - 10);
    context.lineTo(middle + 5, BAND - 10);
    context.lineTo(middle, BAND - 1);
    context.fill();
  }

  function move(to) {
    cursor = to;
    frame.hidden = !to;
    if (!to) return say(section, "");
    const [bin, layer] = to;
    const cell = view.width / view.bins;
    const width = Math.max(cell, 5);
    frame.style.cssText = `left:${GUTTER + (bin + 0.5) * cell - width / 2 - 2}px;` +
      `top:${BAND + layer * view.high - 2}px;width:${width + 4}px;height:${view.high + 4}px`;
    say(section, sentence(bin, layer));
  }

  function sentence(bin, layer) {
    const { n, first, end } = worst(bin, layer);
    const [sequence, position] = data.tokens[n];
    const id = data.ids[sequence]?.[position];
    const name = typeof data.layers[layer] === "number" ? `layer ${data.layers[layer]}` : data.layers[layer];
    const tensors = data.tensors[n][layer], elements = data.elements[n]?.[layer];
    const of = data.tapped[layer] ? ` of ${data.tapped[layer]}` : "";
    let what = "equal";
    if (tensors || elements) {
      what = `${tensors}${of} tapped tensors differ`;
      what += elements === undefined ? ", elements not counted" : ` in ${elements.toLocaleString("en")} elements`;
    }
    const more = end - first > 1 ? ` (the most of ${end - first} tokens here)` : "";
    const here = data.first && data.first[0] === n && data.first[1] === layer ? "; the first divergence" : "";
    return `${name}, sequence ${sequence} position ${position}, token ${id ?? "unknown"}, ` +
      `${isPrompt(n) ? "prompt" : "response"}: ${what}${more}${here}`;
  }

  canvas.addEventListener("pointermove", (e) => {
    const bin = Math.floor(((e.offsetX - GUTTER) / view.width) * view.bins);
    const layer = Math.floor((e.offsetY - BAND) / view.high);
    const inside = bin >= 0 && bin < view.bins && layer >= 0 && layer < layers;
    move(inside ? [bin, layer] : null);
  });
  canvas.addEventListener("pointerleave", () => move(null));
  canvas.addEventListener("blur", () => move(null));
  canvas.addEventListener("keydown", (e) => {
    const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[e.key];
    if (!step) return;
    e.preventDefault();
    const binOf = (n) => Math.min(view.bins - 1, Math.floor(((n - view.from) * view.bins) / (view.to - view.from)));
    const start = data.first && data.first[0] >= view.from && data.first[0] < view.to
      ? [binOf(data.first[0]), data.first[1]] : [0, 0];
    if (!cursor) return move(start);
    move([
      Math.max(0, Math.min(view.bins - 1, cursor[0] + step[0])),
      Math.max(0, Math.min(layers - 1, cursor[1] + step[1])),
    ]);
  });
  pick.form.addEventListener("change", () => {
    for (const ramp of section.querySelectorAll(".ramp.elements")) {
      ramp.parentElement.hidden = measure.value !== "elements";
    }
    draw();
  });
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}

for (const [name, start] of [["strip", strip], ["heat", heat]]) {
  const section = document.getElementById(name);
  if (section?.querySelector(".readout")) start(section);
}
document.documentElement.dataset.drawn = "yes";
