// Byte-level BPE as tokenizer.json of the embedded models describes it.

// Newlines and digits stand alone. Everything else is cut like in GPT-2.
const ALONE = /(\n|\p{N})/u;
const PIECES = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

export class Tokenizer {
  constructor({ model, added_tokens: added }) {
    this.ids = new Map([...Object.entries(model.vocab), ...added.map(({ content, id }) => [content, id])]);
    this.names = new Map([...this.ids].map(([name, id]) => [id, name]));
    this.special = added.map(({ content }) => content);
    this.ranks = new Map(model.merges.map((pair, rank) => [pair.join(" "), rank]));
    // Each byte has a printable letter: itself, or a letter from U+0100 on.
    const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    let next = 256;
    this.letters = Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(printable(byte) ? byte : next++));
    this.bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
  }

  encode(text) {
    const found = this.special.find((name) => text.includes(name));
    if (found) {
      const at = text.indexOf(found);
      return [...this.encode(text.slice(0, at)), this.ids.get(found), ...this.encode(text.slice(at + found.length))];
    }
    const pieces = text.split(ALONE).flatMap((part) => part.match(PIECES) ?? []);
    return pieces.flatMap((piece) => this.merge([...new TextEncoder().encode(piece)].map((byte) => this.letters[byte])));
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

  /** Return a function from the next id to the text that the id completes. Special tokens have no text. */
  decoder() {
    const utf8 = new TextDecoder();
    return (id) => {
      const name = this.names.get(id);
      if (this.special.includes(name)) return "";
      return utf8.decode(Uint8Array.from(name, (letter) => this.bytes.get(letter)), { stream: true });
    };
  }
}
