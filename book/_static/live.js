// Code cells that the reader can change and run in the page, with Pyodide.
//
// In the page, this script makes each cell with the class "live" an editor with a Run
// button. At the first Run it starts itself once more as a web worker, which loads
// Python and runs cells there: the page stays alive, and a run is stopped by ending the
// worker. live_runner.py decides which earlier cells a cell needs, and runs them.
// Changed texts and solved exercises are kept in the browser's localStorage.
(() => {
  "use strict";

  // --- in the worker ------------------------------------------------------------------

  async function loadPython() {
    const place = name => new URL(name, self.location.href).href;
    const json = async name => (await fetch(place(name))).json();
    const { loadPyodide } = await import(place("pyodide/pyodide.mjs"));
    // Pyodide's packages are not served here: forget them, so that importing one says so.
    const lock = json("pyodide/pyodide-lock.json").then(all => ({ ...all, packages: {} }));
    const [python, files] = await Promise.all([
      loadPyodide({ indexURL: place("pyodide/"), lockFileContents: lock }),
      json("live.json"),
    ]);
    for (const [name, text] of Object.entries(files)) {
      const path = `/live/${name}`;
      python.FS.mkdirTree(path.slice(0, path.lastIndexOf("/")));
      python.FS.writeFile(path, text);
    }
    python.runPython("import sys; sys.path.insert(0, '/live')");
    return python.pyimport("live_runner").run_json;
  }

  function serveRuns() {
    const loaded = loadPython();
    self.onmessage = async ({ data }) => {
      try {
        const run = await loaded;
        self.postMessage({ ready: true });
        const result = run(JSON.stringify(data.cells), data.at, text => self.postMessage({ text }));
        self.postMessage({ result: JSON.parse(result) });
      } catch (error) {
        self.postMessage({ broken: String(error).slice(-400) });
      }
    };
  }

  if (typeof document === "undefined") {
    serveRuns();
    return;
  }

  // --- in the page: what is remembered ------------------------------------------------

  const SCRIPT = document.currentScript.src;
  const EDITS = `literate-edits ${location.pathname}`; // original text -> changed text
  const EXERCISES = "literate-exercises"; // exercise number -> true where solved

  function recall(store) {
    try {
      return JSON.parse(localStorage.getItem(store)) || {};
    } catch {
      return {}; // private browsing, or not ours
    }
  }

  function remember(store, key, value) {
    const all = recall(store);
    if (value === undefined) delete all[key];
    else all[key] = value;
    try {
      localStorage.setItem(store, JSON.stringify(all));
    } catch {
      // Private browsing, or no room: it lasts as long as the page is open.
    }
  }

  // --- small things -------------------------------------------------------------------

  const { make } = window.literate; // make.js

  const KEYWORDS =
    "and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|" +
    "from|global|if|import|in|is|lambda|match|nonlocal|not|or|pass|raise|return|try|while|" +
    "with|yield|None|True|False";
  const LONG_STRING = /"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)/.source;
  const STRING = /"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?/.source;
  // The classes are those of the page's own code colors.
  const TOKENS = new RegExp(
    [
      "(?<c1>#.*)",
      `(?<s2>[rbfRBF]{0,2}(?:${LONG_STRING}|${STRING}))`,
      "(?<mf>\\b\\d[\\w.]*)",
      `\\b(?<k>${KEYWORDS})\\b`,
    ].join("|"),
    "g",
  );

  function colored(text) {
    const parts = [];
    let end = 0;
    for (const match of text.matchAll(TOKENS)) {
      const kind = Object.keys(match.groups).find(name => match.groups[name] !== undefined);
      parts.push(text.slice(end, match.index), make("span", { class: kind }, match[0]));
      end = match.index + match[0].length;
    }
    return [...parts, text.slice(end)];
  }

  // "cell 1" or "cells 1, 4–8 and 10", with links.
  function cellLinks(numbers) {
    const rows = [];
    for (const at of numbers) {
      const row = rows.at(-1);
      if (row && row[1] === at - 1) row[1] = at;
      else rows.push([at, at]);
    }
    const link = at => make("a", { href: `#live-${at + 1}` }, String(at + 1));
    const parts = rows.flatMap(([first, last], i) => [
      ...(i === 0 ? [] : [i === rows.length - 1 ? " and " : ", "]),
      link(first),
      ...(last > first ? ["–", link(last)] : []),
    ]);
    return [numbers.length > 1 ? "cells " : "cell ", ...parts];
  }

  // --- running ------------------------------------------------------------------------

  const cells = [];
  const queue = []; // cells that run or wait, the running one first
  let worker, ready, busy;

  function startWorker() {
    ready = false;
    const own = (worker = new Worker(SCRIPT, { type: "module" }));
    worker.onmessage = ({ data }) => {
      const cell = queue[0];
      if (own !== worker || !cell) return; // said before it was stopped
      if (data.ready) {
        ready = true;
        cell.began = performance.now();
        cell.say("Running …");
      } else if (data.text !== undefined) {
        cell.print(data.text);
      } else if (data.broken) {
        halt(`Python ended: ${data.broken}. Run starts it afresh.`);
      } else {
        busy = false;
        queue.shift();
        cell.finish(data.result);
        nextRun();
      }
    };
    worker.onerror = event => {
      event.preventDefault();
      halt("Python cannot be started in this browser; a newer one can, or Colab.");
    };
  }

  function nextRun() {
    if (busy || !queue.length) return;
    busy = true;
    if (!worker) startWorker();
    queue[0].say(ready ? "Running …" : "Loading Python: 13 MB, once …");
    worker.postMessage({ cells: cells.map(cell => cell.area.value), at: queue[0].at });
  }

  function halt(words) {
    worker?.terminate();
    worker = undefined;
    busy = false;
    for (const cell of queue.splice(0)) cell.finish(null, words);
  }

  // --- a cell -------------------------------------------------------------------------

  class Cell {
    constructor(box, at) {
      this.box = box;
      this.at = at;
      this.pre = box.querySelector(".cell_input pre");
      this.original = this.pre.textContent.replace(/\n+$/, "");
      this.originalNodes = [...this.pre.childNodes];
      this.printed = box.querySelector(".cell_output");
      this.before = [];
      this.build(`cell ${at + 1}`);
      const kept = recall(EDITS)[this.original];
      if (typeof kept === "string") this.edit(kept);
      else this.makeRoom();
    }

    build(name) {
      this.area = make("textarea", {
        "aria-label": `Code of ${name}`, "aria-describedby": "live-keys", spellcheck: "false",
        autocapitalize: "off", autocomplete: "off", autocorrect: "off", wrap: "off", rows: "1",
        input: () => this.changed(), keydown: event => this.key(event),
        pointerdown: () => (this.inside = true), blur: () => (this.inside = false),
        mousemove: event => this.point(event), mouseleave: event => this.point(event),
      });
      this.area.value = this.original;
      const code = make("div", { class: "live-code" });
      this.pre.replaceWith(code);
      code.append(this.pre, this.area);
      this.pre.setAttribute("aria-hidden", "true");
      const button = (label, act, hidden = false) =>
        make("button", { type: "button", "aria-label": `${label} ${name}`, click: act, hidden }, label);
      this.runButton = button("Run", () => this.run());
      this.stopButton = button("Stop", () => this.stop(), true);
      this.resetButton = button("Reset", () => (this.reset(), this.runButton.focus()), true);
      this.status = make("span", { class: "live-status", role: "status" });
      this.bar = make(
        "div", { class: "live-bar", id: `live-${this.at + 1}` },
        this.runButton, this.stopButton, this.resetButton, this.status,
        make("span", { class: "live-number" }, name),
      );
      this.text = make("pre", { hidden: true });
      this.error = make("pre", { class: "live-error", hidden: true });
      this.notes = make("div", { class: "live-notes" });
      this.output = make(
        "div",
        {
          class: "live-output", role: "group",
          "aria-label": `Output of ${name}`, "aria-live": "polite",
        },
        this.text, this.error, this.notes,
      );
      this.box.setAttribute("role", "group");
      this.box.setAttribute("aria-label", `Live ${name}`);
      // A folded cell has its buttons inside the fold, and what it prints below it.
      const input = this.box.querySelector(".cell_input");
      input.after(this.bar);
      (input.closest("details") || this.bar).after(this.output);
    }

    // The exercise that this cell belongs to: its heading, and its number.
    get exercise() {
      const section = this.box.closest("section[id^='exercise-']");
      const number = section?.querySelector("h3")?.textContent.match(/^Exercise (\d+\.\d+)/);
      return number && { section, number: number[1] };
    }

    // --- its text

    edit(text) {
      this.area.value = text;
      this.changed();
    }

    // The buttons lie beside the last lines, or below them if these are long (live.css).
    makeRoom() {
      const last = this.area.value.split("\n").slice(-2);
      this.box.classList.toggle("live-long", last.some(line => line.length > 74));
    }

    changed() {
      const text = this.area.value, same = text === this.original;
      this.makeRoom();
      if (same) this.pre.replaceChildren(...this.originalNodes);
      else this.pre.replaceChildren(...colored(text), "\n");
      remember(EDITS, this.original, same ? undefined : text);
      this.showState();
      for (const cell of cells) {
        if (cell === this ? cell.shown : cell.before.includes(this.at)) cell.outdate(this);
      }
    }

    // The text to write in covers the colored one: tell that where the pointer is, since
    // the page explains shapes such as (B, H, T, K) there (comforts.js).
    point(event) {
      const below = document.elementsFromPoint(event.clientX, event.clientY);
      const shape = event.type === "mousemove" ? below.find(e => e.matches(".shape")) : undefined;
      if (shape === this.pointed) return;
      this.pointed?.dispatchEvent(new Event("mouseleave"));
      shape?.dispatchEvent(new Event("mouseenter"));
      this.pointed = shape;
    }

    get isEdited() {
      return this.area.value !== this.original;
    }

    showState() {
      this.resetButton.hidden = !(this.isEdited || this.shown);
      if (!queue.includes(this)) this.status.textContent = this.isEdited ? "changed by you" : "";
    }

    reset() {
      this.edit(this.original);
      this.clear();
      if (this.printed) this.printed.hidden = false;
      this.shown = false;
      this.before = [];
      this.showState();
    }

    // Tab moves on through the page until somebody writes in the cell; Escape leaves it.
    key(event) {
      const { area } = this, start = area.selectionStart;
      const line = area.value.slice(area.value.lastIndexOf("\n", start - 1) + 1, start);
      const insert = text => {
        event.preventDefault();
        // The only way that Undo knows of; else without Undo.
        if (!document.execCommand("insertText", false, text)) {
          area.setRangeText(text, start, area.selectionEnd, "end");
          this.changed();
        }
      };
      if (event.isComposing || event.altKey) return;
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey || event.shiftKey)) {
        event.preventDefault();
        this.run();
      } else if (event.key === "Escape") {
        this.runButton.focus();
      } else if (event.key === "Enter") {
        this.inside = true;
        insert("\n" + line.match(/^ */)[0] + (/:\s*(#.*)?$/.test(line) ? "    " : ""));
      } else if (event.key === "Tab" && !event.shiftKey && this.inside) {
        insert(" ".repeat(4 - (line.length % 4)));
      } else if (event.key.length === 1 || event.key === "Backspace" || event.key === "Delete") {
        this.inside = true;
      }
    }

    // --- its runs

    run() {
      if (queue.includes(this)) return;
      queue.push(this);
      this.clear();
      this.shown = true;
      this.output.setAttribute("role", "region");
      if (this.printed) this.printed.hidden = true;
      this.runButton.setAttribute("aria-disabled", "true");
      this.stopButton.hidden = false;
      this.say("Waiting …");
      nextRun();
    }

    stop() {
      halt("Stopped. The next Run starts Python afresh.");
      this.runButton.focus();
    }

    say(words) {
      this.status.textContent = words;
    }

    clear() {
      this.output.classList.remove("live-old");
      for (const part of [this.text, this.error, this.notes]) part.textContent = "";
      this.text.hidden = this.error.hidden = true;
    }

    print(text) {
      this.text.hidden = false;
      this.text.append(text);
    }

    note(...parts) {
      this.notes.append(make("p", {}, ...parts));
    }

    finish(result, words) {
      this.runButton.removeAttribute("aria-disabled");
      this.stopButton.hidden = true;
      this.showState();
      if (words) this.note(words);
      if (!result) return;
      this.before = result.before;
      this.tellError(result);
      const edited = result.before.filter(at => cells[at].isEdited);
      const seconds = ((performance.now() - this.began) / 1000).toFixed(2);
      if (!this.text.textContent && !result.error) this.note("Done; nothing to print.");
      if (result.before.length) {
        const changed = edited.length ? [" (changed by you: ", ...cellLinks(edited), ")"] : [];
        this.note("Run first: ", ...cellLinks(result.before), ...changed, `. ${seconds} s.`);
      } else {
        this.note(`Needs no other cell. ${seconds} s.`);
      }
      if (result.broken.length) {
        const where = cellLinks(result.broken);
        this.note("Passed over: asserts that hold for the original text only, in ", ...where, ".");
      }
      for (const part of [this.text, this.error]) {
        if (part.scrollWidth > part.clientWidth || part.scrollHeight > part.clientHeight) part.tabIndex = 0;
      }
      this.output.classList.toggle("live-verdict", result.verdict !== null);
      if (result.verdict !== null && this.exercise) {
        remember(EXERCISES, this.exercise.number, result.verdict);
        showExercises();
      }
      // The cell with the gap is followed by the cell that checks it.
      if (this.box.classList.contains("tag_exercise") && !result.error) cells[this.at + 1]?.run();
    }

    tellError({ error, stopped, before }) {
      if (!error) return;
      this.error.hidden = false;
      this.error.textContent = error;
      if (stopped !== this.at) this.note("The error is in ", ...cellLinks([stopped]), ", which this cell needs.");
      if (/^AssertionError/m.test(error) && [...before, this.at].some(at => cells[at].isEdited)) {
        this.note("An assert states what holds for the original text; with your change it need not.");
      }
      if (/^ModuleNotFoundError/m.test(error)) {
        this.note(
          "In the page there are Python's standard library and this chapter's module. ",
          "For others, open the chapter in Colab.",
        );
      }
    }

    outdate(by) {
      if (!this.shown || queue.includes(this) || this.output.classList.contains("live-old")) return;
      this.output.classList.add("live-old");
      this.note("From before your last change", ...(by === this ? [] : [" in ", ...cellLinks([by.at])]), ".");
    }
  }

  // --- the page -----------------------------------------------------------------------

  function showExercises() {
    const solved = recall(EXERCISES);
    for (const { exercise } of cells) {
      if (!exercise || !(exercise.number in solved)) continue;
      const heading = exercise.section.querySelector("h3");
      const mark = heading.querySelector(".live-mark") || make("span", { class: "live-mark" });
      mark.textContent = solved[exercise.number] ? "✓ solved" : "not solved yet";
      mark.classList.toggle("live-solved", solved[exercise.number]);
      heading.append(mark);
    }
  }

  function showAbout(about) {
    const resetAll = () => cells.forEach(cell => (cell.isEdited || cell.shown) && cell.reset());
    about.replaceChildren(
      "Change and run the cells: Python runs in your browser, once 13 MB are loaded, and " +
      "what you change is kept. ",
      make("span", { id: "live-keys" }, "Ctrl+Enter runs a cell, Escape leaves its text."),
      " ",
      make("button", { type: "button", click: resetAll }, "Reset all cells"),
    );
  }

  const about = document.querySelector(".live-about");
  if (location.protocol === "file:") {
    about.textContent =
      "Opened as a file, this page cannot run its code. Open the book through a server " +
      "(make serve starts one), and each cell has a Run button here.";
    return;
  }
  for (const box of document.querySelectorAll("div.cell.live")) cells.push(new Cell(box, cells.length));
  showAbout(about);
  showExercises();
})();
