// The front page's essay: one stage, whose marks move from frame to frame as one scrolls
// or steps, and a translator whose words show what they look at.
//
// The frames come from book/_ext/essay.py: lists of marks, each with a name. A mark that
// is in two frames moves; others come and go. Without this script each scene shows its
// still picture.
(() => {
  "use strict";

  const SCRIPT = document.currentScript.src;
  const { make } = window.literate; // make.js
  const STILL = matchMedia("(prefers-reduced-motion: reduce)");
  const MOVE = 650, REST = 350; // milliseconds: a move, and the pause between two
  const NS = "http://www.w3.org/2000/svg";

  // --- marks ------------------------------------------------------------------------------

  const svg = (tag, attributes = {}) => {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  function barsOf(values, x, y, w, h) {
    const step = h / values.length, f = number => number.toFixed(1);
    const axis = Math.min(0.7, w / 20).toFixed(2); // where the numbers are zero
    let path = `M${f(x)} ${f(y)}h${axis}v${f(h)}h-${axis}z`;
    values.forEach((value, n) => {
      const reach = (value * w) / 2;
      path += `M${f(x)} ${f(y + n * step + step * 0.1)}h${f(reach)}v${f(step * 0.8)}h${f(-reach)}z`;
    });
    return path;
  }

  const curve = ({ x1, y1, x2, y2, b1, b2 }) => `M${x1} ${y1}C${x1} ${y1 + b1} ${x2} ${y2 + b2} ${x2} ${y2}`;

  // How a mark is made, and brought up to its numbers.
  const KINDS = {
    text: ["text", (e, m) => {
      set(e, { x: m.x, y: m.y, "font-size": m.s, "text-anchor": m.a });
      if (e.textContent !== m.txt) e.textContent = m.txt;
    }],
    rect: ["rect", (e, m) => set(e, { x: m.x, y: m.y, width: m.w, height: m.h, rx: m.rx })],
    arc: ["path", (e, m) => set(e, { d: curve(m), "stroke-width": m.w })],
    strip: ["path", (e, m) => set(e, { d: barsOf(m.values, m.x, m.y, m.w, m.h) })],
    dot: ["circle", (e, m) => set(e, { cx: m.x, cy: m.y, r: m.r })],
    clock: ["g", (e, m) => {
      if (!e.firstChild) e.append(svg("circle"), svg("path"));
      set(e.firstChild, { cx: m.x, cy: m.y, r: m.r });
      set(e.lastChild, { d: `M${m.x} ${m.y}L${m.x + m.r * Math.sin(m.turn)} ${m.y - m.r * Math.cos(m.turn)}` });
    }],
    path: ["path", (e, m) => set(e, { d: m.d, pathLength: 1, "stroke-dasharray": `${m.part.toFixed(3)} 2` })],
  };

  function set(element, attributes) {
    for (const [name, value] of Object.entries(attributes))
      element.setAttribute(name, typeof value === "number" ? Math.round(value * 100) / 100 : value);
  }

  const COUNTED = /^([−]?)(\d[\d,]*)(\.\d+)?( %)?$/;
  const valueOf = text => {
    const found = COUNTED.exec(text);
    return found && Number((found[1] ? "-" : "") + found[2].replaceAll(",", "") + (found[3] ?? ""));
  };

  // A number that moves counts to its new value.
  function counted(from, to, t) {
    const [a, b] = [valueOf(from), valueOf(to)];
    if (t >= 1 || from === to) return to;
    if (a === null || b === null) return t < 0.5 ? from : to;
    const [, , , decimals = "", unit = ""] = COUNTED.exec(to);
    return (a + (b - a) * t).toFixed(Math.max(0, decimals.length - 1)).replace("-", "−") + unit;
  }

  function between(a, b, t) {
    const mark = { ...b };
    for (const [name, value] of Object.entries(b)) {
      if (typeof value === "number") mark[name] = a[name] + (value - a[name]) * t;
      else if (name === "txt") mark.txt = counted(a.txt, value, t);
      else if (name === "values") mark.values = value.map((v, i) => a.values[i] + (v - a.values[i]) * t);
    }
    return mark;
  }

  // --- the stage --------------------------------------------------------------------------

  class Stage {
    constructor({ W, H }, { order, strips }) {
      this.strips = strips;
      this.element = svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "essay-svg", "aria-hidden": "true" });
      this.layers = {};
      const kinds = Object.entries(order).sort((a, b) => a[1] - b[1]);
      for (const [kind] of kinds) this.element.append((this.layers[kind] = svg("g")));
      this.now = new Map(); // name to { element, mark }
    }

    wanted(frame) {
      return new Map(frame.map(mark => {
        const full = { o: 1, ...mark };
        if (mark.t === "strip") full.values = this.strips[mark.v];
        return [`${mark.t} ${mark.k}`, full];
      }));
    }

    // Move to a frame in so many milliseconds; at once if none.
    go(frame, milliseconds) {
      cancelAnimationFrame(this.next);
      const wanted = this.wanted(frame), moves = [];
      for (const [name, mark] of wanted) {
        let there = this.now.get(name);
        const from = there?.mark ?? { ...mark, o: 0, ...(mark.t === "arc" ? { x2: mark.x1, y2: mark.y1 } : {}) };
        if (!there) {
          there = { element: svg(KINDS[mark.t][0]), mark: from };
          this.layers[mark.t].append(there.element);
          this.now.set(name, there);
        }
        there.element.setAttribute("class", mark.t === "arc" || mark.t === "strip" ? `${mark.t} ${mark.c}` : mark.c);
        moves.push({ there, from, to: mark });
      }
      for (const [name, there] of this.now)
        if (!wanted.has(name)) moves.push({ there, from: there.mark, to: { ...there.mark, o: 0 }, gone: name });
      const start = performance.now();
      const draw = now => {
        const part = milliseconds ? Math.min(1, (now - start) / milliseconds) : 1;
        const t = part < 0.5 ? 4 * part ** 3 : 1 - (2 - 2 * part) ** 3 / 2;
        for (const { there, from, to, gone } of moves) {
          const mark = (there.mark = part === 1 ? to : between(from, to, Math.max(0, t)));
          KINDS[mark.t][1](there.element, mark);
          if (mark.o < 1) there.element.setAttribute("opacity", mark.o.toFixed(2));
          else there.element.removeAttribute("opacity");
          if (part === 1 && gone) {
            there.element.remove();
            this.now.delete(gone);
          }
        }
        if (part < 1) this.next = requestAnimationFrame(draw);
      };
      if (milliseconds) this.next = requestAnimationFrame(draw);
      else draw(start);
    }
  }

  // --- scrolling and stepping --------------------------------------------------------------

  function begin(data) {
    const scenes = [...document.querySelectorAll(".scene")];
    const sections = scenes.map(scene => scene.closest("section"));
    const beats = scenes.flatMap(scene => [...scene.querySelectorAll(":scope > .beat")].map((text, n) =>
      ({ text, n, scene: scene.dataset.scene, title: scene.closest("section").querySelector("h2") })));
    const prose = make("div", { class: "essay-text" });
    const back = make("button", { type: "button", "aria-label": "Previous step", click: () => step(-1) }, "←");
    const on = make("button", { type: "button", "aria-label": "Next step", click: () => step(1) }, "→");
    const again = make("button", { type: "button", class: "essay-again", "aria-label": "Play again",
      click: () => play(true) }, "↻");
    const where = make("span", { class: "essay-where" });
    const spoken = make("p", { class: "essay-hidden", "aria-live": "polite" });
    const canvas = make("div", { class: "essay-canvas" });
    const hint = make("span", { class: "essay-hint" }, "scroll, or press →");
    const box = make("div", { class: "essay-stage" },
      make("div", { class: "essay-bar", role: "group", "aria-label": "Steps of the essay" }, back, where, on, again, hint),
      canvas, spoken);
    const flow = make("div", { class: "essay-flow" });
    sections[0].before(flow);
    flow.append(box, prose);
    prose.append(...sections);

    let at = -1, stage, layout, timers = [], heading = null;

    function fit() {
      const header = document.querySelector(".bd-header-article");
      flow.style.setProperty("--essay-top", `${header?.offsetHeight ?? 0}px`);
      const now = flow.clientWidth >= 820 ? "wide" : "narrow";
      if (now === layout) return;
      layout = now;
      flow.dataset.layout = layout;
      stage = new Stage(data[layout], data);
      canvas.replaceChildren(stage.element);
      if (at >= 0) play(false);
    }

    function play(moves) {
      timers.forEach(clearTimeout);
      timers = [];
      const frames = data[layout].scenes[beats[at].scene][beats[at].n];
      const still = !moves || STILL.matches;
      if (still) return stage.go(frames.at(-1), moves && !STILL.matches ? MOVE : 0);
      const pause = frames.length > 4 ? REST + 250 : REST;
      frames.forEach((frame, n) => {
        if (n === 0) stage.go(frame, MOVE);
        else timers.push(setTimeout(() => stage.go(frame, MOVE), n * (MOVE + pause)));
      });
    }

    function show(index) {
      if (index === at) return;
      const forward = index > at;
      beats[at]?.text.classList.remove("now");
      at = index;
      const { text, scene, n, title } = beats[at];
      text.classList.add("now");
      flow.dataset.scene = scene;
      flow.dataset.beat = n;
      where.textContent = `${at + 1} of ${beats.length}`;
      back.disabled = at === 0;
      on.setAttribute("aria-disabled", String(at === beats.length - 1));
      const frames = data[layout].scenes[scene][n];
      again.hidden = frames.length < 2;
      hint.hidden = at > 0;
      if (forward) play(true);
      else {
        timers.forEach(clearTimeout);
        stage.go(frames.at(-1), STILL.matches ? 0 : MOVE);
      }
    }

    // The line that a paragraph crosses to be the one that is shown.
    function line() {
      if (layout === "wide") return innerHeight * 0.55;
      const { bottom } = box.getBoundingClientRect();
      return Math.max(bottom, 0) + (innerHeight - Math.max(bottom, 0)) * 0.55;
    }

    function look() {
      if (heading !== null) return;
      const reached = line();
      let index = 0;
      beats.forEach(({ text }, i) => text.getBoundingClientRect().top < reached && (index = i));
      show(index);
    }

    function step(by) {
      const index = at + by;
      if (index < 0 || index >= beats.length) return;
      show(index);
      spoken.textContent = beats[index].text.textContent;
      const { text, n, title } = beats[index], box = text.getBoundingClientRect();
      // The heading of a section's first paragraph is seen, too.
      const above = n || !title ? 0 : box.top - title.getBoundingClientRect().top + 8;
      const near = line() - (line() - stageBottom()) * 0.75;
      const top = layout === "wide" ? innerHeight * 0.4 : Math.min(Math.max(near, stageBottom() + above), line() - 8);
      clearTimeout(heading);
      heading = setTimeout(() => (heading = null), STILL.matches ? 60 : 900);
      scrollBy({ top: box.top - top, behavior: STILL.matches ? "instant" : "smooth" });
    }

    const stageBottom = () => Math.max(box.getBoundingClientRect().bottom, 0);

    let asked = false;
    addEventListener("scroll", () => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => ((asked = false), look()));
    }, { passive: true });
    for (const event of ["wheel", "touchmove"])
      addEventListener(event, () => (clearTimeout(heading), (heading = null)), { passive: true });
    addEventListener("resize", () => (fit(), look()));
    addEventListener("keydown", event => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.defaultPrevented) return;
      if (event.target.closest("input, textarea, select, [contenteditable], [role=tablist], dialog")) return;
      const { top, bottom } = flow.getBoundingClientRect();
      if (bottom < innerHeight * 0.3 || top > innerHeight) return;
      event.preventDefault();
      step(event.key === "ArrowRight" ? 1 : -1);
    });
    let touch = null;
    box.addEventListener("touchstart", ({ touches: [one] }) => (touch = [one.clientX, one.clientY]), { passive: true });
    box.addEventListener("touchend", ({ changedTouches: [one] }) => {
      if (!touch) return;
      const [x, y] = [one.clientX - touch[0], one.clientY - touch[1]];
      touch = null;
      if (Math.abs(x) > 40 && Math.abs(x) > 1.5 * Math.abs(y)) step(x < 0 ? 1 : -1);
    });
    fit();
    look();
    flow.dataset.ready = "";
  }

  // --- the translator ----------------------------------------------------------------------

  const percent = share => `${Math.round(100 * share)} %`;

  function live(box) {
    if (!("version" in box.dataset)) return;
    const about = box.querySelector("p");
    if (location.protocol === "file:") {
      about.textContent = "Opened as a file, this page cannot load the model. Open the book through a server " +
        "(make serve starts one).";
      return;
    }
    const { version, megabytes, text, layer, head } = box.dataset, begun = JSON.parse(box.dataset.start);
    const field = make("input", { type: "text", id: "essay-input", maxlength: "120", lang: "en", value: text,
      autocomplete: "off", spellcheck: "true", focus: warm });
    const go = make("button", { type: "submit" }, "Translate");
    const form = make("form", { submit: event => (event.preventDefault(), start()) },
      make("label", { for: "essay-input" }, "Your English sentence"), make("div", {}, field, go));
    const status = make("p", { class: "essay-status", role: "status" });
    const spoken = make("p", { class: "essay-hidden", "aria-live": "polite", lang: "de" });
    const drawing = make("div", { class: "essay-lines" });
    about.textContent = `The model and what runs it, ${megabytes} MB, load when you touch the field. Nothing that ` +
      "you type leaves your browser.";
    box.replaceChildren(form, status, drawing, spoken, about);

    let worker, ready = false, waiting = null, busy = false, found = null, chosen = 0;

    function warm() {
      if (worker) return;
      worker = new Worker(new URL(`translator_engine.js?v=${version}`, SCRIPT), { type: "module" });
      worker.onmessage = ({ data }) => hear(data);
      worker.onerror = event => {
        event.preventDefault();
        fail("The translator cannot be started in this browser; a newer one can.");
      };
      ask(""); // loads the model
    }

    function ask(words) {
      busy = true;
      worker.postMessage({ text: words, beamSize: 4, wait: 0, version });
    }

    function start() {
      if (!field.value.trim()) return void (status.textContent = "Type a sentence first.");
      warm();
      waiting = field.value;
      status.textContent = ready ? "Translating …" : "Loading the model …";
      if (!busy) next();
    }

    function next() {
      busy = false;
      if (waiting === null) return;
      const words = waiting;
      waiting = null;
      ask(words);
    }

    function fail(words) {
      worker?.terminate();
      worker = undefined;
      ready = busy = false;
      waiting = null;
      status.textContent = words;
    }

    function hear({ loaded, ready: isReady, result, trouble }) {
      if (loaded !== undefined) {
        if (!ready) status.textContent = `Loading the model: ${Math.min(megabytes, Math.floor(loaded / 1e6))} of ${megabytes} MB …`;
      } else if (isReady) {
        if (!ready) status.textContent = waiting === null ? "Ready." : "Translating …";
        ready = true;
      } else if (trouble !== undefined) {
        fail(trouble);
      } else if (result) {
        const told = result.sentences[0];
        if (told) {
          found = read(told);
          chosen = 0;
          draw();
          spoken.textContent = result.line;
          status.textContent = result.sentences.length > 1 ? "Drawn is the first sentence." : "";
        } else if (result.line) status.textContent = result.line;
        next();
      }
    }

    // Two lines of words, broken where they have no room; lines between them.
    function place(words, width, size, top) {
      let x = 0, row = 0;
      const room = words.reduce((sum, word) => sum + word.length * 0.58 + 0.9, 0) * size;
      if (room > width && room < 1.35 * width) size *= width / room - 0.01;
      const placed = words.map(word => {
        const own = (word.length * 0.58 + 0.9) * size;
        if (x + own > width && x > 0) (x = 0), row++;
        x += own;
        return { word, x: x - own / 2, row };
      });
      return { placed, size, rows: row + 1, at: i => top + i * size * 1.9 };
    }

    // Of the engine's answer: tokens, words, and for each word its shares.
    function read({ source, found: [best] }) {
      const words = best.words.filter(word => !word.gone);
      return {
        source: source.map(piece => (piece === "</s>" ? "end" : piece.replace("▁", ""))),
        words: words.map(word => word.text),
        shares: words.map(({ places }) => source.map((_, j) =>
          places.reduce((sum, i) => sum + best.looked[i][layer][head][j], 0) / places.length)),
      };
    }

    function draw() {
      const { source, words, shares } = found;
      const width = Math.max(280, Math.min(drawing.clientWidth, 720)), size = width < 500 ? 15 : 19;
      const English = place(source, width, size, size);
      const below = English.rows * size * 1.9 + (width < 500 ? 80 : 110);
      const German = place(words, width, size, below);
      const height = below + German.rows * size * 1.9 - size * 0.6;
      const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "essay-svg", role: "group",
        "aria-label": "The translation; each word tells what it looks at" });
      const lines = svg("g");
      picture.append(lines);
      English.placed.forEach(({ word, x, row }) => {
        const text = svg("text", { x, y: English.at(row), "font-size": English.size, "text-anchor": "middle", class: "word encoder", lang: "en" });
        text.textContent = word;
        picture.append(text);
      });
      const buttons = German.placed.map(({ word, x, row }, n) => {
        const text = svg("text", { x, y: German.at(row), "font-size": German.size, "text-anchor": "middle", lang: "de",
          tabindex: "0", role: "button" });
        text.textContent = word;
        const pick = () => ((chosen = n), paint());
        for (const event of ["mouseenter", "focus", "click"]) text.addEventListener(event, pick);
        text.addEventListener("keydown", event => {
          const to = { ArrowRight: n + 1, ArrowLeft: n - 1 }[event.key];
          if (buttons[to]) event.preventDefault(), buttons[to].focus();
        });
        picture.append(text);
        return text;
      });

      function paint() {
        lines.replaceChildren();
        shares.forEach((row, n) => row.forEach((share, j) => {
          if (share < 0.05) return;
          const a = German.placed[n], b = English.placed[j];
          const y1 = German.at(a.row) - size, y2 = English.at(b.row) + size * 0.45;
          lines.append(svg("path", { d: curve({ x1: a.x, y1, x2: b.x, y2, b1: (y2 - y1) / 2, b2: (y1 - y2) / 2 }),
            "stroke-width": Math.max(1, 7 * share), class: `arc across${n === chosen ? "" : " faint"}` }));
        }));
        buttons.forEach((text, n) => {
          text.setAttribute("class", `word decoder${n === chosen ? " lit" : ""}`);
          const order = [...source.keys()].sort((i, j) => shares[n][j] - shares[n][i]).slice(0, 2);
          text.setAttribute("aria-label", `${words[n]}: looks at ` +
            order.map(j => `${English.placed[j].word} ${percent(shares[n][j])}`).join(", "));
        });
      }
      paint();
      drawing.replaceChildren(picture);
    }
    found = begun;
    draw();
    addEventListener("resize", draw);
  }

  // --- both -----------------------------------------------------------------------------------

  const frames = document.getElementById("essay-frames");
  if (frames) begin(JSON.parse(frames.textContent));
  document.querySelectorAll(".essay-live").forEach(live);
})();
