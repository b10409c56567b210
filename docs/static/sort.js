// Sorts a table by the column whose head is clicked, and the other way round at the second click. Empty cells stay last.
document.addEventListener("DOMContentLoaded", () => {
  const key = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const number = parseFloat(text.replace(/,/g, ""));
    return Number.isNaN(number) ? text.toLowerCase() : number;
  };
  const compare = (a, b) => (typeof a === typeof b ? (a > b) - (a < b) : typeof a === "number" ? -1 : 1);
  for (const head of document.querySelectorAll("article table thead th")) {
    const body = head.closest("table").tBodies[0];
    if (!body || body.rows.length < 3) continue;
    head.classList.add("sorts");
    head.tabIndex = 0;
    head.addEventListener("keydown", (event) => event.key === "Enter" && head.click());
    head.addEventListener("click", () => {
      const column = head.cellIndex;
      const sign = head.ariaSort === "descending" ? 1 : -1;
      for (const other of head.parentElement.cells) other.ariaSort = null;
      head.ariaSort = sign < 0 ? "descending" : "ascending";
      const rows = [...body.rows].sort((first, second) => {
        const [a, b] = [key(first, column), key(second, column)];
        return (a === "") - (b === "") || sign * compare(a, b);
      });
      body.append(...rows);
    });
  }
});
