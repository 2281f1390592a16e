// The theme gives the button of each block of code a landmark without a name of its own.
const name = () => {
  document.querySelectorAll("nav.md-code__nav").forEach((nav, number) => {
    const label = `Block of code ${number + 1}`;
    if (nav.getAttribute("aria-label") !== label) nav.setAttribute("aria-label", label);
  });
};
new MutationObserver(name).observe(document.body, { childList: true, subtree: true });
name();
