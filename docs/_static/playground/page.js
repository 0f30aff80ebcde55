// The playground's page: a mask's text, its sizes, its tiles and the tokens of one of them.
"use strict";

(() => {
  const root = document.getElementById("playground-page"); // the page's heading is "playground"
  const byId = (id) => document.getElementById(`playground-${id}`);
  const SIZES = [
    ["queries", "Queries", 1, 4096], ["keys", "Keys", 1, 4096], ["tileQ", "Tile, queries", 16, 256], ["tileKV", "Tile, keys", 16, 256],
    ["batch", "Batch", 1, 8], ["heads", "Heads", 1, 32], ["b", "Batch drawn", 0, 7], ["h", "Head drawn", 0, 31], ["headDim", "Head dim", 8, 256],
  ];
  const STEPS = { tileQ: 16, tileKV: 16, headDim: 8 };
  const OWN = [
    "# names: b, h, q_idx, kv_idx", "window = 256", "ids = [0] * 700 + [1] * 548 + [2] * 800", "",
    "near = q_idx - kv_idx < window", "same = ids[q_idx] == ids[kv_idx]", "(q_idx >= kv_idx) & near & same", "",
  ].join("\n");
  const state = { program: null, given: {}, found: null, tile: [0, 0], job: 0 };

  // What is on the page.

  function build() {
    const options = GALLERY.map((mask, i) => `<option value="${i}">${escaped(mask.title)}</option>`).join("");
    const sliders = SIZES.map(([id, label, low, high]) => {
      const step = STEPS[id] || 1;
      return `<label for="playground-${id}">${label}</label>
        <input type="range" id="playground-${id}" min="${low}" max="${high}" step="${step}">
        <input type="number" id="playground-${id}-number" aria-label="${label}, typed" min="${low}" max="${high}" step="${step}">`;
    }).join("");
    root.innerHTML = `
      <div class="text">
        <label for="playground-menu">Mask</label>
        <select id="playground-menu"><option value="own">Your own</option>${options}</select>
        <label for="playground-text">The mask's text</label>
        <textarea id="playground-text" spellcheck="false" autocapitalize="off" rows="14" aria-describedby="playground-tables playground-error"></textarea>
        <p id="playground-tables"></p>
        <pre id="playground-error" role="alert"></pre>
        <p id="playground-notes" aria-live="polite"></p>
      </div>
      <div class="sliders">${sliders}</div>
      <div class="views">
        <figure>
          <div class="frame"><canvas id="playground-tiles" role="img" tabindex="0"></canvas><div id="playground-cursor"></div></div>
          <figcaption>Tiles: rows are queries, columns are keys.
            <span class="key full">full</span><span class="key partial">partial</span><span class="key empty">empty</span>
          </figcaption>
        </figure>
        <figure>
          <canvas id="playground-tokens" role="img"></canvas>
          <figcaption id="playground-tile" aria-live="polite"></figcaption>
        </figure>
      </div>
      <dl id="playground-facts"></dl>`;
    byId("menu").addEventListener("change", choose);
    byId("text").addEventListener("input", () => { byId("menu").value = "own"; read(); });
    for (const [id] of SIZES) {
      const range = byId(id), number = byId(`${id}-number`);
      range.addEventListener("input", () => { number.value = range.value; count(); });
      number.addEventListener("input", () => {
        if (!number.checkValidity() || number.value === "") return;
        range.value = number.value;
        count();
      });
    }
    const canvas = byId("tiles");
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect(), { rows, columns } = state.found;
      select(Math.floor((event.clientY - box.top) / box.height * rows), Math.floor((event.clientX - box.left) / box.width * columns));
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step || !state.found) return;
      event.preventDefault();
      select(state.tile[0] + step[0], state.tile[1] + step[1]);
    });
    const redraw = () => { if (state.found) draw(); };
    new MutationObserver(redraw).observe(document.body, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  const escaped = (text) => text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
  const set = (id, value) => { byId(id).value = byId(`${id}-number`).value = value; };
  const get = (id) => Number(byId(id).value);
  const grouped = (number) => number.toLocaleString("en");

  function choose() {
    const mask = GALLERY[byId("menu").value];
    if (!mask) {
      state.given = {};
      byId("text").value = OWN;
    } else {
      const numbers = Object.entries(mask.names).filter(([, value]) => typeof value === "number");
      state.given = Object.fromEntries(Object.entries(mask.names).filter(([, value]) => typeof value !== "number"));
      const above = numbers.map(([name, value]) => `${name} = ${value}\n`).join("");
      byId("text").value = `${above}${above && "\n"}${mask.source}`;
      const { queries, keys, tile, batch, heads, headDim } = mask;
      Object.entries({ queries, keys, tileQ: tile, tileKV: tile, batch, heads, headDim, b: 0, h: 0 }).forEach(([id, value]) => set(id, value));
    }
    state.tile = [0, 0];
    read();
  }

  // From text to tiles.

  function read() {
    const tables = Object.entries(state.given).map(([name, { shape }]) => `${name}: ${shape.join(" by ")}`).join(", ");
    byId("tables").textContent = tables && `Tables of the gallery's page: ${tables}. A list of your own with that name replaces one.`;
    state.program = guarded(() => Language.compile(byId("text").value, state.given));
    byId("notes").textContent = state.program ? state.program.notes.join(" ") : "";
    if (state.program) count();
  }

  // What `work` returns, or null with the error shown.
  function guarded(work) {
    try {
      const found = work();
      byId("error").textContent = "";
      root.classList.remove("wrong");
      return found;
    } catch (error) {
      if (!(error instanceof Language.MaskError)) throw error;
      const { line, column } = error.at, text = byId("text").value.split("\n")[line - 1] || "";
      byId("error").textContent = `Line ${line}, column ${column}: ${error.message}.\n\n${text}\n${" ".repeat(column - 1)}^`;
      root.classList.add("wrong");
      state.job += 1;
      return null;
    }
  }

  function sizes() {
    const found = Object.fromEntries(SIZES.map(([id]) => [id, get(id)]));
    return { ...found, b: Math.min(found.b, found.batch - 1), h: Math.min(found.h, found.heads - 1) };
  }

  // The drawn batch and head first; then the others, where the mask reads b or h, for what the whole call costs.
  function count() {
    if (!state.program) return;
    const now = sizes(), { program } = state, job = state.job += 1;
    for (const [id, count] of [["b", now.batch], ["h", now.heads]]) {
      byId(id).max = byId(`${id}-number`).max = count - 1;
      set(id, now[id]);
    }
    const places = [[now.b, now.h]];
    for (let b = 0; b < (program.readsBatch ? now.batch : 1); b += 1) {
      for (let h = 0; h < (program.readsHead ? now.heads : 1); h += 1) {
        if ((program.readsBatch && b !== now.b) || (program.readsHead && h !== now.h)) places.push([b, h]);
      }
    }
    const alike = (program.readsBatch ? 1 : now.batch) * (program.readsHead ? 1 : now.heads);
    let pairs = 0, walk = null, drawn = null;
    const step = () => {
      if (state.job !== job) return;
      const until = performance.now() + 20;
      const going = guarded(() => {
        while (performance.now() < until) {
          if (!walk) {
            if (!places.length) return false;
            const [b, h] = places.shift();
            walk = Tiles.scan(program, { ...now, b, h });
          }
          const { value, done } = walk.next();
          drawn = drawn || value;
          if (done) {
            pairs += value.pairs;
            walk = null;
          }
        }
        return true;
      });
      if (going === null) return;
      state.found = drawn;
      draw();
      facts(now, going ? null : pairs * alike);
      if (going) setTimeout(step);
      else select(...state.tile);
    };
    step();
  }

  // Pictures.

  function colours() {
    const style = getComputedStyle(root);
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    return ["empty", "partial", "full", "unseen"].map((name) => {
      context.fillStyle = style.getPropertyValue(`--show-${name}`).trim();
      context.fillRect(0, 0, 1, 1);
      return context.getImageData(0, 0, 1, 1).data;
    });
  }

  function paint(canvas, width, height, colourOf) {
    canvas.width = width;
    canvas.height = height;
    const most = Math.max(width, height);
    canvas.style.width = `${100 * width / most}%`;
    canvas.style.aspectRatio = `${width} / ${height}`;
    const image = new ImageData(width, height);
    for (let i = 0; i < width * height; i += 1) image.data.set(colourOf(i), 4 * i);
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  function draw() {
    const palette = colours(), { rows, columns, kinds, done } = state.found, unknown = [0, 0, 0, 0];
    const canvas = byId("tiles");
    paint(canvas, columns, rows, (i) => (i < done * columns ? palette[kinds[i]] : unknown));
    canvas.setAttribute("aria-label", `Tiles of the mask: ${summary()}. Arrow keys choose a tile.`);
    if (done === rows) zoom(palette);
  }

  function summary() {
    const { full, partial, empty } = state.found;
    return `${grouped(full)} full, ${grouped(partial)} partial, ${grouped(empty)} empty`;
  }

  function select(row, column) {
    const { rows, columns } = state.found;
    state.tile = [Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)];
    zoom(colours());
  }

  function zoom(palette) {
    const { rows, columns, kinds } = state.found;
    const [row, column] = [Math.min(state.tile[0], rows - 1), Math.min(state.tile[1], columns - 1)];
    const tile = guarded(() => Tiles.tokens(state.program, sizes(), row, column));
    if (!tile) return;
    const cursor = byId("cursor"), canvas = byId("tiles"), share = parseFloat(canvas.style.width) / columns;
    Object.assign(cursor.style, {
      left: `${column * share}%`, width: `${share}%`,
      top: `${100 * row / rows}%`, height: `${100 / rows}%`,
    });
    const kind = kinds[row * columns + column], unseen = kind === Tiles.EMPTY ? palette[0] : palette[3];
    paint(byId("tokens"), tile.width, tile.height, (i) => (tile.seen[i] ? palette[kind] : unseen));
    const { q0, kv0, height, width, seen } = tile;
    const text = `Tile (${row}, ${column}): queries ${q0} to ${q0 + height - 1}, keys ${kv0} to ${kv0 + width - 1}, `
      + `${grouped(seen.reduce((a, b) => a + b, 0))} of ${grouped(height * width)} pairs.`;
    byId("tile").textContent = text;
    byId("tokens").setAttribute("aria-label", text);
  }

  function facts(now, pairs) {
    const { rows, columns, empty } = state.found, total = rows * columns;
    const all = now.queries * now.keys * now.batch * now.heads;
    const operations = (number) => (number < 1e9 ? `${(number / 1e6).toPrecision(3)} MFLOP` : `${Number((number / 1e9).toPrecision(3))} GFLOP`);
    const lines = [["Tiles", summary()], ["Sparsity", `${(100 * empty / total).toFixed(1)}%`]];
    if (pairs === null) {
      lines.push(["Forward", "counting"], ["Backward", "counting"]);
    } else {
      const some = Tiles.flops(pairs, now.headDim), dense = Tiles.flops(all, now.headDim);
      for (const [label, key] of [["Forward", "forward"], ["Backward", "backward"]]) {
        lines.push([label, `${operations(some[key])}, ${(100 * some[key] / dense[key]).toFixed(1)}% of dense attention's`]);
      }
    }
    byId("facts").innerHTML = lines.map(([name, text]) => `<dt>${name}</dt><dd>${text}</dd>`).join("");
  }

  build();
  byId("menu").value = String(Math.max(GALLERY.findIndex((mask) => mask.name === "sliding_window"), 0));
  choose();
})();
