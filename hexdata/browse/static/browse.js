"use strict";

// The page of `hexdata browse`. Each view is a function of the address after the #, such as #game=17&ply=30.
// Texts of the store are only ever written as text, never as HTML.

const view = document.getElementById("view");
const SVG = "http://www.w3.org/2000/svg";
let store = null; // facts of the store, read once
let turn = 0; // number of the view that is shown; answers for earlier views are dropped
let keys = null; // keyboard handler of the view

// Elements

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}
const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
const link = (facts) => "#" + new URLSearchParams(Object.entries(facts).filter(([, v]) => v !== undefined && v !== null))
  .toString().replace(/=(?=&|$)/g, "");
const thousands = (number) => number.toLocaleString("en-US");
const plural = (number, one, many) => `${thousands(number)} ${number === 1 ? one : many}`;
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
const colour = (name) => name ? el("span", {class: `is-${name}`}, name) : el("span", {class: "muted"}, "unknown");
const bar = (share, kind) => {
  const inner = el("span", {class: kind || ""});
  inner.style.width = `${100 * share}%`;
  return inner;
};

// Data

class Failure extends Error {
  constructor(lines) { super(lines.join("\n")); this.lines = lines; }
}

async function ask(path, parameters) {
  const mine = turn;
  for (;;) {
    let answer, content;
    try {
      answer = await fetch(`${path}?${new URLSearchParams(Object.entries(parameters || {})
        .filter(([, v]) => v !== undefined && v !== null && v !== ""))}`);
      content = await answer.json();
    } catch {
      throw new Failure([answer ? "The server has failed." :
        "The server does not answer. If `hexdata browse` has ended, start it again and reload this page."]);
    }
    if (content.building === undefined) {
      if (!answer.ok) throw new Failure(content.error);
      return content;
    }
    if (mine === turn) showBuilding(content.building);
    await new Promise((resolve) => setTimeout(resolve, 250));
    if (mine !== turn) return new Promise(() => {});
  }
}

function showBuilding(step) {
  let box = document.getElementById("building");
  if (!box) {
    box = el("div", {id: "building", class: "card"},
      el("h1", {}, "Building the index"),
      el("p", {class: "about"}, "This is done once for each content of a store. The index is kept in the cache folder; ",
        "the store is only read."),
      el("p", {id: "step", role: "status"}), el("progress", {id: "share", max: 1}));
    view.replaceChildren(box);
  }
  document.getElementById("step").textContent = [`${step.stage}: ${percent(step.share)}`, ...step.facts].join(", ");
  document.getElementById("share").value = step.share;
}

// Boards. A cell with row r and column c is at (√3 (c + r / 2), 1.5 r), in sides of a cell.

const HALF = Math.sqrt(3) / 2;
const centre = (row, column) => [2 * HALF * (column + row / 2), 1.5 * row];
const points = (list) => list.map(([x, y]) => `${x.toFixed(3)},${y.toFixed(3)}`).join(" ");
const CORNERS = [[0, -1], [HALF, -0.5], [HALF, 0.5], [0, 1], [-HALF, 0.5], [-HALF, -0.5]];
const columnName = (column) => (column >= 26 ? "a" : "") + String.fromCharCode(97 + column % 26);
const PASS = 65535;
const cellName = (cell, n) => cell === PASS ? "pass" : columnName(cell % n) + (Math.floor(cell / n) + 1);
const moveText = (cells, n) => cells.filter((cell) => cell !== PASS).map((cell) => cellName(cell, n)).join("");
const hexagon = ([x, y]) => `M${CORNERS.map(([a, b]) => `${(x + a).toFixed(3)} ${(y + b).toFixed(3)}`).join("L")}Z`;

function grid(n) {
  // The empty board is drawn once and repeated.
  const id = `grid-${n}`;
  if (!document.getElementById(id)) {
    const at = (row, column, corner) => centre(row, column).map((v, axis) => v + CORNERS[corner][axis]);
    const all = [...Array(n).keys()], last = n - 1;
    const edges = [
      ["blue", all.flatMap((c) => [at(0, c, 5), at(0, c, 0)])],
      ["blue", all.flatMap((c) => [at(last, c, 3), at(last, c, 2)])],
      ["red", all.flatMap((r) => [at(r, 0, 5), at(r, 0, 4)])],
      ["red", all.flatMap((r) => [at(r, last, 1), at(r, last, 2)])],
    ];
    const cells = all.flatMap((r) => all.map((c) => hexagon(centre(r, c)))).join("");
    document.querySelector("#shared defs").append(svg("g", {id},
      edges.map(([name, line]) => svg("polyline", {class: `edge stroke-${name}`, points: points(line)})),
      svg("path", {class: "cell", d: cells})));
  }
  return svg("use", {href: `#${id}`});
}

function drawBoard(position, options) {
  const {n, small, numbers, heat, picks} = {n: store.board_size, ...options};
  const [right, bottom] = centre(n - 1, n - 1);
  const margin = small ? 1.7 : 2.5;
  const box = [-margin * HALF - (small ? 0.2 : 0.6), -margin, right + 2 * (margin * HALF + (small ? 0.2 : 0.6)), bottom + 2 * margin];
  const spot = (cell, r, kind) => {
    const [x, y] = centre(Math.floor(cell / n), cell % n);
    return svg("circle", {cx: x.toFixed(3), cy: y.toFixed(3), r, class: kind});
  };
  const text = (cell, content, size, kind) => {
    const [x, y] = centre(Math.floor(cell / n), cell % n);
    const label = svg("text", {x: x.toFixed(3), y: (y + 0.36 * size).toFixed(3), class: kind}, content);
    label.style.fontSize = `${size}px`;
    return label;
  };
  const labels = small ? [] : [...Array(n).keys()].flatMap((i) => {
    const places = [[centre(0, i), 0, -1.78], [centre(n - 1, i), 0, 1.78], [centre(i, -1), -0.25, 0], [centre(i, n), 0.25, 0]];
    return places.map(([[x, y], dx, dy], k) => {
      const label = svg("text", {x: (x + dx).toFixed(3), y: (y + dy + 0.25).toFixed(3), class: "label"},
        k < 2 ? columnName(i) : String(i + 1));
      return label;
    });
  });
  const top = heat && heat.length ? Math.max(...heat.map(([, share]) => share)) : 0;
  const shades = (top > 0 ? heat : []).filter(([, share]) => share > 0).map(([cell, share, title]) => {
    const [row, column] = [Math.floor(cell / n), cell % n];
    const shade = svg("path", {class: "heat", d: hexagon(centre(row, column))},
      svg("title", {}, title || `${cellName(cell, n)}: ${percent(share)}`));
    shade.style.fillOpacity = (0.08 + 0.92 * share / top).toFixed(3);
    const label = share >= 0.02 || share === top
      ? text(cell, (100 * share).toFixed(0), 0.66, share / top > 0.5 ? "heat-text strong" : "heat-text") : null;
    return [shade, label];
  });
  const both = new Set(position.blue);
  const stones = [
    position.blue.map((cell) => spot(cell, 0.72, "stone-blue")),
    position.red.map((cell) => spot(cell, both.has(cell) ? 0.36 : 0.72, "stone-red")),
  ];
  const numbered = numbers ? numbers.filter(([cell]) => both.has(cell) || position.red.includes(cell)) : [];
  const marks = numbered.map(([cell, number]) => text(cell, String(number), number < 100 ? 0.66 : 0.54, "stone-text"));
  if (position.last !== null && position.last !== undefined && position.last !== PASS) {
    marks.push(numbered.length ? spot(position.last, 0.6, "ring") : spot(position.last, 0.24, "last"));
  }
  if (position.next !== null && position.next !== undefined && position.next !== PASS) {
    marks.push(spot(position.next, 0.58, `next stroke-${position.player}${small ? " thick" : ""}`));
  }
  const title = options.title || boardTitle(position, n);
  return svg("svg", {class: "board", viewBox: box.map((v) => v.toFixed(2)).join(" "), role: "img", "aria-label": title},
    grid(n), labels, shades, stones, marks,
    (picks || []).map(([cell, title, go]) => svg("path",
      {class: "pick", d: hexagon(centre(Math.floor(cell / n), cell % n)), onclick: go}, svg("title", {}, title))));
}

function boardTitle(position, n) {
  const names = (cells) => cells.map((cell) => cellName(cell, n)).join(" ") || "none";
  return `Board. Blue stones: ${names(position.blue)}. Red stones: ${names(position.red)}.`;
}

function caption(position) {
  const game = position.game === null ? "No known game" : `Game ${position.game}`;
  return position.ply === null ? game : `${game}, ply ${position.ply}`;
}
const valueText = (value) => value === 0 ? "blue wins" : value === 1 ? "red wins" : `red wins ${percent(value)}`;

// Parts of views

function title(text, ...about) {
  document.title = `${text} · ${store ? store.name : "hexdata"}`;
  return [el("h1", {}, text), about.length ? el("p", {class: "about"}, about) : null];
}

function failed(error) {
  const lines = error instanceof Failure ? error.lines : [String(error)];
  return el("div", {class: "card error", role: "alert"}, el("pre", {}, lines.join("\n")));
}

function pager(page, facts, name, size) {
  const {start} = page, shown = page.rows.length, most = page.readable;
  const to = (first) => link({...facts, start: first || undefined});
  const button = (text, first, enabled) => enabled
    ? el("a", {class: "button", href: to(first)}, text)
    : el("button", {type: "button", disabled: true}, text);
  const final = Math.max(0, Math.floor((most - 1) / size) * size);
  return el("div", {class: "row"},
    button("First", 0, start > 0), button("Previous", Math.max(0, start - size), start > 0),
    el("span", {}, shown ? `${thousands(start + 1)} to ${thousands(start + shown)} of ${plural(page.found, name, name + "s")}`
      : `No ${name}s here`),
    button("Next", start + size, start + shown < most),
    button("Last", final, start < final));
}

function gamesTable(rows) {
  const n = store.board_size;
  const cell = (name, kind, ...children) => el("td", {"data-name": name, class: kind}, ...children);
  return el("div", {class: "scroll"}, el("table", {class: "stacked"},
    el("thead", {}, el("tr", {}, ["Game", "First moves", "Moves", "Winner", "End", "Split", "Source", "Notes"].map((name) =>
      el("th", {class: name === "Game" || name === "Moves" ? "number" : "", scope: "col"}, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {},
      cell("Game", "number", el("a", {href: link({game: row.game})}, String(row.game))),
      cell("First moves", "moves", row.opening.map((move) => cellName(move, n)).join(" ")),
      cell("Moves", "number", row.moves === null ? el("span", {class: "muted"}, "not all known") : String(row.moves)),
      cell("Winner", "", colour(row.winner)),
      cell("End", "", row.end || ""),
      cell("Split", "", row.split || ""),
      cell("Source", "", row.source || ""),
      cell("Notes", "",
        row.duplicate_of === null ? null : el("a", {class: "tag", href: link({game: row.duplicate_of})}, `same as game ${row.duplicate_of}`),
        row.flags.map((flag) => el("a", {class: "tag", href: link({reasons: flag})}, flag))))))));
}

function album(positions, label) {
  return el("ul", {class: "album"}, positions.map((position) => el("li", {}, el("a", {
    href: position.game !== null && position.ply !== null ? link({game: position.game, ply: position.ply}) : link({position: position.position}),
  },
  drawBoard(position, {small: true, heat: position.policy}),
  el("b", {}, caption(position)),
  el("small", {}, label(position))))));
}

function positionLabel(position) {
  const n = store.board_size;
  const parts = [`${position.player} to move`];
  if (position.next !== null) parts[0] += `: ${cellName(position.next, n)}`;
  if (position.value !== null) parts.push(valueText(position.value));
  return parts.join(", ");
}

// Lists

const EXAMPLES = {
  games: [
    ["winner = 'RED' AND len(moves) < 40", "short games that red won"],
    ["end_reason = 'resigned'", "resigned games"],
    ["duplicate_of IS NOT NULL", "duplicates"],
    ["split = 'val'", "games for validation"],
  ],
  positions: [
    ["position_in_game = 30", "every game after 30 moves"],
    ["move IS NULL", "final positions"],
    ["stones(board) < 6", "fewer than six stones"],
    ["value = 1 AND player_to_move = 0", "blue to move, red wins"],
  ],
};
const SORTS = {
  games: ["len(moves)", "positions", "source_id"],
  positions: ["position_in_game", "value", "stones(board)"],
};
const COLUMNS = {
  games: "game_id, source_id, origin, winner ('BLUE' or 'RED'), end_reason, swap, total_positions, positions, first_player, moves, duplicate_of, split, provenance, flags",
  positions: "position_id, game_id, position_in_game, total_positions, board, move, policy, value (0: blue wins, 1: red wins), player_to_move (0: blue, 1: red), value_sample_tier, winner, metadata, root_value, visits, weight",
};

// Whether conditions in the address may run: after a click, or if the user opened the page.
let trusted = "own" in document.body.dataset;

async function showList(table, facts) {
  const mine = turn, one = table.slice(0, -1), size = table === "games" ? 50 : 24;
  const about = table === "games"
    ? ["One row per game of the store. Click a number to step through the game."]
    : ["Every position that the store has for training. The dashed ring is the move to learn. Click a board to see its game."];
  const filter = el("input", {type: "text", id: "filter", name: "filter", spellcheck: "false", autocapitalize: "off",
    autocomplete: "off", value: facts.filter || "", placeholder: EXAMPLES[table][0][0]});
  const sort = el("input", {type: "text", id: "sort", name: "sort", list: "sorts", spellcheck: "false",
    autocapitalize: "off", autocomplete: "off", value: facts.sort || "", placeholder: `${one}_id`});
  const order = el("select", {id: "order", name: "order"},
    el("option", {value: ""}, "smallest first"), el("option", {value: "1", selected: facts.descending === "1"}, "largest first"));
  const submit = (event) => {
    event.preventDefault();
    const wasTrusted = trusted, before = location.hash;
    trusted = true;
    location.hash = link({[table]: "", filter: filter.value.trim() || undefined, sort: sort.value.trim() || undefined,
      descending: order.value || undefined});
    if (!wasTrusted && location.hash === before) show();
  };
  const columns = store.targets.filter((name) => !COLUMNS[table].includes(name));
  const content = el("div", {});
  const goTo = el("input", {type: "number", id: "goto", min: 0, max: Math.max(0, store.counts[table] - 1), placeholder: "0"});
  view.replaceChildren(...title(table === "games" ? "Games" : "Positions", ...about).filter(Boolean),
    el("div", {class: "card"},
      el("form", {class: "filter", onsubmit: submit, role: "search"},
        el("div", {}, el("label", {for: "filter"}, "Show where (an SQL condition)"), filter),
        el("div", {}, el("label", {for: "sort"}, "Sort by (an SQL number)"), sort,
          el("datalist", {id: "sorts"}, [...SORTS[table], ...(table === "positions" ? store.targets : [])].map((value) => el("option", {value})))),
        el("div", {}, el("label", {for: "order"}, "Order"), order),
        el("button", {class: "main", type: "submit"}, "Apply")),
      el("div", {class: "chips"}, "For example:", EXAMPLES[table].map(([condition, text]) =>
        el("a", {href: link({[table]: "", filter: condition})}, text)),
      facts.filter || facts.sort || facts.descending ? el("a", {href: link({[table]: ""})}, "show all") : null),
      el("details", {}, el("summary", {}, "Columns for conditions"),
        el("p", {}, el("code", {}, COLUMNS[table] + columns.map((name) => `, ${name}`).join(""))),
        el("p", {}, "The functions of ", el("code", {}, "hexdata sql"), " can be used too, such as ",
          el("code", {}, "stones(board)"), " and ", el("code", {}, "cell(move)"), "."))),
    content,
    el("form", {class: "row end goto", onsubmit: (event) => {
      event.preventDefault();
      if (goTo.value !== "") location.hash = link({[one]: goTo.value});
    }}, el("div", {}, el("label", {for: "goto"}, `Open the ${one} with the number`), goTo), el("button", {type: "submit"}, "Open")));

  if (!trusted && (facts.filter || facts.sort)) {
    content.replaceChildren(el("p", {class: "wait"}, "Another page or program opened this address. Press Apply to run its condition."));
    return;
  }
  const progress = el("progress", {max: 1}), text = el("span", {role: "status"});
  let shown = null;
  for (;;) {
    const page = await ask("/api/list", {table, filter: facts.filter, sort: facts.sort, descending: facts.descending,
      start: facts.start, count: size}).catch((error) => error);
    if (mine !== turn) return;
    if (page instanceof Error) { content.replaceChildren(failed(page)); return; }
    const ids = JSON.stringify(page.rows);
    if (page.complete || ids !== shown) {
      shown = ids;
      const rows = page.rows.length === 0
        ? el("p", {class: "wait"}, page.complete ? `No ${one} fits this condition.` : "Nothing found yet.")
        : table === "games" ? gamesTable(page.rows) : album(page.rows, positionLabel);
      content.replaceChildren(...[page.complete ? null : el("div", {class: "card"}, text, progress),
        el("div", {class: "status"}, pager(page, facts, one, size),
          page.complete && page.readable < page.found
            ? el("span", {class: "muted"}, `The first ${thousands(page.readable)} can be opened.`) : null), rows].filter(Boolean));
    }
    if (page.complete) return;
    text.textContent = `Searching: ${percent(page.scanned / page.total)} of ${plural(page.total, one, one + "s")}, ${thousands(page.found)} found so far`;
    progress.value = page.scanned / page.total;
    await new Promise((resolve) => setTimeout(resolve, 350));
    if (mine !== turn) return;
  }
}

// A game

function boardAfter(cells, first, ply) {
  const stones = {blue: [], red: []};
  for (let k = 0; k < ply; k += 1) {
    if (cells[k] === PASS) continue;
    const mover = (k % 2 === 0) === (first === "blue") ? "blue" : "red";
    for (const each of [stones.blue, stones.red]) if (each.includes(cells[k])) each.splice(each.indexOf(cells[k]), 1);
    stones[mover].push(cells[k]);
  }
  return stones;
}

function copyButton(text) {
  const button = el("button", {type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(location.href); button.textContent = "Copied"; }
    catch { window.prompt("Copy this link:", location.href); }
    setTimeout(() => { button.textContent = text; }, 1500);
  }}, text);
  return button;
}

async function savePng(address, name) {
  // The drawing is loaded as an image, in which no script can run.
  const drawing = await (await fetch(address)).blob();
  const source = URL.createObjectURL(drawing);
  const image = new Image();
  image.src = source;
  await image.decode();
  const canvas = el("canvas", {width: 2 * image.naturalWidth, height: 2 * image.naturalHeight});
  const brush = canvas.getContext("2d");
  brush.fillStyle = getComputedStyle(document.body).backgroundColor;
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(source);
  const saved = URL.createObjectURL(await new Promise((resolve) => canvas.toBlob(resolve, "image/png")));
  el("a", {href: saved, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(saved), 10000);
}

function saving(address, name) {
  return [el("a", {class: "button", href: address, download: `${name}.svg`}, "Save SVG"),
    el("button", {type: "button", onclick: () => savePng(address, `${name}.png`)}, "Save PNG")];
}

function targets(position) {
  const n = store.board_size, list = [];
  const add = (name, ...value) => list.push(el("dt", {}, name), el("dd", {}, ...value));
  add("To move", colour(position.player));
  add("Move to learn", position.next !== null ? cellName(position.next, n) : position.policy ? "see the policy" : "none: the game ends here");
  if (position.value !== null) add("Value", `${Number(position.value.toPrecision(3))}, that is: ${valueText(position.value)}`);
  if (position.root_value !== null) add("Search value", `${Number(position.root_value.toPrecision(3))}, that is: ${valueText(position.root_value)}`);
  if (position.visits !== null) add("Visits", thousands(position.visits));
  if (position.weight !== null) add("Weight", String(Number(position.weight.toPrecision(4))));
  if (position.tier !== null) add("Value tier", String(position.tier));
  for (const [name, value] of Object.entries(position.extra)) if (value !== null) add(name, String(Number(value.toPrecision(6))));
  add("Position", el("a", {href: link({position: position.position})}, String(position.position)));
  if (position.metadata !== null && position.metadata !== undefined) add("Metadata", el("code", {}, position.metadata));
  return el("dl", {}, list);
}

function policyBars(policy) {
  const n = store.board_size;
  const strongest = [...policy].sort((a, b) => b[1] - a[1]).slice(0, 6);
  return [el("h2", {}, "Policy"), el("div", {class: "share"}, strongest.map(([cell, share]) => [
    el("b", {}, cellName(cell, n)), el("span", {class: "bar"}, bar(share)), el("span", {}, percent(share))])),
  policy.length > 6 ? el("p", {class: "muted"}, `and ${plural(policy.length - 6, "more cell", "more cells")}`) : null];
}

async function showGame(facts) {
  const mine = turn, game = await ask("/api/game", {game: facts.game});
  if (mine !== turn) return;
  const n = store.board_size;
  const boards = game.boards.map((board, index) => game.facts ? {...board, at: board.ply === null ? index : board.ply} : {...board, at: index});
  const at = (ply) => Math.max(0, boards.findIndex((board) => board.at === ply));
  let index = facts.ply === undefined ? 0 : at(Number(facts.ply)), numbers = false;
  const seen = new Map();
  const figure = el("figure", {class: "boardbox"}), panel = el("section", {class: "card", "aria-label": "This position"});
  const counter = el("output", {"aria-live": "polite"});
  const slider = el("input", {type: "range", min: 0, max: boards.length - 1, "aria-label": "Ply",
    oninput: () => go(Number(slider.value))});
  const button = (text, label, step) => el("button", {type: "button", "aria-label": label, title: label, onclick: () => go(step())}, text);
  const back = button("◀", "One move back (←)", () => index - 1), forth = button("▶", "One move on (→)", () => index + 1);
  const moves = game.cells === null ? null : el("div", {class: "movelist"}, game.cells.map((cell, k) =>
    el("a", {href: link({game: game.game, ply: k + 1}), title: `After move ${k + 1}`,
      onclick: (event) => { event.preventDefault(); go(at(k + 1)); }}, `${k + 1}.${cellName(cell, n)}`)));
  const saves = el("div", {class: "controls"});

  function go(next) {
    index = Math.min(Math.max(next, 0), boards.length - 1);
    const ply = boards[index].at;
    history.replaceState(null, "", link({game: game.game, ply}));
    draw();
  }
  async function draw() {
    const board = boards[index], ply = board.at;
    let position = game.facts ? board : seen.get(board.position);
    slider.value = index;
    back.disabled = index === 0;
    forth.disabled = index === boards.length - 1;
    if (position) counter.textContent = `ply ${position.ply === null ? "unknown" : position.ply}${game.moves === null ? "" : ` of ${game.moves}`}`;
    if (!position) {
      // The positions of this game are scattered over the store, and are read one by one.
      const wanted = index;
      position = await ask("/api/position", {position: board.position}).catch((error) => error);
      if (mine !== turn) return;
      if (position instanceof Error) { panel.replaceChildren(failed(position)); return; }
      seen.set(board.position, position);
      if (wanted === index) draw();
      return;
    }
    const played = game.cells === null || position.ply === null ? null : game.cells.slice(0, position.ply);
    figure.replaceChildren(drawBoard(position, {heat: position.policy,
      numbers: numbers && played ? played.map((cell, k) => [cell, k + 1]) : null}));
    panel.replaceChildren(el("h2", {}, "This position"), targets(position),
      ...(position.policy ? policyBars(position.policy) : []).filter(Boolean));
    const picture = `/board.svg?position=${position.position}${numbers ? "&numbers=1" : ""}`;
    saves.replaceChildren(...saving(picture, `game-${game.game}-ply-${ply}`), copyButton("Copy link"),
      ...(game.hexworld ? [el("a", {class: "button", href: hexworldAt(game.hexworld, position.ply), target: "_blank", rel: "noopener noreferrer"}, "Open in HexWorld")] : []));
    if (moves) {
      [...moves.children].forEach((each, k) => each.toggleAttribute("aria-current", k + 1 === position.ply));
      const current = moves.querySelector("[aria-current]");
      if (current) moves.scrollTop = current.offsetTop - moves.offsetTop - moves.clientHeight / 2;
    }
  }

  keys = (event) => {
    const steps = {ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: boards.length - 1};
    const others = {ArrowUp: game.game - 1, ArrowDown: game.game + 1};
    if (event.key in steps) { event.preventDefault(); go(steps[event.key]); }
    else if (event.key in others && others[event.key] >= 0 && others[event.key] < store.counts.games) {
      event.preventDefault();
      location.hash = link({game: others[event.key]});
    }
  };

  const about = [];
  const fact = (name, ...value) => about.push(el("dt", {}, name), el("dd", {}, ...value));
  fact("Winner", colour(game.winner), game.end && game.end !== "chain" ? ` (${game.end})` : "");
  fact("Moves", game.moves === null ? "not all known" : String(game.moves));
  fact("Positions", String(game.positions));
  if (game.first !== "blue") fact("Begun by", colour(game.first));
  if (game.swap) fact("Swap", `of ${game.swap}`);
  fact("Split", game.split || "");
  fact("Source", game.source || "unknown");
  if (game.duplicate_of !== null) fact("Same as", el("a", {href: link({game: game.duplicate_of})}, `game ${game.duplicate_of}`));
  if (game.flags.length) fact("Flags", game.flags.map((flag) => el("a", {class: "tag", href: link({reasons: flag})}, flag)));
  if (game.cells !== null && game.cells.length && game.first === "blue") {
    fact("Opening", el("a", {href: link({openings: moveText(game.cells.slice(0, 3), n)})}, "in the tree of openings"));
  }
  const box = el("label", {class: "row"}, el("input", {type: "checkbox", onchange: (event) => { numbers = event.target.checked; draw(); }}), "Number the stones");
  view.replaceChildren(...title(`Game ${game.game}`,
    "Step with the arrow keys ← and →. The dot marks the last move, the dashed ring the next one. Blue connects top to bottom, red left to right.").filter(Boolean),
  el("div", {class: "two"},
    el("div", {}, el("div", {class: "card"}, figure,
      el("div", {class: "controls"},
        button("|◀", "Beginning (Home)", () => 0), back, slider, forth, button("▶|", "End (End)", () => boards.length - 1)),
      el("div", {class: "controls"}, counter, box)), saves),
    el("div", {}, panel,
      el("section", {class: "card", "aria-label": "The game"}, el("h2", {}, "The game"), el("dl", {}, about)),
      moves ? el("section", {class: "card", "aria-label": "Moves"}, el("h2", {}, "Moves"), moves) : null,
      el("div", {class: "row"},
        game.game > 0 ? el("a", {class: "button", href: link({game: game.game - 1})}, "Previous game (↑)") : null,
        game.game + 1 < store.counts.games ? el("a", {class: "button", href: link({game: game.game + 1})}, "Next game (↓)") : null))));
  await draw();
}

function hexworldAt(address, ply) {
  // The second comma of the address marks the move at which the board is opened.
  const [head, moves] = [address.slice(0, address.indexOf(",") + 1), address.slice(address.indexOf(",") + 1)];
  const list = moves.match(/[a-z]+[0-9]+|:p/g) || [];
  return ply === null || ply >= list.length ? address : `${head}${list.slice(0, ply).join("")},${list.slice(ply).join("")}`;
}

async function showPosition(facts) {
  const mine = turn, position = await ask("/api/position", {position: facts.position});
  if (mine !== turn) return;
  const number = position.position, count = store.counts.positions;
  keys = (event) => {
    const next = {ArrowLeft: number - 1, ArrowRight: number + 1}[event.key];
    if (next !== undefined && next >= 0 && next < count) { event.preventDefault(); location.hash = link({position: next}); }
  };
  view.replaceChildren(...title(`Position ${number}`,
    "One training example of the store. The arrow keys ← and → show its neighbours in the store.").filter(Boolean),
  el("div", {class: "two"},
    el("div", {}, el("div", {class: "card"}, el("figure", {class: "boardbox"}, drawBoard(position, {heat: position.policy}))),
      el("div", {class: "controls"},
        number > 0 ? el("a", {class: "button", href: link({position: number - 1})}, "◀ Previous") : null,
        number + 1 < count ? el("a", {class: "button", href: link({position: number + 1})}, "Next ▶") : null,
        saving(`/board.svg?position=${number}`, `position-${number}`), copyButton("Copy link"))),
    el("div", {}, el("section", {class: "card"}, el("h2", {}, caption(position)), targets(position),
      position.policy ? policyBars(position.policy) : null),
    position.game === null ? null : el("a", {class: "button", href: link({game: position.game, ply: position.ply === null ? undefined : position.ply})}, `Open game ${position.game}`))));
}

// Openings

async function showOpenings(facts) {
  const mine = turn, n = store.board_size, moves = facts.openings || "";
  const node = await ask("/api/openings", {moves});
  if (mine !== turn) return;
  const path = node.moves, player = path.length % 2 ? "red" : "blue";
  const to = (cells) => link({openings: moveText(cells, n)});
  const follow = (branch) => branch.games === 1 ? link({game: branch.example, ply: path.length + 1}) : to([...path, branch.move]);
  const real = node.branches.filter((branch) => branch.move !== null && branch.move !== PASS);
  const position = {blue: node.blue, red: node.red, last: path.length ? path[path.length - 1] : null, next: null, player};
  const board = drawBoard(position, {
    heat: real.map((branch) => [branch.move, branch.games / node.games]),
    picks: real.map((branch) => [branch.move, `${cellName(branch.move, n)}: ${plural(branch.games, "game", "games")}`,
      () => { location.hash = follow(branch); }]),
    numbers: path.map((cell, k) => [cell, k + 1]),
  });
  const [blue, red] = node.won, decided = blue + red;
  keys = (event) => {
    if (event.key === "ArrowLeft" && path.length) { event.preventDefault(); location.hash = to(path.slice(0, -1)); }
    if (event.key === "ArrowRight" && real.length && real[0].games > 1) { event.preventDefault(); location.hash = follow(real[0]); }
  };
  const results = (won) => won[0] + won[1] === 0 ? el("span", {class: "muted"}, "unknown") : el("span", {class: "bar", role: "img",
    "aria-label": `blue won ${won[0]}, red won ${won[1]}`, title: `blue won ${thousands(won[0])}, red won ${thousands(won[1])}`},
  bar(won[0] / (won[0] + won[1]), "blue"), bar(won[1] / (won[0] + won[1]), "red"));
  const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", {scope: "col"}, "Move"), el("th", {class: "number", scope: "col"}, "Games"),
    el("th", {class: "number", scope: "col"}, "Share"), el("th", {scope: "col"}, "Won by blue, red"))),
  el("tbody", {}, node.branches.map((branch) => el("tr", {},
    el("td", {}, branch.move === null ? el("a", {href: link({game: branch.example})}, "the game ends")
      : branch.move === PASS ? "pass" : el("a", {href: follow(branch)}, cellName(branch.move, n)),
    branch.games === 1 && branch.move !== null ? el("small", {class: "muted"}, ` game ${branch.example}`) : null),
    el("td", {class: "number"}, thousands(branch.games)),
    el("td", {class: "number"}, percent(branch.games / node.games)),
    el("td", {}, results([branch.blue, branch.red]))))));
  view.replaceChildren(...title("Openings",
    "The moves that games have played from here, with the share of games in each cell. Click a cell or a move to go on. ",
    "Rotated and mirrored positions, and other orders of the same moves, count as one position.").filter(Boolean),
  el("div", {class: "card row"},
    el("a", {href: link({openings: ""})}, "Empty board"),
    path.map((cell, k) => [" › ", el("a", {href: to(path.slice(0, k + 1)), "aria-current": k + 1 === path.length ? "step" : undefined},
      `${k + 1}. ${cellName(cell, n)}`)])),
  el("div", {class: "two"},
    el("div", {}, el("div", {class: "card"}, el("figure", {class: "boardbox"}, board)),
      el("div", {class: "controls"},
        path.length ? el("a", {class: "button", href: to(path.slice(0, -1))}, "◀ One move back (←)") : null,
        saving(`/board.svg?moves=${moveText(path, n)}&numbers=1`, `opening-${moveText(path, n) || "empty"}`),
        copyButton("Copy link"),
        path.length ? el("a", {class: "button", href: node.hexworld, target: "_blank", rel: "noopener noreferrer"}, "Open in HexWorld") : null)),
    el("div", {}, node.games ? [
      el("p", {class: "big"}, el("b", {}, plural(node.games, "game", "games")), decided
        ? [": blue won ", el("span", {class: "is-blue"}, percent(blue / decided)), ", red won ", el("span", {class: "is-red"}, percent(red / decided))]
        : ": no winner is known"),
      el("p", {}, "To move: ", colour(player)), el("div", {class: "scroll tall"}, table)]
      : el("p", {class: "card"}, path.length >= store.depth ? `The tree ends after ${store.depth} moves.`
        : store.counts.games ? "Fewer than two games have this position." : "The store has no games."))));
}

// Batches

async function showSheet(facts) {
  const mine = turn, after = facts.sheet ? facts.sheet === "after" : Object.keys(store.splits).length > 0;
  const splits = Object.keys(store.splits), split = facts.split || splits[0] || "train";
  const count = Math.min(256, Math.max(1, Number(facts.count) || 64)), start = Number(facts.start) || 0;
  const base = {sheet: after ? "after" : "before", split: after ? split : undefined, count};
  const to = (more) => link({...base, ...more});
  const choose = (name, value, options, go) => el("div", {}, el("label", {for: name}, options.label),
    el("select", {id: name, onchange: (event) => { location.hash = go(event.target.value); }},
      options.values.map(([each, text]) => el("option", {value: each, selected: String(each) === String(value)}, text))));
  const shards = store.shards.filter(([of]) => of === split);
  const shard = [...shards].reverse().find(([, , first]) => first <= start);
  const content = el("div", {}, el("p", {class: "wait"}, "Loading …"));
  const number = el("input", {type: "number", id: "batch", min: 0, value: Math.floor(start / count)});
  view.replaceChildren(...title("Batches",
    "Consecutive positions, as training reads them. Before the shuffle they follow each other in one game; after it, a batch should show unrelated games.").filter(Boolean),
  el("form", {class: "card row end", onsubmit: (event) => {
    event.preventDefault();
    location.hash = to({start: Number(number.value) * count || undefined});
  }},
  choose("order", base.sheet, {label: "Order", values: [["before", "before the shuffle"], ["after", "after the shuffle"]]},
    (value) => link({sheet: value, count})),
  after && splits.length ? choose("split", split, {label: "Split", values: splits.map((each) => [each, each])},
    (value) => link({...base, split: value})) : null,
  after && shards.length ? choose("shard", shard && shard[2], {label: "Shard", values: shards.map(([, name, first]) => [first, name])},
    (value) => to({start: Number(value) || undefined})) : null,
  choose("count", count, {label: "Positions", values: [16, 64, 256].map((each) => [each, each])},
    (value) => link({...base, count: value, start: Math.floor(start / value) * value || undefined})),
  el("div", {}, el("label", {for: "batch"}, "Batch"), number), el("button", {type: "submit"}, "Show")), content);
  const page = await ask("/api/sheet", {order: base.sheet, split: base.split, start, count}).catch((error) => error);
  if (mine !== turn) return;
  if (page instanceof Error) { content.replaceChildren(failed(page)); return; }
  const known = page.rows.filter((row) => row.game !== null), games = new Set(known.map((row) => row.game)).size;
  const most = Math.max(0, ...[...known.reduce((counts, row) => counts.set(row.game, (counts.get(row.game) || 0) + 1), new Map()).values()]);
  const story = `${plural(page.rows.length, "position", "positions")} from ${plural(games, "game", "games")}`
    + (most > 1 ? `; at most ${most} are from one game` : games ? "; no game occurs twice" : "");
  number.max = Math.floor((page.total - 1) / count);
  content.replaceChildren(el("p", {class: "big", role: "status"}, story, "."),
    el("div", {class: "status"}, pager({...page, found: page.total, readable: page.total}, base, "position", count)),
    album(page.rows, positionLabel));
  keys = (event) => {
    const next = {ArrowLeft: start - count, ArrowRight: start + count}[event.key];
    if (next !== undefined && next > -count && next < page.total) { event.preventDefault(); location.hash = to({start: Math.max(0, next) || undefined}); }
  };
}

// Flags and rejections

async function showReasons(facts) {
  const chosen = facts.reasons || "";
  if (chosen.startsWith("rejected:")) return showRejected(facts, chosen.slice("rejected:".length));
  if (chosen) return showFlagged(facts, chosen);
  const table = (head, rows) => el("div", {class: "scroll"}, el("table", {},
    el("thead", {}, el("tr", {}, head.map((name, k) => el("th", {scope: "col", class: k === 1 ? "number" : ""}, name)))), el("tbody", {}, rows)));
  const most = store.counts.games || 1;
  view.replaceChildren(...title("Flags and rejections",
    "Games that look unusual keep their data and have a flag; you decide whether to train on them. Records that cannot be used were rejected. Nothing was dropped silently.").filter(Boolean),
  el("section", {class: "card"}, el("h2", {}, "Flagged games"), store.flags.length ? table(["Flag", "Games", "Share", "Meaning"],
    store.flags.map(([flag, count, meaning]) => el("tr", {}, el("td", {}, el("a", {href: link({reasons: flag})}, flag)),
      el("td", {class: "number"}, thousands(count)), el("td", {}, percent(count / most)), el("td", {}, meaning))))
    : el("p", {}, "No game has a flag.")),
  el("section", {class: "card"}, el("h2", {}, "Duplicate games"), store.duplicates
    ? el("p", {}, el("a", {href: link({reasons: "duplicates"})}, plural(store.duplicates, "game repeats", "games repeat")), " an earlier game of the store, as it is, rotated or mirrored.")
    : el("p", {}, "No game repeats another one.")),
  el("section", {class: "card"}, el("h2", {}, "Rejected records"), store.reasons.length ? table(["Reason", "Records", ""],
    store.reasons.map(([reason, count]) => el("tr", {}, el("td", {}, el("a", {href: link({reasons: `rejected:${reason}`})}, reason)),
      el("td", {class: "number"}, thousands(count)), el("td", {}, ""))))
    : el("p", {}, "No record was rejected.")));
}

const overview = () => el("p", {}, el("a", {href: link({reasons: ""})}, "◀ All flags and reasons"));

async function showFlagged(facts, flag) {
  const mine = turn, size = 50;
  const page = await ask("/api/flagged", {flag, start: facts.start, count: size});
  if (mine !== turn) return;
  const known = store.flags.find(([name]) => name === flag);
  view.replaceChildren(...title(flag === "duplicates" ? "Duplicate games" : `Games with the flag ${flag}`,
    flag === "duplicates" ? "Each of these games repeats an earlier one, as it is, rotated or mirrored." : known ? known[2] : "").filter(Boolean),
  overview(), el("div", {class: "status"}, pager(page, {reasons: flag}, "game", size)), gamesTable(page.rows));
}

async function showRejected(facts, reason) {
  const mine = turn;
  const page = await ask("/api/rejected", {reason, source: facts.source, record: facts.record, count: 50});
  if (mine !== turn) return;
  view.replaceChildren(...title(`Rejected: ${reason}`, "These records are in no training data. Records are counted from 0 in their file.").filter(Boolean),
    overview(), page.rows.length === 0 ? el("p", {class: "wait"}, "No record was rejected for this reason.")
      : el("div", {class: "scroll"}, el("table", {class: "stacked"},
        el("thead", {}, el("tr", {}, ["File", "Record", "Detail"].map((name) => el("th", {scope: "col"}, name)))),
        el("tbody", {}, page.rows.map((row) => el("tr", {}, el("td", {"data-name": "File"}, row.source || ""),
          el("td", {"data-name": "Record"}, row.record === null ? "whole file" : String(row.record)),
          el("td", {"data-name": "Detail"}, row.detail)))))),
    ...(page.after ? [el("p", {}, el("a", {class: "button", href: link({reasons: `rejected:${reason}`, source: page.after[0], record: page.after[1]})}, "Next"))] : []));
}

// The address

const VIEWS = {
  game: showGame, position: showPosition, openings: showOpenings, sheet: showSheet, reasons: showReasons,
  games: (facts) => showList("games", facts), positions: (facts) => showList("positions", facts),
};
const SECTION = {game: "games", position: "positions"};

async function show() {
  turn += 1;
  const mine = turn;
  keys = null;
  const facts = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const name = Object.keys(VIEWS).find((each) => each in facts) || "games";
  for (const each of document.querySelectorAll("nav a")) {
    const here = each.getAttribute("href") === `#${SECTION[name] || name}`;
    if (here) each.setAttribute("aria-current", "page"); else each.removeAttribute("aria-current");
  }
  view.setAttribute("aria-busy", "true");
  try {
    store = await ask("/api/store");
    document.getElementById("name").textContent = store.name;
    if (mine === turn) await VIEWS[name](facts);
  } catch (error) {
    if (mine === turn) view.replaceChildren(el("h1", {}, "This cannot be shown"), failed(error));
  }
  if (mine === turn) view.removeAttribute("aria-busy");
}

window.addEventListener("hashchange", () => { show().then(() => { window.scrollTo(0, 0); }); });
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=range]):not([type=checkbox]), select, textarea");
  if (keys && !typing && !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey) keys(event);
});
show();
