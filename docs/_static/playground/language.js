// Runs masks that the reader has read: checks them, and makes closures of their trees. Nothing is given to eval.
"use strict";

const Language = (() => {
  const { MaskError, LARGEST, quoted } = Reader;
  const LANES = ["b", "h", "q_idx", "kv_idx"];
  const B = 1, H = 2, Q = 4, KV = 8;

  // Tables: what a mask captures. Data are whole numbers in one array, whatever the shape.

  function unpacked({ shape, truth, runs }) {
    const data = new Float64Array(shape.reduce((a, b) => a * b, 1));
    for (let i = 0, place = 0; i < runs.length; i += 2) {
      data.fill(runs[i], place, place + runs[i + 1]);
      place += runs[i + 1];
    }
    return { shape, truth, data };
  }

  // The value of an expression outside of the function: a number or a list, of numbers or of lists.
  function constant(node, known) {
    const value = (part) => constant(part, known);
    if (node.kind === "list") return node.parts.map(value);
    if (node.kind === "name" && known.has(node.name)) {
      const found = known.get(node.name);
      if (typeof found === "number" || found.listed) return found.listed || found;
    }
    if (node.kind === "binary" && (node.sign === "*" || node.sign === "+")) {
      const [left, right] = node.parts.map(value);
      const lists = [left, right].filter(Array.isArray).length;
      if (node.sign === "+" && lists === 2) return [...left, ...right];
      if (node.sign === "*" && lists === 1) {
        const [list, times] = Array.isArray(left) ? [left, right] : [right, left];
        if (list.length * times > 2 ** 22) throw new MaskError("this list is too long: 4,194,304 entries are the most", node.at);
        return Array.from({ length: Math.max(times, 0) }, () => list).flat(1);
      }
      if (lists) throw new MaskError(`${quoted(node.sign)} does not go with these two: a list times a number, or two lists`, node.at);
    }
    const built = new Builder(known, []).build(node);
    return built.type === "truth" ? Boolean(built.run()) : built.run();
  }

  function tableOf(list, at) {
    const shape = [];
    for (let level = list; Array.isArray(level); level = level[0]) shape.push(level.length);
    const data = [], kinds = new Set();
    const walk = (value, depth) => {
      if (depth === shape.length) {
        if (Array.isArray(value)) throw new MaskError("the inner lists have different depths", at);
        kinds.add(typeof value);
        data.push(Number(value));
      } else if (!Array.isArray(value) || value.length !== shape[depth]) {
        throw new MaskError("the inner lists have different lengths", at);
      } else {
        value.forEach((inner) => walk(inner, depth + 1));
      }
    };
    walk(list, 0);
    if (kinds.size > 1) throw new MaskError("a list holds either numbers or True and False", at);
    return { shape, truth: kinds.has("boolean"), data: Float64Array.from(data), listed: list };
  }

  // From a tree to closures. Each built part knows its type, on which of b, h, q and kv it depends, and how to run.
  // Truth is 1 and 0. What does not depend on both q and kv is kept: for a row, for a key, or for a head.

  class Builder {
    constructor(known, lanes) {
      this.known = known; // names of the page: numbers and tables
      this.lane = { b: 0, h: 0, q: 0, kv: 0, row: 0, grid: 0 };
      this.names = new Map();
      const { lane } = this;
      const readers = [() => lane.b, () => lane.h, () => lane.q, () => lane.kv];
      lanes.forEach((name, i) => this.names.set(name, { type: "number", deps: 1 << i, run: readers[i], leaf: true }));
    }

    build(node) { return this[node.kind](node); }

    number({ value }) { return { type: "number", deps: 0, run: () => value, leaf: true }; }

    truth({ value }) { return { type: "truth", deps: 0, run: () => value, leaf: true }; }

    name({ name, at }) {
      if (this.names.has(name)) return this.names.get(name);
      const value = this.known.get(name);
      if (typeof value === "number") return this.number({ value });
      if (typeof value === "boolean") return this.truth({ value: Number(value) });
      if (value) throw new MaskError(`${quoted(name)} is a table: read one entry, ${name}[${value.shape.map((_, i) => "ijklmn"[i]).join(", ")}]`, at);
      const all = [...this.names.keys(), ...this.known.keys()].join(", ");
      throw new MaskError(`${quoted(name)} is not defined; there are ${all}`, at);
    }

    list({ at }) { throw new MaskError("a list belongs above the function: give it a name there", at); }

    lambda({ at }) { throw new MaskError("a lambda cannot be a part of an expression", at); }

    parts(node) {
      const parts = node.parts.map((part) => this.build(part));
      const deps = parts.reduce((all, part) => all | part.deps, 0);
      return { parts, deps, runs: parts.map((part) => (part.deps === deps ? part.run : this.kept(part))) };
    }

    // What part.run gives, computed once where it is the same.
    kept(part) {
      const { run, deps, leaf } = part, { lane } = this;
      if (leaf || (deps & Q && deps & KV)) return run;
      if (deps & KV) {
        const values = [], grids = [];
        return () => {
          const { kv, grid } = lane;
          if (grids[kv] !== grid) {
            values[kv] = run();
            grids[kv] = grid;
          }
          return values[kv];
        };
      }
      const stamp = deps & Q ? () => lane.row : () => lane.grid;
      let value, when = -1;
      return () => {
        const now = stamp();
        if (when !== now) {
          value = run();
          when = now;
        }
        return value;
      };
    }

    numbers(node, parts, what) {
      parts.forEach((part, i) => {
        if (part.type !== "number") throw new MaskError(`${what} takes numbers, this is True or False`, (node.parts[i] || node).at);
      });
    }

    unary(node) {
      const { parts, deps, runs: [run] } = this.parts(node);
      if (node.sign === "~") {
        if (parts[0].type === "truth") return { type: "truth", deps, run: () => 1 - run() };
        return { type: "number", deps, run: () => -1 - run() };
      }
      this.numbers(node, parts, quoted(node.sign));
      return { type: "number", deps, run: node.sign === "-" ? () => -run() : run };
    }

    not(node) {
      const { deps, runs: [run] } = this.parts(node);
      return { type: "truth", deps, run: () => (run() ? 0 : 1) };
    }

    and(node) { return this.lazy(node, (left, right) => () => left() && right()); }

    or(node) { return this.lazy(node, (left, right) => () => left() || right()); }

    lazy(node, join) {
      const { parts, deps, runs } = this.parts(node);
      this.same(node, parts);
      return { type: parts[0].type, deps, run: join(...runs) };
    }

    same(node, parts) {
      if (parts[0].type !== parts.at(-1).type) {
        throw new MaskError("one side is a number, the other True or False: compare the number, x != 0", node.at);
      }
    }

    choose(node) {
      const { parts, deps, runs: [condition, yes, no] } = this.parts(node);
      this.same(node, parts.slice(1));
      return { type: parts[1].type, deps, run: () => (condition() ? yes() : no()) };
    }

    compare(node) {
      const { deps, runs } = this.parts(node);
      const pairs = node.signs.map((sign, i) => COMPARE[sign](runs[i], runs[i + 1]));
      if (pairs.length === 1) return { type: "truth", deps, run: pairs[0] };
      return { type: "truth", deps, run: () => (pairs.every((pair) => pair()) ? 1 : 0) };
    }

    binary(node) {
      const { parts, deps, runs } = this.parts(node), { sign, at } = node;
      const truths = parts.every((part) => part.type === "truth");
      if ("&|^".includes(sign)) {
        return { type: truths ? "truth" : "number", deps, run: BITS[sign](...runs) };
      }
      if (sign === "<<" || sign === ">>") this.numbers(node, parts, quoted(sign));
      if (truths) throw new MaskError(`${quoted(sign)} of two truth values: write a & b, a | b or a ^ b`, at);
      return { type: "number", deps, run: ARITHMETIC[sign](...runs, (message) => this.fail(message, at)) };
    }

    fail(message, at) {
      const { b, h, q, kv } = this.lane;
      throw new MaskError(`${message} at b ${b}, h ${h}, q_idx ${q}, kv_idx ${kv}`, at);
    }

    index(node) {
      const name = node.table.kind === "name" ? node.table.name : "";
      const table = this.names.has(name) ? null : this.known.get(name);
      if (!table || !table.shape) {
        throw new MaskError(`only tables can be indexed${name ? `: ${quoted(name)} is ${table === undefined && !this.names.has(name) ? "not defined" : "a number"}` : ""}`, node.table.at);
      }
      const { shape, data, truth } = table;
      if (node.parts.length !== shape.length) {
        throw new MaskError(`${name} has ${shape.length} ${shape.length === 1 ? "axis" : "axes"}, here are ${node.parts.length} indices`, node.at);
      }
      const { parts, deps, runs } = this.parts(node);
      this.numbers(node, parts, "an index");
      const place = (value, axis) => {
        const size = shape[axis];
        if (value >= size || value < -size) this.fail(`${name} has ${size} entries${shape.length > 1 ? ` along axis ${axis}` : ""}, the index is ${value}`, node.at);
        return value < 0 ? value + size : value;
      };
      const type = truth ? "truth" : "number";
      const [first, second] = runs;
      if (runs.length === 1) return { type, deps, run: () => data[place(first(), 0)] };
      if (runs.length === 2) return { type, deps, run: () => data[place(first(), 0) * shape[1] + place(second(), 1)] };
      return { type, deps, run: () => data[runs.reduce((sum, run, axis) => sum * shape[axis] + place(run(), axis), 0)] };
    }

    call(node) {
      const { name, at } = node;
      const bare = name.replace(/^torch\./, ""), rule = Object.hasOwn(CALLS, bare) ? CALLS[bare] : null;
      if (!rule || (name.startsWith("torch.") && !rule.torch) || (!name.startsWith("torch.") && rule.torch === "only")) {
        const all = Object.keys(CALLS).map((known) => (CALLS[known].torch === "only" ? `torch.${known}` : known));
        throw new MaskError(`${quoted(name)} is not known here; there are ${all.join(", ")}`, at);
      }
      const args = [...node.parts];
      for (const [key, value] of Object.entries(node.named)) {
        const place = (rule.named || []).indexOf(key);
        if (place < 0 || args[place]) throw new MaskError(`${name} takes no argument ${quoted(key)} here`, value.at);
        args[place] = value;
      }
      const count = args.filter(Boolean).length;
      if (count < rule.least || args.length > rule.most) {
        const own = name.startsWith(".") ? 1 : 0;
        throw new MaskError(`${name} takes ${rule.takes}, here are ${count - own}`, at);
      }
      const places = args.flatMap((arg, i) => (arg ? [i] : []));
      const full = { kind: "call", parts: places.map((i) => args[i]), at };
      const { parts, deps, runs } = this.parts(full);
      if (name === "torch.where") {
        this.same(full, parts.slice(1));
        if (parts[0].type !== "truth") throw new MaskError("torch.where takes True or False first: compare the number", full.parts[0].at);
        const [condition, yes, no] = runs;
        return { type: parts[1].type, deps, run: () => {
          const left = yes(), right = no(); // both are computed, as torch does
          return condition() ? left : right;
        } };
      }
      this.numbers(full, parts, name);
      const byPlace = [];
      places.forEach((place, i) => { byPlace[place] = runs[i]; });
      return { type: "number", deps, run: rule.make(byPlace) };
    }
  }

  const least = (runs) => runs.length === 2
    ? () => Math.min(runs[0](), runs[1]()) : () => Math.min(...runs.map((run) => run()));
  const most = (runs) => runs.length === 2
    ? () => Math.max(runs[0](), runs[1]()) : () => Math.max(...runs.map((run) => run()));
  const absolute = ([run]) => () => Math.abs(run());
  const CALLS = {
    abs: { least: 1, most: 1, takes: "one number", torch: true, make: absolute },
    min: { least: 2, most: 99, takes: "two or more numbers", make: least },
    max: { least: 2, most: 99, takes: "two or more numbers", make: most },
    minimum: { least: 2, most: 2, takes: "two numbers", torch: "only", make: least },
    maximum: { least: 2, most: 2, takes: "two numbers", torch: "only", make: most },
    where: { least: 3, most: 3, takes: "a condition and two values", torch: "only" },
    ".abs": { least: 1, most: 1, takes: "no argument", make: absolute },
    ".clamp": {
      least: 2, most: 3, takes: "min, max or both", named: ["", "min", "max"],
      make: ([run, low, high]) => {
        const above = low ? () => Math.max(run(), low()) : run;
        return high ? () => Math.min(above(), high()) : above;
      },
    },
  };

  const COMPARE = {
    "==": (a, b) => () => (a() === b() ? 1 : 0),
    "!=": (a, b) => () => (a() !== b() ? 1 : 0),
    "<": (a, b) => () => (a() < b() ? 1 : 0),
    "<=": (a, b) => () => (a() <= b() ? 1 : 0),
    ">": (a, b) => () => (a() > b() ? 1 : 0),
    ">=": (a, b) => () => (a() >= b() ? 1 : 0),
  };

  // JavaScript's own bit operations are of 32 bits.
  const fits = (x) => (x | 0) === x;
  const bits = (small, large) => (a, b) => () => {
    const left = a(), right = b();
    return fits(left) && fits(right) ? small(left, right) : Number(large(BigInt(left), BigInt(right)));
  };
  const BITS = {
    "&": bits((a, b) => a & b, (a, b) => a & b),
    "|": bits((a, b) => a | b, (a, b) => a | b),
    "^": bits((a, b) => a ^ b, (a, b) => a ^ b),
  };

  function remainder(a, b) { // with the sign of b, as in Python
    const rest = a % b;
    return rest !== 0 && rest < 0 !== b < 0 ? rest + b : rest;
  }

  const within = (value, fail) => {
    if (value > LARGEST || value < -LARGEST) fail("a number is larger than 2 to the power of 52");
    return value;
  };
  const divided = (compute) => (a, b, fail) => () => {
    const left = a(), right = b();
    if (right === 0) fail("division by zero");
    return compute(left, right);
  };
  const shifted = (compute) => (a, b, fail) => () => {
    const left = a(), right = b();
    if (right < 0) fail(`a shift by ${right}, which is negative`);
    return within(compute(left, right), fail);
  };
  const ARITHMETIC = {
    "+": (a, b, fail) => () => within(a() + b(), fail),
    "-": (a, b, fail) => () => within(a() - b(), fail),
    "*": (a, b, fail) => () => within(a() * b(), fail),
    "//": divided((a, b) => (a - remainder(a, b)) / b),
    "%": divided(remainder),
    "<<": shifted((a, b) => a * 2 ** b),
    ">>": shifted((a, b) => Math.floor(a / 2 ** b)),
  };

  // A mask from its text. `given` are numbers and packed tables by name.
  function compile(text, given = {}) {
    try {
      return compiled(text, given);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      throw new MaskError("the mask is nested too deeply: give parts of it names", { line: 1, column: 1 });
    }
  }

  function compiled(text, given) {
    const known = new Map(Object.entries(given).map(([name, value]) => [name, typeof value === "number" ? value : unpacked(value)]));
    const { lines, notes } = Reader.read(text);
    let last = lines.pop();
    if (last.kind === "assign") throw new MaskError("the mask is missing below: an expression, a lambda or a def", last.at);
    const names = last.names || LANES;
    let body = last.body;
    if (!body) {
      // A bare expression: the assignments before it may read b, h, q_idx and kv_idx.
      const reads = (node) => node.kind === "name" ? LANES.includes(node.name) || local.has(node.name)
        : [...(node.parts || []), ...Object.values(node.named || {})].some(reads);
      const local = new Set();
      const above = [], within = [];
      for (const line of lines) {
        const inside = line.values.some(reads);
        if (inside) line.names.forEach((name) => local.add(name));
        (inside ? within : above).push(line);
      }
      lines.splice(0, lines.length, ...above);
      body = [...within, last];
    }
    for (const { names: targets, values, at } of lines) {
      const found = values.map((value) => constant(value, known));
      targets.forEach((name, i) => known.set(name, Array.isArray(found[i]) ? tableOf(found[i], at) : found[i]));
    }
    const builder = new Builder(known, names), steps = [];
    for (const line of body.slice(0, -1)) {
      const built = line.values.map((value) => builder.build(value));
      line.names.forEach((name, i) => {
        const { type, deps, leaf } = built[i], run = builder.kept(built[i]);
        if (leaf) {
          builder.names.set(name, built[i]);
          return;
        }
        let value;
        steps.push(() => { value = run(); });
        builder.names.set(name, { type, deps, run: () => value, leaf: true });
      });
    }
    last = builder.build(body.at(-1).value);
    if (last.type !== "truth") throw new MaskError("the mask is a number: compare it, x != 0", body.at(-1).value.at);
    const final = builder.kept(last), { lane } = builder;
    const run = () => {
      for (let i = 0; i < steps.length; i += 1) steps[i]();
      return final();
    };
    return { lane, run, deps: last.deps, notes, readsBatch: (last.deps & B) > 0, readsHead: (last.deps & H) > 0 };
  }

  return { compile, MaskError };
})();
