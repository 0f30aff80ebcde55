// A small part of Python for mask_mods: read, checked and run here. Nothing of the text is given to eval.
"use strict";

const Language = (() => {
  const LARGEST = 2 ** 52;
  const LANES = ["b", "h", "q_idx", "kv_idx"];
  const B = 1, H = 2, Q = 4, KV = 8;
  const WORDS = new Set(["def", "lambda", "return", "and", "or", "not", "if", "else", "True", "False"]);
  const REFUSED_WORDS = new Set(["for", "while", "import", "from", "class", "with", "try", "in", "is", "elif", "None",
    "global", "nonlocal", "yield", "await", "async", "assert", "del", "pass", "raise", "break", "continue", "except"]);
  const OPERATORS = ["//=", "**=", "<<=", ">>=", "//", "**", "<<", ">>", "==", "!=", "<=", ">=", "->", ":=", "+=", "-=", "*=",
    "/=", "%=", "&=", "|=", "^=", "+", "-", "*", "/", "%", "@", "&", "|", "^", "~", "<", ">", "=", "(", ")", "[", "]", ",",
    ":", ".", "{", "}", ";"];

  class MaskError extends Error {
    constructor(message, at) {
      super(message);
      this.at = at; // {line, column}, counted from 1, or null
    }
  }

  const quoted = (text) => `'${text}'`;

  // Tokens. A line ends where no bracket is open; its first token knows how far it is indented.

  function tokenize(text) {
    const tokens = [];
    let depth = 0;
    text.split("\n").forEach((line, index) => {
      let column = 0, first = depth === 0;
      while (column < line.length) {
        const rest = line.slice(column), at = { line: index + 1, column: column + 1 };
        const space = /^[ \t\r\f]+/.exec(rest);
        if (space) {
          column += space[0].length;
          continue;
        }
        if (rest[0] === "#") break;
        const token = lex(rest, at);
        if ("([".includes(token.text)) depth += 1;
        if (")]".includes(token.text)) depth = Math.max(depth - 1, 0);
        tokens.push({ ...token, at, first, indent: column });
        first = false;
        column += token.length;
      }
    });
    const last = tokens.at(-1);
    const end = last ? { line: last.at.line, column: last.at.column + last.length } : { line: 1, column: 1 };
    tokens.push({ kind: "end", text: "", at: end, first: true, indent: 0 });
    return tokens;
  }

  function lex(rest, at) {
    const number = /^\d[\w.]*/.exec(rest);
    if (number) {
      const text = number[0], value = Number(text.replaceAll("_", ""));
      if (!/^\d+(_\d+)*$/.test(text) || (/^0\d/.test(text) && value)) {
        throw new MaskError(`${quoted(text)} is not a whole number: masks compute with whole numbers, as in 128`, at);
      }
      if (value > LARGEST) throw new MaskError(`${text} is too large: numbers go up to 2 to the power of 52`, at);
      return { kind: "number", text, value, length: text.length };
    }
    const name = /^[\p{L}_][\p{L}\p{N}_]*/u.exec(rest);
    if (name) {
      const text = name[0];
      if (REFUSED_WORDS.has(text)) {
        throw new MaskError(`${quoted(text)} is not known here: a mask is assignments and one returned expression`, at);
      }
      return { kind: WORDS.has(text) ? "word" : "name", text, length: text.length };
    }
    const text = OPERATORS.find((operator) => rest.startsWith(operator));
    if (text) return { kind: "operator", text, length: text.length };
    if (rest[0] === '"' || rest[0] === "'") throw new MaskError("text has no place in a mask: take the quotes out", at);
    throw new MaskError(`${quoted(rest[0])} is not known here`, at);
  }

  // The tree. A node has a kind and the place it came from.

  class Parser {
    constructor(tokens) {
      this.tokens = tokens;
      this.index = 0;
      this.notes = new Set();
    }

    get token() { return this.tokens[this.index]; }

    is(...texts) { return this.token.kind !== "number" && texts.includes(this.token.text) && !this.ended(); }

    // A token that begins a line belongs to no expression of the line before.
    ended() { return this.token.kind === "end" || (this.token.first && this.index > this.start); }

    take() { return this.tokens[this.index++]; }

    expect(text, where) {
      if (this.is(text)) return this.take();
      throw this.unexpected(`${quoted(text)} ${where}`);
    }

    unexpected(wanted) {
      const found = this.ended() ? "the line ends" : `${quoted(this.token.text)} came`;
      const previous = this.tokens[this.index - 1];
      const at = this.ended() && previous ? { line: previous.at.line, column: previous.at.column + previous.length } : this.token.at;
      return new MaskError(`expected ${wanted}, but ${found}`, at);
    }

    statements(indent) {
      const found = [];
      while (this.token.kind !== "end") {
        this.start = this.index;
        if (this.token.indent < indent) break;
        if (this.token.indent > indent) throw new MaskError("this line is indented farther than the one before", this.token.at);
        found.push(this.statement(indent));
        if (!this.ended()) throw this.unexpected("the end of the line");
        if (["return", "value", "def", "lambda"].includes(found.at(-1).kind)) break;
      }
      return found;
    }

    statement(indent) {
      const at = this.token.at;
      if (this.is("def")) return this.definition(indent);
      if (this.is("return")) {
        this.take();
        return { kind: "return", value: this.expression(), at };
      }
      if (this.is("if", "else")) {
        throw new MaskError(`${quoted(this.token.text)} cannot begin a line here: write a & b, or torch.where(a, x, y)`, at);
      }
      const values = this.list();
      if (!this.is("=")) {
        if (this.token.kind === "operator" && this.token.text.endsWith("=") && !this.ended()) {
          throw new MaskError(`${quoted(this.token.text)} is not known here: write the assignment out, x = x + 1`, this.token.at);
        }
        if (values.length > 1) throw new MaskError("a mask is one expression, not several with commas", at);
        return values[0].kind === "lambda" ? values[0] : { kind: "value", value: values[0], at };
      }
      for (const target of values) {
        if (target.kind !== "name") throw new MaskError("only names can be assigned", target.at);
      }
      const equals = this.take();
      const right = this.list();
      if (this.is("=")) throw new MaskError("one assignment a line: the second '=' is one too many", this.token.at);
      if (right.length !== values.length) {
        throw new MaskError(`${values.length} names on the left, ${right.length} values on the right`, equals.at);
      }
      if (right[0].kind === "lambda") return right[0];
      return { kind: "assign", names: values.map((target) => target.name), values: right, at };
    }

    definition(indent) {
      const at = this.take().at;
      if (this.token.kind !== "name") throw this.unexpected("the function's name after 'def'");
      this.take();
      this.expect("(", "after the function's name");
      const names = this.parameters(")");
      this.expect(")", "after the four names");
      this.expect(":", "after the names");
      if (!this.token.first) {
        const body = this.statement(indent);
        if (body.kind !== "return") throw new MaskError("expected 'return' here, as in def mask(b, h, q, kv): return q >= kv", body.at);
        return { kind: "def", names, body: [body], at };
      }
      if (this.token.kind === "end" || this.token.indent <= indent) {
        throw new MaskError("expected the function's indented lines below 'def'", this.token.at);
      }
      const body = this.statements(this.token.indent);
      const last = body.at(-1);
      if (last.kind !== "return") throw new MaskError("the function's last line has to begin with 'return'", last.at);
      return { kind: "def", names, body, at };
    }

    parameters(closing) {
      const names = [], at = this.token.at;
      while (!this.is(closing)) {
        if (this.token.kind !== "name" || this.ended()) throw this.unexpected("a name of b, h, q_idx and kv_idx");
        names.push(this.take().text);
        if (!this.is(",")) break;
        this.take();
      }
      if (names.length !== 4) throw new MaskError(`a mask takes four arguments (b, h, q_idx, kv_idx), these are ${names.length}`, at);
      if (new Set(names).size !== 4) throw new MaskError("two arguments have the same name", at);
      return names;
    }

    list() {
      const values = [this.expression()];
      while (this.is(",")) {
        this.take();
        values.push(this.expression());
      }
      return values;
    }

    expression() {
      const at = this.token.at;
      if (this.is("lambda")) {
        this.take();
        const names = this.parameters(":");
        this.expect(":", "after the four names");
        return { kind: "lambda", names, body: [{ kind: "return", value: this.expression(), at }], at };
      }
      const value = this.either();
      if (!this.is("if")) return value;
      this.take();
      const condition = this.either();
      this.expect("else", "after the condition of 'if'");
      this.notes.add("flex_attention cannot trace 'x if c else y': write torch.where(c, x, y) there.");
      return { kind: "choose", parts: [condition, value, this.expression()], at };
    }

    either() { return this.word("or", () => this.word("and", () => this.negation())); }

    word(text, next) {
      let left = next();
      while (this.is(text)) {
        const at = this.take().at;
        this.notes.add(`flex_attention cannot trace '${text}': write ${text === "or" ? "|" : "&"} there, and parentheses around comparisons.`);
        left = { kind: text, parts: [left, next()], at };
      }
      return left;
    }

    negation() {
      if (!this.is("not")) return this.comparison();
      const at = this.take().at;
      this.notes.add("flex_attention cannot trace 'not': write ~ there.");
      return { kind: "not", parts: [this.negation()], at };
    }

    comparison() {
      const first = this.binary(0), rest = [];
      const at = this.token.at;
      while (this.is("==", "!=", "<", "<=", ">", ">=")) rest.push([this.take().text, this.binary(0)]);
      if (rest.length === 0) return first;
      if (rest.length > 1) this.notes.add("flex_attention cannot trace 'a <= b < c': write (a <= b) & (b < c) there.");
      return { kind: "compare", signs: rest.map(([sign]) => sign), parts: [first, ...rest.map(([, part]) => part)], at };
    }

    binary(level) {
      const levels = [["|"], ["^"], ["&"], ["<<", ">>"], ["+", "-"], ["*", "//", "%", "/", "@"]];
      if (level === levels.length) return this.unary();
      let left = this.binary(level + 1);
      while (this.is(...levels[level])) {
        const { text, at } = this.take();
        if (text === "/") throw new MaskError("'/' gives fractions: write '//', which rounds down", at);
        if (text === "@") throw new MaskError("'@' is not known here", at);
        left = { kind: "binary", sign: text, parts: [left, this.binary(level + 1)], at };
      }
      return left;
    }

    unary() {
      if (!this.is("-", "+", "~")) return this.postfix();
      const { text, at } = this.take();
      return { kind: "unary", sign: text, parts: [this.unary()], at };
    }

    postfix() {
      let value = this.atom();
      for (;;) {
        const at = this.token.at;
        if (this.is("[")) {
          this.take();
          const places = this.list();
          this.expect("]", "after the index");
          value = value.kind === "index"
            ? { ...value, parts: [...value.parts, ...places] } // t[i][j] is t[i, j]
            : { kind: "index", table: value, parts: places, at };
        } else if (this.is(".")) {
          this.take();
          if (this.token.kind !== "name" || this.ended()) throw this.unexpected("a name after '.'");
          const name = this.take().text;
          if (value.kind === "name" && value.name === "torch") value = { kind: "name", name: `torch.${name}`, at: value.at };
          else value = this.call(`.${name}`, [value], at);
        } else if (this.is("(")) {
          if (value.kind !== "name") throw new MaskError("only functions can be called", at);
          value = this.call(value.name, [], value.at);
        } else if (this.is("**")) {
          throw new MaskError("'**' is not known here: write the product out", at);
        } else {
          return value;
        }
      }
    }

    call(name, parts, at) {
      const named = {};
      this.expect("(", `after ${quoted(name)}: attributes of values are not known here`);
      while (!this.is(")")) {
        const next = this.tokens[this.index + 1];
        if (this.token.kind === "name" && next.text === "=" && next.kind === "operator") {
          const key = this.take().text;
          this.take();
          named[key] = this.expression();
        } else {
          if (Object.keys(named).length) throw this.unexpected("a named argument, as those before");
          parts = [...parts, this.expression()];
        }
        if (!this.is(",")) break;
        this.take();
      }
      this.expect(")", "after the arguments");
      if (name === "min" || name === "max") this.notes.add(`flex_attention cannot trace '${name}': write torch.${name}imum there.`);
      return { kind: "call", name, parts, named, at };
    }

    atom() {
      if (this.ended()) throw this.unexpected("a value");
      const { kind, text, at, value } = this.token;
      if (kind === "number") {
        this.take();
        return { kind: "number", value, at };
      }
      if (kind === "name") {
        this.take();
        return { kind: "name", name: text, at };
      }
      if (this.is("True", "False")) {
        this.take();
        return { kind: "truth", value: text === "True" ? 1 : 0, at };
      }
      if (this.is("(")) {
        this.take();
        const inner = this.expression();
        this.expect(")", "to close the one before");
        return { ...inner, at };
      }
      if (this.is("[")) {
        this.take();
        const parts = [];
        while (!this.is("]")) {
          parts.push(this.expression());
          if (!this.is(",")) break;
          this.take();
        }
        this.expect("]", "to close the list");
        return { kind: "list", parts, at };
      }
      throw this.unexpected("a value");
    }
  }

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
      const rule = CALLS[name.replace(/^torch\./, "")];
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
    const known = new Map(Object.entries(given).map(([name, value]) => [name, typeof value === "number" ? value : unpacked(value)]));
    const parser = new Parser(tokenize(text));
    const lines = parser.statements(parser.token.indent);
    if (!lines.length) throw new MaskError("there is nothing: try q_idx >= kv_idx", { line: 1, column: 1 });
    if (parser.token.kind !== "end") throw new MaskError("nothing can follow the mask", parser.token.at);
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
    return { lane, run, deps: last.deps, notes: [...parser.notes], readsBatch: (last.deps & B) > 0, readsHead: (last.deps & H) > 0 };
  }

  return { compile, MaskError };
})();
