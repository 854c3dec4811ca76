// One sentence through the whole model: each number opens as the sum that it came from.
//
// The numbers are PyTorch's, written by book/_ext/through.py when the book is built. This
// file lists the terms of a number's sum (Model.sum) and shows them. It computes no step
// of the model: tests/test_through.py adds the terms up and compares.

import "./make.js";
import { checked, fetched } from "./translator_engine.js";

const { make } = globalThis.literate;

// --- the numbers ------------------------------------------------------------------------

// Numbers of 16 bits as they stand in a file.
function halves(bytes, at, count) {
  const view = new DataView(bytes.buffer, bytes.byteOffset + at, 2 * count);
  return Float32Array.from({ length: count }, (_, i) => {
    const bits = view.getUint16(2 * i, true), power = (bits >> 10) & 31, rest = bits & 1023;
    const size = power ? 2 ** (power - 15) * (1 + rest / 1024) : 2 ** -14 * (rest / 1024);
    return bits & 0x8000 ? -size : size;
  });
}

const singles = (bytes, at, count) => new Float32Array(bytes.slice(at, at + 4 * count).buffer);

export class Model {
  constructor(told, bytes) {
    Object.assign(this, told, { bytes });
    this.step = new Map(told.steps.map(step => [step.name, step]));
    this.read = new Map();
  }

  static async load(folder, version, report = () => {}) {
    const get = (name, size) => fetched(new URL(`${name}?v=${version}`, folder).href, size);
    let loaded = 0;
    const told = JSON.parse(new TextDecoder().decode(await get("through.json")));
    const bytes = await get("through.bin", (before, now) => report((loaded += now - before)));
    return new Model(told, await checked(bytes, "through.bin", told.file));
  }

  // All numbers of a step, or a learned table, once they are asked for.
  all(name) {
    if (!this.read.has(name)) {
      const { at, type, shape } = this.numbers[name] ?? this.tables[name];
      this.read.set(name, (type === "f2" ? halves : singles)(this.bytes, at, shape.reduce((a, b) => a * b, 1)));
    }
    return this.read.get(name);
  }

  shape(name) {
    return (this.numbers[name] ?? this.tables[name]).shape;
  }

  number(name, ...at) {
    const shape = this.shape(name);
    return this.all(name)[at.reduce((sum, i, axis) => sum * shape[axis] + i, 0)];
  }

  // The sum behind a number: `how` it is made of the terms. A term is a value and its
  // factors; a factor has a name to show, a value, and `of` where it came from a step.
  sum(name, at) {
    const step = this.step.get(name), [i, j] = at.slice(-2), range = n => [...Array(n).keys()];
    const of = (from, ...place) => ({ of: [from, place], value: this.number(from, ...place) });
    const learned = (from, ...place) => ({ learned: from, at: place, value: this.number(from, ...place) });
    const plain = (text, value) => ({ text, value });
    const term = (...factors) => ({
      factors, value: factors.reduce((product, f) => f.under ? product / f.value : product * f.value, 1),
    });
    const under = factor => ({ ...factor, under: true });
    switch (step?.kind) {
      case "embed":
        return { how: "sum", terms: [
          term(learned(step.table, this.ids[step.rows][i], j), plain("√d", step.scale)),
          term({ text: `position ${i}, number ${j + 1}`, value: this.number(step.positions, i, j) }),
        ] };
      case "linear": {
        const terms = range(this.shape(step.x)[1]).map(d => term(of(step.x, i, d), learned(step.weight, j, d)));
        if (step.bias) terms.push(term(learned(step.bias, j)));
        return { how: step.relu ? "relu" : "sum", terms };
      }
      case "score": {
        const width = this.shape(step.q)[1] / step.heads, first = at[0] * width, root = plain("√d_k", Math.sqrt(width));
        return { how: "sum", terms: range(width).map(k =>
          term(of(step.q, i, first + k), of(step.k, j, first + k), under(root))) };
      }
      case "softmax": {
        const count = step.causal ? i + 1 : this.shape(step.x).at(-1), place = n => [...at.slice(0, -1), n];
        const scores = range(count).map(n => of(step.x, ...place(n)));
        const most = Math.max(...scores.map(score => score.value));
        return { how: "share", chosen: j, most, terms: scores.map(score =>
          ({ value: Math.exp(score.value - most), factors: [{ ...score, power: true }] })) };
      }
      case "blend": {
        const [heads, , keys] = this.shape(step.weights), head = Math.floor(j / (this.shape(step.v)[1] / heads));
        const count = step.causal ? i + 1 : keys;
        return { how: "sum", terms: range(count).map(n => term(of(step.weights, head, i, n), of(step.v, n, j))) };
      }
      case "add":
        return { how: "sum", terms: [term(of(step.x, i, j)), term(of(step.y, i, j))] };
      case "norm": {
        const scale = [learned(step.weight, j), under({ of: [step.spread, [i, 0]], value: this.number(step.spread, i, 0) })];
        const minus = plain("−1", -1);
        return { how: "sum", terms: [
          term(of(step.x, i, j), ...scale), term(of(step.mean, i, 0), minus, ...scale), term(learned(step.bias, j)),
        ] };
      }
    }
    const norm = this.steps.find(one => one.mean === name || one.spread === name);
    const width = this.shape(norm.x)[1], count = under(plain("d", width));
    if (norm.mean === name) return { how: "sum", terms: range(width).map(d => term(of(norm.x, i, d), count)) };
    const mean = this.number(norm.mean, i, 0);
    return { how: "root", terms: [
      ...range(width).map(d => {
        const x = of(norm.x, i, d);
        return { value: (x.value - mean) ** 2 / width, factors: [{ ...x, gap: mean }, count] };
      }),
      term(plain("ε", norm.eps)),
    ] };
  }

  // What the terms of a sum come to.
  total({ how, terms, chosen }) {
    const sum = terms.reduce((all, term) => all + term.value, 0);
    if (how === "share") return terms[chosen].value / sum;
    return how === "relu" ? Math.max(0, sum) : how === "root" ? Math.sqrt(sum) : sum;
  }

  piece(side, i) {
    return side === "vocabulary" ? this.vocabulary[i].replaceAll("▁", "") || "▁" : this[side][i];
  }

  // A number in words: weights, “his” → “house”, head 1; or “his”: queries, number 17.
  say(name, at) {
    const step = this.step.get(name);
    if (!step) {
      const norm = this.steps.find(one => one.mean === name || one.spread === name);
      return `“${this.piece(norm.rows, at[0])}”: ${norm.mean === name ? "mean" : "spread"} before it is normalized`;
    }
    const [i, j] = at.slice(-2), head = at.length > 2 ? `, head ${at[0] + 1}` : "";
    if (step.columns) return `${step.title}, “${this.piece(step.rows, i)}” → “${this.piece(step.columns, j)}”${head}`;
    return `“${this.piece(step.rows, i)}”: ${step.title}, number ${j + 1}`;
  }

  // A learned number in words: which table, row and column.
  sayLearned(name, [row, column]) {
    const table = name.replace(/\.weight$/, "").split(".").slice(-2).join(".");
    if (this.shape(name)[0] === this.vocabulary.length)
      return `learned: row of “${this.piece("vocabulary", row)}” (id ${row}) in ${table}, number ${column + 1}`;
    return `learned: ${table} [${column === undefined ? row + 1 : `${row + 1}, ${column + 1}`}]`;
  }
}

// --- the figure -------------------------------------------------------------------------

const WHAT = {
  embed: "Each token's row of the learned table, times √d, plus the numbers of its position.",
  linear: "Each number is a sum over all numbers of the step before, each times a learned one.",
  score: "A query times a key, number by number, added up and divided by √d_k.",
  softmax: "e to the power of each score, divided by the sum of all.",
  blend: "The weighted average of the values.",
  add: "The sublayer's result is added to what came in: the residual connection.",
  norm: "The mean is taken off and the spread divided out; then a learned gain and bias.",
};
const SHOWN = 12; // terms of a sum before one asks for more
const WORDS = 24; // of the vocabulary

const written = x => {
  if (!Number.isFinite(x)) return "0";
  const size = Math.abs(x);
  const text = size === 0 ? "0" : size < 0.01 ? x.toExponential(1) : size >= 100 ? x.toFixed(0) : x.toPrecision(3);
  return text.replace("-", "−");
};

// --- the map ----------------------------------------------------------------------------

// The box of the map that a step lies in.
function boxOf(model, name) {
  if (!name.includes(".layers.")) return { "encoder.in": "src-in", "decoder.in": "tgt-in" }[name] ?? "out";
  const side = name.startsWith("encoder") ? "enc" : "dec", last = side === "enc" ? 2 : 3;
  if (/self_attention|residual_1/.test(name)) return side === "enc" ? "enc-attention" : "dec-self";
  return name.includes("cross_attention") || (last === 3 && name.includes("residual_2")) ? "dec-across" : `${side}-feed`;
}

function light(...lit) {
  for (const box of document.querySelectorAll(".tour-map [data-box]"))
    box.classList.toggle("lit", lit.includes(box.dataset.box));
}

export function show(box, model) {
  const parts = [...new Set(model.steps.map(step => step.part))];
  const state = { at: 0, row: { source: model.start.source, target: model.start.target }, head: model.head, path: [] };
  const choose = make("select", { id: "through-part", change: () => go(model.steps.findIndex(s => s.part === choose.value)) },
    ...parts.map(part => make("option", {}, part)));
  const back = make("button", { type: "button", click: () => go(state.at - 1) }, "‹ back");
  const next = make("button", { type: "button", click: () => go(state.at + 1) }, "next ›");
  const count = make("span", { class: "through-count" });
  const steps = make("div", { class: "through-bar", role: "group", "aria-label": "Steps of this part" });
  const words = make("div", { class: "through-bar", role: "group", "aria-label": "Tokens" });
  const heads = make("div", { class: "through-bar", role: "group", "aria-label": "Heads" });
  const told = make("p", { class: "through-told", "aria-live": "polite" });
  const strip = make("div", { class: "through-strip", role: "group" });
  const now = make("p", { class: "through-now", "aria-hidden": "true" });
  const panel = make("div", { class: "through-sum", role: "region", "aria-label": "The sum" });
  box.replaceChildren(
    make("div", { class: "through-bar" }, make("label", { for: "through-part" }, "Part "), choose, back, next, count),
    steps, words, heads, told, strip, now, panel);

  function press(text, on, click, label) {
    return make("button", { type: "button", "aria-pressed": String(on), "aria-label": label ?? false, click }, text);
  }

  const step = () => model.steps[state.at];

  function go(at) {
    state.at = Math.max(0, Math.min(model.steps.length - 1, at));
    state.path = [];
    draw();
  }

  // The numbers of the step for the chosen piece (and head): [[place, value, name], ...].
  function cells() {
    const { name, rows, heads: all, columns, causal } = step(), row = state.row[rows], shape = model.shape(name);
    if (shape.length === 3) {
      const keys = causal ? row + 1 : shape[2];
      return [...Array(keys).keys()].map(j => [[state.head, row, j], model.number(name, state.head, row, j), model.piece(columns, j)]);
    }
    const width = all ? shape[1] / all : shape[1], first = all ? state.head * width : 0;
    const found = Array.from({ length: width }, (_, k) => [[row, first + k], model.number(name, row, first + k), String(first + k + 1)]);
    if (columns !== "vocabulary" && !step().relu) return found;
    found.sort((a, b) => b[1] - a[1]);
    if (step().relu) return found; // most are zero: those that are on come first
    return found.slice(0, WORDS).map(([at, value]) => [at, value, model.piece(columns, at[1])]);
  }

  function draw() {
    const { part, title, kind, rows, heads: all, columns, name } = step();
    const focus = box.contains(document.activeElement) ? document.activeElement.textContent : null;
    choose.value = part;
    back.disabled = state.at === 0;
    next.disabled = state.at === model.steps.length - 1;
    count.textContent = `step ${state.at + 1} of ${model.steps.length}`;
    steps.replaceChildren(...model.steps.flatMap((one, i) => one.part === part ? [press(one.title, i === state.at, () => go(i))] : []));
    words.replaceChildren(...model[rows].map((piece, i) => press(piece, i === state.row[rows], () => {
      state.row[rows] = i;
      state.path = [];
      draw();
    }, `token ${i + 1}: ${piece}`)));
    heads.replaceChildren(...Array.from({ length: all ?? 0 }, (_, h) => press(`${h + 1}`, h === state.head, () => {
      state.head = h;
      state.path = [];
      draw();
    }, `head ${h + 1}`)));
    if (all) heads.prepend(make("span", {}, "head"));
    const piece = model.piece(rows, state.row[rows]), found = cells(), shape = model.shape(name);
    const row = state.row[rows], known = kind === "embed" ? ` “${piece}” has the id ${model.ids[rows][row]}: its row in the table.` : "";
    const whole = kind === "linear" && step().relu ? `${WHAT.linear} Below zero it becomes zero. The largest come first.` : WHAT[kind] + known;
    told.textContent = `${whole} ${columns ? `A bar is for one ${columns === "vocabulary" ? "token that could come next" : "token looked at"}`
      : `${found.length} numbers of “${piece}”`}; press one to see its sum.`;
    now.textContent = "";
    strip.setAttribute("aria-label", `${title} of “${piece}”, shape ${shape.join(" × ")}`);
    strip.classList.toggle("through-bars", Boolean(columns));
    const most = Math.max(...found.map(([, value]) => Math.abs(value)), 1e-9);
    strip.replaceChildren(...found.map(([at, value, label], n) => {
      const chosen = state.path[0]?.at.join() === at.join();
      const cell = make("button", {
        type: "button", class: value < 0 ? "through-below" : "through-above", tabindex: n ? "-1" : "0",
        style: `--share: ${Math.round(100 * Math.abs(value) / most)}%`, "aria-pressed": String(chosen),
        "aria-label": columns ? false : `number ${label}: ${written(value)}`,
        title: `${columns ? label : `number ${label}`}: ${written(value)}`,
        click: () => open([{ name, at }]),
      });
      if (columns) cell.append(make("span", {}, label), " ", make("span", { class: "through-rail" }, make("span")), make("span", {}, written(value)));
      return cell;
    }));
    if (focus) [...box.querySelectorAll("button")].find(b => b.textContent === focus && !b.disabled)?.focus();
    tell();
  }

  function open(path) {
    state.path = path;
    for (const cell of strip.children) cell.setAttribute("aria-pressed", "false");
    const chosen = cells().findIndex(([at]) => step().name === path[0].name && at.join() === path[0].at.join());
    strip.children[chosen]?.setAttribute("aria-pressed", "true");
    tell();
  }

  // A factor of a term: a number of a step can be pressed, to go down to its own sum.
  function factor(one) {
    let text = written(one.value), name = /^position/.test(one.text) ? one.text : undefined;
    if (one.text && !name && one.text !== "−1") name = `${one.text} = ${text}`;
    if (one.of) name = model.say(...one.of);
    if (one.learned) name = model.sayLearned(one.learned, one.at);
    if (one.power) text = `e^(${text} − ${written(model.sum(state.path.at(-1).name, state.path.at(-1).at).most)})`;
    if (one.gap !== undefined) text = `(${text} − ${written(one.gap)})²`;
    const signs = one.under ? "÷ " : "× ";
    if (!one.of) return { signs, part: make("span", { title: name ?? "" }, one.text && name !== one.text ? one.text : text), name };
    const button = make("button", { type: "button", "aria-label": `${text}: ${name}`, title: name, "data-step": one.of[0],
      click: () => down(one.of) }, text);
    return { signs, part: button, name };
  }

  function down([name, at]) {
    open([...state.path, { name, at }]);
    panel.querySelector("h4")?.focus();
  }

  function tell(all = false) {
    panel.replaceChildren();
    light(boxOf(model, state.path.at(-1)?.name ?? step().name));
    if (!state.path.length) return;
    const { name, at } = state.path.at(-1), found = model.sum(name, at), value = model.number(name, ...at);
    const way = make("p", { class: "through-way" }, ...state.path.slice(0, -1).flatMap((one, i) =>
      [make("button", { type: "button", click: () => open(state.path.slice(0, i + 1)) }, model.say(one.name, one.at)), " › "]));
    const title = make("h4", { tabindex: "-1" }, `${model.say(name, at)} = ${written(value)}`);
    const part = model.step.get(name)?.part ?? model.steps.find(s => [s.mean, s.spread].includes(name)).part;
    const kinds = {
      sum: `${part}. A sum of ${found.terms.length} terms, the largest first:`,
      relu: `${part}. A sum of ${found.terms.length} terms, the largest first; below zero it becomes zero:`,
      share: `${part}. The marked power, divided by the sum of all ${found.terms.length}:`,
      root: `${part}. The root of a sum of ${found.terms.length} terms, the largest first:`,
    };
    const order = found.terms.map((term, i) => ({ ...term, chosen: found.how === "share" && i === found.chosen }))
      .sort((a, b) => b.chosen - a.chosen || Math.abs(b.value) - Math.abs(a.value));
    const seen = all ? order : order.slice(0, SHOWN), rest = order.slice(seen.length);
    const most = Math.max(...order.map(term => Math.abs(term.value)), 1e-12);
    const rows = seen.map(term => {
      const parts = term.factors.map(factor);
      return make("li", { class: `${term.value < 0 ? "through-below" : "through-above"}${term.chosen ? " through-chosen" : ""}`,
        "data-term": String(term.value), style: `--share: ${Math.round(100 * Math.abs(term.value) / most)}%` },
        make("b", {}, written(term.value)), make("span", { class: "through-rail" }, make("span")),
        make("span", { class: "through-factors" }, ...parts.flatMap(({ signs, part }, i) => [i ? ` ${signs}` : "= ", part])),
        make("small", {}, parts.map(({ name: text }) => text).filter(Boolean).join(" · ")));
    });
    const sum = order.reduce((total, term) => total + term.value, 0), left = rest.reduce((total, term) => total + term.value, 0);
    const ends = [];
    if (rest.length) ends.push(make("p", {}, `The other ${rest.length} together: ${written(left)}. `,
      make("button", { type: "button", class: "through-more", click: () => (tell(true), panel.querySelector("h4").focus()) }, "show all")));
    const result = { sum: `All together: ${written(sum)}.`, relu: `All together: ${written(sum)}${sum < 0 ? ", below zero: 0" : ""}.`,
      share: `All together: ${written(sum)}; the share is ${written(value)}.`, root: `All together: ${written(sum)}; its root is ${written(value)}.` };
    ends.push(make("p", { class: "through-total", "data-total": String(model.total(found)), "data-value": String(value) }, result[found.how]));
    if (state.path.length > 1) panel.append(way);
    panel.append(title, make("p", {}, kinds[found.how]), make("ol", {}, ...rows), ...ends);
  }

  // The number that is pointed at or has the focus stands below the strip.
  for (const kind of ["pointerover", "focusin"])
    strip.addEventListener(kind, event => (now.textContent = event.target.closest("button")?.title ?? now.textContent));

  // Arrow keys walk over the strip; Escape goes back up a sum.
  strip.addEventListener("keydown", event => {
    const all = [...strip.children], at = all.indexOf(event.target);
    if (at < 0) return;
    const top = all[0].offsetTop, across = strip.classList.contains("through-bars") ? 1
      : Math.max(1, all.filter(cell => cell.offsetTop === top).length);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + across, ArrowUp: at - across, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const cell = all[Math.max(0, Math.min(all.length - 1, to))];
    all.forEach(one => one.setAttribute("tabindex", one === cell ? "0" : "-1"));
    cell.focus();
  });
  panel.addEventListener("keydown", event => {
    if (event.key !== "Escape" || state.path.length < 2) return;
    open(state.path.slice(0, -1));
    panel.querySelector("h4").focus();
  });
  // A chain of numbers, the first of which is a number of the strip.
  function enter(path) {
    const { name, at } = path[0];
    state.at = model.steps.findIndex(one => one.name === name);
    state.row[step().rows] = at.at(-2);
    if (at.length > 2) state.head = at[0];
    draw();
    open(path);
  }

  draw();
  return { go, open, enter, state };
}

// --- in the page ------------------------------------------------------------------------

const box = typeof document === "undefined" ? null : document.querySelector(".through[data-version]:not([data-ready])");
if (box) {
  box.dataset.ready = "";
  const { version, megabytes } = box.dataset, place = name => new URL(`${name}/`, import.meta.url).href;
  const status = make("p", { class: "through-told", role: "status" },
    `It loads ${megabytes} MB: the model's learned numbers, and what they make of the sentence.`);
  let figure = null;
  async function begin() {
    let going = (start.disabled = true);
    try {
      const model = await Model.load(place("through-the-model"), version, bytes => {
        if (going) status.textContent = `Loading: ${Math.min(megabytes, Math.floor(bytes / 1e6))} of ${megabytes} MB …`;
      });
      const stage = make("div", { class: "through-stage" });
      figure = show(stage, model);
      box.replaceChildren(stage);
      stage.querySelector("select").focus();
    } catch (error) {
      status.textContent = error.message;
      going = start.disabled = false;
    }
  }
  const start = make("button", { type: "button", class: "through-go", click: begin }, "Open every number");
  box.querySelector("p")?.remove(); // what is said where no scripts run
  box.append(start, status);

  // A stop of the tour opens its number here; the map is lit where the reader is.
  for (const button of document.querySelectorAll("[data-open]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      box.scrollIntoView({ block: "start" });
      if (!figure && !start.disabled) await begin();
      if (!figure) return;
      figure.enter(JSON.parse(button.dataset.open).map(([name, at]) => ({ name, at })));
      box.querySelector(".through-sum h4").focus();
    });
  }
  const map = document.querySelector(".tour-map"), seen = new Map();
  const stops = JSON.parse(map?.dataset.stops ?? "{}");
  const watch = new IntersectionObserver(entries => {
    for (const entry of entries) seen.set(entry.target.id, entry.isIntersecting);
    const now = Object.keys(stops).find(id => seen.get(id));
    if (now) light(...stops[now]);
  }, { rootMargin: "-25% 0px -45% 0px" });
  for (const id of Object.keys(stops)) {
    const section = document.getElementById(id);
    if (section) watch.observe(section);
  }
}
