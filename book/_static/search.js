// The search page: sections of the book (book/_ext/sections.py), ranked by MiniSearch.
// Stemmer and stopwords are Sphinx's, of language_data.js.
import MiniSearch from "./minisearch/index.js";

const SHOWN = 30;
const WEIGHT = {chapter: 1, page: 1, term: 1, question: 0.9, hood: 0.7, name: 0.25};
const stemmer = new Stemmer();
const silent = new Set([...stopwords, "how", "do", "does", "i", "my", "what", "why",
  "when", "can", "a", "an", "you", "we", "from", "or"]);

// fine-tuning is found as fine, tuning and finetuning; label_smoothing likewise.
export function words(text) {
  const found = [];
  for (const [word] of text.normalize("NFKC").matchAll(/[\p{L}\p{N}]+(?:[-_.'’][\p{L}\p{N}]+)*/gu)) {
    const parts = word.split(/[-_.'’]/);
    found.push(...parts);
    if (parts.length > 1) found.push(parts.join(""));
  }
  return found;
}

const term = word => {
  const low = word.toLowerCase();
  return silent.has(low) ? null : /^[a-z]+$/.test(low) ? stemmer.stemWord(low) : low;
};

function rank(records) {
  const index = new MiniSearch({
    fields: ["title", "names", "page", "text"],
    tokenize: words, processTerm: term,
    searchOptions: {
      boost: {title: 4, names: 4, page: 1.5},
      prefix: t => t.length > 3, fuzzy: t => t.length > 5 ? 0.15 : false,
      weights: {prefix: 0.3, fuzzy: 0.2},
      boostDocument: id => WEIGHT[byId.get(id).kind],
    },
  });
  const byId = new Map(records.map(r => [r.id, r]));
  index.addAll(records);
  return query => index.search(query).map(hit => ({...byId.get(hit.id), terms: hit.terms}));
}

// The words of a text that were found, as they are written in it.
const written = (text, terms) =>
  [...new Set(words(text).filter(w => terms.includes(term(w))).map(w => w.toLowerCase()))];

const make = (tag, inside, more = {}) => {
  const e = Object.assign(document.createElement(tag), more);
  e.append(...[inside].flat());
  return e;
};

// About thirty words of a text, around the most that were found.
function excerpt(text, terms) {
  const all = text.split(" "), hit = all.map(w => words(w).some(p => terms.includes(term(p))));
  let best = 0, most = -1;
  for (let i = 0; i < all.length; i += 6) {
    const n = hit.slice(i, i + 30).filter(Boolean).length;
    if (n > most) [best, most] = [i, n];
  }
  const shown = all.slice(best, best + 30)
    .flatMap((w, i) => [hit[best + i] ? make("mark", w) : w, " "]);
  return [best ? "… " : "", ...shown, best + 30 < all.length ? "…" : ""];
}

function show(found, query) {
  const list = make("ol", found.slice(0, SHOWN).map(row => {
    const [address, anchor] = row.id.split("#");
    const marked = written(`${row.title} ${row.text}`, row.terms).slice(0, 8).join(" ");
    const href = address + (marked ? `?highlight=${encodeURIComponent(marked)}` : "")
      + (anchor ? `#${anchor}` : "");
    const link = make("a", row.title, {href});
    const where = row.title === row.page ? [] : [make("span", row.page, {className: "where"})];
    return make("li", [link, " ", ...where, make("p", excerpt(row.text, row.terms))]);
  }), {className: "search"});
  const n = found.length;
  const said = !query.trim() ? "" : n
    ? `${n} ${n > 1 ? "places" : "place"} found${n > SHOWN ? `, the best ${SHOWN} here` : ""}.`
    : "Nothing was found. Try fewer or other words; the glossary lists those of this book.";
  document.getElementById("search-results").replaceChildren(
    make("p", said, {className: "search-summary", role: "status"}), list);
}

const field = document.querySelector(".bd-search-container input[name=q]");
const records = await (await fetch(new URL("sections.json", import.meta.url))).json();
const search = rank(records);
const go = () => show(search(field.value), field.value);
field.value = new URLSearchParams(location.search).get("q") ?? "";
field.addEventListener("input", go);
go();
