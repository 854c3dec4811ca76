// The page that translates: what the reader types, sees and chooses.
//
// Nothing is loaded before the first translation. Then translator_engine.js runs in a web
// worker, which loads the model and ONNX Runtime from the book's own files.
(() => {
  "use strict";

  const SCRIPT = document.currentScript.src;
  const box = document.querySelector(".translator");
  const about = box?.querySelector(".translator-about");
  if (!box || !("version" in box.dataset)) return; // built without the model: it is said
  if (location.protocol === "file:") {
    about.textContent =
      "Opened as a file, this page cannot load the model. Open the book through a server " +
      "(make serve starts one), and you can translate here.";
    return;
  }

  const EXAMPLES = [
    "We have to wait until tomorrow.",
    "The old man who lives next door sold his house.",
    "Why didn't you tell me that you were coming?",
    "Can you help me carry these boxes upstairs?",
    "The attention mechanism weighs every word of the sentence.",
  ];
  const SLOWLY = 350; // milliseconds between two steps

  // --- small things -----------------------------------------------------------------------

  const { make } = window.literate; // make.js

  function choice(label, options, change = () => {}) {
    const select = make("select", { change }, ...options.map(([value, text]) => make("option", { value }, text)));
    return { select, label: make("label", {}, `${label} `, select) };
  }

  const percent = share => `${Math.round(100 * share)} %`;
  const plain = piece => (piece === "</s>" ? "end" : piece);
  const mean = rows => Array.from(rows[0], (_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);

  // --- what stands in the page ------------------------------------------------------------

  const area = make("textarea", {
    id: "translator-text", rows: "2", maxlength: "500", lang: "en", spellcheck: "true",
    "aria-describedby": "translator-keys",
    keydown: event => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      start();
    },
  });
  area.value = EXAMPLES[0];
  const startButton = make("button", { type: "button", class: "translator-go", click: start }, "Translate");
  const stopButton = make("button", { type: "button", hidden: true, click: stop }, "Stop");
  const beam = choice("Beam", [["4", "4"], ["1", "1: greedy"]]);
  const pace = choice("Pace", [["0", "full speed"], [String(SLOWLY), "word by word"]]);
  const status = make("p", { class: "translator-status", role: "status" });
  const spoken = make("p", { class: "translator-hidden", "aria-live": "polite", lang: "de" });
  const output = make("p", { class: "translator-output", lang: "de", role: "group", "aria-label": "Translation" });
  const read = make("p", { class: "translator-read", lang: "en" });
  const told = make("p", { class: "translator-told", "aria-live": "polite" });
  const sentence = choice("Sentence", [], () => show(Number(sentence.select.value)));
  const layer = choice("Layer", [], () => draw());
  const head = choice("Head", [], () => draw());
  const map = make("div", {
    class: "translator-map", tabindex: "0", role: "region",
    "aria-label": "What each word of the translation looked at",
  });
  const key = make("p", { class: "translator-keys" },
    "Rows: words of the translation, the queries. Columns: tokens of the English text, the keys. The stronger " +
      "the color, the more a word looked there; each row adds up to 100 %.");
  const candidates = make("div", { class: "translator-candidates" });
  const result = make(
    "div", { class: "translator-result", hidden: true },
    make("p", { class: "translator-label" }, "German"), output, told, read,
    make("div", { class: "translator-bar" }, sentence.label, layer.label, head.label), map, key, candidates,
  );
  const examples = EXAMPLES.map(text =>
    make("button", { type: "button", lang: "en", click: () => ((area.value = text), start()) }, text),
  );
  box.replaceChildren(
    about,
    make("label", { for: "translator-text", class: "translator-label" }, "English"),
    area,
    make("p", { class: "translator-keys", id: "translator-keys" },
      "Enter translates, Shift+Enter begins a new line."),
    make("div", { class: "translator-bar" }, startButton, stopButton, beam.label, pace.label),
    status, spoken, result,
    make("div", { class: "translator-examples", role: "group", "aria-label": "Examples" },
      make("p", { class: "translator-label" }, "Or take one of these"), ...examples),
  );
  about.textContent =
    `The first translation loads ${box.dataset.megabytes} MB: the model and what runs it. All of it comes ` +
    "from this site and runs in your browser; what you type goes nowhere.";

  // --- running ----------------------------------------------------------------------------

  let worker, ready = false, busy = false, sentences = [], after = "", chosen = null, at = 0, drawing;

  function startWorker() {
    ready = false;
    const address = new URL(`translator_engine.js?v=${box.dataset.version}`, SCRIPT);
    const own = (worker = new Worker(address, { type: "module" }));
    own.onmessage = ({ data }) => own === worker && busy && hear(data);
    own.onerror = event => {
      event.preventDefault();
      if (own === worker) halt("The translator cannot be started in this browser; a newer one can.");
    };
  }

  function start() {
    if (busy) return;
    const text = area.value;
    if (!text.trim()) {
      status.textContent = "Type a sentence in English first.";
      area.focus();
      return;
    }
    busy = true;
    [sentences, after, chosen, at] = [[], "", null, 0];
    startButton.setAttribute("aria-disabled", "true");
    stopButton.hidden = false;
    spoken.textContent = "";
    result.classList.add("translator-old"); // until something new stands there
    status.textContent = ready ? "Translating …" : "Loading the model …";
    if (!worker) startWorker();
    const { version } = box.dataset;
    const wait = Number(pace.select.value);
    worker.postMessage({ text, beamSize: Number(beam.select.value), wait, version });
  }

  function stop() {
    if (!busy) return;
    if (ready) worker.postMessage({ stop: true });
    else halt("Stopped: nothing is loaded.");
    startButton.focus();
  }

  function done(words) {
    busy = false;
    if (result.classList.contains("translator-old")) result.hidden = true;
    startButton.removeAttribute("aria-disabled");
    stopButton.hidden = true;
    status.textContent = words;
  }

  function halt(words) {
    worker?.terminate();
    worker = undefined;
    ready = false;
    done(words);
  }

  function hear({ loaded, ready: isReady, seen, result: found, milliseconds, trouble }) {
    if (loaded !== undefined) {
      const all = Number(box.dataset.megabytes);
      const now = Math.min(all, Math.floor(loaded / 1e6));
      if (!ready) status.textContent = `Loading the model: ${now} of ${all} MB …`;
    } else if (isReady) {
      ready = true;
      status.textContent = "Translating …";
    } else if (trouble !== undefined) {
      done(trouble);
    } else if (seen) {
      sentences[seen.sentence] = { source: seen.source, found: [seen.best] };
      const old = drawing;
      drawing = seen.sentence;
      if (old === undefined) setTimeout(drawSeen, 40); // several steps may come meanwhile
    } else {
      ({ sentences, after } = found);
      finish(found, milliseconds);
    }
  }

  function drawSeen() {
    const i = drawing;
    drawing = undefined;
    if (busy && sentences[i]) show(i);
  }

  function finish(found, milliseconds) {
    const notes = [`Translated in ${(milliseconds / 1000).toFixed(2)} s.`];
    if (found.cut) notes.push("A sentence was too long for the model and was cut.");
    if (!sentences.length) notes[0] = "Nothing to translate: the model has not learned these characters. They are copied.";
    done(notes.join(" "));
    if (sentences.length) show(0);
    else showCopy(found.line);
    spoken.textContent = found.line;
  }

  // --- the result -------------------------------------------------------------------------

  function showCopy(line) {
    result.hidden = false;
    result.classList.remove("translator-old");
    output.replaceChildren(line);
    for (const part of [told, read, map, candidates]) part.replaceChildren();
    key.hidden = true;
    for (const { label } of [sentence, layer, head]) label.hidden = true;
  }

  function fill({ select, label }, options) {
    const before = select.value;
    select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
    if (options.some(([value]) => value === before)) select.value = before;
    label.hidden = options.length < 2;
  }

  function numbered(count, all) {
    const one = [...Array(count).keys()].map(i => [String(i), String(i + 1)]);
    return count > 1 ? [["all", all], ...one] : one;
  }

  function show(i) {
    at = i;
    chosen = null;
    result.hidden = key.hidden = false;
    result.classList.remove("translator-old");
    fill(sentence, sentences.map((_, n) => [String(n), `${n + 1} of ${sentences.length}`]));
    sentence.select.value = String(i);
    const shape = sentences[i].found[0].looked[0] ?? [[]];
    const first = !layer.select.options.length;
    fill(layer, numbered(shape.length, "mean of all"));
    fill(head, numbered(shape[0].length, "mean of all"));
    if (first) layer.select.value = String(shape.length - 1);
    writeWords();
    writeCandidates();
    draw();
  }

  // The words of all sentences; those of the chosen sentence can be pressed.
  function writeWords() {
    const parts = sentences.flatMap(({ before, found: [best] }, i) => [
      before ?? (i ? " " : ""),
      ...best.words.flatMap((word, n) => {
        const label = make("button", {
          type: "button", class: "translator-word", "aria-pressed": "false",
          "data-at": i === at ? n : "-", click: () => pick(i, n),
        }, word.text);
        return word.gone ? [] : [word.before, label];
      }),
      best.after,
    ]);
    output.replaceChildren(...parts, after);
  }

  function pick(i, n) {
    if (i !== at) show(i);
    chosen = chosen === n ? null : n;
    draw();
    output.querySelector(`[data-at="${n}"]`)?.focus();
  }

  // Source pieces' shares, for a token: of the layer and head that are selected.
  function sharesOf(token) {
    const layers = layer.select.value === "all" ? token : [token[Number(layer.select.value)]];
    const heads = layers.flatMap(one => (head.select.value === "all" ? one : [one[Number(head.select.value)]]));
    return mean(heads);
  }

  function queries() {
    const { words, looked } = sentences[at].found[0];
    const all = words.map(word => ({ text: word.text, rows: word.places.map(i => looked[i]) }));
    const ended = looked.slice(words.flatMap(word => word.places).length);
    if (ended.length) all.push({ text: "end", rows: ended });
    return all.map(({ text, rows }) => ({ text, shares: mean(rows.map(sharesOf)) }));
  }

  function shade(element, share) {
    element.style.setProperty("--share", `${Math.round(100 * share)}%`);
    return element;
  }

  function draw() {
    const { source } = sentences[at], words = queries();
    for (const button of output.querySelectorAll(".translator-word"))
      button.setAttribute("aria-pressed", String(button.dataset.at === String(chosen)));
    const top = make("tr", {}, make("td"), ...source.map(piece =>
      make("th", { scope: "col", lang: "en" }, make("span", {}, plain(piece))),
    ));
    const rows = words.map(({ text, shares }, n) =>
      make("tr", { class: n === chosen ? "translator-chosen" : "" }, make("th", { scope: "row", lang: "de" }, text),
        ...source.map((piece, i) => shade(make("td", { title: `${text} ← ${plain(piece)}: ${percent(shares[i])}` },
          make("span", { class: "translator-hidden" }, percent(shares[i]))), shares[i]))),
    );
    map.replaceChildren(make("table", {}, make("thead", {}, top), make("tbody", {}, ...rows)));
    tell(source, words);
  }

  function tell(source, words) {
    const word = words[chosen];
    read.replaceChildren();
    if (!word) {
      told.textContent = "Press a word to see what the model looked at when it wrote it.";
      return;
    }
    const order = [...source.keys()].sort((i, j) => word.shares[j] - word.shares[i]).slice(0, 3);
    const most = order.map(i => `${plain(source[i])} ${percent(word.shares[i])}`).join(", ");
    told.textContent = `Writing “${word.text}”, it looked most at: ${most}.`;
    read.append(...source.map((piece, i) => shade(make("span", {}, plain(piece)), word.shares[i])));
  }

  function writeCandidates() {
    const { found } = sentences[at];
    candidates.replaceChildren();
    if (busy || found.length < 2) return;
    const number = (value, digits) => make("td", {}, value.toFixed(digits));
    const rows = found.map(one =>
      make("tr", {}, number(one.score, 2), number(100 * Math.exp(one.logProb), 1), make("td", { lang: "de" }, one.text)),
    );
    const heads = ["score", "probability, %", "candidate"].map(text => make("th", { scope: "col" }, text));
    candidates.append(make("table", {},
      make("caption", {}, "The translations that the search kept, best first."),
      make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows),
    ));
  }
})();
