// Shows the claims of one paper, of one verdict, or of both.
document.addEventListener("DOMContentLoaded", () => {
  const filters = [...document.querySelectorAll(".filters select")];
  const count = document.querySelector(".filters output");
  const rows = [...document.querySelectorAll(".scorecard tbody tr")];
  const show = () => {
    for (const row of rows)
      row.hidden = filters.some((filter) => filter.value && row.dataset[filter.name] !== filter.value);
    if (count) count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims`;
  };
  for (const filter of filters) filter.addEventListener("change", show);
  if (filters.length) show();
});
