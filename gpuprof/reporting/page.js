(function () {
  "use strict";
  var tip = document.getElementById("tip");
  document.querySelectorAll("[data-tip] > title").forEach(function (title) { title.remove(); });
  document.addEventListener("pointermove", function (event) {
    var mark = event.target.closest ? event.target.closest("[data-tip]") : null;
    tip.style.visibility = mark ? "visible" : "hidden";
    if (!mark) { return; }
    tip.textContent = mark.getAttribute("data-tip");
    var left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    var above = event.clientY - tip.offsetHeight - 10;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = (above > 4 ? above : event.clientY + 18) + "px";
  });
  function each(root, what, act) { Array.prototype.forEach.call(root.querySelectorAll(what), act); }
  function marks(key, act) { each(key.ownerSVGElement, '[data-series="' + key.dataset.key + '"]', act); }
  function press(key, on) {
    key.setAttribute("aria-pressed", on);
    marks(key, function (mark) { mark.classList.toggle("off", !on); });
  }
  function choose(key, alone) {
    var keys = key.ownerSVGElement.querySelectorAll(".key");
    var others = Array.prototype.filter.call(keys, function (one) { return one !== key; });
    if (!alone) { press(key, key.getAttribute("aria-pressed") !== "true"); return; }
    var only = others.every(function (one) { return one.getAttribute("aria-pressed") !== "true"; });
    others.forEach(function (one) { press(one, only); });
    press(key, true);
  }
  each(document, ".key", function (key) {
    key.addEventListener("click", function (event) { choose(key, event.shiftKey || event.altKey); });
    key.addEventListener("keydown", function (event) {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(key, event.shiftKey); }
    });
    function dim(on) {
      each(key.ownerSVGElement, "[data-series]", function (mark) {
        mark.classList.toggle("dim", on && mark.dataset.series !== key.dataset.key);
      });
    }
    key.addEventListener("pointerenter", function () { dim(true); });
    key.addEventListener("pointerleave", function () { dim(false); });
  });
  function unfold() {
    var part = location.hash && document.getElementById(location.hash.slice(1));
    if (part && part.tagName === "DETAILS") { part.open = true; part.scrollIntoView(); }
  }
  window.addEventListener("hashchange", unfold);
  unfold();
  document.getElementById("theme").addEventListener("click", function () {
    var root = document.documentElement;
    var dark = root.dataset.theme ? root.dataset.theme === "dark" :
      window.matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
