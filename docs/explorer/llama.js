// A Llama over a ragged KV cache: safetensors in, logits out.

const CHUNK = 256; // tokens of a forward pass; longer prompts are read in several passes

/** Return a function from a tensor's name to its values as float32 in the arena. buffer: a safetensors file of BF16. */
export function safetensors(buffer, arena) {
  const size = Number(new DataView(buffer).getBigUint64(0, true)), start = 8 + size;
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  return (name) => {
    const { dtype, data_offsets: [from, to] } = header[name];
    if (dtype !== "BF16") throw new Error(`${name} is ${dtype}, but this page reads BF16`);
    const halves = new Uint16Array(buffer, start + from, (to - from) / 2), values = arena.take(halves.length);
    const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
    halves.forEach((half, i) => { bits[i] = half << 16; }); // a bfloat16 is the upper half of a float32
    return values;
  };
}

/** The weights. config: config.json. tensor: of `safetensors`. */
export class Llama {
  constructor(config, tensor, arena) {
    Object.assign(this, { arena, context: config.max_position_embeddings, vocabulary: config.vocab_size });
    Object.assign(this, { hidden: config.hidden_size, inner: config.intermediate_size, size: config.head_dim });
    // Groups of heads share keys and values.
    Object.assign(this, { heads: config.num_attention_heads, groups: config.num_key_value_heads });
    Object.assign(this, { theta: config.rope_parameters.rope_theta, epsilon: config.rms_norm_eps });
    this.embedding = tensor("model.embed_tokens.weight");
    this.norm = tensor("model.norm.weight");
    this.layers = Array.from({ length: config.num_hidden_layers }, (_, i) => {
      const of = (name) => tensor(`model.layers.${i}.${name}.weight`);
      return {
        before: of("input_layernorm"), after: of("post_attention_layernorm"),
        q: of("self_attn.q_proj"), k: of("self_attn.k_proj"), v: of("self_attn.v_proj"), o: of("self_attn.o_proj"),
        gate: of("mlp.gate_proj"), up: of("mlp.up_proj"), down: of("mlp.down_proj"),
      };
    });
  }
}

/** A model with a KV cache: `rows` rows of `capacity` positions (a multiple of 8), each with a length of its own. */
export class Runner {
  constructor(model, rows, capacity) {
    const { arena, hidden, inner, size, heads, groups, vocabulary, theta } = model;
    const half = size / 2, share = heads / groups;
    Object.assign(this, { model, arena, capacity, cached: Array(rows).fill(0) });
    const many = (count, make) => Array.from({ length: count }, make);
    const cache = () => many(rows, () => many(groups, () => arena.take(capacity * size)));
    // By layer, row and group. Keys are [capacity, size]; values are transposed, [size, capacity].
    this.caches = model.layers.map(() => ({ keys: cache(), values: cache() }));
    const take = (width) => arena.take(CHUNK * width);
    this.x = take(hidden); this.h = take(hidden); this.o = take(hidden);
    this.q = take(heads * size); this.k = take(groups * size); this.v = take(groups * size);
    this.queries = take(share * size); this.scores = take(share * capacity); this.mixed = take(share * size);
    this.attended = take(heads * size);
    this.gate = take(inner); this.up = take(inner); this.logits = take(vocabulary);
    this.cos = new Float32Array(capacity * half); this.sin = new Float32Array(capacity * half);
    for (let i = 0; i < capacity * half; i++) {
      const angle = Math.fround(Math.floor(i / half) * Math.fround(1 / theta ** ((2 * (i % half)) / size)));
      this.cos[i] = Math.cos(angle); this.sin[i] = Math.sin(angle);
    }
  }

  /** Read the tokens that the cache lacks. Return the logits after the last `wanted` tokens of each row. */
  feed(rows) {
    const results = rows.map(() => []), queue = [];
    for (const [i, { id, tokens, wanted }] of rows.entries()) {
      for (let position = this.cached[id]; position < tokens.length; position++) {
        const result = position < tokens.length - wanted ? null : results[i];
        queue.push({ row: id, position, token: tokens[position], result });
      }
      this.cached[id] = tokens.length;
    }
    for (let i = 0; i < queue.length; i += CHUNK) this.forward(queue.slice(i, i + CHUNK));
    return results;
  }

  forward(fed) {
    const { model, arena, x, h, o, q, k, v, attended, gate, up } = this, n = fed.length;
    const { hidden, inner, embedding, vocabulary } = model, [wide, narrow] = [q.length / CHUNK, k.length / CHUNK];
    const vector = (values, i) => values.subarray(i * hidden, (i + 1) * hidden);
    for (const [t, { token }] of fed.entries()) x.set(vector(embedding, token), t * hidden);
    for (const [i, layer] of model.layers.entries()) {
      this.normalize(h, x, layer.before, n);
      arena.matmul(q, h, layer.q, n, hidden, wide);
      arena.matmul(k, h, layer.k, n, hidden, narrow);
      arena.matmul(v, h, layer.v, n, hidden, narrow);
      this.rotate(q, wide, fed);
      this.rotate(k, narrow, fed);
      this.store(this.caches[i], fed);
      this.attend(this.caches[i], fed);
      arena.matmul(o, attended, layer.o, n, wide, hidden);
      for (let j = 0; j < n * hidden; j++) x[j] += o[j];
      this.normalize(h, x, layer.after, n);
      arena.matmul(gate, h, layer.gate, n, hidden, inner);
      arena.matmul(up, h, layer.up, n, hidden, inner);
      for (let j = 0; j < n * inner; j++) gate[j] *= up[j] / (1 + Math.exp(-gate[j])); // SwiGLU
      arena.matmul(o, gate, layer.down, n, inner, hidden);
      for (let j = 0; j < n * hidden; j++) x[j] += o[j];
    }
    this.normalize(h, x, model.norm, n);
    const asked = [...fed.entries()].filter(([, { result }]) => result);
    for (const [i, [t]] of asked.entries()) x.set(vector(h, t), i * hidden);
    arena.matmul(this.logits, x, embedding, asked.length, hidden, vocabulary); // tied weights
    for (const [i, [, { result }]] of asked.entries()) {
      result.push(this.logits.slice(i * vocabulary, (i + 1) * vocabulary));
    }
  }

  /** Root-mean-square norm of n tokens. */
  normalize(y, x, weight, n) {
    const { hidden, epsilon } = this.model;
    for (let t = 0; t < n; t++) {
      let sum = 0;
      for (let i = 0; i < hidden; i++) sum += x[t * hidden + i] ** 2;
      const scale = 1 / Math.sqrt(sum / hidden + epsilon);
      for (let i = 0; i < hidden; i++) y[t * hidden + i] = weight[i] * (x[t * hidden + i] * scale);
    }
  }

  /** Rotary position embedding (Su et al. 2021), in place. */
  rotate(y, width, fed) {
    const { size } = this.model, half = size / 2;
    for (const [t, { position }] of fed.entries()) {
      for (let head = t * width; head < (t + 1) * width; head += size) {
        for (let i = head; i < head + half; i++) {
          const low = y[i], high = y[i + half], at = position * half + i - head, cos = this.cos[at], sin = this.sin[at];
          y[i] = low * cos - high * sin;
          y[i + half] = high * cos + low * sin;
        }
      }
    }
  }

  /** Write keys and values at each token's own position. Entries of rejected tokens are overwritten. */
  store({ keys, values }, fed) {
    const { size, groups } = this.model;
    for (const [t, { row, position }] of fed.entries()) {
      for (let group = 0; group < groups; group++) {
        const from = (t * groups + group) * size;
        keys[row][group].set(this.k.subarray(from, from + size), position * size);
        for (let i = 0; i < size; i++) values[row][group][i * this.capacity + position] = this.v[from + i];
      }
    }
  }

  /** Attention of each token to its row, up to itself. */
  attend({ keys, values }, fed) {
    const { arena, queries, scores, mixed, q, attended, capacity } = this, { size, heads, groups } = this.model;
    const share = heads / groups, width = share * size, scale = 1 / Math.sqrt(size);
    for (let from = 0, to; from < fed.length; from = to) { // the tokens of one row
      const { row } = fed[from];
      for (to = from + 1; to < fed.length && fed[to].row === row; to++);
      const positions = Math.ceil((fed[to - 1].position + 1) / 8) * 8, count = (to - from) * share;
      for (let group = 0; group < groups; group++) {
        const at = (t) => t * heads * size + group * width;
        for (let t = from; t < to; t++) queries.set(q.subarray(at(t), at(t) + width), (t - from) * width);
        arena.matmul(scores, queries, keys[row][group], count, size, positions);
        for (let i = 0; i < count; i++) {
          softmax(scores, i * positions, fed[from + Math.floor(i / share)].position + 1, positions, scale);
        }
        arena.matmul(mixed, scores, values[row][group], count, positions, size, capacity);
        for (let t = from; t < to; t++) attended.set(mixed.subarray((t - from) * width, (t - from + 1) * width), at(t));
      }
    }
  }
}

/** Softmax of `visible` scores in place; the other scores up to `positions` become 0. */
function softmax(scores, start, visible, positions, scale) {
  let largest = -Infinity, sum = 0;
  for (let i = start; i < start + visible; i++) largest = Math.max(largest, scores[i]);
  for (let i = start; i < start + visible; i++) sum += scores[i] = Math.exp((scores[i] - largest) * scale);
  for (let i = start; i < start + visible; i++) scores[i] /= sum;
  scores.fill(0, start + visible, start + positions);
}

/** A draft without a model: every token is equally likely. Noise chooses one at temperature 0. */
export function guesses(vocabulary, temperature) {
  const scale = temperature ? 0 : 1e-3, noise = (i) => (_, token) => scale * ((1e4 * Math.sin((token + 1) * i)) % 1);
  const logits = ({ id, tokens }) => [new Float32Array(vocabulary).map(noise(99 * id + tokens.length))];
  return { cached: [], feed: (rows) => rows.map(logits) };
}
