// Which tiles of a mask are full, partial and empty, as create_block_mask counts them.
"use strict";

const Tiles = (() => {
  const EMPTY = 0, PARTIAL = 1, FULL = 2;

  // One batch and head, a row of tiles at a time: yields after each, and returns the kinds at last.
  function* scan(program, { queries, keys, tileQ, tileKV, b = 0, h = 0 }) {
    const rows = Math.ceil(queries / tileQ), columns = Math.ceil(keys / tileKV);
    const found = { rows, columns, kinds: new Uint8Array(rows * columns), done: 0, full: 0, partial: 0, empty: 0, pairs: 0 };
    for (let row = 0; row < rows; row += 1) {
      enter(program, b, h); // others may have used the program since
      for (let column = 0; column < columns; column += 1) {
        const kind = kindOf(program, row, column, queries, keys, tileQ, tileKV);
        found.kinds[row * columns + column] = kind;
        found[["empty", "partial", "full"][kind]] += 1;
        if (kind !== EMPTY) {
          found.pairs += Math.min(tileQ, queries - row * tileQ) * Math.min(tileKV, keys - column * tileKV);
        }
      }
      found.done = row + 1;
      yield found;
    }
    return found;
  }

  function enter({ lane }, b, h) {
    lane.b = b;
    lane.h = h;
    lane.grid += 1;
    lane.row += 1;
  }

  // A tile that reaches beyond the end is never full.
  function kindOf({ lane, run }, row, column, queries, keys, tileQ, tileKV) {
    const q0 = row * tileQ, kv0 = column * tileKV;
    const q1 = Math.min(q0 + tileQ, queries), kv1 = Math.min(kv0 + tileKV, keys);
    let seen = false, unseen = q1 - q0 < tileQ || kv1 - kv0 < tileKV;
    for (let q = q0; q < q1; q += 1) {
      lane.q = q;
      lane.row += 1;
      for (let kv = kv0; kv < kv1; kv += 1) {
        lane.kv = kv;
        if (run()) seen = true;
        else unseen = true;
        if (seen && unseen) return PARTIAL;
      }
    }
    return seen ? FULL : EMPTY;
  }

  // The pairs of one tile.
  function tokens(program, { queries, keys, tileQ, tileKV, b = 0, h = 0 }, row, column) {
    const q0 = row * tileQ, kv0 = column * tileKV;
    const height = Math.min(tileQ, queries - q0), width = Math.min(tileKV, keys - kv0);
    const seen = new Uint8Array(height * width), { lane, run } = program;
    enter(program, b, h);
    for (let i = 0; i < height; i += 1) {
      lane.q = q0 + i;
      lane.row += 1;
      for (let j = 0; j < width; j += 1) {
        lane.kv = kv0 + j;
        seen[i * width + j] = run();
      }
    }
    return { q0, kv0, height, width, seen };
  }

  function count(program, sizes) {
    let found;
    for (found of scan(program, sizes));
    return found;
  }

  // Two products forward and five backward, two operations for each pair and number of head_dim.
  const flops = (pairs, headDim) => ({ forward: 4 * headDim * pairs, backward: 10 * headDim * pairs });

  return { EMPTY, PARTIAL, FULL, scan, count, tokens, flops };
})();
