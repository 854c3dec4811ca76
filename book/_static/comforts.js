/* What makes a page comfortable: definitions shown on hover, focus and touch; a mark on
   each chapter that was read to its end; where one was. Nothing leaves the browser. */
(() => {
  "use strict";
  const known = window.literate || {};

  // --- what is kept, where the browser allows it ---------------------------------
  const KEY = "literate-transformer";
  const kept = () => {
    try { return JSON.parse(localStorage.getItem(KEY)) || {}; } catch { return {}; }
  };
  const keep = changes => {
    try { localStorage.setItem(KEY, JSON.stringify({ ...kept(), ...changes })); } catch {}
  };

  // --- explanations ---------------------------------------------------------------
  const tip = document.createElement("div");
  tip.id = "explanation";
  tip.className = "explanation";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;

  function show(about, words) {
    tip.textContent = words;
    tip.hidden = false;
    about.setAttribute("aria-describedby", tip.id);
    const at = about.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const below = at.bottom + own.height + 12 < innerHeight;
    const left = Math.min(at.left, document.documentElement.clientWidth - own.width - 8);
    tip.style.left = `${Math.max(8, left) + scrollX}px`;
    tip.style.top = `${(below ? at.bottom + 6 : at.top - own.height - 6) + scrollY}px`;
  }
  function hide(about) {
    tip.hidden = true;
    about.removeAttribute("aria-describedby");
  }
  function explain(about, words) {
    for (const event of ["mouseenter", "focus"])
      about.addEventListener(event, () => show(about, words));
    for (const event of ["mouseleave", "blur"])
      about.addEventListener(event, () => hide(about));
    about.addEventListener("keydown", event => event.key === "Escape" && hide(about));
    // A first touch explains, a second follows the link.
    about.addEventListener("touchend", event => {
      if (tip.hidden || tip.textContent !== words) {
        event.preventDefault();
        show(about, words);
      }
    });
  }

  function explainTerms() {
    for (const link of document.querySelectorAll("a.defined[title]")) {
      const words = link.title;
      link.removeAttribute("title");
      explain(link, words);
    }
  }

  // "# (B, H, T, K)" in code: what the letters mean.
  const SHAPE = /\(((?:[A-Z]|\d+)(?:, *(?:[A-Z]|\d+))+),?\)/g;
  function explainShapes() {
    for (const comment of document.querySelectorAll(".highlight .c1")) {
      const found = new Set();
      for (const [, inner] of comment.textContent.matchAll(SHAPE))
        for (const letter of inner.split(/, */)) if (known.letters[letter]) found.add(letter);
      if (!found.size) continue;
      const words = [...found].map(letter => `${letter}: ${known.letters[letter]}`);
      comment.classList.add("shape");
      explain(comment, words.join("\n"));
    }
  }

  // --- docstrings -------------------------------------------------------------------
  // A long one shows its first line, and a button opens the rest. The button has no text
  // of its own: what is copied is the code. Live cells stay as they are, to be edited.
  function foldDocstrings() {
    if (document.querySelector('script[src*="live.js"]')) return;
    for (const code of document.querySelectorAll(".cell_input pre")) {
      let first = null;
      for (const line of [...code.querySelectorAll(":scope > .sd")]) {
        const ends = line.textContent.trimEnd().endsWith('"""');
        if (!first && !ends) first = line;
        else if (first && ends) { foldAfter(first, line); first = null; }
      }
    }
  }

  function foldAfter(first, last) {
    const rest = document.createElement("span"), button = document.createElement("button");
    rest.className = "doc-rest";
    while (!rest.contains(last)) rest.append(first.nextSibling);
    first.after(rest);
    if (rest.textContent.trim().split("\n").length < 4) return;
    button.type = "button";
    button.className = "doc-more";
    button.setAttribute("aria-label", "the rest of the docstring");
    const fold = yes => {
      rest.classList.toggle("is-folded", yes);
      button.setAttribute("aria-expanded", !yes);
    };
    button.addEventListener("click", () => fold(!rest.classList.contains("is-folded")));
    first.after(button);
    fold(true);
  }

  // --- figures ----------------------------------------------------------------------
  // On a narrow screen book.css shows a figure no smaller than its words can be read at,
  // and lets it slide. Its own size is known here, and what slides is reached by keys.
  const SLIDES = "div.cell_output:has(> img)";
  function letFiguresSlide() {
    const settle = () => {
      for (const box of document.querySelectorAll(SLIDES)) {
        const over = box.scrollWidth > box.clientWidth + 1;
        box.classList.toggle("slides", over);
        if (over) box.tabIndex = 0; else box.removeAttribute("tabindex");
      }
    };
    for (const image of document.querySelectorAll(`${SLIDES} > img`)) {
      const measure = () => {
        image.style.setProperty("--own", `${image.naturalWidth}px`);
        settle();
      };
      if (image.complete) measure(); else image.addEventListener("load", measure);
    }
    addEventListener("resize", settle);
    settle();
  }

  // --- progress ----------------------------------------------------------------------
  const chapter = /^notebooks\//.test(known.page || "") ? known.page.split("/")[1] : null;
  const article = () => document.querySelector("article.bd-article");

  function follow() {
    const bar = document.createElement("div");
    bar.className = "read-so-far";
    bar.setAttribute("aria-hidden", "true");
    document.body.append(bar);
    const look = () => {
      const box = article().getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (innerHeight - box.top) / box.height));
      bar.style.width = `${100 * share}%`;
      if (scrollY > 200) keep({ last: { chapter, share, title: document.title } });
      if (share > 0.97 && !(kept().read || {})[chapter]) {
        keep({ read: { ...kept().read, [chapter]: true } });
        markRead();
      }
    };
    addEventListener("scroll", look, { passive: true });
    look();
  }

  function markRead() {
    const read = kept().read || {};
    for (const link of document.querySelectorAll(".bd-links a.reference, .chapter-times a")) {
      const name = (link.getAttribute("href") === "#" ? chapter || "" :
        link.getAttribute("href").split("/").pop()).replace(/\.html.*$/, "");
      if (!read[name] || link.querySelector(".was-read")) continue;
      const mark = document.createElement("span");
      mark.className = "was-read";
      mark.textContent = " ✓";
      mark.title = "read to its end, in this browser";
      link.append(mark);
    }
  }

  function offerToGoOn() {
    const place = document.getElementById("go-on"), last = kept().last;
    if (!place || !last || last.share > 0.97) return;
    const link = document.createElement("a");
    link.href = `../notebooks/${last.chapter}.html`;
    link.textContent = last.title.split(" — ")[0];
    place.append("You were in ", link, `, ${Math.round(100 * last.share)}% through.`);
    place.hidden = false;
  }

  // --- notes ---------------------------------------------------------------------------
  // One box for each chapter in the side bar, and one for everything else.
  function offerNotes() {
    const place = document.getElementById("notes");
    if (!place) return;
    const chapters = [["", "The whole book"]];
    for (const link of document.querySelectorAll(".bd-links a.reference")) {
      const name = (link.getAttribute("href").match(/notebooks\/(\d[^.]+)\.html/) || [])[1];
      if (name) chapters.push([name, link.textContent.replace("✓", "").trim()]);
    }
    for (const [name, title] of chapters) {
      const label = document.createElement("label"), box = document.createElement("textarea");
      box.id = `note-${name}`;
      label.htmlFor = box.id;
      label.textContent = title;
      box.rows = 3;
      box.value = (kept().notes || {})[name] || "";
      box.addEventListener("input", () => {
        keep({ notes: { ...kept().notes, [name]: box.value } });
        say((kept().notes || {})[name] === box.value ? "Kept in this browser." :
          "This browser does not keep anything: save to a file before you leave.");
      });
      place.append(label, box);
    }
    const state = document.getElementById("notes-state");
    const say = words => { state.textContent = words; };
    const written = () => chapters.map(([name, title]) =>
      [title, document.getElementById(`note-${name}`).value.trim()]).filter(n => n[1]);
    document.getElementById("notes-save").addEventListener("click", () => {
      const notes = written();
      if (!notes.length) { say("There is nothing to save yet."); return; }
      const text = notes.map(([title, words]) => `## ${title}\n\n${words}\n`).join("\n");
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
      link.download = "literate-transformer-notes.md";
      link.click();
      URL.revokeObjectURL(link.href);
      say(`Saved: notes on ${notes.length} of ${chapters.length} places.`);
    });
    document.getElementById("notes-clear").addEventListener("click", () => {
      if (!written().length || !confirm("Remove all notes from this browser?")) return;
      keep({ notes: {} });
      for (const box of place.querySelectorAll("textarea")) box.value = "";
      say("All notes are removed.");
    });
  }

  addEventListener("DOMContentLoaded", () => {
    document.body.append(tip);
    explainTerms();
    if (known.letters) explainShapes();
    foldDocstrings();
    letFiguresSlide();
    if (chapter && article()) follow();
    offerNotes();
    markRead();
    offerToGoOn();
  });
})();
