"""How the report's page looks, and how its table is sorted: the CSS and the only script. Knows no content."""

CSS = """
:root{--paper:#fff;--ink:#1d2329;--soft:#5b6570;--line:#dfe4e9;--head:#f3f5f7;--best:#0a6b4f;--bestpaper:#e3f4ec;
--stripe:#fafbfc}
@media (prefers-color-scheme:dark){:root{--paper:#161616;--ink:#e6e6e6;--soft:#a3a3a3;--line:#303030;--head:#232323;
--best:#6fdcb4;--bestpaper:#14362b;--stripe:#1b1b1b}
figure svg{filter:invert(.93) hue-rotate(180deg) brightness(1.24)}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",sans-serif}
main{max-width:1240px;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 1rem}
h2{font-size:1.3rem;margin:2.6rem 0 .6rem}
.summary{font-size:1.06rem;max-width:75ch}
.banner{max-width:75ch;padding:.6rem .9rem;border-left:4px solid #d55e00;background:var(--head);font-weight:600}
.note,figcaption{color:var(--soft);font-size:.92rem}
nav{display:flex;flex-wrap:wrap;gap:.4rem 1.1rem;font-size:.92rem;margin:1.2rem 0}
a{color:inherit;text-underline-offset:.2em}
.scroll{overflow:auto;max-height:80vh;border:1px solid var(--line);border-radius:6px}
table{border-collapse:separate;border-spacing:0;font-size:.8rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.32rem .5rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tbody tr:nth-child(even)>*{background:var(--stripe)}
tbody tr:last-child>*{border-bottom:0}
thead th{position:sticky;top:0;background:var(--head);z-index:2;vertical-align:bottom;white-space:normal}
tbody th,thead th:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
tbody th{font-weight:600;z-index:1}
thead th:first-child{background:var(--head);z-index:3}
th button{font:inherit;font-weight:600;
color:inherit;background:none;border:0;padding:0;cursor:pointer;text-align:inherit}
th[aria-sort=ascending] button::after{content:" \\25B2"}
th[aria-sort=descending] button::after{content:" \\25BC"}
tbody tr>td.best{color:var(--best);background:var(--bestpaper);font-weight:700}
details{margin-top:1rem}
details>summary{cursor:pointer;margin-bottom:.6rem}
figure{margin:0}
.replay{display:block;width:100%;height:52rem;border:1px solid var(--line);border-radius:6px;margin-bottom:1.2rem}
.replay.panes1{height:60rem}
@media (max-width:62rem){.replay{height:80vh}}
@media (scripting:none){.replay{display:none}}
figure svg{display:block;width:100%;height:auto}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figcaption{max-width:85ch;margin-top:.6rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1.4rem;font-size:.95rem}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.9em}
@media print{@page{size:A4;margin:12mm}@page wide{size:A4 landscape}#table{page:wide}
:root{--paper:#fff;--ink:#000;--soft:#444;--line:#ccc;--head:#eee;--best:#0a6b4f;--bestpaper:#e3f4ec;--stripe:#fff}
main{max-width:none;padding:0}nav,details,.note,.replay{display:none}.scroll{overflow:visible;max-height:none;border:0}
table{font-size:.58rem}th,td{padding:.15rem .25rem}thead th{position:static}
.plot{break-inside:avoid}figure svg{filter:none;max-height:225mm}h2{break-after:avoid;margin-top:1.2rem}
tr{break-inside:avoid}}
"""

SCRIPT = """
document.querySelectorAll("table.figures thead th").forEach(function (head, at) {
  head.querySelector("button").addEventListener("click", function () {
    var up = head.getAttribute("aria-sort") === "descending" ? 1 : head.hasAttribute("aria-sort") ? -1 : at ? -1 : 1;
    var body = head.closest("table").tBodies[0];
    var value = function (row) {
      var text = row.cells[at].dataset.v;
      return text === "" || isNaN(text) ? text : Number(text);
    };
    Array.from(body.rows).sort(function (a, b) {
      var x = value(a), y = value(b);
      return up * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
    }).forEach(function (row) { body.appendChild(row); });
    head.parentNode.querySelectorAll("th").forEach(function (other) { other.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", up === 1 ? "ascending" : "descending");
  });
});
"""
