// What translates in the page: text to pieces, the search, pieces to text.
//
// translator.js starts this file as a web worker, which loads the model and ONNX Runtime
// and translates there: the page stays alive. As a module it can be imported, too, which
// is how its parts are tested. Everything here says in JavaScript what chapters 09, 14
// and 13 say in Python; tests/test_translator_page.py holds both against each other.

// --- text -------------------------------------------------------------------------------

const SPACE = "▁"; // how SentencePiece writes a space

// SentencePiece's BPE as the manifest describes it; chapter 22 says what is in there.
export class Tokenizer {
  constructor(data, table) {
    if (data.model_type !== "bpe" || data.types.includes("user"))
      throw new Error(`this page cuts text by BPE alone, and the model's pieces are ${data.model_type}`);
    this.data = data;
    this.bytes = []; // byte to id
    this.merged = new Map(); // piece to id, for those that merging can reach
    data.types.forEach((type, id) => {
      if (type === "byte") this.bytes[parseInt(data.pieces[id].slice(3, 5), 16)] = id;
      else if (type === "normal" || type === "unused") this.merged.set(data.pieces[id], id);
    });
    this.unknown = data.types.indexOf("unknown");
    this.known = new Map(); // characters asked for
    const view = new DataView(table);
    const size = view.getUint32(0, true);
    this.trie = new Uint32Array(size / 4);
    for (let i = 0; i < this.trie.length; i++) this.trie[i] = view.getUint32(4 + 4 * i, true);
    this.texts = new Uint8Array(table, 4 + size);
  }

  // What the text at a place becomes, and how many bytes of it that takes.
  longestMatch(bytes, at) {
    const trie = this.trie;
    const offset = unit => (unit >>> 10) << ((unit & 0x200) >>> 6);
    let node = offset(trie[0]), length = 0, start = 0;
    for (let i = at; i < bytes.length; i++) {
      node ^= bytes[i];
      const unit = trie[node];
      if ((unit & 0x800000ff) >>> 0 !== bytes[i]) break;
      node ^= offset(unit);
      if ((unit >>> 8) & 1) [length, start] = [i + 1 - at, trie[node] & 0x7fffffff];
    }
    if (length) return [UTF8.decode(this.texts.subarray(start, this.texts.indexOf(0, start))), length];
    length = bytes[at] < 0x80 ? 1 : bytes[at] < 0xe0 ? 2 : bytes[at] < 0xf0 ? 3 : 4;
    return [UTF8.decode(bytes.subarray(at, at + length)), length];
  }

  normalize(text) {
    const { add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces } = this.data;
    const bytes = new TextEncoder().encode(wellFormed(text));
    let out = add_dummy_prefix ? " " : "", at = 0, afterSpace = remove_extra_whitespaces;
    while (at < bytes.length) {
      let [piece, length] = this.longestMatch(bytes, at);
      at += length;
      if (afterSpace) piece = piece.replace(/^ +/, "");
      out += piece;
      if (piece && remove_extra_whitespaces) afterSpace = piece.endsWith(" ");
    }
    if (remove_extra_whitespaces) out = out.replace(/[ ▁]+$/, "");
    if (!out.trim() && remove_extra_whitespaces) return "";
    return escape_whitespaces ? out.replaceAll(" ", SPACE) : out;
  }

  // Ids of a text: of all neighbours that make a piece, the best merges first.
  encode(text) {
    const symbols = [...this.normalize(text)];
    const score = i => {
      const id = i + 1 < symbols.length ? this.merged.get(symbols[i] + symbols[i + 1]) : undefined;
      return id === undefined ? -Infinity : this.data.scores[id];
    };
    const scores = symbols.map((_, i) => score(i));
    for (;;) {
      let best = -1, value = -Infinity;
      for (let i = 0; i < scores.length; i++) if (scores[i] > value) [best, value] = [i, scores[i]];
      if (best < 0) break;
      symbols.splice(best, 2, symbols[best] + symbols[best + 1]);
      scores.splice(best, 1);
      for (const i of [best - 1, best]) if (i >= 0) scores[i] = score(i);
    }
    return symbols.flatMap(symbol => {
      const id = this.merged.get(symbol);
      if (id !== undefined) return [id];
      if (!this.data.byte_fallback) return [this.unknown];
      return Array.from(new TextEncoder().encode(symbol), byte => this.bytes[byte]);
    });
  }

  decode(ids) {
    let out = "", bytes = [], spaceGone = false;
    const flush = () => {
      out += textOf(bytes);
      bytes = [];
    };
    for (const id of ids) {
      const type = this.data.types[id];
      if (type === "byte") {
        bytes.push(this.bytes.indexOf(id));
        continue;
      }
      flush();
      if (type === "control") continue;
      let piece = type === "unknown" ? this.data.unknown_text : this.data.pieces[id];
      const { add_dummy_prefix, remove_extra_whitespaces } = this.data;
      if (type !== "unknown" && !out && !spaceGone && (add_dummy_prefix || remove_extra_whitespaces)) {
        spaceGone = piece.startsWith(SPACE) && !remove_extra_whitespaces;
        if (piece.startsWith(SPACE)) piece = piece.slice(1);
      }
      out += piece.replaceAll(SPACE, " ");
    }
    flush();
    return out;
  }

  // Whether the vocabulary has a character, and need not spell it in bytes.
  knows(character) {
    if (!this.known.has(character))
      this.known.set(character, !this.encode(character).some(id => this.isByte(id)));
    return this.known.get(character);
  }

  isByte(id) {
    return this.data.types[id] === "byte" || id === this.unknown;
  }

  // The words of a text, each with the places of its pieces; marks stand for themselves.
  words(ids) {
    const words = [];
    ids.forEach((id, i) => {
      const piece = this.data.pieces[id];
      const joins = words.length && !piece.startsWith(SPACE) && !/^\p{Punctuation}+$/u.test(piece);
      if (joins || this.isByte(id) && words.length) words.at(-1).places.push(i);
      else words.push({ places: [i], space: piece.startsWith(SPACE) && i > 0 });
    });
    return words.map(word => ({ ...word, text: this.decode(word.places.map(i => ids[i])).trim() || "·" }));
  }
}

const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

// The text of some bytes, one U+FFFD for each that belongs to no character.
function textOf(bytes) {
  let out = "";
  for (let at = 0; at < bytes.length; ) {
    let text = "\ufffd", length = 1;
    for (let n = 1; n <= 4 && at + n <= bytes.length; n++) {
      try {
        text = UTF8.decode(Uint8Array.from(bytes.slice(at, at + n)));
        length = n;
        break;
      } catch {
        // Not a whole character yet, or never one.
      }
    }
    out += text;
    at += length;
  }
  return out;
}

// Half a surrogate pair is no character.
const wellFormed = text => text.replace(/\p{Surrogate}/gu, "?");

// Quotes, spaces and what nobody sees, written in one way: chapter 09's fold_text.
const EMOJI = String.raw`\p{Extended_Pictographic}[\ufe0e\ufe0f\p{Emoji_Modifier}\u{e0020}-\u{e007f}]*`;
const SCRIPTS =
  "Arabic Syriac Mongolian Devanagari Bengali Gurmukhi Gujarati Oriya Tamil Telugu Kannada Malayalam Sinhala Khmer";
const JOINS = `[${SCRIPTS.replace(/\w+ ?/g, name => `\\p{Script=${name.trim()}}`)}]`;
const INVISIBLE = new RegExp(
  String.raw`(${EMOJI}(?:\u200d${EMOJI})*|[0-9#*]\ufe0f\u20e3|(?<=${JOINS}\p{Mn}*)[\u200c\u200d]+(?=${JOINS})` +
    String.raw`|(?<=\p{Script=Mongolian})[\u180b-\u180f]+)|\p{Default_Ignorable_Code_Point}`,
  "gu",
);

export function foldText(text) {
  text = text.replace(INVISIBLE, (_, kept) => kept ?? "").normalize("NFC");
  if (!/[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]/u.test(text))
    text = text.replace(/[‘’‚‛ʼ´]/g, "'").replace(/[“”„‟]/g, '"');
  return text.replace(/\p{Z}/gu, " ");
}

// One space between words, no control characters: chapter 17's one_line.
export function oneLine(text) {
  const spaces = /[\0-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/;
  return wellFormed(text).split(spaces).filter(Boolean).join(" ");
}

const ABBREVIATIONS = new Set(
  ("approx bros ca capt cf co col dept dr etc ex fig gen gov inc jr lt ltd mr mrs ms " +
    "mt prof rev sgt sr st str vol vs bzw evtl geb hr nr tel usw vgl").split(" "),
);

const END =
  /(?<![\p{Sentence_Terminal}…])([\p{Sentence_Terminal}…]+)(?:["'”“»«’\p{Pe}\p{Pf}\p{Co}]*\s+|["'\p{Pe}\p{Pf}]*)/gu;

// A line cut after each sentence: chapter 17's split_sentences.
export function splitSentences(text) {
  const out = [];
  let start = 0, last = 0;
  for (const match of text.matchAll(END)) {
    if (!/\s$/.test(match[0]) && /^[.!?…．]+$/.test(match[1])) continue;
    const end = match.index + match[0].length;
    const before = match.index && text.lastIndexOf(" ", match.index - 1) + 1;
    let word = text.slice(Math.max(last, before), match.index).toLowerCase();
    last = end;
    word = word.replace(/^["'„“”‚‘’(«»]+|["'„“”‚‘’(«»]+$/g, "");
    const stop = match[0].trimEnd() === ".";
    const letter = /^[\p{L}\p{N}]$/u.test(word);
    if (stop && (ABBREVIATIONS.has(word) || letter || word.includes("."))) continue;
    if (end < text.length && !/^\p{Lowercase}/u.test(text.slice(end, end + 2))) {
      out.push(text.slice(start, end).trimEnd());
      start = end;
    }
  }
  return [...out, text.slice(start)];
}

// Parts of at most `limit` tokens, cut at commas where it can be: chapter 17's cut_text.
export function cutText(text, count, limit) {
  const chars = [...text];
  if (chars.length < 2 || count(text) <= limit) return [text];
  const middle = chars.length / 2;
  let place = Math.floor(middle);
  for (const marks of [",;:–—", null]) {
    const ends = [];
    chars.forEach((char, i) => {
      if (marks ? marks.includes(char) && chars[i + 1] === " " : char === " ")
        ends.push(i + (marks ? 2 : 1));
    });
    let nearest = 0;
    ends.forEach((end, i) => {
      if (!i || Math.abs(end - middle) < Math.abs(nearest - middle)) nearest = end;
    });
    if (Math.abs(nearest - middle) <= chars.length / 4) {
      place = nearest;
      break;
    }
  }
  const halves = [chars.slice(0, place).join("").trimEnd(), chars.slice(place).join("")];
  return halves.flatMap(half => cutText(half, count, limit));
}

// A line in capitals, or a headline, as it would stand in running text: chapter 17's truecase.
const CASED = /\p{L}[\p{L}\p{M}]*(?:'\p{L}+)*/gu;
const capitalized = word => word.replace(/(?<=^.).*/su, rest => rest.toLowerCase());
const cased = line => line.match(CASED) ?? [];

export function inCapitals(line) {
  const upper = /\p{Uppercase}/u.test(line) && !/[\p{Lowercase}\p{Lt}]/u.test(line);
  return upper && cased(line).filter(word => [...word].length > 1).length > 1;
}

export function truecase(line, tokenizer) {
  const long = cased(line).filter(word => [...word].length > 3);
  const headline = long.length > 2 && long.every(word => /^\p{Uppercase}/u.test(word) && word === capitalized(word));
  if (!inCapitals(line) && !headline) return line;
  const usual = word => {
    const forms = [word.toLowerCase(), word, capitalized(word)];
    const known = forms.map(form => ({ form, ids: tokenizer.encode(form) }));
    const differ = (a, b) => a.findIndex((id, i) => id !== b[i]);
    const order = (a, b) => a.length - b.length || a[differ(a, b)] - b[differ(a, b)] || 0;
    return known.sort((a, b) => order(a.ids, b.ids))[0].form;
  };
  const first = new RegExp(`(?<=^[^\\p{L}]*)\\p{L}`, "u");
  const sentence = text => text.replace(CASED, usual).replace(first, letter => letter.toUpperCase());
  return splitSentences(line).map(sentence).join(" ");
}

// How many numbers of a source an output lacks, and how many it adds: chapter 17's
// wrong_numbers. Of the candidates, those with fewer come first.
export function wrongNumbers(source, output) {
  const read = source.match(/[0-9]+/g) ?? [], said = output.match(/[0-9]+/g) ?? [];
  for (const number of [...read])
    if (said.includes(number)) {
      said.splice(said.indexOf(number), 1);
      read.splice(read.indexOf(number), 1);
    }
  return read.length + said.length;
}

// Addresses, names of files and placeholders, each as a private character: chapter 17's
// hide_markup. Tags are not among them: the library puts them where attention says.
const W = String.raw`[\p{L}\p{N}_]`;
const ENDS = "com|org|net|edu|gov|info|io|dev|example|de|fr|uk|csv|docx?|gz|html?|jpe?g|json|mp[34]|pdf|png|pptx?|py|svg|txt|xlsx?|zip";
const KEPT = new RegExp(
  [
    String.raw`(?<!${W})(?:${W}+://|www\.)[^\s<>"]*(?:${W}|/)`,
    String.raw`(?<!${W}|[.+-])(?:${W}|[.+-])+@(?:${W}|-)+\.(?:${W}|[.-])*${W}`,
    String.raw`(?<!${W}|[.-])(?:${W}|-)+(?:\.(?:${W}|-)+)*\.(?:${ENDS})(?!${W})(?:/[^\s<>"]*(?:${W}|/))?`,
    String.raw`(?<!${W})[@#]${W}*[a-zA-Z]${W}*`,
    String.raw`\$?\{\{?(?:${W}|[. ])*\}?\}|\$[a-zA-Z]${W}*|%\(${W}+\)[sd]|%(?:[0-9]+\$)?[sd](?!${W})`,
  ].join("|"),
  "gu",
);

function hideMarkup(text) {
  const kept = [];
  const hidden = text.replace(KEPT, match => {
    if (!kept.includes(match)) kept.push(match);
    return String.fromCodePoint(0xf8000 + kept.indexOf(match));
  });
  const show = text => text.replace(/[\u{f8000}-\u{fffff}]/gu, sign => kept[sign.codePointAt() - 0xf8000] ?? sign);
  return { hidden, show };
}

// What the vocabulary spells in bytes, taken out of a text and put back into its
// translation: chapter 17's take_out and put_back.
const EAST_ASIAN = String.raw`[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]`;
const WORD = String.raw`(?:(?!${EAST_ASIAN})[\p{L}\p{M}\p{N}])+|${EAST_ASIAN}`;
const UNIT = new RegExp(String.raw`${WORD}|[^\p{M}\p{Cf}][\p{M}\p{Cf}]*|.`, "gu");
const matches = (text, pattern) => [...text.matchAll(new RegExp(pattern, "gu"))];
const isLetter = character => /[\p{L}\p{N}]/u.test(character ?? "");
const letters = text => [...text].filter(isLetter).length;
const endOf = match => match.index + match[0].length;

export function takeOut(text, tokenizer) {
  const runs = [[0, 0]]; // neighbours are one sign
  for (const unit of text.matchAll(UNIT)) {
    if ([...unit[0]].every(character => tokenizer.knows(character))) continue;
    if (runs.length > 1 && !text.slice(runs.at(-1)[1], unit.index).trim()) runs.at(-1)[1] = endOf(unit);
    else runs.push([unit.index, endOf(unit)]);
  }
  let left = text.slice(0, runs[1]?.[0]);
  const signs = [];
  for (let i = 1; i < runs.length; i++) {
    const [start, end] = runs[i];
    let right = text.slice(end, runs[i + 1]?.[0]);
    const touches = { left: /\S$/.test(text.slice(0, start)), right: /^\S/.test(text.slice(end)) };
    [left, right] = [left.trimEnd(), right.trimStart()];
    const next = ([...left].at(-1) ?? "") + ([...right][0] ?? "");
    const words = left && right && letters(next) === 2 && !new RegExp(EAST_ASIAN, "u").test(next);
    const apart = !touches.left && !touches.right;
    const comma = Boolean(words && apart);
    signs.push({ text: text.slice(start, end), at: left.length, ...touches, comma });
    left += (comma ? "," : "") + (words || (left && right && apart) ? " " : "") + right;
  }
  return { left, signs };
}

function placeOf(sign, out, text) {
  const before = text.slice(0, sign.at), after = text.slice(sign.at);
  const [first, last, words] = [before, after, out].map(part => matches(part, WORD));
  if (!first.length || !words.length) return words.length && before.trim() ? words[0].index : 0;
  if (!last.length || words.length === 1) return last.length || after.trim() ? endOf(words.at(-1)) : out.length;
  const share = first.length / (first.length + last.length);
  const i = Math.min(Math.max(1, roundEven(share * words.length)), words.length - 1);
  const space = out.lastIndexOf(" ", words[i].index - 1);
  let place = space >= endOf(words[i - 1]) ? space + 1 : words[i].index;
  const same = word => words.filter(match => match[0] === word);
  const times = word => first.filter(match => match[0] === word).length;
  if (sign.left && isLetter([...before].at(-1))) {
    const word = first.at(-1)[0], found = same(word)[times(word) - 1];
    if (found) place = endOf(found);
  }
  if (sign.right && isLetter([...after.trimStart()][0])) {
    const word = last[0][0], found = same(word)[times(word)];
    if (found) place = found.index;
  }
  return place;
}

// As Python rounds: a half goes to the even number.
const roundEven = x => (x % 1 === 0.5 ? 2 * Math.round(x / 2) : Math.round(x));

export function putBack(out, text, signs) {
  const commas = matches(out, ",(?=\\s)|[，、،]").map(match => match.index);
  const places = [];
  for (const [i, sign] of signs.entries()) {
    if (i && !sign.comma && signs[i - 1].at === sign.at) { // stays with the one before
      const { end } = places.at(-1);
      places.push({ start: end, end, sign });
      continue;
    }
    let start = placeOf(sign, out, text), end = start;
    if (sign.comma && commas.length) {
      let nearest = 0;
      commas.forEach((at, i) => {
        if (Math.abs(at - start) < Math.abs(commas[nearest] - start)) nearest = i;
      });
      [start] = commas.splice(nearest, 1);
      end = start + 1;
    }
    places.push({ start, end, sign });
  }
  let whole = "", done = 0;
  for (const { start, end, sign } of places.sort((a, b) => a.start - b.start)) {
    whole = (whole + out.slice(done, Math.max(done, start))).trimEnd();
    const rest = out.slice(Math.max(done, end)).trimStart();
    const word = { left: isLetter([...text.slice(0, sign.at)].at(-1)), right: isLetter([...text.slice(sign.at).trimStart()][0]) };
    const left = sign.left && (word.left || !isLetter([...whole].at(-1)));
    const right = sign.right && (word.right || !isLetter([...rest][0]));
    whole += (whole && !left ? " " : "") + sign.text + (right ? "" : " ");
    done = Math.max(done, end + out.slice(end).search(/\S|$/));
  }
  return (whole + out.slice(done)).trim();
}

// What stands between two parts of a translation: nothing after Chinese and Japanese.
const TOGETHER = new RegExp(`(?:[。！？、，]|${EAST_ASIAN})$`, "u");
const gap = (whole, text) => (!whole || !text || TOGETHER.test(whole) ? "" : " ");

// The words of a translation with what stands before each in the text, in which signs are
// back; a comma whose place a sign took is gone.
function withSigns(words, text, signs) {
  const most = signs.reduce((sum, sign) => sum + sign.text.length + 2, 1);
  let at = 0;
  const found = words.map(word => {
    const next = text.indexOf(word.text, at);
    if (next < 0 || next - at > most) return { ...word, gone: signs.length > 0, before: word.space ? " " : "" };
    const before = text.slice(at, next);
    at = next + word.text.length;
    return { ...word, before };
  });
  return { words: found, after: text.slice(at) };
}

// What is translated of a text: sentences, cut where they are too long; none if copied.
// A part without a row is kept as it is. Chapter 17's _cut_line.
export function partsOf(text, tokenizer, limit) {
  const { hidden, show } = hideMarkup(text);
  const given = oneLine(foldText(hidden)), line = truecase(given, tokenizer);
  const written = inCapitals(given) ? text => text.toUpperCase() : text => text;
  const partOf = text => {
    const { left, signs } = takeOut(text, tokenizer);
    if (signs.length && !letters(left)) return { text, signs: [], row: [] };
    return { text: left, signs, row: tokenizer.encode(left) };
  };
  const { left, signs } = takeOut(line, tokenizer);
  const foreign = signs.length > 0 && 2 * letters(left) < Math.max(letters(line), 1);
  const copied = { line: oneLine(text), parts: [], foreign };
  if (foreign) return copied;
  const count = part => partOf(part).row.length;
  const cuts = splitSentences(line).map(sentence => cutText(sentence, count, limit));
  const parts = cuts.flat().map(partOf);
  if (!parts.some(part => part.row.length)) return copied;
  return { line, parts, show, written, cut: cuts.some(texts => texts.length > 1) };
}

// --- the search: chapter 14's -----------------------------------------------------------

const lengthPenalty = (length, alpha) => ((5 + length) / 6) ** alpha;

// The best tokens of a row of logits, best first; of equal ones, the lower id first.
function bestTokens(logits, count) {
  const best = [];
  for (let id = 0; id < logits.length; id++) {
    if (best.length === count && logits[id] <= logits[best[count - 1]]) continue;
    let at = best.length;
    while (at && logits[best[at - 1]] < logits[id]) at--;
    best.splice(at, 0, id);
    if (best.length > count) best.pop();
  }
  return best;
}

function logSumExp(logits) {
  let most = -Infinity, sum = 0;
  for (const x of logits) if (x > most) most = x;
  for (const x of logits) sum += Math.exp(x - most);
  return most + Math.log(sum);
}

// The indices of the largest values, largest first; of equal ones, the first.
const descending = values => [...values.keys()].sort((i, j) => values[j] - values[i] || i - j);

// Beam search over `steps.step(tokens, parents)`, which gives {logits, looked}: for each
// beam a row of logits, and what it looked at. `watch` sees the best beam of each step.
// Gives the hypotheses, best first: ids, score, logProb, looked (one entry a token, the
// end symbol's last).
export async function search(steps, limit, how, watch = async () => {}) {
  const { beamSize, alpha, nBest, eos, neverSaid } = how;
  const found = [];
  const largest = lengthPenalty(limit + 1, alpha);
  let beams = [{ ids: [], looked: [], logProb: 0, token: how.bos, parent: 0 }];
  for (let length = 0; beams.length; length++) {
    const { logits, looked } = await steps.step(beams.map(b => b.token), beams.map(b => b.parent));
    const going = []; // what may come of the beams: each may go on with a token
    const ends = beams.map((beam, parent) => {
      const row = logits[parent], sum = logSumExp(row);
      for (const token of bestTokens(row, Math.min(beamSize + 3, row.length))) {
        const wanted = token !== eos && !neverSaid.includes(token);
        const logProb = wanted ? beam.logProb + Math.min(row[token] - sum, 0) : -Infinity;
        going.push({ parent, token, logProb });
      }
      return beam.logProb + Math.min(row[eos] - sum, 0);
    });
    const best = descending(going.map(c => c.logProb)).slice(0, beamSize).map(i => going[i]);
    const last = length === limit;
    const all = [...ends, ...best.map(c => c.logProb)];
    const among = new Set(descending(all).slice(0, beamSize));
    beams.forEach((beam, j) => {
      if (!(among.has(j) && ends[j] > -Infinity) && !last) return;
      const score = ends[j] / lengthPenalty(length + 1, alpha);
      found.push({ ids: beam.ids, looked: [...beam.looked, looked[j]], score, logProb: ends[j] });
    });
    found.sort((a, b) => b.score - a.score);
    const toBeat = beamSize === 1 && found.length ? Infinity : found[nBest - 1]?.score ?? -Infinity;
    const alive = last ? [] : best.filter(c => c.logProb / largest > toBeat);
    beams = alive.map(({ parent, token, logProb }) => ({
      parent, token, logProb,
      ids: [...beams[parent].ids, token],
      looked: [...beams[parent].looked, looked[parent]],
    }));
    if (beams.length) await watch(beams[0]);
  }
  return found.slice(0, nBest);
}

// --- the model --------------------------------------------------------------------------

// Steps of the exported graphs for one source, as those of chapter 22.
export class Steps {
  static async of(model, ids) {
    const { ort, encoder } = model, steps = new Steps();
    const source = new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]);
    Object.assign(steps, { ort, session: model.session, source: await encoder.run({ src_ids: source }) });
    const empty = x => new ort.Tensor("float32", new Float32Array(0), x.dims.with(3, 0));
    steps.keys = empty(steps.source.source_keys);
    steps.values = empty(steps.source.source_values);
    return steps;
  }

  async step(tokens, parents) {
    const int64 = ids => new this.ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [ids.length]);
    const { logits, keys, values, weights } = await this.session.run({
      tokens: int64(tokens), parents: int64(parents),
      past_keys: this.keys, past_values: this.values, ...this.source,
    });
    Object.assign(this, { keys, values });
    const [layers, heads, beams, length] = weights.dims;
    const size = logits.dims[1];
    const row = (layer, head, beam) => {
      const start = ((layer * heads + head) * beams + beam) * length;
      return weights.data.slice(start, start + length);
    };
    const range = n => [...Array(n).keys()];
    return {
      logits: tokens.map((_, j) => logits.data.subarray(j * size, (j + 1) * size)),
      looked: tokens.map((_, j) => range(layers).map(l => range(heads).map(h => row(l, h, j)))),
    };
  }
}

// What went wrong, in words for the reader.
class Trouble extends Error {}

export async function fetched(address, report = () => {}) {
  let answer;
  try {
    answer = await fetch(address);
  } catch {
    throw new Trouble("The model could not be loaded: the connection broke off.");
  }
  const name = new URL(address).pathname.split("/").at(-1);
  if (!answer.ok) throw new Trouble(`The model could not be loaded: ${name} is not there (${answer.status}).`);
  const parts = [], reader = answer.body.getReader();
  let size = 0;
  try {
    for (let got; !(got = await reader.read()).done; ) {
      parts.push(got.value);
      report((size += got.value.length) - got.value.length, size);
    }
  } catch {
    throw new Trouble(`The model could not be loaded: ${name} broke off.`);
  }
  const whole = new Uint8Array(size);
  parts.reduce((at, part) => (whole.set(part, at), at + part.length), 0);
  return whole;
}

export async function checked(content, name, known) {
  const damaged = new Trouble(`The model could not be loaded: ${name} came damaged.`);
  if (content.length !== known.size) throw damaged;
  if (!globalThis.crypto?.subtle) return content; // only where the connection is safe
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  if (Array.from(hash, byte => byte.toString(16).padStart(2, "0")).join("") !== known.sha256) throw damaged;
  return content;
}

// Fetch everything at once, and make ready what translates.
export async function loadModel(folder, runtime, version, report = () => {}) {
  let loaded = 0;
  const count = (before, now) => report((loaded += now - before));
  const get = (name, place = folder) => fetched(new URL(`${name}?v=${version}`, place).href, count);
  const names = ["encoder.onnx", "step.onnx", "weights.bin", "normalizer.bin"];
  const [ort, wasm, manifest, ...files] = await Promise.all([
    import(new URL("ort.wasm.bundle.min.mjs", runtime).href),
    get("ort-wasm-simd-threaded.wasm", runtime),
    get("manifest.json").then(bytes => JSON.parse(UTF8.decode(bytes))),
    ...names.map(name => get(name)),
  ]);
  const [encoder, step, weights, table] = await Promise.all(
    files.map((content, i) => checked(content, names[i], manifest.files[names[i]])),
  );
  ort.env.wasm.numThreads = 1; // more would need special headers from the server
  ort.env.wasm.wasmBinary = wasm.buffer;
  ort.env.logLevel = "error";
  const how = { executionProviders: ["wasm"], externalData: [{ path: "weights.bin", data: weights }] };
  const model = { ort, manifest, tokenizer: new Tokenizer(manifest.tokenizer, table.buffer) };
  model.encoder = await ort.InferenceSession.create(encoder, how);
  model.session = await ort.InferenceSession.create(step, how);
  return model;
}

// Translate a text: for each of its sentences the pieces read and the hypotheses.
export async function translate(model, text, beamSize, watch = async () => {}) {
  const { manifest, tokenizer } = model;
  const { ids: special, decoding } = manifest;
  const { line, parts, foreign, cut, show, written } = partsOf(text, tokenizer, decoding.max_length);
  const how = {
    beamSize, nBest: beamSize, alpha: decoding.alpha, neverSaid: decoding.never_said,
    bos: special.start, eos: special.end,
  };
  const pieces = ids => ids.map(id => manifest.tokenizer.pieces[id]);
  const sentences = [], read = parts.filter(part => part.row.length);
  for (const [i, { row, text: left, signs }] of read.entries()) {
    const source = [...row, special.end];
    const steps = await Steps.of(model, source);
    const shown = beam => {
      const text = show(written(putBack(oneLine(tokenizer.decode(beam.ids)), left, signs)));
      const words = tokenizer.words(beam.ids).map(word => ({ ...word, text: written(word.text) }));
      return { ...beam, text, ...withSigns(words, text, signs.map(sign => ({ ...sign, text: show(sign.text) }))) };
    };
    const limit = row.length + decoding.max_extra;
    const seen = best => watch({ sentence: i, of: read.length, source: pieces(source), best: shown(best) });
    let found = await search(steps, limit, how, seen);
    const wrong = ({ ids }) => wrongNumbers(tokenizer.decode(row), tokenizer.decode(ids));
    if (beamSize > 1 && wrong(found[0])) { // chapter 17's look_again
      const wide = 4 * beamSize, again = await Steps.of(model, source);
      const more = await search(again, limit, { ...how, beamSize: wide, nBest: wide }, seen);
      const every = new Map([...more, ...found].map(beam => [beam.ids.join(), beam]));
      found = [...every.values()].sort((a, b) => wrong(a) - wrong(b) || b.score - a.score);
      found = found.slice(0, beamSize);
    }
    sentences.push({ source: pieces(source), found: found.map(shown) });
  }
  let whole = "", before = ""; // a sentence's `before` holds parts that are kept as they are
  for (const part of parts) {
    const sentence = sentences[read.indexOf(part)];
    const text = sentence ? sentence.found[0].text : show(written(part.text));
    before += gap(whole, text);
    whole += gap(whole, text) + text;
    if (sentence) [sentence.before, before] = [before, ""];
    else before += text;
  }
  return { line: parts.length ? whole : line, foreign, cut, sentences, after: before };
}

// --- in the worker ----------------------------------------------------------------------

if (typeof document === "undefined" && typeof self !== "undefined") {
  const here = new URL("./", self.location.href);
  const say = message => self.postMessage(message);
  let loading, stopped = false;

  // Let a message come in, and wait: that is how Stop is heard.
  async function pause(milliseconds) {
    const end = performance.now() + milliseconds;
    do {
      await new Promise(resume => {
        const { port1, port2 } = new MessageChannel();
        port1.onmessage = () => (port1.close(), resume());
        if (milliseconds) setTimeout(() => port2.postMessage(0), Math.min(50, end - performance.now()));
        else port2.postMessage(0);
      });
      if (stopped) throw new Trouble("Stopped.");
    } while (performance.now() < end);
  }

  async function answer({ text, beamSize, wait, version }) {
    const place = name => new URL(`${name}/`, here).href;
    const progress = bytes => say({ loaded: bytes });
    loading ??= loadModel(place("translator-model"), place("onnxruntime"), version, progress);
    const model = await loading.catch(error => {
      loading = undefined; // the next try begins afresh
      throw error;
    });
    say({ ready: true });
    await pause(0);
    const start = performance.now();
    const result = await translate(model, text, beamSize, async seen => {
      say({ seen });
      await pause(wait);
    });
    say({ result, milliseconds: performance.now() - start });
  }

  self.onmessage = async ({ data }) => {
    if (data.stop) {
      stopped = true;
      return;
    }
    stopped = false;
    try {
      await answer(data);
    } catch (error) {
      const known = error instanceof Trouble;
      say({ trouble: known ? error.message : `It did not work: ${String(error).slice(0, 300)}` });
    }
  };
}
