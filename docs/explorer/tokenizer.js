// Byte-level BPE as tokenizer.json of the embedded models describes it.

const END = "<|endoftext|>", ALONE = /(<\|endoftext\|>|\n|\p{N})/u; // everything else is cut as in GPT-2
const SPACE = "\\p{White_Space}", WORDS = `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^${SPACE}\\p{L}\\p{N}]+`;
const PIECES = new RegExp(`${WORDS}|${SPACE}+(?!\\P{White_Space})|${SPACE}+`, "gu");

export class Tokenizer {
  constructor({ model }) {
    this.ids = new Map(Object.entries(model.vocab));
    this.names = new Map([...this.ids].map(([name, id]) => [id, name]));
    this.end = this.ids.get(END);
    this.ranks = new Map(model.merges.map((pair, rank) => [pair.join(" "), rank]));
    // Each byte has a printable letter: itself, or a letter from U+0100 on.
    const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    let next = 256;
    this.letters = Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(printable(byte) ? byte : next++));
    this.bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
  }

  encode(text) {
    const utf8 = new TextEncoder(), letters = (piece) => Array.from(utf8.encode(piece), (byte) => this.letters[byte]);
    const pieces = text.split(ALONE).flatMap((part) => (part === END ? [END] : part.match(PIECES) ?? []));
    return pieces.flatMap((piece) => (piece === END ? [this.end] : this.merge(letters(piece))));
  }

  /** Join the pair of parts with the lowest rank until no pair has a rank. Return the ids. */
  merge(parts) {
    for (;;) {
      const ranks = parts.slice(1).map((part, i) => this.ranks.get(`${parts[i]} ${part}`) ?? Infinity);
      const lowest = Math.min(...ranks), at = ranks.indexOf(lowest);
      if (!ranks.length || lowest === Infinity) return parts.map((part) => this.ids.get(part));
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  /** Return a function from the next id to the text that the id completes. The end of text has none. */
  decoder() {
    const utf8 = new TextDecoder();
    return (id) => {
      const bytes = Uint8Array.from(this.names.get(id), (letter) => this.bytes.get(letter));
      return id === this.end ? "" : utf8.decode(bytes, { stream: true });
    };
  }
}
