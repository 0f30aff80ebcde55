// Reads a small part of Python: from a mask's text to a tree.
"use strict";

const Reader = (() => {
  const LARGEST = 2 ** 52;
  const WORDS = new Set(["def", "lambda", "return", "and", "or", "not", "if", "else", "True", "False"]);
  const REFUSED_WORDS = new Set(["for", "while", "import", "from", "class", "with", "try", "in", "is", "elif", "None",
    "global", "nonlocal", "yield", "await", "async", "assert", "del", "pass", "raise", "break", "continue", "except"]);
  // A string that stands on lines of its own.
  const DOCSTRING = /^[ \t]*("""[^]*?"""|'''[^]*?'''|"[^"\n]*"|'[^'\n]*')[ \t]*(#.*)?$/gm;
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
    text.replace(DOCSTRING, (found) => found.replace(/[^\n]/g, " ")).split("\n").forEach((line, index) => {
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
      const named = Object.create(null);
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

  // The statements of a text. A tree's nodes have a kind and a place; notes say what flex_attention cannot trace.
  function read(text) {
    const parser = new Parser(tokenize(text));
    const lines = parser.statements(parser.token.indent);
    if (!lines.length) throw new MaskError("there is nothing: try q_idx >= kv_idx", { line: 1, column: 1 });
    if (parser.token.kind !== "end") throw new MaskError("nothing can follow the mask", parser.token.at);
    return { lines, notes: [...parser.notes] };
  }

  return { read, MaskError, LARGEST, quoted };
})();
