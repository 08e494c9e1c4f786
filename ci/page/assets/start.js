"use strict";
async function start() {
  await load();
  setUpTabs();
  setUpGrid();
  setUpCell();
  setUpTime();
  setUpReleases();
  all("form").forEach((form) => form.addEventListener("submit", (event) => event.preventDefault()));
  await follow();
  document.documentElement.dataset.ready = "yes";
}
start();
