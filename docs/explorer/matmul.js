// Memory for float32 numbers, and the matrix product over it: WebAssembly SIMD, or plain JavaScript without it.

const PAGE = 65536; // bytes of a page of WebAssembly memory

/** Return an arena of `megabytes` with the fastest product that the browser has. simd: false selects JavaScript. */
export async function arena(megabytes, simd = true) {
  const pages = Math.ceil((megabytes * 1e6) / PAGE);
  if (simd) {
    try {
      const memory = new WebAssembly.Memory({ initial: pages, maximum: pages });
      const code = await (await fetch(new URL("matmul.wasm", import.meta.url))).arrayBuffer();
      const { instance } = await WebAssembly.instantiate(code, { page: { memory } });
      const product = (y, x, w, n, width, outs, stride) =>
        instance.exports.matmul(y.byteOffset, x.byteOffset, w.byteOffset, n, width, outs, stride);
      return new Arena("WebAssembly SIMD", memory.buffer, product);
    } catch (error) {
      console.info(`no WebAssembly SIMD: ${error.message}`);
    }
  }
  return new Arena("plain JavaScript", new ArrayBuffer(pages * PAGE), matmul);
}

class Arena {
  /** y[n, outs] = x[n, width] · w[outs, width]ᵀ. stride: floats from one row of w to the next. */
  matmul(y, x, w, n, width, outs, stride = width) {
    this.product(y, x, w, n, width, outs, stride);
  }

  constructor(name, buffer, product) {
    Object.assign(this, { name, buffer, product, used: 0 });
  }

  /** Return `count` floats, aligned to 16 bytes. Setting `used` back frees what was taken since. */
  take(count) {
    const start = this.used, end = start + Math.ceil(count / 4) * 16;
    if (end > this.buffer.byteLength) throw new RangeError("The page's memory is full: choose fewer rows or a shorter prompt.");
    this.used = end;
    return new Float32Array(this.buffer, start, count).fill(0);
  }
}

/** The product of matmul.wat in JavaScript: four tokens a … d by two outputs 0 and 1 at a time. */
function matmul(y, x, w, n, width, outs, stride) {
  for (let token = 0; token < n; token += 4) { // beyond the last token: the last token again
    const [a, b, c, d] = [0, 1, 2, 3].map((more) => Math.min(token + more, n - 1));
    for (let out = 0; out < outs; out += 2) {
      let a0 = 0, b0 = 0, c0 = 0, d0 = 0, a1 = 0, b1 = 0, c1 = 0, d1 = 0;
      for (let i = 0, p = out * stride, q = p + stride; i < width; i++, p++, q++) {
        const u = w[p], v = w[q], xa = x[a * width + i], xb = x[b * width + i], xc = x[c * width + i], xd = x[d * width + i];
        a0 += u * xa; b0 += u * xb; c0 += u * xc; d0 += u * xd;
        a1 += v * xa; b1 += v * xb; c1 += v * xc; d1 += v * xd;
      }
      y[a * outs + out] = a0; y[b * outs + out] = b0; y[c * outs + out] = c0; y[d * outs + out] = d0;
      y[a * outs + out + 1] = a1; y[b * outs + out + 1] = b1; y[c * outs + out + 1] = c1; y[d * outs + out + 1] = d1;
    }
  }
}
