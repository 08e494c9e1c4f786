"use strict";
// Tabs: the chosen one is in the tab order, arrow keys choose.

const tabs = all("[role=tab]");
const prepare = { time: showTime };
function choose(tab, focus) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  prepare[tab.getAttribute("aria-controls")]?.();
  if (focus) tab.focus();
}

function setUpTabs() {
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => choose(tab, false));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose(tabs[(to + tabs.length) % tabs.length], true);
    });
  });
}
